r"""Krylov spaces: Arnoldi, block Lanczos, and Lanczos for many vectors at once.

`product(block)` is A times an (n, m) block. We orthogonalise every new block against
all earlier blocks, so that `T = K^* A K` holds up to rounding.

If a Krylov space stops growing, T is exact on it, and residuals are at rounding level.
`extend` then returns any orthogonal direction, and T has zeros between it and the rest.

| name | shape | |
|---|---|---|
| K | (n, k), k = m s | basis; step j fills columns `j m, ..., (j + 1) m - 1` |
| H | (k, k + m) | factor, `[Omega, A K] = K H` up to a part orthogonal to K |
| T | (k, k) | projected matrix, block tridiagonal up to rounding |
| omega | (k, m) | coordinates of the m starting vectors in Omega |
| R | (m, m) | triangular factor of `(I - K K^*) A K_s = Z R`, with the last block `K_s`; it fixes Z up to a unitary factor |
| E | (k + m, k + m) | the smallest matrix, in the Loewner order, that `[K, Z]^* A [K, Z]` can be (see `smallest_extension`) |
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
    """Arnoldi's method after some steps.

    Loops copy what they carry if its memory layout isn't row by row, so we carry rows.
    """

    rows: Inexact[Array, "k n"]  # K^T; zeros beyond the steps taken
    factor: Inexact[Array, "k km"]  # H, with zeros for the last block's products
    last_rows: Inexact[Array, "m n"]  # products with the last block; first Omega^T

    @property
    def basis(self) -> Inexact[Array, "n k"]:
        return self.rows.T

    @property
    def last_products(self) -> Block:
        return self.last_rows.T


def arnoldi_start(start: Block, max_steps: int) -> Arnoldi:
    """The state before the first step, with room for `max_steps` steps."""
    (n, m), k = start.shape, start.shape[1] * max_steps
    rows = jnp.zeros((k, n), start.dtype)
    return Arnoldi(rows, jnp.zeros((k, k + m), start.dtype), start.T)


def arnoldi_step(product: Product, state: Arnoldi, j: Int[Array, ""]) -> Arnoldi:
    """The state after step `j = 0, 1, ...`, which takes m products."""
    column = j * len(state.last_rows)
    Q, R = extend(state.basis, state.last_products, column)
    factor = jax.lax.dynamic_update_slice_in_dim(state.factor, R, column, 1)
    return Arnoldi(put(state.basis, Q, column).T, factor, product(Q).T)


def arnoldi_factor(state: Arnoldi, steps: Steps) -> tuple[Array, Array]:
    """The pair of H after `steps` steps, 0 beyond them, and R."""
    basis, last_products = state.basis, state.last_products
    coefficients, column = inner(basis, last_products), steps * last_products.shape[1]
    factor = jax.lax.dynamic_update_slice_in_dim(state.factor, coefficients, column, 1)
    return factor, triangular_factor(last_products - combine(basis, coefficients))


def arnoldi_residual(
    state: Arnoldi, coordinates: Inexact[Array, "k q"], steps: Steps
) -> Inexact[Array, "n q"]:
    """The part of `A K coordinates` orthogonal to K."""
    basis, last_products = state.basis, state.last_products
    m = last_products.shape[1]
    last = jax.lax.dynamic_slice_in_dim(coordinates, m * (steps - 1), m)
    outside = combine(last_products, last)
    return outside - combine(basis, inner(basis, outside))


def arnoldi(product: Product, start: Block, steps: int) -> Arnoldi:
    """All steps, for any operator, in `m * steps <= n` products and O(n k^2) time."""
    state = arnoldi_start(start, steps)
    return fori_loop(steps, lambda j, state: arnoldi_step(product, state, j), state)


class Projected(NamedTuple):
    """A Hermitian operator, projected to a block Krylov space."""

    T: Square
    omega: Inexact[Array, "k m"]
    asymmetry: Float[Array, ""]  # Frobenius norm of the skew part, relative to T


def block_lanczos(factor: Inexact[Array, "k km"]) -> Projected:
    """Block Lanczos for a Hermitian operator, from Arnoldi's factor H."""
    m = factor.shape[1] - len(factor)
    omega, H = factor[:, :m], factor[:, m:]
    T, skew = (H + H.conj().T) / 2, (H - H.conj().T) / 2
    unit = divisor(largest_entry(T)).astype(T.dtype)
    return Projected(T, omega, frobenius(skew / unit) / divisor(frobenius(T / unit)))


