#!/usr/bin/env bash
# jax 0.10.2 with jaxlib 0.10.2 on a CPU: jax.numpy.max and min of arrays with NaN.
#
# Guess, written before the run: the maximum of an array that holds NaN is NaN, as in NumPy and as the
# documentation of jax.numpy.nanmax implies, at every size. So `isfinite(max(abs(x)))` finds NaN.
#
# Behaviour: arrays of up to a few dozen entries give NaN. Larger ones, from 64 x 64 at the latest, give
# the largest of the other entries, eagerly and jitted, in 32 and in 64 bits, along axes, too. argmax
# points at the NaN, and sums and means are NaN.
# Most users would expect NaN, or at least the same answer at every size.
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
seen = {}
for n in (8, 64, 200):
    x = jax.random.normal(jax.random.key(0), (n, n)).at[2, 2].set(jnp.nan)
    assert np.isnan(np.max(np.asarray(x)))
    found = jnp.max(x), jax.jit(jnp.max)(x), jnp.min(x), jnp.max(x, axis=1)[2]
    seen[n] = [bool(jnp.isnan(y)) for y in found]
    print(f"{n} x {n}: max {found[0]}, jitted {found[1]}, min {found[2]}, of its row {found[3]}")
    assert int(jnp.argmax(x)) == 2 * n + 2 and bool(jnp.isnan(jnp.sum(x)))
assert all(seen[8]), seen
assert not any(seen[64]) and not any(seen[200]), seen
PYTHON
