"""Gaussian-process hyper-parameters from gradients of an estimated log-determinant.

The negative log marginal likelihood of a Gaussian process contains `logdet K`, whose
gradient is `tr(K^-1 dK)`: the trace of an operator that contains a solve. Here solves
are by conjugate gradients and the trace is estimated, so that K is only ever applied.
Every gradient is printed next to the exact one, by Cholesky factorisation, and the fit
next to the exact fit. The data are scikit-learn's diabetes measurements.

    python examples/gp_logdet_gradient.py [figure.png]
"""

import math
import sys
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, Key
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from threadpoolctl import threadpool_limits

import traceax as tx

# In float32 conjugate gradients stagnate before they reach the accuracy that a Nystrom
# approximation needs of its products.
jax.config.update("jax_enable_x64", True)

STEPS = 50
BUDGET = 40  # products with an operator, for every trace
SOLVES = 2 * BUDGET  # for each of the formulations that are compared
REPEATS = 32
FEATURES = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
NAMES = (*FEATURES, "amplitude", "noise")


class Hyperparameters(eqx.Module):
    """Logarithms: of a length scale for every feature, and of the two variances."""

    length_scales: Float[Array, " d"]
    amplitude: Float[Array, ""]
    noise: Float[Array, ""]


class Data(NamedTuple):
    x: Float[Array, "n d"]
    y: Float[Array, " n"]


def diabetes() -> Data:
    x, y = load_diabetes(return_X_y=True)
    return Data(standardise(x), standardise(y))


def standardise(x: Any) -> Float[Array, "n ..."]:
    return jnp.asarray((x - x.mean(axis=0)) / x.std(axis=0))


#
# The model
#


def signal_covariance(
    params: Hyperparameters, x: Float[Array, "n d"]
) -> Float[Array, "n n"]:
    """The covariance of all but the noise: a Gaussian kernel."""
    scaled = x / jnp.exp(params.length_scales)
    squares = jnp.sum(scaled**2, axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * scaled @ scaled.T
    return jnp.exp(params.amplitude - distances / 2)


def covariance(params: Hyperparameters, x: Float[Array, "n d"]) -> Float[Array, "n n"]:
    return signal_covariance(params, x) + jnp.exp(params.noise) * jnp.eye(len(x))


def solve(
    matrix: Float[Array, "n n"], vector: Float[Array, " n"]
) -> Float[Array, " n"]:
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, vector, lx.CG(rtol=1e-8, atol=1e-8)).value


@jax.jit
def exact_loss(params: Hyperparameters, data: Data) -> Float[Array, ""]:
    """The negative log marginal likelihood."""
    factor = jnp.linalg.cholesky(covariance(params, data.x))
    whitened = jax.scipy.linalg.solve_triangular(factor, data.y, lower=True)
    half_logdet = jnp.sum(jnp.log(jnp.diagonal(factor)))
    constant = len(data.y) / 2 * math.log(2 * math.pi)
    return whitened @ whitened / 2 + half_logdet + constant


@jax.jit
def exact_logdet_gradient(
    params: Hyperparameters, x: Float[Array, "n d"]
) -> Float[Array, " p"]:
    def logdet(params: Hyperparameters) -> Float[Array, ""]:
        return jnp.linalg.slogdet(covariance(params, x))[1]

    return as_vector(jax.grad(logdet)(params))


def as_vector(params: Hyperparameters) -> Float[Array, " p"]:
    return ravel_pytree(params)[0]


#
# The fit
#


# --8<-- [start:operator]
def logdet_operator(
    params: Hyperparameters, x: Float[Array, "n d"]
) -> lx.FunctionLinearOperator:
    """`S_0 + K_0^-1 (K - K_0)`: its trace has the gradient of `logdet K`.

    `K = S + noise`, of which S is the covariance of the signal; `S_0` and `K_0` are the
    same, held fixed. The derivative of the trace is `tr(K_0^-1 dK)`.

    `K_0^-1 K` has that derivative too. But it is the identity, for which all directions
    are alike: its products don't tell an estimator where to look. Those with `S_0` do,
    and take no iteration of a solver, since `K - K_0` is zero. The eigenvalues of `S_0`
    decay, and its leading eigenvectors are where the derivatives of K are large.
    XNysTrace treats their span exactly, in the derivative as in the value.
    """
    K = covariance(params, x)
    K_0 = jax.lax.stop_gradient(K)
    S_0 = jax.lax.stop_gradient(signal_covariance(params, x))
    return lx.FunctionLinearOperator(
        lambda v: S_0 @ v + solve(K_0, (K - K_0) @ v),
        jax.ShapeDtypeStruct((len(x),), x.dtype),
        lx.positive_semidefinite_tag,
    )


