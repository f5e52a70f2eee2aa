"""Divergences and Laplacians, compared with dense derivatives and under transforms."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import is_rounding, z_score

import traceax as tx

N = 6
X = jnp.linspace(-1.0, 1.0, N)


def network(out="scalar"):
    return eqx.nn.MLP(N, out, 8, 2, activation=jnp.tanh, key=jr.key(0))


def dense_divergence(fn, x):
    return jnp.trace(jax.jacfwd(fn)(x))


def test_exact():
    field, scalar = network(N), network()

    @jax.jit
    def estimates(x):
        return tx.divergence(jr.key(0), field, x, N), tx.laplacian(
            jr.key(0), scalar, x, N + 3
        )

    (value, divergence), (scalar_value, gradient, laplacian) = estimates(X)
    assert_near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    assert_near(value, field(X))
    assert_near(divergence.value, dense_divergence(field, X))
    assert_near(scalar_value, scalar(X))
    assert_near(gradient, jax.grad(scalar)(X))
    assert_near(laplacian.value, jnp.trace(jax.hessian(scalar)(X)))
    assert is_rounding(divergence)
    assert is_rounding(laplacian)


@pytest.mark.x64
@pytest.mark.parametrize("k", [1, 4])
def test_unbiased_with_gradients(k):
    field, scalar = network(N), network()

    def divergence(key):
        return lambda scale, x: (
            tx.divergence(key, lambda y: field(scale * y), x, k)[1].value
        )

    def laplacian(key):
        return lambda scale, x: (
            tx.laplacian(key, lambda y: scalar(scale * y), x, k)[2].value
        )

    def trace(scale, x):
        return dense_divergence(lambda y: field(scale * y), x)

    def hessian_trace(scale, x):
        return dense_divergence(jax.grad(lambda y: scalar(scale * y)), x)

    def derivatives(value):
        slopes, second = jax.grad(value, (0, 1)), jax.hessian(value)
        return value(1.0, X), *slopes(1.0, X), second(1.0, X)

    for estimate, exact in ((divergence, trace), (laplacian, hessian_trace)):
        keys = jr.split(jr.key(1), 2000)
        samples = jax.jit(
            jax.vmap(lambda key, value_at=estimate: derivatives(value_at(key)))
        )(keys)
        for actual, truth in zip(samples, derivatives(exact), strict=True):
            assert z_score(actual, truth, 1e-6) < 4.5


def test_transforms():
    field = network(N)
    keys, xs = jr.split(jr.key(0), 5), jr.normal(jr.key(1), (5, N))

    def value(x, key):
        return tx.divergence(key, field, x)[1].value

    one_by_one = jnp.stack([value(x, key) for x, key in zip(xs, keys, strict=True)])
    transforms = {
        "vmap": lambda: jax.vmap(value)(xs, keys),
        "jit": lambda: jax.jit(jax.vmap(value))(xs, keys),
        "scan": lambda: jax.lax.scan(lambda c, x: (c, value(*x)), 0, (xs, keys))[1],
        "checkpoint": lambda: jax.vmap(jax.checkpoint(value))(xs, keys),
    }
    for name, run in transforms.items():
        np.testing.assert_allclose(
            run(), one_by_one, rtol=1e-4, atol=1e-5, err_msg=name
        )
    assert "callback" not in str(jax.make_jaxpr(value)(xs[0], keys[0]))

    def euler(scale):
        def step(carry, key):
            x, density = carry
            velocity, change = tx.divergence(key, lambda y: scale * field(y), x)
            return (x + 0.1 * velocity, density - 0.1 * change.value), None

        return jax.lax.scan(step, (X, 0.0), keys)[0][1]

    step = 1e-2 if jnp.zeros(()).dtype == jnp.float32 else 1e-4
    slope = (euler(1 + step) - euler(1 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(euler)(1.0), slope, rtol=1e-3)


def test_pytrees_and_scalars():
    def field(x):
        return {"a": x["a"] * jnp.sum(x["b"]), "b": jnp.sin(x["b"])}

    x = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}
    value, estimate = tx.divergence(jr.key(0), field, x, 7)
    assert jax.tree.structure(value) == jax.tree.structure(x)
    np.testing.assert_allclose(estimate.value, 3 * 4 + 4 * np.cos(1.0), rtol=1e-6)
    value, estimate = tx.divergence(jr.key(0), jnp.sin, 0.3)
    np.testing.assert_allclose(estimate.value, np.cos(0.3), rtol=1e-6)
    assert is_rounding(estimate)
    value, gradient, estimate = tx.laplacian(jr.key(0), jnp.exp, 0.0, 1)
    assert (value, gradient, estimate.value) == (1, 1, 1)
    assert tx.laplacian(jr.key(0), jnp.exp, 0.0)[2].value == 1


def test_laplacians_with_colours():
    def energy(x):  # a chain has a tridiagonal Hessian
        return jnp.sum(jnp.sin(x)) + jnp.sum(x[1:] ** 2 * x[:-1] ** 2)

    colours = jnp.arange(N) % 3
    _, _, estimate = tx.laplacian(jr.key(0), energy, X, colours=colours)
    np.testing.assert_allclose(
        estimate.value, jnp.trace(jax.hessian(energy)(X)), rtol=1e-5
    )
    assert estimate.stats["num_matvecs"] == 3
    with pytest.raises(ValueError, match="laplacian: estimator must be left out"):
        tx.laplacian(jr.key(0), energy, X, 3, tx.XTraceEstimator(), colours=colours)


def test_complex_fields():
    A = jnp.asarray(np.arange(16.0).reshape(4, 4) * (1 + 2j))
    _, estimate = tx.divergence(jr.key(0), lambda x: A @ x, A[0], 4)
    np.testing.assert_allclose(estimate.value, jnp.trace(A))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="fn must return the structure"):
        tx.divergence(jr.key(0), lambda x: x[:2], X)
    with pytest.raises(TypeError, match="x must hold floating-point arrays, got"):
        tx.divergence(jr.key(0), lambda x: x, jnp.arange(3))
    with pytest.raises(TypeError, match="x must be real, got complex"):
        tx.laplacian(jr.key(0), lambda x: x[0].real, X.astype(complex), 2)
    with pytest.raises(TypeError, match=r"laplacian: fn must return a real scalar"):
        tx.laplacian(jr.key(0), lambda x: x, X, 2)
    with pytest.raises(ValueError, match=r"^traceax.divergence: k must be at least 1"):
        tx.divergence(jr.key(0), lambda x: x, X, 0)


@pytest.mark.x64
def test_numbers_as_primals():
    A = jnp.asarray(np.random.default_rng(0).normal(size=(20, 20)), jnp.float32)

    def value(c):
        operator = lx.MatrixLinearOperator(A * jnp.asarray(c, jnp.float32) ** 2)
        return tx.trace(jr.key(0), operator, 3, throw=False).value

    one = np.asarray(value(jnp.float32(1)))
    assert_near = functools.partial(np.testing.assert_allclose, rtol=2e-4)
    for c in (2.0, np.float32(2), np.asarray(2, np.float32)):
        assert_near(jax.jvp(value, (c,), (c / 2,))[1], 4 * one)
        assert_near(jax.jacfwd(value)(c), 4 * one)
    assert_near(jax.hessian(value)(2.0), 2 * one)
