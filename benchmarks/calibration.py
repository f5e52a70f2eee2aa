"""Compare 95 % intervals and standard errors with true errors.

    python benchmarks/calibration.py                     # the tables of benchmarks/calibration.md
    python benchmarks/calibration.py --n 300 --keys 500       # a quick look
    python benchmarks/calibration.py --markdown table.md --figure figure.svg

For each estimator, matrix and budget, the script prints statistics over many keys:

- `coverage`: the percentage of 95 % intervals that contain the truth;
- `width`: the mean half-width, divided by the 95 % quantile of the true error's modulus. An
  interval that knows the error's distribution has width 1;
- `error bar`: the mean standard error, divided by the root mean square error.

Estimators with rotation-invariant probes get diagonal matrices, because only the spectrum
matters to them. Estimators with sign probes get dense matrices with random eigenvectors.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np

import traceax as tx

jax.config.update("jax_enable_x64", True)

PSD = lx.positive_semidefinite_tag
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "Hutch++": tx.HutchPlusPlusEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}
BUDGETS = (10, 20, 40, 80)


def matrices(n: int) -> dict[str, np.ndarray]:
    """Vectors of eigenvalues, or whole matrices, by name."""
    i = np.arange(1, n + 1.0)
    rng = np.random.default_rng(0)
    points = rng.uniform(size=(n, 2))
    distances = np.sum((points[:, None] - points[None]) ** 2, axis=-1)
    return {
        "flat": np.linspace(1.0, 3.0, n),
        "poly": i**-2,
        "exp": 0.7 ** (i - 1),
        "step": np.where(i <= 50, 1.0, 1e-3),
        "rbf": np.exp(-distances / (2 * 0.3**2)),
        "signed": np.linspace(-1.0, 2.0, n),
        "nonsymmetric": rng.normal(size=(n, n)) / np.sqrt(n)
        + np.diag(np.linspace(0.5, 1.5, n)),
    }


def operator_and_trace(values: np.ndarray, *, signs: bool) -> tuple:
    """An operator, and its trace from the eigenvalues or the diagonal."""
    n = values.shape[0]
    trace = np.sum(values if values.ndim == 1 else np.diagonal(values))
    if values.ndim == 2:
        return lx.MatrixLinearOperator(jnp.asarray(values), PSD), trace
    if signs:
        gaussian = np.random.default_rng(1).normal(size=(n, n))
        basis = np.linalg.qr(gaussian)[0]
        dense = jnp.asarray((basis * values) @ basis.T)
        return lx.MatrixLinearOperator(dense, PSD), trace
    structure = jax.ShapeDtypeStruct((n,), jnp.float64)
    return lx.FunctionLinearOperator(lambda v: values * v, structure, PSD), trace


def measure(estimator, operator, trace, k, num_keys, seed=0, batch=50) -> dict:
    """Relative error, coverage, width and error bar for one cell of the table."""

    @eqx.filter_jit
    def run(operator, keys):
        def one(key):
            estimate = tx.trace(key, operator, k, estimator, throw=False)
            low, high = estimate.confidence_interval()
            return estimate.value, estimate.standard_error, low, high

        return jax.vmap(one)(keys)

    keys = jr.split(jr.key(seed), num_keys).reshape(-1, batch)
    outputs = [jax.device_get(run(operator, chunk)) for chunk in keys]
    value, error, low, high = (np.concatenate(x) for x in zip(*outputs, strict=True))
    deviations = np.abs(value - trace)
    rms = np.sqrt(np.mean(deviations**2))
    return {
        "rms": rms / abs(trace),
        "coverage": 100 * np.mean((low <= trace) & (trace <= high)),
        "width": np.mean(high - low) / 2 / np.quantile(deviations, 0.95),
        "error bar": np.mean(error) / rms,
    }


def cells(sizes, names, num_keys, seed):
    for n in sizes:
        for spectrum, values in matrices(n).items():
            for name in names:
                if name == "XNysTrace" and spectrum in ("signed", "nonsymmetric"):
                    continue
                signs = name in ("Hutchinson", "Hutch++")
                operator, trace = operator_and_trace(values, signs=signs)
                for k in BUDGETS:
                    row = measure(ESTIMATORS[name], operator, trace, k, num_keys, seed)
                    yield {"n": n, "matrix": spectrum, "estimator": name, "k": k, **row}


def markdown(rows: list[dict], num_keys: int) -> str:
    """A Markdown table: one row per matrix and budget, one column per estimator."""
    names = list(dict.fromkeys(row["estimator"] for row in rows))
    lines = []
    for n in dict.fromkeys(row["n"] for row in rows):
        lines += [
            f"n = {n}, {num_keys} keys; coverage of the 95 % interval (%), "
            "width (ratio), error bar (ratio):",
            "",
            "| matrix | products k | " + " | ".join(names) + " |",
            "|" + "---|" * (2 + len(names)),
        ]
        cell_texts = {
            (row["matrix"], row["k"], row["estimator"]): (
                f"{row['coverage']:.1f}, {row['width']:.2f}, {row['error bar']:.2f}"
            )
            for row in rows
            if row["n"] == n
        }
        for matrix, k in dict.fromkeys((m, k) for m, k, _ in cell_texts):
            row_texts = [cell_texts.get((matrix, k, name), "") for name in names]
            lines.append(f"| {matrix} | {k} | " + " | ".join(row_texts) + " |")
        lines.append("")
    return "\n".join(lines)


def figure(rows: list[dict], path: str) -> None:
    names = list(dict.fromkeys(row["estimator"] for row in rows))
    _, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axis, quantity in zip(axes, ("coverage", "width", "error bar"), strict=True):
        for j, name in enumerate(names):
            own_rows = [row for row in rows if row["estimator"] == name]
            shift = (j - (len(names) - 1) / 2) * 0.18
            x = [BUDGETS.index(row["k"]) + shift for row in own_rows]
            y = [row[quantity] for row in own_rows]
            axis.plot(x, y, "o", alpha=0.5, markersize=4, label=name)
        axis.set_xticks(range(len(BUDGETS)), [str(k) for k in BUDGETS])
        axis.set_xlabel("products")
        axis.axhline(95 if quantity == "coverage" else 1, color="black", linewidth=0.8)
    axes[0].axhspan(93, 99, color="black", alpha=0.08)
    axes[0].set_title("coverage of the 95 % interval (%)")
    axes[1].set_title("half-width / 95 % quantile of the error")
    axes[2].set_title("mean standard error / RMS error")
    axes[0].legend(fontsize=8)
    plt.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--keys", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS))
    parser.add_argument("--markdown", help="write the table to this file")
    parser.add_argument("--figure", help="draw the figure into this file")
    arguments = parser.parse_args()
    rows = []
    print(
        f"jax {jax.__version__}, traceax {tx.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    print("   n matrix       estimator   k  rms error  coverage  width  error bar")
    for row in cells(arguments.n, arguments.estimators, arguments.keys, arguments.seed):
        rows.append(row)
        print(
            f"{row['n']:4} {row['matrix']:12} {row['estimator']:10} {row['k']:3}"
            f"  {row['rms']:9.1e}  {row['coverage']:8.1f}  {row['width']:5.2f}"
            f"  {row['error bar']:9.2f}",
            flush=True,
        )
    if arguments.markdown:
        with open(arguments.markdown, "w") as file:
            file.write(markdown(rows, arguments.keys))
    if arguments.figure:
        figure(rows, arguments.figure)


if __name__ == "__main__":
    main()
