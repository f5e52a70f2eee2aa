"""XTrace: low-rank approximations from all probes but one, tested on that probe."""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from .._error_bar import leave_one_out_bar
from .._functional import Trace
from .._linalg.dense import column_dots, extend, inner
from .._linalg.leave_one_out import (
    LeaveOneOut,
    leave_one_out,
    leave_one_out_sums,
    leave_one_out_traces,
    make_probe_set,
    stand_in,
)
from .._operators.space import apply_block
from .._samplers import NormalSampler, Sampler, check_sampler
from .._trace_estimator import GrowingEstimator, average, left_out_blocks, put_units


class XTraceBuffers(NamedTuple):
    """Probes, and an orthonormal basis Q for their products `A Omega = Q R`."""

    Omega: Inexact[Array, "n m"]
    Q: Inexact[Array, "n m"]
    AQ: Inexact[Array, "n m"]
    R: Inexact[Array, "m m"]
    squares: Float[Array, " m"]  # |w_i|^2


class XTraceEstimator(GrowingEstimator):
    r"""XTrace, for any square operator.

    The operator is applied to m = k/2 probes, and to an orthonormal basis of the
    products. For each probe in turn, the trace on the basis from the other probes is
    exact, and the probe left out estimates the rest:

        tr_i = tr(P_i A) + a_i g_i^* A g_i,   g_i = (I - P_i) w_i,   value = mean of tr_i

    *Use when* the spectrum decays. If it doesn't, the variance is up to about twice as
    large as for Hutchinson's estimator.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | 2 (k // 2); Hutchinson's estimator with all k for k < 4 |
    | beyond the products | O(n k^2) time; eight n x k/2 blocks, ten in the derivative |
    | bias | none |
    | standard error | from leaving out pairs of probes, which captures correlations; NaN for k = 1 |
    | derivative | `<Z, dA V>`, k products with dA; unbiased for any dA |

    **Arguments:**

    - `sampler`: draws independent probes. Rotation invariant if `resphere` is set.
    - `resphere`: whether to divide by each projected probe's length, which fluctuates.

    **Reference:** Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample
    in Stochastic Trace Estimation", SIAM J. Matrix Anal. Appl. 45 (2024),
    doi:10.1137/23M1548323, arXiv:2301.07825, section 2.2.
    """

    sampler: Sampler = NormalSampler()
    resphere: bool = eqx.field(default=True, static=True)
    products_per_unit: ClassVar[int] = 2
    gives_diagonals: ClassVar[bool] = True

    def __check_init__(self):
        check_sampler(
            self.sampler,
            type(self).__name__,
            resphere=self.resphere,
            independent=True,
        )

    def fallback(self, state, k):
        # With a single probe we would have no other probe for a basis. We average plain
        # samples instead.
        if k >= 4:
            return None
        if not isinstance(state.functional, Trace):
            raise ValueError(
                "XTraceEstimator.estimate: k must be at least 4 for diagonals and leaf "
                f"traces, got {k}; use traceax.HutchinsonEstimator."
            )
        return average(state, k, self.sampler, resphere=self.resphere, kept=None)

    def begin(self, state, room):
        n, dtype = state.space.size, state.space.compute_dtype
        blocks = jnp.zeros((n, room), dtype)
        return XTraceBuffers(
            Omega=blocks,
            Q=blocks,
            AQ=blocks,
            R=jnp.zeros((room, room), dtype),
            squares=jnp.zeros(room, state.space.real_dtype),
        )

    def grow(self, state, buffers, count, width):
        room = buffers.Q.shape[1]
        Omega = self.sampler.draw_range(state.key, count, width, room, state.space)
        Y = apply_block(state.operator, Omega)
        Q, R = extend(buffers.Q, Y, count)
        AQ = apply_block(state.operator, Q)
        squares = column_dots(Omega, Omega).real
        new = XTraceBuffers(Omega, Q, AQ, R, squares)
        return put_units(buffers, new, count)

    def judge(self, state, buffers, count):
        Omega, Q, AQ, R, _ = buffers
        loo = self._downdates(buffers, count)
        if isinstance(state.functional, Trace):
            T = R if state.space.is_hermitian else inner(AQ, Omega)
            forms = column_dots(inner(Q, Omega), R)  # Omega^* A Omega = Omega^* Q R
            samples = leave_one_out_traces(inner(Q, AQ), T, forms, loo)
        else:
            samples = leave_one_out_sums(Omega, Q, AQ, loo, state.functional)
        return leave_one_out_bar(samples, loo.probes.active), None

    def stand_in(self, state, buffers, count):
        loo = self._downdates(buffers, count)
        return left_out_blocks(stand_in(buffers.Omega, buffers.Q, loo), loo, count)

    def _downdates(self, buffers: XTraceBuffers, count) -> LeaveOneOut:
        probes = make_probe_set(buffers.Q, count, self.resphere)
        W = inner(buffers.Q, buffers.Omega)
        return leave_one_out(W, buffers.squares, buffers.R, probes)
