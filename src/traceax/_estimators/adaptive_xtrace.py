"""A budget that splits itself between a basis and the tests of what it leaves."""

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Inexact

from .._accuracy.error_bar import ErrorBar, weighted_samples
from .._base import TraceEstimator
from .._deflation import mean_of_tests
from .._linalg import adaptive, krylov_split, tall
from .._operators.block import apply_block, is_hermitian, space_of
from .._samplers import RademacherSampler, Sampler, check_sampler, draw_range
from .._state import kept_of

# Budgets from which a Krylov space pays, its blocks, and of how many products one is a test
# that judges it.
_KRYLOV, _WIDTH, _SHARE = 100, 4, 10


class AdaptiveXTraceEstimator(TraceEstimator):
    r"""Splits its products between a basis and tests by what it sees.

    The first half of the products is taken with probes `w_i`. They are tests, and what
    comes out of the first r of them spans a basis. The second half is taken with the basis
    and with `k / 2 - r` fresh probes. Test i sees what the others of the basis leave,

        t_i = tr(P_i A) + g_i^* A g_i - c_i (|g_i|^2 - n + rank P_i),   g_i = (I - P_i) w_i

    and the value is a weighted mean. r = 0 is Hutchinson's estimator, r = k/2 - 1 nearly
    XTrace. The rank is chosen for each test by all others, among four.

    *Use when* nothing is known of the operator: the error is about that of the better one of
    Hutchinson's estimator and XTrace. Where eigenvalues fall steeply, or the rank is just
    below k/2, XTrace is better, by what its one basis vector more finds. Signs don't see a
    diagonal, and where that is most of the operator no basis is taken. A multiple of the
    identity is exact.

    *Symmetric operators*, and Hermitian ones, known by their tag, have a Krylov basis of
    blocks of 4 from 100 products on. A product with a basis vector is then one for the next
    block, too. Tests, k/10 probes that the basis knows nothing of, say when to stop; what is
    left is for fresh tests. Where the spectrum decays the error falls by factors. Krylov
    spaces find 4 eigenvectors of an eigenvalue: where products with random vectors show that
    most of what is left is in others, the next blocks are begun with these.

    | | |
    |---|---|
    | operator | any, PyTrees, complex; a real symmetric or a semidefinite tag is made use of |
    | products | k, all used; k < 8 is Hutchinson's estimator |
    | beyond the products | O(n k^2) time and four n x k/2 blocks; O(k^3) for the rest; the derivative holds eight |
    | bias | none: no test has a say in what it is tested on |
    | standard error | that of independent samples, and what those in the basis have in common |
    | derivative | `<Z, dA V>`, k products with dA; unbiased for any dA |

    `stats["basis"]` is the size of the basis; the other products were tests. Budgets are
    fixed: an estimate can't go on from an earlier one, nor to a tolerance, and `refresh`
    begins anew, with the probes of its key.

    **Arguments:**

    - `sampler`: of the probes; [`traceax.RademacherSampler`][] by default. Independent.

    **Reference:** Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample
    in Stochastic Trace Estimation", SIAM J. Matrix Anal. Appl. 45 (2024),
    doi:10.1137/23M1548323, arXiv:2301.07825, for leaving one out. The choice of the rank
    by the other tests, and the shift, are not in the literature as far as we know.
    """

    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        check_sampler(self.sampler, type(self).__name__, independent=True)

    def compute(self, state, k):
        if kept_of(state) is not None:
            raise TypeError(
                "AdaptiveXTraceEstimator.estimate: an estimate can't go on from an earlier "
                "one; begin anew with init and another key, or go on with "
                "traceax.XTraceEstimator()."
            )
        if k < 8:
            return mean_of_tests(state, k, self.sampler, resphere=False)
        operator, space = state.operator, space_of(state.operator)
        deep = k >= _KRYLOV and is_hermitian(operator)
        probes = draw_range(self.sampler, state.key, 0, k, k, space)
        bar, rank, V, K = (_krylov_split if deep else _split)(operator, probes)
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "basis": rank,
            "kept": (),  # tells a state that was used
        }
        return bar.mean, bar.standard_error, stats, (V, tall.combine(V, K.conj()))


Found = tuple[ErrorBar, Array, Inexact[Array, "n k"], Inexact[Array, "k k"]]


