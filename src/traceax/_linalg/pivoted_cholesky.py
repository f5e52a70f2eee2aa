r"""Randomly pivoted Cholesky factorisation, in blocks with rejection.

For a positive semidefinite K and noise N, we work on the scaled matrix
`K' = N^-1/2 K N^-1/2`. The scaled noise is the identity.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, Key

from .dense import divisor, inverse_conjugate_transpose, matmul, squares
from .types import fori_loop, while_loop

Diagonal = Float[Array, " n"]

# We stop when the mean residual diagonal is below this fraction of the noise.
_ENOUGH = 1e-3
# We keep a round if it lowers the residual trace by this factor more than it would for
# a multiple of the identity.
_GAIN = 1.5
# Candidates per round. With more we reject more, with fewer we need more rounds.
_WIDTH = 64
# Rounding errors in a diagonal, in units of eps times its entries.
_ROUNDING = 32

Columns = Callable[[Int[Array, " b"]], Inexact[Array, "n b"]]


class Rounding(NamedTuple):
    """Rounding errors in a residual diagonal.

    We treat entries up to `floor` as 0. Rounding stays above `-negative`: an error d in
    a column c with pivot p changes `c^2 / p` by up to `2 d sqrt(residual / p)`.
    """

    floor: Diagonal
    negative: Diagonal


def rounding_of(diagonal: Diagonal) -> Rounding:
    eps = jnp.finfo(diagonal.dtype).eps
    sizes = jnp.where(jnp.isfinite(diagonal), jnp.abs(diagonal), 0)
    negative = (_ROUNDING * eps) ** 0.5 * sizes + eps * jnp.max(sizes)
    return Rounding(_ROUNDING * eps * sizes, negative)


class Pivots(NamedTuple):
    """Pivots for a factorisation `K' ~ F F^*`."""

    indices: Int[Array, " most"]  # -1 after the last pivot
    residual_trace: Float[Array, ""]  # tr (K' - F F^*)
    semidefinite: Bool[Array, ""]  # whether diagonal and residuals are nonnegative
    finite: Bool[Array, ""]  # whether the diagonal and columns we read are finite


class _Search(NamedTuple):
    key: Key[Array, ""]
    rows: Inexact[Array, "room n"]  # F^T, 0 from `number` on
    indices: Int[Array, " room"]
    residual: Diagonal  # diagonal of K' - F F^*, with its rounding errors above 0
    number: Int[Array, ""]
    semidefinite: Bool[Array, ""]
    worthwhile: Bool[Array, ""]  # whether another round may help


def choose(
    key: Key[Array, ""], columns: Columns, diagonal: Diagonal, most: int
) -> Pivots:
    r"""Pivots from randomly pivoted Cholesky factorisation of K', at most `most <= n`.

    We draw pivots with probabilities proportional to the residual diagonal (Chen,
    Epperly, Tropp and Webber, arXiv:2207.06503). Each round draws b candidates. The
    probability to accept one is its residual after earlier acceptances, divided by its
    residual when drawn. Pivots are distributed as if drawn one by one, but most work is
    in matrix products (Epperly, Tropp and Webber, arXiv:2410.03969). The search ends
    when the residual is small relative to the noise, or a round gains too little. It
    takes O(n r^2) time and O(n r) memory. `columns` and `diagonal` belong to K', and
    have no derivatives.
    """
    n, real = diagonal.shape[0], diagonal.dtype
    width = min(_WIDTH, -(-most // 4))
    floor, negative = rounding_of(diagonal)
    dtype = jax.eval_shape(columns, jnp.zeros(width, jnp.int32)).dtype

    def without_rounding(residual: Diagonal) -> Diagonal:
        return jnp.where(residual <= floor, 0, residual)  # keeps NaN and infinity

    def another_round(search: _Search) -> _Search:
        key, rows, indices, residual, number, semidefinite, _ = search
        key, key_draw, key_accept = jax.random.split(key, 3)
        useful = without_rounding(residual)
        chances = useful / jnp.sum(useful)
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
        identity_gain = count.astype(real) * jnp.mean(useful)
        worthwhile = ~(jnp.sum(gains) < _GAIN * identity_gain)  # true for NaN too
        accepted, new = accepted & worthwhile, jnp.where(worthwhile, new, 0)
        gains, count = jnp.where(worthwhile, gains, 0), jnp.where(worthwhile, count, 0)
        # We put accepted candidates first. The next round overwrites the others.
        order = jnp.argsort(~accepted, stable=True)
        drawn_now = jnp.where(accepted, drawn, -1)[order]
        put = jax.lax.dynamic_update_slice_in_dim
        rows = put(rows, new[order], number, 0)
        indices = put(indices, drawn_now, number, 0)
        # We recompute residuals, so a round accepts its first candidate or removes it.
        residual = residual.at[drawn].min(jnp.real(jnp.diagonal(H)))
        residual = residual - gains
        semidefinite = semidefinite & ~jnp.any(residual < -negative)
        # In 32 bits, rounding in over 250 columns can exceed the floor, and it grows
        # from round to round. So we stop when it shows. We keep residuals below the
        # floor: a pivot just above it lowers its neighbours by as much.
        worthwhile = worthwhile & ~jnp.any(residual < -floor)
        residual = jnp.maximum(residual, 0)
        residual = residual.at[jnp.where(accepted, drawn, n)].set(0, mode="drop")
        number = number + count
        return _Search(key, rows, indices, residual, number, semidefinite, worthwhile)

    def needs_more(search: _Search) -> Bool[Array, ""]:
        mean = jnp.mean(without_rounding(search.residual))
        wanted = (search.number < most) & (mean > _ENOUGH) & search.worthwhile
        return wanted & search.semidefinite & jnp.isfinite(mean)

    start = _Search(
        key,
        jnp.zeros((most + width, n), dtype),
        jnp.full(most + width, -1, jnp.int32),
        jnp.maximum(diagonal, 0),
        jnp.zeros((), jnp.int32),
        ~jnp.any(diagonal < -negative),
        jnp.array(True),
    )
    search = while_loop(needs_more, another_round, start)
    trace = jnp.sum(without_rounding(search.residual))
    finite = jnp.isfinite(trace)
    # If squares overflow, we cannot judge whether K is semidefinite.
    semidefinite = search.semidefinite | ~jnp.isfinite(jnp.sum(diagonal**2))
    return Pivots(search.indices[:most], trace, semidefinite, finite)


def spread(
    key: Key[Array, ""], columns: Columns, diagonal: Diagonal, pivots: Pivots
) -> Pivots:
    """Fills the remaining room with pivots spread over the rows, in O(n r) time.

    With the nearest pivot i alone, row j has the residual `K_jj - |K_ij|^2 / K_ii`. It
    keeps its digits when all pivots leave only rounding errors. We draw rows with
    probabilities proportional to its square: without the square the pivots left up to
    1.6 times as much. When length scales shrank (13 kernels, 1 to 6 dimensions), they
    left 0.5 to 1.3 times the residuals from a factorisation to rounding, and 0.002 to
    1.1 times those from random rows. Likelihoods that eliminate the rows had 1.1 to 1.6
    times the errors, and gradients 0.9 to 1.3 times, of those that eliminate a
    factorisation's pivots, which take six times as long to choose (5,000 points).
    """
    n, most = diagonal.shape[0], pivots.indices.shape[0]
    floor, _ = rounding_of(diagonal)

    def another(i, state):
        rest, indices = state
        probabilities = (rest / divisor(jnp.max(rest))) ** 2
        probabilities = probabilities / divisor(jnp.sum(probabilities))
        drawn = jax.random.choice(jax.random.fold_in(key, i), n, p=probabilities)
        is_chosen, is_useful = indices[i] >= 0, rest[drawn] > 0
        pivot = jnp.where(is_chosen, indices[i], drawn.astype(indices.dtype))
        column = columns(pivot[None])[:, 0]
        after = diagonal - squares(column) / divisor(diagonal[pivot])
        rest = jnp.where(after <= floor, 0, jnp.minimum(rest, after)).at[pivot].set(0)
        return rest, indices.at[i].set(jnp.where(is_chosen | is_useful, pivot, -1))

    start = jnp.where(diagonal <= floor, 0, diagonal), pivots.indices
    last = jnp.where(pivots.indices[-1] < 0, most, 0)
    rest, indices = fori_loop(last, another, start)
    finite = pivots.finite & jnp.isfinite(jnp.sum(rest))
    return pivots._replace(indices=indices, finite=finite)


def _eliminate(
    H: Inexact[Array, "b b"], least: Float[Array, " b"], room: Int[Array, ""]
) -> tuple[Inexact[Array, "b b"], Bool[Array, " b"]]:
    """`L^-1` from a Cholesky factorisation without small pivots, and the accepted mask.

    We accept pivot i if it exceeds `least[i]` after eliminating earlier pivots, and
    room is left. Rejected rows and columns come from the identity.
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
