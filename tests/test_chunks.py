"""Probes in chunks: the same numbers, in memory that does not grow with their number."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import OPERATORS, PSD, assert_close, is_x64, matrix, parameters

import traceax as tx
from traceax._operators.block import columns_at_once

# The same in both modes.
pytestmark = pytest.mark.x64

TOLERANCE = 1e-8 if is_x64() else 1e-3


@pytest.mark.parametrize(
    ("operator", "size"),
    [("function", 1), ("jacobian over a PyTree", 4), ("function", 6)],
)
def test_values_and_derivatives_are_those_of_one_block(key, operator, size):
    p = parameters(20)

    def results(estimator):
        def value(p, key):
            op = OPERATORS[operator](p)
            return tx.trace(key, op, 14, estimator, throw=False).value

        def along(t):
            return value(jax.tree.map(lambda x: x * (1 + t), p), key)

        return (
            jax.value_and_grad(value)(p, key),
            jax.jvp(along, (0.5,), (1.0,)),
            jax.hessian(along)(0.5),
            jax.vmap(value, (None, 0))(p, jr.split(key, 2)),
            jax.grad(jax.checkpoint(value))(p, key),
        )

    chunks, whole = (tx.HutchinsonEstimator(chunk_size=x) for x in (size, None))
    for x, y in zip(
        jax.tree.leaves(jax.jit(lambda: results(chunks))()),
        jax.tree.leaves(jax.jit(lambda: results(whole))()),
        strict=True,
    ):
        scale = float(jnp.max(jnp.abs(y)))
        assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale)


@pytest.mark.parametrize("complex", [False, True])
def test_error_bars_are_those_of_one_block(complex):
    a = jnp.asarray(matrix("nonsymmetric", 40, complex))
    chunks, whole = (
        tx.trace(jr.key(1), lx.MatrixLinearOperator(a), 21, estimator)
        for estimator in (
            tx.HutchinsonEstimator(chunk_size=5),
            tx.HutchinsonEstimator(),
        )
    )
    assert_close(chunks.value, whole.value, rtol=TOLERANCE)
    # The skewness of samples is seen from the probes of one chunk.
    assert_close(chunks.standard_error, whole.standard_error, rtol=0.05)
    assert int(chunks.stats["num_matvecs"]) == 21


def _stencil(d, c, n, tags=()):
    def product(v):
        return d * v - c * (jnp.roll(v, 1) + jnp.roll(v, -1))

    structure = jax.ShapeDtypeStruct((n,), jnp.float32)
    return lx.FunctionLinearOperator(product, structure, tags)


def _memory(fn, *args):
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_does_not_grow_with_the_number_of_probes(gradient):
    n = 50_000
    d, c = jnp.ones(n, jnp.float32), jnp.ones((), jnp.float32)

    def used(k):
        def value(d, c):
            estimator = tx.HutchinsonEstimator(chunk_size=4)
            operator = _stencil(d, c, n)
            return tx.trace(jr.key(0), operator, k, estimator, throw=False).value

        return _memory(jax.value_and_grad(value, (0, 1)) if gradient else value, d, c)

    few, many = used(8), used(64)
    assert many <= 1.1 * few
    # A few blocks of four probes.
    assert many < 8 * 4 * n * 4


@pytest.mark.parametrize(
    ("estimator", "columns", "blocks"),
    [
        (tx.HutchPlusPlusEstimator(), 16, (5.1, 7)),
        (tx.XTraceEstimator(), 12, (8, 11)),
        (tx.XNysTraceEstimator(), 24, (5.6, 8)),  # 4.9 before jax 0.12
    ],
    ids=["hutch++", "xtrace", "xnystrace"],
)
def test_how_many_blocks_are_kept(estimator, columns, blocks):
    n = 100_000
    one = jnp.ones((), jnp.float32)

    def estimate(c):
        operator = _stencil(c, c / 4, n, PSD)
        found = tx.trace(jr.key(0), operator, 24, estimator, throw=False)
        return found.value, found.standard_error

    gradient = jax.value_and_grad(estimate, has_aux=True)
    for fn, most in zip((estimate, gradient), blocks, strict=True):
        assert _memory(fn, one) < 1.05 * most * columns * n * 4


def test_chunks_by_default():
    # Of what fits the cache of a CPU.
    assert columns_at_once(1000) == 1048
    assert columns_at_once(10**5) == 10
    assert columns_at_once(10**6) == 4


@pytest.mark.wrong_types
def test_wrong_chunk_sizes():
    for wrong in (2.5, True, "4"):
        with pytest.raises(TypeError, match="chunk_size must be an int or None, got"):
            tx.HutchinsonEstimator(chunk_size=wrong)  # pyright: ignore
    with pytest.raises(ValueError, match="at least 1, got 0"):
        tx.HutchinsonEstimator(chunk_size=0)
    assert tx.HutchinsonEstimator(chunk_size=np.int64(4)).chunk_size == 4  # pyright: ignore
