"""The trace of a network's Hessian, as a whole and by layer, during training.

A network with 1,482 parameters learns to read scikit-learn's digits. At five checkpoints we
estimate the trace of its loss Hessian from 120 products, in two ways: with probes of the whole
network, and leaf by leaf, with probes on one leaf at a time. We print estimates with their 95 %
intervals next to exact traces, which take one product per parameter, and count how many of 40 keys
give an interval that contains the exact trace.

    python examples/hessian_trace.py [figure.png]
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import traceax as tx

BUDGET = 120  # products with the Hessian
CHECKPOINTS = (0, 5, 20, 80, 300)  # training steps
KEYS = 40


# --8<-- [start:loss]
def loss(model, batch):
    images, labels = batch
    logits = jax.vmap(model)(images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


# --8<-- [end:loss]


# --8<-- [start:whole]
@eqx.filter_jit
def curvature(key, model, batch):
    hessian = tx.HessianLinearOperator(loss, model, batch)
    return tx.trace(key, hessian, BUDGET)


# --8<-- [end:whole]


# --8<-- [start:layers]
@eqx.filter_jit
def curvature_by_layer(key, model, batch):
    hessian = tx.HessianLinearOperator(loss, model, batch)
    return tx.leaf_traces(key, hessian, BUDGET, probes="blocks")


# --8<-- [end:layers]


@eqx.filter_jit
def exact_curvature_by_layer(model, batch):
    hessian = tx.HessianLinearOperator(loss, model, batch)
    return tx.leaf_traces(jax.random.key(0), hessian, hessian.in_size())[0].value


def train(model, batch):
    """The model at every checkpoint of training with Adam on all data."""
    optimiser = optax.adam(1e-2)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, state):
        updates, state = optimiser.update(eqx.filter_grad(loss)(model, batch), state)
        return eqx.apply_updates(model, updates), state

    models = []
    for step in range(CHECKPOINTS[-1] + 1):
        if step in CHECKPOINTS:
            models.append(model)
        model, state = update(model, state)
    return models


@eqx.filter_jit
def count_intervals(keys, model, batch, exact):
    """How many keys give an interval that contains the exact trace."""

    def contains(key):
        low, high = curvature(key, model, batch).confidence_interval()
        return (low <= exact) & (exact <= high)

    return jnp.sum(jax.lax.map(contains, keys))


def show(step, name, estimate, exact):
    low, high = estimate.confidence_interval()
    interval = f"{low:.4f} to {high:.4f}"
    print(f"{step:>4}  {name:<14} {estimate.value:>9.4f}  {interval:<20} {exact:>9.4f}")


def main(path):
    images, labels = load_digits(return_X_y=True)
    batch = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    model = eqx.nn.MLP(64, 10, 16, 2, jnp.tanh, key=jax.random.key(0))
    key = jax.random.key(1)

    pairs, truths = [], []
    print(f"step  {'part':<14} {'estimate':>9}  {'95 % interval':<20} {'exact':>9}")
    for step, at in zip(CHECKPOINTS, train(model, batch), strict=True):
        whole = curvature(key, at, batch)
        by_layer, total = curvature_by_layer(key, at, batch)
        exact = jax.tree.leaves(exact_curvature_by_layer(at, batch))
        estimates = {"whole": whole, "sum of layers": total}
        for name, estimate in estimates.items():
            show(step, name, estimate, sum(exact))
            assert abs(estimate.value - sum(exact)) < 5 * estimate.standard_error
        if step == 0:
            keys = jax.random.split(key, KEYS)
            contained = count_intervals(keys, at, batch, sum(exact))
        pairs.append((whole, total))
        truths.append(sum(exact))
        if step == CHECKPOINTS[-1]:
            last_leaves = by_layer, exact

    print(
        f"At step 0, {contained} of {KEYS} keys give an interval with the exact trace."
    )

    by_layer, exact = last_leaves
    paths = jax.tree_util.tree_leaves_with_path(by_layer.value)
    errors = jax.tree.leaves(by_layer.standard_error)
    print()
    for (leaf_path, value), error, truth in zip(paths, errors, exact, strict=True):
        name = jax.tree_util.keystr(leaf_path)
        print(f"{name:<20} {value:>10.4f} ± {error:<8.4f} {truth:>10.4f}")

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    truths = np.asarray(truths)
    places = np.arange(len(CHECKPOINTS))
    names = ("probes of the whole", "probes on one leaf at a time")
    for i, name in enumerate(names):
        estimates = [pair[i] for pair in pairs]
        deviations = np.array([estimate.value for estimate in estimates]) / truths - 1
        ends = np.array([estimate.confidence_interval() for estimate in estimates]).T
        half = (ends[1] - ends[0]) / 2 / truths
        at = places + 0.15 * i
        axes.errorbar(at, 100 * deviations, 100 * half, fmt="o", capsize=3, label=name)
    axes.axhline(0, color="grey", linewidth=1, label="exact")
    axes.set_xticks(places, [str(step) for step in CHECKPOINTS])
    axes.set(xlabel="step of training", ylabel="error and 95 % interval, %")
    axes.set_title(f"Hessian trace, {BUDGET} products")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "hessian_trace.png")
