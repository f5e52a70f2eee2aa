"""Spectral functions of operators with a known trace, compared with the same operators hidden.

    JAX_ENABLE_X64=1 python benchmarks/known_trace.py

The library reads a matrix's trace. It can't read the trace if the matrix is behind a function.
For both, the script prints the root mean square error, the mean error bar and the coverage of
95 % intervals, over 64 keys. The last line has the geometric mean of error ratios.
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
        ("line, Matern 3/2, noise 1e-3", 1, 0.3, 3, 1e-3),
        ("plane, Matern 3/2, noise 1e-2", 2, 0.3, 3, 1e-2),
        ("plane, Matern 5/2, noise 1e-1", 2, 0.2, 5, 1e-1),
        ("3-D, Matern 3/2, noise 1e-3", 3, 0.5, 3, 1e-3),
        ("8-D, Matern 3/2, noise 1e-2", 8, 2.0, 3, 1e-2),
        ("5-D, RBF, noise 1e-2", 5, 0.6, None, 1e-2),
    ):
        x = rng.random((N, d)) if d < 8 else rng.standard_normal((N, d))
        yield name, kernel(x, length, order) + noise * np.eye(N)
    path = 2 * np.eye(22) - np.eye(22, k=1) - np.eye(22, k=-1)
    identity = np.eye(22)
    yield (
        "grid's Laplacian + 0.3",
        np.kron(path, identity) + np.kron(identity, path) + 0.3 * np.eye(484),
    )
    Q = np.linalg.qr(rng.standard_normal((N, N)))[0]
    yield "1 + 40 / i", (Q * (1 + 40 / np.arange(1, N + 1))) @ Q.T


def estimates(keys, operator, lower, k):
    def one(key):
        estimate = tx.trace_function(
            key, functions, operator, k, lower=lower, monotone=True, throw=False
        )
        return estimate.value, estimate.standard_error, estimate.confidence_interval()

    return jax.lax.map(one, keys)


def summarise(outputs, name, truth):
    value, error, (low, high) = jax.tree.map(np.asarray, outputs)
    rms = np.sqrt(np.mean((value[name] - truth) ** 2))
    coverage = np.mean((low[name] <= truth) & (truth <= high[name]))
    return rms, error[name].mean(), coverage


def main():
    keys, log_ratios = jax.random.split(jax.random.key(3), KEYS), []
    print(
        "| spectrum | products k | function | known: error, bar, coverage "
        "| hidden: error, bar, coverage | error ratio |"
    )
    print("|---|---|---|---|---|---|")
    for name, matrix in spectra():
        values = np.linalg.eigvalsh(matrix)
        A = jnp.asarray((matrix + matrix.T) / 2)
        structure = jax.ShapeDtypeStruct((len(A),), A.dtype)
        known = lx.MatrixLinearOperator(A, PSD)
        hidden = lx.FunctionLinearOperator(A.__matmul__, structure, PSD)
        for k in (60, 160):
            run = functools.partial(estimates, lower=0.999 * values[0], k=k)
            outputs = [
                jax.jit(functools.partial(run, operator=x)) for x in (known, hidden)
            ]
            outputs = [fn(keys) for fn in outputs]
            for function, fn in TRUTHS.items():
                cells = [summarise(x, function, np.sum(fn(values))) for x in outputs]
                ratio = cells[0][0] / cells[1][0]
                log_ratios.append(np.log(ratio))
                texts = [
                    f"{e:.3g}, {bar:.3g}, {coverage:.2f}" for e, bar, coverage in cells
                ]
                print(
                    f"| {name} | {k} | {function} | {texts[0]} | {texts[1]} "
                    f"| {ratio:.2f} |",
                    flush=True,
                )
    print(
        f"\ngeometric mean {np.exp(np.mean(log_ratios)):.3f}, largest {np.exp(max(log_ratios)):.2f}"
    )


if __name__ == "__main__":
    main()
