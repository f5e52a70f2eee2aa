"""Hessians and Gauss-Newton matrices, compared with `jax.hessian`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from operator_catalogue import assert_near
from problems import float_dtype

import traceax as tx


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float_dtype())


def _data(*batch, seed=1):
    return {
        "x": _normal(*batch, 4, 2, seed=seed),
        "y": _normal(*batch, 4, seed=seed + 1),
    }


def _dense(fn, x, *args):
    """The Hessian with respect to the floating-point arrays of x."""
    arrays, fixed = eqx.partition(x, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)
    hessian = jax.hessian(lambda flat: fn(eqx.combine(unravel(flat), fixed), *args))
    return jax.jit(hessian)(flat)


def _trace(operator):
    # With one product per coordinate, the trace is exact.
    return tx.trace(jr.key(0), operator, operator.in_size()).value


class _Network(eqx.Module):
    """Leaves of every kind."""

    weight: jax.Array
    bias: np.ndarray
    activation: object
    order: jax.Array
    scale: float
    times: int
    name: str
    missing: None = None

    def __call__(self, x):
        hidden = self.weight @ x + self.bias
        return self.scale * self.times * jnp.sum(self.activation(hidden[self.order]))


def _network():
    return _Network(
        weight=_normal(3, 2),
        bias=np.asarray(_normal(3, seed=5)),
        activation=jnp.tanh,
        order=jnp.asarray([2, 0, 0]),
        scale=0.5,
        times=2,
        name="network",
    )


def _residuals(network, batch):
    return jax.vmap(network)(batch["x"]) - batch["y"]


def _network_loss(network, batch):
    return jnp.mean(_residuals(network, batch) ** 2)


@pytest.mark.x64
def test_leaves_that_are_not_arrays():
    network, data = _network(), _data()
    operator = tx.HessianLinearOperator(_network_loss, network, data)
    structure = operator.in_structure()
    assert structure.weight.shape == (3, 2)
    assert structure.bias.shape == (3,)
    rest = (structure.activation, structure.order, structure.scale, structure.name)
    assert rest == (None,) * 4

    def squares(residuals, _):
        return jnp.sum(residuals**2)

    arrays, fixed = eqx.partition(network, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)

    # We return an operator from a program: its fixed leaves must survive.
    make = eqx.filter_jit(lambda n, d: tx.HessianLinearOperator(_network_loss, n, d))
    returned = make(network, data)

    @eqx.filter_jit
    def matrices_and_traces(operator, returned, network, data):
        matrix = tx.GaussNewtonLinearOperator(_residuals, squares, network, data)
        exact = _dense(_network_loss, network, data)
        jacobian = jax.jacobian(
            lambda flat: _residuals(eqx.combine(unravel(flat), fixed), data)
        )(flat)
        actual = operator.as_matrix(), _trace(returned), _trace(matrix)
        return actual, (exact, jnp.trace(exact), 2 * jnp.sum(jacobian**2))

    jax.tree.map(assert_near, *matrices_and_traces(operator, returned, network, data))


def test_arguments_are_optional():
    x = _normal(4)

    def fn(x):
        return jnp.sum(jnp.sin(x) * x[::-1])

    # Here J is diag(2 x) with a row of ones below, and H is twice the identity.
    def model(x):
        return {"a": x**2, "b": jnp.sum(x)}

    def loss(out):
        return jnp.sum(out["a"] ** 2) + out["b"] ** 2

    @jax.jit
    def matrices(x):
        operators = (
            tx.HessianLinearOperator(fn, x),
            tx.GaussNewtonLinearOperator(model, loss, x),
        )
        return [operator.as_matrix() for operator in operators]

    expected = [_dense(fn, x), 8 * jnp.diag(x**2) + 2]
    jax.tree.map(assert_near, matrices(x), expected)


@pytest.mark.x64
def test_minibatches():
    network, batches = _network(), _data(3)

    @eqx.filter_jit
    def traces(network, batches):
        def make(batch):
            return tx.HessianLinearOperator(_network_loss, network, batch)

        each = eqx.filter_vmap(_trace)(eqx.filter_vmap(make)(batches))
        exact = jax.vmap(lambda b: jnp.trace(_dense(_network_loss, network, b)))
        return each, exact(batches), _trace(tx.MeanLinearOperator(make, batches))

    each, exact, trace_of_mean = traces(network, batches)
    assert_near(each, exact)
    assert_near(trace_of_mean, np.mean(exact))


@pytest.mark.x64
def test_implicit_hessians_of_nonlinear_solves():
    optx = pytest.importorskip("optimistix")

    def inner(y, x):
        return y + 0.3 * jnp.sin(y) - x**2

    def outer(x):
        solver = optx.Newton(rtol=1e-12, atol=1e-12)
        solution = optx.root_find(inner, solver, jnp.zeros_like(x), args=x)
        return jnp.sum(jnp.cos(solution.value) * x)

    def newton(x):
        # We differentiate every Newton step for comparison.
        y = jnp.zeros_like(x)
        for _ in range(6):
            y = y - inner(y, x) / (1 + 0.3 * jnp.cos(y))
        return jnp.sum(jnp.cos(y) * x)

    @jax.jit
    def traces(x):
        value = _trace(tx.HessianLinearOperator(outer, x))
        return value, jnp.trace(_dense(newton, x))

    assert_near(*traces(_normal(3)))


@pytest.mark.x64
def test_functions_with_custom_derivative_rules():
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, ct: (ct * 3 * x**2,))
    x = _normal(3)
    operator = tx.HessianLinearOperator(lambda x: jnp.sum(cube(x)), x)
    assert_near(operator.mv(jnp.ones_like(x)), 6 * x)


@pytest.mark.x64
def test_closures_over_traced_values():
    x = _normal(3)

    class Scaled(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return self.scale * jnp.sum(x**3)

    makers = (
        Scaled,
        lambda s: Scaled(s).__call__,
        lambda s: functools.partial(lambda s, x: s * jnp.sum(x**3), s),
        lambda s: jax.jit(lambda x: s * jnp.sum(x**3)),
        lambda s: lambda x: s * jnp.sum(x**3),
    )

    def value(s, x, make=makers[-1]):
        operator = tx.HessianLinearOperator(make(s), x)
        return jnp.sum(operator.mv(jnp.ones_like(x)))

    two = jnp.asarray(2.0)
    expected = 12 * np.sum(x), (6 * np.sum(x), np.full(3, 12.0))

    @jax.jit
    def transformed(s, x):
        many = jax.vmap(value, (0, None))(jnp.stack([s, -s]), x)
        each = [jax.value_and_grad(value, (0, 1))(s, x, make) for make in makers]
        return each, many

    each, many = transformed(two, x)
    for actual in each:
        jax.tree.map(assert_near, actual, expected)
    assert_near(many, [expected[0], -expected[0]])
    # We also differentiate without jit.
    assert_near(jax.grad(lambda s: value(s, x))(two), expected[1][0])


def test_low_precision():
    x = {"a": jnp.ones(3, jnp.bfloat16), "b": np.ones(2, np.float16)}
    operator = tx.HessianLinearOperator(
        lambda x: (
            jnp.sum(x["a"] ** 3).astype(float_dtype())
            + jnp.sum(x["b"] ** 2).astype(float_dtype())
        ),
        x,
    )
    assert operator.in_structure()["b"].dtype == jnp.float16
    assert float(_trace(operator)) == 3 * 6 + 2 * 2


#
# Errors
#


@pytest.mark.parametrize("name", ["Hessian", "GaussNewton"])
def test_wrong_points(name):
    make = getattr(tx, f"{name}LinearOperator")
    functions = (jnp.sum,) if name == "Hessian" else (lambda x: x, jnp.sum)
    no_arrays = "x must have floating-point arrays.*got none; turn Python"
    complex_arrays = (
        r"arrays of x must be real.*got an array of shape \(3,\) and dtype complex64; "
        "give complex"
    )
    for x, error, message in [
        (2.0, ValueError, no_arrays),
        ({"n": jnp.arange(3)}, ValueError, no_arrays),
        (jnp.ones(3, jnp.complex64), TypeError, complex_arrays),
    ]:
        match = f"^traceax.{name}LinearOperator: .*{message}"
        with pytest.raises(error, match=match):
            make(*functions, x)


def test_wrong_values():
    x = jnp.ones(3)
    start = "must return a real floating-point array of shape .., "
    for out, message in [
        (lambda x: x, r"got an array of shape \(3,\) and dtype float"),
        (lambda x: (jnp.sum(x), x), "got an object of type tuple; return a mean"),
        (lambda x: jax.lax.complex(x[0], x[1]), r"shape \(\) and dtype complex"),
        (jnp.argmax, r"got an array of shape \(\) and dtype int"),
        (lambda x: 0.0, "got 0.0 of type float"),
        (lambda x: None, "got None of type NoneType"),
    ]:
        match = f"HessianLinearOperator: fn {start}.*{message}"
        with pytest.raises(TypeError, match=match):
            tx.HessianLinearOperator(out, x)
        match = f"NewtonLinearOperator: loss {start}.*{message}"
        with pytest.raises(TypeError, match=match):
            tx.GaussNewtonLinearOperator(lambda x: x, out, x)


@pytest.mark.wrong_types
def test_wrong_functions():
    x = jnp.ones(3)
    with pytest.raises(
        TypeError, match=r"fn must be a function, got an array.*pass \(fn, x, args\)"
    ):
        tx.HessianLinearOperator(x, jnp.sum)  # pyright: ignore
    with pytest.raises(TypeError, match=r"loss must be a function.*\(model, loss, x"):
        tx.GaussNewtonLinearOperator(jnp.sin, x, x)  # pyright: ignore
    with pytest.raises(TypeError, match=r"outputs of model must be real.*dtype int32"):
        tx.GaussNewtonLinearOperator(lambda x: jnp.int32(2), jnp.sum, x)


def test_several_arguments_are_a_tuple():
    x, args = jnp.ones(2), (jnp.ones(3), jnp.ones(3))
    for make in (
        lambda *y: tx.HessianLinearOperator(lambda x, y: jnp.sum(x), x, *y),
        lambda *y: tx.GaussNewtonLinearOperator(
            lambda x, y: x, lambda out, y: jnp.sum(out), x, *y
        ),
    ):
        with pytest.raises(
            TypeError, match=r"args must be a single.*2 of them; .*tuple"
        ):
            make(*args)
        make(args)


def test_products_with_long_activations():
    # We multiply with a perceptron's Hessian column by column, and convolve all columns.
    x, images = _normal(9000, 3), _normal(4, 1, 12, 12)

    def perceptron(p):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["in"]) @ p["out"]) ** 2)

    def convolutional(p):
        z = jax.lax.conv_general_dilated(images, p["kernel"], (1, 1), "SAME")
        return jnp.mean((jnp.tanh(z).sum((2, 3)) @ p["out"]) ** 2)

    networks = (
        (perceptron, {"in": _normal(3, 4), "out": _normal(4)}),
        (convolutional, {"kernel": _normal(2, 1, 3, 3), "out": _normal(2)}),
    )
    for loss, parameters in networks:
        operator = tx.HessianLinearOperator(loss, parameters)
        trace = _trace(operator)
        assert_near(trace, jnp.trace(_dense(loss, parameters)))
