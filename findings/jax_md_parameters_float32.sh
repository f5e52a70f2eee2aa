#!/usr/bin/env bash
# jax-md 0.2.29 with jax 0.10.2 on a CPU, in 64-bit mode: parameters of energy.lennard_jones_pair,
# soft_sphere_pair, morse_pair and simple_spring_bond.
#
# Guess, written before the run: with jax_enable_x64 and positions in float64, the energies have errors near 1e-15.
#
# Behaviour: the result is float64, but parameters that are Python numbers or NumPy float64 arrays are rounded to
# float32 first. Relative errors are 1e-8 to 1e-6: 9.8e-7 for the energy of a spring of length 3.8 at 3.9. jnp.asarray(0.0104)
# doesn't help either where a formula multiplies it by a float32 number, because it is weakly typed. With
# jnp.asarray(x, jnp.float64) the errors are near 1e-15.
# Most users would expect 64 bits throughout once they have switched 64-bit mode on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "jax-md==0.2.29"
cd "$folder"
JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import energy, space

print("jax-md", version("jax-md"), "jax", jax.__version__)
displacement = space.free()[0]
r = 3.9
positions = jnp.asarray([[0, 0, 0], [r, 0, 0]], jnp.float64)


def spring(displacement, **parameters):
    return energy.simple_spring_bond(displacement, jnp.array([[0, 1]]), **parameters)


ratio = (3.405 / r) ** 6
cases = {
    "lennard_jones_pair": (energy.lennard_jones_pair, {"sigma": 3.405, "epsilon": 0.0104}, 4 * 0.0104 * (ratio**2 - ratio)),
    "morse_pair": (
        energy.morse_pair,
        {"sigma": 2.9, "epsilon": 0.345, "alpha": 1.6, "r_onset": 8.0, "r_cutoff": 9.0},
        0.345 * ((1 - np.exp(-1.6)) ** 2 - 1),
    ),
    "soft_sphere_pair": (energy.soft_sphere_pair, {"sigma": 4.1, "epsilon": 0.3}, 0.15 * (1 - r / 4.1) ** 2),
    "simple_spring_bond": (spring, {"length": 3.8, "epsilon": 1.7}, 0.85 * (r - 3.8) ** 2),
}
kinds = {
    "Python": float,
    "NumPy": lambda x: np.asarray(x, np.float64),
    "JAX, float64": lambda x: jnp.asarray(x, jnp.float64),
}
for name, (make, parameters, exact) in cases.items():
    for kind, convert in kinds.items():
        own = {key: convert(x) for key, x in parameters.items()}
        seen = make(displacement, **own)(positions)
        error = abs(float(seen) / exact - 1)
        print(f"{name}, parameters from {kind}: {seen.dtype}, relative error {error:.1e}")
        assert seen.dtype == jnp.float64
        assert error < 1e-13 if kind == "JAX, float64" else 1e-9 < error < 1e-5
make, parameters, exact = cases["lennard_jones_pair"]
weak = {key: jnp.asarray(x) for key, x in parameters.items()}
error = abs(float(make(displacement, **weak)(positions)) / exact - 1)
print(f"lennard_jones_pair, parameters from jnp.asarray(x): {weak['sigma'].dtype}, relative error {error:.1e}")
assert 1e-9 < error < 1e-5
PYTHON
