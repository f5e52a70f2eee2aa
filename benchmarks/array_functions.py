"""Functions of eigenvalues that return arrays: time for 1 and 1,000 values, and coverage.

    taskset -c 1 python benchmarks/array_functions.py            # a table of benchmarks/spectral.md
    python benchmarks/array_functions.py coverage                # 95 % intervals, 100 keys

The values are `log det(I - rho W)`, for the symmetric form of a row-normalised weight matrix
W between random points in the plane.
"""

import os
import statistics
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx

PRODUCTS = 100


def weight_matrix(n):
    x = jax.random.uniform(jax.random.key(1), (n, 2))
    distances = jnp.sum((x[:, None] - x[None]) ** 2, axis=-1)
    weights = jnp.exp(-50 * distances)
    scale = jax.lax.rsqrt(jnp.sum(weights, axis=1))
    return scale[:, None] * weights * scale[None, :]


def estimate(matrix, key, rho, k=PRODUCTS):
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    return tx.trace_function(key, lambda x: jnp.log1p(-rho * x), operator, k)


def measure(rho, gradient, matrix):
    """CPU seconds to compile, and the median time of nine runs in milliseconds."""

    def total(matrix, key):
        return jnp.sum(estimate(matrix, key, rho).value)

    def value(matrix, key):
        result = estimate(matrix, key, rho)
        return result.value, result.standard_error

    jax.clear_caches()
    start = time.process_time()
    function = jax.jit(jax.grad(total) if gradient else value)
    compiled = function.lower(matrix, jax.random.key(0)).compile()
    seconds, times = time.process_time() - start, []
    for i in range(9):
        start = time.perf_counter()
        jax.block_until_ready(compiled(matrix, jax.random.key(i)))
        times.append(1e3 * (time.perf_counter() - start))
    return seconds, statistics.median(times)


def coverage():
    """Share of 100 intervals that contain the truth, at five rho, for n = 400."""
    matrix, rho = weight_matrix(400), jnp.asarray([0.1, 0.3, 0.5, 0.7, 0.9])
    truth = jnp.sum(
        jnp.log1p(-rho[:, None] * jnp.linalg.eigvalsh(matrix)[None]), axis=1
    )
    run = jax.jit(lambda key, k: estimate(matrix, key, rho, k), static_argnums=1)
    for k in (20, 40):
        inside = []
        for key in jax.random.split(jax.random.key(2), 100):
            low, high = run(key, k).confidence_interval()
            inside.append((low <= truth) & (truth <= high))
        print(f"{k} products:", *jnp.mean(jnp.stack(inside), axis=0))


def main():
    matrix = weight_matrix(2500)
    print("| | compile, 1 value (s) | 1,000 values (s) | run, 1 (ms) | 1,000 (ms) |")
    print("|---|---|---|---|---|")
    for name, gradient in (("value and error bar", False), ("gradient", True)):
        rows = [
            measure(rho, gradient, matrix)
            for rho in (jnp.float32(0.9), jnp.linspace(0.05, 0.95, 1000))
        ]
        (first, time_first), (second, time_second) = rows
        cells = f"{first:.1f} | {second:.1f} | {time_first:.0f} | {time_second:.0f}"
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    coverage() if "coverage" in sys.argv else main()
