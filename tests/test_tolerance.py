"""Traces estimated to a tolerance."""

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
    assert_close,
    counting_operator,
    exact_trace,
    parameters,
    z_score,
)
from problems import PSD, as_operator, float_dtype, matrix

import traceax as tx

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = pytest.mark.x64

N = 100
ESTIMATORS = {
    "hutchinson": tx.HutchinsonEstimator(),
    "xtrace": tx.XTraceEstimator(),
    "xnystrace": tx.XNysTraceEstimator(),
}


def half_width(estimate, level=0.95):
    low, high = estimate.confidence_interval(level)
    return (high - low) / 2


@eqx.filter_jit
def _run(keys, operator, estimator, rtol):
    def run_once(key):
        estimate = tx.trace(key, operator, 64, estimator, rtol=rtol, throw=False)
        met = estimate.result == tx.RESULTS.successful
        products = estimate.stats["num_matvecs"]
        return estimate.value, estimate.confidence_interval(), products, met

    return jax.vmap(run_once)(keys)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_intervals_contain_the_truth_despite_repeated_looks(name):
    a = matrix("exp", N)
    keys = jr.split(jr.key(5), 400)
    results = _run(keys, as_operator(a, psd=True), ESTIMATORS[name], 0.05)
    values, (low, high), products, met = jax.tree.map(np.asarray, results)
    truth = np.trace(a)
    # We allow three standard errors below 94 %.
    lowest = 0.94 - 3 * np.sqrt(0.94 * 0.06 / 400)
    assert np.mean((low <= truth) & (truth <= high)) > lowest
    if met.any():
        within = np.abs(values - truth) <= 0.05 * np.abs(values)
        assert np.mean(within[met]) > lowest
    # The interval meets the tolerance exactly if the result says so.
    half = (high - low) / 2
    assert np.all((half <= 0.05 * np.abs(values) * (1 + 1e-9)) == met)
    assert np.all(products[~met] == 64)
    if name != "hutchinson":
        assert met.all()
        assert len(np.unique(products)) > 1


def test_one_program_serves_all_tolerances_and_their_derivatives(key):
    estimator = ESTIMATORS["xtrace"]
    a = jnp.asarray(matrix("exp", N))
    calls = []

    def estimate(scale, rtol):
        operator = lx.MatrixLinearOperator(scale**2 * a, PSD)
        estimated = tx.trace(key, operator, 32, estimator, rtol=rtol, throw=False)
        return estimated.value, estimated

    def first_and_second(scale, rtol):
        calls.append(rtol)
        second = jax.hessian(lambda scale: estimate(scale, rtol)[0])(scale)
        return *jax.value_and_grad(estimate, has_aux=True)(scale, rtol), second

    rtols = [0.3, 0.05, 1e-9]
    run = jax.jit(first_and_second)
    alone = [run(1.3, rtol) for rtol in rtols]
    assert len(calls) == 1
    estimates = [estimated for (_, estimated), _, _ in alone]
    products = [int(x.stats["num_matvecs"]) for x in estimates]
    assert products[0] <= products[1] <= products[2] == 32 > products[0]
    assert estimates[0].result == tx.RESULTS.successful
    assert estimates[2].result == tx.RESULTS.tolerance_not_met
    assert half_width(estimates[0]) <= 0.3 * estimates[0].value
    # With all products, the estimate equals one with a fixed budget, except for its
    # wider bar.
    fixed = tx.trace(key, lx.MatrixLinearOperator(1.3**2 * a, PSD), 32, estimator)
    assert_close(estimates[2].value, fixed.value)
    ratio = estimates[2].standard_error / fixed.standard_error
    assert 1 < ratio < 1.2
    # Batch elements stop at different times.
    run_batch = jax.jit(jax.vmap(jax.value_and_grad(estimate, has_aux=True), (None, 0)))
    (values, batch), gradients = run_batch(1.3, jnp.asarray(rtols))
    assert batch.stats["num_matvecs"].tolist() == products
    for i, ((value, one), first, second) in enumerate(alone):
        assert_close(values[i], value, rtol=1e-8)
        assert_close(batch.standard_error[i], one.standard_error, rtol=1e-2)
        assert_close(gradients[i], first, rtol=1e-8)
        # Unlike the value, the derivative is unbiased for any change in the operator.
        assert abs(first / (2 * 1.3 * np.trace(a)) - 1) < 0.5
        assert_close(second, first / 1.3, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "n", "most"), [("xtrace", 40, 32), ("xnystrace", 100, 12)]
)
def test_gradients_are_unbiased(name, n, most):
    estimator = ESTIMATORS[name]
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
    def value(p, rtol):
        operator = OPERATORS["jacobian over a PyTree"](p)
        estimate = tx.trace(key, operator, 20, rtol=rtol, throw=False)
        return estimate.value, estimate.stats["num_matvecs"]

    p = parameters(24)
    run = jax.jit(jax.value_and_grad(value, has_aux=True))
    ((loose, few), gradient), ((tight, many), _) = run(p, 0.5), run(p, 1e-3)
    assert few < many
    exact = jax.value_and_grad(
        lambda p: exact_trace(OPERATORS["jacobian over a PyTree"](p))
    )
    truth, slope = exact(p)
    assert_close(loose, truth, rtol=0.5)
    assert_close(tight, truth, rtol=0.1)
    for x, y in zip(*map(jax.tree.leaves, (gradient, slope)), strict=True):
        assert_close(x, y, rtol=0.5, atol=0.5 * np.max(np.abs(y)))


