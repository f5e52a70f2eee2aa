"""Numbers of other libraries that differ from dense algebra, for differences.md.

    python benchmarks/differences.py                  # every library that is installed
    python benchmarks/differences.py pylops matfree   # some of them

We run each library alone, without traceax, on a small problem, and print a table with the number
that it returns, the expected number (from dense algebra, or a documented budget), and the reason.
Libraries that are not installed are skipped. One environment with Python 3.11 holds all of them
but cola-ml:

    pip install jax==0.10.2 pylops==2.8.0 matfree==0.6.3 scikit-primate==0.5.6 imate==0.29.11 \\
        laplax==0.0.2 linox==0.0.3 skerch==1.2.0

cola-ml needs its own environment, because it installs a package `plum` and linox another one:

    pip install jax==0.10.2 cola-ml==0.0.7

A number with +- is a mean over seeds and its standard error. Other numbers come from a
single call.
"""

# ruff: noqa: PLC0415
# Every function imports its own library.

import argparse
import datetime
import importlib.metadata
import os
import warnings

# We give every library one thread per LAPACK call, as in peers.py.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

N = 60
RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=(N, N))
COMPLEX_NORMAL = NORMAL + 1j * RNG.normal(size=(N, N))
BASIS = np.linalg.qr(RNG.normal(size=(N, N)))[0]
REAL = NORMAL @ NORMAL.T / N  # positive semidefinite
HERMITIAN = COMPLEX_NORMAL @ COMPLEX_NORMAL.conj().T / N


def with_eigenvalues(values):
    return (BASIS * values) @ BASIS.T


def mean(samples):
    """The mean over seeds and its standard error, as text."""
    samples = np.real(np.asarray(samples))
    error = samples.std(ddof=1) / len(samples) ** 0.5
    return f"{samples.mean():.2f} +- {error:.2f}"


def number(x):
    return f"{x:.2f}"


def cola_ml():
    import jax
    import jax.numpy as jnp

    try:
        import cola
    except TypeError as error:
        raise ImportError("its `plum` is replaced by another package's") from error
    from cola.linalg import Exact, Lanczos, logdet, slogdet

    jax.config.update("jax_enable_x64", True)
    scaled = 2.0 * cola.ops.Identity((N, N), jnp.float64)
    yield (
        f"`logdet(2.0 * Identity)`, n = {N}",
        number(logdet(scaled)),
        number(N * np.log(2)),
        "The rule for scalars counts the logarithm once, not n times.",
    )
    diagonal = cola.ops.Dense(jnp.diag(jnp.asarray([1.0, 2.0, 3.0])))
    yield (
        "`logdet(2.0 * A)`, A = diag(1, 2, 3)",
        number(logdet(2.0 * diagonal)),
        number(np.log(48)),
        "The same rule, for a scaled operator.",
    )
    values = np.linspace(0.2, 0.8, N)
    a = cola.PSD(cola.ops.Dense(jnp.asarray(with_eigenvalues(values))))
    yield (
        "`logdet(A, Lanczos(max_iters=n), Exact())`, eigenvalues 0.2 to 0.8",
        number(logdet(a, Lanczos(max_iters=N), Exact())),
        number(np.log(values).sum()),
        "With Lanczos or Arnoldi, `slogdet` returns the modulus of the log-determinant.",
    )
    values = np.linspace(-1, 2, N)
    a = cola.SelfAdjoint(cola.ops.Dense(jnp.asarray(with_eigenvalues(values))))
    yield (
        "the same, eigenvalues -1 to 2",
        number(logdet(a, Lanczos(max_iters=N), Exact())),
        number(np.log(abs(values)).sum()),
        "`Lanczos` takes real logarithms: negative Ritz values give NaN.",
    )
    swap = cola.ops.Dense(jnp.asarray([[0.0, 1.0], [1.0, 0.0]]))
    yield (
        "sign from `slogdet(A)`, A = [[0, 1], [1, 0]]",
        number(slogdet(swap)[0]),
        number(-1),
        "Permutations in the LU factorisation count as even.",
    )


