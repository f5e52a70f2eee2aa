"""Dense linear algebra of tall blocks.

They are only ever multiplied: by each other, for matrices of order k, and by these. That
is as fast as memory on any device, needs only sums of order k x k between devices that
hold rows of a block, and no more memory than the blocks. In memory a block (n, k) is its
transpose, a probe after the other: products with an operator are batched over the leading
axis, and threads and vector units work along entries of a probe.
"""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, PyTree

from ._hash import signs
from ._sharding import (
    explicit_sharding,
    on_one_cpu,
    replicate,
    replicated_like,
    whole_columns,
)
from ._small_matrices import (
    REDUCED_OTHERWISE,
    cholesky,
    divisor,
    frobenius,
    householder,
    identity,
    in_one_loop,
    matmul,
)
from ._staging import inlined, outlined

# Up to this many rows Householder reflections are as fast as products. Up to so many on a
# CPU they are where products need several passes, and compile four times faster.
FEW_ROWS = 256
_SEVERAL_ROWS = 2048
# Passes of orthonormalisation. Two or three is the rule for blocks that lack rank.
_MOST_PASSES = 10
# Columns that `dots_and_norms` sums at once, unless there are never as many.
TILE = 8
# Up to so many rows it sums all columns at once on a CPU. XLA's order there depends on
# the number of entries alone, and is another from `REDUCED_OTHERWISE` on.
_SHORT_COLUMNS = 4096
# Entries of a block that fit into a processor's cache, and rows that are worth a product.
_CACHED = 2**19
_FEWEST_ROWS = 256

_largest = ft.partial(jnp.max, initial=0)


def orthonormalise(
    block: Inexact[Array, "n k"],
) -> tuple[Inexact[Array, "n k"], Inexact[Array, "k k"]]:
    r"""The thin QR factorisation, `Q (n, k)` and an upper triangular `R (k, k)`.

    `Q` is orthonormal to rounding for blocks of any rank, as by Householder
    reflections, but from products: Cholesky-QR. With `G = Y^* Y = L L^*` the block
    `Y L^-*` is orthonormal in exact arithmetic, and in floating-point arithmetic up to
    the condition of G. Applied again it gains as many digits as the first time
    (shifted Cholesky-QR; Fukaya, Kannan, Nakatsukasa, Yamamoto and Yanagisawa, SIAM J.
    Sci. Comput. 42 (2020), doi:10.1137/18M1218212).

    - Where G is singular to rounding, a multiple of the identity is added, so that
        Cholesky succeeds and the next pass finds a better block.
    - One well-conditioned pass is enough, and is recognised from G. So random probes
        and the products of an operator with a flat spectrum take a single pass.
    - A block that lacks rank is given a rounding error: random signs of size eps. Its
        own errors need not fill all of Q, if entries are exactly 0.

    Short blocks are left to LAPACK's reflections.

    `k <= n`. O(n k^2) a pass; one block besides the given one and the result.
    """
    n, k = block.shape
    if n <= FEW_ROWS or (n <= _SEVERAL_ROWS and on_one_cpu()):
        scale = power_of_two_scale(block).astype(block.dtype)
        Q, R = householder(replicate(block) / scale)
        return Q, R * scale
    block = whole_columns(block)
    scale = power_of_two_scale(block)
    factor = factorise(inner(block, block, scale), n)
    # What enters or leaves a branch or a loop is laid out as it is written.
    rows = block.T

    def _scaled(R):
        # 0 for a block of zeros, of which Q is the fill.
        return R * jnp.where(largest_entry(block) == 0, 0, scale).astype(R.dtype)

    def update():
        inverse = factor.inverse.conj() / scale.astype(block.dtype)
        return matmul(inverse, rows), _scaled(factor.lower.conj().T), factor.settled

    def fill():
        eps = jnp.finfo(block.dtype).eps
        unit = (1 / scale).astype(block.dtype)
        filled = rows * unit + float(eps) * noise(k, n, block.dtype)
        return filled, _scaled(identity(k, block.dtype)), jnp.array(False)

    # Where the inverse divided by the scale would over- or underflow, too.
    limit = float(jnp.finfo(block.dtype).max) ** 0.5
    moderate = (scale < limit) & (scale > 1 / limit)
    state = jax.lax.cond(factor.regular & moderate, update, fill)

    def another_pass(state):
        rows, R, _, i = state
        factor = factorise(inner(rows.T, rows.T), n)
        rows = matmul(factor.inverse.conj(), rows)
        return rows, matmul(factor.lower.conj().T, R), factor.settled, i + 1

    rows, R, _, _ = jax.lax.while_loop(
        lambda state: ~state[2] & (state[3] < _MOST_PASSES), another_pass, (*state, 1)
    )
    return rows.T, R


def noise(k: int, n: int, dtype, number: ArrayLike = 0) -> Inexact[Array, "k n"]:
    """Rows of signs, the same ones for the same number."""
    key_words = jax.lax.iota(jnp.uint32, 3 * k).reshape(k, 3)
    key_words = key_words + jnp.asarray(number).astype(jnp.uint32) * (3 * k)
    real = jnp.finfo(dtype).dtype
    return signs(key_words, n, real).astype(dtype)


