"""Accuracy and time of spectral functions, compared with other methods.

    python benchmarks/spectral.py                 # the tables of benchmarks/spectral.md
    python benchmarks/spectral.py accuracy        # one table: accuracy, split, gradients or time

We compare with plain stochastic Lanczos quadrature, at its best split into probes and steps;
with matfree, if it is installed (`pip install matfree==0.6.3`); and with a dense Cholesky
factorisation. Errors are root mean squares over keys, relative to the truth. Times are medians
of interleaved repetitions in this one process.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tx

try:
    import matfree.decomp
    import matfree.funm
    import matfree.stochtrace
except ImportError:
    matfree = None

KEYS = 20
PSD = lx.positive_semidefinite_tag
# We try these probe and step counts for plain quadrature. Each pair takes 120 products.
SPLITS = ((2, 60), (4, 30), (6, 20), (8, 15), (12, 10), (20, 6), (40, 3))


def haar(n):
    return np.linalg.qr(np.random.default_rng(5).normal(size=(n, n)))[0]


def with_spectrum(values):
    u = haar(len(values))
    return (u * values) @ u.T


def graph(n=1000, degree=10):
    """A random graph's adjacency matrix, with independent edges."""
    drawn = np.random.default_rng(1).random((n, n)) < degree / n
    upper = np.triu(drawn, 1).astype(float)
    return upper + upper.T


def preferential_graph(n=1000):
    """An adjacency matrix. Each vertex joins two earlier ones, and prefers many edges."""
    rng = np.random.default_rng(3)
    adjacency, ends = np.zeros((n, n)), [0, 1]
    adjacency[0, 1] = adjacency[1, 0] = 1
    for vertex in range(2, n):
        for other in set(rng.choice(ends, 2)):
            adjacency[other, vertex] = adjacency[vertex, other] = 1
            ends += [other, vertex]
    return adjacency


def laplacian(adjacency):
    return np.diag(adjacency.sum(axis=0)) - adjacency


def root_mean_square(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


def accuracy():
    """Errors of values from 120 products."""
    i = np.arange(1, 1001)
    decay = 1000 * 0.8 ** np.arange(500)
    cases = {
        "log det, 1000 * .8^i + 1, n = 500": (with_spectrum(decay + 1), jnp.log),
        "tr sqrt(A), i^-2, n = 1000": (with_spectrum(i**-2.0), jnp.sqrt),
        "tr exp(A), random graph, n = 1000": (graph(), jnp.exp),
        "tr exp(A), preferential graph, n = 1000": (preferential_graph(), jnp.exp),
    }
    print(
        "| function and matrix | plain quadrature's error (probes x steps) "
        "| Krylov-aware error | ratio | coverage |"
    )
    print("|---|---|---|---|---|")
    for name, (matrix, fn) in cases.items():
        truth = float(jnp.sum(fn(jnp.clip(np.linalg.eigvalsh(matrix), -1e9))))
        if fn is jnp.sqrt:
            truth = float(np.sum(1.0 / i))
        operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)

        def errors(estimator, number, fn=fn, operator=operator, truth=truth):
            def one(key):
                estimate = tx.trace_function(key, fn, operator, 120, estimator)
                low, high = estimate.confidence_interval()
                return estimate.value, (low <= truth) & (truth <= high)

            values, coverage = jax.lax.map(jax.jit(one), jr.split(jr.key(0), number))
            return (
                root_mean_square(np.asarray(values) / truth - 1),
                float(coverage.mean()),
            )

        plain = {
            (m, s): errors(tx.LanczosQuadratureEstimator(m), KEYS)[0] for m, s in SPLITS
        }
        best = min(plain, key=plain.__getitem__)
        ours, coverage = errors(tx.KrylovAwareEstimator(), 5 * KEYS)
        print(
            f"| {name} | {plain[best]:.1e} ({best[0]} x {best[1]}) | {ours:.1e} | "
            f"{plain[best] / ours:.3g} | {coverage:.0%} |",
            flush=True,
        )


def lattice(shape, mass):
    """Products with a Laplacian with open ends, plus a mass."""

    def product(v):
        v, total = v.reshape(shape), mass * v.reshape(shape)
        for axis in range(len(shape)):
            steps = jnp.diff(v, axis=axis)
            ends = [(0, 0)] * len(shape)
            ends[axis] = (1, 1)
            total = total - jnp.diff(jnp.pad(steps, ends), axis=axis)
        return total.reshape(-1)

    paths = [4 * np.sin(np.pi * np.arange(s) / (2 * s)) ** 2 for s in shape]
    return product, sum(np.meshgrid(*paths, indexing="ij")).ravel() + mass


