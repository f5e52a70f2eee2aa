"""Gaussian likelihoods against Cholesky's: errors, error bars, and time.

    JAX_ENABLE_X64=1 python benchmarks/likelihood.py [n] [columns] [products]

The first table is of errors over keys: of the log-determinant, of its derivative by the
length scale, and of the quadratic term; the second of the time of a value and its gradient
over Cholesky's, medians of interleaved runs in one process, pivots held.
"""

import math
import statistics
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import traceax as tx

KEYS, REPEATS = 8, 5
PROBLEMS = [
    ("plane, Matern 5/2", 2, 0.2, "matern 5/2", 1e-2),
    ("8-D, Matern 3/2", 8, 2.0, "matern 3/2", 1e-2),
    ("6-D, RBF", 6, 0.6, "rbf", 1e-3),
    ("plane, Matern 3/2", 2, 0.3, "matern 3/2", 1e-4),
]


def of_squared(kind, squared):
    """The kernel of squared distances."""
    if kind == "rbf":
        return jnp.exp(-squared / 2)
    order = 3 if kind == "matern 3/2" else 5
    # The root has no derivative at 0.
    r = jnp.sqrt(order * jnp.where(squared == 0, 1, squared))
    polynomial = 1 + r if order == 3 else 1 + r + r**2 / 3
    return jnp.where(squared == 0, 1, polynomial * jnp.exp(-r))


class Kernel(eqx.Module):
    length: jax.Array
    kind: str = eqx.field(static=True)

    def __call__(self, a, b):
        a, b = a / self.length, b / self.length
        squared = sum((a[i] - b[i]) ** 2 for i in range(len(a)))
        return of_squared(self.kind, squared)


def data(d, noise, n):
    rng = np.random.default_rng(0)
    x = rng.random((n, d)) if d < 8 else rng.standard_normal((n, d))
    y = np.sin(5 * x[:, 0]) + x[:, 1] + noise**0.5 * rng.standard_normal(n)
    return jnp.asarray(x), jnp.asarray(y)


def terms_by_cholesky(x, y, length, kind, noise):
    """The log-determinant, the quadratic term, and the log likelihood."""
    z = x / length
    squared = jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1)[None] - 2 * z @ z.T
    squared = jnp.where(jnp.eye(len(x), dtype=bool), 0, jnp.maximum(squared, 0))
    A = of_squared(kind, squared) + noise * jnp.eye(len(x))
    lower = jnp.linalg.cholesky(A)
    half = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
    logdet, form = 2 * jnp.sum(jnp.log(jnp.diag(lower))), half @ half
    return logdet, form, -(logdet + form + len(x) * math.log(2 * math.pi)) / 2


def accuracy(problem, n, columns, k):
    name, d, length, kind, noise = problem
    x, y = data(d, noise, n)
    step = 1e-4 * length
    exact, form, _ = terms_by_cholesky(x, y, length, kind, noise)
    up, down = (
        terms_by_cholesky(x, y, length + s, kind, noise)[0] for s in (step, -step)
    )
    slope = (up - down) / (2 * step)

    @jax.jit
    def run(key):
        def logdet(length):
            K = tx.KernelLinearOperator(Kernel(length, kind), x)
            terms = tx.inv_quad_logdet(
                key, K, y, k, shift=noise, preconditioner=columns, throw=False
            )
            return terms.logdet.value, (terms.logdet.standard_error, terms.inv_quad)

        (value, (error, form)), slope = jax.value_and_grad(logdet, has_aux=True)(
            jnp.asarray(length)
        )
        return value, error, form.value, slope

    runs = [run(key) for key in jax.random.split(jax.random.key(0), KEYS)]
    values, bars, forms, slopes = map(np.asarray, zip(*runs, strict=True))

    def rms(x):
        return float(np.sqrt(np.mean(np.asarray(x) ** 2)))

    print(
        f"| {name}, {noise:.0e} | {exact:.0f} | {rms(values - exact):.3g} "
        f"| {bars.mean():.3g} | {rms(slopes / slope - 1):.1e} "
        f"| {rms(forms / form - 1):.1e} |",
        flush=True,
    )


def speed(problem, n, columns, k):
    name, d, length, kind, noise = problem
    x, y = data(d, noise, n)
    K = tx.KernelLinearOperator(Kernel(jnp.full(d, length), kind), x)
    pivots = tx.choose_pivots(jax.random.key(0), K, columns, shift=noise)

    def ours(length, noise):
        K = tx.KernelLinearOperator(Kernel(length, kind), x)
        return tx.gaussian_log_likelihood(
            jax.random.key(0), K, y, k, shift=noise, preconditioner=pivots, throw=False
        ).value

    def dense(length, noise):
        return terms_by_cholesky(x, y, length, kind, noise)[2]

    arguments = jnp.full(d, length), jnp.asarray(noise)
    functions = [jax.jit(jax.value_and_grad(f, (0, 1))) for f in (ours, dense)]
    times = [[], []]
    for repeat in range(REPEATS + 1):
        for f, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            if repeat:
                taken.append(time.perf_counter() - start)
    ours, dense = map(statistics.median, times)
    print(
        f"| {name} | {n} | {ours:.2f} | {dense:.2f} | {ours / dense:.2f} |", flush=True
    )


if __name__ == "__main__":
    given = [int(x) for x in sys.argv[1:]]
    n, columns, k = given + [2000, 600, 32][len(given) :]
    print("| problem, noise | log det | error | bar | slope | quadratic term |")
    print("|---|---|---|---|---|---|")
    for problem in PROBLEMS:
        accuracy(problem, n, columns, k)
    print("\n| problem | n | ours, s | Cholesky, s | ratio |\n|---|---|---|---|---|")
    for problem in PROBLEMS[:2]:
        speed(problem, n, columns, k)
