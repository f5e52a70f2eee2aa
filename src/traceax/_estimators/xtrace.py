"""XTrace: a low-rank part from every probe, tested on the probe that it left out."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .._base import TraceEstimator
from .._basis import continued_basis, extend_at_once, growing_basis
from .._deflation import deflated_trace, with_basis
from .._kept import Counted, Kept, kept_parts
from .._leave_one_out import (
    CountedStandIn,
    grams,
    leave_one_out,
    leave_one_out_traces,
    probe_dots,
    stand_in,
)
from .._operator import apply_block, extend_products, is_hermitian, space_of
from .._orthogonal import (
    column_dots,
    column_norms,
    products_to_check,
    there,
)
from .._product_cost import reads_large_matrix
from .._samplers import NormalSampler, Sampler, check_sampler, draw_probes, laid_out
from .._standard_error import gram, independent_samples, leave_one_out_samples
from .._state import described, init_state
from .._stream import ProbeStream, counted_chunk
from .._tolerance import (
    FEWEST,
    empty_rows,
    phases,
    put,
    unknown_error,
    until,
)


class XTraceEstimator(TraceEstimator):
    r"""XTrace, for any square operator.

    Applies the operator to m = k/2 probes and to an orthonormal basis of what comes
    out. The trace on the basis that the other probes span is exact; the probe left out
    estimates the rest:

        tr_i = tr(P_i A) + a_i g_i^* A g_i,   g_i = (I - P_i) w_i,   value = mean of tr_i

    *Use when* nothing is known of the operator. Much more accurate than Hutchinson's
    estimator where the spectrum decays, and not worse by more than about 2 in
    variance where it doesn't.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | 2 (k // 2); all k for k < 4, where it is Hutchinson's estimator |
    | beyond the products | O(n k^2) time, four n x k/2 blocks; the derivative holds six |
    | bias | none |
    | standard error | from leaving out pairs of probes, so that correlations count; NaN for k = 1 |
    | derivative | `<Z, dA V>`, k products with dA; unbiased for any dA |

    **Arguments:**

    - `sampler`: of the probes. Rotation invariant if `resphere`.
    - `resphere`: whether to divide by the length of each projected probe, which
        removes its fluctuation.

    **Raises:**

    - `ValueError` for `resphere=True` with a sampler that isn't rotation invariant.

    **Reference:** Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample
    in Stochastic Trace Estimation", SIAM J. Matrix Anal. Appl. 45 (2024),
    doi:10.1137/23M1548323, arXiv:2301.07825, section 2.2.
    """

    sampler: Sampler = NormalSampler()
    resphere: bool = eqx.field(default=True, static=True)

    def __check_init__(self):
        check_sampler(
            self.sampler,
            type(self).__name__,
            resphere=self.resphere,
            independent=True,
        )

    def init(self, key, operator):
        return init_state(key, operator, "XTraceEstimator.init")

    def carry_over(self, state, fresh):
        """What `refresh` uses again: the range of products with the basis."""
        _, AQ, *_ = kept_parts(state, 4)
        nothing = None if AQ is None else AQ[:, :0]
        return with_basis(state, fresh, AQ, nothing)

    def compute(self, state, k):
        if state.basis is not None:
            return deflated_trace(state, k, self.sampler, resphere=self.resphere)
        if k < 4 or _projection_exceeds(state, k):
            return self._without_projection(state, k)
        operator = state.operator
        m = k // 2
        Omega = self._probes(state, m)
        known_Y, known_AQ, *basis = kept_parts(state, 4)
        (Y,) = extend_products(operator, (Omega, known_Y))
        tested = probe_dots(Omega, Y)
        Q, R = continued_basis(Y, *basis)
        (AQ,) = extend_products(operator, (Q, known_AQ))
        of, loo = self._left_out(operator, Omega, Q, AQ, R, tested)
        traces = leave_one_out_traces(of, loo, resphere=self.resphere)
        value, standard_error, freedom = leave_one_out_samples(*traces)
        stats = {
            "num_matvecs": 2 * m,
            "degrees_of_freedom": freedom,
            "largest_product": products_to_check(Y),
            "kept": [Y, AQ, *basis] if basis[0] is None else [Y, AQ, Q, R],
        }
        return value, standard_error, stats, stand_in(Omega, Q, loo)

    def passes(self, state, k):
        """What each pass of a [`traceax.StreamedMean`][] multiplies."""
        if k < 4:
            return [lambda: self._probes(state, k)], lambda Y: [Y, None, None, None]
        blocks = [lambda: self._probes(state, k // 2), lambda Y: growing_basis(Y)[0]]
        return blocks, lambda Y, AQ: [Y, AQ, None, None]

    def loop_goes_on(self, state):
        """Whether an estimate to a tolerance can use what is kept."""
        return state.basis is None and kept_parts(state, 4)[1] is not None

    def compute_until(self, state, k, tolerance, meter):
        operator = state.operator
        space = space_of(operator)
        n, dtype = space.size, space.compute_dtype
        m = k // 2
        sampler = laid_out(self.sampler, space)
        draw = ProbeStream(state.key, sampler, n, m, m, dtype).source()
        wide = reads_large_matrix(operator)

        def step(carry, count, phase):
            rows, R = carry
            Omega = draw(count, phase.width)
            Y = apply_block(operator, Omega)
            Q, columns = extend_at_once(rows[2][: phase.end], Y.T, count)
            AQ = apply_block(operator, Q.T)
            rows = put(rows, [Omega.T, Y.T, Q, AQ.T], count)
            return rows, jax.lax.dynamic_update_slice(R, columns, (0 * count, count))

        def left_out(carry, count, end):
            rows, R = carry
            Omega, Y, Q, AQ = (x[:end].T for x in rows)
            active, dots = there(count, end), probe_dots(Omega, Y)
            R = R[:end, :end]
            return *self._left_out(operator, Omega, Q, AQ, R, dots, active), active

        def look(carry, found, count, phase):
            of, loo, active = left_out(carry, count, phase.end)
            traces = leave_one_out_traces(of, loo, resphere=self.resphere)
            return leave_one_out_samples(*traces, active=active), found

        rows, R, done = [empty_rows(m, operator, draw)] * 4, jnp.zeros((m, m), dtype), 0
        Y, AQ, *basis = kept_parts(state, 4)
        if Y is not None:
            done = Y.shape[1]
            Q, factor = continued_basis(Y, *basis)
            rows = put(rows, [x.T for x in (draw(0, done), Y, Q, AQ)], 0)
            R = R.at[:done, :done].set(factor)
        reached = until(
            tolerance,
            meter,
            phases(m, first=FEWEST // 2, wide=wide, done=done),
            (rows, R),
            None,
            step,
            look,
            unknown_error(space),
            fewest=FEWEST // 2,
            done=done,
        )
        _, loo, _ = left_out(reached.carry, reached.taken, m)
        rows, R = reached.carry
        Omega, Y, Q, _ = (x.T for x in rows)
        kept = [Counted(rows[i], as_columns=True) for i in (1, 3, 2)]
        stats = {
            "num_matvecs": 2 * reached.taken,
            "degrees_of_freedom": reached.bar.degrees_of_freedom,
            "largest_product": products_to_check(Y),
            "kept": Kept(2, [*kept, Counted(R, 2)], described(self), reached.taken),
        }
        blocks = CountedStandIn(
            Omega, Q, loo, reached.taken, counted_chunk(n, m, wide=wide, columns=2)
        )
        return reached.bar.mean, reached.bar.standard_error, stats, blocks

    def _left_out(self, operator, Omega, Q, AQ, R, dots, active=None):
        of = grams(Omega, Q, AQ, R if is_hermitian(operator) else None, *dots)
        loo = leave_one_out(
            of.W, of.squares, R, len(Q), resphere=self.resphere, active=active
        )
        return of, loo

    def _probes(self, state, number):
        space = space_of(state.operator)
        return draw_probes(self.sampler, state.key, number, space)

    def _without_projection(self, state, k):
        # Of two probes each leaves the other a single direction to find, and a single
        # probe none: test all, project none.
        space = space_of(state.operator)
        Omega = self._probes(state, k)
        a = jnp.ones(k, space.real_dtype)
        if self.resphere:
            a = space.size / jnp.real(column_dots(Omega, Omega))
        weights = a.astype(Omega.dtype)
        known_Y, *_ = kept_parts(state, 4)
        (Y,) = extend_products(state.operator, (Omega, known_Y))
        value, standard_error, freedom = independent_samples(
            weights * column_dots(Omega, Y), column_norms(Y), gram(Omega, Y)[None]
        )
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": freedom,
            "largest_product": products_to_check(Y),
            "kept": [Y, None, None, None],
        }
        return value, standard_error, stats, (Omega, Omega * (weights / k)[None, :])


def _projection_exceeds(state, k: int) -> bool:
    # From the up to three products of a run without projection, a few more may not
    # allow for it: those with Q are all still to be taken.
    known_Y, known_AQ, *_ = kept_parts(state, 4)
    if known_Y is None or known_AQ is not None:
        return False
    return max(k // 2 - known_Y.shape[1], 0) + k // 2 > k - state.kept.budget
