"""Gaussian likelihoods compared with Cholesky's: errors, error bars and time.

    JAX_ENABLE_X64=1 python benchmarks/likelihood.py [n] [columns] [products]
    JAX_ENABLE_X64=1 python benchmarks/likelihood.py fits [estimated] [names]
    python benchmarks/likelihood.py coverage [n] [keys]
    python benchmarks/likelihood.py stored
    python benchmarks/likelihood.py distances
    python benchmarks/likelihood.py tiles
    python benchmarks/likelihood.py neighbours
    python benchmarks/likelihood.py gpytorch [fits] [n ...]

The first table shows errors over keys for the log-determinant, its derivative with respect to
the length scale, and the quadratic term. It also shows the time of value and derivative, divided
by Cholesky's. We compare with conjugate gradients and stochastic Lanczos quadrature, with a
pivoted Cholesky preconditioner as in GPyTorch, and with matfree, if it is installed (`pip
install matfree==0.6.3`). The second table times the likelihood with its whole gradient, for
fixed pivots. Times are medians of interleaved runs in one process.

`fits` estimates a length scale for every dimension, a scale and the noise, from 1, 1 and 0.1.
The data are real, standardised, or drawn from the prior. Our fit runs L-BFGS three times for 30
steps, and each run chooses its own pivots. We omit k, so each evaluation takes the steps that it
needs. The excess loss is the exact loss where our fit ends, minus the loss after 90 steps with
Cholesky. The table also shows the evaluations and times of both fits. Up to 6,000 points our
likelihoods are exact, unless you write `estimated`. Names after `fits` select data. Real data
come from packages, and no extra of this library contains vega_datasets (`pip install
vega_datasets==0.9.0`).

`gpytorch` compares errors and CPU seconds of one core with GPyTorch's, for 4,000 and 8,000
points. The truth is a Cholesky factorisation in 64 bits. Each method runs in its own process.
With `fits` it fits all parameters. You need an environment of its own: `pip install
torch==2.13.0 gpytorch==1.15.2 statsmodels`, and this library.

`coverage` counts how often 95 % intervals contain the truth, over keys. It covers log likelihoods
and their derivatives in the length scale. The library chooses pivots, probes and steps. The truth
is a Cholesky factorisation in 64 bits.

`distances` measures the CPU time of kernels that add coordinates by `jnp.sum` and by a loop.
`tiles` measures the CPU time of a kernel matrix, of products, and of their gradients, for tiles of
different lengths. `neighbours` moves one log parameter in 20 steps of 1e-5, and prints how far the
likelihoods lie from a straight line, in 32 bits.

`stored` measures the CPU time of a log-determinant from 60 products, and its program's memory,
with a stored kernel matrix and without. We chose the largest matrix that the library stores from
these numbers.
"""

import functools
import importlib
import math
import statistics
import sys
import time

import beside_gpytorch
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import traceax as tx
import traceax._operators.kernel

try:
    import matfree.decomp
    import matfree.funm
    import matfree.stochtrace
except ImportError:
    matfree = None

KEYS, REPEATS = 8, 5
PROBLEMS = [
    ("plane, Matern 5/2", 2, 0.2, "matern 5/2", 1e-2),
    ("8-D, Matern 3/2", 8, 2.0, "matern 3/2", 1e-2),
    ("6-D, RBF", 6, 0.6, "rbf", 1e-3),
    ("plane, Matern 3/2", 2, 0.3, "matern 3/2", 1e-4),
]
RUNS, STEPS, COLUMNS = 3, 30, 300  # for fits; each run chooses its own pivots
COVERED = [
    (1, 0.02, "matern 3/2", 1e-2),
    (1, 0.2, "matern 5/2", 1e-3),
    (2, 0.2, "rbf", 1e-1),
    (2, 0.3, "matern 3/2", 1e-4),
    (3, 0.3, "matern 5/2", 1e-2),
    (3, 0.5, "rbf", 1e-3),
    (4, 0.5, "matern 5/2", 1e-3),
    (5, 0.6, "matern 3/2", 1e-1),
    (6, 0.8, "matern 5/2", 1e-2),
    (7, 1.0, "rbf", 1e-2),
    (8, 2.0, "matern 3/2", 1e-2),
    (9, 3.0, "rbf", 1e-4),
]
DRAWN = [
    (800, 4, "matern 5/2", 1e-3),
    (800, 4, "matern 3/2", 1e-3),
    (1000, 6, "matern 5/2", 1e-2),
    (1000, 9, "matern 3/2", 1e-2),
    (2000, 5, "rbf", 1e-2),
    (1500, 7, "matern 5/2", 1e-3),
]
HINTS = {
    "vega_datasets": "vega_datasets==0.9.0",
    "statsmodels.datasets": "statsmodels",
    "sklearn.datasets": "scikit-learn",
}


