"""Gaussian likelihoods against Cholesky's: errors, error bars, and time.

    JAX_ENABLE_X64=1 python benchmarks/likelihood.py [n] [columns] [products]
    JAX_ENABLE_X64=1 python benchmarks/likelihood.py fits [estimated] [names]
    python benchmarks/likelihood.py stored

The first table is of errors over keys: of the log-determinant, of its derivative by the
length scale, and of the quadratic term, with the time of value and derivative over
Cholesky's. Beside ours stand conjugate gradients and stochastic Lanczos quadrature with a
pivoted Cholesky preconditioner, as in GPyTorch, and matfree, if it is installed (`pip
install matfree==0.6.3`). The second table is of the time of the likelihood with its whole
gradient, medians of interleaved runs in one process, pivots held.

`fits` are of length scales in every dimension, a scale and the noise, from 1, 1 and 0.1, to
real data, standardised, and to data drawn from the prior, by L-BFGS in three runs of 30 steps, each with
pivots of its own, and as many steps as they take: where they end, the exact loss beyond that
of a fit by Cholesky of 90 steps, and what both took. Up to 2,000 points likelihoods are exact
unless they are `estimated`. Real data are of packages, of which
vega_datasets is in no extra of this library (`pip install vega_datasets==0.9.0`). Names after
`fits` choose some.

`stored` is of what the limit below which kernel matrices are stored is chosen by: the CPU
time of a log-determinant of 60 products, and the memory of its program, with and without.
"""

import functools
import importlib
import math
import statistics
import sys
import time

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
RUNS, STEPS, COLUMNS = 3, 30, 300  # of fits; each run has pivots of its own
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


def dense(x, length, kind):
    z = x / length
    squared = jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1)[None] - 2 * z @ z.T
    squared = jnp.where(jnp.eye(len(x), dtype=bool), 0, jnp.maximum(squared, 0))
    return of_squared(kind, squared)


def terms_by_cholesky(x, y, length, kind, noise):
    """The log-determinant, the quadratic term, and the log likelihood."""
    lower = jnp.linalg.cholesky(dense(x, length, kind) + noise * jnp.eye(len(x)))
    half = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
    logdet, form = 2 * jnp.sum(jnp.log(jnp.diag(lower))), half @ half
    return logdet, form, -(logdet + form + len(x) * math.log(2 * math.pi)) / 2


# Ways to the log-determinant: (value, (standard error, quadratic term)), of which the value
# has a derivative by the length scale.


def ours(length, key, x, y, kind, noise, *, columns, k):
    K = tx.KernelLinearOperator(Kernel(length, kind), x)
    terms = tx.inv_quad_logdet(
        key, K, y, k, shift=noise, preconditioner=columns, throw=False
    )
    return terms.logdet.value, (terms.logdet.standard_error, terms.inv_quad.value)


def as_gpytorch(length, key, x, y, kind, noise, *, columns, probes, steps):
    """Gardner et al., arXiv:1809.11165: each column takes `steps` products."""
    K, n = dense(x, length, kind), len(x)
    A = jax.lax.stop_gradient(K) + noise * jnp.eye(n)
    F = greedy_factor(jax.lax.stop_gradient(K), columns)
    small = jnp.linalg.cholesky(F.T @ F + noise * jnp.eye(columns))

    def solve_P(v):
        inner = jax.scipy.linalg.cho_solve((small, True), F.T @ v)
        return (v - F @ inner) / noise

    logdet_P = 2 * jnp.sum(jnp.log(jnp.diag(small))) + (n - columns) * math.log(noise)
    one, other = jax.random.split(key)
    Z = F @ jax.random.normal(one, (columns, probes))
    Z = Z + noise**0.5 * jax.random.normal(other, (n, probes))  # of covariance P
    U, T = conjugate_gradients(A, jnp.column_stack([y, Z]), solve_P, steps)
    theta, V = jnp.linalg.eigh(T[1:])
    quadrature = n * jnp.sum(V[:, 0, :] ** 2 * jnp.log(theta), axis=1)
    pairing = jnp.sum(U[:, 1:] * (K @ solve_P(Z))) / probes
    value = logdet_P + jnp.mean(quadrature) + pairing - jax.lax.stop_gradient(pairing)
    error = jnp.std(quadrature, ddof=1) / probes**0.5
    return value, (error, y @ U[:, 0])


