"""The Girard-Hutchinson estimator."""

import functools as ft
import math
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Inexact, Int, Key

from .._arguments import check_optional_integer, without_numpy
from .._error_bar import (
    GRAM_PROBES,
    ErrorBar,
    Moments,
    add_samples,
    empty_moments,
    exact_bar,
    gram_of,
    independent_samples,
    moments_bar,
)
from .._functional import TRACE, Functional, Trace
from .._linalg.dense import (
    column_dots,
    column_norms,
    leading,
    power_of_two_scale,
    squares,
)
from .._linalg.types import fold
from .._operators.space import Space, columns_at_once
from .._outcome import Evidence
from .._rule import Columns
from .._samplers import RademacherSampler, Sampler, check_rounds, check_sampler
from .._trace_estimator import GrowingEstimator


class TraceSamples(NamedTuple):
    """Samples `w_j^* A w_j`, or one per round, and the blocks for their error bar."""

    samples: Inexact[Array, " m"]
    first: Inexact[Array, "2 few n"]  # first probes and products, for ties and skewness


class SampleMoments(NamedTuple):
    """Moments for samples with many entries. Only the length of `room` matters."""

    moments: Moments
    room: Bool[Array, " m"]


class HutchinsonEstimator(GrowingEstimator):
    r"""The Girard-Hutchinson estimator, the mean of `w_j^* A w_j` over k probes.

    *Use when* you have few products, or the spectrum is flat. The error falls as
    `1 / sqrt(k)` for any spectrum.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used |
    | beyond the products | O(n k) time; two n x c blocks in value and derivative, with c = `chunk_size` |
    | bias | none |
    | variance | `2 (|A|_F^2 - sum_i A_ii^2) / k` for real symmetric A and signs |
    | derivative | the exact gradient of the estimate, k products with dA |

    For traces, `stats["samples"]` holds the `w_j^* A w_j`. The estimate is linear in A.

    **Arguments:**

    - `sampler`: draws the probes. [`traceax.OrthogonalSampler`][] multiplies the
        variance by `1 - k / n`. With [`traceax.ColouredSampler`][], k must fill whole
        rounds, and each round gives one sample.
    - `chunk_size`: how many probes to hold at once, so that memory doesn't grow with k.
        The default holds 2^20 entries and at least 4 probes, or all probes on devices
        other than CPUs. The value changes by rounding only.

    **Reference:** Girard, "A fast 'Monte-Carlo cross-validation' procedure for large
    least squares problems with noisy data", Numer. Math. 56 (1989),
    doi:10.1007/BF01395775; Hutchinson, "A stochastic estimator of the trace of the
    influence matrix for Laplacian smoothing splines", Commun. Stat. Simul. Comput. 18
    (1989), doi:10.1080/03610918908812806; for diagonals Bekas, Kokiopoulou and Saad,
    "An estimator for the diagonal of a matrix", Appl. Numer. Math. 57 (2007),
    doi:10.1016/j.apnum.2007.01.003.
    """

    sampler: Sampler = RademacherSampler()
    chunk_size: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )
    gives_diagonals: ClassVar[bool] = True

    def __check_init__(self):
        name = type(self).__name__
        check_sampler(self.sampler, name, rounds=True)
        meaning = "how many probes to draw at once"
        check_optional_integer(
            self.chunk_size, "chunk_size", name, least=1, meaning=meaning
        )

    @property
    def products_per_unit(self) -> int:  # pyright: ignore
        return self.sampler.round_size

    @property
    def _detects_off_diagonal(self) -> bool:
        return self.sampler.round_size > 1 or self.sampler.is_exact

    def check(self, operator, where):
        self.sampler.check(operator, where)

    def check_budget(self, k, *, at_most):
        where = f"{type(self).__name__}.estimate"
        check_rounds(self.sampler, k, where, at_most=at_most)

    def begin(self, state, room):
        n, dtype = state.space.size, state.space.compute_dtype
        if not isinstance(state.functional, Trace):
            moments = empty_moments(state.functional, n, dtype)
            return SampleMoments(moments, jnp.zeros(room, bool))
        # We keep two rounds, for any chunk size, to detect whether rounds differ.
        least = 2 if self._detects_off_diagonal else 1
        few = min(room, GRAM_PROBES, max(self._columns(n), least))
        return TraceSamples(
            jnp.zeros(room, dtype),
            jnp.zeros((2, few, n), dtype),
        )

    def grow(self, state, buffers, count, width):
        room = _room(buffers)
        chunk = min(self._chunk(state.space.size), width)

        def take(buffers, start, number):
            Omega = self.sampler.draw_range(state.key, start, number, room, state.space)
            Y = self.sampler.multiply(state.operator, Omega)
            if isinstance(buffers, SampleMoments):
                moments = add_samples(
                    buffers.moments, state.functional, Omega, Y, start
                )
                return buffers._replace(moments=moments)
            return _add_probes(buffers, Omega, Y, start)

        # We take one chunk without a loop: CPUs run convolutions 10 times slower in
        # one.
        buffers = take(buffers, count, chunk)
        chunks, remainder = divmod(width - chunk, chunk)
        if chunks:
            starts = jnp.arange(1, chunks + 1, dtype=jnp.int32) * chunk + count
            buffers = fold(lambda x, start: take(x, start, chunk), buffers, starts)
        if remainder:
            buffers = take(buffers, count + width - remainder, remainder)
        return buffers

    def judge(self, state, buffers, count):
        space = state.space
        return self._bar(
            buffers, count, space.size, space.rounding, state.functional
        ), None

    def _bar(
        self,
        buffers: TraceSamples | SampleMoments,
        count: int | Int[Array, ""],
        n: int,
        rounding: float,
        functional: Functional = TRACE,
    ) -> ErrorBar:
        if isinstance(buffers, SampleMoments):
            bar = moments_bar(buffers.moments, count, functional.num_rows(n))
            variation = bar.standard_error
        else:
            samples, (Omega, Y) = buffers
            active, first_active, variation = None, None, None
            if not isinstance(count, int):
                active = jnp.arange(len(samples), dtype=jnp.int32) < count
                first_active = active[: len(Omega)]
            if self._detects_off_diagonal:
                variation = _off_diagonal_size(Omega.T, Y.T, first_active)
            bar = independent_samples(
                samples,
                column_norms(Y.T),
                gram_of(Omega.T, Y.T),
                dimension=n,
                active=active,
                off_diagonal=variation,
                may_miss=self.sampler.round_size == 1,
            )
        if not self.sampler.independent:
            # Our probes belong to an orthogonal basis, which has no error as a whole.
            remaining = 1 - jnp.asarray(count).astype(bar.standard_error.dtype) / n
            error = bar.standard_error * jnp.sqrt(remaining)
            bar = bar._replace(standard_error=error)
        if self.sampler.is_exact and variation is not None:
            exact = exact_bar(bar.mean, rounding * _magnitude(buffers, count))
            # Rounds that differ by more disprove exactness. A single round cannot.
            is_known = jnp.isfinite(variation)
            is_wrong = is_known & (variation > exact.standard_error)
            bar = jtu.tree_map(ft.partial(jnp.where, is_wrong), bar, exact)
        return bar

    def stand_in(self, state, buffers, count):
        space, room = state.space, _room(buffers)
        evidence = None
        if isinstance(buffers, TraceSamples):
            zeros = jtu.tree_map(jnp.zeros_like, (buffers.samples, buffers.first[1]))
            parts = self, count, space.rounding, buffers.first[0]
            evidence = Evidence(zeros, jtu.Partial(_bars_from_products, *parts))
        chunk = self._chunk(space.size)
        return Probes(state.key, self.sampler, count, room, chunk, space, evidence)

    def more_stats(self, buffers):
        has_samples = isinstance(buffers, TraceSamples)
        return {"samples": buffers.samples} if has_samples else {}

    def _columns(self, n: int) -> int:
        return columns_at_once(n) if self.chunk_size is None else self.chunk_size

    def _chunk(self, n: int) -> int:
        return max(self._columns(n) // self.sampler.round_size, 1)


def _room(buffers: TraceSamples | SampleMoments) -> int:
    if isinstance(buffers, SampleMoments):
        return len(buffers.room)
    return len(buffers.samples)


def _magnitude(
    buffers: TraceSamples | SampleMoments, count: int | Int[Array, ""]
) -> Float[Array, "*g"]:
    """How large the added terms are, for rounding errors."""
    if isinstance(buffers, SampleMoments):
        moments = buffers.moments
        number = jnp.asarray(count).astype(moments.unit.dtype)
        return jnp.sqrt(moments.energy / number) * moments.unit
    Omega, Y = buffers.first
    return jnp.sum(jnp.abs(Omega[0] * Y[0]))


def _bars_from_products(
    estimator: HutchinsonEstimator,
    count: int | Int[Array, ""],
    rounding: float,
    Omega: Inexact[Array, "few n"],
    products: tuple[Inexact[Array, " m"], Inexact[Array, "few n"]],
) -> list[ErrorBar]:
    samples, first = products
    buffers = TraceSamples(samples, jnp.stack([Omega, first]))
    return [estimator._bar(buffers, count, Omega.shape[1], rounding)]


def _add_probes(
    buffers: TraceSamples, Omega: Inexact[Array, "n c"], Y: Inexact[Array, "n c"], start
) -> TraceSamples:
    """Writes new samples into the buffers, from probe `start` on."""
    samples, first = buffers
    new = column_dots(Omega, Y)
    if samples.shape != new.shape:
        new = jax.lax.dynamic_update_slice_in_dim(samples, new, start, 0)
    few = first.shape[1]
    if not isinstance(start, int) or start < few:
        block = jnp.stack([block[:, :few].T for block in (Omega, Y)])
        # JAX drops rows beyond the last.
        rows = jnp.arange(block.shape[1], dtype=jnp.int32) + start
        is_all = isinstance(start, int) and start == 0 and block.shape == first.shape
        first = block if is_all else first.at[:, rows].set(block, mode="drop")
    return TraceSamples(new, first)


class Probes(Columns):
    """The blocks `V = Omega` and `Z = Omega / count`, redrawn when needed."""

    key: Key[Array, ""]
    sampler: Sampler
    count: int | Int[Array, ""]
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    space: Space = eqx.field(static=True)
    evidence: Evidence | None

    def __init__(
        self,
        key: Key[Array, ""],
        sampler: Sampler,
        count: int | Int[Array, ""],
        most: int,
        chunk: int,
        space: Space,
        evidence: Evidence | None,
    ):
        self.key, self.sampler, self.count, self.most = key, sampler, count, most
        # We make all chunks equally long.
        number = math.ceil(most / min(chunk, most))
        self.size = math.ceil(most / number)
        if not isinstance(count, int):
            # Short chunks avoid zero columns if our loop stopped early.
            self.size = min(self.size, max(8, most // 8))
        self.space, self.evidence = space, evidence
        self.size = max(self.size, self.num_first)

    def product(self, operator, V):
        return self.sampler.multiply(operator, V)

    def whole(self):
        return self._columns(0, self.most)

    def chunk(self, start):
        return self._columns(start, self.size)

    def _columns(self, start: int | Int[Array, ""], number: int) -> tuple[Array, Array]:
        V = self.sampler.draw_range(self.key, start, number, self.most, self.space)
        active = jnp.arange(number, dtype=jnp.int32) + start < self.count
        V = jnp.where(active[None, :], V, 0)
        return V, V / jnp.asarray(self.count).astype(V.dtype)


def _off_diagonal_size(
    probes: Inexact[Array, "n g"],
    products: Inexact[Array, "n g"],
    active: Bool[Array, " g"] | None = None,
) -> Float[Array, ""]:
    """Estimates `|B - diag B|_F` from products with sign vectors; 0 for a single product.

    Entry r of `conj(w_j) * (B w_j)` is `B_rr` plus off-diagonal terms, which vary with j.
    """
    entrywise = probes.T.conj() * products.T
    unit = power_of_two_scale(entrywise)
    entrywise = leading(entrywise / unit.astype(entrywise.dtype), active)
    g = entrywise.shape[0]
    if active is not None:
        g = jnp.sum(active).astype(unit.dtype)
    mean = jnp.sum(entrywise, axis=0) / jnp.asarray(g).astype(entrywise.dtype)
    deviations = leading(entrywise - mean[None], active)
    return unit * jnp.sqrt(jnp.sum(squares(deviations)) / jnp.maximum(g - 1, 1))
