"""Operator classes, PyTrees and dtypes."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    ESTIMATORS,
    FAMILIES,
    OPERATORS,
    PSD,
    as_operator,
    assert_close,
    float_dtype,
    is_rounding,
    is_x64,
    many,
    matrix,
    parameters,
)
from jax.flatten_util import ravel_pytree

import traceax as tx
from traceax._operators.block import apply_block


@functools.cache
def _every_class():
    p = parameters(6)
    a = lx.MatrixLinearOperator(p["a"])
    d = lx.DiagonalLinearOperator(p["d"])
    structure = a.in_structure()
    lower = lx.MatrixLinearOperator(jnp.tril(p["a"]), lx.lower_triangular_tag)
    tridiagonal = lx.TridiagonalLinearOperator(p["d"], p["d"][1:], p["d"][:-1])
    function = lx.FunctionLinearOperator(lambda v: p["a"] @ v, structure)
    jacobian = lx.JacobianLinearOperator(lambda x, _: jnp.sin(p["a"] @ x), p["d"])
    reverse = lx.JacobianLinearOperator(
        lambda x, _: jnp.sin(p["a"] @ x), p["d"], jac="bwd"
    )
    operators = {name: make(p) for name, make in OPERATORS.items()}
    return operators | {
        "plain matrix": a,
        "diagonal": d,
        "diagonal over a PyTree": lx.DiagonalLinearOperator([p["d"], p["a"]]),
        "identity": lx.IdentityLinearOperator(structure),
        "tridiagonal": tridiagonal,
        "lower triangular": lower,
        "unit diagonal": lx.MatrixLinearOperator(
            jnp.fill_diagonal(p["a"], 1.0, inplace=False), lx.unit_diagonal_tag
        ),
        "diagonal function": lx.FunctionLinearOperator(
            lambda v: p["d"] * v, structure, lx.diagonal_tag
        ),
        "tridiagonal function": lx.FunctionLinearOperator(
            tridiagonal.mv, structure, lx.tridiagonal_tag
        ),
        "triangular function": lx.FunctionLinearOperator(
            lower.mv, structure, lx.lower_triangular_tag
        ),
        "function without closure conversion": lx.FunctionLinearOperator(
            lambda v: 2 * v, structure, closure_convert=False
        ),
        "plain function": function,
        "plain jacobian": jacobian,
        "reverse jacobian": reverse,
        "sum": a + d,
        "difference": a - d,
        "negative": -a,
        "quotient": lower / 3.0,
        "product": a @ function,
        "product with diagonal": d @ tridiagonal,
        "product of triangular": lower @ lower,
        "transpose": (function + d).T,
        "nested": -((a + d * 2.0) / 3.0 + lx.IdentityLinearOperator(structure)).T,
        "inverse": lx.invert(lx.TaggedLinearOperator(a @ a.T + d, PSD), lx.Cholesky()),
    }


CLASSES = list(_every_class())


@pytest.mark.x64
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_exact_with_enough_products(key, name):
    operator = _every_class()[name]
    n = operator.in_size()

    @eqx.filter_jit
    def both(operator):
        diagonal = tx.diagonal(key, operator, n + 3).value
        # Structure is used by default, products by an estimator that is given.
        default = tx.trace(key, operator, n + 3)
        given = tx.diagonal(key, operator, n, tx.XTraceEstimator()).value
        flat = [ravel_pytree(tree)[0] for tree in (diagonal, given)]
        return flat, default, jnp.diagonal(operator.as_matrix())

    flat, default, truth = both(operator)
    for diagonal in flat:
        assert_close(diagonal, truth, rtol=1e-9, atol=1e-9)
    assert_close(default.value, np.sum(truth), rtol=1e-9)
    assert is_rounding(default)
    assert int(default.stats["num_matvecs"]) <= n
    low, high = default.confidence_interval()
    assert low <= default.value <= high


@pytest.mark.x64
def test_unit_diagonal_needs_no_matrix():
    structure = jax.ShapeDtypeStruct((5,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: v, structure, lx.unit_diagonal_tag)
    assert tx.trace(jr.key(0), operator, 1).value == 5


@pytest.mark.x64
@pytest.mark.parametrize("estimator", ["hutch++", "xnystrace"])
def test_pytree_and_flat_operators_agree(key, estimator):
    p = parameters(12)
    a = p["a"] @ p["a"].T
    flat = lx.MatrixLinearOperator(a, PSD)

    def split(v):
        return {"b": (v[:2], [v[2:8].reshape(2, 3)]), "c": v[8:].reshape(2, 1, 2)}

    def join(tree):
        return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])

    structure = jax.eval_shape(lambda: split(p["d"]))
    nested = lx.FunctionLinearOperator(lambda t: split(a @ join(t)), structure, PSD)
    x = tx.trace(key, flat, 7, ESTIMATORS[estimator])
    y = tx.trace(key, nested, 7, ESTIMATORS[estimator])
    assert_close(x.value, y.value, rtol=1e-4)


@jax.numpy_dtype_promotion("standard")
def _mixed_operator():
    # float32, float16 and (in 64-bit mode) float64 leaves.
    a = np.asarray(parameters(9)["a"], np.float64)
    a = a @ a.T / 9
    wide = jnp.float64 if is_x64() else jnp.float32
    structure = {
        "x": jax.ShapeDtypeStruct((2, 2), jnp.float32),
        "y": [
            jax.ShapeDtypeStruct((3,), wide),
            jax.ShapeDtypeStruct((2,), jnp.float16),
        ],
    }

    def mv(tree):
        v = jnp.concatenate([x.reshape(-1).astype(wide) for x in jax.tree.leaves(tree)])
        w = jnp.asarray(a, wide) @ v
        return {
            "x": w[:4].reshape(2, 2).astype(jnp.float32),
            "y": [w[4:7], w[7:].astype(jnp.float16)],
        }

    return lx.FunctionLinearOperator(mv, structure, PSD), np.trace(a), wide


@pytest.mark.x64
@pytest.mark.parametrize("estimator", ["hutch++", "xnystrace"])
def test_leaves_of_different_real_dtypes(estimator):
    operator, truth, wide = _mixed_operator()

    # lineax itself promotes the leaves' dtypes.
    with jax.numpy_dtype_promotion("standard"):
        values, errors = many(ESTIMATORS[estimator], operator, 6, 500)
        exact = tx.trace(jr.key(0), operator, 9)
    assert values.dtype == wide
    z = abs(float(values.mean()) - truth) / (float(values.std()) / 500**0.5)
    assert z < 5
    assert np.all(np.asarray(errors) > 0)
    assert_close(exact.value, truth, rtol=1e-2)


@pytest.mark.x64
def test_half_precision():
    a = jnp.asarray(matrix("flat", 40), jnp.bfloat16)

    def value(a, key):
        operator = lx.MatrixLinearOperator(a, PSD)
        return tx.trace(key, operator, 12, tx.XTraceEstimator()).value

    run = jax.jit(jax.vmap(jax.value_and_grad(value), (None, 0)))
    values, gradients = run(a, jr.split(jr.key(20), 300))
    assert values.dtype == jnp.float32
    assert abs(np.mean(values) / np.trace(a.astype(jnp.float32)) - 1) < 0.01
    assert gradients.dtype == a.dtype
    # Unbiased, of entries whose variance is about 1 / k.
    off = np.mean(np.asarray(gradients, np.float32), axis=0) - np.eye(40)
    assert np.max(np.abs(off)) < 0.2


@pytest.mark.x64
@pytest.mark.parametrize("estimator", FAMILIES)
def test_complex_results(key, estimator):
    hermitian = as_operator(matrix("flat", 20, complex=True), psd=True)
    estimate = tx.trace(key, hermitian, 8, ESTIMATORS[estimator])
    assert not jnp.iscomplexobj(estimate.value)
    assert not jnp.iscomplexobj(estimate.standard_error)
    if estimator == "xnystrace":
        return
    general = as_operator(matrix("nonsymmetric", 20, complex=True))
    estimate = tx.trace(key, general, 8, ESTIMATORS[estimator])
    assert estimate.value.dtype == general.matrix.dtype
    assert not jnp.iscomplexobj(estimate.standard_error)
    low, high = estimate.confidence_interval()
    assert low.real < estimate.value.real < high.real
    assert low.imag < estimate.value.imag < high.imag


@pytest.mark.x64
def test_complex_gradient_is_that_of_the_frozen_pairing(key):
    a = jnp.asarray(as_operator(matrix("nonsymmetric", 9, complex=True)).matrix)
    est = tx.XTraceEstimator()
    state = est.init(key, lx.MatrixLinearOperator(a))
    direction = jnp.ones_like(a) * (1 + 2j)

    def value(a):
        return tx.trace(key, lx.MatrixLinearOperator(a), 6, est).value

    @jax.jit
    def both(a):
        V, Z = est.compute(state, 6)[3]

        def frozen(a):
            return jnp.sum(Z.conj() * (a @ V))

        def derivatives(fn):
            gradient = jax.grad(lambda a: fn(a).imag)(a)
            return gradient, jax.jvp(fn, (a,), (direction,))[1]

        return derivatives(value), derivatives(frozen)

    near = functools.partial(assert_close, rtol=1e-9, atol=1e-9)
    jax.tree.map(near, *both(a))


class _Foreign(lx.AbstractLinearOperator):
    """An operator from elsewhere: it registers few of lineax's checks."""

    matrix: jax.Array

    def mv(self, vector):
        return self.matrix @ vector

    def as_matrix(self):
        return self.matrix

    def transpose(self):
        return _Foreign(self.matrix.T)

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    def out_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)


