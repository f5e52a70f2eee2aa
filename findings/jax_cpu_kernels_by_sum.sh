#!/usr/bin/env bash
# jax 0.10.2 with jaxlib 0.10.2 on a CPU: a kernel matrix from jnp.sum, or from a loop over coordinates.
#
# Guess, written before the run: XLA fuses both forms of |a - b|^2 into one loop over pairs of points, so
# that a product with a kernel matrix of 5-dimensional points takes about as long in either form.
#
# Behaviour: with `jnp.sum((a - b) ** 2)` it takes 4 to 10 times as long as with Python's sum over five
# scalars. The reduction over five numbers is not vectorised; exponentials and products cost less than it.
# Batching the points along the last axis doesn't help.
# Most users would expect array code to be at least as fast as a Python loop over coordinates.
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
n, tile = 4000, 100
x = jax.random.uniform(jax.random.key(0), (n, 5))
vectors = jax.random.normal(jax.random.key(1), (n, 25))


def product(squared_distance):
    def rows(tile):
        squared = jax.vmap(lambda a: jax.vmap(lambda b: squared_distance(a, b))(x))(tile)
        return jnp.exp(-squared) @ vectors

    program = jax.jit(lambda x: jax.lax.map(rows, x.reshape(-1, tile, 5)))
    result, times = program(x).reshape(n, 25).block_until_ready(), []
    for _ in range(5):
        start = time.process_time()
        program(x).block_until_ready()
        times.append(time.process_time() - start)
    return result, min(times)


by_sum, time_of_sum = product(lambda a, b: jnp.sum((a - b) ** 2))
by_loop, time_of_loop = product(lambda a, b: sum((a[i] - b[i]) ** 2 for i in range(5)))
assert jnp.allclose(by_sum, by_loop, atol=1e-3)
print(f"jnp.sum: {1e9 * time_of_sum / n**2:.1f} ns per entry")
print(f"coordinates: {1e9 * time_of_loop / n**2:.1f} ns per entry")
assert time_of_sum > 2 * time_of_loop, (time_of_sum, time_of_loop)
PYTHON