def greedy_factor(K, columns):
    """A pivoted Cholesky factor, of the largest residuals."""

    def step(i, carry):
        F, rest = carry
        s = jnp.argmax(rest)
        column = (K[:, s] - F @ F[s]) / jnp.sqrt(rest[s])
        return F.at[:, i].set(column), jnp.maximum(rest - column**2, 0).at[s].set(0)

    start = jnp.zeros((len(K), columns)), jnp.diag(K)
    return jax.lax.fori_loop(0, columns, step, start)[0]


def conjugate_gradients(A, right, solve_P, steps):
    """Solutions for all columns, and the tridiagonal matrices of their Lanczos processes."""

    def step(carry, _):
        X, R, D, rho = carry
        AD = A @ D
        alpha = rho / jnp.sum(D * AD, axis=0)
        X, R = X + alpha * D, R - alpha * AD
        Z = solve_P(R)
        after = jnp.sum(R * Z, axis=0)
        beta = after / rho
        return (X, R, Z + beta * D, after), (alpha, beta)

    D = solve_P(right)
    start = jnp.zeros_like(right), right, D, jnp.sum(right * D, axis=0)
    (X, *_), (alpha, beta) = jax.lax.scan(step, start, length=steps)
    diagonal = 1 / alpha + jnp.zeros_like(alpha).at[1:].set(beta[:-1] / alpha[:-1])
    beside = jnp.sqrt(beta[:-1]) / alpha[:-1]
    tridiagonal = jax.vmap(
        lambda d, e: jnp.diag(d) + jnp.diag(e, 1) + jnp.diag(e, -1), 1
    )
    return X, tridiagonal(diagonal, beside)


def by_matfree(length, key, x, y, kind, noise, *, probes, steps):
    assert matfree is not None
    integrand = matfree.funm.monte_carlo_funm_sym_logdet(
        matfree.decomp.tridiag_sym(steps)
    )
    sampler = matfree.stochtrace.sampler_signs(jnp.zeros_like(y), num=probes)
    estimate = matfree.stochtrace.estimator_monte_carlo(integrand, sampler)
    A = dense(x, length, kind) + noise * jnp.eye(len(x))
    return estimate(lambda v, A: A @ v, key, A), (jnp.nan, jnp.nan)


