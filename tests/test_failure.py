"""Failures at run time: the result, the message and the batch element."""

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
)
from jax.experimental import checkify
from problems import PSD, as_operator, float_dtype, matrix

import traceax as tx

N = 12
LARGEST = {"float32": 3e38, "float64": 1e308}


def _with_an_entry(value):
    a = matrix("flat", N)
    a[2, 5] = value
    return as_operator(a, psd=True)


def _function(product):
    structure = jax.ShapeDtypeStruct((N,), float_dtype())
    return lx.FunctionLinearOperator(product, structure, PSD)


def _nan_products():
    a = as_operator(matrix("flat", N)).matrix
    return _function(lambda v: a @ v * jnp.log(-1.0))


def _infinite_products():
    huge = LARGEST[float_dtype().__name__]
    return as_operator(matrix("flat", N) * (huge / 8), psd=True)


def _overflow_inside():
    # The first product is infinite, the second NaN.
    huge = LARGEST[float_dtype().__name__] ** 0.75
    a = as_operator(matrix("flat", N) * huge)
    return lx.TaggedLinearOperator(a @ a, PSD)


def _singular_solve():
    # A solver that fails returns NaN, infinite or unconverged numbers.
    operator = as_operator(np.diag([0.0] + [1.0] * (N - 1)), psd=True)
    return _function(lambda v: lx.linear_solve(operator, v, lx.LU(), throw=False).value)


FAULTS = {
    "NaN parameters": lambda: _with_an_entry(np.nan),
    "infinite parameters": lambda: _with_an_entry(np.inf),
    "NaN products": _nan_products,
    "division by zero": lambda: _function(lambda v: v / jnp.zeros_like(v)),
    "infinite products": _infinite_products,
    "overflow inside": _overflow_inside,
    "singular solve": _singular_solve,
}


# All faults give one result, so we try each fault with one estimator, and each
# estimator with one fault.
@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "fault"),
    [("xtrace", fault) for fault in FAULTS]
    + [(e, "NaN parameters") for e in FAMILIES if e != "xtrace"],
)
def test_nonfinite_values_are_reported(estimator, fault):
    operator, est = FAULTS[fault](), ESTIMATORS[estimator]
    for k in (5, N) if fault == "NaN parameters" else (5,):
        estimate = tx.trace(jr.key(0), operator, k, est, throw=False)
        assert estimate.result == tx.RESULTS.nonfinite
        assert not np.isfinite(estimate.value)
        assert np.isnan(estimate.standard_error)
    if fault not in ("NaN parameters", "singular solve"):
        return
    with pytest.raises(Exception, match=r"is not finite.*a linear solve that failed"):
        tx.trace(jr.key(0), operator, 5, est).value.block_until_ready()


@pytest.mark.x64
def test_nonfinite_parts_of_a_sum():
    diagonal = lx.DiagonalLinearOperator(jnp.ones(N, float_dtype()))
    operator = 2.0 * FAULTS["division by zero"]() + diagonal
    estimate = tx.trace(jr.key(0), operator, 6, throw=False)
    assert estimate.result == tx.RESULTS.nonfinite


def test_nonfinite_exact_parts():
    huge = jnp.full(3, LARGEST[float_dtype().__name__], float_dtype())
    for diagonal in (huge.at[1].set(jnp.nan), huge.at[1].set(jnp.inf), huge):
        exact = lx.DiagonalLinearOperator(diagonal)
        for operator in (exact, exact + as_operator(np.ones((3, 3)))):
            estimate = tx.trace(jr.key(0), operator, 2, throw=False)
            assert estimate.result == tx.RESULTS.nonfinite


@pytest.mark.x64
def test_derivatives_raise_the_same_message():
    def value(a):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(jr.key(0), operator, 5, tx.XTraceEstimator()).value

    a = _with_an_entry(np.nan).matrix
    for run in (
        lambda: jax.grad(value)(a),
        lambda: jax.jit(jax.vmap(jax.grad(value)))(jnp.stack([a, a])),
    ):
        with pytest.raises(Exception, match="is not finite"):
            run().block_until_ready()


