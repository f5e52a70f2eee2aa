"""Log-determinants from other libraries: errors, error bars, gradients and time.

    python benchmarks/logdet_peers.py                             # every library
    python benchmarks/logdet_peers.py resona gpflash --keys 3     # some of them

The first run creates pinned virtual environments in the temporary folder `logdet_peers`. Remove it
to install again. Every process has one thread. `traceax, Cholesky` is `tx.logdet` without k.

Bias is the mean error over keys +- its standard error, or the error of an exact method. The error
bar is the library's standard error. Coverage is the share of its 95 % intervals with the truth, or
of the value +- 1.96 error bars. Gradient error is the root mean square over keys of the relative
error, for noise and length scale, or for the mass. Products are for the value, and `+ m` are m more
for the gradient. CPU s is the median over later calls with the gradient (`*`: without, because the
method has none), and includes the kernel matrix. First calls also compile or analyse the pattern.
"""

# ruff: noqa: PLC0415
# Every process imports its own libraries, and the first process needs none.

import argparse
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time

from peers import ROOT, environment

np = importlib.import_module("numpy") if "--child" in sys.argv else None
SIDE, BUDGETS = 64, (120, 384)
SPLITS = (10, 12), (5, 24), (3, 40), (32, 12), (16, 24), (8, 48)  # probes, steps
PROBLEMS = {
    "kernel": "Matern 5/2 kernel, length scale 0.5, 1,000 points in the unit cube, noise 0.01 (log det -4004.1)",
    "lattice": "Laplacian of a 64 x 64 lattice with open ends, mass 0.1, n = 4,096 (log det 4901.9)",
    "series": "Matern 5/2 kernel, length scale 1, 1,000 times in [0, 100], noise 0.01 (log det -3616.2)",
}
NUMPY, JAX = ("numpy==2.4.6", "scipy==1.17.1"), ("jax==0.10.2", "jaxlib==0.10.2")
OLD = ["--ignore-requires-python"] * (sys.version_info < (3, 12))  # It runs on 3.11.
GABP = [*OLD, "gabp-sparse-inv==0.4.1", "torch==2.13.0", *NUMPY]
# Packages, and the problems that the library can't do, with the reason.
PEERS = {
    "traceax": (["-e", str(ROOT), *NUMPY, *JAX], "", ""),
    "matfree": (["matfree==0.6.3", *NUMPY, *JAX], "", ""),
    "resona": (["resona==3.2.0", *NUMPY], "", ""),
    "fvgp": (["fvgp==4.10.0", "imate==0.29.11", *NUMPY], "", ""),
    "gpflash": (["gpflash==0.3.0", *NUMPY], "lattice", "needs points and a kernel"),
    "gabp-sparse-inv": (GABP, "kernel series", "needs a sparse matrix"),
    "smolgp": (["smolgp==0.4.3", *NUMPY, *JAX], "kernel lattice", "needs time series"),
}
COLUMNS = "| method | products | keys | bias | rms error | error bar | coverage | gradient error | CPU s | first call |"


class Problem:
    """A matrix, its log-determinant, and the gradient, for length by a complex step."""

    def __init__(self, name, keys):
        self.keys, self.is_lattice, self.slopes = keys, name == "lattice", [lambda v: v]
        if self.is_lattice:
            sp = importlib.import_module("scipy.sparse")
            self.n, self.parameters, self.eye = SIDE**2, (0.1,), sp.eye(SIDE**2)
            differences = np.diff(np.eye(SIDE), axis=0)
            path = differences.T @ differences
            self.laplacian = sp.csr_matrix(sp.kronsum(path, path))
            values = np.linalg.eigvalsh(path)
            values = values[:, None] + values + 0.1
            self.truth, self.gradient = np.log(values).sum(), [np.sum(1 / values)]
            return
        rng, self.n, self.eye = np.random.default_rng(4), 1000, np.eye(1000)
        self.points, self.parameters = rng.random((1000, 3)), (0.01, 0.5)
        if name == "series":
            self.points, self.parameters = 100 * rng.random((1000, 1)), (0.01, 1.0)
            self.points.sort(axis=0)
        squares = (self.points[:, None] - self.points) ** 2
        self.distances = np.sqrt(squares.sum(axis=-1))
        slope = self.kernel(np, self.parameters[1] + 1e-20j).imag / 1e-20
        inverse, self.slopes = np.linalg.inv(self.matrix()), [*self.slopes, slope]
        self.gradient = [np.trace(inverse), np.sum(inverse * slope)]
        self.truth = np.linalg.slogdet(self.matrix())[1]

    def kernel(self, xp, length):
        s = 5**0.5 * self.distances / length
        return (1 + s + s**2 / 3) * xp.exp(-s)

    def matrix(self):
        noise, *length = self.parameters
        matrix = self.kernel(np, *length) if length else self.laplacian
        return matrix + noise * self.eye

    def logdet(self, likelihood):  # for zero observations
        return -2 * likelihood - self.n * np.log(2 * np.pi)


