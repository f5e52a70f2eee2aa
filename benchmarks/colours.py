"""Coloured probes against plain ones: errors by the number of products.

    JAX_ENABLE_X64=1 python benchmarks/colours.py --figure docs/colours.svg

Root mean square errors over keys: of log-determinants of lattices, of the divergence of a
block-hollow flow, and of the trace of a sparse inverse. And the time that colouring takes.
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
    """The Laplacian of a lattice and a mass, periodic or of open ends; its eigenvalues."""

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
    """The root mean square error of a function of a key."""
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
        # More than 400 products are no better for the time that they take.
        few = min(colours.number * steps, 400)
        plain = plain_log_determinant_error(A, truth, few)
        size = " x ".join(map(str, shape)) + ("" if periodic else ", open")
        print(
            f"{size}, {mass} | {colours.number} x {steps} | {colours.number * steps} | "
            f"{coloured:.2g} | {plain:.2g} with {few}",
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
    """Of 55 points in space: each moves by its own place and by what it sees."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(55, 3)))

    def seen(x):
        return jnp.cos(jnp.sum(jnp.tanh(x), axis=0)[None] - jnp.tanh(x))

    def field(z, context):
        mixing = jnp.asarray([[0.5, -1.0, 0.2], [0.3, 0.7, 1.0], [-0.4, 0.1, 0.9]])
        return jnp.sin(z @ mixing + context) * (1 + z**2)

    def whole(flat):
        z = flat.reshape(55, 3)
        return field(z, seen(z)).reshape(-1)

    truth = jnp.trace(jax.jacfwd(whole)(x.reshape(-1)))
    colours = tx.ColouredSampler(np.arange(165) % 3, exact=True)
    context = seen(x)

    def coloured(key):
        return tx.divergence(key, lambda z: field(z, context), x, colours=colours)[1]

    def plain(k):
        return lambda key: tx.divergence(key, whole, x.reshape(-1), k)[1]

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

    def of_trace(k, estimator=None):
        return error(lambda key: tx.trace(key, inverse, k, estimator), truth)

    coloured, plain = {}, {}
    x, y = np.indices(shape).reshape(2, -1)
    for reach in (1, 2, 3):
        # Perfect codes: what is within a distance of 2 * reach differs.
        k = 2 * reach**2 + 2 * reach + 1
        sampler = tx.ColouredSampler((reach * x + (reach + 1) * y) % k)
        coloured[k] = of_trace(k, tx.HutchinsonEstimator(sampler))
        plain[k] = of_trace(k)
    return coloured, plain


def times():
    cube = (100, 100, 100)
    numbers = np.random.default_rng(0).permutation(10**6)
    print("colouring: grid | distance | colours | seconds")
    for name, pairs in [
        ("open, 1e6", edges(cube, False)),
        ("torus, 1e6", edges(cube, True)),
        ("torus, 30 x 31 x 32", edges((30, 31, 32), True)),
        ("open, 1e6, numbered at random", numbers[edges(cube, False)]),
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
    """Errors by products, a panel for each job."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "traceax"})
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for axis, (title, (coloured, plain)) in zip(axes, curves.items(), strict=True):
        for found, style, colour in [
            (plain, "s-", "#7f7f7f"),
            (coloured, "o-", "#0072b2"),
        ]:
            errors = np.maximum(list(found.values()), 1e-13)  # what is exact has no log
            axis.loglog(list(found), errors, style, color=colour)
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
    parser.add_argument("--figure", help="file to draw the curves to")
    path = parser.parse_args().figure
    log_determinants()
    curves = {}
    for title, run in CURVES.items():
        curves[title] = run()
        for name, found in zip(("coloured", "plain"), curves[title], strict=True):
            row = " | ".join(f"{k}: {x:.2g}" for k, x in found.items())
            print(f"{title} | {name} | {row}", flush=True)
    times()
    if path:
        draw(curves, path)


if __name__ == "__main__":
    main()
