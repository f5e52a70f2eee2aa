"""A continuous normalising flow for handwritten digits, trained with estimated divergences.

A flow moves a point `x` along `dx/dt = f(t, x)`, from the data at `t = 0` to a normal
distribution at `t = 1`. The log-density at `x` is the log-density at its end point plus the
integrated divergence of `f`. `traceax.divergence` estimates the divergence from one product
with the Jacobian at every ODE solver stage. The data are 16 principal components of
scikit-learn's digits. We compare log-densities for held-out images with exact ones.

    python examples/continuous_normalising_flow.py [figure.png]
"""

import sys

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.stats import norm
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import train_test_split

import traceax as tx

DIMENSION, UPDATES, BATCH = 16, 300, 128
TRAINING_STEPS, EVALUATION_STEPS = 6, 24  # ODE steps
KEYS = 8  # sets of probes, for error bars


class Field(eqx.Module):
    """`f(t, x)`, a small network."""

    network: eqx.nn.MLP

    def __call__(self, t, x):
        return self.network(jnp.append(x, t))


# --8<-- [start:log_density]
def log_density(field, x, key, k, num_steps):
    """The log-density at `x`, from k products per solver stage. Exact if `k >= n`.

    We fix the key along a path, so that the integrand is a smooth function of time.
    """

    def rates(t, state, args):
        x, _ = state
        velocity, divergence = tx.divergence(key, lambda x: field(t, x), x, k)
        return velocity, divergence.value

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(rates),
        diffrax.Heun(),
        t0=0.0,
        t1=1.0,
        dt0=1 / num_steps,
        y0=(x, jnp.zeros(())),
        max_steps=num_steps,
    )
    end, log_volume = jax.tree.map(lambda saved: saved[-1], solution.ys)
    return jnp.sum(norm.logpdf(end)) + log_volume


# --8<-- [end:log_density]


# --8<-- [start:objective]
@eqx.filter_value_and_grad
def objective(field, xs, key):
    """The mean of `-log p(x)`. Each point has its own probes."""
    keys = jax.random.split(key, len(xs))
    return -jnp.mean(
        jax.vmap(lambda x, key: log_density(field, x, key, 1, TRAINING_STEPS))(xs, keys)
    )


# --8<-- [end:objective]


@eqx.filter_jit
def train(field, data, key):
    """Train with Adam. Each step draws a new batch and new probes."""
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, UPDATES))
    params, static = eqx.partition(field, eqx.is_inexact_array)

    def update(carry, key):
        params, state = carry
        batch_key, probe_key = jax.random.split(key)
        xs = jax.random.choice(batch_key, data, (BATCH,))
        loss, gradient = objective(eqx.combine(params, static), xs, probe_key)
        change, state = optimiser.update(gradient, state)
        return (eqx.apply_updates(params, change), state), loss

    carry = params, optimiser.init(params)
    (params, _), losses = jax.lax.scan(update, carry, jax.random.split(key, UPDATES))
    return eqx.combine(params, static), losses


@eqx.filter_jit
def evaluate(field, xs, key, k):
    keys = jax.random.split(key, len(xs))
    return jax.vmap(lambda *a: log_density(field, *a, k, EVALUATION_STEPS))(xs, keys)


def main(path):
    images, _ = load_digits(return_X_y=True)
    train_images, test_images = train_test_split(images, test_size=0.2, random_state=0)
    pca = PCA(DIMENSION, whiten=True, random_state=0).fit(train_images)
    data, test = (
        jnp.asarray(pca.transform(x), jnp.float32) for x in (train_images, test_images)
    )
    field_key, train_key, probe_key = jax.random.split(jax.random.key(0), 3)
    sizes = DIMENSION + 1, DIMENSION, 64, 2
    field = Field(eqx.nn.MLP(*sizes, jax.nn.swish, key=field_key))
    field, losses = train(field, data, train_key)

    exact = np.asarray(evaluate(field, test, probe_key, DIMENSION))
    print("mean log-density of held-out images")
    normal = GaussianMixture(1).fit(data).score(test)
    print(f"  normal distribution       {normal:8.3f}")
    print(f"  flow, exact               {exact.mean():8.3f}")
    estimates = {}
    for k in (1, 4):
        keys = jax.random.split(probe_key, KEYS)
        estimates[k] = np.stack([evaluate(field, test, key, k) for key in keys])
        means = estimates[k].mean(axis=1)
        error = means.std(ddof=1) / np.sqrt(KEYS)
        print(f"  flow, {k} of 16 products   {means.mean():8.3f} ± {error:.3f}")
        assert abs(means.mean() - exact.mean()) < 5 * error
    assert exact.mean() > normal

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(losses)
    left.set(title="training", xlabel="update", ylabel="-log p, one product")
    left.set_ylim(top=float(losses[10]))
    right.axline((exact.mean(), exact.mean()), slope=1, color="grey", linewidth=1)
    for k, values in estimates.items():
        right.plot(exact, values[0], ".", markersize=3, label=f"{k} of 16 products")
    right.set(title="log-density", xlabel="exact", ylabel="estimated")
    right.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "continuous_normalising_flow.png")