def measure(problem, method, products, call, **options):
    """Print a row. `call` takes a seed and returns value, bar, interval and gradient."""
    times, answers, truth = [], [], problem.truth
    for seed in range(problem.keys + 1):
        start = time.process_time()
        answers.append(call(seed, **options))
        times.append(time.process_time() - start)
    values, bars, intervals, slopes = zip(*answers[1:], strict=True)
    errors = np.asarray(values) - truth
    rms, keys = f"{np.mean(errors**2) ** 0.5:.2g}", len(errors)
    cells = [method, products, "-", f"{errors[0]:.2g}", rms, "none", "none"]
    if products != "none":
        parts = zip(values, bars, intervals, strict=True)
        ends = [ends or (x - 1.96 * bar, x + 1.96 * bar) for x, bar, ends in parts]
        inside = 100 * np.mean([low <= truth <= high for low, high in ends])
        bias = f"{errors.mean():.2g} +- {np.std(errors, ddof=1) / keys**0.5:.1g}"
        cells[2:] = keys, bias, rms, f"{np.mean(bars):.2g}", f"{inside:.0f} %"
    relative, mark = "none", " *"
    if slopes[0] is not None:
        squares, mark = (np.asarray(slopes) / problem.gradient - 1) ** 2, ""
        relative = ", ".join(f"{x:.1e}" for x in np.mean(squares, axis=0) ** 0.5)
    later, first = f"{np.median(times[1:]):.2g}{mark}", f"{times[0]:.2g}{mark}"
    print("|", " | ".join(map(str, [*cells, relative, later, first])), "|", flush=True)


def measure_jax(problem, method, products, value, **options):
    """`value` maps parameters and a key to the value, and to bar and interval or ()."""
    import jax

    value = functools.partial(value, **options)
    program = jax.jit(jax.value_and_grad(value, has_aux=True))
    parameters = jax.numpy.asarray(problem.parameters)

    def call(seed):
        found, slopes = jax.device_get(program(parameters, jax.random.key(seed)))
        return found[0], found[1][0] if found[1] else None, found[1][1:], slopes

    measure(problem, method, products, call)


def stencil(v):  # the lattice's Laplacian, in JAX
    pad = importlib.import_module("jax.numpy").pad
    u = pad(v.reshape(SIDE, SIDE), 1, mode="edge")
    near = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
    return 4 * v - near.reshape(-1)


def traceax(problem):
    # docs/spectral-functions.md and docs/sparse.md
    import jax
    import lineax as lx

    import traceax as tx

    tag, rows = lx.positive_semidefinite_tag, {"traceax": None}
    if problem.is_lattice:
        like = jax.ShapeDtypeStruct((problem.n,), float)
        rows = {"traceax, function": lx.FunctionLinearOperator(stencil, like, tag)}
        rows["traceax, SciPy matrix"] = tx.as_operator(problem.laplacian, tags=tag)

    def value(parameters, key, k=None, operator=None):
        if operator is None:
            kernel = problem.kernel(jax.numpy, parameters[1])
            operator = lx.MatrixLinearOperator(kernel, tag)
        found = tx.logdet(key, operator, k, shift=parameters[0])
        return found.value, (found.standard_error, *found.confidence_interval())

    for method, operator in rows.items():
        for k in BUDGETS:
            measure_jax(problem, method, k, value, k=k, operator=operator)
    if not problem.is_lattice:
        measure_jax(problem, "traceax, Cholesky", "none", value)


