"""Time relative to the products, memory and accuracy, compared with other libraries.

    python benchmarks/peers.py              # the table of benchmarks/peers.md
    python benchmarks/peers.py --peers no   # without other libraries, installs nothing

We compare with traceax 1.0.2 by mancusolab, which has the same import name, and with matfree,
each in its own virtual environment under `.benchmarks/`. We also compare with Hutchinson's
estimator, written by hand in JAX. Every library runs in its own process. Repetitions are
interleaved: the processes take turns, and each waits while another runs. Times are medians,
divided by the time for the products alone, which we measure in between. The products use the
faster block layout, (n, k) or (k, n).
"""

# ruff: noqa: PLC0415
# Every process imports its own libraries.

import argparse
import importlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import venv
from functools import partial

# We give every library one thread per LAPACK call. With more, OpenBLAS and XLA spin against each
# other, and small factorisations take up to a hundred times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = pathlib.Path(__file__).resolve().parents[1]
PEERS = {"mancusolab": "traceax==1.0.2", "matfree": "matfree==0.6.3"}
ESTIMATORS = ("Hutchinson", "Hutch++", "XTrace", "XNysTrace")
# Name: n, k, repetitions.
CASES = {
    "stencil": (10**6, 60, 7),
    "dense": (4000, 60, 15),
    "small": (100, 30, 300),
    "middle": (1000, 60, 30),
}


#
# The process for one library. `build` compiles its programs.
#


def product(case, data):
    """The function `v -> A v`, which is the same for every library."""
    import jax.numpy as jnp

    if case != "stencil":
        return lambda v: data @ v
    side = 1000

    def stencil(v):
        u = v.reshape(side, side)
        neighbours = sum(
            jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1)
        )
        return (data * u - neighbours).reshape(-1)

    return stencil


def matrix(case):
    import jax.numpy as jnp
    import numpy as np

    n, _, _ = CASES[case]
    if case == "stencil":
        return jnp.float32(4.1)
    rng = np.random.default_rng(0)
    if case == "middle":  # eigenvalues i^-2, to compare accuracy
        u, _ = np.linalg.qr(rng.normal(size=(n, n)))
        return jnp.asarray((u * np.arange(1, n + 1) ** -2.0) @ u.T, jnp.float32)
    a = rng.normal(size=(n, n)).astype(np.float32)
    return jnp.asarray(a @ a.T / n)


def operator(case, data):
    import jax
    import lineax as lx

    if case != "stencil":
        return lx.MatrixLinearOperator(data, lx.positive_semidefinite_tag)
    structure = jax.ShapeDtypeStruct((CASES[case][0],), data.dtype)
    return lx.FunctionLinearOperator(
        product(case, data),
        structure,
        lx.positive_semidefinite_tag,
        # A closure-converted operator refuses the integer signs of mancusolab's sampler.
        closure_convert=False,
    )


def ours(case, estimator, data, key):
    import traceax as tx

    estimator_class = {
        "Hutchinson": tx.HutchinsonEstimator,
        "Hutch++": tx.HutchPlusPlusEstimator,
        "XTrace": tx.XTraceEstimator,
        "XNysTrace": tx.XNysTraceEstimator,
    }[estimator]
    estimate = tx.trace(
        key, operator(case, data), CASES[case][1], estimator_class(), throw=False
    )
    return estimate.value, estimate.standard_error


def mancusolab(case, estimator, data, key):
    import traceax

    estimator_class = {
        "Hutchinson": traceax.HutchinsonEstimator,
        "Hutch++": traceax.HutchPlusPlusEstimator,
        "XTrace": traceax.XTraceEstimator,
        "XNysTrace": traceax.XNysTraceEstimator,
    }[estimator]
    return estimator_class().estimate(key, operator(case, data), CASES[case][1])[0]


