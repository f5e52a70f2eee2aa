"""How calls are staged: names, compilations, batching, host callbacks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest
from helpers import (
    ESTIMATORS,
    FAMILIES,
    PSD,
    as_operator,
    assert_close,
    draw,
    matrix,
    printed_by,
)

import traceax as tx


class _Counting(tx.TraceEstimator):
    """Wraps an estimator, and counts the runs of `compute`'s Python."""

    inner: tx.TraceEstimator
    name: str = eqx.field(static=True)

    def init(self, key, operator):
        return self.inner.init(key, operator)

    def compute(self, state, k):
        RUNS.append(self.name)
        return self.inner.compute(state, k)


RUNS = []


def _counting(estimator, name):
    # Equal but distinct objects.
    fields = {f: getattr(ESTIMATORS[estimator], f) for f in ("sampler",)}
    return _Counting(type(ESTIMATORS[estimator])(**fields), name)


def _calls(seed):
    a = jr.normal(jr.key(seed), (12, 12))
    a = a @ a.T
    keys = jr.split(jr.key(seed), 2)

    def value(a, key, estimator):
        return tx.trace(key, lx.MatrixLinearOperator(a, PSD), 6, estimator).value

    return [
        lambda est: value(a, keys[0], est),
        lambda est: jax.jit(lambda a: value(a, keys[0], est))(a),
        lambda est: eqx.filter_jit(value)(a, keys[0], est),
        lambda est: jax.grad(lambda a: value(a, keys[0], est))(a),
        lambda est: jax.jit(jax.grad(lambda a: value(a, keys[0], est)))(a),
        lambda est: jax.vmap(lambda key: value(a, key, est))(keys),
        lambda est: jax.jit(jax.vmap(lambda key: value(a, key, est)))(keys),
        lambda est: jax.hessian(lambda t: value(t * a, keys[0], est))(jnp.ones(())),
        lambda est: jax.eval_shape(lambda a: value(a, keys[0], est), a),
    ]


@pytest.mark.x64
@pytest.mark.parametrize("estimator", ["hutchinson", "xnystrace"])
def test_all_kinds_of_calls_share_their_traces(estimator):
    RUNS.clear()
    for seed in (0, 1):
        for call in _calls(seed):
            call(_counting(estimator, f"shared-{estimator}"))
    assert len(RUNS) == 1


@pytest.mark.x64
@pytest.mark.parametrize("call", range(9))
def test_compute_runs_no_more_after_the_first_call(call):
    RUNS.clear()
    _calls(0)[call](_counting("xtrace", f"kind-{call}"))
    first = len(RUNS)
    assert first >= 1
    for seed in (1, 2):
        _calls(seed)[call](_counting("xtrace", f"kind-{call}"))
    assert len(RUNS) == first


def test_a_scalar_factor_is_data():
    RUNS.clear()
    operator = as_operator(matrix("flat", 12))
    for factor in (0.5, 1.5, 2.5):
        tx.trace(jr.key(0), operator * factor, 6, _counting("xtrace", "scalar"))
    assert len(RUNS) == 1


@pytest.mark.parametrize("estimator", FAMILIES)
def test_the_jaxpr_names_the_primitive(key, estimator):
    def value(a):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(key, operator, 6, ESTIMATORS[estimator], throw=False).value

    a = jnp.eye(12)
    jaxpr = jax.make_jaxpr(value)(a)
    names = [str(eqn.primitive) for eqn in jaxpr.jaxpr.eqns]
    assert names.count("estimate_trace") == 1
    names = [str(e.primitive) for e in jax.make_jaxpr(jax.grad(value))(a).jaxpr.eqns]
    assert names.count("estimate_trace") == 1


def _products_with(text, shape):
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return [line for line in lines if f"tensor<{shape}>" in line]


@pytest.mark.parametrize("estimator", FAMILIES)
def test_keys_share_single_matrix_products(estimator):
    n, k, batch = 47, 6, 5
    a = jnp.asarray(matrix("flat", n), jnp.float32)

    def value(key, a):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(key, operator, k, ESTIMATORS[estimator], throw=False).value

    keys = jr.split(jr.key(0), batch)
    lowered = jax.jit(jax.vmap(value, (0, None))).lower(keys, a)
    products = _products_with(lowered.as_text(), f"{n}x{n}xf32")
    expected = {"hutchinson": 1, "hutch++": 2, "xtrace": 2, "xnystrace": 1}[estimator]
    assert len(products) == expected, products
    assert not any("batching_dims" in line for line in products)


@pytest.mark.x64
@pytest.mark.parametrize("estimator", FAMILIES)
def test_no_host_callback_unless_throwing(key, estimator):
    a = jnp.asarray(matrix("flat", 12), jnp.float32)

    def text(throw):
        def value(a):
            operator = lx.MatrixLinearOperator(a, PSD)
            return tx.trace(key, operator, 6, ESTIMATORS[estimator], throw=throw).value

        return jax.jit(value).lower(a).as_text()

    assert "callback" not in text(False)
    assert "callback" in text(True)


@pytest.mark.x64
@pytest.mark.parametrize("estimator", FAMILIES)
def test_many_keys_at_once_finish(estimator):
    # In a process of its own, so that a hang is a failure. LAPACK calls batched by
    # vmap have been seen to block each other in XLA's CPU scheduler.
    code = f"""
import sys; sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import jax, jax.random as jr, helpers, traceax as tx
operator = helpers.as_operator(helpers.matrix("flat", 100), psd=True)
run = jax.jit(jax.vmap(
    lambda key: tx.trace(key, operator, 30, helpers.ESTIMATORS[{estimator!r}]).value
))
print(run(jr.split(jr.key(0), 1000)).mean())
"""
    assert abs(float(printed_by(code)) / 200 - 1) < 0.01


@pytest.mark.parametrize("estimator", FAMILIES)
def test_the_same_number_each_time_and_more_probes_extend(key, estimator):
    operator = as_operator(matrix("poly", 20), psd=True)
    est = ESTIMATORS[estimator]
    first = tx.trace(key, operator, 8, est).value
    assert first == tx.trace(key, operator, 8, est).value
    assert_close(tx.trace(jr.PRNGKey(20), operator, 8, est).value, first)
    for sampler in (tx.RademacherSampler(), tx.NormalSampler(), tx.SphereSampler()):
        few = draw(sampler, key, 37, 5, operator.matrix.dtype)
        more = draw(sampler, key, 37, 11, operator.matrix.dtype)
        assert jnp.array_equal(more[:, :5], few)
