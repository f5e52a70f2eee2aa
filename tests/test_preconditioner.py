"""Compare the preconditioner, built from columns and noise, with dense matrices."""

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
    """The preconditioner in dense 64-bit NumPy, built from columns and noise N.

    It is P = N^1/2 (F F^* + I) N^1/2, with F from columns of K' = N^-1/2 K N^-1/2.

    - `M`: an inverse root of P, with M^* M = P^-1.
    - `B`: the preconditioned matrix M (K + N) M^*.
    - `Q`: a factor with Q Q^* = F (I + F^* F)^-1 F^*, for the control variate.
    - `J`: the interpolation K_SS^-1 K_S^* from pivots.
    """

    def __init__(self, K, pivots, noise, jitter=1e-6):
        S = pivots[pivots >= 0]
        r, n = len(S), len(K)
        noise = np.broadcast_to(noise, n)
        scaled = K / np.sqrt(noise[:, None] * noise)
        # In low precision the implementation raises the jitter, and so do we.
        eps = float(jnp.finfo(float_dtype()).eps)
        jitter = np.maximum(jitter, (r + 32) * eps * np.diagonal(scaled)[S].real)
        L = np.linalg.cholesky(scaled[np.ix_(S, S)] + np.diag(jitter))
        F = np.linalg.solve(L, scaled[:, S].conj().T).conj().T
        C = np.linalg.cholesky(F.conj().T @ F + np.eye(r))
        Q2 = np.linalg.inv(C).conj().T
        self.Q = F @ Q2
        X = np.linalg.inv(np.eye(r) + Q2)
        J = np.linalg.solve(L.conj().T, F.conj().T)
        self.J = J * np.sqrt(noise) / np.sqrt(noise[S])[:, None]
        self.S, self.noise = S, noise
        self.M = (np.eye(n) - self.Q @ X @ self.Q.conj().T) / np.sqrt(noise)
        self.B = self.M @ (K + np.diag(noise)) @ self.M.conj().T
        logs = np.log(np.diagonal(C).real)
        self.logdet = 2 * logs.sum() + np.log(noise).sum()
        self.residual_trace = np.trace(scaled - F @ F.conj().T).real
        self.trace = np.trace(scaled).real

    def drift(self, dK, d_noise):
        """M dH M^*, where dH + dH^* is the derivative of P."""
        J, S = self.J, self.S
        dH = dK[:, S] @ J - J.conj().T @ dK[np.ix_(S, S)] @ J / 2 + np.diag(d_noise) / 2
        return self.M @ dH @ self.M.conj().T


def assert_norm_close(x, y, tolerance=None):
    """Assert a small relative error in the Frobenius norm."""
    x, y = np.asarray(x), np.asarray(y)
    tolerance = tolerance or (1e-9 if is_x64() else 5e-3)
    error = np.linalg.norm(x - y) / np.linalg.norm(y)
    assert error < tolerance, error


def problem(n, r, seed=0):
    """A kernel matrix, its derivative in the length scale, noise, a block and pivots."""
    rng = np.random.default_rng(seed)
    x, h = rng.random((n, 2)), 1e-3
    K = matern(x, 0.3)
    dK = (matern(x, 0.3 + h) - matern(x, 0.3 - h)) / (2 * h)
    noise = 1e-3 * np.exp(0.3 * rng.normal(size=n))
    return K, dK, noise, rng.normal(size=(n, 6)), rng.permutation(n)[:r]


def as_indices(pivots):
    return jnp.asarray(pivots, jnp.int32)


def build(K, noise, pivots, jitter=1e-6):
    columns, diagonal = K.T[pivots].T, jnp.real(jnp.diagonal(K))
    return whiten(columns, diagonal, pivots, noise, jitter)


def preconditioned(K, P, noise):
    return PreconditionedLinearOperator(lx.MatrixLinearOperator(K, PSD), P, noise)


@jax.jit
def build_and_apply(K, noise, pivots, V, jitter=1e-6):
    P = build(K, noise, pivots, jitter)
    products = P.apply(V), P.apply_adjoint(V)
    return P, (
        *products,
        apply_block(preconditioned(K, P, noise), V),
    )


