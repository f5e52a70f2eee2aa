r"""Leaving one probe out of a low-rank approximation: downdates and resphering.

Names follow Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample in
Stochastic Trace Estimation", SIAM J. Matrix Anal. Appl. 45 (2024),
doi:10.1137/23M1548323, arXiv:2301.07825:

| symbol | shape | meaning |
|---|---|---|
| `Omega` | n x m | probes, a column `w_i` each |
| `Y` | n x m | `A Omega = Q R` |
| `Q`, `R` | n x m, m x m | thin QR factorisation of `Y` |
| `S` | m x m | `Q s_i` is the direction that `Y`'s range loses if we remove column i |
| `P_i` | n x n | `Q (I - s_i s_i^*) Q^*`, the projector onto the other columns' range |
| `X` | m x m | `x_i`, coordinates of `P_i w_i` in `Q` |
| `g_i` | n | `(I - P_i) w_i`, the remainder of probe i |
| `a` | m | resphering factors |
| `t_i` | | sample i: `tr(P_i A)`, plus an estimate from probe i for the remainder |
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int

from .._functional import Functional
from .dense import (
    column_dots,
    combine,
    divisor,
    frobenius,
    inner,
    inverse_conjugate_transpose,
    leading,
    matmul,
    power_of_two_scale,
    svd,
)

Block = Inexact[Array, "n m"]
Square = Inexact[Array, "m m"]
Active = Bool[Array, " m"] | None


class ProbeSet(NamedTuple):
    """Probes with n entries, each left out in turn."""

    n: int
    room: int  # columns in a block
    active: Active  # which columns are probes; the others are 0
    resphere: bool  # whether to rescale the remainders, see `leave_one_out`

    def number(self, dtype) -> int | Float[Array, ""]:
        if self.active is None:
            return self.room
        return jnp.sum(self.active).astype(jnp.finfo(dtype).dtype)

    def complement(self, dtype, left_out: int = 1) -> int | Float[Array, ""]:
        """n minus the number of probes that are kept; 1 without resphering."""
        return self.n - self.number(dtype) + left_out if self.resphere else 1


def make_probe_set(
    block: Block, count: int | Int[Array, ""], resphere: bool
) -> ProbeSet:
    n, room = block.shape
    return ProbeSet(n, room, active_units(room, count), resphere)


def active_units(room: int, count: int | Int[Array, ""]) -> Active:
    """A mask for `count` of `room` columns; `None`, for all, if `count` is an int."""
    if isinstance(count, int):
        return None
    return jnp.arange(room, dtype=jnp.int32) < count


class PairedSamples(NamedTuple):
    """Leave-one-out samples, each paired with all others or with its neighbours.

    `magnitude` is the size of the terms that are added up, for rounding errors. For
    orthogonal probes, `dimension` is the dimension of the complement of all probes but
    two. It is `None` for independent probes.
    """

    samples: Inexact[Array, "*g m"]  # t_i
    partners: Inexact[Array, "*g m d"]  # t_j, for d partners j per sample i
    without: Inexact[Array, "*g m d"]  # t_ij, sample i with probe j left out as well
    swapped: Inexact[Array, "*g m d"]  # t_ji
    is_pair: Bool[Array, "m d"]  # which pairs exist
    magnitude: Float[Array, "*g"]
    dimension: ArrayLike | None = None


def all_pairs(
    samples: Inexact[Array, " m"],
    pairs: Square,
    magnitude: Float[Array, ""],
    active: Active = None,
    dimension: ArrayLike | None = None,
) -> PairedSamples:
    """Pairs every sample with all others. `pairs[i, j]` is `t_ij`."""
    is_pair = ~jnp.eye(len(samples), dtype=bool)
    if active is not None:
        is_pair = is_pair & active[:, None] & active[None, :]
    partners = jnp.broadcast_to(samples[None, :], pairs.shape)
    fields = partners, pairs, pairs.T, is_pair
    return PairedSamples(samples, *fields, magnitude, dimension)


def neighbour_pairs(
    samples: Inexact[Array, "*g m"],
    # Maps indices j to all samples i with probe j_i left out as well.
    without_partner: Callable[[Int[Array, " m"]], Inexact[Array, "*g m"]],
    active: Active,
    dimension: ArrayLike | None = None,
) -> PairedSamples:
    """Pairs every sample with the next one, and the last with the first."""
    m = samples.shape[-1]
    position = jnp.arange(m, dtype=jnp.int32)
    is_active = jnp.ones(m, bool) if active is None else active
    last = m - 1 if active is None else jnp.sum(active, dtype=jnp.int32) - 1
    after = jnp.where(position < last, position + 1, 0)
    before = jnp.where(position > 0, position - 1, last)
    sizes = jnp.where(is_active, jnp.abs(samples), 0)
    magnitude = jnp.sum(sizes, axis=-1) / jnp.sum(is_active).astype(sizes.dtype)
    swapped = without_partner(before)[..., after]
    fields = samples[..., after], without_partner(after), swapped, is_active
    fields = (x[..., None] for x in fields)
    return PairedSamples(samples, *fields, magnitude, dimension)


class LeaveOneOut(NamedTuple):
    """Downdates of Q, one for each probe."""

    probes: ProbeSet
    R: Square  # R, S and X are coordinates in `Q basis`
    S: Square
    X: Square
    a: Float[Array, " m"]
    residual_squares: Float[Array, " m"]  # |g_i|^2
    basis: Square | None  # `None` for the identity


def floor_diagonal(R: Square, factor: float = 1.0) -> Square:
    """`R` with diagonal entries of modulus at least `factor eps |R|_F`.

    Smaller entries are rounding errors, because `|Y|_F = |R|_F`. The result is safe to
    invert. It changes `Q R` by at most `factor` times the rounding errors in it.
    """
    floor = factor * jnp.finfo(R.dtype).eps * divisor(frobenius(R))
    small = jnp.eye(len(R), dtype=bool) & (jnp.abs(R) < floor)
    return jnp.where(small, floor.astype(R.dtype), R)


def left_out_of_dependent(R: Square) -> tuple[Square, Square]:
    r"""`R^-* e_i` for probes that may be linearly dependent, and a change of basis.

    Sign probes are likely to be dependent if n is small. Q's columns beyond the rank
    then consist of rounding errors, and so depend on the probe that is left out.

    With `R = W Sigma V^*`, the leading columns of `Q W` span `Y`'s range. We return W
    with zeros in the other columns. If `e_i` is orthogonal to R's null space, `V^* e_i`
    has length 1 in leading entries, and our column i is `Sigma^-1 V^* e_i`, coordinates
    in `Q W`. Otherwise column i of R is in the span of the others, and ours is 0.
    """
    W, singular_values, VH = svd(R)
    eps = jnp.finfo(R.dtype).eps
    rank = singular_values > 16 * len(R) * eps * jnp.max(singular_values)
    safe = jnp.where(rank, singular_values, jnp.ones_like(singular_values))
    VH = jnp.where(rank[:, None], VH, 0)
    essential = jnp.sum(jnp.abs(VH) ** 2, axis=0) > 1 - jnp.sqrt(eps)
    columns = jnp.where(essential[None, :], VH / safe[:, None].astype(R.dtype), 0)
    return columns, jnp.where(rank[None, :], W, 0)


def normalise_columns(x: Block) -> Block:
    """Columns of unit norm; zero columns stay zero."""
    return x / divisor(jnp.linalg.norm(x, axis=0))[None, :].astype(x.dtype)


def leave_one_out(
    W: Square, squares: Float[Array, " m"], R: Square, probes: ProbeSet
) -> LeaveOneOut:
    r"""The downdate of `Q` for every probe, in `O(m^3)`.

    Arguments: `W = Q^* Omega`, the probes' squared lengths, and R.

    *Downdate.* `R^-* e_i` is orthogonal to every column of `R` but the i-th, since
    `(R^-* e_i)^* R e_j = e_i^* e_j`. Without column i the range loses its
    direction, `s_i`, and `P_i` projects onto the rest.

    *Resphering.* Given the other probes, `P_i` is fixed with rank m - 1, and `g_i` has
    a uniform direction in the complement, of dimension `N = n - m + 1`. A uniform unit
    vector u there has `E[u u^*] = (I - P_i) / N`, so

        a_i g_i g_i^*  with  a_i = N / |g_i|^2

    has mean `I - P_i`, and `|g_i|^2` no longer fluctuates. We divide by the projected
    probe's length: with `n / |w_i|^2` the mean would be wrong by several per cent.
    Without resphering, `a_i = 1`.
    """
    active = probes.active
    scaled = R / power_of_two_scale(R).astype(R.dtype)
    if active is not None:
        is_probe = active[:, None] & active[None, :]
        scaled = jnp.where(is_probe, scaled, jnp.eye(len(R), dtype=R.dtype))
    if probes.resphere:
        columns, basis = inverse_conjugate_transpose(floor_diagonal(scaled)), None
    else:
        columns, basis = left_out_of_dependent(scaled)
        R, W = (matmul(basis.conj().T, x) for x in (R, W))
    S = normalise_columns(columns)
    X = W - S * column_dots(S, W)[None, :]
    residual_squares = squares - jnp.real(column_dots(X, X))
    if active is not None:
        residual_squares = jnp.where(active, residual_squares, 1)
    a = (
        probes.complement(R.dtype) / residual_squares
        if probes.resphere
        else jnp.ones_like(residual_squares)
    )
    return LeaveOneOut(probes, R, S, X, a, residual_squares, basis)


def leave_one_out_traces(
    H: Inexact[Array, "r r"],
    T: Inexact[Array, "r m"],
    forms: Inexact[Array, " m"],
    loo: LeaveOneOut,
) -> PairedSamples:
    r"""`t_i = tr(P_i A) + a_i g_i^* A g_i`, and `t_ij` with probe j left out as well.

    Arguments: `H = Q^* A Q`, `T = (A Q)^* Omega` (R for a Hermitian A), and the forms
    `w_i^* A w_i`. From `g_i = w_i - Q x_i` and `A w_i = Q r_i`,

        g_i^* A g_i = w_i^* A w_i - w_i^* A Q x_i - x_i^* r_i + x_i^* H x_i .

    *Leaving out j as well.* The projector loses the unit vector u, along the part of
    `s_j` orthogonal to `s_i`, and `g_ij` regains the part of `w_i` along u:

        u = (s_j - c s_i) / sqrt(1 - |c|^2),        c = s_i^* s_j,
        g_ij = g_i + b Q u,                         b = u^* x_i,
        tr(P_ij A) = tr(P_i A) - u^* H u,           |g_ij|^2 = |g_i|^2 + |b|^2 .

    Arrays below have index `[i, j]`. If `s_i` and `s_j` are parallel up to rounding
    (the block has lost rank), u consists of rounding errors, and `H u` is that small.
    """
    R, X, basis = loo.R, loo.X, loo.basis
    if basis is not None:
        H = matmul(basis.conj().T, matmul(H, basis))
        T = matmul(basis.conj().T, T)
    L = R - matmul(H, X)
    K = T - matmul(H.conj().T, X)
    quadratics = forms - jnp.sum(T.conj() * X + X.conj() * L, axis=0)
    return leave_one_out_forms(H, L, K, quadratics, loo)


def leave_one_out_forms(
    H: Inexact[Array, "r r"],
    L: Inexact[Array, "r m"],
    K: Inexact[Array, "r m"],
    quadratics: Inexact[Array, " m"],
    loo: LeaveOneOut,
) -> PairedSamples:
    """The samples from `leave_one_out_traces`, linear in `H = Q^* A Q`, `L = Q^* A G`,
    `K = Q^* A^* G` and `g_i^* A g_i`. H, L and K are in the basis of `loo`."""
    probes, _, S, X, a, residual_squares, _ = loo
    HS = matmul(H, S)
    on_s = column_dots(S, HS)
    on_range = jnp.trace(H) - on_s
    tested = a.astype(H.dtype) * quadratics
    samples = on_range + tested
    number = probes.number(H.dtype)
    magnitude = jnp.sum(jnp.abs(jnp.diagonal(H))) + jnp.sum(jnp.abs(tested)) / number

    c, SHS = inner(S, S), inner(S, HS)
    eps = jnp.finfo(residual_squares.dtype).eps
    # 1 / (1 - |c|^2). We omit its root in b, u_L and u_K, as these come in pairs.
    inverse = (1 / jnp.maximum(1 - jnp.abs(c) ** 2, eps)).astype(H.dtype)

    def on_u(x):
        # u^* x_i = (s_j^* - conj(c) s_i^*) x_i / sqrt(1 - |c|^2)
        return inner(x, S).conj() - c.conj() * column_dots(S, x)[:, None]

    b, u_L, u_K = on_u(X), on_u(L), on_u(K)
    c_squared = jnp.abs(c).astype(H.dtype) ** 2
    u_H_u = on_s[None, :] - c * SHS.T - c.conj() * SHS + c_squared * on_s[:, None]
    u_H_u = inverse * u_H_u
    b_squared = inverse * jnp.abs(b).astype(H.dtype) ** 2
    forms_of_pairs = quadratics[:, None] + inverse * (b.conj() * u_L + b * u_K.conj())
    forms_of_pairs = forms_of_pairs + b_squared * u_H_u
    weight = jnp.ones_like(residual_squares)[:, None]
    if probes.resphere:
        weight = probes.complement(H.dtype, 2) / (
            residual_squares[:, None] + jnp.real(b_squared)
        )
    pairs = on_range[:, None] - u_H_u + weight.astype(H.dtype) * forms_of_pairs
    return all_pairs(samples, pairs, magnitude, probes.active)


def stand_in(Omega: Block, Q: Block, loo: LeaveOneOut) -> list[tuple[Block, Block]]:
    r"""Blocks V, Z with `E[V Z^*] = I`: `<Z, B V>` is the mean sample for B.

    With `G = [g_1 ... g_m]`, averaging `P_i + a_i g_i g_i^*` over the probes gives

        V = [Q, G],    Z = [Q (I - S S^* / m), G diag(a) / m].

    Each term has mean `I`, so `E <Z, B V> = tr B` for every B that does not depend on
    the probes. We return the pairs for Q and for G. Inactive columns are 0.
    """
    S, X, active = loo.S, loo.X, loo.probes.active
    number = jnp.asarray(loo.probes.number(S.dtype)).astype(S.dtype)
    kept = jnp.eye(len(S), dtype=S.dtype) - matmul(S, S.conj().T) / number
    if loo.basis is not None:
        kept = matmul(loo.basis, matmul(kept, loo.basis.conj().T))
        X = matmul(loo.basis, X)
    kept, X = leading(kept.T, active).T, leading(X.T, active).T
    G = Omega - combine(Q, X)
    weights = loo.a.astype(S.dtype) / number
    return [(Q, combine(Q, kept)), (G, (G.T * weights[:, None]).T)]


def leave_one_out_sums(
    Omega: Block, Q: Block, AQ: Block, loo: LeaveOneOut, functional: Functional
) -> PairedSamples:
    r"""The samples from `leave_one_out_traces` for each row r, or for groups of rows:

        t_i(r) = (A P_i)_rr + a_i conj(g_i(r)) (A g_i)(r) .

    The mean is `A_rr`, as `E[a_i g_i g_i^*] = I - P_i`.
    """
    probes, R, S, X, a, residual_squares, basis = loo
    if basis is not None:
        Q, AQ = combine(Q, basis), combine(AQ, basis)
    G, AG = Omega - combine(Q, X), combine(Q, R) - combine(AQ, X)

    def along(U):
        return functional.samples(combine(Q, U), combine(AQ, U))

    on_range = functional.pair(Q, AQ)[..., None] - along(S)
    eps = jnp.finfo(residual_squares.dtype).eps

    def without(j):
        c = column_dots(S, S[:, j])
        sine = jnp.sqrt(jnp.maximum(1 - jnp.abs(c) ** 2, eps)).astype(S.dtype)
        U = (S[:, j] - S * c[None, :]) / sine[None, :]
        b = column_dots(U, X)
        weight = a
        if probes.resphere:
            weight = probes.complement(S.dtype, 2) / (
                residual_squares + jnp.abs(b) ** 2
            )
        Ub = U * b[None, :]
        tested = functional.samples(G + combine(Q, Ub), AG + combine(AQ, Ub))
        return on_range - along(U) + weight.astype(tested.dtype)[None, :] * tested

    samples = on_range + a.astype(on_range.dtype)[None, :] * functional.samples(G, AG)
    return neighbour_pairs(samples, without, probes.active)
