"""Compare estimates on four simulated devices with one device, for test_sharding.py.

JAX fixes the number of devices when it starts, so this script runs in its own process.
It prints the name of every case that passed.
"""

import contextlib
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import PSD

import traceax as tx

jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_enable_x64", True)

# With this many rows we orthonormalise blocks by products. Smaller blocks are gathered.
N, RANK, K = 8448, 8, 24
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
    """`diag(d) + U U^T`: each product sums RANK numbers over the devices."""

    def mv(vector):
        return diagonal * vector + factor @ (factor.T @ vector)

    return lx.FunctionLinearOperator(mv, jax.eval_shape(lambda: diagonal), PSD)


def estimate(estimator, operator):
    return tx.trace(KEY, operator, K, estimator)


def mesh_context(mesh):
    """The context that explicitly sharded arrays need outside of `jit`."""
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
    expected = differentiate(jnp.asarray(DIAGONAL), jnp.asarray(FACTOR))
    rows = NamedSharding(mesh, P("x"))
    distributed = jax.device_put(DIAGONAL, rows), jax.device_put(FACTOR, rows)
    program = differentiate.lower(*distributed).compile()
    agree(program(*distributed), expected)

    # Devices exchange sums of small matrices only.
    messages = re.findall(
        r"= (\S+) (all-gather|all-to-all|collective-permute|all-reduce)[.(-]",
        program.as_text(),
    )
    assert messages
    for shape, kind in messages:
        assert kind == "all-reduce", (shape, kind)
        sizes = [int(size) for size in re.findall(r"\d+", shape.split("{")[0])[1:]]
        assert all(size <= K for size in sizes), shape


class SpreadSampler(tx.IndexedSampler):
    """The recipe from docs/beyond-one-machine.md, around any sampler."""

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
    expected = tx.trace(KEY, operator, 22, estimator)
    for spec in (P("x", None), P(None, "x")):
        sharded = type(estimator)(SpreadSampler(estimator.sampler, spec))
        # We shard 11 + 11 vectors. The matrix stays on one device.
        with mesh_context(mesh):
            actual = tx.trace(KEY, operator, 22, sharded)
            agree(actual.value, expected.value)
            agree(actual.standard_error, expected.standard_error, 1e-6)
    # The last layout gives every device its own probes. We resume, and set a tolerance.
    tight = {"rtol": 1e-9, "throw": False}
    unmet = tx.trace(KEY, operator, 22, estimator, **tight)
    with mesh_context(mesh):
        first = sharded.estimate(sharded.init(KEY, operator), 7)
        resumed = sharded.estimate(first.state, 15)  # 3 probes, then 8 more
        agree(resumed.value, expected.value)
        actual = tx.trace(KEY, operator, 22, sharded, **tight)
        agree(actual.value, unmet.value)


def batches_on_devices(estimator, mesh):
    matrix = jnp.asarray(MATRIX[:96, :96])
    matrices = matrix * jnp.arange(1.0, 9.0)[:, None, None]

    @jax.vmap
    def gradients(key, matrix):
        def value(matrix):
            operator = lx.MatrixLinearOperator(matrix, PSD)
            return tx.trace(key, operator, K, estimator, throw=False).value

        return jax.value_and_grad(value)(matrix)

    arguments = jax.random.split(KEY, 8), matrices
    expected = gradients(*arguments)
    sharding = NamedSharding(mesh, P("x"))
    distributed = [jax.device_put(x, sharding) for x in arguments]
    with mesh_context(mesh):
        actual = jax.sharding.auto_axes(gradients, out_sharding=P("x"))(*distributed)
        agree(actual, expected)
        mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        agree(jax.jit(mapped)(*distributed), expected)


