"""Estimates on four simulated devices against those on one. Run by test_sharding.py.

The number of devices is fixed when JAX starts, so this is a process of its own. It prints
the name of every case that passed.
"""

import contextlib
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import PSD

import traceax as tx

jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_enable_x64", True)

# Enough rows for blocks to be orthonormalised by products: of fewer they are gathered.
N, RANK, K = 2304, 8, 24
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
ESTIMATORS = {
    "hutchinson-chunks": tx.HutchinsonEstimator(chunk_size=7),
    "hutch++": tx.HutchPlusPlusEstimator(),
    "xtrace": tx.XTraceEstimator(),
    "xnystrace": tx.XNysTraceEstimator(),
}
rng = np.random.default_rng(0)
DIAGONAL, FACTOR = rng.uniform(1, 2, N), rng.normal(size=(N, RANK)) / 3
MATRIX = FACTOR[:512] @ FACTOR[:512].T + np.diag(DIAGONAL[:512])
KEY = jax.random.key(0)


def low_rank(diagonal, factor):
    """`diag(d) + U U^T`, whose product needs a sum over devices of RANK numbers."""

    def mv(vector):
        return diagonal * vector + factor @ (factor.T @ vector)

    return lx.FunctionLinearOperator(mv, jax.eval_shape(lambda: diagonal), PSD)


def estimate(estimator, operator):
    return tx.trace(KEY, operator, K, estimator)


def within(mesh):
    """The context that types with an explicit layout ask for outside of `jit`."""
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def agree(x, y, rtol=1e-9):
    scale = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(y))
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=rtol, atol=rtol * scale
        )


def rows_on_devices(estimator, mesh):
    def value(diagonal, factor):
        result = estimate(estimator, low_rank(diagonal, factor))
        return result.value, result.standard_error

    differentiate = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
    alone = differentiate(jnp.asarray(DIAGONAL), jnp.asarray(FACTOR))
    rows = NamedSharding(mesh, P("x"))
    spread = jax.device_put(DIAGONAL, rows), jax.device_put(FACTOR, rows)
    program = differentiate.lower(*spread).compile()
    agree(program(*spread), alone)

    # Nothing but sums of small matrices passes between the devices.
    passed = re.findall(
        r"= (\S+) (all-gather|all-to-all|collective-permute|all-reduce)[.(-]",
        program.as_text(),
    )
    assert passed
    for shape, kind in passed:
        assert kind == "all-reduce", (shape, kind)
        sizes = [int(size) for size in re.findall(r"\d+", shape.split("{")[0])[1:]]
        assert all(size <= K for size in sizes), shape


class SpreadSampler(tx.IndexedSampler):
    """The recipe of docs/beyond-one-machine.md, around any sampler."""

    sampler: tx.IndexedSampler
    spec: P = eqx.field(static=True)

    @property
    def rotation_invariant(self):  # pyright: ignore
        return self.sampler.rotation_invariant

    def probes(self, key, start, n, k, dtype):
        block = self.sampler.probes(key, start, n, k, dtype)
        return jax.lax.with_sharding_constraint(block, self.spec)


def probes_of_any_layout_and_number(estimator, mesh):
    matrix = jnp.asarray(MATRIX[:96, :96])
    operator = lx.MatrixLinearOperator(matrix, PSD)
    alone = tx.trace(KEY, operator, 22, estimator)
    for spec in (P("x", None), P(None, "x")):
        sharded = type(estimator)(SpreadSampler(estimator.sampler, spec))
        # 11 + 11 probes, and the matrix on one device.
        with within(mesh):
            found = tx.trace(KEY, operator, 22, sharded)
            agree(found.value, alone.value)
            agree(found.standard_error, alone.standard_error, 1e-6)
    # Probes of each device, of the last layout.
    tight = {"rtol": 1e-9, "throw": False}
    missed = tx.trace(KEY, operator, 22, estimator, **tight)
    with within(mesh):
        begun = sharded.estimate(sharded.init(KEY, operator), 7)
        on = sharded.estimate(begun.state, 15)  # 3 + 8 probes of XTrace
        agree(on.value, alone.value)
        found = tx.trace(KEY, operator, 22, sharded, **tight)
        agree(found.value, missed.value)


