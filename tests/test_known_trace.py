"""Spectral functions of operators whose trace is known: samples that it controls."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import PSD, assert_close, haar, is_x64, z_score
from spectral_helpers import as_array, relaxed  # noqa: F401

import traceax as tx


def _hermitian(values, complex=False):
    u = haar(len(values), 0, complex)
    a = (u * values) @ u.conj().T
    return (a + a.conj().T) / 2


def _hidden(a):
    structure = jax.ShapeDtypeStruct((len(a),), a.dtype)
    return lx.FunctionLinearOperator(lambda v: a @ v, structure, PSD)


def _logs_and_roots(x):
    return {"log": jnp.log(x), "root": jnp.sqrt(x)}


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
def test_controlled_samples_have_no_bias(complex):
    # Nine steps of three probes leave next to nothing to the bracket.
    for values in (np.linspace(2, 6, 40), 1 + 20 / np.arange(1, 41)):
        a = as_array(_hermitian(values, complex))

        @jax.jit
        def run(keys, a=a):
            def one(key):
                return tx.trace_function(
                    key,
                    _logs_and_roots,
                    lx.MatrixLinearOperator(a, PSD),
                    27,
                    tx.KrylovAwareEstimator(3),
                    lower=0.9,
                    monotone=True,
                ).value

            return jax.lax.map(one, keys, batch_size=100)

        found = run(jr.split(jr.key(0), 4000))
        for name, fn in (("log", np.log), ("root", np.sqrt)):
            truth = np.sum(fn(values))
            assert z_score(found[name], truth) < 5
            assert z_score(1.02 * found[name], truth) > 5


@eqx.filter_jit
def _errors(keys, operator, lower, trace=None):
    def one(key):
        found = tx.trace_function(
            key,
            _logs_and_roots,
            operator,
            40,
            lower=lower,
            monotone=True,
            trace=trace,
            throw=False,
        )
        return found.value, found.standard_error, found.stats["known_trace"]

    return jax.lax.map(one, keys)


def test_a_known_trace_halves_the_error():
    values = 1 + 40 / np.arange(1, 121)
    a, keys = as_array(_hermitian(values)), jr.split(jr.key(1), 16)
    *of_matrix, known = _errors(keys, lx.MatrixLinearOperator(a, PSD), 1.0)
    *of_hidden, unknown = _errors(keys, _hidden(a), 1.0)
    *given, told = _errors(keys, _hidden(a), 1.0, jnp.trace(a))
    assert jnp.all(known & told & ~unknown)
    for name, fn in (("log", np.log), ("root", np.sqrt)):
        truth = np.sum(fn(values))

        def error(found, truth=truth, name=name):
            return np.sqrt(np.mean((np.asarray(found[0][name]) - truth) ** 2))

        assert error(of_matrix) < 0.5 * error(of_hidden)
        # Error bars follow.
        bar = np.mean(np.asarray(of_matrix[1][name]))
        assert 0.5 < bar / error(of_matrix) < 2.5
        assert_close(given[0][name], of_matrix[0][name], 1e-9 if is_x64() else 1e-4)


@pytest.mark.x64
def test_shifts_and_derivatives():
    a = as_array(_hermitian(1 + 40 / np.arange(1, 61)))

    def value(t, trace):
        return tx.logdet(jr.key(0), _hidden(t * a), 20, shift=0.5, trace=trace).value

    both = jax.jit(jax.value_and_grad(value, (0, 1)))
    found, (slope, of_trace) = both(1.0, jnp.trace(a))
    read = tx.logdet(jr.key(0), lx.MatrixLinearOperator(a, PSD), 20, shift=0.5)
    assert_close(found, read.value)
    # The trace has no part in derivatives.
    assert of_trace == 0
    plain = jax.grad(
        lambda t: tx.logdet(jr.key(0), _hidden(t * a), 20, shift=0.5).value
    )(1.0)
    assert_close(slope, plain)
    failed = tx.logdet(jr.key(0), _hidden(a), 20, trace=jnp.nan, throw=False)
    assert failed.result == tx.RESULTS.nonfinite
    assert jnp.isnan(failed.value)
    with pytest.raises(TypeError, match="trace must be a real scalar"):
        tx.logdet(jr.key(0), _hidden(a), 20, trace="known")
