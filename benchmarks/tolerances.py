"""Estimates to a tolerance: are the intervals honest, and what do they cost?

    python benchmarks/tolerances.py normal       # the rule, for normal samples
    python benchmarks/tolerances.py coverage     # the table of the docs
    python benchmarks/tolerances.py overhead     # time against a fixed budget
    python benchmarks/tolerances.py loops        # against differentiating the loop

- `normal`: the smallest coverage over all tolerances, and products over those of an oracle
  that knows the variance, simulated for independent normal samples;
- `coverage`: for every estimator, spectrum and tolerance, over many keys: the share of
  intervals that hold the truth, and of values within the tolerance; median products, and
  those of an oracle that knows the root mean square error of every fixed budget: the
  smallest budget for which 1.96 of it are within the tolerance;
- `overhead`: a dense matrix of order 4000, a tolerance that is not met against the same
  number of products, interleaved in one process, medians;
- `loops`: value and gradient of an estimate to a tolerance that is met by a part of the
  budget, against loops through which JAX differentiates: Hutchinson's estimator as one
  writes it by hand, in steps of equal blocks, and the very loop of this library. Medians
  of the ratios of time of interleaved calls, and temporary memory of the programs.
"""

import argparse
import bisect
import functools
import itertools
import time
import unittest.mock
from collections.abc import Callable

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jax.scipy.stats import norm

import traceax as tx
from traceax import _tolerance as tolerance_module
from traceax._estimate import student_t_quantile
from traceax._operators.space import space_of
from traceax._tolerance import LEAST_PRODUCTS, NO_PROGRESS_METER, make_stop, step_width

PSD = lx.positive_semidefinite_tag
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}
RTOLS = (1e-1, 1e-2, 1e-3)