@jax.jit
def values_and_derivatives(t, K, dK, noise, pivots, V):
    """log det P, and forms in `drift` and B, at K + t dK; derivatives in both modes."""

    def values(t):
        K_t, noise_t = K + t * dK, noise * jnp.exp(t)
        P = build(K_t, noise_t, pivots)
        W, G = V.T[:3].T, V.T[3:].T
        products = (
            P.drift(W),
            apply_block(preconditioned(K_t, jax.lax.stop_gradient(P), noise_t), W),
        )
        return jnp.stack([P.logdet, *(jnp.sum(G * x) for x in products)])

    return values(t), jax.jacfwd(values)(t), jax.jacrev(values)(t)


def true_values_and_derivatives(K, dK, noise, pivots, V):
    """log det P and the form in B; the derivatives of all three, for fixed M."""
    truth = Truth(K, pivots, noise)

    def logdet(t):
        return Truth(K + t * dK, pivots, noise * np.exp(t)).logdet

    def form(matrix):
        return np.sum(V[:, 3:] * (matrix @ V[:, :3]))

    h, dA = 1e-4, truth.M @ (dK + np.diag(noise)) @ truth.M.T
    slope = 8 * (logdet(h) - logdet(-h)) - logdet(2 * h) + logdet(-2 * h)
    slopes = slope / (12 * h), form(truth.drift(dK, noise)), form(dA)
    return np.array([truth.logdet, form(truth.B)]), np.array(slopes)


# XLA on CPUs (jaxlib 0.10.2) gets products of products wrong by O(1) under jit if the
# middle dimension is about 180 to 256, so we test such ranks.
@pytest.mark.parametrize("r", [10, 200, 256])
def test_factors_and_derivatives(r):
    K, dK, noise, V, pivots = problem(500, r)
    arguments = (
        as_array(K),
        as_array(dK),
        as_array(noise),
        as_indices(pivots),
        as_array(V),
    )
    value, forward, reverse = values_and_derivatives(as_array(0.0), *arguments)

    truth, derivative = true_values_and_derivatives(K, dK, noise, pivots, V)
    assert_close(value[::2], truth, 1e-9 if is_x64() else 1e-2)
    for slopes in (forward, reverse):
        if is_x64():
            assert_close(slopes, derivative, 1e-6)
        # Each derivative is a sum that cancels and may lose its digits, so we compare
        # all three in one norm.
        assert_norm_close(slopes, derivative, 1e-2)


@pytest.mark.parametrize("jitter", [1e-9, 1e-6, 2e-3])
def test_determinants_and_residuals(jitter):
    n, r = 200, 60
    K, _, noise, V, _ = problem(n, r)
    # A fit keeps its pivots, so we choose them for another length scale.
    pivots = np.asarray(
        choose_pivots(jr.key(0), as_operator(K, psd=True), r, shift=1e-3)
    )
    K = matern(points(n), 0.6)
    truth = Truth(K, pivots, noise, jitter)
    P, products = build_and_apply(
        as_array(K), as_array(noise), as_indices(pivots), as_array(V), jitter
    )
    dense = truth.M @ V, truth.M.T @ V, truth.B @ V
    for product, expected in zip(products, dense, strict=True):
        assert_norm_close(product, expected)
    rounding = 1e-9 if is_x64() else 2e-2
    # Even for an inexact F, log det P belongs to M, and B is M (K + N) M^*.
    M = np.asarray(P.apply(jnp.eye(n, dtype=float_dtype())), np.float64)
    assert abs(P.logdet + 2 * np.linalg.slogdet(M)[1]) < rounding
    B = M @ (K + np.diag(noise)) @ M.T
    exact = np.linalg.slogdet(K + np.diag(noise))[1]
    assert abs(P.logdet + np.linalg.slogdet(B)[1] - exact) < rounding
    assert np.linalg.eigvalsh(B)[0] > 1 - (1e-8 if is_x64() else 3e-3)
    assert_close(P.logdet, truth.logdet, 1e-9 if is_x64() else 1e-4)
    # The control variate needs Q Q^* and its trace.
    identity = jnp.eye(n, dtype=float_dtype())
    Q_adjoint = np.asarray(P.inside(identity)[0], np.float64)
    assert_norm_close(Q_adjoint.T @ Q_adjoint, truth.Q @ truth.Q.T)
    assert_close(P.trace_inside, np.sum(truth.Q**2), 1e-9 if is_x64() else 1e-3)
    # We compare the number of columns, and the traces before and after them.
    assert int(P.num_columns) == np.sum(pivots >= 0)
    assert_close(P.trace, truth.trace)
    assert_close(P.residual_trace, truth.residual_trace, 1e-9 if is_x64() else 2e-2)
    assert P.semidefinite


