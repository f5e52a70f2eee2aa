r"""Randomly pivoted Cholesky factorisation, and preconditioners made of columns.

Of a positive semidefinite K and noise N, everything here is about the scaled matrix
`K' = N^-1/2 K N^-1/2`, beside which the noise is the identity.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, Key

from .small import cholesky, inverse_conjugate_transpose, matmul, squares
from .tall import combine, inner

# No more pivots where the mean of the residual diagonal is below this part of the noise:
# they would only make K[S, S] singular.
_ENOUGH = 1e-3
# Added to the diagonal of K'[S, S].
_JITTER = 1e-6
# Rounding errors of a diagonal, in units of eps times its largest entry.
_ROUNDING = 32
# Candidates of a round. More of them are rejected more often, fewer take more rounds.
_WIDTH = 64

Columns = Callable[[Int[Array, " b"]], Inexact[Array, "n b"]]


class Pivots(NamedTuple):
    """Pivots, and whether the residual diagonal was never below 0 but for rounding.

    The last indices are -1 where fewer pivots are enough.
    """

    indices: Int[Array, " most"]
    semidefinite: Bool[Array, ""]


class _Search(NamedTuple):
    key: Key[Array, ""]
    rows: Inexact[Array, "room n"]  # F^T, 0 from `number` on
    indices: Int[Array, " room"]
    residual: Float[Array, " n"]  # diagonal of K' - F F^*
    number: Int[Array, ""]
    semidefinite: Bool[Array, ""]


def choose(
    key: Key[Array, ""], columns: Columns, diagonal: Float[Array, " n"], most: int
) -> Pivots:
    r"""Pivots of a randomly pivoted Cholesky factorisation of K', at most `most <= n`.

    A pivot is drawn with probability its entry of the residual diagonal (Chen, Epperly,
    Tropp and Webber, arXiv:2207.06503). A round draws b candidates from the diagonal as
    it stands, and accepts each with probability its residual after those accepted
    before, over its residual when it was drawn: pivots have the same distribution as
    one by one, and all else is matrix products (Epperly, Tropp and Webber,
    arXiv:2410.03969). O(n r^2) time, O(n r) memory.

    - `columns`: columns of K'. What it reads must not be differentiated.
    - `diagonal`: that of K'.
    """
    n, real = diagonal.shape[0], diagonal.dtype
    width = min(_WIDTH, -(-most // 4))
    floor, below = _rounding_of(diagonal)
    dtype = jax.eval_shape(columns, jnp.zeros(width, jnp.int32)).dtype

    def another_round(search: _Search) -> _Search:
        key, rows, indices, residual, number, semidefinite = search
        key, key_draw, key_accept = jax.random.split(key, 3)
        chances = residual / jnp.sum(residual)
        drawn = jax.random.choice(key_draw, n, (width,), p=chances).astype(jnp.int32)
        block = columns(drawn)
        block = block - matmul(rows.T, rows[:, drawn].conj())
        least = jax.random.uniform(key_accept, (width,), real) * residual[drawn]
        H = block[drawn]
        least = jnp.maximum(least, floor)
        inverse, accepted = _eliminate(H, least, most - number)
        new = matmul(inverse.conj(), block.T)
        new = jnp.where(accepted[:, None], new, 0)
        # Those accepted come first. The next round writes over the others.
        order = jnp.argsort(~accepted, stable=True)
        new, taken = new[order], jnp.where(accepted, drawn, -1)[order]
        rows = jax.lax.dynamic_update_slice_in_dim(rows, new, number, 0)
        indices = jax.lax.dynamic_update_slice_in_dim(indices, taken, number, 0)
        # As computed anew: a round accepts the first candidate or strikes it out.
        residual = residual.at[drawn].min(jnp.real(jnp.diagonal(H)))
        residual = residual - jnp.sum(squares(new), axis=0)
        semidefinite = semidefinite & (jnp.min(residual) >= -below)
        residual = jnp.where(residual > floor, residual, 0)
        residual = residual.at[jnp.where(accepted, drawn, n)].set(0, mode="drop")
        number = number + jnp.sum(accepted, dtype=jnp.int32)
        return _Search(key, rows, indices, residual, number, semidefinite)

    def needs_more(search: _Search) -> Bool[Array, ""]:
        mean = jnp.mean(search.residual)
        enough = (search.number >= most) | ~(mean > _ENOUGH)
        return ~enough & search.semidefinite & jnp.isfinite(mean)

    start = _Search(
        key,
        jnp.zeros((most + width, n), dtype),
        jnp.full(most + width, -1, jnp.int32),
        jnp.where(diagonal > floor, diagonal, 0),
        jnp.zeros((), jnp.int32),
        jnp.min(diagonal) >= -below,
    )
    search = jax.lax.while_loop(needs_more, another_round, start)
    return Pivots(search.indices[:most], search.semidefinite)


def _rounding_of(
    diagonal: Float[Array, " n"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What entries of a residual diagonal are 0, and how far below 0 rounding takes them.

    A column c is divided by the root of a pivot p, and c has an error d of a few eps:
    that of `c^2 / p` is up to `2 d sqrt(residual / p)`.
    """
    largest = jnp.max(jnp.abs(diagonal))
    unit = _ROUNDING * jnp.finfo(diagonal.dtype).eps
    return unit * largest, jnp.sqrt(unit) * largest


