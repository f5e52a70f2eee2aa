"""The trace of an implicitly defined function's Hessian.

Ridge regression on scikit-learn's diabetes data has 285 features with one penalty each. We
choose the penalties on a validation set. The validation loss depends on the penalties through
the solution of a linear system. lineax differentiates the solution implicitly, so we apply the
Hessian without unrolling a solver. We print estimates next to exact traces.

    python examples/implicit_hessian.py [figure.png]
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes

import traceax as tx

BUDGET = 60  # products with the Hessian
CHECKPOINTS = (0, 10, 30, 80, 160)  # optimiser steps


# --8<-- [start:loss]
def validation_loss(log_penalties, data):
    """The validation error of the weights w that minimise

    mean (x w - y)^2 + sum_j exp(log_penalties_j) w_j^2 .
    """
    x, y, x_validation, y_validation = data
    matrix = x.T @ x / len(y) + jnp.diag(jnp.exp(log_penalties))
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    weights = lx.linear_solve(operator, x.T @ y / len(y), lx.Cholesky()).value
    return jnp.mean((x_validation @ weights - y_validation) ** 2)


# --8<-- [end:loss]


# --8<-- [start:curvature]
@jax.jit
def curvature(key, log_penalties, data):
    hessian = tx.HessianLinearOperator(validation_loss, log_penalties, data)
    return tx.trace(key, hessian, BUDGET)


# --8<-- [end:curvature]


@jax.jit
def exact_curvature(log_penalties, data):
    return jnp.trace(jax.hessian(validation_loss)(log_penalties, data))


def choose(log_penalties, data):
    """The penalties at every checkpoint, while Adam minimises the validation loss."""
    optimiser = optax.adam(0.1)

    @jax.jit
    def update(log_penalties, state):
        gradient = jax.grad(validation_loss)(log_penalties, data)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(log_penalties, updates), state

    state, checkpoints = optimiser.init(log_penalties), []
    for step in range(CHECKPOINTS[-1] + 1):
        if step in CHECKPOINTS:
            checkpoints.append(log_penalties)
        log_penalties, state = update(log_penalties, state)
    return checkpoints


def diabetes():
    """Features and targets in two halves.

    The features are all products of up to three among the ten measurements.
    """
    measurements, target = load_diabetes(return_X_y=True)
    columns = standardise(measurements).T
    monomials = [
        np.prod(chosen, axis=0)
        for degree in (1, 2, 3)
        for chosen in itertools.combinations_with_replacement(columns, degree)
    ]
    x, y = standardise(np.stack(monomials, axis=1)), standardise(target)
    order = np.random.default_rng(0).permutation(len(y))
    parts = [part[half] for half in np.array_split(order, 2) for part in (x, y)]
    return tuple(jnp.asarray(part, jnp.float32) for part in parts)


def standardise(x):
    return (x - x.mean(axis=0)) / x.std(axis=0)


def main(path):
    data = diabetes()
    start = jnp.full(data[0].shape[1], jnp.log(0.1), jnp.float32)
    keys = jax.random.split(jax.random.key(0), len(CHECKPOINTS))
    rows = []
    print(f"step {'loss':>8} {'trace':>10}   {'error':<9} {'exact':>8}")
    for step, key, at in zip(CHECKPOINTS, keys, choose(start, data), strict=True):
        estimate, exact = curvature(key, at, data), exact_curvature(at, data)
        value, error = estimate.value, estimate.standard_error
        loss = validation_loss(at, data)
        print(f"{step:>4} {loss:>8.4f} {value:>10.5f} ± {error:<9.5f} {exact:>8.5f}")
        assert abs(value - exact) < 5 * error
        rows.append((value, *estimate.confidence_interval(), exact))

    value, low, high, exact = np.array(rows).T
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(CHECKPOINTS))
    axes.plot(places, exact, color="grey", label="exact")
    bars = (value - low, high - value)
    label = f"{BUDGET} products, 95 % interval"
    axes.errorbar(places, value, bars, fmt="o", capsize=3, label=label)
    axes.set_xticks(places, [str(step) for step in CHECKPOINTS])
    axes.set(xlabel="step", ylabel="Hessian trace", ylim=(0, None))
    axes.set_title("validation loss, during the fit")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "implicit_hessian.png")