def from_squared_distances(kind, squared):
    """Kernel values from squared distances."""
    if kind == "rbf":
        return jnp.exp(-squared / 2)
    order = 3 if kind == "matern 3/2" else 5
    # We replace 0, where the root has no derivative.
    r = jnp.sqrt(order * jnp.where(squared == 0, 1, squared))
    polynomial = 1 + r if order == 3 else 1 + r + r**2 / 3
    return jnp.where(squared == 0, 1, polynomial * jnp.exp(-r))


class Kernel(eqx.Module):
    length: jax.Array
    kind: str = eqx.field(static=True)

    def __call__(self, a, b):
        a, b = a / self.length, b / self.length
        squared = sum((a[i] - b[i]) ** 2 for i in range(len(a)))
        return from_squared_distances(self.kind, squared)


def data(d, noise, n):
    rng = np.random.default_rng(0)
    x = rng.random((n, d)) if d < 8 else rng.standard_normal((n, d))
    y = np.sin(5 * x[:, 0]) + x[:, min(1, d - 1)] + noise**0.5 * rng.standard_normal(n)
    return jnp.asarray(x), jnp.asarray(y)


def dense(x, length, kind):
    z = x / length
    squared = jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1)[None] - 2 * z @ z.T
    squared = jnp.where(jnp.eye(len(x), dtype=bool), 0, jnp.maximum(squared, 0))
    return from_squared_distances(kind, squared)


def terms_by_cholesky(x, y, length, kind, noise):
    """The log-determinant, the quadratic term, and the log likelihood."""
    lower = jnp.linalg.cholesky(dense(x, length, kind) + noise * jnp.eye(len(x)))
    whitened = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
    logdet, form = 2 * jnp.sum(jnp.log(jnp.diag(lower))), whitened @ whitened
    return logdet, form, -(logdet + form + len(x) * math.log(2 * math.pi)) / 2


# Methods for the log-determinant. They return (value, (standard error, quadratic term)), and we
# differentiate the value with respect to the length scale.


def ours(length, key, x, y, kind, noise, *, columns, k):
    K = tx.KernelLinearOperator(Kernel(length, kind), x)
    terms = tx.inv_quad_logdet(
        key, K, y, k, shift=noise, preconditioner=columns, throw=False
    )
    return terms.logdet.value, (terms.logdet.standard_error, terms.inv_quad.value)


def as_gpytorch(length, key, x, y, kind, noise, *, columns, probes, steps):
    """GPyTorch's method (arXiv:1809.11165, Gardner et al.). Each column takes `steps` products."""
    K, n = dense(x, length, kind), len(x)
    A = jax.lax.stop_gradient(K) + noise * jnp.eye(n)
    F = greedy_factor(jax.lax.stop_gradient(K), columns)
    inner_factor = jnp.linalg.cholesky(F.T @ F + noise * jnp.eye(columns))

    def solve_P(v):
        inner = jax.scipy.linalg.cho_solve((inner_factor, True), F.T @ v)
        return (v - F @ inner) / noise

    logdet_P = 2 * jnp.sum(jnp.log(jnp.diag(inner_factor))) + (n - columns) * math.log(
        noise
    )
    factor_key, noise_key = jax.random.split(key)
    Z = F @ jax.random.normal(factor_key, (columns, probes))
    Z = Z + noise**0.5 * jax.random.normal(noise_key, (n, probes))  # covariance P
    U, T = conjugate_gradients(A, jnp.column_stack([y, Z]), solve_P, steps)
    theta, V = jnp.linalg.eigh(T[1:])
    quadrature = n * jnp.sum(V[:, 0, :] ** 2 * jnp.log(theta), axis=1)
    pairing = jnp.sum(U[:, 1:] * (K @ solve_P(Z))) / probes
    value = logdet_P + jnp.mean(quadrature) + pairing - jax.lax.stop_gradient(pairing)
    error = jnp.std(quadrature, ddof=1) / probes**0.5
    return value, (error, y @ U[:, 0])


