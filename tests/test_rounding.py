"""Numbers from entries carry their terms' rounding errors."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from problems import PSD, as_array, float_dtype, is_x64

import traceax as tx

N, COLUMNS, LENGTH = 160, 154, 3.0
NOISE = 1e-3 if is_x64() else 0.03
PLACES = np.arange(N, dtype=float)
SQUARES = np.subtract.outer(PLACES, PLACES) ** 2
ROUGH = np.sign(PLACES - N / 2 + 0.5)


def kernel(length, scale=1.0, x=PLACES):
    def function(a, b):
        return scale * jnp.exp(-((a[0] - b[0]) ** 2) / (2 * length**2))

    return tx.KernelLinearOperator(function, as_array(x[:, None]))


def truths(noise, y):
    """Log-determinant and quadratic form, with slopes along length and noise."""
    wide = np.longdouble if is_x64() else float
    noise = wide(float(as_array(noise)))
    K = np.exp(-SQUARES.astype(wide) / (2 * LENGTH**2))
    A, dK = K + noise * np.eye(N), K * SQUARES / LENGTH**3
    inverse = refined_inverse(A)
    u = inverse @ y
    logdet = 2 * np.sum(np.log(np.diagonal(refined_cholesky(A))))
    slopes = [(np.sum(inverse * d), -u @ d @ u) for d in (dK, np.eye(N))]
    return np.array([(logdet, y @ u), *slopes], float)


def refined_inverse(A):
    inverse = np.linalg.inv(A.astype(float)).astype(A.dtype)
    for _ in range(3):
        inverse = inverse + inverse @ (np.eye(len(A)) - A @ inverse)
    return inverse


def refined_cholesky(A):
    """The Cholesky factor, column by column, in the precision of A."""
    L = np.zeros_like(A)
    for j in range(len(A)):
        column = A[j:, j] - L[j:, :j] @ L[j, :j]
        L[j:, j] = column / np.sqrt(column[0])
    return L


def test_bars_of_eliminated_rows_include_rounding():
    estimator, options = tx.KrylovAwareEstimator(), {"throw": False}

    def run(length, noise, key):
        options.update(shift=noise, preconditioner=COLUMNS)
        return tx.inv_quad_logdet(
            key, kernel(length), as_array(ROUGH), estimator=estimator, **options
        )

    def value_and_slope(key, tangents):
        point = tuple(jnp.asarray(x, float_dtype()) for x in (LENGTH, NOISE))
        parts = (lambda *x: run(*x, key).logdet), (lambda *x: run(*x, key).inv_quad)
        estimates = [tx.jvp(part, point, tuple(tangents)) for part in parts]
        return [
            [(e.value, e.standard_error, e.confidence_interval(0.999)) for e in pair]
            for pair in estimates
        ]

    directions = jnp.eye(2, dtype=float_dtype())
    run_all = jax.jit(jax.vmap(value_and_slope, (None, 0)))
    value, *slopes = truths(NOISE, ROUGH)
    for seed in range(3):
        results = run_all(jr.key(seed), directions)
        for part, (of_value, of_slope) in enumerate(results):
            for index in range(2):
                for (estimate, error, (low, high)), truth in (
                    (of_value, value[part]),
                    (of_slope, slopes[index][part]),
                ):
                    assert low[index] <= truth <= high[index]
                    # With 6 rows left, only rounding errors remain. These are far
                    # above rounding of the result.
                    scale = max(abs(truth), abs(float(estimate[index])))
                    assert error[index] > 10 * jnp.finfo(error.dtype).eps * scale
                    assert error[index] < 0.05 * scale


def test_eliminated_rows_fail_where_rounding_hides_the_noise():
    noise = 2e-15 if is_x64() else 1e-6
    options = {"shift": noise, "preconditioner": COLUMNS, "throw": False}
    estimator = tx.KrylovAwareEstimator()
    K, y = kernel(LENGTH * 5), as_array(ROUGH)
    exact = tx.gaussian_log_likelihood(jr.key(0), K, y, shift=noise, throw=False)
    estimate = tx.gaussian_log_likelihood(
        jr.key(0), K, y, estimator=estimator, **options
    )
    # The noise is positive, so that rounding is the cause, and not a wrong tag.
    assert exact.result == tx.RESULTS.outside_domain
    assert estimate.result == tx.RESULTS.outside_domain


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_rounding_is_relative_to_terms_that_cancel(scale):
    # A posterior covariance is a small difference of large matrices.
    x = np.linspace(0.0, 1.0, N)
    shift = (1e-8 if is_x64() else 2e-3) * scale
    K = scale * np.exp(-(np.subtract.outer(x, x) ** 2) / (2 * 0.3**2))
    nodes = np.arange(0, N, 8)
    explained = K[:, nodes] @ np.linalg.solve(
        K[np.ix_(nodes, nodes)] + 1e-3 * scale * np.eye(len(nodes)), K[nodes]
    )
    Q = lx.MatrixLinearOperator(as_array(explained))
    operator = kernel(0.3, scale, x) - Q
    wide = np.longdouble if is_x64() else float
    points = np.asarray(as_array(x)).astype(wide)
    A = scale * np.exp(-(np.subtract.outer(points, points) ** 2) / wide(2 * 0.09))
    A = A - np.asarray(Q.matrix).astype(wide) + wide(float(as_array(shift))) * np.eye(N)
    factor = refined_cholesky(A)
    truth = 2 * np.sum(np.log(np.diagonal(factor))), np.trace(refined_inverse(A))
    for door, expected in zip((tx.logdet, tx.trace_inverse), truth, strict=True):
        estimate = door(jr.key(0), operator, shift=shift)
        error = abs(float(estimate.value) - float(expected))
        assert error < 3 * float(estimate.standard_error)
        assert float(estimate.standard_error) < 0.1 * abs(float(expected))
    tagged = lx.TaggedLinearOperator(operator, PSD)
    y = as_array(np.sin(40 * x))
    form = np.asarray(y, wide) @ refined_inverse(A) @ np.asarray(y, wide)
    density = -(truth[0] + form + N * np.log(2 * np.pi)) / 2
    likelihood = ft.partial(tx.gaussian_log_likelihood, jr.key(0), tagged, y)
    for estimate, expected in (
        (tx.logdet(jr.key(0), tagged, N - 10, shift=jnp.full(N, shift)), truth[0]),
        (likelihood(N - 10, shift=shift), density),
        (likelihood(20, shift=shift, preconditioner=N - 20), density),
    ):
        error = abs(float(estimate.value) - float(expected))
        assert error < 3 * float(estimate.standard_error)
        assert float(estimate.standard_error) < 0.1 * abs(float(expected))
    estimate = tx.trace(jr.key(0), tagged, N)
    error = abs(float(estimate.value) - float(np.trace(A) - N * shift))
    assert error < 3 * estimate.standard_error
    size = 2 * scale * N * float(jnp.finfo(float_dtype()).eps)
    assert size < estimate.standard_error < 10 * size


def scattered(operator, vector):
    return operator.mv(jnp.zeros_like(vector).at[jnp.arange(N)].set(vector))


@pytest.mark.parametrize("columns", [None, 0, 20, COLUMNS])
def test_solutions_have_derivatives(columns):
    # A restricted likelihood contains the log-determinant of Z^T (K + N)^-1 Z. JAX cannot
    # transpose these products, because indices are not marked as unique.
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(N, 2))
    options = {} if columns is None else {"k": 60, "preconditioner": columns or None}

    def solution(point):
        length, noise, size = point
        K = kernel(length)
        if columns == 0:
            K = lx.FunctionLinearOperator(
                ft.partial(scattered, K), K.in_structure(), PSD
            )
        terms = tx.inv_quad_logdet(
            jr.key(0), K, size * as_array(Z), shift=noise, **options
        )
        return terms.solution

    def value(point):
        return jnp.linalg.slogdet(as_array(Z).T @ solution(point))[1]

    def truth(point):
        length, noise, size = point
        K = jnp.exp(-as_array(SQUARES) / (2 * length**2))
        A = K + noise * jnp.eye(N, dtype=K.dtype)
        return jnp.linalg.slogdet(
            as_array(Z).T @ jnp.linalg.solve(A, size * as_array(Z))
        )[1]

    point = as_array([LENGTH, 0.1, 1.3])
    expected = jax.jit(jax.grad(truth))(point)
    gradient, tangent = jax.jit(
        lambda point: (
            jax.grad(value)(point),
            jax.jvp(value, (point,), (as_array([1.0, 2.0, 3.0]),))[1],
        )
    )(point)
    # Estimated solutions have errors, which enter the value's derivative.
    rtol = 5e-3 if columns is not None else 1e-6 if is_x64() else 2e-3
    np.testing.assert_allclose(gradient, expected, rtol=rtol)
    np.testing.assert_allclose(tangent, expected @ as_array([1, 2, 3]), rtol=rtol)


def test_neighbouring_likelihoods_lie_on_a_line():
    # In 32 bits, rounding in residuals moved likelihoods by 3e-3 between these points, so
    # that line searches stopped early.
    rng = np.random.default_rng(0)
    x, y = rng.random((700, 3)), rng.normal(size=700) / 10
    x, y = (jnp.asarray(a, jnp.float32) for a in (x, y + np.sin(9 * x[:, 0])))

    def matern(a, b):
        r = jnp.sqrt(5 * jnp.sum((a - b) ** 2) + 1e-10) / 0.7
        return (1 + r + r**2 / 3) * jnp.exp(-r)

    def likelihood(step):
        noise, K = jnp.exp(-4.0 + step), tx.KernelLinearOperator(matern, x)
        return tx.gaussian_log_likelihood(jr.key(0), K, y, shift=noise).value

    steps = 1e-5 * np.arange(12, dtype=np.float32)
    values = np.asarray(jax.jit(lambda x: jax.lax.map(likelihood, x))(steps), float)
    line = np.polyval(np.polyfit(steps, values, 1), steps)
    assert np.abs(values - line).max() < 1e-3
