#!/usr/bin/env bash
# lineax 0.1.1 with jax 0.10.2 on a CPU: lineax.CG in float32 with many unknowns, or with a small operator.
#
# What we expected, written down after a preconditioned solve with n = 99,856 had failed: CG solves
# well-conditioned positive definite systems at every size and scale in float32, since A x = b and
# (A / 100) x = b / 100 have the same solution and the same iterates up to rounding. A perfect
# preconditioner lets it converge in one or two steps.
#
# Behaviour: a step fails if p^T A p is at most 200 eps n times r^T z, for the search direction p, the
# residual r and the preconditioned residual z. In float32 this bound is 2.4e-5 n: 0.024 for 1,000
# unknowns, 1 for 42,000, and 2.4 for 100,000. So the outcome depends on the scale of A and on n:
#   - for a diagonal A with entries from 1 to 2, CG fails as nonfinite for n = 100,000, and solves 100 A;
#   - for n = 1,000 it solves A, and fails for A / 100;
#   - with the exact inverse as the preconditioner, it solves n = 30,000 and fails for n = 60,000. With 100
#     times this preconditioner it solves both.
# All of these work in float64. The message suggests that the operator is singular or isn't definite.
# Most users would expect all of them to be solved in a few steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "lineax==0.1.1"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

print("jax", jax.__version__, "lineax", lx.__version__)


def solved(n, scale, preconditioner_scale=None, dtype=jnp.float32):
    d = jnp.linspace(1, 2, n, dtype=dtype)
    tag = lx.positive_semidefinite_tag

    def diagonal(entries):
        # A function hides that the operator is diagonal.
        structure = jax.ShapeDtypeStruct((n,), dtype)
        return lx.FunctionLinearOperator(lambda x: entries * x, structure, tag)

    options = {}
    if preconditioner_scale is not None:
        options = {"preconditioner": diagonal(preconditioner_scale / (scale * d))}
    b = jnp.where(jnp.arange(n) % 3 == 0, -1.0, 1.0).astype(dtype)
    solver = lx.CG(rtol=1e-4, atol=0.0)
    solution = lx.linear_solve(diagonal(scale * d), scale * b, solver, options=options, throw=False)
    error = float(np.max(np.abs(np.asarray(solution.value - b / d))))
    good = bool(solution.result == lx.RESULTS.successful)
    print(f"n = {n}, {dtype.__name__}, A scaled by {scale:g}, preconditioner {preconditioner_scale}: "
          f"successful {good}, error {error:.1g}")
    assert good == (error < 1e-2)
    return good


assert not solved(100_000, 1.0) and solved(100_000, 100.0)
assert solved(1_000, 1.0) and not solved(1_000, 0.01)
assert solved(30_000, 1.0, 1.0) and not solved(60_000, 1.0, 1.0)
assert solved(30_000, 1.0, 100.0) and solved(60_000, 1.0, 100.0)
jax.config.update("jax_enable_x64", True)
for n, scale, m in ((100_000, 1.0, None), (1_000, 0.01, None), (60_000, 1.0, 1.0)):
    assert solved(n, scale, m, jnp.float64)
PYTHON
