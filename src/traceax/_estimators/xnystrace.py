"""XNysTrace: leave-one-out Nystrom approximations of a semidefinite operator."""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._error_bar import ErrorBar, leave_one_out_bar
from .._functional import Trace
from .._linalg.dense import combine, extend
from .._linalg.leave_one_out import make_probe_set
from .._linalg.nystrom import nystrom_factor, nystrom_sums, nystrom_traces, stand_in
from .._operators.space import apply_block, is_semidefinite
from .._results import RESULTS
from .._samplers import NormalSampler, Sampler, check_sampler
from .._trace_estimator import GrowingEstimator, left_out_blocks, put_units


class XNysTraceBuffers(NamedTuple):
    """Probes `Omega = U T` with an orthonormal U, and their products."""

    U: Inexact[Array, "n k"]
    T: Inexact[Array, "k k"]
    AU: Inexact[Array, "n k"]


class XNysTraceEstimator(GrowingEstimator):
    r"""XNysTrace, for positive or negative semidefinite operators.

    For each of k orthonormalised probes `u_i`, the other probes make the Nystrom
    approximation `A_(i)`, and `u_i` tests the remainder:

        tr_i = tr A_(i) + (n - k + 1) u_i^* (A - A_(i)) u_i,    value = mean of tr_i

    *Use when* you know that the operator is semidefinite: a covariance, a Gauss-Newton
    or Fisher matrix, a Hessian at a minimum. It has the smallest error per product.

    | | |
    |---|---|
    | operator | tagged positive or negative semidefinite, any dtype, PyTrees |
    | products | k, all used |
    | beyond the products | O(n k^2) time; five n x k blocks, seven in the derivative |
    | bias | none except rounding |
    | standard error | as for [`traceax.XTraceEstimator`][] |
    | derivative | `<Z, dA V>` with leave-one-out blocks from the range of `A Omega`, 2k products with dA; unbiased for any dA |

    **Arguments:** `sampler` and `resphere` are as for [`traceax.XTraceEstimator`][].
    Without resphering, the original probes are left out and tested, with factor 1.

    **Raises:** `ValueError` from `init` if the operator isn't tagged semidefinite.

    **Reference:** section 2.3 in the paper under [`traceax.XTraceEstimator`][].
    """

    sampler: Sampler = NormalSampler()
    resphere: bool = eqx.field(default=True, static=True)
    products_per_unit: ClassVar[int] = 1
    gives_diagonals: ClassVar[bool] = True

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
        n, dtype = state.space.size, state.space.compute_dtype
        blocks = jnp.zeros((n, room), dtype)
        return XNysTraceBuffers(blocks, jnp.zeros((room, room), dtype), blocks)

    def grow(self, state, buffers, count, width):
        room = buffers.U.shape[1]
        Omega = self.sampler.draw_range(state.key, count, width, room, state.space)
        U, T = extend(buffers.U, Omega, count)
        new = XNysTraceBuffers(U, T, apply_block(state.operator, U))
        return put_units(buffers, new, count)

    def judge(self, state, buffers, count):
        U, T, AU = buffers
        probes = make_probe_set(U, count, self.resphere)
        # A zero operator has both signs, so we may take either.
        sign = 1 if state.space.is_positive else -1
        factor = nystrom_factor(U, T, AU, sign, probes)
        if isinstance(state.functional, Trace):
            bar = leave_one_out_bar(
                nystrom_traces(factor), probes.active, may_miss=True
            )
            bar = bar._replace(mean=bar.mean - len(U) * factor.mu)
        else:
            tests = U if self.resphere else combine(U, T)
            samples = nystrom_sums(tests, factor, state.functional)
            bar = leave_one_out_bar(samples, probes.active)
        mean = factor.scale.astype(bar.mean.dtype) * bar.mean
        error = jnp.abs(factor.scale) * bar.standard_error
        result = RESULTS.where(
            factor.is_invalid, RESULTS.not_semidefinite, RESULTS.successful
        )
        return ErrorBar(mean, error, bar.degrees_of_freedom), result

    def stand_in(self, state, buffers, count):
        probes = make_probe_set(buffers.U, count, self.resphere)
        pairs, loo = stand_in(buffers.U, buffers.T, buffers.AU, probes)
        return left_out_blocks(pairs, loo, count)