def a_matrix_by_rows(estimator, mesh):
    def value(matrix):
        return estimate(estimator, lx.MatrixLinearOperator(matrix, PSD)).value

    small = MATRIX[:96, :96]
    expected = jax.value_and_grad(value)(jnp.asarray(small))
    # We also call eagerly, and request an exact answer.
    with mesh_context(mesh):
        rows = jax.device_put(small, NamedSharding(mesh, P("x")))
        agree(jax.value_and_grad(value)(rows), expected)
        exact = tx.trace(KEY, lx.MatrixLinearOperator(rows, PSD), 96)
        agree(exact.value, np.trace(small))


def rows_to_a_tolerance(estimator, mesh):
    def value(matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        result = tx.trace(KEY, operator, K, estimator, rtol=1e-9, throw=False)
        return result.value, result.standard_error

    differentiate = jax.jit(jax.value_and_grad(value, has_aux=True))
    expected = differentiate(jnp.asarray(MATRIX))
    with mesh_context(mesh):
        rows = NamedSharding(mesh, P("x"))
        agree(differentiate(jax.device_put(MATRIX, rows)), expected)


def spectral_functions_by_rows(_, mesh):
    diagonal = jnp.asarray(DIAGONAL[:64])

    def gradient_and_value(diagonal):
        def logdet(diagonal, k=12, **options):
            structure = jax.eval_shape(lambda: diagonal)
            operator = lx.FunctionLinearOperator(lambda v: diagonal * v, structure, PSD)
            return tx.logdet(KEY, operator, k, **options).value

        gradient = jax.grad(logdet)(diagonal)
        return gradient, logdet(diagonal, 16, rtol=0.1, throw=False)

    expected = jax.jit(gradient_and_value)(diagonal)
    with mesh_context(mesh):
        distributed = jax.device_put(diagonal, NamedSharding(mesh, P("x")))
        agree(jax.jit(gradient_and_value)(distributed), expected, 1e-7)


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
    expected = differentiate(layers, inputs)
    # We split the parameters, and then the data.
    for specs in ((P(None, "x"), P("x"), P()), (P(), P(), P("x"))):
        w, v, x = (NamedSharding(mesh, spec) for spec in specs)
        distributed = jax.device_put(layers, {"w": w, "v": v})
        agree(differentiate(distributed, jax.device_put(inputs, x)), expected, 1e-7)


def entry_points_on_each_device(_, mesh):
    n = 20
    a = jnp.asarray(rng.normal(size=(n, n)))
    positive = a @ a.T + jnp.eye(n)

    def chain(entry, key, scale):
        """A quantity of a tridiagonal operator."""
        other = jnp.ones(n - 1)
        bands = scale * jnp.linspace(2.0, 3.0, n), scale * other, other
        return entry(key, lx.TridiagonalLinearOperator(*bands), throw=False).value

    def values(key, scale):
        # We give every device its own points: at a shared point, a derivative would be
        # a sum over devices.
        points = a + 0 * scale
        point, rows = points[0], points[:, :2]
        halves = {"a": point[:12], "b": point[12:]}

        def energy(x):
            return scale * jnp.sum(x["a"] ** 4) + jnp.sum(jnp.sin(x["b"]))

        kernel = lx.MatrixLinearOperator(scale * positive, PSD)
        hessian = tx.HessianLinearOperator(energy, halves)
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
                tx.divergence(key, lambda x: jnp.sin(scale * x), point, 3)[1].value,
                tx.divergence(key, lambda x: jnp.sin(scale * x), point, n)[1].value,
                tx.laplacian(key, lambda x: jnp.sum(x**3) * scale, point, 3)[2].value,
                tx.gaussian_log_likelihood(
                    key, smooth, point, 9, shift=0.1, preconditioner=4, **quiet
                ).value,
                tx.trace_inverse(key, kernel, n, shift=scale, **quiet).value,
                tx.spectral_density(key, kernel, 9, **quiet).points[0],
                chain(tx.logdet, key, scale),
                *jax.value_and_grad(chain, 2)(tx.trace_inverse, key, scale),
            ]
        )

    def all_values(key, scale):
        def logdet(scale):
            kernel = lx.MatrixLinearOperator(scale * positive, PSD)
            return tx.logdet(key, kernel, 9, shift=0.1, throw=False).value

        value, slope = jax.value_and_grad(logdet)(scale)
        return jnp.concatenate([values(key, scale), jnp.stack([value, slope])])

    keys, scales = jax.random.split(KEY, 2), jnp.asarray([1.0, 2.0])
    pair = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda keys, scales: all_values(keys[0], scales[0])[None],
        mesh=pair,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    expected = jnp.stack(
        [jax.jit(all_values)(*x) for x in zip(keys, scales, strict=True)]
    )
    agree(jax.jit(mapped)(keys, scales), expected, 1e-7)


