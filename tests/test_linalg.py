"""Factorisations of tall blocks and small matrices are accurate up to rounding."""

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
    residual_of,
    side_by_side,
)

# We test `extend` with a static start and with a traced one.
EXTEND = (jax.jit(extend, static_argnums=2), jax.jit(extend))
# Few rows use Householder reflections, and many rows use eigenvectors of Gram matrices.
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
    # We accept Gram matrices up to condition 16, and only this block comes close. The
    # rounding error in a sum of squares grows with the number of rows.
    near = 10 if kind == "zero rows" and n == MANY_ROWS else 1
    return near * 50 * max(1, n / 2100) ** 0.5 * _eps()


def _orthonormality_error(q):
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
        assert _orthonormality_error(q) < rounding, kind
        deviation = np.max(np.abs(q @ r - y))
        assert deviation <= 2 * rounding * np.max(np.abs(y)), kind
        assert np.all(np.tril(r, -1) == 0), kind


@pytest.mark.parametrize("n", [FEW_ROWS, MANY_ROWS])
def test_batch_elements_are_independent(n):
    rng = np.random.default_rng(1)
    blocks = [_block(kind, n, 6, False, rng) for kind in KINDS]
    blocks = jnp.stack([jnp.asarray(block, float_dtype()) for block in blocks])
    # A nonfinite batch element neither hangs nor spoils the others.
    broken = blocks.at[2].set(jnp.nan).at[4].set(jnp.inf)
    factorise = jax.jit(jax.vmap(orthonormalise))
    for batch, failed in ((blocks, ()), (broken, (2, 4))):
        q, _ = _wide(*factorise(batch))
        for i, kind in enumerate(KINDS):
            if i in failed:
                assert not np.all(np.isfinite(q[i])), kind
            else:
                assert _orthonormality_error(q[i]) < _rounding(kind, n), kind


#
# Growing a basis
#


def _grow(kinds, n, complex, *, traced):
    """Grow a basis by blocks of these kinds; return basis, factor and blocks."""
    rng = np.random.default_rng(2)
    blocks = [_block(kind, n, m, complex, rng) for kind, m in kinds]
    size = sum(m for _, m in kinds) + 3
    basis, factor = np.zeros((n, size)), np.zeros((size, size))
    basis, factor = (jnp.asarray(x, _dtype(complex)) for x in (basis, factor))
    end = 0
    for block in blocks:
        start = jnp.int32(end) if traced else end
        with jax.debug_nans(True):
            Q, R = EXTEND[traced](basis, jnp.asarray(block, basis.dtype), start)
        basis, factor = put(basis, Q, start), put(factor, R, start)
        end += block.shape[1]
    return basis, factor, jnp.asarray(np.hstack(blocks), basis.dtype)


