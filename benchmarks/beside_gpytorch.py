"""Gaussian likelihoods compared with GPyTorch: `python benchmarks/likelihood.py gpytorch`.

This process starts one child for each method and problem, on one
core and in turns. A child prints its numbers as JSON.
"""

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg as la
import scipy.optimize
import statsmodels.datasets

import traceax as tx

try:
    import gpytorch
    import torch
except ImportError:
    gpytorch = torch = None

METHODS = {
    "traceax": {},
    "GPyTorch, 15": {"columns": 15},
    "GPyTorch, 100": {"columns": 100},
    "GPyTorch, 400": {"columns": 400},
    "Cholesky": {},  # SciPy's, in 64 bits
}
CORE, EVALUATIONS, RUNS = "0", 60, 3
EXACT = 6000  # up to this many points our answers are exact, and need no pivots


def smooth(n):
    rng = np.random.default_rng(0)
    x = rng.random((n, 6))
    y = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + np.cos(2 * x[:, 3:].sum(1))
    return x, y + 0.1 * rng.standard_normal(n), 0.8, 0.01


def randhie(n):
    table = statsmodels.datasets.randhie.load_pandas().data.sample(n, random_state=0)
    x = table.drop(columns="mdvis").to_numpy()[:, :8]
    return *_standardised(x, np.log1p(table["mdvis"].to_numpy())), 2.0, 0.5


def drawn(d, length, noise, n):
    """Observations from the prior, by the sum of many random cosines."""
    rng = np.random.default_rng(1)
    x = rng.random((n, d))
    # Matern 5/2 has a multivariate t distribution with 5 degrees of freedom as its spectrum.
    w = rng.standard_normal((4000, d)) / np.sqrt(rng.chisquare(5, (4000, 1)) / 5)
    phases = x @ (w / length).T + rng.uniform(0, 2 * np.pi, 4000)
    y = np.cos(phases) @ rng.standard_normal(4000) * (2 / 4000) ** 0.5
    return x, y + noise**0.5 * rng.standard_normal(n), length, noise


def _standardised(*arrays):
    return ((a - a.mean(0)) / a.std(0) for a in map(np.asarray, arrays))


PROBLEMS = {
    "smooth, 6-D": smooth,
    "randhie, 8-D": randhie,
    "drawn, 4-D": functools.partial(drawn, 4, 0.5, 0.01),
    "drawn, 7-D": functools.partial(drawn, 7, 1.0, 0.05),
}


class Matern(eqx.Module):
    """Matern 5/2. A module of arrays compiles once."""

    lengths: jax.Array
    scale: jax.Array

    def __call__(self, a, b):
        squared = sum(((a[i] - b[i]) / self.lengths[i]) ** 2 for i in range(len(a)))
        r = jnp.sqrt(5 * jnp.where(squared == 0, 1, squared))
        value = (1 + r + r**2 / 3) * jnp.exp(-r)
        return self.scale * jnp.where(squared == 0, 1, value)


def by_traceax(x, y, p, keys):
    x, y, d = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), x.shape[1]

    def covariance(p):
        return tx.KernelLinearOperator(Matern(jnp.exp(p[:d]), jnp.exp(p[d])), x)

    @jax.jit
    @jax.value_and_grad
    def evaluate(p, key, pivots):
        options = {"shift": jnp.exp(p[d + 1]), "preconditioner": pivots}
        # A line search may try parameters for which 32 bits are too few.
        likelihood = tx.gaussian_log_likelihood(
            key, covariance(p), y, throw=False, **options
        )
        return likelihood.value

    def pivots_at(p, seed, columns=None):
        if len(x) <= EXACT:
            return None
        key, p = jax.random.key(seed), jnp.asarray(p, jnp.float32)
        noise = jnp.exp(p[d + 1])
        return tx.choose_pivots(key, covariance(p), columns, shift=noise, throw=False)

    def run(p, seed, pivots=None):
        pivots = pivots_at(p, seed) if pivots is None else pivots
        key, p = jax.random.key(seed), jnp.asarray(p, jnp.float32)
        value, gradient = evaluate(p, key, pivots)
        return float(value), np.asarray(gradient, float)

    run.pivots_at = lambda p, seed: pivots_at(p, seed, int(16 * len(x) ** 0.5))
    return run


