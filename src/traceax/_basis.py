r"""Orthonormal bases that grow: earlier vectors keep every bit when later ones come.

`orthonormalise` factorises a block as a whole, and its columns depend on the width of
the block in the last bits. Here column j of Q and R depends on columns 0, ..., j of the
block alone, to the last bit: what was computed with Q can be used again for a wider
block. To that end

- every product of matrices has a fixed shape: columns are taken in tiles of a size that
    depends on n alone, the last one padded with zeros;
- every decision is made for each column from those before it.

Pure kernels. Arrays of vectors are (k, n), a vector a row.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

from ._orthogonal import (
    FEW_ROWS,
    combine,
    factorise,
    inner,
    largest_entries,
    noise,
    power_of_two,
    there,
)
from ._sharding import on_one_cpu, replicate, whole_columns, zeros_beside
from ._small_matrices import cholesky, diagonal, divisor, householder, identity, matmul
from ._staging import inlined

# The first columns come from reflections. For blocks of so many entries these are as fast
# as products on a CPU, and compile several times faster.
_REFLECTED = 2**15
# Passes over a tile. One for random vectors, two or three where rank is lost.
_MOST_PASSES = 10


def tile_size(n: int) -> int:
    """How many columns are taken at once."""
    return 8 if n <= 2**16 else 16


class _Tile(NamedTuple):
    """Vectors X of a tile that become orthonormal, and what they were made of.

    The given vectors are `basis^T C + X^T M`.
    """

    X: Inexact[Array, "c n"]
    C: Inexact[Array, "k c"]
    M: Inexact[Array, "c c"]
    settled: Bool[Array, " c"]
    passes: Int[Array, ""]


def _steps(n: int) -> list[int]:
    """Numbers of columns that come from reflections, one step after the other."""
    most = _REFLECTED // n
    # A step takes long to compile. Where few columns can follow, the first one takes
    # more, so that fewer blocks need another.
    first = 24 if 24 <= most < 64 else 16
    return [min(n, end) for end in (first, 32, 64) if end <= most]


def growing_basis(
    block: Inexact[Array, "n k"],
) -> tuple[Inexact[Array, "n k"], Inexact[Array, "k k"]]:
    """`Q (n, k)`, orthonormal to rounding for blocks of any rank, and R, as
    `orthonormalise` has them, and with the same leading columns for any wider block.

    O(n k^2) time, twice that of `orthonormalise`; one block besides the given one and
    the result.
    """
    n, k = block.shape
    if k == 0:
        return block, jnp.zeros((0, 0), block.dtype)
    # Given vectors, each tile of which the basis replaces.
    rows = whole_columns(block).T
    largest = largest_entries(rows.T)
    few = n <= FEW_ROWS or on_one_cpu()
    ends = _steps(n) if few else []
    if ends:
        first = rows[: ends[-1]]
        basis, R = _by_reflections(replicate(first), largest[: len(first)], ends)
    else:
        basis, R = rows[:0], zeros_beside(rows, (0, 0))
    if len(basis) < k:
        basis, R = _by_tiles(rows, largest, basis, R)
    # A barrier, so that this is compiled alike whatever becomes of it.
    basis, R = jax.lax.optimization_barrier((basis, R))
    return basis.T, R


def continued_basis(
    block: Inexact[Array, "n k"],
    basis: Inexact[Array, "n d"] | None,
    R: Inexact[Array, "d d"] | None,
) -> tuple[Inexact[Array, "n k"], Inexact[Array, "k k"]]:
    """As `growing_basis`, after the factors of the first columns that a loop has found.

    `None` if there are none.
    """
    if basis is None or R is None:
        return growing_basis(block)
    k, done = block.shape[1], basis.shape[1]
    if done == k:
        return basis, R
    rows = jnp.pad(basis.T, ((0, k - done), (0, 0)))
    start = jnp.asarray(done, jnp.int32)
    more, columns = extend_at_once(rows, block[:, done:].T, start)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, more, done, 0)
    R = jnp.pad(R, ((0, k - done), (0, 0)))
    return rows.T, jnp.concatenate([R, columns], axis=1)


@inlined
def _by_reflections(
    rows: Inexact[Array, "k n"], largest: Float[Array, " k"], ends: list[int]
) -> tuple[Inexact[Array, "k n"], Inexact[Array, "k k"]]:
    """By LAPACK, in steps that double: `[Q, Y]` of the basis so far and what comes next
    has a factor `[+-Q, ...]`, whatever the rank of Y.

    The products in a step are of fixed shape: what is missing is filled up, and vectors
    of zeros, too. LAPACK leaves out columns that are 0 at the end, which the last one
    never is.
    """
    k, n = rows.shape
    filler = jnp.asarray(np.cos(np.arange(n))[None, :], rows.dtype)
    scale = power_of_two(largest).astype(rows.dtype)
    given = jnp.where((largest != 0)[:, None], rows / scale[:, None], filler)
    basis, columns = rows[:0], []
    for start, end in itertools.pairwise([0, *ends]):
        here = given[start:end]
        if len(here) == 0:
            break
        fill = jnp.broadcast_to(filler, (end - start - len(here) + 1, n))
        Q, upper = householder(jnp.concatenate([basis, here, fill]).T)
        # What was orthonormal has kept its directions.
        sign = jnp.sign(jnp.real(diagonal(upper[:start, :start])))
        sign = jnp.concatenate([sign, jnp.ones(end - start, sign.dtype)])
        upper = sign[:, None].astype(upper.dtype) * upper[:end, start:][:, : len(here)]
        columns.append(jnp.pad(upper, ((0, max(k - end, 0)), (0, 0)))[:k])
        basis = jnp.concatenate([basis, Q.T[start : start + len(here)]])
    # 0 for a vector of zeros, of which Q is the fill.
    weights = jnp.where(largest == 0, 0, scale)
    return basis, jnp.concatenate(columns, axis=1) * weights[None, :]


def _by_tiles(
    rows: Inexact[Array, "k n"],
    largest: Float[Array, " k"],
    basis: Inexact[Array, "d n"],
    R: Inexact[Array, "d d"],
) -> tuple[Inexact[Array, "k n"], Inexact[Array, "k k"]]:
    """By products, after a basis of the first vectors, of whole tiles."""
    (k, n), done = rows.shape, len(basis)
    size = tile_size(n)
    number = -(-k // size)
    if k < size:
        rows = jnp.pad(rows, ((0, size - k), (0, 0)))
    width = number * size
    last = len(rows) - size
    each = jnp.arange(size)
    largest = jnp.pad(largest, (0, width - k))

    def tile(j, carry):
        basis, R = carry
        start = j * size
        # Of the last tile the vectors before it, too: they are left as they are.
        before = start - jnp.minimum(start, last)
        here = jax.lax.dynamic_slice_in_dim(basis, start - before, size)
        given = jnp.pad(here, ((0, size), (0, 0)))
        given = jax.lax.dynamic_slice_in_dim(given, before, size)
        sizes = jax.lax.dynamic_slice_in_dim(largest, start, size)
        Q, columns = extend(basis, given, sizes, j, start + each < k, width)
        Q = jnp.pad(Q, ((size, 0), (0, 0)))
        Q = jax.lax.dynamic_slice_in_dim(Q, size - before, size)
        Q = jnp.where(each[:, None] < before, here, Q)
        basis = jax.lax.dynamic_update_slice_in_dim(basis, Q, start - before, 0)
        return basis, jax.lax.dynamic_update_slice_in_dim(R, columns, start, 1)

    carry = rows, zeros_beside(rows, (width, width))
    if done:
        carry = rows.at[:done].set(basis), carry[1].at[:done, :done].set(R)
    basis, R = jax.lax.fori_loop(done // size, number, tile, carry)
    return basis[:k], R[:k, :k]


def extend(
    basis: Inexact[Array, "k n"],
    given: Inexact[Array, "c n"],
    largest: Float[Array, " c"],
    j: Int[Array, ""] | int,
    present: Bool[Array, " c"],
    width: int,
) -> tuple[Inexact[Array, "c n"], Inexact[Array, "{width} c"]]:
    """The tile j of an orthonormal basis, of which tiles before j are given.

    `largest` are the largest entries of the given vectors, `width` is the number of
    columns of all tiles.

    **Returns:** orthonormal vectors, 0 where none is present, and the coordinates of
    the given vectors in the basis with these at tile j.
    """

    def project(X, active):
        def off_tile(i, carry):
            X, C = carry
            Q = jax.lax.dynamic_slice_in_dim(basis, i * len(X), len(X))
            inside = jnp.where(active[None, :], inner(Q.T, X.T), 0)
            X = X - combine(Q.T, inside).T
            return X, jax.lax.dynamic_update_slice_in_dim(C, inside, i * len(X), 0)

        C = zeros_beside(X, (width, len(X)))
        return jax.lax.fori_loop(0, j, off_tile, (X, C))

    number = jnp.asarray(j)
    X, C, M = _orthonormalise(given, largest, project, present, number, _by_prefix)
    columns = jax.lax.dynamic_update_slice_in_dim(C, M, j * len(given), 0)
    return X, columns


def extend_at_once(
    basis: Inexact[Array, "k n"], given: Inexact[Array, "c n"], start: Int[Array, ""]
) -> tuple[Inexact[Array, "c n"], Inexact[Array, "k c"]]:
    """Orthonormal vectors `start, ..., start + c - 1` of a basis that is 0 from there.

    As `extend`, but for any start, and faster: not the same to the last bit for another
    c or k.
    """

    def project(X, active):
        inside = jnp.where(active[None, :], inner(basis.T, X.T), 0)
        return X - combine(basis.T, inside).T, inside

    given = whole_columns(given.T).T
    present = jnp.ones(len(given), bool)
    largest = largest_entries(given.T)
    X, C, M = _orthonormalise(given, largest, project, present, start, _by_block)
    return X, jax.lax.dynamic_update_slice_in_dim(C, M, start, 0)


def counted_basis(
    block: Inexact[Array, "n k"], count: Int[Array, ""], size: int
) -> tuple[Inexact[Array, "n k"], Inexact[Array, "k k"]]:
    """As `orthonormalise`, of so many columns, known at run time; the others are 0.

    `size` columns at a time, as long as any lane of a `vmap` has more.
    """
    k = block.shape[1]
    rows = jnp.pad(block.T, ((0, -k % size), (0, 0)))

    def tile(i, carry):
        basis, R = carry
        start = i * size
        given = jax.lax.dynamic_slice_in_dim(rows, start, size)
        Q, columns = extend_at_once(basis, given, start)
        # Not what it was filled with.
        Q = jnp.where(there(count - start, size)[:, None], Q, 0)
        basis = jax.lax.dynamic_update_slice_in_dim(basis, Q, start, 0)
        return basis, jax.lax.dynamic_update_slice_in_dim(R, columns, start, 1)

    number = -(-eqxi.unvmap_max(count) // size)
    carry = jnp.zeros_like(rows), zeros_beside(rows, (len(rows), len(rows)))
    basis, R = jax.lax.fori_loop(0, number, tile, carry)
    return basis[:k].T, R[:k, :k]


def _orthonormalise(
    given: Inexact[Array, "c n"],
    largest: Float[Array, " c"],
    project: Callable[..., tuple[Inexact[Array, "c n"], Inexact[Array, "k c"]]],
    present: Bool[Array, " c"],
    number: Int[Array, ""],
    factor: Callable[..., tuple[Array, Array, Array]],
) -> tuple[Inexact[Array, "c n"], Inexact[Array, "k c"], Inexact[Array, "c c"]]:
    """Vectors orthonormal to each other and to a basis, and the coordinates C in the
    basis and M in these of the given ones.

    `project(X, active)` takes from the active vectors of X what they have in the basis,
    and returns what is left and the coordinates of what was taken. `largest` are the
    vectors' largest entries, `number` tells tiles apart. `factor(correlations, n)` is
    `_by_prefix` or `_by_block`.
    """
    scale = power_of_two(largest)
    c, n = given.shape
    dtype, eps = given.dtype, jnp.finfo(given.dtype).eps
    one = identity(c, dtype)

    def another_pass(tile):
        active = ~tile.settled

        # Signs of norm eps, for what is 0 once the rest of the basis is taken out. Others
        # each time: in a small space they may be in the span of the rest.
        fill = noise(c, n, dtype, number * _MOST_PASSES + tile.passes)
        fill = fill * (float(eps) / n**0.5)
        again = active & (tile.passes > 0)
        X = tile.X + jnp.where(again[:, None], fill, 0)
        X, C = project(X, active)
        lower, inverse, settled = _factor(X, C, n, factor)
        # Vectors that are orthonormal stay as they are.
        change = jnp.where(active[None, :], inverse.conj().T, one)
        back = jnp.where(active[None, :], lower.conj().T, one)
        return _Tile(
            combine(X.T, change).T,
            tile.C + matmul(C, tile.M),
            matmul(back, tile.M),
            tile.settled | settled,
            tile.passes + 1,
        )

    coordinates = jax.eval_shape(project, given, present)[1]
    tile = _Tile(
        given / scale[:, None].astype(dtype),
        zeros_beside(given, coordinates.shape),
        zeros_beside(given, (c, c)) + one,
        ~present,
        jnp.zeros((), jnp.int32),
    )
    tile = jax.lax.while_loop(
        lambda tile: ~jnp.all(tile.settled) & (tile.passes < _MOST_PASSES),
        another_pass,
        tile,
    )
    # 0 for a vector of zeros, of which Q is the fill.
    weights = jnp.where(largest == 0, 0, scale).astype(dtype)[None, :]
    X = jnp.where(present[:, None], tile.X, 0)
    return X, tile.C * weights, tile.M * weights


def _factor(
    X: Inexact[Array, "c n"],
    C: Inexact[Array, "k c"],
    n: int,
    factor: Callable[..., tuple[Array, Array, Array]],
) -> tuple[Inexact[Array, "c c"], Inexact[Array, "c c"], Bool[Array, " c"]]:
    r"""L and L^-1 with `X X^* = conj(L L^*)`, and which vectors `conj(L^-1) X` is
    orthonormal for, from the first up to the first that is not."""
    gram = inner(X.T, X.T)
    squares = jnp.real(diagonal(gram))
    lengths = divisor(jnp.sqrt(squares))
    unit = lengths.astype(X.dtype)
    one = identity(X.shape[0], X.dtype)
    correlations = gram / (unit[:, None] * unit[None, :])
    correlations = jnp.where(one == 1, one, correlations)
    lower, inverse, settled = factor(correlations, n)
    # Errors of products grow by what was subtracted in relation to what is left.
    exact = (jnp.sum(jnp.abs(C) ** 2, axis=0) <= 3 * squares) & (squares > 0)
    settled = _up_to_the_first_that_is_not(settled & exact)
    return lower * unit[:, None], inverse / unit[None, :], settled


def _by_prefix(correlations: Inexact[Array, "c c"], n: int):
    """L, L^-1, and which vectors are settled, each decided from those before it.

    As `factorise` does: where the Gram matrix is singular to rounding a multiple of the
    identity is added, from the first vector on that needs it.
    """
    c, eps = correlations.shape[0], float(jnp.finfo(correlations.dtype).eps)
    one = identity(c, correlations.dtype)
    shift = c * (c + 32 + n**0.25) * eps
    _, inverse = cholesky(correlations + shift * one)
    regular = 4 * c * shift * _squares_of_rows(inverse) <= 1
    regular = _up_to_the_first_that_is_not(regular)
    shifts = jnp.where(regular, 0, shift).astype(correlations.dtype)
    lower, inverse = cholesky(correlations + shifts[:, None] * one)
    # Errors of products are about eps; they grow by the inverse.
    return lower, inverse, regular & (_squares_of_rows(inverse) <= 4)


def _by_block(correlations: Inexact[Array, "c c"], n: int):
    """As `_by_prefix`, decided for all vectors at once: sharper for many."""
    factor = factorise(correlations, n)
    settled = jnp.broadcast_to(factor.settled, correlations.shape[:1])
    return factor.lower, factor.inverse, settled


def _squares_of_rows(inverse: Inexact[Array, "c c"]) -> Float[Array, " c"]:
    return jnp.sum(jnp.abs(inverse) ** 2, axis=1)


def _up_to_the_first_that_is_not(good: Bool[Array, " c"]) -> Bool[Array, " c"]:
    number = jnp.arange(len(good))
    return jnp.all(good[None, :] | (number[None, :] > number[:, None]), axis=1)
