r"""Preconditioners M for K + N, with `M^* M` close to `(K + N)^-1`."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

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

# Probes without a budget.
PROBES_TO_DEPTH = 5
# We add this to the diagonal of K'[S, S], with K' = N^-1/2 K N^-1/2 and pivots S.
JITTER = 1e-6
# We drop a pivot whose remainder after earlier pivots, in K', is below this number.
_LEAST_REMAINDER = 1e-4


class Preconditioner(eqx.Module):
    r"""Abstract base class for preconditioners M, which make `M A M^*` close to I.

    ```python
    class Scaling(traceax.Preconditioner):  # by a diagonal close to A's
        diagonal: jax.Array
        lower: None = None

        def apply(self, block):
            return block / jnp.sqrt(self.diagonal)[:, None]

        apply_adjoint = apply

        @property
        def logdet(self):
            return jnp.sum(jnp.log(self.diagonal))
    ```

    Here `A = K + N`. For any M, `log det A = logdet + log det (M A M^*)`, and we
    estimate the second term. With a poor M you need more products for the same error.
    Derivatives are right whether M depends on your parameters or is held fixed.

    **Attributes:**

    - `logdet`: the log-determinant of `(M^* M)^-1`, which approximates A. Real scalar.
    - `lower`: a lower bound on the eigenvalues of `M A M^*`, or `None`. With `None`,
        brackets are not proven.
    """

    logdet: eqx.AbstractVar[Float[Array, ""]]
    lower: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def apply(self, block: Block) -> Array:
        """`M V` for a block V, `(n, k)`: linear, with V's shape and dtype."""

    @abc.abstractmethod
    def apply_adjoint(self, block: Block) -> Array:
        """`M^* V`."""

    def inside(self, block: Block) -> tuple[Array, Array] | None:
        """Optional, for a control variate: `Q^* V` and `tr Q Q^*`. Q has few columns,
        and `M A M^*` is close to I on their span."""
        return None

    def drift(self, block: Block) -> Array | None:
        r"""Optional: `M dH M^* V`, where `dM = -M dH P^-1`. If it isn't `None`, we hold M
        fixed in all products.

        Here `P = (M^* M)^-1` and `dP = dH + dH^*`. Only H carries derivatives.
        """
        return None

    @property
    def default_probes(self) -> int:
        """The number of probes without a budget. Optional."""
        return PROBES_TO_DEPTH

    @property
    def magnitude(self) -> Float[Array, ""] | None:
        """Magnitude of terms that cancel in products with `M A M^*`. Optional."""
        return None

    def num_rows(self, n: int) -> int:
        """The number of rows in `M V`, for blocks of n rows. Optional."""
        return n

    def verdict(self, n: int) -> tuple[dict[str, Array], list[tuple[Array, RESULTS]]]:
        """Optional: entries for `stats`, and pairs of a flag and its `RESULTS` item."""
        return {}, []

    def solve(self, inverse: Callable[[Block], Array], block: Block) -> Array:
        """`A^-1 V = M^* B^-1 M V` for `B = M A M^*`, from products with `B^-1`.
        Optional in subclasses."""
        return self.apply_adjoint(inverse(self.apply(block)))

    def sandwich(
        self, product: Callable[[Block], Array], noise: Any, block: Block
    ) -> Array:
        """`M (K + N) M^* V`, from products with K. Optional in subclasses."""
        adjoint = self.apply_adjoint(block)
        noise = noise[:, None].astype(block.dtype)
        return self.apply(product(adjoint) + noise * adjoint)


class Unscaled(Preconditioner):
    """`M = I`, for an operator without noise."""

    logdet: Float[Array, ""]
    lower: None = None

    def apply(self, block):
        return block

    apply_adjoint = apply


class Factors(NamedTuple):
    """Triangular factors that derivatives need, for the scaled `K' = N^-1/2 K N^-1/2`.

    `K'_SS = L L^*`, and `F = basis R^*` with `I + F^* F` close to `R R^*`.
    """

    pivots: Int[Array, " r"]
    inverse: Inexact[Array, "r r"]  # L^-1
    R: Inexact[Array, "r r"]
    inverse_R: Inexact[Array, "r r"]


