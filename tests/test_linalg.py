"""Factorisations of tall blocks and small matrices: to rounding, for every block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    ESTIMATORS,
    assert_close,
)
from problems import as_operator, complex_dtype, float_dtype, haar, matrix

import traceax as tx
from traceax._linalg import dense
from traceax._linalg.dense import (
    column_norms,
    extend,
    inverse_root,
    orthonormalise,
    power_of_two_scale,
    put,
    side_by_side,
)

# Of a start that is known, and of one that is traced.
EXTEND = (jax.jit(extend, static_argnums=2), jax.jit(extend))
# Householder reflections; eigenvectors of Gram matrices.
FEW_ROWS, MANY_ROWS = 400, 8400


def _blocks(n, k, complex, rng):
    def normal(*shape):
        x = rng.normal(size=shape)
        return x + 1j * rng.normal(size=shape) if complex else x

    def graded(smallest):
        u, _ = np.linalg.qr(normal(n, k))
        return (u * np.geomspace(1, smallest, k)) @ haar(k, 1, complex)

    return {
        "random": lambda: normal(n, k),
        "ill-conditioned": lambda: graded(1e-5),
        "singular to rounding": lambda: graded(1e-25),
        "rank 3": lambda: normal(n, 3) @ normal(3, k),
        "zero": lambda: 0 * normal(n, k),
        "zero rows": lambda: np.concatenate([normal(2, k), np.zeros((n - 2, k))]),
        "equal columns": lambda: np.repeat(normal(n, 1), k, axis=1),
        "graded columns": lambda: normal(n, k) * np.geomspace(1, 1e-12, k),
        "tiny": lambda: 1e-30 * normal(n, k),
        "huge": lambda: 1e30 * normal(n, k),
        "almost too large": lambda: 1e36 * normal(n, k),
    }


KINDS = list(_blocks(0, 0, False, None))


def _block(kind, n, k, complex, rng):
    return _blocks(n, k, complex, rng)[kind]()


def _dtype(complex):
    return complex_dtype() if complex else float_dtype()


def _eps():
    return float(jnp.finfo(float_dtype()).eps)


def _wide(*arrays):
    dtypes = (np.complex128 if jnp.iscomplexobj(x) else np.float64 for x in arrays)
    return [np.asarray(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


def _rounding(kind, n):
    # Gram matrices of condition 16 are taken for good, which only this block is near. The
    # rounding error of a sum of squares grows with the number of rows.
    near = 10 if kind == "zero rows" and n == MANY_ROWS else 1
    return near * 50 * max(1, n / 2100) ** 0.5 * _eps()


def _off_orthonormal(q):
    return np.max(np.abs(q.conj().T @ q - np.eye(q.shape[1])))


@pytest.mark.parametrize(
    ("n", "k", "complex"),
    [
        *((FEW_ROWS, 1, False), (FEW_ROWS, 12, True), (40, 36, False)),
        *((MANY_ROWS, 1, True), (MANY_ROWS, 12, False), (MANY_ROWS, 12, True)),
    ],
)
def test_orthonormal_to_rounding(n, k, complex):
    rng = np.random.default_rng(0)
    factorise = jax.jit(orthonormalise)
    for kind in KINDS:
        rounding = _rounding(kind, n) * max(1, np.sqrt(k) / 3)
        block = jnp.asarray(_block(kind, n, k, complex, rng), _dtype(complex))
        with jax.debug_nans(True):
            q, r = factorise(block)
        q, r, y = _wide(q, r, block)
        assert _off_orthonormal(q) < rounding, kind
        off = np.max(np.abs(q @ r - y))
        assert off <= 2 * rounding * np.max(np.abs(y)), kind
        assert np.all(np.tril(r, -1) == 0), kind


@pytest.mark.parametrize("n", [FEW_ROWS, MANY_ROWS])
def test_lanes_do_not_disturb_each_other(n):
    rng = np.random.default_rng(1)
    blocks = [_block(kind, n, 6, False, rng) for kind in KINDS]
    blocks = jnp.stack([jnp.asarray(block, float_dtype()) for block in blocks])
    # A lane that is not finite neither hangs nor spoils the others.
    spoilt = blocks.at[2].set(jnp.nan).at[4].set(jnp.inf)
    factorise = jax.jit(jax.vmap(orthonormalise))
    for given, failed in ((blocks, ()), (spoilt, (2, 4))):
        q, _ = _wide(*factorise(given))
        for i, kind in enumerate(KINDS):
            if i in failed:
                assert not np.all(np.isfinite(q[i])), kind
            else:
                assert _off_orthonormal(q[i]) < _rounding(kind, n), kind


#
# Growing a basis
#


def _grown(kinds, n, complex, *, traced):
    """A basis that grows by blocks of the kinds: the basis, its factor, and the blocks."""
    rng = np.random.default_rng(2)
    blocks = [_block(kind, n, m, complex, rng) for kind, m in kinds]
    most = sum(m for _, m in kinds) + 3
    basis, factor = np.zeros((n, most)), np.zeros((most, most))
    basis, factor = (jnp.asarray(x, _dtype(complex)) for x in (basis, factor))
    begin = 0
    for block in blocks:
        start = jnp.int32(begin) if traced else begin
        with jax.debug_nans(True):
            Q, R = EXTEND[traced](basis, jnp.asarray(block, basis.dtype), start)
        basis, factor = put(basis, Q, start), put(factor, R, start)
        begin += block.shape[1]
    return basis, factor, jnp.asarray(np.hstack(blocks), basis.dtype)


def _check_grown(kind, basis, factor, blocks):
    k = blocks.shape[1]
    q, r, y = _wide(basis, factor, blocks)
    assert np.all(q[:, k:] == 0)
    assert np.all(r[k:] == 0)
    rounding = _rounding(kind, len(blocks)) * 3
    assert _off_orthonormal(q[:, :k]) < rounding
    off = np.max(np.abs((q @ r)[:, :k] - y), axis=0)
    # Each block relative to itself: one may be tiny beside another.
    assert np.all(off <= 2 * rounding * np.max(np.abs(y))), off
    assert np.all(np.tril(r, -1) == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_basis_grows_by_blocks_of_any_rank(kind):
    for n, complex, traced in ((FEW_ROWS, False, False), (MANY_ROWS, True, True)):
        blocks = [("random", 5), (kind, 8), (kind, 1)]
        _check_grown(kind, *_grown(blocks, n, complex, traced=traced))


def test_a_basis_grows_from_nothing():
    # As by products with a zero operator: the fill of each block is another.
    _check_grown("zero", *_grown([("zero", 4)] * 4, FEW_ROWS, False, traced=True))


@pytest.mark.parametrize(("n", "complex"), [(FEW_ROWS, False), (MANY_ROWS, True)])
def test_a_basis_that_spans_the_block_already(n, complex):
    rng = np.random.default_rng(3)
    first = _block("random", n, 6, complex, rng)
    coordinates = _block("random", 6, 4, complex, rng)
    for scale in (1.0, 1e-20, 1e20):
        y, z = (
            jnp.asarray(scale * x, _dtype(complex))
            for x in (first, first @ coordinates)
        )
        basis = jnp.zeros((n, 12), y.dtype)
        Q, _ = EXTEND[0](basis, y, 0)
        basis = put(basis, Q, 0)
        for grow in EXTEND:
            more, columns = grow(basis, z, 6)
            (whole,) = _wide(side_by_side(Q, more))
            assert _off_orthonormal(whole) < 100 * _eps()
            given, columns = _wide(z, columns)
            off = np.max(np.abs(whole @ columns[:10] - given))
            assert off <= 200 * _eps() * np.max(np.abs(given))
            # Of the new directions there is nothing in the block.
            assert np.max(np.abs(columns[6:])) <= 200 * _eps() * np.max(np.abs(columns))


#
# Small matrices, and lengths
#


def test_the_root_of_an_inverse():
    u, dtype = haar(6, 0, complex=True), _dtype(complex=True)
    floor = jnp.asarray(1e-3, float_dtype())
    # Far from singular; within the floor; below the floor, and negative.
    for lowest in (0.5, 2e-3, 1e-4, 0.0, -1e-2):
        values = np.array([1.0, 1.0, 2.0, 3.0, 4.0, lowest])
        H = jnp.asarray((u * values) @ u.conj().T, dtype)
        root, least = jax.jit(inverse_root)(H, floor)
        expected = (u / np.maximum(values, 1e-3)) @ u.conj().T
        assert_close(root.conj().T @ root, expected, rtol=0, atol=2e7 * _eps())
        assert_close(least, min(lowest, 0.0), rtol=0, atol=50 * _eps())
    # As a batch, of which some lanes are regular.
    several = jnp.stack([H, jnp.eye(6, dtype=dtype)])
    roots, _ = jax.vmap(inverse_root, (0, None))(several, floor)
    assert_close(jnp.abs(roots[1]), jnp.eye(6, dtype=float_dtype()))
    assert_close(roots[0], root, rtol=0, atol=6e5 * _eps())


def test_lengths_neither_over_nor_underflow():
    for size in (1e-30, 1.0, 1e30):
        block = size * np.random.default_rng(5).normal(size=(50, 3))
        given = jnp.asarray(block, float_dtype())
        lengths = np.linalg.norm(block, axis=0)
        assert_close(column_norms(given), lengths, rtol=20 * _eps())
        scale = float(power_of_two_scale(given))
        assert np.log2(scale) == round(np.log2(scale))
        assert scale <= np.max(np.abs(block)) <= 4 * scale


@pytest.mark.x64
def test_programs_do_not_grow_with_lanes(key):
    estimator, operator = ESTIMATORS["xtrace"], as_operator(matrix("flat", 60))

    def length(lanes):
        def value(key):
            return estimator.compute(estimator.init(key, operator), 12)[:2]

        keys = jax.random.split(key, lanes)
        return len(str(jax.make_jaxpr(jax.vmap(value))(keys)).splitlines())

    assert length(3) == length(7)


@pytest.mark.x64
def test_a_block_that_stays_short_of_orthonormal_is_a_failure(monkeypatch):
    # A pass too few, of a block that lacks rank.
    monkeypatch.setattr(dense, "_MOST_PASSES", 1)
    diagonal = jnp.zeros(8209).at[:2].set(1.0)
    operator = tx.as_operator(lambda x: diagonal * x, diagonal)
    estimate = tx.trace(
        jax.random.key(0), operator, 8, tx.XTraceEstimator(), throw=False
    )
    assert estimate.result == tx.RESULTS.nonfinite
    # Nor is there room for two columns in one dimension.
    basis = jnp.pad(jnp.eye(4)[:, :3], ((0, 0), (0, 2)))
    assert jnp.isnan(extend(basis, jnp.ones((4, 2)), 3)[0]).all()
