"""Errors of the default estimator, which splits its budget, compared with other estimators.

    python benchmarks/choice.py --figure docs/choice.svg    # everything: ten minutes
    python benchmarks/choice.py --keys 100 --k 24 60
    python benchmarks/choice.py --keys 100 --constants      # other values of constants
    python benchmarks/choice.py --time      # compared with XTrace: a dense matrix and a stencil

For each operator and budget, the script prints statistics over many keys:

- `RMSE / best`: the root mean square error, divided by the smallest error among four estimators:
  Hutchinson's with signs and on the sphere, Hutch++ and XTrace. Only hindsight knows the best
  estimator. `two` compares with Hutchinson's with signs and XTrace alone. `XTrace` is XTrace's own
  error, divided by the smallest error;
- `bar/RMSE`: the root mean square standard error, divided by the root mean square error;
- `cover`: the coverage of 95 % intervals, in percent;
- `basis`: the share of keys for which at least one test used the basis.

All operators are dense: matrices with random eigenvectors and three positive spectra or a
signed one, a nonsymmetric matrix, a Matern kernel, the Laplacian of a random geometric graph,
and a network's Hessian before and after training. `--more` takes seven others. The figure shows
relative errors for all estimators. XNysTrace appears for semidefinite operators, which we tag
for it. It isn't among the four.
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
    """A tanh network's loss Hessians on ten classes, after each number of Adam steps."""
    rng = np.random.default_rng(2)
    classes = rng.integers(0, 10, 400)
    centres = rng.normal(size=(10, 20))
    x = jnp.asarray(centres[classes] + rng.normal(size=(400, 20)))
    layers = {
        "a": rng.normal(size=(20, 13)) / np.sqrt(20),
        "b": np.zeros(13),
        "c": rng.normal(size=(13, 10)) / np.sqrt(13),
        "d": np.zeros(10),
    }
    start, unravel = jax.flatten_util.ravel_pytree(layers)

    def loss(p):
        p = unravel(p)
        logits = jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] + p["d"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(400), classes])

    gradient, results = jax.jit(jax.grad(loss)), []
    p, m, v = start, 0 * start, 0 * start
    for step in range(max(steps) + 1):
        if step in steps:
            results.append(np.asarray(jax.jit(jax.hessian(loss))(p)))
        g = gradient(p)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        unit = (1 - 0.9 ** (step + 1)) / jnp.sqrt(1 - 0.999 ** (step + 1))
        p = p - 0.01 * m / (unit * (jnp.sqrt(v) + 1e-8))
    return results


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
    first_nine = {
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
        return first_nine
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
        estimate = tx.trace(key, operator, k, estimator, throw=False)
        low, high = estimate.confidence_interval()
        basis = estimate.stats.get("basis", 0)
        return estimate.value, estimate.standard_error, low, high, basis

    return jax.lax.map(one, keys)


def measure(matrix, k, estimator, keys, tags=()) -> tuple[float, float, float, float]:
    """RMSE, error bar / RMSE, coverage in percent, and the share of keys that used a basis."""
    outputs = estimates(jnp.asarray(matrix), keys, k, estimator, tags)
    value, error, low, high, basis = (np.asarray(x) for x in outputs)
    truth = np.trace(matrix)
    rms = np.sqrt(np.mean((value - truth) ** 2))
    bar = np.sqrt(np.mean(error**2)) / rms
    cover = 100 * np.mean((low <= truth) & (truth <= high))
    return rms, bar, cover, np.mean(basis > 0)


def is_semidefinite(matrix) -> bool:
    symmetric = np.allclose(matrix, matrix.T)
    return symmetric and np.linalg.eigvalsh(matrix)[0] > -1e-9 * np.trace(matrix)


def draw(errors: dict[str, dict[str, dict[int, float]]], path: str) -> None:
    """Draw relative errors against products, one panel per operator."""
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
    for ax, (operator, errors_by_estimator) in zip(
        axes.flat, errors.items(), strict=True
    ):
        for name, by_budget in errors_by_estimator.items():
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
    """Print a line for each operator and budget. With a path, draw the figure."""
    print("                      |  RMSE / best         |")
    print("operator            k | adaptive  two XTrace | bar/RMSE cover | basis")
    ratios, errors = {"adaptive": [], "two": [], "XTrace": []}, {}
    for k in budgets:
        for name, matrix in operators.items():
            rms_errors = {x: measure(matrix, k, OTHERS[x], keys)[0] for x in OTHERS}
            best, best_of_two = (
                min(rms_errors.values()),
                min(rms_errors["signs"], rms_errors["XTrace"]),
            )
            error, bar, cover, basis = measure(matrix, k, ADAPTIVE, keys)
            row = error / best, error / best_of_two, rms_errors["XTrace"] / best
            for ratio, so_far in zip(row, ratios.values(), strict=True):
                so_far.append(ratio)
            if figure and is_semidefinite(matrix):
                tag, estimator = lx.positive_semidefinite_tag, tx.XNysTraceEstimator()
                rms_errors["XNysTrace"] = measure(matrix, k, estimator, keys, tag)[0]
            for estimator, rms in {**rms_errors, "adaptive": error}.items():
                by_budget = errors.setdefault(name, {}).setdefault(estimator, {})
                by_budget[k] = rms / abs(np.trace(matrix))
            print(
                f"{name:18}{k:4}| {row[0]:8.2f} {row[1]:4.2f} {row[2]:6.2f} |"
                f" {bar:8.2f} {cover:5.1f} | {basis:.2f}",
                flush=True,
            )
    for name, values in ratios.items():
        print(
            f"{name}: geometric mean {geometric_mean(values):.2f}, worst {max(values):.2f}"
        )
    if figure:
        draw(errors, figure)


def compare_constants(operators, budgets: list[int], keys) -> None:
    """Print the geometric mean and the worst RMSE / best, for other values of constants."""
    best = {
        (name, k): min(measure(matrix, k, x, keys)[0] for x in OTHERS.values())
        for name, matrix in operators.items()
        for k in budgets
    }
    for constant, values in CONSTANTS.items():
        default = getattr(adaptive, constant)
        for value in values:
            setattr(adaptive, constant, value)
            jax.clear_caches()
            ratios = [
                measure(operators[name], k, ADAPTIVE, keys)[0] / error
                for (name, k), error in best.items()
            ]
            mean, worst = geometric_mean(ratios), max(ratios)
            print(f"{constant} {value}: {mean:.3f}, worst {worst:.2f}", flush=True)
        setattr(adaptive, constant, default)


def compare_times(k: int = 60, repetitions: int = 9) -> None:
    """Print the smallest CPU time over repetitions, for the adaptive estimator and XTrace."""
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
        programs, compile_seconds, times = {}, {}, {}
        for name, estimator in {
            "adaptive": ADAPTIVE,
            "XTrace": OTHERS["XTrace"],
        }.items():
            start = time.process_time()
            run = jax.jit(value, static_argnums=(2, 3))
            programs[name] = run.lower(dense, jr.key(0), case, estimator).compile()
            compile_seconds[name], times[name] = time.process_time() - start, []
        for repetition in range(repetitions):
            for name, program in programs.items():
                start = time.process_time()
                program(dense, jr.key(repetition)).block_until_ready()
                times[name].append(time.process_time() - start)
        for name in programs:
            print(
                f"{case:8}{name:9}{min(times[name]):7.3f}, compiled in {compile_seconds[name]:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", type=int, nargs="+", default=[12, 24, 60, 120, 240])
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", action="store_true", help="use seven other operators")
    parser.add_argument("--figure", help="draw the errors into this file")
    parser.add_argument(
        "--constants", action="store_true", help="compare other constants"
    )
    parser.add_argument("--time", action="store_true", help="compare times with XTrace")
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