class Whitening(Preconditioner):
    r"""`M = W N^-1/2` with `M^* M = P^-1`, for `P = N^1/2 (I + F F^*) N^1/2`.

    `F F^*` is the Nystrom approximation of `K' = N^-1/2 K N^-1/2` from columns S, and
    `W = I - Q X Q^*` (see `whiten`). As `F F^* <= K'`, no eigenvalue of `M (K + N) M^*`
    is below 1. For fixed pivots log det P and `drift` are differentiable in columns and
    noise. All else is fixed.
    """

    basis: Inexact[Array, "n r"]  # Q = basis root, Q Q^* = I - N^1/2 P^-1 N^1/2
    root: Inexact[Array, "r r"]
    core: Inexact[Array, "r r"]  # root X root^*, W = I - basis core basis^*
    inverse_sqrt_noise: Float[Array, " n"]  # N^-1/2
    factors: Factors
    columns: Inexact[Array, "n r"]  # K'_S, with derivatives of K_S
    noise: Float[Array, " n"]  # 1, with derivatives of N, divided by N
    logdet: Float[Array, ""]  # log det P
    # |I + F^* F|_F / sqrt(n). Products with M (K + N) M^* have errors eps times this.
    relative_norm: Float[Array, ""]
    trace_inside: Float[Array, ""]  # tr Q Q^*, at most the number of columns
    num_columns: Int[Array, ""]  # how many pivots are active
    trace: Float[Array, ""]  # tr K'
    residual_trace: Float[Array, ""]  # tr (K' - F F^*)
    semidefinite: Bool[Array, ""]  # whether diag K, K[S, S], residuals are nonnegative

    @property
    def lower(self) -> Float[Array, ""]:
        return jnp.ones_like(self.logdet)

    @property
    def magnitude(self):
        return self.relative_norm

    @property
    def default_probes(self):
        # With columns we expect few steps.
        return 2 * PROBES_TO_DEPTH if self.basis.shape[1] else PROBES_TO_DEPTH

    def verdict(self, n):
        residual = jax.lax.stop_gradient(self.residual_trace)
        failures = [
            (~self.semidefinite, RESULTS.not_semidefinite),
            (~jnp.isfinite(residual), RESULTS.nonfinite),
        ]
        return {"num_columns": self.num_columns, "residual": residual / n}, failures

    def apply_w(self, block: Block) -> Array:  # W V
        return block - combine(self.basis, matmul(self.core, inner(self.basis, block)))

    def apply_w_adjoint(self, block: Block) -> Array:  # W^* V
        coefficients = matmul(self.core.conj().T, inner(self.basis, block))
        return block - combine(self.basis, coefficients)

    def scale_rows(self, block: Block) -> Array:  # N^-1/2 V
        return block * self.inverse_sqrt_noise[:, None].astype(block.dtype)

    def apply(self, block: Block) -> Array:  # M V
        return self.apply_w(self.scale_rows(block))

    def apply_adjoint(self, block: Block) -> Array:  # M^* V
        return self.scale_rows(self.apply_w_adjoint(block))

    def sandwich(self, product, noise, block):
        WV = self.apply_w_adjoint(block)
        # N is 1 after scaling, up to its derivative.
        change = (noise - jax.lax.stop_gradient(noise)) * self.inverse_sqrt_noise**2
        unit = (1 + change)[:, None].astype(block.dtype)
        return self.apply_w(self.scale_rows(product(self.scale_rows(WV))) + unit * WV)

    def drift(self, block):
        r"""`M dH M^* V` with `dH = dK_S J - J^* dK_SS J / 2 + dN / 2`.

        `J = K_SS^-1 K_S^*`. For any dH with `dH + dH^* = dP`, `-M dH P^-1` is the
        derivative of some M with `M^* M = P^-1`. With this dH, derivatives of
        `M (K + N) M^*` nearly vanish between the range of the columns and its
        complement. With `dP / 2`, slopes in length scales had 1.0 to 14 times the
        errors (6 kernels, n = 800, 12 runs).
        """
        V, (pivots, inverse, R, _) = self.apply_w_adjoint(block), self.factors
        JV = matmul(inverse.conj().T, matmul(R, inner(self.basis, V)))
        half = matmul(self.columns[pivots], JV) / 2
        half = combine(self.basis, matmul(R.conj().T, matmul(inverse, half)))
        noise = self.noise[:, None].astype(V.dtype) * V
        return self.apply_w(combine(self.columns, JV) - half + noise / 2)

    def inside(self, block):
        r"""`Q^* V`, the part of V in the columns' range, and `tr Q Q^*`.

        As a control variate, any positive semidefinite matrix with known trace is
        right, and it helps if it is large where `log(M A M^*)` is small. We use `Q Q^*`
        because rounding blurs F's range. The projector onto this range gave the same
        errors to within 4 % (4 kernels, n = 800, 250 columns, 12 runs).
        """
        if self.basis.shape[1] == 0:
            return None
        projected = matmul(self.root.conj().T, inner(self.basis, block))
        return projected, self.trace_inside