def pylops():
    import pylops
    from pylops.utils import trace_hutchinson, trace_hutchpp

    np.random.seed(0)  # noqa: NPY002 (pylops draws from NumPy's global state)
    operator = pylops.MatrixMult(HERMITIAN, dtype=complex)
    yield (
        "`trace_hutchpp(Op, neval=30)`, complex Hermitian",
        mean([trace_hutchpp(operator, neval=30) for _ in range(400)]),
        number(np.trace(HERMITIAN).real),
        "Projections use `Q.T` without a conjugate.",
    )
    operator = pylops.MatrixMult(REAL[:10, :10].copy())
    yield (
        '`trace_hutchinson(Op, neval=5, sampler="rayleigh")`, n = 10',
        mean([trace_hutchinson(operator, 5, sampler="rayleigh") for _ in range(4000)]),
        number(np.trace(REAL[:10, :10])),
        "Probes are multiplied by n / norm^2, so their norm isn't sqrt(n). The factor is n / (n - 2).",
    )
    products = 0

    class Counted(pylops.LinearOperator):
        def _matvec(self, x):
            nonlocal products
            products += 1
            return REAL @ x

    trace_hutchinson(Counted(dtype=float, shape=(N, N)), 5, sampler="unitvector")
    yield (
        '`trace_hutchinson(Op, neval=5, sampler="unitvector")`: products',
        str(products),
        "5",
        "The loop takes every unit vector, whatever `neval` is. (The value is exact.)",
    )


def matfree():
    import jax
    import jax.numpy as jnp
    from matfree import stochtrace

    jax.config.update("jax_enable_x64", True)

    def run(function, keys):
        one_by_one = jax.jit(lambda keys: jax.lax.map(function, keys))
        return jax.tree.map(
            np.asarray, one_by_one(jax.random.split(jax.random.key(0), keys))
        )

    def estimator(rule, like, num, sampler=stochtrace.sampler_normal, sem=False):
        build = (
            stochtrace.estimator_leave_one_out_mean_and_sem
            if sem
            else stochtrace.estimator_leave_one_out
        )
        return build(
            getattr(stochtrace, f"leave_one_out_{rule}")(), sampler(like, num=num)
        )

    a = jnp.asarray(HERMITIAN)
    xdiag = estimator("xdiag", jnp.zeros(N), 15, stochtrace.sampler_signs)
    yield (
        "sum of `leave_one_out_xdiag()`, complex Hermitian, 15 real signs",
        mean(run(lambda key: jnp.sum(xdiag(lambda v: a @ v, key)), 400)),
        number(np.trace(HERMITIAN).real),
        "The adjoint is a transposed product with real inputs, and loses the imaginary part. Complex probes work.",
    )
    b = jnp.asarray(REAL, jnp.float32)
    xtrace = estimator("xtrace", jnp.zeros(N, jnp.float32), 15)
    yield (
        "`leave_one_out_xtrace()`, float32, 1e-9 A; times 1e9",
        mean(1e9 * run(lambda key: xtrace(lambda v: 1e-9 * (b @ v), key), 200)),
        number(np.trace(REAL)),
        "Columns with a norm below machine epsilon, an absolute threshold, count as zero.",
    )
    i = np.arange(1, 101.0)
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(100, 100)))[0]
    held = []
    for values in (np.linspace(1, 3, 100), i**-2, 0.7**i):
        c = jnp.asarray((basis * values) @ basis.T)
        for rule in ("xtrace", "xnystrace"):
            for num in (5, 10):
                both = estimator(rule, jnp.zeros(100), num, sem=True)
                found, sem = run(
                    lambda key, c=c, both=both: both(lambda v: c @ v, key), 1000
                )
                held.append(np.mean(abs(found - values.sum()) <= 1.96 * sem))
    yield (
        "value +- 1.96 times the error of `estimator_leave_one_out_mean_and_sem`: coverage",
        f"{100 * min(held):.0f} to {100 * max(held):.0f} %",
        "95 %",
        "The formula treats samples that share probes as independent.",
    )


