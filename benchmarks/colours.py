"""Coloured probes against plain ones: errors by the number of products.

    JAX_ENABLE_X64=1 python benchmarks/colours.py

Root mean square errors over keys: of log-determinants of lattices, of the divergence of a
block-hollow flow, and of the trace of a sparse inverse. And the time that colouring takes.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
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


def error(estimate, truth, keys=KEYS):
    """The root mean square error of a function of a key."""
    value = eqx.filter_jit(lambda key: estimate(key).value)
    values = [float(value(key)) for key in jax.random.split(jax.random.key(1), keys)]
    return np.sqrt(np.mean((np.asarray(values) - truth) ** 2))


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
        p, k = colours.number, colours.number * steps
        estimator = tx.LanczosQuadratureEstimator(p, tx.ColouredSampler(colours))
        coloured = error(
            lambda key, A=A, k=k, e=estimator: tx.logdet(key, A, k, e, throw=False),
            truth,
        )
        # More than 400 products are no better for the time that they take.
        few = min(k, 400)
        plain = error(
            lambda key, A=A, k=few: tx.logdet(key, A, k, throw=False), truth, 4
        )
        size = " x ".join(map(str, shape)) + ("" if periodic else ", open")
        print(f"{size}, {mass} | {p} x {steps} | {k} | {coloured:.2g}", end=" | ")
        print(f"{plain:.2g} with {few}", flush=True)


def block_hollow():
    """A velocity of 55 points in space: each moves by its own place and what it sees."""
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

    print("block-hollow divergence: products | error")
    print(f"coloured 3 | {error(coloured, truth):.1g}")
    for k in (1, 3, 30, 100):
        plain = error(
            lambda key, k=k: tx.divergence(key, whole, x.reshape(-1), k)[1], truth, 100
        )
        print(f"plain {k} | {plain:.2g}", flush=True)


def sparse_inverse():
    shape = (64, 64)
    A, eigenvalues = lattice(shape, False, 1.0)
    truth = (1 / eigenvalues).sum()
    inverse = tx.InverseLinearOperator(A, lx.CG(rtol=1e-8, atol=1e-8))
    nodes = np.arange(np.prod(shape)).reshape(shape)
    pairs = [(nodes[:-1], nodes[1:]), (nodes[:, :-1], nodes[:, 1:])]
    pairs = np.concatenate([np.stack([x.ravel(), y.ravel()], 1) for x, y in pairs])
    print("trace of an inverse: distance | solves | error | plain error")
    for distance in (1, 2, 4, 6):
        colours = tx.colour(pairs, distance)
        k = colours.number
        sampler = tx.ColouredSampler(colours, exact=False)
        errors = [
            error(lambda key, k=k, e=e: tx.trace(key, inverse, k, e), truth)
            for e in (tx.HutchinsonEstimator(sampler), None)
        ]
        print(f"{distance} | {k} | {errors[0]:.2g} | {errors[1]:.2g}", flush=True)


def edges(shape, periodic):
    nodes = np.arange(np.prod(shape)).reshape(shape)
    pairs = []
    for axis, size in enumerate(shape):
        starts = np.arange(size if periodic else size - 1)
        ends = np.roll(nodes, -1, axis)
        pairs.append((nodes.take(starts, axis), ends.take(starts, axis)))
    return np.concatenate([np.stack([x.ravel(), y.ravel()], 1) for x, y in pairs])


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


if __name__ == "__main__":
    log_determinants()
    block_hollow()
    sparse_inverse()
    times()
