"""A map in time: 100,000 cells in a grid with gaps, and a custom operator class.

The signal's covariance is a Kronecker product of two kernels, restricted to the observed cells.
Each cell has its own noise variance. A product with the covariance takes two products with
small matrices. The library reads columns and the diagonal, and makes a preconditioner from
them. We compare with Cholesky's answer on 4,200 cells, and then compute value and gradient on
100,000.

    python examples/kronecker_with_holes.py
"""

import functools as ft
import time

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree

import traceax as tx

COLUMNS = {4_200: 100, 100_000: 200}  # at most, by the number of cells
TRUTH = {"lengths": jnp.log(jnp.full(2, 0.5)), "scale": 0.0, "noise": jnp.log(0.3)}
TRUTH = jax.tree.map(jnp.asarray, TRUTH)


# --8<-- [start:operator]
class MaskedKronecker(lx.AbstractLinearOperator):
    """A Kronecker product of two kernel matrices, restricted to `cells`."""

    left: jax.Array  # (a, a)
    right: jax.Array  # (b, b)
    cells: jax.Array  # in the flattened (a, b) grid

    def mv(self, vector):
        grid = jnp.zeros((len(self.left), len(self.right)), vector.dtype)
        grid = grid.ravel().at[self.cells].set(vector).reshape(grid.shape)
        return (self.left @ grid @ self.right).ravel()[self.cells]

    def as_matrix(self):
        return tx.columns(self, jnp.arange(len(self.cells)))

    def transpose(self):
        return self

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.cells.shape, self.left.dtype)

    def out_structure(self):
        return self.in_structure()


for check in (lx.is_symmetric, lx.is_positive_semidefinite):
    check.register(MaskedKronecker, lambda operator: True)
for check in (
    lx.is_diagonal,
    lx.is_tridiagonal,
    lx.is_lower_triangular,
    lx.is_upper_triangular,
    lx.is_negative_semidefinite,
    lx.has_unit_diagonal,
):
    check.register(MaskedKronecker, lambda operator: False)


@tx.columns.register
def _(operator: MaskedKronecker, indices):
    i, j = jnp.divmod(operator.cells, len(operator.right))
    left = operator.left[i[:, None], i[indices][None]]
    return left * operator.right[j[:, None], j[indices][None]]


@tx.diagonal_entries.register
def _(operator: MaskedKronecker):
    i, j = jnp.divmod(operator.cells, len(operator.right))
    return jnp.diagonal(operator.left)[i] * jnp.diagonal(operator.right)[j]


# --8<-- [end:operator]


# --8<-- [start:likelihood]
def matern(x, length):  # Matern 3/2, for points on a line
    r = jnp.sqrt(3.0) * jnp.abs(x[:, None] - x[None]) / length
    return (1 + r) * jnp.exp(-r)


def covariance(log, grid, cells):
    a, b = (jnp.arange(m, dtype=log["scale"].dtype) / m for m in grid)
    left, right = (
        matern(x, jnp.exp(y)) for x, y in zip((a, b), log["lengths"], strict=True)
    )
    return MaskedKronecker(jnp.exp(log["scale"]) * left, right, cells)


def log_likelihood(log, grid, cells, y, relative_noise, key, pivots):
    K, noise = covariance(log, grid, cells), jnp.exp(log["noise"]) * relative_noise
    estimate = tx.gaussian_log_likelihood(key, K, y, shift=noise, preconditioner=pivots)
    return estimate.value, estimate


value_and_grad = jax.jit(
    jax.value_and_grad(log_likelihood, has_aux=True), static_argnums=1
)
# --8<-- [end:likelihood]


@ft.partial(jax.jit, static_argnums=1)
@jax.value_and_grad
def by_cholesky(log, grid, cells, y, relative_noise):
    K = covariance(log, grid, cells).as_matrix()
    factor = jnp.linalg.cholesky(K + jnp.diag(jnp.exp(log["noise"]) * relative_noise))
    whitened = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return -(whitened @ whitened + logdet + len(y) * np.log(2 * np.pi)) / 2


def draw(grid, number, seed):
    """Observed grid cells, their data, and their relative noise variances."""
    rng = np.random.default_rng(seed)
    cells = np.sort(rng.choice(grid[0] * grid[1], number, replace=False))
    K = covariance(TRUTH, grid, cells)
    jitter = [1e-4 * np.eye(m) for m in grid]
    left, right = (
        np.linalg.cholesky(np.asarray(x) + y)
        for x, y in zip((K.left, K.right), jitter, strict=True)
    )
    signal = (left @ rng.normal(size=grid) @ right.T).ravel()[cells]
    relative = np.exp(0.5 * rng.normal(size=number))
    deviations = np.sqrt(np.exp(TRUTH["noise"]) * relative)
    y = signal + deviations * rng.normal(size=number)
    as_float = ft.partial(jnp.asarray, dtype=jnp.float32)
    return jnp.asarray(cells, jnp.int32), as_float(y), as_float(relative)


def evaluate(grid, cells, y, relative_noise):
    key, start = jax.random.key(0), time.perf_counter()
    noise = jnp.exp(TRUTH["noise"]) * relative_noise
    K = covariance(TRUTH, grid, cells)
    pivots = tx.choose_pivots(key, K, COLUMNS[len(y)], shift=noise)
    (_, estimate), gradient = value_and_grad(
        TRUTH, grid, cells, y, relative_noise, key, pivots
    )
    gradient = np.asarray(ravel_pytree(gradient)[0])
    seconds = time.perf_counter() - start
    print(f"{len(y)} of {grid[0]} x {grid[1]} cells: {estimate}")
    print("    gradient (lengths, noise, scale):", *np.round(gradient, 2))
    print(f"    from {int(estimate.stats['num_columns'])} columns, in {seconds:.0f} s")
    return estimate, gradient


def main():
    grid, data = (80, 60), draw((80, 60), 4_200, 0)
    estimate, gradient = evaluate(grid, *data)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(x, float), (TRUTH, *data[1:]))
        exact, slope = by_cholesky(double[0], grid, data[0], *double[1:])
        exact, slope = float(exact), np.asarray(ravel_pytree(slope)[0])
    print(f"    by Cholesky {exact:.3f}; gradient", *np.round(slope, 2))
    assert abs(estimate.value - exact) < 4 * estimate.standard_error
    assert np.linalg.norm(gradient - slope) < 0.05 * np.linalg.norm(slope)

    estimate, _ = evaluate((400, 300), *draw((400, 300), 100_000, 0))
    assert estimate.standard_error < 1e-3 * abs(estimate.value)
    assert estimate.stats["num_matvecs"] < 50


if __name__ == "__main__":
    main()