def primate():
    from primate.diagonal import xdiag
    from primate.trace import hutch, hutchpp
    from scipy.sparse.linalg import LinearOperator

    yield (
        "sum of `xdiag(A, m=20)`",
        mean([xdiag(REAL, m=20, seed=s).sum() for s in range(4000)]),
        number(np.trace(REAL)),
        'The default `pdf="sphere"` normalises rows, but the probes are columns. With signs the mean is right.',
    )
    products = 0

    class Counted(LinearOperator):
        def _matvec(self, x):
            nonlocal products
            products += 1
            return REAL @ x

        def _matmat(self, x):
            nonlocal products
            products += x.shape[1]
            return REAL @ x

    hutchpp(Counted(float, (N, N)), m=30, seed=0)
    yield (
        "`hutchpp(A, m=30)`: products",
        str(products),
        "30",
        "`m` is the width for each block, and it takes three blocks.",
    )
    b = REAL + 0.5 * np.eye(N)
    yield (
        '`hutch(A, fun="log")`',
        number(hutch(b, fun="log", seed=0)),
        f"{np.linalg.slogdet(b)[1]:.2f} (trace: {np.trace(b):.2f})",
        '`hutch` ignores unknown arguments. Pass `matrix_function(A, fun="log")`.',
    )


def imate():
    import imate
    import scipy.sparse as sp

    x = np.linspace(0, 1, 500)
    kernel = np.exp(-((x[:, None] - x) ** 2) / (2 * 0.3**2)) + 0.01 * np.eye(500)
    options = {"method": "slq", "min_num_samples": 50, "max_num_samples": 50}
    yield (
        '`trace(K, method="slq")`, kernel, 500 points, 50 samples',
        mean([imate.trace(kernel, seed=s, **options) for s in range(100)]),
        number(np.trace(kernel)),
        "Samples beyond a 99.9 % normal interval (`outlier_significance_level`) are left out, and the distribution is skewed.",
    )
    values = np.linspace(-2, 1, N)
    a = with_eigenvalues(values)
    for p in (1, 3):
        yield (
            f"`schatten(A, p={p})`, eigenvalues -2 to 1",
            number(imate.schatten(a, p=p, method="exact")),
            f"{abs(np.mean(values**p)) ** (1 / p):.2f} (with moduli: {np.mean(abs(values) ** p) ** (1 / p):.2f})",
            "The documented modulus isn't taken.",
        )
    band = sp.diags_array(
        [1.5 + np.arange(100) % 7, *([np.full(99, -0.3)] * 2)], offsets=[0, 1, -1]
    )
    options = {"method": "eigenvalue", "assume_matrix": "sym"}
    matrix = sp.csr_matrix(band)
    for name, function, truth in (
        ("trace", imate.trace, np.trace(band.toarray())),
        ("logdet", imate.logdet, np.linalg.slogdet(band.toarray())[1]),
    ):
        yield (
            f'`{name}(A, method="eigenvalue", assume_matrix="sym")`, sparse, n = 100',
            number(function(matrix, **options)),
            number(truth),
            "Sums over 90 % of the eigenvalues (`non_zero_eig_fraction`). Dense matrices use all.",
        )


