"""Hutch++: a randomised low-rank part, and Hutchinson on what it leaves."""

from typing import ClassVar

import jax.numpy as jnp

from .._accuracy.error_bar import (
    ErrorBar,
    gram_of,
    independent_samples,
    moments_bar,
)
from .._accuracy.moments import add_samples, empty_moments
from .._average import average
from .._base import TraceEstimator
from .._functional import Trace
from .._linalg.tall import (
    column_dots,
    column_norms,
    combine,
    extend,
    inner,
    side_by_side,
)
from .._operators.block import apply_block
from .._samplers import RademacherSampler, Sampler, check_sampler
from .._slope import with_bar


class HutchPlusPlusEstimator(TraceEstimator):
    r"""Hutch++: the exact trace on a sketched range, Hutchinson on the rest.

    A third of the products sketch the range of A, a third take the exact trace on its
    orthonormal basis Q, and the remaining l estimate the trace of what is left:

        value = tr(Q^* A Q) + 1/l sum_j g_j^* A g_j,    g_j = (I - Q Q^*) psi_j

    *Use when* an error bar from independent samples matters more than accuracy: XTrace is
    more accurate for the same products, and Hutchinson's estimator where the spectrum is
    flat.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used: 2 (k // 3) on the range, l = k - 2 (k // 3) on the rest; all on the rest for k < 4 |
    | beyond the products | O(n k^2) time, seven n x k/3 blocks; the derivative as many |
    | bias | none |
    | standard error | from the residual probes; NaN for k = 1 |
    | derivative | `<Z, dA V>` with `V = [Q, G]`, `Z = [Q, G / l]`; k - k // 3 products with dA; unbiased for any dA |

    **Arguments:** `sampler`: of all probes, independent ones.

    **Reference:** Meyer, Musco, Musco and Woodruff, "Hutch++: Optimal Stochastic Trace
    Estimation", SOSA (2021), doi:10.1137/1.9781611976496.16, arXiv:2010.09649.
    """

    sampler: Sampler = RademacherSampler()
    gives_diagonals: ClassVar[bool] = True

    def __check_init__(self):
        # Of one orthogonal matrix the tests would avoid the sketch.
        check_sampler(self.sampler, type(self).__name__, independent=True)

    def compute(self, state, k):
        functional = state.functional
        if _sketch_size(k, 0, 0) == 0 and isinstance(functional, Trace):
            return average(state, k, self.sampler, resphere=False)
        n, dtype = state.space.size, state.space.compute_dtype
        grown, nothing = state.grown, jnp.zeros((n, 0), dtype)
        Q, AQ, APsi = [nothing] * 3 if grown is None else grown.buffers
        known, tested = Q.shape[1], APsi.shape[1]
        m = _sketch_size(k, known, tested)
        num_tests = max(k - 2 * m, tested)
        # Of one sequence in turn: there is one draw to compile.
        block = self.sampler.sample(state.key, n, 2 * max(m, num_tests), dtype)
        Omega, Psi = block[:, ::2][:, :m], block[:, 1::2][:, :num_tests]
        Y = apply_block(state.operator, Omega[:, known:])
        if m > known:
            basis = jnp.pad(Q, ((0, 0), (0, m - known)))
            new, _ = extend(basis, Y, known)
            Q = side_by_side(Q, new)
        # Of the probes themselves: what is left of them depends on all of the sketch,
        # and products with it could not be used again.
        block = side_by_side(Q[:, known:], Psi[:, tested:])
        products = apply_block(state.operator, block)
        AQ = side_by_side(AQ, products[:, : m - known])
        APsi = side_by_side(APsi, products[:, m - known :])
        inside = inner(Q, Psi)
        G, AG = Psi - combine(Q, inside), APsi - combine(AQ, inside)
        if isinstance(functional, Trace):
            bar = _bar(G, AG, column_dots(Q, AQ))
        else:
            moments = empty_moments(functional, n, dtype)
            bar = moments_bar(add_samples(moments, functional, G, AG, 0), num_tests)
        stats = {
            "num_matvecs": 2 * m + num_tests,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "kept": [Q, AQ, APsi],
        }
        value = functional.pair(Q, AQ) + bar.mean
        blocks = side_by_side(Q, G), side_by_side(Q, G / num_tests)
        return value, bar.standard_error, stats, with_bar(blocks, _slope_bar, m)


def _slope_bar(rank: int, V, W) -> ErrorBar:
    exact = column_dots(V[:, :rank], W[:, :rank])
    return _bar(V[:, rank:], W[:, rank:], exact)


def _bar(G, AG, exact) -> ErrorBar:
    samples, norms = column_dots(G, AG), column_norms(AG)
    return independent_samples(samples, norms, gram_of(G, AG), exact)


def _sketch_size(k: int, known: int, tested: int) -> int:
    """The number of probes that sketch the range, of k products in all.

    `known` did before, and `tested` were tested on what it left: no more new products are
    taken than were allowed for.
    """
    # A single residual probe would leave the error unknown.
    size, budget = (k // 3 if k >= 4 else 0), k - 2 * known - tested
    while size > known and 2 * (size - known) + max(k - 2 * size - tested, 0) > budget:
        size -= 1
    return max(size, known)
