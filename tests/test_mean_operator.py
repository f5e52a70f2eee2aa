"""The mean of operators over minibatches, against dense means."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import NSD, PSD, complex_dtype, float_dtype, is_x64

import traceax as tx
from traceax import MeanLinearOperator

# The same in both modes.
pytestmark = pytest.mark.x64

N, B, M = 5, 4, 7
WEIGHTED = pytest.mark.parametrize("weighted", [False, True])
RTOL = 1e-9 if is_x64() else 1e-4


def _normal(*shape, seed=0, complex=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    x = x + 1j * rng.normal(size=shape) if complex else x
    return jnp.asarray(x, complex_dtype() if complex else float_dtype())


def _weights(weighted):
    return jnp.asarray([3, 1, 4, 2]) if weighted else None


def _dense(matrices, weighted):
    weights = np.asarray([3.0, 1.0, 4.0, 2.0]) if weighted else np.ones(B)
    return np.einsum("b,bij->ij", weights / weights.sum(), np.asarray(matrices))


def _near(x, y, rtol=RTOL):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.max(np.abs(y)))


#
# A network, and the Hessian of its loss
#


def _network(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(2, 3)), float_dtype()),
        "v": jnp.asarray(rng.normal(size=3), float_dtype()),
    }


def _loss(parameters, batch):
    x, y = batch["x"], batch["y"]
    return jnp.mean((jnp.tanh(x @ parameters["w"]) @ parameters["v"] - y) ** 2)


def _data(batches=B, seed=1):
    return {
        "x": _normal(batches, M, 2, seed=seed),
        "y": _normal(batches, M, seed=seed + 1),
    }


def _hessian(parameters, data, weights=None, loss=_loss):
    def make(batch):
        def gradient(p, _):
            return jax.grad(loss)(p, batch)

        return lx.JacobianLinearOperator(gradient, parameters, tags=lx.symmetric_tag)

    return MeanLinearOperator(make, data, weights=weights)


@functools.partial(jax.jit, static_argnames="loss")
def _full_loss(parameters, data, weights=None, loss=_loss):
    losses = jax.vmap(lambda batch: loss(parameters, batch))(data)
    if weights is None:
        return jnp.mean(losses)
    weights = weights.astype(losses.dtype)
    return jnp.sum(weights * losses) / jnp.sum(weights)


@functools.partial(jax.jit, static_argnames="loss")
def _exact_hessian(parameters, data, weights=None, loss=_loss):
    flat, unravel = jax.flatten_util.ravel_pytree(parameters)
    return jax.hessian(lambda x: _full_loss(unravel(x), data, weights, loss))(flat)


def _trace(operator):
    # As many products as there are coordinates: exact.
    return tx.trace(jr.key(0), operator, operator.in_size()).value


#
# Values
#


@pytest.mark.parametrize(
    ("complex", "weighted"), [(False, False), (True, False), (True, True)]
)
def test_products_with_dense_operators(complex, weighted):
    matrices = _normal(B, 3, N, complex=complex)
    operator = MeanLinearOperator(
        lx.MatrixLinearOperator, matrices, weights=_weights(weighted)
    )
    exact = _dense(matrices, weighted)
    vector, other = _normal(N, complex=complex), _normal(3, complex=complex)
    _near(operator.mv(vector), exact @ np.asarray(vector))
    _near(operator.as_matrix(), exact)
    _near(lx.materialise(operator).as_matrix(), exact)
    _near(operator.T.mv(other), exact.T @ np.asarray(other))
    _near(operator.T.T.as_matrix(), exact)
    _near(lx.conj(operator).as_matrix(), exact.conj())
    _near(lx.conj(operator.T).mv(other), exact.conj().T @ np.asarray(other))
    (transposed,) = jax.linear_transpose(operator.mv, vector)(other)
    _near(transposed, exact.T @ np.asarray(other))
    assert lx.linearise(operator) is operator
    vectors = _normal(6, N, complex=complex)
    _near(jax.jit(jax.vmap(operator.mv))(vectors), np.asarray(vectors) @ exact.T)
    arithmetic = (2.0 * operator - operator.T.T / 4) @ operator.T
    _near(arithmetic.as_matrix(), 1.75 * exact @ exact.T)


@WEIGHTED
def test_hessians_of_a_network(weighted):
    parameters, data, weights = _network(), _data(), _weights(weighted)
    operator = _hessian(parameters, data, weights)
    exact = _exact_hessian(parameters, data, weights)
    assert operator.in_structure() == jax.eval_shape(lambda: parameters)
    assert operator.out_structure() == operator.in_structure()
    _near(operator.as_matrix(), exact)
    _near(lx.materialise(operator).as_matrix(), exact)
    _near(lx.diagonal(operator), jnp.diagonal(exact))
    flat, unravel = jax.flatten_util.ravel_pytree(parameters)
    product = operator.mv(unravel(jnp.sin(flat)))
    _near(jax.flatten_util.ravel_pytree(product)[0], exact @ jnp.sin(flat))
    assert operator.T is operator
    _near(_trace(operator), jnp.trace(exact))
    dense = tx.trace(jr.key(0), lx.MatrixLinearOperator(exact, lx.symmetric_tag), 6)
    estimate = tx.trace(jr.key(0), operator, 6)
    _near(estimate.value, dense.value)
    assert estimate.stats["num_matvecs"] == 6


def test_transposes_of_operators_that_are_not_symmetric():
    weights = _normal(N, 3)

    def make(batch):
        return lx.JacobianLinearOperator(
            lambda x, _: jnp.tanh(weights.T @ (x * batch)), jnp.ones(N, float_dtype())
        )

    data = _normal(B, N)
    operator = MeanLinearOperator(make, data)
    exact = jax.vmap(
        lambda b: jax.jacobian(lambda x: jnp.tanh(weights.T @ (x * b)))(
            jnp.ones(N, float_dtype())
        )
    )(data).mean(0)
    _near(operator.as_matrix(), exact)
    _near(operator.T.as_matrix(), exact.T)
    _near(lx.materialise(operator.T).as_matrix(), exact.T)


def test_sums_are_taken_in_32_bits():
    many = 300
    matrices = jnp.ones((many, 1, 1), jnp.bfloat16)
    operator = MeanLinearOperator(lx.MatrixLinearOperator, matrices)
    product = operator.mv(jnp.ones(1, jnp.bfloat16))
    assert product.dtype == jnp.bfloat16
    # In bfloat16 a sum of ones stops at 256.
    assert float(product[0]) == 1
    weighted = MeanLinearOperator(
        lx.MatrixLinearOperator, matrices, weights=np.arange(many)
    )
    assert float(weighted.mv(jnp.ones(1, jnp.bfloat16))[0]) == 1


def test_batches_of_integers_and_keys():
    labels = jnp.asarray([0, 2, 2, 1])
    keys = jr.split(jr.key(3), B)

    def make(batch):
        label, key = batch
        scale = jr.normal(key, (3,), float_dtype())
        return lx.DiagonalLinearOperator(
            scale * jax.nn.one_hot(label, 3, dtype=float_dtype())
        )

    operator = MeanLinearOperator(make, (labels, keys))
    draws = jax.vmap(lambda key: jr.normal(key, (3,), float_dtype()))(keys)
    exact = jnp.mean(draws * jax.nn.one_hot(labels, 3, dtype=float_dtype()), axis=0)
    _near(lx.diagonal(operator), exact)
    assert lx.is_diagonal(operator)
    _near(_trace(operator), jnp.sum(exact))


def test_solves():
    a = _normal(B, N, N)
    matrices = a @ a.mT + jnp.eye(N)[None].astype(a.dtype)
    operator = MeanLinearOperator(lambda m: lx.MatrixLinearOperator(m, PSD), matrices)
    right = _normal(N)
    exact = np.linalg.solve(_dense(matrices, False), right)
    for solver in (
        lx.CG(rtol=1e-6, atol=1e-6),
        lx.Cholesky(),
        lx.AutoLinearSolver(True),
    ):
        solution = lx.linear_solve(operator, right, solver)
        _near(solution.value, exact, rtol=1e-4)


#
# Derivatives
#


def _exact_trace(parameters, data, weights):
    """The trace of the exact Hessian, without this library."""
    return jnp.trace(_exact_hessian(parameters, data, weights))


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_traces(jit):
    weights = jnp.asarray([3.0, 1.0, 4.0, 2.0], float_dtype())
    parameters, data = _network(), _data()

    def value(parameters, data, weights):
        return _trace(_hessian(parameters, data, weights))

    gradient = jax.grad(value, (0, 1, 2))
    got = (jax.jit(gradient) if jit else gradient)(parameters, data, weights)
    exact = jax.jit(jax.grad(_exact_trace, (0, 1, 2)))(parameters, data, weights)
    jax.tree.map(_near, got, exact)


def test_forward_and_second_derivatives_of_products():
    parameters, data = _network(), _data()
    tangent = jax.tree.map(jnp.cos, parameters)

    def quadratic(parameters):
        product = _hessian(parameters, data).mv(tangent)
        return sum(jnp.vdot(product[name], tangent[name]) for name in product)

    def exact(parameters):
        flat = jax.flatten_util.ravel_pytree(tangent)[0]
        return flat @ _exact_hessian(parameters, data) @ flat

    for derivative in (
        lambda fn: jax.jvp(fn, (parameters,), (tangent,)),
        lambda fn: jax.jvp(jax.grad(fn), (parameters,), (tangent,)),
        lambda fn: jax.grad(lambda p: jax.jvp(fn, (p,), (tangent,))[1])(parameters),
    ):
        got = jax.jit(derivative, static_argnums=0)(quadratic)
        expected = jax.jit(derivative, static_argnums=0)(exact)
        jax.tree.map(_near, got, expected)


def _static_mlp():
    mlp = eqx.nn.MLP(2, "scalar", 3, 1, key=jr.key(4), dtype=float_dtype())
    return eqx.partition(mlp, eqx.is_inexact_array)


@pytest.mark.parametrize("jit", [False, True])
def test_networks_of_equinox(jit):
    parameters, static = _static_mlp()

    def loss(parameters, batch):
        mlp = eqx.combine(parameters, static)
        return jnp.mean((jax.vmap(mlp)(batch["x"]) - batch["y"]) ** 2)

    def value(parameters):
        return _trace(_hessian(parameters, _data(), loss=loss))

    def exact(parameters):
        return jnp.trace(_exact_hessian(parameters, _data(), loss=loss))

    got = (jax.jit if jit else lambda fn: fn)(jax.value_and_grad(value))(parameters)
    jax.tree.map(_near, got, jax.jit(jax.value_and_grad(exact))(parameters))


class _Holder:
    """Opaque: no PyTree, and methods that aren't functions."""

    def __init__(self, scale):
        self.scale = scale

    def make(self, matrix):
        return lx.MatrixLinearOperator(self.scale * matrix)


