#!/usr/bin/env bash
# kfac-jax 0.0.8 with jax 0.7.2 on a CPU: the modes "ggn_exact" and "fisher_exact" for a parameter without a
# layer of its own, such as exp(g) x. Such parameters get the block NaiveDiagonal.
#
# Guess, written before the run: for a batch of independent examples, "ggn_exact" gives the diagonal of the
# Gauss-Newton matrix without noise. It is the mean of "ggn_curvature_prop" over keys.
#
# Behaviour: it isn't. The block squares the gradient of the whole batch and divides by the batch size. With
# random signs for each example, the mixed terms vanish on average. The exact modes pass the same unit vector
# for all examples, so that all mixed terms stay: (sum of J)^2 / n instead of the sum of J^2 / n. If the
# derivatives J have one sign, the entries are too large by up to the batch size, without a warning, and they
# grow with the batch size. With batches of one example the mode is exact.
# The class documents the formula with the square of a sum. The mode is documented as exact, except for
# diagonal or Kronecker approximations and for batches whose examples interact.
# Most users would expect an exact diagonal from a diagonal block in a mode that is called exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.7.2" "jaxlib==0.7.2" "kfac-jax==0.0.8"
JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np

print("kfac-jax", version("kfac-jax"), "jax", jax.__version__)
rng = np.random.default_rng(0)
w = jnp.asarray(rng.normal(size=(3, 2)))
params = {"g": jnp.asarray([0.3, -0.2, 0.1]), "w": w}


def model(g, x, w=w):
    return (jnp.exp(g) * x) @ w


def loss(params, batch):
    x, y = batch
    z = model(params["g"], x, params["w"])
    kfac_jax.register_squared_error_loss(z, y)
    return jnp.mean(jnp.sum((z - y) ** 2, axis=1))


def diagonal(batch, mode, keys=1):
    """The diagonal of the block for g, as a mean over keys."""
    curvature = kfac_jax.BlockDiagonalCurvature(loss, default_estimation_mode=mode)
    arguments = (params, batch)
    curvature.finalize(arguments)
    [place] = [i for i, block in enumerate(curvature.blocks) if type(block).__name__ == "NaiveDiagonal"]
    state = curvature.init(jax.random.PRNGKey(0), arguments, None, None, False)

    @jax.jit
    def one(key):
        new = curvature.update_curvature_matrix_estimate(
            state, ema_old=0.0, ema_new=1.0, identity_weight=0.0, batch_size=len(batch[0]), rng=key, func_args=arguments
        )
        return jnp.diag(curvature.to_diagonal_block_dense_matrix(new)[place])

    return np.mean([one(key) for key in jax.random.split(jax.random.PRNGKey(1), keys)], axis=0)


for n in (1, 20, 200):
    x = jnp.asarray(rng.uniform(0.5, 1.5, size=(n, 3)))
    batch = x, jnp.asarray(rng.normal(size=(n, 2)))
    jacobian = jax.jacobian(model)(params["g"], x)
    exact = 2 * np.sum(np.asarray(jacobian) ** 2, axis=(0, 1)) / n
    found = {mode: diagonal(batch, mode) for mode in ("ggn_exact", "fisher_exact")}
    ratio = found["ggn_exact"] / exact
    print(f"batch size {n}: exact {exact}, ggn_exact over exact {ratio}")
    assert np.allclose(found["ggn_exact"], found["fisher_exact"])
    assert np.allclose(found["ggn_exact"], 2 * np.sum(np.asarray(jnp.sum(jacobian, axis=0)) ** 2, axis=0) / n)
    assert np.allclose(ratio, 1) if n == 1 else np.all((0.8 * n < ratio) & (ratio <= n))
    if n == 20:
        mean = diagonal(batch, "ggn_curvature_prop", 400)
        print(f"    ggn_curvature_prop, mean over 400 keys, over exact {mean / exact}")
        assert np.all(abs(mean / exact - 1) < 0.3)
PYTHON