def matfree(problem):
    # https://github.com/pnkraemer/matfree/blob/main/tutorials/8_gaussian_logpdf.py, with
    # the error bar of 3_uncertainty_quantification.py. The library has no default steps.
    import jax.numpy as jnp
    from matfree import decomp, funm, stochtrace

    def product(v, noise, *matrix):
        return noise * v + (matrix[0] @ v if matrix else stencil(v))

    def value(parameters, key, probes, steps):
        matrix = [problem.kernel(jnp, length) for length in parameters[1:]]
        integrand = funm.monte_carlo_funm_sym_logdet(decomp.tridiag_sym(steps))
        sampler = stochtrace.sampler_signs(jnp.zeros(problem.n), num=probes)
        estimate = stochtrace.estimator_monte_carlo_mean_and_sem(integrand, sampler)
        mean, bar = estimate(product, key, parameters[0], *matrix)
        return mean, (bar,)

    for probes, steps in SPLITS:
        method, k = f"matfree 0.6.3, {probes} probes x {steps}", probes * steps
        measure_jax(problem, method, k, value, probes=probes, steps=steps)


def resona(problem):
    # https://github.com/dimaq12/resona/blob/main/docs/reading-spectra.md. The defaults are
    # 8 probes x 48 steps. Checks take four products, and one for each probe. We don't time
    # the matrix's derivatives, which callers pass to `grad_trace`.
    import resona

    def call(seed, **split):
        matrix, options = problem.matrix(), {"seed": seed, **split}
        value, bar = resona.of(matrix, **options).trace("log", with_err=True)
        slopes = problem.slopes, lambda x: 1 / x
        return value, bar, None, resona.grad_trace(matrix, *slopes, **options)

    for m, steps in SPLITS:
        method, k = f"resona 3.2.0, {m} probes x {steps}", m * steps
        measure(problem, method, f"{k + 4} + {k + m}", call, k=steps, probes=m)


