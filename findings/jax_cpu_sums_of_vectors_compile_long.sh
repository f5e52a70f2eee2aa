#!/usr/bin/env bash
# jax 0.10.2 with jaxlib 0.10.2 on a CPU: how long XLA compiles a sum of squares.
#
# Guess, written before the run: `sum(x * x)` compiles as long for a vector as for a matrix of as many
# rows, and `vdot(x, x)`, one dot product, in less time than either.
#
# Behaviour: of matrices it takes half a millisecond, as it becomes a call of a library. Of vectors it takes
# tens of milliseconds: a kernel for partial sums and one for the rest, each of which goes through LLVM
# alone. `vdot` of vectors takes as long. 40 sums of vectors compile for more than a second.
# Most users would expect the case of fewer dimensions to be the simpler one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import time

import jax
import jax.numpy as jnp
import jaxlib

print("jax", jax.__version__, "jaxlib", jaxlib.__version__)
jax.jit(lambda x: x + 1).lower(1.0).compile()


def seconds(fn, shapes):
    """CPU seconds of XLA for one program that applies fn to an array of each shape."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    lowered = jax.jit(lambda *xs: [fn(x) for x in xs]).lower(*arrays)
    start = time.process_time()
    lowered.compile()
    return (time.process_time() - start) / len(shapes)


vectors = [(100 + i,) for i in range(40)]
matrices = [(100 + i, 100 + i) for i in range(40)]
of_vectors = seconds(lambda x: jnp.sum(x * x), vectors)
of_dots = seconds(lambda x: jnp.vdot(x, x), vectors)
of_matrices = seconds(lambda x: jnp.sum(x * x), matrices)
for name, time_of in (
    ("sum of squares of a vector", of_vectors),
    ("vdot of a vector", of_dots),
    ("sum of squares of a matrix", of_matrices),
):
    print(f"{name}: {1e3 * time_of:.1f} ms to compile")
assert of_vectors > 10 * of_matrices, (of_vectors, of_matrices)
assert of_dots > 10 * of_matrices, (of_dots, of_matrices)
PYTHON
