"""Spectral functions of operators whose trace is known, against the same ones hidden.

    JAX_ENABLE_X64=1 python benchmarks/known_trace.py

A matrix shows its trace; the same matrix behind a function doesn't. Prints the root mean
square error, mean error bar and coverage of 95 % intervals of both over 64 keys, and the
geometric mean of the ratio of errors.
"""

import functools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx

KEYS, N = 64, 500
PSD = lx.positive_semidefinite_tag
TRUTHS = {"log": np.log, "root": np.sqrt, "inverse": lambda x: 1 / x}


def functions(x):
    return {"log": jnp.log(x), "root": jnp.sqrt(x), "inverse": 1 / x}


def kernel(x, length, order):
    squared = np.sum((x[:, None] - x[None]) ** 2, axis=-1) / length**2
    if order is None:
        return np.exp(-squared / 2)
    r = np.sqrt(order * squared)
    return (1 + r + (r**2 / 3 if order == 5 else 0)) * np.exp(-r)


def spectra():
    rng = np.random.default_rng(0)
    for name, d, length, order, noise in (
        ("line, Matern 3/2, 1e-3", 1, 0.3, 3, 1e-3),
        ("plane, Matern 3/2, 1e-2", 2, 0.3, 3, 1e-2),
        ("plane, Matern 5/2, 1e-1", 2, 0.2, 5, 1e-1),
        ("3-D, Matern 3/2, 1e-3", 3, 0.5, 3, 1e-3),
        ("8-D, Matern 3/2, 1e-2", 8, 2.0, 3, 1e-2),
        ("5-D, RBF, 1e-2", 5, 0.6, None, 1e-2),
    ):
        x = rng.random((N, d)) if d < 8 else rng.standard_normal((N, d))
        yield name, kernel(x, length, order) + noise * np.eye(N)
    path = 2 * np.eye(22) - np.eye(22, k=1) - np.eye(22, k=-1)
    one = np.eye(22)
    yield (
        "grid's Laplacian + 0.3",
        np.kron(path, one) + np.kron(one, path) + 0.3 * np.eye(484),
    )
    Q = np.linalg.qr(rng.standard_normal((N, N)))[0]
    yield "1 + 40 / i", (Q * (1 + 40 / np.arange(1, N + 1))) @ Q.T


def estimates(keys, operator, lower, k):
    def one(key):
        found = tx.trace_function(
            key, functions, operator, k, lower=lower, monotone=True, throw=False
        )
        return found.value, found.standard_error, found.confidence_interval()

    return jax.lax.map(one, keys)


def judged(found, name, truth):
    value, error, (low, high) = jax.tree.map(np.asarray, found)
    rms = np.sqrt(np.mean((value[name] - truth) ** 2))
    held = np.mean((low[name] <= truth) & (truth <= high[name]))
    return rms, error[name].mean(), held


def main():
    keys, logs = jax.random.split(jax.random.key(3), KEYS), []
    print("| spectrum | k | function | known: error, bar, coverage | hidden | ratio |")
    print("|---|---|---|---|---|---|")
    for name, matrix in spectra():
        values = np.linalg.eigvalsh(matrix)
        A = jnp.asarray((matrix + matrix.T) / 2)
        structure = jax.ShapeDtypeStruct((len(A),), A.dtype)
        known = lx.MatrixLinearOperator(A, PSD)
        hidden = lx.FunctionLinearOperator(A.__matmul__, structure, PSD)
        for k in (60, 160):
            run = functools.partial(estimates, lower=0.999 * values[0], k=k)
            both = [
                jax.jit(functools.partial(run, operator=x)) for x in (known, hidden)
            ]
            both = [fn(keys) for fn in both]
            for function, fn in TRUTHS.items():
                cells = [judged(x, function, np.sum(fn(values))) for x in both]
                ratio = cells[0][0] / cells[1][0]
                logs.append(np.log(ratio))
                texts = [f"{e:.3g}, {bar:.3g}, {held:.2f}" for e, bar, held in cells]
                print(
                    f"| {name} | {k} | {function} | {texts[0]} | {texts[1]} "
                    f"| {ratio:.2f} |",
                    flush=True,
                )
    print(
        f"\ngeometric mean {np.exp(np.mean(logs)):.3f}, largest {np.exp(max(logs)):.2f}"
    )


if __name__ == "__main__":
    main()
