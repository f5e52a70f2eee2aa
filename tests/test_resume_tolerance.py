"""Estimates to a tolerance that go on from earlier ones, and others that go on from them."""

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
from helpers import (
    OPERATORS,
    as_operator,
    assert_close,
    counting,
    draw,
    is_x64,
    matrix,
    parameters,
)
from test_resume import saved_and_loaded

import traceax as tx
from traceax._tolerance import phases

N, MOST = 100, 56
ESTIMATORS = {
    "hutchinson": tx.HutchinsonEstimator(),
    "hutchinson-chunks": tx.HutchinsonEstimator(chunk_size=8),
    "xtrace": tx.XTraceEstimator(),
    "xnystrace": tx.XNysTraceEstimator(),
    "xnystrace-plain": tx.XNysTraceEstimator(tx.RademacherSampler(), resphere=False),
}
ONE_OF_EACH = ["hutchinson", "xtrace", "xnystrace"]
NAMES = pytest.mark.parametrize(
    "name",
    ["hutchinson", "hutchinson-chunks", "xtrace", "xnystrace-plain"]
    if is_x64()
    else ["xtrace"],
)
RTOL = 1e-9 if is_x64() else 1e-3


def _loose_and_tight(name):
    return (0.8, 0.4) if name.startswith("hutchinson") else (0.3, 0.04)


def _begun(name, operator, key):
    """An estimate to a loose tolerance: its estimator and state, and how many it took."""
    estimator, rtol = ESTIMATORS[name], _loose_and_tight(name)[0]
    state = estimator.init(key, operator)
    begun = estimator.estimate(state, MOST, rtol=rtol)
    taken = int(begun.stats["num_matvecs"])
    assert taken < MOST / 2
    return estimator, state, begun, taken


def _operator(name, complex=False):
    a = matrix("poly", N, complex=complex)
    return as_operator(a, psd=name.startswith("xnystrace"))


def _assert_one_run(on, whole):
    assert_close(on.value, whole.value, rtol=RTOL)
    # Rounding of its squares, of an error bar that can be small.
    assert_close(on.standard_error, whole.standard_error, rtol=1e5 * RTOL)
    assert on.stats["num_matvecs"] == whole.stats["num_matvecs"]


@NAMES
def test_more_products_are_those_of_one_run(key, name):
    estimator, state, begun, taken = _begun(name, _operator(name), key)
    on = estimator.estimate(begun.state, 13)
    whole = estimator.estimate(state, taken + 13)
    assert_close(on.value, whole.value, rtol=RTOL)
    if name != "hutchinson-chunks":  # which tests chunks of its own for skewness
        _assert_one_run(on, whole)
    further = estimator.estimate(on.state, 12)
    whole = estimator.estimate(state, taken + 25)
    assert_close(further.value, whole.value, rtol=RTOL)
    assert further.stats["num_matvecs"] == whole.stats["num_matvecs"]


@NAMES
def test_a_smaller_tolerance_is_met_by_more(key, name):
    estimator, state, begun, taken = _begun(name, _operator(name), key)
    rtol = _loose_and_tight(name)[1]
    on = estimator.estimate(begun.state, MOST - taken, rtol=rtol)
    assert taken < on.stats["num_matvecs"] <= MOST
    low, high = on.confidence_interval()
    assert (high - low) / 2 <= rtol * on.value
    whole = estimator.estimate(state, int(on.stats["num_matvecs"]))
    assert_close(on.value, whole.value, rtol=RTOL)
    # And on, by a number of products.
    further = estimator.estimate(on.state, 7)
    whole = estimator.estimate(state, int(on.stats["num_matvecs"]) + 7)
    assert_close(further.value, whole.value, rtol=RTOL)


@pytest.mark.x64
@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize(("first", "complex"), [(5, False), (13, True)])
def test_a_tolerance_after_a_number_of_products(key, name, first, complex):
    operator = _operator(name, complex)
    estimator = ESTIMATORS[name]
    state = estimator.init(key, operator)
    begun = estimator.estimate(state, first)
    rtol = _loose_and_tight(name)[1]
    on = estimator.estimate(begun.state, MOST - first, rtol=rtol, throw=False)
    spent = int(on.stats["num_matvecs"])
    assert first <= spent + 1
    whole = estimator.estimate(state, spent)
    assert_close(on.value, whole.value, rtol=RTOL)
    assert on.standard_error > whole.standard_error  # widened
    met = on.confidence_interval()[1] - on.confidence_interval()[0]
    assert bool(on.result == tx.RESULTS.successful) == (
        spent < MOST - 1 or bool(met.real / 2 <= rtol * abs(on.value))
    )