class _Factory(eqx.Module):
    scale: jax.Array

    def __call__(self, matrix):
        return lx.MatrixLinearOperator(self.scale * matrix)


FUNCTIONS = {
    "closure": lambda s: lambda m: lx.MatrixLinearOperator(s * m),
    "method": lambda s: _Holder(s).make,
    "module": _Factory,
    "PyTree of a partial": lambda s: jax.tree_util.Partial(
        lambda s, m: _Factory(s)(m), s
    ),
    "operator made outside": lambda s: lambda m: lx.MatrixLinearOperator(m) * s,
    "unconverted": lambda s: (
        lambda m: lx.FunctionLinearOperator(
            lambda v: s * (m @ v),
            jax.ShapeDtypeStruct((N,), m.dtype),
            closure_convert=False,
        )
    ),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_closures_over_traced_values(kind):
    matrices = _normal(B, N, N)
    trace = jnp.trace(jnp.mean(matrices, axis=0))
    scale = jnp.asarray(2.0, matrices.dtype)

    def value(scale, matrices):
        return _trace(MeanLinearOperator(FUNCTIONS[kind](scale), matrices))

    identity = jnp.eye(N, dtype=matrices.dtype)
    for transform in (lambda fn: fn, jax.jit):
        of_scale, of_data = transform(jax.grad(value, (0, 1)))(scale, matrices)
        _near(of_scale, trace)
        _near(of_data, jnp.broadcast_to(2 * identity / B, (B, N, N)))
    _near(jax.jvp(value, (scale, matrices), (scale, matrices))[1], 4 * trace)
    _near(
        jax.vmap(value, (0, None))(jnp.stack([scale, 3 * scale]), matrices),
        [2 * trace, 6 * trace],
    )

    def step(scale):
        return scale + value(scale, matrices) * 0 + 1

    assert jax.lax.while_loop(lambda s: s < 5, step, scale) == 5
    total = jax.lax.fori_loop(
        0, 3, lambda i, t: t + value(t, matrices), jnp.ones((), scale.dtype)
    )
    _near(total, (1 + trace) ** 3)
    # Transposed, and what is known of the structure of values.
    vector = _normal(N)
    gradient = jax.grad(
        lambda s: jnp.sum(MeanLinearOperator(FUNCTIONS[kind](s), matrices).T.mv(vector))
    )(scale)
    _near(gradient, jnp.sum(jnp.mean(matrices, axis=0).T @ vector))


def test_operators_as_arguments_of_transformations():
    matrices = _normal(B, N, N)
    scale = jnp.asarray(2.0, matrices.dtype)
    for kind in ("closure", "method", "module", "PyTree of a partial"):
        operator = MeanLinearOperator(FUNCTIONS[kind](scale), matrices)
        assert any(x is scale for x in jax.tree.leaves(operator))
        gradient = eqx.filter_grad(_trace)(operator)
        _near(gradient.batches[0], 2 * jnp.eye(N) / B)
        others = [x for x in jax.tree.leaves(gradient) if x.shape == ()]
        _near(others[0], jnp.trace(jnp.mean(matrices, axis=0)))

    scales = jnp.asarray([1.0, 2.0, 3.0], scale.dtype)
    stacked = eqx.filter_vmap(
        lambda s: MeanLinearOperator(FUNCTIONS["closure"](s), s * matrices)
    )(scales)
    trace = jnp.trace(jnp.mean(matrices, axis=0))
    _near(eqx.filter_vmap(_trace)(stacked), scales**2 * trace)


def test_data_spread_over_devices():
    # Types tell what differs between devices also where there is one.
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, same = jax.P("d"), jax.P()
    matrices, vector = _normal(B, N, N), _normal(N)
    exact = jnp.mean(matrices, axis=0) @ vector

    def product(matrices, vector):
        operator = MeanLinearOperator(lx.MatrixLinearOperator, matrices)
        return jax.lax.pmean(operator.mv(vector), "d")

    parallel = jax.shard_map(
        product, mesh=mesh, in_specs=(spread, same), out_specs=same
    )
    _near(jax.jit(parallel)(matrices, vector), exact)
    gradient = jax.grad(lambda m: jnp.sum(jax.jit(parallel)(m, vector)))(matrices)
    expected = jnp.broadcast_to(vector / B, (B, N, N))
    _near(gradient, expected)


def test_functions_are_read_when_the_mean_is_made():
    matrices = _normal(B, N, N)
    trace = jnp.trace(jnp.mean(matrices, axis=0))
    held = {"scale": 1.0}

    def make(matrix):
        return lx.MatrixLinearOperator(held["scale"] * matrix)

    first = MeanLinearOperator(make, matrices)
    held["scale"] = 3.0
    second = MeanLinearOperator(make, matrices)
    _near(_trace(first), trace)
    _near(_trace(second), 3 * trace)
    _near(
        _trace(eqx.tree_at(lambda mean: mean.batches, second, 2 * matrices)), 6 * trace
    )


#
# Cost
#


def _scans(program):
    program = getattr(program, "jaxpr", program)
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"]
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from _scans(inner)


def test_one_pass_over_the_data():
    parameters = _network()
    operator = _hessian(parameters, _data())
    block = jax.tree.map(lambda x: jnp.stack([x] * 6), parameters)
    assert list(_scans(jax.make_jaxpr(operator.mv)(parameters))) == [B]
    assert list(_scans(jax.make_jaxpr(jax.vmap(operator.mv))(block))) == [B]
    assert list(_scans(jax.make_jaxpr(operator.as_matrix)())) == [B]


def test_memory_does_not_grow_with_the_data():
    parameters = _network()
    block = jax.tree.map(lambda x: jnp.stack([x] * 3), parameters)

    def squares(parameters, data, weights):
        products = jax.vmap(_hessian(parameters, data, weights).mv)(block)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(products))

    def without_checkpoint(parameters, data, weights):
        def product(batch, vector):
            return jax.jvp(
                lambda p: jax.grad(_loss)(p, batch), (parameters,), (vector,)
            )[1]

        def add(total, batch):
            products = jax.vmap(lambda v: product(batch, v))(block)
            return jax.tree.map(jnp.add, total, products), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, block), data)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(total))

    def memory(fn, batches):
        data = jax.eval_shape(
            lambda: {
                "x": jnp.zeros((batches, 50, 2), float_dtype()),
                "y": jnp.zeros((batches, 50), float_dtype()),
            }
        )
        weights = jax.ShapeDtypeStruct((batches,), float_dtype())
        compiled = jax.jit(fn).lower(parameters, data, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # The normalised weights, and a bound far below the 150 numbers of a minibatch.
    most = 4 * jnp.finfo(float_dtype()).bits // 8 * (64 - 4)
    for fn in (squares, jax.grad(squares), jax.grad(squares, (0, 1, 2))):
        assert memory(fn, 64) - memory(fn, 4) <= most
    grows = jax.grad(without_checkpoint)
    assert memory(grows, 64) - memory(grows, 4) > 100 * most


#
# What is known of the mean
#


def _known(operator):
    checks = {
        "symmetric": lx.is_symmetric,
        "diagonal": lx.is_diagonal,
        "tridiagonal": lx.is_tridiagonal,
        "lower": lx.is_lower_triangular,
        "upper": lx.is_upper_triangular,
        "unit": lx.has_unit_diagonal,
        "psd": lx.is_positive_semidefinite,
        "nsd": lx.is_negative_semidefinite,
    }
    return {name for name, check in checks.items() if check(operator)}


def _tagged(batch_tags=(), tags=(), weights=None, dtype=None):
    matrices = jnp.ones((B, N, N), dtype or float_dtype())
    return MeanLinearOperator(
        lambda m: lx.MatrixLinearOperator(m, batch_tags),
        matrices,
        weights=weights,
        tags=tags,
    )


@pytest.mark.parametrize(
    ("tag", "known", "transposed"),
    [
        (lx.symmetric_tag, {"symmetric"}, {"symmetric"}),
        (PSD, {"symmetric", "psd"}, {"symmetric", "psd"}),
        (NSD, {"symmetric", "nsd"}, {"symmetric", "nsd"}),
        (lx.tridiagonal_tag, {"tridiagonal"}, {"tridiagonal"}),
        (lx.lower_triangular_tag, {"lower"}, {"upper"}),
        (lx.upper_triangular_tag, {"upper"}, {"lower"}),
        (lx.unit_diagonal_tag, {"unit"}, {"unit"}),
        (
            lx.diagonal_tag,
            {"symmetric", "diagonal", "tridiagonal", "lower", "upper"},
            {"symmetric", "diagonal", "tridiagonal", "lower", "upper"},
        ),
        ((), set(), set()),
    ],
)
def test_checks(tag, known, transposed):
    weights = jnp.ones(B)
    for operator in (_tagged(tag), _tagged((), tag), _tagged((), tag, weights)):
        assert _known(operator) == known
        assert _known(operator.T) == transposed
        assert _known(lx.conj(operator)) == known
    # Weights may be negative.
    assert _known(_tagged(tag, weights=weights)) == known - {"psd", "nsd"}


def test_checks_of_complex_operators():
    for operator in (_tagged(PSD, (), None, complex_dtype()),):
        assert _known(operator) == {"psd"}
        assert _known(operator.T) == _known(lx.conj(operator)) == {"psd"}


def test_checks_do_not_depend_on_values_that_can_change():
    matrices = jnp.ones((B, N, N), float_dtype())
    for scale in (2.0, -2.0):
        factor = jnp.asarray(scale, float_dtype())

        def make(matrix, factor=factor):
            tags = lx.positive_semidefinite_tag
            return lx.MatrixLinearOperator(matrix, tags) * factor

        assert _known(MeanLinearOperator(make, matrices)) == {"symmetric"}
    negative = MeanLinearOperator(lambda m: -lx.MatrixLinearOperator(m, PSD), matrices)
    assert _known(negative) == {"symmetric", "nsd"}


def test_structured_diagonals():
    rng = np.random.default_rng(0)
    bands = jnp.asarray(rng.normal(size=(B, 3, N)), float_dtype())

    def make(band):
        return lx.TridiagonalLinearOperator(band[0], band[1][1:], band[2][1:])

    operator = MeanLinearOperator(make, bands)
    exact = jnp.mean(bands, axis=0)
    assert _known(operator) == {"tridiagonal"}
    _near(lx.diagonal(operator), exact[0])
    for got, expected in zip(
        lx.tridiagonal(operator), (exact[0], exact[1][1:], exact[2][1:]), strict=True
    ):
        _near(got, expected)
    estimate = tx.trace(jr.key(0), operator, 3)
    _near(estimate.value, jnp.sum(exact[0]))
    assert estimate.stats["num_matvecs"] == 2
    materialised = lx.materialise(operator)
    _near(materialised.as_matrix(), operator.as_matrix())


#
# Errors
#


def _identity(batch):
    return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), float_dtype()))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            (jnp.ones((3, 2)), jnp.ones(4)),
            r"of one length.*got lengths \[3, 4\]; stack",
        ),
        ({}, r"got lengths \[\]"),
        (None, r"got lengths \[\]"),
        (jnp.ones((0, 3)), r"got lengths \[0\]"),
        (
            jnp.ones(()),
            r"leading axis of minibatches, got an array of shape \(\) and dtype",
        ),
        (np.float32(1), r"got an array of shape \(\)"),
        ((jnp.ones(3), 2.0), "got 2.0 of type float; let make_operator close over"),
    ],
)
def test_wrong_batches(batches, message):
    with pytest.raises(ValueError, match=f"^traceax.MeanLinearOperator: .*{message}"):
        MeanLinearOperator(_identity, batches)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (jnp.ones(3), ValueError, r"must have shape \(4,\), got \(3,\)"),
        (jnp.ones(()), ValueError, r"must have shape \(4,\), got \(\)"),
        (jnp.ones((4, 1)), ValueError, r"must have shape \(4,\), got \(4, 1\)"),
        (jnp.ones(4, jnp.complex64), TypeError, "must be real, got dtype complex64"),
        (np.ones(4, bool), TypeError, "must be real, got dtype bool"),
        (
            [1.0] * 4,
            TypeError,
            r"must be an array of shape \(4,\), got an object of type list; pass jax",
        ),
    ],
)
def test_wrong_weights(weights, error, message):
    with pytest.raises(error, match=f"^traceax.MeanLinearOperator: weights {message}"):
        MeanLinearOperator(_identity, jnp.ones(4), weights=weights)


def test_wrong_functions():
    with pytest.raises(
        TypeError, match=r"must be a function of a minibatch, got an array of shape"
    ):
        MeanLinearOperator(jnp.ones(4), _identity)  # pyright: ignore
    for make in (lambda batch: batch, _Holder(1.0).__init__):
        with pytest.raises(
            TypeError, match="must return a lineax linear operator, got"
        ):
            MeanLinearOperator(make, jnp.ones(4))
    with pytest.raises(ValueError, match="must have matching input and output"):
        MeanLinearOperator(lx.MatrixLinearOperator, jnp.ones((B, 2, 3)), tags=PSD)
