"""Probes in chunks: the same numbers, in memory that does not grow with their number."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    OPERATORS,
    assert_close,
    parameters,
)
from problems import PSD, is_x64, matrix

import traceax as tx
from traceax._operators.space import columns_at_once

# The same in both modes.
pytestmark = pytest.mark.x64

TOLERANCE = 1e-8 if is_x64() else 1e-3


def _given(kind):
    if kind != "complex":
        return parameters(20), OPERATORS[kind]
    rng = np.random.default_rng(0)
    b, c = jnp.asarray(rng.normal(size=(2, 20, 20)) / 4)
    # Nonlinear in what it is differentiated by.
    return {"b": b, "c": c}, lambda p: lx.MatrixLinearOperator(
        jax.lax.complex(jnp.sin(p["b"]), b * p["c"]) + jax.lax.complex(c, p["c"]) ** 2
    )


@pytest.mark.parametrize(
    ("kind", "size"), [("jacobian over a PyTree", 4), ("complex", 5)]
)
def test_values_and_derivatives_are_those_of_one_block(key, kind, size):
    p, make = _given(kind)

    def results(estimator):
        def value(p, key):
            found = tx.trace(key, make(p), 14, estimator, throw=False).value
            return jnp.real(found) + 2 * jnp.imag(found)

        def along(t):
            return value(jax.tree.map(lambda x: x * (1 + t), p), key)

        return (
            jax.value_and_grad(value)(p, key),
            jax.jvp(along, (0.5,), (1.0,)),
            jax.value_and_grad(jax.hessian(along))(0.5),
            jax.vmap(value, (None, 0))(p, jr.split(key, 2)),
            jax.grad(jax.checkpoint(value))(p, key),
        )

    @jax.jit
    def both():
        return [results(tx.HutchinsonEstimator(chunk_size=x)) for x in (size, None)]

    for x, y in zip(*map(jax.tree.leaves, both()), strict=True):
        assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE * float(jnp.max(jnp.abs(y))))


def test_error_bars_are_those_of_one_block():
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix("nonsymmetric", 40, True)))
    chunks, whole = (
        tx.trace(jr.key(1), operator, 21, tx.HutchinsonEstimator(chunk_size=size))
        for size in (5, None)
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


def test_memory_does_not_grow_with_the_number_of_probes():
    n = 50_000
    d, c = jnp.ones(n, jnp.float32), jnp.ones((), jnp.float32)

    def used(k):
        def value(d, c):
            estimator = tx.HutchinsonEstimator(chunk_size=4)
            operator = _stencil(d, c, n)
            return tx.trace(jr.key(0), operator, k, estimator, throw=False).value

        return _memory(jax.value_and_grad(value, (0, 1)), d, c)

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


def _exact_answers(n):
    """Of every door an exact answer, and the truth, as functions of parameters."""
    half = n // 2

    def split(v):
        return {"a": v[:half], "b": v[half:]}

    def coupled(d, tree=False):
        def product(v):
            v = jnp.concatenate([v["a"], v["b"]]) if tree else v
            out = d**2 * v + jnp.flip(d) * jnp.roll(v, 1)
            return split(out) if tree else out

        structure = jax.eval_shape(lambda: split(d) if tree else d)
        return lx.FunctionLinearOperator(product, structure)

    def weigh(x):
        return jnp.sum(x * jnp.linspace(0, 1, len(x)).astype(x.dtype))

    def of(door, d, **options):
        return door(jr.key(0), coupled(d, **options), n, throw=False)

    return {
        "trace": (lambda d: of(tx.trace, d).value, lambda d: jnp.sum(d**2)),
        "diagonal": (
            lambda d: weigh(of(tx.diagonal, d).value),
            lambda d: weigh(d**2),
        ),
        "leaf traces": (
            lambda d: of(tx.leaf_traces, d, tree=True)[0].value["b"],
            lambda d: jnp.sum(d[half:] ** 2),
        ),
        "Frobenius": (
            lambda d: of(tx.frobenius_norm_squared, d).value,
            lambda d: jnp.sum(jnp.abs(d**2) ** 2) + jnp.sum(jnp.abs(d) ** 2),
        ),
    }


@pytest.mark.parametrize(
    ("door", "complex"),
    [
        *(("trace", True), ("diagonal", False)),
        *(("leaf traces", True), ("Frobenius", True)),
    ],
)
def test_exact_answers_in_chunks_of_columns(door, complex):
    # More columns than are multiplied at once, and a remainder.
    n = 1100
    assert columns_at_once(n) < n
    d = jnp.linspace(1, 2, n)
    turn = jnp.asarray(np.exp(0.3j) if complex else 1.0)

    def all_derivatives(value, d):
        def real(d):
            found = value(d.astype(turn.dtype) * turn)
            return jnp.real(found) - 2 * jnp.imag(found)

        return jax.value_and_grad(real)(d), jax.jvp(jax.grad(real), (d,), (d**3,))[1]

    both = jax.vmap(lambda d: [all_derivatives(x, d) for x in _exact_answers(n)[door]])
    found, truth = jax.jit(both)(jnp.stack([d, jnp.flip(d) / 2]))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert_close(x, y, rtol=1e-10, atol=1e-10 * float(jnp.max(jnp.abs(y))))


@pytest.mark.parametrize("door", ["trace", "diagonal", "leaf traces", "Frobenius"])
def test_exact_answers_hold_a_few_columns(door):
    n = 4000
    value, _ = _exact_answers(n)[door]

    def second(d):
        return jax.jvp(jax.grad(value), (d,), (d,))

    assert _memory(second, jnp.ones(n, jnp.float32)) < 8 * columns_at_once(n) * n * 4


class Counted(tx.Sampler):
    """Normal probes, all at once. It counts how often they are drawn."""

    draws: list = eqx.field(static=True)
    rotation_invariant = True

    def sample(self, key, n, k, dtype):
        jax.debug.callback(lambda: self.draws.append(k))
        return jr.normal(key, (k, n), dtype).T


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("Hutchinson", {}),
        ("rounds", {"rtol": 1e-9, "throw": False}),
        ("XTrace", {"rtol": 1e-9, "throw": False}),
    ],
)
def test_probes_that_are_drawn_at_once_are_drawn_once(kind, tolerance):
    n, k, draws = 100, 40, []
    sampler = Counted(draws)
    estimator = {
        "Hutchinson": tx.HutchinsonEstimator(sampler, chunk_size=3),
        "rounds": tx.HutchinsonEstimator(
            tx.ColouredSampler(np.arange(n) % 2, sampler=sampler), chunk_size=4
        ),
        "XTrace": tx.XTraceEstimator(sampler),
    }[kind]

    def value(d):
        operator = lx.FunctionLinearOperator(lambda v: d * v + jnp.mean(v), shape)
        return tx.trace(jr.key(0), operator, k, estimator, **tolerance).value

    shape = jax.ShapeDtypeStruct((n,), jnp.result_type(float))
    jax.block_until_ready(jax.jit(jax.value_and_grad(value))(jnp.linspace(1, 2, n)))
    jax.effects_barrier()
    assert len(draws) == 1


def test_chunks_are_those_of_the_device_that_computes(monkeypatch):
    cpu, n, k = jax.devices("cpu")[0], 3001, 700
    # As on a machine with an accelerator.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert columns_at_once(n) > k
    for device in (cpu, "cpu"):
        with jax.default_device(device):
            assert columns_at_once(n) < k
    seen = []

    class Widths(tx.IndexedSampler):
        """Signs. It notes how many are drawn at once."""

        rotation_invariant = False

        def probes(self, key, start, n, k, dtype):
            seen.append(k)
            return tx.RademacherSampler().probes(key, start, n, k, dtype)

    d = jax.device_put(np.linspace(1, 2, n, dtype=np.float32), cpu)
    tx.trace(jr.key(0), _stencil(d, d[0], n), k, tx.HutchinsonEstimator(Widths()))
    assert max(seen) < k


@pytest.mark.wrong_types
def test_wrong_chunk_sizes():
    for wrong in (2.5, True, "4"):
        with pytest.raises(TypeError, match="chunk_size must be an int or None, got"):
            tx.HutchinsonEstimator(chunk_size=wrong)  # pyright: ignore
    with pytest.raises(ValueError, match="at least 1, got 0"):
        tx.HutchinsonEstimator(chunk_size=0)
    assert tx.HutchinsonEstimator(chunk_size=np.int64(4)).chunk_size == 4  # pyright: ignore
