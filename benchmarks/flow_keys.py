"""Train a flow with one key for all steps, or with new keys in each step.

    python benchmarks/flow_keys.py  # the table of docs/jobs/normalising-flows.md

A flow in six dimensions learns a mixture of normal distributions, with two products at each ODE
solver stage. We then estimate log densities at 1,000 other points with the last step's keys,
and compute them exactly from six products.
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
    """Points from a mixture of eight normal distributions."""
    which, noise = jax.random.split(key)
    centres = jax.random.normal(jax.random.key(0), (8, DIMENSION))
    chosen = centres[jax.random.randint(which, (number,), 0, 8)]
    return chosen + 0.5 * jax.random.normal(noise, chosen.shape)


def log_density(network, x, key, k):
    """The log density at `x`, and the integral of the divergence's standard error."""

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
    one_key, new_keys = jnp.broadcast_to(key, shape), jax.random.split(key, shape)
    test = draw(jax.random.key(3), 1000)
    for name, keys in ("one key", one_key), ("new keys", new_keys):
        network, test_keys = train(start, keys), jnp.resize(keys[-1], 1000)
        value, bar = run(network, test, test_keys, PRODUCTS)
        exact, _ = run(network, test, test_keys, DIMENSION)
        percent_off = 100 * jnp.mean(abs(value - exact) > 2 * bar)
        means = f"{jnp.mean(value):.2f} estimated, {jnp.mean(exact):.2f} exact"
        print(f"{name}: log density {means}, {percent_off:.0f} % off by over two bars")
