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

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from ._orthogonal import (
    column_dots,
    inner,
    inverse_conjugate_transpose,
    matmul,
    power_of_two_scale,
)


class LeaveOneOut(NamedTuple):
    """What each probe keeps when the range found by the others is projected out."""

    S: Inexact[Array, "m m"]
    X: Inexact[Array, "m m"]
    a: Float[Array, " m"]
    left: Float[Array, " m"]  # |g_i|^2


def floor_diagonal(R: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """`R` with diagonal entries of modulus at least `eps |R|_F`.

    `|R|_F = |Y|_F`, so the test is relative to the block itself. A diagonal entry
    below the floor is rounding: the floor makes the triangle safe to invert and moves
    `Q R` by no more than rounding has moved it already.
    """
    diagonal = jnp.diagonal(R)
    norm = jnp.linalg.norm(R)
    floor = jnp.finfo(R.dtype).eps * jnp.where(norm == 0, jnp.ones_like(norm), norm)
    small = jnp.abs(diagonal) < floor
    return R + jnp.diag(jnp.where(small, floor.astype(R.dtype) - diagonal, 0))


def leave_one_out(
    Omega: Inexact[Array, "n m"],
    Q: Inexact[Array, "n m"],
    R: Inexact[Array, "m m"],
    *,
    resphere: bool,
) -> LeaveOneOut:
    r"""The downdate of `Q` for every probe, in `O(n m^2)`.

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
    n, m = Q.shape
    scale = power_of_two_scale(R)
    inverse = inverse_conjugate_transpose(floor_diagonal(R / scale.astype(R.dtype)))
    norms = jnp.linalg.norm(inverse, axis=0)
    S = inverse / norms[None, :].astype(R.dtype)
    W = inner(Q, Omega)
    X = W - S * column_dots(S, W)[None, :]
    left = jnp.real(column_dots(Omega, Omega) - column_dots(X, X))
    a = (n - m + 1) / left if resphere else jnp.ones_like(left)
    return LeaveOneOut(S, X, a, left)


def leave_one_out_traces(
    Omega: Inexact[Array, "n m"],
    Y: Inexact[Array, "n m"],
    R: Inexact[Array, "m m"],
    Q: Inexact[Array, "n m"],
    AQ: Inexact[Array, "n m"],
    loo: LeaveOneOut,
    *,
    resphere: bool,
) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"]]:
    r"""`t_i = tr(P_i A) + a_i g_i^* A g_i`, and `t_ij`: the same with probe j left out.

    Four Gram products of order m; everything else is of order m x m. With
    `H = Q^* A Q`, and from `g_i = w_i - Q x_i` and `A w_i = Q r_i`,

        g_i^* A g_i = w_i^* A w_i - w_i^* A Q x_i - x_i^* r_i + x_i^* H x_i .

    *Leaving out j as well* takes the unit vector t, the part of `s_j` orthogonal to
    `s_i`, out of the projector too, and gives what it held of `w_i` back:

        t = (s_j - c s_i) / sqrt(1 - |c|^2),        c = s_i^* s_j,
        g_ij = g_i + b Q t,                         b = t^* x_i,
        tr(P_ij A) = tr(P_i A) - t^* H t,           |g_ij|^2 = |g_i|^2 + |b|^2 .

    Arrays below have index `[i, j]`. Where `s_i` and `s_j` are parallel to rounding
    (the block has lost rank) t is rounding, and so is what A does on it.
    """
    n, m = Q.shape
    S, X, a, left = loo
    H = inner(Q, AQ)
    T = inner(AQ, Omega)  # column i is (w_i^* A Q)^*
    L = R - matmul(H, X)  # column i is Q^* A g_i
    K = T - matmul(H.conj().T, X)  # column i is (g_i^* A Q)^*
    quadratics = column_dots(Omega, Y) - column_dots(T, X) - column_dots(X, L)
    SHS = inner(S, matmul(H, S))
    on_s = jnp.diagonal(SHS)
    on_range = jnp.trace(H) - on_s
    samples = on_range + a.astype(H.dtype) * quadratics

    c = inner(S, S)
    eps = jnp.finfo(left.dtype).eps
    sine = jnp.sqrt(jnp.maximum(1 - jnp.abs(c) ** 2, eps)).astype(H.dtype)

    def along_t(block):
        # t^* b_i from s_j^* b_i; t^* = (s_j^* - conj(c) s_i^*) / sine
        projections = inner(S, block).T
        return (projections - c.conj() * jnp.diagonal(projections)[:, None]) / sine

    b = along_t(X)
    t_H_t = (
        on_s[None, :]
        - c * SHS.T
        - c.conj() * SHS
        + jnp.abs(c).astype(H.dtype) ** 2 * on_s[:, None]
    ) / sine**2
    with_b = (
        quadratics[:, None]
        + b.conj() * along_t(L)
        + b * along_t(K).conj()
        + jnp.abs(b).astype(H.dtype) ** 2 * t_H_t
    )
    weight = jnp.ones_like(left)[:, None]
    if resphere:
        weight = (n - m + 2) / (left[:, None] + jnp.abs(b) ** 2)
    pairs = on_range[:, None] - t_H_t + weight.astype(H.dtype) * with_b
    return samples, pairs


def stand_in(
    Omega: Inexact[Array, "n m"], Q: Inexact[Array, "n m"], loo: LeaveOneOut
) -> tuple[Inexact[Array, "n 2m"], Inexact[Array, "n 2m"]]:
    r"""Blocks V, Z with `E[V Z^*] = I` that carry the low-rank part exactly.

    With `G = [g_1 ... g_m]`, averaging `P_i + a_i g_i g_i^*` over the probes gives

        V = [Q, G],    Z = [Q (I - S S^* / m), G diag(a) / m].

    Each term has mean `I` for any fixed matrix it is paired with, so
    `E <Z, B V> = tr B` for every B that does not depend on the probes.
    """
    m = Q.shape[1]
    G = Omega - matmul(Q, loo.X)
    kept = jnp.eye(m, dtype=Q.dtype) - matmul(loo.S, loo.S.conj().T) / m
    V = jnp.concatenate([Q, G], axis=1)
    Z = jnp.concatenate(
        [matmul(Q, kept), G * (loo.a / m)[None, :].astype(G.dtype)], axis=1
    )
    return V, Z
