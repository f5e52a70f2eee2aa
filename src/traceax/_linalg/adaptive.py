r"""A basis or none, and tests that had no part in the choice.

Pure kernels on arrays. A budget of k products is spent in two blocks. The first holds h
probes, which are tests; the products of the first r = h - 1 of them span a basis. The
second holds that basis, whose products make the trace on it exact, or r fresh probes, and
l - r fresh probes in any case. Everything is a mask: no shape depends on the choice.

| symbol | shape | meaning |
|---|---|---|
| `W` | n x h | probes of the first block |
| `Q`, `R` | n x h, h x h | QR factorisation of `A W`; the first r columns of Q are the basis |
| `C` | h x h | `Q^* W` |
| `X` | n x l | second block, l = k - h: the basis or r fresh probes, then l - r fresh probes |
| `V` | n x k | `[W, X]`, all that is multiplied |
| `form` | k x k | `V^* A V`; of `W^* A W` the diagonal only |
| `gram` | k x k | `V^* V`; of `W^* W` the diagonal only |
| `S` | l x h+1 | `X s_i` spans what the basis loses without the product of probe i |
| `P_i` | n x n | the projector that test i uses: on the basis without `X s_i`, or 0 |
| `g_ij` | n | `(I - P_i) v_j` |

*Rows and tests.* Row i < h belongs to probe i of the first block, and leaves it out. Row h
leaves none out, and belongs to all fresh probes.

*Why it has no bias.* Whether test i uses the basis is chosen without `w_i`, and its basis is
made without `A w_i`. Given all other probes only `w_i` is random in

    t_i = tr(P_i A) + g_ii^* A g_ii - c_i (|g_ii|^2 - n + rank P_i) ,

whose mean is `tr A`: the shift `c_i`, from tests that had no part in `P_i`, doesn't depend
on `w_i` either. It makes multiples of the identity exact, as resphering does, for probes of
any distribution. Fresh probes are drawn after all choices.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from .leave_one_out import (
    LeaveOneOut,
    floor_diagonal,
    leave_one_out_traces,
    normalise_columns,
)
from .pairs import ProbeSet
from .small import divisor, inverse_conjugate_transpose, matmul, squares
from .tall import column_dots, inner

# Correlation of two tests whose products span the basis: 0 if they miss different
# directions, 1 if the same. By `benchmarks/choice.py --constants` 1/2 and 1 are worse, and
# 0 to 1/4 are about the same.
CORRELATION = 0.25
# The variance that h samples show may be too small by chance, by a factor of
# 1 + ALLOWANCE / h. By `benchmarks/choice.py --constants` 0 is worse, and 10 and more are
# about the same.
ALLOWANCE = 30.0
# Energy less that of a multiple of the identity is a difference, which may be rounding. It
# counts as this share of the energy at least.
_LEAST_SHARE = 1e-3
# In units of the rounding error, chosen and not measured: by how much dependent products are
# moved apart, so that what one leaves of the other has digits (`test_bias`, parallel);
_SEPARATION = 100.0
# the squared sine below which directions count as parallel;
_PARALLEL = 400.0
# the share of a probe outside of the basis that counts as 0.
_OUTSIDE = 1e3


def dual_basis(R: Inexact[Array, "h h"]) -> Inexact[Array, "h h"]:
    """`R^-*`, column i of which is orthogonal to all columns of R but the i-th.

    Columns of R that depend on others are moved apart, along their column of Q.
    """
    return inverse_conjugate_transpose(floor_diagonal(R, factor=_SEPARATION))


def choose_basis(
    duals: Inexact[Array, "h h"],
    R: Inexact[Array, "h h"],
    C: Inexact[Array, "h h"],
    n: int,
    k: int,
) -> tuple[Bool[Array, " h"], Float[Array, " h"]]:
    r"""Whether each test uses the basis, by all other tests, and the energy that is left.

    With v the variance of a test on what is left, up to a factor, the error is `v_0 / k`
    without a basis, and with one of r vectors, which take r products,

        v_r / (k - r) + 1/4 r (r - 1) / (k - r)^2 d .

    The last term is the covariance of tests in the basis. d is the energy of a direction,
    the last one if v falls by the same factor with each.

    Signs don't see a diagonal, which energies count. Without a basis v is half of the
    sample variance of the other tests, with an allowance for chance, where it is less.
    """
    h = len(R)
    r, tested = h - 1, column_dots(C, R)
    v_0 = _mean_energies(column_dots(R, R).real[None, :], tested[None, :], n)
    v_0 = jnp.minimum(v_0, (1 + ALLOWANCE / h) * _variances_of_others(tested) / 2)
    v_r = residual_energies(duals, R, C, n)
    ratio = jnp.maximum(v_0, v_r) / divisor(v_r)
    direction = v_r * (ratio ** (1 / r) - 1)
    covariance = CORRELATION * r * (r - 1) / (k - r) ** 2 * direction
    uses_basis = v_r / (k - r) + covariance < v_0 / k
    return uses_basis, jnp.where(uses_basis, v_r, v_0)


def residual_energies(
    duals: Inexact[Array, "h h"],
    R: Inexact[Array, "h h"],
    C: Inexact[Array, "h h"],
    n: int,
) -> Float[Array, " h"]:
    r"""The energy that the basis leaves of a product, by all tests but i, for each i.

    With `P_ij` the projector on the basis without the products of i and of j,

        e_ij = |(I - P_ij) A w_j|^2 ,      u_ij = w_j^* (I - P_ij) A w_j .

    Without its product the basis sees test j by `d_j = R^-* e_j` alone, and without that of
    i, too, by `d_ij = d_j - s_i s_i^* d_j`:

        e_ij = 1 / |d_ij|^2 ,      u_ij = C_j^* d_ij / |d_ij|^2 .

    Vectors are subtracted, and not their lengths: of two products that are parallel, one
    of which is left out, the lengths would have no digits.
    """
    h, r = len(R), len(R) - 1
    S, duals = _directions(duals), duals[:r]
    d = duals.T[None] - inner(S, duals)[:, :, None] * S.T[:, None, :]
    e = 1 / divisor(jnp.sum(squares(d), axis=2))
    u = e.astype(R.dtype) * jnp.sum(d * C[:r].T.conj()[None], axis=2)
    # The product of the last test isn't in the basis, which lacks the direction of i alone.
    on_s = inner(S, R[:r, -1:])
    e_last = squares(R[-1, -1]) + squares(on_s)
    u_last = C[-1, -1].conj() * R[-1, -1] + inner(S, C[:r, -1:]).conj() * on_s
    in_basis = jnp.arange(h) < r
    e = jnp.where(in_basis[None, :], e, e_last)
    u = jnp.where(in_basis[None, :], u, u_last)
    return _mean_energies(e, u, n - r + in_basis.astype(int))


def _directions(duals: Inexact[Array, "h h"]) -> Inexact[Array, "r h"]:
    """Column i is the direction that the basis loses without product i; 0 for the last."""
    r = len(duals) - 1
    return jnp.pad(normalise_columns(duals[:r, :r]), ((0, 0), (0, 1)))


def _mean_energies(
    energies: Float[Array, "_ h"],
    traces: Inexact[Array, "_ h"],
    dimension: int | Array,
) -> Float[Array, " h"]:
    """Means over all tests but i, less the energy of a multiple of the identity."""
    h = energies.shape[1]
    others = ~jnp.eye(h, dtype=bool)
    energy, trace = (
        jnp.sum(jnp.where(others, x, 0), axis=1) / (h - 1) for x in (energies, traces)
    )
    beside = energy - squares(trace) / jnp.asarray(dimension).astype(energy.dtype)
    return jnp.maximum(beside, _LEAST_SHARE * energy)


def _variances_of_others(samples: Inexact[Array, " h"]) -> Float[Array, " h"]:
    """The sample variance of all samples but each."""
    h = len(samples)
    samples = samples - jnp.mean(samples)
    mean = (jnp.sum(samples) - samples) / (h - 1)
    total = jnp.sum(squares(samples)) - squares(samples) - (h - 1) * squares(mean)
    return jnp.maximum(total, 0) / (h - 2)


class Plan(NamedTuple):
    """A plan of the tests, made before the second block is multiplied.

    - `uses_basis`: whether each test of the first block uses the basis.
    - `in_basis`: mask of the columns of X that are the basis; empty if no test uses it.
    - `S`: column i is the direction that row i takes out of the basis, or 0.
    """

    uses_basis: Bool[Array, " h"]
    in_basis: Bool[Array, " l"]
    S: Inexact[Array, "l h1"]


def plan_tests(
    duals: Inexact[Array, "h h"], uses_basis: Bool[Array, " h"], width: int
) -> Plan:
    """The plan for a second block of so many columns."""
    r = len(duals) - 1
    in_basis = (jnp.arange(width) < r) & jnp.any(uses_basis)
    S = jnp.pad(_directions(duals), ((0, width - r), (0, 1)))
    return Plan(uses_basis, in_basis, jnp.where(in_basis[:, None], S, 0))


def sample_weights(plan: Plan) -> Float[Array, " k"]:
    """Weights of the samples in the value, 0 for the basis.

    Each test of the first block is averaged with the fresh probes that its choice leaves,
    all with the same weight.
    """
    uses_basis, in_basis, S = plan
    h, width, real = len(uses_basis), len(in_basis), jnp.finfo(S.dtype).dtype
    fresh = width - jnp.where(uses_basis, h - 1, 0)
    share = (fresh / (h + fresh)).astype(real)
    number = (width - jnp.sum(in_basis)).astype(real)
    second = jnp.where(in_basis, 0, jnp.mean(share) / number)
    return jnp.concatenate([(1 - share) / h, second])


def test_samples(
    form: Inexact[Array, "k k"], gram: Inexact[Array, "k k"], n: int, plan: Plan
) -> tuple[Inexact[Array, " k"], Inexact[Array, " h1"]]:
    r"""The samples `t_j`, linear in `form`, and the shift `c_i` of each row.

    With B for the basis, `x_j = B^* v_j` and `g_j = v_j - B x_j`,

        g_ij = g_j + a_ij B s_i ,    a_ij = s_i^* x_j ,    |g_ij|^2 = |g_j|^2 + |a_ij|^2 ,
        c_i = sum_j g_ij^* A g_ij / sum_j |g_ij|^2  over tests j that P_i knows nothing of.
    """
    uses_basis, in_basis, S = plan
    h, k = len(uses_basis), len(form)
    row, test = jnp.arange(h + 1)[:, None], jnp.arange(k)[None, :]
    uses = jnp.append(uses_basis, jnp.any(uses_basis))[:, None]
    tested, lengths = jnp.diagonal(form), jnp.diagonal(gram).real

    X = jnp.where(in_basis[:, None], gram[h:], 0)
    H, BAV, VAB = _basis_blocks(form, in_basis)
    BAg, gAB = BAV - matmul(H, X), VAB - matmul(X.conj().T, H)
    gAg = tested - column_dots(X, BAV) - jnp.sum(gAB.T * X, axis=0)
    a, sHs = inner(S, X), column_dots(S, matmul(H, S))[:, None]
    mixed = a.conj() * inner(S, BAg) + a * matmul(gAB, S).T
    gAg = jnp.where(uses, gAg[None, :] + mixed + a.conj() * a * sHs, tested[None, :])
    gg = (lengths - column_dots(X, X).real)[None, :] + squares(a)
    gg = jnp.where(uses, gg, lengths[None, :])
    rank = jnp.sum(in_basis).astype(gg.dtype) - jnp.sum(squares(S), axis=0)[:, None]
    rank = jnp.where(uses, rank, 0)

    # The last test of the first block is never in the basis. The last fresh probe tells
    # rows of the first block; for its row it is a test.
    outside = (test < h) & (test != row) & (~uses | (test == h - 1))
    outside = outside | ((test == k - 1) & (row < h))
    total = jnp.sum(jnp.where(outside, gg, 0), axis=1)
    limit = jnp.sum(jnp.where(outside, lengths[None, :], 0), axis=1)
    # Probes may lie in the basis: what is left of them is rounding then.
    known = total > _OUTSIDE * jnp.finfo(gg.dtype).eps * limit
    shifts = jnp.sum(jnp.where(outside, gAg, 0), axis=1)
    shifts = shifts / jnp.where(known, total, 1).astype(form.dtype)
    shifts = jnp.where(known, shifts, 0)

    basis_trace = jnp.where(uses, jnp.trace(H) - sHs, 0)
    samples = basis_trace + gAg - shifts[:, None] * (gg - n + rank).astype(form.dtype)
    return jnp.sum(jnp.where(row == jnp.minimum(test, h), samples, 0), axis=0), shifts


def _basis_blocks(
    form: Inexact[Array, "k k"], in_basis: Bool[Array, " l"]
) -> tuple[Inexact[Array, "l l"], Inexact[Array, "l k"], Inexact[Array, "k l"]]:
    """`B^* A B`, `B^* A V` and `V^* A B`, with zeros where there is no basis."""
    h = len(form) - len(in_basis)
    rows, columns = in_basis[:, None], in_basis[None, :]
    H = jnp.where(rows & columns, form[h:, h:], 0)
    return H, jnp.where(rows, form[h:], 0), jnp.where(columns, form[:, h:], 0)


def covariance(
    form: Inexact[Array, "k k"],
    gram: Inexact[Array, "k k"],
    n: int,
    plan: Plan,
    shifts: Inexact[Array, " h1"],
    weights: Float[Array, " k"],
) -> Float[Array, ""]:
    r"""Covariance of the tests whose products span the basis, in the variance of the value.

    `sum_{i != j} a_i a_j (t_ij - t_i) conj(t_ji - t_j)`, with `a_i` the weight of `t_i`
    and `t_ij` the same with probe j left out as well, for `c_i` as it is; see
    `leave_one_out_bar` of the error bars for why.
    """
    uses_basis, in_basis, S = plan
    h = len(uses_basis)
    S, X = S[:, :h], jnp.where(in_basis[:, None], gram[h:, :h], 0)
    X = X - S * column_dots(S, X)[None, :]
    ones = jnp.ones(h, weights.dtype)
    H, BAV, VAB = _basis_blocks(form, in_basis)
    probes = ProbeSet(n, h, None, resphere=False)
    loo = LeaveOneOut(probes, BAV[:, :h], S, X, ones, ones, None)
    T, forms = VAB[:h].conj().T, jnp.diagonal(form)[:h]
    paired = leave_one_out_traces(H, T, forms, loo)
    # What the shift is multiplied by is the same of the identity: `|t^* x_i|^2 - 1`, with t
    # the unit vector of what `s_j` has beside `s_i`, to which `x_i` is orthogonal.
    sine = 1 - squares(inner(S, S))
    used = uses_basis & (jnp.arange(h) < h - 1)
    used = used[:, None] & used[None, :] & ~jnp.eye(h, dtype=bool)
    used = used & (sine >= _PARALLEL * jnp.finfo(form.dtype).eps)
    length = squares(inner(X, S)) / jnp.where(used, sine, 1) - 1
    change = (
        paired.without
        - paired.samples[:, None]
        - shifts[:h, None] * length.astype(form.dtype)
    )
    change = jnp.where(used, change * weights[:h, None].astype(form.dtype), 0)
    return jnp.maximum(jnp.sum(jnp.real(change * change.conj().T)), 0)
