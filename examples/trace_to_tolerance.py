"""How many products does an accuracy need? A trace estimate that stops at a tolerance.

For softmax regression on scikit-learn's digits, the loss Hessian in the 640 weights is
semidefinite, and its trace has a closed form. We set tolerances of 1e-1, 3e-2 and 1e-2 for
Hutchinson's estimator and XNysTrace, and take the gradient with respect to a temperature. One
program serves all tolerances. We also draw the estimate against products. This curve resumes
from point to point, so it takes no product twice.

    python examples/trace_to_tolerance.py [figure.png]
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import traceax as tx

RTOLS = (1e-1, 3e-2, 1e-2)
MOST = 128  # products, at any tolerance
CURVE = (8, 24, 96)  # additional products for each point
TEMPERATURE = jnp.asarray(2.0)
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}


# --8<-- [start:operator]
def loss(weights, args):
    x, labels, temperature = args
    chosen = jax.nn.log_softmax(x @ weights / temperature)[jnp.arange(len(x)), labels]
    return -jnp.mean(chosen)


def hessian(weights, x, labels, temperature):
    """Semidefinite, since the loss is convex in the weights."""
    operator = tx.HessianLinearOperator(loss, weights, (x, labels, temperature))
    return lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)


# --8<-- [end:operator]


def exact_trace(temperature, weights, x):
    """The mean over images of `|x|^2 / T^2` times the summed class variances."""
    p = jax.nn.softmax(x @ weights / temperature)
    variances = jnp.sum(p * (1 - p), axis=1)
    return jnp.mean(jnp.sum(x**2, axis=1) * variances) / temperature**2


# --8<-- [start:tolerance]
@eqx.filter_jit
def stop_at(rtol, key, weights, x, labels, estimator):
    """An estimate to a tolerance, and its gradient with respect to the temperature."""

    def curvature(temperature):
        operator = hessian(weights, x, labels, temperature)
        estimate = tx.trace(key, operator, MOST, estimator, rtol=rtol, throw=False)
        return estimate.value, estimate

    gradient, estimate = jax.grad(curvature, has_aux=True)(TEMPERATURE)
    return estimate, gradient


# --8<-- [end:tolerance]


# --8<-- [start:curve]
def curve(key, operator, estimator):
    """Estimates from more and more products. Each one resumes from the previous state."""
    resume = eqx.filter_jit(estimator.estimate)
    state, estimates = estimator.init(key, operator), []
    for more in CURVE:
        estimates.append(resume(state, more))
        state = estimates[-1].state
    return estimates


# --8<-- [end:curve]


def half_width(estimate):
    low, high = estimate.confidence_interval()
    return (high - low) / 2


def main(path):
    x, labels = load_digits(return_X_y=True)
    fitted = LogisticRegression(fit_intercept=False).fit(x / 16, labels)
    x, weights = (jnp.asarray(z, jnp.float32) for z in (x / 16, fitted.coef_.T))
    key, labels = jax.random.key(0), jnp.asarray(labels)
    exact, slope = jax.value_and_grad(exact_trace)(TEMPERATURE, weights, x)
    operator = hessian(weights, x, labels, TEMPERATURE)

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    print(
        f"{'estimator':<11} {'rtol':>6} {'products':>9} {'trace':>8} {'error':>8}",
        end="",
    )
    print(f" {'gradient':>9}   (exact: {exact:.4f}, gradient {slope:.4f})")
    for axes, (name, estimator) in zip(panels, ESTIMATORS.items(), strict=True):
        for i, rtol in enumerate(RTOLS):
            # We pass rtol as an array, so that JAX compiles once for all tolerances.
            arguments = jnp.asarray(rtol), key, weights, x, labels, estimator
            estimate, gradient = stop_at(*arguments)
            products, value = estimate.stats["num_matvecs"], estimate.value
            met = bool(estimate.result == tx.RESULTS.successful)
            print(
                f"{name:<11} {rtol:>6.0e} {products:>9} {value:>8.4f} "
                f"{abs(value / exact - 1):>8.1e} {gradient:>9.4f}"
                f"{'' if met else '   tolerance not met'}"
            )
            half = half_width(estimate)
            assert met == (half <= rtol * value * (1 + 1e-5))
            assert abs(value - exact) <= 1.5 * half
            style = {"fmt": "o", "color": f"C{i + 1}", "capsize": 4}
            at, error, bar = products, value / exact - 1, half / exact
            axes.errorbar(at, error, bar, label=f"rtol = {rtol:g}", **style)
        estimates = curve(key, operator, estimator)
        values = np.array([estimate.value for estimate in estimates]) / exact - 1
        bars = np.array([half_width(estimate) for estimate in estimates]) / exact
        products = np.cumsum(CURVE)
        axes.fill_between(products, values - bars, values + bars, alpha=0.3)
        axes.plot(products, values, label="estimate, 95 %")
        axes.axhline(0, color="grey", linewidth=1)
        axes.set(title=name, xlabel="products", xscale="log")
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.legend(fontsize="small", loc="lower right")
    panels[0].set_ylabel("relative error")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "trace_to_tolerance.png")
