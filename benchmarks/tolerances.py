"""Estimates to a tolerance: are the intervals honest, and what do they cost?

    python benchmarks/tolerances.py normal       # the rule, for normal samples
    python benchmarks/tolerances.py coverage     # the table of the docs
    python benchmarks/tolerances.py overhead     # time against a fixed budget

- `normal`: the smallest coverage over all tolerances, and products over those of an oracle
  that knows the variance, simulated for independent normal samples;
- `coverage`: for every estimator, spectrum and tolerance, over many keys: the share of
  intervals that hold the truth, and of values within the tolerance; median products, and
  those of an oracle, the smallest budget for which 95 % of errors are within the tolerance;
- `overhead`: a dense matrix of order 4000, a tolerance that is not met against the same
  number of products, interleaved in one process, medians.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jax.scipy.stats import norm

import traceax as tx
from traceax._estimate import student_t_quantile
from traceax._tolerance import FEWEST, phases

PSD = lx.positive_semidefinite_tag
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}
RTOLS = (1e-1, 1e-2, 1e-3)
BUDGETS = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 240)


def looks(most):
    """The numbers of probes at which error bars are looked at."""
    found, start = [], 0
    for phase in phases(most):
        found += range(start + phase.width, phase.end + 1, phase.width)
        start = phase.end
    return [count for count in found if count >= FEWEST]


def normal(chains):
    samples = np.random.default_rng(0).standard_normal((chains, 512))
    sums, squares = np.cumsum(samples, 1), np.cumsum(samples**2, 1)
    z = float(norm.ppf(0.975))
    print("widening | smallest coverage (at oracle's k) | median products / oracle's")
    for widening in (0.0, 1.0, 2.0, 3.0):
        coverage, ratios = [], []
        for oracle in np.geomspace(8, 300, 30):
            tolerance = z / np.sqrt(oracle)
            open_, held, used = np.ones(chains, bool), np.zeros(chains, bool), 0.0
            used = np.full(chains, 512)
            for m in looks(512):
                mean = sums[:, m - 1] / m
                s = np.sqrt((squares[:, m - 1] - m * mean**2) / (m - 1))
                quantile = float(
                    student_t_quantile(jnp.asarray(0.975), jnp.asarray(m - 1.0))
                )
                half = quantile * s / np.sqrt(m) * (1 + 1 / (4 * (m - 1)))
                half = half * (1 + widening / m)
                stop = open_ & (half <= tolerance)
                held[stop] = np.abs(mean[stop]) <= half[stop]
                used[stop] = m
                open_ &= ~stop
            if not open_.any():
                coverage.append((held.mean(), oracle))
                ratios.append(np.median(used) / oracle)
        worst, at = min(coverage)
        print(f"{widening:8.0f} | {worst:.4f} ({at:.0f}) | {np.median(ratios):.2f}")


def matrices(n):
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(2))
    i = np.arange(n)
    spectra = {
        "flat": 3 - 2 * i / (n - 1),
        "poly": (i + 1.0) ** -2,
        "exp": 0.7**i,
        "step": np.where(i < 50, 1.0, 1e-3),
        "slow": (i + 1.0) ** -0.5,
    }
    found = {name: (U * x) @ U.T for name, x in spectra.items()}
    points = rng.uniform(size=(n, 2))
    distances = ((points[:, None] - points[None]) ** 2).sum(-1)
    found["kernel"] = np.exp(-distances / (2 * 0.1**2)) + 1e-2 * np.eye(n)
    found["nonsymmetric"] = (U * (i + 1.0) ** -1) @ V.T + 0.05 * np.eye(n)
    return found


@eqx.filter_jit
def run(keys, A, estimator, k, rtol):
    semidefinite = isinstance(estimator, tx.XNysTraceEstimator)
    operator = lx.MatrixLinearOperator(A, PSD if semidefinite else ())

    def one(key):
        estimate = tx.trace(key, operator, k, estimator, rtol=rtol, throw=False)
        met = estimate.result == tx.RESULTS.successful
        interval = estimate.confidence_interval()
        return estimate.value, interval, estimate.stats["num_matvecs"], met

    return jax.vmap(one)(keys)


def coverage(n, num_keys, most):
    jax.config.update("jax_enable_x64", True)
    keys = jr.split(jr.key(7), num_keys)
    print("| estimator | matrix | rtol | holds | within | met | products | oracle |")
    print("|---|---|---|---|---|---|---|---|")
    every = []
    for label, estimator in ESTIMATORS.items():
        for name, dense in matrices(n).items():
            if label == "XNysTrace" and name == "nonsymmetric":
                continue
            A, truth = jnp.asarray(dense), np.trace(dense)
            errors = {}
            for k in BUDGETS:
                if k <= most:
                    values = np.asarray(run(keys, A, estimator, k, None)[0])
                    errors[k] = np.quantile(np.abs(values - truth), 0.95) / abs(truth)
            for rtol in RTOLS:
                results = run(keys, A, estimator, most, jnp.asarray(rtol))
                values, (low, high), used, met = jax.tree.map(np.asarray, results)
                if met.mean() < 0.95:
                    continue  # out of reach
                holds = np.mean((low <= truth) & (truth <= high))
                within = np.mean((np.abs(values - truth) <= rtol * np.abs(values))[met])
                enough = [k for k, error in errors.items() if error <= rtol]
                oracle = min(enough, default=most)
                every.append(np.median(used) / oracle)
                print(
                    f"| {label} | {name} | {rtol:g} | {100 * holds:.1f} | "
                    f"{100 * within:.1f} | {100 * met.mean():.0f} | "
                    f"{np.median(used):.0f} | {oracle} |",
                    flush=True,
                )
        jax.clear_caches()
    print(f"median products / oracle's: {np.median(every):.2f}")


def overhead(n, budgets):
    A = jnp.asarray(np.random.default_rng(0).standard_normal((n, n)), jnp.float32)
    A = A @ A.T / n
    for label, estimator in ESTIMATORS.items():
        for k in budgets:
            key, calls = jr.key(0), {}
            for name, rtol in (("fixed", None), ("tolerance", 0.0)):
                calls[name] = jax.jit(
                    lambda key, A, rtol=rtol, k=k, estimator=estimator: (
                        tx.trace(
                            key,
                            lx.MatrixLinearOperator(A, PSD),
                            k,
                            estimator,
                            rtol=rtol,
                            throw=False,
                        ).value
                    )
                )
            times = {name: [] for name in calls}
            for call in calls.values():
                jax.block_until_ready(call(key, A))
            for _ in range(7):
                for name, call in calls.items():
                    start = time.perf_counter()
                    jax.block_until_ready(call(key, A))
                    times[name].append(time.perf_counter() - start)
            fixed, looped = (np.median(times[name]) for name in calls)
            print(f"{label}, k = {k}: {looped / fixed:.2f} ({1e3 * fixed:.0f} ms)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["normal", "coverage", "overhead"])
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--most", type=int, default=240)
    given = parser.parse_args()
    match given.what:
        case "normal":
            normal(100_000)
        case "coverage":
            coverage(given.n, given.keys, given.most)
        case "overhead":
            overhead(4000, (60, 240, 960))


if __name__ == "__main__":
    main()
