"""Dense linear algebra of small matrices, of the order of a number of probes.

LAPACK factorises them. Under `vmap` the calls run one after the other: batched calls can
block each other's threads in XLA's CPU scheduler, so that a program hangs. The products
around them stay batched.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Inexact


def matmul(x: Inexact[Array, "*b n k"], y: Inexact[Array, "k *m"]) -> Array:
    """`X Y` in full precision, also where an accelerator's default is lower."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def divisor(x: Inexact[Array, "*s"]) -> Inexact[Array, "*s"]:
    """`x` with 1 for 0."""
    return jnp.where(x == 0, jnp.ones_like(x), x)


def ratio(x: Float[Array, "*s"], y: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """`x / y`, and 0 where y is too small to divide by."""
    safe = y > jnp.finfo(y.dtype).tiny
    return jnp.where(safe, x / jnp.where(safe, y, 1), 0)


def frobenius(x: Inexact[Array, "k m"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.sum(squares(x)))


def squares(x: Inexact[Array, "*s"]) -> Float[Array, "*s"]:
    """`|x|^2`."""
    return jnp.real(x * x.conj())


def leading(x: Inexact[Array, "k *s"], active: Array | None) -> Inexact[Array, "k *s"]:
    """The rows that are active, with zeros for the others; `None` for all."""
    if active is None:
        return x
    return jnp.where(active.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


@sequential_vmap
def householder(block: Inexact[Array, "n k"]) -> tuple[Array, Array]:
    """The thin QR factorisation by reflections, of columns that are not near overflow."""
    return jnp.linalg.qr(block)


@sequential_vmap
def cholesky(gram: Inexact[Array, "k k"]) -> tuple[Array, Array]:
    """`L` and its inverse, with `gram = L L^*`. NaN where `gram` is not definite."""
    lower = jax.lax.linalg.cholesky(gram, symmetrize_input=False)
    eye = jnp.eye(len(gram), dtype=gram.dtype)
    return lower, jax.scipy.linalg.solve_triangular(lower, eye, lower=True)


@sequential_vmap
def eigh(matrix: Inexact[Array, "k k"]) -> tuple[Float[Array, " k"], Array]:
    """Eigenvalues, ascending, and eigenvectors of a Hermitian matrix."""
    return jnp.linalg.eigh(matrix, symmetrize_input=False)


@sequential_vmap
def svd(matrix: Inexact[Array, "k m"]) -> tuple[Array, Float[Array, " k"], Array]:
    """`U`, singular values, descending, and `V^*`; the thin factors."""
    u, values, vh = jnp.linalg.svd(matrix, full_matrices=False)
    return u, values, vh


@sequential_vmap
def inverse_conjugate_transpose(upper: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
    """`R^-*` of an upper triangular `R` with a nonzero diagonal."""
    eye = jnp.eye(upper.shape[0], dtype=upper.dtype)
    return jax.scipy.linalg.solve_triangular(upper, eye, trans="C")


def inverse_root(
    hermitian: Inexact[Array, "k k"], floor: Float[Array, ""]
) -> tuple[Inexact[Array, "k k"], Float[Array, ""]]:
    """`C` with `C^* C = H^-1`, and the least eigenvalue of H, or 0 if it is positive.

    From eigenvalues, none of which is taken for less than the floor; where H is far from
    singular from Cholesky's factors, in half of the time of XNysTrace on 100 unknowns.
    """
    _, inverse = cholesky(hermitian)
    eps = float(jnp.finfo(hermitian.dtype).eps)
    lowest = jnp.maximum(floor, eps ** (2 / 3) * frobenius(hermitian))

    def from_eigenvalues():
        values, vectors = eigh(hermitian)
        scales = 1 / jnp.sqrt(jnp.maximum(values, floor))
        least = jnp.minimum(jnp.min(values), 0)
        return scales[:, None].astype(hermitian.dtype) * vectors.conj().T, least

    # NaN where H isn't positive.
    regular = frobenius(inverse) ** 2 * lowest < 1
    cholesky_root = inverse, jnp.zeros_like(floor)
    return jax.lax.cond(regular, lambda: cholesky_root, from_eigenvalues)