def dense(matrix):
    array = jnp.asarray(matrix)
    return lambda v: array @ v, np.linalg.eigvalsh(matrix)


def kernel_with_noise(dimension, noise=0.01, n=2000):
    points = np.random.default_rng(4).random((n, dimension))
    squared = np.maximum(np.asarray(squared_distances(points)), 0)
    scaled = np.sqrt(5 * squared) / (0.3 * dimension**0.5)
    matern = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return matern + noise * np.eye(n)


def split():
    """Errors of log-determinants, for the default and for plain quadrature."""
    i = np.arange(1, 2001)
    cases = {
        "lattice 64 x 64, mass 0.1": lattice((64, 64), 0.1),
        "lattice 64 x 64, mass 0.001": lattice((64, 64), 0.001),
        "lattice 16 x 16 x 16, mass 0.1": lattice((16, 16, 16), 0.1),
        "random graph's Laplacian + 1, n = 1000": dense(
            laplacian(graph()) + np.eye(1000)
        ),
        "100 at 10 to 1000, rest 1 to 2, n = 2000": dense(
            with_spectrum(np.r_[np.geomspace(10, 1000, 100), np.linspace(1, 2, 1900)])
        ),
        "1 / i, n = 2000": dense(with_spectrum(1.0 / i)),
        "Matern 5/2 kernel in 1-D + 0.01": dense(kernel_with_noise(1)),
        "Matern 5/2 kernel in 3-D + 0.01": dense(kernel_with_noise(3)),
        "Matern 5/2 kernel in 8-D + 0.01": dense(kernel_with_noise(8)),
    }
    budgets = 60, 200, 400
    print("| matrix | " + " | ".join(f"{k} products" for k in budgets) + " |")
    print("|---" * (1 + len(budgets)) + "|")
    for name, (product, eigenvalues) in cases.items():
        like = jax.ShapeDtypeStruct(eigenvalues.shape, jnp.float64)
        operator = lx.FunctionLinearOperator(product, like, PSD)
        truth, cells = np.sum(np.log(eigenvalues)), []
        for k in budgets:
            errors, times = [], []
            for estimator in (None, tx.LanczosQuadratureEstimator()):

                @jax.jit
                def value(key, k=k, estimator=estimator, operator=operator):
                    return tx.logdet(key, operator, k, estimator).value

                values = [value(key) for key in jr.split(jr.key(0), KEYS)]
                start = time.process_time()
                jax.block_until_ready(value(jr.key(1)))
                times.append(time.process_time() - start)
                errors.append(root_mean_square(np.asarray(values) - truth))
            ours, plain = errors
            ratio, cost = ours / plain, times[0] / times[1]
            cells.append(f"{ours:.2g} / {plain:.2g} = {ratio:.2g}, time {cost:.2g}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


#
# Gaussian processes
#


def squared_distances(points):
    squares = jnp.sum(points**2, axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * points @ points.T
    return jnp.maximum(distances, 0)


def kernel(parameters, distances):
    length, amplitude, _ = parameters
    return amplitude * jnp.exp(-distances / (2 * length**2))


def exact_logdet(parameters, distances):
    noise = parameters[2] * jnp.eye(len(distances), dtype=parameters.dtype)
    factor = jnp.linalg.cholesky(kernel(parameters, distances) + noise)
    return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))


def logdet(parameters, distances, key, k, estimator=None):
    operator = lx.MatrixLinearOperator(kernel(parameters, distances), PSD)
    estimate = tx.logdet(key, operator, k, estimator, shift=parameters[2])
    return estimate.value


def matfree_logdet(parameters, distances, key, probes, steps):
    def product(vector, parameters):
        return kernel(parameters, distances) @ vector + parameters[2] * vector

    assert matfree is not None
    integrand = matfree.funm.monte_carlo_funm_sym_logdet(
        matfree.decomp.tridiag_sym(steps)
    )
    like = jnp.zeros(len(distances), distances.dtype)
    sampler = matfree.stochtrace.sampler_signs(like, num=probes)
    estimate = matfree.stochtrace.estimator_monte_carlo(integrand, sampler)
    return estimate(product, key, parameters)


def diabetes():
    from sklearn.datasets import load_diabetes  # noqa: PLC0415

    points = load_diabetes().data
    return squared_distances(jnp.asarray(points / points.std(axis=0)))


