"""Carbon dioxide at Mauna Loa: a Gaussian process, fitted to 2,068 weekly means up to 1998.

The data are from statsmodels, and we forecast three more years. The kernel is the sum of a trend,
a season whose shape may change, and weather. L-BFGS fits the kernel's parameters and the noise.
With at most 6,000 points the likelihood is exact; for more, see `large_gaussian_process.py`.

    python examples/gaussian_process.py [figure.png]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from matplotlib.figure import Figure
from statsmodels.datasets import co2
from threadpoolctl import threadpool_limits

import traceax as tx

# We need 64 bits, because the noise is 1e-6 times the largest eigenvalue.
jax.config.update("jax_enable_x64", True)

STEPS = 64  # for L-BFGS
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


def log_likelihood(log, t, y):
    key, noise = jax.random.key(0), jnp.exp(log["noise"])
    return tx.gaussian_log_likelihood(key, matrix(log, t), y, shift=noise, throw=False)


# --8<-- [end:likelihood]


# --8<-- [start:fit]
@jax.jit
def fit(log, t, y):
    def loss(log, _):  # about 10, so that the first step isn't too long
        return -log_likelihood(log, t, y).value / 100

    solver = optx.LBFGS(rtol=1e-6, atol=1e-6)
    return optx.minimise(loss, solver, log, max_steps=STEPS, throw=False).value


# --8<-- [end:fit]


# --8<-- [start:predict]
@jax.jit
def predict(log, t, y, new):
    """Means and standard deviations of observations at new times."""
    K, noise = matrix(log, t), jnp.exp(log["noise"])
    cross = jax.vmap(jax.vmap(K.kernel, (None, 0)), (0, None))(t, new)
    rhs = jnp.concatenate([y[:, None], cross], axis=1)
    terms = tx.inv_quad_logdet(jax.random.key(0), K, rhs, shift=noise)
    variances = jax.vmap(K.kernel)(new, new) + noise - terms.inv_quad.value[1:]
    return cross.T @ terms.solution[:, 0], jnp.sqrt(variances)


# --8<-- [end:predict]


def main(path):
    weekly = co2.load_pandas().data["co2"].dropna()
    t = 1970 + weekly.index.to_numpy().astype("datetime64[D]").astype(float) / 365.25
    past = t < FORECAST[0]
    line = np.poly1d(np.polyfit(t[past], weekly[past], 1))
    data = jnp.asarray(t[past]), jnp.asarray(weekly[past] - line(t[past]))
    log = fit(START, *data)
    estimates = [jax.jit(log_likelihood)(x, *data) for x in (START, log)]
    print("log likelihood before the fit:", estimates[0])
    print("log likelihood after the fit: ", estimates[1])
    for name in log:
        print(f"{name:>14}", np.exp(log[name]).round(3))
    assert estimates[1].value > estimates[0].value + 100
    new = np.linspace(*FORECAST, 37)
    mean, deviation = predict(log, *data, jnp.asarray(new))
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
