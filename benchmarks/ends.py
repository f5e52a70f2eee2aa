"""Error bars for functions that change between the Ritz values and the spectrum's ends.

    python benchmarks/ends.py

These functions have no bracket, and are flat on the Ritz values. Each line shows the truth, the
root mean square error, the mean standard error, and the coverage of 95 % intervals, over 100
keys.
"""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tx

KEYS = 100


def differences(n, order):
    """`D^T D` for the difference matrix D. Order 1 gives the Laplacian of a path."""
    steps = np.diff(np.eye(n), n=order, axis=0)
    return steps.T @ steps


def grid(n, m):
    return np.kron(differences(n, 1), np.eye(m)) + np.kron(np.eye(n), differences(m, 1))


def kernel(n, dimension, length, scale=1.0):
    rng = np.random.default_rng(0)
    x = rng.random((n, dimension))
    r = 3**0.5 * np.linalg.norm(x[:, None] - x[None], axis=-1) / length
    return scale * (1 + r) * np.exp(-r)


def smoother(s, t):
    return 1 / (1 + s * t)


def freedom(s, t):
    return t / (t + s)


def heat(s, t):
    return jnp.exp(-s * t)


CASES = [
    *((f"spline, n = 150, s = {s:g}", differences(150, 2), smoother, s, 60) for s in (1e2, 1e4, 1e6)),
    ("spline, n = 150, s = 1e4", differences(150, 2), smoother, 1e4, 100),
    ("cubic spline, n = 200, s = 1e5", differences(200, 3), smoother, 1e5, 60),
    *((f"path, n = 140, s = {s:g}", differences(140, 1), heat, s, 40) for s in (40.0, 400.0, 4e3)),
    ("negated path, n = 140, s = -4000", -differences(140, 1), heat, -4e3, 40),
    *((f"grid, 15 x 20, s = {s:g}", grid(15, 20), heat, s, 60) for s in (40.0, 400.0)),
    *((f"kernel times {c:g}, n = 60, s = 1", kernel(60, 2, 1.0, c), freedom, 1.0, 20) for c in (1e2, 1e4)),
    *((f"kernel, n = 200, 3-D, s = {s:g}", kernel(200, 3, 0.5), freedom, s, 60) for s in (0.1, 1e-2)),
]  # fmt: skip


@ft.partial(jax.jit, static_argnums=(0, 2))
def run(fn, a, k, s):
    def one(key):
        operator = lx.MatrixLinearOperator(a, lx.symmetric_tag)
        e = tx.trace_function(key, ft.partial(fn, s), operator, k, throw=False)
        return e.value, e.standard_error, e.confidence_interval()

    return jax.lax.map(one, jr.split(jr.key(0), KEYS))


def main():
    jax.config.update("jax_enable_x64", True)
    print("| case | products | truth | RMS error | standard error | coverage |")
    print("|---|---|---|---|---|---|")
    for name, a, fn, s, k in CASES:
        truth = float(np.sum(fn(s, np.linalg.eigvalsh(a))))
        value, error, (low, high) = jax.tree.map(np.asarray, run(fn, a, k, s))
        rms = np.sqrt(np.mean((value - truth) ** 2))
        coverage = np.mean((low <= truth) & (truth <= high))
        print(
            f"| {name} | {k} | {truth:.4g} | {rms:.2g} | {np.mean(error):.2g} | {coverage:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
