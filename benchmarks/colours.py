"""Errors with coloured probes and with plain ones, by the number of products.

    JAX_ENABLE_X64=1 python benchmarks/colours.py --figure docs/colours.svg

The script prints root mean square errors over keys for three jobs: log-determinants on
lattices, the divergence of a block-hollow flow, and the trace of a sparse inverse. It also
times colouring.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np

import traceax as tx

KEYS = 10


def lattice(shape, periodic, mass):
    """A lattice Laplacian plus a mass, periodic or with open ends, and its eigenvalues."""

    def product(x):
        out = (mass + 2 * len(shape)) * x
        for axis, size in enumerate(shape):
            pad = [(int(i == axis),) * 2 for i in range(len(shape))]
            wide = jnp.pad(x, pad, "wrap" if periodic else "constant")
            for start in (0, 2):
                out = out - jax.lax.slice_in_dim(wide, start, start + size, axis=axis)
        return out

    eigenvalues = np.asarray(mass)
    for size in shape:
        angles = np.arange(1, size + 1) / (size + 1)
        angles = 2 * np.arange(size) / size if periodic else angles
        eigenvalues = np.add.outer(eigenvalues, 2 - 2 * np.cos(np.pi * angles))
    structure = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
    tag = lx.positive_semidefinite_tag
    return lx.FunctionLinearOperator(product, structure, tag), eigenvalues


def edges(shape, periodic=False):
    nodes = np.arange(np.prod(shape)).reshape(shape)
    pairs = []
    for axis, size in enumerate(shape):
        starts = np.arange(size if periodic else size - 1)
        ends = np.roll(nodes, -1, axis)
        pairs.append((nodes.take(starts, axis), ends.take(starts, axis)))
    return np.concatenate([np.stack([x.ravel(), y.ravel()], 1) for x, y in pairs])


def error(estimate, truth, keys=KEYS):
    """Root mean square error over keys. `estimate` maps a key to an estimate."""
    value = eqx.filter_jit(lambda key: estimate(key).value)
    values = [float(value(key)) for key in jax.random.split(jax.random.key(1), keys)]
    return float(np.sqrt(np.mean((np.asarray(values) - truth) ** 2)))


def log_determinant_error(A, truth, colours, steps):
    p = colours.number
    estimator = tx.LanczosQuadratureEstimator(p, tx.ColouredSampler(colours))
    return error(
        lambda key: tx.logdet(key, A, p * steps, estimator, throw=False), truth
    )


def plain_log_determinant_error(A, truth, k):
    return error(lambda key: tx.logdet(key, A, k, throw=False), truth, 4)


def log_determinants():
    print("log det: lattice, mass | colours x steps | products | error | plain error")
    for shape, periodic, mass, distance, steps in [
        ((128, 128), True, 1.0, 3, 12),
        ((128, 128), True, 1.0, 7, 12),
        ((128, 128), True, 0.1, 3, 25),
        ((128, 128), True, 0.01, 3, 25),
        ((100, 70), False, 1.0, 3, 12),
        ((24, 24, 24), True, 0.5, 3, 12),
    ]:
        A, eigenvalues = lattice(shape, periodic, mass)
        truth = np.log(eigenvalues).sum()
        colours = tx.lattice_colours(shape, distance, periodic)
        coloured = log_determinant_error(A, truth, colours, steps)
        # We stop at 400 products: more of them gain too little for their time.
        plain_budget = min(colours.number * steps, 400)
        plain = plain_log_determinant_error(A, truth, plain_budget)
        size = " x ".join(map(str, shape)) + ("" if periodic else ", open")
        print(
            f"{size}, {mass} | {colours.number} x {steps} | {colours.number * steps} | "
            f"{coloured:.2g} | {plain:.2g} with {plain_budget}",
            flush=True,
        )


def log_determinants_by_products():
    shape = (64, 64)
    A, eigenvalues = lattice(shape, True, 1.0)
    truth = np.log(eigenvalues).sum()
    coloured = {}
    for distance in (1, 3, 5, 7):
        colours = tx.lattice_colours(shape, distance)
        coloured[12 * colours.number] = log_determinant_error(A, truth, colours, 12)
    plain = {
        k: plain_log_determinant_error(A, truth, k) for k in (48, 100, 200, 400, 800)
    }
    return coloured, plain


def divergences_by_products():
    """Divergence errors for a flow of 55 points in space.

    A point's velocity depends on the point, and on a context from the other points.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(55, 3)))

    def compute_context(x):
        return jnp.cos(jnp.sum(jnp.tanh(x), axis=0)[None] - jnp.tanh(x))

    def field(z, context):
        mixing = jnp.asarray([[0.5, -1.0, 0.2], [0.3, 0.7, 1.0], [-0.4, 0.1, 0.9]])
        return jnp.sin(z @ mixing + context) * (1 + z**2)

    def full_field(flat):
        z = flat.reshape(55, 3)
        return field(z, compute_context(z)).reshape(-1)

    truth = jnp.trace(jax.jacfwd(full_field)(x.reshape(-1)))
    colours = tx.ColouredSampler(np.arange(165) % 3, exact=True)
    context = compute_context(x)

    def coloured(key):
        return tx.divergence(key, lambda z: field(z, context), x, colours=colours)[1]

    def plain(k):
        return lambda key: tx.divergence(key, full_field, x.reshape(-1), k)[1]

    budgets = (1, 3, 10, 30, 100)
    return (
        {3: error(coloured, truth)},
        {k: error(plain(k), truth, 100) for k in budgets},
    )