def matfree(case, estimator, data, key):
    import jax.numpy as jnp
    from matfree import stochtrace

    n, k, _ = CASES[case]
    like = jnp.zeros(n, jnp.float32)
    if estimator == "Hutchinson":
        sampler = stochtrace.sampler_signs(like, num=k)
        integrand = stochtrace.monte_carlo_trace()
        return stochtrace.estimator_monte_carlo(integrand, sampler)(
            product(case, data), key
        )
    # XTrace takes two products per sample.
    number, integrand = {
        "XTrace": (k // 2, stochtrace.leave_one_out_xtrace),
        "XNysTrace": (k, stochtrace.leave_one_out_xnystrace),
    }[estimator]
    sampler = stochtrace.sampler_sphere(like, num=number)
    return stochtrace.estimator_leave_one_out(integrand(), sampler)(
        product(case, data), key
    )


def by_hand(case, estimator, data, key):
    import jax
    import jax.numpy as jnp

    if estimator != "Hutchinson":
        raise KeyError(estimator)
    n, k, _ = CASES[case]
    probes = jax.random.rademacher(key, (k, n), jnp.float32)
    return jnp.mean(jax.vmap(lambda w: w @ product(case, data)(w))(probes))


LIBRARIES = {
    "ours": ours,
    "by hand": by_hand,
    "mancusolab": mancusolab,
    "matfree": matfree,
}


def build(library, case, estimator, data):
    """A compiled program, its key, its compile time in seconds, and its memory in bytes."""
    import jax

    key = jax.random.PRNGKey(0)
    if library == "products":
        axis = int(estimator)
        n, k, _ = CASES[case]
        shape = (n, k) if axis else (k, n)
        key = jax.random.normal(jax.random.key(0), shape, data.dtype)

        def program(data, block):
            return jax.vmap(product(case, data), axis, axis)(block)
    else:
        program = partial(LIBRARIES[library], case, estimator)
    start = time.perf_counter()
    compiled = jax.jit(program).lower(data, key).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis().temp_size_in_bytes
    return partial(compiled, data), key, seconds, memory


def serve():
    """Answer requests, one per line, until the input ends."""
    import jax

    data, programs = {}, {}
    for line in sys.stdin:
        request = json.loads(line)
        library, case, estimator = request["program"]
        if case not in data:
            data = {case: matrix(case)}
            programs = {}
        name = library, estimator
        try:
            if name not in programs:
                programs[name] = build(library, case, estimator, data[case])
        except (KeyError, ValueError) as error:
            print(json.dumps({"error": repr(error)}), flush=True)
            continue
        program, key, seconds, memory = programs[name]
        answer = {"compile": seconds, "memory": memory}
        if request["do"] == "time":
            start = time.perf_counter()
            jax.block_until_ready(program(key))
            answer["time"] = time.perf_counter() - start
        elif request["do"] == "eager":
            run = partial(LIBRARIES[library], case, estimator, data[case])
            jax.block_until_ready(run(key))
            times = []
            for _ in range(5):
                start = time.perf_counter()
                jax.block_until_ready(run(key))
                times.append(time.perf_counter() - start)
            answer["time"] = statistics.median(times)
        elif request["do"] == "accuracy":
            import numpy as np

            truth = float(np.trace(np.asarray(data[case], np.float64)))
            errors = []
            for seed in range(100):
                out = jax.tree.leaves(program(jax.random.PRNGKey(seed)))[0]
                errors.append(abs(float(out) - truth) / truth)
            answer["error"] = float(np.mean(errors))
        print(json.dumps(answer), flush=True)


#
# The process that sends requests.
#


class Library:
    """A process that answers requests with one library."""

    def __init__(self, python):
        self.process = subprocess.Popen(
            [python, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do, *program):
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"do": do, "program": program}) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())


def environment(name, packages=None, folder=ROOT / ".benchmarks"):
    """The Python in a peer's virtual environment, which the first call creates."""
    home = pathlib.Path(folder) / name
    python = home / "bin" / "python"
    if not python.exists():
        if packages is None:
            version = importlib.import_module("jax").__version__
            packages = [PEERS[name], f"jax=={version}"]
        venv.create(home, with_pip=True)
        command = [python, "-m", "pip", "install", "-q", *packages]
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError:
            shutil.rmtree(home)
            raise
    return str(python)


def measure(case, libraries):
    """Print a case's rows: estimator, library, ratio, compilation, memory, eager, error."""
    _, _, repetitions = CASES[case]
    our_process = libraries["ours"]
    programs = [
        (name, estimator)
        for estimator in ESTIMATORS
        for name in ("ours", "by hand", "mancusolab", "matfree")
        if (name if name in PEERS else "ours") in libraries
    ]
    host = {name: libraries.get(name, our_process) for name, _ in programs}
    first_answers = {p: host[p[0]].ask("time", p[0], case, p[1]) for p in programs}
    programs = [p for p in programs if "error" not in first_answers[p]]
    times = {p: [] for p in programs}
    layouts = {axis: [] for axis in (0, 1)}
    for _ in range(repetitions):
        for axis, run_times in layouts.items():
            run_times.append(our_process.ask("time", "products", case, axis)["time"])
        for name, estimator in programs:
            answer = host[name].ask("time", name, case, estimator)
            times[name, estimator].append(answer["time"])
    product_time = min(
        statistics.median(run_times[1:]) for run_times in layouts.values()
    )
    print(
        f"\n{case}: n = {CASES[case][0]:,}, k = {CASES[case][1]}, products take {product_time * 1e3:.3g} ms"
    )
    print(
        "| estimator | library | time / products | compilation (s) | memory (MB) | eager (ms) | relative error |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, estimator in programs:
        ratio = statistics.median(times[name, estimator]) / product_time
        cells = [estimator, name, f"{ratio:.2f}"]
        cells += [f"{first_answers[name, estimator]['compile']:.2f}"]
        cells += [f"{first_answers[name, estimator]['memory'] / 1e6:.3g}"]
        eager = error = ""
        if case == "small":
            eager = (
                f"{1e3 * host[name].ask('eager', name, case, estimator)['time']:.2f}"
            )
        if case == "middle":
            error = f"{host[name].ask('accuracy', name, case, estimator)['error']:.2e}"
        print("| " + " | ".join([*cells, eager, error]) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--peers", default="yes", choices=["yes", "no"])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    libraries = {"ours": Library(sys.executable)}
    if arguments.peers == "yes":
        libraries |= {name: Library(environment(name)) for name in PEERS}
    for case in arguments.cases:
        measure(case, libraries)


if __name__ == "__main__":
    main()
