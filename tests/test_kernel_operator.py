"""Kernel matrices in tiles against dense ones."""

import os
import pathlib
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.experimental.sparse as jsparse
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from helpers import OPERATORS, PSD, assert_close, float_dtype, is_x64, parameters
from kernels import Matern, RationalQuadratic

import traceax as tx
from traceax._operators.block import apply_block, has_one_pass
from traceax._operators.entries import columns_of, diagonal_of, has_known_entries

HERE = pathlib.Path(__file__).parent
N = 23
rng = np.random.default_rng(0)
FIRST = rng.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_for_each_test():
    rng.bit_generator.state = FIRST


def inputs(n=N, d=3):
    return jnp.asarray(rng.normal(size=(n, d)), float_dtype())


def lengths(d=3):
    return jnp.linspace(0.8, 1.3, d, dtype=float_dtype())


def dense(kernel, x):
    n = jax.tree.leaves(x)[0].shape[0]
    rows = [jax.tree.map(lambda a, i=i: a[i], x) for i in range(n)]
    return jnp.stack([jnp.stack([kernel(a, b) for b in rows]) for a in rows])


# One tile, equal tiles, and tiles of which the last one is padded.
each_tile = pytest.mark.parametrize("tile", [None, 1, 5, 23, 40])


@each_tile
def test_products_columns_and_diagonals(tile):
    x, block = inputs(), jnp.asarray(rng.normal(size=(N, 4)), float_dtype())
    operator = tx.KernelLinearOperator(Matern(lengths()), x, tile=tile)
    K = dense(Matern(lengths()), x)
    indices = jnp.asarray([3, 3, 22, 0, 7, 11])

    @jax.jit
    def run(operator):
        return (
            operator.mv(block[:, 0]),
            apply_block(operator, block),
            jax.vmap(jax.vmap(operator.mv))(block.T.reshape(2, 2, N)),
            operator.columns(indices),
            operator.columns(indices[:0]),
            operator.diagonal(),
            operator.as_matrix(),
        )

    one, many, nested, columns, none, diagonal, matrix = run(operator)
    assert_close(one, K @ block[:, 0])
    assert_close(many, K @ block)
    assert_close(nested.reshape(4, N).T, K @ block)
    assert_close(columns, K[:, indices])
    assert none.shape == (N, 0)
    assert_close(diagonal, jnp.diagonal(K))
    assert_close(lx.diagonal(operator), jnp.diagonal(K))
    assert_close(matrix, K)


@pytest.mark.x64
@pytest.mark.parametrize("tile", [None, 5])
def test_derivatives(tile):
    x, V, W = inputs(), *(jnp.asarray(rng.normal(size=(2, N, 4))))

    def value(make):
        def of(length, x):
            return jnp.sum(W * make(length, x)) + jnp.sum(jnp.sin(make(length, x)))

        return of

    def tiled(length, x):
        return apply_block(tx.KernelLinearOperator(Matern(length), x, tile=tile), V)

    def naive(length, x):
        kernel = jax.vmap(jax.vmap(Matern(length), (None, 0)), (0, None))
        return kernel(x, x) @ V

    def derivatives(make, length, x):
        f = value(make)
        return (
            jax.grad(f, (0, 1))(length, x),
            jax.jvp(f, (length, x), (length**2, jnp.cos(x)))[1],
            jax.hessian(f)(length, x),
            jax.jacrev(jax.jacrev(lambda s: f(s * length, s * x)))(1.0),
        )

    found = jax.jit(derivatives, static_argnums=0)(tiled, lengths(), x)
    # Not under `jit`: XLA on CPUs (jaxlib 0.10.2, its fusion emitters) gets the gradient
    # of the dense matrix wrong by a tenth.
    expected = derivatives(naive, lengths(), x)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(a, b, 1e-9, 1e-9)

    def along(t):
        return value(tiled)(lengths() * (1 + t), x * (1 - t))

    h = 1e-5
    slope = (along(h) - along(-h)) / (2 * h)
    assert_close(jax.jit(jax.grad(along))(0.0), slope, 1e-7)


