"""Traces of Hessians: of a network's loss, and of an implicitly defined function.

1. A small network learns to read digits. On the way the trace of the loss's Hessian is
   estimated, over all parameters and layer by layer; the operators act on PyTrees.
2. Ridge regression has a penalty for every feature, chosen on a validation set. The
   validation loss depends on the penalties through the solution of a linear system;
   its Hessian follows by implicit differentiation, and is only ever applied.

Every estimate is printed next to the exact value, which costs a product a parameter.

    python examples/hessian_trace.py [figure.png]
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, Key, PyTree
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes, load_digits

import traceax as tx

BUDGET = 60  # products with an operator, for every estimate


class Row(NamedTuple):
    """An estimate, and what it is an estimate of."""

    step: int
    part: str
    size: int
    estimate: tx.Estimate
    exact: float


# --8<-- [start:operator]
def hessian_operator(
    fn: Callable[[PyTree], Float[Array, ""]], at: PyTree, *, convex: bool = False
) -> lx.JacobianLinearOperator:
    """The Hessian of a scalar function of a PyTree, an operator on such PyTrees."""
    tag = lx.positive_semidefinite_tag if convex else lx.symmetric_tag
    return lx.JacobianLinearOperator(lambda x, _: jax.grad(fn)(x), at, tags=tag)


# --8<-- [end:operator]


#
# The Hessian of a network's loss
#


class Network(NamedTuple):
    """A network without its parameters, and the data that it is trained on."""

    static: eqx.nn.MLP
    x: Float[Array, "n 64"]
    labels: Int[Array, " n"]

    def loss(self, params: eqx.nn.MLP) -> Float[Array, ""]:
        logits = jax.vmap(eqx.combine(params, self.static))(self.x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, self.labels)
        return jnp.mean(losses)

    def layer_loss(self, params: eqx.nn.MLP, i: int) -> Callable:
        """The loss as a function of one layer, with the others as in `params`."""
        return lambda layer: self.loss(
            eqx.tree_at(lambda p: p.layers[i], params, layer)
        )


# --8<-- [start:network]
@eqx.filter_jit
def total_curvature(
    key: Key[Array, ""], params: eqx.nn.MLP, network: Network
) -> tx.Estimate:
    return tx.trace(key, hessian_operator(network.loss, params), BUDGET)


@eqx.filter_jit
def layer_curvature(
    key: Key[Array, ""], params: eqx.nn.MLP, network: Network, i: int
) -> tx.Estimate:
    # Cross-entropy is convex in the logits, and these are linear in the last layer.
    convex = i == len(params.layers) - 1
    loss = network.layer_loss(params, i)
    operator = hessian_operator(loss, params.layers[i], convex=convex)
    return tx.trace(key, operator, BUDGET)


# --8<-- [end:network]


@eqx.filter_jit
def exact_curvatures(params: eqx.nn.MLP, network: Network) -> list[Float[Array, ""]]:
    """Of every layer, from the products with all coordinate vectors."""

    def trace(loss: Callable, layer: eqx.nn.Linear) -> Float[Array, ""]:
        flat, unravel = ravel_pytree(layer)
        gradient = jax.grad(lambda x: loss(unravel(x)))

        def entry(i: Int[Array, ""]) -> Float[Array, ""]:
            coordinate = jnp.zeros_like(flat).at[i].set(1)
            return jax.jvp(gradient, (flat,), (coordinate,))[1][i]

        return jnp.sum(jax.lax.map(entry, jnp.arange(flat.size), batch_size=64))

    return [
        trace(network.layer_loss(params, i), layer)
        for i, layer in enumerate(params.layers)
    ]


def train(
    params: eqx.nn.MLP, network: Network, checkpoints: list[int]
) -> list[eqx.nn.MLP]:
    """The parameters after so many steps of Adam, each on all of the data."""
    optimiser = optax.adam(1e-2)

    @eqx.filter_jit
    def step(params, state, network):
        gradient = jax.grad(network.loss)(params)
        updates, state = optimiser.update(gradient, state)
        return eqx.apply_updates(params, updates), state

    state = optimiser.init(eqx.filter(params, eqx.is_array))
    kept = []
    for i in range(checkpoints[-1] + 1):
        if i in checkpoints:
            kept.append(params)
        params, state = step(params, state, network)
    return kept


def network_rows(key: Key[Array, ""], checkpoints: list[int]) -> list[Row]:
    x, labels = load_digits(return_X_y=True)
    model_key, key = jax.random.split(key)
    model = eqx.nn.MLP(64, 10, 16, 2, activation=jnp.tanh, key=model_key)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    network = Network(static, jnp.asarray(x / 16, jnp.float32), jnp.asarray(labels))
    rows = []
    for step, at in zip(checkpoints, train(params, network, checkpoints), strict=True):
        keys = jax.random.split(jax.random.fold_in(key, step), 1 + len(at.layers))
        exact = [float(value) for value in exact_curvatures(at, network)]
        # Layers are blocks on the diagonal: their traces add up to that of the whole.
        total = total_curvature(keys[0], at, network)
        rows.append(Row(step, "all", num_parameters(at), total, sum(exact)))
        for i, layer in enumerate(at.layers):
            estimate = layer_curvature(keys[i + 1], at, network, i)
            part = f"layer {i + 1}"
            rows.append(Row(step, part, num_parameters(layer), estimate, exact[i]))
    return rows


def num_parameters(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


#
# The Hessian of an implicitly defined function
#


class Regression(NamedTuple):
    """Features and targets, to fit the weights and to choose the penalties."""

    x: Float[Array, "n d"]
    y: Float[Array, " n"]
    x_validation: Float[Array, "m d"]
    y_validation: Float[Array, " m"]


def diabetes_regression() -> Regression:
    """All products of up to three of the ten measurements: 285 standard features."""
    measurements, target = load_diabetes(return_X_y=True)
    x = standardise(measurements)
    monomials = [
        x[:, list(chosen)].prod(axis=1)
        for degree in (1, 2, 3)
        for chosen in itertools.combinations_with_replacement(range(10), degree)
    ]
    x, y = standardise(np.stack(monomials, axis=1)), standardise(target)
    order = np.random.default_rng(0).permutation(len(y))
    fit, validation = np.array_split(order, 2)
    parts = (x[fit], y[fit], x[validation], y[validation])
    return Regression(*(jnp.asarray(part, jnp.float32) for part in parts))


def standardise(x: Any) -> np.ndarray:
    return (x - x.mean(axis=0)) / x.std(axis=0)


# --8<-- [start:implicit]
def validation_loss(
    log_penalties: Float[Array, " d"], data: Regression
) -> Float[Array, ""]:
    """The error, on the validation set, of the weights w that minimise

    mean (x w - y)^2 + sum_j exp(log_penalties_j) w_j^2 .
    """
    n = len(data.y)
    normal_matrix = data.x.T @ data.x / n + jnp.diag(jnp.exp(log_penalties))
    normal_operator = lx.MatrixLinearOperator(
        normal_matrix, lx.positive_semidefinite_tag
    )
    weights = lx.linear_solve(normal_operator, data.x.T @ data.y / n, lx.Cholesky())
    return jnp.mean((data.x_validation @ weights.value - data.y_validation) ** 2)


@jax.jit
def implicit_curvature(
    key: Key[Array, ""], log_penalties: Float[Array, " d"], data: Regression
) -> tx.Estimate:
    operator = hessian_operator(lambda p: validation_loss(p, data), log_penalties)
    return tx.trace(key, operator, BUDGET)


# --8<-- [end:implicit]


@jax.jit
def exact_implicit_curvature(
    log_penalties: Float[Array, " d"], data: Regression
) -> Float[Array, ""]:
    """From the dense Hessian, through a dense solve without implicit derivatives."""

    def loss(log_penalties: Float[Array, " d"]) -> Float[Array, ""]:
        n = len(data.y)
        matrix = data.x.T @ data.x / n + jnp.diag(jnp.exp(log_penalties))
        weights = jnp.linalg.solve(matrix, data.x.T @ data.y / n)
        return jnp.mean((data.x_validation @ weights - data.y_validation) ** 2)

    return jnp.trace(jax.hessian(loss)(log_penalties))


def choose_penalties(
    log_penalties: Float[Array, " d"], data: Regression, checkpoints: list[int]
) -> list[Float[Array, " d"]]:
    """The penalties after so many steps of Adam on the validation loss."""
    optimiser = optax.adam(0.1)

    @jax.jit
    def step(log_penalties, state):
        gradient = jax.grad(validation_loss)(log_penalties, data)
        updates, state = optimiser.update(gradient, state)
        return eqx.apply_updates(log_penalties, updates), state

    state = optimiser.init(log_penalties)
    kept = []
    for i in range(checkpoints[-1] + 1):
        if i in checkpoints:
            kept.append(log_penalties)
        log_penalties, state = step(log_penalties, state)
    return kept


def implicit_rows(key: Key[Array, ""], checkpoints: list[int]) -> list[Row]:
    data = diabetes_regression()
    d = data.x.shape[1]
    start = jnp.full(d, jnp.log(0.1), data.x.dtype)
    rows = []
    for step, at in zip(
        checkpoints, choose_penalties(start, data, checkpoints), strict=True
    ):
        estimate = implicit_curvature(jax.random.fold_in(key, step), at, data)
        exact = float(exact_implicit_curvature(at, data))
        rows.append(Row(step, "penalties", d, estimate, exact))
    return rows


#
# What is shown
#


def print_table(title: str, rows: list[Row]) -> None:
    print(f"{title}\n")
    print(
        f"{'step':>4}  {'part':<9} {'size':>5} {'estimate':>10}   {'s.e.':<9}"
        f"{'exact':>9} {'off by':>11}  {'products':>8}  estimator"
    )
    reasons = set()
    previous = None
    for row in rows:
        estimate = row.estimate
        reason = tx.CHOICES[estimate.stats["choice"]]
        reasons.add(reason)
        error = float(estimate.standard_error)
        off = (float(estimate.value) - row.exact) / error
        if previous not in (None, row.step) and row.part == "all":
            print()
        previous = row.step
        print(
            f"{row.step:>4}  {row.part:<9} {row.size:>5} {estimate.value:>10.5f} ± "
            f"{error:<9.5f}{row.exact:>9.5f} {off:>+6.1f} s.e.  "
            f"{estimate.stats['num_matvecs']:>8}  {reason.split(':')[0]}"
        )
    held = sum(interval_holds(row) for row in rows)
    print(f"\n{held} of {len(rows)} intervals of 95 % hold the exact value.")
    print("\n".join(sorted(reasons)) + "\n")


def interval_holds(row: Row) -> bool:
    low, high = row.estimate.confidence_interval()
    return bool(low <= row.exact <= high)


def plot(axes: tuple[Axes, Axes], rows: list[Row], title: str) -> None:
    """Above the traces, below what the estimates are off by, in percent."""
    above, below = axes
    steps = sorted({row.step for row in rows})
    parts = list(dict.fromkeys(row.part for row in rows))
    for j, part in enumerate(parts):
        chosen = [row for row in rows if row.part == part]
        exact = np.array([row.exact for row in chosen])
        value = np.array([row.estimate.value for row in chosen])
        low, high = np.array([row.estimate.confidence_interval() for row in chosen]).T
        bars = np.stack([value - low, high - value])
        position = np.arange(len(steps)) + 0.14 * (j - (len(parts) - 1) / 2)
        style = {"fmt": "o", "color": f"C{j}", "markersize": 4, "capsize": 3}
        above.plot(position, exact, color=f"C{j}", alpha=0.5, linewidth=1)
        above.errorbar(position, value, bars, label=part, **style)
        percent = 100 / exact
        below.errorbar(position, (value - exact) * percent, bars * percent, **style)
    above.set_title(title)
    above.set_ylabel("trace of the Hessian")
    above.plot([], [], color="grey", linewidth=1, label="exact")
    above.legend(fontsize="small")
    below.axhline(0, color="grey", linewidth=1)
    below.set_ylabel("estimate - exact, % of exact\n(95 % intervals)")
    below.set_xlabel("optimisation step")
    below.set_xticks(range(len(steps)), [str(step) for step in steps])


def save_figure(path: str, network: list[Row], implicit: list[Row]) -> None:
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", height_ratios=(3, 2))
    figure.suptitle(f"Traces of Hessians, estimated from {BUDGET} products each")
    plot((axes[0, 0], axes[1, 0]), network, "loss of a network")
    plot((axes[0, 1], axes[1, 1]), implicit, "validation loss, through the fit")
    axes[0, 0].set_yscale("log")
    axes[1, 0].set_yscale("symlog", linthresh=5)
    axes[1, 0].set_yticks([-50, -5, 0, 5, 50])
    axes[1, 0].yaxis.set_major_formatter("{x:.0f}")
    axes[1, 0].set_ylim(-70, 70)
    axes[0, 1].set_ylim(bottom=0)
    figure.savefig(path, dpi=150)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "hessian_trace.png"
    network_key, implicit_key = jax.random.split(jax.random.key(0))
    network = network_rows(network_key, [0, 5, 20, 80, 300])
    print_table("Hessian of a network's loss", network)
    implicit = implicit_rows(implicit_key, [0, 10, 30, 80, 160])
    print_table("Hessian of a validation loss, through the fitted weights", implicit)
    save_figure(path, network, implicit)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
