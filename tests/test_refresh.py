"""Traces along a path of operators, each from the estimate before."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    is_rounding,
    rounding,
    z_score,
)
from helpers import many as from_scratch
from problems import as_operator, haar, matrix
from test_resume import assert_one_run, saved_and_loaded

import traceax as tx

# The same in both modes.
pytestmark = pytest.mark.x64

N, K, STEPS, NUMBER = 40, 12, 6, 600
ESTIMATORS = {
    "delta-shift": tx.DeltaShiftEstimator(),
    "delta-shift-plain": tx.DeltaShiftEstimator(
        tx.RademacherSampler(), resphere=False, basis_size=0
    ),
}


def path(change=0.02, complex=False, name="poly"):
    """Matrices that rotate and grow a little from each to the next."""
    a = matrix(name, N, complex) + 0.2 * matrix("nonsymmetric", N, complex) / N
    step = change * np.log(2) * (haar(N, 7, complex) - haar(N, 8, complex)) / 2
    found = []
    for _ in range(STEPS):
        found.append(a)
        a = (1 + change) * (a + step @ a + a @ step.conj().T)
    return np.stack(found)


def along(key, matrices, estimator, k=K):
    """The estimates of each of the matrices."""
    keys = jr.split(key, len(matrices))
    state = estimator.init(keys[0], lx.MatrixLinearOperator(matrices[0]))
    estimates = [estimator.estimate(state, k, throw=False)]
    for key, a in zip(keys[1:], matrices[1:], strict=True):
        operator = lx.MatrixLinearOperator(a)
        state = estimator.refresh(estimates[-1].state, key, operator)
        estimates.append(estimator.estimate(state, k, throw=False))
    return estimates


@eqx.filter_jit
def many(matrices, estimator, k=K):
    """Values, standard errors, and whether intervals hold the (real part of the) truth."""

    def outcome(a, estimate):
        low, high = map(jnp.real, estimate.confidence_interval())
        truth = jnp.real(jnp.trace(a))
        inside = (low <= truth) & (truth <= high)
        return estimate.value, estimate.standard_error, inside

    def step(state, given):
        key, a = given
        state = estimator.refresh(state, key, lx.MatrixLinearOperator(a))
        estimate = estimator.estimate(state, k, throw=False)
        return estimate.state, outcome(a, estimate)

    def one(key):
        state = estimator.init(key, lx.MatrixLinearOperator(matrices[0]), k)
        keys = jr.split(jr.fold_in(key, 1), len(matrices))
        return jax.lax.scan(step, state, (keys, matrices))[1]

    return jax.lax.map(one, jr.split(jr.key(3), NUMBER), batch_size=100)


@pytest.mark.parametrize(
    ("name", "complex"),
    [
        ("delta-shift", False),
        ("delta-shift-plain", False),
        ("delta-shift", True),
    ],
)
def test_estimates_along_a_path_are_unbiased(name, complex):
    matrices = path(complex=complex)
    truth = np.trace(matrices, axis1=1, axis2=2)
    results = many(jnp.asarray(matrices), ESTIMATORS[name])
    values, errors, inside = map(np.asarray, results)
    assert np.iscomplexobj(values) == complex
    for step in range(STEPS):
        assert z_score(values[:, step], truth[step]) < 4
    # A bias of 2 % does not pass; of signs without a basis, one of 5 %.
    bias = 0.05 if name == "delta-shift-plain" else 0.02
    assert complex or z_score((1 + bias) * values[:, -1], truth[-1]) > 4
    mean_square = np.mean(np.abs(values - truth) ** 2, axis=0)
    ratio = np.sqrt(np.mean(errors**2, axis=0) / mean_square)
    assert np.all((ratio > 0.85) & (ratio < 1.5)), ratio
    assert np.all(np.mean(inside, axis=0) > 0.92)


def test_the_past_is_worth_products():
    matrices = jnp.asarray(path(0.002, name="flat"))
    truth = np.trace(matrices[-1])
    values, _, _ = map(np.asarray, many(matrices, tx.DeltaShiftEstimator()))
    operator = lx.MatrixLinearOperator(matrices[-1])
    anew, _ = from_scratch(tx.XTraceEstimator(), operator, 2 * K, NUMBER)
    anew = np.asarray(anew)[:, None]
    errors = [np.sqrt(np.mean((x[:, -1] - truth) ** 2)) for x in (values, anew)]
    assert errors[0] < errors[1]


def test_an_operator_that_jumps_is_not_estimated_from_its_past():
    a, b = (matrix("flat", N, seed=seed) for seed in (1, 2))
    jump = np.stack([1e3 * (a - 2 * np.eye(N))] * (STEPS - 1) + [b])
    estimator = ESTIMATORS["delta-shift"]
    values, errors, _ = map(np.asarray, many(jnp.asarray(jump), estimator))
    assert z_score(values[:, -1], np.trace(b)) < 4
    anew, _, _ = map(np.asarray, many(jnp.asarray(np.stack([b] * STEPS)), estimator))
    assert values[:, -1].std() < 1.2 * anew[:, 0].std()
    assert np.abs(values[:, -1] - np.trace(b)).max() < 10 * np.mean(errors[:, -1])
    # In all steps, the past is worth little, and must not be worth more than that.
    spikes = [100 * np.diag(np.eye(N)[i]) + 0.1 * np.eye(N) for i in range(STEPS)]
    values, errors, _ = map(np.asarray, many(jnp.asarray(np.stack(spikes)), estimator))
    assert np.abs(values).max() < 5000
    truth = float(np.trace(spikes[0]))
    ratio = np.sqrt(np.mean(errors**2) / np.mean((values - truth) ** 2))
    assert 0.5 < ratio < 2


def test_scales_and_an_operator_that_is_not_finite(key):
    estimator, matrices = ESTIMATORS["delta-shift"], jnp.asarray(path()[:3])
    *_, last = along(key, matrices, estimator)
    for scale in (1e-20, 0.0):
        *_, scaled = along(key, scale * matrices, estimator)
        assert_close(scaled.value, scale * last.value, rtol=1e-3)
        assert_close(scaled.standard_error, scale * last.standard_error, rtol=1e-2)
        assert scaled.result == tx.RESULTS.successful
    for bad in (jnp.nan, jnp.inf):  # is forgotten
        *_, estimate = along(key, matrices.at[1].multiply(bad), estimator)
        assert estimate.result == tx.RESULTS.successful
        off = abs(estimate.value - jnp.trace(matrices[2]))
        assert off < 6 * estimate.standard_error


def test_a_state_that_was_taken_over_goes_on_and_is_saved(key):
    estimator, (first, second) = ESTIMATORS["delta-shift"], map(as_operator, path()[:2])
    state = estimator.estimate(estimator.init(key, first), K, throw=False).state
    state = estimator.refresh(state, jr.key(1), second)
    estimate = estimator.estimate(state, K, throw=False)
    loaded = estimator.estimate(saved_and_loaded(state), K, throw=False)
    assert_one_run(estimate, loaded)
    assert estimate.stats["num_matvecs"] == K

    # The operator as it is, with further probes.
    def further(key):
        past = estimator.estimate(estimator.init(key, second), K).state
        more = estimator.estimate(past, 8)
        off = abs(more.value - np.trace(path()[1])) / more.standard_error
        return off, more.stats["num_matvecs"], more.stats["weight_of_past"]

    off, products, weight = jax.jit(jax.vmap(further))(jr.split(key, 20))
    assert np.median(off) < 2
    assert np.all(products == 8)
    assert np.median(weight) > 0.2


def test_a_path_begins_in_a_scan(key):
    estimator, matrices = ESTIMATORS["delta-shift"], jnp.asarray(path()[:3])
    estimates = along(key, matrices, estimator)

    @jax.jit
    def scanned(keys, matrices):
        def step(state, given):
            key, a = given
            state = estimator.refresh(state, key, lx.MatrixLinearOperator(a))
            estimate = estimator.estimate(state, K, throw=False)
            return estimate.state, estimate.value

        state = estimator.init(keys[0], lx.MatrixLinearOperator(matrices[0]), K)
        return jax.lax.scan(step, state, (keys, matrices))[1]

    values = scanned(jr.split(key, len(matrices)), matrices)
    assert_close(values, jnp.stack([x.value for x in estimates]), rtol=rounding())


def test_derivatives_are_those_of_the_operator_as_it_is():
    estimator = tx.DeltaShiftEstimator()
    first, second = jnp.asarray(path()[:2])
    direction = jnp.asarray(matrix("nonsymmetric", N, seed=4))

    def last(key, first, second):
        return along(key, (first, second), estimator)[-1].value

    @jax.jit
    @jax.vmap
    def derivatives(key):
        of_first, of_second = jax.grad(last, (1, 2))(key, first, second)
        tangent = jax.jvp(lambda a: last(key, first, a), (second,), (direction,))[1]
        return jnp.sum(of_second * direction), tangent, jnp.max(jnp.abs(of_first))

    backward, forward, of_past = derivatives(jr.split(jr.key(0), 2000))
    assert_close(backward, forward, rtol=1e-7, atol=1e-9)
    assert np.all(of_past == 0)
    assert z_score(forward, jnp.trace(direction)) < 4


@pytest.mark.parametrize("ks", [(1, 1), (30, 6), (K, N)])
def test_budgets(key, ks):
    estimator = tx.DeltaShiftEstimator()
    first, second = (as_operator(a) for a in path()[:2])
    estimate = estimator.estimate(estimator.init(key, first), ks[0], throw=False)
    state = estimator.refresh(estimate.state, jr.key(1), second)
    estimate = estimator.estimate(state, ks[1], throw=False)
    assert estimate.stats["num_matvecs"] == ks[1]
    assert np.isnan(estimate.standard_error) == (ks[1] == 1)
    truth = np.trace(path()[1])
    if ks[1] == N:
        assert is_rounding(estimate)
        assert_close(estimate.value, truth, rtol=rounding())
    elif ks[1] > 1:
        assert abs(estimate.value - truth) < 30 * estimate.standard_error
    # And once more, from what this one left.
    state = estimator.refresh(estimate.state, jr.key(2), first)
    again = estimator.estimate(state, ks[0], throw=False)
    assert again.result == tx.RESULTS.successful


def test_operators_over_pytrees(key):
    estimator = tx.DeltaShiftEstimator()

    def hessian(x):
        def gradient(x, _):
            return jax.grad(lambda x: jnp.sum(x["u"] ** 4) + jnp.prod(x["w"]) ** 2)(x)

        return lx.JacobianLinearOperator(gradient, x)

    x = {"u": jnp.linspace(1.0, 2.0, 9), "w": jnp.asarray([[1.0], [2.0]])}
    state = estimator.estimate(estimator.init(key, hessian(x)), 8).state
    x = jax.tree.map(lambda y: 1.01 * y, x)
    state = estimator.refresh(state, jr.key(5), hessian(x))
    estimate = estimator.estimate(state, 8)
    truth = jnp.trace(hessian(x).as_matrix())
    assert abs(estimate.value - truth) < 6 * estimate.standard_error


def test_the_same_key_gives_fresh_probes(key):
    # With the probes that the basis was found with, the rest would be 0 for any operator.
    estimator, a = tx.DeltaShiftEstimator(), jnp.asarray(matrix("flat", N))

    def one(key):
        state = estimator.init(key, lx.MatrixLinearOperator(a))
        for _ in range(2):
            state = estimator.estimate(state, 12).state
            state = estimator.refresh(state, key, lx.MatrixLinearOperator(a))
        return estimator.estimate(state, 12).value

    values = jax.lax.map(one, jr.split(key, 500), batch_size=100)
    assert abs(z_score(values, jnp.trace(a))) < 4


@pytest.mark.wrong_types
def test_messages(key):
    estimator = tx.DeltaShiftEstimator()
    state = estimator.init(key, as_operator(np.eye(5)))
    with pytest.raises(ValueError, match="must have the structure of the state's"):
        estimator.refresh(state, key, as_operator(np.eye(6)))
    with pytest.raises(TypeError, match=r"type traceax.Estimate; pass its `\.state`"):
        estimator.refresh(estimator.estimate(state, 4), key, as_operator(np.eye(5)))
    operator = as_operator(np.eye(20))
    state_of_other = estimator.estimate(estimator.init(key, operator), 8).state
    with pytest.raises(TypeError, match="begin anew with XTraceEstimator"):
        tx.XTraceEstimator().estimate(state_of_other, 8)
    with pytest.raises(TypeError, match="takes no tolerance"):
        estimator.estimate(state, 4, rtol=0.1)
    for kind, match, given in (
        (TypeError, "basis_size must be an int", {"basis_size": 1.5}),
        (ValueError, "basis_size must be at least 0, got -1", {"basis_size": -1}),
        (ValueError, "rotation-invariant", {"sampler": tx.RademacherSampler()}),
        (ValueError, "independent", {"sampler": tx.OrthogonalSampler()}),
    ):
        with pytest.raises(kind, match=match):
            tx.DeltaShiftEstimator(**given)
