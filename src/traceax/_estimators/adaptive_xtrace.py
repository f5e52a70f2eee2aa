"""A budget that splits itself between a basis and the tests of what it leaves."""

import jax
import jax.numpy as jnp

from .._accuracy.error_bar import weighted_samples
from .._base import TraceEstimator, init_state
from .._deflation import deflated_trace
from .._linalg.adaptive import (
    candidates,
    choose_ranks,
    covariance,
    samples_of,
    split_tests,
    stand_in,
)
from .._linalg.leave_one_out import floor_diagonal
from .._linalg.small import inverse_conjugate_transpose
from .._linalg.tall import (
    column_dots,
    combine,
    inner,
    orthonormalise,
    power_of_two_scale,
    side_by_side,
)
from .._operators.block import apply_block, space_of
from .._samplers import RademacherSampler, Sampler, check_sampler, draw_range


class AdaptiveXTraceEstimator(TraceEstimator):
    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        check_sampler(self.sampler, type(self).__name__, independent=True)

    def init(self, key, operator):
        return init_state(key, operator, "AdaptiveXTraceEstimator.init")

    def compute(self, state, k):
        if k < 8:
            return deflated_trace(state, k, self.sampler, resphere=False)
        space = space_of(state.operator)
        n, h = space.size, k // 2
        W = draw_range(self.sampler, state.key, 0, h, k, space)
        Y = apply_block(state.operator, W)
        unit = power_of_two_scale(Y).astype(Y.dtype)
        Q, R = orthonormalise(Y / unit)
        C, ranks = inner(Q, W), candidates(h)
        duals = inverse_conjugate_transpose(floor_diagonal(R))
        which, energies = choose_ranks(duals, R, C, n, k, ranks)
        tests = split_tests(duals, which, ranks, k - h)
        rank = jnp.max(jnp.asarray(ranks)[which])
        X = draw_range(self.sampler, state.key, h, k - h, k, space)
        pad = ((0, k - 2 * h), (0, 0))
        basis = jnp.arange(k - h) < rank
        X = jnp.where(basis[:, None], jnp.pad(Q.T, pad), X.T).T
        AX = apply_block(state.operator, X) / unit
        R, C = jnp.pad(R, pad), jnp.pad(C, pad)
        form = of_blocks(column_dots(C, R), inner(W, AX), R, inner(X, AX))
        gram = of_blocks(column_dots(W, W), C.conj().T, C, inner(X, X))
        samples, shifts = samples_of(form, gram, n, tests)
        shared = covariance(form, gram, n, tests, shifts)
        sizes = jnp.abs(jnp.diagonal(form))
        magnitude = jnp.mean(sizes[:h]) + jnp.sum(jnp.where(basis, sizes[h:], 0))
        bar = weighted_samples(
            samples,
            tests.weight,
            magnitude,
            energy=jnp.mean(energies),
            shared=shared,
            freedom=max(2.0, h / 2),
        )
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "basis": rank,
            "tests": k - rank,
        }
        V = side_by_side(W, X)
        K = stand_in(form, gram, n, tests)
        blocks = V, combine(V, K.conj())
        return bar.mean * unit, bar.standard_error * jnp.real(unit), stats, blocks


def of_blocks(own, upper, lower, inside):
    """A form on `[W, X]`, of W its diagonal only."""
    return jnp.block([[jnp.diag(own), upper], [lower, inside]])
