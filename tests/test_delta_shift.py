"""The estimator from `examples/delta_shift.py`, for slowly changing matrices."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import load_example, z_score
from helpers import many as from_scratch
from problems import as_operator, haar, matrix

import traceax as tx

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.x64  # the same in both modes

N, K, STEPS, NUMBER = 40, 20, 5, 2000


EXAMPLE = load_example("delta_shift")
ESTIMATOR = EXAMPLE.DeltaShiftEstimator()


def path(change, name="flat"):
    """A sequence of matrices that rotate and grow a little in each step."""
    a = matrix(name, N) + 0.2 * matrix("nonsymmetric", N) / N
    step = change * (haar(N, 7) - haar(N, 8)) / 3
    matrices = []
    for _ in range(STEPS):
        matrices.append(a)
        a = (1 + change) * (a + step @ a + a @ step.T)
    return jnp.asarray(np.stack(matrices))


def estimate_sequence(key, matrices, k=K):
    """Estimate every matrix, starting from the estimate before."""
    estimates = []
    keys = jr.split(key, len(matrices))
    for key, a in zip(keys, matrices, strict=True):
        past = EXAMPLE.past_of(estimates[-1]) if estimates else None
        state = ESTIMATOR.init(key, lx.MatrixLinearOperator(a), past)
        estimates.append(ESTIMATOR.estimate(state, k, throw=False))
    return estimates


@jax.jit
def many(matrices):
    """Values and standard errors over a fixed number of keys."""

    def run_once(key):
        estimates = estimate_sequence(key, matrices)
        pairs = [jnp.stack([x.value, x.standard_error]) for x in estimates]
        return jnp.stack(pairs, axis=1)

    return jnp.moveaxis(jax.vmap(run_once)(jr.split(jr.key(3), NUMBER)), 1, 0)


def test_estimates_are_unbiased_with_honest_error_bars():
    matrices = path(0.02, "poly")
    values, errors = map(np.asarray, many(matrices))
    truth = np.trace(matrices, axis1=1, axis2=2)
    for step in range(STEPS):
        assert z_score(values[:, step], truth[step]) < 4
        assert z_score(1.02 * values[:, step], truth[step]) > 4  # a bias of 2 %
    mean_square = np.mean((values - truth) ** 2, axis=0)
    ratio = np.sqrt(np.mean(errors**2, axis=0) / mean_square)
    assert np.all((ratio > 0.8) & (ratio < 1.3)), ratio


def test_earlier_estimates_save_products():
    matrices = path(0.005)
    values, _ = map(np.asarray, many(matrices))
    fresh, _ = from_scratch(
        tx.HutchinsonEstimator(), lx.MatrixLinearOperator(matrices[-1]), K, NUMBER
    )
    assert values[:, -1].std() < fresh.std() / 1.4


def test_a_jump_is_not_estimated_from_the_past():
    last = matrix("flat", N, seed=2)
    jump = np.stack([1e3 * (matrix("flat", N) - 2 * np.eye(N))] * (STEPS - 1) + [last])
    values, errors = map(np.asarray, many(jnp.asarray(jump)))
    truth = np.trace(last)
    assert z_score(values[:, -1], truth) < 4
    ratio = np.sqrt(np.mean(errors[:, -1] ** 2)) / np.std(values[:, -1])
    assert 0.8 < ratio < 1.3


def test_few_products_and_a_zero_operator(key):
    a, zero = matrix("flat", N), np.zeros((N, N))
    for before, now in ((a, zero), (zero, a)):
        estimate = estimate_sequence(key, jnp.asarray(np.stack([before, now])))[-1]
        assert abs(estimate.value - np.trace(now)) < 6 * estimate.standard_error + 1e-9
    # One probe leaves the error unknown, which must not persist. We also start from an
    # exact answer.
    for k in (1, N):
        first = ESTIMATOR.estimate(ESTIMATOR.init(key, as_operator(a)), k)
        assert np.isnan(first.standard_error) == (k == 1)
        state = ESTIMATOR.init(jr.key(1), as_operator(a), EXAMPLE.past_of(first))
        estimate = ESTIMATOR.estimate(state, K)
        assert abs(estimate.value - np.trace(a)) < 6 * estimate.standard_error
