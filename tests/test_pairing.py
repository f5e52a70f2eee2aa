"""The derivative of estimates, of a number of probes known before or at run time only."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close

import traceax as tx
from traceax._leave_one_out import CountedStandIn, leave_one_out, stand_in
from traceax._orthogonal import inner, orthonormalise
from traceax._pairing import pair
from traceax._stream import CountedStream, ProbeStream

N, MOST = 20, 14
pytestmark = pytest.mark.x64


def _stream(key, count, chunk_size, dtype):
    sampler = tx.NormalSampler()
    stream = ProbeStream(key, sampler, N, MOST, chunk_size, np.dtype(dtype))
    return CountedStream(jnp.asarray(count, jnp.int32), stream)


def _matrix(theta, b, c):
    sine, growth = (x.astype(b.dtype) for x in (jnp.sin(theta[0]), jnp.exp(theta[1])))
    return sine * b + sine * growth * (c @ c)


def _given(dtype):
    rng = np.random.default_rng(0)
    b, c = rng.standard_normal((2, N, N)) / 4
    if np.issubdtype(dtype, np.complexfloating):
        b, c = b + 1j * c, c - 2j * b
    return jnp.asarray(b, dtype), jnp.asarray(c, dtype)


def _compare_all(ours, reference, theta, tangent):
    """Compares a function of parameters and a tangent, and its derivatives."""

    def squared_hessian(f):
        return lambda theta, tangent: jnp.sum(jax.hessian(f)(theta, tangent) ** 2)

    for fn in (
        lambda f: f,
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: jax.jacfwd(f, argnums=(0, 1)),
        lambda f: jax.jacfwd(jax.grad(f, argnums=(0, 1))),
        lambda f: jax.jacrev(jax.grad(f, argnums=(0, 1)), argnums=(0, 1)),
        lambda f: jax.jacrev(jax.jacfwd(f, argnums=1), argnums=(0, 1)),
        lambda f: jax.grad(squared_hessian(f)),
    ):
        found, expected = (jax.jit(fn(f))(theta, tangent) for f in (ours, reference))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(x, y, rtol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "count", "chunk_size"), [("float64", 9, 4), ("complex128", MOST, 5)]
)
def test_derivatives_of_every_order_and_mode(key, dtype, count, chunk_size):
    b, c = _given(dtype)
    blocks = _stream(key, count, chunk_size, dtype)
    V = np.asarray(blocks.stream.draw(0, count))
    theta, tangent = jnp.asarray([0.7, -0.3]), jnp.asarray([1.3, 0.4])

    def built(theta):
        # A leaf without a derivative beside one with.
        scale = lx.DiagonalLinearOperator(jnp.full(N, 2.0, dtype))
        return lx.MatrixLinearOperator(_matrix(theta, b, c)) @ scale

    def ours(theta, tangent):
        paired = pair(*eqx.filter_jvp(built, (theta,), (tangent,)), blocks)
        return jnp.real(paired) + 2 * jnp.imag(paired)

    def reference(theta, tangent):
        _, t = jax.jvp(lambda theta: _matrix(theta, b, c), (theta,), (tangent,))
        paired = jnp.sum(V.conj() * (t @ (2 * V))) / count
        return jnp.real(paired) + 2 * jnp.imag(paired)

    _compare_all(ours, reference, theta, tangent)


@pytest.mark.parametrize("p", [3, 13])
def test_large_blocks_are_taken_in_chunks(monkeypatch, key, p):
    # As if 5 columns of an operator and its derivative were large.
    monkeypatch.setattr("traceax._operator._CACHED", 5 * 2 * N)
    b, c = _given(np.float64)
    V, Z = jax.random.normal(key, (2, N, p), jnp.float64)
    theta, tangent = jnp.asarray([0.7, -0.3]), jnp.asarray([1.3, 0.4])

    def product(theta, vector):
        return _matrix(theta, b, c) @ vector

    def built(theta):
        partial = jax.tree_util.Partial(product, theta)
        return lx.FunctionLinearOperator(partial, jax.ShapeDtypeStruct((N,), V.dtype))

    def ours(theta, tangent):
        return pair(*eqx.filter_jvp(built, (theta,), (tangent,)), (V, Z))

    def reference(theta, tangent):
        _, t = jax.jvp(lambda theta: _matrix(theta, b, c), (theta,), (tangent,))
        return jnp.sum(Z * (t @ V))

    text = jax.jit(jax.grad(ours, argnums=1)).lower(theta, tangent).as_text()
    assert ("<5x20xf64>" in text) == (p > 5)
    _compare_all(ours, reference, theta, tangent)
    lanes = [jnp.stack([x, 2 * x, -x]) for x in (theta, tangent)]
    for fn in (lambda f: f, lambda f: jax.grad(f, argnums=(0, 1))):
        found, expected = (jax.vmap(fn(f))(*lanes) for f in (ours, reference))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(x, y, rtol=1e-9)


def test_the_derivative_of_a_matrix_is_written_once(monkeypatch, key):
    monkeypatch.setattr("traceax._operator._CACHED", 5 * 2 * N)
    b, _ = _given(np.float64)
    V, Z = jax.random.normal(key, (2, N, 13), jnp.float64)

    def ours(t):
        return pair(lx.MatrixLinearOperator(b), lx.MatrixLinearOperator(t), (V, Z))

    assert_close(jax.grad(ours)(b), Z @ V.T, rtol=1e-12)
    assert "<5x20xf64>" not in jax.jit(jax.grad(ours)).lower(b).as_text()


@pytest.mark.parametrize("chunk_size", [4, MOST])
def test_lanes_have_counts_of_their_own(key, chunk_size):
    b, c = _given("float64")
    counts = jnp.asarray([2, 14, 7])

    def gradient(count, scale):
        operator = lx.MatrixLinearOperator(scale * b)
        zeros = lx.MatrixLinearOperator(c)
        blocks = _stream(key, count, chunk_size, "float64")
        return jax.grad(
            lambda t: pair(operator, eqx.tree_at(lambda o: o.matrix, zeros, t), blocks)
        )(c)

    found = jax.jit(jax.vmap(gradient, (0, None)))(counts, 1.0)
    for count, x in zip(counts, found, strict=True):
        V = _stream(key, count, 4, "float64").stream.draw(0, int(count))
        assert_close(x, V @ V.T / int(count), rtol=1e-12)


@pytest.mark.parametrize("resphere", [True, False])
def test_a_stand_in_of_counted_probes_is_that_of_so_many(key, resphere):
    count = 9
    active = jnp.arange(MOST) < count

    def left_out(Omega, Q, R, active=None):
        squares = jnp.sum(Omega**2, axis=0)
        of = inner(Q, Omega), squares, R, N
        return leave_one_out(*of, resphere=resphere, active=active)

    @jax.jit
    def sums(key):
        Omega = jnp.where(active[None, :], jr.normal(key, (N, MOST)), 0)
        Q, R = orthonormalise(Omega[:, :count])
        V, Z = stand_in(Omega[:, :count], Q, left_out(Omega[:, :count], Q, R))
        Q, R = jnp.pad(Q, ((0, 0), (0, 5))), jnp.pad(R, ((0, 5), (0, 5)))
        loo = left_out(Omega, Q, R, active)
        counted = CountedStandIn(Omega, Q, loo, jnp.asarray(count), 4)
        return counted.sum(lambda V, Z: V @ Z.T), V @ Z.T

    assert_close(*sums(key), rtol=1e-12)


def _mean_over_lanes(scale, b, keys, rtols, axes):
    """The mean trace of `scale b`, of lanes with keys or tolerances of their own."""

    def lane(key, rtol, scale):
        operator = lx.MatrixLinearOperator(scale * b)
        return tx.trace(key, operator, 16, rtol=rtol, throw=False).value

    values = jax.vmap(lane, axes)(keys, rtols, scale)
    return jnp.mean(values), values


@pytest.mark.parametrize("varied", ["keys", "operators", "all"])
def test_derivatives_through_lanes_that_share_an_operator(key, varied):
    b, _ = _given("float64")
    b = b @ b.T + jnp.eye(N)
    keys = jr.split(key, 3) if varied in ("keys", "all") else key
    rtols = jnp.asarray([0.5, 0.1, 1e-9]) if varied == "all" else 1e-9
    scale = jnp.asarray([1.0, 2.0, 3.0] if varied in ("operators", "all") else 1.0)
    axes = tuple(0 if jnp.ndim(x) else None for x in (keys, rtols, scale))

    def mean(scale):
        return _mean_over_lanes(scale, b, keys, rtols, axes)[0]

    # Linear in the scale, for probes that don't depend on it.
    gradient = jax.jit(jax.grad(mean))(scale)
    assert_close(jnp.sum(gradient * scale), mean(scale), rtol=1e-9)
    assert_close(jax.jvp(mean, (scale,), (scale,))[1], mean(scale), rtol=1e-9)
    squared = jax.hessian(lambda root: mean(root**2))(jnp.sqrt(scale))
    expected = 2 * gradient if scale.ndim == 0 else 2 * jnp.diag(gradient)
    assert_close(squared, expected, rtol=1e-9, atol=1e-12)
    rows = jax.jacrev(lambda x: _mean_over_lanes(x, b, keys, rtols, axes)[1])(scale)
    assert_close(jnp.mean(rows, axis=0), gradient, rtol=1e-9)


def test_lanes_that_exchange_numbers(key):
    b, _ = _given("float64")
    scales, keys = jnp.asarray([1.0, 2.0, 3.0]), jr.split(key, 3)
    signs = tx.HutchinsonEstimator()

    def total(scales, rtol):
        def lane(scale, key):
            def product(vector):
                return jax.lax.psum(scale, "lanes") * (b @ vector)

            operator = lx.FunctionLinearOperator(
                product, jax.ShapeDtypeStruct((N,), b.dtype)
            )
            return tx.trace(key, operator, 12, signs, rtol=rtol, throw=False).value

        return jnp.sum(jax.vmap(lane, axis_name="lanes")(scales, keys))

    expected = jax.grad(total)(scales, None)
    assert_close(jax.grad(total)(scales, 1e-9), expected)


def test_a_product_with_a_python_number(key):
    b, _ = _given("float64")

    def trace(matrix):
        operator = lx.MatrixLinearOperator(matrix)
        return tx.trace(key, operator, 16, rtol=1e-9, throw=False).value

    _, back = jax.vjp(trace, b)
    assert_close(back(2.0)[0], 2 * jax.grad(trace)(b))


def test_eager_derivatives_compile_once(key):
    compiled = []

    def record(event, _, **__):
        compiled.extend([event] if event.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(record)
    b, _ = _given("float64")

    def trace(scale):
        operator = lx.MatrixLinearOperator(b * scale**2)
        return tx.trace(key, operator, 16, rtol=1e-9, throw=False).value

    for derivative in (jax.grad(trace), jax.hessian(trace)):
        derivative(jnp.asarray(1.0))
        before = len(compiled)
        derivative(jnp.asarray(2.0))
        assert before > 0
        assert len(compiled) == before


@pytest.mark.parametrize(
    ("estimator", "rtol"),
    [
        (tx.HutchinsonEstimator(chunk_size=3), None),
        (tx.HutchinsonEstimator(), 1e-9),
        (tx.XTraceEstimator(), None),
    ],
    ids=["streamed", "to a tolerance", "blocks"],
)
def test_functions_with_a_reverse_mode_alone_under_gradients_of_lanes(
    key, estimator, rtol
):
    # JAX refuses `vmap` of the linear function that forward mode makes of such a rule.
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    b, c = _given("float64")

    def mean(b, sine):
        def lane(x):
            def product(v):
                return sine(x[0] * b) @ v + x @ v

            structure = jax.eval_shape(lambda: x)
            operator = lx.FunctionLinearOperator(product, structure)
            return tx.trace(key, operator, 14, estimator, rtol=rtol, throw=False).value

        return jnp.mean(jax.vmap(lane)(c[:3]))

    found, expected = (jax.grad(mean)(b, fn) for fn in (sine, jnp.sin))
    assert_close(found, expected, rtol=1e-12)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda b: mean(b, sine), (b,), (c,))
