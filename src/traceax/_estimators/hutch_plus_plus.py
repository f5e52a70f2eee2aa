"""Hutch++: a randomised low-rank part, and Hutchinson on what it leaves."""

import jax
import jax.numpy as jnp

from .._base import TraceEstimator, init_state
from .._operator import apply_block, space_of
from .._orthogonal import column_dots, column_norms, inner, matmul, qr
from .._samplers import RademacherSampler, Sampler, check_resphere
from .._standard_error import independent_samples


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
    | beyond the products | O(n k^2) time, about three n x 2k/3 blocks |
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
        check_resphere(False, self.sampler, type(self).__name__)

    def init(self, key, operator):
        return init_state(key, operator, "HutchPlusPlusEstimator.init")

    def compute(self, state, k):
        operator = state.operator
        space = space_of(operator)
        n, dtype = space.size, space.compute_dtype
        # A single residual probe would leave the error unknown.
        sketch_size = k // 3 if k >= 4 else 0
        num_residual = k - 2 * sketch_size
        sketch_key, residual_key = jax.random.split(state.key)
        Omega = self.sampler.sample(sketch_key, n, sketch_size, dtype)
        Psi = self.sampler.sample(residual_key, n, num_residual, dtype)
        Q, _ = qr(apply_block(operator, Omega))
        G = Psi - matmul(Q, inner(Q, Psi))
        # One block of products where the sketch no longer matters.
        V = jnp.concatenate([Q, G], axis=1)
        AV = apply_block(operator, V)
        quadratics = column_dots(V, AV)
        low_rank = jnp.sum(quadratics[:sketch_size])
        residual, standard_error = independent_samples(
            quadratics[sketch_size:], column_norms(AV[:, sketch_size:])
        )
        stats = {"num_matvecs": k, "degrees_of_freedom": num_residual - 1}
        Z = jnp.concatenate([Q, G / num_residual], axis=1)
        return low_rank + residual, standard_error, stats, (V, Z)
