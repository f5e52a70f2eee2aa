#!/usr/bin/env bash
# s2fft 1.5.0 with jax 0.10.2 on a CPU: inverse_jax in 32-bit mode, samplings with a ring at the equator.
#
# Guess, written down before this comparison (after a Gram matrix had differed between 32 and 64 bits):
# at L = 8 the float32 transform agrees with inverse_numpy, in float64, to 1e-5 for every sampling.
#
# Behaviour: mw, dh and gl agree to 1e-6. healpix and mwss are off by 5 to 27 % for L = 4 to 32. The
# error is no rounding: for l = 2, m = 0 the ring at theta = pi / 2 is exactly zero, and all other rings
# are right. Most harmonics with even l - m >= 2 are affected. In 64-bit mode healpix agrees to 1e-15.
# The import warns of precision "at even moderate L", and an open issue of the project asks about a
# round-trip error of 15 % at L = 8. Most users would expect lost digits, not a lost ring of pixels.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "s2fft==1.5.0"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import s2fft

print("s2fft", version("s2fft"), "jax", jax.__version__)
L, nside = 8, 4
rng = np.random.default_rng(0)
alm = np.zeros((L, 2 * L - 1), complex)
for l in range(L):
    alm[l, L - 1 - l : L + l] = rng.normal(size=2 * l + 1) + 1j * rng.normal(size=2 * l + 1)


def both(alm, sampling):
    options = {"sampling": sampling, "nside": nside if sampling == "healpix" else None}
    exact = s2fft.inverse(alm, L, method="numpy", **options)
    return exact, np.asarray(s2fft.inverse_jax(jnp.asarray(alm), L, **options))


errors = {}
for sampling in ("mw", "dh", "gl", "mwss", "healpix"):
    exact, found = both(alm, sampling)
    errors[sampling] = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    print(f"{sampling}: {found.dtype}, relative error {errors[sampling]:.1e}")
assert max(errors[x] for x in ("mw", "dh", "gl")) < 1e-5
assert min(errors[x] for x in ("mwss", "healpix")) > 0.05

single = np.zeros((L, 2 * L - 1), complex)
single[2, L - 1] = 1  # l = 2, m = 0
exact, found = both(single, "healpix")
ring = np.arange(88, 104)  # the 16 pixels on the equator, of 192
rest = np.setdiff1d(np.arange(192), ring)
print("Y_20 on the equator:", exact[ring][0].real, "found:", np.unique(found[ring]))
assert np.all(found[ring] == 0) and np.min(np.abs(exact[ring])) > 0.3
assert np.max(np.abs(found - exact)[rest]) < 1e-5
PYTHON
