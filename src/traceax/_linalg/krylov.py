r"""Krylov spaces: Arnoldi, block Lanczos, Lanczos of many vectors at once.

`product` maps an (n, m) block to the products of its columns. Every new block is
orthogonalised against all before it, to rounding, and `T = K^* A K` is what it says.

Breakdown is a success. Where a Krylov space stops growing, the residual is rounding, of
which `extend` makes a direction that is orthogonal to the space. The projected matrix stays
a projection of A, and does not couple the space to that direction.

| name | shape | |
|---|---|---|
| K | (n, k), k = m s | basis, the block of step j in columns `j m, ..., (j + 1) m - 1` |
| H | (k, k + m) | factor, `[Omega, A K] = K H` up to what is orthogonal to K |
| T | (k, k) | projected matrix, block tridiagonal up to rounding |
| omega | (k, m) | coordinates of the m starting vectors, the columns of Omega |
| R | (m, m) | coupling to a next block Z, `Z R = (I - K K^*) A K_s`, up to a rotation of Z |
| E | (k + m, k + m) | the smallest matrix that A can be on `[K, Z]` (see `smallest_extension`) |
"""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from .dense import (
    column_norms,
    combine,
    divisor,
    eigh,
    extend,
    frobenius,
    inner,
    largest_entry,
    matmul,
    put,
    triangular_factor,
)
from .types import fori_loop

Block = Inexact[Array, "n m"]
Square = Inexact[Array, "k k"]
Steps = int | Int[Array, ""]

Product = Callable[[Block], Block]


class Arnoldi(NamedTuple):
    """A run of Arnoldi's method, of which some steps are done."""

    basis: Inexact[Array, "n k"]  # K; zeros where there is none yet
    factor: Inexact[Array, "k km"]  # H, but for the products with the last block
    pending: Block  # these products, which make the next block


def arnoldi_start(start: Block, most: int) -> Arnoldi:
    """Before the first of at most so many steps."""
    (n, m), k = start.shape, start.shape[1] * most
    basis = jnp.zeros((k, n), start.dtype).T
    return Arnoldi(basis, jnp.zeros((k, k + m), start.dtype), start)


def arnoldi_step(product: Product, run: Arnoldi, j: Int[Array, ""]) -> Arnoldi:
    """After step `j = 0, 1, ...`, of m products."""
    basis, factor, pending = run
    start = j * pending.shape[1]
    Q, R = extend(basis, pending, start)
    factor = jax.lax.dynamic_update_slice_in_dim(factor, R, start, 1)
    return Arnoldi(put(basis, Q, start), factor, product(Q))


def arnoldi_factor(run: Arnoldi, steps: Steps) -> tuple[Array, Array]:
    """H after so many steps, zeros beyond; and R."""
    basis, factor, pending = run
    last, start = inner(basis, pending), steps * pending.shape[1]
    factor = jax.lax.dynamic_update_slice_in_dim(factor, last, start, 1)
    return factor, triangular_factor(pending - combine(basis, last))


def arnoldi(product: Product, start: Block, steps: int) -> tuple[Array, Array, Array]:
    """K, H and R of any operator, in `m * steps <= n` products and O(n k^2) time."""
    run = arnoldi_start(start, steps)
    run = fori_loop(steps, lambda j, run: arnoldi_step(product, run, j), run)
    return run.basis, *arnoldi_factor(run, steps)


class Projected(NamedTuple):
    """A Hermitian operator in coordinates of a block Krylov space."""

    T: Square
    omega: Inexact[Array, "k m"]
    asymmetry: Float[Array, ""]  # of the skew-Hermitian part, relative to T


def block_lanczos(factor: Inexact[Array, "k km"]) -> Projected:
    """Block Lanczos: what Arnoldi's factor is of a Hermitian operator."""
    m = factor.shape[1] - len(factor)
    omega, H = factor[:, :m], factor[:, m:]
    T, skew = (H + H.conj().T) / 2, (H - H.conj().T) / 2
    unit = divisor(largest_entry(T)).astype(T.dtype)
    return Projected(T, omega, frobenius(skew / unit) / divisor(frobenius(T / unit)))


