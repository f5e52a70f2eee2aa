"""Staging: traces, compilations, batching and host callbacks."""

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
    assert_close,
    printed_by,
)
from problems import PSD, as_operator, matrix

import traceax as tx

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = pytest.mark.x64


class _Counting(tx.TraceEstimator):
    """Wraps an estimator, and counts how often Python runs `compute`."""

    inner: tx.TraceEstimator
    name: str = eqx.field(static=True)

    def init(self, key, operator):
        return self.inner.init(key, operator)

    def compute(self, state, k):
        RUNS.append(self.name)
        return self.inner.compute(state, k)


RUNS = []


def _counting(estimator, name):
    # We return equal but distinct objects.
    return _Counting(type(estimator)(estimator.sampler), name)


def _calls(seed):
    a = jr.normal(jr.key(seed), (12, 12))
    a, keys = a @ a.T, jr.split(jr.key(seed), 2)

    def value(a, key, estimator):
        return tx.trace(key, lx.MatrixLinearOperator(a, PSD), 6, estimator).value

    def curvature(est):
        return jax.hessian(lambda t: value(t * a, keys[0], est))

    # We count traces, so we run only the first call and lower the others.
    return [
        lambda est: value(a, keys[0], est),
        lambda est: jax.jit(lambda a: value(a, keys[0], est)).lower(a),
        lambda est: eqx.filter_jit(value).lower(a, keys[0], est),
        lambda est: jax.jit(jax.grad(lambda a: value(a, keys[0], est))).lower(a),
        lambda est: jax.jit(jax.vmap(lambda key: value(a, key, est))).lower(keys),
        lambda est: jax.jit(curvature(est)).lower(1.0),
        lambda est: jax.eval_shape(lambda a: value(a, keys[0], est), a),
    ]


def test_all_kinds_of_calls_share_their_traces():
    RUNS.clear()
    for seed in (0, 1):
        for call in _calls(seed):
            call(_counting(tx.XNysTraceEstimator(), "shared"))
    assert len(RUNS) == 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("factor", lambda a: lx.MatrixLinearOperator(a) * a[0, 0]),
        ("sum", lambda a: lx.DiagonalLinearOperator(a[0]) + lx.MatrixLinearOperator(a)),
        ("tagged", lambda a: lx.TaggedLinearOperator(lx.MatrixLinearOperator(a), PSD)),
    ],
)
def test_operators_of_arrays_share_their_traces(name, make):
    RUNS.clear()
    estimator = _counting(tx.HutchinsonEstimator(), name)
    for c in (0.5, 1.5, 2.5):
        operator = make(c * jnp.eye(12))
        estimate = tx.trace(jr.key(0), operator, 6, estimator)
        assert_close(estimate.value, jnp.trace(operator.as_matrix()))
    assert len(RUNS) == 1


@pytest.mark.parametrize(
    ("estimator", "number"), list(zip(FAMILIES, (1, 2, 2, 1), strict=True))
)
def test_keys_share_single_matrix_products(estimator, number):
    a = jnp.asarray(matrix("flat", 47), jnp.float32)

    def value(key, a):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(key, operator, 6, ESTIMATORS[estimator], throw=False).value

    lowered = jax.jit(jax.vmap(value, (0, None))).lower(jr.split(jr.key(0), 5), a)
    lines = [x for x in lowered.as_text().splitlines() if "stablehlo.dot_general" in x]
    products = [line for line in lines if "tensor<47x47xf32>" in line]
    assert len(products) == number, products
    assert not any("batching_dims" in line for line in products)


def test_no_host_callback_unless_throwing(key):
    def text(throw):
        def value(a):
            return tx.trace(key, lx.MatrixLinearOperator(a), 6, throw=throw).value

        return jax.jit(value).lower(jnp.eye(12)).as_text()

    assert "callback" not in text(False)
    assert "callback" in text(True)


def test_many_keys_at_once_finish():
    # We start another process, so that a hang is a failure: LAPACK calls batched by
    # vmap have blocked each other in XLA's CPU scheduler.
    code = f"""
import sys; sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import jax, jax.random as jr, helpers, problems, traceax as tx
operator = problems.as_operator(problems.matrix("flat", 100), psd=True)
for name in ("xtrace", "xnystrace"):
    run = jax.jit(jax.vmap(
        lambda key: tx.trace(key, operator, 30, helpers.ESTIMATORS[name]).value
    ))
    print(run(jr.split(jr.key(0), 1000)).mean())
"""
    means = [float(line) for line in printed_by(code).split()]
    assert len(means) == 2
    assert max(abs(mean / 200 - 1) for mean in means) < 0.01