# --8<-- [end:operator]


# --8<-- [start:gradient]
def estimated_gradient(
    key: Key[Array, ""], params: Hyperparameters, data: Data
) -> Hyperparameters:
    """Of the negative log marginal likelihood, whose value isn't needed."""

    def surrogate(params: Hyperparameters) -> Float[Array, ""]:
        quadratic = data.y @ solve(covariance(params, data.x), data.y)
        return (quadratic + logdet_surrogate(key, params, data.x)) / 2

    return jax.grad(surrogate)(params)


def logdet_surrogate(
    key: Key[Array, ""], params: Hyperparameters, x: Float[Array, "n d"]
) -> Float[Array, ""]:
    """Its gradient is an unbiased estimate of that of `logdet K`; its value is not."""
    return tx.trace(key, logdet_operator(params, x), BUDGET).value


# --8<-- [end:gradient]


@jax.jit
def estimated_logdet_gradient(
    key: Key[Array, ""], params: Hyperparameters, x: Float[Array, "n d"]
) -> Float[Array, " p"]:
    return as_vector(jax.grad(lambda p: logdet_surrogate(key, p, x))(params))


def exact_gradient(
    key: Key[Array, ""], params: Hyperparameters, data: Data
) -> Hyperparameters:
    del key
    return jax.grad(exact_loss)(params, data)


def fit(
    key: Key[Array, ""], params: Hyperparameters, data: Data, gradient: Callable
) -> list[Hyperparameters]:
    """The hyper-parameters before and after every step of Adam."""
    optimiser = optax.adam(0.1)

    @eqx.filter_jit
    def step(key, params, state):
        updates, state = optimiser.update(gradient(key, params, data), state)
        return eqx.apply_updates(params, updates), state

    state = optimiser.init(eqx.filter(params, eqx.is_array))
    path = [params]
    for step_key in jax.random.split(key, STEPS):
        params, state = step(step_key, params, state)
        path.append(params)
    return path


#
# The gradient of the log-determinant, component by component
#


class Component(NamedTuple):
    value: Float[Array, ""]
    standard_error: Float[Array, ""]
    interval: tuple[Float[Array, ""], Float[Array, ""]]
    num_matvecs: Int[Array, ""]
    choice: Any


# --8<-- [start:components]
def signal_operator(
    params: Hyperparameters, x: Float[Array, "n d"]
) -> lx.FunctionLinearOperator:
    """`K^-1 S`. The two commute: it is symmetric, with eigenvalues in [0, 1)."""
    K, S = covariance(params, x), signal_covariance(params, x)
    return lx.FunctionLinearOperator(
        lambda v: solve(K, S @ v),
        jax.ShapeDtypeStruct((len(x),), x.dtype),
        lx.positive_semidefinite_tag,
    )


def length_scale_operator(
    params: Hyperparameters, x: Float[Array, "n d"], direction: Float[Array, " d"]
) -> lx.FunctionLinearOperator:
    """`K^-1 dK`, for a derivative in a direction of the length scales."""

    def signal(length_scales: Float[Array, " d"]) -> Float[Array, "n n"]:
        moved = eqx.tree_at(lambda p: p.length_scales, params, length_scales)
        return signal_covariance(moved, x)

    K = covariance(params, x)
    _, dK = jax.jvp(signal, (params.length_scales,), (direction,))
    return lx.FunctionLinearOperator(
        lambda v: solve(K, dK @ v), jax.ShapeDtypeStruct((len(x),), x.dtype)
    )


def estimate_component(
    key: Key[Array, ""], operator: lx.AbstractLinearOperator
) -> Component:
    estimate = tx.trace(key, operator, BUDGET)
    return Component(
        estimate.value,
        estimate.standard_error,
        estimate.confidence_interval(),
        estimate.stats["num_matvecs"],
        estimate.stats["choice"],
    )