def greedy_factor(K, columns):
    """A pivoted Cholesky factor. Each pivot has the largest residual."""

    def step(i, carry):
        F, residual = carry
        s = jnp.argmax(residual)
        column = (K[:, s] - F @ F[s]) / jnp.sqrt(residual[s])
        return F.at[:, i].set(column), jnp.maximum(residual - column**2, 0).at[s].set(0)

    start = jnp.zeros((len(K), columns)), jnp.diag(K)
    return jax.lax.fori_loop(0, columns, step, start)[0]


def conjugate_gradients(A, rhs, solve_P, steps):
    """Solutions for all columns, and the tridiagonal matrices from their Lanczos processes."""

    def step(carry, _):
        X, R, D, rho = carry
        AD = A @ D
        alpha = rho / jnp.sum(D * AD, axis=0)
        X, R = X + alpha * D, R - alpha * AD
        Z = solve_P(R)
        new_rho = jnp.sum(R * Z, axis=0)
        beta = new_rho / rho
        return (X, R, Z + beta * D, new_rho), (alpha, beta)

    D = solve_P(rhs)
    start = jnp.zeros_like(rhs), rhs, D, jnp.sum(rhs * D, axis=0)
    (X, *_), (alpha, beta) = jax.lax.scan(step, start, length=steps)
    diagonal = 1 / alpha + jnp.zeros_like(alpha).at[1:].set(beta[:-1] / alpha[:-1])
    off_diagonal = jnp.sqrt(beta[:-1]) / alpha[:-1]
    tridiagonal = jax.vmap(
        lambda d, e: jnp.diag(d) + jnp.diag(e, 1) + jnp.diag(e, -1), 1
    )
    return X, tridiagonal(diagonal, off_diagonal)


def by_matfree(length, key, x, y, kind, noise, *, probes, steps):
    assert matfree is not None
    integrand = matfree.funm.monte_carlo_funm_sym_logdet(
        matfree.decomp.tridiag_sym(steps)
    )
    sampler = matfree.stochtrace.sampler_signs(jnp.zeros_like(y), num=probes)
    estimate = matfree.stochtrace.estimator_monte_carlo(integrand, sampler)
    A = dense(x, length, kind) + noise * jnp.eye(len(x))
    return estimate(lambda v, A: A @ v, key, A), (jnp.nan, jnp.nan)


