"""Spectral functions for operators with a known trace, which reduces their errors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, products_only, z_score
from problems import PSD, Problem, as_array, is_x64
from spectral_helpers import relaxed  # noqa: F401

import traceax as tx


def _logs_and_roots(x):
    return {"log": jnp.log(x), "root": jnp.sqrt(x)}


@eqx.filter_jit
def _run(keys, operator, k, lower, estimator=None, trace=None):
    options = {"lower": lower, "monotone": True, "trace": trace, "throw": False}

    def run_once(key):
        estimate = tx.trace_function(
            key, _logs_and_roots, operator, k, estimator, **options
        )
        return estimate.value, estimate.standard_error, estimate.stats["known_trace"]

    return jax.lax.map(run_once, keys)


@pytest.mark.x64
def test_controlled_samples_are_unbiased():
    # Nine steps from three probes make the bracket negligible.
    keys, three = jr.split(jr.key(0), 4000), tx.KrylovAwareEstimator(3)
    for problem in (
        Problem("flat", 40, True, scale=2),
        Problem("tail", 40, True, scale=0.5, shift=0.5),
    ):
        values, *_ = _run(keys, problem.operator(psd=True), 27, 0.9, three)
        for name, fn in (("log", np.log), ("root", np.sqrt)):
            truth = problem.total(fn)
            assert z_score(values[name], truth) < 5
            assert z_score(1.02 * values[name], truth) > 5


def test_a_known_trace_halves_the_error():
    problem, keys = Problem("tail", 120), jr.split(jr.key(1), 16)
    operator = problem.operator(psd=True)
    *from_matrix, known = _run(keys, operator, 40, 1.0)
    *from_products, unknown = _run(keys, products_only(operator), 40, 1.0)
    trace = as_array(problem.trace)
    *with_trace, passed = _run(keys, products_only(operator), 40, 1.0, trace=trace)
    assert jnp.all(known & passed & ~unknown)
    for name, fn in (("log", np.log), ("root", np.sqrt)):

        def error(result, fn=fn, name=name):
            deviation = np.asarray(result[0][name]) - problem.total(fn)
            return np.sqrt(np.mean(deviation**2))

        assert error(from_matrix) < 0.5 * error(from_products)
        # Error bars shrink with the errors.
        bar = np.mean(np.asarray(from_matrix[1][name]))
        assert 0.5 < bar / error(from_matrix) < 2.5
        assert_close(
            with_trace[0][name], from_matrix[0][name], 1e-9 if is_x64() else 1e-4
        )


@pytest.mark.x64
def test_shifts_and_derivatives(key):
    problem = Problem("tail", 60)

    def logdet(t, trace):
        operator = products_only(lx.MatrixLinearOperator(t * problem.array, PSD))
        return tx.logdet(key, operator, 20, shift=0.5, trace=trace, throw=False)

    @jax.jit
    def value_and_slopes(t, trace):
        def value(t, trace):
            e = logdet(t, trace)
            return e.value, e.result

        return jax.value_and_grad(value, (0, 1), has_aux=True)(t, trace)

    (estimated, _), (slope, trace_slope) = value_and_slopes(1.0, problem.trace)
    read = tx.logdet(key, problem.operator(psd=True), 20, shift=0.5)
    assert_close(estimated, read.value)
    # Derivatives ignore the trace.
    assert trace_slope == 0
    assert_close(slope, jax.jit(jax.grad(lambda t: logdet(t, None).value))(1.0))
    (value, result), _ = value_and_slopes(1.0, jnp.nan)
    assert result == tx.RESULTS.nonfinite
    assert jnp.isnan(value)
    with pytest.raises(TypeError, match="trace must be a real scalar"):
        logdet(1.0, "known")
