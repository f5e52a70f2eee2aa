"""Spectral functions estimated to a tolerance."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close
from problems import PSD, Problem, as_array, as_operator, matrix
from spectral_helpers import first_failure

import traceax as tx

N, K, M = 40, 36, 4
ESTIMATOR = tx.KrylovAwareEstimator(num_probes=M)


def _functions(shift):
    return lambda x: {"log": jnp.log(x + shift), "root": jnp.sqrt(x + 1)}


def _estimate(a, shift, rtol, key, k=K, estimator=ESTIMATOR):
    operator = lx.MatrixLinearOperator(a, PSD)
    return tx.trace_function(
        key, _functions(shift), operator, k, estimator, rtol=rtol, throw=False
    )


TRACED = []


@jax.jit
def _jitted(a, shift, rtol, key):
    TRACED.append(rtol)
    e = _estimate(a, shift, rtol, key)
    return e.value, e.confidence_interval(), e.stats, e.result


def _run(a, shift, rtol, key):
    return _jitted(as_array(a), as_array(shift), as_array(rtol), key)


def _sum(scale, shift, a, rtol, key, k=K):
    e = _estimate(scale * a, shift, rtol, key, k)
    return e.value["log"] + 2 * e.value["root"], (e.value, e.standard_error, e.stats)


def _assert_trees_close(x, y, rtol):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert_close(a, b, rtol=rtol)


def _met(interval, values, rtol):
    halves = jax.tree.map(lambda low, high: (high - low) / 2, *interval)
    met = jax.tree.map(lambda h, v: h <= rtol * abs(v) * (1 + 1e-5), halves, values)
    return all(jax.tree.leaves(met))


@pytest.mark.x64
def test_stopped_estimates_equal_fixed_budgets(key):
    a = jnp.asarray(matrix("exp", N))
    rtols = jnp.asarray([0.3, 0.03, 1e-12])
    run = jax.value_and_grad(_sum, (0, 1), has_aux=True)
    run_batch = jax.jit(jax.vmap(run, (None, None, None, 0, None)))
    batch = run_batch(1.3, 0.1, a, rtols, key)
    products = [int(x) for x in batch[0][1][2]["num_matvecs"]]
    assert products[0] < products[1] < products[2] == K
    for i in range(2):
        (total, (value, error, stats)), slopes = jax.tree.map(lambda x: x[i], batch)  # noqa: B023
        assert stats["num_matvecs"] == products[i]
        alone = jax.jit(run)(1.3, 0.1, a, rtols[i], key)
        assert_close(alone[0][0], total, rtol=1e-9)
        _assert_trees_close(alone[1], slopes, 1e-8)
        if i == 0:
            continue
        fixed = jax.jit(run, static_argnums=(3, 5))(1.3, 0.1, a, None, key, products[i])
        _assert_trees_close(value, fixed[0][1][0], 1e-9)
        _assert_trees_close(slopes, fixed[1], 1e-8)
        # The loop widens its bar, and rounds differently.
        for name, fixed_error in fixed[0][1][1].items():
            assert_close(error[name], (1 + 2 / M) * fixed_error, rtol=1e-6)
        weights, nodes = stats["ritz_weights"], stats["ritz_values"]
        assert_close(weights.sum(), N, rtol=1e-9)
        assert_close(weights @ (1 / (nodes + 0.1)), slopes[1], rtol=1e-9)


@pytest.mark.x64
def test_intervals_contain_the_truth_despite_repeated_looks():
    n = 100
    values = 100 * 0.8 ** np.arange(n) + 1.0
    a = as_operator(np.diag(values), psd=True)
    keys = jr.split(jr.key(5), 400)

    def run_once(key):
        e = tx.logdet(key, a, 60, rtol=0.03, throw=False)
        met = e.result == tx.RESULTS.successful
        return e.value, e.confidence_interval(), e.stats["num_matvecs"], met

    results = jax.jit(lambda keys: jax.lax.map(run_once, keys))(keys)
    value, (low, high), products, met = jax.tree.map(np.asarray, results)
    truth = np.log(values).sum()
    lowest = 0.94 - 3 * np.sqrt(0.94 * 0.06 / len(keys))
    assert np.mean((low <= truth) & (truth <= high)) > lowest
    assert np.all(((high - low) / 2 <= 0.03 * abs(value) * (1 + 1e-9)) == met)
    assert met.mean() > 0.9
    assert np.mean(abs(value - truth)[met] <= 0.03 * truth) > lowest
    assert len(np.unique(products)) > 1


@pytest.mark.x64
def test_one_program_serves_all_tolerances(key):
    a = matrix("exp", N)
    results = {rtol: _run(a, 0.1, rtol, key) for rtol in (0.3, 0.03, 0.0)}
    assert len(TRACED) == 1
    products = [int(stats["num_matvecs"]) for _, _, stats, _ in results.values()]
    assert products[0] < products[1] < products[2] == K
    for rtol, (value, interval, _, outcome) in results.items():
        result = first_failure(outcome)
        assert (result == tx.RESULTS.successful) == _met(interval, value, rtol)
    assert result == tx.RESULTS.tolerance_not_met


def test_krylov_spaces_that_stop_growing(key):
    low_rank = np.zeros((N, N))
    low_rank[:2, :2] = matrix("exp", 2)
    rtol = 1e-3
    for a in (np.zeros((N, N)), 2 * np.eye(N), low_rank):
        value, _, stats, result = _run(a, 0.1, rtol, key)
        assert first_failure(result) == tx.RESULTS.successful
        assert stats["num_matvecs"] <= 3 * M
        values = np.linalg.eigvalsh(a)
        assert_close(value["log"], np.log(values + 0.1).sum(), rtol=1e-3)
        assert_close(value["root"], np.sqrt(values + 1).sum(), rtol=1e-3)


@pytest.mark.x64
def test_failures_stop_early(key):
    a = matrix("exp", N)
    # One of two functions fails, and the loop continues for the other.
    _, _, stats, result = _run(a, -100.0, 1e-9, key)
    assert result["log"] == tx.RESULTS.outside_domain
    assert result["root"] != tx.RESULTS.outside_domain
    assert stats["num_matvecs"] == K
    a[0, 0] = np.nan
    _, _, stats, result = _run(a, 0.1, 1e-9, key)
    assert first_failure(result) == tx.RESULTS.nonfinite
    assert stats["num_matvecs"] < K


@pytest.mark.x64
def test_small_problems(key):
    for n, k in ((1, 40), (8, 40), (30, 1), (30, 9)):
        problem = Problem("flat", n)
        estimate = tx.logdet(key, problem.operator(), k, rtol=1e-12, throw=False)
        assert estimate.stats["num_matvecs"] <= min(n, k)
        if k >= n:
            assert_close(estimate.value, problem.logdet(), rtol=1e-9)
            assert estimate.result == tx.RESULTS.successful
        else:
            assert estimate.result == tx.RESULTS.tolerance_not_met
    diagonal = lx.DiagonalLinearOperator(as_array(np.arange(1.0, 31.0)))
    exact = tx.logdet(key, diagonal, 30, rtol=0.0)
    assert exact.standard_error < 1e-12


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
def test_wrappers(key, complex):
    problem, options = Problem("exp", N, complex), {"rtol": 0.1, "throw": False}
    operator = problem.operator(psd=True)
    if complex:
        estimate = tx.schatten_norm(key, operator, K, p=2.0, **options)
        truth = problem.total(np.square) ** 0.5
    else:
        estimate = tx.trace_inverse(key, operator, K, shift=0.1, **options)
        truth = problem.trace_inverse(0.1)
    assert estimate.result == tx.RESULTS.successful
    assert estimate.stats["num_matvecs"] <= K
    assert _met(estimate.confidence_interval(), estimate.value, 0.1)
    assert_close(estimate.value, truth, rtol=0.2)


@pytest.mark.wrong_types
@pytest.mark.x64
def test_wrong_arguments(key):
    operator = as_operator(matrix("flat", 20), psd=True)
    quadrature = tx.LanczosQuadratureEstimator()
    with pytest.raises(TypeError, match="takes no tolerance; use traceax"):
        tx.logdet(key, operator, 10, quadrature, rtol=0.1)
    for entry in (tx.logdet, tx.schatten_norm):
        with pytest.raises(ValueError, match=f"{entry.__name__}: rtol must be finite"):
            entry(key, operator, 10, rtol=-1.0)
        with pytest.raises(ValueError, match="level must lie strictly between"):
            entry(key, operator, 10, rtol=1.0, level=2)
    with pytest.raises(TypeError, match="progress_meter must be a traceax"):
        tx.logdet(key, operator, 10, progress_meter=1)  # pyright: ignore


@pytest.mark.x64
def test_progress_is_shown(key, capfd):
    meter = tx.TextProgressMeter()
    operator = as_operator(matrix("poly", N), psd=True)
    estimate = tx.logdet(
        key, operator, 20, rtol=1e-9, progress_meter=meter, throw=False
    )
    jax.block_until_ready(estimate.value)
    jax.effects_barrier()
    shown = [
        float(x.strip("% \n")) for x in capfd.readouterr().out.split("\r") if x.strip()
    ]
    assert shown == sorted(shown)
    assert shown[-1] == 100
