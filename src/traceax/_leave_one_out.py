r"""Leaving one probe out of a low-rank approximation: downdates and resphering.

Pure kernels on arrays. Shapes and names, after Epperly, Tropp and Webber, "XTrace:
Making the Most of Every Sample in Stochastic Trace Estimation", SIAM J. Matrix Anal.
Appl. 45 (2024), doi:10.1137/23M1548323, arXiv:2301.07825:

| symbol | shape | meaning |
|---|---|---|
| `Omega` | n x m | probes, a column `w_i` each |
| `Y` | n x m | `A Omega = Q R` |
| `Q`, `R` | n x m, m x m | thin QR factorisation of `Y` |
| `S` | m x m | `s_i` spans what `Y` loses from its range without column i |
| `P_i` | n x n | `Q (I - s_i s_i^*) Q^*`, the projector on the range of `Y` without column i |
| `X` | m x m | `x_i`, coordinates of `P_i w_i` in `Q` |
| `g_i` | n | `(I - P_i) w_i`, the part of probe i that the others don't explain |
| `a` | m | resphering factors |
| `t_i` | | the trace estimated by testing probe i on what the others built |
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

from ._orthogonal import column_dots, combine, inner, inners, power_of_two_scale, there
from ._sharding import side_by_side
from ._small_matrices import (
    diagonal,
    divisor,
    frobenius,
    identity,
    inverse_conjugate_transpose,
    matmul,
    svd,
)
from ._staging import inlined
from ._stream import CountedBlocks


class Grams(NamedTuple):
    """What samples are made of: products of blocks with each other."""

    W: Inexact[Array, "m m"]  # Q^* Omega
    H: Inexact[Array, "m m"]  # Q^* A Q
    T: Inexact[Array, "m m"]  # (A Q)^* Omega
    squares: Float[Array, " m"]  # |w_i|^2
    tested: Inexact[Array, " m"]  # w_i^* A w_i


class LeaveOneOut(NamedTuple):
    """What each probe keeps when the range found by the others is projected out."""

    n: int
    R: Inexact[Array, "m m"]
    S: Inexact[Array, "m m"]
    X: Inexact[Array, "m m"]
    a: Float[Array, " m"]
    left: Float[Array, " m"]  # |g_i|^2
    basis: Inexact[Array, "m m"] | None  # the one meant, in Q, if it is another
    number: Float[Array, ""] | int  # of probes


def probe_dots(
    Omega: Inexact[Array, "n m"], Y: Inexact[Array, "n m"]
) -> tuple[Float[Array, " m"], Inexact[Array, " m"]]:
    """`squares` and `tested` of `Grams`. Y is not needed any more then."""
    return jnp.real(column_dots(Omega, Omega)), column_dots(Omega, Y)


def grams(
    Omega: Inexact[Array, "n m"],
    Q: Inexact[Array, "n m"],
    AQ: Inexact[Array, "n m"],
    R: Inexact[Array, "m m"] | None,
    squares: Float[Array, " m"],
    tested: Inexact[Array, " m"],
) -> Grams:
    """Of all blocks, each of which is read once.

    R is given for a Hermitian A, of which it is T: `(A Q)^* Omega = Q^* Y`.
    """
    if R is not None:
        W, H = inners((Q, Omega), (Q, AQ))
        return Grams(W, H, R, squares, tested)
    W, H, T = inners((Q, Omega), (Q, AQ), (AQ, Omega))
    return Grams(W, H, T, squares, tested)


@inlined
def floor_diagonal(R: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """`R` with diagonal entries of modulus at least `eps |R|_F`.

    `|R|_F = |Y|_F`, so the test is relative to the block itself. A diagonal entry
    below the floor is rounding: the floor makes the triangle safe to invert and moves
    `Q R` by no more than rounding has moved it already.
    """
    norm = frobenius(R)
    floor = jnp.finfo(R.dtype).eps * divisor(norm)
    small = identity(R.shape[0], np.bool_) & (jnp.abs(R) < floor)
    return jnp.where(small, floor.astype(R.dtype), R)


@inlined
def left_out_of_dependent(
    R: Inexact[Array, "m m"],
) -> tuple[Inexact[Array, "m m"], Inexact[Array, "m m"]]:
    r"""`R^-* e_i` for probes that may be linearly dependent, and a change of basis.

    Probes of finitely many values, such as signs, can be dependent, which a small n
    makes likely. The columns of Q beyond the rank are then rounding, but for being
    orthogonal to all of `Y`: tested on probe i they would not be independent of it.

    With `R = W Sigma V^*`, `Q W` has the range of `Y` in its leading columns, of which
    the returned basis zeroes the others. Column i is in the span of the others unless
    `e_i` is orthogonal to the null space of R, that is of length 1 in the leading
    columns of V. Leaving it out then loses nothing, and its column is 0; else it is
    `Sigma^-1 V^* e_i`, in coordinates of `Q W`.
    """
    W, singular_values, VH = svd(R)
    m = R.shape[0]
    eps = jnp.finfo(R.dtype).eps
    rank = singular_values > 16 * m * eps * jnp.max(singular_values)
    safe = jnp.where(rank, singular_values, jnp.ones_like(singular_values))
    VH = jnp.where(rank[:, None], VH, 0)
    essential = jnp.sum(jnp.abs(VH) ** 2, axis=0) > 1 - jnp.sqrt(eps)
    columns = jnp.where(essential[None, :], VH / safe[:, None].astype(R.dtype), 0)
    return columns, jnp.where(rank[None, :], W, 0)


@inlined
def normalise_columns(x: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
    """Columns of unit norm; zero columns stay zero."""
    norms = jnp.linalg.norm(x, axis=0)
    return x / divisor(norms)[None, :].astype(x.dtype)


@inlined
def leave_one_out(
    W: Inexact[Array, "m m"],
    squares: Float[Array, " m"],
    R: Inexact[Array, "m m"],
    n: int,
    *,
    resphere: bool,
    active: Bool[Array, " m"] | None = None,
) -> LeaveOneOut:
    r"""The downdate of `Q` for every probe, in `O(m^3)`.

    From `W = Q^* Omega` and the squares of the lengths of probes. `active` says which
    columns there are, all by default; the others are 0.

    *Downdate.* `R^-* e_i` is orthogonal to every column of `R` but the i-th, since
    `(R^-* e_i)^* R e_j = e_i^* e_j`. So its direction `s_i` is what the range of `Y`
    loses with column i, and `P_i` projects on the rest.

    *Resphering.* Given the other probes `P_i` is fixed, of rank m - 1, and the
    direction of `g_i` is uniform on the unit sphere of its complement, of dimension
    `N = n - m + 1`. For a unit vector u uniform there `E[u u^*] = (I - P_i) / N`, so

        a_i g_i g_i^*  with  a_i = N / |g_i|^2

    has mean `I - P_i`, without the fluctuation of `|g_i|^2`. `|g_i|^2` is that of the
    projected probe: with `n` for `|w_i|^2` the mean would be off by percents for
    probes whose length varies. Without resphering, `a_i = 1`.
    """
    count = R.shape[1]
    scaled = R / power_of_two_scale(R).astype(R.dtype)
    if active is not None:
        count = jnp.sum(active).astype(jnp.finfo(R.dtype).dtype)
        here = active[:, None] & active[None, :]
        scaled = jnp.where(here, scaled, identity(len(active), R.dtype))
    if resphere:
        columns, basis = inverse_conjugate_transpose(floor_diagonal(scaled)), None
    else:
        columns, basis = left_out_of_dependent(scaled)
        R, W = (matmul(basis.conj().T, x) for x in (R, W))
    S = normalise_columns(columns)
    X = W - S * column_dots(S, W)[None, :]
    left = squares - jnp.real(column_dots(X, X))
    if active is not None:
        left = jnp.where(active, left, 1)
    a = (n - count + 1) / left if resphere else jnp.ones_like(left)
    return LeaveOneOut(n, R, S, X, a, left, basis, count)


@inlined
def leave_one_out_traces(
    of: Grams, loo: LeaveOneOut, *, resphere: bool
) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"], Float[Array, ""]]:
    r"""`t_i = tr(P_i A) + a_i g_i^* A g_i`, and `t_ij`: the same with probe j left out.

    Also the magnitude of what is added up to a sample.

    With `H = Q^* A Q`, and from `g_i = w_i - Q x_i` and `A w_i = Q r_i`,

        g_i^* A g_i = w_i^* A w_i - w_i^* A Q x_i - x_i^* r_i + x_i^* H x_i .

    *Leaving out j as well* takes the unit vector t, the part of `s_j` orthogonal to
    `s_i`, out of the projector too, and gives what it held of `w_i` back:

        t = (s_j - c s_i) / sqrt(1 - |c|^2),        c = s_i^* s_j,
        g_ij = g_i + b Q t,                         b = t^* x_i,
        tr(P_ij A) = tr(P_i A) - t^* H t,           |g_ij|^2 = |g_i|^2 + |b|^2 .

    Arrays below have index `[i, j]`. Where `s_i` and `s_j` are parallel to rounding
    (the block has lost rank) t is rounding, and so is what A does on it.
    """
    n, R, S, X, a, left, basis, count = loo
    H, T = of.H, of.T
    m = len(H)
    if basis is not None:
        H = matmul(basis.conj().T, matmul(H, basis))
        T = matmul(basis.conj().T, T)
    HS = matmul(H, S)
    L = R - matmul(H, X)  # column i is Q^* A g_i
    K = T - matmul(H.conj().T, X)  # column i is (g_i^* A Q)^*
    quadratics = of.tested - jnp.sum(T.conj() * X + X.conj() * L, axis=0)
    # Not from the product below: the samples alone need none of that.
    on_s = column_dots(S, HS)
    on_range = jnp.sum(diagonal(H)) - on_s
    tested = a.astype(H.dtype) * quadratics
    samples = on_range + tested
    SHS = inner(S, HS)
    # One product instead of many, and with these indices nothing is transposed later:
    # [i, j] of each is x_i^* s_j.
    stacked = inner(jnp.concatenate([S, HS, X, L, K], axis=1), S).reshape(5, m, m)
    c, *projections = stacked[0], *stacked[1:].conj()
    on_own = [diagonal(x) for x in projections[1:]]
    magnitude = jnp.sum(jnp.abs(diagonal(H)) + jnp.abs(tested) / count)

    eps = jnp.finfo(left.dtype).eps
    # 1 / (1 - |c|^2). Below b and the others lack their roots: each comes in pairs.
    inverse = (1 / jnp.maximum(1 - jnp.abs(c) ** 2, eps)).astype(H.dtype)
    # t^* = (s_j^* - conj(c) s_i^*) / sqrt(1 - |c|^2)
    b, t_L, t_K = (
        projection - c.conj() * own[:, None]
        for projection, own in zip(projections[1:], on_own, strict=True)
    )
    t_H_t = inverse * (
        on_s[None, :]
        - c * projections[0]
        - c.conj() * SHS
        + jnp.abs(c).astype(H.dtype) ** 2 * on_s[:, None]
    )
    longer = inverse * jnp.abs(b).astype(H.dtype) ** 2
    with_b = quadratics[:, None] + inverse * (b.conj() * t_L + b * t_K.conj())
    with_b = with_b + longer * t_H_t
    weight = jnp.ones_like(left)[:, None]
    if resphere:
        weight = (n - count + 2) / (left[:, None] + jnp.real(longer))
    pairs = on_range[:, None] - t_H_t + weight.astype(H.dtype) * with_b
    return samples, pairs, magnitude


@inlined
def stand_in(
    Omega: Inexact[Array, "n m"], Q: Inexact[Array, "n m"], loo: LeaveOneOut
) -> tuple[Inexact[Array, "n 2m"], Inexact[Array, "n 2m"]]:
    r"""Blocks V, Z with `E[V Z^*] = I` that carry the low-rank part exactly.

    With `G = [g_1 ... g_m]`, averaging `P_i + a_i g_i g_i^*` over the probes gives

        V = [Q, G],    Z = [Q (I - S S^* / m), G diag(a) / m].

    Each term has mean `I` for any fixed matrix it is paired with, so
    `E <Z, B V> = tr B` for every B that does not depend on the probes.
    """
    kept, X, weights = _coordinates(loo)
    G = Omega - combine(Q, X)
    return side_by_side(Q, G), side_by_side(combine(Q, kept), G * weights[None, :])


@inlined
def _coordinates(
    loo: LeaveOneOut,
) -> tuple[Inexact[Array, "m m"], Inexact[Array, "m m"], Inexact[Array, " m"]]:
    """`I - S S^* / m` and X, in Q itself, and `a / m`."""
    S, X = loo.S, loo.X
    number = jnp.asarray(loo.number).astype(S.dtype)
    kept = identity(len(S), S.dtype) - matmul(S, S.conj().T) / number
    if loo.basis is not None:
        kept = matmul(loo.basis, matmul(kept, loo.basis.conj().T))
        X = matmul(loo.basis, X)
    return kept, X, loo.a.astype(S.dtype) / number


class CountedStandIn(CountedBlocks):
    """As `stand_in`, of as many probes as a count that is known at run time.

    Of a chunk of probes, V and Z are found when it is needed.

    **Attributes:**

    - `Omega`, `Q`: of the most probes there could be.
    - `kept`, `X`, `weights`: `I - S S^* / m`, X and `a / m`.
    - `count`, `most`, `chunk_size`: how many probes there are, could be, and are looked at at
        once.
    """

    Omega: Inexact[Array, "n m"]
    Q: Inexact[Array, "n m"]
    kept: Inexact[Array, "m m"]
    X: Inexact[Array, "m m"]
    weights: Inexact[Array, " m"]
    count: Int[Array, ""]
    most: int = eqx.field(static=True)
    chunk_size: int = eqx.field(static=True)

    def __init__(
        self,
        Omega: Inexact[Array, "n m"],
        Q: Inexact[Array, "n m"],
        loo: LeaveOneOut,
        count: Int[Array, ""],
        chunk_size: int,
    ):
        self.Omega, self.Q, self.count = Omega, Q, count
        self.kept, self.X, self.weights = _coordinates(loo)
        self.most, self.chunk_size = Omega.shape[1], chunk_size

    @property
    def size(self) -> int:
        return self.chunk_size

    @property
    def number(self) -> int:
        return -(-self.most // self.chunk_size)

    @property
    def dtype(self) -> np.dtype:
        return self.Omega.dtype

    def chunks(self):
        size, m = self.chunk_size, self.most

        def by_columns(block):
            # Of rows, as blocks are in memory.
            rows = jnp.pad(block.T, ((0, -m % size), (0, 0)))

            def columns(start):
                here = jax.lax.dynamic_slice_in_dim(rows, start, size)
                return jnp.where(there(self.count - start, size)[:, None], here, 0).T

            return columns

        given = [self.Omega, self.Q, self.kept, self.X, self.weights[None, :]]
        parts = [by_columns(block) for block in given]

        def of(start):
            Omega, Q, kept, X, weights = (columns(start) for columns in parts)
            G = Omega - combine(self.Q, X)
            return side_by_side(Q, G), side_by_side(combine(self.Q, kept), G * weights)

        return of
