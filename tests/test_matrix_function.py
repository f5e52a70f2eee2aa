"""f(A) as an operator, against dense matrices."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import NSD, PSD, as_operator, assert_close, is_x64, matrix, z_score
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads
from spectral_helpers import (
    as_array,
    eps,
    hermitian,
    normal,
    relaxed,  # noqa: F401
    wide,
)

import traceax as tx

# In the 32-bit mode the kernels and the entry points are tested.
pytestmark = pytest.mark.x64

N = 12
COMPLEX = pytest.mark.parametrize("complex", [False, True])


def _dense(fn, a):
    values, vectors = np.linalg.eigh(a)
    return (vectors * np.asarray(fn(values))) @ vectors.conj().T


def _function(a, fn, steps=N, tags=PSD, of=()):
    operator = lx.MatrixLinearOperator(as_array(a), tags)
    return tx.MatrixFunctionLinearOperator(operator, fn, steps, of)


#
# Functions
#


FUNCTIONS = (lambda x: x**3 + x, jnp.exp)


@jax.jit
def _products(a, vector):
    operator = lx.MatrixLinearOperator(a, PSD)
    functions = (tx.MatrixFunctionLinearOperator(operator, f, N) for f in FUNCTIONS)
    return [function.mv(vector) for function in functions]


@COMPLEX
def test_products_of_hermitian_operators(complex):
    vector = normal(N, complex)
    for kind in ("flat", "rank 5", "small projector", "twice the identity", "zero"):
        a = hermitian(kind, N, complex)
        found = _products(as_array(a), as_array(vector))
        for got, fn in zip(found, FUNCTIONS, strict=True):
            dense = _dense(fn, a)
            scale = np.linalg.norm(dense, 2) * np.linalg.norm(vector)
            assert_close(got, dense @ vector, rtol=0, atol=100 * eps() * scale)


def test_products_are_exact_for_polynomials():
    # Degree s - 1 from s steps, and not more.
    a, vector = matrix("signed", 40), normal(40)

    @jax.jit
    def products(vector):
        def product(steps, degree):
            fn = functools.partial(_power, degree)
            return _function(a, fn, steps, lx.symmetric_tag).mv(vector)

        return {(s, d): product(s, d) for s in (1, 3) for d in (s - 1, s)}

    for (steps, degree), got in products(vector).items():
        expected = np.linalg.matrix_power(a, degree) @ vector
        off = np.linalg.norm(wide(got) - expected) / np.linalg.norm(vector)
        assert off < 1e3 * eps() if degree < steps else off > 0.01


def _power(degree, x):
    return x**degree if degree else jnp.ones_like(x)


def test_products_over_pytrees():
    a = hermitian("flat", N)
    matrix = as_array(a)
    structure = (
        jax.ShapeDtypeStruct((2,), matrix.dtype),
        jax.ShapeDtypeStruct((5, 2), matrix.dtype),
    )

    def product(v):
        out = matrix @ jnp.concatenate([v[0], v[1].reshape(-1)])
        return out[:2], out[2:].reshape(5, 2)

    @jax.jit
    def found(x):
        inner = lx.FunctionLinearOperator(product, structure, PSD)
        operator = tx.MatrixFunctionLinearOperator(inner, jnp.sqrt, N)
        got = operator.mv((x[:2], x[2:].reshape(5, 2)))
        assert jax.eval_shape(lambda: got) == structure
        materialised = lx.materialise(operator)
        assert materialised.in_structure() == structure
        matrices = operator.as_matrix(), materialised.as_matrix()
        return ravel_pytree(got)[0], matrices, lx.diagonal(operator)

    expected, x = _dense(np.sqrt, a), normal(N)
    near = functools.partial(assert_close, rtol=0, atol=1e3 * eps())
    truths = expected @ x, (expected, expected), np.diag(expected)
    jax.tree.map(near, found(x), truths)


def test_products_with_nothing():
    a = hermitian("flat", N)

    @jax.jit
    def product_and_gradient(x):
        product, pullback = jax.vjp(_function(a, jnp.exp).mv, x)
        return product, *pullback(jnp.ones(N))

    product, gradient = product_and_gradient(np.zeros(N))
    assert not np.any(product)
    # The transpose is applied to ones.
    assert_close(gradient, _dense(np.exp, a).sum(axis=0), rtol=1e4 * eps())


def test_structure():
    a = hermitian("flat", N, True)
    operator, untagged = _function(a, jnp.sqrt, of=PSD), _function(a, jnp.sqrt)
    assert lx.is_positive_semidefinite(operator)
    assert not lx.is_negative_semidefinite(operator)
    assert not lx.is_positive_semidefinite(untagged)
    assert lx.is_symmetric(_function(a.real, jnp.sqrt, tags=lx.symmetric_tag))
    assert untagged.in_structure() == untagged.out_structure()
    assert not lx.is_tridiagonal(operator)
    assert _function(a, jnp.sqrt, 100).num_steps == N

    @eqx.filter_jit
    def found(operator):
        materialised = lx.materialise(operator)
        assert lx.is_positive_semidefinite(materialised)
        matrices = operator, materialised, operator.T, lx.conj(operator)
        bands = lx.diagonal(operator), *lx.tridiagonal(operator)
        return [x.as_matrix() for x in matrices], bands

    exact = _dense(np.sqrt, a)
    matrices = [exact, exact, exact.T, exact.conj()]
    bands = tuple(np.diag(exact, offset) for offset in (0, 0, -1, 1))
    near = functools.partial(assert_close, rtol=0, atol=1e3 * eps())
    jax.tree.map(near, found(operator), (matrices, bands))


@pytest.mark.parametrize(("steps", "complex"), [(N, False), (20, True)])
def test_first_derivatives(steps, complex):
    # 20 of 60 steps: the Krylov error of exp on [1, 3] is below rounding.
    n = N if steps == N else 60
    a, b = (as_array(hermitian("flat", n, complex, seed)) for seed in (0, 1))
    x = as_array(normal(n, complex))

    def product(t, p, x):
        operator = lx.MatrixLinearOperator(a + t * b, PSD)
        fn = tx.MatrixFunctionLinearOperator(operator, lambda z: jnp.exp(p * z), steps)
        y = fn.mv(x)
        return jnp.concatenate([y.real, y.imag]) if complex else y

    check_grads(
        jax.jit(product),
        (as_array(0.1), as_array(0.7), x),
        order=1,
        modes=("fwd", "rev"),
        rtol=1e-6,
    )
    with pytest.raises(NotImplementedError, match="f\\(A\\) as an operator"):
        jax.jit(jax.hessian(lambda t: jnp.sum(product(t, as_array(0.7), x))))(
            as_array(0.1)
        )


def test_any_order_with_respect_to_the_vector():
    operator = _function(hermitian("flat", N), jnp.exp)
    dense = _dense(np.exp, hermitian("flat", N))
    hessian = jax.jit(jax.hessian(lambda x: x @ operator.mv(x)))(normal(N))
    assert_close(hessian, 2 * dense, rtol=0, atol=1e4 * eps())


def test_traces():
    n, complex = 20, True
    a = as_array(hermitian("flat", n, complex))
    b = as_array(hermitian("signed", n, complex, 4))

    def value(t, key):
        inner = lx.MatrixLinearOperator(a + t * b, PSD)
        root = tx.MatrixFunctionLinearOperator(inner, jnp.sqrt, 14, PSD)
        return tx.trace(key, root, 8, tx.HutchinsonEstimator(), throw=False).value

    def exact(t):
        return jnp.sum(jnp.sqrt(jnp.linalg.eigvalsh(a + t * b)))

    run = jax.jit(jax.vmap(jax.value_and_grad(value), (None, 0)))
    t = as_array(0.2)
    truth, slope = jax.jit(jax.value_and_grad(exact))(t)
    values, gradients = run(t, jr.split(jr.key(0), 500))
    # The Krylov error of 14 steps is 1e-8.
    floor = 1e-7 if is_x64() else 1e-5
    assert z_score(values, truth, floor) < 4
    assert z_score(gradients, slope, floor) < 4
    assert z_score(values * 1.02, truth) > 5
    exact_for_n = jax.jit(jax.value_and_grad(lambda t: _trace_of_root(a + t * b, n)))
    got = exact_for_n(t)
    assert_close(got[0], truth, rtol=1e3 * eps())
    assert_close(got[1], slope, rtol=1e5 * eps())


def _trace_of_root(a, n):
    inner = lx.MatrixLinearOperator(a, PSD)
    root = tx.MatrixFunctionLinearOperator(inner, jnp.sqrt, n, PSD)
    return tx.trace(jr.key(0), root, n, throw=False).value


def test_tags():
    a = hermitian("flat", N)
    function = _function(a, jnp.exp, tags=NSD)
    assert not lx.is_negative_semidefinite(function)
    assert lx.is_symmetric(function)
    assert not lx.is_symmetric(_function(hermitian("flat", N, True), jnp.exp))


@COMPLEX
def test_operators_that_are_not_known_to_be_hermitian(complex):
    a = hermitian("flat", N, complex)
    for tags in ((), lx.symmetric_tag) if complex else ((),):
        with pytest.raises(ValueError, match=r"known to be Hermitian, got.*give it"):
            _function(a, jnp.exp, tags=tags)


@pytest.mark.wrong_types
def test_wrong_steps_and_functions():
    operator = as_operator(hermitian("flat", N), psd=True)
    make = tx.MatrixFunctionLinearOperator
    for steps in (2.0, True, None):
        with pytest.raises(TypeError, match="num_steps must be a positive int, got"):
            make(operator, jnp.exp, steps)
    with pytest.raises(ValueError, match="num_steps must be a positive int, got 0"):
        make(operator, jnp.exp, 0)
    with pytest.raises(ValueError, match="one scalar, not several"):
        make(operator, lambda x: (x, x), 3)
    with pytest.raises(TypeError, match="function of a real scalar"):
        make(operator, 3, 3)
    with pytest.raises(TypeError, match="lineax linear operator"):
        make(jnp.exp, operator, 3)


@COMPLEX
@pytest.mark.parametrize("lower", [None, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_roots_of_singular_operators(complex, lower, dtype):
    # Rounding takes Ritz values below 0, or below a declared end of the spectrum.
    b, vector = normal((50, 5), complex), normal(50, complex, seed=8)
    end = 0.0 if lower is None else lower
    left, sizes, _ = np.linalg.svd(b, full_matrices=False)
    kind = np.result_type(dtype, np.complex64) if complex else dtype
    a = jnp.asarray(b @ b.conj().T + end * np.eye(50), kind)
    for order in (2, 3, 8):

        def product(a, order=order):
            operator = lx.MatrixLinearOperator(a, PSD)
            root = tx.MatrixFunctionLinearOperator(
                operator, lambda t: (t - end) ** (1 / order), 30, lower=lower
            )
            return root.mv(jnp.asarray(vector, kind))

        truth = left @ (sizes ** (2 / order) * (left.conj().T @ vector))
        off = np.linalg.norm(wide(product(a)) - truth) / np.linalg.norm(truth)
        assert off < 100 * eps(dtype)
