"""Exact Laplacians in a physics-informed loss: time, memory, error.

    taskset -c 1 python benchmarks/laplacian.py         # the table of benchmarks/laplacian.md
    taskset -c 1 python benchmarks/laplacian.py 10 30   # for these n

A step computes the loss gradient in a tanh network's parameters, over 64 points. The network
has two hidden layers of width 256. All methods run in this one process, in random order. Times
are medians of one thread's CPU time. Memory counts the temporaries that the compiled program
allocates. The gradient's error is relative to `jax.hessian`'s gradient in float32.
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


METHODS = {
    "tx.laplacian": lambda u, x: tx.laplacian(KEY, u, x, x.size)[2].value,
    "folx": folx_alone(0),
    "folx, sparsity_threshold=0.6": folx_alone(0.6),
    "jax.hessian": lambda u, x: jnp.trace(jax.hessian(u)(x)),
}


def measure(n, repetitions, width=256, batch=64):
    network = eqx.nn.MLP(n, "scalar", width, 2, jnp.tanh, key=KEY)
    params, static = eqx.partition(network, eqx.is_inexact_array)
    xs = jr.uniform(jr.key(1), (batch, n))

    def step(method):
        def loss(params):
            u = eqx.combine(params, static)
            laplacians = jax.vmap(lambda x: method(u, x))(xs)
            return jnp.mean((laplacians + jnp.sum(jnp.sin(xs), axis=1)) ** 2)

        return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

    steps = {name: step(method) for name, method in METHODS.items()}
    flat = {name: ravel_pytree(fn(params))[0] for name, fn in steps.items()}
    times = {name: [] for name in steps}
    for _ in range(repetitions):
        # We shuffle, because each program leaves its data in the cache.
        for name in random.sample(list(steps), len(steps)):
            fn = steps[name]
            start = time.process_time()
            jax.block_until_ready(fn(params))
            times[name].append(time.process_time() - start)
    truth, median = flat["jax.hessian"], statistics.median
    for name, fn in steps.items():
        seconds = median(times[name])
        time_pairs = zip(times[name], times["folx"], strict=True)
        ratio = median(time_taken / folx_time for time_taken, folx_time in time_pairs)
        memory = fn.memory_analysis().temp_size_in_bytes
        error = jnp.linalg.norm(flat[name] - truth) / jnp.linalg.norm(truth)
        print(
            f"| {n} | {name} | {1e3 * seconds:.3g} | {ratio:.2f} | {memory / 1e6:.3g} "
            f"| {error:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("n", nargs="*", type=int, default=[10, 30, 100])
    parser.add_argument("--repetitions", type=int, default=21)
    args = parser.parse_args()
    print(
        "| dimension n | implementation | step (ms) | time ratio | memory (MB) | "
        "relative error |\n|---|---|---|---|---|---|"
    )
    for n in args.n:
        measure(n, args.repetitions)
