"""Diagonals of inverses, of which two terms of a series are exact and the rest is estimated."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from helpers import NSD, PSD, as_bcoo, assert_close, hidden, z_score

import traceax as tx

pytestmark = pytest.mark.x64


def grid(m):
    """The Laplacian of an m x m grid of closed ends, and 0.1."""
    path = scipy.sparse.diags_array([-1.0, -1.0], offsets=[-1, 1], shape=(m, m))
    near = scipy.sparse.kronsum(path, path)
    return (scipy.sparse.diags_array(0.1 - near.sum(axis=0)) + near).tocoo()


def precision(n, condition=100):
    """A random sparse precision matrix, of some 9 entries in a row."""
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


# By k: the largest ratio of errors to those of the whole inverse.
CASES = {
    "grid": (grid(30), {10: 0.9, 30: 0.8, 100: 0.5}),
    "precision": (precision(900), {10: 0.75, 30: 0.6, 100: 0.5}),
    "kernel": (kernel(400), {10: 1.05, 40: 1.0}),
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
            # By a factorisation in place of solves that iterate.
            inverse = lx.MatrixLinearOperator(whole, PSD)
            after = tx.InverseLinearOperator(A, _Stored(whole))

            def one(key):
                def both(operator):
                    d = tx.diagonal(key, operator, k, throw=False)
                    t = tx.trace(key, operator, k, throw=False)
                    low, high = d.confidence_interval()
                    inside = jnp.mean((low <= truth) & (truth <= high))
                    return d.value, t.value, inside

                return both(after), both(hidden(inverse))

            return jax.lax.map(one, keys, batch_size=10)

        found, before = run(jr.split(jr.key(0), 40), jnp.asarray(exact))
        off = [np.sqrt(np.mean((x[0] - truth) ** 2)) for x in (found, before)]
        of_trace = [np.sqrt(np.mean((x[1] - sum(truth)) ** 2)) for x in (found, before)]
        inside = [np.mean(x[2]) for x in (found, before)]
        print(name, k, *off, off[0] / off[1], of_trace[0] / of_trace[1], *inside)
        assert off[0] < ratio * off[1]
        assert 0.93 < inside[0] < 0.99


class _Stored(lx.AbstractLinearSolver):
    """A solver that knows the inverse."""

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
