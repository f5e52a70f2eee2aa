#!/usr/bin/env bash
# numpyro 0.22.0 with jax 0.10.2 on a CPU: numpyro.infer.autoguide.AutoLaplaceApproximation, one guide for two data sets.
#
# Guess, written before the run: after svi.run(key, steps, data), get_posterior(result.params) is the Laplace
# approximation for this data, also if the same guide was fitted to other data before. The documentation says that the
# covariance is the inverse Hessian of -log p(x, z) at the mode.
#
# Behaviour: the guide keeps the arguments of its first call. A second run finds the mode for the new data, and
# get_posterior puts the Hessian for the old data around it. Neither a new SVI object nor data passed to
# sample_posterior changes this, and no warning is raised. For the mean of a normal with unit noise the precision is
# 10.01 after 10 observations and stays 10.01 after a run on 1,000 others, where 1000.01 is exact: standard deviations
# are 10 times too large. If svi.update receives minibatches, the Hessian is the first minibatch's. A new guide is right.
# Most users would expect the mode and the Hessian to belong to the same data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "numpyro==0.22.0"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W error::UserWarning - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation

print("numpyro", numpyro.__version__, "jax", jax.__version__)


def model(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


rng = np.random.default_rng(0)
first = jnp.asarray(rng.normal(size=10), jnp.float32)
second = jnp.asarray(rng.normal(size=1000) + 5, jnp.float32)


def fit(guide, y):
    svi = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())
    return svi.run(jax.random.key(0), 1000, y, progress_bar=False).params


def describe(name, guide, params, y):
    posterior = guide.get_posterior(params)
    precision, exact = float(posterior.precision_matrix[0, 0]), len(y) + 0.01
    mode, exact_mode = float(posterior.loc[0]), float(jnp.sum(y)) / exact
    print(f"{name}: mode {mode:.3f} (exact {exact_mode:.3f}), precision {precision:.2f} (exact {exact:.2f})")
    assert abs(mode - exact_mode) < 0.05
    return precision


guide = AutoLaplaceApproximation(model)
assert abs(describe("first data", guide, fit(guide, first), first) - 10.01) < 0.01
params = fit(guide, second)
assert abs(describe("second data, same guide", guide, params, second) - 10.01) < 0.01
draws = guide.sample_posterior(jax.random.key(1), params, second, sample_shape=(4000,))["mean"]
print(f"standard deviation of sample_posterior(key, params, second): {float(draws.std()):.3f} (exact {1000.01**-0.5:.3f})")
assert abs(float(draws.std()) - 10.01**-0.5) < 0.02
new = AutoLaplaceApproximation(model)
assert abs(describe("second data, new guide", new, fit(new, second), second) - 1000.01) < 1

guide = AutoLaplaceApproximation(model)
svi = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())
state = svi.init(jax.random.key(0), first)
update = jax.jit(svi.update)
for _ in range(1000):
    state, _ = update(state, second)
assert abs(describe("svi.init on first, svi.update on second", guide, svi.get_params(state), second) - 10.01) < 0.01
PYTHON
