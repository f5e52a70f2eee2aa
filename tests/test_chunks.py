"""Probes in chunks give the same numbers, in memory independent of their number."""

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

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = pytest.mark.x64

TOLERANCE = 1e-8 if is_x64() else 1e-3


def _parameters_and_operator(kind):
    if kind != "complex":
        return parameters(20), OPERATORS[kind]
    rng = np.random.default_rng(0)
    b, c = jnp.asarray(rng.normal(size=(2, 20, 20)) / 4)
    # The matrix is nonlinear in its parameters.
    return {"b": b, "c": c}, lambda p: lx.MatrixLinearOperator(
        jax.lax.complex(jnp.sin(p["b"]), b * p["c"]) + jax.lax.complex(c, p["c"]) ** 2
    )


@pytest.mark.parametrize(
    ("kind", "size"), [("jacobian over a PyTree", 4), ("complex", 5)]
)
def test_chunks_agree_with_one_block(key, kind, size):
    p, make = _parameters_and_operator(kind)

    def results(estimator):
        def value(p, key):
            estimate = tx.trace(key, make(p), 14, estimator, throw=False).value
            return jnp.real(estimate) + 2 * jnp.imag(estimate)

        def value_at(t):
            return value(jax.tree.map(lambda x: x * (1 + t), p), key)

        return (
            jax.value_and_grad(value)(p, key),
            jax.jvp(value_at, (0.5,), (1.0,)),
            jax.value_and_grad(jax.hessian(value_at))(0.5),
            jax.vmap(value, (None, 0))(p, jr.split(key, 2)),
            jax.grad(jax.checkpoint(value))(p, key),
        )

    @jax.jit
    def all_results():
        return [results(tx.HutchinsonEstimator(chunk_size=x)) for x in (size, None)]

    for x, y in zip(*map(jax.tree.leaves, all_results()), strict=True):
        assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE * float(jnp.max(jnp.abs(y))))


def test_error_bars_agree_with_one_block():
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix("nonsymmetric", 40, True)))
    chunks, whole = (
        tx.trace(jr.key(1), operator, 21, tx.HutchinsonEstimator(chunk_size=size))
        for size in (5, None)
    )
    assert_close(chunks.value, whole.value, rtol=TOLERANCE)
    # With chunks, we estimate the samples' skewness from one chunk's probes.
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

    def memory(k):
        def value(d, c):
            estimator = tx.HutchinsonEstimator(chunk_size=4)
            operator = _stencil(d, c, n)
            return tx.trace(jr.key(0), operator, k, estimator, throw=False).value

        return _memory(jax.value_and_grad(value, (0, 1)), d, c)

    few, many = memory(8), memory(64)
    assert many <= 1.1 * few
    # The program keeps a few blocks of four probes.
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
def test_number_of_blocks_in_memory(estimator, columns, blocks):
    n = 100_000
    one = jnp.ones((), jnp.float32)

    def estimate(c):
        operator = _stencil(c, c / 4, n, PSD)
        result = tx.trace(jr.key(0), operator, 24, estimator, throw=False)
        return result.value, result.standard_error

    gradient = jax.value_and_grad(estimate, has_aux=True)
    for fn, limit in zip((estimate, gradient), blocks, strict=True):
        assert _memory(fn, one) < 1.05 * limit * columns * n * 4


def _exact_answers(n):
    """Exact answers by entry point, with the truth, as functions of parameters."""
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

    def answer(entry, d, **options):
        return entry(jr.key(0), coupled(d, **options), n, throw=False)

    return {
        "trace": (lambda d: answer(tx.trace, d).value, lambda d: jnp.sum(d**2)),
        "diagonal": (
            lambda d: weigh(answer(tx.diagonal, d).value),
            lambda d: weigh(d**2),
        ),
        "leaf traces": (
            lambda d: answer(tx.leaf_traces, d, tree=True)[0].value["b"],
            lambda d: jnp.sum(d[half:] ** 2),
        ),
        "Frobenius": (
            lambda d: answer(tx.frobenius_norm_squared, d).value,
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
    # We take more columns than are multiplied at once, plus a remainder.
    n = 1100
    assert columns_at_once(n) < n
    d = jnp.linspace(1, 2, n)
    turn = jnp.asarray(np.exp(0.3j) if complex else 1.0)

    def all_derivatives(value, d):
        def real(d):
            actual = value(d.astype(turn.dtype) * turn)
            return jnp.real(actual) - 2 * jnp.imag(actual)

        return jax.value_and_grad(real)(d), jax.jvp(jax.grad(real), (d,), (d**3,))[1]

    derivatives = jax.vmap(
        lambda d: [all_derivatives(x, d) for x in _exact_answers(n)[door]]
    )
    actual, truth = jax.jit(derivatives)(jnp.stack([d, jnp.flip(d) / 2]))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(truth), strict=True):
        assert_close(x, y, rtol=1e-10, atol=1e-10 * float(jnp.max(jnp.abs(y))))


@pytest.mark.parametrize("door", ["trace", "diagonal", "leaf traces", "Frobenius"])
def test_exact_answers_keep_few_columns_in_memory(door):
    n = 4000
    value, _ = _exact_answers(n)[door]

    def second(d):
        return jax.jvp(jax.grad(value), (d,), (d,))

    assert _memory(second, jnp.ones(n, jnp.float32)) < 8 * columns_at_once(n) * n * 4


class Counted(tx.Sampler):
    """Normal probes, drawn all at once. It counts the draws."""

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
def test_probes_drawn_at_once_are_drawn_once(kind, tolerance):
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


def test_chunk_sizes_suit_the_computing_device(monkeypatch):
    cpu, n, k = jax.devices("cpu")[0], 3001, 700
    # We pretend to run on a machine with an accelerator.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert columns_at_once(n) > k
    for device in (cpu, "cpu"):
        with jax.default_device(device):
            assert columns_at_once(n) < k
    widths = []

    class Widths(tx.IndexedSampler):
        """Signs. It records how many are drawn at once."""

        rotation_invariant = False

        def probes(self, key, start, n, k, dtype):
            widths.append(k)
            return tx.RademacherSampler().probes(key, start, n, k, dtype)

    d = jax.device_put(np.linspace(1, 2, n, dtype=np.float32), cpu)
    tx.trace(jr.key(0), _stencil(d, d[0], n), k, tx.HutchinsonEstimator(Widths()))
    assert max(widths) < k


@pytest.mark.wrong_types
def test_wrong_chunk_sizes():
    for wrong in (2.5, True, "4"):
        with pytest.raises(TypeError, match="chunk_size must be an int or None, got"):
            tx.HutchinsonEstimator(chunk_size=wrong)  # pyright: ignore
    with pytest.raises(ValueError, match="at least 1, got 0"):
        tx.HutchinsonEstimator(chunk_size=0)
    assert tx.HutchinsonEstimator(chunk_size=np.int64(4)).chunk_size == 4  # pyright: ignore
