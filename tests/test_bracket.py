"""The bracket of the Krylov error: against dense matrices, and what it makes of error bars."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import PSD, assert_close, draw, float_dtype, is_x64
from spectral_helpers import as_array, hermitian, normal, wide

import traceax as tx
from traceax._accuracy.error_bar import leave_one_out_bar
from traceax._linalg.krylov import (
    arnoldi_factor,
    arnoldi_start,
    arnoldi_step,
    block_lanczos,
    ritz_pairs,
    smallest_extension,
)
from traceax._linalg.left_out_krylov import (
    leave_probes_out,
    paired_samples,
    sample_weights,
)

FUNCTIONS = {"log": np.log, "root": np.sqrt, "inverse": lambda x: -1 / x}


def _function_of(hermitian, f):
    values, vectors = np.linalg.eigh(hermitian)
    return (vectors * f(values)) @ vectors.conj().T


def _orthonormal(Q, W):
    """Of what a block leaves outside of Q, directions that are more than rounding."""
    for _ in range(2):
        W = W - Q @ (Q.conj().T @ W)
    u, sizes, _ = np.linalg.svd(W, full_matrices=False)
    return u[:, sizes > 1e-9]


def _spans(A, start, steps):
    """Bases of a Krylov space, and of its next block, by a loop."""
    Q, block = np.zeros((len(A), 0)), start
    for _ in range(steps):
        new = _orthonormal(Q, block)
        Q, block = np.hstack([Q, new]), A @ new
    return Q, _orthonormal(Q, block)


def _extension(A, Q, Z, lower):
    T, C = Q.conj().T @ A @ Q, Z.conj().T @ A @ Q
    inverse = np.linalg.pinv(T - lower * np.eye(len(T)), rcond=1e-13, hermitian=True)
    corner = lower * np.eye(Z.shape[1]) + C @ inverse @ C.conj().T
    return T, np.block([[T, C.conj().T], [C, corner]])


@functools.partial(jax.jit, static_argnums=(3, 4))
def _small_matrices(A, start, lower, steps, room):
    """Of so many steps, in matrices with room for more."""
    run = arnoldi_start(start, room)
    for j in range(steps):
        run = arnoldi_step(lambda X: A @ X, run, jnp.asarray(j, jnp.int32))
    steps = jnp.asarray(steps, jnp.int32)
    factor, coupling = arnoldi_factor(run, steps)
    T, omega, _ = block_lanczos(factor)
    m = start.shape[1]
    pairs = ritz_pairs(T, m * steps)
    E = smallest_extension(T, coupling, pairs, lower, steps)
    return run.basis, T, omega, pairs, ritz_pairs(E, m * steps, beside=m)


# Rank 5 and few eigenvalues: spaces that stop growing. 22 of 24 dimensions: of the next
# block two are left. The lower end may be an eigenvalue, which is found exactly.
SPACES = [
    ("flat", 4, 3, 3, True, 0.7),
    ("flat", 4, 3, 5, False, 1.0),
    ("exp", 3, 4, 4, False, 0.5),
    ("flat", 11, 2, 2, False, 0.9),
    ("rank 5", 4, 2, 4, True, 1.0),
    ("repeated", 3, 4, 4, False, 1.0),
    ("twice the identity", 3, 3, 3, False, 0.5),
]


@pytest.mark.parametrize(("kind", "m", "steps", "room", "complex", "part"), SPACES)
def test_the_bracket_against_dense_matrices(kind, m, steps, room, complex, part):
    n = 24
    A = hermitian(kind, n, complex)
    A = A + (1 - np.linalg.eigvalsh(A)[0]) * np.eye(n)
    start = normal((n, m), complex, 3)
    A, start = wide(as_array(A)), wide(as_array(start))
    lower = part * np.linalg.eigvalsh(A)[0]
    found = _small_matrices(as_array(A), as_array(start), as_array(lower), steps, room)
    basis, _, _, (theta, S), (nodes, U) = jax.tree.map(wide, found)
    K, k = basis[:, : m * steps], m * steps
    Z = _orthonormal(K, A @ K[:, -m:])
    T, E = _extension(A, K, Z, lower)
    atol = 1e-9 if is_x64() else 1e-3
    assert np.all(U[k : len(S)] == 0)
    assert np.all(S[k:] == 0)
    for f in FUNCTIONS.values():
        high, low = _function_of(T, f), _function_of(E, f)[:k, :k]
        got = (
            (S * f(theta)) @ S.conj().T,
            (U * f(np.maximum(nodes, lower))) @ U.conj().T,
        )
        assert_close(got[0][:k, :k], high, rtol=0, atol=atol)
        assert_close(got[1][:k, :k], low, rtol=0, atol=atol)
        # The theorem.
        inside = K.conj().T @ _function_of(A, f) @ K
        for difference in (high - inside, inside - low):
            assert np.linalg.eigvalsh(difference)[0] > -atol
    # With f(x) = x^2, which is not operator monotone, the ends are none.
    if kind == "flat" and part < 1:
        square = _function_of(E, np.square)[:k, :k]
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
    # Of matrices side by side, against loops: f(T), f(E), and a projector.
    n = 24
    A = hermitian(kind, n, complex)
    A = A + (1 - np.linalg.eigvalsh(A)[0]) * np.eye(n)
    start, F = normal((n, q + m), complex, 3), normal((n, 4), complex, 4)
    A, start, F = (wide(as_array(x)) for x in (A, start, np.linalg.qr(F)[0]))
    lower = 0.5

    @jax.jit
    def weights(A, start, F):
        found = _small_matrices(A, start, as_array(lower), steps, steps)
        basis, T, omega, (theta, S), (nodes, U) = found
        left_out = leave_probes_out(T, omega, n, steps, kept=q)
        blocks = jnp.concatenate([S, U[: len(S)], basis.conj().T @ F], axis=1)
        ones = jnp.ones(F.shape[1], theta.dtype)
        nodes = jnp.maximum(nodes, lower)
        return sample_weights(left_out, blocks), theta, nodes, ones

    weights, theta, nodes, ones = jax.tree.map(
        wide, weights(*(as_array(x) for x in (A, start, F)))
    )
    K, Z = _spans(A, start, steps)
    T, E = _extension(A, K, Z, lower)
    values = np.log(theta), np.log(nodes), ones
    splits = np.cumsum([len(x) for x in values])[:-1]
    targets = (
        K @ _function_of(T, np.log) @ K.conj().T,
        K @ _function_of(E, np.log)[: K.shape[1], : K.shape[1]] @ K.conj().T,
        K @ K.conj().T @ F @ F.conj().T @ K @ K.conj().T,
    )

    def naive(probe, without):
        P, _ = _spans(A, np.delete(start, [q + i for i in without], axis=1), steps)
        g = _orthonormal(P, start[:, [q + probe]])
        C = P @ P.conj().T + (n - P.shape[1]) * g @ g.conj().T
        return [np.real(np.sum(C.conj() * x)) for x in targets]

    atol = 1e-7 if is_x64() else 3e-2
    for i in range(m):
        after = (i + 1) % m
        cases = (
            (weights.samples, i, (i,)),
            (weights.pairs_first, i, (i, after)),
            (weights.pairs_second, after, (i, after)),
        )
        for w, probe, without in cases[: 1 if m == 1 else 3]:
            got = [
                np.sum(x * f)
                for x, f in zip(np.split(w[i], splits), values, strict=True)
            ]
            assert_close(got, naive(probe, without), rtol=0, atol=atol)


#
# The estimator
#

N, M, STEPS = 40, 3, 4


def _all(x):
    """What the estimator is asked for: functions that rise, and one that falls."""
    return {"log": jnp.log(x), "root": jnp.sqrt(x), "inverse": -1 / x, "+": 1 / x}


NAIVE = {**FUNCTIONS, "+": lambda x: 1 / x}


@eqx.filter_jit
def _estimated(key, A, lower, tolerance):
    """Of an operator tagged semidefinite, with or without a known lower end."""

    def value(shift):
        eye = jnp.eye(len(A), dtype=A.dtype)
        operator = lx.MatrixLinearOperator(A + shift.astype(A.dtype) * eye, PSD)
        estimate = tx.trace_function(
            key,
            _all,
            operator,
            M * STEPS,
            tx.KrylovAwareEstimator(M),
            lower=lower,
            monotone=True,
            throw=False,
            # Never met: all products are taken.
            rtol=1e-9 if tolerance else None,
        )
        rest = estimate.standard_error, estimate.stats, estimate.result
        return estimate.value, rest

    zero = jnp.zeros((), float_dtype())
    found, slope, rest = jax.jvp(value, (zero,), (zero + 1,), has_aux=True)
    return found, slope, *rest


def _naive_samples(A, start, lower):
    """Samples and those of pairs with f(T), with f(E), and with f'(T), by loops."""
    Q, Z = _spans(A, start, STEPS)
    if lower is None:
        lower = np.linalg.eigvalsh(Q.conj().T @ A @ Q)[0] / 4
    T, E = _extension(A, Q, Z, lower)

    def samples(f, matrix):
        inside = _function_of(matrix, f)[: len(T), : len(T)]

        def sample(probe, *without):
            P, _ = _spans(A, np.delete(start, without, axis=1), STEPS)
            P, g = Q.conj().T @ P, start[:, [probe]]
            g = Q.conj().T @ _orthonormal(Q @ P, g)
            C = P @ P.conj().T + (len(A) - P.shape[1]) * g @ g.conj().T
            return np.real(np.sum(C.conj() * inside))

        cases = [(i, (i + 1) % M) for i in range(M)]
        return np.array(
            [
                [sample(i, i) for i, _ in cases],
                [sample(i, i, j) for i, j in cases],
                [sample(j, i, j) for i, j in cases],
            ]
        )

    return {name: (samples(f, T), samples(f, E)) for name, f in NAIVE.items()} | {
        "slope": samples(lambda x: 1 / x, T)
    }


