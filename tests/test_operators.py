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
    assert_close,
    is_rounding,
    many,
    parameters,
    z_score,
)
from jax.flatten_util import ravel_pytree
from problems import PSD, as_operator, float_dtype, matrix

import traceax as tx
from traceax._operators.space import apply_block


def _structured():
    """Operators with readable diagonals, and the most products that reading them takes."""
    p = parameters(6)
    structure = jax.eval_shape(lambda: p["d"])
    lower, bands = jnp.tril(p["a"]), jnp.triu(jnp.tril(p["a"], 1), -1)

    def function(a, tags):
        return lx.FunctionLinearOperator(lambda v: a @ v, structure, tags)

    unit = jnp.fill_diagonal(lower, 1.0, inplace=False)
    return {
        "diagonal over a PyTree": (lx.DiagonalLinearOperator([p["d"], p["a"]]), 0),
        "matrix": (lx.MatrixLinearOperator(p["a"]), 6),
        "pytree": (OPERATORS["pytree"](p), 6),
        "unit diagonal": (function(unit, lx.unit_diagonal_tag), 0),
        "diagonal function": (function(jnp.diag(p["d"]), lx.diagonal_tag), 1),
        "tridiagonal function": (function(bands, lx.tridiagonal_tag), 2),
        "triangular function": (function(lower, lx.lower_triangular_tag), 6),
    }


@pytest.mark.x64
def test_diagonals_of_structures_are_read(key):
    operators = _structured()

    @jax.jit
    def run():
        def diagonal_and_trace(operator):
            entries = tx.diagonal(key, operator, 9).value
            return ravel_pytree(entries)[0], tx.trace(key, operator, 9)

        return {
            name: diagonal_and_trace(operator)
            for name, (operator, _) in operators.items()
        }

    for name, (diagonal, trace) in run().items():
        operator, limit = operators[name]
        truth = np.diagonal(operator.as_matrix())
        np.testing.assert_allclose(diagonal, truth, 1e-9, 1e-9, err_msg=name)
        assert_close(trace.value, np.sum(truth), rtol=1e-9)
        assert is_rounding(trace)
        assert int(trace.stats["num_matvecs"]) <= limit


def _by_products():
    p = parameters(6)
    a, d = lx.MatrixLinearOperator(p["a"]), lx.DiagonalLinearOperator(p["d"])
    structure = a.in_structure()
    function = lx.FunctionLinearOperator(lambda v: p["a"] @ v, structure)
    return {
        "function without closure conversion": lx.FunctionLinearOperator(
            lambda v: 2 * v, structure, closure_convert=False
        ),
        "jacobian over a PyTree": OPERATORS["jacobian over a PyTree"](p),
        "reverse jacobian": lx.JacobianLinearOperator(
            lambda x, _: jnp.sin(p["a"] @ x), p["d"], jac="bwd"
        ),
        "product": a @ function,
        "nested": -(
            (function + d * 2.0) / 3.0 + lx.IdentityLinearOperator(structure)
        ).T,
        "inverse": lx.invert(lx.TaggedLinearOperator(a @ a.T + d, PSD), lx.Cholesky()),
    }


@pytest.mark.x64
@pytest.mark.parametrize("name", list(_by_products()))
def test_every_class_is_exact_with_enough_products(key, name):
    operator = _by_products()[name]

    @eqx.filter_jit
    def diagonal_and_trace(operator):
        entries = tx.diagonal(key, operator, 6, tx.XTraceEstimator()).value
        return ravel_pytree(entries)[0], tx.trace(key, operator, 9)

    diagonal, trace = diagonal_and_trace(operator)
    truth = np.diagonal(operator.as_matrix())
    np.testing.assert_allclose(diagonal, truth, 1e-9, 1e-9)
    assert_close(trace.value, np.sum(truth), rtol=1e-9)
    assert is_rounding(trace)
    assert int(trace.stats["num_matvecs"]) <= 6
    low, high = trace.confidence_interval()
    assert low <= trace.value <= high


