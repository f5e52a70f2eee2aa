"""Diagonals of inverses: two series terms are exact, and the remainder is estimated."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from helpers import (
    as_bcoo,
    assert_close,
    products_only,
    z_score,
)
from problems import PSD

import traceax as tx
from traceax._operators.inverse import expand_inverse

pytestmark = pytest.mark.x64


def grid(m):
    """The Laplacian of an m x m grid with closed ends, plus 0.1."""
    path = scipy.sparse.diags_array([-1.0, -1.0], offsets=[-1, 1], shape=(m, m))
    near = scipy.sparse.kronsum(path, path)
    return (scipy.sparse.diags_array(0.1 - near.sum(axis=0)) + near).tocoo()


def precision(n, condition=100):
    """A random sparse precision matrix with about 9 entries per row."""
    rng = np.random.default_rng(0)
    places = rng.integers(n, size=(4 * n, 2))
    half = scipy.sparse.coo_array((rng.normal(size=4 * n), places.T), shape=(n, n))
    symmetric = (half + half.T).tocsr()
    low, *_, high = np.linalg.eigvalsh(symmetric.toarray())
    shift = (high - condition * low) / (condition - 1)
    return (symmetric + shift * scipy.sparse.eye_array(n)).tocoo()


def kernel(n):
    """A dense covariance, whose rows are far longer than its diagonal."""
    x = np.random.default_rng(0).uniform(size=(n, 2))
    distances = np.sum((x[:, None] - x) ** 2, axis=-1)
    return scipy.sparse.coo_array(np.exp(-50 * distances) + np.eye(n))


# For each k we bound the error, relative to the error without the series.
CASES = {
    "grid": (grid(30), {10: 0.92, 100: 0.5}),
    "precision": (precision(900), {10: 0.72, 40: 0.5}),
    "kernel": (kernel(400), {10: 1.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_and_intervals(name):
    coo, ratios = CASES[name]
    exact = np.linalg.inv(coo.toarray())
    truth = np.diag(exact)
    A = lx.TaggedLinearOperator(tx.as_operator(as_bcoo(coo)), PSD)
    if name == "kernel":
        A = lx.MatrixLinearOperator(jnp.asarray(coo.toarray()), PSD)
    for k, ratio in ratios.items():

        @jax.jit
        def run(keys, whole, k=k):
            # A stored inverse replaces iterative solves.
            inverse = lx.MatrixLinearOperator(whole, PSD)
            expanded = tx.InverseLinearOperator(A, _Stored(whole))

            def run_once(key):
                def compare(operator):
                    d = tx.diagonal(key, operator, k, throw=False)
                    low, high = d.confidence_interval()
                    coverage = jnp.mean((low <= truth) & (truth <= high))
                    return d.value, coverage

                return compare(expanded), compare(products_only(inverse))

            return jax.lax.map(run_once, keys, batch_size=10)

        keys = jr.split(jr.key(0), 20)
        series, plain = jax.tree.map(np.asarray, run(keys, jnp.asarray(exact)))
        deviation = [np.sqrt(np.mean((x[0] - truth) ** 2)) for x in (series, plain)]
        assert deviation[0] < ratio * deviation[1]
        assert 0.93 < np.mean(series[1]) < 0.99


class _Stored(lx.AbstractLinearSolver):
    """A solver that multiplies by a stored inverse."""

    inverse: jax.Array

    def init(self, operator, options):
        return None

    def compute(self, state, vector, options):
        return self.inverse @ vector, lx.RESULTS.successful, {}

    def transpose(self, state, options):
        return None, {}

    def conj(self, state, options):
        return None, {}

    def assume_full_rank(self):
        return True


N = 24


def _complex(t):
    """A Hermitian inverse over a PyTree, tagged semidefinite."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, N)) + 1j * rng.normal(size=(N, N))
    a = jnp.asarray(x @ x.conj().T / N + np.eye(N))
    a = a + t * jnp.diag(jnp.arange(1.0 * N) / N).astype(a.dtype)
    tree = [[a[:9, :9], a[:9, 9:]], [a[9:, :9], a[9:, 9:]]]
    structure = jax.eval_shape(lambda: [a[0, :9], a[0, 9:]])
    inverse = tx.InverseLinearOperator(
        lx.PyTreeLinearOperator(tree, structure), lx.LU()
    )
    return lx.TaggedLinearOperator(inverse, PSD), jnp.linalg.inv(a)


