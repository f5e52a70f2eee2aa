"""Sparse log-determinants, which take colours by default."""

import jax
import jax.experimental.sparse as jsparse
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse as sp
from problems import PSD, is_x64
from scipy import stats
from scipy.spatial import Delaunay

import traceax as tx


def path(m):
    return sp.diags_array(
        [-np.ones(m - 1), 2 * np.ones(m), -np.ones(m - 1)], offsets=[-1, 0, 1]
    )


def grid(m):
    """The Laplacian on an m x m grid with open ends, plus 0.1."""
    eye = sp.eye_array(m)
    return sp.kron(path(m), eye) + sp.kron(eye, path(m)) + 0.1 * sp.eye_array(m * m)


def mesh(n):
    """Stiffness plus mass, for linear elements on random points."""
    points = np.random.default_rng(0).uniform(size=(n, 2))
    triangles = Delaunay(points).simplices
    a, b, c = points[triangles].transpose(1, 0, 2)
    edges = np.stack([c - b, a - c, b - a])
    area = np.abs(np.linalg.det(np.stack([b - a, c - a], 1))) / 2
    rows, columns, entries = [], [], []
    for i in range(3):
        for j in range(3):
            stiffness = np.sum(edges[i] * edges[j], axis=1) / (4 * area)
            rows.append(triangles[:, i])
            columns.append(triangles[:, j])
            entries.append(stiffness + 40 * area * (1 + (i == j)) / 12)
    rows, columns, entries = map(np.concatenate, (rows, columns, entries))
    return sp.coo_array((entries, (rows, columns)), shape=(n, n))


def hubs(n):
    """A graph whose new nodes prefer nodes with many edges, Laplacian plus 0.1."""
    rng, rows, columns, ends = np.random.default_rng(0), [], [], [0, 1, 2]
    for node in range(3, n):
        for other in set(np.asarray(ends)[rng.integers(len(ends), size=3)].tolist()):
            rows.append(node)
            columns.append(other)
            ends += [node, other]
    W = sp.coo_array((np.ones(len(rows)), (rows, columns)), shape=(n, n))
    W = W + W.T
    return sp.diags_array(np.asarray(W.sum(1)).ravel() + 0.1) - W


MATRICES = {"grid": grid(30), "mesh": mesh(900), "hubs": hubs(900)}


@pytest.mark.x64
@pytest.mark.parametrize("name", MATRICES)
def test_values_and_slopes(name):
    # The slope is along a multiple of the diagonal, so that its truth needs no solve.
    matrix = MATRICES[name].tocoo()
    n, dense = matrix.shape[0], matrix.toarray()
    operator, weights = tx.as_operator(matrix), jnp.asarray(np.linspace(0, 2, n))
    change = lx.DiagonalLinearOperator(weights * dense.diagonal())

    def both(key):
        def logdet(t):
            A = lx.TaggedLinearOperator(operator + t * change, PSD)
            return tx.logdet(key, A, 200, throw=False)

        value, slope = tx.jvp(logdet, (0.0,), (1.0,))
        low, high = value.stats["bracket"]
        return [
            (x.value, x.standard_error, x.stats["degrees_of_freedom"], low, high)
            for x in (value, slope)
        ]

    truth = (
        np.linalg.slogdet(dense)[1],
        np.linalg.inv(dense).diagonal() @ change.diagonal,
    )
    results = jax.jit(jax.vmap(both))(jr.split(jr.key(0), 100))
    if name == "mesh":  # ill-conditioned: slopes converge after more steps
        truth, results = truth[:1], results[:1]
    for i, (expected, columns) in enumerate(zip(truth, results, strict=True)):
        value, error, freedom, low, high = columns
        errors, radius = value - expected, error * stats.t.ppf(0.975, freedom)
        assert np.mean(np.abs(errors) < radius) >= 0.9
        assert np.mean(freedom) > 5
        spread = np.std(value)
        if i == 0:  # the mean of both ends brackets the truth up to sampling errors
            noise = 4 * spread / 10
            assert np.mean(low) - noise < expected < np.mean(high) + noise
            if name != "grid":
                continue
            plain = tx.KrylovAwareEstimator()
            tagged = lx.TaggedLinearOperator(operator, PSD)
            other = tx.logdet(jr.key(0), tagged, 200, plain, throw=False)
            assert np.sqrt(np.mean(errors**2)) < 0.5 * other.standard_error


