#!/usr/bin/env bash
# jax-md 0.2.29 with jax 0.10.2 on a CPU: smap.pair_neighbor_list(..., reduce_axis=(0, 1)), neighbour lists in
# the format Sparse.
#
# Guess, written before the run: reduce_axis=(0, 1) sums over particles and neighbours, so a function with one number
# for each pair gives the energy, the same for every format of the list.
#
# Behaviour: Dense and OrderedSparse give the energy, and Sparse gives twice the energy. A Sparse list holds each pair
# twice; the sum is halved for reduce_axis=None and (1,), but not if axis 0 is among the axes. This concerns pair functions
# with several outputs, such as a virial or an energy for each component, where axes have to be named.
# The documentation calls axis 0 the particles and axis 1 the neighbours, and has no exception for Sparse here.
# Most users would expect one value for all formats.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "jax-md==0.2.29"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import partition, smap, space

print("jax-md", version("jax-md"), "jax", jax.__version__)
side, cutoff = 6.0, 1.4
displacement = space.periodic(side)[0]
grid = jnp.stack(jnp.meshgrid(*[jnp.arange(5) * 1.2] * 3), axis=-1).reshape(-1, 3)
positions = grid + 0.1 * jax.random.normal(jax.random.key(0), grid.shape)


def spring(r):
    return jnp.where(r < cutoff, (r - cutoff) ** 2, 0)


def virial(dR):  # six numbers for each pair would do; here three, the diagonal
    r = space.distance(dR)[..., None]
    near = (r > 0) & (r < cutoff)
    return jnp.where(near, 2 * (r - cutoff) / jnp.where(near, r, 1) * dR**2, 0)


gaps = np.asarray(positions)[:, None] - np.asarray(positions)
gaps -= side * np.round(gaps / side)
i, j = np.triu_indices(len(gaps), 1)
energy = np.sum(spring(np.linalg.norm(gaps[i, j], axis=-1)))
virials = np.sum(virial(jnp.asarray(gaps[i, j])), axis=0)
print(f"a loop over pairs: energy {energy:.4f}, virial {virials.round(3)}")
for kind in (partition.Dense, partition.OrderedSparse, partition.Sparse):
    neighbors = partition.neighbor_list(displacement, side, cutoff, 0.2, format=kind).allocate(positions)

    def total(fn, by, axes):
        mapped = smap.pair_neighbor_list(fn, by, reduce_axis=axes)
        return np.asarray(mapped(positions, neighbor=neighbors))

    plain = total(spring, space.metric(displacement), None)
    named = total(spring, space.metric(displacement), (0, 1))
    parts = total(virial, displacement, (0, 1))
    print(f"{kind.name}: reduce_axis=None {plain:.4f}, (0, 1) {named:.4f}, virial {parts.round(3)}")
    factor = 2 if kind is partition.Sparse else 1
    assert np.isclose(plain, energy, rtol=1e-4)
    assert np.isclose(named, factor * energy, rtol=1e-4)
    assert np.allclose(parts, factor * virials, rtol=1e-3)
PYTHON
