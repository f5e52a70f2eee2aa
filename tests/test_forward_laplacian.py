"""Exact Laplacians through folx: against dense Hessians, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import is_rounding, is_x64

import traceax as tx

pytest.importorskip("folx")

N = 6
X = jnp.linspace(0.2, 0.9, N)
W, V = jr.normal(jr.key(1), (2, N, N))
KEY = jr.key(0)


def laplacian(fn, x=X, **options):
    size = sum(leaf.size for leaf in jax.tree.leaves(x))
    return tx.laplacian(KEY, fn, x, size, forward="folx", **options)


def network():
    return eqx.nn.MLP(N, "scalar", 8, 2, activation=jnp.tanh, key=KEY)


def definite(x):
    return jnp.outer(x, W @ x) / 4 + jnp.diag(1 + x**2)


FUNCTIONS = {
    "tanh": network(),
    "silu": lambda x: jnp.sum(jax.nn.silu(V @ jax.nn.softplus(W @ x)) ** 2),
    "silu under vmap": lambda x: jnp.sum(jax.vmap(jax.nn.silu)(jnp.outer(x, x)) ** 2),
    "gelu, relu": lambda x: jnp.sum(jax.nn.gelu(V @ x) * jax.nn.relu(W @ x)),
    "softmax": lambda x: jnp.sum(jax.nn.softmax(V @ x) ** 2),
    "logsumexp": lambda x: jax.nn.logsumexp(V @ x),
    "product": lambda x: jnp.sum((W @ x) * (V @ x) * x) + jnp.prod(x),
    "quotient": lambda x: jnp.sum((W @ x) / (1 + (V @ x) ** 2)),
    "power": lambda x: jnp.sum((x * x[0]) ** (V @ x)) + jnp.sum(x**-3),
    "exp, log": lambda x: jnp.sum(jnp.exp(jnp.sin(V @ x)) * jnp.log(x)),
    "where": lambda x: jnp.sum(jnp.where(x > 0.5, (V @ x) ** 2, jnp.sin(W @ x))),
    "largest": lambda x: jnp.max((V @ x) ** 2) ** 2 + jnp.sum(jnp.abs(W @ x) ** 3),
    "dot": lambda x: jnp.sin(x) @ W @ x**2,
    "matrices": lambda x: jnp.sum((definite(x) @ definite(x).T) ** 2),
    "norm": lambda x: jnp.linalg.norm(V @ x),
    "sort": lambda x: jnp.sum(jnp.sort(V @ x) ** 3 * x),
    "indices": lambda x: jnp.sum(jnp.roll(x, 1)[2:] * x.at[1].set(x[0] ** 2)[:-2]),
    "slogdet": lambda x: jnp.linalg.slogdet(definite(x))[1],
    "solve": lambda x: x @ jnp.linalg.solve(definite(x), V @ x),
    "cholesky": lambda x: jnp.sum(jnp.linalg.cholesky(definite(x) @ definite(x).T)),
    "branch": lambda x: jax.lax.cond(x[0] < 1, lambda: (V @ x) @ x**2, lambda: x[0]),
    "gradient": lambda x: jnp.sum(jax.grad(lambda y: jnp.sum((V @ y) ** 3))(x) ** 2),
    "linear": lambda x: x[0] + x[2],
    "constant": lambda x: jnp.ones(()),
}


def test_functions():
    found = jax.jit(lambda: {name: laplacian(fn) for name, fn in FUNCTIONS.items()})()

    def dense(fn):
        gradient = jax.grad(fn)
        return fn(X), gradient(X), jnp.trace(jax.jacfwd(gradient)(X))

    truths = jax.jit(lambda: {name: dense(fn) for name, fn in FUNCTIONS.items()})()
    tolerance = {"rtol": 1e-9 if is_x64() else 3e-4, "atol": 1e-5}
    for name, (value, gradient, estimate) in found.items():
        truth = truths[name]
        np.testing.assert_allclose(value, truth[0], **tolerance, err_msg=name)
        np.testing.assert_allclose(gradient, truth[1], **tolerance, err_msg=name)
        np.testing.assert_allclose(estimate.value, truth[2], **tolerance, err_msg=name)
        assert abs(estimate.value - truth[2]) <= 4 * estimate.standard_error, name
        assert estimate.result == tx.RESULTS.successful
        assert estimate.stats["choice"] == tx.CHOICES.forward
    assert is_rounding(found["tanh"][2])


def test_loops():
    def fn(x):
        y, _ = jax.lax.scan(lambda y, w: (jnp.sin(w * y) * x, None), x, W[0])
        return jnp.sum(y**2)

    if jax.__version_info__ >= (0, 12):
        with pytest.raises(NotImplementedError, match="folx fails on fn"):
            laplacian(fn)
        return
    found, truth = laplacian(fn)[2].value, tx.laplacian(KEY, fn, X, N)[2].value
    np.testing.assert_allclose(found, truth, rtol=1e-9 if is_x64() else 3e-4)


def test_derivatives_under_vmap():
    params, static = eqx.partition(network(), eqx.is_inexact_array)
    xs = jr.uniform(jr.key(3), (5, N))

    def loss(params, xs, forward):
        def residual(x):
            u = eqx.combine(params, static)
            value, gradient, estimate = tx.laplacian(KEY, u, x, N, forward=forward)
            return estimate.value + jnp.sum(gradient**2) - value

        return jnp.mean(jax.vmap(residual)(xs) ** 2)

    slopes = [
        jax.jit(jax.grad(lambda *args, way=way: loss(*args, way), (0, 1)))(params, xs)
        for way in ("folx", None)
    ]
    rtol = 1e-9 if is_x64() else 1e-3
    for one, other in zip(*map(jax.tree.leaves, slopes), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-2 * rtol)


def test_error_bar_where_curvatures_cancel():
    # 1 / |x| is harmonic in three dimensions.
    points = 3 + jr.normal(KEY, (50, 3))
    fn = jax.jit(jax.vmap(lambda x: laplacian(lambda x: 1 / jnp.linalg.norm(x), x)[2]))
    estimate = fn(points)
    assert jnp.all(estimate.standard_error > 0)
    assert jnp.all(abs(estimate.value) < 4 * estimate.standard_error)
    assert jnp.all(estimate.standard_error < 1e3 * jnp.finfo(X.dtype).eps)


def test_error_bar_of_rank_one():
    # Half of all signs are in the null space of such a Hessian.
    def fn(key):
        return tx.laplacian(
            key, lambda x: jnp.sin(3 * (x[0] - x[1])), X, N, forward="folx"
        )[2]

    estimate = jax.jit(jax.vmap(fn))(jr.split(KEY, 64))
    truth = -18 * np.sin(3 * (np.float64(X[0]) - np.float64(X[1])))
    assert np.all(abs(estimate.value - truth) <= 4 * estimate.standard_error)
    assert np.all(estimate.standard_error > 0)


def test_pytrees_scalars_and_dtypes():
    def fn(x):
        return jnp.sum(x["a"] ** 3) * x["b"]["c"] + jnp.sum(x["b"]["d"] ** 2)

    x = {"a": jnp.arange(3.0), "b": {"d": jnp.ones((2, 2)), "c": jnp.asarray(2.0)}}
    value, gradient, estimate = laplacian(fn, x)
    np.testing.assert_allclose(value, fn(x), rtol=1e-6)
    jax.tree.map(np.testing.assert_allclose, gradient, jax.grad(fn)(x))
    np.testing.assert_allclose(estimate.value, 6 * 3 * 2 + 2 * 4, rtol=1e-6)
    value, gradient, estimate = laplacian(jnp.exp, jnp.asarray(0.0))
    assert (value, gradient, estimate.value) == (1, 1, 1)
    weights, x = W[0].astype(jnp.float32), X.astype(jnp.float32)
    parts = laplacian(lambda x: jnp.sum(jnp.tanh(weights * x)) / (weights @ x), x)
    assert {y.dtype for y in (*parts[:2], parts[2].value)} == {jnp.dtype("float32")}
    halves = laplacian(lambda x: jnp.sum(x**3), X.astype(jnp.bfloat16))[2]
    assert halves.value.dtype == jnp.float32
    np.testing.assert_allclose(halves.value, 6 * jnp.sum(X), rtol=2e-2)
    for dtype in (jnp.bfloat16, jnp.float16):
        halves = laplacian(lambda x: jnp.sum(jnp.sin(2 * x) * x), X.astype(dtype))[2]
        x = np.asarray(X.astype(dtype), np.float64)
        truth = np.sum(4 * np.cos(2 * x) - 4 * np.sin(2 * x) * x)
        error = abs(float(halves.value) - truth)
        assert 0 < error <= 4 * float(halves.standard_error)


def test_what_folx_misreads_is_refused():
    @jax.jit
    def solve(matrix, x):
        return jnp.sin(matrix @ x)

    def stacked(x):
        return jnp.sum(jax.lax.scan(lambda y, w: (w * y, y**2), x, W[0])[1] ** 2)

    def other_axes(x):
        matrices = V[:, :, None] * x[None, None, :] + V[:, :, None]
        return jnp.sum(jax.vmap(jnp.linalg.inv, in_axes=2)(matrices))

    def inside_of_loop(x):
        return jnp.sum(jax.lax.scan(lambda y, w: (solve(V, y), None), x, W)[0])

    with pytest.raises(ValueError, match="'solve', which isn't JAX's"):
        laplacian(lambda x: jnp.sum(solve(V, x)))
    with pytest.raises(ValueError, match="'solve', which isn't JAX's"):
        laplacian(inside_of_loop)
    with pytest.raises(ValueError, match="'inv', which isn't JAX's"):
        laplacian(other_axes)
    with pytest.raises(ValueError, match="loses the digits of determinants"):
        laplacian(lambda x: jnp.linalg.det(definite(x)))
    with pytest.raises(ValueError, match="misreads loops that stack"):
        laplacian(stacked)
    with pytest.raises(NotImplementedError, match=r"folx fails on fn; leave out"):
        laplacian(lambda x: jnp.sum(jax.lax.top_k(x, 2)[0]))
    # What doesn't depend on x is JAX's.
    estimate = laplacian(lambda x: jnp.sum(x**2) * jnp.sum(solve(V, X)))[2]
    np.testing.assert_allclose(estimate.value, 2 * N * jnp.sum(solve(V, X)), rtol=1e-5)


@pytest.mark.wrong_types
def test_wrong_arguments(monkeypatch):
    with pytest.raises(ValueError, match=r"forward= is exact, for k >= n = 6.*k = 5"):
        tx.laplacian(KEY, jnp.sum, X, 5, forward="folx")
    with pytest.raises(ValueError, match="without an estimator"):
        laplacian(jnp.sum, estimator=tx.HutchinsonEstimator())
    with pytest.raises(ValueError, match='forward must be "folx" or None'):
        tx.laplacian(KEY, jnp.sum, X, N, forward="jet")  # pyright: ignore
    failed = laplacian(lambda x: jnp.sum(jnp.log(x - x)))[2]
    assert failed.result == tx.RESULTS.nonfinite
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"folx must be installed.*pip install folx"):
        laplacian(jnp.sum)
