"""Likelihoods from one Cholesky factorisation: time, memory, compile time and error bars.

    python benchmarks/exact.py [sizes]
    python benchmarks/exact.py rounding
    python benchmarks/exact.py lines

The first table times the log likelihood and its gradient in a length scale and the noise, in 32
and in 64 bits. It compares our exact answer, which you get up to 4,000 or 6,000 points if you omit
k, with code written by hand with `jnp.linalg.cholesky` and `jax.value_and_grad`, and with an
estimate that holds columns from `choose_pivots`. Times are medians of interleaved runs in one
process. Compile times are CPU seconds for the second compilation in a process. Memory is for XLA's
temporaries, and its unit is one n x n matrix.

`rounding` compares answers in 32 bits with dense algebra in 64 bits, for 100 kernels. It prints
the coverage of 95 % intervals, and the root mean square ratio of error to error bar. `lines`
does the same for smooth kernels on a line, for which a factorisation makes the largest errors.
"""

import math
import statistics
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve

import traceax as tx
import traceax._exact.cholesky

REPEATS, PROBLEMS = 9, 100
KEY = jax.random.key(0)
ROOTS = {"matern 1/2": 1.0, "matern 3/2": 3.0, "matern 5/2": 5.0}


class Kernel(eqx.Module):
    length: jax.Array
    kind: str = eqx.field(static=True)

    def __call__(self, a, b):
        squared = sum((a[i] - b[i]) ** 2 for i in range(len(a))) / self.length**2
        if self.kind == "rbf":
            return jnp.exp(-squared / 2)
        # We replace 0, where the root has no derivative.
        r = jnp.sqrt(ROOTS[self.kind] * jnp.where(squared == 0, 1, squared))
        factor = {"matern 1/2": 1, "matern 3/2": 1 + r, "matern 5/2": 1 + r + r**2 / 3}
        return jnp.where(squared == 0, 1, factor[self.kind] * jnp.exp(-r))


def by_hand(parameters, x, y, kind):
    length, noise = parameters
    kernel = Kernel(length, kind)
    K = jax.vmap(lambda a: jax.vmap(lambda b: kernel(a, b))(x))(x)
    lower = jnp.linalg.cholesky(K + noise * jnp.eye(len(x), dtype=x.dtype))
    solution = cho_solve((lower, True), y)
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(lower)))
    return -(y @ solution + logdet + len(x) * math.log(2 * math.pi)) / 2


def by_traceax(parameters, x, y, kind, **options):
    length, noise = parameters
    K = tx.KernelLinearOperator(Kernel(length, kind), x)
    return tx.gaussian_log_likelihood(KEY, K, y, shift=noise, **options).value


def compiled(fn, *arguments):
    """The program, and the CPU seconds of its second compilation."""
    for _ in range(2):
        jax.clear_caches()
        start = time.process_time()
        program = jax.jit(jax.value_and_grad(fn)).lower(*arguments).compile()
        seconds = time.process_time() - start
    return program, seconds


def compare(n, dimension, kind):
    dtype = jnp.zeros(()).dtype
    x = jax.random.uniform(jax.random.key(1), (n, dimension), dtype)
    y = jnp.sin(5 * x[:, 0])
    parameters = jnp.asarray(0.5, dtype), jnp.asarray(0.01, dtype)
    K = tx.KernelLinearOperator(Kernel(parameters[0], kind), x)
    pivots = tx.choose_pivots(KEY, K, shift=parameters[1])
    estimate_options = {
        "estimator": tx.KrylovAwareEstimator(),
        "preconditioner": pivots,
    }
    programs = [
        compiled(lambda *a, fn=fn, options=options: fn(*a, kind, **options), parameters, x, y)
        for fn, options in ((by_traceax, {}), (by_hand, {}), (by_traceax, estimate_options))
    ]  # fmt: skip
    times = [[] for _ in programs]
    for _ in range(REPEATS):
        for (program, _), run_times in zip(programs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(parameters, x, y))
            run_times.append(time.perf_counter() - start)
    seconds = [statistics.median(t) for t in times]
    sizes = [p.memory_analysis().temp_size_in_bytes for p, _ in programs]
    sizes = [s / n**2 / dtype.itemsize for s in sizes]
    compile_times = [s for _, s in programs]
    print(
        f"| {dimension}-D {kind} | {n:,} | {8 * dtype.itemsize} "
        f"| {seconds[0]:.3f} | {seconds[0] / seconds[1]:.2f} | {seconds[0] / seconds[2]:.2f} "
        f"| {sizes[0]:.1f}, {sizes[1]:.1f} "
        f"| {compile_times[0]:.2f}, {compile_times[1]:.2f}, {compile_times[2]:.2f} |",
        flush=True,
    )