def _eliminate(
    H: Inexact[Array, "b b"], least: Float[Array, " b"], room: Int[Array, ""]
) -> tuple[Inexact[Array, "b b"], Bool[Array, " b"]]:
    """`L^-1` of a Cholesky factorisation that leaves out small pivots, and which are in.

    Pivot i is accepted if it is above `least[i]` after the elimination of those before,
    and if there is room. Rows and columns of `L^-1` of the others are those of the
    identity.
    """
    b = H.shape[0]

    def step(i, state):
        H, L, accepted, room = state
        pivot = jnp.real(H[i, i])
        accept = (pivot > least[i]) & (room > 0)
        root = jnp.sqrt(jnp.where(accept, pivot, 1)).astype(H.dtype)
        column = jnp.where(accept, H[:, i] / root, 0)
        H = H - column[:, None] * column[None, :].conj()
        L = L.at[:, i].set(jnp.where(accept, column, L[:, i]))
        return H, L, accepted.at[i].set(accept), room - accept.astype(room.dtype)

    one = jnp.eye(b, dtype=H.dtype)
    start = H, one, jnp.zeros(b, bool), room
    _, L, accepted, _ = jax.lax.fori_loop(0, b, step, start)
    L = jnp.where(accepted[:, None], jnp.tril(L), one)
    return inverse_conjugate_transpose(L.conj().T), accepted


#
# The preconditioner
#


