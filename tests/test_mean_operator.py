"""The mean of operators over minibatches, against dense means."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import NSD, PSD
from jax.flatten_util import ravel_pytree

import traceax as tx
from traceax import MeanLinearOperator

# The same in both modes.
pytestmark = pytest.mark.x64

N, B, M = 5, 4, 7


def _normal(*shape, seed=0, complex=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    return x + 1j * rng.normal(size=shape) if complex else x


def _near(x, y, rtol=1e-9):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.max(np.abs(y)))


#
# A network, and the Hessian of its loss
#


def _network():
    return {"w": _normal(2, 3), "v": _normal(3, seed=3)}


def _loss(parameters, batch):
    x, y = batch["x"], batch["y"]
    return jnp.mean((jnp.tanh(x @ parameters["w"]) @ parameters["v"] - y) ** 2)


def _data(batches=B, size=M):
    return {"x": _normal(batches, size, 2, seed=1), "y": _normal(batches, size, seed=2)}


def _hessian(parameters, data, weights=None):
    def make(batch):
        def gradient(p, _):
            return jax.grad(_loss)(p, batch)

        return lx.JacobianLinearOperator(gradient, parameters)

    return MeanLinearOperator(make, data, weights=weights, tags=lx.symmetric_tag)


def _exact_hessian(parameters, data, weights=None):
    flat, unravel = ravel_pytree(parameters)

    def loss(flat):
        losses = jax.vmap(lambda batch: _loss(unravel(flat), batch))(data)
        if weights is None:
            return jnp.mean(losses)
        return jnp.sum(weights * losses) / jnp.sum(weights)

    return jax.hessian(loss)(flat)


def _trace(operator):
    # As many products as there are coordinates: exact.
    return tx.trace(jr.key(0), operator, operator.in_size()).value


#
# Values
#


def test_products_with_dense_operators():
    weights = np.asarray([3, 1, 4, 2])
    matrices = _normal(B, 3, N, complex=True)
    exact = np.einsum("b,bij->ij", weights / weights.sum(), matrices)
    vectors, other = _normal(6, N, complex=True), _normal(3, complex=True)

    @jax.jit
    def found(matrices, weights, vectors, other):
        operator = MeanLinearOperator(
            lx.MatrixLinearOperator, matrices, weights=weights
        )
        assert lx.linearise(operator) is operator
        transposed = jax.linear_transpose(operator.mv, vectors[0])(other)
        arithmetic = (2.0 * operator - operator.T.T / 4) @ operator.T
        return (
            operator.as_matrix(),
            lx.materialise(operator).as_matrix(),
            lx.conj(operator).as_matrix(),
            jax.vmap(operator.mv)(vectors),
            [operator.T.mv(other), *transposed, lx.conj(operator.T).mv(other)],
            arithmetic.as_matrix(),
        )

    expected = (
        exact,
        exact,
        exact.conj(),
        vectors @ exact.T,
        [exact.T @ other, exact.T @ other, exact.conj().T @ other],
        1.75 * exact @ exact.T,
    )
    jax.tree.map(_near, found(matrices, weights, vectors, other), expected)


def test_hessians_of_a_network_and_gradients_of_traces():
    arguments = _network(), _data(), np.asarray([3.0, 1.0, 4.0, 2.0])

    @jax.jit
    def both(*arguments):
        operator, exact = _hessian(*arguments), _exact_hessian(*arguments)
        assert operator.in_structure() == jax.eval_shape(lambda: arguments[0])
        assert operator.out_structure() == operator.in_structure()
        assert operator.T is operator
        found = operator.as_matrix(), lx.diagonal(operator)
        slopes = [
            jax.value_and_grad(trace, (0, 1, 2))(*arguments)
            for trace in (
                lambda *arguments: _trace(_hessian(*arguments)),
                lambda *arguments: jnp.trace(_exact_hessian(*arguments)),
            )
        ]
        return (found, slopes[0]), ((exact, jnp.diagonal(exact)), slopes[1])

    jax.tree.map(_near, *both(*arguments))


def test_sums_are_taken_in_32_bits():
    many = 300
    matrices = jnp.ones((many, 1, 1), jnp.bfloat16)
    # In bfloat16 a sum of ones stops at 256.
    for weights in (None, np.arange(many)):
        operator = MeanLinearOperator(
            lx.MatrixLinearOperator, matrices, weights=weights
        )
        product = operator.mv(matrices[0, 0])
        assert product.dtype == jnp.bfloat16
        assert float(product[0]) == 1


def test_batches_of_integers_and_keys():
    labels, keys = np.asarray([0, 2, 2, 1]), jr.split(jr.key(3), B)

    def diagonal(label, key):
        return jr.normal(key, (3,)) * jax.nn.one_hot(label, 3)

    @jax.jit
    def both(labels, keys):
        operator = MeanLinearOperator(
            lambda batch: lx.DiagonalLinearOperator(diagonal(*batch)),
            (labels, keys),
            tags=lx.diagonal_tag,
        )
        assert lx.is_diagonal(operator)
        return lx.diagonal(operator), jnp.mean(jax.vmap(diagonal)(labels, keys), axis=0)

    _near(*both(labels, keys))


def test_solves():
    a = _normal(B, N, N)
    matrices, right = a @ a.mT + np.eye(N), _normal(N)

    @jax.jit
    def solutions(matrices, right):
        operator = MeanLinearOperator(lx.MatrixLinearOperator, matrices, tags=PSD)
        solvers = lx.CG(rtol=1e-6, atol=1e-6), lx.AutoLinearSolver(True)
        return [lx.linear_solve(operator, right, solver).value for solver in solvers]

    for solution in solutions(matrices, right):
        _near(solution, np.linalg.solve(matrices.mean(0), right), rtol=1e-4)


#
# Derivatives
#


def test_second_derivatives_of_products():
    parameters, data = _network(), _data()
    tangent = jax.tree.map(np.cos, parameters)
    flat = ravel_pytree(tangent)[0]

    def quadratic(parameters):
        return flat @ ravel_pytree(_hessian(parameters, data).mv(tangent))[0]

    def exact(parameters):
        return flat @ _exact_hessian(parameters, data) @ flat

    def derivatives(fn, parameters):
        def slope(parameters):
            return jax.jvp(fn, (parameters,), (tangent,))[1]

        forward = jax.jvp(jax.grad(fn), (parameters,), (tangent,))
        return forward, jax.grad(slope)(parameters)

    @jax.jit
    def both(parameters):
        return derivatives(quadratic, parameters), derivatives(exact, parameters)

    jax.tree.map(_near, *both(parameters))


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


def test_closures_over_traced_values():
    matrices, vector = _normal(B, N, N), _normal(N)
    mean, scale = np.mean(matrices, axis=0), 2.0

    @jax.jit
    def gradients(scale, matrices, vector):
        def form(kind, scale, matrices):
            operator = MeanLinearOperator(FUNCTIONS[kind](scale), matrices)
            return jnp.sum(operator.mv(vector)) + jnp.sum(operator.T.mv(vector))

        return [jax.grad(form, (1, 2))(kind, scale, matrices) for kind in FUNCTIONS]

    ones = np.ones(N)
    to_data = scale * (np.outer(ones, vector) + np.outer(vector, ones)) / B
    expected = np.sum((mean + mean.T) @ vector), np.broadcast_to(to_data, (B, N, N))
    for found in gradients(scale, matrices, vector):
        jax.tree.map(_near, found, expected)


def test_transformations_of_traces():
    matrices = jnp.asarray(_normal(B, N, N))
    scale, trace = jnp.asarray(2.0), np.trace(matrices.mean(0))

    def value(scale, matrices):
        return _trace(MeanLinearOperator(FUNCTIONS["closure"](scale), matrices))

    of_scale, of_data = jax.grad(value, (0, 1))(scale, matrices)
    _near(of_scale, trace)
    _near(of_data, np.broadcast_to(2 * np.eye(N) / B, (B, N, N)))

    @jax.jit
    def transformed(scale, matrices):
        both = jax.vmap(value, (0, None))(jnp.stack([scale, 3 * scale]), matrices)
        end = jax.lax.while_loop(
            lambda s: s < 5, lambda s: s + value(s, matrices) * 0 + 1, scale
        )
        total = jax.lax.fori_loop(0, 3, lambda _, t: t + value(t, matrices), 1.0)
        return both, end, total

    expected = np.asarray([2 * trace, 6 * trace]), 5, (1 + trace) ** 3
    jax.tree.map(_near, transformed(scale, matrices), expected)


def test_operators_as_arguments_of_transformations():
    matrices, scale = jnp.asarray(_normal(B, N, N)), jnp.asarray(2.0)
    trace = np.trace(matrices.mean(0))
    for kind in ("closure", "method", "module", "PyTree of a partial"):
        operator = MeanLinearOperator(FUNCTIONS[kind](scale), matrices)
        assert any(x is scale for x in jax.tree.leaves(operator))
    gradient = eqx.filter_jit(eqx.filter_grad(_trace))(operator)
    _near(gradient.batches[0], 2 * np.eye(N) / B)
    (of_scale,) = (x for x in jax.tree.leaves(gradient) if x.shape == ())
    _near(of_scale, trace)

    @jax.jit
    def many(scales):
        stacked = eqx.filter_vmap(
            lambda s: MeanLinearOperator(FUNCTIONS["closure"](s), s * matrices)
        )(scales)
        return eqx.filter_vmap(_trace)(stacked)

    scales = np.asarray([1.0, 2.0, 3.0])
    _near(many(scales), scales**2 * trace)


def test_data_spread_over_devices():
    # Types tell what differs between devices also where there is one.
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, same = jax.P("d"), jax.P()
    matrices, vector = _normal(B, N, N), _normal(N)

    def product(matrices, vector):
        operator = MeanLinearOperator(lx.MatrixLinearOperator, matrices)
        return jax.lax.pmean(operator.mv(vector), "d")

    @jax.jit
    def product_and_gradient(matrices, vector):
        parallel = jax.shard_map(
            product, mesh=mesh, in_specs=(spread, same), out_specs=same
        )
        found, pullback = jax.vjp(lambda m: parallel(m, vector), matrices)
        return found, *pullback(jnp.ones(N))

    expected = matrices.mean(0) @ vector, np.broadcast_to(vector / B, (B, N, N))
    jax.tree.map(_near, product_and_gradient(matrices, vector), expected)


def test_functions_are_read_when_the_mean_is_made():
    matrices, vector = _normal(B, N, N), _normal(N)
    exact = matrices.mean(0) @ vector
    held = {"scale": 1.0}

    def make(matrix):
        return lx.MatrixLinearOperator(held["scale"] * matrix)

    first = MeanLinearOperator(make, matrices)
    held["scale"] = 3.0
    second = MeanLinearOperator(make, matrices)
    doubled = eqx.tree_at(lambda mean: mean.batches, second, 2 * second.batches)

    @eqx.filter_jit
    def products(operators):
        return [operator.mv(vector) for operator in operators]

    expected = [exact, 3 * exact, 6 * exact]
    jax.tree.map(_near, products((first, second, doubled)), expected)


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
    block = jax.tree.map(lambda x: np.stack([x] * 6), parameters)
    assert list(_scans(jax.make_jaxpr(operator.mv)(parameters))) == [B]
    assert list(_scans(jax.make_jaxpr(jax.vmap(operator.mv))(block))) == [B]
    assert list(_scans(jax.make_jaxpr(operator.as_matrix)())) == [B]


def test_memory_does_not_grow_with_the_data():
    parameters = _network()
    block = jax.tree.map(lambda x: np.stack([x] * 3), parameters)

    def squares(parameters, data, weights):
        products = jax.vmap(_hessian(parameters, data, weights).mv)(block)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(products))

    def memory(batches):
        arguments = parameters, _data(batches, 50), np.ones(batches)
        gradient = jax.jit(jax.grad(squares, (0, 1, 2)))
        compiled = gradient.lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # The normalised weights, and a bound far below the 150 numbers of a minibatch.
    assert memory(64) - memory(4) <= 4 * 8 * (64 - 4)


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


def _tagged(tags=(), weights=None, dtype=float):
    matrices = np.ones((B, N, N), dtype)
    return MeanLinearOperator(
        lx.MatrixLinearOperator, matrices, weights=weights, tags=tags
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
    for operator in (_tagged(tag), _tagged(tag, np.ones(B))):
        assert _known(operator) == known
        assert _known(operator.T) == transposed
        assert _known(lx.conj(operator)) == known


def test_checks_of_complex_operators():
    operator = _tagged(PSD, dtype=complex)
    for same in (operator, operator.T, lx.conj(operator)):
        assert _known(same) == {"psd"}


def test_structured_diagonals():
    bands = _normal(B, 3, N)

    def make(band):
        return lx.TridiagonalLinearOperator(band[0], band[1][1:], band[2][1:])

    @jax.jit
    def found(bands):
        operator = MeanLinearOperator(make, bands, tags=lx.tridiagonal_tag)
        assert _known(operator) == {"tridiagonal"}
        estimate = tx.trace(jr.key(0), operator, 3)
        bands = lx.tridiagonal(operator), lx.diagonal(operator)
        return bands, estimate.value, estimate.stats["num_matvecs"]

    diagonal, lower, upper = bands.mean(0)
    expected = ((diagonal, lower[1:], upper[1:]), diagonal), diagonal.sum(), 2
    jax.tree.map(_near, found(bands), expected)


#
# Errors
#


def _identity(batch):
    return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), float))


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            (np.ones((3, 2)), np.ones(4)),
            r"of one length.*got lengths \[3, 4\]; stack",
        ),
        ({}, r"got lengths \[\]"),
        (None, r"got lengths \[\]"),
        (np.ones((0, 3)), r"got lengths \[0\]"),
        (
            np.ones(()),
            r"leading axis of minibatches, got an array of shape \(\) and dtype",
        ),
        (np.float32(1), r"got an array of shape \(\)"),
        ((np.ones(3), 2.0), "got 2.0 of type float; let make_operator close over"),
    ],
)
def test_wrong_batches(batches, message):
    with pytest.raises(ValueError, match=f"^traceax.MeanLinearOperator: .*{message}"):
        MeanLinearOperator(_identity, batches)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (np.ones(3), ValueError, r"be of shape \(4,\), got an array of shape \(3,\)"),
        (np.ones(()), ValueError, r"be of shape \(4,\), got an array of shape \(\)"),
        (
            np.ones((4, 1)),
            ValueError,
            r"be of shape \(4,\), got an array of shape \(4, 1",
        ),
        (np.ones(4, np.complex64), TypeError, "be real, got .* dtype complex64"),
    ],
)
def test_wrong_weights(weights, error, message):
    with pytest.raises(
        error, match=f"^traceax.MeanLinearOperator: weights must {message}"
    ):
        MeanLinearOperator(_identity, np.ones(4), weights=weights)


@pytest.mark.wrong_types
def test_wrong_functions():
    with pytest.raises(
        TypeError, match=r"must be a function of a minibatch, got an array of shape"
    ):
        MeanLinearOperator(np.ones(4), _identity)  # pyright: ignore
    for make in (lambda batch: batch, _Holder(1.0).__init__):
        with pytest.raises(
            TypeError, match="must return a lineax linear operator, got"
        ):
            MeanLinearOperator(make, np.ones(4))
    with pytest.raises(ValueError, match="must have matching input and output"):
        MeanLinearOperator(lx.MatrixLinearOperator, np.ones((B, 2, 3)), tags=PSD)