def test_complex_operators(key):
    a = matrix("exp", N, complex=True)
    estimate = tx.trace(key, as_operator(a, psd=True), 60, rtol=0.1)
    assert_close(estimate.value, np.trace(a).real, rtol=0.15)
    assert estimate.stats["num_matvecs"] < 60


def test_tolerances_apply_to_the_whole_value(key):
    a = as_operator(matrix("poly", N), psd=True)
    ones = lx.DiagonalLinearOperator(jnp.full(N, 100.0, float_dtype()))
    alone = tx.trace(key, a, 80, rtol=1e-3, throw=False)
    # The exact part makes the tolerance easy to meet.
    total = tx.trace(key, -2.0 * a + ones, 80, rtol=1e-3)
    assert total.stats["num_matvecs"] == 8 < alone.stats["num_matvecs"]
    assert half_width(total) <= 1e-3 * abs(total.value) * 1.001
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
    flat = as_operator(matrix("flat", 30))
    estimate = tx.trace(key, flat, 2, rtol=1e-12, throw=False)
    assert estimate.result == tx.RESULTS.tolerance_not_met
    assert estimate.stats["num_matvecs"] <= 2
    zero = lx.MatrixLinearOperator(jnp.zeros((30, 30), float_dtype()), PSD)
    assert tx.trace(key, zero, 20, rtol=1e-3).value == 0
    exact = tx.trace(key, lx.IdentityLinearOperator(zero.in_structure()), 5, rtol=0)
    assert exact.value == 30


@pytest.mark.parametrize("k", [44, 60, None])
def test_failed_loops_leave_n_products_for_an_exact_answer(key, k):
    n = 40
    a = matrix("flat", n)
    operator, count_products = counting_operator(jnp.asarray(a, float_dtype()))
    operator = lx.TaggedLinearOperator(operator, PSD)
    estimate = tx.trace(key, operator, k, rtol=1e-5, throw=False)
    assert estimate.result == tx.RESULTS.successful
    assert_close(estimate.value, np.trace(a), rtol=1e-5)
    assert half_width(estimate) <= 1e-5 * estimate.value
    number = count_products(estimate)
    assert number == estimate.stats["num_matvecs"] <= (k or 2 * n)
    assert tx.CHOICES[estimate.stats["choice"]] == tx.CHOICES[tx.CHOICES.budget]
    loose = tx.trace(key, operator, k, rtol=0.5, throw=False)
    saves_products = k is None or k > 50
    assert (loose.stats["num_matvecs"] < n) == saves_products


def test_derivatives_of_batches_with_an_exact_answer(key):
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


def test_failures(key):
    nan = as_operator(matrix("flat", N)).matrix.at[0, 0].set(jnp.nan)
    failed = tx.trace(key, lx.MatrixLinearOperator(nan), 80, rtol=1e-9, throw=False)
    assert failed.result == tx.RESULTS.nonfinite
    assert failed.stats["num_matvecs"] < 80


def test_inside_of_a_loop(key):
    a = jnp.asarray(matrix("exp", 30))

    def step(carry, theta):
        i, x, total = carry
        operator = lx.FunctionLinearOperator(  # closes over the loop's carry
            lambda v: (x**2 + theta) * (a @ v), jax.eval_shape(lambda: a[0]), PSD
        )
        step_key, xtrace = jr.fold_in(key, i), ESTIMATORS["xtrace"]
        estimate = tx.trace(step_key, operator, 16, xtrace, atol=5.0, throw=False)
        return i + 1, jnp.sin(x + estimate.value), total + estimate.value

    def looped(theta):
        return eqxi.while_loop(
            lambda carry: carry[0] < 2,
            lambda carry: step(carry, theta),
            (jnp.asarray(0), theta, jnp.zeros_like(theta)),
            max_steps=3,
            kind="checkpointed",
        )[2]

    def unrolled(theta):
        carry = (jnp.asarray(0), theta, jnp.zeros_like(theta))
        return step(step(carry, theta), theta)[2]

    @jax.jit
    def values_and_slopes(theta):
        return [jax.value_and_grad(fn)(theta) for fn in (looped, unrolled)]

    assert_close(*values_and_slopes(1.3), rtol=1e-8)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        ({"rtol": -1.0}, ValueError, "rtol must be finite and not negative"),
        ({"rtol": np.nan}, ValueError, "rtol must be finite and not negative"),
        ({"atol": "tight"}, TypeError, "atol must be a real number, got"),
        ({"atol": np.ones(2)}, TypeError, "atol must be a real number, got"),
        ({"atol": True}, TypeError, "atol must be a real number, got"),
        ({"rtol": 0.1, "level": 95}, ValueError, "level must lie strictly between"),
        ({"rtol": 0.1, "level": "95 %"}, TypeError, "level must be a Python number"),
        (
            {"rtol": 0.1, "estimator": tx.HutchPlusPlusEstimator()},
            *(TypeError, "takes no tolerance; use"),
        ),
        (
            {"progress_meter": tx.TextProgressMeter},
            *(TypeError, "progress_meter must be a traceax"),
        ),
    ],
)
def test_wrong_arguments(key, given, kind, match):
    with pytest.raises(kind, match=match):
        tx.trace(key, as_operator(matrix("flat", 20)), 10, **given)


def test_progress_is_shown(key, capfd):
    operator = as_operator(matrix("poly", N), psd=True)
    meter = tx.TextProgressMeter()
    for rtol in (0.2, 1e-9):
        tx.trace(key, operator, 40, rtol=rtol, progress_meter=meter, throw=False)
        jax.effects_barrier()
        drawn = capfd.readouterr().out.split("\r")
        shown = [float(x.strip("% \n")) for x in drawn if x.strip()]
        assert shown == sorted(shown)
        assert shown[-1] == 100
