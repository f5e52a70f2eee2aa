"""Kernel matrices: tiles, rows, programs, digits and columns."""

import os
import pathlib
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from helpers import (
    OPERATORS,
    assert_close,
    parameters,
)
from kernels import Matern
from problems import float_dtype, is_x64

import traceax as tx
from traceax._operators.entries import columns_of, diagonal_of, has_known_entries
from traceax._operators.space import apply_block

HERE = pathlib.Path(__file__).parent
N = 23
rng = np.random.default_rng(0)
FIRST = rng.bit_generator.state


@pytest.fixture(autouse=True)
def reset_random_numbers():
    rng.bit_generator.state = FIRST


def inputs(n=N, d=3):
    return jnp.asarray(rng.normal(size=(n, d)), float_dtype())


def lengths(d=3):
    return jnp.linspace(0.8, 1.3, d, dtype=float_dtype())


def dense(kernel, x):
    n = jax.tree.leaves(x)[0].shape[0]
    rows = [jax.tree.map(lambda a, i=i: a[i], x) for i in range(n)]
    return jnp.stack([jnp.stack([kernel(a, b) for b in rows]) for a in rows])


def test_every_number_of_tiles():
    x, block = inputs(), jnp.asarray(rng.normal(size=(N, 4)), float_dtype())
    indices = jnp.asarray([3, 3, 22, 0, 7, 11])

    @jax.jit
    def run(length, x):
        def products_with(tile):
            A = tx.KernelLinearOperator(Matern(length), x, tile=tile)
            nested = jax.vmap(jax.vmap(A.mv))(block.T.reshape(2, 2, N))
            assert A.columns(indices[:0]).shape == (N, 0)
            return apply_block(A, block), nested.reshape(4, N).T, A.columns(indices)

        # We take the default tile, one row per tile, and two sizes that don't divide
        # the 23 rows.
        return [products_with(tile) for tile in (None, 1, 12, 5)]

    K = dense(Matern(lengths()), x)
    for products, nested, columns in run(lengths(), x):
        assert_close(products, K @ block)
        assert_close(nested, K @ block)
        assert_close(columns, K[:, indices])


@pytest.mark.x64
def test_sums_over_products_have_derivatives():
    x, V, W = inputs(), *(jnp.asarray(rng.normal(size=(2, N, 4))))

    def tiled(length, x):
        A = tx.KernelLinearOperator(Matern(length), x)
        return jnp.sum(W * apply_block(A, V))

    def naive(length, x):
        kernel = jax.vmap(jax.vmap(Matern(length), (None, 0)), (0, None))
        return jnp.sum(W * (kernel(x, x) @ V))

    # We don't jit this: XLA on CPUs (jaxlib 0.10.2, its fusion emitters) gets the dense
    # matrix's gradient wrong by a tenth.
    expected = jax.grad(naive, (0, 1))(lengths(), x)
    actual = jax.jit(jax.grad(tiled, (0, 1)))(lengths(), x)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-9, 1e-9), actual, expected)


def test_rows_that_are_pytrees():
    x = {"site": inputs(N, 2), "kind": jnp.asarray(rng.integers(0, 3, N))}

    def kernel(a, b):
        near = jnp.exp(-jnp.sum((a["site"] - b["site"]) ** 2))
        return jnp.where(a["kind"] == b["kind"], near, near / 2)

    operator = tx.KernelLinearOperator(kernel, x, tile=6)
    assert operator.in_structure().shape == (N,)
    naive = jax.jit(jax.vmap(jax.vmap(kernel, (None, 0)), (0, None)))(x, x)
    assert_close(eqx.filter_jit(lambda A: A.as_matrix())(operator), naive)


def test_vmap_and_entry_points():
    dtype, x = float_dtype(), inputs()

    def logdet(length, x):
        operator = tx.KernelLinearOperator(Matern(length), x, tile=7)
        return tx.logdet(jax.random.key(0), operator, N, shift=0.1).value

    def naive(length, x):
        K = jax.vmap(jax.vmap(Matern(length), (None, 0)), (0, None))(x, x)
        factor = jnp.linalg.cholesky(K + 0.1 * jnp.eye(N, dtype=dtype))
        return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))

    scales = jnp.asarray([0.5, 1.0], dtype)[:, None] * lengths()[None, :]
    actual = jax.jit(jax.vmap(jax.value_and_grad(logdet), (0, None)))(scales, x)
    expected = jax.vmap(jax.value_and_grad(naive), (0, None))(scales, x)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1], 1e-8 if is_x64() else 1e-3)
    # The operator keeps its arguments, and each has its own gradient.
    operator = tx.KernelLinearOperator(Matern(lengths()), x)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda A: jnp.sum(A.mv(x[:, 0]))))
    assert gradient(operator).kernel.length.shape == (3,)
    assert gradient(operator).x.shape == x.shape


def test_a_block_takes_one_matrix_product_per_tile():
    operator = tx.KernelLinearOperator(Matern(lengths()), inputs(300), tile=30)

    def program(operator, k):
        block = jnp.ones((300, k), float_dtype())
        # Other operators multiply this many vectors a few at a time.
        many = jnp.tile(block, (1, 5000))
        product = jax.jit(lambda op, V: apply_block(2.0 * op, V))
        return product.lower(operator, many).compile().as_text()

    text = program(operator, 1)
    assert len(re.findall(r" dot\(", text)) == 1
    (shape,) = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", text)
    assert sorted(shape.split(",")) == ["30", "5000"]


