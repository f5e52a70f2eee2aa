"""Hutch++: a randomised low-rank part, and Hutchinson on what it leaves."""

import jax
import jax.numpy as jnp

from .._base import TraceEstimator, init_state
from .._operator import apply_block, space_of
from .._orthogonal import (
    column_dots,
    column_norms,
    combine,
    inner,
    largest_entry,
    orthonormalise,
)
from .._samplers import RademacherSampler, Sampler, check_sampler, laid_out
from .._sharding import side_by_side
from .._standard_error import gram, independent_samples


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
    | beyond the products | O(n k^2) time, three n x 2k/3 blocks; the derivative holds three |
    | bias | none |
    | standard error | from the residual probes; NaN for k = 1 |
    | derivative | `<Z, dA V>` with `V = [Q, G]`, `Z = [Q, G / l]`; k - k // 3 products with dA; unbiased for any dA |

    **Arguments:**

    - `sampler`: of the sketch and of the residual probes;
        [`traceax.RademacherSampler`][] by default.

    **Reference:** Meyer, Musco, Musco and Woodruff, "Hutch++: Optimal Stochastic Trace
    Estimation", SOSA (2021), doi:10.1137/1.9781611976496.16, arXiv:2010.09649.
    """

    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        check_sampler(self.sampler, type(self).__name__)

    def init(self, key, operator):
        return init_state(key, operator, "HutchPlusPlusEstimator.init")

    def compute(self, state, k):
        operator = state.operator
        space = space_of(operator)
        n, dtype = space.size, space.compute_dtype
        sampler = laid_out(self.sampler, space)
        # A single residual probe would leave the error unknown.
        sketch_size = k // 3 if k >= 4 else 0
        num_residual = k - 2 * sketch_size
        sketch_key, residual_key = jax.random.split(state.key)
        Omega = sampler.sample(sketch_key, n, sketch_size, dtype)
        Psi = sampler.sample(residual_key, n, num_residual, dtype)
        Y = apply_block(operator, Omega)
        Q, _ = orthonormalise(Y)
        G = Psi - combine(Q, inner(Q, Psi))
        # One block of products where the sketch no longer matters.
        V = side_by_side(Q, G)
        AV = apply_block(operator, V)
        quadratics = column_dots(V, AV)
        low_rank = quadratics[:sketch_size]
        residual, standard_error, freedom = independent_samples(
            quadratics[sketch_size:],
            column_norms(AV[:, sketch_size:]),
            gram(G, AV[:, sketch_size:])[None],
            low_rank,
        )
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": freedom,
            "largest_product": largest_entry(Y if sketch_size else AV),
        }
        Z = side_by_side(Q, G / num_residual)
        return jnp.sum(low_rank) + residual, standard_error, stats, (V, Z)
