r"""Choice between a basis and more tests, where no test affects its own basis.

We take the first h = k // 2 products with the probes in a first block. Products with
its first r = h - 1 probes span a basis. The other l = k - h products are with a second
block: either the r basis vectors and l - r fresh probes, or l fresh probes. Masks
encode the choice, so no shape depends on it.

| symbol | shape | meaning |
|---|---|---|
| `W` | n x h | probes `w_i`, the first block |
| `Q`, `R` | n x h, h x h | QR factorisation of `A W`; the first r columns of Q are the basis |
| `C` | h x h | `Q^* W` |
| `X` | n x l | the second block; basis vectors come before fresh probes |
| `V` | n x k | `[W, X]`, all columns that A multiplies |
| `form`, `gram` | k x k | `V^* A V` and `V^* V`; only the diagonals in `W^* A W` and `W^* W` |
| `B` | n x l | the basis, X with 0 for fresh probes; 0 without a basis |
| `H` | l x l | `B^* A B` |
| `S` | l x h1 | `B s_i` is the direction that the basis loses without product i; 0 for i = h - 1, h; h1 = h + 1 |
| `P_i` | n x n | the projector for test i: onto the basis without `B s_i`, or 0 |
| `g_ij` | n | `(I - P_i) v_j` |

Index j runs over V's columns, and i over projectors. For i < h, `P_i` belongs to test i
on `w_i`, without its product. `P_h`, with `s_h = 0`, belongs to all fresh probes.

*Why it has no bias.* Neither the choice for test i nor its basis depends on `w_i`.
Given all other probes, only `w_i` is random in

    t_i = tr(P_i A) + g_ii^* A g_ii - c_i (|g_ii|^2 - n + rank P_i) ,

with the mean `tr A`. The shift `c_i` comes from tests outside `P_i`, so it doesn't
depend on `w_i` either. It makes multiples of the identity exact. We draw fresh probes
after all choices.
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

# Correlation between two tests whose products span the basis. We measured it with
# `benchmarks/choice.py --constants`: 1/2 and 1 are worse, 0 to 1/4 about the same.
CORRELATION = 0.25
# A sample variance from h tests may be too small by chance. We multiply it by
# 1 + ALLOWANCE / h. In that script 0 is worse, 10 and more are about the same.
ALLOWANCE = 30.0
# We chose the next four without measurements. Traceless energy is a difference, so we
# keep it at or above this share of the energy.
_LEAST_TRACELESS = 1e-3
# In units of eps: the least diagonal entry in R over |R|_F, to separate dependent
# products; the squared sine below which directions count as parallel; the share of
# squared lengths outside the basis that counts as 0.
_SEPARATION, _PARALLEL, _LEAST_OUTSIDE = 100.0, 400.0, 1e3


def dual_basis(R: Square) -> Inexact[Array, "r h"]:
    """The dual basis for R's first r columns: column i is orthogonal to all of them but
    the i-th. The last column is 0."""
    r = len(R) - 1
    first = floor_diagonal(R, factor=_SEPARATION)[:r, :r]
    return jnp.pad(inverse_conjugate_transpose(first), ((0, 0), (0, 1)))


def choose_basis(
    duals: Inexact[Array, "r h"], R: Square, C: Square, n: int, k: int
) -> tuple[Bool[Array, " h"], Float[Array, " h"]]:
    r"""Whether test i uses the basis, and the remaining energy, for each i.

    We compute both from all tests but i. Let v be the mean energy `|(I - P) A w|^2`,
    minus the energy from a multiple of the identity. For symmetric A, v is half a
    test's variance, apart from A's diagonal. We predict half the value's variance as
    `v_0 / k` without a basis, and with r basis vectors as

        v_r / (k - r) + CORRELATION r (r - 1) / (k - r)^2 (v_{r-1} - v_r) .

    The last term is the covariance between tests that share the basis. `v_{r-1} - v_r`
    is the energy in one direction, if each lowers v by the same factor.

    The diagonal of A adds energy, but no variance for signs. So `v_0` is at most half
    the sample variance, with its allowance.
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
    r"""The mean energy `v_r` outside the basis, from all products but i, for each i.

    With the projector `P_ij` onto the basis without products i and j, it combines

        e_ij = |(I - P_ij) A w_j|^2 ,      u_ij = w_j^* (I - P_ij) A w_j .

    Let `d_j` be the first r coordinates of `R^-* e_j`, with direction `s_j`. It is
    orthogonal to all basis products but j, and `d_ij = d_j - s_i s_i^* d_j` to all but
    i and j. As `(Q d_ij)^* A w_j = 1`, `(I - P_ij) A w_j = Q d_ij / |d_ij|^2`, and

        e_ij = 1 / |d_ij|^2 ,      u_ij = C_j^* d_ij / |d_ij|^2 .

    We subtract vectors, because lengths lose all digits for parallel products.
    """
    r, h = duals.shape
    s = normalise_columns(duals)  # lost directions; 0 for the last
    d = duals.T[None] - inner(s, duals)[:, :, None] * s.T[:, None, :]  # index [i, j, :]
    e = 1 / divisor(jnp.sum(squares(d), axis=2))
    u = e.astype(R.dtype) * jnp.sum(d * C[:r].T.conj()[None], axis=2)
    # The last product isn't in the basis. It leaves parts along `s_i` and `q_r`.
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
    """Mean energies over all tests but i, minus energy from a multiple of the identity.

    Takes `e_ij` and `u_ij`, or one row for all i, and the dimension outside the
    projector.
    """
    h = energies.shape[1]
    others = ~jnp.eye(h, dtype=bool)
    energy, trace = (
        jnp.sum(jnp.where(others, x, 0), axis=1) / (h - 1) for x in (energies, traces)
    )
    traceless = energy - squares(trace) / jnp.asarray(dimension).astype(energy.dtype)
    return jnp.maximum(traceless, _LEAST_TRACELESS * energy)


