"""Estimates without a budget, and brackets from loose bounds."""

import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import assert_close
from problems import as_array, as_operator, observations, process

import traceax as tx

N = 96


# We test three quantities with brackets: an estimate from parameters, k and an
# estimator, and the truth from parameters.


def likelihood(p, k, estimator):
    x, y = observations(N)
    return tx.gaussian_log_likelihood(
        jr.key(3), p.kernel(x), y, k, estimator, shift=p.noise
    )


def exact_likelihood(p):
    return p.exact_likelihood(*observations(N))


def log_determinant(p, k, estimator):
    K = p.kernel(observations(N)[0])
    return tx.logdet(jr.key(3), K, k, estimator, shift=p.noise)


def exact_log_determinant(p):
    return p.exact_terms(*observations(N))[0]


def root(p, k, estimator):
    operator = p.kernel(observations(N)[0]) + as_operator(np.eye(N)) * p.noise
    return tx.trace_function(
        jr.key(3), jnp.sqrt, operator, k, estimator, lower=p.noise, monotone=True
    )


def exact_root(p):
    return jnp.sum(jnp.sqrt(jnp.linalg.eigvalsh(p.dense(observations(N)[0]))))


KRYLOV = tx.KrylovAwareEstimator()
CASES = {
    "likelihood": (likelihood, exact_likelihood, 0.1),
    "log determinant": (log_determinant, exact_log_determinant, 0.0),
    "root": (root, exact_root, 0.0),
}


@pytest.mark.x64
@pytest.mark.parametrize("name", CASES)
def test_steps_continue_until_truncation_errors_are_negligible(name):
    entry, exact, negligible = CASES[name]

    @ft.partial(jax.jit, static_argnums=(2, 3))
    def run(p, direction, k=None, estimator=KRYLOV):
        def ends(p):
            estimate = entry(p, k, estimator)
            return (estimate.value, *estimate.stats["bracket"]), estimate

        return jax.jvp(ends, (p,), (direction,), has_aux=True)

    products = []
    for noise in (1e-3, 0.3):
        p = process(noise)
        truth, gradient = jax.value_and_grad(exact)(p)
        square = sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient))
        slope = jnp.sqrt(square)
        direction = jax.tree.map(lambda x, slope=slope: x / slope, gradient)
        (value, low, high), slopes, estimate = run(p, direction)
        error = estimate.standard_error
        products.append(int(estimate.stats["num_matvecs"]))
        assert (high - low) / 2 < max(negligible, 0.1 * error)
        assert low < value < high
        assert abs(value - truth) < 4 * error
        assert_close(slopes[0], slope, 0.05)
        # Both ends have the value's slope.
        assert_close(slopes[1], slopes[0])
        assert_close(slopes[2], slopes[0])
    assert 10 <= products[1] < products[0] < N
    # The same k, passed explicitly, gives the same estimate.
    values, *others = run(p, direction, products[1], tx.KrylovAwareEstimator(5))
    assert_close(jnp.stack(values), jnp.stack([value, low, high]), 1e-8)
    assert_close(others[0][0], slopes[0], 1e-7)
    assert_close(others[1].standard_error, error, 1e-6)


def test_terms_sum_to_the_likelihood_and_k_is_required_without_a_bracket():
    x, y = observations(N)
    p, key = process(), jr.key(3)
    K, noise = p.kernel(x), p.noise
    pivots = tx.choose_pivots(key, K, 40, shift=noise)
    options = {"estimator": KRYLOV, "shift": noise, "preconditioner": pivots}
    terms = tx.inv_quad_logdet(key, K, y, **options)
    estimate = tx.gaussian_log_likelihood(key, K, y, **options)
    constant = N * math.log(2 * math.pi)
    total = -(terms.logdet.value + terms.inv_quad.value + constant) / 2
    assert_close(estimate.value, total, 1e-5)
    assert estimate.stats["num_matvecs"] == terms.logdet.stats["num_matvecs"]
    low, high = terms.inv_quad.stats["bracket"]
    assert (high - low) / 4 < max(0.1, 0.1 * estimate.standard_error)
    assert abs(total - p.exact_likelihood(x, y)) < 4 * estimate.standard_error

    plain = as_operator(np.eye(N) + 0.1)
    quadrature = tx.LanczosQuadratureEstimator()
    for call in (
        lambda: tx.trace_function(key, jnp.exp, K),
        lambda: tx.trace_function(key, jnp.sqrt, plain, monotone=True),
        lambda: tx.logdet(key, plain, estimator=KRYLOV),
        lambda: tx.logdet(key, K, None, quadrature, shift=noise),
    ):
        with pytest.raises(TypeError, match=r"k must .* unless .* monotone function"):
            call()


@pytest.mark.parametrize("n", [1, 2, 5, 32])
def test_few_observations_have_exact_answers(n):
    x, y = observations(n)
    p = process(0.1)
    run = eqx.filter_jit(tx.gaussian_log_likelihood)
    for columns in (None, min(n, 3)) if n in (1, 5) else (None,):
        options = {"shift": p.noise, "preconditioner": columns}
        for estimator, products in ((KRYLOV, n), (None, 0)):
            estimate = run(jr.key(0), p.kernel(x), y, None, estimator, **options)
            assert_close(estimate.value, p.exact_likelihood(x, y), 1e-4, 1e-4)
            assert estimate.standard_error < 1e-3
            assert estimate.stats["num_matvecs"] == products


@pytest.mark.x64
def test_a_loose_bound_costs_nothing():
    # A close bound helps, and a bound as loose as jitter must do no harm.
    edges = 2 * np.eye(16) - np.eye(16, k=1) - np.eye(16, k=-1)
    grid = np.kron(edges, np.eye(16)) + np.kron(np.eye(16), edges) + 0.1 * np.eye(256)
    truth, operator = np.linalg.slogdet(grid)[1], as_operator(grid, psd=True)

    @jax.jit
    def run(shift):
        def run_once(key):
            estimate = tx.logdet(key, operator, 48, shift=shift, throw=False)
            return estimate.value, estimate.standard_error, estimate.stats

        values, bars, stats = jax.lax.map(run_once, jr.split(jr.key(0), 8))
        low, high = stats["bracket"]
        return values, bars, stats["bottom"], high - low, stats["bracket_is_proven"]

    without, _, _, length, proven = run(as_array(0.0))
    assert not proven.any()
    values, bars, bottoms, longer, proven = run(as_array(1e-9))
    size = [np.sqrt(np.mean((x - truth) ** 2)) for x in (without, values)]
    assert size[1] < 1.2 * size[0]
    assert np.mean(np.abs(values - truth) < 2.8 * bars) > 0.8
    assert np.all((bottoms > 1e-7) & (bottoms < 0.2))
    # The ends still come from the bound.
    assert proven.all()
    assert np.all(longer > length)