def ritz_pairs(
    T: Square, count: Steps, sizes: tuple[int, ...] = ()
) -> tuple[Float[Array, " k"], Square]:
    """Eigenvalues and eigenvectors of T's leading `count x count` block.

    We read only the lower triangle. Further eigenvalues repeat the largest one, so that
    functions are finite there, and their vectors are 0. We decompose a block with the
    first of the ascending `sizes` that is enough for the whole batch, or all of T.
    """
    k = T.shape[0]

    def decompose(size, T):
        values, vectors = eigh(T[:size, :size])
        rest = k - size
        return jnp.pad(values, (0, rest), mode="edge"), jnp.pad(vectors, (0, rest))

    if isinstance(count, int):
        return decompose(count, T)
    active = jnp.arange(k, dtype=jnp.int32) < count
    # We pad with decoupled eigenvalues above the spectrum, which come last.
    padding = divisor(2 * k * largest_entry(T)).astype(T.dtype) * jnp.eye(
        k, dtype=T.dtype
    )
    padded = jnp.where(active[:, None] & active[None, :], T, padding)
    # We skip the sizes that are too small.
    branch = jnp.sum(eqxi.unvmap_max(count) > jnp.asarray(sizes, count.dtype))
    branches = [ft.partial(decompose, size) for size in (*sizes, k)]
    values, vectors = jax.lax.switch(branch, branches, padded)
    values = jnp.where(active, values, values[count - 1])
    return values, jnp.where(active[None, :], vectors, 0)


def residual_norms(
    R: Inexact[Array, "m m"], vectors: Square, steps: Steps
) -> Float[Array, " k"]:
    """`|A v_i - theta_i v_i|`, which bounds theta_i's distance to an eigenvalue."""
    return column_norms(_residuals(R, vectors, steps))


def _residuals(
    R: Inexact[Array, "m m"], vectors: Square, steps: Steps
) -> Inexact[Array, "m k"]:
    """Residuals for Ritz pairs, in coordinates of the next block Z."""
    last_rows = jax.lax.dynamic_slice_in_dim(vectors, len(R) * (steps - 1), len(R), 0)
    return matmul(R, last_rows)


def smallest_extension(
    T: Square,
    R: Inexact[Array, "m m"],
    pairs: tuple[Float[Array, " k"], Square],
    lower: Float[Array, ""],
    steps: Steps,
) -> Inexact[Array, "km km"]:
    r"""The block Gauss-Radau matrix E, from T, its Ritz pairs and R.

        E = [ T   C^*                                        ]
            [ C   lower I + C (T - lower I)^-1 C^*           ],     C = [0 ... 0 R].

    We fill E's lower triangle. Rows and columns beyond the steps taken are 0.

    We continue E by `lower I` outside `[K, Z]`. If no eigenvalue of A is below `lower`,
    `A - E` is a semidefinite Schur complement of `A - lower I`, padded with zeros. If f
    is operator monotone on `(lower, oo)`, f is also operator concave there (Hansen and
    Pedersen, doi:10.1112/S0024609303002200), and

        f(E)[K, K] <= K^* f(A) K <= f(T)

    for any basis Z: the leading k x k block `f(E)[K, K]` depends on `R^* R` alone. See
    Golub and Meurant (2010), doi:10.1515/9781400833889; for blocks Zimmerling, Druskin
    and Simoncini, doi:10.1007/s10915-025-02799-z. We use a pseudo-inverse, because Ritz
    values may equal `lower` up to rounding.
    """
    values, vectors = pairs
    m = R.shape[0]
    residuals = _residuals(R, vectors, steps)
    distance = values - lower
    is_zero = distance <= 10 * jnp.finfo(T.dtype).eps * largest_entry(values)
    inverse = jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, distance)).astype(T.dtype)
    lower_right = matmul(residuals * inverse[None, :], residuals.conj().T)
    lower_right = lower_right + lower.astype(T.dtype) * jnp.eye(m, dtype=T.dtype)
    E, order = jnp.pad(T, (0, m)), m * steps
    E = jax.lax.dynamic_update_slice(E, R, (order, order - m))
    return jax.lax.dynamic_update_slice(E, lower_right, (order, order))


class RitzPairs(eqx.Module):
    """Ritz pairs from one or more Krylov spaces, for a Hermitian operator.

    `probes` holds coordinates of the starting vectors in the Ritz vectors `V = K S`,
    divided by `sqrt(m)`, so that `D = probes probes^*` has `E[V D V^*] = I`.
    """

    basis: Inexact[Array, "n p"]  # K
    values: Float[Array, " p"]
    vectors: Inexact[Array, "p p"]  # S
    probes: Inexact[Array, "p m"]

    @property
    def ritz_vectors(self) -> Inexact[Array, "n p"]:
        return combine(self.basis, self.vectors)