def quadratic_loss(w, X):
    return jnp.mean((X @ w) ** 2 + (X @ w) ** 4 / 4)


WEIGHTS, ROWS = jnp.linspace(-0.5, 1, 6), jnp.asarray(rng.normal(size=(8, 6)))


def data_parallel_hessians(_, mesh):
    def mean_loss(w, X):
        return jax.lax.pmean(quadratic_loss(w, X), "x")

    def values(loss, w, X):
        def trace(scale, k=5, estimator=None):
            hessian = scale * tx.HessianLinearOperator(loss, w, X)
            return tx.trace(KEY, hessian, k, estimator, throw=False).value

        hessian = lx.TaggedLinearOperator(tx.HessianLinearOperator(loss, w, X), PSD)
        options = {"key": KEY, "operator": hessian, "throw": False}
        one = jnp.asarray(1.0)
        return {
            **{
                name: tx.trace(**options, k=5, estimator=x).value
                for name, x in ESTIMATORS.items()
            },
            "adaptive": trace(one, 5, tx.AdaptiveXTraceEstimator()),
            "slope": jax.grad(trace)(one),
            "exact": trace(one, 6),
            "diagonal": tx.diagonal(**options, k=4).value,
            "logdet": tx.logdet(**options, k=4, shift=0.1).value,
            "quadrature": tx.logdet(
                **options, k=4, shift=0.1, estimator=tx.LanczosQuadratureEstimator(2)
            ).value,
            "all": tx.logdet(**options, k=6, shift=0.1).value,
        }

    expected = jax.jit(lambda w, X: values(quadratic_loss, w, X))(WEIGHTS, ROWS)
    specs = P(), P("x")
    # The types declare the results equal on all devices.
    mapped = jax.shard_map(
        lambda *x: values(mean_loss, *x), mesh=mesh, in_specs=specs, out_specs=P()
    )
    agree(jax.jit(mapped)(WEIGHTS, ROWS), expected, 1e-7)

    def exact(w, X):
        hessian = tx.HessianLinearOperator(mean_loss, w, X)
        return tx.trace(KEY, hessian, 6, throw=False).value[None]

    # With `check_vma=False`, every device uses its own part of the data only.
    options = {"mesh": mesh, "in_specs": specs, "out_specs": P("x")}
    local = jax.jit(jax.shard_map(exact, **options, check_vma=False))(WEIGHTS, ROWS)
    parts = jnp.stack(
        [
            jnp.trace(jax.hessian(quadratic_loss)(WEIGHTS, x))
            for x in ROWS.reshape(4, 2, 6)
        ]
    )
    agree(local, parts)
    agree(jnp.mean(parts), expected["exact"])
    assert jnp.max(jnp.abs(local / expected["exact"] - 1)) > 0.3

    def other_keys(w, X):
        hessian = tx.HessianLinearOperator(mean_loss, w, X)
        key = jax.random.fold_in(KEY, jax.lax.axis_index("x"))
        return tx.trace(key, hessian, 5, throw=False).value[None]

    with pytest.raises(ValueError, match="pass the same key on every device"):
        jax.jit(jax.shard_map(other_keys, **options))(WEIGHTS, ROWS)


