"""Doctor visits: the likelihood of 20,190 observations, without storing their matrix.

The data are the RAND health insurance experiment, from statsmodels: visits in a year, explained
by nine regressors, each with its own length scale. We first fit 2,000 rows in a few steps, where
Cholesky's answer is known. Then we compute value and gradient for all rows, in 32 bits.

    python examples/large_gaussian_process.py [figure.png]
"""

import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from statsmodels.datasets import randhie
from threadpoolctl import threadpool_limits

import traceax as tx

COLUMNS = 300  # for each likelihood, at most
SUBSET, STEPS = 2000, 12
START = {"lengths": jnp.log(jnp.full(9, 3.0)), "scale": 0.0, "noise": 0.0}
START = jax.tree.map(jnp.asarray, START)


def matrix(log, x):
    """The signal's covariance. `log` contains log-parameters."""
    scale = jnp.exp(log["scale"])

    def kernel(a, b):  # this sum is 4 times as fast as `jnp.sum`
        return scale * jnp.exp(-sum((a[i] - b[i]) ** 2 for i in range(9)) / 2)

    return tx.KernelLinearOperator(kernel, x / jnp.exp(log["lengths"]))


@jax.jit
def choose_pivots(log, x, key):
    return tx.choose_pivots(key, matrix(log, x), COLUMNS, shift=jnp.exp(log["noise"]))


def log_likelihood(log, x, y, key, pivots):
    K, options = matrix(log, x), {"shift": jnp.exp(log["noise"])}
    options["preconditioner"] = pivots
    estimate = tx.gaussian_log_likelihood(key, K, y, **options)
    return estimate.value, estimate


value_and_grad = jax.jit(jax.value_and_grad(log_likelihood, has_aux=True))


@jax.jit
def fit(log, *data):
    def loss(log, data):
        return -log_likelihood(log, *data)[0] / 100

    solver = optx.LBFGS(rtol=1e-4, atol=1e-4)
    return optx.minimise(loss, solver, log, data, max_steps=STEPS, throw=False).value


@jax.jit
@jax.value_and_grad
def by_cholesky(log, x, y):
    K = matrix(log, x).as_matrix() + jnp.exp(log["noise"]) * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(K)
    whitened = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return -(whitened @ whitened + logdet + len(x) * np.log(2 * np.pi)) / 2


def memory():
    """The peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(path):
    table = randhie.load_pandas()
    x, y = table.exog.to_numpy(), np.log1p(table.endog.to_numpy())
    x, y = (jnp.asarray((z - z.mean(0)) / z.std(0), jnp.float32) for z in (x, y))
    key = jax.random.key(0)
    subset = jax.random.choice(key, len(x), (SUBSET,), replace=False)

    small = x[subset], y[subset]
    pivots = choose_pivots(START, small[0], key)
    log = fit(START, *small, key, pivots)
    for name, point in {"at the start": START, "fitted": log}.items():
        pivots = choose_pivots(point, small[0], key)
        (_, estimate), gradient = value_and_grad(point, *small, key, pivots)
        gradient = ravel_pytree(gradient)[0]
        with jax.enable_x64(True):
            double = jax.tree.map(lambda a: jnp.asarray(a, float), (point, *small))
            exact, slope = by_cholesky(*double)
        slope = ravel_pytree(slope)[0]
        error = np.linalg.norm(gradient - slope)
        print(f"{SUBSET} rows, {name}: {estimate}\n    by Cholesky {exact:.3f}")
        print(f"    gradient of norm {np.linalg.norm(slope):.1f}, error {error:.3f}")
        assert abs(estimate.value - exact) < 4 * estimate.standard_error
    lengths = dict(zip(table.exog_name, np.exp(log["lengths"]), strict=True))
    print("length scales:", *(f"{name} {z:.2f}" for name, z in lengths.items()))

    before, start = memory(), time.perf_counter()
    pivots = choose_pivots(log, x, key)
    (_, estimate), gradient = value_and_grad(log, x, y, key, pivots)
    estimate.value.block_until_ready()
    seconds, extra_memory = time.perf_counter() - start, memory() - before
    print(f"{len(x)} rows: {estimate}, {int(estimate.stats['num_columns'])} columns")
    print(f"    value and gradient in {seconds:.0f} s, compiling included, and")
    print(
        f"    {extra_memory:.0f} MB; the matrix alone would take {4e-6 * len(x) ** 2:.0f} MB"
    )
    assert estimate.standard_error < 1e-3 * abs(estimate.value)
    assert extra_memory < 4e-6 * len(x) ** 2

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(lengths), [1 / length for length in lengths.values()])
    axes.set(
        xlabel="1 / length scale: how strongly doctor visits depend on a regressor"
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    # We use one thread: on a busy machine, LAPACK's threads wait for each other.
    with threadpool_limits(1, user_api="blas"):
        main(sys.argv[1] if len(sys.argv) > 1 else "large_gaussian_process.png")
