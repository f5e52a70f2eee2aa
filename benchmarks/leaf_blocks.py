"""Traces by leaf, with probes of the whole or with probes on one leaf at a time.

    taskset -c 1 python benchmarks/leaf_blocks.py  # the table of benchmarks/leaf_blocks.md

We measure networks at initialisation and after training. Times are medians of one thread's CPU
time. Errors are root mean squares over 24 keys, relative to the exact values. For leaves, we
add up squared errors and take the root. Blocks get 20 products per leaf. Probes of the whole
get the same time.
"""

import os
import statistics
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import traceax as tx

KEYS, CLASSES, STEPS = 24, 10, 200


class Cnn(eqx.Module):
    convolutions: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys, channels = jr.split(key, 4), (1, 16, 24, 24)
        self.convolutions = [
            eqx.nn.Conv2d(channels[i], channels[i + 1], 3, 2, 1, key=keys[i])
            for i in range(3)
        ]
        self.head = eqx.nn.Linear(96, CLASSES, key=keys[3])

    def __call__(self, x):
        for layer in self.convolutions:
            x = jax.nn.gelu(layer(x.reshape(-1, *x.shape[-2:])))
        return self.head(x.reshape(-1))


class Transformer(eqx.Module):
    """Each row is a patch. Two blocks with two heads follow, and a mean over tokens."""

    embedding: eqx.nn.Linear
    positions: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key, width=24):
        keys = jr.split(key, 8)
        self.embedding = eqx.nn.Linear(16, width, key=keys[0])
        self.positions = 0.1 * jr.normal(keys[1], (16, width))
        self.blocks = [
            (
                eqx.nn.LayerNorm(width),
                eqx.nn.MultiheadAttention(2, width, key=keys[2 + 2 * i]),
                eqx.nn.LayerNorm(width),
                eqx.nn.MLP(
                    width, width, 4 * width, 1, jax.nn.gelu, key=keys[3 + 2 * i]
                ),
            )
            for i in range(2)
        ]
        self.head = eqx.nn.Linear(width, CLASSES, key=keys[7])

    def __call__(self, x):
        x = jax.vmap(self.embedding)(x) + self.positions
        for norm, attention, other_norm, mlp in self.blocks:
            y = jax.vmap(norm)(x)
            x = x + attention(y, y, y)
            x = x + jax.vmap(mlp)(jax.vmap(other_norm)(x))
        return self.head(jnp.mean(x, axis=0))


class Mlp(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(256, CLASSES, 48, 2, jnp.tanh, key=key)

    def __call__(self, x):
        return self.mlp(x.reshape(-1))


def measure(name, network):
    params, static = eqx.partition(network(jr.key(0)), eqx.is_inexact_array)
    x = jr.normal(jr.key(1), (32, 16, 16))
    # A random teacher makes the labels.
    teacher = jr.normal(jr.key(2), (256, CLASSES))
    batch = x, jnp.argmax(jnp.abs(x).reshape(32, -1) @ teacher, axis=1)

    def loss(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return jnp.mean(losses)

    optimiser = optax.adam(1e-3)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimiser.update(jax.grad(loss)(params, batch), state)
            return (optax.apply_updates(params, updates), state), None

        carry = params, optimiser.init(params)
        return jax.lax.scan(step, carry, length=STEPS)[0][0]

    def make_program(probes, k):
        def fn(params, key):
            operator = tx.HessianLinearOperator(loss, params, batch)
            parts, total = tx.leaf_traces(key, operator, k, probes=probes)
            return jnp.stack(jax.tree.leaves(parts.value)), total.value

        return jax.jit(fn)

    def median_time(fn):
        jax.block_until_ready(fn(params, jr.key(0)))
        times = []
        for i in range(7):
            start = time.process_time()
            jax.block_until_ready(fn(params, jr.key(i)))
            times.append(time.process_time() - start)
        return statistics.median(times)

    leaves = len(jax.tree.leaves(params))
    n, k = sum(x.size for x in jax.tree.leaves(params)), 20 * leaves

    @jax.jit
    def entries(params, start):
        # We take columns of the identity from `start` on. The last chunk repeats some.
        flat, unravel = ravel_pytree(params)
        gradient = jax.grad(lambda p: loss(unravel(p), batch))
        places = jnp.minimum(start + jnp.arange(64), n - 1)
        columns = jax.nn.one_hot(places, n)
        products = jax.vmap(lambda v: jax.jvp(gradient, (flat,), (v,))[1])(columns)
        return jnp.take_along_axis(products, places[:, None], 1)[:, 0]

    def exact(params):
        # We loop in Python: on a CPU, JAX's loops make convolutions ten times slower.
        diagonal = jnp.concatenate([entries(params, i) for i in range(0, n, 64)])[:n]
        parts = [jnp.sum(x) for x in jax.tree.leaves(ravel_pytree(params)[1](diagonal))]
        return jnp.stack(parts), jnp.sum(diagonal)

    stages = {"start": params, "trained": train(params)}
    truths = {stage: exact(p) for stage, p in stages.items()}
    print(f"{name}: {leaves} leaves, {n} parameters")
    for label in ("blocks", "whole"):
        number, run = k, make_program(label, k)
        if label == "blocks":
            target_time = median_time(run)
        else:
            # We interpolate, because time is affine in the number of products.
            half_time, full_time = (
                median_time(make_program(label, k // 2)),
                median_time(run),
            )
            number = int(
                k // 2 * (1 + (target_time - half_time) / (full_time - half_time))
            )
            number = min(max(number, 8), n - 1)
            run = make_program(label, number)
        milliseconds = 1e3 * median_time(run)
        for stage, p in stages.items():
            true_parts, true_total = truths[stage]
            outputs = [run(p, key) for key in jr.split(jr.key(5), KEYS)]
            total_errors = (
                np.array([total - true_total for _, total in outputs]) / true_total
            )
            parts = np.array([parts - true_parts for parts, _ in outputs])
            parts = parts / np.linalg.norm(true_parts)
            print(
                f"| {name}, {stage} | {label} | {number} | {milliseconds:.3g} "
                f"| {np.sqrt(np.mean(total_errors**2)):.1e} "
                f"| {np.sqrt(np.mean(np.sum(parts**2, axis=1))):.1e} |",
                flush=True,
            )


NETWORKS = {"MLP": Mlp, "CNN": Cnn, "transformer": Transformer}

if __name__ == "__main__":
    for name in sys.argv[1:] or NETWORKS:
        measure(name, NETWORKS[name])
