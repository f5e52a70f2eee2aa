"""Spectral functions of operators whose trace is known: samples that it controls."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, hidden, z_score
from problems import PSD, Problem, as_array, is_x64
from spectral_helpers import relaxed  # noqa: F401

import traceax as tx


def _logs_and_roots(x):
    return {"log": jnp.log(x), "root": jnp.sqrt(x)}


@eqx.filter_jit
def _run(keys, operator, k, lower, estimator=None, trace=None):
    options = {"lower": lower, "monotone": True, "trace": trace, "throw": False}

    def one(key):
        found = tx.trace_function(
            key, _logs_and_roots, operator, k, estimator, **options
        )
        return found.value, found.standard_error, found.stats["known_trace"]

    return jax.lax.map(one, keys)


@pytest.mark.x64
def test_controlled_samples_have_no_bias():
    # Nine steps of three probes leave next to nothing to the bracket.
    keys, three = jr.split(jr.key(0), 4000), tx.KrylovAwareEstimator(3)
    for problem in (
        Problem("flat", 40, True, scale=2),
        Problem("tail", 40, True, scale=0.5, shift=0.5),
    ):
        found, *_ = _run(keys, problem.operator(psd=True), 27, 0.9, three)
        for name, fn in (("log", np.log), ("root", np.sqrt)):
            truth = problem.total(fn)
            assert z_score(found[name], truth) < 5
            assert z_score(1.02 * found[name], truth) > 5


def test_a_known_trace_halves_the_error():
    problem, keys = Problem("tail", 120), jr.split(jr.key(1), 16)
    operator = problem.operator(psd=True)
    *of_matrix, known = _run(keys, operator, 40, 1.0)
    *of_hidden, unknown = _run(keys, hidden(operator), 40, 1.0)
    trace = as_array(problem.trace)
    *given, told = _run(keys, hidden(operator), 40, 1.0, trace=trace)
    assert jnp.all(known & told & ~unknown)
    for name, fn in (("log", np.log), ("root", np.sqrt)):

        def error(found, fn=fn, name=name):
            off = np.asarray(found[0][name]) - problem.total(fn)
            return np.sqrt(np.mean(off**2))

        assert error(of_matrix) < 0.5 * error(of_hidden)
        # Error bars follow.
        bar = np.mean(np.asarray(of_matrix[1][name]))
        assert 0.5 < bar / error(of_matrix) < 2.5
        assert_close(given[0][name], of_matrix[0][name], 1e-9 if is_x64() else 1e-4)


@pytest.mark.x64
def test_shifts_and_derivatives(key):
    problem = Problem("tail", 60)

    def logdet(t, trace):
        operator = hidden(lx.MatrixLinearOperator(t * problem.array, PSD))
        return tx.logdet(key, operator, 20, shift=0.5, trace=trace, throw=False)

    @jax.jit
    def both(t, trace):
        def value(t, trace):
            e = logdet(t, trace)
            return e.value, e.result

        return jax.value_and_grad(value, (0, 1), has_aux=True)(t, trace)

    (found, _), (slope, of_trace) = both(1.0, problem.trace)
    read = tx.logdet(key, problem.operator(psd=True), 20, shift=0.5)
    assert_close(found, read.value)
    # The trace has no part in derivatives.
    assert of_trace == 0
    assert_close(slope, jax.jit(jax.grad(lambda t: logdet(t, None).value))(1.0))
    (value, result), _ = both(1.0, jnp.nan)
    assert result == tx.RESULTS.nonfinite
    assert jnp.isnan(value)
    with pytest.raises(TypeError, match="trace must be a real scalar"):
        logdet(1.0, "known")