@pytest.mark.skipif(is_x64(), reason="one mode is enough")
def test_calls_agree():
    matrix, key = grid(30).tocoo(), jr.key(0)
    operator = tx.as_operator(matrix, tags=PSD)
    estimate = tx.logdet(key, operator, 200)
    assert "LanczosQuadrature" in str(estimate)
    assert 150 < estimate.stats["num_matvecs"] <= 200
    assert "ritz_values" not in estimate.stats
    truth = np.linalg.slogdet(matrix.toarray())[1]
    assert abs(estimate.value - truth) < 4 * estimate.standard_error
    # Other forms, orders of entries, and calls from inside `jax.jit`.
    order = np.random.default_rng(0).permutation(matrix.nnz)
    shuffled = sp.coo_array(
        (matrix.data[order], (matrix.row[order], matrix.col[order])), matrix.shape
    )
    indices = jnp.stack([matrix.row, matrix.col], axis=1)
    bcoo = jsparse.BCOO(
        (jnp.asarray(matrix.data, jnp.float32), indices), shape=matrix.shape
    )

    def from_data(data):
        A = jsparse.BCOO((data, indices), shape=matrix.shape)
        return tx.logdet(key, tx.as_operator(A, tags=PSD), 200)

    laplacian = sp.coo_array(matrix - 0.1 * sp.eye_array(900))
    for other in (
        tx.logdet(key, tx.as_operator(shuffled, tags=PSD), 200),
        tx.logdet(key, tx.as_operator(bcoo, tags=PSD), 200),
        jax.jit(lambda key: tx.logdet(key, operator, 200))(key),
        jax.jit(from_data)(bcoo.data),
    ):
        np.testing.assert_allclose(other.value, estimate.value, rtol=1e-5)
        np.testing.assert_allclose(
            other.standard_error, estimate.standard_error, rtol=0.02
        )
    # The shift is a lower bound for the bracket, whose middle is the value.
    other = tx.logdet(key, tx.as_operator(laplacian, tags=PSD), 200, shift=0.1)
    assert "LanczosQuadrature" in str(other)
    assert abs(other.value - estimate.value) < estimate.standard_error
    # Without a known pattern, with few products or few colours, it is the Krylov space.
    traced = jax.jit(lambda A: tx.logdet(key, A, 60))(operator)
    chain = tx.as_operator(path(600) + 0.1 * sp.eye_array(600), tags=PSD)
    for other in (traced, tx.logdet(key, operator, 60), tx.logdet(key, chain, 60)):
        assert "KrylovAware" in str(other)
    # A matrix that isn't positive definite fails.
    bad = tx.as_operator(laplacian - 2 * sp.eye_array(900))
    with pytest.raises(Exception, match="outside"):
        tx.logdet(key, bad, 200)


@pytest.mark.skipif(is_x64(), reason="one mode is enough")
def test_complex_matrices():
    # A gauge transformation leaves the determinant unchanged.
    matrix = grid(30).tocoo()
    phases = np.exp(1j * np.random.default_rng(0).uniform(size=900))
    data = phases[matrix.row] * matrix.data * phases[matrix.col].conj()
    turned = sp.coo_array(
        (data.astype(np.complex64), (matrix.row, matrix.col)), (900, 900)
    )
    estimate = tx.logdet(jr.key(0), tx.as_operator(turned, tags=PSD), 200)
    truth = np.linalg.slogdet(matrix.toarray())[1]
    assert abs(estimate.value - truth) < 4 * estimate.standard_error < 20


def test_rows_with_many_entries():
    # Most entries are in slots, and the others are added one by one.
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(40, 30)) * (rng.random((40, 30)) < 0.05)
    dense[3], dense[:, 7] = rng.normal(size=30), rng.normal(size=40)
    operator, X = tx.as_operator(sp.coo_array(dense)), rng.normal(size=(30, 4))
    X = jnp.asarray(X, operator.in_structure().dtype)
    assert operator.rest.size > 0
    products = jax.jit(jax.vmap(operator.mv, 1, 1))(X)
    np.testing.assert_allclose(products, dense @ X, rtol=1e-4, atol=1e-5)
    transposed = jax.vmap(operator.transpose().mv, 1, 1)(products)
    np.testing.assert_allclose(transposed, dense.T @ products, rtol=1e-4, atol=1e-4)