def ritz_pairs(
    T: Square, count: Steps, sizes: tuple[int, ...] = ()
) -> tuple[Float[Array, " k"], Square]:
    """Eigenvalues and eigenvectors of the leading block of order `count` of T.

    Only the lower triangle of T is read. Eigenvalues beyond `count` are copies of the
    largest one, at which functions are finite, and their vectors are 0. The smallest of the
    ascending `sizes` that is enough, in all lanes of a `vmap`, is decomposed, or all of T.
    """
    k = T.shape[0]

    def of_size(size, T):
        values, vectors = eigh(T[:size, :size])
        more = k - size
        return jnp.pad(values, (0, more), mode="edge"), jnp.pad(vectors, (0, more))

    if isinstance(count, int):
        return of_size(count, T)
    active = jnp.arange(k, dtype=jnp.int32) < count
    # Decoupled, and above all that there is: the ones beyond come last.
    above = divisor(2 * k * largest_entry(T)).astype(T.dtype) * jnp.eye(
        k, dtype=T.dtype
    )
    filled = jnp.where(active[:, None] & active[None, :], T, above)
    # How many of the sizes are too small.
    which = jnp.sum(eqxi.unvmap_max(count) > jnp.asarray(sizes, count.dtype))
    branches = [ft.partial(of_size, size) for size in (*sizes, k)]
    values, vectors = jax.lax.switch(which, branches, filled)
    values = jnp.where(active, values, values[count - 1])
    return values, jnp.where(active[None, :], vectors, 0)


def residual_norms(
    R: Inexact[Array, "m m"], vectors: Square, steps: Steps
) -> Float[Array, " k"]:
    """`|A v_i - theta_i v_i|` of the Ritz pairs: an eigenvalue is that close to theta_i."""
    return column_norms(_residuals(R, vectors, steps))


def _residuals(
    R: Inexact[Array, "m m"], vectors: Square, steps: Steps
) -> Inexact[Array, "m k"]:
    """Residuals of the Ritz pairs, as coordinates in the next block Z."""
    last = jax.lax.dynamic_slice_in_dim(vectors, len(R) * (steps - 1), len(R), 0)
    return matmul(R, last)


def smallest_extension(
    T: Square,
    R: Inexact[Array, "m m"],
    pairs: tuple[Float[Array, " k"], Square],
    lower: Float[Array, ""],
    steps: Steps,
) -> Inexact[Array, "km km"]:
    r"""E: block Gauss-Radau, given R, and the Ritz pairs of T.

        E = [ T   C^*                                        ]
            [ C   lower I + C (T - lower I)^-1 C^*           ],     C = [0 ... 0 R].

    The lower triangle of E is filled. Rows and columns beyond the steps taken are 0.

    With no eigenvalue of A below `lower`, and E continued by `lower I` outside of `[K, Z]`,
    `A - E` is 0 but for a Schur complement of `A - lower I`, which is semidefinite. So for
    f operator monotone, thus concave (Hansen and Pedersen, doi:10.1112/S0024609303002200),

        f(E)[K, K] <= K^* f(A) K <= f(T),

    whatever basis Z is: f(E)[K, K] depends on `R^* R` alone. Golub and Meurant (2010),
    doi:10.1515/9781400833889; for blocks Zimmerling, Druskin and Simoncini,
    doi:10.1007/s10915-025-02799-z. The inverse is a pseudo-inverse: Ritz values may be
    `lower` up to rounding.
    """
    values, vectors = pairs
    m = R.shape[0]
    inside = _residuals(R, vectors, steps)
    distance = values - lower
    found = distance <= 10 * jnp.finfo(T.dtype).eps * largest_entry(values)
    inverse = jnp.where(found, 0, 1 / jnp.where(found, 1, distance)).astype(T.dtype)
    corner = matmul(inside * inverse[None, :], inside.conj().T)
    corner = corner + lower.astype(T.dtype) * jnp.eye(m, dtype=T.dtype)
    E, row = jnp.pad(T, (0, m)), m * steps
    E = jax.lax.dynamic_update_slice(E, R, (row, row - m))
    return jax.lax.dynamic_update_slice(E, corner, (row, row))


class RitzPairs(eqx.Module):
    """Ritz pairs of one or more Krylov spaces of a Hermitian operator.

    `probes` are Ritz coordinates of the starting vectors, scaled so that
    `D = probes probes^*` has `E[V D V^*] = I`.
    """

    basis: Inexact[Array, "n p"]  # K
    values: Float[Array, " p"]
    vectors: Inexact[Array, "p p"]  # S; the Ritz vectors are V = K S
    probes: Inexact[Array, "p m"]

    @property
    def ritz_vectors(self) -> Inexact[Array, "n p"]:
        return combine(self.basis, self.vectors)