@pytest.mark.x64
@pytest.mark.parametrize("estimator", FAMILIES)
def test_batch_elements_fail_independently(estimator):
    good = as_operator(matrix("flat", N)).matrix
    huge = LARGEST[float_dtype().__name__]
    batch = jnp.stack([good, good.at[0, 0].set(jnp.nan), good * (huge / 8), 2 * good])

    @jax.jit
    @jax.vmap
    def run(a):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(jr.key(0), operator, 6, ESTIMATORS[estimator], throw=False)

    estimates = run(batch)
    R = tx.RESULTS
    expected = [R.successful, R.nonfinite, R.nonfinite, R.successful]
    for i, result in enumerate(expected):
        element = jax.tree.map(lambda x, i=i: x[i], estimates.result)
        assert element == result
    alone = run(batch[:1])
    np.testing.assert_allclose(estimates.value[0], alone.value[0], rtol=1e-5)
    np.testing.assert_allclose(estimates.value[3], 2 * estimates.value[0], rtol=1e-5)
    assert np.all(np.isfinite(np.asarray(estimates.standard_error)[[0, 3]]))


@pytest.mark.x64
def test_solver_errors_keep_their_message():
    operator = as_operator(matrix("exp", N) + 1e-3 * np.eye(N), psd=True)
    solve = lx.CG(rtol=1e-12, atol=1e-12, max_steps=1)
    inverse = lx.FunctionLinearOperator(
        lambda v: lx.linear_solve(operator, v, solve).value,
        operator.in_structure(),
        PSD,
    )
    with pytest.raises(Exception, match="maximum number of solver steps"):
        tx.trace(jr.key(0), inverse, 4).value.block_until_ready()


@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "complex"),
    [("hutch++", False), ("xtrace", True), ("xnystrace", False)],
)
def test_no_false_alarms(estimator, complex):
    def run(a):
        operator = lx.MatrixLinearOperator(a, PSD)
        e = tx.trace(jr.key(0), operator, 6, ESTIMATORS[estimator], throw=False)
        return e.value.real, jnp.isnan(e.standard_error)

    jitted = jax.jit(jax.value_and_grad(run, has_aux=True))
    checked = jax.jit(checkify.checkify(run, errors=checkify.all_checks))
    flat, ones = matrix("flat", 9, complex), np.ones((9, 9))
    several = flat, 0 * flat, ones + 0 * flat, 1e-30 * flat
    for a in [as_operator(a).matrix for a in several]:
        with jax.debug_nans(True):
            (_, unknown), _ = jax.block_until_ready(jitted(a))
            assert not unknown
        error, _ = checked(a)
        assert error.get() is None


def test_intervals_for_levels_close_to_one():
    operator = as_operator(matrix("flat", 9), psd=True)
    with jax.debug_nans(True):
        low, high = tx.trace(jr.key(0), operator, 5).confidence_interval(1 - 1e-9)
    assert low < high
    assert np.isfinite([low, high]).all()


@pytest.mark.x64
def test_unknown_errors_pass_nan_debugging():
    a, d = matrix("flat", 9), lx.DiagonalLinearOperator(jnp.arange(1.0, 10))
    key, operator = jr.key(0), as_operator(a @ a.T, psd=True)
    with jax.debug_nans(True):
        for estimate in (
            tx.trace(key, 2.0 * operator + d, 1),
            tx.diagonal(key, operator, 1),
            tx.frobenius_norm_squared(key, operator, 3),
            tx.schatten_norm(key, operator, 1),
            tx.gaussian_log_likelihood(key, operator, jnp.ones(9), 2, shift=1.0),
        ):
            assert jnp.isnan(estimate.standard_error).all()
            low, high = estimate.confidence_interval()
            assert jnp.all(low == -jnp.inf)
            assert jnp.all(high == jnp.inf)
            assert str(estimate)

    def value_and_error(s):
        estimate = tx.trace(key, s * operator, 1)
        return estimate.value, estimate.standard_error

    slopes = jax.jacrev(value_and_error)(2.0)
    assert_close(slopes, (tx.trace(key, operator, 1).value, 0.0))
