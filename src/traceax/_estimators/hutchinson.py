"""The Girard-Hutchinson estimator."""

import math

import equinox as eqx
import jax.numpy as jnp

from .._base import TraceEstimator, init_state
from .._operator import apply_block, space_of
from .._orthogonal import column_dots, column_norms, largest_entry
from .._samplers import RademacherSampler, Sampler, check_sampler, laid_out
from .._standard_error import gram, independent_samples
from .._stream import ProbeStream, check_chunk_size, chunk_size, without_numpy


class HutchinsonEstimator(TraceEstimator):
    r"""The Girard-Hutchinson estimator, the mean of `w_j^* A w_j` over k probes.

    *Use when* the budget is a handful of products, as in a Jacobian trace inside a
    training loop, or when the spectrum is flat. Its error falls as `1 / sqrt(k)`
    whatever the spectrum: with more than about ten products the other estimators are
    better wherever the spectrum decays.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used |
    | beyond the products | O(n k) time, two n x c blocks in value and derivative, with c = `chunk_size` |
    | bias | none |
    | variance | real symmetric A, signs: `2 (|A|_F^2 - sum_i A_ii^2) / k` |
    | derivative | the exact gradient of the estimate, k products with dA |

    **Arguments:**

    - `sampler`: of the probes; [`traceax.RademacherSampler`][] by default. With
        [`traceax.OrthogonalSampler`][] the variance is smaller by `1 - k / n`.
    - `chunk_size`: how many probes are alive at once. Probes of the next chunk take
        their memory, and derivatives draw them again, so that memory does not grow with
        k. By default as many as have 2^22 entries together, and at least 4. The value
        does not depend on it, but for rounding.

    **Reference:** Girard, "A fast 'Monte-Carlo cross-validation' procedure for large
    least squares problems with noisy data", Numer. Math. 56 (1989),
    doi:10.1007/BF01395775; Hutchinson, "A stochastic estimator of the trace of the
    influence matrix for Laplacian smoothing splines", Commun. Stat. Simul. Comput. 18
    (1989), doi:10.1080/03610918908812806.
    """

    sampler: Sampler = RademacherSampler()
    chunk_size: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )

    def __check_init__(self):
        check_sampler(self.sampler, type(self).__name__)
        check_chunk_size(self.chunk_size, type(self).__name__)

    def init(self, key, operator):
        return init_state(key, operator, "HutchinsonEstimator.init")

    def compute(self, state, k):
        space = space_of(state.operator)
        n, dtype = space.size, space.compute_dtype
        sampler = laid_out(self.sampler, space)

        def test(Omega):
            Y = apply_block(state.operator, Omega)
            of_probes = column_dots(Omega, Y), column_norms(Y)
            return of_probes, gram(Omega, Y), largest_entry(Y)

        size = chunk_size(self.chunk_size, self.sampler, n, k)
        if size == k:
            Omega = sampler.sample(state.key, n, k, dtype)
            (samples, norms), grams, largest = test(Omega)
            grams = grams[None]
            blocks = Omega, Omega / k
        else:
            blocks = ProbeStream(state.key, sampler, n, k, size, dtype)
            whole, last = blocks.map(test)
            assert whole is not None
            of_probes, grams, largest = whole
            samples, norms = (x.reshape(-1) for x in of_probes)
            largest = jnp.max(largest)
            if last is not None:
                (more_samples, more_norms), _, more_largest = last
                samples = jnp.concatenate([samples, more_samples])
                norms = jnp.concatenate([norms, more_norms])
                largest = jnp.maximum(largest, more_largest)
        value, standard_error, freedom = independent_samples(samples, norms, grams)
        if not self.sampler.independent:
            # Samples of a part of an orthogonal basis, whose sum over all is known.
            standard_error = standard_error * math.sqrt(1 - k / n)
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": freedom,
            "largest_product": largest,
        }
        return value, standard_error, stats, blocks
