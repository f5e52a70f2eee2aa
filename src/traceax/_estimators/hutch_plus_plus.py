"""Hutch++: a randomised low-rank part, and Hutchinson on what it leaves."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._accuracy.error_bar import gram_of, independent_rows, independent_samples
from .._base import TraceEstimator
from .._deflation import deflated_trace, only_tests, trace_beside_basis, with_basis
from .._linalg.tall import (
    RowMoments,
    Rows,
    column_dots,
    column_norms,
    combine,
    extend,
    inner,
    side_by_side,
)
from .._operators.block import apply_block, space_of
from .._samplers import RademacherSampler, Sampler, check_sampler
from .._state import init_state


class HutchPlusPlusEstimator(TraceEstimator):
    r"""Hutch++: the exact trace on a sketched range, Hutchinson on the rest.

    A third of the products sketch the range of A, a third take the exact trace on its
    orthonormal basis Q, and the remaining l estimate the trace of what is left:

        value = tr(Q^* A Q) + 1/l sum_j g_j^* A g_j,    g_j = (I - Q Q^*) psi_j

    *Use when* an error bar from independent samples matters more than accuracy: its
    residual probes are independent of the range they are tested on. XTrace makes every
    probe do both and is more accurate for the same products. Where the spectrum is
    flat, the products spent on a range are wasted: use Hutchinson's estimator.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used: 2 (k // 3) on the range, l = k - 2 (k // 3) on the rest; all on the rest for k < 4 |
    | beyond the products | O(n k^2) time, seven n x k/3 blocks; the derivative as many |
    | bias | none |
    | standard error | from the residual probes; NaN for k = 1 |
    | derivative | `<Z, dA V>` with `V = [Q, G]`, `Z = [Q, G / l]`; k - k // 3 products with dA; unbiased for any dA |

    **Arguments:**

    - `sampler`: of the sketch and of the residual probes;
        [`traceax.RademacherSampler`][] by default. Independent.

    **Raises:**

    - `ValueError` for a sampler whose probes aren't independent.

    **Reference:** Meyer, Musco, Musco and Woodruff, "Hutch++: Optimal Stochastic Trace
    Estimation", SOSA (2021), doi:10.1137/1.9781611976496.16, arXiv:2010.09649.
    """

    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        # Of one orthogonal matrix the tests would avoid the sketch.
        check_sampler(self.sampler, type(self).__name__, independent=True)

    def init(self, key, operator):
        return init_state(key, operator, "HutchPlusPlusEstimator.init")

    def carry_over(self, state, fresh):
        if state.kept is None:
            return with_basis(state, fresh, None, None)
        parts = state.kept.parts
        rest = parts if state.basis is None else parts[1]
        if isinstance(rest, jax.Array):
            return with_basis(state, fresh, rest[:, :0], rest)
        _, AQ, APsi = rest
        return with_basis(state, fresh, AQ, APsi)

    def by_rows(self, rows):
        return _ByRows(self, rows)

    def compute(self, state, k):
        if state.basis is not None and not only_tests(state, k):
            return trace_beside_basis(self, state, k)
        if state.basis is not None or _sketch_size(k, 0, 0) == 0:
            return deflated_trace(state, k, self.sampler, resphere=False)
        of = self._products(state, k)
        low_rank = column_dots(of.Q, of.AQ)
        residual, standard_error, freedom = independent_samples(
            column_dots(of.G, of.AG),
            column_norms(of.AG),
            gram_of(of.G, of.AG),
            low_rank,
        )
        stats = {**of.stats, "degrees_of_freedom": freedom}
        return jnp.sum(low_rank) + residual, standard_error, stats, of.blocks()

    def _products(self, state, k: int) -> "_Products":
        operator, space = state.operator, space_of(state.operator)
        n, dtype = space.size, space.compute_dtype
        kept, nothing = state.kept, jnp.zeros((n, 0), dtype)
        Q, AQ, APsi = [nothing] * 3 if kept is None else kept.parts
        known, tested = Q.shape[1], APsi.shape[1]
        m = _sketch_size(k, known, tested)
        num_residual = max(k - 2 * m, tested)
        # Of one sequence in turn: there is one draw to compile.
        block = self.sampler.sample(state.key, n, 2 * max(m, num_residual), dtype)
        Omega, Psi = block[:, ::2][:, :m], block[:, 1::2][:, :num_residual]
        Y = apply_block(operator, Omega[:, known:])
        if m > known:
            basis = jnp.pad(Q, ((0, 0), (0, m - known)))
            new, _ = extend(basis, Y, known)
            Q = side_by_side(Q, new)
        # Of the probes themselves: what is left of them depends on all of the sketch,
        # and products with it could not be used again.
        block = side_by_side(Q[:, known:], Psi[:, tested:])
        products = apply_block(operator, block)
        AQ = side_by_side(AQ, products[:, : m - known])
        APsi = side_by_side(APsi, products[:, m - known :])
        inside = inner(Q, Psi)
        G, AG = Psi - combine(Q, inside), APsi - combine(AQ, inside)
        stats = {"num_matvecs": 2 * m + num_residual, "kept": [Q, AQ, APsi]}
        return _Products(Q, AQ, G, AG, stats)


class _Products(NamedTuple):
    """A basis, what it leaves of probes, and products with both."""

    Q: Inexact[Array, "n m"]
    AQ: Inexact[Array, "n m"]
    G: Inexact[Array, "n l"]
    AG: Inexact[Array, "n l"]
    stats: dict[str, Any]

    def blocks(self):
        return side_by_side(self.Q, self.G), side_by_side(
            self.Q, self.G / self.G.shape[1]
        )


class _ByRows(TraceEstimator):
    """The same, of groups of rows of the diagonal."""

    estimator: HutchPlusPlusEstimator
    rows: Rows = eqx.field(static=True)

    def init(self, key, operator):
        return self.estimator.init(key, operator)

    def compute(self, state, k):
        of = self.estimator._products(state, k)
        moments = RowMoments.none(self.rows, of.G)
        bar = independent_rows(
            moments.with_samples(of.G, of.AG, self.rows, 0), of.G.shape[1]
        )
        low_rank = self.rows(jnp.sum(of.Q.conj() * of.AQ, axis=1))
        stats = {**of.stats, "degrees_of_freedom": bar.degrees_of_freedom}
        return low_rank + bar.mean, bar.standard_error, stats, of.blocks()


def _sketch_size(k: int, known: int, tested: int) -> int:
    """How many probes sketch the range, of k products in all.

    `known` and `tested` are how many sketched it before, and were tested on the rest: no
    more new products are taken than were allowed for, also where one probe less is wanted.
    """
    # A single residual probe would leave the error unknown.
    size, budget = (k // 3 if k >= 4 else 0), k - 2 * known - tested
    while size > known and 2 * (size - known) + max(k - 2 * size - tested, 0) > budget:
        size -= 1
    return max(size, known)
