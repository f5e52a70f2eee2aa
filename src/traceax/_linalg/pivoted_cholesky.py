r"""Randomly pivoted Cholesky factorisation, in blocks with rejection.

Of a positive semidefinite K and noise N, everything here is about the scaled matrix
`K' = N^-1/2 K N^-1/2`, beside which the noise is the identity.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, Key

from .dense import divisor, inverse_conjugate_transpose, matmul, squares
from .types import fori_loop, while_loop

Diagonal = Float[Array, " n"]

# No more pivots where the mean of the residual diagonal is below this part of the noise.
_ENOUGH = 1e-3
# A round of columns is kept if it lowers the residual trace by this much more than as many
# columns of a multiple of the identity do.
_GAIN = 1.5
# Candidates of a round. More of them are rejected more often, fewer take more rounds.
_WIDTH = 64
# Rounding errors of a diagonal, in units of eps times its entries.
_ROUNDING = 32

Columns = Callable[[Int[Array, " b"]], Inexact[Array, "n b"]]


class Rounding(NamedTuple):
    """What rounding makes of entries of a residual diagonal.

    Up to `floor` they are taken for 0. Below `-negative` no rounding takes them: an error d
    of a column c changes `c^2 / p`, of a pivot p, by up to `2 d sqrt(residual / p)`.
    """

    floor: Diagonal
    negative: Diagonal


def rounding_of(diagonal: Diagonal) -> Rounding:
    eps = jnp.finfo(diagonal.dtype).eps
    sizes = jnp.where(jnp.isfinite(diagonal), jnp.abs(diagonal), 0)
    negative = (_ROUNDING * eps) ** 0.5 * sizes + eps * jnp.max(sizes)
    return Rounding(_ROUNDING * eps * sizes, negative)


class Pivots(NamedTuple):
    """Pivots of a factorisation `K' ~ F F^*`."""

    indices: Int[Array, " most"]  # -1 behind the last one
    residual_trace: Float[Array, ""]  # of K' - F F^*
    semidefinite: Bool[Array, ""]  # whether its diagonal and residuals aren't negative
    finite: Bool[Array, ""]  # whether the diagonal and the columns that were read are


class _Search(NamedTuple):
    key: Key[Array, ""]
    rows: Inexact[Array, "room n"]  # F^T, 0 from `number` on
    indices: Int[Array, " room"]
    residual: Diagonal  # diagonal of K' - F F^*
    number: Int[Array, ""]
    semidefinite: Bool[Array, ""]
    worthwhile: Bool[Array, ""]  # whether the last round was kept


def choose(
    key: Key[Array, ""], columns: Columns, diagonal: Diagonal, most: int
) -> Pivots:
    r"""Pivots of a randomly pivoted Cholesky factorisation of K', at most `most <= n`.

    A pivot is drawn with probability its entry of the residual diagonal (Chen, Epperly,
    Tropp and Webber, arXiv:2207.06503). A round draws b candidates from the diagonal as it
    stands, and accepts each with probability its residual after those accepted before, over
    its residual when it was drawn: pivots have the same distribution as one by one, and all
    else is matrix products (Epperly, Tropp and Webber, arXiv:2410.03969). O(n r^2) time,
    O(n r) memory.

    Ends where the residual is small beside the noise, and before a round that buys nothing.
    `columns` and `diagonal` are those of K', not to be differentiated.
    """
    n, real = diagonal.shape[0], diagonal.dtype
    width = min(_WIDTH, -(-most // 4))
    floor, negative = rounding_of(diagonal)
    dtype = jax.eval_shape(columns, jnp.zeros(width, jnp.int32)).dtype

    def another_round(search: _Search) -> _Search:
        key, rows, indices, residual, number, semidefinite, _ = search
        key, key_draw, key_accept = jax.random.split(key, 3)
        chances = residual / jnp.sum(residual)
        drawn = jax.random.choice(key_draw, n, (width,), p=chances).astype(jnp.int32)
        block = columns(drawn)
        block = block - matmul(rows.T, rows[:, drawn].conj())
        least = jax.random.uniform(key_accept, (width,), real) * residual[drawn]
        H = block[drawn]
        least = jnp.maximum(least, floor[drawn])
        inverse, accepted = _eliminate(H, least, most - number)
        new = jnp.where(accepted[:, None], matmul(inverse.conj(), block.T), 0)
        gains = jnp.sum(squares(new), axis=0)
        count = jnp.sum(accepted, dtype=jnp.int32)
        alone = count.astype(real) * jnp.mean(residual)
        worthwhile = ~(jnp.sum(gains) < _GAIN * alone)  # also where NaN is
        accepted, new = accepted & worthwhile, jnp.where(worthwhile, new, 0)
        gains, count = jnp.where(worthwhile, gains, 0), jnp.where(worthwhile, count, 0)
        # Those accepted come first. The next round writes over the others.
        order = jnp.argsort(~accepted, stable=True)
        drawn_now = jnp.where(accepted, drawn, -1)[order]
        put = jax.lax.dynamic_update_slice_in_dim
        rows = put(rows, new[order], number, 0)
        indices = put(indices, drawn_now, number, 0)
        # As computed anew: a round accepts the first candidate or strikes it out.
        residual = residual.at[drawn].min(jnp.real(jnp.diagonal(H)))
        residual = residual - gains
        semidefinite = semidefinite & ~jnp.any(residual < -negative)
        # NaN and infinity stay.
        residual = jnp.where(residual <= floor, 0, residual)
        residual = residual.at[jnp.where(accepted, drawn, n)].set(0, mode="drop")
        number = number + count
        return _Search(key, rows, indices, residual, number, semidefinite, worthwhile)

    def needs_more(search: _Search) -> Bool[Array, ""]:
        mean = jnp.mean(search.residual)
        wanted = (search.number < most) & (mean > _ENOUGH) & search.worthwhile
        return wanted & search.semidefinite & jnp.isfinite(mean)

    start = _Search(
        key,
        jnp.zeros((most + width, n), dtype),
        jnp.full(most + width, -1, jnp.int32),
        jnp.where(diagonal <= floor, 0, diagonal),
        jnp.zeros((), jnp.int32),
        ~jnp.any(diagonal < -negative),
        jnp.array(True),
    )
    search = while_loop(needs_more, another_round, start)
    trace = jnp.sum(search.residual)
    finite = jnp.isfinite(trace)
    # Numbers that left the range say nothing about K.
    semidefinite = search.semidefinite | ~jnp.isfinite(jnp.sum(diagonal**2))
    return Pivots(search.indices[:most], trace, semidefinite, finite)


def spread(
    key: Key[Array, ""], columns: Columns, diagonal: Diagonal, pivots: Pivots
) -> Pivots:
    """As many pivots more as there is room for, spread over the rows. O(n r) time.

    Of a row the pivot nearest to it, alone, leaves `K_jj - |K_ij|^2 / K_ii`, which keeps
    its digits where all pivots together leave rounding. One is drawn with a probability
    that is its square. Where length scales shrank (13 kernels, 1 to 6 dimensions) such
    pivots left 0.5 to 1.3 of what those of a factorisation to rounding do, and 0.002 to 1.1
    of random rows; without the square up to 1.6 times as much.
    """
    n, most = diagonal.shape[0], pivots.indices.shape[0]
    floor, _ = rounding_of(diagonal)

    def another(i, state):
        left, indices = state
        chances = (left / divisor(jnp.max(left))) ** 2
        chances = chances / divisor(jnp.sum(chances))
        drawn = jax.random.choice(jax.random.fold_in(key, i), n, p=chances)
        given, fresh = indices[i] >= 0, left[drawn] > 0
        pivot = jnp.where(given, indices[i], drawn.astype(indices.dtype))
        column = columns(pivot[None])[:, 0]
        after = diagonal - squares(column) / divisor(diagonal[pivot])
        left = jnp.where(after <= floor, 0, jnp.minimum(left, after)).at[pivot].set(0)
        return left, indices.at[i].set(jnp.where(given | fresh, pivot, -1))

    start = jnp.where(diagonal <= floor, 0, diagonal), pivots.indices
    last = jnp.where(pivots.indices[-1] < 0, most, 0)
    left, indices = fori_loop(last, another, start)
    finite = pivots.finite & jnp.isfinite(jnp.sum(left))
    return pivots._replace(indices=indices, finite=finite)


def _eliminate(
    H: Inexact[Array, "b b"], least: Float[Array, " b"], room: Int[Array, ""]
) -> tuple[Inexact[Array, "b b"], Bool[Array, " b"]]:
    """`L^-1` of a Cholesky factorisation that leaves out small pivots, and which are in.

    Pivot i is accepted if it is above `least[i]` after the elimination of those before, and
    if there is room. Rows and columns of the others are those of the identity.
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
    _, L, accepted, _ = fori_loop(b, step, start)
    L = jnp.where(accepted[:, None], jnp.tril(L), one)
    return inverse_conjugate_transpose(L.conj().T), accepted