def by_gpytorch(x, y, p, keys, columns=100, double=False):
    assert gpytorch is not None
    assert torch is not None
    torch.set_num_threads(1)
    dtype = torch.float64 if double else torch.float32
    x, y = (torch.tensor(np.ascontiguousarray(z), dtype=dtype) for z in (x, y))
    d, n = x.shape[1], len(x)

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            matern = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=d)
            self.covar_module = gpytorch.kernels.ScaleKernel(matern)

        def forward(self, x):
            mean, covariance = self.mean_module(x), self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    likelihood = gpytorch.likelihoods.GaussianLikelihood(
        noise_constraint=gpytorch.constraints.GreaterThan(1e-6)
    )
    model = Model(likelihood).to(dtype)
    likelihood.to(dtype)
    model.train()
    likelihood.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    settings = gpytorch.settings
    parts = [
        (model.covar_module.base_kernel, "lengthscale"),
        (model.covar_module, "outputscale"),
        (likelihood.noise_covar, "noise"),
    ]

    def run(p, seed):
        torch.manual_seed(seed)
        values = torch.tensor(np.exp(p), dtype=dtype)
        for (module, name), value in zip(
            parts, (values[:d][None], values[d], values[d + 1 :]), strict=True
        ):
            module.initialize(**{name: value})
        model.zero_grad()
        with (
            settings.max_preconditioner_size(columns),
            settings.min_preconditioning_size(1),
            settings.max_cholesky_size(1),
        ):
            value = mll(model(x), y) * n
            value.backward()
        gradient = []
        for module, name in parts:
            raw = getattr(module, f"raw_{name}")
            slope = raw.grad * getattr(module, name) / torch.sigmoid(raw)
            gradient.extend(slope.detach().double().numpy().ravel())
        return float(value.detach()), np.array(gradient)

    run.model, run.mll, run.likelihood = model, mll, likelihood
    return run


def by_cholesky(x, y, p, keys):
    x, y = np.asarray(x, float), np.asarray(y, float)
    d, n = x.shape[1], len(x)

    def run(p, seed):
        lengths, scale, noise = np.exp(p[:d]), np.exp(p[d]), np.exp(p[d + 1])
        z = x / lengths
        squared = (z**2).sum(1)[:, None] + (z**2).sum(1) - 2 * z @ z.T
        r = np.sqrt(5 * np.maximum(squared, 0))
        del squared
        factor = scale * np.exp(-r)
        K = (1 + r + r**2 / 3) * factor
        weight = 5 / 3 * (1 + r) * factor  # -2 dK / d(squared)
        L = la.cholesky(K + noise * np.eye(n), lower=True)
        u = la.cho_solve((L, True), y)
        value = -(y @ u) / 2 - np.log(np.diag(L)).sum() - n / 2 * math.log(2 * math.pi)
        G, info = la.lapack.dpotri(L, lower=1)
        assert info == 0
        G = np.outer(u, u) - np.tril(G) - np.tril(G, -1).T
        weight *= G
        total = weight.sum(1)
        slopes = [
            2 * (total @ z[:, i] ** 2 - z[:, i] @ weight @ z[:, i]) for i in range(d)
        ]
        gradient = [*np.array(slopes) / 2, np.sum(G * K) / 2, noise * np.trace(G) / 2]
        return value, np.array(gradient)

    return run


def method_of(name):
    if name == "Cholesky":
        return by_cholesky
    if name == "traceax":
        return by_traceax
    return functools.partial(by_gpytorch, **METHODS[name])


def start_of(problem, n):
    x, y, length, noise = PROBLEMS[problem](n)
    return x, y, np.log([*[length] * x.shape[1], 1.0, noise])


def child(task, name, problem, n, number):
    x, y, p = start_of(problem, n)
    run = method_of(name)(x, y, p, number)
    if task == "fit":
        print(json.dumps(fit(name, run, x, y)))
        return
    runs, seconds = [], []
    for seed in range(number + (name != "Cholesky")):
        start = time.process_time()
        value, gradient = run(p, seed)
        seconds.append(time.process_time() - start)
        runs.append([value, *gradient])
    first = name != "Cholesky"  # the first call compiles
    print(
        json.dumps(
            {"seconds": seconds[first:], "first": seconds[0], "runs": runs[first:]}
        )
    )


