"""Dense factorisations of tall and of small blocks.

LAPACK calls batched by `vmap` can block each other's threads in XLA's CPU scheduler, so
that a program hangs. Here a batch is a sequence of calls; the products around them stay
batched.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Inexact


@sequential_vmap
def qr(block: Inexact[Array, "n k"]) -> tuple[Array, Array]:
    """The thin QR factorisation, `Q (n, k)` and `R (k, k)`, for `k <= n`.

    By Householder reflections: `Q` is orthonormal to rounding for blocks of any rank.
    """
    q, r = jnp.linalg.qr(block)
    return q, r


@sequential_vmap
def eigh(
    matrix: Inexact[Array, "k k"],
) -> tuple[Float[Array, " k"], Inexact[Array, "k k"]]:
    """Eigenvalues, ascending, and eigenvectors of a Hermitian matrix."""
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors


@sequential_vmap
def svd(matrix: Inexact[Array, "k k"]) -> tuple[Array, Float[Array, " k"], Array]:
    """`U`, singular values, descending, and `V^*`."""
    u, values, vh = jnp.linalg.svd(matrix)
    return u, values, vh


@sequential_vmap
def inverse_conjugate_transpose(upper: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
    """`R^-*` of an upper triangular `R` with a nonzero diagonal."""
    identity = jnp.eye(upper.shape[0], dtype=upper.dtype)
    return jax.scipy.linalg.solve_triangular(upper, identity, trans="C")


def inner(x: Inexact[Array, "n k"], y: Inexact[Array, "n m"]) -> Inexact[Array, "k m"]:
    """`X^* Y` in full precision."""
    return matmul(x.conj().T, y)


def matmul(x: Inexact[Array, "n k"], y: Inexact[Array, "k m"]) -> Inexact[Array, "n m"]:
    """`X Y` in full precision, also where an accelerator's default is lower."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def column_dots(
    x: Inexact[Array, "n k"], y: Inexact[Array, "n k"]
) -> Inexact[Array, " k"]:
    """`x_i^* y_i` for every column i."""
    return jnp.sum(x.conj() * y, axis=0)


def column_norms(x: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """`|x_i|` for every column i, safe against under- and overflow of squares."""
    scale = power_of_two_scale(x)
    return scale * jnp.linalg.norm(x / scale.astype(x.dtype), axis=0)


def power_of_two_scale(block: Inexact[Array, "n k"]) -> Float[Array, ""]:
    """A power of two within a factor 2 below the largest entry; 1 for a zero block.

    Dividing by it is exact, and squares neither overflow nor underflow afterwards.
    """
    largest = jnp.max(jnp.abs(block))
    _, exponent = jnp.frexp(largest)
    scale = jnp.ldexp(jnp.ones_like(largest), exponent - 1)
    scale = jnp.where(largest == 0, jnp.ones_like(largest), scale)
    return jnp.where(jnp.isfinite(largest), scale, largest)