def laplax():
    import jax
    import jax.numpy as jnp
    from laplax.curv import create_ggn_mv, estimate_curvature
    from laplax.eval.likelihood import marginal_log_likelihood

    jax.config.update("jax_enable_x64", True)
    p = 6
    x = np.random.default_rng(1).normal(size=(40, p))
    y = x @ np.arange(1.0, p + 1) / p

    def model(input, params):
        return (params["w"] @ input)[None]

    for prior in (1.0, 10.0):
        w = np.linalg.solve(x.T @ x + prior * np.eye(p), x.T @ y)
        params = {"w": jnp.asarray(w)}
        data = {"input": jnp.asarray(x), "target": jnp.asarray(y)[:, None]}
        product = create_ggn_mv(model, params, data, loss_fn="mse")
        curvature = estimate_curvature(
            "lanczos", product, layout=params, key=jax.random.key(0), rank=p
        )
        options = {
            "model_fn": model,
            "params": params,
            "loss_fn": "mse",
            "vmap_over_data": True,
        }
        found = marginal_log_likelihood(
            curvature, {"prior_prec": prior}, data, curv_type="lanczos", **options
        )
        # The posterior precision is 2 x^T x + prior I, since the loss adds squares.
        precision = 2 * x.T @ x + prior * np.eye(p)
        joint = (
            -np.sum((y - x @ w) ** 2) / 2 - prior * w @ w / 2 + p * np.log(prior) / 2
        )
        yield (
            f'`marginal_log_likelihood(..., curv_type="lanczos")`, all {p} eigenvalues, prior precision {prior:g}',
            number(found),
            number(joint - np.linalg.slogdet(precision)[1] / 2),
            "No difference: the formula is right for prior precision 1."
            if prior == 1
            else "Eigenvalues are multiplied by it, not divided. Its logarithm counts rank times, not p times.",
        )


def linox():
    import jax
    import jax.numpy as jnp
    import linox

    jax.config.update("jax_enable_x64", True)
    signs = (
        2.0 * np.asarray(jax.random.bernoulli(jax.random.PRNGKey(0), shape=(N, 100)))
        - 1
    )
    by_hand = np.mean(np.sum(signs * (REAL @ signs), axis=0))
    yield (
        '`trace(Matrix(A), method="exact")`',
        number(linox.trace(linox.Matrix(jnp.asarray(REAL)), method="exact")),
        number(np.trace(REAL)),
        f"Hutchinson's estimator with 100 signs of `PRNGKey(0)` (by hand: {by_hand:.2f}), also for dense matrices.",
    )


def skerch():
    import torch
    from skerch.algorithms import snorm, xhutchpp

    warnings.simplefilter("ignore")  # skerch warns about noise without unit modulus.
    a = torch.tensor(REAL)
    for noise, why in (
        ("rademacher", "No difference."),
        (
            "gaussian",
            "Only one copy of each probe is scaled, to norm sqrt(x_dims), not sqrt(n), so the estimated part shrinks.",
        ),
        (
            "ssrft",
            "The same. SSRFT probes are also orthonormal, so they depend on each other.",
        ),
    ):
        found = [
            xhutchpp(a, "cpu", a.dtype, x_dims=20, seed=1000 * s, noise_type=noise)[
                "tr"
            ]
            for s in range(200)
        ]
        yield (
            f'`xhutchpp(A, x_dims=20, noise_type="{noise}")["tr"]`',
            mean(found),
            number(np.trace(REAL)),
            why,
        )
    symmetric = torch.tensor(NORMAL + NORMAL.T)
    yield (
        '`snorm(A)[0]["fro"]`, five measurements (the default), symmetric normal matrix',
        mean(
            [
                snorm(symmetric, "cpu", a.dtype, seed=1000 * s)[0]["fro"]
                for s in range(200)
            ]
        ),
        number(np.linalg.norm(NORMAL + NORMAL.T)),
        "Returns the norm of `Q Q^H A` for five columns Q, without the documented factor.",
    )


LIBRARIES = {
    "cola-ml": cola_ml,
    "pylops": pylops,
    "matfree": matfree,
    "scikit-primate": primate,
    "imate": imate,
    "laplax": laplax,
    "linox": linox,
    "skerch": skerch,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", help=", ".join(LIBRARIES))
    names = parser.parse_args().libraries or list(LIBRARIES)
    today = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y").lstrip("0")
    print(f"Measured on {today}.\n")
    print("| library | call | returns | expected | why |")
    print("|---|---|---|---|---|")
    skipped = []
    for name in names:
        try:
            version = importlib.metadata.version(name)
            rows = list(LIBRARIES[name]())
        except ImportError as error:
            skipped.append(f"{name} ({error})")
            continue
        for row in rows:
            print("| " + " | ".join((f"{name} {version}", *row)) + " |", flush=True)
    if skipped:
        print("\nSkipped:", ", ".join(skipped))


if __name__ == "__main__":
    main()
