"""How many products does an accuracy take? A trace to a tolerance, whatever it takes.

Kernel ridge regression on 600 of scikit-learn's digits maps targets y to fitted values
S y, with S = K (K + penalty)^-1, a semidefinite operator of which every product is a solve
by conjugate gradients. The trace of S is the degrees of freedom of the fit, as in the
cross-validation of smoothing splines that Hutchinson invented his estimator for.

1. Each estimator is asked for tolerances of 1e-1, 1e-2 and 1e-3. One program serves all.
2. The gradient with respect to the penalty, of estimates that stop at a tolerance.
3. The estimate against products: each point of the curve goes on from the one before, so
   that no product is taken twice.

Everything is compared with the eigenvalues.

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
from jaxtyping import Array, ArrayLike, Float, Key
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import traceax as tx

RTOLS = (1e-1, 1e-2, 1e-3)
MOST = 192  # products, for whatever tolerance
CURVE = (8, 16, 24, 48, 96)  # each of so many more products
LOG_PENALTY = jnp.log(10.0)
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}


# --8<-- [start:operator]
def kernel() -> Float[Array, "n n"]:
    """Gaussian, of the images of 8 x 8 pixels, each between 0 and 1."""
    x = load_digits().data[:600] / 16
    squares = np.sum(x**2, axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * x @ x.T
    return jnp.asarray(np.exp(-distances / (2 * 8.0**2)), jnp.float32)


def smoother(
    log_penalty: Float[ArrayLike, ""], K: Float[Array, "n n"]
) -> lx.FunctionLinearOperator:
    """y -> K (K + penalty)^-1 y."""
    penalty = jnp.exp(log_penalty)
    structure = jax.eval_shape(lambda: K[0])
    psd = lx.positive_semidefinite_tag
    regularised = lx.FunctionLinearOperator(
        lambda v: K @ v + penalty * v, structure, psd
    )
    solver = lx.CG(rtol=1e-5, atol=1e-5)

    def fitted(y):
        return K @ lx.linear_solve(regularised, y, solver).value

    return lx.FunctionLinearOperator(fitted, structure, psd)


# --8<-- [end:operator]


class Truth(NamedTuple):
    value: float
    gradient: float


def truth(K: Float[Array, "n n"]) -> Truth:
    """Of the trace, the sum of x / (x + penalty) over the eigenvalues x of K."""
    x = np.linalg.eigvalsh(np.asarray(K, np.float64))
    shrunk = x / (x + np.exp(LOG_PENALTY))
    return Truth(np.sum(shrunk), -np.sum(shrunk * (1 - shrunk)))


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
    key: Key[Array, ""], K: Float[Array, "n n"], estimator: tx.TraceEstimator
) -> list[Stop]:
    """One for each tolerance, by one program."""
    traced = []

    # --8<-- [start:tolerance]
    @jax.jit
    def run(log_penalty, K, rtol):
        traced.append(estimator)  # whenever this function is compiled

        def degrees_of_freedom(log_penalty):
            estimate = tx.trace(
                key, smoother(log_penalty, K), MOST, estimator, rtol=rtol, throw=False
            )
            return estimate.value, estimate

        (_, estimate), gradient = jax.value_and_grad(degrees_of_freedom, has_aux=True)(
            log_penalty
        )
        return estimate, gradient

    # --8<-- [end:tolerance]
    found = [Stop(rtol, *run(LOG_PENALTY, K, rtol)) for rtol in RTOLS]
    assert len(traced) == 1
    return found


# --8<-- [start:curve]
def curve(
    key: Key[Array, ""], K: Float[Array, "n n"], estimator: tx.TraceEstimator
) -> list[tx.Estimate]:
    """Of more and more products, each estimate from the state of the one before."""
    go_on = eqx.filter_jit(estimator.estimate)
    state, estimates = estimator.init(key, smoother(LOG_PENALTY, K)), []
    for more in CURVE:
        estimates.append(go_on(state, more))
        state = estimates[-1].state
    return estimates


# --8<-- [end:curve]


def half_width(estimate: tx.Estimate) -> Float[Array, ""]:
    low, high = estimate.confidence_interval()
    return (high - low) / 2


def print_table(found: dict[str, list[Stop]], exact: Truth) -> None:
    print(f"{'estimator':<11} {'asked':>7} {'products':>9} {'degrees of freedom':>20}")
    print(f"{'':<11} {'':>7} {'':>9} {'estimate':>10} {'error':>9} {'gradient':>10}")
    for name, of_estimator in found.items():
        for stop in of_estimator:
            error = abs(stop.estimate.value / exact.value - 1)
            print(
                f"{name:<11} {stop.rtol:>7.0e} {stop.products:>9} "
                f"{stop.estimate.value:>10.4f} {error:>9.1e} {stop.gradient:>10.4f}"
                f"{'' if stop.met else '  tolerance not met'}"
            )
    print(f"{'eigenvalues':<28} {exact.value:>11.4f} {'':>9} {exact.gradient:>10.4f}")


def plot(
    axes: Axes, name: str, of: list[Stop], curve: list[tx.Estimate], exact: Truth
) -> None:
    products = np.cumsum(CURVE)
    values = np.array([estimate.value for estimate in curve]) / exact.value
    half = np.array([half_width(estimate) for estimate in curve]) / exact.value
    axes.fill_between(products, values - half, values + half, alpha=0.3, label="95 %")
    axes.plot(products, values, label="estimate")
    axes.axhline(1, color="grey", linewidth=1, label="eigenvalues")
    for i, stop in enumerate(stop for stop in of if stop.met):
        axes.errorbar(
            stop.products,
            stop.estimate.value / exact.value,
            half_width(stop.estimate) / exact.value,
            fmt="o",
            color=f"C{i + 1}",
            capsize=4,
            label=f"rtol = {stop.rtol:g}",
        )
    axes.set(title=name, xlabel="products", xscale="log")
    axes.legend(fontsize="small", loc="upper right")


def check(stop: Stop, exact: Truth) -> None:
    """A tolerance is met or reported, and errors are what the intervals say."""
    value, half = stop.estimate.value, half_width(stop.estimate)
    assert stop.met == bool(half <= stop.rtol * value * (1 + 1e-5))
    assert stop.met or stop.products == MOST
    # One interval of 95 % in twenty doesn't hold the truth, but hardly misses it.
    assert abs(value - exact.value) <= 1.5 * half
    assert abs(stop.gradient / exact.gradient - 1) <= 4 * half / value


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "trace_to_tolerance.png"
    K, key = kernel(), jax.random.key(0)
    exact = truth(K)
    found = {name: stops(key, K, of) for name, of in ESTIMATORS.items()}
    print_table(found, exact)
    curves = {name: curve(key, K, of) for name, of in ESTIMATORS.items()}

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3, sharey=True), found, strict=True):
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
