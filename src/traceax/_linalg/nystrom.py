r"""Leaving one probe out of a Nystrom approximation.

| symbol | shape | meaning |
|---|---|---|
| `U` | n x k | orthonormal probes |
| `T` | k x k | coordinates in U of the probes, `Omega = U T`, for use without resphering |
| `Y` | n x k | `A U` |
| `H` | k x k | `U^* Y` |
| `mu` | | the multiple of the identity added to A |
| `C` | k x k | `C^* C = H^-1` |
| `F` | n x k | `F F^*` is the Nystrom approximation of `A + mu I` |
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
    """The Nystrom approximation of `A / scale + mu I`, and data to leave columns out.

    F, `halves`, `remainders` and `mu` are 0 for a zero operator.
    """

    F: Block  # entries near 1
    halves: Square  # C e_i, or C T^-* e_i without resphering
    remainders: Float[Array, " k"]  # 1 / |C e_i|^2
    probes: ProbeSet
    mu: Float[Array, ""]
    rounding: Float[Array, ""]  # eps |Y|_F, the least mu
    is_invalid: Bool[Array, ""]  # whether A is indefinite or has the other sign
    scale: Float[Array, ""]  # a power of two, with A's sign


def nystrom_factor(
    U: Block, T: Square, Y: Block, sign: int, probes: ProbeSet
) -> NystromFactor:
    r"""The factor F, and data to leave columns out.

    With the shifted `Y_mu = Y + mu U` and `H = U^* Y_mu`, k x k, the Nystrom
    approximation from all columns is `F F^*` with `F = Y_mu H^{-1/2}`. Without column i
    it is `F (I - q_i q_i^*) F^*`. The unit vector `q_i` is along `H^{-1/2} e_i`, which
    is orthogonal to `H^{1/2} e_j` for every other j. And

        u_i^* (A + mu I - F (I - q_i q_i^*) F^*) u_i = 1 / |H^{-1/2} e_i|^2 .

    Any `C` with `C^* C = H^-1` works as well, with `C e_i` for `H^{-1/2} e_i`.

    Without resphering, we leave out column `i` of `Omega = U T`. Then `T^-* e_i`
    replaces `e_i`, and 1 replaces n - k + 1, the complement's dimension.

    Departures from the source (XTrace's Algorithm 4 factorises `Omega^* Y` by
    Cholesky): our basis is orthonormal, so `H` has no eigenvalue below `mu`, up to
    rounding by about `eps |Y|_F`. Products from solvers have larger errors, which make
    `H` non-Hermitian: `mu` is `|H - H^*|_F` if that exceeds rounding. A floor at `mu`
    would lift half of the eigenvalues that should equal `mu`, and bias the value by a
    multiple of `mu n`. A floor at `mu / 2` does not.
    """
    identity = left_out = jnp.eye(probes.room, dtype=Y.dtype)
    outside = jnp.zeros_like(identity)
    if probes.active is not None:
        outside = jnp.where(probes.active[:, None], 0, identity)
    if not probes.resphere:
        left_out, basis = left_out_of_dependent(T + outside)
        U, Y = combine(U, basis), combine(Y, basis)
    H = inner(U, Y)
    # A semidefinite H has its largest entry on the diagonal, which is shorter than Y.
    scale = sign * power_of_two_scale(jnp.diagonal(H))
    inverse = (1 / scale).astype(Y.dtype)
    H, Y = H * inverse, Y * inverse
    norm = jnp.sqrt(jnp.sum(squares(Y)))
    nonzero, norm = norm != 0, divisor(norm)
    eps = jnp.finfo(Y.dtype).eps
    skew = frobenius(H - H.conj().T)
    rounding = eps * norm
    mu = jnp.where(skew > probes.number(Y.dtype) ** 0.5 * rounding, skew, rounding)
    Y_mu = Y + mu.astype(Y.dtype) * U
    # We give inactive columns a diagonal of |Y|: they decouple, and H stays regular.
    H_mu = (H + H.conj().T) / 2 + mu.astype(Y.dtype) * identity
    H_mu = H_mu + outside * norm.astype(Y.dtype)
    C, least = inverse_root(H_mu, mu / 2)
    # Solver errors and rounding stay within our limit. Beyond it, the tag is wrong.
    limit = jnp.maximum(jnp.sqrt(eps) * norm, 10 * skew)
    is_invalid = (least < -limit) | (skew > 0.3 * frobenius(H))
    # For a zero operator we drop all columns.
    C, mu, rounding = (jnp.where(nonzero, x, 0) for x in (C, mu, rounding))
    halves = matmul(C, left_out)
    weights = jnp.real(column_dots(halves, halves))
    # A probe in the span of the others has no remainder to test.
    remainders = jnp.where(weights == 0, 0, 1 / divisor(weights))
    F = combine(Y_mu, C.conj().T)
    return NystromFactor(F, halves, remainders, probes, mu, rounding, is_invalid, scale)


def nystrom_traces(factor: NystromFactor) -> PairedSamples:
    r"""Leave-one-out traces `t_i`, and `t_ij` with probe j left out as well.

    Given the other columns, `u_i` is uniform on the unit sphere in their complement,
    whose dimension is n - k + 1. The remainder vanishes outside it. Hence

        t_i = |F|^2 - |F q_i|^2 + (n - k + 1) / |H^{-1/2} e_i|^2 .

    *Leaving out j as well.* `q_i` and `q_j` span the lost part. With `c = q_i^* q_j`,
    `|H^{-1/2} e_i|^2` shrinks by the factor `1 - |c|^2` (a Schur complement).
    """
    F, halves, remainders = factor.F, factor.halves, factor.remainders
    dimension, further = _complements(factor)
    eps = jnp.finfo(F.dtype).eps
    squared = inner(F, F)
    all_columns = jnp.sum(jnp.real(jnp.diagonal(squared)))
    weighted = matmul(squared, halves)
    lost_by_one = jnp.real(column_dots(halves, weighted)) * remainders
    samples = all_columns - lost_by_one + dimension * remainders

    # We divide by both lengths below, which gives products with q_i and q_j.
    products, lost = inner(halves, halves), inner(halves, weighted)
    scales = remainders[:, None] * remainders[None, :]
    sine_squared = jnp.maximum(1 - jnp.abs(products) ** 2 * scales, eps)
    lost_by_two = lost_by_one[:, None] + lost_by_one[None, :]
    lost_by_two = lost_by_two - 2 * jnp.real(products.conj() * lost) * scales
    pairs = all_columns + (further * remainders[:, None] - lost_by_two) / sine_squared
    # We add and subtract n mu. Eigenvalues that should equal mu have rounding errors,
    # which we measured: at most a few times `rounding sqrt(n)`.
    magnitude = all_columns + factor.rounding * math.sqrt(len(F)) / eps
    probes = factor.probes
    orthogonal = further if probes.resphere else None
    return all_pairs(samples, pairs, magnitude, probes.active, orthogonal)


def _complements(factor: NystromFactor):
    return [factor.probes.complement(factor.F.dtype, number) for number in (1, 2)]


def stand_in(
    U: Block, T: Square, AU: Block, probes: ProbeSet
) -> tuple[list[tuple[Block, Block]], LeaveOneOut]:
    """XTrace's blocks V, Z, from the products `A Omega`, with `Omega = U T`."""
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
    r"""The samples from `nystrom_traces` for each row or group of rows of `A / scale`.

    With resphering `Omega` is U. Let `f_i = F q_i`, `alpha_i = 1 / |C e_i|`, and N the
    complement's dimension. The remainder of A without column i maps `u_i` to
    `alpha_i f_i`, so

        t_i(r) = |F(r)|^2 - |f_i(r)|^2 + N alpha_i conj(u_i(r)) f_i(r) .

    Without column j as well, `q = (q_j - c q_i) / sqrt(1 - |c|^2)` with `c = q_i^* q_j`
    is lost too. The remainder maps `u_i` to `alpha_i (f_i - conj(c) F q / sqrt(...))`.
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
        remainder = (f - Fq * (c.conj() / sine)[None, :]) * alpha[None, :]
        tested = further * functional.samples(Omega, remainder)
        return on_range - functional.samples(Fq, Fq) + tested

    samples = on_range + dimension * functional.samples(Omega, f * alpha[None, :])
    orthogonal = probes.complement(F.dtype, 2) if probes.resphere else None
    return neighbour_pairs(samples, without, probes.active, orthogonal)
