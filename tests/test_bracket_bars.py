"""Brackets in estimates: compared with loops, and their part in error bars."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, draw, products_only
from problems import PSD, Problem, as_array, float_dtype, is_x64, matern, points
from spectral_helpers import (
    OPERATOR_MONOTONE,
    SPECTRAL,
    dense_function,
    extension,
    first_failure,
    krylov_bases,
    new_directions,
    to_double,
)

import traceax as tx
from traceax._error_bar import leave_one_out_bar
from traceax._linalg.left_out_krylov import paired_samples

#
# The estimator
#

N, M, STEPS = 40, 3, 4


def _functions(x):
    """The requested functions: three rise, and one falls."""
    return {"log": jnp.log(x), "root": jnp.sqrt(x), "inverse": -1 / x, "+": 1 / x}


NAIVE = {**OPERATOR_MONOTONE, "+": lambda x: 1 / x}


@eqx.filter_jit
def _estimate_with_slope(key, A, lower, tolerance):
    """Estimate functions of a semidefinite operator with unknown trace."""

    def value(shift):
        eye = jnp.eye(len(A), dtype=A.dtype)
        operator = lx.MatrixLinearOperator(A + shift.astype(A.dtype) * eye, PSD)
        operator = products_only(operator)
        estimate = tx.trace_function(
            key,
            _functions,
            operator,
            M * STEPS,
            tx.KrylovAwareEstimator(M),
            lower=lower,
            monotone=True,
            throw=False,
            # This tolerance is never met, so the loop uses all products.
            rtol=1e-9 if tolerance else None,
        )
        rest = estimate.standard_error, estimate.stats, estimate.result
        return estimate.value, rest

    zero = jnp.zeros((), float_dtype())
    values, slope, rest = jax.jvp(value, (zero,), (zero + 1,), has_aux=True)
    return values, slope, *rest


def _naive_samples(A, start, lower):
    """Samples and paired samples from f(T), f(E) and f'(T), by loops."""
    Q, Z = krylov_bases(A, start, STEPS)
    if lower is None:
        lower = np.linalg.eigvalsh(Q.conj().T @ A @ Q)[0] / 4
    T, E = extension(A, Q, Z, lower)

    def samples(f, matrix):
        projected = dense_function(matrix, f)[: len(T), : len(T)]

        def sample(probe, *without):
            P, _ = krylov_bases(A, np.delete(start, without, axis=1), STEPS)
            P, g = Q.conj().T @ P, start[:, [probe]]
            g = Q.conj().T @ new_directions(Q @ P, g)
            C = P @ P.conj().T + (len(A) - P.shape[1]) * g @ g.conj().T
            return np.real(np.sum(C.conj() * projected))

        cases = [(i, (i + 1) % M) for i in range(M)]
        return np.array(
            [
                [sample(i, i) for i, _ in cases],
                [sample(i, i, j) for i, j in cases],
                [sample(j, i, j) for i, j in cases],
            ]
        )

    return {name: (samples(f, T), samples(f, E)) for name, f in NAIVE.items()} | {
        "slope": samples(lambda x: 1 / x, T)
    }


