"""How many columns of a block to multiply with a network's Hessian at once, on a CPU.

    python benchmarks/columns.py

It prints the milliseconds of CPU time for one of 32 products: one by one and in chunks inside a
loop (`jax.lax.map`), all at once, and in 32 calls from Python. The last column is a call of
`traceax.leaf_traces(..., probes="whole")` with 60 products, which chooses the number itself.
On one core (`taskset -c 0`, jaxlib 0.10.2, milliseconds differ between runs by a fifth):

| network | parameters | 1 | 4 | 16 | all 32 | from Python | leaf_traces |
|---|---|---|---|---|---|---|---|
| perceptron, 64 rows | 16,448 | 0.20 | 0.24 | 0.30 | 0.49 | 0.27 | 0.44 |
| perceptron, 512 rows | 16,448 | 1.45 | 2.26 | 2.03 | 2.49 | 1.87 | 1.79 |
| attention, 8 sequences | 4,096 | 0.33 | 0.38 | 0.49 | 0.63 | 0.48 | 0.41 |
| convolutional, 50 images | 13,188 | 16.84 | 19.21 | 26.78 | 6.81 | 20.32 | 6.04 |
| convolutional, 50 images, wide | 160,024 | 69.21 | 84.35 | 133.91 | 15.99 | 21.73 | 20.08 |

Loops make convolutions slow. So a network without convolutions takes few columns, and one with
convolutions takes all.
"""

import functools as ft
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import traceax as tx

COLUMNS, PRODUCTS, REPEATS = 32, 60, 3
rng = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)


def convolution(x, w):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)


def pool(x):
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4


def convolutional(first, second, hidden, images):
    x, y = normal(images, 28, 28, 1), jnp.asarray(rng.integers(0, 10, images))
    parameters = {
        "first": normal(3, 3, 1, first, scale=1 / 3),
        "second": normal(3, 3, first, second, scale=1 / (3 * first**0.5)),
        "hidden": normal(49 * second, hidden, scale=1 / (49 * second) ** 0.5),
        "out": normal(hidden, 10, scale=1 / hidden**0.5),
    }

    def loss(p):
        z = pool(jnp.tanh(convolution(x, p["first"])))
        z = pool(jnp.tanh(convolution(z, p["second"]))).reshape(images, -1)
        z = jax.nn.log_softmax(jnp.tanh(z @ p["hidden"]) @ p["out"])
        return -jnp.mean(z[jnp.arange(images), y])

    return loss, parameters


def perceptron(rows):
    x, y = normal(rows, 64), normal(rows)
    parameters = [normal(64, 128, scale=1 / 8), normal(128, 64, scale=1 / 11)]
    parameters.append(normal(64, scale=1 / 8))

    def loss(p):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2] - y) ** 2)

    return loss, parameters


def attention(sequences, length=32, width=32):
    x = normal(sequences, length, width)
    parameters = {name: normal(width, width, scale=1 / width**0.5) for name in "qkvo"}

    def loss(p):
        q, k, v = (x @ p[name] for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("ntd,nsd->nts", q, k) / width**0.5)
        return jnp.mean((x + (weights @ v) @ p["o"] - x[::-1]) ** 2)

    return loss, parameters


def is_estimate(x):
    return isinstance(x, tx.Estimate)


def milliseconds(run):
    times = []
    for _ in range(1 + REPEATS):
        start = time.process_time()
        jax.block_until_ready(run())
        times.append(time.process_time() - start)
    return 1e3 * min(times[1:])


def times(loss, parameters):
    flat, unravel = ravel_pytree(parameters)
    V = normal(COLUMNS, flat.size)

    def product(x, v):
        return jax.jvp(jax.grad(lambda x: loss(unravel(x))), (x,), (v,))[1]

    @ft.partial(jax.jit, static_argnums=2)
    def in_chunks(x, V, width):
        size = None if width == 1 else width
        return jax.lax.map(lambda v: product(x, v), V, batch_size=size)

    @jax.jit
    def estimate(p):
        hessian = tx.HessianLinearOperator(loss, p)
        key = jax.random.key(0)
        whole = tx.leaf_traces(key, hessian, PRODUCTS, probes="whole")
        return [x.value for x in jax.tree.leaves(whole, is_leaf=is_estimate)]

    one, at_once = jax.jit(product), jax.jit(jax.vmap(product, (None, 0)))
    runs = [ft.partial(in_chunks, flat, V, width) for width in (1, 4, 16)]
    runs += [lambda: at_once(flat, V), lambda: [one(flat, v) for v in V]]
    per_product = [milliseconds(run) / COLUMNS for run in runs]
    return [*per_product, milliseconds(lambda: estimate(parameters)) / PRODUCTS]


def main():
    print("| network | parameters | 1 | 4 | 16 | all 32 | from Python | leaf_traces |")
    print("|---|---|---|---|---|---|---|---|")
    networks = {
        "perceptron, 64 rows": perceptron(64),
        "perceptron, 512 rows": perceptron(512),
        "attention, 8 sequences": attention(8),
        "convolutional, 50 images": convolutional(4, 8, 32, 50),
        "convolutional, 50 images, wide": convolutional(8, 16, 200, 50),
    }
    for name, (loss, parameters) in networks.items():
        cells = " | ".join(f"{x:.2f}" for x in times(loss, parameters))
        count = sum(x.size for x in jax.tree.leaves(parameters))
        print(f"| {name} | {count:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
