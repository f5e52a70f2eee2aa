"""Which estimator should a divergence use by default? Variance times time over a batch.

    python benchmarks/divergence.py

The field is a tanh network with two hidden layers on n inputs and random weights. A batch has
64 points, as in a training step for a flow or a score. The table shows ratios of
AdaptiveXTrace to Hutchinson's estimator with signs, in variance and in variance times time. If
the last ratio is below 1, AdaptiveXTrace would be the better default. Times are medians of
interleaved runs in one process, in 32 bits.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import traceax as tx

BATCH, REPEATS, KEYS = 64, 7, 24
CASES = [(n, k) for n in (10, 30, 100, 300, 800) for k in (8, 16, 32, 128) if k < n]
ESTIMATORS = {
    "signs": tx.HutchinsonEstimator(),
    "adaptive": tx.AdaptiveXTraceEstimator(),
}


def network(key, n, width):
    a, b, c = (jax.random.normal(x, (width, width)) for x in jax.random.split(key, 3))
    a, c = a[:, :n] / n**0.5, c[:n] / width**0.5

    def field(x):
        return c @ jnp.tanh(b / width**0.5 @ jnp.tanh(a @ x))

    return field


def measure(n, k):
    field = network(jax.random.key(0), n, max(128, n))
    points = jax.random.normal(jax.random.key(1), (BATCH, n))

    def batched(estimator):
        def values(key, points):
            keys = jax.random.split(key, BATCH)
            return jax.vmap(
                lambda key, x: tx.divergence(key, field, x, k, estimator)[1].value
            )(keys, points)

        return jax.jit(values)

    exact = jax.vmap(lambda x: jnp.trace(jax.jacfwd(field)(x)))(points)
    functions = {name: batched(x) for name, x in ESTIMATORS.items()}
    errors = {
        name: np.mean(
            [
                np.mean((f(key, points) - exact) ** 2)
                for key in jax.random.split(jax.random.key(2), KEYS)
            ]
        )
        for name, f in functions.items()
    }
    times = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, f in functions.items():
            start = time.perf_counter()
            f(jax.random.key(3), points).block_until_ready()
            times[name].append(time.perf_counter() - start)
    times = {name: statistics.median(x) for name, x in times.items()}
    return times, errors


if __name__ == "__main__":
    print(
        "| dimension n | products k | signs (ms) | adaptive (ms) | variance ratio | "
        "variance x time ratio |"
    )
    print("|---|---|---|---|---|---|")
    for n, k in CASES:
        times, errors = measure(n, k)
        variance_ratio = errors["adaptive"] / errors["signs"]
        time_ratio = times["adaptive"] / times["signs"]
        print(
            f"| {n} | {k} | {1e3 * times['signs']:.2f} | {1e3 * times['adaptive']:.2f} "
            f"| {variance_ratio:.2f} | {variance_ratio * time_ratio:.2f} |",
            flush=True,
        )