def looks(most):
    """The numbers of probes at which error bars are looked at."""
    width = step_width(most, LEAST_PRODUCTS)
    found, due = [], LEAST_PRODUCTS
    for count in range(width, most + 1, width):
        if count >= due or count + width > most:
            found.append(count)
            due = count + max(width, count // 3)
    return found


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
                freedom = jnp.asarray(m - 1.0)
                quantile = float(student_t_quantile(0.95, freedom))
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


def oracle(keys, dense, label, most):
    """The smallest fixed budget by tolerance, found by bisection over all budgets."""
    estimator, truth = ESTIMATORS[label], np.trace(dense)

    @functools.cache
    def error(k):
        if (
            label == "Hutchinson"
        ):  # known: of signs, only what is off the diagonal counts
            off = (dense + dense.T) / 2 * (1 - np.eye(len(dense)))
            return np.sqrt(2 * np.sum(off**2) / k)
        values = run(keys, jnp.asarray(dense), estimator, k, None)[0]
        return np.sqrt(np.mean((np.asarray(values) - truth) ** 2))

    # XTrace takes pairs of products.
    budgets = range(4, most + 1, 2) if label == "XTrace" else range(2, most + 1)

    def smallest(rtol):
        # Of what doesn't fall; `most` if none is enough.
        at = bisect.bisect_left(
            budgets[:-1], True, key=lambda k: 1.96 * error(k) <= rtol * abs(truth)
        )
        return budgets[at]

    return smallest


def coverage(labels, n, num_keys, most):
    jax.config.update("jax_enable_x64", True)
    keys = jr.split(jr.key(7), num_keys)
    print("| estimator | matrix | rtol | holds | within | met | products | oracle |")
    print("|---|---|---|---|---|---|---|---|")
    for label in labels:
        ratios = []
        for name, dense in matrices(n).items():
            if label == "XNysTrace" and name == "nonsymmetric":
                continue
            A, truth = jnp.asarray(dense), np.trace(dense)
            needed = oracle(keys, dense, label, most)
            for rtol in RTOLS:
                results = run(keys, A, ESTIMATORS[label], most, jnp.asarray(rtol))
                values, (low, high), used, met = jax.tree.map(np.asarray, results)
                if met.mean() < 0.95:
                    continue  # out of reach
                holds = np.mean((low <= truth) & (truth <= high))
                within = np.mean((np.abs(values - truth) <= rtol * np.abs(values))[met])
                ratios.append((np.median(used) / needed(rtol), needed(rtol)))
                print(
                    f"| {label} | {name} | {rtol:g} | {100 * holds:.1f} | "
                    f"{100 * within:.1f} | {100 * met.mean():.0f} | "
                    f"{np.median(used):.0f} | {needed(rtol)} |",
                    flush=True,
                )
        for least in (0, LEAST_PRODUCTS):
            of = [ratio for ratio, k in ratios if k >= least]
            print(
                f"{label}, where the oracle needs at least {least}: products / oracle's "
                f"median {np.median(of):.2f}, {min(of):.2f} to {max(of):.2f}",
                flush=True,
            )
        jax.clear_caches()


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


def kernel_squared(theta):
    """K K of order 1000 for a length scale and an amplitude: dense."""
    points = jnp.asarray(np.random.default_rng(0).uniform(size=(1000, 2)), jnp.float32)
    distances = jnp.sum((points[:, None] - points[None]) ** 2, axis=-1)
    K = jnp.exp(theta[1] - distances / (2 * jnp.exp(theta[0]) ** 2))
    operator = lx.MatrixLinearOperator(K, lx.symmetric_tag)
    return operator @ operator


def network_hessian(theta):
    """Of the loss of a network with 1,810 parameters on 200 inputs: matrix-free."""
    x = jnp.asarray(np.random.default_rng(1).uniform(size=(200, 64)), jnp.float32)

    def loss(theta):
        w, u = theta[: 64 * 24].reshape(64, 24), theta[-250:-10].reshape(24, 10)
        logits = jnp.tanh(x @ w + theta[64 * 24 : 65 * 24]) @ u + theta[-10:]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    return lx.JacobianLinearOperator(
        lambda theta, _: jax.grad(loss)(theta), theta, tags=lx.symmetric_tag
    )


OPERATORS = {
    "dense": (kernel_squared, jnp.log(jnp.asarray([0.2, 1.0], jnp.float32))),
    "matrix-free": (
        network_hessian,
        jnp.asarray(np.random.default_rng(2).normal(size=1810) / 8, jnp.float32),
    ),
}
KINDS = ("checkpointed", "bounded")


def by_hand(operator, k, products, kind, width=16):
    """Hutchinson's estimator; after how many products its loop stops is given."""
    n = operator.in_size()

    def step(carry):
        count, total, squares, _ = carry
        probes = jr.rademacher(jr.fold_in(jr.key(0), count), (width, n), jnp.float32)
        samples = jnp.sum(probes * jax.vmap(operator.mv)(probes), axis=1)
        count, total = count + width, total + jnp.sum(samples)
        squares = squares + jnp.sum(samples**2)
        variance = (squares - total**2 / count) / (count - 1)
        return count, total, squares, jax.lax.stop_gradient(variance / count)

    count, total, _, _ = eqxi.while_loop(
        lambda carry: (carry[0] < products) & (carry[3] > 0),
        step,
        (jnp.asarray(0), jnp.asarray(0.0), jnp.asarray(0.0), jnp.asarray(jnp.inf)),
        max_steps=k // width,
        kind=kind,
    )
    return total / count


def own_loop(operator, k, estimator, rtol, kind):
    """This library's loop, differentiated like any other."""

    class Lax:
        def __getattr__(self, name):
            return getattr(jax.lax, name)

        def while_loop(self, proceed, body, init):
            steps = k // step_width(k, LEAST_PRODUCTS)
            return eqxi.while_loop(proceed, body, init, max_steps=steps, kind=kind)

    class Jax:
        lax = Lax()

        def __getattr__(self, name):
            return getattr(jax, name)

    state = estimator.init(jr.key(0), operator)
    dtype = space_of(operator).compute_dtype
    stop = make_stop(rtol, None, 0.95, NO_PROGRESS_METER, dtype, "loops")
    with unittest.mock.patch.object(tolerance_module, "jax", Jax()):
        return estimator.compute_until(state, k, stop)[0]


def loops(k, repetitions):
    print("| operator | estimator | products | loop | time | memory, MB | ours, MB |")
    print("|---|---|---|---|---|---|---|")
    for (name, (build, theta)), label in itertools.product(
        OPERATORS.items(), ("Hutchinson", "XTrace")
    ):
        estimator = ESTIMATORS[label]

        def ours(theta, rtol, build=build, estimator=estimator):
            estimate = tx.trace(
                jr.key(0), build(theta), k, estimator, rtol=rtol, throw=False
            )
            return estimate.value, estimate.stats["num_matvecs"]

        # The loosest tolerance that takes a quarter of the budget.
        used = jax.jit(lambda rtol, ours=ours, theta=theta: ours(theta, rtol)[1])
        rtol = next(x for x in 10 ** -jnp.arange(0, 4, 0.05) if used(x) >= k // 4)
        products = used(rtol)
        programs: dict[str, Callable] = {
            "ours": lambda theta, rtol, _, ours=ours: ours(theta, rtol)[0]
        }
        for kind in KINDS:
            programs[f"by hand, {kind}"] = (
                lambda theta, _, products, kind=kind, build=build: by_hand(
                    build(theta), k, products, kind
                )
            )
            if label == "XTrace":
                continue  # its loop has no reverse mode
            programs[f"the same, {kind}"] = (
                lambda theta, rtol, _, kind=kind, build=build, estimator=estimator: (
                    own_loop(build(theta), k, estimator, rtol, kind)
                )
            )
        compiled, given = {}, (theta, rtol, products)
        for loop, program in programs.items():
            call = jax.jit(jax.value_and_grad(program))
            compiled[loop] = call.lower(*given).compile()
            jax.block_until_ready(compiled[loop](*given))
        times = {loop: [] for loop in compiled}
        order = np.random.default_rng(0)  # none always after the same other
        for _ in range(repetitions):
            for loop in order.permutation(list(compiled)):
                start = time.perf_counter()
                jax.block_until_ready(compiled[loop](*given))
                times[loop].append(time.perf_counter() - start)
        memory = {
            loop: call.memory_analysis().temp_size_in_bytes / 1e6
            for loop, call in compiled.items()
        }
        own = np.asarray(times.pop("ours"))
        for loop, taken in times.items():
            print(
                f"| {name} | {label} | {products} of {k} | {loop} | "
                f"{np.median(np.asarray(taken) / own):.2f} | {memory[loop]:.3g} | "
                f"{memory['ours']:.3g} |",
                flush=True,
            )
        print(f"({name}, {label}: {1e3 * np.median(own):.0f} ms)", flush=True)
        jax.clear_caches()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["normal", "coverage", "overhead", "loops"])
    parser.add_argument("--estimators", nargs="*", default=list(ESTIMATORS))
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--most", type=int, default=240)
    given = parser.parse_args()
    match given.what:
        case "normal":
            normal(100_000)
        case "coverage":
            coverage(given.estimators, given.n, given.keys, given.most)
        case "overhead":
            overhead(4000, (60, 240, 960))
        case "loops":
            loops(256, 25)


if __name__ == "__main__":
    main()