def functions_of_explicit_layouts(_, mesh):
    def values(w, X):
        def loss(w, X):
            return jnp.mean((jnp.sum(X * w, axis=1)) ** 4)

        def vector_field(x):
            return jnp.sin(x) * x

        hessian = tx.HessianLinearOperator(loss, w, X)
        matrix = tx.GaussNewtonLinearOperator(
            lambda w, X: jnp.sum(X * w, axis=1), lambda y, _: jnp.sum(y**4), w, X
        )
        kernel = tx.KernelLinearOperator(
            lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)), w
        )
        mean = tx.MeanLinearOperator(
            lambda X: tx.HessianLinearOperator(loss, w, X), X.reshape(2, 4, 8)
        )
        root = tx.MatrixFunctionLinearOperator(matrix, jnp.sqrt, 3)
        function = tx.as_operator(lambda v: w * v, w)
        x = w, 3
        return {
            "hessian": tx.trace(KEY, hessian, 5, throw=False).value,
            "exact": tx.trace(KEY, hessian, 8, throw=False).value,
            "diagonal": tx.diagonal(KEY, matrix, 5, throw=False).value,
            "kernel": tx.logdet(KEY, kernel, 5, shift=0.1, throw=False).value,
            "mean": tx.trace(KEY, mean, 5, throw=False).value,
            "root": tx.trace(KEY, root, 5, throw=False).value,
            "function": tx.trace(KEY, function, 5, throw=False).value,
            "divergence": tx.divergence(KEY, vector_field, *x)[1].value,
            "laplacian": tx.laplacian(KEY, lambda x: jnp.sum(x**3), *x)[2].value,
        }

    def loss(w, X):
        results = values(w, X)
        return sum(jnp.sum(x) for x in jax.tree.leaves(results)), results

    w, X = jnp.linspace(0.5, 1, 8), jnp.asarray(rng.normal(size=(8, 8)))
    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = differentiate(w, X)
    with mesh_context(mesh):
        distributed = jax.device_put(w, P("x")), jax.device_put(X, P())
        agree(differentiate(*distributed), expected, 1e-7)
    # We also shard over two axes, outside of `jit`, and close over a sharded array.
    grid = jax.make_mesh((2, 2), ("x", "y"))
    with jax.set_mesh(grid):
        arguments = {
            "w": jax.device_put(X, P(None, "y")),
            "b": jax.device_put(w, P("x")),
        }
        scale = arguments["b"]

        def energy(x):
            return jnp.sum(x["w"] ** 4) + jnp.sum(scale * x["b"] ** 3)

        results = tx.trace(KEY, tx.HessianLinearOperator(energy, arguments), 72).value
        agree(results, 12 * jnp.sum(X**2) + 6 * jnp.sum(w**2))


def cases():
    for estimator in ("hutchinson-chunks", "hutch++", "xnystrace"):
        yield rows_on_devices, "auto", estimator
    yield a_matrix_by_rows, "explicit", "xtrace"
    yield probes_of_any_layout_and_number, "explicit", "xtrace"
    yield spectral_functions_by_rows, "auto", "xtrace"
    yield batches_on_devices, "explicit", "xtrace"
    yield parameters_on_devices, "auto", "xtrace"
    yield entry_points_on_each_device, "auto", "xtrace"
    yield rows_to_a_tolerance, "auto", "xtrace"
    yield data_parallel_hessians, "auto", "xtrace"
    yield functions_of_explicit_layouts, "explicit", "xtrace"


def main(part, parts):
    for i, (case, axes, estimator) in enumerate(cases()):
        if i % parts == part:
            mesh = jax.make_mesh((4,), ("x",), axis_types=(AXES[axes],))
            case(ESTIMATORS[estimator], mesh)
            print(case.__name__, axes, estimator, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
