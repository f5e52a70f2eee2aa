"""Unbiased values and derivatives, and intervals, over fixed numbers of keys."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, hidden, rounding, z_score
from problems import Problem, as_array
from spectral_helpers import (
    SPECTRAL,
    eps,
    relaxed,  # noqa: F401
)

import traceax as tx

N, K = 30, 15
# In the 32-bit mode the kernels and the entry points are tested.
pytestmark = pytest.mark.x64

KRYLOV = SPECTRAL["krylov-aware"]
PAIRS = pytest.mark.parametrize(
    ("estimator", "complex"), [("krylov-aware", True), ("quadrature", False)]
)


def _hidden(a):
    # Of a known trace linear functions would be exact.
    return hidden(lx.MatrixLinearOperator(a))


#
# Values and intervals
#


def _functions(x):
    # Five steps integrate these on [-1, 3] but for 1e-3 of their deviation, a linear
    # function to rounding.
    return {"log": jnp.log(x + 3), "linear": 2 * x + 5, "exp": jnp.exp(x / 2)}


@functools.partial(jax.jit, static_argnames="estimator")
def _run(keys, a, estimator):
    def one(key):
        estimator_of = SPECTRAL[estimator]
        e = tx.trace_function(key, _functions, _hidden(a), K, estimator_of, throw=False)
        return e.value, e.standard_error, e.confidence_interval()

    return jax.lax.map(one, keys)


@PAIRS
@pytest.mark.parametrize("kind", ["flat", "signed", "exp", "repeated"])
def test_values_are_unbiased_and_intervals_cover(estimator, complex, kind):
    problem = Problem(kind, N, complex)
    # 0.5 % of standard error at 95 %.
    keys = jr.split(jr.key(0), 2000)
    values, errors, intervals = _run(keys, problem.array, estimator)
    for name in values:
        truth = problem.total(lambda x, name=name: _functions(x)[name])
        samples = np.asarray(values[name], np.float64)
        # Three eigenvalues are found by five steps. Else f(T) stands for f(A) in all of
        # the space, of which the last block knows least: the bias is a part of what the
        # error bar holds.
        if estimator == "quadrature" or name == "linear" or kind == "repeated":
            assert z_score(samples, truth, rounding()) < 4, name
        else:
            assert abs(samples.mean() - truth) < 0.15 * samples.std(), name
        assert z_score(samples * 1.02, truth, rounding()) > 5, name
        ratio = np.sqrt(np.mean(np.asarray(errors[name]) ** 2)) / samples.std()
        # Three probes that agree don't show their spread: quadrature is told so, and so
        # is a space that has found all.
        agree = estimator == "quadrature" or kind == "repeated"
        assert 0.6 < ratio < (4 if agree else 1.6), name
        low, high = (np.asarray(end[name]) for end in intervals)
        covered = np.mean((low <= truth) & (truth <= high))
        assert 0.90 <= covered <= 1.0, name
        # An interval of half the length covers less.
        middle, half = (low + high) / 2, (high - low) / 4
        assert np.mean(np.abs(middle - truth) <= half) < covered


#
# Derivatives
#


def _of(theta, complex):
    # A spectrum about [4, 6]: five steps know its logarithm to 1e-8 on probes.
    a = Problem("flat", N, complex, shift=3.0).array
    b, c = (Problem("signed", N, complex, seed).array for seed in (4, 5))
    x, y = theta.astype(a.dtype)
    return a + 0.2 * x * b + 0.2 * y**2 * c + 0.1 * x * y * (b @ c + c @ b)


THETA = [0.3, 0.5]


def _value(theta, key, estimator, complex, k=K):
    operator = lx.MatrixLinearOperator(_of(theta, complex))
    estimator = SPECTRAL[estimator]
    return tx.trace_function(key, jnp.log, operator, k, estimator, throw=False).value


def _exact(theta, complex):
    return jnp.linalg.slogdet(_of(theta, complex))[1]


def _derivatives(value):
    """The gradient and the Hessian of a function of one argument."""

    def gradient(x):
        slope = jax.grad(value)(x)
        return slope, slope

    def both(x):
        hessian, gradient_there = jax.jacfwd(gradient, has_aux=True)(x)
        return gradient_there, hessian

    return both


@PAIRS
def test_derivatives_are_unbiased(estimator, complex):
    theta = as_array(THETA)
    value = functools.partial(_value, estimator=estimator, complex=complex)

    @jax.jit
    def run(keys):
        return jax.lax.map(
            lambda key: _derivatives(functools.partial(value, key=key))(theta), keys
        )

    found = run(jr.split(jr.key(2), 1500))
    exact = jax.jit(_derivatives(functools.partial(_exact, complex=complex)))(theta)
    for samples, truth in zip(found, exact, strict=True):
        assert z_score(samples, truth, 1e-5) < 4
        assert z_score(np.asarray(samples) * 1.05, truth) > 5


def test_modes_of_differentiation_agree(key):
    theta, direction = as_array(THETA), as_array([0.7, -0.4])

    def line(t):
        return _value(theta + t * direction, key, "krylov-aware", True, 6)

    @jax.jit
    def run(t):
        pairs = (jax.jacfwd, jax.grad), (jax.grad, jax.jacfwd), (jax.grad, jax.grad)
        return [d(line)(t) for d in (jax.grad, jax.jacfwd)], [
            outer(inner(line))(t) for outer, inner in pairs
        ]

    for found in run(0.0):
        assert_close(found, found[0] * np.ones(len(found)), rtol=1e5 * eps())


def test_derivatives_are_exact_for_enough_products(key):
    value = functools.partial(
        _value, key=key, estimator="krylov-aware", complex=True, k=N
    )
    exact = functools.partial(_exact, complex=True)
    run = jax.jit(lambda theta: [_derivatives(f)(theta) for f in (value, exact)])
    (gradient, hessian), (g, h) = run(as_array(THETA))
    # Divided differences of f' are accurate to eps^(4/5).
    assert_close(gradient, g, rtol=0, atol=1e3 * eps() * np.max(np.abs(g)))
    assert_close(hessian, h, rtol=0, atol=100 * eps() ** 0.8 * np.max(np.abs(h)))


def test_third_derivatives_are_refused(key):
    def value(x):
        return _value(jnp.stack([x, x]), key, "krylov-aware", False)

    for d in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match="Third derivatives"):
            jax.eval_shape(d(d(d(value))), as_array(0.3))


@pytest.mark.parametrize("k", [9, N])
def test_derivatives_of_what_the_function_closes_over(key, k):
    problem = Problem("flat", N)
    operator = problem.operator()

    def value(p):
        e = tx.trace_function(key, lambda x: x**p, operator, k, KRYLOV, throw=False)
        return e.value, e.stats

    @jax.jit
    def both(p):
        reverse, stats = jax.grad(value, has_aux=True)(p)
        return reverse, jax.jacfwd(lambda p: value(p)[0])(p), stats

    reverse, forward, stats = both(1.7)
    ritz, weights = stats["ritz_values"], stats["ritz_weights"]
    expected = np.sum(weights * ritz**1.7 * np.log(ritz))
    assert_close(reverse, expected, rtol=1e4 * eps())
    assert_close(forward, reverse, rtol=1e3 * eps())
    if k == N:
        exact = problem.total(lambda x: x**1.7 * np.log(x))
        assert_close(reverse, exact, rtol=1e3 * eps())


def test_mixed_derivatives(key):
    a = Problem("flat", N).array

    def value(s, p):
        return tx.trace_function(
            key, lambda x: x**p, _hidden(a * s), 6, throw=False
        ).value

    s, p = as_array(1.1), as_array(1.7)

    @jax.jit
    def both(s, p):
        found = jax.grad(value)(s, p), jax.grad(jax.grad(value), 1)(s, p)
        # By homogeneity: s^p tr A^p.
        of_s = functools.partial(lambda s, p: p / 1.1 * value(s, p), s)
        total, slope = jax.value_and_grad(of_s)(p)
        return found, (total, slope)

    assert_close(*both(s, p), rtol=1e5 * eps())
    # The other way round is refused.
    with pytest.raises(NotImplementedError, match="mix the operator and"):
        jax.grad(jax.grad(value, 1), 0)(s, p)


def test_derivatives_with_respect_to_the_shift(key):
    # A shift moves every Ritz value: d/ds sum w log(theta + s), draw by draw.
    operator = Problem("flat", N, True).operator()

    def value(s):
        e = tx.logdet(key, operator, 9, KRYLOV, shift=s, throw=False)
        return e.value, e.stats

    run = jax.jit(jax.value_and_grad(value, has_aux=True))
    (_, stats), slope = run(as_array(0.5))
    expected = np.sum(stats["ritz_weights"] / stats["ritz_values"])
    assert_close(slope, expected, rtol=1e4 * eps())


def test_derivatives_of_schatten_norms(key):
    # Homogeneous of degree one, draw by draw; at zero the slope is finite.
    a = Problem("signed", N).array

    def value(s, p):
        return tx.schatten_norm(key, _hidden(a * s), 9, KRYLOV, p=p, throw=False).value

    both = jax.jit(jax.value_and_grad(value))
    for p in (2.0, 3.0):
        norm, slope = both(as_array(1.5), as_array(p))
        assert_close(slope, norm / 1.5, rtol=1e5 * eps())
    # Of zero a subgradient.
    norm, slope = both(as_array(0.0), as_array(2.0))
    assert norm == 0
    assert abs(slope) <= 2 * np.linalg.norm(a)


def test_the_gradient_at_a_multiple_of_the_identity_is_that_of_a_trace():
    problem, identity = Problem("signed", N), Problem("identity", N).array

    @jax.jit
    def run(c, keys):
        def value(t, key):
            operator = lx.MatrixLinearOperator(c * identity + t * problem.array)
            return tx.trace_function(
                key, jnp.exp, operator, K, KRYLOV, throw=False
            ).value

        slope = jax.grad(value)
        return jax.lax.map(lambda key: slope(as_array(0.0), key), keys)

    for c in (0.5, 0.0):
        samples = run(as_array(c), jr.split(jr.key(0), 1000))
        truth = np.exp(c) * problem.trace
        assert z_score(samples, truth, rounding()) < 4
        assert z_score(samples + 0.2 * np.std(samples), truth, rounding()) > 5


def test_hessians_at_operators_of_low_rank(key):
    a, b = Problem("rank 5", N, scale=0.2), Problem("signed", N, seed=4)

    def value(t):
        operator = lx.MatrixLinearOperator(a.array + t * b.array)
        return tx.trace_function(key, jnp.exp, operator, N, KRYLOV, throw=False).value

    def exact(t):
        return np.sum(np.exp(np.linalg.eigvalsh(a.dense + t * b.dense)))

    expected = (exact(1e-3) - 2 * exact(0) + exact(-1e-3)) / 1e-6
    got = jax.jit(jax.grad(jax.grad(value)))(as_array(0.0))
    assert_close(got, expected, rtol=1e-3)
