"""How calls are staged: names, compilations, batching, host callbacks."""

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
    PSD,
    as_operator,
    assert_close,
    matrix,
    printed_by,
)

import traceax as tx
from traceax._estimators.hutchinson import Probes
from traceax._functional import TRACE
from traceax._operators.block import Space
from traceax._primitive import Blocks

# The same in both modes.
pytestmark = pytest.mark.x64


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

    def along(est):
        return jax.hessian(lambda t: value(t * a, keys[0], est))

    # What is counted is traced; all but one are not run.
    return [
        lambda est: value(a, keys[0], est),
        lambda est: jax.jit(lambda a: value(a, keys[0], est)).lower(a),
        lambda est: eqx.filter_jit(value).lower(a, keys[0], est),
        lambda est: jax.jit(jax.grad(lambda a: value(a, keys[0], est))).lower(a),
        lambda est: jax.jit(jax.vmap(lambda key: value(a, key, est))).lower(keys),
        lambda est: jax.jit(along(est)).lower(1.0),
        lambda est: jax.eval_shape(lambda a: value(a, keys[0], est), a),
    ]


def test_all_kinds_of_calls_share_their_traces():
    RUNS.clear()
    for seed in (0, 1):
        for call in _calls(seed):
            call(_counting("xnystrace", "shared"))
    assert len(RUNS) == 1


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

    # Once, also where a derivative is taken.
    for fn in (value, jax.grad(value)):
        assert str(jax.make_jaxpr(fn)(jnp.eye(12))).count("estimate_trace[") == 1


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


def test_many_keys_at_once_finish():
    # In a process of its own, so that a hang is a failure. LAPACK calls batched by
    # vmap have been seen to block each other in XLA's CPU scheduler.
    code = f"""
import sys; sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import jax, jax.random as jr, helpers, traceax as tx
operator = helpers.as_operator(helpers.matrix("flat", 100), psd=True)
for name in ("hutch++", "xtrace", "xnystrace"):
    run = jax.jit(jax.vmap(
        lambda key: tx.trace(key, operator, 30, helpers.ESTIMATORS[name]).value
    ))
    print(run(jr.split(jr.key(0), 1000)).mean())
"""
    means = [float(line) for line in printed_by(code).split()]
    assert len(means) == 3
    assert max(abs(mean / 200 - 1) for mean in means) < 0.01


@pytest.mark.wrong_types
@pytest.mark.parametrize("estimator", FAMILIES)
def test_the_same_number_each_time(key, estimator):
    operator = as_operator(matrix("poly", 20), psd=True)
    est = ESTIMATORS[estimator]
    first = tx.trace(key, operator, 8, est).value
    assert first == tx.trace(key, operator, 8, est).value
    assert_close(tx.trace(jr.PRNGKey(20), operator, 8, est).value, first)


#
# The pairing of blocks with the tangent of the operator
#

N, MOST = 20, 14


def _given(dtype="float64"):
    rng = np.random.default_rng(0)
    b, c = rng.standard_normal((2, N, N)) / 4
    if np.issubdtype(dtype, np.complexfloating):
        b, c = b + 1j * c, c - 2j * b
    return jnp.asarray(b, dtype), jnp.asarray(c, dtype)


def _probes(key, count, chunk, dtype):
    dtype = np.dtype(dtype)
    space = Space(N, dtype, dtype, None)
    return Probes(key, tx.NormalSampler(), count, MOST, chunk, space)


def _blocks(key, count, dtype):
    V, Z = jax.random.normal(key, (2, N, MOST), dtype)
    active = (jnp.arange(MOST, dtype=jnp.int32) < count)[None, :]
    V, Z = jnp.where(active, V, 0), jnp.where(active, Z, 0)
    return Blocks([(V[:, :5], Z[:, :5]), (V[:, 5:], Z[:, 5:])], count)


def _dense(stand_in):
    """`V Z^*`, of all chunks."""
    starts = range(0, stand_in.most, stand_in.size)
    pairs = [stand_in.chunk(start) for start in starts]
    return sum(V @ Z.conj().T for V, Z in pairs)