@jax.jit
def estimate_components(
    key: Key[Array, ""], params: Hyperparameters, x: Float[Array, "n d"]
) -> list[Component]:
    *keys, amplitude_key, noise_key = jax.random.split(key, len(NAMES))
    length_scales = jax.vmap(
        lambda key, direction: estimate_component(
            key, length_scale_operator(params, x, direction)
        )
    )(jnp.stack(keys), jnp.eye(x.shape[1]))
    # With respect to the logarithms of the variances, K^-1 dK is K^-1 S and
    # noise K^-1 = I - K^-1 S. The trace of the identity is read off, not estimated.
    signal = signal_operator(params, x)
    identity = lx.IdentityLinearOperator(signal.in_structure())
    return [
        *(jax.tree.map(itemgetter(i), length_scales) for i in range(len(keys))),
        estimate_component(amplitude_key, signal),
        estimate_component(noise_key, identity - signal),
    ]


# --8<-- [end:components]


#
# What the choice of an operator is worth
#

IDENTITY_HUTCHINSON = "Hutchinson, K_0^-1 K"
IDENTITY_XTRACE = "XTrace, K_0^-1 K"
SIGNAL = "XNysTrace, K_0^-1 S"
GUIDED = "XNysTrace, S_0 + K_0^-1 (K - K_0)"
FORMULATIONS = {  # and how they are written in the figure
    IDENTITY_HUTCHINSON: "Hutchinson\n$K_0^{-1} K$",
    IDENTITY_XTRACE: "XTrace\n$K_0^{-1} K$",
    SIGNAL: "XNysTrace\n$K_0^{-1} S$",
    GUIDED: "XNysTrace\n$S_0 + K_0^{-1} (K - K_0)$",
}


class Formulation(NamedTuple):
    """An operator as a function of the hyper-parameters, its trace differentiated."""

    operator: Callable[[Hyperparameters], lx.AbstractLinearOperator]
    k: int
    estimator: tx.TraceEstimator

    def gradient(
        self, key: Key[Array, ""], params: Hyperparameters
    ) -> Float[Array, " p"]:
        def value(params: Hyperparameters) -> Float[Array, ""]:
            return tx.trace(key, self.operator(params), self.k, self.estimator).value

        return as_vector(jax.grad(value)(params))


