"""Means over minibatches. test_operator_catalogue.py tests their operations."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from operator_catalogue import assert_near, known_properties
from problems import NSD, PSD

import traceax as tx
from traceax import MeanLinearOperator

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = pytest.mark.x64

N, B = 5, 4


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _trace(operator):
    # With one product per coordinate, the trace is exact.
    return tx.trace(jr.key(0), operator, operator.in_size()).value


def test_sums_are_taken_in_32_bits():
    many = 300
    matrices = jnp.ones((many, 1, 1), jnp.bfloat16)
    # A sum of ones in bfloat16 stops at 256.
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
    def diagonals(labels, keys):
        operator = MeanLinearOperator(
            lambda batch: lx.DiagonalLinearOperator(diagonal(*batch)),
            (labels, keys),
            tags=lx.diagonal_tag,
        )
        return lx.diagonal(operator), jnp.mean(jax.vmap(diagonal)(labels, keys), axis=0)

    assert_near(*diagonals(labels, keys))


#
# Closures
#


class _Holder:
    """An opaque class: it is no PyTree, and its method isn't a plain function."""

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
    for actual in gradients(scale, matrices, vector):
        jax.tree.map(assert_near, actual, expected)


def test_traces_in_loops_and_under_vmap():
    matrices = jnp.asarray(_normal(B, N, N))
    scale, trace = jnp.asarray(2.0), np.trace(matrices.mean(0))

    def value(scale, matrices):
        return _trace(MeanLinearOperator(FUNCTIONS["closure"](scale), matrices))

    @jax.jit
    def transformed(scale, matrices):
        many = jax.vmap(value, (0, None))(jnp.stack([scale, 3 * scale]), matrices)
        total = jax.lax.fori_loop(0, 3, lambda _, t: t + value(t, matrices), 1.0)
        return many, total

    expected = np.asarray([2 * trace, 6 * trace]), (1 + trace) ** 3
    jax.tree.map(assert_near, transformed(scale, matrices), expected)


def test_operators_as_arguments_of_transformations():
    matrices, scale = jnp.asarray(_normal(B, N, N)), jnp.asarray(2.0)
    trace = np.trace(matrices.mean(0))
    for kind in ("closure", "method", "module", "PyTree of a partial"):
        operator = MeanLinearOperator(FUNCTIONS[kind](scale), matrices)
        assert any(x is scale for x in jax.tree.leaves(operator))
    gradient = eqx.filter_jit(eqx.filter_grad(_trace))(operator)
    assert_near(gradient.batches[0], 2 * np.eye(N) / B)
    (scale_gradient,) = (x for x in jax.tree.leaves(gradient) if x.shape == ())
    assert_near(scale_gradient, trace)


def test_functions_read_values_when_the_mean_is_made():
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
    jax.tree.map(assert_near, products((first, second, doubled)), expected)


def test_data_spread_over_devices():
    # JAX's types mark values that differ between devices, even on a single device.
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split, same = jax.P("d"), jax.P()
    matrices, vector = _normal(B, N, N), _normal(N)

    def product(matrices, vector):
        operator = MeanLinearOperator(lx.MatrixLinearOperator, matrices)
        return jax.lax.pmean(operator.mv(vector), "d")

    @jax.jit
    def product_and_gradient(matrices, vector):
        parallel = jax.shard_map(
            product, mesh=mesh, in_specs=(split, same), out_specs=same
        )
        product_value, pullback = jax.vjp(lambda m: parallel(m, vector), matrices)
        return product_value, *pullback(jnp.ones(N))

    expected = matrices.mean(0) @ vector, np.broadcast_to(vector / B, (B, N, N))
    jax.tree.map(assert_near, product_and_gradient(matrices, vector), expected)


#
# Cost
#


def _hessian(x, data, weights=None):
    def loss(x, batch):
        return jnp.mean(jnp.tanh(batch["x"] @ x) ** 2 * batch["y"])

    return MeanLinearOperator(
        lambda batch: tx.HessianLinearOperator(loss, x, batch),
        data,
        weights=weights,
        tags=lx.symmetric_tag,
    )


def _data(batches, size):
    return {"x": _normal(batches, size, 3), "y": _normal(batches, size, seed=2)}


def test_one_pass_over_the_data():
    operator = _hessian(_normal(3), _data(B, 7))
    block = _normal(6, 3)
    for program in (
        jax.make_jaxpr(operator.mv)(block[0]),
        jax.make_jaxpr(jax.vmap(operator.mv))(block),
        jax.make_jaxpr(operator.as_matrix)(),
    ):
        text = str(program)
        assert text.count("scan[") == 1
        assert f"length={B}" in text


