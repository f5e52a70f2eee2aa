"""Inverse operators: solvers, their errors, and error bars that include these."""

from collections.abc import Callable

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

# These tests don't depend on the mode, so we run them in 64 bits only.
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
    def values_and_slopes(t):
        return [jax.value_and_grad(value)(t, key, N, solver) for solver in solvers]

    loose = 1e-9 if is_x64() else 1e-3
    truth, slope = jax.value_and_grad(exact)(t)
    for pair in values_and_slopes(t):
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
    # We expect tr log A^-1 = -log det A.
    a = hermitian("flat", N)
    inverse = tx.InverseLinearOperator(as_operator(a, psd=True), lx.LU())
    estimate = tx.logdet(jr.key(0), inverse, N)
    assert_close(estimate.value, -np.linalg.slogdet(a)[1], rtol=1e4 * eps())


def test_error_bars_of_exact_answers_include_solver_errors():
    n, key = 40, jr.key(0)
    u = np.linalg.qr(normal((n, n)))[0]

    @jax.jit
    def estimates(a, tolerance):
        operator = lx.MatrixLinearOperator(a, PSD)
        solver = lx.CG(tolerance, tolerance, max_steps=10_000)
        inverse = tx.InverseLinearOperator(operator, solver)
        answers = [
            tx.trace(key, inverse, n),
            tx.trace(key, 2.0 * inverse + operator, n),
            tx.diagonal(key, inverse, n),
            tx.frobenius_norm_squared(key, inverse, n),
        ]
        return [(estimate.value, estimate.standard_error) for estimate in answers]

    for condition in (10, 1e4):
        for tolerance in (1e-2, 1e-6, 1e-10):
            power = 1 if is_x64() else 0.5
            values = np.geomspace(condition**-power, 1, n)
            a = np.asarray(as_array((u * values) @ u.T), float)
            a = (a + a.T) / 2
            exact = np.linalg.inv(a)
            *answers, norm = estimates(as_array(a), as_array(tolerance**power))
            truths = np.trace(exact), np.trace(2 * exact + a), np.diag(exact)
            for (value, bar), truth in zip(answers, truths, strict=True):
                error = np.abs(value - truth)
                assert np.all(error <= 2 * bar)
                floor = 1e3 * eps() * np.abs(truth)
                assert np.all(bar <= 1e3 * np.max(error) + floor)
            # We bound the norm's error by whole columns, to first order in the
            # residual.
            assert abs(norm[0] - np.sum(exact**2)) <= norm[1]


def test_norms_of_thin_products_and_sums_with_an_inverse():
    a, thin = hermitian("flat", N), normal((N, 3))
    solver = lx.CG(rtol=1e-10, atol=1e-10)
    inverse = tx.InverseLinearOperator(as_operator(a, psd=True), solver)
    B = lx.MatrixLinearOperator(jnp.asarray(thin))
    estimate = tx.frobenius_norm_squared(jr.key(0), inverse @ B + B, 3)
    truth = np.linalg.norm(np.linalg.inv(a) @ thin + thin) ** 2
    assert_close(estimate.value, truth, rtol=1e-7)
    # We can't bound errors of solves inside products.
    assert np.isnan(estimate.standard_error)


COARSE = lx.CG(0.1, 0.1)


def three_unknowns():
    # CG with tolerance 0.1 makes errors of 1e-4 to 1e-2, relative to the trace.
    a = jnp.diag(jnp.array([1.0, 10.0, 100.0])) + 1
    A = lx.MatrixLinearOperator(a, PSD)
    return a, tx.InverseLinearOperator(A, COARSE)


class Influence(lx.AbstractLinearOperator):
    """A function after an inverse, in a custom class."""

    fn: Callable
    inverse: tx.InverseLinearOperator

    def mv(self, vector):
        return self.fn(self.inverse.mv(vector))

    def transpose(self):
        raise NotImplementedError

    def as_matrix(self):
        raise NotImplementedError

    def in_structure(self):
        return self.inverse.in_structure()

    def out_structure(self):
        return self.inverse.out_structure()


for check in CHECKS.values():
    check.register(Influence, lambda _: False)


