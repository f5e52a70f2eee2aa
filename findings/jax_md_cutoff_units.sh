#!/usr/bin/env bash
# jax-md 0.2.29 with jax 0.10.2 on a CPU: r_onset and r_cutoff in energy.lennard_jones_pair and energy.morse_pair.
#
# Guess, written before the run: r_cutoff has one unit in all pair potentials, and with the default values a pair
# at the distance `sigma` has the energy -epsilon in morse_pair, whose minimum is there.
#
# Behaviour: lennard_jones_pair multiplies r_onset and r_cutoff by the largest sigma, and morse_pair takes them as
# distances. Both have the defaults 2.0 and 2.5. So morse_pair(sigma=3.0) is 0 from 2.5 on, and its well is gone:
# at the minimum you get 0 instead of -5, and so for gradients and Hessians, without a warning.
# With species, lennard_jones_pair truncates all pairs at 2.5 times the *largest* sigma. For the Kob-Andersen mixture
# (sigma_BB = 0.88) pairs BB reach to 2.5 instead of 2.2, and their energy at 2.3 isn't 0. A radius per pair, such as
# 2.5 sigma_ab, can't be passed. The neighbour-list versions do the same. Neither docstring mentions a unit.
# Most users would expect one unit, and a potential with a well.
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
from jax_md import energy, space

print("jax-md", version("jax-md"), "jax", jax.__version__)
displacement = space.free()[0]


def at(fn, r):
    """Energy, force and curvature of a pair at a distance."""
    along = lambda r: fn(jnp.stack([jnp.zeros(3), jnp.array([1.0, 0, 0]) * r]))
    return [float(f(r)) for f in (along, jax.grad(along), jax.grad(jax.grad(along)))]


for sigma in (1.0, 3.0):
    default = at(energy.morse_pair(displacement, sigma=sigma), sigma)
    wide = at(energy.morse_pair(displacement, sigma=sigma, r_onset=2 * sigma, r_cutoff=2.5 * sigma), sigma)
    print(f"morse_pair(sigma={sigma}) at r = {sigma}: {default}; with the cutoffs times sigma: {wide}")
    assert np.allclose(wide, [-5, 0, 250], atol=1e-3)
    assert np.allclose(default, wide if sigma == 1.0 else 0, atol=1e-3)
    minimum = 2 ** (1 / 6) * sigma
    seen = at(energy.lennard_jones_pair(displacement, sigma=sigma), minimum)
    print(f"lennard_jones_pair(sigma={sigma}) at its minimum: {seen[0]:.4f}")
    assert np.isclose(seen[0], -1)

sigma, epsilon = jnp.array([[1.0, 0.8], [0.8, 0.88]]), jnp.array([[1.0, 1.5], [1.5, 0.5]])
for species, name in (([0, 0], "AA"), ([1, 1], "BB")):
    mixture = energy.lennard_jones_pair(displacement, species=jnp.array(species), sigma=sigma, epsilon=epsilon)
    own = float(sigma[species[0], species[1]])
    seen = [at(mixture, r)[0] for r in (2.3, 2.45, 2.55)]
    print(f"{name}: 2.5 sigma = {2.5 * own:.2f}, energies at 2.3, 2.45 and 2.55: {seen}")
    assert seen[0] < -1e-3 and seen[1] < -1e-5 and seen[2] == 0
PYTHON
