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


@each
def test_products(make, dense):
    parameters, data = _parameters(), _data()
    operator, exact = make(parameters, data), dense(parameters, data)
    assert operator.in_structure() == jax.eval_shape(lambda: parameters)
    assert operator.out_structure() == operator.in_structure()
    flat, unravel = ravel_pytree(parameters)

    @eqx.filter_jit
    def evaluate(operator, vector):
        product = ravel_pytree(operator.mv(unravel(vector)))[0]
        linear = lx.linearise(operator)
        assert lx.is_symmetric(linear)
        matrices = [x.as_matrix() for x in (operator, lx.materialise(operator), linear)]
        return product, lx.diagonal(operator), matrices, _trace(operator)

    vector = jnp.sin(flat)
    expected = exact @ vector, jnp.diagonal(exact), [exact] * 3, jnp.trace(exact)
    jax.tree.map(_near, evaluate(operator, vector), expected)
    assert operator.T is operator
    assert lx.conj(operator) is operator


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

    @functools.partial(jax.jit, static_argnums=0)
    def both(fn, parameters):
        return jax.jvp(fn, (parameters,), (parameters,))

    for got, exact in zip(
        both(solve, parameters), both(expected, parameters), strict=True
    ):
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
    exact = _dense(_network_loss, network, data)
    _near(eqx.filter_jit(lambda x: x.as_matrix())(operator), exact)
    jitted = eqx.filter_jit(lambda n, d: tx.HessianLinearOperator(_network_loss, n, d))
    _near(_trace(jitted(network, data)), jnp.trace(exact))

    def residuals(network, batch):
        return jax.vmap(network)(batch["x"]) - batch["y"]

    def squares(residuals, _):
        return jnp.sum(residuals**2)

    arrays, fixed = eqx.partition(network, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)
    jacobian = jax.jit(
        jax.jacobian(lambda flat: residuals(eqx.combine(unravel(flat), fixed), data))
    )(flat)
    matrix = tx.GaussNewtonLinearOperator(residuals, squares, network, data)
    _near(_trace(matrix), 2 * jnp.sum(jacobian**2))


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
@each
def test_minibatches(make, dense):
    parameters, batches = _parameters(), _data(3)
    operator = tx.MeanLinearOperator(lambda batch: make(parameters, batch), batches)
    exact = sum(
        dense(parameters, jax.tree.map(lambda x, i=i: x[i], batches)) for i in range(3)
    )
    _near(_trace(operator), jnp.trace(exact) / 3)
    expected = lx.is_positive_semidefinite(make(parameters, _data()))
    assert lx.is_positive_semidefinite(operator) == expected


#
# Networks of other libraries
#


def _images():
    return _normal(5, 3, seed=7), _normal(5, 2, seed=8)


def _squares(outputs, y):
    return jnp.mean((outputs - y) ** 2)


def _check_network(loss, x, size):
    data = _images()
    operator = tx.HessianLinearOperator(loss, x, data)
    exact = _dense(loss, x, data)
    assert operator.in_size() == size
    _near(_trace(operator), jnp.trace(exact))


@pytest.mark.x64
def test_networks_of_equinox():
    network = eqx.nn.MLP(3, 2, 4, 2, jnp.tanh, key=jr.key(0), dtype=float_dtype())

    def loss(network, data):
        return _squares(jax.vmap(network)(data[0]), data[1])

    _check_network(loss, network, 16 + 20 + 10)


@pytest.mark.x64
def test_networks_of_flax_linen():
    nn = pytest.importorskip("flax.linen")
    layers = [nn.Dense(4, param_dtype=float_dtype()), jnp.tanh]
    network = nn.Sequential([*layers, nn.Dense(2, param_dtype=float_dtype())])
    parameters = network.init(jr.key(0), _images()[0])

    def loss(parameters, data):
        return _squares(network.apply(parameters, data[0]), data[1])

    _check_network(loss, parameters, 16 + 10)