def test_solver_errors_behind_functions():
    a, inverse = three_unknowns()
    x, exact = jnp.zeros(3), np.linalg.inv(np.asarray(a, float))
    double = tx.as_operator(lambda v: 2 * v, x)
    tilted = jnp.eye(3) + jnp.eye(3, k=1) / 4
    J = lx.JacobianLinearOperator(lambda x, _: tilted @ jnp.sin(x), x)
    j, unit = np.asarray(tilted, float), np.eye(3)
    nested = lx.TaggedLinearOperator(inverse, PSD)
    preconditioner = lx.TaggedLinearOperator(tx.as_operator(lambda v: v / 50, x), PSD)
    options = {"preconditioner": preconditioner}
    measured = [
        (double + inverse, 2 * unit + exact),
        ((J - 3.0 * inverse).T, (j - 3 * exact).T),
        (tx.InverseLinearOperator(inverse.operator, COARSE, options), exact),
    ]
    unknown = [
        (double @ inverse, 2 * exact),
        (lx.linearise(inverse @ double).T, 2 * exact),
        (J @ inverse @ J.T, j @ exact @ j.T),
        (Influence(lambda v: 2 * v, inverse), 2 * exact),
        (tx.as_operator(inverse.mv, x), exact),
        (tx.InverseLinearOperator(nested, lx.LU()), np.asarray(a, float)),
        (tx.MeanLinearOperator(lambda s: s * inverse, jnp.arange(3.0)), exact),
        (lx.TaggedLinearOperator(double @ inverse, lx.diagonal_tag), 2 * exact),
    ]
    truths = [np.trace(truth) for _, truth in measured + unknown]

    @jax.jit
    def traces():
        estimates = [
            tx.trace(jr.key(0), operator, 3, throw=False)
            for operator, _ in measured + unknown
        ]
        return [(x.value, x.standard_error) for x in estimates]

    for i, ((value, bar), truth) in enumerate(zip(traces(), truths, strict=True)):
        assert abs(value - truth) < 0.02 * truth
        if i < len(measured):
            assert abs(value - truth) <= 2 * bar < 0.02 * truth
        else:
            assert np.isnan(bar)


def test_nested_solvers_and_fixed_step_counts():
    # With fewer than n products, error bars include the solver's tolerance.
    _, inverse = three_unknowns()
    double = tx.as_operator(lambda v: 2 * v, jnp.zeros(3))
    solvers = COARSE, lx.Normal(COARSE), lx.CG(0.0, 0.0, max_steps=2), lx.LU()

    @jax.jit
    def estimates():
        operators = [tx.InverseLinearOperator(inverse.operator, x) for x in solvers]
        results = [tx.trace(jr.key(0), double @ x, 2, throw=False) for x in operators]
        return [(x.value, x.standard_error) for x in results]

    *inexact, (_, sampling_error) = estimates()
    for (value, bar), share in zip(inexact, (0.1, 0.1, np.nan), strict=True):
        expected = np.hypot(sampling_error, share * value)
        np.testing.assert_allclose(bar, expected, rtol=0.05)


def test_tolerances_include_solver_errors():
    n, key = 60, jr.key(0)
    a = as_array(hermitian("flat", n))
    truth = np.trace(np.linalg.inv(np.asarray(a, float)))

    @jax.jit
    def estimate(solver_tolerance):
        # We hide the diagonal, so that the whole inverse is estimated.
        structure = jax.ShapeDtypeStruct((n,), a.dtype)
        operator = lx.FunctionLinearOperator(lambda v: a @ v, structure, PSD)
        solver = lx.CG(solver_tolerance, solver_tolerance)
        inverse = tx.InverseLinearOperator(operator, solver)
        return tx.trace(key, inverse, 40, rtol=0.05, throw=False)

    coarse, fine = map(estimate, map(as_array, (0.05, 1e-5)))
    for result in (coarse, fine):
        low, high = result.confidence_interval()
        assert low <= truth <= high
        assert (high - low) / 2 <= 0.0501 * result.value or result is coarse
    assert coarse.result == tx.RESULTS.tolerance_not_met
    assert np.isinf(coarse.stats["products_needed"])
    assert "smaller tolerance" in str(coarse)
    assert fine.result == tx.RESULTS.successful
    # An exact answer measures the solver's error if it can.
    _, inverse = three_unknowns()
    for operator, met in ((inverse, True), (2 * inverse @ inverse, False)):
        result = tx.trace(key, operator, 3, rtol=0.02, throw=False)
        unmet = result.result == tx.RESULTS.tolerance_not_met
        assert unmet == (not met)
        assert np.isfinite(result.stats["products_needed"]) == met