class KrylovSpaces(NamedTuple):
    """A Krylov space for each of m starting vectors.

    `basis[i, j]` is vector j in space i, or 0 if the space has fewer dimensions.
    `asymmetry` is the largest modulus in the difference between `K^* A K` and the
    tridiagonal matrix, relative to the largest product norm.
    """

    basis: Inexact[Array, "m s n"]
    projected: Float[Array, "m s s"]  # tridiagonal matrices
    following: Float[Array, " m"]  # off-diagonal entry from a next step
    norms: Float[Array, " m"]  # the starting vectors are `norms * basis[0]`
    asymmetry: Float[Array, ""]

    def ritz_pairs(self) -> RitzPairs:
        """Pairs from all spaces. Pair r from starting vector i has index `i s + r`."""
        (m, steps, n), dtype = self.basis.shape, self.basis.dtype
        values, vectors = jax.vmap(eigh)(self.projected)
        is_own = jnp.eye(m, dtype=bool)
        first = vectors[:, 0, :] * (self.norms / jnp.sqrt(1.0 * m))[:, None]
        probes = jnp.where(is_own[:, None, :], first[:, :, None], 0)
        S = jnp.where(is_own[:, None, :, None], vectors[:, :, None, :], 0)
        p, values = m * steps, values.reshape(-1)
        S, probes = (x.reshape(p, -1).astype(dtype) for x in (S, probes))
        return RitzPairs(self.basis.reshape(p, n).T, values, S, probes)


def lanczos(product: Product, start: Block, steps: int) -> KrylovSpaces:
    """Lanczos from m vectors, independently, with one block product per step.

    If a space stops growing, we continue its basis with zeros, and its matrix with a
    diagonal entry from A's numerical range, repeated. O(n m s^2) time.
    """
    n, m = start.shape
    dtype, real = start.dtype, jnp.finfo(start.dtype).dtype
    einsum = ft.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def normalised(vectors, lengths):
        return vectors / divisor(lengths)[:, None].astype(dtype)

    def coordinates(basis, vectors):
        # We project each vector onto its own space.
        return einsum("mjn,mn->mj", basis.conj(), vectors)

    def orthogonalise(basis, vectors):
        return vectors - einsum("mjn,mj->mn", basis, coordinates(basis, vectors))

    def step(j, carry):
        basis, T, alive, largest_norms, deviation, _ = carry
        W = product(basis[:, j].T).T
        coefficients = coordinates(basis, W)
        alpha = jnp.where(alive, jnp.real(coefficients[:, j]), T[:, 0, 0])
        T = T.at[:, j, j].set(alpha)
        largest_norms = jnp.maximum(largest_norms, column_norms(W.T))
        # A Hermitian operator couples neighbours only, with a symmetric matrix.
        difference = jnp.abs(coefficients - T[:, :, j].astype(dtype))
        largest = jnp.max(jnp.where(alive[:, None], difference, 0))
        deviation = jnp.maximum(deviation, largest)
        residual = orthogonalise(basis, orthogonalise(basis, W))
        beta = column_norms(residual.T)
        alive = beta > 10 * jnp.finfo(dtype).eps * largest_norms
        beta = jnp.where(alive, beta, 0)
        next_vectors = orthogonalise(basis, normalised(residual, beta))
        next_vectors = normalised(next_vectors, column_norms(next_vectors.T))
        next_vectors = jnp.where(alive[:, None], next_vectors, 0)
        # The last step has no next vector, so we drop these writes.
        basis = basis.at[:, j + 1].set(next_vectors, mode="drop")
        T = T.at[:, j, j + 1].set(beta, mode="drop")
        T = T.at[:, j + 1, j].set(beta, mode="drop")
        return basis, T, alive, largest_norms, deviation, beta

    norms = column_norms(start)
    basis = jnp.zeros((m, steps, n), dtype).at[:, 0].set(normalised(start.T, norms))
    T, zeros = jnp.zeros((m, steps, steps), real), jnp.zeros(m, real)
    carry = (basis, T, jnp.ones(m, bool), zeros, jnp.zeros((), real), zeros)
    basis, T, _, largest_norms, deviation, beta = fori_loop(steps, step, carry)
    asymmetry = deviation / divisor(jnp.max(largest_norms))
    return KrylovSpaces(basis, T, beta, norms, asymmetry)