@pytest.mark.parametrize(
    ("kind", "complex", "part", "tolerance"),
    [
        ("exp", False, 0.9, False),
        ("flat", False, 1, False),
        ("exp", False, None, False),
        ("exp", True, 0.5, True),
    ],
)
def test_the_estimator_against_a_naive_bracket(kind, complex, part, tolerance):
    A = hermitian(kind, N, complex) + 1e-3 * np.eye(N)
    A = wide(as_array(A))
    smallest = np.linalg.eigvalsh(A)[0]
    lower = None if part is None else part * smallest
    key = jr.key(2)
    sampler = tx.KrylovAwareEstimator().sampler
    start = wide(draw(sampler, key, N, M, as_array(A).dtype))
    given = None if lower is None else as_array(lower)
    value, slope, error, stats, result = _estimated(key, as_array(A), given, tolerance)
    met = result == tx.RESULTS.successful
    assert met or result == tx.RESULTS.tolerance_not_met
    naive = _naive_samples(A, start, lower)
    wrong = _naive_samples(A, start, smallest / 10)
    assert stats["num_matvecs"] == M * STEPS
    tol = {"rtol": 1e-7 if is_x64() else 2e-2, "atol": 0}
    for name in NAIVE:
        high, low = naive[name]
        middle, ends = (high + low) / 2, (high[0].mean(), low[0].mean())
        assert_close(value[name], middle[0].mean(), **tol)
        found = [x[name] for x in stats["bracket"]]
        assert_close(found, sorted(ends), **tol)
        magnitude = jnp.asarray(np.abs(high[0]).mean())
        paired = paired_samples(*(as_array(x) for x in middle), as_array(magnitude))
        widened = 1 + 2 / M if tolerance else 1
        bar = leave_one_out_bar(paired).standard_error
        expected = widened * np.hypot(bar, (max(ends) - min(ends)) / 12**0.5)
        if is_x64():
            assert_close(error[name], expected, rtol=1e-5, atol=0)
        # Another lower end is told from the right one.
        other = sorted(x[0].mean() for x in wrong[name])
        if kind == "exp" and is_x64():
            assert not np.allclose(found, other, rtol=1e-4)
    # The derivative is that of f(T), not of the middle.
    assert_close(slope["log"], naive["slope"][0].mean(), **tol)
