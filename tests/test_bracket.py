"""Brackets for truncation errors, compared with dense matrices and a theorem."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from problems import Problem, as_array, is_x64
from spectral_helpers import (
    OPERATOR_MONOTONE,
    dense_function,
    extension,
    krylov_bases,
    new_directions,
    normal,
    to_double,
)

from traceax._linalg.krylov import (
    arnoldi_factor,
    arnoldi_start,
    arnoldi_step,
    block_lanczos,
    ritz_pairs,
    smallest_extension,
)
from traceax._linalg.left_out_krylov import leave_probes_out, sample_weights


@functools.partial(jax.jit, static_argnums=(3, 4))
def _small_matrices(A, start, lower, steps, room):
    """Small matrices after `steps` steps, in buffers with room for more."""
    run = arnoldi_start(start, room)
    for j in range(steps):
        run = arnoldi_step(lambda X: A @ X, run, jnp.asarray(j, jnp.int32))
    steps = jnp.asarray(steps, jnp.int32)
    factor, coupling = arnoldi_factor(run, steps)
    T, omega, _ = block_lanczos(factor)
    m = start.shape[1]
    pairs = ritz_pairs(T, m * steps)
    E = smallest_extension(T, coupling, pairs, lower, steps)
    return run.basis, T, omega, pairs, ritz_pairs(E, m * (steps + 1))


# Spaces stop growing for rank 5 and for few eigenvalues. A space with 22 out of 24
# dimensions leaves two for the next block. We also let the lower end equal an
# eigenvalue, which the space finds exactly.
SPACES = [
    ("flat", 4, 3, 3, True, 0.7),
    ("flat", 4, 3, 5, False, 1.0),
    ("exp", 3, 4, 4, False, 0.5),
    ("flat", 11, 2, 2, False, 0.9),
    ("rank 5", 4, 2, 4, True, 1.0),
    ("repeated", 3, 4, 4, False, 1.0),
    ("identity", 3, 3, 3, False, 0.5),
]


def with_smallest_eigenvalue_one(kind, n, complex):
    """A matrix whose smallest eigenvalue is 1."""
    shift = 1 - Problem(kind, n).eigenvalues.min()
    return Problem(kind, n, complex, shift=shift).dense


@pytest.mark.parametrize(("kind", "m", "steps", "room", "complex", "part"), SPACES)
def test_the_bracket_against_dense_matrices(kind, m, steps, room, complex, part):
    n = 24
    A = with_smallest_eigenvalue_one(kind, n, complex)
    start = normal((n, m), complex, 3)
    A, start = to_double(as_array(A)), to_double(as_array(start))
    lower = part * np.linalg.eigvalsh(A)[0]
    matrices = _small_matrices(
        as_array(A), as_array(start), as_array(lower), steps, room
    )
    basis, _, _, (theta, S), (nodes, U) = jax.tree.map(to_double, matrices)
    K, k = basis[:, : m * steps], m * steps
    Z = new_directions(K, A @ K[:, -m:])
    T, E = extension(A, K, Z, lower)
    atol = 1e-9 if is_x64() else 1e-3
    assert np.all(U[k + m :] == 0)
    assert np.all(S[k:] == 0)
    for f in OPERATOR_MONOTONE.values():
        high, low = dense_function(T, f), dense_function(E, f)[:k, :k]
        actual = (
            (S * f(theta)) @ S.conj().T,
            (U * f(np.maximum(nodes, lower))) @ U.conj().T,
        )
        assert_close(actual[0][:k, :k], high, rtol=0, atol=atol)
        assert_close(actual[1][:k, :k], low, rtol=0, atol=atol)
        # The theorem says that f(T) and f(E) bracket the projected f(A).
        projected = K.conj().T @ dense_function(A, f) @ K
        for difference in (high - projected, projected - low):
            assert np.linalg.eigvalsh(difference)[0] > -atol
    # x^2 is not operator monotone: f(E) is exact for it, and bounds nothing.
    if kind == "flat" and part < 1:
        square = dense_function(E, np.square)[:k, :k]
        assert_close(square, K.conj().T @ A @ A @ K, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "q", "m", "steps", "complex"),
    [
        ("flat", 1, 3, 3, True),
        ("signed", 2, 3, 2, False),
        ("flat", 1, 1, 4, False),
        ("rank 5", 1, 4, 2, False),
    ],
)
def test_vectors_that_are_never_left_out(kind, q, m, steps, complex):
    # We compare three matrices side by side with loops: f(T), f(E) and a projector.
    n = 24
    A = with_smallest_eigenvalue_one(kind, n, complex)
    start, F = normal((n, q + m), complex, 3), normal((n, 4), complex, 4)
    A, start, F = (to_double(as_array(x)) for x in (A, start, np.linalg.qr(F)[0]))
    lower = 0.5

    @jax.jit
    def weights(A, start, F):
        matrices = _small_matrices(A, start, as_array(lower), steps, steps)
        basis, T, omega, (theta, S), (nodes, U) = matrices
        left_out = leave_probes_out(T, omega, n, steps, q=q)
        blocks = jnp.concatenate([S, U[: len(S)], basis.conj().T @ F], axis=1)
        ones = jnp.ones(F.shape[1], theta.dtype)
        nodes = jnp.maximum(nodes, lower)
        return sample_weights(left_out, blocks), theta, nodes, ones

    weights, theta, nodes, ones = jax.tree.map(
        to_double, weights(*(as_array(x) for x in (A, start, F)))
    )
    K, Z = krylov_bases(A, start, steps)
    T, E = extension(A, K, Z, lower)
    values = np.log(theta), np.log(nodes), ones
    splits = np.cumsum([len(x) for x in values])[:-1]
    targets = (
        K @ dense_function(T, np.log) @ K.conj().T,
        K @ dense_function(E, np.log)[: K.shape[1], : K.shape[1]] @ K.conj().T,
        K @ K.conj().T @ F @ F.conj().T @ K @ K.conj().T,
    )

    def naive(probe, without):
        P, _ = krylov_bases(
            A, np.delete(start, [q + i for i in without], axis=1), steps
        )
        g = new_directions(P, start[:, [q + probe]])
        C = P @ P.conj().T + (n - P.shape[1]) * g @ g.conj().T
        return [np.real(np.sum(C.conj() * x)) for x in targets]

    atol = 1e-7 if is_x64() else 3e-2
    for i in range(m):
        following = (i + 1) % m
        cases = (
            (weights[0], i, (i,)),
            (weights[1], i, (i, following)),
            (weights[2], following, (i, following)),
        )
        for w, probe, without in cases[: 1 if m == 1 else 3]:
            actual = [
                np.sum(x * f)
                for x, f in zip(np.split(w[i], splits), values, strict=True)
            ]
            assert_close(actual, naive(probe, without), rtol=0, atol=atol)
