"""The inverse of an operator as an operator, against dense matrices."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import NSD, PSD, as_operator, assert_close, is_x64, matrix, z_score
from spectral_helpers import (
    as_array,
    eps,
    hermitian,
    normal,
    relaxed,  # noqa: F401
)

import traceax as tx

# The same in both modes.
pytestmark = pytest.mark.x64

N = 12
COMPLEX = pytest.mark.parametrize("complex", [False, True])
SOLVERS = {
    "lu": lx.LU(),
    "cg": lx.CG(rtol=1e-12, atol=1e-12),
    "auto": lx.AutoLinearSolver(well_posed=True),
}


@pytest.mark.parametrize("solver", list(SOLVERS))
@COMPLEX
def test_inverses(solver, complex):
    a = hermitian("flat", N, complex)
    solve = SOLVERS[solver]
    if solver == "cg" and not is_x64():
        solve = lx.CG(rtol=1e-6, atol=1e-6)
    operator = as_operator(a, psd=True)
    inverse = tx.InverseLinearOperator(operator, solve)
    exact = np.linalg.inv(a)
    atol = 1e-10 if is_x64() else 1e-5
    assert_close(inverse.as_matrix(), exact, rtol=0, atol=atol)
    assert_close(inverse.T.as_matrix(), exact.T, rtol=0, atol=atol)
    assert_close(lx.conj(inverse).as_matrix(), exact.conj(), rtol=0, atol=atol)
    truth = np.trace(exact).real
    got = tx.trace(jr.key(0), inverse, N)
    assert_close(got.value, truth, rtol=10 * atol)
    estimate = tx.trace(jr.key(0), inverse, 9, tx.XNysTraceEstimator())
    assert abs(estimate.value - truth) < 6 * estimate.standard_error


def test_inverses_of_other_operators():
    a = matrix("nonsymmetric", N) + 2 * np.eye(N)
    inverse = tx.InverseLinearOperator(as_operator(a), lx.LU())
    exact = np.linalg.inv(a)
    assert_close(inverse.as_matrix(), exact, rtol=0, atol=1e3 * eps())
    assert_close(inverse.T.as_matrix(), exact.T, rtol=0, atol=1e3 * eps())
    assert_close(lx.diagonal(inverse), np.diag(exact), rtol=0, atol=1e3 * eps())


def test_tags_are_inherited():
    a = hermitian("flat", N)
    checks = {
        PSD: lx.is_positive_semidefinite,
        NSD: lx.is_negative_semidefinite,
        lx.symmetric_tag: lx.is_symmetric,
        lx.lower_triangular_tag: lx.is_lower_triangular,
    }
    for tag, check in checks.items():
        operator = lx.MatrixLinearOperator(as_array(a), tag)
        inverse = tx.InverseLinearOperator(operator, lx.LU())
        for other in checks.values():
            assert other(inverse) == other(operator)
        assert check(inverse)
        assert not lx.is_tridiagonal(inverse)


def test_derivatives_of_the_trace_of_an_inverse():
    a, b = hermitian("flat", N), hermitian("signed", N, seed=4)
    a, b = as_array(a), as_array(b)
    rtol = 1e-12 if is_x64() else 1e-6

    def value(t, key, k):
        operator = lx.MatrixLinearOperator(a + t * b, PSD)
        inverse = tx.InverseLinearOperator(operator, lx.CG(rtol=rtol, atol=rtol))
        return tx.trace(key, inverse, k, tx.XTraceEstimator(), throw=False).value

    def exact(t):
        return jnp.trace(jnp.linalg.inv(a + t * b))

    t = as_array(0.2)
    of_n = functools.partial(value, key=jr.key(0), k=N)
    first, second = jax.grad(exact)(t), jax.grad(jax.grad(exact))(t)
    loose = 1e-9 if is_x64() else 1e-3
    assert_close(jax.grad(of_n)(t), first, rtol=loose)
    assert_close(jax.jit(jax.hessian(of_n))(t), second, rtol=10 * loose)
    run = jax.jit(jax.vmap(jax.grad(lambda t, key: value(t, key, 6)), (None, 0)))
    samples = run(t, jr.split(jr.key(0), 1000))
    assert z_score(samples, first, loose) < 4


@pytest.mark.parametrize("k", [6, N])
def test_solves_that_fail(k):
    a = matrix("exp", N) + 1e-3 * np.eye(N)
    operator = as_operator(a, psd=True)
    solver = lx.CG(rtol=1e-12, atol=1e-12, max_steps=2)
    inverse = tx.InverseLinearOperator(operator, solver)
    assert np.all(np.isnan(inverse.mv(as_array(normal(N)))))
    estimate = tx.trace(jr.key(0), inverse, k, throw=False)
    assert estimate.result == tx.RESULTS.nonfinite
    with pytest.raises(Exception, match="a linear solve that failed"):
        jax.block_until_ready(tx.trace(jr.key(0), inverse, k).value)


@pytest.mark.wrong_types
def test_wrong_solvers():
    operator = as_operator(hermitian("flat", N))
    for solver in (lx.CG, None, "cg"):
        with pytest.raises(TypeError, match="solver must be a lineax solver"):
            tx.InverseLinearOperator(operator, solver)
    with pytest.raises(TypeError, match="lineax linear operator"):
        tx.InverseLinearOperator(lx.LU(), operator)


def test_functions_of_an_inverse():
    # tr log A^-1 = -log det A, by solves.
    a = hermitian("flat", N)
    inverse = tx.InverseLinearOperator(as_operator(a, psd=True), lx.LU())
    estimate = tx.logdet(jr.key(0), inverse, N)
    assert_close(estimate.value, -np.linalg.slogdet(a)[1], rtol=1e4 * eps())


@pytest.mark.parametrize("condition", [10, 1e4])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-10])
def test_bars_of_exact_answers_hold_what_the_solver_leaves(condition, tolerance):
    n = 40
    if not is_x64():
        condition, tolerance = condition**0.5, tolerance**0.5
    u = np.linalg.qr(normal((n, n)))[0]
    a = np.asarray(as_array((u * np.geomspace(1 / condition, 1, n)) @ u.T), float)
    a = (a + a.T) / 2
    solver = lx.CG(tolerance, tolerance, max_steps=10_000)
    inverse = tx.InverseLinearOperator(as_operator(a, psd=True), solver)
    exact = np.linalg.inv(a)
    key = jr.key(0)
    for estimate, truth in (
        (tx.trace(key, inverse, n), np.trace(exact)),
        (tx.trace(key, 2.0 * inverse + as_operator(a), n), np.trace(2 * exact + a)),
        (tx.diagonal(key, inverse, n), np.diag(exact)),
    ):
        error, bar = np.abs(estimate.value - truth), estimate.standard_error
        assert np.all(error <= 2 * bar)
        assert np.all(bar <= 1e3 * np.max(error) + 1e3 * eps() * np.abs(truth))
    # By the errors of whole columns, which are of first order in the residual.
    estimate = tx.frobenius_norm_squared(key, inverse, n)
    assert abs(estimate.value - np.sum(exact**2)) <= estimate.standard_error


def test_norms_of_thin_products_and_sums_with_an_inverse():
    a, thin = hermitian("flat", N), normal((N, 3))
    solver = lx.CG(rtol=1e-10, atol=1e-10)
    inverse = tx.InverseLinearOperator(as_operator(a, psd=True), solver)
    B = lx.MatrixLinearOperator(jnp.asarray(thin))
    estimate = tx.frobenius_norm_squared(jr.key(0), inverse @ B + B, 3)
    truth = np.linalg.norm(np.linalg.inv(a) @ thin + thin) ** 2
    assert_close(estimate.value, truth, rtol=1e-7)
    # Of solves inside of products nothing is known.
    assert np.isnan(estimate.standard_error)