def methods(columns, k):
    yield f"ours, {columns} columns", k, functools.partial(ours, columns=columns, k=k)
    for r, probes, steps in ((columns, 3, k // 4), (15, 10, 20)):
        fn = functools.partial(as_gpytorch, columns=r, probes=probes, steps=steps)
        yield f"CG and quadrature, {r} columns", (probes + 1) * steps, fn
    if matfree is not None:
        yield "matfree", 200, functools.partial(by_matfree, probes=10, steps=20)


def rms(x):
    return float(np.sqrt(np.mean(np.asarray(x) ** 2)))


def timed(fn, *arguments):
    start = time.perf_counter()
    out = jax.block_until_ready(fn(*arguments))
    return out, time.perf_counter() - start


def accuracy(problem, n, columns, k):
    name, d, length, kind, noise = problem
    x, y = data(d, noise, n)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def cholesky(length):
        logdet, form, _ = terms_by_cholesky(x, y, length, kind, noise)
        return logdet, form

    length = jnp.asarray(length)
    jax.block_until_ready(cholesky(length))
    runs, times = zip(*(timed(cholesky, length) for _ in range(REPEATS)), strict=True)
    ((exact, form), slope), cholesky_time = runs[0], statistics.median(times)
    for method, products, fn in methods(columns, k):
        on_data = functools.partial(fn, x=x, y=y, kind=kind, noise=noise)
        run = jax.jit(jax.value_and_grad(on_data, has_aux=True))
        keys = jax.random.split(jax.random.key(0), KEYS)
        jax.block_until_ready(run(length, keys[0]))
        runs, times = zip(*(timed(run, length, key) for key in keys), strict=True)
        values, bars, forms, slopes = map(
            np.asarray, zip(*((v, e, q, s) for (v, (e, q)), s in runs), strict=True)
        )
        print(
            f"| {name}, {noise:.0e} | {exact:.0f} | {method} | {products} "
            f"| {rms(values - exact):.3g} | {bars.mean():.3g} "
            f"| {rms(slopes / slope - 1):.1e} | {rms(forms / form - 1):.1e} "
            f"| {statistics.median(times) / cholesky_time:.2f} |",
            flush=True,
        )


def speed(problem, n, columns, k):
    name, d, length, kind, noise = problem
    x, y = data(d, noise, n)
    K = tx.KernelLinearOperator(Kernel(jnp.full(d, length), kind), x)
    pivots = tx.choose_pivots(jax.random.key(0), K, columns, shift=noise)

    def estimated(length, noise):
        K = tx.KernelLinearOperator(Kernel(length, kind), x)
        return tx.gaussian_log_likelihood(
            jax.random.key(0), K, y, k, shift=noise, preconditioner=pivots, throw=False
        ).value

    def exact(length, noise):
        return terms_by_cholesky(x, y, length, kind, noise)[2]

    arguments = jnp.full(d, length), jnp.asarray(noise)
    functions = [jax.jit(jax.value_and_grad(f, (0, 1))) for f in (estimated, exact)]
    times = [[], []]
    for repeat in range(REPEATS + 1):
        for f, run_times in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            if repeat:
                run_times.append(time.perf_counter() - start)
    our_time, cholesky_time = map(statistics.median, times)
    print(
        f"| {name} | {n} | {our_time:.2f} | {cholesky_time:.2f} "
        f"| {our_time / cholesky_time:.2f} |",
        flush=True,
    )


def standardised(x, y, kind):
    x, y = (np.asarray(z, float) for z in (x, y))
    return *((z - z.mean(0)) / z.std(0) for z in (x, y)), kind


def drawn(seed, n, d, kind, noise):
    """Points in a cube, and observations drawn from the prior."""
    rng = np.random.default_rng(seed)
    x, lengths = rng.random((n, d)), rng.uniform(0.5, 1.5, d)
    A = dense(jnp.asarray(x / lengths), 1.0, kind) + noise * jnp.eye(n)
    return x, np.linalg.cholesky(A) @ rng.standard_normal(n), kind


def seattle_weather():
    days = import_package("vega_datasets").data.seattle_weather()["temp_max"]
    return np.arange(len(days))[:, None], days, "matern 3/2"


def elnino():  # sea temperatures by year and month
    table = import_package("statsmodels.datasets").elnino.load_pandas().data.to_numpy()
    years, months = np.meshgrid(table[:, 0], np.arange(12), indexing="ij")
    places = np.column_stack([years.ravel(), months.ravel()])
    return places, table[:, 1:].ravel(), "matern 3/2"


def co2():
    weeks = (
        import_package("statsmodels.datasets").co2.load_pandas().data["co2"].dropna()
    )
    return np.arange(1500)[:, None], weeks[:1500], "matern 3/2"


def randhie():
    table = import_package("statsmodels.datasets").randhie.load_pandas().data
    table = table.sample(2000, random_state=0)
    x = table.drop(columns="mdvis").to_numpy()[:, :8]
    return x, np.log1p(table["mdvis"]), "rbf"


def diabetes():
    x, y = import_package("sklearn.datasets").load_diabetes(return_X_y=True)
    return x, y, "matern 3/2"


def import_package(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}: pip install {HINTS[name]}") from None


def finite(value, gradient):
    """Replace NaN and infinity, which end SciPy's line search, by a value that shortens its step."""
    if math.isfinite(value):
        return float(value), np.asarray(gradient)
    return 1e6, np.zeros(gradient.shape)


def fit(name, x, y, kind, estimator):
    x, y = jnp.asarray(x), jnp.asarray(y)
    n, d = x.shape

    @jax.jit
    @jax.value_and_grad
    def exact(p):
        K = jnp.exp(p[d]) * dense(x / jnp.exp(p[:d]), 1.0, kind)
        lower = jnp.linalg.cholesky(K + jnp.exp(p[d + 1]) * jnp.eye(n))
        whitened = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
        logdet = 2 * jnp.sum(jnp.log(jnp.diag(lower)))
        return (whitened @ whitened + logdet + n * math.log(2 * math.pi)) / 2

    def covariance(p):
        kernel = Kernel(jnp.exp(p[:d]), kind)
        return tx.KernelLinearOperator(lambda a, b: jnp.exp(p[d]) * kernel(a, b), x)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def estimated(p, pivots):
        estimate = tx.gaussian_log_likelihood(
            jax.random.key(5),
            covariance(p),
            y,
            estimator=estimator,
            shift=jnp.exp(p[d + 1]),
            preconditioner=pivots,
            throw=False,
        )
        return -estimate.value, estimate

    @jax.jit
    def pivots_at(p, key):
        columns, noise = min(COLUMNS, n), jnp.exp(p[d + 1])
        return tx.choose_pivots(key, covariance(p), columns, shift=noise, throw=False)

    def minimise(loss, p, steps):
        options = {"maxiter": steps}
        return scipy.optimize.minimize(
            loss, p, jac=True, method="L-BFGS-B", options=options
        )

    start = np.array([*np.zeros(d), 0.0, math.log(0.1)])
    best, cholesky_time = timed(
        minimise, lambda p: finite(*exact(p)), start, RUNS * STEPS
    )
    products = []

    def ours(p):
        for run in range(RUNS):
            pivots = pivots_at(p, jax.random.key(run))

            def loss(p, pivots=pivots):
                (value, estimate), gradient = estimated(p, pivots)
                products.append(int(estimate.stats["num_matvecs"]))
                return finite(value, gradient)

            p = minimise(loss, p, STEPS).x
        return p, estimated(p, pivots)[0][1]

    (p, estimate), our_time = timed(ours, start)
    low, high = estimate.stats["bracket"]
    print(
        f"| {name}, {n} x {d}, {kind} | {best.fun:.1f} | {float(exact(p)[0]) - best.fun:.2g} "
        f"| {estimate.standard_error:.2g} | {(high - low) / 2:.2g} "
        f"| {len(products)}, {best.nfev} | {np.mean(products):.0f} | {max(products)} "
        f"| {our_time:.0f}, {cholesky_time:.0f} |",
        flush=True,
    )


def coverage(problem, n, keys):
    d, length, kind, noise = problem
    x, y = data(d, noise, n)

    @jax.value_and_grad
    def cholesky(length):
        z = jnp.asarray(x, float), jnp.asarray(y, float)
        return terms_by_cholesky(*z, length, kind, noise)[2]

    with jax.enable_x64(True):
        truth = [float(z) for z in cholesky(jnp.asarray(length))]

    @jax.jit
    def estimates(key, pivots, length):
        def value(length):
            K = tx.KernelLinearOperator(Kernel(length, kind), x)
            return tx.gaussian_log_likelihood(
                key,
                K,
                y,
                estimator=tx.KrylovAwareEstimator(),
                shift=noise,
                preconditioner=pivots,
                throw=False,
            )

        return tx.jvp(value, (length,), (jnp.ones_like(length),))

    length, runs = jnp.asarray(length), []
    K = tx.KernelLinearOperator(Kernel(length, kind), x)
    for i in range(keys):
        pivots = tx.choose_pivots(jax.random.key(i), K, shift=noise)
        runs.append(estimates(jax.random.key(i), pivots, length))
    row = []
    for part, exact in zip(zip(*runs, strict=True), truth, strict=True):
        low, high = np.array([e.confidence_interval() for e in part]).T
        covered = np.mean((low <= exact) & (exact <= high))
        error = rms(np.array([e.value - exact for e in part]))
        bar = rms(np.array([e.standard_error for e in part]))
        row.append(f"{error:.2g}, {bar:.2g} | {covered:.3f}")
    freedom, products, columns = (
        np.array([float(e.stats[name]) for e, _ in runs])
        for name in ("degrees_of_freedom", "num_matvecs", "num_columns")
    )
    print(
        f"| {d}-D {kind}, {noise:.0e} | {np.median(columns):.0f} | {np.median(products):.0f} "
        f"| {' | '.join(row)} | {freedom.min():.2g} to {np.median(freedom):.2g} |",
        flush=True,
    )


def cpu_seconds(program, *arguments):
    """The smallest CPU time of later calls, because other processes only add to it."""
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        jax.block_until_ready(program(*arguments))
        times.append(time.process_time() - start)
    return min(times)


def stored(n, d):
    """Print CPU seconds and MB for the log-determinant, with the matrix stored and in tiles."""
    x, _ = data(d, 1.0, n)
    results = []
    for limit in (n**2, 0):
        traceax._operators.kernel._MOST_STORED = limit
        jax.clear_caches()

        @jax.jit
        def value(length):
            K = tx.KernelLinearOperator(Kernel(length, "matern 3/2"), x)
            key = jax.random.key(0)
            return tx.logdet(key, K, 60, shift=0.1, throw=False).value

        length = jnp.asarray(0.3)
        program = value.lower(length).compile()
        memory = program.memory_analysis().temp_size_in_bytes / 1e6
        results.append(f"{cpu_seconds(program, length):.2f} | {memory:.0f}")
    print(f"| {n} | {d} | {' | '.join(results)} |", flush=True)


def matern(length, x, tile=None, squared=None):
    """A Matern 5/2 kernel matrix."""
    squared = squared or (lambda a, b: sum((a[i] - b[i]) ** 2 for i in range(len(a))))

    def kernel(a, b):
        r = jnp.sqrt(5 * squared(a, b) + 1e-10) / length
        return (1 + r + r**2 / 3) * jnp.exp(-r)

    return tx.KernelLinearOperator(kernel, x, tile=tile)


def tiles(n):
    """Print CPU milliseconds of values and gradients for tiles of different lengths."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, weights = jax.random.uniform(keys[0], (n, 5)), jax.random.normal(keys[1], (n, n))

    def weighted_sum(lengths, vectors, tile):
        def squared(a, b):
            return sum(((a[i] - b[i]) / lengths[i]) ** 2 for i in range(len(a)))

        K = matern(1.0, x, tile, squared)
        if len(vectors) == n:
            return jnp.sum(vectors * K.as_matrix())
        return jnp.sum(vectors * jax.vmap(K.mv)(vectors))

    for name, m in (("matrix", n), ("25 products", 25), ("400 products", 400)):
        for job, run in (("", weighted_sum), (", gradient", jax.grad(weighted_sum))):
            row = [
                cpu_seconds(
                    jax.jit(functools.partial(run, tile=t)),
                    jnp.full(5, 0.7),
                    weights[:m],
                )
                for t in (16, 64, 256, 1024)
            ]
            cells = " | ".join(f"{1e3 * t:.0f}" for t in row)
            print(f"| {n} | {name}{job} | {cells} |", flush=True)


def distances(n):
    """Print CPU seconds for kernels that add coordinates along an axis, and in a loop."""

    def by_sum(a, b):
        return jnp.sum((a - b) ** 2)

    def by_loop(a, b):
        return sum((a[i] - b[i]) ** 2 for i in range(len(a)))

    keys = jax.random.split(jax.random.key(0), 3)
    x, y = jax.random.uniform(keys[0], (n, 5)), jax.random.normal(keys[1], (n,))

    def products(length, vectors, squared):
        return jax.vmap(matern(length, x, squared=squared).mv)(vectors)

    def likelihood(length, y, squared):
        K = matern(length, x, squared=squared)
        return tx.gaussian_log_likelihood(keys[2], K, y, shift=0.1).value

    vectors, gradient = jax.random.normal(keys[1], (25, n)), jax.grad(likelihood)
    jobs = ("25 products", products, vectors), ("likelihood, gradient", gradient, y)
    for name, job, array in jobs:
        slow, fast = (
            cpu_seconds(jax.jit(functools.partial(job, squared=f)), 0.7, array)
            for f in (by_sum, by_loop)
        )
        print(f"| {n} | {name} | {slow:.2f} | {fast:.2f} | {slow / fast:.1f} |")


def neighbours(n):
    """Print how far 20 neighbouring likelihoods lie from a straight line."""
    key, (x, y), logs = (
        jax.random.key(0),
        data(5, 0.02, n),
        jnp.log(jnp.array([0.7, 0.02])),
    )

    def covariance(length):
        return tx.KernelLinearOperator(Kernel(length, "matern 3/2"), x)

    @jax.jit
    def value(logs, pivots):
        length, noise = jnp.exp(logs)
        return tx.gaussian_log_likelihood(
            key, covariance(length), y, shift=noise, preconditioner=pivots
        ).value

    pivots = tx.choose_pivots(key, covariance(jnp.asarray(0.7)), shift=0.02)
    steps, deviations = 1e-5 * np.arange(20, dtype=np.float32), []
    for i in range(2):
        values = [float(value(logs.at[i].add(step), pivots)) for step in steps]
        line = np.polyval(np.polyfit(steps, values, 1), steps)
        deviations.append(f"{np.abs(values - line).max():.1e}")
    print(f"| {n} | {' | '.join(deviations)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["gpytorch"]:
        beside_gpytorch.main(sys.argv[2:])
        sys.exit()
    if sys.argv[1:2] == ["coverage"]:
        given = [int(x) for x in sys.argv[2:]]
        n, keys = given + [4200, 60][len(given) :]
        print(
            "| kernel, noise | columns | products | value: error, bar | coverage "
            "| slope: error, bar | coverage | degrees of freedom: smallest, median |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        for problem in COVERED:
            coverage(problem, n, keys)
        sys.exit()
    if sys.argv[1:] == ["distances"]:
        print("| n | job | `jnp.sum` (s) | coordinates (s) | ratio |")
        print("|---|---|---|---|---|")
        for n in (2000, 4000, 8000):
            distances(n)
        sys.exit()
    if sys.argv[1:] == ["tiles"]:
        print(
            "| n | job | 16 rows (ms) | 64 | 256 | 1,024 |\n|---|---|---|---|---|---|"
        )
        for n in (1000, 4000):
            tiles(n)
        sys.exit()
    if sys.argv[1:] == ["neighbours"]:
        print("| n | length | noise |\n|---|---|---|")
        for n in (2000, 4000, 5500):
            neighbours(n)
        sys.exit()
    if sys.argv[1:] == ["stored"]:
        print(
            "| n | dimension | stored: time (s) | memory (MB) | in tiles: time (s) | memory (MB) |\n|---|---|---|---|---|---|"
        )
        for d in (2, 8):
            for n in (2000, 4000, 8000):
                stored(n, d)
        sys.exit()
    if sys.argv[1:2] == ["fits"]:
        real = seattle_weather, co2, randhie, elnino, diabetes
        problems = {f.__name__: lambda f=f: standardised(*f()) for f in real}
        for seed, problem in enumerate(DRAWN):
            n, d, kind, noise = problem
            name = f"drawn, noise {noise:.0e}, {d}-D {kind}"
            problems[name] = functools.partial(drawn, seed, *problem)
        print(
            "| data | Cholesky's loss | excess loss | error bar | half of the bracket ",
            end="",
        )
        print(
            "| evaluations: ours, Cholesky | products per evaluation | most products | time (s): ours, Cholesky |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        names = sys.argv[2:]
        estimator = tx.KrylovAwareEstimator() if "estimated" in names else None
        for name in [x for x in names if x != "estimated"] or problems:
            try:
                problem = problems[name]()
            except ImportError as error:
                print(f"skipping {name}: {error}", file=sys.stderr)
                continue
            fit(name, *problem, estimator)
        sys.exit()
    given = [int(x) for x in sys.argv[1:]]
    n, columns, k = given + [2000, 600, 32][len(given) :]
    print(
        "| kernel, noise | log det K | method | products | error | error bar | slope error ",
        end="",
    )
    print(
        "| quadratic-term error | time / Cholesky |\n|---|---|---|---|---|---|---|---|---|"
    )
    for problem in PROBLEMS:
        accuracy(problem, n, columns, k)
    print(
        "\n| kernel | n | ours (s) | Cholesky (s) | time ratio |\n|---|---|---|---|---|"
    )
    for problem in PROBLEMS[:2]:
        speed(problem, n, columns, k)
