#!/usr/bin/env bash
# jax 0.10.2 with jaxlib 0.10.2 on a CPU: copies of an array that a loop carries and extends.
#
# Guess, written before the run: if a loop carries a tall block (n, k) and writes a few of its columns per
# step, XLA lays it out column by column, and updates it in place, as it does for rows of a wide block.
#
# Behaviour: arrays that a loop carries lie row by row. The product inside of the loop wants columns, so
# every step copies the whole block to the other layout, and back. Carrying the transpose makes all copies
# of the block disappear, and an Arnoldi iteration took half the time.
# Most users would expect XLA's layout assignment to look through a transposition in a loop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import re

import jax
import jax.numpy as jnp
import jaxlib

print("jax", jax.__version__, "jaxlib", jaxlib.__version__)
n, k, m = 4096, 384, 8


def block_step(rows, last):
    """Orthogonalises m rows against k rows of a basis."""
    coordinates = last @ rows.T
    return jnp.tanh(last - coordinates @ rows)


def carry_rows(start):
    def step(j, carry):
        rows, last = carry
        new = block_step(rows, last)
        return jax.lax.dynamic_update_slice(rows, new, (j * m, 0)), new

    return jax.lax.fori_loop(0, k // m, step, (jnp.zeros((k, n)), start))


def carry_columns(start):
    def step(j, carry):
        columns, last = carry
        new = block_step(columns.T, last)
        rows = jax.lax.dynamic_update_slice(columns.T, new, (j * m, 0))
        return rows.T, new

    return jax.lax.fori_loop(0, k // m, step, (jnp.zeros((k, n)).T, start))


def copies(fn):
    """How many instructions of the program copy or transpose the whole block."""
    text = jax.jit(fn).lower(jnp.ones((m, n))).compile().as_text()
    shape = rf"f32\[({k},{n}|{n},{k})\]\S*"
    return len(re.findall(rf"= {shape} (?:copy|transpose)\(", text))


of_rows, of_columns = copies(carry_rows), copies(carry_columns)
print("copies of the block: rows", of_rows, "columns", of_columns)
assert of_rows == 0 and of_columns >= 1, (of_rows, of_columns)
PYTHON
