#!/usr/bin/env bash
# laplax 0.0.2 (with jax 0.10.2): laplax.eval.likelihood.marginal_log_likelihood, curv_type="full",
# loss_fn="mse", a model that is linear in its parameters.
#
# Guess, written before the run: for a linear model the Laplace evidence is exact. So its difference between
# two prior precisions, at the modes, is the exact difference for noise of variance 1 (or of variance 1/2, if
# the log likelihood is the negative sum of squares, as the documentation says).
#
# Behaviour: it is neither. The log likelihood is minus half the sum of squares, and the curvature of "mse" is
# that of the whole sum, twice as large. With `sigma_squared` = 0.5 next to `prior_prec`, which multiplies the
# curvature only, the differences are exact for variance 1.
# Most users would expect the likelihood and the curvature of one call to belong to the same loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "laplax==0.0.2"
JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 "$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
from laplax.curv import create_ggn_mv, estimate_curvature
from laplax.eval.likelihood import marginal_log_likelihood

print("laplax", importlib.metadata.version("laplax"), "jax", jax.__version__)
n, p = 40, 6
rng = np.random.default_rng(1)
x = rng.normal(size=(n, p))
y = x @ np.arange(1.0, p + 1) / p + rng.normal(size=n)
data = {"input": jnp.asarray(x), "target": jnp.asarray(y)[:, None]}


def model(input, params):
    return (params["w"] @ input)[None]


def exact(variance, prior):
    covariance = variance * np.eye(n) + x @ x.T / prior
    return -(y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(covariance)[1]) / 2


def evidence(variance, prior, **arguments):
    w = np.linalg.solve(x.T @ x + variance * prior * np.eye(p), x.T @ y)  # the mode
    params = {"w": jnp.asarray(w)}
    curvature = estimate_curvature("full", create_ggn_mv(model, params, data, loss_fn="mse"), layout=params)
    return float(
        marginal_log_likelihood(
            curvature, {"prior_prec": prior, **arguments}, data, model, params, "mse", "full", vmap_over_data=True
        )
    )


off = []
for variance in (1.0, 0.5):
    seen = evidence(variance, 10.0) - evidence(variance, 100.0)
    truth = exact(variance, 10.0) - exact(variance, 100.0)
    off.append(abs(seen - truth))
    print(f"noise variance {variance}: evidence at prior precision 10 minus 100: {seen:.4f}, exact {truth:.4f}")
assert min(off) > 0.1, off
halved = evidence(1.0, 10.0, sigma_squared=0.5) - evidence(1.0, 100.0, sigma_squared=0.5)
truth = exact(1.0, 10.0) - exact(1.0, 100.0)
print(f"with sigma_squared = 0.5: {halved:.4f}, exact for variance 1 {truth:.4f}")
assert abs(halved - truth) < 1e-6, (halved, truth)
PYTHON
