"""Coverage and cost of estimates to a tolerance.

    python benchmarks/tolerances.py normal       # the stopping rule, for normal samples
    python benchmarks/tolerances.py coverage     # a table of benchmarks/tolerances.md
    python benchmarks/tolerances.py overhead     # time compared with a fixed budget
    python benchmarks/tolerances.py loops        # compared with differentiating the loop

- `normal` simulates independent normal samples. It prints the smallest coverage over all
  tolerances, and the product count divided by an oracle's count. The oracle knows the variance;
- `coverage` runs every estimator, matrix and tolerance over many keys. It prints the intervals'
  coverage, the percentage of values within the tolerance, and the median product count. An
  oracle knows the root mean square error for every fixed budget. Its count is the smallest
  budget for which 1.96 root mean square errors are within the tolerance;
- `overhead` times a tolerance that isn't met, and a fixed budget with the same product count,
  for a dense matrix of order 4000. Times are medians of interleaved runs in one process;
- `loops` times value and gradient for an estimate that meets its tolerance with part of the
  budget. It compares them with loops that JAX differentiates: a handwritten loop for
  Hutchinson's estimator, with equal blocks, and this library's own loop. It prints median
  ratios of interleaved times, and the programs' temporary memory.
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


def check_counts(largest):
    """The probe counts at which a loop checks its error bar."""
    width = step_width(largest, LEAST_PRODUCTS)
    counts, next_check = [], LEAST_PRODUCTS
    for count in range(width, largest + 1, width):
        if count >= next_check or count + width > largest:
            counts.append(count)
            next_check = count + max(width, count // 3)
    return counts


def normal(chains):
    samples = np.random.default_rng(0).standard_normal((chains, 512))
    sums, squares = np.cumsum(samples, 1), np.cumsum(samples**2, 1)
    z = float(norm.ppf(0.975))
    print(
        "widening | smallest coverage (the oracle's products) | median products / the oracle's"
    )
    for widening in (0.0, 1.0, 2.0, 3.0):
        coverage, ratios = [], []
        for oracle_count in np.geomspace(8, 300, 30):
            tolerance = z / np.sqrt(oracle_count)
            running, covered = np.ones(chains, bool), np.zeros(chains, bool)
            used = np.full(chains, 512)
            for m in check_counts(512):
                mean = sums[:, m - 1] / m
                s = np.sqrt((squares[:, m - 1] - m * mean**2) / (m - 1))
                freedom = jnp.asarray(m - 1.0)
                quantile = float(student_t_quantile(0.95, freedom))
                half = quantile * s / np.sqrt(m) * (1 + 1 / (4 * (m - 1)))
                half = half * (1 + widening / m)
                stop = running & (half <= tolerance)
                covered[stop] = np.abs(mean[stop]) <= half[stop]
                used[stop] = m
                running &= ~stop
            if not running.any():
                coverage.append((covered.mean(), oracle_count))
                ratios.append(np.median(used) / oracle_count)
        lowest, at_count = min(coverage)
        print(
            f"{widening:8.0f} | {lowest:.4f} ({at_count:.0f}) | {np.median(ratios):.2f}"
        )


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
    matrices_by_name = {name: (U * x) @ U.T for name, x in spectra.items()}
    points = rng.uniform(size=(n, 2))
    distances = ((points[:, None] - points[None]) ** 2).sum(-1)
    matrices_by_name["kernel"] = np.exp(-distances / (2 * 0.1**2)) + 1e-2 * np.eye(n)
    matrices_by_name["nonsymmetric"] = (U * (i + 1.0) ** -1) @ V.T + 0.05 * np.eye(n)
    return matrices_by_name


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


def oracle(keys, dense, label, largest):
    """Return a function from a tolerance to the smallest fixed budget that meets it."""
    estimator, truth = ESTIMATORS[label], np.trace(dense)

    @functools.cache
    def error(k):
        if label == "Hutchinson":
            # We know the variance for signs, which depends on off-diagonal entries alone.
            off_diagonal = (dense + dense.T) / 2 * (1 - np.eye(len(dense)))
            return np.sqrt(2 * np.sum(off_diagonal**2) / k)
        values = run(keys, jnp.asarray(dense), estimator, k, None)[0]
        return np.sqrt(np.mean((np.asarray(values) - truth) ** 2))

    # XTrace takes pairs of products.
    budgets = range(4, largest + 1, 2) if label == "XTrace" else range(2, largest + 1)

    def smallest(rtol):
        # We assume that the error falls with the budget, and bisect. If no budget is
        # enough, the result is the largest one.
        index = bisect.bisect_left(
            budgets[:-1], True, key=lambda k: 1.96 * error(k) <= rtol * abs(truth)
        )
        return budgets[index]

    return smallest


def coverage(labels, n, num_keys, largest):
    jax.config.update("jax_enable_x64", True)
    keys = jr.split(jr.key(7), num_keys)
    print(
        "| estimator | matrix | rtol | coverage (%) | within the tolerance (%) "
        "| met (%) | products | oracle's products |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for label in labels:
        ratios = []
        for name, dense in matrices(n).items():
            if label == "XNysTrace" and name == "nonsymmetric":
                continue
            A, truth = jnp.asarray(dense), np.trace(dense)
            needed = oracle(keys, dense, label, largest)
            for rtol in RTOLS:
                results = run(keys, A, ESTIMATORS[label], largest, jnp.asarray(rtol))
                values, (low, high), used, met = jax.tree.map(np.asarray, results)
                if met.mean() < 0.95:
                    continue  # the budget can't meet this tolerance
                coverage_rate = np.mean((low <= truth) & (truth <= high))
                within = np.mean((np.abs(values - truth) <= rtol * np.abs(values))[met])
                ratios.append((np.median(used) / needed(rtol), needed(rtol)))
                print(
                    f"| {label} | {name} | {rtol:g} | {100 * coverage_rate:.1f} | "
                    f"{100 * within:.1f} | {100 * met.mean():.0f} | "
                    f"{np.median(used):.0f} | {needed(rtol)} |",
                    flush=True,
                )
        for least in (0, LEAST_PRODUCTS):
            selected = [ratio for ratio, k in ratios if k >= least]
            print(
                f"{label}, products / the oracle's, if the oracle needs at least {least}: "
                f"median {np.median(selected):.2f}, "
                f"from {min(selected):.2f} to {max(selected):.2f}",
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
            print(
                f"{label}, k = {k}: time ratio {looped / fixed:.2f} (fixed: {1e3 * fixed:.0f} ms)"
            )


def kernel_squared(theta):
    """K K, for a dense kernel matrix K of order 1000.

    `theta` is a log length scale and a log amplitude.
    """
    points = jnp.asarray(np.random.default_rng(0).uniform(size=(1000, 2)), jnp.float32)
    distances = jnp.sum((points[:, None] - points[None]) ** 2, axis=-1)
    K = jnp.exp(theta[1] - distances / (2 * jnp.exp(theta[0]) ** 2))
    operator = lx.MatrixLinearOperator(K, lx.symmetric_tag)
    return operator @ operator


def network_hessian(theta):
    """The Hessian of a network's loss, matrix-free: 1,810 parameters, 200 inputs."""
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


