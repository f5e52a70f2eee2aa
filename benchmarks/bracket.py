"""Error bars for log-determinants of kernel matrices: do intervals contain the truth?

    python benchmarks/bracket.py
    python benchmarks/bracket.py --inside               # the operator contains the noise
    python benchmarks/bracket.py --single               # float32
    python benchmarks/bracket.py -k 0                   # without k
    python benchmarks/bracket.py --entry trace_inverse

Each line shows one kernel and budget: the root mean square error, the root mean square standard
error, their ratio, the 95 % interval's coverage, half the bracket, and where the truth lies
relative to the bracket: 0 at its lower end, 1 at its upper end. With `--inside` the library
knows no lower bound on the spectrum.
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tx

# Dimension, kernel, length scale, noise variance. We draw points uniformly in the unit cube up
# to four dimensions, and from a normal distribution above.
KERNELS = [
    (1, "Matern 3/2", 0.1, 1e-2),
    (1, "RBF", 0.05, 1e-3),
    (2, "Matern 3/2", 0.3, 1e-4),
    (2, "Matern 5/2", 0.2, 1e-2),
    (2, "RBF", 0.2, 1e-1),
    (3, "Matern 5/2", 0.5, 1e-4),
    (4, "Matern 3/2", 1.0, 1e-3),
    (6, "RBF", 2.0, 1e-3),
    (6, "Matern 3/2", 3.0, 1e-1),
    (8, "Matern 3/2", 2.0, 1e-2),
    (9, "Matern 5/2", 3.0, 1e-1),
    (9, "RBF", 3.0, 1e-4),
]
FUNCTIONS = {"logdet": tx.logdet, "trace_inverse": tx.trace_inverse}


def kernel_matrix(dimension, name, length, n):
    rng = np.random.default_rng(dimension)
    x = (
        rng.random((n, dimension))
        if dimension <= 4
        else rng.normal(size=(n, dimension))
    )
    r = np.linalg.norm(x[:, None] - x[None], axis=-1) / length
    match name:
        case "Matern 3/2":
            return (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r)
        case "Matern 5/2":
            return (1 + 5**0.5 * r + 5 * r**2 / 3) * np.exp(-(5**0.5) * r)
    return np.exp(-(r**2) / 2)


def runner(k, entry, inside):
    """One program, which serves all kernels."""

    @jax.jit
    def run(K, noise, keys):
        def one(key):
            if inside:
                matrix = K + noise * jnp.eye(len(K), dtype=K.dtype)
                operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
                e = entry(key, operator, k or None, throw=False)
            else:
                operator = lx.MatrixLinearOperator(K, lx.positive_semidefinite_tag)
                e = entry(key, operator, k or None, shift=noise, throw=False)
            failed = e.result != tx.RESULTS.successful
            ends = e.stats.get("bracket", (e.value, e.value))
            return e.value, e.standard_error, e.confidence_interval(), ends, failed

        return jax.lax.map(one, keys)

    return run


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--keys", type=int, default=24)
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("-k", type=int, nargs="*", default=[40, 80, 160])
    parser.add_argument("--entry", choices=list(FUNCTIONS), default="logdet")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", not options.single)
    dtype = jnp.float32 if options.single else jnp.float64
    keys, extremes = jr.split(jr.key(0), options.keys), [1.0, 0.0]
    for k in options.k:
        run = runner(k, FUNCTIONS[options.entry], options.inside)
        for dimension, name, length, noise in KERNELS:
            K = kernel_matrix(dimension, name, length, options.n)
            spectrum = np.maximum(np.linalg.eigvalsh(K), 0) + noise
            inverse = options.entry == "trace_inverse"
            truth = np.sum(1 / spectrum if inverse else np.log(spectrum))
            results = run(jnp.asarray(K, dtype), jnp.asarray(noise, dtype), keys)
            value, error, (low, high), ends, failed = jax.tree.map(np.asarray, results)
            rmse, bar = (np.sqrt(np.mean(x**2)) for x in (value - truth, error))
            coverage = np.mean((low <= truth) & (truth <= high))
            position = np.mean((truth - ends[0]) / np.maximum(ends[1] - ends[0], 1e-30))
            extremes = [min(extremes[0], coverage), max(extremes[1], rmse / bar)]
            print(
                f"k {k:3d} {dimension}-D {name:10s} noise {noise:.0e} truth {truth:9.2f}: error {rmse:8.2f}, bar {bar:8.2f}, "
                f"ratio {rmse / bar:4.2f}, coverage {coverage:4.0%}, half the bracket {np.mean(ends[1] - ends[0]) / 2:8.2f}, "
                f"truth at {position:5.2f}, failed {failed.mean():.0%}",
                flush=True,
            )
    print(f"lowest coverage {extremes[0]:.0%}, largest ratio {extremes[1]:.2f}")


if __name__ == "__main__":
    main()