@pytest.mark.wrong_types
def test_the_same_number_each_time(key):
    operator, estimator = as_operator(matrix("poly", 20)), ESTIMATORS["hutchinson"]
    first = tx.trace(key, operator, 8, estimator).value
    assert first == tx.trace(key, operator, 8, estimator).value
    assert_close(tx.trace(jr.PRNGKey(20), operator, 8, estimator).value, first)


#
# Derivatives
#

N = 20


def _matrices():
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, N, N)) / 4)


@pytest.mark.parametrize("chunk", [3, None])
def test_derivatives_under_vmap(key, chunk):
    # Every batch element has its own tolerance, and misses or meets it with its own
    # number of products.
    estimator = tx.HutchinsonEstimator(chunk_size=chunk) if chunk else None
    b, _ = _matrices()
    b = b @ b.T + jnp.eye(N)
    keys, rtols = jr.split(key, 3), jnp.asarray([0.5, 0.1, 1e-9])

    def element(key, rtol, scale, b):
        operator = lx.MatrixLinearOperator(scale * b)
        estimate = tx.trace(key, operator, 16, estimator, rtol=rtol, throw=False)
        return estimate.value, estimate.stats["num_matvecs"]

    def mean(scale, b):
        values, products = jax.vmap(element, (0, 0, 0, None))(keys, rtols, scale, b)
        return jnp.mean(values), products

    @jax.jit
    def derivatives(scale):
        root = jnp.sqrt(scale)
        slope = jax.grad(lambda root: mean(root**2, b)[0])
        second = jax.jvp(slope, (root,), (root,))[1]
        return jax.value_and_grad(mean, (0, 1), has_aux=True)(scale, b), second / root

    # Values are linear in the scale, because the probes don't depend on it.
    ((value, products), (gradient, b_gradient)), second = derivatives(
        jnp.asarray([1.0, 2.0, 3.0])
    )
    assert len(set(products.tolist())) > 1
    assert_close(gradient @ jnp.asarray([1.0, 2.0, 3.0]), value, rtol=1e-9)
    assert_close(jnp.sum(b_gradient * b), value, rtol=1e-9)
    assert_close(second, 2 * gradient, rtol=1e-9)


def test_batch_elements_that_exchange_numbers(key):
    b, _ = _matrices()
    scales, keys = jnp.asarray([1.0, 2.0, 3.0]), jr.split(key, 3)

    def total(scales, rtol):
        def element(scale, key):
            def product(vector):
                return jax.lax.psum(scale, "lanes") * (b @ vector)

            structure = jax.ShapeDtypeStruct((N,), b.dtype)
            operator = lx.FunctionLinearOperator(product, structure)
            signs = tx.HutchinsonEstimator()
            return tx.trace(key, operator, 12, signs, rtol=rtol, throw=False).value

        return jnp.sum(jax.vmap(element, axis_name="lanes")(scales, keys))

    @jax.jit
    def gradients(scales):
        return [jax.grad(total)(scales, rtol) for rtol in (1e-9, None)]

    assert_close(*gradients(scales))


def test_eager_derivatives_compile_once(key):
    compiled = []

    def record(event, _, **__):
        compiled.extend([event] if event.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(record)
    b, _ = _matrices()

    def trace(scale):
        operator = lx.MatrixLinearOperator(b * scale**2)
        return tx.trace(key, operator, 16, rtol=1e-9, throw=False).value

    derivative = jax.grad(trace)
    derivative(jnp.asarray(1.0))
    before = len(compiled)
    derivative(jnp.asarray(2.0))
    assert before > 0
    assert len(compiled) == before


@pytest.mark.parametrize(
    ("estimator", "rtol"),
    [
        (tx.HutchinsonEstimator(chunk_size=3), 1e-9),
        (tx.XTraceEstimator(), None),
    ],
    ids=["chunks to a tolerance", "blocks"],
)
def test_functions_with_reverse_mode_only(key, estimator, rtol):
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    b, c = _matrices()

    def value(b, x, sine):
        def product(v):
            return sine(x[0] * b) @ v + x @ v

        operator = lx.FunctionLinearOperator(product, jax.eval_shape(lambda: x))
        return tx.trace(key, operator, 14, estimator, rtol=rtol, throw=False).value

    @jax.jit
    def gradients(b, x):
        return [jax.grad(value)(b, x, fn) for fn in (sine, jnp.sin)]

    assert_close(*gradients(b, c[0]), rtol=1e-12)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda b: value(b, c[0], sine), (b,), (c,))
