"""CPU seconds to trace, lower and compile, compared with other libraries and handwritten code.

    taskset -c 1 python benchmarks/compile.py         # the table of benchmarks/compile.md
    python benchmarks/compile.py logdet default       # these rows alone
    python benchmarks/compile.py readme import        # README's blocks, and imports

Each number is the smallest from two fresh processes, in 32 bits and without a compilation
cache. In each process we compile the peer first, then the row's program.
"""

# ruff: noqa: PLC0415
# Every process imports its own libraries.

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def psd(n):
    import jax.numpy as jnp
    import numpy as np

    root = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    return jnp.asarray(root @ root.T / n + np.eye(n, dtype=np.float32))


def tagged(matrix):
    import lineax as lx

    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)


#
# Our programs: each function returns a program, and the arguments that come before its key.
#


def logdet(k=None, **options):
    import jax

    import traceax as tx

    def value(matrix, key):
        return tx.logdet(key, tagged(matrix), k, **options).value

    return jax.value_and_grad(value), psd(1000)


def logdet_of_function():
    import jax
    import jax.numpy as jnp
    import lineax as lx

    import traceax as tx

    def value(matrix, key):
        operator = lx.FunctionLinearOperator(
            lambda v: matrix @ v,
            jax.ShapeDtypeStruct((1000,), jnp.float32),
            lx.positive_semidefinite_tag,
        )
        return tx.logdet(key, operator).value

    return jax.value_and_grad(value), psd(1000)


def likelihood(gradient, n=5000):
    import jax
    import jax.numpy as jnp

    import traceax as tx

    x = jax.random.uniform(jax.random.key(1), (n, 2))
    y = jnp.sin(5 * x[:, 0])

    def kernel_matrix(length):
        def kernel(a, b):
            return jnp.exp(-sum((a[i] - b[i]) ** 2 for i in range(2)) / (2 * length**2))

        return tx.KernelLinearOperator(kernel, x)

    pivots = tx.choose_pivots(jax.random.key(0), kernel_matrix(0.2), 200, shift=0.01)

    def value(parameters, key):
        length, noise = parameters
        K = kernel_matrix(length)
        return tx.gaussian_log_likelihood(
            key, K, y, shift=noise, preconditioner=pivots
        ).value

    program = jax.value_and_grad(value) if gradient else value
    return program, (jnp.float32(0.2), jnp.float32(0.01))


def trace(kind=None, **options):
    import lineax as lx

    import traceax as tx

    estimator = None if kind is None else getattr(tx, kind)()

    def value(matrix, key):
        operator = tagged(matrix) if kind else lx.MatrixLinearOperator(matrix)
        estimate = tx.trace(key, operator, 40, estimator, **options)
        return estimate.value, estimate.standard_error

    return value, psd(1000)


def field(weights):
    import jax.numpy as jnp

    return lambda point: jnp.tanh(weights @ point) - point


def divergences():
    import jax
    import jax.numpy as jnp

    import traceax as tx

    def losses(weights, key):
        def one(point, key):
            velocity, divergence = tx.divergence(key, field(weights), point, 40)
            return velocity, divergence.value

        points = jnp.ones((64, 1000), jnp.float32)
        return jax.vmap(one)(points, jax.random.split(key, 64))

    return losses, psd(1000)


#
# The peers' programs.
#


def matfree_logdet():
    import jax
    import jax.numpy as jnp
    from matfree import decomp, funm, stochtrace

    def value(matrix, key):
        tridiagonal = decomp.tridiag_sym(20)
        integrand = funm.monte_carlo_funm_sym_logdet(tridiagonal)
        sampler = stochtrace.sampler_normal(jnp.zeros(1000, jnp.float32), num=5)
        estimate = stochtrace.estimator_monte_carlo(integrand, sampler)
        return estimate(lambda v: matrix @ v, key)

    return jax.value_and_grad(value), psd(1000)


def matfree_xtrace():
    import jax.numpy as jnp
    from matfree import stochtrace

    def value(matrix, key):
        sampler = stochtrace.sampler_sphere(jnp.zeros(1000, jnp.float32), num=20)
        integrand = stochtrace.leave_one_out_xtrace()
        return stochtrace.estimator_leave_one_out(integrand, sampler)(
            lambda v: matrix @ v, key
        )

    return value, psd(1000)


def hand_likelihood(n=5000):
    """The exact likelihood, from a Cholesky factor."""
    import jax
    import jax.numpy as jnp

    x = jax.random.uniform(jax.random.key(1), (n, 2))
    y = jnp.sin(5 * x[:, 0])

    def value(parameters, key):
        length, noise = parameters
        distance = sum((x[:, None, i] - x[None, :, i]) ** 2 for i in range(2))
        K = jnp.exp(-distance / (2 * length**2)) + noise * jnp.eye(n)
        lower = jnp.linalg.cholesky(K)
        z = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
        return -z @ z / 2 - jnp.sum(jnp.log(jnp.diagonal(lower)))

    return jax.value_and_grad(value), (jnp.float32(0.2), jnp.float32(0.01))


