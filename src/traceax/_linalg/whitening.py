r"""The preconditioner of a Nystrom approximation and noise: `M^* M = (F F^* + N)^-1`."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Inexact, Int

from .._results import RESULTS
from .dense import (
    cholesky,
    combine,
    frobenius,
    inner,
    inverse_conjugate_transpose,
    matmul,
    squares,
)
from .pivoted_cholesky import rounding_of

Block = Inexact[Array, "n k"]

# Added to the diagonal of K'[S, S], in units of the noise.
JITTER = 1e-6
# A pivot is left out of which those before it leave less, in units of the noise.
_LEAST = 1e-4


class Preconditioner(eqx.Module):
    r"""Abstract base class of preconditioners M of `A = K + N`, `M A M^*` being near I.

    ```python
    class Scaling(traceax.Preconditioner):  # by a diagonal near that of A
        diagonal: jax.Array
        lower: None = None

        def apply(self, block):
            return block / jnp.sqrt(self.diagonal)[:, None]

        apply_adjoint = apply

        @property
        def logdet(self):
            return jnp.sum(jnp.log(self.diagonal))
    ```

    Of `log det A = logdet + log det (M A M^*)` the second term is estimated, of M as it is: a
    poor M costs products, not accuracy. Arrays of M that depend on what is differentiated
    have a part in derivatives, which are right whether they do or are held fixed.

    **Attributes:**

    - `logdet`: the log-determinant of `(M^* M)^-1`, which A is like, a real scalar.
    - `lower`: a number that no eigenvalue of `M A M^*` is below, or `None`: then nothing is
        proven of brackets.
    """

    logdet: eqx.AbstractVar[Float[Array, ""]]
    lower: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def apply(self, block: Block) -> Array:
        """`M V` of a block `(n, k)`, linear, of the same shape and dtype."""

    @abc.abstractmethod
    def apply_adjoint(self, block: Block) -> Array:
        """`M^* V`."""

    def inside(self, block: Block) -> tuple[Array, Array] | None:
        """`Q^* V` and `tr Q Q^*`, of a Q of few columns along which M makes A to be I: a
        control variate. Optional."""
        return None

    @property
    def _magnitude(self) -> Float[Array, ""] | None:
        """Magnitude of the terms that cancel in a product with `M A M^*`. Optional."""
        return None

    def _verdict(self, n: int) -> tuple[dict[str, Array], list[tuple[Array, RESULTS]]]:
        """Entries of `stats`, and reasons to refuse a result, for n unknowns. Optional."""
        return {}, []

    def sandwich(
        self, product: Callable[[Block], Array], noise: Any, block: Block
    ) -> Array:
        """`M (K + N) M^* V`, given products with K. Optional."""
        inner = self.apply_adjoint(block)
        noise = noise[:, None].astype(block.dtype)
        return self.apply(product(inner) + noise * inner)


class Whitening(Preconditioner):
    r"""`P = F F^* + N`, as M with `M^* M = P^-1`: `M = W N^-1/2`, `W = I - Q X Q^*`.

    `F F^*` is the Nystrom approximation of K from its columns S, which is at most K, so
    that no eigenvalue of `M (K + N) M^*` is below 1. Differentiable in the columns and the
    noise, for fixed pivots.
    """

    basis: Inexact[Array, "n r"]  # Q = basis root, Q Q^* = I - N^1/2 P^-1 N^1/2
    root: Inexact[Array, "r r"]
    core: Inexact[Array, "r r"]  # root X root^*
    scale: Float[Array, " n"]  # N^-1/2
    logdet: Float[Array, ""]  # log det P
    # |F F^*|_F / sqrt(n) beside the noise. Rounding errors of products with M (K + N) M^* are
    # eps times as large.
    size: Float[Array, ""]
    trace_inside: Float[Array, ""]  # tr Q Q^*, at most the number of columns
    num_columns: Int[Array, ""]  # how many pivots take part
    trace: Float[Array, ""]  # tr N^-1 K
    residual_trace: Float[Array, ""]  # tr N^-1 (K - F F^*)
    semidefinite: Bool[Array, ""]  # whether the diagonal of K, K[S, S], residuals are

    @property
    def lower(self) -> Float[Array, ""]:
        return jnp.ones_like(self.logdet)

    @property
    def _magnitude(self):
        return self.size

    def _verdict(self, n):
        residual = jax.lax.stop_gradient(self.residual_trace)
        failures = [
            (~self.semidefinite, RESULTS.not_semidefinite),
            (~jnp.isfinite(residual), RESULTS.nonfinite),
        ]
        return {"num_columns": self.num_columns, "residual": residual / n}, failures

    def rotate(self, block: Block) -> Array:  # W V
        return block - combine(self.basis, matmul(self.core, inner(self.basis, block)))

    def rotate_back(self, block: Block) -> Array:  # W^* V
        small = matmul(self.core.conj().T, inner(self.basis, block))
        return block - combine(self.basis, small)

    def divide(self, block: Block) -> Array:  # N^-1/2 V
        return block * self.scale[:, None].astype(block.dtype)

    def apply(self, block: Block) -> Array:  # M V
        return self.rotate(self.divide(block))

    def apply_adjoint(self, block: Block) -> Array:  # M^* V
        return self.divide(self.rotate_back(block))

    def sandwich(self, product, noise, block):
        inner = self.rotate_back(block)
        return self.rotate(self.divide(product(self.divide(inner))) + inner)

    def inside(self, block):
        r"""`Q^* V`, how much of vectors lies where columns are.

        Any positive matrix of known trace will do that is large where `log(M A M^*)` is
        small. `Q Q^*` needs no basis of the range of F, which rounding knows badly, and
        gains as much as its projector (4 kernels, n = 800, 250 columns, 12 runs: errors
        equal to 4 %).
        """
        if self.basis.shape[1] == 0:
            return None
        found = matmul(self.root.conj().T, inner(self.basis, block))
        return found, self.trace_inside


def whiten(
    columns: Inexact[Array, "n r"],
    diagonal: Float[Array, " n"],
    pivots: Int[Array, " r"],
    noise: Float[Array, " n"],
    jitter: float | Float[Array, ""] = JITTER,
) -> Whitening:
    r"""The preconditioner of columns of K, its diagonal, pivots and the noise.

    With `[F; I] = [Q; Q2] R`, R upper triangular with a positive diagonal, the compact WY
    form of the orthogonal complement is `W = I - Q X Q^*` with `X = (I + Q2)^-1`: `I + Q2`
    is triangular, with a diagonal above 1. F is that of `N^-1/2 K N^-1/2`.

    R is found in two steps, as `I` is far below the rounding errors of `F^* F` where the
    noise is small: `R = R2 R1`, R1 from `F^* F` with a shift above these, and R2 from the
    Gram matrix of `[F; I] R1^-1`, which is far from singular. R1 is held fixed: any matrix
    would do, so that derivatives are those of R2 alone. M and log det P are those of one F,
    to rounding, whatever the errors of this F are.

    Pivots of -1, wherever they are, have columns of 0 and the identity in all factors; so
    have those of which the ones before leave little beside the noise, or what rounding
    hides: held for other hyper-parameters, they would make `K[S, S]` singular.
    """
    r, dtype = columns.shape[1], columns.dtype
    eps = jnp.finfo(dtype).eps
    one = jnp.eye(r, dtype=dtype)
    given = pivots >= 0
    S = jnp.where(given, pivots, 0)
    scale = jax.lax.rsqrt(noise)
    columns = columns * (scale[:, None] * scale[S][None, :]).astype(dtype)
    diagonal = jax.lax.stop_gradient(diagonal * scale**2)
    block = (columns[S] + columns[S].conj().T) / 2

    def regular(active):
        # Errors of sums over columns, above those of a Cholesky factorisation.
        units = (jnp.sum(active) + 32).astype(scale.dtype) * eps
        added = jnp.where(active, jnp.maximum(jitter, units * jnp.abs(diagonal[S])), 0)
        H = jnp.where(active[:, None] & active[None, :], block, one)
        return H + jnp.diag(added).astype(dtype), added, units

    H, added, _ = regular(given)
    lower, _ = cholesky(jax.lax.stop_gradient(H))
    left = squares(jnp.diagonal(lower)) - added
    # Of a pivot that is there twice as much is left as is added. NaN stays.
    active = given & ~(left <= jnp.maximum(_LEAST, 2 * added))
    num_columns = jnp.sum(active, dtype=jnp.int32)
    columns = jnp.where(active[None, :], columns, 0)
    H, _, units = regular(active)
    _, inverse = _cholesky(H)
    F = combine(columns, inverse.conj().T)

    frozen = jax.lax.stop_gradient(F)
    gram = inner(frozen, frozen) + one
    size = frobenius(gram)
    shift = units * size
    lower1, inverse1 = cholesky(gram + shift.astype(dtype) * one)
    lower1, inverse1 = jax.lax.stop_gradient((lower1, inverse1))

    basis = combine(F, inverse1.conj().T)
    inverse_gram = matmul(inverse1, inverse1.conj().T)
    lower2, inverse2 = _cholesky(inner(basis, basis) + inverse_gram)
    # `R2^-1 X R2^-*`, as `R2^-1 (I + Q2)^-1 = (L2^* + R1^-1)^-1` for `R2 = L2^*`.
    core = matmul(_lower_inverse(lower2 + inverse1).conj().T, inverse2)
    Q2 = matmul(inverse2, inverse1)  # its adjoint

    pivots_left = (jnp.diagonal(lower1) * jnp.diagonal(lower2)).real
    residual = diagonal - jnp.sum(squares(frozen), axis=1)
    # NaN is what the factorisation of a matrix makes that isn't definite.
    definite = jnp.all(residual >= -rounding_of(diagonal).negative)
    finite = jnp.isfinite(jnp.sum(squares(columns)) + jnp.sum(diagonal**2))
    return Whitening(  # pyright: ignore
        basis,
        inverse2.conj().T,
        core,
        scale,
        2 * jnp.sum(jnp.log(pivots_left)) + jnp.sum(jnp.log(noise)),
        size / len(F) ** 0.5,
        jax.lax.stop_gradient(r - jnp.sum(squares(Q2))),
        num_columns,
        jnp.sum(diagonal),
        jnp.sum(jnp.maximum(residual, 0)),
        definite | ~finite,
    )


def scale_only(noise: Float[Array, " n"], dtype: DTypeLike) -> Whitening:
    """The preconditioner of no columns, `N` itself."""
    zero, empty = jnp.zeros((), noise.dtype), jnp.zeros((0, 0), dtype)
    basis, one = jnp.zeros((0, len(noise)), dtype).T, jnp.ones_like(zero)
    scale, logdet, count = jax.lax.rsqrt(noise), jnp.sum(jnp.log(noise)), jnp.int32(0)
    of_noise = basis, empty, empty, scale, logdet, one
    others = zero, count, zero, zero, jnp.array(True)
    return Whitening(*of_noise, *others)  # pyright: ignore


@jax.custom_jvp
def _cholesky(hermitian: Inexact[Array, "r r"]) -> tuple[Array, Array]:
    """`L` and `L^-1`, differentiable: one lane at a time has no derivative."""
    return cholesky(hermitian)


@_cholesky.defjvp
def _cholesky_jvp(primals, tangents):
    lower, inverse = _cholesky(*primals)
    inside = matmul(matmul(inverse, tangents[0]), inverse.conj().T)
    r, dtype = len(inside), inside.dtype
    inside = inside * (jnp.tri(r, dtype=dtype) - jnp.eye(r, dtype=dtype) / 2)
    return (lower, inverse), (matmul(lower, inside), -matmul(inside, inverse))


@jax.custom_jvp
def _lower_inverse(lower: Inexact[Array, "r r"]) -> Inexact[Array, "r r"]:
    """`L^-1`, differentiable."""
    return inverse_conjugate_transpose(lower.conj().T)


@_lower_inverse.defjvp
def _lower_inverse_jvp(primals, tangents):
    inverse = _lower_inverse(*primals)
    return inverse, -matmul(matmul(inverse, tangents[0]), inverse)
