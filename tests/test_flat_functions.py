"""Error bars for functions that are flat on the Ritz values but not beyond them."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from problems import as_array, gaussian, haar, points
from spectral_helpers import (
    SPECTRAL,
    relaxed,  # noqa: F401
)

import traceax as tx

N, K, KEYS = 90, 36, 100
pytestmark = pytest.mark.x64


def path(n):
    """Laplacian of a path with n nodes."""
    steps = np.diff(np.eye(n), axis=0)
    return steps.T @ steps


def smoother(n):
    """Squared second differences, as in a smoothing spline."""
    steps = np.diff(np.eye(n), n=2, axis=0)
    return steps.T @ steps


def isolated(n):
    """One large eigenvalue, which Krylov spaces find at once, and many small ones."""
    values = np.r_[np.linspace(0, 1, n - 1), 5.0]
    return (haar(n) * values) @ haar(n).T


def reciprocal(s, t):
    return 1 / (1 + s * t)


def heat(s, t):
    return jnp.exp(-s * t)


# Each case has a matrix, a function and its parameter s. The sum of 1 - 1 / (1 + s t)
# counts degrees of freedom.
CASES = {
    "smoothing": (smoother(N), reciprocal, 1e5),
    "strong smoothing": (smoother(N), reciprocal, 1e7),
    "degrees of freedom": (1e4 * gaussian(points(N), 0.5), reciprocal, 1.0),
    "a graph": (path(N), reciprocal, 1e3),
    "heat": (path(N), heat, 1e3),
    "growth": (-path(N), heat, -1e3),
}


@ft.partial(jax.jit, static_argnums=(0, 1, 4))
def _run(estimator, function, a, s, tag=lx.symmetric_tag):
    def run_once(key):
        operator = lx.MatrixLinearOperator(a, tag)
        fn = ft.partial(function, s)
        e = tx.trace_function(key, fn, operator, K, SPECTRAL[estimator], throw=False)
        return e.value, e.standard_error, e.confidence_interval()

    return jax.lax.map(run_once, jr.split(jr.key(0), KEYS))


def _coverage(interval, truth):
    low, high = interval
    return np.mean((low <= truth) & (truth <= high))


def _truth(name):
    a, function, s = CASES[name]
    return np.sum(function(s, np.linalg.eigvalsh(a)))


@pytest.mark.parametrize(
    ("estimator", "name"),
    [("krylov-aware", name) for name in CASES] + [("quadrature", "heat")],
)
def test_intervals_cover_values_beyond_the_ritz_values(estimator, name):
    a, function, s = CASES[name]
    _, _, interval = _run(estimator, function, as_array(a), as_array(s))
    assert _coverage(interval, _truth(name)) >= 0.93


def test_an_isolated_eigenvalue_lengthens_no_bar():
    # We must not extend the space to its end, which would add a block of eigenvalues
    # there.
    a = isolated(N)
    values, errors, _ = _run("krylov-aware", heat, as_array(a), as_array(-4.0))
    rms = np.sqrt(np.mean((values - np.sum(np.exp(4 * np.linalg.eigvalsh(a)))) ** 2))
    assert np.sqrt(np.mean(errors**2)) < 1.5 * rms


def test_a_small_shift_is_no_evidence_for_the_smallest_eigenvalue():
    a = smoother(N)
    values = np.maximum(np.linalg.eigvalsh(a), 0)
    operator = lx.MatrixLinearOperator(as_array(a), lx.positive_semidefinite_tag)
    rhs = np.ones(N) / N**0.5

    @jax.jit
    def run(shift):
        def run_once(key):
            trace = tx.trace_inverse(key, operator, K, shift=shift, throw=False)
            terms = tx.inv_quad_logdet(
                key, operator, as_array(rhs), K, shift=shift, throw=False
            )
            estimates = trace, terms.inv_quad
            return [x.confidence_interval() for x in estimates]

        return jax.lax.map(run_once, jr.split(jr.key(0), KEYS))

    for small in (1e-6, 1e-4):
        trace_intervals, form_intervals = run(as_array(small))
        assert _coverage(trace_intervals, np.sum(1 / (values + small))) >= 0.93, small
        # Constants lie in the null space.
        assert _coverage(form_intervals, 1 / small) >= 0.93, small
