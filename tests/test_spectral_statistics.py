"""Unbiased values and derivatives, and intervals, over a fixed number of keys."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    products_only,
    rounding,
    z_score,
)
from problems import as_array, as_operator, float_dtype, hermitian, matrix
from spectral_helpers import (
    SPECTRAL,
    eps,
    relaxed,  # noqa: F401
)

import traceax as tx

N, K = 30, 15
# In 32-bit mode, we test the kernels and the entry points only.
pytestmark = pytest.mark.x64

BOTH = pytest.mark.parametrize("estimator", list(SPECTRAL))
ONE = pytest.mark.parametrize("estimator", ["krylov-aware"])
PAIRS = pytest.mark.parametrize(
    ("estimator", "complex"), [("krylov-aware", True), ("quadrature", False)]
)


def _functions(x):
    # Five steps integrate log on [1, 3] to 1e-5, and a linear function to rounding.
    return {"log": jnp.log(x), "linear": 2 * x - 1, "root": jnp.sqrt(x)}


@functools.partial(jax.jit, static_argnames=("estimator", "k", "fn", "of"))
def _run(keys, a, estimator, k=K, fn=_functions, of=lx.MatrixLinearOperator):
    def run_once(key):
        operator = of(a)
        est = SPECTRAL[estimator]
        e = tx.trace_function(key, fn, operator, k, est, throw=False)
        return e.value, e.standard_error, e.confidence_interval()

    return jax.vmap(run_once)(keys)


def _without_trace(a):
    return products_only(lx.MatrixLinearOperator(a))


@PAIRS
def test_values_are_unbiased(estimator, complex):
    a = hermitian("flat", N, complex)
    # With a known trace, linear functions would be exact.
    keys, of = jr.split(jr.key(0), 3000), _without_trace
    values, errors, _ = _run(keys, as_array(a), estimator, of=of)
    theta = np.linalg.eigvalsh(a)
    truths = jax.tree.map(np.sum, _functions(jnp.asarray(theta)))
    for name, truth in truths.items():
        samples = np.asarray(values[name], np.float64)
        if estimator == "quadrature" or name == "linear":
            assert z_score(samples, truth, rounding()) < 4, name
        else:
            # f(T) replaces f(A) in the whole space, and is least accurate in its last
            # block. The error bar includes this bias.
            assert abs(samples.mean() - truth) < 0.15 * samples.std(), name
        assert z_score(samples * 1.02, truth, rounding()) > 5, name
        ratio = np.sqrt(np.mean(np.asarray(errors[name]) ** 2)) / samples.std()
        # Three probes that agree hide their spread, so quadrature widens its bars.
        assert 0.7 < ratio < (1.6 if estimator == "krylov-aware" else 3.2), name


#
# Intervals
#


@BOTH
@pytest.mark.parametrize("name", ["flat", "poly", "signed", "exp"])
def test_intervals_cover(estimator, name):
    # On these spectra, five steps or more have converged for this function.
    fn, a = jnp.expm1, matrix(name, 60)
    # 1600 keys give a coverage of 95 % a standard error of 0.5 %.
    _, _, (low, high) = _run(
        jr.split(jr.key(1), 1600), as_array(a), estimator, k=30, fn=fn
    )
    truth = float(jnp.sum(fn(jnp.asarray(np.linalg.eigvalsh(a)))))
    covered = np.mean((np.asarray(low) <= truth) & (truth <= np.asarray(high)))
    assert 0.90 <= covered <= 1.0
    # Intervals with half the length cover less.
    middle, half = (low + high) / 2, (high - low) / 4
    assert np.mean(np.abs(np.asarray(middle) - truth) <= np.asarray(half)) < covered


#
# Derivatives
#


def _matrices(complex):
    # The spectrum is about [4, 6], so five steps integrate its logarithm to 1e-8.
    a = hermitian("flat", N, complex) + 3 * np.eye(N)
    b, c = (hermitian("signed", N, complex, seed) for seed in (4, 5))
    return as_array(a), as_array(b), as_array(c)


def _matrix_at(theta, complex):
    a, b, c = _matrices(complex)
    x, y = theta.astype(a.dtype)
    return a + 0.2 * x * b + 0.2 * y**2 * c + 0.1 * x * y * (b @ c + c @ b)


THETA = [0.3, 0.5]


def _value(theta, key, estimator, complex, fn=jnp.log, k=K):
    operator = lx.MatrixLinearOperator(_matrix_at(theta, complex))
    est = SPECTRAL[estimator]
    return tx.trace_function(key, fn, operator, k, est, throw=False).value


def _exact(theta, complex, fn=jnp.log):
    return jnp.sum(fn(jnp.linalg.eigvalsh(_matrix_at(theta, complex))))


@PAIRS
def test_derivatives_are_unbiased(estimator, complex):
    theta = as_array(THETA)
    value = functools.partial(_value, estimator=estimator, complex=complex)

    run = jax.jit(jax.vmap(lambda key: jax.grad(value)(theta, key)))
    gradients = run(jr.split(jr.key(2), 1500))
    exact = functools.partial(_exact, complex=complex)
    gradient = jax.jit(jax.grad(exact))(theta)
    assert z_score(gradients, gradient, 1e-5) < 4
    assert z_score(np.asarray(gradients) * 1.05, gradient) > 5


def test_modes_of_differentiation_agree(key):
    theta, direction = as_array(THETA), as_array([0.7, -0.4])
    value = functools.partial(_value, key=key, estimator="krylov-aware", complex=True)

    def line(t):
        return value(theta + t * direction)

    @jax.jit
    def run(t):
        return jax.grad(value)(theta), jax.jacfwd(line)(t)

    gradient, directional = run(0.0)
    assert_close(directional, gradient @ direction, rtol=1e5 * eps())


@PAIRS
def test_derivatives_are_exact_for_enough_products(key, estimator, complex):
    theta = as_array(THETA)
    value = functools.partial(
        _value, key=key, estimator=estimator, complex=complex, k=N
    )
    exact = functools.partial(_exact, complex=complex)

    @jax.jit
    def run(theta):
        return [jax.grad(f)(theta) for f in (value, exact)]

    gradient, expected = run(theta)
    scale = np.max(np.abs(expected))
    assert_close(gradient, expected, rtol=0, atol=1e3 * eps() * scale)


@ONE
def test_second_derivatives_are_refused(key, estimator):
    theta = as_array(0.3)

    def value(x):
        return _value(jnp.stack([x, x]), key, estimator, False)

    for d in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match="got a second one"):
            jax.jit(d(d(value)))(theta)


@pytest.mark.parametrize(
    ("estimator", "k"), [("krylov-aware", 9), ("krylov-aware", N), ("quadrature", 9)]
)
def test_derivatives_with_respect_to_closed_over_values(key, estimator, k):
    a = hermitian("flat", N)
    values = np.linalg.eigvalsh(a)
    operator = as_operator(a)

    def value(p):
        est = SPECTRAL[estimator]
        e = tx.trace_function(key, lambda x: x**p, operator, k, est, throw=False)
        return e.value, e.stats

    @jax.jit
    def slopes(p):
        reverse, stats = jax.grad(value, has_aux=True)(p)
        return reverse, jax.jacfwd(lambda p: value(p)[0])(p), stats

    reverse, forward, stats = slopes(1.7)
    ritz, weights = stats["ritz_values"], stats["ritz_weights"]
    expected = np.sum(weights * ritz**1.7 * np.log(ritz))
    assert_close(reverse, expected, rtol=1e4 * eps())
    assert_close(forward, reverse, rtol=1e3 * eps())
    if k == N:
        exact = np.sum(values**1.7 * np.log(values))
        assert_close(reverse, exact, rtol=1e3 * eps())


@ONE
def test_derivatives_with_respect_to_the_shift(key, estimator):
    # A shift moves every Ritz value, so we expect d/ds sum w log(theta + s), draw by
    # draw.
    operator = as_operator(hermitian("flat", N, True))
    est = SPECTRAL[estimator]

    def value(s):
        e = tx.logdet(key, operator, 9, est, shift=s, throw=False)
        return e.value, e.stats

    (_, stats), slope = jax.value_and_grad(value, has_aux=True)(as_array(0.5))
    expected = np.sum(stats["ritz_weights"] / stats["ritz_values"])
    assert_close(slope, expected, rtol=1e4 * eps())


@ONE
def test_derivatives_of_schatten_norms(key, estimator):
    # The norm is homogeneous in s, draw by draw, with a finite slope at zero.
    a = as_array(matrix("signed", N))
    est = SPECTRAL[estimator]

    def value(s, p):
        operator = _without_trace(a * s)
        return tx.schatten_norm(key, operator, 9, est, p=p, throw=False).value

    norm_and_slope = jax.jit(jax.value_and_grad(value))
    for p in (2.0, 3.0):
        norm, slope = norm_and_slope(as_array(1.5), as_array(p))
        assert_close(slope, norm / 1.5, rtol=1e5 * eps())
    # At zero we expect a subgradient.
    norm, slope = norm_and_slope(as_array(0.0), as_array(2.0))
    assert norm == 0
    assert abs(slope) <= 2 * np.linalg.norm(a)


@BOTH
def test_gradients_at_multiples_of_the_identity(estimator):
    b = as_array(hermitian("signed", N))
    identity = jnp.eye(N, dtype=float_dtype())

    def value(t, c, key):
        operator = lx.MatrixLinearOperator(c * identity + t * b)
        est = SPECTRAL[estimator]
        return tx.trace_function(key, jnp.exp, operator, K, est, throw=False).value

    keys = jr.split(jr.key(0), 1000)
    run = jax.jit(jax.vmap(jax.grad(value), (None, None, 0)))
    for c in (0.5, 0.0):
        samples = run(as_array(0.0), as_array(c), keys)
        assert z_score(samples, np.exp(c) * np.trace(b), rounding()) < 4