def _split(operator: lx.AbstractLinearOperator, probes: Inexact[Array, "n k"]) -> Found:
    """The error bar, the size of the basis, V, and K with `Z = V conj(K)`."""
    n, k = probes.shape
    h = k // 2
    width = k - h
    W, fresh = probes[:, :h], probes[:, h:]
    Y = apply_block(operator, W)
    unit = tall.power_of_two_scale(Y).astype(Y.dtype)
    Q, R = tall.orthonormalise(Y / unit)
    C, ranks = tall.inner(Q, W), adaptive.candidates(h)
    duals = adaptive.duals_of(R)
    which, energies = adaptive.choose_ranks(duals, R, C, n, k, ranks)
    tests = adaptive.split_tests(duals, which, ranks, width)
    rank = jnp.max(jnp.asarray(ranks)[which])
    basis, pad = jnp.arange(width) < rank, ((0, k - 2 * h), (0, 0))
    X = jnp.where(basis[:, None], jnp.pad(Q.T, pad), fresh.T).T
    AX = apply_block(operator, X) / unit
    R, C = jnp.pad(R, pad), jnp.pad(C, pad)
    form = form_of(tall.column_dots(C, R), tall.inner(W, AX), R, tall.inner(X, AX))
    gram = form_of(tall.column_dots(W, W), C.conj().T, C, tall.inner(X, X))
    samples, shifts = adaptive.samples_of(form, gram, n, tests)
    bar = weighted_samples(
        samples,
        tests.weight,
        magnitude_of(form, basis),
        energy=jnp.mean(energies),
        shared=adaptive.covariance(form, gram, n, tests, shifts),
        freedom=max(2.0, h / 2),
    )
    K = adaptive.stand_in(form, gram, n, tests)
    return scaled(bar, unit), rank, tall.side_by_side(W, X), K


def _krylov_split(
    operator: lx.AbstractLinearOperator, probes: Inexact[Array, "n k"]
) -> Found:
    """The same, of a Hermitian operator."""
    (n, k), b = probes.shape, _WIDTH
    p = k // _SHARE
    p += (k - p) % b
    W, others = probes[:, :p], probes[:, p:]
    Y = apply_block(operator, W)
    unit = tall.power_of_two_scale(Y).astype(Y.dtype)
    Y, width = Y / unit, k - p
    spent = krylov_split.split_budget(
        lambda block: apply_block(operator, block) / unit, W, Y, others, b
    )
    rank, X, AX = b * jnp.max(spent.stop), spent.X, spent.AX
    basis = jnp.arange(width) < rank
    upper, mixed = tall.inner(W, AX), tall.inner(W, X)
    own = tall.column_dots(W, Y), tall.column_dots(W, W)
    form = form_of(own[0], upper, upper.conj().T, tall.inner(X, AX))
    gram = form_of(own[1], mixed, mixed.conj().T, tall.inner(X, X))
    tests = krylov_split.krylov_tests(spent.stop, b, width, W.dtype)
    samples = [adaptive.samples_of(form, gram, n, x)[0] for x in tests]
    bar = weighted_samples(
        jnp.concatenate([x.reshape(-1) for x in samples]),
        jnp.concatenate([x.weight.reshape(-1) for x in tests]),
        magnitude_of(form, basis),
        energy=jnp.mean(spent.energy),
        # Tests of which the basis was stopped earlier have a larger variance.
        freedom=(k - rank) / 2,
    )
    K = adaptive.stand_in(form, gram, n, *tests)
    return scaled(bar, unit), rank, tall.side_by_side(W, X), K


def form_of(
    own: Inexact[Array, " h"],
    upper: Inexact[Array, "h l"],
    lower: Inexact[Array, "l h"],
    inside: Inexact[Array, "l l"],
) -> Inexact[Array, "hl hl"]:
    """A form on `[W, X]`, of W the diagonal only."""
    return jnp.block([[jnp.diag(own), upper], [lower, inside]])


def magnitude_of(form: Inexact[Array, "k k"], basis: Bool[Array, " l"]):
    """What is added up to a sample, for the error of rounding."""
    sizes = jnp.abs(jnp.diagonal(form))
    first = len(form) - len(basis)
    return jnp.mean(sizes[:first]) + jnp.sum(jnp.where(basis, sizes[first:], 0))


def scaled(bar: ErrorBar, unit: Array) -> ErrorBar:
    """The error bar in other units."""
    error = bar.standard_error * jnp.real(unit)
    return ErrorBar(bar.mean * unit, error, bar.degrees_of_freedom)
