"""A function of eigenvalues may return arrays. Each entry equals a scalar function."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from problems import as_array, as_operator, is_x64, matrix
from spectral_helpers import SPECTRAL, relaxed  # noqa: F401

import traceax as tx

KEY, N, K = jr.key(0), 30, 12
SHIFTS = np.array([[0.1, 0.5, 1.0], [2.0, 3.0, 5.0]])
MATRIX = as_array(matrix("flat", N))
RTOL = 1e-9 if is_x64() else 2e-3


def _logs(x):
    return jnp.log(x + jnp.asarray(SHIFTS, x.dtype))


def _log(i, j):
    return lambda x: jnp.log(x + SHIFTS[i, j].astype(x.dtype))


def _values(fn, matrix, k=K, estimator=None, **options):
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    return tx.trace_function(KEY, fn, operator, k, estimator, **options)


def _assert_entries(whole, single, index):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[index], y, rtol=RTOL), whole, single
    )


@pytest.mark.parametrize("k", [K, N])
@pytest.mark.parametrize("monotone", [False, True])
@pytest.mark.parametrize("estimator", list(SPECTRAL))
def test_entries_equal_scalar_functions(estimator, monotone, k):
    options = {"estimator": SPECTRAL[estimator], "monotone": monotone}
    whole = _values(_logs, MATRIX, k, **options)
    for index in ((0, 0), (1, 2)):
        single = _values(_log(*index), MATRIX, k, **options)
        _assert_entries(whole.value, single.value, index)
        _assert_entries(whole.standard_error, single.standard_error, index)
        _assert_entries(*(x.confidence_interval() for x in (whole, single)), index)
        if "bracket" in single.stats:
            _assert_entries(whole.stats["bracket"], single.stats["bracket"], index)


def test_trees_of_arrays_and_complex_entries():
    def fn(x):
        waves = jnp.exp(1j * jnp.asarray(SHIFTS[0], x.dtype) * x)
        return {"logs": _logs(x), "waves": waves, "square": x**2}

    whole = _values(fn, MATRIX)
    single = _values(lambda x: jnp.exp(1j * SHIFTS[0, 1].astype(x.dtype) * x), MATRIX)
    _assert_entries(whole.value["waves"], single.value, 1)
    _assert_entries(whole.standard_error["waves"], single.standard_error, 1)
    assert whole.value["square"].shape == ()
    assert whole.result["logs"].is_traced() is False
    assert str(whole).splitlines()[0].startswith("['logs']: array of shape (2, 3) +- ")


@pytest.mark.parametrize("k", [K, N])
def test_derivatives_equal_those_for_scalar_functions(k):
    tangent = MATRIX @ MATRIX

    def derivative(fn):
        def values(matrix):
            return _values(fn, matrix, k)

        slope = tx.jvp(values, (MATRIX,), (tangent,))[1]
        forward = jax.jvp(lambda x: values(x).value, (MATRIX,), (tangent,))[1]
        jacobian = jax.jacrev(lambda x: values(x).value)(MATRIX)
        reverse = jnp.tensordot(jacobian, tangent, 2)
        return slope.value, slope.standard_error, forward, reverse

    whole = derivative(_logs)
    for index in ((0, 1), (1, 0)):
        _assert_entries(whole, derivative(_log(*index)), index)


def test_diagonals_are_exact():
    entries = jnp.linspace(0.5, 2.0, 7)
    estimate = tx.trace_function(KEY, _logs, lx.DiagonalLinearOperator(entries), 1)
    truth = jax.vmap(_logs)(entries).sum(0)
    np.testing.assert_allclose(estimate.value, truth, rtol=1e-5)
    shown = ": [1.549 3.609 5.496 8.166 10.08 12.81], 0 products, exact"
    assert str(estimate).endswith(shown)
    rounding = 20 * float(jnp.finfo(truth.dtype).eps) * np.max(np.abs(truth))
    assert np.all(estimate.standard_error <= rounding)


def test_tolerances_hold_for_every_entry():
    estimate = _values(_logs, MATRIX, 5 * N, rtol=1e-3)
    truth = jax.vmap(_logs)(jnp.linalg.eigvalsh(MATRIX)).sum(0)
    np.testing.assert_allclose(estimate.value, truth, rtol=3e-3)


def test_one_program_serves_all_batch_elements():
    def estimate(key):
        operator = as_operator(MATRIX)
        return tx.trace_function(key, _logs, operator, K, throw=False).value

    keys = jr.split(KEY, 3)
    batch = jax.vmap(estimate)(keys)
    for key, values in zip(keys, batch, strict=True):
        np.testing.assert_allclose(estimate(key), values, rtol=RTOL)


def test_entries_fail_alone():
    def fn(x):
        return jnp.log(x - jnp.asarray([-1.0, 1e3], x.dtype))

    estimate = _values(fn, MATRIX, throw=False)
    failed = estimate.result != tx.RESULTS.successful
    assert failed.tolist() == [False, True]
    assert np.isnan(estimate.value).tolist() == [False, True]
    assert tx.RESULTS[tx.RESULTS.outside_domain] in str(estimate)
    with pytest.raises(RuntimeError, match="not finite at an eigenvalue"):
        _values(fn, MATRIX)


def test_entries_outside_the_domain_spare_the_gradients_of_others():
    def log(rate):
        return lambda x: jnp.log1p(-jnp.asarray(rate, x.dtype) * x)

    def slope(matrix, rate, pick):
        def value(matrix):
            estimate = _values(log(rate), matrix, throw=False)
            return pick(estimate.value)

        return jax.grad(value)(matrix)

    unit = MATRIX / jnp.linalg.norm(MATRIX, 2)
    actual = jax.jit(lambda x: slope(x, [0.2, 1.5], lambda v: v[0]))(unit)
    expected = jax.jit(lambda x: slope(x, 0.2, lambda v: v))(unit)
    np.testing.assert_allclose(actual, expected, rtol=RTOL, atol=RTOL)
    tangent = jax.jvp(
        lambda x: _values(log([0.2, 1.5]), x, throw=False).value, *[[unit]] * 2
    )
    assert jnp.isnan(tangent[1][1])
    assert not jnp.isnan(tangent[1][0])


def test_empty_results_are_refused():
    with pytest.raises(ValueError, match="or an empty one"):
        _values(lambda x: x * jnp.zeros(0, x.dtype), MATRIX)
