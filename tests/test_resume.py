"""Estimates that resume from earlier products, to budgets and tolerances."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    counting_operator,
    is_rounding,
)
from problems import PSD, as_operator, matrix

import traceax as tx

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = pytest.mark.x64

N, MOST = 100, 56
RTOL = 1e-9
ESTIMATORS = {
    "hutchinson-chunks": tx.HutchinsonEstimator(chunk_size=8),
    "xtrace": tx.XTraceEstimator(tx.SphereSampler()),
    "xtrace-plain": tx.XTraceEstimator(tx.RademacherSampler(), resphere=False),
    "xnystrace": tx.XNysTraceEstimator(),
    "xnystrace-plain": tx.XNysTraceEstimator(tx.RademacherSampler(), resphere=False),
}


def saved_and_loaded(state):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    empty = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, state)
    return eqx.tree_deserialise_leaves(file, empty)


def assert_one_run(resumed, whole):
    assert_close(resumed.value, whole.value, rtol=RTOL)
    # An error bar comes from squares, so a small one has fewer digits.
    assert_close(resumed.standard_error, whole.standard_error, rtol=1e5 * RTOL)
    assert resumed.stats["num_matvecs"] == whole.stats["num_matvecs"]


@pytest.mark.parametrize("name", ["hutchinson-chunks", "xnystrace-plain"])
def test_resuming_equals_one_run(key, name):
    estimator = ESTIMATORS[name]
    state = estimator.init(key, as_operator(matrix("poly", N), psd=True))
    whole = estimator.estimate(state, 40)
    initial = estimator.estimate(state, 12)
    resumed = estimator.estimate(initial.state, 28)
    assert_one_run(resumed, whole)
    freedom = whole.stats["degrees_of_freedom"]
    assert_close(resumed.stats["degrees_of_freedom"], freedom, rtol=1e5 * RTOL)
    loaded = estimator.estimate(saved_and_loaded(initial.state), 28)
    assert_close(loaded.value, resumed.value, rtol=RTOL)


def test_only_new_products_are_taken():
    operator, count_products = counting_operator(matrix("exp", N))
    estimator = ESTIMATORS["xtrace"]
    state = estimator.init(jr.key(0), operator)
    spent = 0
    for k in (3, 9, 1):
        estimate = estimator.estimate(state, k, throw=False)
        number = count_products(estimate)
        spent += number
        # A later call may use the product that an odd budget left over.
        assert spent <= 3 + 9 + 1
        assert number <= k + 1
        state = estimate.state
    assert spent >= 3 + 9 + 1 - 2


@pytest.mark.parametrize("rtol", [None, 1e-9])
def test_derivatives_equal_one_run(key, rtol):
    estimator = ESTIMATORS["xtrace"]
    a = jnp.asarray(matrix("poly", N))

    def value(scale, *budgets):
        operator = lx.MatrixLinearOperator(jnp.diag(scale) @ a @ jnp.diag(scale), PSD)
        state = estimator.init(key, operator)
        for i, k in enumerate(budgets):
            tolerance = rtol if i else None
            estimate = estimator.estimate(state, k, rtol=tolerance, throw=False)
            state = estimate.state
        return estimate.value, estimate.stats["num_matvecs"]

    scale = jnp.linspace(0.5, 1.5, N)
    gradient = jax.jit(jax.grad(value, has_aux=True), static_argnums=(1, 2))
    resumed, spent = gradient(scale, 6, 20)
    assert 6 < spent <= 26
    assert_close(resumed, gradient(scale, int(spent))[0], rtol=1e-8)


def test_all_products_make_an_answer_exact(key):
    a = matrix("flat", 12)
    estimator = tx.XTraceEstimator()
    initial = estimator.estimate(estimator.init(key, as_operator(a)), 6)
    exact = estimator.estimate(initial.state, 12)
    assert_close(exact.value, np.trace(a), rtol=1e-5)
    assert is_rounding(exact)
    # With fewer than n further products, the answer stays an estimate.
    further = estimator.estimate(initial.state, 8)
    assert further.stats["num_matvecs"] <= 14
    assert_close(further.value, np.trace(a), rtol=0.2)


def test_custom_estimators_start_over(key):
    class Plain(tx.TraceEstimator):
        def init(self, key, operator):
            return tx.init_state(key, operator)

        def compute(self, state, k):
            inner = tx.HutchinsonEstimator()
            value, error, stats, blocks = inner.compute(state, k)
            return value, error, {"num_matvecs": stats["num_matvecs"]}, blocks

    operator = as_operator(matrix("flat", 12))
    state = Plain().init(key, operator)
    again = Plain().estimate(Plain().estimate(state, 4).state, 4)
    assert_close(again.value, Plain().estimate(state, 4).value)


def test_states_belong_to_one_configuration(key):
    operator = as_operator(matrix("exp", N))
    for one, other in (
        (tx.XTraceEstimator(), ESTIMATORS["xtrace-plain"]),
        (ESTIMATORS["hutchinson-chunks"], tx.HutchinsonEstimator(chunk_size=5)),
    ):
        state = one.estimate(one.init(key, operator), 4).state
        with pytest.raises(TypeError, match=r"which .* can't use; start over"):
            other.estimate(state, 4)


#
# Resuming before and after a tolerance
#


def _loose_and_tight(name):
    return (0.8, 0.4) if name.startswith("hutchinson") else (0.3, 0.015)


def _operator(name, complex=False):
    a = matrix("poly", N, complex=complex)
    return as_operator(a, psd=name.startswith("xnystrace"))


def _start(name, operator, key):
    """Start with a loose tolerance; return estimator, state, estimate and products."""
    estimator, rtol = ESTIMATORS[name], _loose_and_tight(name)[0]
    state = estimator.init(key, operator)
    initial = estimator.estimate(state, MOST, rtol=rtol)
    taken = int(initial.stats["num_matvecs"])
    assert taken < MOST / 2
    return estimator, state, initial, taken


def _half_width(estimate):
    low, high = estimate.confidence_interval()
    return jnp.real(high - low) / 2


@pytest.mark.parametrize("name", ["hutchinson-chunks", "xtrace"])
def test_resuming_after_a_tolerance(key, name):
    estimator, state, initial, taken = _start(name, _operator(name), key)
    resumed = estimator.estimate(initial.state, 12)
    assert_one_run(resumed, estimator.estimate(state, taken + 12))
    loaded = saved_and_loaded(initial.state)
    assert_close(estimator.estimate(loaded, 12).value, resumed.value, rtol=RTOL)
    # A smaller tolerance takes more products, and a met tolerance takes none.
    rtol = _loose_and_tight(name)[1]
    tight = estimator.estimate(initial.state, MOST - taken, rtol=rtol)
    spent = int(tight.stats["num_matvecs"])
    assert taken < spent <= MOST
    assert _half_width(tight) <= rtol * tight.value
    assert_close(tight.value, estimator.estimate(state, spent).value, rtol=RTOL)
    assert_one_run(estimator.estimate(initial.state, MOST - taken, rtol=0.8), initial)


@pytest.mark.parametrize(
    ("name", "first", "complex"),
    [("xtrace", 13, True), ("xnystrace", 2, False)],
)
def test_a_tolerance_after_a_number_of_products(key, name, first, complex):
    estimator, rtol = ESTIMATORS[name], _loose_and_tight(name)[1]
    state = estimator.init(key, _operator(name, complex))
    initial = estimator.estimate(state, first)
    resumed = estimator.estimate(initial.state, MOST - first, rtol=rtol, throw=False)
    spent = int(resumed.stats["num_matvecs"])
    assert first - 1 <= spent <= MOST
    whole = estimator.estimate(state, spent)
    assert_close(resumed.value, whole.value, rtol=RTOL)
    assert resumed.standard_error > whole.standard_error  # widened
    met = _half_width(resumed) <= rtol * abs(resumed.value)
    assert (resumed.result == tx.RESULTS.successful) == met
    assert met or spent >= MOST - 6


def test_no_product_is_taken_twice():
    operator, count_products = counting_operator(matrix("poly", N))
    estimator = ESTIMATORS["xtrace"]
    state, spent = estimator.init(jr.key(0), operator), 0
    for arguments in (
        {"k": 60, "rtol": 0.5},
        {"k": 3},
        {"k": 60, "rtol": 0.2},
        {"k": 10, "rtol": 1e-9},
    ):
        estimate = estimator.estimate(state, **arguments, throw=False)
        number = count_products(estimate)
        assert number <= arguments["k"]
        spent += number
        assert estimate.stats["num_matvecs"] == spent
        state = estimate.state
    assert spent >= 18


@pytest.mark.parametrize(("name", "rank"), [("xtrace", 6), ("xnystrace-plain", 0)])
def test_low_rank_stays_exact(key, name, rank):
    u = np.linalg.qr(np.random.default_rng(0).standard_normal((N, N)))[0][:, :rank]
    a = (u * np.arange(1.0, rank + 1)) @ u.T
    estimator = ESTIMATORS[name]
    state = estimator.init(key, as_operator((a + a.T) / 2, psd=True))
    truth = rank * (rank + 1) / 2
    initial = estimator.estimate(state, 40, rtol=1e-3)
    assert_close(initial.value, truth, rtol=1e-10, atol=1e-10)
    for arguments in ({}, {"rtol": 0.0}):
        resumed = estimator.estimate(initial.state, 24, **arguments, throw=False)
        assert_close(resumed.value, truth, rtol=1e-10, atol=1e-10)
        assert resumed.standard_error < 1e-9


def test_programs_resume_from_a_traced_number_of_products(key):
    name = "xtrace"
    operator = _operator(name)
    estimator, state, _, taken = _start(name, operator, key)
    loose, tight = _loose_and_tight(name)

    def further(key, rtol=loose, tolerance=None):
        initial = estimator.init(key, operator)
        initial = estimator.estimate(initial, MOST, rtol=rtol, throw=False)
        resumed = estimator.estimate(initial.state, 8, rtol=tolerance, throw=False)
        return initial.stats["num_matvecs"], resumed

    whole = estimator.estimate(state, taken + 8)
    assert_one_run(jax.jit(further)(key)[1], whole)
    # With a tolerance, jit gives the same as a single call.
    _, missed = jax.jit(lambda key: further(key, tolerance=1e-9))(key)
    assert_close(missed.value, whole.value, rtol=RTOL)
    assert missed.stats["num_matvecs"] == taken + 8
    # Every batch element has its own number of products.
    keys, rtols = jr.split(jr.key(8), 3), jnp.asarray([1.0, loose, tight])
    numbers, resumed = jax.jit(jax.vmap(further))(keys, rtols)
    assert len(set(numbers.tolist())) > 1
    assert np.array_equal(resumed.stats["num_matvecs"], numbers + 8)
    alone = estimator.init(keys[2], operator)
    alone = estimator.estimate(alone, int(numbers[2]) + 8)
    assert_close(resumed.value[2], alone.value, rtol=RTOL)


def test_states_of_other_quantities_are_refused(key):
    # From each state, an estimator would compute another number.
    operator, y = as_operator(matrix("flat", N), psd=True), jnp.ones(N)
    noise, krylov = jnp.full(N, 0.1), tx.KrylovAwareEstimator()
    spectral = {
        "logdet": tx.logdet(key, operator, 12, shift=noise),
        "gaussian_log_likelihood": tx.gaussian_log_likelihood(
            key, operator, y, shift=0.1
        ),
        "schatten_norm": tx.schatten_norm(key, operator, N, p=2.0),
        "frobenius_norm_squared": tx.frobenius_norm_squared(key, operator, 12),
        "jvp": tx.jvp(lambda s: tx.trace(key, operator * s, N), (0.1,), (1.0,))[1],
    }
    for name, estimate in spectral.items():
        with pytest.raises(TypeError, match=f"got one from traceax.{name}, whose"):
            krylov.estimate(estimate.state, 24)
    by_leaf, total = tx.leaf_traces(key, operator, 12)
    for estimate in (by_leaf, total):
        with pytest.raises(TypeError, match=r"got one from traceax\.leaf_traces"):
            ESTIMATORS["xnystrace"].estimate(estimate.state, 12)
    with pytest.raises(TypeError, match="state must be a SpectralState, got"):
        krylov.estimate(tx.trace(key, operator, 12).state, 24)
    with pytest.raises(TypeError, match="state must be a TraceState, got"):
        ESTIMATORS["xtrace"].estimate(tx.logdet(key, operator, 12).state, 24)
    # A plain log-determinant's state gives the same quantity.
    estimate = tx.logdet(key, operator, 12, shift=0.1)
    exact = krylov.estimate(estimate.state, N).value
    truth = np.linalg.slogdet(matrix("flat", N) + 0.1 * np.eye(N))[1]
    assert_close(exact, truth, rtol=1e-9)


@pytest.mark.parametrize("k", [6, 12])
def test_an_estimator_that_starts_over_says_so(key, k):
    operator = as_operator(matrix("flat", N))
    for estimator in (tx.AdaptiveXTraceEstimator(), tx.HutchPlusPlusEstimator()):
        first = estimator.estimate(estimator.init(key, operator), k // 2)
        with pytest.raises(TypeError, match="can't resume"):
            estimator.estimate(first.state, 12)