def fvgp(problem):
    # https://fvgp.readthedocs.io/, docstrings of `fvgp.GP` and `gp_lin_alg`: sparse modes
    # call imate with 20 steps. Equal numbers of samples fix the budget. imate takes its
    # seeds from the processor's time. By default, fvgp takes exact factorisations.
    from fvgp import GP, gp_lin_alg, kernels
    from scipy.sparse import csr_matrix

    def call(seed, **options):
        matrix, info = csr_matrix(problem.matrix()), {}
        value = gp_lin_alg.calculate_random_logdet(matrix, "cpu", options, info)
        return value, info["variance"] ** 0.5, None, None

    def sparse_lu(_):
        factor = gp_lin_alg.calculate_sparse_LU_factor(csr_matrix(problem.matrix()))
        return gp_lin_alg.calculate_LU_logdet(factor), None, None, None

    def kernel(x, y, p):
        return kernels.matern_kernel_diff2(kernels.get_distance_matrix(x, y), p[1])

    def likelihood(_):
        value = problem.logdet(process.log_likelihood(p))
        return value, None, None, 2 * process.neg_log_likelihood_gradient(p)

    for m in (k // 20 for k in BUDGETS):
        samples = {f"random_logdet_{end}_num_samples": m for end in ("min", "max")}
        method = f"fvgp 4.10.0, imate 0.29.11, {m} probes x 20"
        measure(problem, method, 20 * m, call, **samples)
    if problem.is_lattice:
        return measure(problem, "fvgp 4.10.0, sparse LU", "none", sparse_lu)
    functions = {"noise_function": lambda x, p: np.full(len(x), p[0])}
    functions["kernel_function"], p = kernel, np.asarray(problem.parameters)
    process = GP(problem.points, np.zeros(problem.n), p, **functions)
    measure(problem, "fvgp 4.10.0, Cholesky", "none", likelihood)


def gpflash(problem):
    # https://github.com/marchildon/gpflash/blob/main/python/README.md, for zero observations.
    # The matrix includes a nugget, which limits the condition number to `cond_max`, 1e10.
    import gpflash

    options, (noise, length) = gpflash.OptzOptions(), problem.parameters
    options.model_options.has_mean_model_constant = False
    process, point = gpflash.GaussianProcess(options), gpflash.HpVal()
    point.hp_gamma_vec = [1 / length] * problem.points.shape[1]
    point.hp_sig2_k, point.hp_sig2_f_val = 1.0, noise
    data = problem.points, np.zeros(problem.n), point

    def call(_):
        found = process.eval_mll(*data, return_mll_gradient=True, sig2_f_val=-1.0)
        slopes = found.mll_hp_grad_struct
        by_length = 2 * slopes.d_mll_d_hp_gamma_vec.sum() / length**2
        slopes = -2 * slopes.d_mll_d_hp_sig2_f_val, by_length
        return problem.logdet(found.mll), None, None, slopes

    measure(problem, "gpflash 0.3.0, Cholesky", "none", call)


def gabp_sparse_inv(problem):
    # https://github.com/vanshsehrawat14/gabp-sparse-inv#choosing-a-route, reused analysis
    import gabp_sparse_inv as gabp
    import torch

    edges, real = gabp.grid_edges(SIDE, SIDE), {"dtype": torch.float64}
    degrees = gabp.grid_node_degrees(problem.n, edges)[:, None, None]
    order = gabp.elimination_order_nested_dissection(SIDE, SIDE)
    analysis = functools.cache(lambda: gabp.analyze_junction(problem.n, edges, order))
    entries = -torch.ones(edges.shape[1], 1, 1, **real)

    def call(_):
        mass = torch.tensor(problem.parameters[0], requires_grad=True, **real)
        value = analysis().factor(degrees + mass, entries, batched=True).logdet()
        value.backward()
        return value.item(), None, None, [mass.grad.item()]

    measure(problem, "gabp-sparse-inv 0.4.1, Cholesky", "none", call)


def smolgp(problem):
    # https://smolgp.readthedocs.io/, likelihood for zero observations
    import jax.numpy as jnp
    import smolgp

    def value(parameters, key):
        kernel = smolgp.kernels.Matern52(scale=parameters[1], sigma=1.0)
        times, zeros = jnp.asarray(problem.points[:, 0]), jnp.zeros(problem.n)
        process = smolgp.GaussianProcess(kernel, times, noise=parameters[0])
        return problem.logdet(process.log_probability(zeros)), ()

    measure_jax(problem, "smolgp 0.4.3, Kalman filter", "none", value)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", choices=[*PEERS, []])
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--child", choices=PROBLEMS)
    arguments = parser.parse_args()
    if arguments.child:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        library = globals()[arguments.peers[0].replace("-", "_")]
        return library(Problem(arguments.child, arguments.keys))
    folder = os.path.join(tempfile.gettempdir(), "logdet_peers")
    settings = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    settings |= {"JAX_ENABLE_X64": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    print(time.strftime("%Y-%m-%d, Python"), sys.version.split()[0], *NUMPY, *JAX)
    for name, title in PROBLEMS.items():
        print(f"\n{title}:", "", COLUMNS, "|---" * 10 + "|", sep="\n", flush=True)
        for peer in arguments.peers or PEERS:
            packages, unsuitable, reason = PEERS[peer]
            try:
                if name not in unsuitable:
                    command = [environment(peer, packages, folder), __file__, peer]
                    command += ["--child", name, "--keys", str(arguments.keys)]
                    subprocess.run(command, env=os.environ | settings, check=True)
                    continue
            except subprocess.CalledProcessError as error:
                reason = "pip can't install it" if "pip" in error.cmd else "error above"
            print(f"| {peer}: {reason} {'| - ' * 9}|", flush=True)


if __name__ == "__main__":
    main()
