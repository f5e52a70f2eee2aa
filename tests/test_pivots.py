"""Compare blocked, randomly pivoted Cholesky with one column at a time."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from helpers import z_score
from problems import PSD, as_array, as_operator, float_dtype, gaussian, points, process

import traceax as tx
from traceax._preconditioner import _choose, choose_pivots


def residual(K, pivots):
    """Residual diagonal after the columns."""
    S = np.asarray(pivots)
    S = S[S >= 0]
    values, vectors = np.linalg.eigh(K[np.ix_(S, S)])
    F = K[:, S] @ (vectors / np.sqrt(np.maximum(values, 1e-14)))
    return np.diagonal(K) - np.sum(F**2, axis=1)


def one_by_one(K, number, rng):
    """Algorithm 2.1 of arXiv:2207.06503."""
    d, F, S = np.diagonal(K).copy(), np.zeros((len(K), number)), []
    for i in range(number):
        S.append(rng.choice(len(K), p=d / d.sum()))
        column = K[:, S[i]] - F @ F[S[i]]
        F[:, i] = column / np.sqrt(column[S[i]])
        d = np.maximum(d - F[:, i] ** 2, 0)
        d[S] = 0
    return S


def test_residuals_match_columns_one_by_one():
    K = gaussian(points(150), 0.15)
    operator = as_operator(K, psd=True)
    keys = jr.split(jr.key(0), 200)
    pivots = jax.jit(
        jax.vmap(lambda key: choose_pivots(key, operator, 40, shift=1e-3, throw=False))
    )(keys)
    rng = np.random.default_rng(0)
    ours = np.array([residual(K, S).sum() for S in np.asarray(pivots)])
    naive = np.array([residual(K, one_by_one(K, 40, rng)).sum() for _ in range(200)])
    assert abs(np.log(ours.mean() / naive.mean())) < 0.15
    assert z_score(ours, naive.mean()) < 5 * np.sqrt(2)
    assert all(len(set(S)) == 40 for S in np.asarray(pivots))


def test_the_first_pivots_have_their_probabilities():
    K = gaussian(points(6, 1, 3), 0.5) * np.linspace(1, 2, 6)[:, None]
    K = K * np.linspace(1, 2, 6)[None]
    operator, keys = as_operator(K, psd=True), jr.split(jr.key(1), 20_000)
    # Each round draws two candidates.
    pivots = jax.jit(
        jax.vmap(lambda key: choose_pivots(key, operator, 6, shift=1e-2, throw=False))
    )(keys)
    counts = np.zeros((6, 6))
    np.add.at(counts, tuple(np.asarray(pivots)[:, :2].T), 1)
    d = np.diagonal(K)
    after = d[None] - K**2 / d[:, None]
    np.fill_diagonal(after, 0)
    chances = (d / d.sum())[:, None] * after / after.sum(axis=1, keepdims=True)
    error = np.sqrt(chances * (1 - chances) / len(keys)) + 1e-9
    assert np.all(abs(counts / len(keys) - chances) < 5 * error)


N = 200


@eqx.filter_jit
def _search(matrix, noise):
    return _choose(jr.key(0), lx.MatrixLinearOperator(matrix, PSD), noise, 100)


def search(matrix, noise):
    """At most 100 pivots among 200 rows, and the residual trace."""
    matrix = jnp.asarray(matrix, float_dtype())
    pivots = _search(matrix, jnp.full(N, noise, matrix.dtype))
    assert pivots.semidefinite
    assert pivots.finite
    indices = np.asarray(pivots.indices)
    number = np.sum(indices >= 0)
    assert np.all(indices[number:] == -1)
    return indices[:number], float(pivots.residual_trace)


def test_search_stops_when_residuals_are_small_relative_to_noise():
    K = gaussian(points(N), 0.2)
    noise = np.where(np.arange(N) < N // 2, 0.1, 10.0)
    for shift in (np.full(N, 0.1), noise):
        pivots, trace = search(K, shift)
        assert 30 < len(pivots) < 100
        after, before = (
            np.mean(residual(K, S) / shift) for S in (pivots, pivots[:-25])
        )
        assert after < 1e-3 < before
        assert trace / N == pytest.approx(after, rel=0.2)
    # A column for a noisy observation is worth less.
    assert np.mean(pivots < N // 2) > 0.7


def test_useless_columns_are_dropped():
    def number_and_trace(matrix):
        pivots, trace = search(matrix, 1e-3)
        return len(pivots), pytest.approx(trace * 1e-3, rel=1e-4)

    assert number_and_trace(np.eye(N)) == (0, N)
    assert number_and_trace(np.zeros((N, N))) == (0, 0)
    # For a smooth kernel plus the identity, we take columns only for their shared part.
    number, _ = number_and_trace(10 * gaussian(points(N, 1), 2.0) + np.eye(N))
    assert 0 < number <= 50
    # Each entry that stands out is worth a column.
    entries = np.where(np.arange(N) < 10, 1e4, 1.0)
    number, trace = number_and_trace(np.diag(entries))
    assert 10 <= number <= 40
    assert trace == N - number


def test_repeated_points():
    pivots, _ = search(gaussian(np.repeat(points(N // 4), 4, axis=0)), 1e-9)
    assert 20 < len(pivots) <= N // 4
    assert len(set(pivots // 4)) == len(pivots)


def test_pivots_beyond_the_noise_help_other_length_scales():
    # We choose pivots for a smooth kernel, and use them after length scales have
    # shrunk.
    x = points(N)
    smooth, rough = gaussian(x, 1.0), gaussian(x, 0.1)
    rng = np.random.default_rng(0)
    ours = random = 0
    for i in range(3):
        needed, _ = search(smooth, 0.1)
        operator = as_operator(smooth, psd=True)
        pivots = np.asarray(choose_pivots(jr.key(i), operator, 80, shift=0.1))
        assert len(needed) < 40
        assert len(set(pivots)) == 80
        assert pivots.min() >= 0
        ours += residual(rough, pivots).sum()
        random += residual(rough, rng.permutation(N)[:80]).sum()
    assert ours < 0.7 * random


def test_repeated_rows_are_no_pivots():
    x = np.repeat(points(N // 4), 4, axis=0)
    for K in (gaussian(x), gaussian(x, 3.0), np.ones((N, N)), np.zeros((N, N))):
        # Every row has its own noise, which doesn't make rows distinct.
        noise = as_array(np.linspace(0.1, 1, N))
        pivots = choose_pivots(jr.key(0), as_operator(K, psd=True), 100, shift=noise)
        number = len(np.unique(K.round(6), axis=0)) if K.any() else 0
        indices = np.asarray(pivots)
        assert np.all(indices[:number] >= 0)
        assert np.all(indices[number:] == -1)
        assert len(set(indices[:number] // 4)) == number
    identity = as_operator(np.eye(N), psd=True)
    pivots = choose_pivots(jr.key(0), identity, N, shift=0.1)
    np.testing.assert_array_equal(np.sort(pivots), np.arange(N))


def test_rounding_is_no_failure():
    # A smooth kernel's residuals reach rounding long before the pivots end.
    for length in (0.5, 2.0):
        for noise in (1e-3, 1e-6, 1e-12):
            assert 5 < len(search(gaussian(points(N), length), noise)[0]) < 100


def test_rounding_in_many_columns_is_no_failure():
    # A kernel computed in 32 bits is indefinite by more than eps times its diagonal.
    # Without a stop the search amplified this, and refused it with three of these keys.
    x = jnp.asarray(np.random.default_rng(0).random((800, 6)), jnp.float32)

    def matern_5_2(a, b):
        squared = jnp.sum((a - b) ** 2)
        r = jnp.sqrt(jnp.where(squared == 0, 1, squared)) / 5**0.5  # length scale 5
        return jnp.where(squared == 0, 1, (1 + r + r**2 / 3) * jnp.exp(-r))

    K = tx.KernelLinearOperator(matern_5_2, x)
    for i in range(4):
        assert np.all(choose_pivots(jr.key(i), K, 600, shift=1e-4) >= 0)


@pytest.mark.x64
def test_a_smooth_kernel_in_32_bits_needs_few_columns_for_every_key():
    # Neighbours of a pivot just above rounding looked negative. So for three of these
    # keys, the search stopped after 15 pivots, which left up to 0.8 of the noise.
    n, noise = 3000, 1e-3
    x = np.linspace(0, 1, n)[:, None]

    def smooth(a, b):
        return jnp.exp(-50 * jnp.sum((a - b) ** 2))

    operator = tx.KernelLinearOperator(smooth, jnp.asarray(x, jnp.float32))
    K = np.exp(-50 * (x - x.T) ** 2)
    shift = jnp.asarray(noise, jnp.float32)
    for i in range(14):
        pivots = choose_pivots(jr.key(i), operator, shift=shift)
        assert len(pivots) == 64
        search = _choose(jr.key(i), operator, shift, 2250)
        assert np.mean(residual(K, search.indices)) < 0.03 * noise


def test_other_operators():
    n, key = 30, jr.key(0)
    rng = np.random.default_rng(0)
    U = rng.normal(size=(n, 6)) + 1j * rng.normal(size=(n, 6))
    pivots = choose_pivots(key, as_operator(U @ U.conj().T, psd=True), 20, shift=1e-2)
    assert len(set(np.asarray(pivots))) == 20
    matrix = as_operator(U.real @ U.real.T, psd=True)
    sparse = tx.as_operator(scipy.sparse.coo_array(U.real @ U.real.T), tags=PSD)
    kernel = process().kernel(as_array(points(n)))

    def sums(scale):
        all_pivots = [
            choose_pivots(key, scale * operator, 20, shift=scale, throw=False)
            for operator in (matrix, sparse, kernel)
        ]
        return jnp.sum(jnp.stack(all_pivots)).astype(float_dtype()), all_pivots

    one = jnp.ones((), float_dtype())
    derivative, (S1, S2, S3) = jax.jit(jax.grad(sums, has_aux=True))(one)
    np.testing.assert_array_equal(S1, S2)
    assert len(set(np.asarray(S1))) == 20
    np.testing.assert_array_equal(S3, choose_pivots(key, kernel, 20, shift=1.0))
    assert derivative == 0


@pytest.mark.wrong_types
def test_arguments():
    key, operator = jr.key(0), as_operator(gaussian(points(20)), psd=True)
    for columns, error in ((0, ValueError), (21, ValueError), (True, TypeError)):
        with pytest.raises(error, match="columns must be"):
            choose_pivots(key, operator, columns, shift=1.0)
    with pytest.raises(TypeError, match="columns must be a Python int"):
        jax.jit(lambda k: choose_pivots(key, operator, k, shift=1.0))(3)
    for shift in (0, -1.0, np.nan, np.zeros(20), np.r_[np.ones(19), np.nan]):
        with pytest.raises(ValueError, match="shift must be positive"):
            choose_pivots(key, operator, 3, shift=shift)
    for shift in (np.ones(3), 1j * np.ones(20)):
        with pytest.raises(ValueError, match="shift must be real and of shape"):
            choose_pivots(key, operator, 3, shift=shift)
    with pytest.raises(TypeError, match="shift must be a real number"):
        choose_pivots(key, operator, 3, shift="much")  # pyright: ignore
    with pytest.raises(TypeError, match="key must be"):
        choose_pivots(0, operator, 3, shift=1.0)  # pyright: ignore


def test_failures_at_run_time():
    K = gaussian(points(20))

    @eqx.filter_jit
    def run(matrix, shift):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        return choose_pivots(jr.key(0), operator, 8, shift=shift)

    def raises(matrix, shift, match):
        arrays = jnp.asarray(matrix, float_dtype()), jnp.asarray(shift, float_dtype())
        with pytest.raises(RuntimeError, match=match):
            jax.block_until_ready(run(*arrays))

    negative = np.eye(20)
    negative[3, 3] = -1e-3
    for matrix in (K - 0.2 * np.eye(20), K - 2 * np.eye(20), negative):
        raises(matrix, 1e-2, "positive semidefinite")
    bad = K.copy()
    bad[3, 3] = np.nan
    raises(bad, 1e-2, "NaN or infinity")
    bad = K.copy()
    np.fill_diagonal(bad, np.inf)
    raises(bad, 1e-2, "NaN or infinity")
    bad = np.full((20, 20), np.nan)
    np.fill_diagonal(bad, 1)
    raises(bad, 1e-2, "NaN or infinity")
    for shift in (0.0, -1.0, np.nan):
        raises(K, shift, "shift must be positive")
    S = choose_pivots(jr.key(0), as_operator(bad, psd=True), 8, shift=1, throw=False)
    assert S.shape == (8,)
