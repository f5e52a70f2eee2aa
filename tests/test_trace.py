"""`traceax.trace`: the parts that it sums exactly, and the estimators that it chooses."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    exact_trace,
    parameters,
)
from problems import NSD, PSD, as_operator, matrix

import traceax as tx

N = 20


def _choice(estimate):
    return tx.CHOICES[estimate.stats["choice"]].partition(":")[0]


def _parts():
    p = parameters(N)
    plain = lx.MatrixLinearOperator(p["a"])
    psd = lx.MatrixLinearOperator(p["a"] @ p["a"].T / N, PSD)
    diagonal = lx.DiagonalLinearOperator(p["d"])
    identity = lx.IdentityLinearOperator(plain.in_structure())
    tridiagonal = lx.TridiagonalLinearOperator(p["d"], p["d"][1:], p["d"][:-1])
    upper = lx.MatrixLinearOperator(jnp.triu(p["a"]), lx.upper_triangular_tag)
    return plain, psd, diagonal, identity, tridiagonal, upper


def _structural():
    _, _, diagonal, identity, tridiagonal, upper = _parts()
    function = lx.FunctionLinearOperator(
        diagonal.mv, diagonal.in_structure(), lx.diagonal_tag
    )
    return {
        "diagonal": (diagonal, 0),
        "identity": (identity, 0),
        "tridiagonal": (tridiagonal, 0),
        "triangular": (upper, 0),
        "sum": (upper + tridiagonal * 2.0 - identity / 3.0, 0),
        "tagged": (lx.TaggedLinearOperator(-(diagonal + identity), NSD), 0),
        "product": (upper @ upper + diagonal @ tridiagonal, 0),
        "transpose": ((upper + diagonal).T, 0),
        "tagged function": (function, 1),
    }


@pytest.mark.x64
@pytest.mark.parametrize("name", list(_structural()))
def test_known_structure_is_summed(key, name):
    operator, used = _structural()[name]
    estimate = tx.trace(key, operator, 3)
    size = float(jnp.finfo(estimate.value.dtype).eps) * abs(complex(estimate.value))
    assert_close(estimate.value, exact_trace(operator), rtol=1e-5)
    # Products are rounded. Entries that we read aren't, but their sum may be.
    assert (used > 0) * size / 10 <= estimate.standard_error < 100 * size
    assert _choice(estimate) == "Exact"
    assert int(estimate.stats["num_matvecs"]) == used
    gradient = jax.grad(lambda s: tx.trace(key, operator * s, 3).value)(1.0)
    assert_close(gradient, estimate.value, rtol=1e-5)


@pytest.mark.x64
def test_the_rest_of_a_sum_is_estimated(key):
    plain, psd, diagonal, identity, tridiagonal, upper = _parts()
    every = diagonal, -identity, upper / 2.0, tridiagonal @ diagonal
    for rest, name, exacts in (
        (plain, "AdaptiveXTrace", every[:2]),
        (psd, "XNysTrace", every[2:]),
        (psd * 2.0, "XNysTrace", every[:1]),
    ):
        alone = tx.trace(key, rest, 8)
        assert _choice(alone) == name
        for i, exact in enumerate(exacts):
            for whole in (rest + exact, exact + rest)[: 2 - i]:
                estimate = tx.trace(key, whole, 8)
                truth = alone.value + exact_trace(exact)
                assert_close(estimate.value, truth, rtol=1e-5)
                assert_close(estimate.standard_error, alone.standard_error)
                assert _choice(estimate) == name
    nested = lx.TaggedLinearOperator(-((psd + diagonal) * 3.0 + identity) / 2.0, NSD)
    estimate = tx.trace(key, nested, 8)
    truth = -1.5 * tx.trace(key, psd, 8).value
    truth = truth - 1.5 * jnp.sum(diagonal.diagonal) - N / 2
    assert_close(estimate.value, truth, rtol=1e-5)


@pytest.mark.x64
def test_gradients_of_split_sums(key):
    def value(p, split):
        psd = lx.MatrixLinearOperator(p["a"] @ p["a"].T, PSD)
        # A traced factor has an unknown sign, so we take it out of the semidefinite
        # part.
        if split:
            return tx.trace(key, psd, 8).value * p["d"][0] + jnp.sum(p["d"])
        operator = psd * p["d"][0] + lx.DiagonalLinearOperator(p["d"])
        return tx.trace(key, operator, 8).value

    actual, expected = (
        jax.grad(value)(parameters(N), split) for split in (False, True)
    )
    for name in actual:
        assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.x64
def test_choices_by_budget(key):
    plain, psd, *_ = _parts()
    assert _choice(tx.trace(key, plain, 7)) == "Hutchinson"
    assert _choice(tx.trace(key, plain, 8)) == "AdaptiveXTrace"
    assert _choice(tx.trace(key, plain, 8, rtol=0.9, throw=False)) == "XTrace"
    assert _choice(tx.trace(key, psd, 1)) == "Hutchinson"
    assert _choice(tx.trace(key, psd, 2)) == "Hutchinson"
    assert _choice(tx.trace(key, psd, 3)) == "XNysTrace"
    assert _choice(tx.trace(key, -psd, 8)) == "XNysTrace"
    # An operator with nothing to split off keeps its tag.
    tagged = lx.TaggedLinearOperator(plain @ plain.T, PSD)
    assert _choice(tx.trace(key, tagged, 8)) == "XNysTrace"
    for operator in (plain, psd):
        estimate = tx.trace(key, operator, N)
        assert _choice(estimate) == "Exact"
        assert_close(estimate.value, exact_trace(operator), rtol=1e-5)
    estimate = tx.trace(key, plain, 7, tx.HutchinsonEstimator())
    assert _choice(estimate) == "The estimator that the caller passed."


@pytest.mark.x64
def test_reading_a_diagonal_counts_and_never_exceeds_the_budget(key):
    plain, _, diagonal, _, tridiagonal, _ = _parts()
    function = lx.FunctionLinearOperator(
        tridiagonal.mv, plain.in_structure(), lx.tridiagonal_tag
    )
    for k, operator in (
        *((1, function), (2, function), (3, function)),
        *((1, function + plain), (3, function + plain)),
        (6, plain + diagonal + function),
    ):
        estimate = tx.trace(key, operator, k)
        assert 1 <= int(estimate.stats["num_matvecs"]) <= k
    assert_close(tx.trace(key, function, 2).value, exact_trace(function), rtol=1e-5)


@pytest.mark.x64
def test_complex_sums(key):
    a = as_operator(matrix("nonsymmetric", N, complex=True))
    d = lx.DiagonalLinearOperator(jnp.diagonal(a.matrix) * 1j)
    estimate = tx.trace(key, a + d, 8)
    alone = tx.trace(key, a, 8)
    assert_close(estimate.value, alone.value + jnp.sum(d.diagonal), rtol=1e-4)


@pytest.mark.x64
def test_states_of_split_sums_refer_to_the_whole(key):
    a = matrix("poly", N)
    d = lx.DiagonalLinearOperator(100 * jnp.ones(N))
    for operator, truth in (
        (as_operator(a, psd=True) + d, np.trace(a) + 100 * N),
        (as_operator(a, psd=True) * jnp.asarray(-10.0), -10 * np.trace(a)),
    ):
        estimate = tx.trace(key, operator, N // 2)
        for estimator in (tx.XTraceEstimator(), tx.HutchinsonEstimator()):
            # We resume with n products, so that the answer is exact.
            refined = estimator.estimate(estimate.state, N)
            assert_close(refined.value, truth, rtol=1e-4)


@pytest.mark.x64
def test_an_estimator_may_wrap_another(key):
    class Doubled(tx.TraceEstimator):
        inner: tx.TraceEstimator

        def init(self, key, operator):
            return self.inner.init(key, operator)

        def compute(self, state, k):
            value, error, stats, (V, Z) = self.inner.compute(state, k)
            return 2 * value, 2 * error, stats, (V, 2 * Z)

    a = as_operator(matrix("nonsymmetric", N)).matrix

    @jax.jit
    def values_and_gradients(a):
        def value(a, estimator):
            return tx.trace(key, lx.MatrixLinearOperator(a), 7, estimator).value

        inner = tx.HutchinsonEstimator()
        return [jax.value_and_grad(value)(a, e) for e in (inner, Doubled(inner))]

    (value, gradient), (doubled, twice) = values_and_gradients(a)
    assert_close(doubled, 2 * value)
    assert_close(twice, 2 * gradient)


def test_student_t_quantiles():
    from scipy import stats  # noqa: PLC0415

    from traceax._estimate import student_t_quantile  # noqa: PLC0415

    freedom = np.asarray([1, 2, 3, 4, 5, 7, 10, 19, 50, 300, np.inf])
    rtol = np.where(freedom < 10, 1e-3, 3e-4)
    for level in (0.5, 0.8, 0.95, 0.99, 0.999):
        actual = np.asarray(student_t_quantile(level, jnp.asarray(freedom)))
        expected = stats.t.isf((1 - level) / 2, freedom)
        assert np.all(np.abs(actual / expected - 1) < rtol)
    for nu in (1.0, 1.7, 2.0, 9.0, 40.0):
        for level in (1e-9, 1 - 1e-9, math.nextafter(1, 0)):
            actual = student_t_quantile(level, jnp.asarray(nu))
            assert_close(actual, stats.t.isf((1 - level) / 2, nu), rtol=1e-2)


@pytest.mark.x64
def test_confidence_intervals_grow_with_the_level(key):
    estimate = tx.trace(key, as_operator(matrix("flat", N)), 8)
    widths = []
    for level in (0.5, 0.9, 0.99):
        low, high = estimate.confidence_interval(level)
        assert_close((low + high) / 2, estimate.value, rtol=1e-4)
        widths.append(float(high - low))
    assert widths == sorted(widths)
    assert widths[0] > 0


class CustomState(eqx.Module):
    key: jax.Array
    operator: lx.AbstractLinearOperator
    scale: jax.Array


class Scaled(tx.TraceEstimator):
    """Hutchinson's estimator with rescaled normal probes. Its state holds the scale."""

    def init(self, key, operator):
        state = tx.init_state(key, operator)
        return CustomState(state.key, state.operator, jnp.sqrt(jnp.asarray(2.0)))

    def compute(self, state, k):
        n = state.operator.in_size()
        W = state.scale * jax.random.normal(state.key, (n, k))
        AW = jax.vmap(state.operator.mv, 1, 1)(W)
        samples = jnp.sum(W * AW, axis=0) / state.scale**2
        error = jnp.std(samples, ddof=1) / k**0.5
        blocks = W, W / (state.scale**2 * k)
        return jnp.mean(samples), error, {"num_matvecs": k}, blocks


def test_estimators_with_custom_states(key):
    a = jnp.asarray(matrix("flat", 20))

    def value(t):
        operator = lx.MatrixLinearOperator(t * a)
        return tx.trace(key, operator, 10, Scaled(), throw=False).value

    estimator, operator = Scaled(), lx.MatrixLinearOperator(a)
    estimate = estimator.estimate(estimator.init(key, operator), 10)
    assert isinstance(estimate.state, CustomState)
    assert_close(value(1.0), estimate.value, rtol=1e-5)
    assert_close(jax.grad(value)(1.0), estimate.value, rtol=1e-5)
