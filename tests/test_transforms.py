"""Every transform, for every estimator and kind of operator, with right values."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    ESTIMATORS,
    FAMILIES,
    OPERATORS,
    PSD,
    assert_close,
    exact_trace,
    parameters,
    rounding,
    z_score,
)

import traceax as tx
from traceax._operators.block import apply_block

# The same in both modes.
pytestmark = pytest.mark.x64

K = 6
PYTREE = "jacobian over a PyTree"
# A transform sees the primitive as a whole: every estimator with one kind of operator, and
# kinds of operators with one estimator. It sees no dtype.
CROSS_SECTION = pytest.mark.parametrize(
    ("estimator", "operator"),
    [*((e, "matrix") for e in FAMILIES), ("xtrace", PYTREE)],
)
FEW = pytest.mark.parametrize(
    ("estimator", "operator"),
    [("hutchinson", PYTREE), ("xtrace", "function"), ("xnystrace", "matrix")],
)
TWO = pytest.mark.parametrize(
    ("estimator", "operator"), [("hutch++", "matrix"), ("xtrace", PYTREE)]
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


@CROSS_SECTION
def test_jit_and_vmap_agree_with_single_calls(key, estimator, operator):
    value = _value(estimator, operator)
    p = parameters()
    keys = jr.split(key, 3)
    batch = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), p)
    single = jax.jit(value)
    grid = jnp.stack(
        [
            jnp.stack(
                [single(jax.tree.map(lambda x, i=i: x[i], batch), k) for k in keys]
            )
            for i in range(2)
        ]
    )
    assert_close(value(p, keys[0]), grid[0, 0])

    @jax.jit
    def batched(p, batch, keys):
        return (
            jax.vmap(value, (None, 0))(p, keys),
            jax.vmap(value, (0, None))(batch, keys[1]),
            jax.vmap(value)(batch, keys[:2]),
            jax.vmap(jax.vmap(value, (None, 0)), (0, None))(batch, keys),
        )

    over_keys, over_operators, over_both, nested = batched(p, batch, keys)
    assert_close(over_keys, grid[0])
    assert_close(over_operators, grid[:, 1])
    assert_close(over_both, jnp.diagonal(grid[:, :2]))
    assert_close(nested, grid)


@CROSS_SECTION
def test_the_derivative_pairs_the_frozen_blocks(key, estimator, operator):
    # d value = <Z, dA V>: the derivative of <Z, A V> with the blocks of this draw.
    value, p = _value(estimator, operator), parameters()
    est = ESTIMATORS[estimator]
    direction = _direction(p)
    t = jnp.zeros((), p["a"].dtype)

    def along(f):
        return lambda t: f(jax.tree.map(lambda x, d: x + t * d, p, direction))

    @jax.jit
    def expectations(p, t):
        _, _, _, (V, Z) = est.compute(est.init(key, OPERATORS[operator](p)), K)

        def frozen(p):
            return jnp.sum(Z * apply_block(OPERATORS[operator](p), V))

        return jax.grad(frozen)(p), jax.grad(jax.grad(along(frozen)))(t)

    @jax.jit
    def derivatives(p, t):
        line = along(lambda p: value(p, key))
        first = [d(value)(p, key) for d in (jax.grad, jax.jacfwd)]
        second = [jax.hessian(line)(t)]
        if estimator == "xnystrace":
            first.append(jax.jacrev(value)(p, key))
            second += [d(d(line))(t) for d in (jax.jacfwd, jax.jacrev)]
        return first, jax.jvp(lambda p: value(p, key), (p,), (direction,)), second

    expected, second_expected = expectations(p, t)
    first, (primal, tangent), second = derivatives(p, t)
    for got in first:
        _assert_trees_close(got, expected)
    rtol = 1e-7
    assert_close(tangent, _dot(expected, direction), rtol=rtol)
    for got in second:
        assert_close(got, second_expected, rtol=rtol)
    # Eager calls go through the same rules.
    assert_close(primal, value(p, key))
    _assert_trees_close(jax.grad(value)(p, key), expected)


@pytest.mark.parametrize(
    ("estimator", "operator"),
    [("hutchinson", PYTREE), ("xtrace", "composed sum"), ("xnystrace", "matrix")],
)
def test_gradients_match_those_of_the_exact_trace(estimator, operator):
    value, p = _value(estimator, operator), parameters()
    exact = jax.grad(lambda p: exact_trace(OPERATORS[operator](p)))(p)
    gradients = jax.jit(jax.vmap(jax.grad(value), (None, 0)))(
        p, jr.split(jr.key(4), 1500)
    )
    for samples, truth in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True
    ):
        scale = float(jnp.max(jnp.abs(truth)))
        if scale == 0:
            assert_close(samples, jnp.zeros_like(samples))
        else:
            assert z_score(samples, np.asarray(truth), 10 * rounding()) < 5


@TWO
def test_gradients_under_vmap_and_vmapped_gradients(key, estimator, operator):
    value, p = _value(estimator, operator), parameters()
    keys = jr.split(key, 3)
    single = [jax.grad(value)(p, k) for k in keys]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *single)
    _assert_trees_close(jax.vmap(jax.grad(value), (None, 0))(p, keys), stacked)
    total = jax.grad(lambda p: jnp.sum(jax.vmap(value, (None, 0))(p, keys)))
    expected = jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked)
    _assert_trees_close(jax.jit(total)(p), expected)


@FEW
def test_control_flow_and_checkpoint(key, estimator, operator):
    value, p = _value(estimator, operator), parameters()
    expected_value, expected = jax.value_and_grad(value)(p, key)

    checkpointed = jax.checkpoint(value)
    _assert_trees_close(jax.grad(checkpointed)(p, key), expected)

    def scanned(p):
        def body(carry, k):
            return carry + value(p, k), None

        return jax.lax.scan(body, jnp.zeros_like(expected_value), jnp.stack([key]))[0]

    _assert_trees_close(jax.jit(jax.grad(scanned))(p), expected)

    def looped(p):
        def body(carry):
            i, _ = carry
            return i + 1, value(p, key)

        start = (0, jnp.zeros_like(expected_value))
        return jax.lax.while_loop(lambda c: c[0] < 2, body, start)[1]

    assert_close(jax.jit(looped)(p), expected_value)

    def branched(p):
        return jax.lax.cond(
            p["d"][0] > 0, lambda p: value(p, key), lambda p: jnp.sum(p["d"]), p
        )

    _assert_trees_close(jax.jit(jax.grad(branched))(p), expected)


@pytest.mark.parametrize(
    ("estimator", "operator"), [("xnystrace", "matrix"), ("xtrace", "pytree")]
)
def test_equinox_transforms(key, estimator, operator):
    op = OPERATORS[operator](parameters())
    est = ESTIMATORS[estimator]

    def value(op, key):
        return tx.trace(key, op, K, est).value

    plain = value(op, key)
    assert plain.shape == ()
    jitted = eqx.filter_jit(value)(op, key)
    assert jitted.shape == ()
    assert_close(jitted, plain)
    gradient = eqx.filter_jit(eqx.filter_grad(value))(op, key)
    inexact = eqx.filter(op, eqx.is_inexact_array)
    assert jax.tree.structure(gradient) == jax.tree.structure(inexact)
    for g, x in zip(jax.tree.leaves(gradient), jax.tree.leaves(inexact), strict=True):
        assert g.shape == x.shape
        assert g.dtype == x.dtype
    keys = jr.split(key, 2)
    batched = eqx.filter_vmap(value, in_axes=(None, 0))(op, keys)
    assert_close(batched, jnp.stack([value(op, k) for k in keys]))
    struct = eqx.filter_eval_shape(value, op, key)
    assert (struct.shape, struct.dtype) == (plain.shape, plain.dtype)


@TWO
def test_export(estimator, operator):
    value, p = _value(estimator, operator), parameters()
    key = jr.PRNGKey(0)
    for fn in (value, jax.grad(value)):
        exported = jax.export.export(jax.jit(fn))(p, key)
        again = jax.export.deserialize(exported.serialize())
        _assert_trees_close(again.call(p, key), jax.jit(fn)(p, key))


@pytest.mark.parametrize("estimator", ["hutchinson", "xnystrace"])
def test_the_whole_estimate_passes_through_jit(key, estimator):
    est = ESTIMATORS[estimator]

    @jax.jit
    def run(p, key):
        return tx.trace(key, OPERATORS["jacobian over a PyTree"](p), K, est)

    estimate = run(parameters(), key)
    assert estimate.result == tx.RESULTS.successful
    low, high = estimate.confidence_interval()
    assert low < estimate.value < high
    state = estimate.state
    again = est.estimate(est.init(state.key, state.operator), K)
    assert_close(again.value, estimate.value)


def test_gradient_with_respect_to_a_scalar_factor(key):
    p = parameters()
    operator = OPERATORS["matrix"](p)

    def value(scale):
        scaled = lx.TaggedLinearOperator(operator * scale, PSD)
        return tx.trace(key, scaled, K, tx.XTraceEstimator()).value

    scale = jnp.asarray(2.0, p["a"].dtype)
    assert_close(jax.grad(value)(scale), value(scale) / 2, rtol=1e-4)


def test_standard_error_and_statistics_are_not_differentiated(key):
    def error(a):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(key, operator, K, tx.XTraceEstimator()).standard_error

    a = parameters()["a"]
    assert_close(jax.grad(error)(a @ a.T), jnp.zeros_like(a))