@pytest.mark.parametrize(
    ("kind", "complex", "part", "tolerance"),
    [
        ("exp", False, 0.9, False),
        ("flat", False, 1, False),
        ("exp", False, None, False),
        ("exp", True, 0.5, True),
    ],
)
def test_the_estimator_against_a_naive_bracket(kind, complex, part, tolerance):
    A = to_double(Problem(kind, N, complex, shift=1e-3).array)
    smallest = np.linalg.eigvalsh(A)[0]
    lower = None if part is None else part * smallest
    key = jr.key(2)
    sampler = tx.KrylovAwareEstimator().sampler
    start = to_double(draw(sampler, key, N, M, as_array(A).dtype))
    lower_end = None if lower is None else as_array(lower)
    value, slope, error, stats, result = _estimate_with_slope(
        key, as_array(A), lower_end, tolerance
    )
    result = first_failure(result)
    met = result == tx.RESULTS.successful
    assert met or result == tx.RESULTS.tolerance_not_met
    naive = _naive_samples(A, start, lower)
    wrong = _naive_samples(A, start, smallest / 10)
    assert stats["num_matvecs"] == M * STEPS
    tol = {"rtol": 1e-7 if is_x64() else 2e-2, "atol": 0}
    for name in NAIVE:
        high, low = naive[name]
        middle, ends = (high + low) / 2, (high[0].mean(), low[0].mean())
        assert_close(value[name], middle[0].mean(), **tol)
        bracket = [x[name] for x in stats["bracket"]]
        assert_close(bracket, sorted(ends), **tol)
        magnitude = jnp.asarray(np.abs(high[0]).mean())
        paired = paired_samples(as_array(np.stack(middle)), as_array(magnitude))
        widened = 1 + 2 / M if tolerance else 1
        bar = leave_one_out_bar(paired).standard_error
        expected = widened * np.hypot(bar, (max(ends) - min(ends)) / 2)
        if is_x64():
            assert_close(error[name], expected, rtol=1e-5, atol=0)
        # We check that another lower end gives another bracket.
        other = sorted(x[0].mean() for x in wrong[name])
        if kind == "exp" and is_x64():
            assert not np.allclose(bracket, other, rtol=1e-4)
    # We differentiate f(T), not the middle.
    assert_close(slope["log"], naive["slope"][0].mean(), **tol)


#
# Error bars
#


@eqx.filter_jit
def _many(keys, K, noise, k, entry):
    def run_once(key):
        operator = lx.MatrixLinearOperator(K, PSD)
        e = entry(key, operator, k, shift=noise, throw=False)
        interval = e.confidence_interval()
        return e.value, e.standard_error, interval, e.stats["bracket"], e.result

    return jax.lax.map(run_once, keys)


def test_intervals_before_convergence():
    K, noise = matern(points(200), 0.3), 1e-4
    truth = np.sum(np.log(np.linalg.eigvalsh(K) + noise))
    keys, noise = jr.split(jr.key(0), 40), as_array(noise)
    *results, result = _many(keys, as_array(K), noise, 24, tx.logdet)
    assert np.all(result == tx.RESULTS.successful)
    value, error, (low, high), ends = jax.tree.map(to_double, results)
    assert np.mean((low <= truth) & (truth <= high)) >= 0.9
    assert np.sqrt(np.mean((value - truth) ** 2)) < 1.3 * np.sqrt(np.mean(error**2))
    # The theorem is about expectations, so we compare means.
    spread = np.std(ends, axis=1) / len(keys) ** 0.5
    assert np.mean(ends[0]) - 4 * spread[0] < truth < np.mean(ends[1]) + 4 * spread[1]
    assert_close(value, np.mean(ends, axis=0), rtol=1e-4)
    # f(T) with the probes' spread alone misses the truth in most cases.
    half = (ends[1] - ends[0]) / 2
    spread = np.sqrt(np.maximum(error**2 - half**2, 0))
    assert np.mean(np.abs(ends[1] - truth) <= 2.5 * spread) < 0.5


def test_ends_swapped_by_rounding():
    # The space finds everything, and the noise is near rounding in 32 bits.
    K, noise = 300 * matern(points(60), 3.0), 1e-3 if is_x64() else 2e-2
    truth = np.sum(np.log(np.linalg.eigvalsh(K) + noise))
    keys = jr.split(jr.key(0), 8)
    results = _many(keys, as_array(K), as_array(noise), 56, tx.logdet)
    value, error, _, (low, high), result = results
    assert np.all(result == tx.RESULTS.successful)
    assert np.all((low <= value) & (value <= high))
    assert np.all(np.abs(value - truth) < 4 * error + 1e-6 * abs(truth))


#
# Proven, guessed and missing brackets
#


def _estimate(fn, operator, lower=None, k=12, estimator=None):
    options = {"lower": lower, "monotone": True, "throw": False}
    return tx.trace_function(jr.key(0), fn, operator, k, estimator, **options)


# The eigenvalues lie between 1 and 2.
ONE_TO_TWO = Problem("flat", 25, scale=0.5, shift=0.5)


