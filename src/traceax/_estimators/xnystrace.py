"""XNysTrace: leave-one-out Nystrom approximations of a semidefinite operator."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from .._accuracy.error_bar import ErrorBar, leave_one_out_samples, row_error_bar
from .._estimate import RESULTS
from .._growing import ByRows, GrowingEstimator, active_of
from .._linalg.nystrom import (
    NystromFactor,
    nystrom_factor,
    nystrom_rows,
    nystrom_traces,
    stand_in,
)
from .._linalg.tall import combine, extend, put
from .._operators.block import (
    apply_block,
    is_positive_semidefinite,
    is_semidefinite,
    space_of,
)
from .._samplers import NormalSampler, Sampler, check_sampler, draw_range


class XNysTraceEstimator(GrowingEstimator):
    r"""XNysTrace, for positive or negative semidefinite operators.

    Applies the operator to k orthonormalised probes U, builds the Nystrom
    approximation of A from all of them but one, and tests what it misses on the one
    left out, for each in turn:

        tr_i = tr A_(i) + (n - k + 1) u_i^* (A - A_(i)) u_i,    value = mean of tr_i

    *Use when* the operator is known to be semidefinite: a covariance, a Gauss-Newton
    or Fisher matrix, a Hessian at a minimum. The most accurate estimator per product.

    | | |
    |---|---|
    | operator | tagged positive or negative semidefinite, any dtype, PyTrees |
    | products | k, all used |
    | beyond the products | O(n k^2) time, five n x k blocks; the derivative holds seven |
    | bias | none, but for rounding |
    | standard error | from leaving out pairs of probes, so that correlations count; NaN for k = 1 |
    | derivative | `<Z, dA V>` with the leave-one-out blocks of the range of `A Omega`, 2k products with dA; unbiased for any dA |

    **Arguments:**

    - `sampler`: of the probes. Rotation invariant if `resphere`.
    - `resphere`: whether to use that probes are uniform in direction, given the
        others. Without it the probes themselves are left out and tested, of factor 1.

    **Raises:**

    - `ValueError` for `resphere=True` with a sampler that isn't rotation invariant, and
        from `init` for an operator that isn't tagged semidefinite.

    **Reference:** Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample
    in Stochastic Trace Estimation", SIAM J. Matrix Anal. Appl. 45 (2024),
    doi:10.1137/23M1548323, arXiv:2301.07825, section 2.3.
    """

    sampler: Sampler = NormalSampler()
    resphere: bool = eqx.field(default=True, static=True)
    products_per_unit: ClassVar[int] = 1

    def __check_init__(self):
        check_sampler(
            self.sampler,
            type(self).__name__,
            resphere=self.resphere,
            independent=True,
        )

    def check(self, operator, where):
        if not is_semidefinite(operator):
            raise ValueError(
                f"{where}: operator must be tagged positive or negative semidefinite, got "
                f"a {type(operator).__name__} that is neither; if it is, wrap it as "
                "lineax.TaggedLinearOperator(operator, "
                "lineax.positive_semidefinite_tag), else use traceax.XTraceEstimator."
            )

    def begin(self, state, room):
        space = space_of(state.operator)
        blocks = jnp.zeros((space.size, room), space.compute_dtype)
        factor = jnp.zeros((room, room), space.compute_dtype)
        # Probes `Omega = U T`, of orthonormal U.
        return {"U": blocks, "T": factor, "AU": blocks}

    def grow(self, state, buffers, count, width):
        space, most = space_of(state.operator), buffers["U"].shape[1]
        Omega = draw_range(self.sampler, state.key, count, width, most, space)
        U, T = extend(buffers["U"], Omega, count)
        new = {"U": U, "T": T, "AU": apply_block(state.operator, U)}
        return {name: put(buffers[name], x, count) for name, x in new.items()}

    def judge(self, state, buffers, count):
        of, active = self._factor(state, buffers, count)
        traces = nystrom_traces(of, resphere=self.resphere)
        left = of.dimension + 1 if self.resphere else None
        bar = leave_one_out_samples(*traces, left, active=active)
        bar = bar._replace(mean=bar.mean - len(of.F) * of.mu)
        return _of_operator(bar, of)

    def by_rows(self, rows):
        return ByRows(self, rows)

    def judge_rows(self, state, buffers, count, rows):
        of, active = self._factor(state, buffers, count)
        U, resphere = buffers["U"], self.resphere
        tests = U if resphere else combine(U, buffers["T"])
        found = nystrom_rows(tests, of, rows, resphere=resphere, active=active)
        return _of_operator(row_error_bar(found, active), of)

    def stand_in(self, state, buffers, count):
        active = active_of(count, buffers["U"].shape[1])
        return stand_in(**buffers, resphere=self.resphere, active=active)

    def _factor(self, state, buffers, count):
        U, T, AU = (buffers[name] for name in ("U", "T", "AU"))
        active = active_of(count, U.shape[1])
        # Zero is both.
        sign = 1 if is_positive_semidefinite(state.operator) else -1
        of = nystrom_factor(U, T, AU, sign, resphere=self.resphere, active=active)
        return of, active


def _of_operator(bar: ErrorBar, of: NystromFactor) -> tuple[ErrorBar, RESULTS]:
    """The error bar in units of the operator, and whether that is what its tag says."""
    mean = of.scale.astype(bar.mean.dtype) * bar.mean
    error = jnp.abs(of.scale) * bar.standard_error
    result = RESULTS.where(of.wrong, RESULTS.not_semidefinite, RESULTS.successful)
    return ErrorBar(mean, error, bar.degrees_of_freedom), result
