"""Orthonormalisation by products: as accurate as by reflections, for every block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    ESTIMATORS,
    PSD,
    as_operator,
    assert_close,
    complex_dtype,
    float_dtype,
    haar,
    matrix,
)

from traceax._hash import signs
from traceax._orthogonal import (
    TILE,
    dots_and_norms,
    inners,
    orthonormalise,
    sum_over_rows,
)
from traceax._small_matrices import in_one_loop, inverse_root

ROWS = 400


def _block(kind, k, complex, rng):
    def normal(*shape):
        x = rng.normal(size=shape)
        return x + 1j * rng.normal(size=shape) if complex else x

    def graded(smallest):
        u, _ = np.linalg.qr(normal(ROWS, k))
        return (u * np.geomspace(1, smallest, k)) @ haar(k, 1, complex)

    match kind:
        case "random":
            return normal(ROWS, k)
        case "ill-conditioned":
            return graded(1e-5)
        case "singular to rounding":
            return graded(1e-25)
        case "rank 3":
            return normal(ROWS, 3) @ normal(3, k)
        case "zero":
            return 0 * normal(ROWS, k)
        case "zero rows":
            return np.concatenate([normal(2, k), np.zeros((ROWS - 2, k))])
        case "equal columns":
            return np.repeat(normal(ROWS, 1), k, axis=1)
        case "graded columns":
            return normal(ROWS, k) * np.geomspace(1, 1e-12, k)
        case "tiny":
            return 1e-30 * normal(ROWS, k)
        case "huge":
            return 1e30 * normal(ROWS, k)
        case "almost too large":
            return 1e36 * normal(ROWS, k)
    raise ValueError(kind)


KINDS = [
    "random",
    "ill-conditioned",
    "singular to rounding",
    "rank 3",
    "zero",
    "zero rows",
    "equal columns",
    "graded columns",
    "tiny",
    "huge",
    "almost too large",
]


@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("k", [1, 12, 390])
def test_orthonormal_to_rounding(k, complex):
    dtype = complex_dtype() if complex else float_dtype()
    eps = float(jnp.finfo(dtype).eps)
    rng = np.random.default_rng(0)
    factorise = jax.jit(orthonormalise)
    for kind in KINDS:
        block = jnp.asarray(_block(kind, k, complex, rng), dtype)
        with jax.debug_nans(True):
            q, r = factorise(block)
        wide = np.complex128 if complex else np.float64
        q, r, y = (np.asarray(x, wide) for x in (q, r, block))
        rounding = 20 * eps * np.sqrt(k)
        assert np.max(np.abs(q.conj().T @ q - np.eye(k))) < rounding, kind
        off = np.max(np.abs(q @ r - y))
        assert off <= 2 * rounding * np.max(np.abs(y)), kind
        assert np.all(np.tril(r, -1) == 0), kind


def test_lanes_do_not_disturb_each_other():
    rng = np.random.default_rng(1)
    blocks = jnp.stack(
        [jnp.asarray(_block(kind, 6, False, rng), float_dtype()) for kind in KINDS]
    )
    q, _ = jax.jit(jax.vmap(orthonormalise))(blocks)
    gram = jnp.einsum("bni,bnj->bij", q, q)
    eps = float(jnp.finfo(float_dtype()).eps)
    assert jnp.max(jnp.abs(gram - jnp.eye(6, dtype=q.dtype)[None])) < 50 * eps
    # A lane that is not finite neither hangs nor spoils the others.
    blocks = blocks.at[2].set(jnp.nan).at[4].set(jnp.inf)
    q, _ = jax.jit(jax.vmap(orthonormalise))(blocks)
    gram = jnp.einsum("bni,bnj->bij", q, q)
    sound = jnp.asarray([i for i in range(len(KINDS)) if i not in (2, 4)])
    assert jnp.max(jnp.abs(gram[sound] - jnp.eye(6, dtype=q.dtype)[None])) < 50 * eps
    assert not jnp.all(jnp.isfinite(gram[2]))


@pytest.mark.parametrize("complex", [False, True])
def test_the_root_of_an_inverse(complex):
    u = haar(6, 0, complex)
    dtype = complex_dtype() if complex else float_dtype()
    eps = float(jnp.finfo(dtype).eps)
    floor = jnp.asarray(1e-3, float_dtype())
    # Far from singular; within the floor; below the floor, and negative.
    for lowest in (0.5, 2e-3, 1e-4, 0.0, -1e-2):
        values = np.array([1.0, 1.0, 2.0, 3.0, 4.0, lowest])
        H = jnp.asarray((u * values) @ u.conj().T, dtype)
        root, least = jax.jit(inverse_root)(H, floor)
        expected = (u / np.maximum(values, 1e-3)) @ u.conj().T
        assert_close(root.conj().T @ root, expected, rtol=0, atol=2e4 * eps * 1e3)
        assert_close(least, min(lowest, 0), rtol=0, atol=50 * eps)
    # As a batch, of which some lanes are regular.
    several = jnp.stack([H, jnp.eye(6, dtype=dtype)])
    roots, _ = jax.vmap(inverse_root, (0, None))(several, floor)
    assert_close(jnp.abs(roots[1]), jnp.eye(6, dtype=float_dtype()))
    assert_close(roots[0], root, rtol=0, atol=2e4 * eps * 30)


@pytest.mark.parametrize("n", [511, 512, 513, 100_001])
def test_sums_over_pieces_of_the_rows(n, monkeypatch):
    # As if no more than the fewest rows fitted into the cache.
    monkeypatch.setattr("traceax._orthogonal._CACHED", 1)
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(n, 5)), rng.normal(size=(n, 7)) + 1j
    x, y = jnp.asarray(x + 1j, complex_dtype()), jnp.asarray(y, complex_dtype())
    expected = np.asarray(x, np.complex128).conj().T @ np.asarray(y, np.complex128)
    close = {"rtol": 1e-5, "atol": 1e-5 * n**0.5}
    two = jnp.asarray(2.0, x.real.dtype)
    products, own = inners((x, y), (y, y), scale=two)
    assert_close(4 * products, expected, **close)

    def squares(x, y):
        assert (len(x) < n) == (n >= 512)
        return jnp.sum(jnp.abs(y) ** 2, axis=0), jnp.sum(x)

    lengths, total = sum_over_rows(squares, x, y)
    assert_close(lengths, 4 * jnp.real(jnp.diagonal(own)), **close)
    assert_close(total, np.sum(x), **close)


def test_the_fill_is_not_singular():
    key_words = jax.lax.iota(jnp.uint32, 3 * 40).reshape(40, 3)
    noise = np.asarray(signs(key_words, ROWS, jnp.float32), np.float64)
    singular = np.linalg.svd(noise)[1]
    assert singular[-1] > 0.4 * np.sqrt(ROWS)


@pytest.mark.parametrize(
    "estimator", ["hutch++", "xtrace", "xnystrace", "xnystrace-plain"]
)
def test_programs_do_not_grow_with_lanes(key, estimator):
    # Kernels are traced in few pieces, but for their loops.
    estimator, operator = ESTIMATORS[estimator], as_operator(matrix("flat", 60), PSD)

    def length(lanes):
        def value(key):
            return estimator.compute(estimator.init(key, operator), 12)[:2]

        keys = jax.random.split(key, lanes)
        return len(str(jax.make_jaxpr(jax.vmap(value))(keys)).splitlines())

    assert length(3) == length(7)


@pytest.mark.parametrize("n", [1, 37, 100, 1000, 4096, 4097])
def test_columns_are_tested_to_the_last_bit(n):
    rng = np.random.default_rng(n)
    x, y = (jnp.asarray(rng.normal(size=(130, n)), float_dtype()) for _ in range(2))
    # As blocks lie in memory.
    test = jax.jit(lambda x, y: dots_and_norms(x.T, y.T, TILE))
    all_dots, all_norms = test(x, y)
    assert_close(all_dots, np.sum(np.asarray(x) * np.asarray(y), axis=1), atol=1e-4)
    assert_close(all_norms, np.linalg.norm(np.asarray(y), axis=1))
    for k in (1, 2, 5, 12, 40, 41, 111):
        dots, norms = test(x[:k], y[:k])
        np.testing.assert_array_equal(dots, all_dots[:k])
        np.testing.assert_array_equal(norms, all_norms[:k])


def test_lanes_of_short_columns_take_the_memory_of_their_entries():
    x = jnp.ones((10_000, 1, 2), float_dtype())
    test = jax.jit(jax.vmap(lambda x, y: dots_and_norms(x.T, y.T, TILE)))
    dots, norms = test(x, 2 * x)
    assert_close(dots, np.full((10_000, 1), 4))
    assert_close(norms, np.full((10_000, 1), 8**0.5))
    memory = test.lower(x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 10 * TILE * x.nbytes


@pytest.mark.parametrize("shape", [(3, 100), (37, 41), (61, 61), (2, 1500), (0, 40)])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_reductions_in_one_loop(shape, axis):
    rng = np.random.default_rng(4)
    x, y = (rng.normal(size=shape) + 1j * rng.normal(size=shape) for _ in range(2))
    given = [jnp.asarray(z, complex_dtype()) for z in (x, y)]

    def dots(x, y):
        return x.conj() * y

    def largest(*given, axis):
        return jnp.max(*given, axis=axis, initial=0)

    eps = float(jnp.finfo(float_dtype()).eps)
    summed = in_one_loop(jnp.sum, dots, *given, axis=axis)
    assert_close(
        summed, np.sum(x.conj() * y, axis=axis), rtol=0, atol=eps * np.sum(abs(x * y))
    )
    found = in_one_loop(largest, jnp.abs, given[0], axis=axis)
    assert_close(found, np.max(abs(x), axis=axis, initial=0), rtol=10 * eps)
