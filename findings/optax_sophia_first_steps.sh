#!/usr/bin/env bash
# optax 0.2.8 with jax 0.10.2 on a CPU: optax.contrib.sophia with its Hutchinson estimate of the diagonal.
#
# Guess, written before the run: for f = sum h_i x_i^2 / 2, one probe of signs gives the exact diagonal h. With
# b1 = b2 = 0 (no averages), gamma = 1, no clipping and a learning rate of 1, the first step is Newton's and
# ends at the minimum. With averages, gradient and diagonal are corrected for their zero start, as in Adam, so
# that the first steps for a constant gradient and Hessian have equal lengths.
#
# Behaviour: a step divides by the diagonal that the step before it left.
#   - The first step divides by eps = 1e-8, although the diagonal is computed in it. With clipping, the first
#     step is the sign of the gradient, whatever the curvature.
#   - Later steps use the Hessian at the point before: with f = sum x_i^4 / 12, whose Newton steps are x / 3,
#     the second step uses the diagonal of the starting point.
#   - The average of the gradient is corrected for its zero start, and the average of the diagonal isn't. After
#     m estimates it is 1 - b2^m times its value, so that the steps are 100, 50, 34, 25, ... times Newton's
#     for b2 = 0.99. Only clipping bounds them.
# The cited paper (Algorithm 3) updates the diagonal before the step, and corrects neither average. Its authors'
# program updates it after the step. The documentation of optax mentions neither point.
# Most users would expect Newton's step, or at least a step that uses the diagonal computed in it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "optax==0.2.8"
JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import hutchinson_estimator_diag_hessian, sophia

print("optax", optax.__version__, "jax", jax.__version__)
h = jnp.asarray([1.0, 4.0, 25.0])
x = jnp.asarray([1.0, 2.0, 3.0])


def quadratic(x):
    return jnp.sum(h * x**2) / 2


def quartic(x):
    return jnp.sum(x**4) / 12


def optimizer(b1, b2, clip):
    return sophia(1.0, b1=b1, b2=b2, gamma=1.0, weight_decay=0.0, clip_threshold=clip, update_interval=1)


estimator = hutchinson_estimator_diag_hessian(jax.random.key(0))
diagonal, _ = estimator.update(x, estimator.init(x), x, obj_fn=quadratic)
print("estimated diagonal:", diagonal, "of", h)
assert np.allclose(diagonal, h)

for clip in (None, 1.0):
    opt = optimizer(0.0, 0.0, clip)
    step, state = opt.update(jax.grad(quadratic)(x), opt.init(x), x, obj_fn=quadratic)
    print(f"first step, clip_threshold {clip}: {step}, Newton's step {-x}, stored diagonal {state[0].nu}")
    assert np.allclose(step, -h * x / 1e-8 if clip is None else -jnp.ones(3)) and np.allclose(state[0].nu, h)

point, opt = x, optimizer(0.0, 0.0, 1.0)
_, state = opt.update(jax.grad(quartic)(x), opt.init(x), x, obj_fn=quartic)
moved = x / 2
step, _ = opt.update(jax.grad(quartic)(moved), state, moved, obj_fn=quartic)
print("quartic, second step over Newton's step:", step / (-moved / 3), "(Hessian of the first point: 0.25)")
assert np.allclose(step / (-moved / 3), 0.25)

opt = optimizer(0.9, 0.99, None)
state, ratios = opt.init(x), []
for _ in range(6):
    step, state = opt.update(jax.grad(quadratic)(x), state, x, obj_fn=quadratic)  # at the same point
    ratios.append(float(step[0] / -x[0]))
print("b2 = 0.99, steps over Newton's step:", np.round(ratios, 1))
assert ratios[0] > 1e7 and np.allclose(ratios[1:], 1 / (1 - 0.99 ** np.arange(1, 6)), rtol=1e-6)
PYTHON
