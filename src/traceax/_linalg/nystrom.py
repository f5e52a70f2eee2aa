r"""Leaving one probe out of a Nystrom approximation.

| symbol | shape | meaning |
|---|---|---|
| `U` | n x k | orthonormal probes |
| `T` | k x k | coordinates of the probes in U that are left out without resphering |
| `Y` | n x k | `A U` |
| `H` | k x k | `U^* Y` |
| `mu` | | the multiple of the identity that is added to A |
| `C` | k x k | `C^* C = H^-1` |
| `F` | n x k | the Nystrom approximation of `A + mu I` is `F F^*` |
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from .._functional import Functional
from .dense import (
    column_dots,
    combine,
    divisor,
    frobenius,
    inner,
    inverse_root,
    matmul,
    orthonormalise,
    power_of_two_scale,
    squares,
)
from .leave_one_out import (
    LeaveOneOut,
    PairedSamples,
    ProbeSet,
    all_pairs,
    leave_one_out,
    left_out_of_dependent,
    neighbour_pairs,
)
from .leave_one_out import stand_in as leave_one_out_stand_in

Block = Inexact[Array, "n k"]
Square = Inexact[Array, "k k"]


class NystromFactor(NamedTuple):
    """The Nystrom approximation of `A / scale + mu I`, and what leaves columns out of it.

    F, `halves`, `remainders` and `mu` of a zero operator are 0.
    """

    F: Block  # of order 1
    halves: Square  # C e_i, or what stands for it
    remainders: Float[Array, " k"]  # 1 / |C e_i|^2
    probes: ProbeSet
    mu: Float[Array, ""]
    rounding: Float[Array, ""]  # what mu is at least, eps |Y|_F
    is_invalid: Bool[Array, ""]  # whether A is not semidefinite, or has another sign
    scale: Float[Array, ""]  # a power of two with the sign of A


def nystrom_factor(
    U: Block, T: Square, Y: Block, sign: int, probes: ProbeSet
) -> NystromFactor:
    r"""The factor F, and what leaves columns out of it.

    With the shifted `Y_mu = Y + mu U` and `H = U^* Y_mu`, of order k, the Nystrom
    approximation from all columns is `F F^*` with `F = Y_mu H^{-1/2}`. Without column i it
    is `F (I - q_i q_i^*) F^*`, where the unit vector `q_i` is along `H^{-1/2} e_i`: its
    range is orthogonal to `H^{1/2} e_j` for every other j. And

        u_i^* (A + mu I - F (I - q_i q_i^*) F^*) u_i = 1 / |H^{-1/2} e_i|^2 .

    All of this holds for any `C` with `C^* C = H^-1`, and `C e_i` for `H^{-1/2} e_i`.

    Without resphering, column `i` of `Omega = U T` is left out instead: `T^-* e_i` takes
    the place of `e_i`, and 1 that of n - k + 1, the dimension of the complement.

    Departures from the source (Algorithm 4 of XTrace's factors `Omega^* Y` by Cholesky):
    the basis is orthonormal, so that `H` has no eigenvalue below `mu` but for rounding, of
    about `eps |Y|_F`. Products from an iterative solver have more, which shows in `H` not
    being Hermitian: `mu` is `|H - H^*|_F` where that is more. A floor of `mu` itself under
    the eigenvalues would lift half of those that should equal `mu`, and bias the value by a
    multiple of `mu n`; a floor of `mu / 2` does not.
    """
    one = left_out = jnp.eye(probes.room, dtype=Y.dtype)
    outside = jnp.zeros_like(one)
    if probes.active is not None:
        outside = jnp.where(probes.active[:, None], 0, one)
    if not probes.resphere:
        left_out, basis = left_out_of_dependent(T + outside)
        U, Y = combine(U, basis), combine(Y, basis)
    H = inner(U, Y)
    # That of a semidefinite A, and easier to find than the largest entry of Y.
    scale = sign * power_of_two_scale(jnp.diagonal(H))
    inverse = (1 / scale).astype(Y.dtype)
    H, Y = H * inverse, Y * inverse
    norm = jnp.sqrt(jnp.sum(squares(Y)))
    nonzero, norm = norm != 0, divisor(norm)
    eps = jnp.finfo(Y.dtype).eps
    noise = frobenius(H - H.conj().T)
    rounding = eps * norm
    mu = jnp.where(noise > probes.number(Y.dtype) ** 0.5 * rounding, noise, rounding)
    Y_mu = Y + mu.astype(Y.dtype) * U
    # Inactive columns get a diagonal of |Y|, which decouples them and keeps H regular.
    H_mu = (H + H.conj().T) / 2 + mu.astype(Y.dtype) * one
    H_mu = H_mu + outside * norm.astype(Y.dtype)
    C, least = inverse_root(H_mu, mu / 2)
    # A tag can be wrong: neither noise nor rounding does this.
    limit = jnp.maximum(jnp.sqrt(eps) * norm, 10 * noise)
    is_invalid = (least < -limit) | (noise > 0.3 * frobenius(H))
    # A zero operator is explained by no column.
    C, mu, rounding = (jnp.where(nonzero, x, 0) for x in (C, mu, rounding))
    halves = matmul(C, left_out)
    weights = jnp.real(column_dots(halves, halves))
    # A probe that the others span has nothing left to test.
    remainders = jnp.where(weights == 0, 0, 1 / divisor(weights))
    F = combine(Y_mu, C.conj().T)
    return NystromFactor(F, halves, remainders, probes, mu, rounding, is_invalid, scale)


def nystrom_traces(factor: NystromFactor) -> PairedSamples:
    r"""Leave-one-out traces `t_i`, and `t_ij`: the same with probe j left out as well.

    Given the other columns, `u_i` is uniform on the unit sphere of their complement, of
    dimension n - k + 1, outside which the remainder vanishes: hence

        t_i = |F|^2 - |F q_i|^2 + (n - k + 1) / |H^{-1/2} e_i|^2 .

    *Leaving out j as well*: `q_i`, `q_j` span what is lost, with `c = q_i^* q_j`, and
    `|H^{-1/2} e_i|^2` shrinks by `1 - |c|^2` (a Schur complement).
    """
    F, halves, remainders = factor.F, factor.halves, factor.remainders
    dimension, further = _complements(factor)
    eps = jnp.finfo(F.dtype).eps
    squared = inner(F, F)
    all_columns = jnp.sum(jnp.real(jnp.diagonal(squared)))
    weighted = matmul(squared, halves)
    lost_by_one = jnp.real(column_dots(halves, weighted)) * remainders
    samples = all_columns - lost_by_one + dimension * remainders

    # Those of q_i and q_j, once divided by the lengths of both.
    products, lost = inner(halves, halves), inner(halves, weighted)
    of_two = remainders[:, None] * remainders[None, :]
    sine_squared = jnp.maximum(1 - jnp.abs(products) ** 2 * of_two, eps)
    lost_by_two = lost_by_one[:, None] + lost_by_one[None, :]
    lost_by_two = lost_by_two - 2 * jnp.real(products.conj() * lost) * of_two
    pairs = all_columns + (further * remainders[:, None] - lost_by_two) / sine_squared
    # Where all is explained, n mu is added and subtracted again, with the rounding of
    # eigenvalues that should equal mu: at most a few times `rounding sqrt(n)`, measured.
    magnitude = all_columns + factor.rounding * math.sqrt(len(F)) / eps
    probes = factor.probes
    orthogonal = further if probes.resphere else None
    return all_pairs(samples, pairs, magnitude, probes.active, orthogonal)


def _complements(factor: NystromFactor):
    return [factor.probes.complement(factor.F.dtype, number) for number in (1, 2)]


def stand_in(
    U: Block, T: Square, AU: Block, probes: ProbeSet
) -> tuple[list[tuple[Block, Block]], LeaveOneOut]:
    """Blocks V, Z as those of XTrace, from the range of `A Omega`, `Omega = U T`."""
    Omega = combine(U, T)
    Q, R = orthonormalise(AU)
    if probes.active is not None:
        Q = jnp.where(probes.active[None, :], Q, 0)
    W, sizes = inner(Q, Omega), jnp.real(column_dots(Omega, Omega))
    loo = leave_one_out(W, sizes, matmul(R, T), probes)
    return leave_one_out_stand_in(Omega, Q, loo), loo


def nystrom_sums(
    Omega: Block, factor: NystromFactor, functional: Functional
) -> PairedSamples:
    r"""The samples of `nystrom_traces` before they are summed over rows, of `A / scale`.

    `Omega` are U itself with resphering. With `f_i = F q_i` and `alpha_i = 1 / |C e_i|`,
    what the approximation without column i leaves of A takes `u_i` to `alpha_i f_i`, so
    that with N for the dimension of the complement of the others

        t_i(r) = |F(r)|^2 - |f_i(r)|^2 + N alpha_i conj(u_i(r)) f_i(r) .

    Without column j as well, `q = (q_j - c q_i) / sqrt(1 - |c|^2)` with `c = q_i^* q_j` is
    lost too, and what is left takes `u_i` to `alpha_i (f_i - conj(c) F q / sqrt(...))`.
    """
    F, eps, probes = factor.F, jnp.finfo(factor.mu.dtype).eps, factor.probes
    alpha = jnp.sqrt(factor.remainders).astype(F.dtype)
    q = factor.halves * alpha[None, :]
    f = combine(F, q)
    ones = functional.sum(jnp.ones(len(F), F.dtype))
    total = functional.pair(F, F) - ones * factor.mu.astype(ones.dtype)
    on_range = total[..., None] - functional.samples(f, f)
    dimension, further = (
        jnp.asarray(x).astype(ones.dtype) for x in _complements(factor)
    )

    def without(j):
        c = column_dots(q, q[:, j])
        sine = jnp.sqrt(jnp.maximum(1 - jnp.abs(c) ** 2, eps)).astype(F.dtype)
        Fq = (f[:, j] - f * c[None, :]) / sine[None, :]
        left = (f - Fq * (c.conj() / sine)[None, :]) * alpha[None, :]
        tested = further * functional.samples(Omega, left)
        return on_range - functional.samples(Fq, Fq) + tested

    samples = on_range + dimension * functional.samples(Omega, f * alpha[None, :])
    orthogonal = probes.complement(F.dtype, 2) if probes.resphere else None
    return neighbour_pairs(samples, without, probes.active, orthogonal)
