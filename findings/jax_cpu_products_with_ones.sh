#!/usr/bin/env bash
# jax 0.10.2 with jaxlib 0.10.2 on a CPU: row sums of a kernel matrix, as a product with ones.
#
# Guess, written before the run: in a jitted loop over tiles of rows, `tile @ jnp.ones((n, 25))` gives the row
# sums 25 times, whether the ones are a constant of the program or an argument.
#
# Behaviour: if the ones are a constant, the result is NaN, although all entries of the tiles lie between 0
# and 1. If they are an argument, or if the constant holds random numbers, the result is right.
# Most users would expect constants to change the speed of a program, and nothing else.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

print("jax", jax.__version__, "jaxlib", jaxlib.__version__)
n, d, tile = 4000, 5, 100
x = jax.random.uniform(jax.random.key(0), (n, d))
ones = jnp.ones((n, 25))


def rows(tile, vectors):
    """`exp(-|a - b|^2)` for the tile's points a and all points b, times vectors."""
    squared = jax.vmap(lambda a: jax.vmap(lambda b: jnp.sum((a - b) ** 2))(x))(tile)
    return jnp.exp(-squared) @ vectors


tiles = x.reshape(-1, tile, d)
constant = jax.jit(lambda tiles: jax.lax.map(lambda t: rows(t, ones), tiles))(tiles)
program = jax.jit(lambda tiles, ones: jax.lax.map(lambda t: rows(t, ones), tiles))
argument = program(tiles, ones)
points = np.asarray(x, float)
squared = sum(np.subtract.outer(points[:, i], points[:, i]) ** 2 for i in range(d))
sums = np.exp(-squared).sum(axis=1)
print("sums in NumPy:", sums[:3])
print("ones as an argument:", argument.reshape(n, 25)[:3, 0])
print("ones as a constant:", constant.reshape(n, 25)[:3, 0])
assert np.allclose(argument.reshape(n, 25)[:, 0], sums, rtol=1e-4)
assert np.isnan(np.asarray(constant)).any()
PYTHON
