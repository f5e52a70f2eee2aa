"""Orthonormalisation by products: as accurate as by reflections, for every block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, complex_dtype, float_dtype, haar

from traceax._hash import signs
from traceax._orthogonal import _inners_by_pieces, inner, orthonormalise

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


@pytest.mark.parametrize("n", [255, 256, 257, 100_001])
def test_products_in_pieces(n):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(5, n)), rng.normal(size=(7, n)) + 1j
    x, y = jnp.asarray(x + 1j, complex_dtype()), jnp.asarray(y, complex_dtype())
    half = jnp.asarray(0.5, x.dtype)
    expected = np.asarray(x, np.complex128).conj() @ np.asarray(y, np.complex128).T / 4
    atol = 1e-5 * n**0.5
    first, second = _inners_by_pieces([(x, y), (y, y)], half)
    assert_close(first, expected, rtol=1e-5, atol=atol)
    assert second.shape == (7, 7)
    assert_close(inner(x.T, y.T) / 4, expected, rtol=1e-5, atol=atol)


def test_the_fill_is_not_singular():
    key_words = jax.lax.iota(jnp.uint32, 3 * 40).reshape(40, 3)
    noise = np.asarray(signs(key_words, ROWS, jnp.float32), np.float64)
    singular = np.linalg.svd(noise)[1]
    assert singular[-1] > 0.4 * np.sqrt(ROWS)
