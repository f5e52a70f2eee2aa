"""Divergences and Laplacians: against dense Jacobians and Hessians, in what surrounds them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import is_rounding

import traceax as tx

N = 6
X = jnp.linspace(-1.0, 1.0, N)


def network(out="scalar"):
    return eqx.nn.MLP(N, out, 8, 2, activation=jnp.tanh, key=jr.key(0))


def dense_divergence(fn, x):
    return jnp.trace(jax.jacfwd(fn)(x))


def z_score(samples, truth):
    samples = np.asarray(samples).reshape(len(samples), -1)
    off = samples.mean(0) - np.ravel(truth)
    return np.max(np.abs(off) / (samples.std(0) / np.sqrt(len(samples)) + 1e-6))


def over_keys(function, number=2000):
    return jax.jit(jax.vmap(function))(jr.split(jr.key(1), number))


@pytest.mark.parametrize("k", [N, N + 3])
def test_exact(k):
    field, scalar = network(N), network()
    value, estimate = tx.divergence(jr.key(0), field, X, k)
    np.testing.assert_allclose(value, field(X), rtol=1e-6)
    np.testing.assert_allclose(estimate.value, dense_divergence(field, X), rtol=1e-5)
    assert is_rounding(estimate)
    value, gradient, estimate = tx.laplacian(jr.key(0), scalar, X, k)
    np.testing.assert_allclose(value, scalar(X), rtol=1e-6)
    np.testing.assert_allclose(gradient, jax.grad(scalar)(X), rtol=1e-5)
    truth = jnp.trace(jax.hessian(scalar)(X))
    np.testing.assert_allclose(estimate.value, truth, rtol=1e-4, atol=1e-6)
    assert is_rounding(estimate)


@pytest.mark.x64
@pytest.mark.parametrize("k", [1, 4])
def test_unbiased_with_gradients(k):
    field, scalar = network(N), network()

    def one(key):
        def divergence(scale, x):
            return tx.divergence(key, lambda y: field(scale * y), x, k)[1].value

        def laplacian(scale, x):
            return tx.laplacian(key, lambda y: scalar(scale * y), x, k)[2].value

        found = []
        for value in (divergence, laplacian):
            reverse = jax.grad(value, (0, 1))(1.0, X)
            forward = jax.jacfwd(value)(1.0, X)
            second = jax.hessian(value)(1.0, X)
            found.append((value(1.0, X), *reverse, forward, second))
        return found

    found = over_keys(one)

    def truth_of(trace):
        return (
            trace(1.0, X),
            *jax.grad(trace, (0, 1))(1.0, X),
            jax.hessian(trace)(1.0, X),
        )

    def trace(scale, x):
        return dense_divergence(lambda y: field(scale * y), x)

    def hessian_trace(scale, x):
        return dense_divergence(jax.grad(lambda y: scalar(scale * y)), x)

    for (value, slope, by_x, forward, second), of in zip(
        found, (trace, hessian_trace), strict=True
    ):
        truth, truth_slope, truth_by_x, truth_second = truth_of(of)
        assert z_score(value, truth) < 4.5
        assert z_score(slope, truth_slope) < 4.5
        assert z_score(by_x, truth_by_x) < 4.5
        assert z_score(second, truth_second) < 4.5
        np.testing.assert_allclose(forward, slope, rtol=1e-3, atol=1e-4)


def test_what_surrounds_them():
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


PRIMALS = {
    "float": 2.0,
    "NumPy scalar": np.float32(2),
    "NumPy array": np.asarray(2, np.float32),
}


@pytest.mark.x64
@pytest.mark.parametrize("name", PRIMALS)
def test_numbers_as_primals(name):
    c = PRIMALS[name]
    A = jnp.asarray(np.random.default_rng(0).normal(size=(20, 20)), jnp.float32)

    def value(c):
        operator = lx.MatrixLinearOperator(A * jnp.asarray(c, jnp.float32) ** 2)
        return tx.trace(jr.key(0), operator, 3, throw=False).value

    one = np.asarray(value(jnp.float32(1)))
    for slope in (jax.jvp(value, (c,), (c / 2,))[1], jax.jacfwd(value)(c)):
        np.testing.assert_allclose(slope, 4 * one, rtol=2e-4)
    np.testing.assert_allclose(jax.hessian(value)(c), 2 * one, rtol=2e-4)