@pytest.mark.x64
@pytest.mark.parametrize("name", ["hutchinson-chunks", "xtrace"])
def test_no_product_is_taken_twice(name):
    operator, taken = counting(matrix("poly", N))
    estimator = ESTIMATORS[name]
    state, spent = estimator.init(jr.key(0), operator), 0
    for arguments in (
        {"k": 60, "rtol": 0.5},
        {"k": 3},
        {"k": 60, "rtol": 0.2},
        {"k": 10, "rtol": 1e-9},
        {"k": 10, "rtol": 0.5},
        {"k": 1},
    ):
        estimate = estimator.estimate(state, **arguments, throw=False)
        number = taken(estimate)
        assert number <= arguments["k"]
        spent += number
        assert estimate.stats["num_matvecs"] == spent
        state = estimate.state
    assert number <= 1
    assert spent >= 18


@pytest.mark.x64
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_tolerance_that_is_met_takes_nothing(key, name):
    estimator, _, begun, taken = _begun(name, _operator(name), key)
    again = estimator.estimate(begun.state, 30, rtol=0.8)
    assert again.stats["num_matvecs"] == taken
    _assert_one_run(again, begun)
    assert again.state.kept.budget == taken


@pytest.mark.x64
@pytest.mark.parametrize("name", ["hutchinson", "xnystrace"])
def test_what_was_missed_is_met_by_more(key, name):
    estimator = ESTIMATORS[name]
    state = estimator.init(key, _operator(name))
    rtol = _loose_and_tight(name)[1]
    missed = estimator.estimate(state, 10, rtol=rtol, throw=False)
    assert missed.result == tx.RESULTS.tolerance_not_met
    assert missed.state.kept.budget == 10
    met = estimator.estimate(missed.state, 80, rtol=rtol)
    assert 10 < met.stats["num_matvecs"] <= 90
    low, high = met.confidence_interval()
    assert (high - low) / 2 <= rtol * met.value


@pytest.mark.x64
def test_states_are_saved_and_loaded(key):
    estimator, _, begun, _ = _begun("xtrace", _operator("xtrace"), key)
    loaded = saved_and_loaded(begun.state)
    jax.tree.map(
        np.testing.assert_array_equal,
        estimator.estimate(loaded, 8).value,
        estimator.estimate(begun.state, 8).value,
    )


@pytest.mark.x64
def test_probes_that_become_too_many_not_to_be_orthonormalised(key):
    # XNysTrace takes products of the probes themselves where n >= 8 k.
    operator = as_operator(matrix("poly", 400), psd=True)
    estimator = tx.XNysTraceEstimator()
    state = estimator.init(key, operator)
    begun = estimator.estimate(state, 48, rtol=0.1)
    taken = int(begun.stats["num_matvecs"])
    assert taken < 48
    for more in (2, 40):
        on = estimator.estimate(begun.state, more)
        _assert_one_run(on, estimator.estimate(state, taken + more))
        on = estimator.estimate(begun.state, more, rtol=1e-9, throw=False)
        assert on.stats["num_matvecs"] == taken + more
        whole = estimator.estimate(state, taken + more)
        assert_close(on.value, whole.value, rtol=RTOL)


@pytest.mark.x64
@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("name", ["xtrace", "xnystrace-plain"])
def test_low_rank_stays_exact(key, name, rank):
    u = np.linalg.qr(np.random.default_rng(0).standard_normal((N, N)))[0][:, :rank]
    a = (u * np.arange(1.0, rank + 1)) @ u.T
    estimator = ESTIMATORS[name]
    state = estimator.init(key, as_operator((a + a.T) / 2, psd=True))
    truth = rank * (rank + 1) / 2
    begun = estimator.estimate(state, 40, rtol=1e-3)
    assert_close(begun.value, truth, rtol=1e-10, atol=1e-10)
    for arguments in ({}, {"rtol": 0.0}):
        on = estimator.estimate(begun.state, 23, **arguments, throw=False)
        assert_close(on.value, truth, rtol=1e-10, atol=1e-10)
        assert on.standard_error < 1e-9


