"""One key for all steps of training a flow, or new keys in each step.

    python benchmarks/flow_keys.py  # the table of docs/jobs/normalising-flows.md

A flow in six dimensions learns a mixture of normal distributions from two products at each
stage of the ODE solver. Log densities of 1,000 other points are then estimated with the keys
of the last step, and computed exactly from six products.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.scipy.stats import norm

import traceax as tx

DIMENSION, PRODUCTS, UPDATES, BATCH, STEPS = 6, 2, 100, 128, 8


def draw(key, number):
    """Points from eight normal distributions."""
    which, noise = jax.random.split(key)
    centres = jax.random.normal(jax.random.key(0), (8, DIMENSION))
    chosen = centres[jax.random.randint(which, (number,), 0, 8)]
    return chosen + 0.5 * jax.random.normal(noise, chosen.shape)


def log_density(network, x, key, k):
    """The log density of `x`, and the integral of the divergence's standard error."""

    def rates(t, state, args):
        velocity, divergence = tx.divergence(
            key, lambda x: network(jnp.append(x, t)), state[0], k
        )
        return velocity, divergence.value, divergence.standard_error

    term, start = diffrax.ODETerm(rates), (x, jnp.zeros(()), jnp.zeros(()))
    solution = diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 1.0, 1 / STEPS, start)
    end, log_volume, bar = (saved[-1] for saved in solution.ys)
    return jnp.sum(norm.logpdf(end)) + log_volume, bar


run = eqx.filter_jit(eqx.filter_vmap(log_density, in_axes=(None, 0, 0, None)))


@eqx.filter_jit
def train(network, keys):
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-3, UPDATES))
    params, static = eqx.partition(network, eqx.is_array)

    def loss(params, xs, keys):
        return -jnp.mean(run(eqx.combine(params, static), xs, keys, PRODUCTS)[0])

    def update(carry, step):
        params, state = carry
        gradient = jax.grad(loss)(params, draw(step[0], BATCH), step[1])
        change, state = optimiser.update(gradient, state)
        return (eqx.apply_updates(params, change), state), None

    steps = jax.random.split(jax.random.key(1), UPDATES), keys
    carry, _ = jax.lax.scan(update, (params, optimiser.init(params)), steps)
    return eqx.combine(carry[0], static)


if __name__ == "__main__":
    sizes, key = (DIMENSION + 1, DIMENSION, 64, 2), jax.random.key(2)
    start, shape = eqx.nn.MLP(*sizes, jax.nn.swish, key=key), (UPDATES, BATCH)
    one, new = jnp.broadcast_to(key, shape), jax.random.split(key, shape)
    test = draw(jax.random.key(3), 1000)
    for way, keys in ("one key", one), ("new keys", new):
        network, own = train(start, keys), jnp.resize(keys[-1], 1000)
        value, bar = run(network, test, own, PRODUCTS)
        exact, _ = run(network, test, own, DIMENSION)
        off = 100 * jnp.mean(abs(value - exact) > 2 * bar)
        means = f"{jnp.mean(value):.2f} by its own keys, {jnp.mean(exact):.2f} exactly"
        print(f"{way}: log density {means}, {off:.0f} % off by two bars")