def formulations(
    params: Hyperparameters, x: Float[Array, "n d"]
) -> dict[str, Formulation]:
    """Operators whose trace has the gradient of `logdet K`, with `SOLVES` solves each.

    (That of `K_0^-1 S` has all of it but the noise's component.)

    A differentiated trace takes a solve for every product with an operator that
    contains one, and a solve for every vector of its derivative rule: k of them for
    Hutchinson (whose value isn't needed here) and for XTrace, 2k for XNysTrace.

    A solve is a product with a dense inverse here, for the sake of repetition.
    """
    inverse = jnp.linalg.inv(covariance(params, x))
    K_0, S_0 = covariance(params, x), signal_covariance(params, x)

    def operator(product: Callable) -> Callable:
        return lambda params: lx.FunctionLinearOperator(
            lambda v: product(params, v),
            jax.ShapeDtypeStruct((len(x),), x.dtype),
            lx.positive_semidefinite_tag,
        )

    identity = operator(lambda p, v: inverse @ (covariance(p, x) @ v))
    quotient = operator(lambda p, v: inverse @ (signal_covariance(p, x) @ v))
    guided = operator(lambda p, v: S_0 @ v + inverse @ ((covariance(p, x) - K_0) @ v))
    return {
        IDENTITY_HUTCHINSON: Formulation(identity, SOLVES, tx.HutchinsonEstimator()),
        IDENTITY_XTRACE: Formulation(identity, SOLVES // 2, tx.XTraceEstimator()),
        SIGNAL: Formulation(quotient, SOLVES // 3, tx.XNysTraceEstimator()),
        GUIDED: Formulation(guided, SOLVES // 2, tx.XNysTraceEstimator()),
    }


@jax.jit
def errors_of_formulations(
    key: Key[Array, ""], params: Hyperparameters, x: Float[Array, "n d"]
) -> dict[str, Float[Array, " p-1"]]:
    """Root mean square errors of all components but the noise's, from repetition.

    The noise's is n less the amplitude's, and has the same error.
    """
    keys = jax.random.split(key, REPEATS)
    exact = exact_logdet_gradient(params, x)

    def error(formulation: Formulation) -> Float[Array, " p-1"]:
        estimates = jax.lax.map(lambda key: formulation.gradient(key, params), keys)
        return jnp.sqrt(jnp.mean((estimates - exact) ** 2, axis=0))[:-1]

    return {name: error(f) for name, f in formulations(params, x).items()}


#
# What is shown
#


class Checkpoint(NamedTuple):
    """The gradient of the log-determinant at one step of the fit."""

    step: int
    exact: Float[np.ndarray, " p"]
    differentiated: Float[np.ndarray, " p"]  # from one trace
    components: list[Component]  # a trace each
    errors: dict[str, Float[np.ndarray, " p-1"]]


def check(
    key: Key[Array, ""], step: int, params: Hyperparameters, data: Data
) -> Checkpoint:
    keys = jax.random.split(jax.random.fold_in(key, step), 3)
    errors = errors_of_formulations(keys[2], params, data.x)
    return Checkpoint(
        step,
        np.asarray(exact_logdet_gradient(params, data.x)),
        np.asarray(estimated_logdet_gradient(keys[0], params, data.x)),
        estimate_components(keys[1], params, data.x),
        {name: np.asarray(error) for name, error in errors.items()},
    )


def print_checkpoint(checkpoint: Checkpoint) -> None:
    rms = checkpoint.errors[GUIDED]
    rms = [*rms, rms[-1]]
    print(
        f"\nGradient of the log-determinant after {checkpoint.step} steps\n\n"
        f"{'':<10} {'':>9}  {'one trace for all':<19}  a trace for each\n"
        f"{'log of':<10} {'exact':>9}  {'estimate':>9}   {'r.m.s.':<7}  "
        f"{'estimate':>9}   {'s.e.':<7} {'off by':>10}  {'k':>3}  estimator"
    )
    reasons = set()
    rows = zip(
        NAMES,
        checkpoint.exact,
        checkpoint.differentiated,
        rms,
        checkpoint.components,
        strict=True,
    )
    for name, exact, value, error, component in rows:
        off = (component.value - exact) / component.standard_error
        reason = tx.CHOICES[component.choice]
        reasons.add(reason)
        print(
            f"{name:<10} {exact:>9.3f}  {value:>9.3f} ± {error:<7.3f}  "
            f"{component.value:>9.3f} ± {component.standard_error:<7.3f}"
            f"{off:>+6.1f} s.e.  {component.num_matvecs:>3}  {reason.split(':')[0]}"
        )
    pairs = zip(checkpoint.components, checkpoint.exact, strict=True)
    held = sum(bool(c.interval[0] <= exact <= c.interval[1]) for c, exact in pairs)
    print(f"\n{held} of {len(NAMES)} intervals of 95 % hold the exact value.")
    print("\n".join(sorted(reasons)))


def rms_length_scales(errors: Float[np.ndarray, " p-1"]) -> float:
    return float(np.sqrt(np.mean(errors[:-1] ** 2)))


def print_errors(checkpoints: list[Checkpoint]) -> None:
    print(f"\nGradients of the log-determinant from {SOLVES} solves each")
    print(f"root mean square errors of {REPEATS} estimates\n")
    headings = [f"after {checkpoint.step} steps" for checkpoint in checkpoints]
    print(f"{'':<36}" + "".join(f"{heading:>24}" for heading in headings))
    columns = f"{'length scales':>14}{'amplitude':>10}"
    print(f"{'estimator, operator':<36}" + columns * len(checkpoints))
    for name in FORMULATIONS:
        errors = [checkpoint.errors[name] for checkpoint in checkpoints]
        cells = [
            f"{rms_length_scales(error):>14.3f}{error[-1]:>10.3f}" for error in errors
        ]
        print(f"{name:<36}" + "".join(cells))


def print_fits(
    estimated: list[Hyperparameters], exact: list[Hyperparameters], data: Data
) -> None:
    print(f"\n{'':<22}{'estimated':>11}{'exact':>11}   gradients")
    for step in range(0, STEPS + 1, 10):
        losses = [float(exact_loss(path[step], data)) for path in (estimated, exact)]
        print(f"{f'loss after {step} steps':<22}{losses[0]:>11.3f}{losses[1]:>11.3f}")
    pairs = zip(as_vector(estimated[-1]), as_vector(exact[-1]), strict=True)
    for name, values in zip(NAMES, pairs, strict=True):
        kind = "length scale, " if name in FEATURES else ""
        cells = "".join(f"{math.exp(value):>11.3f}" for value in values)
        print(f"{kind + name:<22}{cells}")


def plot_fits(axes: Axes, estimated: list[float], exact: list[float]) -> None:
    axes.plot(exact, color="grey", linewidth=4, alpha=0.5, label="exact gradients")
    axes.plot(estimated, color="C0", label="estimated gradients")
    axes.set_xlabel("step")
    axes.set_ylabel("negative log marginal likelihood")
    axes.set_title("the fit")
    axes.legend()


def plot_components(
    axes: Axes, checkpoint: Checkpoint, offset: float, colour: str
) -> None:
    position = np.arange(len(FEATURES)) + offset
    shown = slice(len(FEATURES))
    values = np.array([component.value for component in checkpoint.components[shown]])
    ends = np.array([component.interval for component in checkpoint.components[shown]])
    bars = np.abs(ends.T - values)
    axes.plot(position, checkpoint.exact[shown], "_", color="black", markersize=16)
    label = f"after {checkpoint.step} steps"
    style = {"fmt": "o", "color": colour, "markersize": 4, "capsize": 3}
    axes.errorbar(position, values, bars, label=label, **style)


def plot_errors(axes: Axes, checkpoint: Checkpoint, offset: float, colour: str) -> None:
    errors = [rms_length_scales(checkpoint.errors[name]) for name in FORMULATIONS]
    label = f"after {checkpoint.step} steps"
    position = np.arange(len(errors)) + offset
    axes.barh(position, errors, 0.35, color=colour, label=label)


def save_figure(
    path: str, losses: tuple[list[float], list[float]], checkpoints: list[Checkpoint]
) -> None:
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplot_mosaic([["fit", "errors"], ["components", "components"]])
    right, below = axes["errors"], axes["components"]
    plot_fits(axes["fit"], *losses)
    for i, checkpoint in enumerate((checkpoints[0], checkpoints[-1])):
        plot_components(below, checkpoint, 0.3 * (i - 0.5), f"C{i + 1}")
        plot_errors(right, checkpoint, 0.35 * (i - 0.5), f"C{i + 1}")
    right.set_xscale("log")
    right.set_xlim(left=0.02)
    right.set_yticks(range(len(FORMULATIONS)), list(FORMULATIONS.values()))
    right.invert_yaxis()
    right.set_xlabel("root mean square error, length scales")
    right.set_title(rf"$\nabla\,\log\det K$ from {SOLVES} solves")
    right.legend(loc="lower right")
    below.plot([], [], "_", color="black", markersize=16, label="exact")
    below.set_xticks(range(len(FEATURES)), FEATURES)
    below.set_xlabel("derivative with respect to the log length scale of")
    below.set_ylabel(r"$\mathrm{tr}(K^{-1} \mathrm{d}K)$")
    below.set_title(f"a trace for each, {BUDGET} products, 95 % intervals")
    below.legend(loc="upper left")
    figure.savefig(path, dpi=150)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "gp_logdet_gradient.png"
    data = diabetes()
    d = data.x.shape[1]
    start = Hyperparameters(
        length_scales=jnp.full(d, jnp.log(4.0), data.x.dtype),
        amplitude=jnp.zeros((), data.x.dtype),
        noise=jnp.full((), jnp.log(0.5), data.x.dtype),
    )
    fit_key, check_key = jax.random.split(jax.random.key(0))
    estimated = fit(fit_key, start, data, estimated_gradient)
    exact = fit(fit_key, start, data, exact_gradient)
    checkpoints = [
        check(check_key, step, estimated[step], data) for step in (0, 10, STEPS)
    ]
    for checkpoint in checkpoints:
        print_checkpoint(checkpoint)
    print_errors(checkpoints)
    print_fits(estimated, exact, data)
    losses = [[float(exact_loss(p, data)) for p in fit] for fit in (estimated, exact)]
    save_figure(path, (losses[0], losses[1]), checkpoints)
    print(f"\nsaved {path}")


if __name__ == "__main__":
    # On a busy machine the threads of LAPACK wait for each other, and a factorisation
    # takes a hundred times as long as with one thread.
    with threadpool_limits(1, user_api="blas"):
        main()