class KrylovSpaces(NamedTuple):
    """A Krylov space for each of m starting vectors.

    `basis[j, i]` is vector j of the space of starting vector i, 0 where that has fewer
    dimensions. `asymmetry` is the largest coefficient that a Hermitian operator would not
    have, relative to the largest norm of a product.
    """

    basis: Inexact[Array, "s m n"]
    projected: Float[Array, "m s s"]  # tridiagonal matrices
    following: Float[Array, " m"]  # their next entry beside the diagonal
    norms: Float[Array, " m"]  # of the starting vectors, `norms * basis[0]`
    asymmetry: Float[Array, ""]

    def ritz_pairs(self) -> RitzPairs:
        """Those of all spaces; pair r of starting vector i at `i s + r`."""
        (steps, m, n), dtype = self.basis.shape, self.basis.dtype
        values, vectors = jax.vmap(eigh)(self.projected)
        own = jnp.eye(m, dtype=bool)
        first = vectors[:, 0, :] * (self.norms / jnp.sqrt(1.0 * m))[:, None]
        probes = jnp.where(own[:, None, :], first[:, :, None], 0)
        # In the Krylov basis vector j of i comes at `j m + i`.
        S = jnp.where(own[None, :, :, None], vectors.swapaxes(0, 1)[:, :, None], 0)
        p, values = m * steps, values.reshape(-1)
        S, probes = (x.reshape(p, -1).astype(dtype) for x in (S, probes))
        return RitzPairs(self.basis.reshape(p, n).T, values, S, probes)


def lanczos(product: Product, start: Block, steps: int) -> KrylovSpaces:
    """Lanczos from each of m vectors, independently; a product a step for all of them.

    A space that stops growing is continued by zeros, and its matrix by a multiple of the
    identity within the range of A, decoupled. O(n m s^2) time.
    """
    n, m = start.shape
    dtype, real = start.dtype, jnp.finfo(start.dtype).dtype
    einsum = ft.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def normalised(vectors, lengths):
        return vectors / divisor(lengths)[:, None].astype(dtype)

    def inside(basis, vectors):
        # The part of each vector in its own space.
        return einsum("jmn,mn->jm", basis.conj(), vectors)

    def without(basis, vectors):
        return vectors - einsum("jmn,jm->mn", basis, inside(basis, vectors))

    def step(j, carry):
        basis, T, alive, scale, foreign, _ = carry
        W = product(basis[j].T).T
        parts = inside(basis, W)
        alpha = jnp.where(alive, jnp.real(parts[j]), T[:, 0, 0])
        T = T.at[:, j, j].set(alpha)
        scale = jnp.maximum(scale, column_norms(W.T))
        # A Hermitian operator couples a vector to its neighbours only, and alike.
        unexpected = jnp.abs(parts - T[:, :, j].T.astype(dtype))
        foreign = jnp.maximum(foreign, jnp.max(jnp.where(alive, unexpected, 0)))
        residual = without(basis, without(basis, W))
        beta = column_norms(residual.T)
        alive = beta > 10 * jnp.finfo(dtype).eps * scale
        beta = jnp.where(alive, beta, 0)
        following = without(basis, normalised(residual, beta))
        following = normalised(following, column_norms(following.T))
        following = jnp.where(alive[:, None], following, 0)
        # The last step writes nothing: there is no vector after it.
        basis = basis.at[j + 1].set(following, mode="drop")
        T = T.at[:, j, j + 1].set(beta, mode="drop")
        T = T.at[:, j + 1, j].set(beta, mode="drop")
        return basis, T, alive, scale, foreign, beta

    norms = column_norms(start)
    basis = jnp.zeros((steps, m, n), dtype).at[0].set(normalised(start.T, norms))
    T, zeros = jnp.zeros((m, steps, steps), real), jnp.zeros(m, real)
    carry = (basis, T, jnp.ones(m, bool), zeros, jnp.zeros((), real), zeros)
    basis, T, _, scale, foreign, beta = fori_loop(steps, step, carry)
    asymmetry = foreign / divisor(jnp.max(scale))
    return KrylovSpaces(basis, T, beta, norms, asymmetry)
