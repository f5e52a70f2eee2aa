#!/usr/bin/env bash
# dynamiqs 0.3.7 with jax 0.10.2 on a CPU: QArray.squeeze() in the sparse layout dq.dia, which is the layout of
# operators such as dq.destroy and of their sums and products.
#
# Guess, written before the run: for a batch of one operator, shape (1, n, n), squeeze() has the shape (n, n) and
# the same entries in the layouts dq.dia and dq.dense.
#
# Behaviour: dense is right. In the layout dia, squeeze() returns the stored diagonals as a JAX array, one row per
# diagonal: (3, n) for an oscillator with a drive. Each row is padded with zeros. A trace of this array is a number, but
# not the operator's: 1.24 instead of 10 below. squeeze(0), which names the axis, is right in both layouts.
# The documentation of squeeze mentions no layout.
# Most users would expect a layout to change the storage and not the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "dynamiqs==0.3.7"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import dynamiqs as dq
import jax
import jax.numpy as jnp
import numpy as np

print("dynamiqs", version("dynamiqs"), "jax", jax.__version__)
a = dq.destroy(5)
drives = [0.1]  # a sweep with one value
batch = dq.stack([a.dag() @ a + drive * (a + a.dag()) for drive in drives])
matrix = np.asarray(batch.to_jax()[0])
print("layout", batch.layout, "shape", batch.shape, "trace", batch.trace())
for layout, x in (("dia", batch), ("dense", batch.asdense())):
    squeezed, named = x.squeeze(), x.squeeze(0)
    array = np.asarray(dq.to_jax(squeezed))
    print(f"{layout}: squeeze() {type(squeezed).__name__} {array.shape}, trace {np.trace(array).real:.3f}; "
          f"squeeze(0) {type(named).__name__} {named.shape}")
    assert np.allclose(dq.to_jax(named), matrix)
    if layout == "dense":
        assert np.allclose(array, matrix)
    else:
        assert array.shape == (3, 5) and not np.isclose(np.trace(array), np.trace(matrix), atol=1)
        print(jnp.asarray(squeezed).real.round(3))
PYTHON
