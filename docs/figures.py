"""Draw the site's figures, in about two minutes on a CPU.

    python docs/figures.py [directory]

The default directory is `docs/figures`. Every figure carries this file's digest, which the
test suite compares.
"""

import functools
import hashlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib
import numpy as np
from matplotlib.figure import Figure

import traceax as tx

jax.config.update("jax_enable_x64", True)

HERE = pathlib.Path(__file__).parent
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "Hutch++": tx.HutchPlusPlusEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.prop_cycle": matplotlib.cycler(
        color=["#7f7f7f", "#e69f00", "#0072b2", "#d55e00"], marker=["s", "^", "o", "D"]
    ),
    "font.size": 10,
    "grid.alpha": 0.3,
    "lines.markersize": 5,
    "svg.hashsalt": "traceax",
}


def digest():
    """This file's hash, which ignores line endings."""
    return hashlib.sha256(pathlib.Path(__file__).read_text().encode()).hexdigest()[:16]


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def each(function, number, given, estimator, k):
    """Call a function with `number` keys."""

    def one(key):
        return function(key, given, estimator, k)

    return jax.lax.map(one, jax.random.split(jax.random.key(1), number))


def relative_error(estimates, truth):
    return float(jnp.sqrt(jnp.mean((estimates - truth) ** 2)) / abs(truth))


def label_panel(ax, title, budgets):
    """Set a panel's title and its product axis."""
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel("products")
    ax.set_xticks(budgets, [str(k) for k in budgets])
    ax.minorticks_off()


def with_spectrum(eigenvalues):
    """A matrix with given eigenvalues and random eigenvectors."""
    n = len(eigenvalues)
    Q, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (n, n)))
    return lx.MatrixLinearOperator(
        Q @ (eigenvalues[:, None] * Q.T), lx.positive_semidefinite_tag
    )


points = jax.random.uniform(jax.random.key(0), (300, 2))
distances = jnp.sum((points[:, None, :] - points[None, :, :]) ** 2, axis=-1)


def value(key, operator, estimator, k):
    return tx.trace(key, operator, k, estimator, throw=False).value


def gradient(key, length, estimator, k):
    """The derivative of |K|_F^2 with respect to the length scale, for a kernel matrix K."""

    def squared_norm(length):
        K = lx.MatrixLinearOperator(jnp.exp(-distances / (2 * length**2)))
        operator = lx.TaggedLinearOperator(K @ K, lx.positive_semidefinite_tag)
        return value(key, operator, estimator, k)

    return jax.grad(squared_norm)(length)


def errors_by_products():
    """Errors in values and in a gradient, for every estimator."""
    budgets, keys = [10, 20, 40, 80], 40
    index = jnp.arange(1, 301)
    flat, decaying = (
        with_spectrum(eigenvalues)
        for eigenvalues in (jnp.linspace(1.0, 3.0, 300), 1 / index**2)
    )

    exact = jax.grad(lambda length: jnp.sum(jnp.exp(-distances / length**2)))(0.3)
    panels = {
        "Value, eigenvalues from 1 to 3": (value, flat, jnp.trace(flat.matrix)),
        r"Value, eigenvalues $i^{-2}$": (value, decaying, jnp.trace(decaying.matrix)),
        r"Gradient of $\mathrm{tr}\,K^2$, $K$ a kernel": (gradient, 0.3, exact),
    }
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, (title, (function, given, truth)) in zip(axes, panels.items(), strict=True):
        for name, estimator in ESTIMATORS.items():
            errors = [
                relative_error(each(function, keys, given, estimator, k), truth)
                for k in budgets
            ]
            ax.loglog(budgets, errors, label=name)
        label_panel(ax, title, budgets)
    axes[0].set_ylabel("relative error")
    axes[0].set_ylim(1e-3, 1e-1)
    axes[2].legend(frameon=False, fontsize="small", loc="lower left")
    return figure