class _Factor(NamedTuple):
    """`G = L L^*`, perhaps with a multiple of the identity added to G."""

    lower: Inexact[Array, "k k"]  # L
    inverse: Inexact[Array, "k k"]  # L^-1
    regular: Bool[Array, ""]  # nothing had to be added
    settled: Bool[Array, ""]  # Y L^-* is orthonormal to rounding


@inlined
def factorise(gram: Inexact[Array, "k k"], n: int) -> _Factor:
    """L, L^-1 and what they are good for, of the Gram matrix of a block of n rows."""
    k = gram.shape[0]
    eps = jnp.finfo(gram.dtype).eps
    one = identity(k, gram.dtype)
    norm = divisor(_bound(gram))
    # Above the errors of G and of its factorisation.
    shift = (k + 32 + n**0.25) * eps * norm
    _, inverse = cholesky(gram + shift.astype(gram.dtype) * one)
    of_inverse = _bound(matmul(inverse.conj().T, inverse))
    regular = 4 * shift * of_inverse <= 1
    shift = jnp.where(regular, 0, shift)
    lower, inverse = cholesky(gram + shift.astype(gram.dtype) * one)
    # The loss of orthogonality is about eps times the condition.
    return _Factor(lower, inverse, regular, regular & (norm * of_inverse <= 16))


def _bound(hermitian: Inexact[Array, "k k"]) -> Float[Array, ""]:
    # Of the largest eigenvalue, and equal to it for multiples of the identity.
    rows = jnp.max(jnp.sum(jnp.abs(hermitian), axis=1), initial=0)
    return jnp.minimum(rows, frobenius(hermitian))


def inner(
    x: Inexact[Array, "n k"],
    y: Inexact[Array, "n m"],
    scale: Float[Array, ""] | None = None,
) -> Inexact[Array, "k m"]:
    """`X^* Y` in full precision; of `X / scale` and `Y / scale` if given.

    `scale` is a power of two, of blocks whose squares over- or underflow.
    """
    (product,) = inners((x, y), scale=scale)
    return product


@inlined
def inners(
    *pairs: tuple[Inexact[Array, "n k"], Inexact[Array, "n m"]],
    scale: Float[Array, ""] | None = None,
) -> list[Inexact[Array, "k m"]]:
    """`inner` of several pairs of blocks, which are read once."""

    def products(*pieces):
        if scale is not None:
            unit = 1 / scale.astype(pieces[0].dtype)
            pieces = [x * unit for x in pieces]
        return [
            jnp.matmul(
                x.conj().T,
                y,
                precision=jax.lax.Precision.HIGHEST,
                out_sharding=replicated_like(x, y),
            )
            for x, y in zip(pieces[::2], pieces[1::2], strict=True)
        ]

    return sum_over_rows(products, *[block for pair in pairs for block in pair])


