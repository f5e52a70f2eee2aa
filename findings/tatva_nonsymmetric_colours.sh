#!/usr/bin/env bash
# tatva 0.11.6 (tatva-coloring 0.0.2, jax 0.10.2, SciPy 1.17.1) on a CPU: sparse.jacfwd for a residual whose
# Jacobian isn't structurally symmetric.
#
# Guess, written before the run: sparse.pattern_from_virtual_work returns patterns that need not be symmetric,
# ColoredMatrix.from_csr colours them, and jacfwd returns the Jacobian, for every correct pattern. Columns that
# share a row get different colours.
#
# Behaviour: the colours keep unknowns apart that are connected by at most two stored entries (i, r), (r, j).
# If the pattern is symmetric, columns that share a row are such unknowns. Otherwise they may get one colour,
# and then each of their entries is the sum of them all, without a warning. If a single equation depends on all
# unknowns, and they don't depend on it, two colours are used: its row holds the row sum in every entry.
# With the pattern P + P^T, or with colours for P^T P, the result is right.
# The documentation speaks about stiffness matrices, which are usually symmetric, but sets no such condition.
# Most users would expect the right Jacobian from a correct pattern, or an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "scipy==1.17.1" "tatva==0.11.6" "tatva-coloring==0.0.2"
JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from tatva.sparse import ColoredMatrix, jacfwd, pattern_from_virtual_work

print("tatva", version("tatva"), "tatva-coloring", version("tatva-coloring"), "jax", jax.__version__)
n = 8


def virtual_work(u, v):  # a chain of cells, and a meter that reads the total of their squares
    cells = jnp.sum(v[:-1] * (u[:-1] ** 3 + u[:-1])) - jnp.sum(v[1:-1] * u[:-2])
    return cells + v[-1] * (u[-1] - jnp.sum(u[:-1] ** 2))


def residual(u):
    return jax.grad(virtual_work, argnums=1)(u, jnp.zeros(n))


u = jnp.linspace(0.5, 1.5, n)
truth = np.asarray(jax.jacfwd(residual)(u))
pattern = pattern_from_virtual_work(virtual_work, n, "u", "v")
stored = pattern.toarray() != 0
assert np.all(stored[truth != 0])  # the pattern is complete
print("the pattern is symmetric:", bool(np.all(stored == stored.T)))


def compare(name, pattern, colours=None):
    coloured = ColoredMatrix.from_csr(pattern, colours)
    found = np.asarray(jacfwd(residual, coloured)(u).to_dense())
    print(f"{name}: colours {coloured.colors}, largest error {np.max(abs(found - truth)):.3g}")
    return found


found = compare("from_csr(P)", pattern)
print("    last row", found[-1].round(2), "of", truth[-1].round(2))
assert np.max(abs(found - truth)) > 1
symmetric = compare("from_csr(P + P^T)", (pattern + pattern.T).tocsr())
one_each = compare("from_csr(P), one colour for each unknown", pattern, np.arange(n, dtype=np.int32))
assert np.allclose(symmetric, truth) and np.allclose(one_each, truth)
PYTHON