@pytest.mark.x64
def test_leaves_of_different_real_dtypes():
    a = np.asarray(parameters(9)["a"], np.float64)
    a = a @ a.T / 9
    wide = float_dtype()
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

    # lineax itself promotes the leaves' dtypes, so we allow it.
    with jax.numpy_dtype_promotion("standard"):
        operator = lx.FunctionLinearOperator(mv, structure, PSD)
        values, errors = many(tx.XNysTraceEstimator(), operator, 6, 500)
        exact = tx.trace(jr.key(0), operator, 9)
    assert values.dtype == wide
    assert z_score(values, np.trace(a)) < 5
    assert np.all(np.asarray(errors) > 0)
    assert_close(exact.value, np.trace(a), rtol=1e-2)


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
    # Gradients are unbiased, with variances about 1 / k.
    deviation = np.mean(np.asarray(gradients, np.float32), axis=0) - np.eye(40)
    assert np.max(np.abs(deviation)) < 0.2


@pytest.mark.x64
@pytest.mark.parametrize("estimator", FAMILIES)
def test_complex_results(key, estimator):
    psd = estimator == "xnystrace"
    a = matrix("flat" if psd else "nonsymmetric", 20, complex=True)
    operator = as_operator(a, psd)
    estimate = tx.trace(key, operator, 8, ESTIMATORS[estimator])
    assert not jnp.iscomplexobj(estimate.standard_error)
    if psd:
        assert not jnp.iscomplexobj(estimate.value)
        return
    assert estimate.value.dtype == operator.matrix.dtype
    low, high = estimate.confidence_interval()
    assert low.real < estimate.value.real < high.real
    assert low.imag < estimate.value.imag < high.imag


@pytest.mark.x64
def test_complex_gradients_pair_the_frozen_blocks(key):
    a = jnp.asarray(as_operator(matrix("nonsymmetric", 9, complex=True)).matrix)
    est = tx.XTraceEstimator()
    state = est.init(key, lx.MatrixLinearOperator(a))
    direction = jnp.ones_like(a) * (1 + 2j)

    def value(a):
        return tx.trace(key, lx.MatrixLinearOperator(a), 6, est).value

    @jax.jit
    def compute_derivatives(a):
        V, Z = est.compute(state, 6)[3]

        def frozen(a):
            return jnp.sum(Z.conj() * (a @ V))

        def derivatives(fn):
            gradient = jax.grad(lambda a: fn(a).imag)(a)
            return gradient, jax.jvp(fn, (a,), (direction,))[1]

        return derivatives(value), derivatives(frozen)

    near = functools.partial(assert_close, rtol=1e-9, atol=1e-9)
    jax.tree.map(near, *compute_derivatives(a))


class _Foreign(lx.AbstractLinearOperator):
    """A foreign operator, which registers few of lineax's checks."""

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


# lineax requires only these checks to make one.
for check in (
    lx.is_symmetric,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
):
    check.register(_Foreign)(lambda operator: False)


@pytest.mark.x64
def test_foreign_operators(key):
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

    def trace(fn, args):
        operator = lx.JacobianLinearOperator(
            fn, x, args, closure_convert=closure_convert
        )
        return tx.trace(key, operator, 9).value

    # Arguments may be functions, Python numbers and NumPy arrays.
    factors = np.linspace(1, 2, 9).astype(x.dtype)
    for args in ((jnp.tanh, 2.0, 2), (lambda v: v, factors, 3), (jnp.sin, x, 1)):
        expected = jnp.trace(jax.jacfwd(lambda x, args=args: _power(x, args))(x))
        assert_close(trace(_power, args), expected, rtol=1e-4)
    net = eqx.nn.MLP(9, 9, 8, 1, activation=jnp.tanh, key=key, dtype=x.dtype)

    @eqx.filter_jit
    def gradients(net):
        traces = (
            lambda net: trace(lambda x, net: net(x), net),
            lambda net: jnp.trace(jax.jacfwd(net)(x)),
        )
        return [eqx.filter_value_and_grad(trace_of)(net) for trace_of in traces]

    leaves, expected = map(jax.tree.leaves, gradients(net))
    for actual, exact in zip(leaves, expected, strict=True):
        assert_close(actual, exact, rtol=1e-3, atol=1e-4)


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
    # We lower the limit, so that a block with 5 columns counts as large.
    monkeypatch.setattr("traceax._operators.space._CACHED", 5 * 20)
    text, several = squares()
    assert ("while" in text) == (k > 5)
    for x, y in zip(jax.tree.leaves(several), jax.tree.leaves(whole), strict=True):
        assert_close(x, y, rtol=1e-3, atol=1e-3)
