#!/usr/bin/env bash
# kfac-jax 0.0.8 with jax 0.7.2 on a CPU: curvature block of a dense layer with a bias that acts on sequences,
# arrays with shape (batch, positions, features).
#
# Guess, written before the run: for z = x w + b and a squared error, the modes "ggn_exact" and
# "ggn_curvature_prop" agree on the block, and its bias entries are exact, 2 x positions. Padding the
# sequences, with a mask of 0 in the loss, changes neither weight nor bias entries.
#
# Behaviour: the statistics leave out masked positions, which they recognise by zero gradients. They do so
# for the inputs, but append the constant input of the bias afterwards, so that every position counts.
#   - If two thirds of the positions are padding, the bias entries are three times too large.
#   - In the modes "ggn_exact" and "fisher_exact", which take one output of one position at a time, all other
#     positions look masked. Then the bias entries are too large by the number of positions, without a mask.
# Weight entries are right in all cases. The argument `use_masking` is on by default and has no documentation.
# Most users would expect padding to have no effect, and the exact mode to be exact for this linear model.
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
n, positions, width, classes = 5, 4, 3, 2
rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(n, positions, width)))
y = jnp.asarray(rng.normal(size=(n, positions, classes)))
labels = jnp.asarray(rng.integers(0, classes, size=(n, positions)))
params = {"b": jnp.zeros(classes), "w": jnp.asarray(rng.normal(size=(width, classes)))}


def squared_error(params, batch):
    x, y = batch
    z = x @ params["w"] + params["b"]
    kfac_jax.register_squared_error_loss(z, y)
    return jnp.mean(jnp.sum((z - y) ** 2, axis=(1, 2)))


def cross_entropy(params, batch):
    x, labels, mask = batch
    z = x @ params["w"] + params["b"]
    kfac_jax.register_softmax_cross_entropy_loss(z, labels, mask=mask)
    logs = jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], axis=-1)[..., 0]
    return -jnp.mean(jnp.sum(logs * mask, axis=1))


def diagonal(loss, batch, mode, keys=1):
    """The diagonal of the only block, whose parameters are b and then w, as a mean over keys."""
    curvature = kfac_jax.BlockDiagonalCurvature(loss, default_estimation_mode=mode)
    arguments = (params, batch)
    curvature.finalize(arguments)
    state = curvature.init(jax.random.PRNGKey(0), arguments, None, None, False)

    @jax.jit
    def one(key):
        new = curvature.update_curvature_matrix_estimate(
            state, ema_old=0.0, ema_new=1.0, identity_weight=0.0, batch_size=n, rng=key, func_args=arguments
        )
        [block] = curvature.to_diagonal_block_dense_matrix(new)
        return jnp.diag(block)

    return np.mean([one(key) for key in jax.random.split(jax.random.PRNGKey(1), keys)], axis=0)


exact = jnp.concatenate(
    [jnp.full(classes, 2.0 * positions), jnp.repeat(2 * jnp.sum(x**2, axis=(0, 1)) / n, classes)]
)
sampled = diagonal(squared_error, (x, y), "ggn_curvature_prop", 20)
found = diagonal(squared_error, (x, y), "ggn_exact")
print("squared error, exact Gauss-Newton diagonal: bias", exact[:classes], "weights", exact[classes:])
print("ggn_curvature_prop: bias", sampled[:classes], "weights", sampled[classes:])
print("ggn_exact:          bias", found[:classes], "weights", found[classes:])
assert np.allclose(sampled, exact) and np.allclose(found[classes:], exact[classes:])
assert np.allclose(found[:classes], positions * exact[:classes])


def padded(array):
    return jnp.pad(array, [(0, 0), (0, 2 * positions)] + [(0, 0)] * (array.ndim - 2))


batch = (x, labels, jnp.ones((n, positions)))
ratio = diagonal(cross_entropy, tuple(map(padded, batch)), "ggn_curvature_prop", 400)
ratio = ratio / diagonal(cross_entropy, batch, "ggn_curvature_prop", 400)
print("cross entropy, padded over plain: bias", ratio[:classes], "weights", ratio[classes:])
assert np.all(abs(ratio[:classes] - 3) < 0.3) and np.all(abs(ratio[classes:] - 1) < 0.1)
PYTHON
