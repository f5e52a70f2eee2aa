r"""A basis of chosen rank, and tests that had no part in the choice.

Pure kernels on arrays. A budget of k products is spent in two blocks. The first holds h
probes, which are tests; the products of the first r of them span a basis. The second holds
r basis vectors, whose products make the trace on the basis exact, and fresh probes, which
test it. Everything is a mask, so that no shape depends on r.

| symbol | shape | meaning |
|---|---|---|
| `W` | n x h | probes of the first block |
| `Q`, `R` | n x h, h x h | QR factorisation of `A W` |
| `C` | h x h | `Q^* W` |
| `X` | n x l | second block: r columns of Q, then fresh probes; l = k - h |
| `V` | n x k | `[W, X]`, all that is multiplied |
| `form` | k x k | `V^* A V`; of `W^* A W` the diagonal only |
| `gram` | k x k | `V^* V`; the same of `W^* W` |
| `S` | l x c | `X s_i` is what leaving probe i out takes from the basis; 0 for nothing |
| `inside` | l | which columns of the second block are the basis |
| `P_i` | n x n | the projector on the basis of test i, without the column of i |
| `g_ij` | n | `(I - P_i) v_j` |

*Why it has no bias.* `P_i` has a rank chosen without `w_i`, and a basis without `A w_i`.
Given all other probes only `w_i` is random in

    t_i = tr(P_i A) + g_ii^* A g_ii - c_i (|g_ii|^2 - n + rank P_i) ,

whose mean is `tr A`: `c_i`, from tests that had no part in `P_i`, doesn't depend on `w_i`
either. It makes multiples of the identity exact, as resphering does, for probes of any
distribution. Fresh probes are drawn after all choices, and use the largest basis chosen.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from .leave_one_out import Grams, LeaveOneOut, floor_diagonal, leave_one_out_traces
from .pairs import ProbeSet
from .small import divisor, inverse_conjugate_transpose, matmul, squares
from .tall import column_dots, inner

# What tests that are columns of the basis have in common, as a share of what they would
# have if all of them missed the same direction. Measured: 1/4 loses the least.
_COMMON = 0.25
# What few samples may hide of their variance: a factor of 1 + 30 / h. Less lets chance decide
# against a basis, at 12 products.
_HIDDEN = 30


def candidates(h: int) -> list[int]:
    """Ranks to choose from. One probe at least is fresh."""
    return sorted({min(round(h * third / 3), h - 1) for third in range(4)})


def duals_of(R: Inexact[Array, "h h"]) -> Inexact[Array, "h h"]:
    """`R^-*`, column i of which is orthogonal to all columns of R but the i-th.

    Columns that depend on others are moved apart, along their own column of Q, by much
    more than rounding: what one of a pair leaves of the other has digits then.
    """
    return inverse_conjugate_transpose(floor_diagonal(R, factor=100.0))


def directions(
    duals: Inexact[Array, "h h"], inside: Bool[Array, " h"]
) -> Inexact[Array, "h h"]:
    """`s_i` for the basis of the leading columns, 0 for columns that aren't in it.

    The leading rows of `R^-* e_i` are orthogonal to every leading column of R but the i-th.
    """
    duals = jnp.where(inside[:, None], duals, 0)
    lengths = jnp.linalg.norm(duals, axis=0)
    return duals / divisor(lengths)[None, :].astype(duals.dtype)


def choose_ranks(
    duals: Inexact[Array, "h h"],
    R: Inexact[Array, "h h"],
    C: Inexact[Array, "h h"],
    n: int,
    k: int,
    ranks: list[int],
) -> tuple[Int[Array, " h"], Float[Array, " h"]]:
    r"""The rank for each test by all other tests, and the energy it leaves.

    With v the variance of a test on what a basis of rank r leaves, up to a factor, the
    error of r products for the basis and k - r for tests is

        v / (k - r) + 1/4 r (r - 1) / (k - r)^2 (v' - v) ,

    where the last term is what tests in the basis have in common: the energy of a
    direction, `v' - v`, interpolated from the candidate before. The rank is the argmin,
    the smaller one of a tie.

    Signs don't see a diagonal, which energies count. Without a basis v is half of the
    sample variance of the other tests, and an allowance for that of few, where it is less.
    """
    h = len(R)
    inside = jnp.arange(h)[None, :] < jnp.asarray(ranks)[:, None]
    v = jax.vmap(lambda inside: left_energies(duals, R, C, n, inside))(inside)
    v = v.at[0].min((1 + _HIDDEN / h) * other_variances(column_dots(C, R)) / 2)
    predicted = []
    for g, r in enumerate(ranks):
        cost = v[g] / (k - r)
        if g:
            ratio = jnp.maximum(v[g - 1], v[g]) / divisor(v[g])
            step = ratio ** (1 / (r - ranks[g - 1])) - 1
            cost = cost + _COMMON * r * (r - 1) / (k - r) ** 2 * v[g] * step
        predicted.append(cost)
    which = jnp.argmin(jnp.stack(predicted), axis=0)
    return which, jnp.take_along_axis(v, which[None], axis=0)[0]


def left_energies(
    duals: Inexact[Array, "h h"],
    R: Inexact[Array, "h h"],
    C: Inexact[Array, "h h"],
    n: int,
    inside: Bool[Array, " h"],
) -> Float[Array, " h"]:
    r"""The energy that a basis leaves of a product, by all tests but i, for each i.

    With `P` the projector on the leading columns of `A W` without i and j,

        e_ij = |(I - P) A w_j|^2 ,      u_ij = w_j^* (I - P) A w_j ,

    and with means over all j but i, `E_i - |u_i|^2 / (n - rank)` is the energy less that
    of a multiple of the identity. A column j of the basis loses its own direction and that
    of i. With `d_j = R^-* e_j`, what `d_ij = d_j - s_i s_i^* d_j` says of it is

        e_ij = 1 / |d_ij|^2 ,      u_ij = C_j^* d_ij / |d_ij|^2 .

    Vectors are subtracted, and not their lengths: of two products that are parallel, one
    of which is left out, the lengths would have no digits.
    """
    h = len(R)
    S = directions(duals, inside)
    B, a = inner(S, R), inner(S, C)
    duals = jnp.where(inside[:, None], duals, 0)
    left = duals.T[None] - inner(S, duals)[:, :, None] * S.T[:, None, :]
    own = 1 / divisor(jnp.sum(squares(left), axis=2))
    u_own = own.astype(R.dtype) * jnp.sum(left * C.T.conj()[None], axis=2)
    beyond = jnp.where(inside[:, None], 0, R)
    outer = jnp.sum(squares(beyond), axis=0)[None, :] + squares(B)
    u_outer = column_dots(C, beyond)[None, :] + a.conj() * B
    e = jnp.where(inside[None, :], own, outer)
    u = jnp.where(inside[None, :], u_own, u_outer)
    others = ~jnp.eye(h, dtype=bool)
    energy = jnp.sum(jnp.where(others, e, 0), axis=1) / (h - 1)
    traces = jnp.sum(jnp.where(others, u, 0), axis=1) / (h - 1)
    dimension = (n - jnp.sum(inside) + inside.astype(int)).astype(energy.dtype)
    rest = energy - squares(traces) / dimension
    return jnp.maximum(rest, energy / 1000)


def other_variances(samples: Inexact[Array, " h"]) -> Float[Array, " h"]:
    """The sample variance of all but each."""
    h = len(samples)
    samples = samples - jnp.mean(samples)
    mean = (jnp.sum(samples) - samples) / (h - 1)
    rest = jnp.sum(squares(samples)) - squares(samples) - (h - 1) * squares(mean)
    return jnp.maximum(rest, 0) / (h - 2)


class Tests(NamedTuple):
    """How samples are made of tests, when all is chosen.

    Axes are g, a candidate for the basis; c, a test that is left out, or none; and t, a
    test: those of the first block, then perhaps the columns of the second.

    - `inside`: the basis.
    - `S`: what leaving out takes from it.
    - `shift`: which tests make up `c_i`.
    - `weight`: of each sample in the value; 0 for what is no sample.
    """

    inside: Bool[Array, "g l"]
    S: Inexact[Array, "g l c"]
    shift: Bool[Array, "g c t"]
    weight: Float[Array, "g c t"]


def split_tests(
    duals: Inexact[Array, "h h"], which: Int[Array, " h"], ranks: list[int], width: int
) -> Tests:
    """The tests for the ranks chosen, with so many columns in the second block.

    The last one to be left out is none, for the fresh probes.
    """
    h, real = len(duals), jnp.finfo(duals.dtype).dtype
    chosen, column = jnp.asarray(ranks)[which], jnp.arange(width)
    largest = jnp.max(chosen)
    fresh, number = column >= largest, (width - largest).astype(real)
    # A sample is the mean over the test and the fresh ones, as if all took that rank.
    share = ((width - chosen) / (h + width - chosen)).astype(real)
    itself = jnp.eye(h + 1, h, dtype=bool)

    def of(rank):
        inside = column < rank
        S = jnp.pad(directions(duals, inside[:h]), ((0, width - h), (0, 1)))
        # c_i is told by tests that aren't in the basis, and by one that is always fresh.
        shift = jnp.zeros((h + 1, h + width), bool)
        shift = shift.at[:, :h].set(~inside[None, :h] & ~itself).at[:h, -1].set(True)
        own = jnp.where(chosen == rank, (1 - share) / h, 0)
        others = jnp.where(fresh & (largest == rank), jnp.mean(share) / number, 0)
        weight = jnp.zeros(shift.shape, real)
        weight = weight.at[:h, :h].set(jnp.diag(own)).at[h, h:].set(others)
        return Tests(inside, S, shift, weight)

    return jax.vmap(of)(jnp.asarray(ranks))


def samples_of(
    form: Inexact[Array, "k k"], gram: Inexact[Array, "k k"], n: int, tests: Tests
) -> tuple[Inexact[Array, "g c t"], Inexact[Array, "g c"]]:
    r"""`t_i`, linear in `form`, and `c_i`.

    With B for the basis, `x_j = B^* v_j` and `g_j = v_j - B x_j`,

        g_ij = g_j + a_ij B s_i ,    a_ij = s_i^* x_j ,    |g_ij|^2 = |g_j|^2 + |a_ij|^2 .
    """

    def one(inside, S, shift):
        first, t = len(form) - len(S), shift.shape[1]
        X = jnp.where(inside[:, None], gram[first:, :t], 0)
        H, R, L = on_basis(form, inside, first, t)
        BAg, gAB = R - matmul(H, X), L - matmul(X.conj().T, H)
        base = jnp.diagonal(form)[:t] - column_dots(X, R) - jnp.sum(gAB.T * X, axis=0)
        a, on_s = inner(S, X), column_dots(S, matmul(H, S))
        mixed = a.conj() * inner(S, BAg) + a * matmul(gAB, S).T
        quadratics = base[None, :] + mixed + a.conj() * a * on_s[:, None]
        whole = jnp.diagonal(gram)[:t].real
        lengths = (whole - column_dots(X, X).real)[None, :] + squares(a)
        rank = jnp.sum(inside).astype(whole.dtype) - jnp.sum(squares(S), axis=0)
        c = jnp.sum(jnp.where(shift, quadratics, 0), axis=1)
        left = jnp.sum(jnp.where(shift, lengths, 0), axis=1)
        # Probes may lie in the basis: what is left of them is rounding then.
        rounding = 1e3 * jnp.finfo(gram.dtype).eps
        known = left > rounding * jnp.sum(jnp.where(shift, whole, 0), axis=1)
        c = jnp.where(known, c / jnp.where(known, left, 1).astype(c.dtype), 0)
        more = (lengths - n + rank[:, None]).astype(c.dtype)
        return (jnp.trace(H) - on_s)[:, None] + quadratics - c[:, None] * more, c

    return jax.vmap(one)(tests.inside, tests.S, tests.shift)


def on_basis(
    form: Inexact[Array, "k k"], inside: Bool[Array, " l"], first: int, t: int
) -> tuple[Inexact[Array, "l l"], Inexact[Array, "l t"], Inexact[Array, "t l"]]:
    """`B^* A B`, `B^* A v_j` and `v_j^* A B`, with zeros where there is no basis."""
    rows, columns = inside[:, None], inside[None, :]
    H = jnp.where(rows & columns, form[first:, first:], 0)
    return (
        H,
        jnp.where(rows, form[first:, :t], 0),
        jnp.where(columns, form[:t, first:], 0),
    )


def covariance(
    form: Inexact[Array, "k k"],
    gram: Inexact[Array, "k k"],
    n: int,
    tests: Tests,
    c: Float[Array, "g c"],
) -> Float[Array, ""]:
    r"""What tests that are columns of the basis have in common, in the variance.

    `sum_{i != j} a_i a_j (t_ij - t_i) conj(t_ji - t_j)`, with `a_i` the weight of `t_i`
    and `t_ij` the same with probe j left out as well, for `c_i` as it is; see
    `leave_one_out_samples` of the error bars for why.
    """
    h = tests.S.shape[2] - 1
    apart = ~jnp.eye(h, dtype=bool)

    def one(inside, S, weight, c):
        first, S = len(form) - len(S), S[:, :h]
        X = jnp.where(inside[:, None], gram[first:, :h], 0)
        X = X - S * column_dots(S, X)[None, :]
        ones = jnp.ones(h, weight.dtype)
        loo = [S, X, ones, ones, None]

        def differences(form):
            H, R, L = on_basis(form, inside, first, h)
            of = Grams(X, H, L.conj().T, ones, jnp.diagonal(form)[:h])
            loo_ = LeaveOneOut(ProbeSet(n, h, None, False), R, *loo)
            paired = leave_one_out_traces(of, loo_)
            return paired.without - paired.samples[:, None]

        change, of_identity = jax.vmap(differences)(jnp.stack([form, gram]))
        change = change - c[:h, None] * of_identity
        both = inside[:h, None] & inside[None, :h] & apart
        parallel = 1 - squares(inner(S, S)) < 400 * jnp.finfo(form.dtype).eps
        a = jnp.diagonal(weight[:h, :h]).astype(form.dtype)
        return jnp.where(both & ~parallel, change, 0) * a[:, None]

    change = jnp.sum(jax.vmap(one)(tests.inside, tests.S, tests.weight, c), axis=0)
    return jnp.maximum(jnp.sum(jnp.real(change * change.conj().T)), 0)


def stand_in(
    form: Inexact[Array, "k k"], gram: Inexact[Array, "k k"], n: int, *parts: Tests
) -> Inexact[Array, "k k"]:
    r"""K with `value = sum_ab K_ab v_a^* A v_b` and `E[V K^T V^*] = I`.

    All that is chosen being fixed, a value is linear in `form`, and K is what it is
    multiplied by. It isn't differentiated in any other sense.
    """

    def value(form):
        found = [
            jnp.sum(samples_of(form, gram, n, x)[0] * x.weight.astype(form.dtype))
            for x in parts
        ]
        return sum(found, start=jnp.zeros((), form.dtype))

    (K,) = jax.linear_transpose(value, form)(jnp.ones((), form.dtype))
    return K
