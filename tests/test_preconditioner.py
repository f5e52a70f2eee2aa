"""The preconditioner of columns and noise against dense matrices."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close
from problems import PSD, as_array, as_operator, float_dtype, is_x64, matern, points

from traceax._linalg.whitening import whiten
from traceax._operators.space import apply_block
from traceax._preconditioner import (
    PreconditionedLinearOperator,
    choose_pivots,
)


class Truth:
    """The preconditioner in dense 64-bit NumPy, of N^-1/2 K N^-1/2."""

    def __init__(self, K, pivots, noise, jitter=1e-6):
        S = pivots[pivots >= 0]
        r, n = len(S), len(K)
        noise = np.broadcast_to(noise, n)
        scaled = K / np.sqrt(noise[:, None] * noise)
        # Where the precision knows no better.
        eps = float(jnp.finfo(float_dtype()).eps)
        jitter = np.maximum(jitter, (r + 32) * eps * np.diagonal(scaled)[S].real)
        L = np.linalg.cholesky(scaled[np.ix_(S, S)] + np.diag(jitter))
        F = np.linalg.solve(L, scaled[:, S].conj().T).conj().T
        C = np.linalg.cholesky(F.conj().T @ F + np.eye(r))
        Q2 = np.linalg.inv(C).conj().T
        self.Q = F @ Q2
        X = np.linalg.inv(np.eye(r) + Q2)
        self.M = (np.eye(n) - self.Q @ X @ self.Q.conj().T) / np.sqrt(noise)
        self.B = self.M @ (K + np.diag(noise)) @ self.M.conj().T
        logs = np.log(np.diagonal(C).real)
        self.logdet = 2 * logs.sum() + np.log(noise).sum()
        self.residual_trace = np.trace(scaled - F @ F.conj().T).real
        self.trace = np.trace(scaled).real


def close(x, y, tolerance=None):
    """In the Frobenius norm."""
    x, y = np.asarray(x), np.asarray(y)
    tolerance = tolerance or (1e-9 if is_x64() else 5e-3)
    error = np.linalg.norm(x - y) / np.linalg.norm(y)
    assert error < tolerance, error


def problem(n, r, seed=0):
    """A kernel matrix, its derivative by the length scale, noise, a block and pivots."""
    rng = np.random.default_rng(seed)
    x, h = rng.random((n, 2)), 1e-3
    K = matern(x, 0.3)
    slope = (matern(x, 0.3 + h) - matern(x, 0.3 - h)) / (2 * h)
    noise = 1e-3 * np.exp(0.3 * rng.normal(size=n))
    return K, slope, noise, rng.normal(size=(n, 6)), rng.permutation(n)[:r]


def as_indices(pivots):
    return jnp.asarray(pivots, jnp.int32)


def make(K, noise, pivots, jitter=1e-6):
    columns, diagonal = K.T[pivots].T, jnp.real(jnp.diagonal(K))
    return whiten(columns, diagonal, pivots, noise, jitter)


def preconditioned(K, made):
    return PreconditionedLinearOperator(lx.MatrixLinearOperator(K, PSD), made)


@jax.jit
def compute(K, noise, pivots, V, jitter=1e-6):
    made = make(K, noise, pivots, jitter)
    products = made.apply(V), made.apply_adjoint(V)
    return made, (*products, apply_block(preconditioned(K, made), V))


@jax.jit
def along(t, K, slope, noise, pivots, V):
    """A value of each factor, and first derivatives in both modes."""

    def values(t):
        at, noise_at = K + t * slope, noise * jnp.exp(t)
        made = make(at, noise_at, pivots)
        W, G = V.T[:3].T, V.T[3:].T
        products = made.apply(W), apply_block(preconditioned(at, made), W)
        return jnp.stack([made.logdet, *(jnp.sum(G * x) for x in products)])

    return values(t), jax.jacfwd(values)(t), jax.jacrev(values)(t)


def truth_along(t, K, slope, noise, pivots, V):
    truth = Truth(K + t * slope, pivots, noise * np.exp(t))
    W, G = V[:, :3], V[:, 3:]
    return np.array([truth.logdet, *(np.sum(G * (x @ W)) for x in (truth.M, truth.B))])


def central(f, h):
    return (8 * (f(h) - f(-h)) - f(2 * h) + f(-2 * h)) / (12 * h)


# XLA on CPUs (jaxlib 0.10.2) gets products of products wrong by O(1) where the middle
# dimension is about 180 to 256, and only in programs.
@pytest.mark.parametrize("r", [10, 200, 256])
def test_factors_and_derivatives(r):
    K, slope, noise, V, pivots = problem(500, r)
    data = (
        as_array(K),
        as_array(slope),
        as_array(noise),
        as_indices(pivots),
        as_array(V),
    )
    value, forward, reverse = along(as_array(0.0), *data)

    def truth(t):
        return truth_along(t, K, slope, noise, pivots, V)

    derivative = central(truth, 1e-4)
    assert_close(value, truth(0.0), 1e-9 if is_x64() else 1e-2)
    for found in (forward, reverse):
        if is_x64():
            assert_close(found, derivative, 1e-6)
        # Each is a sum that cancels, and may have no more digits: in the norm of all.
        close(found, derivative, 1e-2)


@pytest.mark.parametrize("jitter", [1e-9, 1e-6, 2e-3])
def test_determinants(jitter):
    n, r = 200, 60
    K, _, noise, V, _ = problem(n, r)
    # As pivots are held along a fit: chosen for another length scale.
    pivots = np.asarray(
        choose_pivots(jr.key(0), as_operator(K, psd=True), r, shift=1e-3)
    )
    K = matern(points(n), 0.6)
    truth = Truth(K, pivots, noise, jitter)
    made, products = compute(
        as_array(K), as_array(noise), as_indices(pivots), as_array(V), jitter
    )
    dense = truth.M @ V, truth.M.T @ V, truth.B @ V
    for product, expected in zip(products, dense, strict=True):
        close(product, expected)
    rounding = 1e-9 if is_x64() else 2e-2
    # M and log det P belong together, and B is what M makes of A, however inexact F is.
    M = np.asarray(made.apply(jnp.eye(n, dtype=float_dtype())), np.float64)
    assert abs(made.logdet + 2 * np.linalg.slogdet(M)[1]) < rounding
    B = M @ (K + np.diag(noise)) @ M.T
    exact = np.linalg.slogdet(K + np.diag(noise))[1]
    assert abs(made.logdet + np.linalg.slogdet(B)[1] - exact) < rounding
    assert np.linalg.eigvalsh(B)[0] > 1 - (1e-8 if is_x64() else 3e-3)
    assert_close(made.logdet, truth.logdet, 1e-9 if is_x64() else 1e-4)
    # The control variate.
    identity = jnp.eye(n, dtype=float_dtype())
    Qh = np.asarray(made.inside(identity)[0], np.float64)
    close(Qh.T @ Qh, truth.Q @ truth.Q.T)
    assert_close(made.trace_inside, np.sum(truth.Q**2), 1e-9 if is_x64() else 1e-3)
    # What columns bought.
    assert int(made.num_columns) == np.sum(pivots >= 0)
    assert_close(made.trace, truth.trace)
    assert_close(made.residual_trace, truth.residual_trace, 1e-9 if is_x64() else 2e-2)
    assert made.semidefinite


def test_inactive_pivots_drop_out():
    n = 80
    K, slope, noise, V, pivots = problem(n, 12)
    data = as_array(K), as_array(slope), as_array(noise)
    padded = np.insert(pivots, [0, 3, 3, 12], -1)

    def truth(t):
        return truth_along(t, K, slope, noise, pivots, V)

    values, *derivatives = along(as_array(0.0), *data, as_indices(padded), as_array(V))
    assert_close(values, truth(0.0), 1e-9 if is_x64() else 3e-3)
    for derivative in derivatives:
        expected = central(truth, 1e-4)
        assert_close(derivative, expected, 1e-6 if is_x64() else 1e-2)
    made, (_, _, product) = compute(*data[::2], as_indices(padded), as_array(V))
    assert made.num_columns == 12
    assert_close(made.trace_inside, np.sum(Truth(K, pivots, noise).Q ** 2))
    columns = np.asarray(made.basis)[:, padded < 0]
    np.testing.assert_array_equal(columns, 0)
    # None at all: P is the noise.
    nothing = as_indices(np.full(16, -1))
    values, *derivatives = along(as_array(0.0), *data, nothing, as_array(V))
    assert_close(values[0], np.log(noise).sum())
    for derivative in derivatives:
        assert_close(derivative[0], n)
        assert np.all(np.isfinite(derivative))
    made, (_, _, product) = compute(*data[::2], nothing, as_array(V))
    close(product, V + (K @ (V / noise[:, None] ** 0.5)) / noise[:, None] ** 0.5, 1e-5)
    assert made.trace_inside == 0
    assert_close(made.residual_trace, made.trace)


def test_repeated_pivots_and_points():
    K, _, noise, V, pivots = problem(80, 16)
    twice = np.r_[pivots[:8], pivots[:8]]
    data = as_array(noise), as_indices(twice), as_array(V)
    made, (_, _, product) = compute(as_array(K), *data)
    close(product, Truth(K, pivots[:8], noise).B @ V, 1e-3 if is_x64() else 3e-2)
    assert made.semidefinite
    wrong = as_array(K - 0.5 * np.eye(80))
    assert not compute(wrong, *data)[0].semidefinite


def test_complex():
    n, r = 60, 16
    _, _, noise, V, pivots = problem(n, r)
    rng = np.random.default_rng(1)
    U = rng.normal(size=(n, 20)) + 1j * rng.normal(size=(n, 20))
    K, V = U @ U.conj().T, V + 1j * V[::-1]
    dtype = as_operator(K).matrix.dtype
    data = as_array(noise), as_indices(pivots), jnp.asarray(V, dtype)
    made, products = compute(jnp.asarray(K, dtype), *data)
    truth = Truth(K, pivots, noise)
    for product, M in zip(products, (truth.M, truth.M.conj().T, truth.B), strict=True):
        close(product, M @ V, 1e-7 if is_x64() else 3e-2)
    assert_close(made.logdet, truth.logdet, 1e-9 if is_x64() else 1e-4)
