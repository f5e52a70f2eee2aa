"""Hutch++: an exact low-rank part, and Hutchinson's estimator on the remainder."""

from typing import ClassVar

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from .._error_bar import (
    GRAM_PROBES,
    ErrorBar,
    add_samples,
    empty_moments,
    gram_of,
    independent_samples,
    moments_bar,
)
from .._functional import Trace
from .._linalg.dense import (
    column_dots,
    column_norms,
    combine,
    inner,
    orthonormalise,
    side_by_side,
)
from .._operators.space import apply_block
from .._outcome import Evidence
from .._rule import Blocks
from .._samplers import RademacherSampler, Sampler, check_sampler
from .._trace_estimator import TraceEstimator, average


class HutchPlusPlusEstimator(TraceEstimator):
    r"""Hutch++: the exact trace on a sketched range, plus an estimate of the rest.

    One third of the products sketch A's range. Another third compute the exact trace on
    an orthonormal basis Q. The remaining l products give Hutchinson's estimate:

        value = tr(Q^* A Q) + 1/l sum_j g_j^* A g_j,    g_j = (I - Q Q^*) psi_j

    *Use when* you need an error bar from independent samples more than accuracy. With
    the same products XTrace is more accurate, and so is Hutchinson's estimator if the
    spectrum is flat.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used: 2 (k // 3) on the range, l = k - 2 (k // 3) on the rest; all on the rest for k < 4 |
    | beyond the products | O(n k^2) time; seven n x k/3 blocks, also in the derivative |
    | bias | none |
    | standard error | from the residual probes; NaN for k = 1 |
    | derivative | `<Z, dA V>` with `V = [G, Q]`, `Z = [G / l, Q]`; k - k // 3 products with dA; unbiased for any dA |

    **Arguments:** `sampler`: draws all probes, which must be independent.

    **Reference:** Meyer, Musco, Musco and Woodruff, "Hutch++: Optimal Stochastic Trace
    Estimation", SOSA (2021), doi:10.1137/1.9781611976496.16, arXiv:2010.09649.
    """

    sampler: Sampler = RademacherSampler()
    gives_diagonals: ClassVar[bool] = True

    def __check_init__(self):
        # With columns from one orthogonal matrix, our tests would avoid the sketch.
        check_sampler(self.sampler, type(self).__name__, independent=True)

    def compute(self, state, k):
        functional = state.functional
        if k < 4 and isinstance(functional, Trace):
            return average(state, k, self.sampler, resphere=False)
        # We skip the sketch if it would leave a single residual probe and no error bar.
        m = k // 3 if k >= 4 else 0
        l = k - 2 * m  # noqa: E741
        n, dtype = state.space.size, state.space.compute_dtype
        # We take alternating columns from one sequence: XLA compiles a single draw.
        block = self.sampler.sample(state.key, n, 2 * max(m, l), dtype)
        Omega, Psi = block[:, ::2][:, :m], block[:, 1::2][:, :l]
        Y = apply_block(state.operator, Omega)
        Q = orthonormalise(Y)[0] if m else Y
        G = Psi - combine(Q, inner(Q, Psi))
        products = apply_block(state.operator, side_by_side(G, Q))
        AG, AQ = products[:, :l], products[:, l:]
        evidence = None
        if isinstance(functional, Trace):
            samples = column_dots(G, AG), column_dots(Q, AQ)
            forms, first = jnp.concatenate(samples), AG.T[:GRAM_PROBES]
            (bar,) = _bars_from_products(G, (forms, first))
            zeros = jnp.zeros_like(forms), jnp.zeros_like(first)
            evidence = Evidence(zeros, jtu.Partial(_bars_from_products, G))
        else:
            moments = empty_moments(functional, n, dtype)
            moments = add_samples(moments, functional, G, AG, 0)
            bar = moments_bar(moments, l, functional.num_rows(n))
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "kept": (),  # marks the state as used
        }
        value = functional.pair(Q, AQ) + bar.mean
        pair = side_by_side(G, Q), side_by_side(G / l, Q)
        return value, bar.standard_error, stats, Blocks([pair], evidence)


def _bars_from_products(
    G: Inexact[Array, "n l"],
    products: tuple[Inexact[Array, " p"], Inexact[Array, "few n"]],
) -> list[ErrorBar]:
    (forms, first), l = products, G.shape[1]  # noqa: E741
    norms, gram = column_norms(first.T), gram_of(G, first.T)
    return [independent_samples(forms[:l], norms, gram, forms[l:])]