def whiten(
    columns: Inexact[Array, "n r"],
    diagonal: Float[Array, " n"],
    pivots: Int[Array, " r"],
    noise: Float[Array, " n"],
    jitter: float | Float[Array, ""] = JITTER,
) -> Whitening:
    r"""The preconditioner from columns of K, K's diagonal, pivots and the noise.

    Let `[F; I] = [Q; Q2] R`, with R upper triangular and a positive diagonal. Then
    `W = I - Q X Q^*` with `X = (I + Q2)^-1` has `W^* W = (I + F F^*)^-1`. It is the
    compact WY form. The triangle `I + Q2` has a diagonal above 1.

    For small noise, rounding errors in `F^* F` exceed the added `I`. So we take two
    steps, `R = R2 R1`: R1 from `F^* F` with a shift above these errors, then R2 from
    the Gram matrix of `[F; I] R1^-1`, which is far from singular. M and log det P use
    the same computed F, and match up to rounding even if F has errors.

    For pivots of -1, anywhere in `pivots`, we set columns to 0, and take rows and
    columns of r x r factors from the identity. We drop pivots with small remainders in
    the same way, or `K[S, S]` would become singular when hyper-parameters change.
    """
    r, dtype = columns.shape[1], columns.dtype
    eps = jnp.finfo(dtype).eps
    identity = jnp.eye(r, dtype=dtype)
    is_pivot = pivots >= 0
    S = jnp.where(is_pivot, pivots, 0)
    scale = jax.lax.rsqrt(jax.lax.stop_gradient(noise))
    scaled = columns * (scale[:, None] * scale[S][None, :]).astype(dtype)
    columns = jax.lax.stop_gradient(scaled)
    diagonal = jax.lax.stop_gradient(diagonal) * scale**2
    K_SS = (columns[S] + columns[S].conj().T) / 2

    def regularise(active):
        # This exceeds rounding in Gram matrices, and in their Cholesky factorisation.
        slack = (jnp.sum(active) + 32).astype(scale.dtype) * eps
        added = jnp.where(active, jnp.maximum(jitter, slack * jnp.abs(diagonal[S])), 0)
        H = jnp.where(active[:, None] & active[None, :], K_SS, identity)
        return H + jnp.diag(added).astype(dtype), added, slack

    H, added, _ = regularise(is_pivot)
    L, _ = cholesky(H)
    remaining = squares(jnp.diagonal(L)) - added
    # A repeated pivot leaves about `added`, so we drop it. NaN stays, to be reported.
    active = is_pivot & ~(remaining <= jnp.maximum(_LEAST_REMAINDER, 2 * added))
    num_columns = jnp.sum(active, dtype=jnp.int32)
    columns = jnp.where(active[None, :], columns, 0)
    H, _, slack = regularise(active)
    _, inverse = cholesky(H)
    F = combine(columns, inverse.conj().T)

    gram = inner(F, F) + identity
    norm = frobenius(gram)
    shift = slack * norm
    L1, inverse1 = cholesky(gram + shift.astype(dtype) * identity)

    basis = combine(F, inverse1.conj().T)
    inverse_gram = matmul(inverse1, inverse1.conj().T)
    L2, inverse2 = cholesky(inner(basis, basis) + inverse_gram)
    # We compute `R2^-1 X R2^-*`: `R2^-1 (I + Q2)^-1 = (L2^* + R1^-1)^-1`, `R2 = L2^*`.
    inverse_sum = inverse_conjugate_transpose((L2 + inverse1).conj().T)
    core = matmul(inverse_sum.conj().T, inverse2)
    Q2_adjoint = matmul(inverse2, inverse1)

    diagonal_of_R = (jnp.diagonal(L1) * jnp.diagonal(L2)).real
    residual = diagonal - jnp.sum(squares(F), axis=1)
    # For an indefinite matrix our factorisation returns NaN, and NaN fails this test.
    definite = jnp.all(residual >= -rounding_of(diagonal).negative)
    finite = jnp.isfinite(jnp.sum(squares(columns)) + jnp.sum(diagonal**2))
    logdet = 2 * jnp.sum(jnp.log(diagonal_of_R)) - 2 * jnp.sum(jnp.log(scale))
    root, factors = inverse2.conj().T, Factors(S, inverse, L1, inverse1)
    scaled = jnp.where(active[None, :], scaled, 0)
    moving = scaled, noise * scale**2
    return Whitening(  # pyright: ignore
        basis=basis,
        root=root,
        core=core,
        inverse_sqrt_noise=scale,
        factors=factors,
        columns=moving[0],
        noise=moving[1],
        logdet=_with_slope(logdet, (basis, root, factors), moving),
        relative_norm=norm / len(F) ** 0.5,
        trace_inside=r - jnp.sum(squares(Q2_adjoint)),
        num_columns=num_columns,
        trace=jnp.sum(diagonal),
        residual_trace=jnp.sum(jnp.maximum(residual, 0)),
        semidefinite=definite | ~finite,
    )