def lanes_on_devices(estimator, mesh):
    matrix = jnp.asarray(MATRIX[:96, :96])
    matrices = matrix * jnp.arange(1.0, 9.0)[:, None, None]

    @jax.vmap
    def gradients(key, matrix):
        def value(matrix):
            operator = lx.MatrixLinearOperator(matrix, PSD)
            return tx.trace(key, operator, K, estimator, throw=False).value

        return jax.value_and_grad(value)(matrix)

    given = jax.random.split(KEY, 8), matrices
    alone = gradients(*given)
    lanes = NamedSharding(mesh, P("x"))
    spread = [jax.device_put(x, lanes) for x in given]
    with within(mesh):
        found = jax.sharding.auto_axes(gradients, out_sharding=P("x"))(*spread)
        agree(found, alone)
        each = jax.shard_map(
            gradients, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        agree(jax.jit(each)(*spread), alone)


def a_matrix_by_rows(estimator, mesh):
    def value(matrix):
        return estimate(estimator, lx.MatrixLinearOperator(matrix, PSD)).value

    small = MATRIX[:96, :96]
    alone = jax.value_and_grad(value)(jnp.asarray(small))
    # Eager calls, too, and exact answers.
    with within(mesh):
        rows = jax.device_put(small, NamedSharding(mesh, P("x")))
        agree(jax.value_and_grad(value)(rows), alone)
        exact = tx.trace(KEY, lx.MatrixLinearOperator(rows, PSD), 96)
        agree(exact.value, np.trace(small))


def rows_to_a_tolerance(estimator, mesh):
    def value(matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        result = tx.trace(KEY, operator, K, estimator, rtol=1e-9, throw=False)
        return result.value, result.standard_error

    differentiate = jax.jit(jax.value_and_grad(value, has_aux=True))
    alone = differentiate(jnp.asarray(MATRIX))
    with within(mesh):
        rows = NamedSharding(mesh, P("x"))
        agree(differentiate(jax.device_put(MATRIX, rows)), alone)


def spectral_functions_by_rows(_, mesh):
    diagonal = jnp.asarray(DIAGONAL[:64])

    def along(diagonal):
        def logdet(diagonal, k=12, **options):
            structure = jax.eval_shape(lambda: diagonal)
            operator = lx.FunctionLinearOperator(lambda v: diagonal * v, structure, PSD)
            return tx.logdet(KEY, operator, k, **options).value

        gradient, change = jax.jvp(jax.grad(logdet), (diagonal,), (diagonal,))
        return gradient, change, logdet(diagonal, 16, rtol=0.1, throw=False)

    alone = jax.jit(along)(diagonal)
    with within(mesh):
        spread = jax.device_put(diagonal, NamedSharding(mesh, P("x")))
        agree(jax.jit(along)(spread), alone, 1e-7)


def parameters_on_devices(estimator, mesh):
    layers = {"w": rng.normal(size=(24, 16)) / 5, "v": rng.normal(size=16)}
    inputs = rng.normal(size=(40, 24))

    def value(layers, inputs):
        def loss(layers):
            hidden = jax.nn.softplus(inputs @ layers["w"])
            return jnp.mean(jnp.logaddexp(0, hidden @ layers["v"]) ** 2)

        operator = lx.JacobianLinearOperator(
            lambda x, _: jax.grad(loss)(x), layers, tags=PSD
        )
        return tx.trace(KEY, operator, K, estimator, throw=False).value

    differentiate = jax.jit(jax.value_and_grad(value))
    alone = differentiate(layers, inputs)
    # Parameters on devices; data.
    for specs in ((P(None, "x"), P("x"), P()), (P(), P(), P("x"))):
        w, v, x = (NamedSharding(mesh, spec) for spec in specs)
        spread = jax.device_put(layers, {"w": w, "v": v})
        agree(differentiate(spread, jax.device_put(inputs, x)), alone, 1e-7)


def doors_of_each_device(_, mesh):
    n = 20
    a = jnp.asarray(rng.normal(size=(n, n)))
    positive = a @ a.T + jnp.eye(n)
    # Points that aren't arguments of what is mapped.
    point, rows = a[0], a[:, :2]
    halves = {"a": a[0, :12], "b": a[0, 12:]}

    def values(key, scale):
        def energy(x):
            return scale * jnp.sum(x["a"] ** 4) + jnp.sum(jnp.sin(x["b"]))

        kernel = lx.MatrixLinearOperator(scale * positive, PSD)
        hessian = tx.HessianLinearOperator(energy, {"a": a[0, :12], "b": a[0, 12:]})
        function = tx.as_operator(lambda v: scale * (a @ v), a[0])
        jacobian = lx.JacobianLinearOperator(
            lambda x, _: jax.tree.map(lambda leaf: jnp.sin(scale * leaf), x), halves
        )
        smooth = tx.KernelLinearOperator(
            lambda p, q: jnp.exp(-scale * jnp.sum((p - q) ** 2)), rows
        )
        mean = tx.MeanLinearOperator(
            lambda b: lx.MatrixLinearOperator(scale * b * a), jnp.arange(1.0, 4.0)
        )
        quiet = {"throw": False}
        return jnp.stack(
            [
                tx.trace(key, function, 9, **quiet).value,
                tx.trace(key, mean, 9, **quiet).value,
                tx.trace(key, hessian, 9, rtol=0.5, **quiet).value,
                jnp.sum(tx.diagonal(key, function, 6, **quiet).value ** 2),
                tx.leaf_traces(key, hessian, 9, probes="blocks", **quiet)[0].value["a"],
                tx.leaf_traces(key, jacobian, 9, probes="blocks", **quiet)[1].value,
                tx.leaf_traces(key, hessian, n, **quiet)[0].value["b"],
                tx.frobenius_norm_squared(key, function, 9, **quiet).value,
                tx.divergence(key, lambda x: jnp.sin(scale * x), a[0], 3)[1].value,
                tx.divergence(key, lambda x: jnp.sin(scale * x), point, n)[1].value,
                tx.laplacian(key, lambda x: jnp.sum(x**3) * scale, a[0], 3)[2].value,
                tx.gaussian_log_likelihood(
                    key, smooth, point, 9, shift=0.1, preconditioner=4, **quiet
                ).value,
                tx.trace_inverse(key, kernel, n, shift=scale, **quiet).value,
                tx.spectral_density(key, kernel, 9, **quiet).points[0],
            ]
        )

    def both(key, scale):
        def logdet(scale):
            kernel = lx.MatrixLinearOperator(scale * positive, PSD)
            return tx.logdet(key, kernel, 9, shift=0.1, throw=False).value

        value, slope = jax.value_and_grad(logdet)(scale)
        return jnp.concatenate([values(key, scale), jnp.stack([value, slope])])

    keys, scales = jax.random.split(KEY, 2), jnp.asarray([1.0, 2.0])
    pair = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda keys, scales: both(keys[0], scales[0])[None],
        mesh=pair,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    alone = jnp.stack([jax.jit(both)(*x) for x in zip(keys, scales, strict=True)])
    agree(jax.jit(mapped)(keys, scales), alone, 1e-7)


def cases():
    # Functions over arrays of explicit layouts are not among them: lineax makes data of
    # what they close over under the explicit mesh, and is called under an automatic one.
    for estimator in ("hutchinson-chunks", "hutch++", "xnystrace"):
        yield rows_on_devices, "auto", estimator
    yield a_matrix_by_rows, "explicit", "xtrace"
    yield probes_of_any_layout_and_number, "explicit", "xtrace"
    yield spectral_functions_by_rows, "auto", "xtrace"
    yield lanes_on_devices, "explicit", "xtrace"
    yield parameters_on_devices, "auto", "xtrace"
    yield doors_of_each_device, "auto", "xtrace"
    yield rows_to_a_tolerance, "auto", "xtrace"


def main(part, parts):
    for i, (case, axes, estimator) in enumerate(cases()):
        if i % parts == part:
            mesh = jax.make_mesh((4,), ("x",), axis_types=(AXES[axes],))
            case(ESTIMATORS[estimator], mesh)
            print(case.__name__, axes, estimator, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
