"""Follow the trace of a Hessian through training, each step helped by those before.

A network with one hidden layer learns to read scikit-learn's digits. After each of 50 steps
the trace of its Hessian is estimated: from scratch, by XTrace, with 20 and with 40 products
a step; and by `DeltaShiftEstimator` with 20, in one `jax.lax.scan`. `refresh` hands the state
of an estimate to the next step, which then needs half of the products for the same error.

    python examples/track_hessian_through_training.py [figure.png]
"""

import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import traceax as tx

PRODUCTS, STEPS, REPEATS = 20, 50, 3
IMAGES, HIDDEN = 500, 8

digits = load_digits()
images = jnp.asarray(digits.data[:IMAGES] / 16, jnp.float32)
labels = jnp.asarray(digits.target[:IMAGES])


def loss(parameters):
    hidden = jnp.tanh(images @ parameters["w"] + parameters["b"])
    logits = hidden @ parameters["v"] + parameters["c"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def hessian(parameters):
    return tx.HessianLinearOperator(loss, parameters)


@jax.jit
def exact_trace(parameters):
    return jnp.trace(hessian(parameters).as_matrix())


optimiser = optax.adam(1e-2)


@jax.jit
def train(parameters, state):
    updates, state = optimiser.update(jax.grad(loss)(parameters), state)
    return optax.apply_updates(parameters, updates), state


def path_of_training():
    """The parameters after each step."""
    w_key, v_key = jax.random.split(jax.random.key(0))
    parameters = {
        "w": jax.random.normal(w_key, (64, HIDDEN)) / 8,
        "b": jnp.zeros(HIDDEN),
        "v": jax.random.normal(v_key, (HIDDEN, 10)) / HIDDEN**0.5,
        "c": jnp.zeros(10),
    }
    state, found = optimiser.init(parameters), []
    for _ in range(STEPS):
        parameters, state = train(parameters, state)
        found.append(parameters)
    return found


@eqx.filter_jit
def estimate_alone(key, parameters, k):
    return tx.trace(key, hessian(parameters), k, tx.XTraceEstimator()).value


def from_scratch(key, path, k):
    """The value after each step, by XTrace."""
    keys = jax.random.split(key, len(path))
    return [estimate_alone(*given, k) for given in zip(keys, path, strict=True)]


def without_operator(state):
    """What a loop carries: the operator is new in each step."""
    return eqx.tree_at(lambda state: state.operator, state, None)


@partial(jax.jit, static_argnums=2)
def tracked(key, path, k):
    """The value and the interval after each step, from the state of the one before."""
    estimator = tx.DeltaShiftEstimator()

    def step(past, given):
        key, parameters = given
        state = estimator.refresh(past, key, hessian(parameters))
        estimate = estimator.estimate(state, k, throw=False)
        found = estimate.value, estimate.confidence_interval()
        return without_operator(estimate.state), found

    start = jax.tree.map(lambda x: x[0], path)
    state = without_operator(estimator.init(key, hessian(start), k))
    return jax.lax.scan(step, state, (jax.random.split(key, STEPS), path))[1]


def main(figure_path):
    path = path_of_training()
    truth = np.asarray([exact_trace(parameters) for parameters in path])
    keys = jax.random.split(jax.random.key(1), REPEATS)
    print(f"{STEPS} steps, {REPEATS} runs, root mean square error of the trace")

    def report(name, runs):
        errors = np.asarray(runs) - truth
        relative = (errors / truth) ** 2
        all_steps, later = (np.sqrt(np.mean(relative[:, s:])) for s in (0, STEPS // 2))
        print(f"{name:26s} {100 * all_steps:.2f} %, second half {100 * later:.2f} %")
        return later

    errors, scratch = {}, {}
    for k in (PRODUCTS, 2 * PRODUCTS):
        scratch[k] = [from_scratch(key, path, k) for key in keys]
        errors[k] = report(f"from scratch, {k} products", scratch[k])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *path)
    runs = [jax.tree.map(np.asarray, tracked(key, stacked, PRODUCTS)) for key in keys]
    error = report(f"tracked, {PRODUCTS} products", [values for values, _ in runs])
    assert error < errors[2 * PRODUCTS], "tracking saves half of the products"

    intervals = np.stack([np.stack(interval, axis=-1) for _, interval in runs])
    inside = (intervals[..., 0] <= truth) & (truth <= intervals[..., 1])
    print(f"95 % intervals that hold the truth: {100 * inside.mean():.0f} %")
    # Errors of neighbouring steps are alike, so there are few independent ones.
    assert inside.mean() > 0.85

    steps = np.arange(1, STEPS + 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, scratch[PRODUCTS][0], ".", color="0.6", label="from scratch")
    axes.fill_between(steps, *intervals[0].T, alpha=0.3, label="tracked, 95 % interval")
    axes.plot(steps, runs[0][0], color="C0", label="tracked")
    axes.plot(steps, truth, "k--", linewidth=1, label="exact")
    axes.set(xlabel="step of training", ylabel="trace of the Hessian")
    axes.set_title(f"{PRODUCTS} products with the Hessian a step")
    axes.legend()
    figure.savefig(figure_path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "track_hessian_through_training.png")
