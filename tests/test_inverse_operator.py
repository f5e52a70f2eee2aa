"""What is special to inverses: solvers, what they leave, and what is said of it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    z_score,
)
from operator_catalogue import CHECKS
from problems import NSD, PSD, as_array, as_operator, hermitian, is_x64, matrix
from spectral_helpers import (
    eps,
    normal,
    relaxed,  # noqa: F401
)

import traceax as tx

# The same in both modes.
pytestmark = pytest.mark.x64

N = 12


def test_tags_are_inherited():
    a = as_array(hermitian("flat", N))
    checks = [CHECKS[name] for name in ("psd", "nsd", "symmetric", "lower")]
    tags = (PSD, NSD, lx.symmetric_tag, lx.lower_triangular_tag, lx.tridiagonal_tag)
    for tag in tags:
        operator = lx.MatrixLinearOperator(a, tag)
        inverse = tx.InverseLinearOperator(operator, lx.LU())
        for check in checks:
            assert check(inverse) == check(operator)
        assert not lx.is_tridiagonal(inverse)


def test_values_and_derivatives_of_traces():
    a, b = as_array(hermitian("flat", N)), as_array(hermitian("signed", N, seed=4))
    rtol = 1e-12 if is_x64() else 1e-6

    def value(t, key, k, solver):
        operator = lx.MatrixLinearOperator(a + t * b, PSD)
        inverse = tx.InverseLinearOperator(operator, solver)
        return tx.trace(key, inverse, k, tx.XTraceEstimator(), throw=False).value

    def exact(t):
        return jnp.trace(jnp.linalg.inv(a + t * b))

    t, key = as_array(0.2), jr.key(0)
    solvers = lx.CG(rtol=rtol, atol=rtol), lx.AutoLinearSolver(well_posed=True)

    @jax.jit
    def found(t):
        return [jax.value_and_grad(value)(t, key, N, solver) for solver in solvers]

    loose = 1e-9 if is_x64() else 1e-3
    truth, slope = jax.value_and_grad(exact)(t)
    for pair in found(t):
        assert_close(pair[0], truth, rtol=loose)
        assert_close(pair[1], slope, rtol=loose)

    @jax.jit
    def run(keys):
        return jax.vmap(lambda key: jax.grad(value)(t, key, 6, solvers[0]))(keys)

    assert z_score(run(jr.split(key, 1000)), slope, loose) < 4


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


def test_bars_of_exact_answers_hold_what_the_solver_leaves():
    n, key = 40, jr.key(0)
    u = np.linalg.qr(normal((n, n)))[0]

    @jax.jit
    def estimates(a, tolerance):
        operator = lx.MatrixLinearOperator(a, PSD)
        solver = lx.CG(tolerance, tolerance, max_steps=10_000)
        inverse = tx.InverseLinearOperator(operator, solver)
        found = [
            tx.trace(key, inverse, n),
            tx.trace(key, 2.0 * inverse + operator, n),
            tx.diagonal(key, inverse, n),
            tx.frobenius_norm_squared(key, inverse, n),
        ]
        return [(estimate.value, estimate.standard_error) for estimate in found]

    for condition in (10, 1e4):
        for tolerance in (1e-2, 1e-6, 1e-10):
            power = 1 if is_x64() else 0.5
            values = np.geomspace(condition**-power, 1, n)
            a = np.asarray(as_array((u * values) @ u.T), float)
            a = (a + a.T) / 2
            exact = np.linalg.inv(a)
            *found, norm = estimates(as_array(a), as_array(tolerance**power))
            truths = np.trace(exact), np.trace(2 * exact + a), np.diag(exact)
            for (value, bar), truth in zip(found, truths, strict=True):
                error = np.abs(value - truth)
                assert np.all(error <= 2 * bar)
                floor = 1e3 * eps() * np.abs(truth)
                assert np.all(bar <= 1e3 * np.max(error) + floor)
            # By the errors of whole columns, of first order in the residual.
            assert abs(norm[0] - np.sum(exact**2)) <= norm[1]


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