def fit(name, run, x, y):
    """Fits all parameters from lengths 1, scale 1 and noise 0.1, with 60 evaluations.

    GPyTorch takes 60 steps of Adam with rate 0.1, as its documentation does. The others take
    L-BFGS. Where it estimates, traceax chooses `16 sqrt(n)` pivots anew after every 20
    evaluations.
    """
    p = np.log([*np.ones(x.shape[1] + 1), 0.1])
    start = time.process_time()
    if name.startswith("GPyTorch"):
        p = _by_adam(run, p)
    elif name == "traceax" and len(x) > EXACT:
        for part in range(RUNS):
            pivots = run.pivots_at(p, part)
            p = _by_lbfgs(functools.partial(run, pivots=pivots), p, EVALUATIONS // RUNS)
    else:
        p = _by_lbfgs(run, p, EVALUATIONS)
    return {"seconds": time.process_time() - start, "point": list(p)}


def _by_lbfgs(run, p, evaluations):
    def loss(p):
        value, gradient = run(p, 0)
        if not math.isfinite(value):
            return 1e6, np.zeros(len(p))
        return -value, -gradient

    options = {"maxfun": evaluations}
    out = scipy.optimize.minimize(loss, p, jac=True, method="L-BFGS-B", options=options)
    return out.x


def _by_adam(run, p, rate=0.1):
    first, second = np.zeros(len(p)), np.zeros(len(p))
    for i in range(1, EVALUATIONS + 1):
        _, gradient = run(p, i)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        step = first / (1 - 0.9**i) / (np.sqrt(second / (1 - 0.999**i)) + 1e-8)
        p = p + rate * step
    return p


def start_child(*arguments):
    command = ["taskset", "-c", CORE, sys.executable, __file__, *map(str, arguments)]
    threads = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    out = subprocess.run(
        command,
        env={**os.environ, **threads},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(out.stdout.splitlines()[-1])


def truth_of(problem, n):
    """The exact answer in 64 bits, kept in the folder for temporary files."""
    path = os.path.join(
        tempfile.gettempdir(), f"truth-{problem}-{n}.json".replace(" ", "")
    )
    if not os.path.exists(path):
        with open(path, "w") as file:
            json.dump(
                start_child("evaluate", "Cholesky", problem, n, 1)["runs"][0], file
            )
    with open(path) as file:
        return np.array(json.load(file))


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


def evaluations(sizes, problems, number=8):
    print(
        "| data | n | method | CPU s | first call, s | error (value) | error (gradient) |"
    )
    print("|---|---|---|---|---|---|---|")
    for n in sizes:
        for problem in problems:
            truth = truth_of(problem, n)
            for name in METHODS:
                out = start_child("evaluate", name, problem, n, number)
                runs = np.array(out["runs"]) - truth
                errors = rms(runs[:, 0]), rms(np.linalg.norm(runs[:, 1:], axis=1))
                print(
                    f"| {problem} | {n} | {name} | {np.median(out['seconds']):.2f} "
                    f"| {out['first']:.1f} | {errors[0]:.3g} | {errors[1]:.3g} |",
                    flush=True,
                )


def fits(sizes, problems):
    print("| data | n | method | CPU s | nats behind the best |")
    print("|---|---|---|---|---|")
    for n in sizes:
        for problem in problems:
            x, y, _ = start_of(problem, n)
            exact, ends = by_cholesky(x, y, None, 1), {}
            for name in METHODS:
                out = start_child("fit", name, problem, n, 1)
                ends[name] = out["seconds"], exact(np.array(out["point"]), 0)[0]
            best = max(value for _, value in ends.values())
            for name, (seconds, value) in ends.items():
                row = (
                    f"| {problem} | {n} | {name} | {seconds:.0f} | {best - value:.3g} |"
                )
                print(row, flush=True)


def main(arguments):
    compare = fits if "fits" in arguments else evaluations
    sizes = [int(x) for x in arguments if x.isdigit()] or [4000, 8000]
    compare(sizes, PROBLEMS)


if __name__ == "__main__":
    task, name, problem, n, number = sys.argv[1:]
    child(task, name, problem, int(n), int(number))