def sum_over_rows(
    of: Callable[..., PyTree[Array]], *blocks: Inexact[Array, "n _"]
) -> PyTree[Array]:
    """The sum of `of(*pieces)` over pieces of the rows of blocks.

    On a CPU each is of as many entries of every probe as fit into the cache: three times
    faster than XLA's product of large blocks, whose sums along n are slow, and what `of`
    makes of them is never written to memory. A block over several devices would have to
    be gathered for that, and is a single piece.
    """
    n = blocks[0].shape[0]
    total = sum(block.shape[1] for block in blocks)
    if n * total <= 4 * _CACHED or n < 2 * _FEWEST_ROWS or not on_one_cpu():
        return of(*blocks)
    rows = [block.T for block in blocks]
    length = min(n, max(_FEWEST_ROWS, 2 * _CACHED // total))

    def piece(start, length):
        pieces = (jax.lax.dynamic_slice_in_dim(x, start, length, 1) for x in rows)
        return of(*(x.T for x in pieces))

    whole = n // length
    first = piece(whole * length, n - whole * length)
    with outlined():
        return jax.lax.fori_loop(
            0,
            whole,
            lambda i, sums: jax.tree.map(jnp.add, sums, piece(i * length, length)),
            first,
        )


@inlined
def there(count: Int[Array, ""], most: int) -> Bool[Array, " {most}"]:
    """Which of the most columns there could be there are."""
    return jnp.arange(most, dtype=count.dtype) < count


def combine(
    block: Inexact[Array, "n k"], small: Inexact[Array, "k m"]
) -> Inexact[Array, "n m"]:
    """`matmul(block, small)`, with the result laid out in memory as blocks are."""
    return matmul(small.T, block.T).T


@inlined
def column_dots(
    x: Inexact[Array, "n k"], y: Inexact[Array, "n k"]
) -> Inexact[Array, " k"]:
    """`x_i^* y_i` for every column i."""
    dots = in_one_loop(jnp.sum, lambda x, y: x.conj() * y, x.T, y.T, axis=1)
    return replicate(dots)


def dots_and_norms(
    x: Inexact[Array, "n k"], y: Inexact[Array, "n k"], tile: int
) -> tuple[Inexact[Array, " k"], Float[Array, " k"]]:
    """`x_i^* y_i` and `|y_i|`, the same to the last bit whatever other columns there are.

    Of real columns, as they lie in memory. How the compiler orders a sum depends on how
    many there are: sums of `tile` columns at a time, or of short ones next to enough
    zeros.
    """
    n, k = x.shape
    if explicit_sharding(x) is not None or explicit_sharding(y) is not None:
        return column_dots(x, y), column_norms(y)
    if n > _SHORT_COLUMNS or n == 0 or not on_one_cpu():
        return _in_tiles(x.T, y.T, tile)

    @custom_vmap
    def at_once(x, y):
        more = REDUCED_OTHERWISE // n + 1 - k
        dots, norms = _alone(_longer(x, more), _longer(y, more))
        return (dots[:k], norms[:k]) if more > 0 else (dots, norms)

    @at_once.def_vmap
    def _(lanes, in_batched, x, y):
        del lanes
        # Zeros beside each of many small blocks would be most of what is summed.
        tiles = jax.vmap(
            lambda x, y: _in_tiles(x, y, tile),
            in_axes=tuple(0 if batched else None for batched in in_batched),
        )
        return tiles(x, y), (True, True)

    with outlined():
        return at_once(x.T, y.T)


def _in_tiles(
    x: Inexact[Array, "k n"], y: Inexact[Array, "k n"], tile: int
) -> tuple[Inexact[Array, " k"], Float[Array, " k"]]:
    k = len(x)
    if k == tile:
        return _alone(x, y)
    rows = [_longer(block, tile - k) for block in (x, y)]
    last = len(rows[0]) - tile

    def one(i, carry):
        # The last tile may begin within the one before it.
        # Unsigned, so that no start counts from the end.
        start = jnp.minimum(i * tile, last).astype(jnp.uint32)
        pair = [jax.lax.dynamic_slice_in_dim(of, start, tile) for of in rows]
        update = jax.lax.dynamic_update_slice_in_dim
        tested = _alone(*pair)
        return tuple(
            update(of, x, start, 0) for of, x in zip(carry, tested, strict=True)
        )

    real = jnp.finfo(y.dtype).dtype
    carry = jnp.zeros(last + tile, x.dtype), jnp.zeros(last + tile, real)
    dots, norms = jax.lax.fori_loop(0, -(-k // tile), one, carry)
    return dots[:k], norms[:k]


def _alone(
    x: Inexact[Array, "k n"], y: Inexact[Array, "k n"]
) -> tuple[Inexact[Array, " k"], Float[Array, " k"]]:
    """Dots and norms, compiled apart from what is around them."""
    x, y = (rows.T for rows in jax.lax.optimization_barrier((x, y)))
    return jax.lax.optimization_barrier((column_dots(x, y), column_norms(y)))


def _longer(rows: Inexact[Array, "k n"], more: int) -> Inexact[Array, "m n"]:
    """With so many rows of zeros more, if any."""
    return jnp.pad(rows, ((0, more), (0, 0))) if more > 0 else rows


@inlined
def column_norms(x: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """`|x_i|` for every column i, safe against under- and overflow of squares."""
    scale = power_of_two_scale(x)
    return replicate(scale * jnp.linalg.norm(x.T / scale.astype(x.dtype), axis=1))


@inlined
def nan_unless_finite(array: Inexact[Array, "..."]) -> Float[Array, ""]:
    """0, but NaN if an entry is not finite.

    A maximum doesn't tell: XLA's of many entries on a CPU passes over NaN.
    """
    return jnp.sum(jnp.abs(0 * array))


@inlined
def largest_entry(block: Inexact[Array, "..."]) -> Float[Array, ""]:
    """The largest modulus of an entry, 0 for an empty block. NaN may be passed over."""
    return in_one_loop(_largest, jnp.abs, block.T)


def largest_product(products: Inexact[Array, "..."]) -> Float[Array, ""]:
    """The largest modulus of an entry, NaN if one is not finite."""
    return largest_entry(products) + nan_unless_finite(products.T)


def products_to_check(products: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """What `stats["largest_product"]` is, of products: finite if they are.

    Few are given themselves, and looked at only if the value turns out not to be finite.
    Many would have to be kept until then.
    """
    rows = products.T
    return rows if rows.size <= _CACHED else nan_unless_finite(rows)


@inlined
def largest_entries(block: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """The largest modulus of an entry of each column."""
    return in_one_loop(_largest, jnp.abs, block.T, axis=1)


def power_of_two_scale(block: Inexact[Array, "n k"]) -> Float[Array, ""]:
    """A power of two within a factor 4 below the largest entry; 1 for a zero block.

    Dividing by it is exact, and squares neither overflow nor underflow afterwards.
    """
    return power_of_two(largest_entry(block))


@inlined
def power_of_two(largest: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """As `power_of_two_scale`, of the largest entry, or of several."""
    info = jnp.finfo(largest.dtype)
    # Rounded to no digits behind the leading one, and not up to infinity.
    scale = jax.lax.reduce_precision(largest / 2, info.nexp, 0)
    return jax.lax.select(jnp.isfinite(largest), divisor(scale), largest)
