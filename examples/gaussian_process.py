"""Hyper-parameters of a Gaussian process, fitted without a factorisation.

Scikit-learn's diabetes data, 442 points with a length scale for each of ten inputs. The
log-determinant of the likelihood is estimated, with its gradient, from 100 products with
the kernel matrix; the quadratic form is a solve by conjugate gradients. A fit by L-BFGS is
printed next to one that has the exact likelihood.

    python examples/gaussian_process.py [figure.png]
"""

import sys

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from threadpoolctl import threadpool_limits

import traceax as tx

# Conjugate gradients stagnate early in float32.
jax.config.update("jax_enable_x64", True)

BUDGET = 100  # products with the kernel matrix, for each log-determinant
REPEATS = 8  # of the gradient at the start
STEPS = 40


def kernel(log, x):
    """The covariance of the signal. Hyper-parameters are given by their logarithms."""
    scaled = x / jnp.exp(log["length_scales"])
    squares = jnp.sum(scaled**2, axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * scaled @ scaled.T
    return jnp.exp(log["amplitude"] - distances / 2)


# --8<-- [start:likelihood]
def loss(log, x, y, key):
    """The negative log marginal likelihood, less a constant."""
    S = tx.as_operator(kernel(log, x), tags=lx.positive_semidefinite_tag)
    noise = jnp.exp(log["noise"])
    logdet = tx.logdet(key, S, BUDGET, shift=noise).value
    return (quadratic_form(S, noise, y) + logdet) / 2


def quadratic_form(S, noise, y):
    """`y^T (S + noise I)^-1 y`."""
    K = S + noise * lx.IdentityLinearOperator(S.in_structure())
    K = lx.TaggedLinearOperator(K, lx.positive_semidefinite_tag)
    return y @ lx.linear_solve(K, y, lx.CG(rtol=1e-8, atol=1e-8)).value


# --8<-- [end:likelihood]


def exact_loss(log, x, y, key=None):
    """The same by a Cholesky factorisation."""
    factor = jnp.linalg.cholesky(
        kernel(log, x) + jnp.exp(log["noise"]) * jnp.eye(len(x))
    )
    whitened = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    return whitened @ whitened / 2 + jnp.sum(jnp.log(jnp.diagonal(factor)))


# --8<-- [start:fit]
def fit(loss, start):
    """The hyper-parameters before every step of L-BFGS, and after the last."""
    optimiser = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        log, state = carry
        value, grad = value_and_grad(log, state=state)
        updates, state = optimiser.update(
            grad, state, log, value=value, grad=grad, value_fn=loss
        )
        return (optax.apply_updates(log, updates), state), log

    @jax.jit
    def run(log):
        (last, _), path = jax.lax.scan(step, (log, optimiser.init(log)), length=STEPS)
        return jax.tree.map(lambda x, y: jnp.append(x, y[None], axis=0), path, last)

    return run(start)


# --8<-- [end:fit]


def relative_error(log, x, y, key):
    """Of estimated gradients, the root mean square over keys."""
    keys = jax.random.split(key, REPEATS)
    gradient = jax.jit(lambda key: ravel_pytree(jax.grad(loss)(log, x, y, key))[0])
    exact = ravel_pytree(jax.jit(jax.grad(exact_loss))(log, x, y))[0]
    errors = np.stack([gradient(key) for key in keys]) - exact
    return np.sqrt(np.mean(np.sum(errors**2, axis=1)) / np.sum(exact**2))


def main(path):
    x, y = load_diabetes(return_X_y=True)
    x, y = (jnp.asarray((z - z.mean(axis=0)) / z.std(axis=0)) for z in (x, y))
    d = x.shape[1]
    start = {
        "length_scales": jnp.full(d, jnp.log(4.0)),
        "amplitude": jnp.zeros(()),
        "noise": jnp.log(0.5),
    }
    key = jax.random.key(0)
    error = relative_error(start, x, y, key)
    print(
        f"relative error of the gradient at the start, {BUDGET} products: {error:.1e}"
    )
    assert error < 0.08

    paths = {
        "estimated": fit(lambda log: loss(log, x, y, key), start),
        "exact": fit(lambda log: exact_loss(log, x, y), start),
    }
    along = jax.jit(lambda path: jax.lax.map(lambda log: exact_loss(log, x, y), path))
    losses = {name: np.asarray(along(path)) for name, path in paths.items()}
    print(f"\n{'':<22}{'estimated':>11}{'exact':>11}")
    for step in range(0, STEPS + 1, 20):
        cells = "".join(f"{values[step]:>11.4f}" for values in losses.values())
        print(f"{f'loss after {step} steps':<22}{cells}")
    for name in ("length_scales", "amplitude", "noise"):
        ends = [np.exp(path[name][-1]).reshape(-1) for path in paths.values()]
        for row in zip(*ends, strict=True):
            print(f"{name:<22}" + "".join(f"{value:>11.3f}" for value in row))
    assert abs(losses["estimated"][-1] - losses["exact"][-1]) < 0.05

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses["exact"], color="grey", linewidth=4, alpha=0.5, label="exact")
    axes.plot(losses["estimated"], label=f"estimated, {BUDGET} products")
    axes.set(xlabel="step of L-BFGS", ylabel="exact negative log likelihood")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    # Threads of LAPACK wait for each other on a busy machine.
    with threadpool_limits(1, user_api="blas"):
        main(sys.argv[1] if len(sys.argv) > 1 else "gaussian_process.png")