@pytest.mark.x64
def test_networks_of_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    network = nnx.Sequential(
        nnx.Linear(3, 4, rngs=rngs, param_dtype=float_dtype()),
        jnp.tanh,
        nnx.Linear(4, 2, rngs=rngs, param_dtype=float_dtype()),
    )
    graph, parameters, rest = nnx.split(network, nnx.Param, ...)

    def loss(parameters, data):
        network = nnx.merge(graph, parameters, rest)
        return _squares(network(data[0]), data[1])

    _check_network(loss, parameters, 16 + 10)


@pytest.mark.x64
def test_networks_of_haiku():
    hk = pytest.importorskip("haiku")
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.Linear(2)(jnp.tanh(hk.Linear(4)(x))))
    )
    parameters = network.init(jr.key(0), _images()[0])

    def loss(parameters, data):
        return _squares(network.apply(parameters, data[0]), data[1])

    _check_network(loss, parameters, 16 + 10)


#
# Implicit functions
#


@pytest.mark.x64
def test_implicit_hessians_of_linear_solves():
    a = jnp.eye(3, dtype=float_dtype()) * 4 + _normal(3, 3)

    def solution(x, solve):
        return jnp.sum(jnp.sin(solve(a + jnp.diag(x**2), jnp.cos(x))))

    def solve(a, b):
        return lx.linear_solve(lx.MatrixLinearOperator(a), b).value

    x = _normal(3, seed=5)
    operator = tx.HessianLinearOperator(lambda x: solution(x, solve), x)
    exact = _dense(lambda x: solution(x, jnp.linalg.solve), x)
    _near(_trace(operator), jnp.trace(exact))


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

    def value(x):
        return _trace(tx.HessianLinearOperator(outer, x))

    x = _normal(3)
    _near(jax.jit(value)(x), jnp.trace(_dense(newton, x)))


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
@each
def test_gradients_of_traces(make, dense):
    parameters, data = _parameters(), _data()

    def value(parameters, data):
        return _trace(make(parameters, data))

    def exact(parameters, data):
        return jnp.trace(dense(parameters, data))

    got = jax.jit(jax.grad(value, (0, 1)))(parameters, data)
    expected = jax.jit(jax.grad(exact, (0, 1)))(parameters, data)
    jax.tree.map(_near, got, expected)
    gradient = eqx.filter_grad(_trace)(make(parameters, data))
    jax.tree.map(_near, (gradient.x, gradient.args), expected)


@pytest.mark.x64
def test_many_at_once():
    make, dense = MAKERS["hessian"]
    parameters, batches = _parameters(), _data(3)
    exact = [
        jnp.trace(dense(parameters, jax.tree.map(lambda x, i=i: x[i], batches)))
        for i in range(3)
    ]
    operators = eqx.filter_vmap(lambda batch: make(parameters, batch))(batches)
    _near(eqx.filter_jit(eqx.filter_vmap(_trace))(operators), exact)


@pytest.mark.x64
def test_closures_over_traced_values():
    x = _normal(3)

    class Scaled(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return self.scale * jnp.sum(x**3)

    makers = (
        lambda s: lambda x: s * jnp.sum(x**3),
        lambda s: jax.jit(lambda x: s * jnp.sum(x**3)),
        Scaled,
        lambda s: Scaled(s).__call__,
        lambda s: functools.partial(lambda s, x: s * jnp.sum(x**3), s),
    )
    for make in makers:

        def value(s, x, make=make):
            return _trace(tx.HessianLinearOperator(make(s), x))

        two = jnp.asarray(2.0, x.dtype)
        got = jax.jit(jax.value_and_grad(value, (0, 1)))(two, x)
        expected = 12 * jnp.sum(x), (6 * jnp.sum(x), jnp.full(3, 12.0))
        jax.tree.map(_near, got, expected)
    # The last, without a program around it.
    _near(jax.grad(value)(two, x), expected[1][0])
    _near(jax.vmap(value, (0, None))(jnp.stack([two, -two]), x), [got[0], -got[0]])


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
