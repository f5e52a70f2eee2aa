"""Gaussian-process hyper-parameters from an estimated log-determinant.

1. Scikit-learn's diabetes data, n = 442: a negative log marginal likelihood whose
   log-determinant is estimated and whose quadratic form is a solve by conjugate
   gradients. Its gradient with respect to all twelve hyper-parameters is printed next
   to the exact one, and a fit by L-BFGS next to the exact fit.
2. Generated inputs, n = 5,000: value and gradient of the log-determinant, timed against
   a Cholesky factorisation.

    python examples/gaussian_process.py [figure.png]
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from threadpoolctl import threadpool_limits

import traceax as tx

# Conjugate gradients stagnate early in float32.
jax.config.update("jax_enable_x64", True)

BUDGET = 100  # products with the kernel matrix, for the fit and for n = 5,000
BUDGETS = (BUDGET, 200)  # of the comparison of gradients
REPEATS = 8
STEPS = 40
FEATURES = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
NAMES = (*FEATURES, "amplitude", "noise")


class Hyperparameters(eqx.Module):
    """Logarithms: of a length scale for every input, and of the two variances."""

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


def hyperparameters(
    d: int, length_scale: float, noise: float, amplitude: float = 1.0
) -> Hyperparameters:
    return Hyperparameters(
        jnp.full(d, math.log(length_scale), float),
        jnp.asarray(math.log(amplitude), float),
        jnp.asarray(math.log(noise), float),
    )


def as_vector(params: Hyperparameters) -> Float[Array, " p"]:
    return ravel_pytree(params)[0]


#
# The model
#


# --8<-- [start:kernel]
def kernel(params: Hyperparameters, x: Float[Array, "n d"]) -> lx.MatrixLinearOperator:
    """The covariance without the noise: a Gaussian kernel."""
    scaled = x / jnp.exp(params.length_scales)
    squares = jnp.sum(scaled**2, axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * scaled @ scaled.T
    matrix = jnp.exp(params.amplitude - distances / 2)
    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)


def logdet(
    key: Key[Array, ""], params: Hyperparameters, x: Float[Array, "n d"], k: int
) -> tx.Estimate:
    return tx.logdet(key, kernel(params, x), k, shift=jnp.exp(params.noise))


# --8<-- [end:kernel]


def exact_logdet(params: Hyperparameters, x: Float[Array, "n d"]) -> Float[Array, ""]:
    factor = jnp.linalg.cholesky(covariance(params, x).matrix)
    return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))


# --8<-- [start:likelihood]
def covariance(
    params: Hyperparameters, x: Float[Array, "n d"]
) -> lx.MatrixLinearOperator:
    matrix = kernel(params, x).matrix + jnp.exp(params.noise) * jnp.eye(len(x))
    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)


def loss(
    params: Hyperparameters, data: Data, key: Key[Array, ""], k: int
) -> Float[Array, ""]:
    """The negative log marginal likelihood. Of one key, it is deterministic."""
    solver = lx.CG(rtol=1e-8, atol=1e-8)
    solution = lx.linear_solve(covariance(params, data.x), data.y, solver)
    constant = len(data.y) * math.log(2 * math.pi)
    value = logdet(key, params, data.x, k).value
    return (data.y @ solution.value + value + constant) / 2


# --8<-- [end:likelihood]


def exact_loss(params: Hyperparameters, data: Data) -> Float[Array, ""]:
    """The same by a Cholesky factorisation."""
    factor = jnp.linalg.cholesky(covariance(params, data.x).matrix)
    whitened = jax.scipy.linalg.solve_triangular(factor, data.y, lower=True)
    constant = len(data.y) * math.log(2 * math.pi)
    value = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return (whitened @ whitened + value + constant) / 2


# --8<-- [start:fit]
def fit(
    loss: Callable[[Hyperparameters], Float[Array, ""]], start: Hyperparameters
) -> Hyperparameters:
    """The hyper-parameters before every step of L-BFGS and after the last, stacked."""
    optimiser = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        params, state = carry
        value, grad = value_and_grad(params, state=state)
        updates, state = optimiser.update(
            grad, state, params, value=value, grad=grad, value_fn=loss
        )
        return (optax.apply_updates(params, updates), state), params

    @jax.jit
    def run(params):
        carry = (params, optimiser.init(params))
        (last, _), path = jax.lax.scan(step, carry, length=STEPS)
        return jax.tree.map(lambda x, y: jnp.append(x, y[None], axis=0), path, last)

    return run(start)


# --8<-- [end:fit]


def at_step(path: Hyperparameters, step: int) -> Hyperparameters:
    return jax.tree.map(lambda x: x[step], path)


@jax.jit
def losses_along(path: Hyperparameters, data: Data) -> Float[Array, " steps"]:
    return jax.lax.map(lambda params: exact_loss(params, data), path)


#
# Gradients of the likelihood
#


class Gradients(NamedTuple):
    """Of the likelihood at one point: exact ones, and estimates by budget."""

    where: str
    exact: Float[np.ndarray, " p"]
    estimates: dict[int, Float[np.ndarray, "repeats p"]]

    def errors(self, k: int) -> Float[np.ndarray, " p"]:
        """Root mean square errors of the components."""
        return np.sqrt(np.mean((self.estimates[k] - self.exact) ** 2, axis=0))

    def relative_error(self, k: int) -> float:
        """Of the whole gradient, in the Euclidean norm."""
        return float(np.linalg.norm(self.errors(k)) / np.linalg.norm(self.exact))


@partial(jax.jit, static_argnames="k")
def estimated_gradients(
    keys: Key[Array, " repeats"], params: Hyperparameters, data: Data, k: int
) -> Float[Array, "repeats p"]:
    return jax.lax.map(
        lambda key: as_vector(jax.grad(loss)(params, data, key, k)), keys
    )


@jax.jit
def exact_gradient(params: Hyperparameters, data: Data) -> Float[Array, " p"]:
    return as_vector(jax.grad(exact_loss)(params, data))


def compare_gradients(
    where: str, key: Key[Array, ""], params: Hyperparameters, data: Data
) -> Gradients:
    keys = jax.random.split(key, REPEATS)
    return Gradients(
        where,
        np.asarray(exact_gradient(params, data)),
        {k: np.asarray(estimated_gradients(keys, params, data, k)) for k in BUDGETS},
    )


def print_gradients(gradients: Gradients) -> None:
    size = np.linalg.norm(gradients.exact)
    print(
        f"\nGradient of the likelihood {gradients.where}, from {BUDGET} products\n"
        f"root mean square errors of {REPEATS} estimates, "
        "also relative to the norm of the gradient\n\n"
        f"{'log of':<10} {'exact':>10} {'estimate':>10} {'error':>9} {'relative':>10}"
    )
    estimate, errors = gradients.estimates[BUDGET][0], gradients.errors(BUDGET)
    rows = zip(NAMES, gradients.exact, estimate, errors, strict=True)
    for name, exact, value, error in rows:
        relative = error / size
        print(
            f"{name:<10} {exact:>10.4f} {value:>10.4f} {error:>9.4f} {relative:>10.1e}"
        )
    for k in BUDGETS:
        print(f"{k:>4} products: relative error {gradients.relative_error(k):.1e}")


def print_fits(
    estimated: Hyperparameters, exact: Hyperparameters, losses: list[np.ndarray]
) -> None:
    print(f"\n{'':<24}{'estimated':>11}{'exact':>11}")
    for step in range(0, STEPS + 1, 10):
        cells = "".join(f"{path[step]:>11.4f}" for path in losses)
        print(f"{f'loss, step {step}':<24}{cells}")
    pairs = zip(as_vector(estimated), as_vector(exact), strict=True)
    for name, values in zip(NAMES, pairs, strict=True):
        kind = "length scale, " if name in FEATURES else ""
        cells = "".join(f"{math.exp(value):>11.3f}" for value in values)
        print(f"{kind + name:<24}{cells}")


#
# Many data
#


class Timing(NamedTuple):
    """A value and its gradient, and the seconds that both took, once compiled."""

    value: float
    standard_error: float
    gradient: Float[np.ndarray, " p"]
    seconds: float


# --8<-- [start:large]
def compare_times(n: int, key: Key[Array, ""]) -> tuple[Timing, Timing]:
    """The log-determinant and its gradient: estimated, and by Cholesky."""
    input_key, key = jax.random.split(key)
    x = jax.random.uniform(input_key, (n, 2))
    params = hyperparameters(2, length_scale=0.3, noise=0.1)

    def estimated(params, x, key):
        estimate = logdet(key, params, x, BUDGET)
        return estimate.value, estimate.standard_error

    def exact(params, x, key):
        del key
        return exact_logdet(params, x), jnp.zeros(())

    return timed(estimated, params, x, key), timed(exact, params, x, key)


def timed(fn: Callable, *args) -> Timing:
    value_and_grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
    compiled = value_and_grad.lower(*args).compile()
    start = time.perf_counter()
    (value, error), grad = jax.block_until_ready(compiled(*args))
    seconds = time.perf_counter() - start
    return Timing(float(value), float(error), np.asarray(as_vector(grad)), seconds)


# --8<-- [end:large]


def print_times(n: int, estimated: Timing, exact: Timing) -> None:
    print(f"\nLog-determinant and its gradient for n = {n}, {BUDGET} products\n")
    print(f"{'':<28}{'estimated':>14}{'Cholesky':>14}{'difference':>12}")
    names = ("log length scale 1", "log length scale 2", "log amplitude", "log noise")
    rows = [("value", estimated.value, exact.value)]
    rows += zip(names, estimated.gradient, exact.gradient, strict=True)
    for name, a, b in rows:
        print(f"{name:<28}{a:>14.6f}{b:>14.6f}{a - b:>12.1e}")
    print(f"{'standard error of the value':<28}{estimated.standard_error:>14.1e}")
    print(f"{'seconds':<28}{estimated.seconds:>14.2f}{exact.seconds:>14.2f}")


#
# What is shown
#


def plot_fits(axes: Axes, losses: list[np.ndarray]) -> None:
    estimated, exact = losses
    axes.plot(exact, color="grey", linewidth=4, alpha=0.5, label="exact")
    axes.plot(estimated, color="C0", label=f"estimated, {BUDGET} products")
    axes.set_xlabel("step of L-BFGS")
    axes.set_ylabel("exact negative log marginal likelihood")
    axes.set_title("the fit")
    axes.legend()


def plot_errors(axes: Axes, gradients: list[Gradients]) -> None:
    for one in gradients:
        errors = [one.relative_error(k) for k in BUDGETS]
        axes.loglog(BUDGETS, errors, "o-", label=one.where)
    axes.set_xticks(BUDGETS, [str(k) for k in BUDGETS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("products with the kernel matrix")
    axes.set_ylabel("relative error")
    axes.set_title("the gradient")
    axes.legend()


def save_figure(
    path: str, losses: list[np.ndarray], gradients: list[Gradients]
) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_fits(left, losses)
    plot_errors(right, gradients)
    figure.savefig(path, dpi=150)


def fit_diabetes(path: str) -> None:
    data = diabetes()
    start = hyperparameters(data.x.shape[1], length_scale=4.0, noise=0.5)
    fit_key, check_key = jax.random.split(jax.random.key(0))
    estimated = fit(lambda params: loss(params, data, fit_key, BUDGET), start)
    exact = fit(lambda params: exact_loss(params, data), start)
    paths = (estimated, exact)
    losses = [np.asarray(losses_along(path, data)) for path in paths]
    gradients = [
        compare_gradients("at the start", check_key, start, data),
        compare_gradients("after 5 steps", check_key, at_step(exact, 5), data),
    ]
    for one in gradients:
        print_gradients(one)
    print_fits(at_step(estimated, STEPS), at_step(exact, STEPS), losses)
    save_figure(path, losses, gradients)
    print(f"\nsaved {path}")
    assert all(one.relative_error(BUDGET) < 0.08 for one in gradients)
    assert abs(losses[0][-1] - losses[1][-1]) < 0.05


def main() -> None:
    # On a busy machine the threads of LAPACK wait for each other, and a factorisation
    # of a small matrix takes a hundred times as long as with one thread.
    with threadpool_limits(1, user_api="blas"):
        fit_diabetes(sys.argv[1] if len(sys.argv) > 1 else "gaussian_process.png")
    estimated, exact = compare_times(5000, jax.random.key(1))
    print_times(5000, estimated, exact)
    assert abs(estimated.value - exact.value) < 0.1
    assert np.all(np.abs(estimated.gradient / exact.gradient - 1) < 1e-3)


if __name__ == "__main__":
    main()