def plane(n, dtype=jnp.float64):
    return squared_distances(
        jnp.asarray(np.random.default_rng(4).random((n, 2)), dtype)
    )


def gradients():
    """Errors of gradients with respect to length scale, amplitude and noise."""
    plane_distances = plane(1000)
    cases = {
        "diabetes, n = 442": (diabetes(), (3.0, 1.0, 0.1), (100, 200, 440)),
    }
    for length in (0.1, 0.2, 0.5):
        for noise in (1e-1, 1e-3):
            name = f"plane, n = 1000, length {length}, noise {noise}"
            cases[name] = (plane_distances, (length, 1.0, noise), (200,))
    print(
        "| data and parameters | estimator | products "
        "| error, length | error, amplitude | error, noise |"
    )
    print("|---|---|---|---|---|---|")
    for name, (distances, values, budgets) in cases.items():
        parameters = jnp.asarray(values)
        truth = jax.grad(exact_logdet)(parameters, distances)
        methods = {("Krylov-aware", k): functools.partial(logdet, k=k) for k in budgets}
        k = budgets[-1]
        plain = tx.LanczosQuadratureEstimator(k // 10 if len(budgets) == 1 else k // 25)
        methods["plain quadrature", k] = functools.partial(logdet, k=k, estimator=plain)
        if matfree is not None and len(budgets) == 1:
            methods["matfree, 20 x 10", 200] = functools.partial(
                matfree_logdet, probes=20, steps=10
            )
        for (method, k), fn in methods.items():
            gradient = jax.jit(
                jax.grad(lambda p, key, fn=fn, d=distances: fn(p, d, key))
            )
            estimates = np.stack(
                [gradient(parameters, key) for key in jr.split(jr.key(0), KEYS)]
            )
            errors = [
                root_mean_square(x) for x in (estimates / np.asarray(truth) - 1).T
            ]
            row = " | ".join(f"{x:.1e}" for x in errors)
            print(f"| {name} | {method} | {k} | {row} |", flush=True)


def interleaved(functions, repetitions=7):
    """Median times in seconds, after a call that compiles."""
    times = {name: [] for name in functions}
    for fn in functions.values():
        jax.block_until_ready(fn())
    for _ in range(repetitions):
        for name, fn in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(fn())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(x) for name, x in times.items()}


def timed():
    """Time and errors for value and gradient."""
    key = jr.key(0)

    def make_program(fn, parameters, distances):
        program = jax.jit(jax.value_and_grad(fn))
        return lambda: program(parameters, distances)

    print("| points, precision, method | time | value error | gradient error |")
    print("|---|---|---|---|")
    for n, dtype, noise, budgets in (
        (1000, jnp.float64, 1e-1, (100, 200)),
        (4000, jnp.float32, 1e-1, (60, 120)),
    ):
        distances = plane(n, dtype)
        parameters = jnp.asarray((0.2, 1.0, noise), dtype)
        methods = {"Cholesky": make_program(exact_logdet, parameters, distances)}
        for k in budgets:
            ours = functools.partial(logdet, key=key, k=k)
            methods[f"Krylov-aware, {k} products"] = make_program(
                ours, parameters, distances
            )
        if n == 1000:
            plain = tx.LanczosQuadratureEstimator(20)
            ours = functools.partial(logdet, key=key, k=200, estimator=plain)
            methods["plain quadrature, 20 x 10"] = make_program(
                ours, parameters, distances
            )
            if matfree is not None:
                matfree_on_key = functools.partial(
                    matfree_logdet, key=key, probes=20, steps=10
                )
                methods["matfree, 20 x 10"] = make_program(
                    matfree_on_key, parameters, distances
                )
        medians = interleaved(methods)
        exact = [np.asarray(x, np.float64) for x in methods["Cholesky"]()]
        for name, fn in methods.items():
            value, gradient = fn()
            print(
                f"| n = {n}, {jnp.dtype(dtype).name}, {name} | "
                f"{1e3 * medians[name]:.0f} ms | {abs(value / exact[0] - 1):.1e} | "
                f"{np.max(np.abs(gradient / exact[1] - 1)):.1e} |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    tables = {
        "accuracy": accuracy,
        "split": split,
        "gradients": gradients,
        "time": timed,
    }
    parser.add_argument("tables", nargs="*", choices=[*tables, []])
    chosen = parser.parse_args().tables or tables
    jax.config.update("jax_enable_x64", True)
    for name in chosen:
        print(f"\n{name}: {tables[name].__doc__}\n")
        tables[name]()


if __name__ == "__main__":
    main()
