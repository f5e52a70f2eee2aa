"""Estimates to a tolerance."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    OPERATORS,
    PSD,
    as_operator,
    assert_close,
    counting,
    exact_trace,
    float_dtype,
    matrix,
    parameters,
    z_score,
)

import traceax as tx
from traceax._accuracy.tolerance import LEAST_PRODUCTS, step_width

# The same in both modes.
pytestmark = pytest.mark.x64

N = 100
ESTIMATORS = {
    "hutchinson": tx.HutchinsonEstimator(),
    "xtrace": tx.XTraceEstimator(),
    "xnystrace": tx.XNysTraceEstimator(),
}
named = pytest.mark.parametrize("name", ESTIMATORS)
# Whose probes are left out and tested as they are.
OF_PROBES = {
    "xtrace, probes": tx.XTraceEstimator(resphere=False),
    "xnystrace, probes": tx.XNysTraceEstimator(resphere=False),
}


def half_width(estimate, level=0.95):
    low, high = estimate.confidence_interval(level)
    return (high - low) / 2


@eqx.filter_jit
def _run(keys, operator, estimator, rtol):
    def one(key):
        estimate = tx.trace(key, operator, 64, estimator, rtol=rtol, throw=False)
        met = estimate.result == tx.RESULTS.successful
        products = estimate.stats["num_matvecs"]
        return estimate.value, estimate.confidence_interval(), products, met

    return jax.vmap(one)(keys)


@named
def test_intervals_hold_the_truth_though_looked_at_repeatedly(name):
    a = matrix("exp", N)
    keys = jr.split(jr.key(5), 400)
    results = _run(keys, as_operator(a, psd=True), ESTIMATORS[name], 0.05)
    values, (low, high), products, met = jax.tree.map(np.asarray, results)
    truth = np.trace(a)
    # Three standard errors below 94 %.
    least = 0.94 - 3 * np.sqrt(0.94 * 0.06 / 400)
    assert np.mean((low <= truth) & (truth <= high)) > least
    if met.any():
        within = np.abs(values - truth) <= 0.05 * np.abs(values)
        assert np.mean(within[met]) > least
    # Interval and tolerance agree about what was met.
    half = (high - low) / 2
    assert np.all((half <= 0.05 * np.abs(values) * (1 + 1e-9)) == met)
    assert np.all(products[~met] == 64)
    if name != "hutchinson":
        assert met.all()
        assert len(np.unique(products)) > 1


def test_one_program_serves_all_tolerances(key):
    estimator = ESTIMATORS["xtrace"]
    operator = as_operator(matrix("flat", N), psd=True)
    calls = []

    @jax.jit
    def run(rtol):
        calls.append(rtol)
        return tx.trace(key, operator, 32, estimator, rtol=rtol, throw=False)

    estimates = [run(rtol) for rtol in (0.5, 0.1, 1e-9)]
    assert len(calls) == 1
    products = [int(x.stats["num_matvecs"]) for x in estimates]
    assert products[0] <= products[1] <= products[2] == 32 > products[0]
    assert estimates[0].result == tx.RESULTS.successful
    assert estimates[2].result == tx.RESULTS.tolerance_not_met
    assert half_width(estimates[0]) <= 0.5 * estimates[0].value
    # Lanes that stop at different times.
    lanes = jax.vmap(run)(jnp.asarray([0.5, 0.1, 1e-9], float_dtype()))
    for i, estimate in enumerate(estimates):
        assert lanes.stats["num_matvecs"][i] == products[i]
        assert_close(lanes.value[i], estimate.value, rtol=1e-4)
        assert_close(lanes.standard_error[i], estimate.standard_error, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "most", "rtol"),
    [("xtrace, probes", 24, 0.005), ("xnystrace", 64, 0)],
)
def test_a_tolerance_that_is_missed_gives_the_estimate_of_all_products(
    key, name, most, rtol
):
    estimator = {**ESTIMATORS, **OF_PROBES}[name]
    operator = as_operator(matrix("step", 200), psd=True)
    missed = tx.trace(key, operator, most, estimator, rtol=rtol, throw=False)
    fixed = tx.trace(key, operator, most, estimator)
    assert missed.stats["num_matvecs"] == most
    assert_close(missed.value, fixed.value)
    samples = most // 2 if name.startswith("xtrace") else most
    widened = fixed.standard_error * (1 + 2 / samples)
    assert_close(missed.standard_error, widened, rtol=1e-6)
    freedom = fixed.stats["degrees_of_freedom"]
    assert_close(missed.stats["degrees_of_freedom"], freedom, rtol=1e-6)


def test_derivatives_at_different_stops(key):
    estimator = ESTIMATORS["xtrace"]
    a = jnp.asarray(matrix("exp", N))

    def estimate(scale, rtol):
        operator = lx.MatrixLinearOperator(scale**2 * a, PSD)
        return tx.trace(key, operator, 32, estimator, rtol=rtol, throw=False).value

    @jax.jit
    def derivatives(scale, rtol):
        second = jax.hessian(estimate)(scale, rtol)
        return jax.grad(estimate)(scale, rtol), second

    rtols = jnp.asarray([0.3, 0.05, 1e-9])
    lanes = jax.jit(jax.vmap(jax.grad(estimate), (None, 0)))(1.3, rtols)
    for rtol, lane in zip(rtols, lanes, strict=True):
        first, second = derivatives(1.3, rtol)
        assert_close(first, lane, rtol=1e-8)
        # Unlike the value, an unbiased estimate for any change of the operator.
        assert abs(first / (2 * 1.3 * np.trace(a)) - 1) < 0.5
        assert_close(second, first / 1.3, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "n", "most"),
    [
        *(("hutchinson", 40, 32), ("xtrace", 40, 32)),
        ("xnystrace", 100, 12),
    ],
)
def test_gradients_are_unbiased(name, n, most):
    estimator = {**ESTIMATORS, **OF_PROBES}[name]
    a = jnp.asarray(matrix("exp", n))
    direction = jnp.asarray(matrix("flat", n, seed=4))

    def value(t, key):
        operator = lx.MatrixLinearOperator(a + t * direction, PSD)
        return tx.trace(key, operator, most, estimator, rtol=0.1, throw=False).value

    gradients = jax.jit(jax.vmap(jax.grad(value), (None, 0)))(
        0.0, jr.split(jr.key(2), 600)
    )
    assert z_score(gradients, jnp.trace(direction)) < 4


def test_operators_over_pytrees(key):
    kind = "jacobian over a PyTree"

    def value(given, rtol):
        operator = OPERATORS[kind](given)
        estimate = tx.trace(key, operator, 20, rtol=rtol, throw=False)
        return estimate.value, estimate.stats["num_matvecs"]

    given, direction = parameters(24), parameters(24, seed=8)

    @jax.jit
    def both(given, rtol):
        # Forward and reverse mode are two ways to the same derivative.
        found, gradient = jax.value_and_grad(value, has_aux=True)(given, rtol)
        tangent = jax.jvp(lambda x: value(x, rtol)[0], (given,), (direction,))[1]
        along = jax.tree.map(jnp.vdot, gradient, direction)
        return found, sum(jax.tree.leaves(along)), tangent

    (loose, few), along, tangent = both(given, 0.5)
    (tight, many), _, _ = both(given, 1e-3)
    exact = exact_trace(OPERATORS[kind](given))
    assert few < many
    assert_close(loose, exact, rtol=0.5)
    assert_close(tight, exact, rtol=0.1)
    assert_close(along, tangent, rtol=1e-4)


def test_complex_operators(key):
    a = matrix("exp", N, complex=True)
    for operator in (as_operator(a), as_operator(a, psd=True)):
        estimate = tx.trace(key, operator, 60, rtol=0.1)
        assert_close(jnp.real(estimate.value), np.trace(a).real, rtol=0.15)
        assert estimate.stats["num_matvecs"] < 60


def test_the_tolerance_is_of_the_whole_value(key):
    a = as_operator(matrix("poly", N), psd=True)
    ones = lx.DiagonalLinearOperator(jnp.full(N, 100.0, float_dtype()))
    alone = tx.trace(key, a, 80, rtol=1e-3, throw=False)
    # The exact part makes it easy.
    beside = tx.trace(key, -2.0 * a + ones, 80, rtol=1e-3)
    assert beside.stats["num_matvecs"] == 8 < alone.stats["num_matvecs"]
    assert half_width(beside) <= 1e-3 * abs(beside.value) * 1.001
    absolute = tx.trace(key, a, 80, atol=0.5)
    assert half_width(absolute) <= 0.5
    wide = tx.trace(key, a, 80, atol=0.5, level=0.5)
    assert wide.stats["num_matvecs"] <= absolute.stats["num_matvecs"]
    assert half_width(wide, 0.5) <= 0.5


def test_small_problems(key):
    for n in (8, 9):
        a = matrix("flat", n)
        estimate = tx.trace(key, as_operator(a), 40, rtol=1e-12, throw=False)
        if n <= 8:
            assert_close(estimate.value, np.trace(a), rtol=1e-5)
            assert estimate.result == tx.RESULTS.successful
        assert estimate.stats["num_matvecs"] <= n
    estimate = tx.trace(
        key, as_operator(matrix("flat", 30)), 2, rtol=1e-12, throw=False
    )
    assert estimate.result == tx.RESULTS.tolerance_not_met
    assert estimate.stats["num_matvecs"] <= 2
    zero = lx.MatrixLinearOperator(jnp.zeros((30, 30), float_dtype()), PSD)
    for name in ("xtrace", "xnystrace"):
        estimate = tx.trace(key, zero, 20, ESTIMATORS[name], rtol=1e-3)
        assert estimate.value == 0
    exact = tx.trace(key, lx.IdentityLinearOperator(zero.in_structure()), 5, rtol=0)
    assert exact.value == 30


@pytest.mark.parametrize("k", [40, 44, 60, 200, None])
def test_a_loop_that_fails_leaves_n_products_for_the_exact_answer(key, k):
    n = 40
    a = matrix("flat", n)
    operator, taken = counting(jnp.asarray(a, float_dtype()))
    operator = lx.TaggedLinearOperator(operator, PSD)
    estimate = tx.trace(key, operator, k, rtol=1e-5, throw=False)
    assert estimate.result == tx.RESULTS.successful
    assert_close(estimate.value, np.trace(a), rtol=1e-5)
    assert half_width(estimate) <= 1e-5 * estimate.value
    number = taken(estimate)
    assert number == estimate.stats["num_matvecs"] <= (k or 2 * n)
    assert tx.CHOICES[estimate.stats["choice"]] == tx.CHOICES[tx.CHOICES.budget]
    loose = tx.trace(key, operator, k, rtol=0.5, throw=False)
    few = k is None or k > 50
    assert (loose.stats["num_matvecs"] < n) == few


def test_derivatives_where_lanes_end_with_the_exact_answer(key):
    a = jnp.asarray(matrix("flat", 40), float_dtype())

    def value(scale, rtol):
        operator = lx.MatrixLinearOperator(scale**2 * a, PSD)
        estimate = tx.trace(key, operator, 80, rtol=rtol, throw=False)
        return estimate.value, estimate.stats["num_matvecs"]

    rtols = jnp.asarray([0.5, 1e-9], float_dtype())
    run = jax.jit(jax.vmap(jax.value_and_grad(value, has_aux=True), (None, 0)))
    (values, products), gradients = run(1.5, rtols)
    assert products[0] < 40 <= products[1] <= 80
    truth = 2.25 * jnp.trace(a)
    assert_close(values[0], truth, rtol=0.5)
    assert_close(values[1], truth, rtol=1e-5)
    assert_close(gradients[0], 2 * truth / 1.5, rtol=0.1)
    assert_close(gradients[1], 2 * truth / 1.5, rtol=1e-5)


def test_never_more_than_n_products_are_advised(key):
    operator = as_operator(matrix("flat", 40), psd=True)
    estimate = tx.trace(key, operator, 30, rtol=1e-6, throw=False)
    assert estimate.result == tx.RESULTS.tolerance_not_met
    assert estimate.stats["products_needed"] == 40
    assert "about 40 products" in str(estimate)


def test_failures(key):
    operator = as_operator(matrix("flat", N))
    with pytest.raises(Exception, match="tolerance was not met"):
        jax.block_until_ready(tx.trace(key, operator, 10, rtol=1e-9).value)
    nan = lx.MatrixLinearOperator(operator.matrix.at[0, 0].set(jnp.nan))
    failed = tx.trace(key, nan, 80, rtol=1e-9, throw=False)
    assert failed.result == tx.RESULTS.nonfinite
    assert failed.stats["num_matvecs"] < 80


@pytest.mark.parametrize(
    ("kind", "name"),
    [("lax", "xnystrace"), ("checkpointed", "xtrace")],
)
def test_inside_loops(key, kind, name):
    a = jnp.asarray(matrix("exp", 30))

    def step(carry, theta):
        i, x, total = carry
        operator = lx.FunctionLinearOperator(  # over what the loop carries
            lambda v: (x**2 + theta) * (a @ v), jax.eval_shape(lambda: a[0]), PSD
        )
        estimate = tx.trace(
            jr.fold_in(key, i),
            operator,
            16,
            ESTIMATORS[name],
            atol=5.0,
            throw=False,
        )
        return i + 1, jnp.sin(x + estimate.value), total + estimate.value

    def looped(theta):
        init = (jnp.asarray(0), theta, jnp.zeros_like(theta))
        return eqxi.while_loop(
            lambda carry: carry[0] < 2,
            lambda carry: step(carry, theta),
            init,
            max_steps=3,
            kind=kind,
        )[2]

    def unrolled(theta):
        carry = (jnp.asarray(0), theta, jnp.zeros_like(theta))
        for _ in range(2):
            carry = step(carry, theta)
        return carry[2]

    @jax.jit
    def both(theta):
        def forward(fn, theta):  # lax has no reverse mode
            return jax.jvp(fn, (theta,), (jnp.ones_like(theta),))

        def reverse(fn, theta):
            return jax.value_and_grad(fn)(theta)

        differentiate = forward if kind == "lax" else reverse
        return differentiate(looped, theta), reverse(unrolled, theta)

    jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-8), *both(1.3))


@pytest.mark.parametrize(("name", "most"), [("xtrace", 15), ("xnystrace", 37)])
def test_few_products_are_left_over(name, most):
    # Steps are equal: what is less than one is left.
    operator, taken = counting(matrix("step", N))
    estimate = tx.trace(
        jr.key(0), operator, most, ESTIMATORS[name], rtol=1e-9, throw=False
    )
    number = taken(estimate)
    assert most - 6 <= number <= most
    assert estimate.stats["num_matvecs"] == number


def test_steps():
    for most in range(1, 200):
        for fewest in (LEAST_PRODUCTS, LEAST_PRODUCTS // 2):
            width = step_width(most, fewest)
            assert min(most, fewest) <= width < 2 * fewest
            assert width <= most
            # Less is left over than by the narrowest steps.
            assert most % width <= most % min(fewest, most)


@pytest.mark.wrong_types
def test_wrong_arguments(key):
    operator = as_operator(matrix("flat", 20))
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="rtol must be finite and not negative"):
            tx.trace(key, operator, 10, rtol=wrong)
    for wrong in ("tight", 1j, np.ones(2), True):
        with pytest.raises(TypeError, match="atol must be a real number, got"):
            tx.trace(key, operator, 10, atol=wrong)
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1"):
        tx.trace(key, operator, 10, rtol=0.1, level=95)
    with pytest.raises(TypeError, match="level must be a Python number"):
        tx.trace(key, operator, 10, rtol=0.1, level="95 %")  # pyright: ignore
    with pytest.raises(TypeError, match="takes no tolerance; use"):
        tx.trace(key, operator, 10, tx.HutchPlusPlusEstimator(), rtol=0.1)
    with pytest.raises(TypeError, match="progress_meter must be a traceax"):
        tx.trace(key, operator, 10, progress_meter=tx.TextProgressMeter)  # pyright: ignore


def test_progress_is_shown(key, capfd):
    operator = as_operator(matrix("poly", N), psd=True)
    meter = tx.TextProgressMeter()
    for rtol in (0.2, 1e-9):
        estimate = tx.trace(
            key, operator, 40, rtol=rtol, progress_meter=meter, throw=False
        )
        jax.block_until_ready(estimate.value)
        jax.effects_barrier()
        shown = [
            float(x.strip("% \n"))
            for x in capfd.readouterr().out.split("\r")
            if x.strip()
        ]
        assert shown == sorted(shown)
        assert shown[-1] == 100