def _check_grown(kind, basis, factor, blocks):
    k = blocks.shape[1]
    q, r, y = _wide(basis, factor, blocks)
    assert np.all(q[:, k:] == 0)
    assert np.all(r[k:] == 0)
    rounding = _rounding(kind, len(blocks)) * 3
    assert _orthonormality_error(q[:, :k]) < rounding
    deviation = np.max(np.abs((q @ r)[:, :k] - y), axis=0)
    # We compare each column's error with the largest entry.
    assert np.all(deviation <= 2 * rounding * np.max(np.abs(y))), deviation
    assert np.all(np.tril(r, -1) == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_basis_grows_by_blocks_of_any_rank(kind):
    for n, complex, traced in ((FEW_ROWS, False, False), (MANY_ROWS, True, True)):
        blocks = [("random", 5), (kind, 8), (kind, 1)]
        _check_grown(kind, *_grow(blocks, n, complex, traced=traced))


def test_a_basis_grows_from_zero_blocks():
    # Products with a zero operator give zero blocks, and each needs different new
    # directions.
    _check_grown("zero", *_grow([("zero", 4)] * 4, FEW_ROWS, False, traced=True))


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
            assert _orthonormality_error(whole) < 100 * _eps()
            block, columns = _wide(z, columns)
            deviation = np.max(np.abs(whole @ columns[:10] - block))
            assert deviation <= 200 * _eps() * np.max(np.abs(block))
            # The block has no part in the new directions.
            assert np.max(np.abs(columns[6:])) <= 200 * _eps() * np.max(np.abs(columns))


#
# Small matrices, and lengths
#


def test_the_root_of_an_inverse():
    u, dtype = haar(6, 0, complex=True), _dtype(complex=True)
    floor = jnp.asarray(1e-3, float_dtype())
    # The smallest eigenvalue is far above the floor, near it, below it, and negative.
    for lowest in (0.5, 2e-3, 1e-4, 0.0, -1e-2):
        values = np.array([1.0, 1.0, 2.0, 3.0, 4.0, lowest])
        H = jnp.asarray((u * values) @ u.conj().T, dtype)
        root, smallest = jax.jit(inverse_root)(H, floor)
        expected = (u / np.maximum(values, 1e-3)) @ u.conj().T
        assert_close(root.conj().T @ root, expected, rtol=0, atol=2e7 * _eps())
        assert_close(smallest, min(lowest, 0.0), rtol=0, atol=50 * _eps())
    # We also batch a regular matrix with this one.
    several = jnp.stack([H, jnp.eye(6, dtype=dtype)])
    roots, _ = jax.vmap(inverse_root, (0, None))(several, floor)
    assert_close(jnp.abs(roots[1]), jnp.eye(6, dtype=float_dtype()))
    assert_close(roots[0], root, rtol=0, atol=6e5 * _eps())


def test_lengths_neither_over_nor_underflow():
    for size in (1e-30, 1.0, 1e30):
        block = size * np.random.default_rng(5).normal(size=(50, 3))
        array = jnp.asarray(block, float_dtype())
        lengths = np.linalg.norm(block, axis=0)
        assert_close(column_norms(array), lengths, rtol=20 * _eps())
        scale = float(power_of_two_scale(array))
        assert np.log2(scale) == round(np.log2(scale))
        assert scale <= np.max(np.abs(block)) <= 4 * scale


@pytest.mark.x64
def test_programs_do_not_grow_with_the_batch(key):
    estimator, operator = ESTIMATORS["xtrace"], as_operator(matrix("flat", 60))

    def length(batch_size):
        def value(key):
            return estimator.compute(estimator.init(key, operator), 12)[:2]

        keys = jax.random.split(key, batch_size)
        return len(str(jax.make_jaxpr(jax.vmap(value))(keys)).splitlines())

    assert length(3) == length(7)


@pytest.mark.x64
def test_blocks_that_stay_nonorthonormal_are_failures(monkeypatch):
    # We allow one pass too few for a block without full rank.
    monkeypatch.setattr(dense, "_MOST_PASSES", 1)
    diagonal = jnp.zeros(8209).at[:2].set(1.0)
    operator = tx.as_operator(lambda x: diagonal * x, diagonal)
    estimate = tx.trace(
        jax.random.key(0), operator, 8, tx.XTraceEstimator(), throw=False
    )
    assert estimate.result == tx.RESULTS.nonfinite
    # Two columns don't fit into one remaining dimension either.
    basis = jnp.pad(jnp.eye(4)[:, :3], ((0, 0), (0, 2)))
    assert jnp.isnan(extend(basis, jnp.ones((4, 2)), 3)[0]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_residuals_have_more_digits(dtype):
    rng = np.random.default_rng(0)

    def draw(*shape):
        real, imaginary = rng.normal(size=(2, *shape))
        is_complex = np.issubdtype(dtype, np.complexfloating)
        return (real + 1j * imaginary if is_complex else real).astype(dtype)

    A, X = draw(400, 400) / dtype(20), draw(400, 2)
    wide = np.result_type(dtype, np.float64)
    B = (A.astype(wide) @ X.astype(wide) + 1e-5 * draw(400, 2)).astype(dtype)
    truth = B.astype(wide) - A.astype(wide) @ X.astype(wide)
    error = np.abs(np.asarray(jax.jit(residual_of)(A, X, B)) - truth).max()
    assert error < 0.05 * np.abs(B - A @ X - truth).max()

    def total(A, X, B):
        return jnp.real(jnp.sum(residual_of(A, X, B)))

    def plain(A, X, B):
        return jnp.real(jnp.sum(B - A @ X))

    arrays = jnp.asarray(A), jnp.asarray(X), jnp.asarray(B)
    slopes, expected = (jax.grad(f, (0, 1, 2))(*arrays) for f in (total, plain))
    for slope, other in zip(slopes, expected, strict=True):
        assert_close(slope, other, rtol=1e-3, atol=1e-4)
