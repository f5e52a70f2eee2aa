"""Error against products of the estimator that splits its budget, and of the others.

    python benchmarks/choice.py --figure docs/choice.svg    # all of it: ten minutes
    python benchmarks/choice.py --keys 100 --k 24 60
    python benchmarks/choice.py --keys 100 --constants      # other values of constants
    python benchmarks/choice.py --time      # beside XTrace: a dense matrix and a stencil

For every operator and budget, over many keys:

- `RMSE / best`: over the smallest root mean square error of Hutchinson's estimator with
  signs and on the sphere, Hutch++ and XTrace, which only hindsight knows. `two` is over
  that of Hutchinson's estimator with signs or XTrace, and `XTrace` is that estimator's;
- `bar / RMSE`: the root mean square of the standard error, and `cover`, the share of 95 %
  intervals that hold the truth, in percent;
- `basis`, the share of keys for which any test used the basis.

Operators are dense: three spectra and a signed one in a random basis, a nonsymmetric one, a
Matern kernel, the Laplacian of a random geometric graph, and Hessians of a network before
and after training. `--more` takes others. The figure has relative errors of all estimators;
XNysTrace is for the semidefinite ones, tagged so, and isn't among the four.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np

import traceax as tx
from traceax._linalg import adaptive

jax.config.update("jax_enable_x64", True)

N = 413  # parameters of the network
ADAPTIVE = tx.AdaptiveXTraceEstimator()
CONSTANTS = {
    "CORRELATION": [0.0, 0.125, 0.25, 0.5, 1.0],
    "ALLOWANCE": [0.0, 10.0, 30.0, 100.0, 1e9],
}
OTHERS = {
    "signs": tx.HutchinsonEstimator(),
    "sphere": tx.HutchinsonEstimator(tx.SphereSampler()),
    "Hutch++": tx.HutchPlusPlusEstimator(),
    "XTrace": tx.XTraceEstimator(),
}


def hessians(steps=(0, 300)) -> list[np.ndarray]:
    """Of the loss of a tanh network on ten classes, after steps of Adam."""
    rng = np.random.default_rng(2)
    classes = rng.integers(0, 10, 400)
    centres = rng.normal(size=(10, 20))
    x = jnp.asarray(centres[classes] + rng.normal(size=(400, 20)))
    first = {
        "a": rng.normal(size=(20, 13)) / np.sqrt(20),
        "b": np.zeros(13),
        "c": rng.normal(size=(13, 10)) / np.sqrt(13),
        "d": np.zeros(10),
    }
    start, unravel = jax.flatten_util.ravel_pytree(first)

    def loss(p):
        p = unravel(p)
        logits = jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] + p["d"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(400), classes])

    gradient, found = jax.jit(jax.grad(loss)), []
    p, m, v = start, 0 * start, 0 * start
    for step in range(max(steps) + 1):
        if step in steps:
            found.append(np.asarray(jax.jit(jax.hessian(loss))(p)))
        g = gradient(p)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        unit = (1 - 0.9 ** (step + 1)) / jnp.sqrt(1 - 0.999 ** (step + 1))
        p = p - 0.01 * m / (unit * (jnp.sqrt(v) + 1e-8))
    return found


def matrices(*, more: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    i = np.arange(1, N + 1.0)

    def rotated(values):
        basis = np.linalg.qr(rng.normal(size=(N, N)))[0]
        return (basis * values) @ basis.T

    points = rng.uniform(size=(N, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    kernel = (1 + distances / 0.2) * np.exp(-distances / 0.2)
    adjacent = (distances < 0.1) & ~np.eye(N, dtype=bool)
    signs = np.where(rng.uniform(size=N) < 0.5, -1, 1)
    hessian = hessians()
    found = {
        "flat": rotated(np.linspace(1, 3, N)),
        "1 / i": rotated(1 / i),
        "0.9^i": rotated(0.9**i),
        "signed 1 / i": rotated(signs / i),
        "nonsymmetric": rng.normal(size=(N, N)) / i,
        "kernel": kernel,
        "Laplacian": np.diag(adjacent.sum(1)) - 1.0 * adjacent,
        "Hessian, step 0": hessian[0],
        "Hessian, step 300": hessian[1],
    }
    if not more:
        return found
    outliers = np.where(i <= 20, 20 + i, 1 + rng.uniform(size=N))
    return {
        "step": rotated(np.where(i <= 50, 1, 1e-3)),
        "two steps": rotated(np.where(i <= 3, 10, np.where(i <= 40, 1, 1e-3))),
        "i^-2": rotated(i**-2),
        "i^-1/2": rotated(i**-0.5),
        "0.7^i": rotated(0.7**i),
        "bulk and outliers": rotated(outliers),
        "I + normal": np.eye(N) + rng.normal(size=(N, N)) / np.sqrt(N),
    }


@eqx.filter_jit
def estimates(matrix, keys, k, estimator, tags):
    operator = lx.MatrixLinearOperator(matrix, tags)

    def one(key):
        found = tx.trace(key, operator, k, estimator, throw=False)
        low, high = found.confidence_interval()
        basis = found.stats.get("basis", 0)
        return found.value, found.standard_error, low, high, basis

    return jax.lax.map(one, keys)


def measure(matrix, k, estimator, keys, tags=()) -> tuple[float, float, float, float]:
    """The RMSE, the error bar over it, the coverage, and how often a basis was taken."""
    found = estimates(jnp.asarray(matrix), keys, k, estimator, tags)
    value, error, low, high, basis = (np.asarray(x) for x in found)
    truth = np.trace(matrix)
    rms = np.sqrt(np.mean((value - truth) ** 2))
    bar = np.sqrt(np.mean(error**2)) / rms
    cover = 100 * np.mean((low <= truth) & (truth <= high))
    return rms, bar, cover, np.mean(basis > 0)


def is_semidefinite(matrix) -> bool:
    symmetric = np.allclose(matrix, matrix.T)
    return symmetric and np.linalg.eigvalsh(matrix)[0] > -1e-9 * np.trace(matrix)


def draw(errors: dict[str, dict[str, dict[int, float]]], path: str) -> None:
    """Relative errors by products, a panel for each operator."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "traceax"})
    styles = {
        "signs": ("Hutchinson, signs", "s", "#7f7f7f"),
        "sphere": ("Hutchinson, sphere", "s", "#bdbdbd"),
        "Hutch++": ("Hutch++", "^", "#e69f00"),
        "XTrace": ("XTrace", "o", "#0072b2"),
        "XNysTrace": ("XNysTrace, tagged semidefinite", "D", "#d55e00"),
        "adaptive": ("adaptive, the default", "", "black"),
    }
    figure, axes = plt.subplots(3, 3, figsize=(10, 8.5), layout="constrained")
    for ax, (operator, found) in zip(axes.flat, errors.items(), strict=True):
        for name, by_budget in found.items():
            label, marker, colour = styles[name]
            x, y = list(by_budget), list(by_budget.values())
            ax.loglog(
                x, y, marker=marker, color=colour, label=label, lw=1 + (not marker)
            )
        ax.set_title(operator, fontsize="medium")
        ax.set_xticks(ticks := [12, 24, 60, 120, 240], [str(k) for k in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.spines[["right", "top"]].set_visible(False)
        if ax.get_ylim()[0] < 1e-7:
            ax.set_ylim(bottom=1e-7)
    for ax in axes[:, 0]:
        ax.set_ylabel("relative error")
    for ax in axes[-1]:
        ax.set_xlabel("products")
    lines = {x.get_label(): x for ax in axes.flat for x in ax.lines}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=4)
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def geometric_mean(ratios) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


def compare(operators: dict[str, np.ndarray], budgets: list[int], keys, figure) -> None:
    """A line for each operator and budget, and the figure if it has a path."""
    print("                      |  RMSE / best         |")
    print("operator            k | adaptive  two XTrace | bar/RMSE cover | basis")
    ratios, errors = {"adaptive": [], "two": [], "XTrace": []}, {}
    for k in budgets:
        for name, matrix in operators.items():
            found = {x: measure(matrix, k, OTHERS[x], keys)[0] for x in OTHERS}
            best, two = min(found.values()), min(found["signs"], found["XTrace"])
            error, bar, cover, basis = measure(matrix, k, ADAPTIVE, keys)
            row = error / best, error / two, found["XTrace"] / best
            for ratio, so_far in zip(row, ratios.values(), strict=True):
                so_far.append(ratio)
            if figure and is_semidefinite(matrix):
                tag, estimator = lx.positive_semidefinite_tag, tx.XNysTraceEstimator()
                found["XNysTrace"] = measure(matrix, k, estimator, keys, tag)[0]
            for estimator, rms in {**found, "adaptive": error}.items():
                by_budget = errors.setdefault(name, {}).setdefault(estimator, {})
                by_budget[k] = rms / abs(np.trace(matrix))
            print(
                f"{name:18}{k:4}| {row[0]:8.2f} {row[1]:4.2f} {row[2]:6.2f} |"
                f" {bar:8.2f} {cover:5.1f} | {basis:.2f}",
                flush=True,
            )
    for name, found in ratios.items():
        print(
            f"{name}: geometric mean {geometric_mean(found):.2f}, worst {max(found):.2f}"
        )
    if figure:
        draw(errors, figure)


def compare_constants(operators, budgets: list[int], keys) -> None:
    """Geometric mean and worst of RMSE / best, for other values of the constants."""
    best = {
        (name, k): min(measure(matrix, k, x, keys)[0] for x in OTHERS.values())
        for name, matrix in operators.items()
        for k in budgets
    }
    for constant, values in CONSTANTS.items():
        used = getattr(adaptive, constant)
        for value in values:
            setattr(adaptive, constant, value)
            jax.clear_caches()
            ratios = [
                measure(operators[name], k, ADAPTIVE, keys)[0] / error
                for (name, k), error in best.items()
            ]
            mean, worst = geometric_mean(ratios), max(ratios)
            print(f"{constant} {value}: {mean:.3f}, worst {worst:.2f}", flush=True)
        setattr(adaptive, constant, used)


def compare_times(k: int = 60, repetitions: int = 9) -> None:
    """CPU seconds of the adaptive estimator and of XTrace, the least of repetitions."""
    side = 1000
    structure = jax.ShapeDtypeStruct((side * side,), jnp.float32)

    def stencil(v):
        u = v.reshape(side, side)
        shifted = [jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1)]
        return (4.1 * u - sum(shifted)).reshape(-1)

    def value(dense, key, case, estimator):
        operator = lx.FunctionLinearOperator(stencil, structure)
        if case == "dense":
            operator = lx.MatrixLinearOperator(dense)
        return tx.trace(key, operator, k, estimator, throw=False).value

    dense = jr.normal(jr.key(0), (4000, 4000), jnp.float32)
    for case in ("dense", "stencil"):
        programs, first, times = {}, {}, {}
        for name, estimator in {
            "adaptive": ADAPTIVE,
            "XTrace": OTHERS["XTrace"],
        }.items():
            start = time.process_time()
            run = jax.jit(value, static_argnums=(2, 3))
            programs[name] = run.lower(dense, jr.key(0), case, estimator).compile()
            first[name], times[name] = time.process_time() - start, []
        for repetition in range(repetitions):
            for name, program in programs.items():
                start = time.process_time()
                program(dense, jr.key(repetition)).block_until_ready()
                times[name].append(time.process_time() - start)
        for name in programs:
            print(
                f"{case:8}{name:9}{min(times[name]):7.3f}, compiled in {first[name]:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", type=int, nargs="+", default=[12, 24, 60, 120, 240])
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", action="store_true", help="other operators")
    parser.add_argument("--figure", help="draw errors into this file")
    parser.add_argument("--constants", action="store_true", help="compare constants")
    parser.add_argument("--time", action="store_true", help="compare times")
    arguments = parser.parse_args()
    if arguments.time:
        return compare_times()
    keys = jr.split(jr.key(arguments.seed), arguments.keys)
    print(
        f"jax {jax.__version__}, traceax {tx.__version__}, {time.strftime('%Y-%m-%d')}, "
        f"n = {N}, {arguments.keys} keys, float64"
    )
    operators = matrices(more=arguments.more)
    if arguments.constants:
        compare_constants(operators, arguments.k, keys)
    else:
        compare(operators, arguments.k, keys, arguments.figure)


if __name__ == "__main__":
    main()