def ways(columns, k):
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
    ((exact, form), slope), full = runs[0], statistics.median(times)
    for way, products, fn in ways(columns, k):
        given = functools.partial(fn, x=x, y=y, kind=kind, noise=noise)
        run = jax.jit(jax.value_and_grad(given, has_aux=True))
        keys = jax.random.split(jax.random.key(0), KEYS)
        jax.block_until_ready(run(length, keys[0]))
        runs, times = zip(*(timed(run, length, key) for key in keys), strict=True)
        values, bars, forms, slopes = map(
            np.asarray, zip(*((v, e, q, s) for (v, (e, q)), s in runs), strict=True)
        )
        print(
            f"| {name}, {noise:.0e} | {exact:.0f} | {way} | {products} "
            f"| {rms(values - exact):.3g} | {bars.mean():.3g} "
            f"| {rms(slopes / slope - 1):.1e} | {rms(forms / form - 1):.1e} "
            f"| {statistics.median(times) / full:.2f} |",
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
        for f, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            if repeat:
                taken.append(time.perf_counter() - start)
    taken, full = map(statistics.median, times)
    print(
        f"| {name} | {n} | {taken:.2f} | {full:.2f} | {taken / full:.2f} |", flush=True
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
    days = of_package("vega_datasets").data.seattle_weather()["temp_max"]
    return np.arange(len(days))[:, None], days, "matern 3/2"


def elnino():  # temperatures of the sea, by year and month
    table = of_package("statsmodels.datasets").elnino.load_pandas().data.to_numpy()
    years, months = np.meshgrid(table[:, 0], np.arange(12), indexing="ij")
    places = np.column_stack([years.ravel(), months.ravel()])
    return places, table[:, 1:].ravel(), "matern 3/2"


def co2():
    weeks = of_package("statsmodels.datasets").co2.load_pandas().data["co2"].dropna()
    return np.arange(1500)[:, None], weeks[:1500], "matern 3/2"


def randhie():
    table = of_package("statsmodels.datasets").randhie.load_pandas().data
    table = table.sample(2000, random_state=0)
    x = table.drop(columns="mdvis").to_numpy()[:, :8]
    return x, np.log1p(table["mdvis"]), "rbf"


def diabetes():
    x, y = of_package("sklearn.datasets").load_diabetes(return_X_y=True)
    return x, y, "matern 3/2"


def of_package(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}: pip install {HINTS[name]}") from None


def finite(value, gradient):
    """What SciPy's line search takes a shorter step for: NaN and infinity end it."""
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
        half = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
        logdet = 2 * jnp.sum(jnp.log(jnp.diag(lower)))
        return (half @ half + logdet + n * math.log(2 * math.pi)) / 2

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
    best, full = timed(minimise, lambda p: finite(*exact(p)), start, RUNS * STEPS)
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

    (p, estimate), taken = timed(ours, start)
    low, high = estimate.stats["bracket"]
    print(
        f"| {name}, {n} x {d}, {kind} | {best.fun:.1f} | {float(exact(p)[0]) - best.fun:.2g} "
        f"| {estimate.standard_error:.2g} | {(high - low) / 2:.2g} "
        f"| {len(products)}, {best.nfev} | {np.mean(products):.0f} | {max(products)} "
        f"| {taken:.0f}, {full:.0f} |",
        flush=True,
    )


def stored(n, d):
    """The log-determinant with the matrix in memory and without: seconds, and MB."""
    x, _ = data(d, 1.0, n)
    results = []
    for most in (n**2, 0):
        traceax._operators.kernel._MOST_STORED = most
        jax.clear_caches()

        @jax.jit
        def value(length):
            K = tx.KernelLinearOperator(Kernel(length, "matern 3/2"), x)
            key = jax.random.key(0)
            return tx.logdet(key, K, 60, shift=0.1, throw=False).value

        length = jnp.asarray(0.3)
        program = value.lower(length).compile()
        memory = program.memory_analysis().temp_size_in_bytes / 1e6
        jax.block_until_ready(program(length))
        times = []
        for _ in range(REPEATS):
            start = time.process_time()
            jax.block_until_ready(program(length))
            times.append(time.process_time() - start)
        # What else runs on the machine only adds to it.
        results.append(f"{min(times):.2f} | {memory:.0f}")
    print(f"| {n} | {d} | {' | '.join(results)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["stored"]:
        print(
            "| n | d | stored, s | MB | in tiles, s | MB |\n|---|---|---|---|---|---|"
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
            "| data | Cholesky's loss | more | error bar | half of the bracket ", end=""
        )
        print("| evaluations, Cholesky's | products of one | most | s, Cholesky's |")
        print("|---|---|---|---|---|---|---|---|---|")
        names = sys.argv[2:]
        estimator = tx.KrylovAwareEstimator() if "estimated" in names else None
        for name in [x for x in names if x != "estimated"] or problems:
            try:
                problem = problems[name]()
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            fit(name, *problem, estimator)
        sys.exit()
    given = [int(x) for x in sys.argv[1:]]
    n, columns, k = given + [2000, 600, 32][len(given) :]
    print("| problem, noise | log det | way | products | error | bar | slope ", end="")
    print("| quadratic term | time |\n|---|---|---|---|---|---|---|---|---|")
    for problem in PROBLEMS:
        accuracy(problem, n, columns, k)
    print("\n| problem | n | ours, s | Cholesky, s | ratio |\n|---|---|---|---|---|")
    for problem in PROBLEMS[:2]:
        speed(problem, n, columns, k)