def main(sizes):
    print(
        "| kernel | n | bits | exact time (s) | exact / by hand | exact / estimate "
        "| memory: exact, by hand ",
        end="",
    )
    print("| compile time (s): exact, by hand, estimate |")
    print("|---|---|---|---|---|---|---|---|")
    # We also run above the limit, to see where it should lie.
    traceax._exact.cholesky.LARGEST = max(sizes)
    for bits in (32, 64):
        jax.config.update("jax_enable_x64", bits == 64)
        for n in sizes:
            compare(n, 2, "rbf")
            compare(n, 8, "matern 5/2")


@eqx.filter_jit
def in_32_bits(kernel, x, y, noise):
    K = tx.KernelLinearOperator(kernel, x)
    terms = tx.inv_quad_logdet(KEY, K, y, shift=noise)
    likelihood = tx.gaussian_log_likelihood(KEY, K, y, shift=noise)
    inverse = tx.trace_inverse(KEY, K, shift=noise)
    return likelihood, terms.logdet, terms.inv_quad, inverse


def rounding():
    rng, covered, ratios = np.random.default_rng(0), [], []
    for _ in range(PROBLEMS):
        kind = str(rng.choice(["rbf", *ROOTS]))
        n, dimension = int(rng.choice([100, 300, 700])), int(rng.choice([1, 2, 4, 8]))
        x = rng.random((n, dimension)).astype(np.float32)
        length, noise = (10 ** rng.uniform([-1, -4], [0.3, 0])).astype(np.float32)
        y = np.sin(5 * x[:, 0]) + 0.1 * rng.standard_normal(n).astype(np.float32)
        arguments = Kernel(jnp.asarray(length), kind), *map(jnp.asarray, (x, y, noise))
        estimates = in_32_bits(*arguments)
        intervals = [e.confidence_interval() for e in estimates]
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(a), float) for a in (length, x, y, noise)]
            K = tx.KernelLinearOperator(Kernel(wide[0], kind), wide[1]).as_matrix()
            A, y = np.asarray(K + wide[3] * jnp.eye(n)), np.asarray(wide[2])
        logdet, form = np.linalg.slogdet(A)[1], y @ np.linalg.solve(A, y)
        likelihood = -(logdet + form + n * math.log(2 * math.pi)) / 2
        truths = likelihood, logdet, form, np.trace(np.linalg.inv(A))
        triples = list(zip(estimates, intervals, truths, strict=True))
        covered.append([float(a) <= t <= float(b) for _, (a, b), t in triples])
        ratios.append([(float(e) - t) / float(e.standard_error) for e, _, t in triples])
    print("| quantity | coverage | RMS error / error bar |")
    print("|---|---|---|")
    names = "likelihood", "log-determinant", "quadratic form", "trace of the inverse"
    relative_errors = np.sqrt(np.mean(np.square(ratios), axis=0))
    for row in zip(names, np.mean(covered, axis=0), relative_errors, strict=True):
        print("| {} | {:.2f} | {:.2f} |".format(*row))


def lines():
    """Smooth kernels on a line, for which a factorisation makes coherent errors."""
    ratios = []
    for n in (100, 300, 600, 1200, 2000, 4000):
        rng = np.random.default_rng(n)
        x = rng.random((n, 1)).astype(np.float32).astype(float)
        cells = [
            (length, noise, kind, noisy)
            for length in (0.1, 0.3, 1.0)
            for noise in np.float32([1e-3, 1e-2, 1e-1])
            for kind in ("rbf", "matern 5/2")
            for noisy in (0, 1)
        ]
        for length, noise, kind, noisy in cells:
            r2 = (x - x.T) ** 2 / length**2
            r = np.sqrt(5 * r2)
            K = np.exp(-r2 / 2) if kind == "rbf" else (1 + r + r**2 / 3) * np.exp(-r)
            K = K.astype(np.float32)
            y = np.sin(5 * x[:, 0]) + noisy * noise**0.5 * rng.standard_normal(n)
            y = y.astype(np.float32)
            A = K.astype(float) + float(noise) * np.eye(n)
            truths = np.linalg.slogdet(A)[1], y @ np.linalg.solve(A, y.astype(float))
            estimates = tx.inv_quad_logdet(
                KEY, tx.as_operator(jnp.asarray(K)), jnp.asarray(y), shift=noise
            )
            pairs = zip((estimates.logdet, estimates.inv_quad), truths, strict=True)
            ratios.append(
                [(float(e.value) - t) / float(e.standard_error) for e, t in pairs]
            )
    relative_sizes = np.abs(ratios)
    print(f"{len(ratios)} problems: log-determinant, quadratic form")
    print("coverage of intervals", np.mean(relative_sizes < 1.96, axis=0))
    print("largest error / error bar", relative_sizes.max(axis=0))


if __name__ == "__main__":
    if sys.argv[1:] == ["rounding"]:
        rounding()
    elif sys.argv[1:] == ["lines"]:
        lines()
    else:
        main([int(a) for a in sys.argv[1:]] or [500, 1000, 2000, 4000])
