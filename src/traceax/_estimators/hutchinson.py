"""The Girard-Hutchinson estimator."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp

from .._base import TraceEstimator
from .._kept import Counted, Kept, kept_parts
from .._operator import apply_block, extend_products, space_of
from .._orthogonal import (
    TILE,
    column_dots,
    column_norms,
    dots_and_norms,
    products_to_check,
    there,
)
from .._product_cost import reads_large_matrix
from .._samplers import RademacherSampler, Sampler, check_sampler, laid_out
from .._sharding import columns, side_by_side
from .._standard_error import GRAM_PROBES, gram, independent_samples
from .._state import described, init_state
from .._stream import (
    CountedStream,
    ProbeStream,
    check_chunk_size,
    chunk_size,
    counted_chunk,
    without_numpy,
)
from .._tolerance import empty_rows, phases, put, unknown_error, until


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
        k. By default as many as have 2^20 entries together, which stay in the cache of a
        CPU, and at least 4, in multiples of 8 where it is more. Other devices may be
        faster with more. The value does not depend on it, but for rounding.

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
        stream = self._stream(state, k)
        size = stream.chunk_size
        # Of each probe, of the first probes of each whole chunk, and, of a chunk that
        # has only begun, the products of its first probes.
        samples, norms, grams, head = _of_chunks(state, size)
        of_probes = [] if samples is None else [(samples, norms)]
        of_chunks = [] if grams is None else [grams]
        done = 0 if samples is None else samples.shape[0]

        def test(block):
            (Y,) = extend_products(state.operator, (block, None))
            return dots_and_norms(block, Y, min(size, TILE)), Y

        def test_whole(block):
            tested, Y = test(block)
            return tested, gram(block, Y)

        begin, end = done // size * size, min((done // size + 1) * size, k)
        if done > begin and end > done:
            tested, Y = test(stream.draw(done, end - done))
            of_probes.append(tested)
            if head is not None:
                head = side_by_side(head, Y)[:, :GRAM_PROBES]
            if end == begin + size and head is not None:
                first = stream.draw(begin, min(size, GRAM_PROBES))
                of_chunks.append(gram(first, head)[None])
                head = None
            done = end
        if done + size <= k:
            tested, stacked = stream.map(test_whole, done // size)
            of_probes.append(tuple(x.reshape(-1) for x in tested))
            of_chunks.append(stacked)
            done = k // size * size
        Omega = stream.draw(0, k) if k < size else None
        check = None
        if done < k:
            block = stream.draw(done, k - done) if done or Omega is None else Omega
            tested, Y = test(block)
            of_probes.append(tested)
            head = columns(Y, 0, GRAM_PROBES)
            # Norms take a pass over products, which the value alone can do without.
            if done == 0:
                check = products_to_check(Y)

        samples, norms = jax.lax.optimization_barrier(
            tuple(jnp.concatenate(x) for x in zip(*of_probes, strict=True))
        )
        if of_chunks:
            grams = jnp.concatenate(of_chunks)
            tested = grams
        else:
            assert Omega is not None
            assert head is not None
            tested = gram(Omega, head)[None]
        value, standard_error, freedom = independent_samples(
            samples, norms, tested, dimension=stream.n
        )
        if not self.sampler.independent:
            # Samples of a part of an orthogonal basis, whose sum over all is known.
            standard_error = standard_error * math.sqrt(1 - k / stream.n)
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": freedom,
            "largest_product": norms if check is None else check,
            "kept": [samples, norms, grams, head],
        }
        blocks = stream if Omega is None else (Omega, Omega / k)
        return value, standard_error, stats, blocks

    def passes(self, state, k):
        """What each pass of a [`traceax.StreamedMean`][] multiplies."""
        stream = self._stream(state, k)
        n, size = stream.n, stream.chunk_size
        whole = k // size * size

        def of_chunks(block):
            return block[:, :whole].T.reshape(-1, size, n)[:, :GRAM_PROBES]

        def parts(Y):
            Omega = stream.draw(0, k)
            samples, norms = dots_and_norms(Omega, Y, min(size, TILE))
            grams = head = None
            if whole:
                grams = jax.vmap(lambda x, y: gram(x.T, y.T))(
                    of_chunks(Omega), of_chunks(Y)
                )
            if whole < k:
                head = Y[:, whole:][:, :GRAM_PROBES]
            return [samples, norms, grams, head]

        return [lambda: stream.draw(0, k)], parts

    def _stream(self, state, k):
        space = space_of(state.operator)
        sampler = laid_out(self.sampler, space)
        size = chunk_size(self.chunk_size, self.sampler, space.size)
        return ProbeStream(state.key, sampler, space.size, k, size, space.compute_dtype)

    def loop_goes_on(self, state):
        """Whether an estimate to a tolerance can use what is kept."""
        del state
        return True

    def compute_until(self, state, k, tolerance, meter):
        space = space_of(state.operator)
        n, dtype = space.size, space.compute_dtype
        sampler = laid_out(self.sampler, space)
        widest = chunk_size(self.chunk_size, self.sampler, n)
        wide = reads_large_matrix(state.operator)
        size = min(widest, counted_chunk(n, k, wide=wide))
        stream = ProbeStream(state.key, sampler, n, k, size, dtype)
        draw = stream.source()
        samples, norms, head, products = self._known(state, stream)
        done, few = len(samples), len(products)
        schedule = phases(k, widest, wide=wide, done=done)
        growing = [
            phase
            for phase in schedule
            if done < few and (phase.width < GRAM_PROBES or phase is schedule[0])
        ]
        # The step that takes the last of the first probes may take more.
        room = max((phase.width for phase in growing), default=0)
        head = jnp.pad(head, ((0, room), (0, 0)))

        def step(carry, count, phase):
            samples, norms, head, products = carry
            block = draw(count, phase.width)
            Y = apply_block(state.operator, block)
            if phase in growing:

                def grown():
                    (longer,) = put([head], [Y.T], count)
                    return longer, gram(draw(0, few), longer[:few].T)

                # Where steps widen early, before they do all phases see the first probes.
                head, products = jax.lax.cond(
                    count < few, grown, lambda: (head, products)
                )
            tested = [column_dots(block, Y), column_norms(Y)]
            samples, norms = put([samples, norms], tested, count)
            return samples, norms, head, products

        def look(carry, found, count, phase):
            samples, norms, _, products = carry
            bar = independent_samples(
                samples, norms, products[None], dimension=n, active=there(count, k)
            )
            if not self.sampler.independent:
                left = 1 - count.astype(space.real_dtype) / n
                bar = bar._replace(standard_error=bar.standard_error * jnp.sqrt(left))
            return bar, found

        samples, norms = (jnp.pad(x, (0, k - done)) for x in (samples, norms))
        reached = until(
            tolerance,
            meter,
            schedule,
            (samples, norms, head, products),
            None,
            step,
            look,
            unknown_error(space),
            done=done,
        )
        mean, standard_error, freedom = reached.bar
        samples, norms, head, products = reached.carry
        kept = [
            Counted(samples),
            Counted(norms),
            products,
            Counted(head[:few], as_columns=True),
        ]
        stats = {
            "num_matvecs": reached.taken,
            "degrees_of_freedom": freedom,
            "largest_product": norms,
            "kept": Kept(1, kept, described(self), reached.taken),
        }
        return mean, standard_error, stats, CountedStream(reached.taken, stream)

    def _known(self, state, stream):
        """What a loop begins with: samples, norms, the products of the first probes as
        rows, and the Gram matrix of these."""
        space = space_of(state.operator)
        few = min(stream.k, GRAM_PROBES)
        rows = empty_rows(few, state.operator, stream.source())
        samples, norms, grams, head = kept_parts(state, 4)
        if samples is None:
            nothing = jnp.zeros(0, stream.dtype), jnp.zeros(0, space.real_dtype)
            return *nothing, rows, jnp.zeros((few, few), stream.dtype)
        if grams is not None and grams.ndim == 3:
            # Of the first chunk, which may be of fewer probes.
            return samples, norms, rows[: len(grams[0])], grams[0]
        (rows,) = put([rows], [head.T], 0)
        return samples, norms, rows, gram(stream.draw(0, few), rows.T)


def _of_chunks(state, size):
    """What a state keeps, as chunks of this size go on from it.

    Of probes that a loop has taken only the first chunk's products are known.
    """
    samples, norms, grams, head = kept_parts(state, 4)
    if grams is None or grams.ndim == 3:
        return samples, norms, grams, head
    if samples.shape[0] < size:
        return samples, norms, None, head
    few = min(size, GRAM_PROBES)
    return samples, norms, grams[None, :few, :few], None