@pytest.mark.x64
@pytest.mark.parametrize("name", ["hutchinson-chunks", "xtrace", "xnystrace"])
def test_derivatives_are_those_of_one_run(key, name):
    operator = _operator(name)
    estimator, state, begun, taken = _begun(name, operator, key)
    rtol = _loose_and_tight(name)[1]

    def with_matrix(state, a):
        return eqx.tree_at(lambda s: s.operator.matrix, state, a)

    def gradient(state, k, **arguments):
        def value(a):
            return estimator.estimate(with_matrix(state, a), k, **arguments).value

        return jax.jit(jax.grad(value))(operator.matrix)

    more = {"k": MOST - taken, "rtol": rtol}
    spent = int(estimator.estimate(begun.state, **more).stats["num_matvecs"])
    on = gradient(begun.state, **more)
    assert_close(on, gradient(state, spent), rtol=1e-8, atol=1e-9)
    on = gradient(begun.state, 11)
    assert_close(on, gradient(state, taken + 11), rtol=1e-8, atol=1e-9)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("chunk_size", "done"), [(3, 0), (5, 0), (7, 1), (5, 14), (30, 14), (8, 9)]
)
def test_the_first_products_are_those_of_the_first_probes(key, chunk_size, done):
    a, most = matrix("poly", N), 40
    estimator = tx.HutchinsonEstimator(tx.NormalSampler(), chunk_size=chunk_size)
    state = estimator.init(key, as_operator(a))
    if done:
        state = estimator.estimate(state, done).state
    arguments = {"rtol": 1e-9, "throw": False}
    ended = estimator.estimate(state, most - done, **arguments).state
    *_, products, head = ended.kept.parts
    first = draw(tx.NormalSampler(), key, N, len(products), np.dtype("float64"))
    assert_close(products, first.T @ a @ first, rtol=1e-10)
    if head.any():  # else they are of a chunk of the estimate before
        assert_close(head, a @ first, rtol=1e-10)
    assert len(products) == (min(chunk_size, 16) if done >= chunk_size else 16)


@pytest.mark.x64
def test_operators_over_pytrees(key):
    p = parameters(20)
    operator = OPERATORS["jacobian over a PyTree"](p)
    estimator = tx.XTraceEstimator()
    state = estimator.init(key, operator)
    begun = estimator.estimate(state, 14, rtol=1e-3, throw=False)
    on = estimator.estimate(begun.state, 4)
    assert_close(on.value, estimator.estimate(state, 18).value, rtol=RTOL)


@pytest.mark.x64
def test_what_was_taken_helps_a_changed_operator(key):
    estimator, _, begun, taken = _begun("xtrace", _operator("xtrace"), key)
    changed = as_operator(1.01 * matrix("poly", N))
    refreshed = estimator.refresh(begun.state, jr.key(1), changed)
    assert refreshed.basis.shape == (N, taken // 2)
    anew = estimator.init(jr.key(1), changed)
    errors = [estimator.estimate(x, taken).standard_error for x in (refreshed, anew)]
    assert errors[0] < errors[1]
    # Products with a basis say nothing of probes.
    on = estimator.estimate(estimator.estimate(refreshed, 20).state, 30, rtol=0.5)
    assert on.stats["num_matvecs"] <= 30


@pytest.mark.parametrize("name", ONE_OF_EACH if is_x64() else ["hutchinson"])
def test_a_number_that_is_not_known_is_refused(key, name):
    operator, estimator = _operator(name), ESTIMATORS[name]

    def to_tolerance(key):
        return estimator.estimate(estimator.init(key, operator), MOST, rtol=0.7)

    def at_once(key):
        return estimator.estimate(to_tolerance(key).state, 8).value

    with pytest.raises(TypeError, match=r"made in the same program.*Return the"):
        jax.jit(at_once)(key)
    lanes = jax.vmap(to_tolerance)(jr.split(key, 2))
    with pytest.raises(TypeError, match=r"lanes of a vmap.*begin anew"):
        jax.vmap(lambda state: estimator.estimate(state, 8).value)(lanes.state)
    # One lane has one number.
    lane = jax.tree.map(lambda x: x[1] if eqx.is_array(x) else x, lanes)
    alone = to_tolerance(jr.split(key, 2)[1])
    assert lane.state.kept.budget == alone.state.kept.budget
    state = jax.tree.map(lambda x: x[1] if eqx.is_array(x) else x, lanes.state)
    for x in (lane.state, state):
        on, expected = (estimator.estimate(s, 8) for s in (x, alone.state))
        assert_close(on.value, expected.value, rtol=RTOL)
    # Returned from its program, it is known.
    alone = eqx.filter_jit(to_tolerance)(key)
    on = jax.jit(lambda state: estimator.estimate(state, 8).value)(alone.state)
    state = eqx.filter_jit(lambda key: to_tolerance(key).state)(key)
    assert_close(estimator.estimate(state, 8).value, on, rtol=RTOL)


@pytest.mark.x64
def test_loops_that_go_on_look_where_others_do():
    rng = np.random.default_rng(0)
    for _ in range(300):
        most, first = int(rng.integers(8, 300)), int(rng.choice([4, 8]))
        wide = bool(rng.integers(2))
        widest = None if rng.integers(2) else int(rng.integers(4, 40))
        done = int(rng.integers(1, most + 1))
        anew = phases(most, widest, first, wide=wide)
        after = phases(most, widest, first, wide=wide, done=done)
        looks, count = set(), 0
        for phase in anew:
            looks |= set(range(count + phase.width, phase.end + 1, phase.width))
            count = phase.end
        count = done
        for phase in after:
            assert (phase.end - count) % phase.width == 0
            steps = range(count + phase.width, phase.end + 1, phase.width)
            assert looks.issuperset(steps)
            count = phase.end
            assert widest is None or phase.width <= widest
        assert count == most