def test_pytrees_functions_and_closures():
    dtype = float_dtype()
    x = {"site": inputs(N, 2), "kind": jnp.asarray(rng.integers(0, 3, N))}
    V = jnp.asarray(rng.normal(size=(N, 3)), dtype)

    def kernel_of(scale):
        def kernel(a, b):
            near = jnp.exp(-jnp.sum((a["site"] - b["site"]) ** 2) * scale)
            return jnp.where(a["kind"] == b["kind"], near, near / 2)

        return kernel

    def value(scale, tile):
        # What the kernel closes over is traced.
        operator = tx.KernelLinearOperator(kernel_of(scale), x, tile=tile)
        assert operator.in_structure().shape == (N,)
        return jnp.sum(apply_block(operator, V) ** 2)

    def naive(scale):
        both = jax.vmap(jax.vmap(kernel_of(scale), (None, 0)), (0, None))
        return jnp.sum((both(x, x) @ V) ** 2)

    scale = jnp.asarray(0.7, dtype)
    expected = jax.jit(jax.value_and_grad(naive))(scale)
    found = jax.jit(jax.value_and_grad(lambda s: value(s, 6)))(scale)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_lanes_and_doors():
    dtype, x = float_dtype(), inputs()

    def value(length, x):
        operator = tx.KernelLinearOperator(Matern(length), x, tile=7)
        return tx.trace(jax.random.key(0), operator, N, tx.XTraceEstimator()).value

    scales = jnp.asarray([0.5, 1.0, 2.0], dtype)[:, None] * lengths()[None, :]
    lanes = jax.jit(jax.vmap(jax.value_and_grad(value), (0, None)))(scales, x)
    assert_close(lanes[0], jnp.full(3, N, dtype))
    assert_close(lanes[1], jnp.zeros((3, 3)), atol=1e-4)

    def logdet(length, k):
        operator = tx.KernelLinearOperator(Matern(length), x, tile=7)
        return tx.logdet(jax.random.key(0), operator, k, shift=0.1).value

    def naive(length):
        K = jax.vmap(jax.vmap(Matern(length), (None, 0)), (0, None))(x, x)
        factor = jnp.linalg.cholesky(K + 0.1 * jnp.eye(N, dtype=dtype))
        return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))

    found = jax.jit(jax.value_and_grad(logdet), static_argnums=1)(lengths(), N)
    expected = jax.value_and_grad(naive)(lengths())
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1], 1e-8 if is_x64() else 1e-3)
    # What was given stays, with its own gradient.
    operator = tx.KernelLinearOperator(Matern(lengths()), x)
    gradient = eqx.filter_grad(lambda op: jnp.sum(op.mv(x[:, 0])))(operator)
    assert gradient.kernel.length.shape == (3,)
    assert gradient.x.shape == x.shape


def test_what_lineax_knows():
    operator = tx.KernelLinearOperator(Matern(lengths()), inputs())
    assert lx.is_symmetric(operator)
    assert lx.is_positive_semidefinite(operator)
    assert not lx.is_diagonal(operator)
    assert not lx.is_negative_semidefinite(operator)
    assert operator.transpose() is operator
    assert operator.T is operator
    assert lx.conj(operator) is operator
    assert lx.linearise(operator) is operator
    assert_close(lx.materialise(operator).as_matrix(), operator.as_matrix())
    assert has_one_pass(2.0 * operator + operator)
    assert not has_one_pass(lx.MatrixLinearOperator(jnp.eye(3)))


