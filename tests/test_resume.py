"""Estimates that go on from the products of earlier ones."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import PSD, as_operator, assert_close, counting, is_x64, matrix, printed_by

import traceax as tx

N = 100
ESTIMATORS = {
    "hutchinson": tx.HutchinsonEstimator(),
    "hutchinson-chunks": tx.HutchinsonEstimator(chunk_size=8),
    "hutchinson-orthogonal": tx.HutchinsonEstimator(tx.OrthogonalSampler()),
    "hutch++-orthogonal": tx.HutchPlusPlusEstimator(tx.OrthogonalSampler()),
    "hutch++": tx.HutchPlusPlusEstimator(),
    "xtrace": tx.XTraceEstimator(tx.SphereSampler()),
    "xtrace-plain": tx.XTraceEstimator(tx.RademacherSampler(), resphere=False),
    "xnystrace": tx.XNysTraceEstimator(),
    "xnystrace-plain": tx.XNysTraceEstimator(tx.RademacherSampler(), resphere=False),
}


@pytest.fixture(autouse=True, scope="module")
def _as_users_compile():
    """Without optimisations arithmetic depends on shapes more than it does for users."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def saved_and_loaded(state):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    empty = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, state)
    return eqx.tree_deserialise_leaves(file, empty)


def assert_same(one, other):
    for x, y in zip(
        (one.value, one.standard_error, one.stats),
        (other.value, other.standard_error, other.stats),
        strict=True,
    ):
        jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.parametrize(
    "name",
    ESTIMATORS if is_x64() else ["hutchinson", "hutch++", "xtrace", "xnystrace"],
)
def test_going_on_is_one_run(key, name):
    estimator = ESTIMATORS[name]
    operator = as_operator(matrix("exp", N), psd=True)
    state = estimator.init(key, operator)
    whole = estimator.estimate(state, 40)
    begun = estimator.estimate(state, 12)
    assert_same(estimator.estimate(begun.state, 28), whole)
    loaded = saved_and_loaded(begun.state)
    assert_same(estimator.estimate(loaded, 28), whole)
    if name in ("hutchinson-chunks", "xtrace"):
        further = estimator.estimate(estimator.estimate(begun.state, 11).state, 17)
        assert_same(further, whole)


@pytest.mark.x64
def test_short_probes_go_on_to_the_last_bit():
    # With the code generator that users have.
    code = """
import jax, jax.numpy as jnp, lineax as lx, numpy as np, traceax as tx
jax.config.update("jax_enable_x64", True)
a = jnp.asarray(np.random.default_rng(0).standard_normal(20))
matrix, larger = (
    jnp.asarray(np.random.default_rng(1).standard_normal((n, n))) for n in (20, 600)
)
for sampler, operator, first, more in [
    (tx.SphereSampler(), lx.MatrixLinearOperator(matrix), 8, 8),
    (tx.SphereSampler(), lx.MatrixLinearOperator(matrix), 6, 1),
    (tx.SphereSampler(), lx.MatrixLinearOperator(larger), 6, 1),
    (tx.SphereSampler(), lx.DiagonalLinearOperator(a), 2, 9),
]:
    estimator = tx.HutchinsonEstimator(sampler=sampler)
    state = estimator.init(jax.random.key(3), operator)
    whole = estimator.estimate(state, first + more)
    begun = estimator.estimate(state, first)
    on = estimator.estimate(begun.state, more)
    print(on.value == whole.value, on.standard_error == whole.standard_error)
"""
    assert printed_by(code).split() == ["True"] * 8


@pytest.mark.x64
@pytest.mark.parametrize("name", ["hutchinson", "xtrace"])
def test_going_on_with_a_large_matrix(key, name):
    # Sums along rows of a large matrix are taken in parts, that depend on the number of
    # columns. 34 MB.
    a = jr.normal(key, (2060, 2060))
    estimator, operator = ESTIMATORS[name], lx.MatrixLinearOperator(a)
    state = estimator.init(key, operator)
    whole = estimator.estimate(state, 40)
    begun = estimator.estimate(state, 12)
    assert_same(estimator.estimate(begun.state, 28), whole)


@pytest.mark.x64
@pytest.mark.parametrize(
    "name", ["hutchinson-chunks", "hutch++", "xtrace", "xnystrace"]
)
def test_only_new_products_are_taken(name):
    operator, taken = counting(matrix("exp", N))
    estimator = ESTIMATORS[name]
    state = estimator.init(jr.key(0), operator)
    spent = 0
    for k in (3, 9, 1, 14):
        estimate = estimator.estimate(state, k, throw=False)
        number = taken(estimate)
        spent += number
        # What an odd budget left over may be taken later.
        assert spent <= 3 + 9 + 1 + 14
        assert number <= k + 1
        state = estimate.state
    assert spent >= 3 + 9 + 1 + 14 - 2


@pytest.mark.x64
@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "xtrace", "xnystrace"])
def test_derivatives_are_those_of_one_run(key, name):
    estimator = ESTIMATORS[name]
    a = jnp.asarray(matrix("poly", N))

    def value(scale, *budgets):
        operator = lx.MatrixLinearOperator(jnp.diag(scale) @ a @ jnp.diag(scale), PSD)
        state = estimator.init(key, operator)
        for k in budgets:
            estimate = estimator.estimate(state, k)
            state = estimate.state
        return estimate.value

    scale = jnp.linspace(0.5, 1.5, N)
    gradients = [jax.grad(value)(scale, 12), jax.grad(value)(scale, 5, 7)]
    assert_close(*gradients, rtol=1e-8)


def test_all_products_make_an_answer_exact(key):
    a = matrix("flat", 12)
    estimator = tx.XTraceEstimator()
    begun = estimator.estimate(estimator.init(key, as_operator(a)), 6)
    exact = estimator.estimate(begun.state, 12)
    assert_close(exact.value, np.trace(a), rtol=1e-5)
    assert exact.standard_error == 0
    # Less than n more do not: what is left is estimated.
    further = estimator.estimate(begun.state, 8)
    assert further.stats["num_matvecs"] <= 14
    assert_close(further.value, np.trace(a), rtol=0.2)


def test_states_of_own_estimators_begin_anew(key):
    class Plain(tx.TraceEstimator):
        def init(self, key, operator):
            return tx.init_state(key, operator)

        def compute(self, state, k):
            inner = tx.HutchinsonEstimator()
            value, error, stats, blocks = inner.compute(state, k)
            return value, error, {"num_matvecs": stats["num_matvecs"]}, blocks

    operator = as_operator(matrix("flat", 12))
    state = Plain().init(key, operator)
    again = Plain().estimate(Plain().estimate(state, 4).state, 4)
    assert_close(again.value, Plain().estimate(state, 4).value)


def test_states_are_of_one_configuration(key):
    operator = as_operator(matrix("exp", N))
    for one, other in (
        (tx.XTraceEstimator(), ESTIMATORS["xtrace-plain"]),
        (tx.HutchPlusPlusEstimator(), tx.HutchPlusPlusEstimator(tx.NormalSampler())),
        (ESTIMATORS["hutchinson-chunks"], tx.HutchinsonEstimator(chunk_size=5)),
    ):
        state = one.estimate(one.init(key, operator), 12).state
        with pytest.raises(TypeError, match=r"of which .* can't make use; begin anew"):
            other.estimate(state, 12)