class Preconditioner(eqx.Module):
    r"""`P = F F^* + N`, as M with `M^* M = P^-1`.

    `M = (I - Q C Q^*) N^-1/2`. Differentiable in the columns and the noise, for fixed
    pivots. `F F^*` is the Nystrom approximation of K from its columns S, which is at
    most K, so that no eigenvalue of `M (K + N) M^*` is below 1.

    **Attributes:**

    - `logdet`: `log det P`.
    - `num_columns`: how many columns were of use.
    - `trace`, `residual_trace`: the traces of `N^-1 K` and of `N^-1 (K - F F^*)`: what
        columns bought.
    - `semidefinite`: false where K isn't positive semidefinite, as its diagonal or a
        residual shows.
    - `positive_noise`: whether N is positive.
    """

    basis: Inexact[Array, "n r"]  # Q
    core: Inexact[Array, "r r"]  # C
    root: Inexact[Array, "r r"]  # Q root has P^-1 = I - Q root (Q root)^* for N = I
    scale: Float[Array, " n"]  # N^-1/2
    logdet: Float[Array, ""]
    num_columns: Int[Array, ""]
    trace: Float[Array, ""]
    residual_trace: Float[Array, ""]
    semidefinite: Bool[Array, ""]
    positive_noise: Bool[Array, ""]

    def apply(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """`M V`."""
        block = block * self.scale[:, None].astype(block.dtype)
        return block - combine(self.basis, matmul(self.core, inner(self.basis, block)))

    def apply_transpose(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """`M^* V`."""
        inside = matmul(self.core.conj().T, inner(self.basis, block))
        block = block - combine(self.basis, inside)
        return block * self.scale[:, None].astype(block.dtype)

    def solve(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """`P^-1 V`."""
        return self.apply_transpose(self.apply(block))


def make(
    columns: Inexact[Array, "n r"],
    diagonal: Float[Array, " n"],
    pivots: Int[Array, " r"],
    noise: Float[Array, " n"],
) -> Preconditioner:
    r"""The preconditioner of columns of K, of its diagonal, its pivots and the noise.

    With `[F; I] = [Q1; Q2] R`, R upper triangular with a positive diagonal, the compact WY
    form of the orthogonal complement is `M = I - Q1 X Q1^*` with `X = (I + Q2)^-1`: `I +
    Q2` is triangular, with a diagonal above 1.

    R is found in two steps, as `I` is far below the rounding errors of `F^* F` where the
    noise is small: `R = R2 R1`, R1 from `F^* F` with a shift above these, and R2 from the
    Gram matrix of `[F; I] R1^-1`, which is far from singular. R1 is held fixed: any matrix
    would do, so that derivatives are those of R2 alone. Neither is wrong by more than
    rounding for the F that `Q R1` is, whatever the errors of `L^-1` are.

    Pivots of -1, wherever they are, have columns of 0 and the identity in all factors.
    """
    r = columns.shape[1]
    scale = jax.lax.rsqrt(noise)
    active = pivots >= 0
    S = jnp.where(active, pivots, 0)
    both = active[:, None] & active[None, :]
    dtype = columns.dtype
    one = jnp.eye(r, dtype=dtype)

    columns = columns * (scale[:, None] * scale[S][None, :]).astype(dtype)
    columns = jnp.where(active[None, :], columns, 0)
    diagonal = jax.lax.stop_gradient(diagonal * scale**2)
    block = columns[S]
    block = jnp.where(both, (block + block.conj().T) / 2, one)
    _, below = _rounding_of(diagonal)
    eps = jnp.finfo(dtype).eps
    num_columns = jnp.sum(active, dtype=jnp.int32)
    units = (num_columns + _ROUNDING).astype(diagonal.dtype)
    jitter = jnp.maximum(_JITTER, units * eps * jnp.max(diagonal))
    _, inverse = _cholesky(block + jnp.diag(jnp.where(active, jitter, 0).astype(dtype)))

    F = combine(*jax.lax.stop_gradient((columns, inverse.conj().T)))
    gram = inner(F, F) + one
    shift = units * eps * jnp.max(jnp.sum(jnp.abs(gram), axis=1), initial=0)
    L1, inverse1 = jax.lax.stop_gradient(cholesky(gram + shift.astype(dtype) * one))

    Q = combine(columns, matmul(inverse.conj().T, inverse1.conj().T))
    gram = inner(Q, Q) + matmul(inverse1, inverse1.conj().T)
    L2, inverse2 = _cholesky(gram)
    root = inverse2.conj().T
    X = _upper_inverse(one + matmul(inverse1.conj().T, root))
    core = matmul(matmul(root, X), inverse2)

    residual = diagonal - jnp.sum(squares(F), axis=1)
    finite = jnp.isfinite(jnp.sum(columns) + jnp.sum(diagonal).astype(dtype))
    semidefinite = (jnp.min(residual) >= -below) | ~finite
    return Preconditioner(
        Q,
        core,
        root,
        scale,
        2 * _sum_of_logs(L1) + 2 * _sum_of_logs(L2) + jnp.sum(jnp.log(noise)),
        num_columns,
        jnp.sum(diagonal),
        jnp.sum(jnp.maximum(residual, 0)),
        semidefinite,
        jnp.min(noise) > 0,
    )


def _sum_of_logs(lower: Inexact[Array, "r r"]) -> Float[Array, ""]:
    return jnp.sum(jnp.log(jnp.real(jnp.diagonal(lower))))


@jax.custom_jvp
def _cholesky(hermitian: Inexact[Array, "r r"]) -> tuple[Array, Array]:
    """`L` and `L^-1`, differentiable: one lane at a time has no derivative."""
    return cholesky(hermitian)


@_cholesky.defjvp
def _cholesky_jvp(primals, tangents):
    lower, inverse = _cholesky(*primals)
    inside = matmul(matmul(inverse, tangents[0]), inverse.conj().T)
    inside = jnp.tril(inside) - jnp.diag(jnp.diagonal(inside)) / 2
    return (lower, inverse), (matmul(lower, inside), -matmul(inside, inverse))


@jax.custom_jvp
def _upper_inverse(upper: Inexact[Array, "r r"]) -> Inexact[Array, "r r"]:
    """`U^-1`, differentiable."""
    return inverse_conjugate_transpose(upper).conj().T


@_upper_inverse.defjvp
def _upper_inverse_jvp(primals, tangents):
    inverse = _upper_inverse(*primals)
    return inverse, -matmul(matmul(inverse, tangents[0]), inverse)
