"""Hutch++: a randomised low-rank part, and Hutchinson on what it leaves."""

import jax
import jax.numpy as jnp

from .._base import TraceEstimator
from .._basis import growing_basis
from .._deflation import deflated_trace, with_basis
from .._hash import split
from .._kept import kept_parts
from .._operator import extend_products, space_of
from .._orthogonal import (
    column_dots,
    combine,
    inner,
    largest_entries,
    power_of_two,
    products_to_check,
    sum_over_rows,
)
from .._samplers import (
    RademacherSampler,
    Sampler,
    check_sampler,
    draw_probes,
    laid_out,
    ranges_of,
)
from .._sharding import side_by_side
from .._staging import inlined
from .._standard_error import GRAM_PROBES, gram, independent_samples
from .._state import init_state

# No sketch is as large, and four words for each probe have different positions.
_APART = 2**29


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
    | beyond the products | O(n k^2) time, six n x k/3 blocks; the derivative holds three |
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

    def carry_over(self, state, fresh):
        """What `refresh` uses again: the range of products."""
        _, *products = kept_parts(state, 3)
        return with_basis(state, fresh, *products)

    def compute(self, state, k):
        if state.basis is not None:
            return deflated_trace(state, k, self.sampler, resphere=False)
        operator = state.operator
        known_Y, known_AQ, known_APsi = kept_parts(state, 3)
        sketch_size = _sketch_size(state, k)
        num_residual = k - 2 * sketch_size
        # Barriers, or XLA draws probes wherever they are used, and sums over all entries
        # of a block once more.
        probes = self._probes(state, sketch_size, num_residual)
        rows = jax.lax.optimization_barrier([block.T for block in probes])
        Omega, Psi = (block.T for block in rows)
        (Y,) = extend_products(operator, (Omega, known_Y))
        Q, _ = growing_basis(Y)
        # Of the probes themselves: what is left of them depends on all of the sketch,
        # and products with it could not be used again.
        AQ, APsi = extend_products(operator, (Q, known_AQ), (Psi, known_APsi))
        inside = inner(Psi, Q).conj().T
        # Of columns first, as the basis needs them.
        first = Y if sketch_size else APsi
        largest = jnp.max(largest_entries(first))
        tests = _residual_tests(Q, AQ, Psi, APsi, inside, power_of_two(largest))
        dots, norms, products, low_rank = jax.lax.optimization_barrier(
            (*tests, column_dots(Q, AQ))
        )
        residual, standard_error, freedom = independent_samples(
            dots, norms, products, low_rank
        )
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": freedom,
            "largest_product": products_to_check(first),
            "kept": [Y, AQ, APsi],
        }
        G = Psi - combine(Q, inside)
        blocks = side_by_side(Q, G), side_by_side(Q, G / num_residual)
        return jnp.sum(low_rank) + residual, standard_error, stats, blocks

    def passes(self, state, k):
        """What each pass of a [`traceax.StreamedMean`][] multiplies."""
        m = _size_of_new_sketch(k)

        def probes():
            return side_by_side(*self._probes(state, m, k - 2 * m))

        def basis(products):
            return growing_basis(products[:, :m])[0]

        def parts(products, AQ=None):
            Y, APsi = products[:, :m], products[:, m:]
            return [Y, Y if AQ is None else AQ, APsi]

        return [probes, basis] if m else [probes], parts

    def _probes(self, state, sketch_size, num_residual):
        space = space_of(state.operator)
        probes = ranges_of(laid_out(self.sampler, space))
        if probes is not None:
            # Of one sequence, far apart: there is one key to be hashed.
            return [
                probes(state.key, start, space.size, number, space.compute_dtype)
                for start, number in ((0, sketch_size), (_APART, num_residual))
            ]
        sketch_key, residual_key = split(state.key, 2)
        Omega = draw_probes(self.sampler, sketch_key, sketch_size, space)
        return Omega, draw_probes(self.sampler, residual_key, num_residual, space)


@inlined
def _residual_tests(Q, AQ, Psi, APsi, inside, scale):
    """`g_i^* A g_i`, `|A g_i|` and `g_i^* A g_j` of the first `g_i = (I - Q Q^*) psi_i`,
    for products of about that scale."""

    def sums(Q, AQ, Psi, APsi):
        # In rows, as blocks are in memory.
        G = (Psi.T - combine(Q, inside).T).T
        AG = (APsi.T - combine(AQ, inside).T).T
        scaled = (AG.T / scale.astype(AG.dtype)).T
        products = gram(G, AG) if G.shape[1] > 2 * GRAM_PROBES else inner(G, AG)
        return column_dots(G, AG), column_dots(scaled, scaled), products

    dots, squares, products = sum_over_rows(sums, Q, AQ, Psi, APsi)
    products = products[None, :GRAM_PROBES, :GRAM_PROBES]
    return dots, scale * jnp.sqrt(jnp.real(squares)), products


def _size_of_new_sketch(k: int) -> int:
    # A single residual probe would leave the error unknown.
    return k // 3 if k >= 4 else 0


def _sketch_size(state, k: int) -> int:
    size = _size_of_new_sketch(k)
    known_Y, _, known_APsi = kept_parts(state, 3)
    if known_Y is None:
        return size
    # No more new products than were allowed for, also where one probe less is wanted.
    sketch, residual = known_Y.shape[1], known_APsi.shape[1]
    while 2 * (size - sketch) + max(k - 2 * size - residual, 0) > (
        k - state.kept.budget
    ):
        size -= 1
    return size
