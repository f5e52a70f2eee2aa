"""The Girard-Hutchinson estimator."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from .._accuracy.error_bar import (
    GRAM_PROBES,
    ErrorBar,
    gram_of,
    independent_rows,
    independent_samples,
)
from .._arguments import check_optional_integer, without_numpy
from .._growing import GrowingEstimator, active_of
from .._linalg.tall import RowMoments, Rows, column_dots, column_norms
from .._operators.block import Space, apply_block, columns_at_once, space_of
from .._primitive import Columns
from .._samplers import RademacherSampler, Sampler, check_sampler, draw_range


class HutchinsonEstimator(GrowingEstimator):
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

    `stats["samples"]` holds the `w_j^* A w_j`. The estimate is linear in A: the mean over
    minibatches of samples with one key is that of the mean of their operators.

    **Arguments:**

    - `sampler`: of the probes; [`traceax.RademacherSampler`][] by default. With
        [`traceax.OrthogonalSampler`][] the variance is smaller by `1 - k / n`.
    - `chunk_size`: how many probes are alive at once. Probes of the next chunk take
        their memory, and derivatives draw them again, so that memory does not grow with
        k. By default as many as have 2^20 entries together, which stay in the cache of a
        CPU, and at least 4; all of them on other devices. The value does not depend on
        it, but for rounding.

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
    products_per_unit: ClassVar[int] = 1

    def __check_init__(self):
        name = type(self).__name__
        check_sampler(self.sampler, name)
        what = "the number of probes drawn at once"
        check_optional_integer(self.chunk_size, "chunk_size", name, least=1, what=what)

    def begin(self, state, room):
        space = space_of(state.operator)
        few = min(room, GRAM_PROBES, self._chunk(space.size))
        return {
            "samples": jnp.zeros(room, space.compute_dtype),
            "norms": jnp.zeros(room, space.real_dtype),
            # The first probes and their products, for the skewness of samples.
            "first": jnp.zeros((2, few, space.size), space.compute_dtype),
        }

    def grow(self, state, buffers, count, width):
        space = space_of(state.operator)
        most = len(buffers["samples"])
        chunk = min(self._chunk(space.size), width)
        few = buffers["first"].shape[1]

        def test(start, number):
            Omega = draw_range(self.sampler, state.key, start, number, most, space)
            Y = apply_block(state.operator, Omega)
            tested = {"samples": column_dots(Omega, Y), "norms": column_norms(Y)}
            return tested, (Omega, Y)

        def put(buffers, tested, start):
            return {
                name: jax.lax.dynamic_update_slice_in_dim(buffers[name], new, start, 0)
                for name, new in tested.items()
            }

        tested, blocks = test(count, chunk)
        first = buffers["first"]
        if not isinstance(count, int) or count < few:
            new = jnp.stack([block[:, :few].T for block in blocks])
            # Rows beyond the last are dropped.
            rows = jnp.arange(new.shape[1], dtype=jnp.int32) + count
            whole = new.shape == first.shape and isinstance(count, int) and count == 0
            first = new if whole else first.at[:, rows].set(new, mode="drop")
        buffers = {**put(buffers, tested, count), "first": first}
        whole, rest = divmod(width - chunk, chunk)
        if whole:
            starts = jnp.arange(1, whole + 1, dtype=jnp.int32) * chunk + count
            stacked = jax.lax.map(lambda start: test(start, chunk)[0], starts)
            tested = jax.tree.map(lambda x: x.reshape(-1), stacked)
            buffers |= put(buffers, tested, count + chunk)
        if rest:
            start = count + width - rest
            buffers |= put(buffers, test(start, rest)[0], start)
        return buffers

    def judge(self, state, buffers, count):
        space = space_of(state.operator)
        samples, (Omega, Y) = buffers["samples"], buffers["first"]
        active = active_of(count, len(samples))
        bar = independent_samples(
            samples,
            buffers["norms"],
            gram_of(Omega.T, Y.T),
            dimension=space.size,
            active=active,
        )
        return self._of_sampler(bar, count, state), None

    def _of_sampler(self, bar: ErrorBar, count, state) -> ErrorBar:
        if self.sampler.independent:
            return bar
        # Samples of a part of an orthogonal basis, whose sum over all is known.
        space = space_of(state.operator)
        left = 1 - jnp.asarray(count).astype(space.real_dtype) / space.size
        return bar._replace(standard_error=bar.standard_error * jnp.sqrt(left))

    def stand_in(self, state, buffers, count):
        space, most = space_of(state.operator), len(buffers["samples"])
        probes = Probes(
            state.key, self.sampler, count, most, self._chunk(space.size), space
        )
        if probes.size < most or not isinstance(count, int):
            return probes
        return [probes.chunk(0)]

    def by_rows(self, rows):
        return _ByRows(self, rows)

    def more_stats(self, buffers):
        return {"samples": buffers["samples"]}

    def _chunk(self, n: int) -> int:
        if self.chunk_size is None:
            return columns_at_once(n)
        return self.chunk_size


class Probes(Columns):
    """The blocks `V = Omega` and `Z = Omega / count`, drawn again when needed."""

    key: Key[Array, ""]
    sampler: Sampler
    count: int | Int[Array, ""]
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    space: Any = eqx.field(static=True)

    def __init__(self, key, sampler, count, most: int, chunk: int, space: Space):
        self.key, self.sampler, self.count, self.most = key, sampler, count, most
        # In chunks of equal size.
        number = math.ceil(most / min(chunk, most))
        self.size = math.ceil(most / number)
        if not isinstance(count, int):
            # So that a loop that stopped early pays for what it took.
            self.size = min(self.size, max(8, most // 8))
        self.space = (space.size, space.compute_dtype)

    def chunk(self, start):
        n, dtype = self.space
        space = Space(n, dtype, dtype, None)
        V = draw_range(self.sampler, self.key, start, self.size, self.most, space)
        active = jnp.arange(self.size, dtype=jnp.int32) + start < self.count
        V = jnp.where(active[None, :], V, 0)
        return V, V / jnp.asarray(self.count).astype(dtype)


class _ByRows(GrowingEstimator):
    """Of groups of rows of the diagonal: `A_rr` is the mean of `conj(w_j(r)) (A w_j)(r)`.

    Bekas, Kokiopoulou and Saad, "An estimator for the diagonal of a matrix", Appl. Numer.
    Math. 57 (2007), doi:10.1016/j.apnum.2007.01.003. Moments are kept in place of samples.
    """

    estimator: HutchinsonEstimator
    rows: Rows = eqx.field(static=True)
    products_per_unit: ClassVar[int] = 1

    def begin(self, state, room):
        space = space_of(state.operator)
        nothing = jnp.zeros((space.size, 0), space.compute_dtype)
        moments = RowMoments.none(self.rows, nothing)
        return {"moments": moments, "samples": jnp.zeros(room, bool)}  # of their number

    def grow(self, state, buffers, count, width):
        space, most = space_of(state.operator), len(buffers["samples"])
        chunk = min(self.estimator._chunk(space.size), width)

        def more(moments, start, number):
            Omega = draw_range(
                self.estimator.sampler, state.key, start, number, most, space
            )
            Y = apply_block(state.operator, Omega)
            return moments.with_samples(Omega, Y, self.rows, start)

        # No loop for one chunk: on a CPU convolutions are ten times slower in one.
        moments = more(buffers["moments"], count, chunk)
        whole, rest = divmod(width - chunk, chunk)
        if whole:
            starts = jnp.arange(1, whole + 1, dtype=jnp.int32) * chunk + count
            moments, _ = jax.lax.scan(
                lambda x, start: (more(x, start, chunk), None), moments, starts
            )
        if rest:
            moments = more(moments, count + width - rest, rest)
        return {**buffers, "moments": moments}

    def judge(self, state, buffers, count):
        bar = independent_rows(buffers["moments"], count)
        return self.estimator._of_sampler(bar, count, state), None

    def stand_in(self, state, buffers, count):
        return self.estimator.stand_in(state, buffers, count)
