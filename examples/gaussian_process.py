"""Carbon dioxide at Mauna Loa: a Gaussian process, fitted without a factorisation.

The data are 2,068 weekly means up to 1998, from statsmodels, and we forecast three more years.
The kernel is the sum of a trend, a season whose shape may change, and weather. L-BFGS fits the
kernel's parameters and the noise. We print likelihoods next to Cholesky's.

    python examples/gaussian_process.py [figure.png]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from statsmodels.datasets import co2
from threadpoolctl import threadpool_limits

import traceax as tx

# We need 64 bits, because the noise is 1e-6 times the largest eigenvalue.
jax.config.update("jax_enable_x64", True)

COLUMNS = 300  # for each likelihood, at most
RUNS, STEPS, EXACT_STEPS = 4, 16, 6  # for L-BFGS; each run chooses its own pivots
FORECAST = 1999, 2002
START = {"trend": [10.0, 20.0], "season": [2.0, 50.0, 1.0], "weather": [1.0, 1.0]}
START = {name: jnp.log(jnp.array(x)) for name, x in (START | {"noise": 0.1}).items()}


# --8<-- [start:likelihood]
def matrix(log, t):
    """The signal's covariance at times in years. `log` contains log-parameters."""
    trend, season, weather, _ = (jnp.exp(log[name]) for name in START)

    def kernel(a, b):
        squared, wave = (a - b) ** 2 / 2, jnp.sin(jnp.pi * (a - b)) / season[2]
        return (
            trend[0] ** 2 * jnp.exp(-squared / trend[1] ** 2)
            + season[0] ** 2 * jnp.exp(-squared / season[1] ** 2 - 2 * wave**2)
            + weather[0] ** 2 / (1 + squared / weather[1] ** 2)
        )

    return tx.KernelLinearOperator(kernel, t)


def log_likelihood(log, t, y, key, pivots):
    options = {"shift": jnp.exp(log["noise"]), "preconditioner": pivots, "throw": False}
    K = matrix(log, t)
    estimate = tx.gaussian_log_likelihood(key, K, y, **options)
    return estimate.value, estimate


# --8<-- [end:likelihood]


def by_cholesky(log, t, y):
    K = matrix(log, t).as_matrix() + jnp.exp(log["noise"]) * jnp.eye(len(t))
    factor = jnp.linalg.cholesky(K)
    whitened = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return -(whitened @ whitened + logdet + len(t) * np.log(2 * np.pi)) / 2, None


# --8<-- [start:fit]
def choose_pivots(key, log, t):
    return tx.choose_pivots(key, matrix(log, t), COLUMNS, shift=jnp.exp(log["noise"]))


@jax.jit(static_argnums=(0, 1))
def maximise(function, steps, log, *data):
    def loss(log, data):  # about 10, so that the first step isn't too long
        return -function(log, *data)[0] / 100

    solver = optx.LBFGS(rtol=1e-6, atol=1e-6)
    return optx.minimise(loss, solver, log, data, max_steps=steps, throw=False).value


def fit(log, t, y, key):
    for run in range(RUNS):
        pivots = choose_pivots(jax.random.fold_in(key, run), log, t)
        log = maximise(log_likelihood, STEPS, log, t, y, key, pivots)
    return log


# --8<-- [end:fit]


# --8<-- [start:predict]
@jax.jit
def predict(log, t, y, new, key, pivots):
    """Means and standard deviations of observations at new times."""
    K, noise = matrix(log, t), jnp.exp(log["noise"])
    cross = jax.vmap(jax.vmap(K.kernel, (None, 0)), (0, None))(t, new)
    rhs = jnp.concatenate([y[:, None], cross], axis=1)
    budget, options = 6 * (len(new) + 2), {"shift": noise, "preconditioner": pivots}
    terms = tx.inv_quad_logdet(key, K, rhs, budget, **options)
    variances = jax.vmap(K.kernel)(new, new) + noise - terms.inv_quad.value[1:]
    return cross.T @ terms.solution[:, 0], jnp.sqrt(variances)


# --8<-- [end:predict]


def compare(log, t, y, pivots):
    """Print value and gradient next to Cholesky's."""
    run = jax.jit(jax.value_and_grad(log_likelihood, has_aux=True))
    keys = jax.random.split(jax.random.key(1), 4)
    runs = [run(log, t, y, key, pivots) for key in keys]
    estimate, rows = runs[0][0][1], [ravel_pytree(grad)[0] for _, grad in runs]
    run = jax.jit(jax.value_and_grad(by_cholesky, has_aux=True))
    (value, _), exact = run(log, t, y)
    exact, bars = ravel_pytree(exact)[0], np.std(rows, axis=0, ddof=1)
    print(f"log likelihood {estimate}\n   by Cholesky {value:.3f}")
    for name, row in {"gradient": rows[0], "bars": bars, "Cholesky's": exact}.items():
        print(f"{name:>14}", *(f"{x:8.3f}" for x in row))
    assert abs(estimate.value - value) < 4 * estimate.standard_error
    assert np.linalg.norm(rows[0] - exact) < 0.015 * np.linalg.norm(exact)


def main(path):
    weekly = co2.load_pandas().data["co2"].dropna()
    t = 1970 + weekly.index.to_numpy().astype("datetime64[D]").astype(float) / 365.25
    past = t < FORECAST[0]
    line = np.poly1d(np.polyfit(t[past], weekly[past], 1))
    data = jnp.asarray(t[past]), jnp.asarray(weekly[past] - line(t[past]))
    key = jax.random.key(0)
    compare(START, *data, choose_pivots(key, START, data[0]))
    log = fit(START, *data, key)
    better = maximise(by_cholesky, EXACT_STEPS, log, *data)
    end, best = (float(jax.jit(by_cholesky)(x, *data)[0]) for x in (log, better))
    print(
        f"exact likelihood at our fit {end:.2f}, {EXACT_STEPS} exact steps later {best:.2f}"
    )
    for name in log:
        print(f"{name:>14}", *(np.exp(x[name]).round(3) for x in (log, better)))
    assert best - end < 0.0015 * abs(best)
    new, pivots = np.linspace(*FORECAST, 37), choose_pivots(key, log, data[0])
    mean, deviation = predict(log, *data, jnp.asarray(new), key, pivots)
    mean, band = line(new) + mean, 1.96 * deviation
    center, width = (np.interp(t[~past], new, z) for z in (mean, band))
    inside = np.mean(np.abs(weekly[~past] - center) < width)
    print(f"{inside:.0%} of {sum(~past)} held-out weeks lie in the 95 % band")
    assert inside > 0.85

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    for axes in figure.subplots(1, 2):
        axes.plot(t[past], weekly[past], ".", color="grey", markersize=3)
        axes.plot(t[~past], weekly[~past], "k.", markersize=3, label="held out")
        axes.plot(new, mean, label="forecast")
        axes.fill_between(new, mean - band, mean + band, alpha=0.3, label="95 %")
        axes.set(ylabel="parts per million")
    axes.set(xlim=(1995, 2002), ylim=(356, 376))
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    # We use one thread: on a busy machine, LAPACK's threads wait for each other.
    with threadpool_limits(1, user_api="blas"):
        main(sys.argv[1] if len(sys.argv) > 1 else "gaussian_process.png")
