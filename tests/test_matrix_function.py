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


@eqx.filter_jit
def _mv(operator, vector):
    return operator.mv(vector)


def _function(a, fn, steps=N, tags=PSD, of=()):
    operator = lx.MatrixLinearOperator(as_array(a), tags)
    return tx.MatrixFunctionLinearOperator(operator, fn, steps, of)


#
# Functions
#


@COMPLEX
def test_products_of_hermitian_operators(complex):
    vector = normal(N, complex)
    for kind in ("flat", "rank 5", "small projector", "twice the identity", "zero"):
        a = hermitian(kind, N, complex)
        for fn, exact in (
            (jnp.exp, np.exp),
            (lambda x: x**3 + x, lambda x: x**3 + x),
        ):
            got = _mv(_function(a, fn), as_array(vector))
            expected = _dense(exact, a) @ vector
            scale = np.linalg.norm(_dense(exact, a), 2) * np.linalg.norm(vector)
            assert_close(got, expected, rtol=0, atol=100 * eps() * scale)


def test_products_are_exact_for_polynomials():
    # Degree s - 1 from s steps, and not more.
    a = matrix("signed", 40)
    for steps in (1, 3):
        vector = normal(40)
        for degree in (steps - 1, steps):
            fn = functools.partial(_power, degree)
            got = _mv(_function(a, fn, steps, lx.symmetric_tag), as_array(vector))
            expected = np.linalg.matrix_power(a, degree) @ vector
            off = np.linalg.norm(wide(got) - expected) / np.linalg.norm(vector)
            if degree < steps:
                assert off < 1e3 * eps()
            else:
                assert off > 0.01


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

    inner = lx.FunctionLinearOperator(product, structure, PSD)
    operator = tx.MatrixFunctionLinearOperator(inner, jnp.sqrt, N)
    x = as_array(normal(N))
    got = operator.mv((x[:2], x[2:].reshape(5, 2)))
    assert got[1].shape == (5, 2)
    flat = np.concatenate([got[0], got[1].reshape(-1)])
    expected = _dense(np.sqrt, a)
    assert_close(flat, expected @ wide(x), rtol=0, atol=1e3 * eps())
    assert_close(operator.as_matrix(), expected, rtol=0, atol=1e3 * eps())
    materialised = lx.materialise(operator)
    assert materialised.in_structure() == structure
    assert_close(materialised.as_matrix(), expected, rtol=0, atol=1e3 * eps())
    assert_close(lx.diagonal(operator), np.diag(expected), rtol=0, atol=1e3 * eps())


def test_products_with_nothing():
    operator = _function(hermitian("flat", N), jnp.exp)
    assert not np.any(operator.mv(as_array(np.zeros(N))))
    gradient = jax.grad(lambda x: jnp.sum(operator.mv(x)))(as_array(np.zeros(N)))
    dense = _dense(np.exp, hermitian("flat", N))
    # The transpose is applied to ones.
    assert_close(gradient, dense.sum(axis=0), rtol=1e4 * eps())


@COMPLEX
def test_structure(complex):
    a = hermitian("flat", N, complex)
    exact = _dense(np.sqrt, a)
    operator = _function(a, jnp.sqrt, of=PSD)
    atol = 1e3 * eps()
    assert_close(operator.as_matrix(), exact, rtol=0, atol=atol)
    assert_close(operator.T.as_matrix(), exact.T, rtol=0, atol=atol)
    assert_close(lx.conj(operator).as_matrix(), exact.conj(), rtol=0, atol=atol)
    assert lx.is_positive_semidefinite(operator)
    assert not lx.is_negative_semidefinite(operator)
    untagged = _function(a, jnp.sqrt)
    assert not lx.is_positive_semidefinite(untagged)
    assert lx.is_symmetric(_function(a.real, jnp.sqrt, tags=lx.symmetric_tag))
    assert untagged.in_structure() == untagged.out_structure()
    assert_close(lx.materialise(operator).as_matrix(), exact, rtol=0, atol=atol)
    assert lx.is_positive_semidefinite(lx.materialise(operator))
    assert_close(lx.diagonal(operator), np.diag(exact), rtol=0, atol=atol)
    for got, offset in zip(lx.tridiagonal(operator), (0, -1, 1), strict=True):
        assert_close(got, np.diag(exact, offset), rtol=0, atol=atol)
    assert not lx.is_tridiagonal(operator)
    assert _function(a, jnp.sqrt, 100).num_steps == N


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
    x = as_array(normal(N))
    hessian = jax.hessian(lambda x: x @ operator.mv(x))(x)
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
    values, gradients = run(t, jr.split(jr.key(0), 500))
    # The Krylov error of 14 steps is 1e-8.
    floor = 1e-7 if is_x64() else 1e-5
    assert z_score(values, exact(t), floor) < 4
    assert z_score(gradients, jax.grad(exact)(t), floor) < 4
    assert z_score(values * 1.02, exact(t)) > 5
    exact_for_n = jax.jit(jax.value_and_grad(lambda t: _trace_of_root(a + t * b, n)))
    got, slope = exact_for_n(t)
    assert_close(got, exact(t), rtol=1e3 * eps())
    assert_close(slope, jax.grad(exact)(t), rtol=1e5 * eps())


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
