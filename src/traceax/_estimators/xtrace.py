"""XTrace: a low-rank part from every probe, tested on the probe that it left out."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from .._accuracy.error_bar import leave_one_out_samples, row_error_bar
from .._deflation import deflated_trace, only_tests, trace_beside_basis, with_basis
from .._growing import ByRows, GrowingEstimator, Grown, active_of
from .._linalg.leave_one_out import (
    grams,
    leave_one_out,
    leave_one_out_rows,
    leave_one_out_traces,
    stand_in,
)
from .._linalg.tall import column_dots, extend, put
from .._operators.block import apply_block, is_hermitian, space_of
from .._samplers import NormalSampler, Sampler, check_sampler, draw_range


class XTraceEstimator(GrowingEstimator):
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
    | beyond the products | O(n k^2) time, eight n x k/2 blocks; the derivative holds ten |
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
    products_per_unit: ClassVar[int] = 2

    def __check_init__(self):
        check_sampler(
            self.sampler,
            type(self).__name__,
            resphere=self.resphere,
            independent=True,
        )

    def carry_over(self, state, fresh):
        if state.kept is None:
            return with_basis(state, fresh, None, None)
        parts = state.kept.parts
        rest = parts if state.basis is None else parts[1]
        if not isinstance(rest, Grown):
            return with_basis(state, fresh, rest[:, :0], rest)
        AQ = rest.buffers["AQ"]
        return with_basis(state, fresh, AQ, AQ[:, :0])

    def instead(self, state, k):
        # Of two probes each leaves the other a single direction to find, and a single
        # probe none: test all, project none.
        if state.basis is not None and not only_tests(state, k):
            return trace_beside_basis(self, state, k)
        if k < 4 or state.basis is not None:
            return deflated_trace(state, k, self.sampler, resphere=self.resphere)
        return None

    def begin(self, state, room):
        space = space_of(state.operator)
        blocks = jnp.zeros((space.size, room), space.compute_dtype)
        return {
            "Omega": blocks,
            "Q": blocks,
            "AQ": blocks,
            "R": jnp.zeros((room, room), space.compute_dtype),
            "squares": jnp.zeros(room, space.real_dtype),  # |w_i|^2
            "tested": jnp.zeros(room, space.compute_dtype),  # w_i^* A w_i
        }

    def grow(self, state, buffers, count, width):
        operator, space = state.operator, space_of(state.operator)
        most = buffers["Q"].shape[1]
        Omega = draw_range(self.sampler, state.key, count, width, most, space)
        Y = apply_block(operator, Omega)
        Q, R = extend(buffers["Q"], Y, count)
        new = {
            "Omega": Omega,
            "Q": Q,
            "AQ": apply_block(operator, Q),
            "R": R,
            "squares": jnp.real(column_dots(Omega, Omega)),
            "tested": column_dots(Omega, Y),
        }
        return {name: put(buffers[name], x, count) for name, x in new.items()}

    def judge(self, state, buffers, count):
        of, loo, active = self._left_out(state, buffers, count)
        traces = leave_one_out_traces(of, loo, resphere=self.resphere)
        return leave_one_out_samples(*traces, active=active), None

    def by_rows(self, rows):
        return ByRows(self, rows)

    def judge_rows(self, state, buffers, count, rows):
        if buffers["Q"].shape[1] < 2:
            raise ValueError(
                "traceax.diagonal: XTraceEstimator needs at least 4 products; use "
                "traceax.HutchinsonEstimator."
            )
        _, loo, active = self._left_out(state, buffers, count)
        Omega, Q, AQ = (buffers[name] for name in ("Omega", "Q", "AQ"))
        of = leave_one_out_rows(
            Omega, Q, AQ, loo, rows, resphere=self.resphere, active=active
        )
        return row_error_bar(of, active), None

    def stand_in(self, state, buffers, count):
        _, loo, active = self._left_out(state, buffers, count)
        return stand_in(buffers["Omega"], buffers["Q"], loo, active)

    def _left_out(self, state, buffers, count):
        Omega, Q, AQ, R, squares, tested = (
            buffers[name] for name in ("Omega", "Q", "AQ", "R", "squares", "tested")
        )
        n, most = Q.shape
        active = active_of(count, most)
        T = R if is_hermitian(state.operator) else None
        of = grams(Omega, Q, AQ, T, squares, tested)
        loo = leave_one_out(of.W, squares, R, n, resphere=self.resphere, active=active)
        return of, loo, active
