"""Log-determinants of sparse matrices: the default, the Krylov space, and a factorisation.

    JAX_ENABLE_X64=1 python benchmarks/sparse.py

For each matrix the script prints the root mean square error and the mean error bar over keys,
the coverage of 95 % intervals, CPU seconds of later calls with the gradient, and the seconds
that SciPy's `splu` takes for the exact value.
"""

import time

import jax
import lineax as lx
import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from scipy.spatial import Delaunay, cKDTree

import traceax as tx

KEYS, PRODUCTS = 20, 400


def graph_laplacian(rows, columns, n, mass):
    W = sp.coo_array((np.ones(len(rows)), (rows, columns)), shape=(n, n)).tocsr()
    W = ((W + W.T) > 0).astype(float)
    return sp.diags_array(np.asarray(W.sum(axis=1)).ravel() + mass) - W


def lattice(shape, mass):
    """A Laplacian with open ends plus a mass."""
    total = mass * sp.eye_array(np.prod(shape))
    for axis, size in enumerate(shape):
        band = -np.ones(size - 1)
        path = sp.diags_array([band, 2 * np.ones(size), band], offsets=[-1, 0, 1])
        before, after = np.prod(shape[:axis]), np.prod(shape[axis + 1 :])
        inner = sp.kron(path, sp.eye_array(int(after)))
        total = total + sp.kron(sp.eye_array(int(before)), inner)
    return total


def triangles(n):
    points = np.random.default_rng(0).random((n, 2))
    return points, Delaunay(points).simplices


def mesh(n):
    """Stiffness plus 400 times mass, for linear elements on an irregular mesh."""
    points, corners = triangles(n)
    a, b, c = points[corners].transpose(1, 0, 2)
    area = np.abs(np.linalg.det(np.stack([b - a, c - a], axis=1))) / 2
    edges, parts = np.stack([c - b, a - c, b - a]), []
    for i, j in np.ndindex(3, 3):
        stiffness = np.sum(edges[i] * edges[j], axis=1) / (4 * area)
        entries = stiffness + 400 * area * (1 + (i == j)) / 12
        parts.append((entries, corners[:, i], corners[:, j]))
    entries, rows, columns = map(np.concatenate, zip(*parts, strict=True))
    return sp.coo_array((entries, (rows, columns)), shape=(n, n))


def planar(n):
    _, corners = triangles(n)
    pairs = np.concatenate([corners[:, [0, 1]], corners[:, [1, 2]], corners[:, [2, 0]]])
    return graph_laplacian(*pairs.T, n, 0.1)


def neighbours(n, dimension):
    points = np.random.default_rng(0).random((n, dimension))
    nearest = cKDTree(points).query(points, 9)[1]
    return graph_laplacian(np.repeat(np.arange(n), 8), nearest[:, 1:].ravel(), n, 0.1)


def hubs(n):
    """New nodes choose three nodes, those with many edges more often."""
    rng, rows, columns, ends = np.random.default_rng(0), [], [], [0, 1, 2]
    for node in range(3, n):
        for other in {ends[i] for i in rng.integers(len(ends), size=3)}:
            rows.append(node)
            columns.append(other)
            ends += [node, other]
    return graph_laplacian(np.asarray(rows), np.asarray(columns), n, 0.1)


MATRICES = {
    "64 x 64 lattice, mass 0.1": lambda: lattice((64, 64), 0.1),
    "64 x 64 lattice, mass 0.001": lambda: lattice((64, 64), 0.001),
    "20 x 20 x 20 lattice, mass 0.1": lambda: lattice((20, 20, 20), 0.1),
    "irregular mesh": lambda: mesh(5000),
    "planar graph": lambda: planar(5000),
    "8 neighbours in the plane": lambda: neighbours(5000, 2),
    "8 neighbours in space": lambda: neighbours(5000, 3),
    "graph with hubs": lambda: hubs(5000),
}


def main():
    print("matrix | n | splu (s) | default: error, bar, coverage, CPU s | Krylov space")
    keys = jax.random.split(jax.random.key(0), KEYS)
    for name, make in MATRICES.items():
        matrix = make().tocsc()
        start = time.perf_counter()
        truth = np.log(np.abs(spla.splu(matrix).U.diagonal())).sum()
        row = f"{name} | {matrix.shape[0]} | {time.perf_counter() - start:.2f}"
        A = tx.as_operator(matrix, tags=lx.positive_semidefinite_tag)
        for estimator in (None, tx.KrylovAwareEstimator()):

            @jax.jit
            def run(key, scale, A=A, estimator=estimator):
                def value(scale):
                    scaled = lx.TaggedLinearOperator(
                        scale * A, lx.positive_semidefinite_tag
                    )
                    estimate = tx.logdet(key, scaled, PRODUCTS, estimator, throw=False)
                    return estimate.value, estimate

                return jax.value_and_grad(value, has_aux=True)(scale)

            jax.block_until_ready(run(keys[0], 1.0))
            few, start = keys if estimator is None else keys[:5], time.process_time()
            found = [jax.block_until_ready(run(key, 1.0))[0][1] for key in few]
            seconds = (time.process_time() - start) / len(few)
            errors = np.asarray([float(x.value) - truth for x in found])
            bars = np.asarray([float(x.standard_error) for x in found])
            inside = [x.confidence_interval(0.95) for x in found]
            share = np.mean([low <= truth <= high for low, high in inside])
            row += (
                f" | {np.sqrt(np.mean(errors**2)):.2g}, {np.sqrt(np.mean(bars**2)):.2g}"
            )
            row += f", {share:.2f}, {seconds:.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