def test_spectral_functions_and_slopes_include_solver_errors():
    a, inverse = three_unknowns()
    x, exact = jnp.zeros(3), np.linalg.inv(np.asarray(a, float))
    double = tx.as_operator(lambda v: 2 * v, x)
    truth = np.sum(np.exp(2 + np.linalg.eigvalsh(exact)))
    estimate = tx.trace_function(jr.key(0), jnp.exp, inverse + double, 3, throw=False)
    assert abs(estimate.value - truth) <= 2 * estimate.standard_error < 0.1 * truth
    operator = lx.TaggedLinearOperator(double @ inverse, PSD)
    estimate = tx.trace_function(jr.key(0), jnp.exp, operator, 3, throw=False)
    assert estimate.result == tx.RESULTS.successful
    assert np.isnan(estimate.standard_error)

    def scaled(t):
        operator = lx.MatrixLinearOperator(t * a, PSD)
        inverse = tx.InverseLinearOperator(operator, COARSE)
        return tx.trace(jr.key(0), inverse, 3, throw=False)

    _, slope = tx.jvp(scaled, (as_array(1.0),), (as_array(1.0),))
    assert np.isnan(slope.standard_error)


def test_products_are_homogeneous():
    # The solver's absolute tolerance must not stop it early for short vectors.
    a = as_array(hermitian("flat", N))
    inverse = tx.InverseLinearOperator(lx.MatrixLinearOperator(a, PSD), COARSE)
    x = as_array(normal(N))
    for scale in (2.0**-20, 2.0**20):
        assert_close(inverse.mv(scale * x) / scale, inverse.mv(x), rtol=100 * eps())


def test_diagonal_matrices_without_a_tag_for_it():
    # The remainder after two terms consists of rounding errors if D is the diagonal.
    n, key = 40, jr.key(0)
    d = np.stack(
        [
            np.linspace(1, 2, n),
            np.geomspace(0.01, 1, n),
            np.ones(n),
            1 / np.arange(1, n + 1),
        ]
    )
    nearly = d[0] * np.eye(n) + 1e-7 * matrix("signed", n)

    @jax.jit
    def run(a):
        operator = lx.MatrixLinearOperator(a, PSD)
        inverse = tx.InverseLinearOperator(operator, lx.CG(1e-6, 1e-6))
        estimate = tx.trace(key, inverse, 10, throw=False)
        return estimate.value, estimate.standard_error, estimate.result

    for dtype in (np.float32, np.float64):
        for matrix_64 in (*(np.diag(x) for x in d), nearly):
            a = matrix_64.astype(dtype)
            value, error, result = run(jnp.asarray(a))
            truth = np.trace(np.linalg.inv(a.astype(float)))
            assert result == tx.RESULTS.successful
            assert abs(value - truth) <= 4 * error <= 100 * eps(dtype) * truth


def test_products_that_are_nan_are_failures():
    # lineax's CG takes no step, and returns zeros as a solution.
    x = jnp.ones(N)
    broken = tx.as_operator(lambda v: v / jnp.sum(v**2), x, tags=PSD)
    inverse = tx.InverseLinearOperator(broken, lx.CG(1e-6, 1e-6))
    assert np.all(np.isnan(inverse.mv(x)))
    assert tx.trace(jr.key(0), inverse, 4, throw=False).result == tx.RESULTS.nonfinite
    whole = tx.InverseLinearOperator(lx.MatrixLinearOperator(jnp.eye(N), PSD), COARSE)
    assert not np.any(whole.mv(0 * x))


def test_operators_without_unknowns():
    identity = tx.as_operator(lambda v: v, jnp.zeros(0), tags=PSD)
    inverse = tx.InverseLinearOperator(identity, COARSE)
    assert inverse.mv(jnp.zeros(0)).shape == (0,)
    assert tx.trace(jr.key(0), inverse, 2).value == 0
    assert tx.trace_function(jr.key(0), jnp.log, inverse, 2).value == 0
