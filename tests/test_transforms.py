"""Every transform gives right values, for every estimator and kind of operator."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    ESTIMATORS,
    OPERATORS,
    assert_close,
    parameters,
)
from problems import PSD

import traceax as tx
from traceax._operators.space import apply_block

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = pytest.mark.x64

K = 6
PYTREE = "jacobian over a PyTree"
# Transforms act on the primitive as a whole, whatever its dtype. So we combine every
# estimator with one kind of operator, and the kinds with one estimator.
CROSS_SECTION = pytest.mark.parametrize(
    ("estimator", "operator"),
    [
        *(("hutchinson", "composed sum"), ("hutch++", "matrix")),
        *(("xtrace", PYTREE), ("xnystrace", "matrix")),
    ],
)


def _value(estimator, operator, k=K):
    def value(parameters, key):
        op = OPERATORS[operator](parameters)
        return tx.trace(key, op, k, ESTIMATORS[estimator], throw=False).value

    return value


def _direction(p, seed=9):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), p)


def _dot(x, y):
    return sum(
        jnp.sum(a * b)
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    )


def _assert_trees_close(x, y, rtol=None):
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(y))
    tolerance = 1e-9 * scale
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert_close(a, b, rtol=rtol, atol=tolerance)


@pytest.mark.parametrize(
    ("estimator", "operator"), [("hutch++", PYTREE), ("xnystrace", "matrix")]
)
def test_vmap_agrees_with_single_calls(key, estimator, operator):
    value = _value(estimator, operator)
    keys = jr.split(key, 3)
    batch = jax.tree.map(lambda x: np.stack([x, 1.1 * x]), parameters())
    first = jax.tree.map(lambda x: x[0], batch)

    single = jax.jit(jax.value_and_grad(value))
    grid = [
        [single(jax.tree.map(lambda x, i=i: x[i], batch), k) for k in keys]
        for i in range(2)
    ]
    values = np.asarray([[value for value, _ in row] for row in grid])
    stacked = jax.tree.map(lambda *x: np.stack(x), *(g for _, g in grid[0]))

    @jax.jit
    def batched(batch, keys):
        over_keys = jax.vmap(value, (None, 0))
        nested = jax.vmap(over_keys, (0, None))(batch, keys)
        pairs = jax.vmap(value)(batch, keys[:2])
        total = jax.grad(lambda p: jnp.sum(over_keys(p, keys)))(first)
        gradients = jax.vmap(jax.grad(value), (None, 0))(first, keys)
        return nested, pairs, gradients, total

    nested, pairs, gradients, total = batched(batch, keys)
    assert_close(nested, values)
    assert_close(pairs, np.diagonal(values))
    _assert_trees_close(gradients, stacked)
    _assert_trees_close(total, jax.tree.map(lambda x: x.sum(0), stacked))


@CROSS_SECTION
def test_the_derivative_pairs_the_frozen_blocks(key, estimator, operator):
    # The rule is d value = <Z, dA V>, the derivative of <Z, A V> with this draw's
    # blocks.
    value, p = _value(estimator, operator), parameters()
    est = ESTIMATORS[estimator]
    direction = _direction(p)

    @jax.jit
    def derivatives(p, t):
        _, _, _, (V, Z) = est.compute(est.init(key, OPERATORS[operator](p)), K)

        def on_line(f):
            return lambda t: f(jax.tree.map(lambda x, d: x + t * d, p, direction))

        def frozen(p):
            return jnp.sum(Z * apply_block(OPERATORS[operator](p), V))

        expected = jax.grad(frozen)(p), jax.grad(jax.grad(on_line(frozen)))(t)
        line = on_line(lambda p: value(p, key))
        gradient = jax.grad(value)(p, key)
        primal, tangent = jax.jvp(lambda p: value(p, key), (p,), (direction,))
        seconds = [jax.hessian(line)(t)]
        if estimator == "xnystrace":
            seconds += [d(d(line))(t) for d in (jax.jacfwd, jax.jacrev)]
        return expected, gradient, primal, tangent, seconds

    (expected, second), gradient, primal, tangent, seconds = derivatives(p, 0.0)
    _assert_trees_close(gradient, expected)
    rtol = 1e-7
    assert_close(tangent, _dot(expected, direction), rtol=rtol)
    for actual in seconds:
        assert_close(actual, second, rtol=rtol)
    # Eager calls go through the same rules, so we compare them.
    if operator == PYTREE:
        assert_close(primal, value(p, key))
        _assert_trees_close(jax.grad(value)(p, key), expected)


def test_control_flow_and_checkpoint(key):
    value, p = _value("xtrace", "function"), parameters()

    def branched(p, key):
        return jax.lax.cond(p["d"][0] > 0, value, lambda p, _: jnp.sum(p["d"]), p, key)

    def scanned(p):
        def body(carry, key):
            return carry + jax.checkpoint(branched)(p, key), None

        return jax.lax.scan(body, 0.0, key[None])[0]

    def looped(p):
        start = (0, 0.0)
        return jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, value(p, key)), start
        )[1]

    @jax.jit
    def run(p):
        expected = jax.value_and_grad(value)(p, key)
        return jax.value_and_grad(scanned)(p), looped(p), expected

    actual, loop_value, expected = run(p)
    _assert_trees_close(actual, expected)
    assert_close(loop_value, expected[0])


def test_equinox_transforms(key):
    operator, keys = OPERATORS["pytree"](parameters()), jr.split(key, 2)

    def value(operator, key):
        return tx.trace(key, operator, K, tx.HutchinsonEstimator()).value

    @eqx.filter_jit
    def transformed(operator, keys):
        value_and_gradient = eqx.filter_value_and_grad(value)(operator, keys[0])
        return value_and_gradient, eqx.filter_vmap(value, in_axes=(None, 0))(
            operator, keys
        )

    (jitted, gradient), batched = transformed(operator, keys)
    plain = [value(operator, key) for key in keys]
    assert_close(jitted, plain[0])
    assert_close(batched, plain)
    inexact = eqx.filter(operator, eqx.is_inexact_array)
    shapes = [jax.eval_shape(lambda x: x, x) for x in (gradient, inexact)]
    assert eqx.tree_equal(*shapes)
    assert eqx.filter_eval_shape(value, operator, key) == jax.eval_shape(
        lambda: plain[0]
    )


def test_export():
    p, key = parameters(), jr.PRNGKey(0)

    def total(p, key):
        names = ("xtrace", PYTREE), ("xnystrace", "matrix")
        return sum(_value(*pair)(p, key) for pair in names)

    fn = jax.jit(jax.value_and_grad(total))
    again = jax.export.deserialize(jax.export.export(fn)(p, key).serialize())
    _assert_trees_close(again.call(p, key), fn(p, key))


def test_the_whole_estimate_passes_through_jit(key):
    @jax.jit
    def run(p, key):
        return tx.trace(key, OPERATORS[PYTREE](p), K, ESTIMATORS["xtrace"])

    estimate = run(parameters(), key)
    assert estimate.result == tx.RESULTS.successful
    low, high = estimate.confidence_interval()
    assert low < estimate.value < high
    alone = tx.trace(key, estimate.state.operator, K, ESTIMATORS["xtrace"])
    assert_close(alone.value, estimate.value)


def test_standard_errors_are_not_differentiated(key):
    def error(a):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(key, operator, K, tx.XTraceEstimator()).standard_error

    a = parameters()["a"]
    assert not np.any(jax.jit(jax.grad(error))(a @ a.T))
