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
    residual_norms: Float[Array, " m"]


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

    `residual_norms` are `1 / |R^-* e_i| = |(I - P_i) A w_i|`.
    """
    n, m = Q.shape
    scale = power_of_two_scale(R)
    inverse = inverse_conjugate_transpose(floor_diagonal(R / scale.astype(R.dtype)))
    norms = jnp.linalg.norm(inverse, axis=0)
    S = inverse / norms[None, :].astype(R.dtype)
    W = inner(Q, Omega)
    X = W - S * column_dots(S, W)[None, :]
    if resphere:
        left = jnp.real(column_dots(Omega, Omega) - column_dots(X, X))
        a = (n - m + 1) / left
    else:
        a = jnp.ones_like(norms)
    return LeaveOneOut(S, X, a, scale / norms)


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
