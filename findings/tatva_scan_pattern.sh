#!/usr/bin/env bash
# tatva 0.11.6 (tatva-coloring 0.0.2, jax 0.10.2, SciPy 1.17.1) on a CPU: sparse.pattern_from_energy for an
# energy with jax.lax.scan or jax.lax.fori_loop.
#
# Guess, written before the run: the pattern covers all nonzero entries of the Hessian, or a warning says that
# it may not, as for jnp.prod. Loops and scans give the pattern that the same sums give without a loop.
#
# Behaviour: what a scan carries from step to step is taken as independent of the unknowns. Couplings between
# steps are missing from the pattern, without a warning: an energy that depends on running totals, which has a
# full Hessian, gets a diagonal pattern. fori_loop with a known number of steps is a scan, and so the same.
# sparse.jacfwd with that pattern then uses one colour, and returns row sums of the Hessian as its diagonal.
# With jnp.cumsum instead of the scan, the pattern is full and the Hessian is right.
# The source has a handler for scan. Of the documentation, no page mentions it.
# Most users would expect the full pattern, or a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "scipy==1.17.1" "tatva==0.11.6" "tatva-coloring==0.0.2"
JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 "$folder/venv/bin/python" - <<'PYTHON'
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from tatva.sparse import ColoredMatrix, jacfwd, pattern_from_energy

print("tatva", version("tatva"), "tatva-coloring", version("tatva-coloring"), "jax", jax.__version__)
n = 6


def with_scan(u):  # the energy of accumulated displacements
    def step(total, increment):
        total = total + increment
        return total, total**2 + increment**4

    return jnp.sum(jax.lax.scan(step, 0.0, u)[1])


def with_loop(u):
    def step(i, carry):
        total, energy = carry
        return total + u[i], energy + (total + u[i]) ** 2 + u[i] ** 4

    return jax.lax.fori_loop(0, n, step, (0.0, 0.0))[1]


def with_cumsum(u):
    return jnp.sum(jnp.cumsum(u) ** 2 + u**4)


u = jnp.linspace(0.5, 1.5, n)
truth = np.asarray(jax.hessian(with_cumsum)(u))
assert np.all(truth != 0)
for energy in (with_cumsum, with_scan, with_loop):
    assert np.isclose(energy(u), with_cumsum(u))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pattern = pattern_from_energy(energy, n)
    coloured = ColoredMatrix.from_csr(pattern)
    found = jacfwd(jax.grad(energy), coloured)(u)
    diagonal = np.diag(np.asarray(found.to_dense()))
    print(f"{energy.__name__}: {pattern.nnz} entries of {n * n}, {len(caught)} warnings, diagonal {diagonal.round(2)}")
    if energy is with_cumsum:
        assert pattern.nnz == n * n and np.allclose(np.asarray(found.to_dense()), truth)
        print("    exact diagonal", np.diag(truth).round(2))
    else:
        assert pattern.nnz == n and not caught
        assert np.allclose(diagonal, truth.sum(axis=1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pattern_from_energy(jnp.prod, n)
print("jnp.prod, warnings:", len(caught))
assert caught
PYTHON
