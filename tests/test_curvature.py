"""Hessians and Gauss-Newton matrices, against `jax.hessian`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import PSD, float_dtype, is_x64
from jax.flatten_util import ravel_pytree

import traceax as tx

RTOL = 1e-9 if is_x64() else 2e-4


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float_dtype())


def _near(x, y, rtol=RTOL):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.max(np.abs(y)))


def _data(*batch, seed=1):
    return {
        "x": _normal(*batch, 4, 2, seed=seed),
        "y": _normal(*batch, 4, seed=seed + 1),
    }


def _parameters():
    return {"w": _normal(2, 3, seed=3), "v": _normal(3, seed=4)}


def _model(parameters, batch):
    return jnp.tanh(batch["x"] @ parameters["w"]) @ parameters["v"]


def _cross_entropy(outputs, batch):
    # Convex, but not quadratic.
    return jnp.mean(jax.nn.softplus(outputs) - batch["y"] * outputs)


def _loss(parameters, batch):
    return _cross_entropy(_model(parameters, batch), batch)


def _dense(fn, x, *args):
    """The Hessian with respect to the floating-point arrays of x."""
    arrays, fixed = eqx.partition(x, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)
    of_flat = jax.hessian(lambda flat: fn(eqx.combine(unravel(flat), fixed), *args))
    return jax.jit(of_flat)(flat)


def _dense_gauss_newton(parameters, batch):
    flat, unravel = ravel_pytree(parameters)

    def model(flat):
        return _model(unravel(flat), batch)

    jacobian = jax.jacobian(model)(flat)
    inner = jax.hessian(lambda outputs: _cross_entropy(outputs, batch))(model(flat))
    return jacobian.T @ inner @ jacobian


def _trace(operator):
    # As many products as there are coordinates: exact.
    return tx.trace(jr.key(0), operator, operator.in_size()).value


MAKERS = {
    "hessian": (
        functools.partial(tx.HessianLinearOperator, _loss),
        functools.partial(_dense, _loss),
    ),
    "gauss-newton": (
        functools.partial(tx.GaussNewtonLinearOperator, _model, _cross_entropy),
        _dense_gauss_newton,
    ),
}
each = pytest.mark.parametrize(("make", "dense"), MAKERS.values(), ids=MAKERS)


#
# Values
#


@pytest.mark.x64
@each
def test_products_and_gradients_of_traces(make, dense):
    parameters, data = _parameters(), _data()
    operator = make(parameters, data)
    assert operator.in_structure() == jax.eval_shape(lambda: parameters)
    assert operator.out_structure() == operator.in_structure()
    assert operator.T is operator
    assert lx.conj(operator) is operator
    flat, unravel = ravel_pytree(parameters)
    vector = np.sin(flat)

    @eqx.filter_jit
    def found(operator):
        product = ravel_pytree(operator.mv(unravel(vector)))[0]
        linear = lx.linearise(operator)
        assert lx.is_symmetric(linear)
        matrices = [x.as_matrix() for x in (operator, lx.materialise(operator), linear)]
        trace, gradient = eqx.filter_value_and_grad(_trace)(operator)
        slopes = gradient.x, gradient.args
        return product, lx.diagonal(operator), matrices, trace, slopes

    @jax.jit
    def expected(*arguments):
        exact = dense(*arguments)
        trace, slopes = jax.value_and_grad(
            lambda *arguments: jnp.trace(dense(*arguments)), (0, 1)
        )(*arguments)
        return exact @ vector, jnp.diagonal(exact), [exact] * 3, trace, slopes

    jax.tree.map(_near, found(operator), expected(parameters, data))


@pytest.mark.x64
def test_what_is_known():
    hessian = MAKERS["hessian"][0](_parameters(), _data())
    assert lx.is_symmetric(hessian)
    assert not lx.is_positive_semidefinite(hessian)
    assert not lx.is_diagonal(hessian)
    matrix = MAKERS["gauss-newton"][0](_parameters(), _data())
    assert lx.is_symmetric(matrix)
    assert lx.is_positive_semidefinite(matrix)
    assert not lx.is_negative_semidefinite(matrix)


@pytest.mark.x64
def test_solves():
    make, dense = MAKERS["hessian"]
    parameters, data = _parameters(), _data()
    flat, unravel = ravel_pytree(parameters)
    identity = lx.IdentityLinearOperator(jax.eval_shape(lambda: parameters))

    def damped(parameters):
        return lx.TaggedLinearOperator(make(parameters, data) + 3.0 * identity, PSD)

    def solve(parameters):
        solver = lx.CG(rtol=1e-8, atol=1e-8)
        return ravel_pytree(
            lx.linear_solve(damped(parameters), unravel(jnp.sin(flat)), solver).value
        )[0]

    def expected(parameters):
        exact = dense(parameters, data) + 3 * jnp.eye(flat.size, dtype=flat.dtype)
        return jnp.linalg.solve(exact, jnp.sin(flat))

    @jax.jit
    def both(parameters):
        return [jax.jvp(fn, (parameters,), (parameters,)) for fn in (solve, expected)]

    for got, exact in zip(*both(parameters), strict=True):
        _near(got, exact, 1e-4)


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


def _network_loss(network, batch):
    return jnp.mean((jax.vmap(network)(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.x64
def test_leaves_that_are_not_arrays():
    network, data = _network(), _data()
    operator = tx.HessianLinearOperator(_network_loss, network, data)
    structure = operator.in_structure()
    assert structure.weight.shape == (3, 2)
    assert structure.bias.shape == (3,)
    rest = (structure.activation, structure.order, structure.scale, structure.name)
    assert rest == (None,) * 4

    def residuals(network, batch):
        return jax.vmap(network)(batch["x"]) - batch["y"]

    def squares(residuals, _):
        return jnp.sum(residuals**2)

    arrays, fixed = eqx.partition(network, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)

    # What is fixed leaves a program with the operator.
    made = eqx.filter_jit(lambda n, d: tx.HessianLinearOperator(_network_loss, n, d))
    again = made(network, data)

    @eqx.filter_jit
    def both(operator, again, network, data):
        matrix = tx.GaussNewtonLinearOperator(residuals, squares, network, data)
        exact = _dense(_network_loss, network, data)
        jacobian = jax.jacobian(
            lambda flat: residuals(eqx.combine(unravel(flat), fixed), data)
        )(flat)
        found = operator.as_matrix(), _trace(again), _trace(matrix)
        return found, (exact, jnp.trace(exact), 2 * jnp.sum(jacobian**2))

    jax.tree.map(_near, *both(operator, again, network, data))


def test_arguments_are_optional():
    x = _normal(4)
    operator = tx.HessianLinearOperator(lambda x: jnp.sum(jnp.sin(x) * x[::-1]), x)
    exact = _dense(lambda x: jnp.sum(jnp.sin(x) * x[::-1]), x)
    as_matrix = eqx.filter_jit(lambda operator: operator.as_matrix())
    _near(as_matrix(operator), exact)
    matrix = tx.GaussNewtonLinearOperator(
        lambda x: {"a": x**2, "b": jnp.sum(x)},
        lambda out: jnp.sum(out["a"] ** 2) + out["b"] ** 2,
        x,
    )
    # J is diag(2 x) and a row of ones, H twice the identity.
    _near(as_matrix(matrix), 8 * jnp.diag(x**2) + 2)


@pytest.mark.x64
def test_minibatches():
    parameters, batches = _parameters(), _data(3)

    @eqx.filter_jit
    def traces(parameters, batches):
        def make(batch):
            return tx.HessianLinearOperator(_loss, parameters, batch)

        each = eqx.filter_vmap(_trace)(eqx.filter_vmap(make)(batches))
        exact = jax.vmap(lambda batch: jnp.trace(_dense(_loss, parameters, batch)))
        return each, exact(batches), _trace(tx.MeanLinearOperator(make, batches))

    each, exact, of_mean = traces(parameters, batches)
    _near(each, exact)
    _near(of_mean, np.mean(exact))


#
# Implicit functions
#


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
        # The same, with every step differentiated.
        y = jnp.zeros_like(x)
        for _ in range(6):
            y = y - inner(y, x) / (1 + 0.3 * jnp.cos(y))
        return jnp.sum(jnp.cos(y) * x)

    @jax.jit
    def both(x):
        value = _trace(tx.HessianLinearOperator(outer, x))
        return value, jnp.trace(_dense(newton, x))

    _near(*both(_normal(3)))


@pytest.mark.x64
def test_functions_with_rules_of_their_own():
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, ct: (ct * 3 * x**2,))
    x = _normal(3)
    operator = tx.HessianLinearOperator(lambda x: jnp.sum(cube(x)), x)
    _near(_trace(operator), jnp.sum(6 * x))


#
# Transformations
#


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
        return _trace(tx.HessianLinearOperator(make(s), x))

    two = jnp.asarray(2.0)
    expected = 12 * np.sum(x), (6 * np.sum(x), np.full(3, 12.0))

    @jax.jit
    def transformed(s, x):
        many = jax.vmap(value, (0, None))(jnp.stack([s, -s]), x)
        each = [jax.value_and_grad(value, (0, 1))(s, x, make) for make in makers]
        return each, many

    each, many = transformed(two, x)
    for found in each:
        jax.tree.map(_near, found, expected)
    _near(many, [expected[0], -expected[0]])
    # Without a program around it.
    _near(jax.grad(value)(two, x), expected[1][0])


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
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (2.0, ValueError, "x must have floating-point arrays.*got none; turn Python"),
        ({"n": jnp.arange(3)}, ValueError, "x must have floating-point arrays"),
        (
            jnp.ones(3, jnp.complex64),
            TypeError,
            r"arrays of x must be real.*got an array of shape \(3,\) and dtype complex64; "
            "give complex",
        ),
    ],
)
def test_wrong_points(name, x, error, message):
    make = getattr(tx, f"{name}LinearOperator")
    functions = (jnp.sum,) if name == "Hessian" else (lambda x: x, jnp.sum)
    with pytest.raises(error, match=f"^traceax.{name}LinearOperator: .*{message}"):
        make(*functions, x)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda x: x, r"got an array of shape \(3,\) and dtype float"),
        (lambda x: jnp.sum(x)[None], r"got an array of shape \(1,\)"),
        (lambda x: (jnp.sum(x), x), "got an object of type tuple; return a mean"),
        (
            lambda x: jax.lax.complex(x[0], x[1]),
            r"got an array of shape \(\) and dtype complex",
        ),
        (jnp.argmax, r"got an array of shape \(\) and dtype int"),
        (lambda x: 0.0, "got 0.0 of type float"),
        (lambda x: None, "got None of type NoneType"),
    ],
)
def test_wrong_values(out, message):
    x = jnp.ones(3)
    start = "must return a real floating-point array of shape .., "
    with pytest.raises(TypeError, match=f"HessianLinearOperator: fn {start}{message}"):
        tx.HessianLinearOperator(out, x)
    with pytest.raises(TypeError, match=f"NewtonLinearOperator: loss {start}{message}"):
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
