"""Extreme sizes, budgets, ranks and scales: exact or statistically right answers."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    ESTIMATORS,
    FAMILIES,
    assert_close,
    many,
    rounding,
    z_score,
)
from problems import PSD, as_operator, float_dtype, haar, is_x64, matrix

import traceax as tx

# Sphere and normal probes follow the same path as signs, so we skip them.
_PATHS = [*FAMILIES, "xtrace-plain", "xnystrace-plain"]


@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "k"),
    [
        *(("hutchinson", 2), ("hutch++", 4), ("xtrace-plain", 4)),
        *(("xnystrace", 1), ("xnystrace-plain", 2)),
    ],
)
def test_small_budgets_are_unbiased(estimator, k):
    a = matrix("flat", 8)
    values, errors = many(
        ESTIMATORS[estimator], as_operator(a, psd=True), k, 4000, seed=k
    )
    assert z_score(values, np.trace(a), rounding()) < 4
    assert not np.any(errors == 0)


@pytest.mark.parametrize(
    ("estimator", "complex"),
    [("hutch++", False), ("xtrace", False), ("xnystrace", False), ("xtrace", True)],
)
def test_zero_and_its_gradient(estimator, complex):
    def value(a, key):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(key, operator, 6, ESTIMATORS[estimator], throw=False).value

    zero = as_operator(np.zeros((10, 10)) * (1j if complex else 1)).matrix
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(value), (None, 0)))(
        zero, jr.split(jr.key(0), 2000)
    )
    assert np.max(np.abs(values)) < (1e-14 if is_x64() else 1e-6)
    assert z_score(gradients, np.eye(10), rounding()) < 5


# We keep one size, budget and number of keys, to compile one program per estimator.
SIZE, BUDGET, KEYS = 30, 12, 2000


@pytest.mark.parametrize("estimator", _PATHS[1:])
def test_low_rank_is_exact(estimator):
    for rank, scale in ((1, 1.0), (3, 1e-12), (3, 1e12)):
        u = haar(SIZE)[:, :rank]
        a = scale * (u * np.arange(1.0, rank + 1)) @ u.T
        truth = scale * rank * (rank + 1) / 2
        operator = as_operator((a + a.T) / 2, psd=True)
        values, errors = many(ESTIMATORS[estimator], operator, BUDGET, KEYS)
        tolerance = truth * (1e-12 if is_x64() else 1e-4)
        assert np.max(np.abs(values - truth)) < tolerance
        assert np.max(errors) < tolerance
        assert np.min(errors) > 0


@pytest.mark.parametrize("estimator", ["hutch++", "xtrace", "xnystrace-plain"])
def test_repeated_eigenvalues(estimator):
    u = haar(SIZE)
    repeated = (u * np.repeat([1.0, 2.0, 5.0], 10)) @ u.T
    for a, truth in ((repeated, 80.0), (3 * np.eye(SIZE), 90.0)):
        operator = as_operator((a + a.T) / 2, psd=True)
        values, _ = many(ESTIMATORS[estimator], operator, BUDGET, KEYS)
        assert z_score(values, truth, rounding()) < 4


@pytest.mark.parametrize("estimator", ["hutchinson-sphere", "xtrace", "xnystrace"])
def test_resphering_makes_multiples_of_the_identity_exact(estimator):
    operator = as_operator(3 * np.eye(SIZE), psd=True)
    values, _ = many(ESTIMATORS[estimator], operator, BUDGET, KEYS)
    assert_close(values, 90 * np.ones(KEYS), rtol=1e-5)


@pytest.mark.parametrize("estimator", ["hutch++", "xtrace"])
def test_a_nonsymmetric_operator_of_rank_one(estimator):
    rng = np.random.default_rng(0)
    a = np.outer(rng.normal(size=30), rng.normal(size=30))
    values, _ = many(ESTIMATORS[estimator], as_operator(a), 12, 50)
    atol = np.linalg.norm(a) * (1e-11 if is_x64() else 1e-4)
    assert_close(values, np.trace(a) * np.ones(50), rtol=0, atol=atol)


@pytest.mark.parametrize("estimator", _PATHS)
def test_scale_equivariance(estimator):
    rtol = 1e-9 if is_x64() else 5e-4
    a = matrix("poly", SIZE)
    keys = jr.split(jr.key(1), 3)

    @jax.jit
    def run(a, keys):
        def run_once(key):
            operator = lx.MatrixLinearOperator(a, PSD)
            estimate = tx.trace(
                key, operator, BUDGET, ESTIMATORS[estimator], throw=False
            )
            return estimate.value, estimate.standard_error

        return jax.vmap(run_once)(keys)

    plain, error = run(as_operator(a).matrix, keys)
    for factor in (1e-20, 1e-12, 1e18):
        scaled, scaled_error = run(as_operator(factor * a).matrix, keys)
        assert_close(scaled / factor, plain, rtol=rtol)
        assert_close(scaled_error / factor, error, rtol=100 * rtol)


@pytest.mark.x64
def test_shift_equivariance_of_resphered_estimators():
    # We expect tr(A + c I) = tr A + c n, draw by draw.
    a = matrix("poly", 30)
    x, y = (
        tx.trace(jr.key(0), as_operator(b), 3, tx.XTraceEstimator()).value
        for b in (a, a + 2 * np.eye(30))
    )
    assert_close(y, x + 60, rtol=1e-5)


@pytest.mark.x64
def test_an_operator_over_an_empty_structure(key):
    operator = lx.IdentityLinearOperator(())
    assert tx.trace(key, operator, 3).value == 0
    empty = lx.MatrixLinearOperator(jnp.zeros((0, 0)))
    assert tx.trace(key, empty, 3, tx.XTraceEstimator()).value == 0


@pytest.mark.x64
@pytest.mark.parametrize(("dtype", "k"), [(jnp.bfloat16, 2), (jnp.float16, 3)])
def test_intervals_of_half_precision(key, dtype, k):
    operator = lx.MatrixLinearOperator(
        jnp.ones((3, 3), dtype) + jnp.eye(3, dtype=dtype)
    )

    def interval(key):
        return tx.trace(key, operator, k).confidence_interval()

    low, high = jax.jit(jax.vmap(interval))(jr.split(key, 200))
    assert low.dtype == high.dtype == jnp.float32
    # With probability 4^-k, all probes are eigenvectors with the same eigenvalue.
    assert np.mean((low <= 6) & (high >= 6)) > 0.9


def test_error_bars_include_the_rounding_of_exact_parts(key):
    small = np.zeros((8, 8))
    small[0, 0] = 1e-3
    exact = np.linspace(1e5, 2e5, 8) / 3
    diagonal = lx.DiagonalLinearOperator(jnp.asarray(exact, float_dtype()))
    estimate = tx.trace(key, as_operator(small, psd=True) + diagonal, 5)
    deviation = abs(
        float(estimate.value) - float(np.asarray(diagonal.diagonal, float).sum())
    )
    assert deviation - 1e-3 <= 3 * estimate.standard_error

    # Only the exact part changes, so that rounding is the slope's only error.
    def fn(scale):
        whole = 2.0 * as_operator(small, psd=True) + scale * diagonal
        return tx.trace(key, whole, 5)

    one = jnp.ones((), float_dtype())
    _, slope = tx.jvp(fn, (one,), (one,))
    truth = float(np.asarray(diagonal.diagonal, float).sum())
    size = float(jnp.finfo(float_dtype()).eps) * truth
    assert abs(float(slope.value) - truth) <= 3 * slope.standard_error
    assert size < slope.standard_error < 20 * size