def intervals():
    """95 % intervals from many runs, and the truth."""
    runs, index = 100, jnp.arange(1, 301)
    operator = with_spectrum(1 / index**2)
    truth = jnp.trace(operator.matrix)

    def one(key, operator, estimator, k):
        estimate = tx.trace(key, operator, k, estimator, throw=False)
        return estimate.value, *estimate.confidence_interval()

    results = each(one, runs, operator, tx.XTraceEstimator(), 20)
    middle, low, high = (np.asarray(x / truth) for x in results)
    covered = (low <= 1) & (high >= 1)
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    ax = figure.subplots()
    for which, colour in ((covered, "#0072b2"), (~covered, "#d55e00")):
        position = np.arange(runs)[which]
        ax.vlines(position, low[which], high[which], color=colour, linewidth=1.5)
        ax.plot(position, middle[which], "o", color=colour, markersize=3)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_title(
        f"{covered.sum()} of {runs} 95 % intervals contain the truth "
        r"(XTrace, 20 products, eigenvalues $i^{-2}$)",
        fontsize="medium",
    )
    ax.set_xlabel("run")
    ax.set_ylabel("estimate / truth")
    ax.set_xlim(-1, runs)
    return figure


def log_determinants():
    """Errors in a Gaussian process's log-determinant and its gradient."""
    budgets, keys, noise = [40, 80, 160], 12, 0.1

    def estimated(length, key, estimator, k):
        kernel = jnp.exp(-distances / (2 * length**2))
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        return tx.logdet(key, operator, k, estimator, shift=noise, throw=False).value

    def exact(length):
        kernel = jnp.exp(-distances / (2 * length**2))
        return jnp.linalg.slogdet(kernel + noise * jnp.eye(len(kernel)))[1]

    def value_and_gradient(key, length, estimator, k):
        return jax.value_and_grad(estimated)(length, key, estimator, k)

    truths = jax.value_and_grad(exact)(0.2)
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, estimator, style in (
        ("Lanczos quadrature", tx.LanczosQuadratureEstimator(), "C0s-"),
        ("Krylov-aware, the default", tx.KrylovAwareEstimator(), "C2o-"),
    ):
        results = [each(value_and_gradient, keys, 0.2, estimator, k) for k in budgets]
        for i, ax in enumerate(axes):
            errors = [relative_error(pair[i], truths[i]) for pair in results]
            ax.loglog(budgets, errors, style, label=name)
    titles = (r"Value of $\log\det(K + 0.1 I)$", "Derivative in the length scale")
    for ax, title in zip(axes, titles, strict=True):
        label_panel(ax, title, budgets)
    axes[0].set_ylabel("relative error")
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def known_traces():
    """Errors in sums over eigenvalues, for a matrix and for the same matrix as a function."""
    budgets, keys, n = [30, 60, 120], 24, len(distances)
    kernel = jnp.exp(-distances / (2 * 0.2**2)) + 0.1 * jnp.eye(n)
    spectrum = 1 + 40 / jnp.arange(1, n + 1)
    panels = (
        (r"$\log\det(K + 0.1 I)$", kernel, jnp.log),
        (
            r"$\mathrm{tr}\,\sqrt{A}$, eigenvalues $1 + 40 / i$",
            with_spectrum(spectrum).matrix,
            jnp.sqrt,
        ),
    )
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for ax, (title, matrix, fn) in zip(axes, panels, strict=True):
        known = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        truth = jnp.sum(fn(jnp.linalg.eigvalsh(matrix)))

        def known_total(key, operator, _, k, fn=fn):
            bound = {"lower": 0.1, "monotone": True}
            return tx.trace_function(key, fn, operator, k, throw=False, **bound).value

        def hidden_total(key, operator, estimator, k, total=known_total):
            hidden = lx.FunctionLinearOperator(
                operator.mv, operator.in_structure(), operator.tags
            )
            return total(key, hidden, estimator, k)

        for name, total, style in (
            ("trace hidden", hidden_total, "C0s-"),
            ("trace known", known_total, "C2o-"),
        ):
            estimates = [each(total, keys, known, None, k) for k in budgets]
            errors = [relative_error(x, truth) for x in estimates]
            ax.loglog(budgets, errors, style, label=name)
        label_panel(ax, title, budgets)
    axes[0].set_ylabel("relative error")
    axes[0].legend(frameon=False, fontsize="small")
    return figure


FIGURES = {
    "errors": errors_by_products,
    "intervals": intervals,
    "log-determinants": log_determinants,
    "known-traces": known_traces,
}


def main():
    directory = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "figures")
    directory.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams.update(STYLE)
    for name, draw in FIGURES.items():
        path = directory / f"{name}.svg"
        metadata = {"Date": None, "Description": f"docs/figures.py {digest()}"}
        draw().savefig(path, facecolor="white", metadata=metadata)
        text = path.read_text()
        path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()))
        print(f"drew {path}")


if __name__ == "__main__":
    main()
