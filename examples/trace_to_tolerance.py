"""How many products does an accuracy take? A trace to a tolerance, whatever it takes.

Softmax regression on scikit-learn's digits: the Hessian of its loss in the 640 weights is
semidefinite, and only ever applied, by automatic differentiation. Its trace has a closed
form, which everything is compared with.

1. Hutchinson's estimator and XNysTrace are asked for tolerances of 1e-1, 3e-2 and 1e-2.
   One program serves all.
2. The gradient with respect to a temperature, of estimates that stop at a tolerance.
3. The estimate against products: each point of the curve goes on from the one before, so
   that no product is taken twice.

    python examples/trace_to_tolerance.py [figure.png]
"""

import itertools
import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import traceax as tx

RTOLS = (1e-1, 3e-2, 1e-2)
MOST = 128  # products, for whatever tolerance
CURVE = (8, 24, 96)  # each of so many more products
TEMPERATURE = 2.0
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}


class Model(NamedTuple):
    x: Float[Array, "images pixels"]
    labels: Int[Array, " images"]
    weights: Float[Array, "pixels classes"]


def fitted() -> Model:
    x, labels = load_digits(return_X_y=True)
    x = x / 16
    weights = LogisticRegression(fit_intercept=False).fit(x, labels).coef_.T
    x, weights = (jnp.asarray(array, jnp.float32) for array in (x, weights))
    return Model(x, jnp.asarray(labels), weights)


# --8<-- [start:operator]
def hessian(temperature: ArrayLike, model: Model) -> lx.JacobianLinearOperator:
    """Of the mean loss as a function of the weights. It is convex."""

    def loss(weights):
        logits = model.x @ weights / temperature
        chosen = model.labels[:, None]
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=1)
        )

    return lx.JacobianLinearOperator(
        lambda weights, _: jax.grad(loss)(weights),
        model.weights,
        tags=lx.positive_semidefinite_tag,
    )


# --8<-- [end:operator]


def exact_trace(temperature: ArrayLike, model: Model) -> Float[Array, ""]:
    """A mean over images: of squared lengths, times the variances of the classes."""
    p = jax.nn.softmax(model.x @ model.weights / temperature)
    variances = jnp.sum(p * (1 - p), axis=1)
    return jnp.mean(jnp.sum(model.x**2, axis=1) * variances) / temperature**2


class Truth(NamedTuple):
    value: Float[Array, ""]
    gradient: Float[Array, ""]


class Stop(NamedTuple):
    """An estimate to a tolerance, and its gradient."""

    rtol: float
    estimate: tx.Estimate
    gradient: Float[Array, ""]

    @property
    def products(self) -> int:
        return int(self.estimate.stats["num_matvecs"])

    @property
    def met(self) -> bool:
        return bool(self.estimate.result == tx.RESULTS.successful)


def stops(
    key: Key[Array, ""], model: Model, estimator: tx.TraceEstimator
) -> list[Stop]:
    """One for each tolerance, by one program."""
    traced = []

    # --8<-- [start:tolerance]
    @jax.jit
    def run(temperature, model, rtol):
        traced.append(estimator)  # whenever this function is compiled

        def curvature(temperature):
            operator = hessian(temperature, model)
            estimate = tx.trace(key, operator, MOST, estimator, rtol=rtol, throw=False)
            return estimate.value, estimate

        gradient, estimate = jax.grad(curvature, has_aux=True)(temperature)
        return estimate, gradient

    # --8<-- [end:tolerance]
    found = [Stop(rtol, *run(TEMPERATURE, model, rtol)) for rtol in RTOLS]
    assert len(traced) == 1
    return found


# --8<-- [start:curve]
def curve(
    key: Key[Array, ""], model: Model, estimator: tx.TraceEstimator
) -> list[tx.Estimate]:
    """Of more and more products, each estimate from the state of the one before."""
    go_on = eqx.filter_jit(estimator.estimate)
    state, estimates = estimator.init(key, hessian(TEMPERATURE, model)), []
    for more in CURVE:
        estimates.append(go_on(state, more))
        state = estimates[-1].state
    return estimates