def test_a_block_is_one_matrix_product_a_tile():
    operator = tx.KernelLinearOperator(Matern(lengths()), inputs(300), tile=30)

    def program(operator, k):
        block = jnp.ones((300, k), float_dtype())
        # Of so many vectors other operators take a few at a time.
        many = jnp.tile(block, (1, 5000))
        product = jax.jit(lambda op, V: apply_block(2.0 * op, V))
        return product.lower(operator, many).compile().as_text()

    text = program(operator, 1)
    assert len(re.findall(r" dot\(", text)) == 1
    (shape,) = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", text)
    assert sorted(shape.split(",")) == ["30", "5000"]


@pytest.mark.x64
def test_digits_in_single_precision():
    # Far from the origin, and close to each other.
    x = jnp.asarray(1e3 + rng.uniform(0, 1, (40, 2)), jnp.float32)
    kernel = Matern(jnp.asarray([0.5, 0.5], jnp.float32))
    operator = tx.KernelLinearOperator(kernel, x)
    exact = Matern(jnp.asarray([0.5, 0.5]))
    K = tx.KernelLinearOperator(exact, x.astype(jnp.float64)).as_matrix()
    # `a / length - b / length` loses what is common to all rows, and no more.
    assert jnp.max(jnp.abs(operator.as_matrix().astype(K.dtype) - K)) < 3e-3

    def direct(a, b):
        return jnp.exp(-jnp.sum((a - b) ** 2))

    found = tx.KernelLinearOperator(direct, x).as_matrix()
    K = tx.KernelLinearOperator(direct, x.astype(jnp.float64)).as_matrix()
    assert jnp.max(jnp.abs(found.astype(K.dtype) - K)) < 1e-6
    assert operator.in_structure().dtype == jnp.float32


def test_half_precision_is_summed_in_single():
    x = inputs(200, 2).astype(jnp.bfloat16)
    operator = tx.KernelLinearOperator(lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)), x)
    assert operator.in_structure().dtype == jnp.bfloat16
    ones = jnp.ones(200, jnp.bfloat16)
    expected = jnp.sum(operator.as_matrix().astype(jnp.float32), axis=1)
    assert_close(operator.mv(ones).astype(jnp.float32), expected, 1e-2)


def test_memory_is_that_of_a_tile():
    n, k = 6000, 36
    x = jax.ShapeDtypeStruct((n, 2), jnp.float32)
    V = jax.ShapeDtypeStruct((n, k), jnp.float32)
    length = jax.ShapeDtypeStruct((2,), jnp.float32)

    def value(length, x, V):
        return jnp.sum(V * apply_block(tx.KernelLinearOperator(Matern(length), x), V))

    program = jax.jit(jax.value_and_grad(value, (0, 1))).lower(length, x, V).compile()
    # 144 MB for the matrix.
    assert program.memory_analysis().temp_size_in_bytes < 80e6


BAD = {
    "kernel": (TypeError, "kernel must be a function of two rows, got 3"),
    "scalar": (TypeError, r"shape \(\), got an array of shape \(3,\)"),
    "integer": (TypeError, "real floating-point array of shape"),
    "complex": (TypeError, "real floating-point array of shape"),
    "leading": (ValueError, r"one length, at least 1, got lengths \[4, 5\]"),
    "no rows": (ValueError, r"at least 1, got lengths \[0\]"),
    "no leaves": (ValueError, r"at least 1, got lengths \[\]"),
    "a leaf": (ValueError, "leading axis of rows, got 1.0 of type float"),
    "tile": (ValueError, "tile must be at least 1, got 0"),
    "type of tile": (TypeError, "tile must be an int or None, got 2.0"),
}


@pytest.mark.wrong_types
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    x = inputs(4)

    def product(a, b):
        return jnp.sum(a * b)

    arguments = {
        "kernel": (3, x),
        "scalar": (lambda a, b: a * b, x),
        "integer": (lambda a, b: jnp.sum(a * b).astype(int), x),
        "complex": (lambda a, b: jax.lax.complex(product(a, b), product(a, b)), x),
        "leading": (product, [x, inputs(5)]),
        "no rows": (product, x[:0]),
        "no leaves": (product, ()),
        "a leaf": (product, [x, 1.0]),
    }.get(case, (product, x))
    tile = {"tile": 0, "type of tile": 2.0}.get(case)
    error, message = BAD[case]
    with pytest.raises(error, match=message):
        tx.KernelLinearOperator(*arguments, tile=tile)  # pyright: ignore