def scale_only(noise: Float[Array, " n"], dtype: DTypeLike) -> Whitening:
    """The preconditioner without columns, `M = N^-1/2`."""
    zero, empty = jnp.zeros((), noise.dtype), jnp.zeros((0, 0), dtype)
    none = jnp.zeros((0, len(noise)), dtype).T
    scale = jax.lax.stop_gradient(jax.lax.rsqrt(noise))
    return Whitening(  # pyright: ignore
        basis=none,
        root=empty,
        core=empty,
        inverse_sqrt_noise=scale,
        factors=Factors(jnp.zeros(0, jnp.int32), empty, empty, empty),
        columns=none,
        noise=noise * scale**2,
        logdet=jnp.sum(jnp.log(noise)),
        relative_norm=jnp.ones_like(zero),
        trace_inside=zero,
        num_columns=jnp.int32(0),
        trace=zero,
        residual_trace=zero,
        semidefinite=jnp.array(True),
    )


@jax.custom_jvp
def _with_slope(
    logdet: Float[Array, ""],
    fixed: tuple[Block, Inexact[Array, "r r"], Factors],
    moving: tuple[Array, Array],
) -> Float[Array, ""]:
    """log det P, with the derivative `tr(P^-1 dP)` along the scaled columns and noise.

    `tr(P^-1 dP) = 2 Re tr(Y^* dK'_S) - tr(J' Y dK'_SS) + tr(P'^-1 dN')`, where
    `Y = P'^-1 J'^*` and `P'^-1 = I - Q Q^*`.
    """
    return logdet


@_with_slope.defjvp
def _slope_of_logdet(primals, tangents):
    logdet, (basis, root, (pivots, inverse, _, inverse_R)), _ = primals
    _, _, (t_columns, t_noise) = tangents
    Q = combine(basis, root)
    Z = matmul(root.conj().T, matmul(inverse_R, inverse))  # J'^* P'^-1 = Q Z
    JY = matmul(inverse.conj().T, inverse) - matmul(Z.conj().T, Z)
    slope = 2 * jnp.sum(jnp.real(combine(Q, Z).conj() * t_columns))
    slope = slope - jnp.sum(jnp.real(JY.conj() * t_columns[pivots]))
    return logdet, slope + jnp.sum((1 - jnp.sum(squares(Q), axis=1)) * t_noise)