# --8<-- [end:curve]


def half_width(estimate: tx.Estimate) -> Float[Array, ""]:
    low, high = estimate.confidence_interval()
    return (high - low) / 2


def print_table(found: dict[str, list[Stop]], exact: Truth) -> None:
    print(
        f"{'estimator':<11} {'asked':>7} {'products':>9} {'trace of the Hessian':>20}"
    )
    print(f"{'':<11} {'':>7} {'':>9} {'estimate':>10} {'error':>9} {'gradient':>10}")
    for name, of_estimator in found.items():
        for stop in of_estimator:
            error = abs(stop.estimate.value / exact.value - 1)
            print(
                f"{name:<11} {stop.rtol:>7.0e} {stop.products:>9} "
                f"{stop.estimate.value:>10.4f} {error:>9.1e} {stop.gradient:>10.4f}"
                f"{'' if stop.met else '  tolerance not met'}"
            )
    print(f"{'closed form':<28} {exact.value:>11.4f} {'':>9} {exact.gradient:>10.4f}")


def plot(
    axes: Axes, name: str, of: list[Stop], curve: list[tx.Estimate], exact: Truth
) -> None:
    products = np.cumsum(CURVE)
    values = np.array([estimate.value for estimate in curve]) / exact.value - 1
    half = np.array([half_width(estimate) for estimate in curve]) / exact.value
    axes.fill_between(products, values - half, values + half, alpha=0.3, label="95 %")
    axes.plot(products, values, label="estimate")
    axes.axhline(0, color="grey", linewidth=1, label="closed form")
    for i, stop in enumerate(stop for stop in of if stop.met):
        axes.errorbar(
            stop.products,
            stop.estimate.value / exact.value - 1,
            half_width(stop.estimate) / exact.value,
            fmt="o",
            color=f"C{i + 1}",
            capsize=4,
            label=f"rtol = {stop.rtol:g}",
        )
    axes.set(title=name, xlabel="products", ylabel="relative error", xscale="log")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.legend(fontsize="small", loc="lower right")


def check(stop: Stop, exact: Truth) -> None:
    """A tolerance is met or reported, and errors are what the intervals say."""
    value, half = stop.estimate.value, half_width(stop.estimate)
    assert stop.met == bool(half <= stop.rtol * value * (1 + 1e-5))
    assert stop.met or stop.products == MOST
    # One interval of 95 % in twenty doesn't hold the truth, but hardly misses it.
    assert abs(value - exact.value) <= 1.5 * half
    assert abs(stop.gradient / exact.gradient - 1) <= 3 * half / value


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "trace_to_tolerance.png"
    model, key = fitted(), jax.random.key(0)
    exact = Truth(*jax.value_and_grad(exact_trace)(TEMPERATURE, model))
    found = {name: stops(key, model, of) for name, of in ESTIMATORS.items()}
    print_table(found, exact)
    curves = {name: curve(key, model, of) for name, of in ESTIMATORS.items()}

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), found, strict=True):
        plot(axes, name, found[name], curves[name], exact)
    figure.savefig(path, dpi=150)
    print(f"\nsaved {path}")

    for stop in itertools.chain(*found.values()):
        check(stop, exact)
    # The same tolerance takes fewer products of those that know more.
    first = [of[0].products for of in found.values()]
    assert first == sorted(first, reverse=True)
    assert [stop.met for stop in found["XNysTrace"]] == [True, True, True]
    assert not found["Hutchinson"][-1].met
    # In the end the curve is at the estimate that took all products.
    assert np.isclose(
        curves["Hutchinson"][-1].value, found["Hutchinson"][-1].estimate.value
    )


if __name__ == "__main__":
    main()
