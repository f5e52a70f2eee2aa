#!/usr/bin/env bash
# matfree 0.6.3 (with jax 0.10.2): stochtrace.estimator_leave_one_out_mean_and_sem.
#
# Guess, written before the run: the second number is the standard error of the first one, about as
# large as its root mean square error over keys.
#
# Behaviour: it is std(samples) / sqrt(number of samples), although leave-one-out samples of XTrace and
# XNysTrace share their probes and are correlated. It is about 0.5 to 0.85 times the root mean square
# error, so that mean +- 1.96 of it holds the trace in 66 to 88 % of runs instead of 95 %.
# Most users would expect a calibrated standard error from a function of this name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "matfree==0.6.3"
JAX_ENABLE_X64=1 "$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
from matfree import stochtrace

print("matfree", importlib.metadata.version("matfree"), "jax", jax.__version__)
n, samples, runs = 100, 10, 1000
basis = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))[0]
i = np.arange(1, n + 1.0)
ratios = []
for name, values in {"1 to 3": np.linspace(1, 3, n), "i^-2": i**-2}.items():
    matrix = jnp.asarray((basis * values) @ basis.T)
    for rule in (stochtrace.leave_one_out_xtrace(), stochtrace.leave_one_out_xnystrace()):
        sampler = stochtrace.sampler_normal(jnp.zeros(n), num=samples)
        estimate = stochtrace.estimator_leave_one_out_mean_and_sem(rule, sampler)
        keys = jax.random.split(jax.random.key(0), runs)
        run = jax.jit(lambda keys: jax.lax.map(lambda key: estimate(lambda v: matrix @ v, key), keys))
        mean, error = map(np.asarray, run(keys))
        off = mean - values.sum()
        ratio = error.mean() / np.sqrt(np.mean(off**2))
        held = np.mean(np.abs(off) <= 1.96 * error)
        ratios.append(ratio)
        print(f"{name}: mean standard error over RMS error {ratio:.2f}, 1.96 bars hold {held:.0%}")
assert all(0.4 < x < 0.9 for x in ratios), ratios
PYTHON