@pytest.mark.x64
def test_digits_in_single_precision():
    # The points are far from the origin and close to each other.
    x = jnp.asarray(1e3 + rng.uniform(0, 1, (40, 2)), jnp.float32)
    kernel = Matern(jnp.asarray([0.5, 0.5], jnp.float32))
    operator = tx.KernelLinearOperator(kernel, x)
    exact = Matern(jnp.asarray([0.5, 0.5]))
    K = tx.KernelLinearOperator(exact, x.astype(jnp.float64)).as_matrix()
    # `a / length - b / length` loses only the digits that all rows share.
    assert jnp.max(jnp.abs(operator.as_matrix().astype(K.dtype) - K)) < 3e-3

    def direct(a, b):
        return jnp.exp(-jnp.sum((a - b) ** 2))

    actual = tx.KernelLinearOperator(direct, x).as_matrix()
    K = tx.KernelLinearOperator(direct, x.astype(jnp.float64)).as_matrix()
    assert jnp.max(jnp.abs(actual.astype(K.dtype) - K)) < 1e-6
    assert operator.in_structure().dtype == jnp.float32


def test_half_precision_is_summed_in_single():
    x = inputs(200, 2).astype(jnp.bfloat16)
    operator = tx.KernelLinearOperator(lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)), x)
    assert operator.in_structure().dtype == jnp.bfloat16
    ones = jnp.ones(200, jnp.bfloat16)
    expected = jnp.sum(operator.as_matrix().astype(jnp.float32), axis=1)
    assert_close(operator.mv(ones).astype(jnp.float32), expected, 1e-2)


def test_memory_does_not_hold_the_matrix():
    n, k = 6000, 36
    x = jax.ShapeDtypeStruct((n, 2), jnp.float32)
    V = jax.ShapeDtypeStruct((n, k), jnp.float32)
    length = jax.ShapeDtypeStruct((2,), jnp.float32)

    def value(length, x, V):
        return jnp.sum(V * apply_block(tx.KernelLinearOperator(Matern(length), x), V))

    program = jax.jit(jax.value_and_grad(value, (0, 1))).lower(length, x, V).compile()
    # The matrix would take 144 MB.
    assert program.memory_analysis().temp_size_in_bytes < 80e6


@pytest.mark.wrong_types
def test_bad_input():
    x = inputs(4)

    def product(a, b):
        return jnp.sum(a * b)

    def complex(a, b):
        return jax.lax.complex(product(a, b), product(a, b))

    for arguments, error, message in [
        ((3, x), TypeError, "kernel must be a function of two rows, got 3"),
        ((lambda a, b: a * b, x), TypeError, r"shape \(\), got an array of shape \(3,"),
        ((lambda a, b: 1, x), TypeError, "real floating-point array of shape"),
        ((complex, x), TypeError, "real floating-point array of shape"),
        ((product, [x, inputs(5)]), ValueError, r"at least 1, got lengths \[4, 5\]"),
        ((product, x[:0]), ValueError, r"at least 1, got lengths \[0\]"),
        ((product, ()), ValueError, r"at least 1, got lengths \[\]"),
        ((product, [x, 1.0]), ValueError, "axis of rows, got 1.0 of type float"),
    ]:
        with pytest.raises(error, match=message):
            tx.KernelLinearOperator(*arguments)  # pyright: ignore
    with pytest.raises(ValueError, match="tile must be at least 1, got 0"):
        tx.KernelLinearOperator(product, x, tile=0)
    with pytest.raises(TypeError, match="tile must be an int or None, got"):
        tx.KernelLinearOperator(product, x, tile=2.0)  # pyright: ignore


def test_nonfinite_rows_are_reported():
    x = inputs().at[3, 1].set(jnp.nan)
    operator = tx.KernelLinearOperator(Matern(lengths()), x)
    estimate = tx.logdet(jax.random.key(0), operator, 9, shift=0.1, throw=False)
    assert estimate.result == tx.RESULTS.nonfinite


def test_entries_of_lineax_operators():
    operators = {name: make(parameters()) for name, make in OPERATORS.items()}
    known = {name for name, x in operators.items() if has_known_entries(x)}
    assert known == {"matrix", "pytree"}
    n, values = 10, jnp.arange(30, dtype=float_dtype())
    operators = [
        *(operators[name] for name in known),
        lx.TridiagonalLinearOperator(values[:n], values[1:n], values[n + 1 : 2 * n]),
        lx.DiagonalLinearOperator((values[:4], values[4:n].reshape(2, 3))),
        lx.IdentityLinearOperator(jax.eval_shape(lambda: values[:n])),
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
    operator = tx.KernelLinearOperator(_exponential, inputs())
    pivots = tx.choose_pivots(jax.random.key(0), 2.0 * operator, 9, shift=0.1)
    assert len(set(np.asarray(pivots))) == 9


def test_four_devices_agree_with_one():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.run(
        [sys.executable, str(HERE / "sharded_kernel.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.split() == ["rows", "columns", "lanes"]