def _variances_of_others(samples: Inexact[Array, " h"]) -> Float[Array, " h"]:
    """The sample variance without sample i, for each i."""
    h = len(samples)
    samples = samples - jnp.mean(samples)
    mean = (jnp.sum(samples) - samples) / (h - 1)
    total = jnp.sum(squares(samples)) - squares(samples) - (h - 1) * squares(mean)
    return jnp.maximum(total, 0) / (h - 2)


class Plan(NamedTuple):
    """The plan for tests, made before products with the second block."""

    uses_basis: Bool[Array, " h"]  # whether test i in the first block does
    in_basis: Bool[Array, " l"]  # basis columns in X, if any test uses the basis
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
    """Weights for the samples `t_j` in the value, 0 for basis columns.

    The value is the mean over i < h of `(1 - f_i) t_i + f_i t`, with the mean sample t
    from fresh probes. `f_i` is their share among all tests if all choose like test i.
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
    r"""Samples `t_j`, linear in `form` (ignore basis columns), and shifts `c_i`.

    `t_j` uses `P_j` for j < h, and `P_h` for fresh probes. With `x_j = B^* v_j` and
    `g_j = v_j - B x_j`,

        g_ij = g_j + a_ij B s_i ,    a_ij = s_i^* x_j ,    |g_ij|^2 = |g_j|^2 + |a_ij|^2 ,
        c_i = sum_j g_ij^* A g_ij / sum_j |g_ij|^2  over tests j outside P_i, see below.
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
    # From here on we have index [i, j], for `g_ij`.
    gAg = jnp.where(uses, gAg[None, :] + mixed + a.conj() * a * sHs, vAv[None, :])
    gg = (vv - column_dots(x, x).real)[None, :] + squares(a)
    gg = jnp.where(uses, gg, vv[None, :])
    rank = jnp.sum(in_basis).astype(gg.dtype) - jnp.sum(squares(S), axis=0)[:, None]
    rank = jnp.where(uses, rank, 0)

    # The first block's last product is outside the basis. For i < h we take only the
    # last fresh probe: whether earlier columns are fresh depends on `w_i`.
    is_outside = (j < h) & (j != i) & (~uses | (j == h - 1))
    is_outside = is_outside | ((j == k - 1) & (i < h))
    sum_gg = jnp.sum(jnp.where(is_outside, gg, 0), axis=1)
    sum_vv = jnp.sum(jnp.where(is_outside, vv[None, :], 0), axis=1)
    # Probes may lie in the basis. Their remainders then consist of rounding errors.
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
    r"""The value's variance from covariances between tests that span the basis.

    We sum `weight_i weight_j (t_ij - t_i) conj(t_ji - t_j)` over i != j. Here `t_ij` is
    `t_i` without product j in `P_i`, and with the same `c_i` (see `leave_one_out_bar`).
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
    # The shift's factor changes by `|u^* x_i|^2 - 1`. The unit vector u is along the
    # part of `s_j` orthogonal to `s_i`, and `x_i` is orthogonal to `s_i`.
    squared_sine = 1 - squares(inner(s, s))
    is_pair = uses_basis & (jnp.arange(h) < h - 1)
    is_pair = is_pair[:, None] & is_pair[None, :] & ~jnp.eye(h, dtype=bool)
    is_pair = is_pair & (squared_sine >= _PARALLEL * jnp.finfo(form.dtype).eps)
    factor_change = squares(inner(x, s)) / jnp.where(is_pair, squared_sine, 1) - 1
    change = paired.without - paired.samples[:, None]
    change = change - shifts[:h, None] * factor_change.astype(form.dtype)
    change = jnp.where(is_pair, change * weights[:h, None].astype(form.dtype), 0)
    return jnp.maximum(jnp.sum(jnp.real(change * change.conj().T)), 0)
