"""Probes in chunks: the same numbers, in memory that does not grow with their number."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    OPERATORS,
    as_operator,
    assert_close,
    complex_dtype,
    float_dtype,
    is_x64,
    many,
    matrix,
    parameters,
    z_score,
)

import traceax as tx
from traceax._stream import chunk_size

TOLERANCE = 1e-8 if is_x64() else 1e-3


def _hutchinson(size):
    return tx.HutchinsonEstimator(chunk_size=size)


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

    for x, y in zip(
        jax.tree.leaves(jax.jit(lambda: results(_hutchinson(size)))()),
        jax.tree.leaves(jax.jit(lambda: results(_hutchinson(None)))()),
        strict=True,
    ):
        scale = float(jnp.max(jnp.abs(y)))
        assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale)


@pytest.mark.parametrize("complex", [False, True])
def test_complex_operators_and_error_bars(complex):
    a = matrix("nonsymmetric", 40, complex)
    dtype = complex_dtype() if complex else float_dtype()
    operator = lx.MatrixLinearOperator(jnp.asarray(a, dtype))
    whole = tx.trace(jr.key(1), operator, 21, _hutchinson(None))
    parts = tx.trace(jr.key(1), operator, 21, _hutchinson(5))
    assert_close(parts.value, whole.value, rtol=TOLERANCE)
    # The degrees of freedom differ, and with them the factor for the root.
    assert_close(parts.standard_error, whole.standard_error, rtol=0.05)
    assert int(parts.stats["num_matvecs"]) == 21


def test_coverage_in_chunks():
    a = matrix("poly", 60)
    operator = as_operator(a)
    values, errors = many(_hutchinson(4), operator, 20, 2000)
    assert z_score(values, np.trace(a)) < 4
    assert 0.9 < np.sqrt(np.mean(errors**2)) / values.std() < 1.15


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_does_not_grow_with_the_number_of_probes(gradient):
    n = 50_000

    def value(d, c, k):
        def mv(v):
            return d * v + c * (jnp.roll(v, 1) + jnp.roll(v, -1))

        structure = jax.ShapeDtypeStruct((n,), d.dtype)
        operator = lx.FunctionLinearOperator(mv, structure)
        return tx.trace(jr.key(0), operator, k, _hutchinson(4), throw=False).value

    fn = jax.value_and_grad(value, (0, 1)) if gradient else value
    d, c = jnp.ones(n, jnp.float32), jnp.ones((), jnp.float32)
    used = []
    for k in (8, 64):
        compiled = jax.jit(fn, static_argnums=2).lower(d, c, k).compile()
        used.append(compiled.memory_analysis().temp_size_in_bytes)
    assert used[1] <= 1.1 * used[0]
    # A few blocks of four probes.
    assert used[1] < 8 * 4 * n * 4


@pytest.mark.parametrize(
    ("of", "estimator", "columns", "blocks"),
    [
        (tx.trace, tx.HutchPlusPlusEstimator(), 16, (4, 5.5)),
        (tx.trace, tx.XTraceEstimator(), 12, (5, 7)),
        (tx.trace, tx.XNysTraceEstimator(), 24, (3.2, 7)),
        (tx.logdet, tx.KrylovAwareEstimator(), 24, (2.3, 2.4)),
        (tx.logdet, tx.LanczosQuadratureEstimator(6), 24, (3.1, 3.7)),
    ],
    ids=["hutch++", "xtrace", "xnystrace", "krylov aware", "lanczos"],
)
def test_how_many_blocks_are_kept(of, estimator, columns, blocks):
    # With what products take, of large blocks that are multiplied in pieces.
    n = 100_000

    def estimate(c):
        def mv(v):
            return c * v - (jnp.roll(v, 1) + jnp.roll(v, -1)) / 4

        structure = jax.ShapeDtypeStruct((n,), jnp.float32)
        tag = lx.positive_semidefinite_tag
        operator = lx.FunctionLinearOperator(mv, structure, tag)
        found = of(jr.key(0), operator, 24, estimator, throw=False)
        return found.value, found.standard_error

    gradient = jax.value_and_grad(estimate, has_aux=True)
    for fn, most in zip((estimate, gradient), blocks, strict=True):
        compiled = jax.jit(fn).lower(jnp.ones((), jnp.float32)).compile()
        used = compiled.memory_analysis().temp_size_in_bytes
        assert used < 1.05 * most * columns * n * 4


def test_chunks_by_default():
    signs, orthogonal = tx.RademacherSampler(), tx.OrthogonalSampler()
    # Of what fits the cache of a CPU.
    assert chunk_size(None, signs, 1000) == 1048
    assert chunk_size(None, signs, 10**5) == 8
    assert chunk_size(None, signs, 10**6) == 4
    assert chunk_size(7, signs, 10) == 7
    # Drawn all at once, or not at all.
    assert chunk_size(7, orthogonal, 1000) == 1000


def test_wrong_chunk_sizes():
    for wrong in (2.5, True, "4"):
        with pytest.raises(TypeError, match="chunk_size must be an int or None, got"):
            tx.HutchinsonEstimator(chunk_size=wrong)  # pyright: ignore
    with pytest.raises(ValueError, match="at least 1, got 0"):
        tx.HutchinsonEstimator(chunk_size=0)
    with pytest.raises(ValueError, match=r"generator must be one of .*got 'dice'"):
        tx.NormalSampler("dice")
    with pytest.raises(ValueError, match="needs independent probes"):
        tx.XTraceEstimator(tx.OrthogonalSampler())
    with pytest.raises(
        ValueError, match="at most n = 3 probes are orthogonal, got k = 4"
    ):
        tx.OrthogonalSampler().sample(jr.key(0), 3, 4, jnp.dtype("float32"))