def _few_zeros(t):
    """A nonsymmetric matrix with zeros on the diagonal, and one entry close to zero."""
    rng = np.random.default_rng(2)
    d = np.where(np.arange(N) % 6 == 0, 0.0, 4.0)
    d[1] = 1e-9
    a = rng.normal(size=(N, N)) / 2
    a = jnp.asarray(a - np.diag(np.diag(a) - d)) + t * jnp.eye(N)[::-1]
    A = lx.MatrixLinearOperator(2 * a) * 0.5
    return tx.InverseLinearOperator(A, lx.LU()), jnp.linalg.inv(a)


def _all_zeros(t):
    rng = np.random.default_rng(3)
    a = rng.normal(size=(N, N)) / 4 + np.roll(np.eye(N), 1, 0) * 4
    a = jnp.asarray(a - np.diag(np.diag(a))) + t * jnp.eye(N)[::-1]
    return tx.InverseLinearOperator(
        lx.MatrixLinearOperator(a), lx.LU()
    ), jnp.linalg.inv(a)


KINDS = {"complex": _complex, "few zeros": _few_zeros, "all zeros": _all_zeros}


@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_with_derivatives(kind):
    def exact(t):
        return 1 - 2 * jnp.diag(KINDS[kind](t)[1])

    @jax.jit
    def run(keys):
        def run_once(key):
            def value_at(t):
                inverse, _ = KINDS[kind](t)
                identity = lx.IdentityLinearOperator(inverse.in_structure())
                operator = -2.0 * inverse + identity
                value = tx.diagonal(key, operator, 10, throw=False).value
                return jnp.concatenate(jax.tree.leaves(value))

            tags = PSD if kind == "complex" else ()
            stored = lx.MatrixLinearOperator(KINDS[kind](0.1)[1], tags)
            plain = 1 - 2 * tx.diagonal(key, stored, 10, throw=False).value
            return jax.jvp(value_at, (0.1,), (1.0,)), plain

        return jax.vmap(run_once)(keys), jax.jvp(exact, (0.1,), (1.0,))

    (series, plain), truths = jax.tree.map(np.asarray, run(jr.split(jr.key(0), 2000)))
    for samples, truth in zip(series, truths, strict=True):
        assert samples.dtype == truth.dtype
        assert z_score(samples, truth[None]) < 4
    assert z_score(1.02 * series[0], truths[0][None]) > 4 or kind != "complex"
    # We don't divide by tiny entries, so they make nothing worse.
    deviation = [
        np.sqrt(np.mean(abs(x - truths[0][None]) ** 2)) for x in (series[0], plain)
    ]
    assert deviation[0] < 1.1 * deviation[1]


@pytest.mark.parametrize("kind", KINDS)
def test_remainder(kind):
    operator, inverse = KINDS[kind](jnp.asarray(0.3))
    expansion = expand_inverse(operator)
    assert expansion is not None
    remainder = expansion.remainder
    remaining = remainder.as_matrix()
    assert_close(expansion.diagonal + jnp.diag(remaining), jnp.diag(inverse))
    unit = jnp.eye(N)[3].astype(inverse.dtype)
    assert_close(remainder.terms(unit) + remaining[:, 3], inverse[:, 3], atol=1e-9)
    assert lx.is_positive_semidefinite(remainder) == (kind == "complex")
    if kind == "complex":  # at most about the inverse, as a quadratic form
        assert np.linalg.eigvalsh(inverse - remaining).min() > -0.05


def test_tolerances_and_exact_answers():
    coo = grid(8)
    truth = np.diag(np.linalg.inv(coo.toarray()))
    A = lx.TaggedLinearOperator(tx.as_operator(as_bcoo(coo)), PSD)
    inverse = tx.InverseLinearOperator(A, lx.CG(rtol=1e-4, atol=1e-4))

    @jax.jit
    def run(rtol):
        met = tx.diagonal(jr.key(0), inverse, rtol=rtol)
        return met, tx.diagonal(jr.key(0), inverse, 64)

    for rtol in (0.3, 1e-4):
        met, exact = run(rtol)
        assert (met.stats["num_matvecs"] < 64) == (rtol == 0.3)
        size = np.sqrt(np.mean(truth**2))
        assert np.sqrt(np.mean((met.value - truth) ** 2)) < rtol * size
        # The error bar includes the solver's error.
        for estimate in (exact, met) if rtol < 0.1 else (exact,):
            assert np.all(abs(estimate.value - truth) <= 2 * estimate.standard_error)
            assert np.all(estimate.standard_error < 1e-3)