def hand_divergences():
    import jax
    import jax.numpy as jnp

    def losses(weights, key):
        def one(point, key):
            probes = jax.random.rademacher(key, (40, 1000), jnp.float32)
            velocity, push = jax.linearize(field(weights), point)
            return velocity, jnp.mean(jax.vmap(lambda v: v @ push(v))(probes))

        points = jnp.ones((64, 1000), jnp.float32)
        return jax.vmap(one)(points, jax.random.split(key, 64))

    return losses, psd(1000)


PEERS = {
    "matfree's Lanczos quadrature": matfree_logdet,
    "matfree's XTrace": matfree_xtrace,
    "handwritten Cholesky": hand_likelihood,
    "handwritten `jax.linearize`": hand_divergences,
}
SLQ, XTRACE, CHOLESKY, HAND = PEERS
# Each name has a row label, a program and a peer.
ROWS = {
    "logdet": ("`tx.logdet`, k = 100, gradient", lambda: logdet(100), SLQ),
    "whole": (
        "`tx.logdet` for a function operator, no k, gradient",
        logdet_of_function,
        SLQ,
    ),
    "until": (
        "`tx.logdet` to a tolerance, k = 240, gradient",
        lambda: logdet(240, rtol=1e-2),
        SLQ,
    ),
    "value": (
        "`tx.gaussian_log_likelihood`, n = 3,000, 200 pivots",
        lambda: likelihood(False),
        CHOLESKY,
    ),
    "likelihood": (
        "`tx.gaussian_log_likelihood`, n = 3,000, 200 pivots, gradient",
        lambda: likelihood(True),
        CHOLESKY,
    ),
    "default": ("`tx.trace`, k = 40, default estimator", trace, XTRACE),
    "xtrace": ("XTrace", lambda: trace("XTraceEstimator"), XTRACE),
    "xnystrace": ("XNysTrace", lambda: trace("XNysTraceEstimator"), XTRACE),
    "hutchinson": ("Hutchinson", lambda: trace("HutchinsonEstimator"), XTRACE),
    "tolerance": (
        "`tx.trace` to a tolerance, k = 40",
        lambda: trace(rtol=1e-2),
        XTRACE,
    ),
    "divergence": ("`tx.divergence`, 64 points", divergences, XTRACE),
    "by hand": ("`tx.divergence`, 64 points", divergences, HAND),
}


def cost(build):
    """A program's CPU seconds, XLA's part of them, and its StableHLO lines."""
    import jax

    program, arguments = build()
    jax.block_until_ready(arguments)
    start = time.process_time()
    lowered = jax.jit(program).lower(arguments, jax.random.key(0))
    middle = time.process_time()
    lowered.compile()
    end = time.process_time()
    lines = lowered.as_text().count("\n")
    return end - start, end - middle, lines


def readme():
    """CPU seconds for README's blocks in one process. Each block compiles and runs."""
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    blocks = [x.split("```")[0] for x in text.split("```python\n")[1:4]]
    names, seconds = {}, []
    for block in blocks:
        start = time.process_time()
        exec(block, names)
        seconds.append(time.process_time() - start)
    return seconds


def imports(name):
    start = time.process_time()
    importlib.import_module(name)
    return [time.process_time() - start]


def programs(name):
    import jax

    jax.jit(lambda x: x + 1).lower(1.0).compile()
    _, build, peer = ROWS[name]
    peer_numbers = cost(PEERS[peer])
    return [*cost(build), *peer_numbers]


def least(*arguments, processes=2):
    """Elementwise minimum over fresh processes, which print the numbers."""
    runs = []
    for _ in range(processes):
        command = [sys.executable, __file__, "--serve", *arguments]
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        runs.append(json.loads(out.stdout.splitlines()[-1]))
    return [min(x) for x in zip(*runs, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=[*ROWS, "readme", "import"])
    parser.add_argument("--serve", nargs="*")
    arguments = parser.parse_args()
    if arguments.serve:
        job, *values = arguments.serve
        numbers = {"readme": readme, "import": imports, "program": programs}
        print(json.dumps(numbers[job](*values)))
        return
    rows = [x for x in arguments.rows if x in ROWS]
    if rows:
        print(
            "| program | time (s) | XLA's part (s) | StableHLO (lines) | "
            "compared with | its time (s) | time ratio |"
        )
        print("|---|---|---|---|---|---|---|")
    for name in rows:
        text, _, peer = ROWS[name]
        seconds, xla_seconds, lines, peer_seconds, *_ = least("program", name)
        cells = text, f"{seconds:.2f}", f"{xla_seconds:.2f}", f"{lines:,}"
        cells += peer, f"{peer_seconds:.2f}", f"{seconds / peer_seconds:.2f}"
        print("| " + " | ".join(cells) + " |", flush=True)
    if "readme" in arguments.rows:
        seconds = ", ".join(f"{x:.1f}" for x in least("readme"))
        print(
            f"\nREADME's divergence, likelihood and Hessian, compiled and run: {seconds} s"
        )
    if "import" in arguments.rows:
        ours, lineax = (
            least("import", x, processes=5)[0] for x in ("traceax", "lineax")
        )
        print(f"import traceax: {ours:.2f} s; import lineax: {lineax:.2f} s")


if __name__ == "__main__":
    main()