def test_inactive_pivots_drop_out():
    n = 80
    K, dK, noise, V, pivots = problem(n, 12)
    arguments = as_array(K), as_array(dK), as_array(noise)
    padded = np.insert(pivots, [0, 3, 3, 12], -1)

    truth, expected = true_values_and_derivatives(K, dK, noise, pivots, V)
    values, *derivatives = values_and_derivatives(
        as_array(0.0), *arguments, as_indices(padded), as_array(V)
    )
    assert_close(values[::2], truth, 1e-9 if is_x64() else 3e-3)
    for derivative in derivatives:
        assert_close(derivative, expected, 1e-6 if is_x64() else 1e-2)
    P, (_, _, product) = build_and_apply(
        *arguments[::2], as_indices(padded), as_array(V)
    )
    assert P.num_columns == 12
    assert_close(P.trace_inside, np.sum(Truth(K, pivots, noise).Q ** 2))
    columns = np.asarray(P.basis)[:, padded < 0]
    np.testing.assert_array_equal(columns, 0)
    # Without any active pivot, P is the noise.
    inactive = as_indices(np.full(16, -1))
    values, *derivatives = values_and_derivatives(
        as_array(0.0), *arguments, inactive, as_array(V)
    )
    assert_close(values[0], np.log(noise).sum())
    for derivative in derivatives:
        assert_close(derivative[0], n)
        assert np.all(np.isfinite(derivative))
    P, (_, _, product) = build_and_apply(*arguments[::2], inactive, as_array(V))
    assert_norm_close(
        product, V + (K @ (V / noise[:, None] ** 0.5)) / noise[:, None] ** 0.5, 1e-5
    )
    assert P.trace_inside == 0
    assert_close(P.residual_trace, P.trace)


def test_repeated_pivots_and_points():
    K, _, noise, V, pivots = problem(80, 16)
    repeated = np.r_[pivots[:8], pivots[:8]]
    arguments = as_array(noise), as_indices(repeated), as_array(V)
    P, (_, _, product) = build_and_apply(as_array(K), *arguments)
    assert_norm_close(
        product, Truth(K, pivots[:8], noise).B @ V, 1e-3 if is_x64() else 3e-2
    )
    assert P.semidefinite
    indefinite = as_array(K - 0.5 * np.eye(80))
    assert not build_and_apply(indefinite, *arguments)[0].semidefinite


def test_complex():
    n, r = 60, 16
    _, _, noise, V, pivots = problem(n, r)
    rng = np.random.default_rng(1)
    U = rng.normal(size=(n, 20)) + 1j * rng.normal(size=(n, 20))
    K, V = U @ U.conj().T, V + 1j * V[::-1]
    dtype = as_operator(K).matrix.dtype
    arguments = as_array(noise), as_indices(pivots), jnp.asarray(V, dtype)
    P, products = build_and_apply(jnp.asarray(K, dtype), *arguments)
    truth = Truth(K, pivots, noise)
    for product, matrix in zip(
        products, (truth.M, truth.M.conj().T, truth.B), strict=True
    ):
        assert_norm_close(product, matrix @ V, 1e-7 if is_x64() else 3e-2)
    assert_close(P.logdet, truth.logdet, 1e-9 if is_x64() else 1e-4)