def by_hand(operator, k, stop_after, kind, width=16):
    """Hutchinson's estimator in a handwritten loop, which stops after a given product count."""
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
        lambda carry: (carry[0] < stop_after) & (carry[3] > 0),
        step,
        (jnp.asarray(0), jnp.asarray(0.0), jnp.asarray(0.0), jnp.asarray(jnp.inf)),
        max_steps=k // width,
        kind=kind,
    )
    return total / count


def own_loop(operator, k, estimator, rtol, kind):
    """This library's loop, which JAX differentiates like any other loop."""

    def loop(proceed, body, start):
        steps = k // step_width(k, LEAST_PRODUCTS)
        return eqxi.while_loop(proceed, body, start, max_steps=steps, kind=kind)

    state = estimator.init(jr.key(0), operator)
    dtype = space_of(operator).compute_dtype
    stop = make_stop(rtol, None, 0.95, NO_PROGRESS_METER, dtype, "loops")
    with unittest.mock.patch.object(tolerance_module, "while_loop", loop):
        return estimator.compute_until(state, k, stop)[0]


def loops(k, repetitions):
    print(
        "| operator | estimator | products | loop | time (ratio to traceax) | "
        "memory (MB) | memory of traceax (MB) |"
    )
    print("|---|---|---|---|---|---|---|")
    for (name, (make_operator, theta)), label in itertools.product(
        OPERATORS.items(), ("Hutchinson", "XTrace")
    ):
        estimator = ESTIMATORS[label]

        def ours(theta, rtol, make_operator=make_operator, estimator=estimator):
            estimate = tx.trace(
                jr.key(0), make_operator(theta), k, estimator, rtol=rtol, throw=False
            )
            return estimate.value, estimate.stats["num_matvecs"]

        # We take the loosest tolerance that needs a quarter of the budget.
        used = jax.jit(lambda rtol, ours=ours, theta=theta: ours(theta, rtol)[1])
        rtol = next(x for x in 10 ** -jnp.arange(0, 4, 0.05) if used(x) >= k // 4)
        products = used(rtol)
        programs: dict[str, Callable] = {
            "ours": lambda theta, rtol, _, ours=ours: ours(theta, rtol)[0]
        }
        for kind in KINDS:
            programs[f"by hand, {kind}"] = (
                lambda theta, _, products, kind=kind, make_operator=make_operator: (
                    by_hand(make_operator(theta), k, products, kind)
                )
            )
            if label == "XTrace":
                continue  # XTrace's loop has no reverse mode
            programs[f"our loop, {kind}"] = (
                lambda theta, rtol, _, kind=kind, make_operator=make_operator, estimator=estimator: (
                    own_loop(make_operator(theta), k, estimator, rtol, kind)
                )
            )
        compiled, arguments = {}, (theta, rtol, products)
        for loop, program in programs.items():
            call = jax.jit(jax.value_and_grad(program))
            compiled[loop] = call.lower(*arguments).compile()
            jax.block_until_ready(compiled[loop](*arguments))
        times = {loop: [] for loop in compiled}
        # We shuffle, so that no loop always follows the same other loop.
        order = np.random.default_rng(0)
        for _ in range(repetitions):
            for loop in order.permutation(list(compiled)):
                start = time.perf_counter()
                jax.block_until_ready(compiled[loop](*arguments))
                times[loop].append(time.perf_counter() - start)
        memory = {
            loop: call.memory_analysis().temp_size_in_bytes / 1e6
            for loop, call in compiled.items()
        }
        our_times = np.asarray(times.pop("ours"))
        for loop, loop_times in times.items():
            print(
                f"| {name} | {label} | {products} of {k} | {loop} | "
                f"{np.median(np.asarray(loop_times) / our_times):.2f} | {memory[loop]:.3g} | "
                f"{memory['ours']:.3g} |",
                flush=True,
            )
        print(f"({name}, {label}: {1e3 * np.median(our_times):.0f} ms)", flush=True)
        jax.clear_caches()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["normal", "coverage", "overhead", "loops"])
    parser.add_argument("--estimators", nargs="*", default=list(ESTIMATORS))
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--most", type=int, default=240)
    options = parser.parse_args()
    match options.what:
        case "normal":
            normal(100_000)
        case "coverage":
            coverage(options.estimators, options.n, options.keys, options.most)
        case "overhead":
            overhead(4000, (60, 240, 960))
        case "loops":
            loops(256, 25)


if __name__ == "__main__":
    main()