@pytest.mark.parametrize("where", ["krylov-aware", "quadrature", "exact"])
def test_wrong_lower_ends_are_reported(where):
    operator, estimator = ONE_TO_TWO.operator(), SPECTRAL.get(where)
    k = 25 if where == "exact" else 12
    for lower, expected in ((1.5, "below_lower"), (1.0, "successful")):
        estimate = _estimate(jnp.log, operator, as_array(lower), k, estimator)
        assert estimate.result == getattr(tx.RESULTS, expected), lower


def test_a_wrong_semidefinite_tag_is_reported_through_the_shift():
    operator = Problem("signed", 25).operator(psd=True)
    estimate = tx.logdet(jr.key(0), operator, 12, shift=1.5, throw=False)
    assert estimate.result == tx.RESULTS.below_lower
    with pytest.raises(Exception, match="has an eigenvalue below its lower bound"):
        tx.logdet(jr.key(0), operator, 12, shift=1.5).value.block_until_ready()


def test_which_brackets_are_proven():
    operator, tagged = ONE_TO_TWO.operator(), ONE_TO_TWO.operator(psd=True)
    for fn, lower, expected in (
        (jnp.log, 1.0, True),
        (jnp.log, -1.0, False),
        (jnp.sqrt, -1.0, False),
        (jnp.sqrt, 0.0, True),
    ):
        estimate = _estimate(fn, operator, as_array(lower))
        assert estimate.stats["bracket_is_proven"] == expected, (fn, lower)
    # log is infinite at 0, so we guess the smallest eigenvalue.
    assert not _estimate(jnp.log, tagged).stats["bracket_is_proven"]
    for shift, expected in ((1.0, True), (-1.5, False)):
        estimate = tx.logdet(jr.key(0), tagged, 12, shift=shift, throw=False)
        assert estimate.stats["bracket_is_proven"] == expected, shift


def _has_bracket(entry, operator, **options):
    shapes = eqx.filter_eval_shape(entry, jr.key(0), operator, 12, **options)
    names = {"bracket", "bracket_is_proven"} & set(shapes.stats)
    assert len(names) != 1
    return bool(names)


@pytest.mark.wrong_types
def test_functions_without_a_bracket():
    operator, untagged = ONE_TO_TWO.operator(psd=True), ONE_TO_TWO.operator()
    for entry in (tx.logdet, tx.trace_inverse, tx.schatten_norm):
        assert _has_bracket(entry, operator)
        assert not _has_bracket(entry, untagged)
    for p, expected in ((0.5, True), (2.0, False)):
        assert _has_bracket(tx.schatten_norm, operator, p=p) is expected

    def log_trace(key, operator, k, **options):
        return tx.trace_function(key, jnp.log, operator, k, **options)

    assert not _has_bracket(log_trace, operator, lower=0.5)
    assert _has_bracket(log_trace, untagged, lower=0.5, monotone=True)
    with pytest.raises(TypeError, match="monotone must be True or False"):
        log_trace(jr.key(0), operator, 12, monotone="yes")


def test_an_inverse_with_negative_eigenvalues_has_an_unknown_error():
    # The shift makes some eigenvalues negative, and 1 / x is not monotone across 0.
    problem = Problem("flat", 25)
    tagged, untagged = (
        tx.trace_inverse(jr.key(0), operator, 12, shift=-2.02, throw=False)
        for operator in (problem.operator(psd=True), problem.operator())
    )
    assert tagged.result == tx.RESULTS.successful
    assert jnp.isnan(tagged.standard_error)
    assert_close(tagged.value, untagged.value, rtol=1e-3)


def test_a_norm_has_the_bracket_of_the_root():
    operator = Problem("poly", 60, scale=100).operator(psd=True)
    norm = tx.schatten_norm(jr.key(0), operator, 12, p=0.5)
    total = _estimate(jnp.sqrt, operator)
    assert norm.stats["bracket_is_proven"] & total.stats["bracket_is_proven"]
    low, high = norm.stats["bracket"]
    for actual, end in zip((low, high), total.stats["bracket"], strict=True):
        assert_close(actual, end**2, rtol=1e-3)
    assert low < norm.value < high