def inverses_by_solves():
    shape = (64, 64)
    A, eigenvalues = lattice(shape, False, 1.0)
    truth = (1 / eigenvalues).sum()
    inverse = tx.InverseLinearOperator(A, lx.CG(rtol=1e-8, atol=1e-8))

    def trace_error(k, estimator=None):
        return error(lambda key: tx.trace(key, inverse, k, estimator), truth)

    coloured, plain = {}, {}
    x, y = np.indices(shape).reshape(2, -1)
    for reach in (1, 2, 3):
        # These are perfect codes: nodes within a distance of 2 * reach differ in colour.
        k = 2 * reach**2 + 2 * reach + 1
        sampler = tx.ColouredSampler((reach * x + (reach + 1) * y) % k)
        coloured[k] = trace_error(k, tx.HutchinsonEstimator(sampler))
        plain[k] = trace_error(k)
    return coloured, plain


def times():
    cube = (100, 100, 100)
    permutation = np.random.default_rng(0).permutation(10**6)
    print("colouring: grid | distance | colours | seconds")
    for name, pairs in [
        ("open, 1e6", edges(cube, False)),
        ("torus, 1e6", edges(cube, True)),
        ("torus, 30 x 31 x 32", edges((30, 31, 32), True)),
        ("open, 1e6, numbered at random", permutation[edges(cube, False)]),
    ]:
        for distance in (1, 2, 3):
            start = time.perf_counter()
            number = tx.colour(pairs, distance).number
            seconds = time.perf_counter() - start
            print(f"{name} | {distance} | {number} | {seconds:.1f}", flush=True)


CURVES = {
    "log det of a lattice, 64 x 64": log_determinants_by_products,
    "divergence of a block-hollow flow": divergences_by_products,
    "trace of a sparse inverse": inverses_by_solves,
}


def draw(curves, path):
    """Draw errors against products, one panel per job."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "traceax"})
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for axis, (title, (coloured, plain)) in zip(axes, curves.items(), strict=True):
        for error_by_products, style, colour in [
            (plain, "s-", "#7f7f7f"),
            (coloured, "o-", "#0072b2"),
        ]:
            errors = np.maximum(list(error_by_products.values()), 1e-13)  # 0 has no log
            axis.loglog(list(error_by_products), errors, style, color=colour)
        axis.set_xticks(list(plain), [str(k) for k in plain])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_title(title, fontsize="medium")
        axis.grid(alpha=0.3)
        axis.set_xlabel("solves" if "inverse" in title else "products")
    axes[0].set_ylabel("root mean square error")
    axes[0].legend(["plain", "coloured"])
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", help="draw the curves into this file")
    path = parser.parse_args().figure
    log_determinants()
    curves = {}
    for title, run in CURVES.items():
        curves[title] = run()
        for name, error_by_products in zip(
            ("coloured", "plain"), curves[title], strict=True
        ):
            row = " | ".join(f"{k}: {x:.2g}" for k, x in error_by_products.items())
            print(f"{title} | {name} | {row}", flush=True)
    times()
    if path:
        draw(curves, path)


if __name__ == "__main__":
    main()