@pytest.mark.parametrize(
    ("dtype", "count", "chunk"),
    [("float64", 9, 4), ("complex128", MOST, 5)],
)
def test_derivatives_of_every_order_and_mode(key, dtype, count, chunk):
    b, c = _given(dtype)
    theta, tangent = jnp.asarray([0.7, -0.3]), jnp.asarray([1.3, 0.4])

    def matrix(theta):
        sine, growth = jnp.sin(theta[0]).astype(dtype), jnp.exp(theta[1]).astype(dtype)
        return sine * b + sine * growth * (c @ c)

    def built(theta):
        # A leaf without a derivative beside one with.
        scale = lx.DiagonalLinearOperator(jnp.full(N, 2.0, dtype))
        return lx.MatrixLinearOperator(matrix(theta)) @ scale

    counted = jnp.asarray(count, jnp.int32) if count < MOST else count
    stand_in = _probes(key, counted, chunk, dtype)
    dense = _dense(stand_in)

    def ours(theta, tangent):
        paired = stand_in.pair(*eqx.filter_jvp(built, (theta,), (tangent,)), TRACE)
        return jnp.real(paired) + 2 * jnp.imag(paired)

    def reference(theta, tangent):
        _, t = jax.jvp(matrix, (theta,), (tangent,))
        paired = 2 * jnp.sum(dense.T * t)
        return jnp.real(paired) + 2 * jnp.imag(paired)

    def squared_hessian(f):
        return lambda theta, tangent: jnp.sum(jax.hessian(f)(theta, tangent) ** 2)

    @jax.jit
    def derivatives(theta, tangent):
        return [
            [
                d(f)(theta, tangent)
                for d in (
                    lambda f: jax.jacfwd(jax.grad(f, argnums=(0, 1))),
                    lambda f: jax.jacrev(jax.jacfwd(f, argnums=1), argnums=(0, 1)),
                    lambda f: jax.value_and_grad(squared_hessian(f)),
                )
            ]
            for f in (ours, reference)
        ]

    found, expected = derivatives(theta, tangent)
    jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-9), found, expected)


@pytest.mark.parametrize("kind", ["probes", "blocks"])
def test_lanes_have_counts_of_their_own(key, monkeypatch, kind):
    # As if 8 columns were large.
    monkeypatch.setattr("traceax._operators.block._CACHED", 8 * N)
    b, c = _given()

    def stand_in(count):
        if kind == "probes":
            return _probes(key, count, 4, "float64")
        return _blocks(key, count, "float64")

    def gradient(count, t):
        primal = lx.MatrixLinearOperator(b)
        return jax.grad(
            lambda t: stand_in(count).pair(primal, lx.MatrixLinearOperator(t), TRACE)
        )(t)

    counts = jnp.asarray([2, 14, 7], jnp.int32)
    found = jax.jit(jax.vmap(gradient, (0, None)))(counts, c)
    for count, x in zip(counts, found, strict=True):
        assert_close(x, _dense(stand_in(count)).T, rtol=1e-12, atol=1e-12)


def _mean_over_lanes(scale, b, keys, rtols):
    """The mean trace of `scale b`, of lanes with keys or tolerances of their own."""

    def lane(key, rtol, scale):
        operator = lx.MatrixLinearOperator(scale * b)
        return tx.trace(key, operator, 16, rtol=rtol, throw=False).value

    values = jax.vmap(lane)(keys, rtols, scale)
    return jnp.mean(values), values


def test_derivatives_through_lanes(key):
    b, _ = _given()
    b = b @ b.T + jnp.eye(N)
    keys = jr.split(key, 3)
    rtols, scale = jnp.asarray([0.5, 0.1, 1e-9]), jnp.asarray([1.0, 2.0, 3.0])

    def mean(scale):
        return _mean_over_lanes(scale, b, keys, rtols)[0]

    @jax.jit
    def derivatives(scale):
        root = jnp.sqrt(scale)
        slope = jax.grad(lambda root: mean(root**2))
        along = jax.jvp(slope, (root,), (root,))[1]
        return jax.value_and_grad(mean)(scale), along / root

    # Linear in the scale, for probes that don't depend on it.
    (value, gradient), along = derivatives(scale)
    assert_close(jnp.sum(gradient * scale), value, rtol=1e-9)
    assert_close(along, 2 * gradient, rtol=1e-9)


def test_lanes_that_exchange_numbers(key):
    b, _ = _given()
    scales, keys = jnp.asarray([1.0, 2.0, 3.0]), jr.split(key, 3)

    def total(scales, rtol):
        def lane(scale, key):
            def product(vector):
                return jax.lax.psum(scale, "lanes") * (b @ vector)

            structure = jax.ShapeDtypeStruct((N,), b.dtype)
            operator = lx.FunctionLinearOperator(product, structure)
            signs = tx.HutchinsonEstimator()
            return tx.trace(key, operator, 12, signs, rtol=rtol, throw=False).value

        return jnp.sum(jax.vmap(lane, axis_name="lanes")(scales, keys))

    @jax.jit
    def both(scales):
        return [jax.grad(total)(scales, rtol) for rtol in (1e-9, None)]

    assert_close(*both(scales))


def test_eager_derivatives_compile_once(key):
    compiled = []

    def record(event, _, **__):
        compiled.extend([event] if event.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(record)
    b, _ = _given()

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
def test_functions_with_a_reverse_mode_alone(key, estimator, rtol):
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    b, c = _given()

    def value(b, x, sine):
        def product(v):
            return sine(x[0] * b) @ v + x @ v

        operator = lx.FunctionLinearOperator(product, jax.eval_shape(lambda: x))
        return tx.trace(key, operator, 14, estimator, rtol=rtol, throw=False).value

    @jax.jit
    def both(b, x):
        return [jax.grad(value)(b, x, fn) for fn in (sine, jnp.sin)]

    assert_close(*both(b, c[0]), rtol=1e-12)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda b: value(b, c[0], sine), (b,), (c,))