# All that lineax asks for when one is made.
for check in (
    lx.is_symmetric,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
):
    check.register(_Foreign)(lambda operator: False)


@pytest.mark.x64
def test_operators_from_elsewhere(key):
    p = parameters(8)
    operator = _Foreign(p["a"])
    estimate = tx.trace(key, operator, 5)
    assert tx.CHOICES[estimate.stats["choice"]].startswith("Hutchinson")
    gradient = jax.grad(lambda a: tx.trace(key, _Foreign(a), 8).value)(p["a"])
    assert_close(gradient, jnp.eye(8), atol=1e-6)
    numpy = _Foreign(np.asarray(p["a"]))  # pyright: ignore
    assert_close(tx.trace(key, numpy, 5).value, estimate.value)
    with pytest.raises(TypeError, match="dtype int32"):
        tx.trace(key, _Foreign(jnp.ones((3, 3), jnp.int32)), 2)


def _power(x, args):
    fn, factor, exponent = args
    return fn(factor * x**exponent)


@pytest.mark.x64
@pytest.mark.parametrize("closure_convert", [True, False])
def test_arguments_of_a_jacobian(key, closure_convert):
    x = jnp.linspace(0.5, 1, 9).astype(float_dtype())

    def trace(fn, args, k, x=x):
        operator = lx.JacobianLinearOperator(
            fn, x, args, closure_convert=closure_convert
        )
        return tx.trace(key, operator, k).value

    # Functions, Python numbers and arrays of NumPy.
    factors = np.linspace(1, 2, 9).astype(x.dtype)
    for args in ((jnp.tanh, 2.0, 2), (lambda v: v, factors, 3), (jnp.sin, x, 1)):
        expected = jnp.trace(jax.jacfwd(lambda x, args=args: _power(x, args))(x))
        assert_close(trace(_power, args, 9), expected, rtol=1e-4)
    net = eqx.nn.MLP(9, 9, 8, 1, activation=jnp.tanh, key=key, dtype=x.dtype)

    def of(net):
        return trace(lambda x, net: net(x), net, 9)

    def directly(net):
        return jnp.trace(jax.jacfwd(net)(x))

    value, gradient = eqx.filter_value_and_grad(of)(net)
    expected = eqx.filter_value_and_grad(directly)(net)
    assert_close(value, expected[0], rtol=1e-4)
    for got, wanted in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True
    ):
        assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.x64