def test_what_is_not_finite_is_said():
    x = inputs().at[3, 1].set(jnp.nan)
    operator = tx.KernelLinearOperator(Matern(lengths()), x)
    estimate = tx.logdet(jax.random.key(0), operator, 9, shift=0.1, throw=False)
    assert estimate.result == tx.RESULTS.nonfinite


#
# Columns and diagonals of any operator
#


def test_entries_that_are_read():
    operators = {name: make(parameters()) for name, make in OPERATORS.items()}
    known = {name for name, x in operators.items() if has_known_entries(x)}
    assert known == {"matrix", "pytree"}
    n, values = 10, jnp.arange(30, dtype=float_dtype())
    # Entries at one place add up, and those outside count as 0.
    places = jnp.asarray(np.random.default_rng(0).integers(0, n + 1, (30, 2)))
    sparse = jsparse.BCOO((values, places), shape=(n, n))
    operators = [
        *(operators[name] for name in known),
        tx.as_operator(sparse),
        lx.TridiagonalLinearOperator(values[:n], values[1:n], values[n + 1 : 2 * n]),
        lx.DiagonalLinearOperator((values[:4], values[4:n].reshape(2, 3))),
    ]
    indices = jnp.asarray([7, 0, 7, 2])

    @eqx.filter_jit
    def run(operators):
        assert all(map(has_known_entries, operators))
        return [(columns_of(x, indices), diagonal_of(x)) for x in operators]

    for operator, (columns, diagonal) in zip(operators, run(operators), strict=True):
        matrix = operator.as_matrix()
        assert_close(columns, matrix[:, indices], atol=1e-12 if is_x64() else 1e-5)
        assert_close(diagonal, jnp.diagonal(matrix))


def _exponential(a, b):
    return jnp.exp(-jnp.sum(jnp.abs(a - b)))


def test_pivots_of_functions_that_close_over_nothing():
    x = inputs()
    operator = tx.KernelLinearOperator(_exponential, x)
    pivots = tx.choose_pivots(jax.random.key(0), 2.0 * operator, 9, shift=0.1)
    assert len(set(np.asarray(pivots))) == 9
    assert_close(operator.as_matrix(), dense(_exponential, x))


def test_sums_and_multiples_keep_columns():
    x = inputs()
    first = tx.KernelLinearOperator(Matern(lengths()), x, tile=6)
    second = tx.KernelLinearOperator(RationalQuadratic(), x)
    d = jnp.linspace(1.0, 2.0, N, dtype=float_dtype())
    structure = first.in_structure()
    operator = lx.TaggedLinearOperator(
        2.0 * first
        + (-second) / 3.0
        + lx.DiagonalLinearOperator(d)
        + lx.IdentityLinearOperator(structure)
        + lx.MatrixLinearOperator(d[:, None] * d[None, :]),
        PSD,
    )
    assert has_known_entries(operator)
    K, other = dense(Matern(lengths()), x), dense(RationalQuadratic(), x)
    matrix = 2 * K - other / 3 + jnp.diag(d + 1) + d[:, None] * d[None, :]
    indices = jnp.asarray([5, 22, 0])
    columns = eqx.filter_jit(columns_of)(operator, indices)
    assert_close(columns, matrix[:, indices], atol=1e-12 if is_x64() else 1e-5)
    assert_close(eqx.filter_jit(diagonal_of)(operator), jnp.diagonal(matrix))
    function = lx.FunctionLinearOperator(lambda v: v, structure)
    assert not has_known_entries(first + function)


def test_four_devices_agree_with_one():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "sharded_kernel.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["rows", "columns", "lanes"]
