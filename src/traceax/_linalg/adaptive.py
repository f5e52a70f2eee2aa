r"""Choice between a basis and more tests, by tests that have no say in their own basis.

Of a budget of k products, h = k // 2 are with the probes of the first block. The products
of its first r = h - 1 probes span a basis. The other l = k - h products are with the second
block: either with the r basis vectors and l - r fresh probes, or with l fresh probes. Masks
tell which: no shape depends on the choice.

| symbol | shape | meaning |
|---|---|---|
| `W` | n x h | probes `w_i`, the first block |
| `Q`, `R` | n x h, h x h | QR factorisation of `A W`; the first r columns of Q are the basis |
| `C` | h x h | `Q^* W` |
| `X` | n x l | the second block; basis vectors come before fresh probes |
| `V` | n x k | `[W, X]`, all that is multiplied |
| `form`, `gram` | k x k | `V^* A V` and `V^* V`; of `W^* A W` and `W^* W` the diagonals only |
| `B` | n x l | X with 0 for fresh probes: the basis, or 0 if it isn't taken |
| `H` | l x l | `B^* A B` |
| `S` | l x h1 | `B s_i` is the direction that the basis loses without product i; 0 for i = h - 1, h; h1 = h + 1 |
| `P_i` | n x n | the projector of test i: on the basis without `B s_i`, or 0 |
| `g_ij` | n | `(I - P_i) v_j` |

j counts all columns of V, i projectors: `P_i` for i < h is that of test i on `w_i`, made
without its product; `P_h`, with `s_h = 0`, is that of all fresh probes.

*Why it has no bias.* Whether test i uses the basis is chosen without `w_i`, and its basis
is made without `A w_i`. Given all other probes only `w_i` is random in

    t_i = tr(P_i A) + g_ii^* A g_ii - c_i (|g_ii|^2 - n + rank P_i) ,

whose mean is `tr A`: the shift `c_i`, from tests that had no part in `P_i`, doesn't depend
on `w_i` either. It makes multiples of the identity exact. Fresh probes are drawn after all
choices.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from .dense import (
    column_dots,
    divisor,
    inner,
    inverse_conjugate_transpose,
    matmul,
    squares,
)
from .leave_one_out import (
    LeaveOneOut,
    ProbeSet,
    floor_diagonal,
    leave_one_out_traces,
    normalise_columns,
)

Square = Inexact[Array, "h h"]
Whole = Inexact[Array, "k k"]

# Correlation of two tests whose products span the basis. By `benchmarks/choice.py --constants`
# 1/2 and 1 are worse, and 0 to 1/4 are about the same.
CORRELATION = 0.25
# A sample variance of h tests, which may be too small by chance, is multiplied by
# 1 + ALLOWANCE / h. By that script 0 is worse, and 10 and more are about the same.
ALLOWANCE = 30.0
# The next four are chosen, and not measured. Energy less that of a multiple of the identity
# is a difference: it counts as this share of the energy at least.
_LEAST_SHARE = 1e-3
# In units of eps: the diagonal of R over |R|_F, at least, to which dependent products are
# moved apart; the squared sine below which two directions count as parallel; the share of
# squared lengths outside of the basis that counts as 0.
_SEPARATION, _PARALLEL, _LEAST_OUTSIDE = 100.0, 400.0, 1e3


def dual_basis(R: Square) -> Inexact[Array, "r h"]:
    """Dual basis of the first r columns of R: column i is orthogonal to all but the i-th of
    these; and 0."""
    r = len(R) - 1
    first = floor_diagonal(R, factor=_SEPARATION)[:r, :r]
    return jnp.pad(inverse_conjugate_transpose(first), ((0, 0), (0, 1)))


def choose_basis(
    duals: Inexact[Array, "r h"], R: Square, C: Square, n: int, k: int
) -> tuple[Bool[Array, " h"], Float[Array, " h"]]:
    r"""Whether test i uses the basis, and the energy that its choice leaves, for each i.

    Both are by all tests but i. v is the mean energy `|(I - P) A w|^2` of tests, without
    that of a multiple of the identity: but for the diagonal of A half of the variance of a
    test, if A is symmetric. Half of the variance of the value is predicted to be `v_0 / k`
    without a basis, and with one of r vectors

        v_r / (k - r) + CORRELATION r (r - 1) / (k - r)^2 (v_{r-1} - v_r) .

    The last term is the covariance of tests that share the basis. `v_{r-1} - v_r` is the
    energy of one direction, if v falls by the same factor with each.

    Signs don't see a diagonal, which energies count: `v_0` is half of the sample variance,
    with its allowance, where that is less.
    """
    h = len(R)
    r, wAw = h - 1, column_dots(C, R)
    v_0 = _mean_energies(column_dots(R, R).real[None, :], wAw[None, :], n)
    v_0 = jnp.minimum(v_0, (1 + ALLOWANCE / h) * _variances_of_others(wAw) / 2)
    v_r = residual_energies(duals, R, C, n)
    ratio = jnp.maximum(v_0, v_r) / divisor(v_r)
    direction = v_r * (ratio ** (1 / r) - 1)
    covariance = CORRELATION * r * (r - 1) / (k - r) ** 2 * direction
    uses_basis = v_r / (k - r) + covariance < v_0 / k
    return uses_basis, jnp.where(uses_basis, v_r, v_0)


def residual_energies(
    duals: Inexact[Array, "r h"], R: Square, C: Square, n: int
) -> Float[Array, " h"]:
    r"""The mean energy `v_r` that the basis leaves of all products but i, for each i.

    With `P_ij` the projector on the basis without the products of i and of j, it is made of

        e_ij = |(I - P_ij) A w_j|^2 ,      u_ij = w_j^* (I - P_ij) A w_j .

    The first r coordinates of `R^-* e_j`, `d_j`, are orthogonal to all products of the basis
    but j, of direction `s_j`, and `d_ij = d_j - s_i s_i^* d_j` to all but j and, if i is in
    the basis, i. As
    `(Q d_ij)^* A w_j = 1`, what is residual_squares is `(I - P_ij) A w_j = Q d_ij / |d_ij|^2`, and

        e_ij = 1 / |d_ij|^2 ,      u_ij = C_j^* d_ij / |d_ij|^2 .

    Vectors are subtracted: of two parallel products lengths would have no digits.
    """
    r, h = duals.shape
    s = normalise_columns(duals)  # what the basis loses; 0 for the last
    d = duals.T[None] - inner(s, duals)[:, :, None] * s.T[:, None, :]  # index [i, j, :]
    e = 1 / divisor(jnp.sum(squares(d), axis=2))
    u = e.astype(R.dtype) * jnp.sum(d * C[:r].T.conj()[None], axis=2)
    # The last product isn't in the basis: of it `P_i` leaves what is along `s_i` and `q_r`.
    along_s = inner(s, R[:r, -1:])
    e_last = squares(R[-1, -1]) + squares(along_s)
    u_last = C[-1, -1].conj() * R[-1, -1] + inner(s, C[:r, -1:]).conj() * along_s
    spans_basis = jnp.arange(h) < r
    e = jnp.where(spans_basis[None, :], e, e_last)
    u = jnp.where(spans_basis[None, :], u, u_last)
    return _mean_energies(e, u, n - r + spans_basis.astype(int))


def _mean_energies(
    energies: Float[Array, "_ h"], traces: Inexact[Array, "_ h"], dimension: int | Array
) -> Float[Array, " h"]:
    """Mean energies over all tests but i, less that of a multiple of the identity.

    `e_ij` and `u_ij`, or a row of them for all i, and the dimension that a projector
    leaves.
    """
    h = energies.shape[1]
    others = ~jnp.eye(h, dtype=bool)
    energy, trace = (
        jnp.sum(jnp.where(others, x, 0), axis=1) / (h - 1) for x in (energies, traces)
    )
    traceless = energy - squares(trace) / jnp.asarray(dimension).astype(energy.dtype)
    return jnp.maximum(traceless, _LEAST_SHARE * energy)


def _variances_of_others(samples: Inexact[Array, " h"]) -> Float[Array, " h"]:
    """Sample variances of all samples but one, by the one left out."""
    h = len(samples)
    samples = samples - jnp.mean(samples)
    mean = (jnp.sum(samples) - samples) / (h - 1)
    total = jnp.sum(squares(samples)) - squares(samples) - (h - 1) * squares(mean)
    return jnp.maximum(total, 0) / (h - 2)


class Plan(NamedTuple):
    """Plan of the tests, made before the second block is multiplied."""

    uses_basis: Bool[Array, " h"]  # whether test i of the first block does
    in_basis: Bool[Array, " l"]  # which columns of X are the basis, if a test uses it
    S: Inexact[Array, "l h1"]  # 0 outside of the basis


def plan_tests(
    duals: Inexact[Array, "r h"], uses_basis: Bool[Array, " h"], width: int
) -> Plan:
    """The plan for a second block of `width` = l columns."""
    r = len(duals)
    in_basis = (jnp.arange(width) < r) & jnp.any(uses_basis)
    S = jnp.pad(normalise_columns(duals), ((0, width - r), (0, 1)))
    return Plan(uses_basis, in_basis, jnp.where(in_basis[:, None], S, 0))


def weights_of(plan: Plan) -> Float[Array, " k"]:
    """Weights of the samples `t_j` in the value, 0 for columns of the basis.

    The value is the mean over i < h of `(1 - f_i) t_i + f_i t`, with t the mean sample of
    fresh probes. `f_i` would be their share among all tests if all chose as test i.
    """
    uses_basis, in_basis, S = plan
    h, width, real = len(uses_basis), len(in_basis), jnp.finfo(S.dtype).dtype
    fresh = width - jnp.where(uses_basis, h - 1, 0)
    share = (fresh / (h + fresh)).astype(real)
    num_fresh = (width - jnp.sum(in_basis)).astype(real)
    second = jnp.where(in_basis, 0, jnp.mean(share) / num_fresh)
    return jnp.concatenate([(1 - share) / h, second])


def samples_of(
    form: Whole, gram: Whole, n: int, plan: Plan
) -> tuple[Inexact[Array, " k"], Inexact[Array, " h1"]]:
    r"""Samples `t_j`, linear in `form`, and shifts `c_i`. Those of the basis mean nothing.

    `t_j` is by `P_j` for j < h, and by `P_h` for fresh probes. With `x_j = B^* v_j` and
    `g_j = v_j - B x_j`,

        g_ij = g_j + a_ij B s_i ,    a_ij = s_i^* x_j ,    |g_ij|^2 = |g_j|^2 + |a_ij|^2 ,
        c_i = sum_j g_ij^* A g_ij / sum_j |g_ij|^2  over tests j outside of P_i, see below.
    """
    uses_basis, in_basis, S = plan
    h, k = len(uses_basis), len(form)
    i, j = jnp.arange(h + 1)[:, None], jnp.arange(k)[None, :]
    uses = jnp.append(uses_basis, jnp.any(uses_basis))[:, None]
    vAv, vv = jnp.diagonal(form), jnp.diagonal(gram).real

    x = jnp.where(in_basis[:, None], gram[h:], 0)
    H, BAV, VAB = _basis_blocks(form, in_basis)
    BAg, gAB = BAV - matmul(H, x), VAB - matmul(x.conj().T, H)
    gAg = vAv - column_dots(x, BAV) - jnp.sum(gAB.T * x, axis=0)
    a, sHs = inner(S, x), column_dots(S, matmul(H, S))[:, None]
    mixed = a.conj() * inner(S, BAg) + a * matmul(gAB, S).T
    # From here on of `g_ij`, index [i, j].
    gAg = jnp.where(uses, gAg[None, :] + mixed + a.conj() * a * sHs, vAv[None, :])
    gg = (vv - column_dots(x, x).real)[None, :] + squares(a)
    gg = jnp.where(uses, gg, vv[None, :])
    rank = jnp.sum(in_basis).astype(gg.dtype) - jnp.sum(squares(S), axis=0)[:, None]
    rank = jnp.where(uses, rank, 0)

    # The last product of the first block doesn't span the basis. Of fresh probes `P_i`,
    # i < h, takes the last: whether those before it are fresh depends on `w_i`.
    is_outside = (j < h) & (j != i) & (~uses | (j == h - 1))
    is_outside = is_outside | ((j == k - 1) & (i < h))
    sum_gg = jnp.sum(jnp.where(is_outside, gg, 0), axis=1)
    sum_vv = jnp.sum(jnp.where(is_outside, vv[None, :], 0), axis=1)
    # Probes may lie in the basis: what is left of them is rounding then.
    has_digits = sum_gg > _LEAST_OUTSIDE * jnp.finfo(gg.dtype).eps * sum_vv
    shifts = jnp.sum(jnp.where(is_outside, gAg, 0), axis=1)
    shifts = shifts / jnp.where(has_digits, sum_gg, 1).astype(form.dtype)
    shifts = jnp.where(has_digits, shifts, 0)

    basis_trace = jnp.where(uses, jnp.trace(H) - sHs, 0)
    samples = basis_trace + gAg - shifts[:, None] * (gg - n + rank).astype(form.dtype)
    return jnp.sum(jnp.where(i == jnp.minimum(j, h), samples, 0), axis=0), shifts


def _basis_blocks(
    form: Whole, in_basis: Bool[Array, " l"]
) -> tuple[Array, Array, Array]:
    """`H = B^* A B`, `B^* A V` and `V^* A B`."""
    h = len(form) - len(in_basis)
    rows, columns = in_basis[:, None], in_basis[None, :]
    H = jnp.where(rows & columns, form[h:, h:], 0)
    return H, jnp.where(rows, form[h:], 0), jnp.where(columns, form[:, h:], 0)


def covariance(
    form: Whole,
    gram: Whole,
    n: int,
    plan: Plan,
    shifts: Inexact[Array, " h1"],
    weights: Float[Array, " k"],
) -> Float[Array, ""]:
    r"""Covariance of the tests whose products span the basis, in the variance of the value.

    The sum over i != j of `weight_i weight_j (t_ij - t_i) conj(t_ji - t_j)`, where `t_ij`
    is `t_i` with the product of probe j residual_squares out of `P_i` too, and `c_i` as it is (see
    `leave_one_out_bar`).
    """
    uses_basis, in_basis, S = plan
    h = len(uses_basis)
    s, x = S[:, :h], jnp.where(in_basis[:, None], gram[h:, :h], 0)
    x = x - s * column_dots(s, x)[None, :]  # `P_i w_i = B x_i`
    ones = jnp.ones(h, weights.dtype)
    H, BAV, VAB = _basis_blocks(form, in_basis)
    probes = ProbeSet(n, h, None, resphere=False)
    loo = LeaveOneOut(
        probes, BAV[:, :h], s, x, a=ones, residual_squares=ones, basis=None
    )
    T, wAw = VAB[:h].conj().T, jnp.diagonal(form)[:h]
    paired = leave_one_out_traces(H, T, wAw, loo)  # t_i and t_ij for shifts of 0
    # The factor of the shift changes by `|t^* x_i|^2 - 1`, with t the unit vector of what `s_j`
    # has beside `s_i`, to which `x_i` is orthogonal.
    squared_sine = 1 - squares(inner(s, s))
    is_pair = uses_basis & (jnp.arange(h) < h - 1)
    is_pair = is_pair[:, None] & is_pair[None, :] & ~jnp.eye(h, dtype=bool)
    is_pair = is_pair & (squared_sine >= _PARALLEL * jnp.finfo(form.dtype).eps)
    factor_change = squares(inner(x, s)) / jnp.where(is_pair, squared_sine, 1) - 1
    change = paired.without - paired.samples[:, None]
    change = change - shifts[:h, None] * factor_change.astype(form.dtype)
    change = jnp.where(is_pair, change * weights[:h, None].astype(form.dtype), 0)
    return jnp.maximum(jnp.sum(jnp.real(change * change.conj().T)), 0)
