r"""Krylov spaces: block Lanczos, Lanczos of many vectors at once, Arnoldi.

Pure kernels. `product` maps an (n, m) block to the products of its columns. Every new
block is orthogonalised against all before it, as often as it takes for a basis that is
orthonormal to rounding in any precision, and a projected matrix is what it says:
`T = K^* A K`.

Breakdown is a success. Where a Krylov space stops growing, the residual is rounding;
`orthonormalise` makes a direction of it, or fills one in, that is orthogonal to the
space. The projected matrix stays a projection of A, and does not couple the space to
that direction. Nothing is divided by the residual.

| name | shape | |
|---|---|---|
| K | (n, k), k = m s | basis, the block of step j in columns `j m, ..., (j + 1) m - 1` |
| T | (k, k) | projected matrix, block tridiagonal up to rounding |
| start | (k, m) | coordinates of the m starting vectors |
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from ._orthogonal import (
    column_norms,
    combine,
    inner,
    largest_entry,
    largest_product,
    noise,
    orthonormalise,
)
from ._sharding import laid_out_like, replicate, whole_columns, zeros_beside
from ._small_matrices import frobenius, identity, matmul

Product = Callable[[Inexact[Array, "n m"]], Inexact[Array, "n m"]]

# Entries of a basis of which few are worth the compilation of a pass over these alone.
_LARGE = 2**20


class KrylovSpace(NamedTuple):
    """An orthonormal basis of a block Krylov space, and the operator projected to it.

    - `asymmetry`: the part of the projected matrix that a Hermitian operator would not
        have, relative to the matrix.
    - `largest_product`: the largest modulus of an entry of a product.
    """

    basis: Inexact[Array, "n k"]
    projected: Inexact[Array, "k k"]
    start: Inexact[Array, "k m"]
    asymmetry: Float[Array, ""]
    largest_product: Float[Array, ""]


class Arnoldi(NamedTuple):
    """Where a run of Arnoldi's method is: j steps of the most there could be.

    - `rows`: the basis, a vector after the other; zeros where there is none yet.
    - `columns`: of the projected matrix, those of the first j - 1 blocks.
    - `pending`: products with the last block, which make the next one.
    - `largest`: the largest modulus of an entry of a product.
    """

    rows: Inexact[Array, "k n"]
    columns: Inexact[Array, "k k"]
    pending: Inexact[Array, "m n"]
    largest: Float[Array, ""]


def arnoldi_start(start: Inexact[Array, "n m"], most: int) -> Arnoldi:
    """Before the first of at most so many steps."""
    n, m = start.shape
    k = m * most
    pending = whole_columns(start).T
    return Arnoldi(
        laid_out_like(zeros_beside(start, (k, n)), pending),
        zeros_beside(start, (k, k)),
        pending,
        jnp.zeros((), jnp.finfo(start.dtype).dtype),
    )


def arnoldi_step(
    product: Product, run: Arnoldi, j: Int[Array, ""], *, hermitian: bool
) -> Arnoldi:
    """After step `j = 0, 1, ...`, which takes m products."""
    rows, columns, pending, largest = run
    m, _ = pending.shape
    Q, H = _orthogonalise(rows, pending, j, hermitian=hermitian)
    # The column of the step before, and below it the coupling to this block. The first
    # step has none: what it writes comes last, and is zero.
    columns = jax.lax.dynamic_update_slice_in_dim(columns, H, (j - 1) * m, 1)
    coupling = jnp.where(j == 0, 0, inner(Q.T, pending.T))
    columns = jax.lax.dynamic_update_slice(columns, coupling, (j * m, (j - 1) * m))
    rows = jax.lax.dynamic_update_slice_in_dim(rows, Q, j * m, 0)
    W = laid_out_like(product(Q.T).T, pending)
    return Arnoldi(rows, columns, W, jnp.maximum(largest, largest_product(W.T)))


def arnoldi_columns(run: Arnoldi, steps: int | Int[Array, ""]) -> Inexact[Array, "k k"]:
    """The block Hessenberg matrix after so many steps; zeros beyond."""
    m, _ = run.pending.shape
    last = inner(run.rows.T, run.pending.T)
    return jax.lax.dynamic_update_slice_in_dim(run.columns, last, (steps - 1) * m, 1)


def arnoldi(
    product: Product, start: Inexact[Array, "n m"], steps: int, *, hermitian: bool
) -> tuple[Inexact[Array, "n k"], Inexact[Array, "k k"], Float[Array, ""]]:
    """`K`, the block Hessenberg matrix `K^* A K`, and the largest entry of a product.

    Right for any operator, and faster if one that is `hermitian` is said to be.
    `m * steps <= n`. Takes `m * steps` products, O(n k^2) time, and the memory of K
    and a few blocks (n, m).
    """
    run = jax.lax.fori_loop(
        0,
        steps,
        lambda j, run: arnoldi_step(product, run, j, hermitian=hermitian),
        arnoldi_start(start, steps),
    )
    return run.rows.T, arnoldi_columns(run, steps), run.largest


def _orthogonalise(
    rows: Inexact[Array, "k n"],
    block: Inexact[Array, "m n"],
    number: Int[Array, ""],
    *,
    hermitian: bool,
) -> tuple[Inexact[Array, "m n"], Inexact[Array, "k m"]]:
    """An orthonormal block, orthogonal to rows, and what it had in common with them.

    An orthonormal block that has at most half of its length in common with rows keeps
    the rest to rounding, so that a second pass is enough. One that was rounding, where
    the space doesn't grow, points anywhere, and is taken again.

    A product of a Hermitian operator has little in common with rows but the two blocks
    before it. The first pass over many rows is over these; the next one finds the rest.
    """
    k, (m, n) = rows.shape[0], block.shape
    few = hermitian and k > 4 * m and rows.size > _LARGE
    nothing = zeros_beside(block, (k, m))

    def against_all(Q):
        inside = inner(rows.T, Q.T)
        return Q - combine(rows.T, inside).T, inside

    def against_neighbours(Q):
        start = jnp.maximum(number - 2, 0) * m
        last = jax.lax.dynamic_slice_in_dim(rows, start, 2 * m)
        inside = inner(last.T, Q.T)
        rest = Q - combine(last.T, inside).T
        return rest, jax.lax.dynamic_update_slice_in_dim(nothing, inside, start, 0)

    def another_pass(state):
        Q, common, factor, _, i = state
        if few:
            rest, inside = jax.lax.cond(i == 0, against_neighbours, against_all, Q)
        else:
            rest, inside = against_all(Q)
        # Exact zeros are filled in, and by other directions for every block.
        largest = largest_entry(rest)
        rounding = jnp.where(largest == 0, 1, eps * largest).astype(block.dtype)
        Q, R = orthonormalise((rest + rounding * fill).T)
        Q = laid_out_like(Q.T, block)
        if few:
            common = common + matmul(inside, factor)
            factor = matmul(jnp.where(largest == 0, 0, R), factor)
        else:
            common = jnp.where(i == 0, inside, common)
        return Q, common, factor, frobenius(inside), i + 1

    real = jnp.finfo(block.dtype).dtype
    eps = jnp.finfo(real).eps
    fill = noise(m, n, block.dtype, number + 1)
    # What coordinates in the block of a pass are multiplied by.
    factor = laid_out_like(identity(m, block.dtype), nothing) if few else None
    Q, common, *_ = jax.lax.while_loop(
        lambda state: (state[4] < 2) | ((state[3] > 0.5) & (state[4] < 4)),
        another_pass,
        (block, nothing, factor, jnp.zeros((), real), 0),
    )
    return Q, common


def block_lanczos(
    product: Product, start: Inexact[Array, "n m"], steps: int
) -> KrylovSpace:
    """The block Krylov space of a Hermitian operator, of `steps` blocks.

    Products, time and memory as for `arnoldi`.
    """
    return krylov_space(*arnoldi(product, start, steps, hermitian=True), start)


def krylov_space(
    basis: Inexact[Array, "n k"],
    columns: Inexact[Array, "k k"],
    largest: Float[Array, ""],
    start: Inexact[Array, "n m"],
) -> KrylovSpace:
    """Of a Hermitian operator, from what `arnoldi` returns."""
    m, k = start.shape[1], columns.shape[0]
    block = jnp.arange(k) // m
    distance = block[None, :] - block[:, None]
    diagonal = jnp.where(distance == 0, columns, 0)
    above = jnp.where(distance > 0, columns, 0)
    projected = (diagonal + diagonal.conj().T) / 2 + above + above.conj().T
    # A Hermitian operator couples a block to the next one only.
    foreign = jnp.where(distance > 1, columns, 0) + (diagonal - diagonal.conj().T) / 2
    unit = largest_entry(projected)
    unit = jnp.where(unit == 0, 1, unit)
    norms = [jnp.linalg.norm(x / unit.astype(x.dtype)) for x in (foreign, projected)]
    asymmetry = norms[0] / jnp.where(norms[1] == 0, 1, norms[1])
    coordinates = inner(basis[:, :m], start)
    coordinates = jnp.pad(coordinates, ((0, k - m), (0, 0)))
    return KrylovSpace(basis, projected, coordinates, asymmetry, largest)


class KrylovSpaces(NamedTuple):
    """A Krylov space for each of m starting vectors.

    - `basis[j, i]`: vector j of the space of starting vector i. Zero where that space
        has fewer dimensions.
    - `projected`: tridiagonal matrices.
    - `norms`: of the starting vectors, which are `norms * basis[0]`.
    - `asymmetry`: the largest coefficient that a Hermitian operator would not have,
        relative to the largest norm of a product.
    """

    basis: Inexact[Array, "s m n"]
    projected: Float[Array, "m s s"]
    norms: Float[Array, " m"]
    asymmetry: Float[Array, ""]
    largest_product: Float[Array, ""]


def lanczos(product: Product, start: Inexact[Array, "n m"], steps: int) -> KrylovSpaces:
    """Lanczos from each of m vectors, independently; a product a step for all of them.

    A space that stops growing is continued by zeros, and its matrix by a multiple of
    the identity within the range of A, decoupled. O(n m s^2) time.
    """
    n, m = start.shape
    dtype = start.dtype
    real = jnp.finfo(dtype).dtype
    eps = jnp.finfo(dtype).eps
    start = replicate(start)
    norms = column_norms(start)
    unit = start.T / jnp.where(norms == 0, 1, norms)[:, None].astype(dtype)

    precision = jax.lax.Precision.HIGHEST

    def inside(basis, vectors):
        # The part of each vector in its own space.
        return jnp.einsum("jmn,mn->jm", basis.conj(), vectors, precision=precision)

    def without(basis, vectors, parts):
        return vectors - jnp.einsum("jmn,jm->mn", basis, parts, precision=precision)

    def step(j, carry):
        basis, alphas, betas, scale, foreign, largest = carry
        vectors = basis[j]
        W = replicate(product(vectors.T))
        largest = jnp.maximum(largest, largest_product(W))
        W = W.T
        parts = inside(basis, W)
        alpha = jnp.real(parts[j])
        scale = jnp.maximum(scale, column_norms(W.T))
        # A Hermitian operator couples a vector to its neighbours only, and alike.
        expected = jnp.zeros_like(alphas).at[j].set(alpha)
        coupling = jnp.where(j > 0, betas[j - 1], 0)
        expected = jnp.where(jnp.arange(steps)[:, None] == j - 1, coupling, expected)
        unexpected = jnp.max(jnp.abs(parts - expected.astype(dtype)))
        alphas = alphas.at[j].set(alpha)
        residual = without(basis, W, parts)
        residual = without(basis, residual, inside(basis, residual))
        beta = column_norms(residual.T)
        grows = beta > 10 * eps * scale
        following = residual / jnp.where(grows, beta, 1)[:, None].astype(dtype)
        following = without(basis, following, inside(basis, following))
        lengths = column_norms(following.T)
        safe = jnp.where(lengths == 0, 1, lengths)[:, None].astype(dtype)
        following = jnp.where(grows[:, None], following / safe, 0)
        # The last step writes nothing: there is no vector after it.
        basis = basis.at[j + 1].set(following, mode="drop")
        betas = betas.at[j].set(jnp.where(grows, beta, 0))
        return basis, alphas, betas, scale, jnp.maximum(foreign, unexpected), largest

    zeros = jnp.zeros((steps, m), real)
    basis = jnp.zeros((steps, m, n), dtype).at[0].set(unit)
    nothing = jnp.zeros((), real)
    carry = (basis, zeros, zeros, jnp.zeros(m, real), nothing, nothing)
    carry = jax.lax.fori_loop(0, steps, step, carry)
    basis, alphas, betas, scale, foreign, largest = carry
    size = jnp.max(scale)
    asymmetry = foreign / jnp.where(size == 0, 1, size)
    alive = jnp.cumprod(
        jnp.concatenate([jnp.ones((1, m), bool), betas[:-1] > 0]), axis=0
    )
    alphas = jnp.where(alive, alphas, alphas[:1])
    off = betas[:-1].T
    rows = jnp.arange(steps - 1)
    projected = jnp.zeros((m, steps, steps), real)
    projected = projected.at[:, rows, rows + 1].set(off)
    projected = projected.at[:, rows + 1, rows].set(off)
    diagonal = jnp.arange(steps)
    projected = projected.at[:, diagonal, diagonal].set(alphas.T)
    return KrylovSpaces(basis, projected, norms, asymmetry, largest)
