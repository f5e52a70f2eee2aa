#!/usr/bin/env bash
# jax 0.10.2 with jaxlib 0.10.2 on a CPU: gradients of convolutions for many kernels, in a loop.
#
# Guess, written before the run: `jax.lax.map(f, kernels, batch_size=16)` runs the program that `jax.vmap(f)`
# runs, on two chunks of 16 kernels, and takes as long, or less, because chunks fit into caches.
#
# Behaviour: the loop takes several times as long (5 times for gradients in chunks of 16, 10 times for
# convolutions one by one). The same operations in the body of a loop don't run the same code as outside.
# Most users would expect `batch_size` to bound memory at about the same speed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import time

import jax
import jax.numpy as jnp
import jaxlib

print("jax", jax.__version__, "jaxlib", jaxlib.__version__)
images = jax.random.normal(jax.random.key(0), (50, 28, 28, 4))
kernels = jax.random.normal(jax.random.key(1), (32, 3, 3, 4, 8))


def loss(kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return jnp.sum(jnp.tanh(out))


def seconds(run):
    run, times = jax.jit(run), []
    expected = jax.block_until_ready(run(kernels))
    for _ in range(3):
        start = time.process_time()
        jax.block_until_ready(run(kernels))
        times.append(time.process_time() - start)
    return min(times), expected


gradient = jax.grad(loss)
at_once, expected = seconds(jax.vmap(gradient))
in_chunks, same = seconds(lambda V: jax.lax.map(gradient, V, batch_size=16))
assert jnp.allclose(expected, same, rtol=1e-3, atol=1e-2)
print(f"all at once {1e3 * at_once:.0f} ms, two chunks in a loop {1e3 * in_chunks:.0f} ms")
assert in_chunks > 2 * at_once, (in_chunks, at_once)
PYTHON