def test_a_solve_inside_the_operator(key):
    p = parameters(20)
    a = p["a"] @ p["a"].T / 20 + jnp.eye(20, dtype=p["a"].dtype)

    def value(a):
        solver = lx.CG(rtol=1e-6, atol=1e-6)
        operator = lx.invert(lx.MatrixLinearOperator(a, PSD), solver)
        return tx.trace(key, operator, 20, tx.XNysTraceEstimator()).value

    got, gradient = jax.value_and_grad(value)(a)
    inverse = jnp.linalg.inv(a)
    assert_close(got, jnp.trace(inverse), rtol=1e-4)
    assert_close(gradient, -(inverse @ inverse).T, rtol=1e-2, atol=1e-3)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("kind", "k"), [("function", 16), ("jacobian over a PyTree", 17), ("matrix", 5)]
)
def test_large_blocks_are_multiplied_some_columns_at_a_time(monkeypatch, kind, k):
    p = parameters(20)
    rng = np.random.default_rng(0)
    block = jnp.asarray(rng.normal(size=(20, k)), float_dtype())

    def squares():
        def square(p, block):
            product = apply_block(OPERATORS[kind](p), block)
            return jnp.sum(product**2), product

        program = jax.jit(jax.value_and_grad(square, (0, 1), has_aux=True))
        return program.lower(p, block).as_text(), program(p, block)

    _, whole = squares()
    assert_close(whole[0][1], OPERATORS[kind](p).as_matrix() @ block, rtol=1e-3)
    # As if a block of 5 columns were large.
    monkeypatch.setattr("traceax._operators.block._CACHED", 5 * 20)
    text, several = squares()
    assert ("while" in text) == (k > 5)
    for x, y in zip(jax.tree.leaves(several), jax.tree.leaves(whole), strict=True):
        assert_close(x, y, rtol=1e-3, atol=1e-3)
