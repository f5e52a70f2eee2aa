"""Exact Laplacians in the loss of a physics-informed network: time, memory, error.

    taskset -c 1 python benchmarks/laplacian.py         # the table of docs/performance.md
    taskset -c 1 python benchmarks/laplacian.py 10 30   # for these n

A step is the gradient of the loss in the parameters of a tanh network of width 256 and two
hidden layers, over 64 points. All ways run in this one process, in random order; times are medians of
CPU time of one thread. Memory is what the compiled program allocates besides its arguments,
the error that of the gradient, relative to `jax.hessian`'s in float32.
"""

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import equinox as eqx
import folx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree

import traceax as tx

KEY = jr.key(0)


def folx_alone(threshold):
    return lambda u, x: folx.forward_laplacian(u, threshold)(x).laplacian


WAYS = {
    "tx.laplacian": lambda u, x: tx.laplacian(KEY, u, x, x.size)[2].value,
    "folx": folx_alone(0),
    "folx, sparsity_threshold=0.6": folx_alone(0.6),
    "jax.hessian": lambda u, x: jnp.trace(jax.hessian(u)(x)),
}


def measure(n, repetitions, width=256, batch=64):
    network = eqx.nn.MLP(n, "scalar", width, 2, jnp.tanh, key=KEY)
    params, static = eqx.partition(network, eqx.is_inexact_array)
    xs = jr.uniform(jr.key(1), (batch, n))

    def step(way):
        def loss(params):
            u = eqx.combine(params, static)
            laplacians = jax.vmap(lambda x: way(u, x))(xs)
            return jnp.mean((laplacians + jnp.sum(jnp.sin(xs), axis=1)) ** 2)

        return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

    steps = {name: step(way) for name, way in WAYS.items()}
    flat = {name: ravel_pytree(fn(params))[0] for name, fn in steps.items()}
    times = {name: [] for name in steps}
    for _ in range(repetitions):
        # What ran before leaves its data in the cache.
        for name in random.sample(list(steps), len(steps)):
            fn = steps[name]
            start = time.process_time()
            jax.block_until_ready(fn(params))
            times[name].append(time.process_time() - start)
    truth, median = flat["jax.hessian"], statistics.median
    for name, fn in steps.items():
        taken = median(times[name])
        pairs = zip(times[name], times["folx"], strict=True)
        ratio = median(one / other for one, other in pairs)
        memory = fn.memory_analysis().temp_size_in_bytes
        error = jnp.linalg.norm(flat[name] - truth) / jnp.linalg.norm(truth)
        print(
            f"| {n} | {name} | {1e3 * taken:.3g} | {ratio:.2f} | {memory / 1e6:.3g} "
            f"| {error:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("n", nargs="*", type=int, default=[10, 30, 100])
    parser.add_argument("--repetitions", type=int, default=21)
    args = parser.parse_args()
    print("| n | way | step, ms | ratio | MB | error |\n|---|---|---|---|---|---|")
    for n in args.n:
        measure(n, args.repetitions)
