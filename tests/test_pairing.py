"""The derivative of estimates whose number of probes is known at run time only."""

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
        found, expected = (fn(f)(theta, tangent) for f in (jax.jit(ours), reference))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(x, y, rtol=1e-9)


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
    Omega = jnp.where(active[None, :], jr.normal(key, (N, MOST)), 0)
    Q, R = orthonormalise(Omega[:, :count])

    def left_out(Omega, Q, R, active=None):
        squares = jnp.sum(Omega**2, axis=0)
        of = inner(Q, Omega), squares, R, N
        return leave_one_out(*of, resphere=resphere, active=active)

    V, Z = stand_in(Omega[:, :count], Q, left_out(Omega[:, :count], Q, R))
    Q, R = jnp.pad(Q, ((0, 0), (0, 5))), jnp.pad(R, ((0, 5), (0, 5)))
    loo = left_out(Omega, Q, R, active)
    counted = CountedStandIn(Omega, Q, loo, jnp.asarray(count), 4)
    for total in (counted.sum, lambda fn: counted.loop(fn, jnp.zeros((N, N)))):
        assert_close(total(lambda V, Z: V @ Z.T), V @ Z.T, rtol=1e-12)