def test_memory_does_not_grow_with_the_data():
    def squares(x, data, weights):
        products = jax.vmap(_hessian(x, data, weights).mv)(_normal(3, 3))
        return jnp.sum(products**2)

    def memory(batches):
        arguments = jnp.ones(3), _data(batches, 50), np.ones(batches)
        gradient = jax.jit(jax.grad(squares, (0, 1, 2)))
        compiled = gradient.lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # We allow for the normalised weights, far below a minibatch's 200 numbers.
    assert memory(64) - memory(4) <= 4 * 8 * (64 - 4)


#
# Known properties
#


ALL = {"symmetric", "diagonal", "tridiagonal", "lower", "upper"}


@pytest.mark.parametrize("weights", [None, np.ones(B)])
def test_known_properties(weights):
    for tag, known, transposed in [
        (lx.symmetric_tag, {"symmetric"}, {"symmetric"}),
        (PSD, {"symmetric", "psd"}, {"symmetric", "psd"}),
        (NSD, {"symmetric", "nsd"}, {"symmetric", "nsd"}),
        (lx.tridiagonal_tag, {"tridiagonal"}, {"tridiagonal"}),
        (lx.lower_triangular_tag, {"lower"}, {"upper"}),
        (lx.upper_triangular_tag, {"upper"}, {"lower"}),
        (lx.unit_diagonal_tag, {"unit"}, {"unit"}),
        (lx.diagonal_tag, ALL, ALL),
        ((lx.tridiagonal_tag, PSD), {"tridiagonal", "symmetric", "psd"}, None),
    ]:
        operator = MeanLinearOperator(
            lx.MatrixLinearOperator, np.ones((B, N, N)), weights=weights, tags=tag
        )
        assert (
            known_properties(operator) == known_properties(lx.conj(operator)) == known
        )
        assert known_properties(operator.T) == (
            known if transposed is None else transposed
        )
    operator = MeanLinearOperator(
        lx.MatrixLinearOperator, np.ones((B, N, N), complex), weights=weights, tags=PSD
    )
    for same in (operator, operator.T, lx.conj(operator)):
        assert known_properties(same) == {"psd"}


def test_structured_diagonals():
    bands = _normal(B, 3, N)

    def make(band):
        return lx.TridiagonalLinearOperator(band[0], band[1][1:], band[2][1:])

    @jax.jit
    def diagonals_and_trace(bands):
        operator = MeanLinearOperator(make, bands, tags=lx.tridiagonal_tag)
        estimate = tx.trace(jr.key(0), operator, 3)
        return lx.tridiagonal(operator), estimate.value, estimate.stats["num_matvecs"]

    diagonal, lower, upper = bands.mean(0)
    expected = (diagonal, lower[1:], upper[1:]), diagonal.sum(), 2
    jax.tree.map(assert_near, diagonals_and_trace(bands), expected)


#
# Errors
#


def _identity(batch):
    return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), float))


@pytest.mark.wrong_types
def test_wrong_arguments():
    for batches, message in [
        (
            (np.ones((3, 2)), np.ones(4)),
            r"with one length.*got lengths \[3, 4\]; stack",
        ),
        ({}, r"got lengths \[\]"),
        (np.ones((0, 3)), r"got lengths \[0\]"),
        (np.ones(()), r"leading axis of minibatches, got an array of shape \(\) and"),
        ((np.ones(3), 2.0), "got 2.0 of type float; let make_operator close over"),
    ]:
        with pytest.raises(
            ValueError, match=f"^traceax.MeanLinearOperator: .*{message}"
        ):
            MeanLinearOperator(_identity, batches)
    match = "^traceax.MeanLinearOperator: weights must"
    for shape in ((3,), (), (4, 1)):
        with pytest.raises(
            ValueError, match=rf"{match} be of shape \(4,\), got an array"
        ):
            MeanLinearOperator(_identity, np.ones(4), weights=np.ones(shape))
    weights = np.ones(4, np.complex64)
    with pytest.raises(TypeError, match=f"{match} be real, got .* dtype complex64"):
        MeanLinearOperator(_identity, np.ones(4), weights=weights)  # pyright: ignore
    match = r"must be a function of a minibatch, got an array of shape"
    with pytest.raises(TypeError, match=match):
        MeanLinearOperator(np.ones(4), _identity)  # pyright: ignore
    for make in (lambda batch: batch, _Holder(1.0).__init__):
        match = "must return a lineax linear operator, got"
        with pytest.raises(TypeError, match=match):
            MeanLinearOperator(make, np.ones(4))
    with pytest.raises(ValueError, match="must have matching input and output"):
        MeanLinearOperator(lx.MatrixLinearOperator, np.ones((B, 2, 3)), tags=PSD)
