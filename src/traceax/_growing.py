"""Estimators that can go on: they fill buffers with units, probes and their products."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Int, PyTree

from ._accuracy.error_bar import ErrorBar
from ._accuracy.tolerance import LEAST_PRODUCTS, Check, run_until, step_width
from ._base import TraceEstimator
from ._estimate import RESULTS
from ._linalg.tall import put, side_by_side
from ._primitive import Blocks, Columns
from ._samplers import with_drawn
from ._state import Kept, kept_of, replace_parts, state_space


class Grown(eqx.Module):
    """Units that a [`traceax.GrowingEstimator`][] keeps for a later estimate.

    - `buffers`: arrays with space for `room` units, the first `count` of which are taken.
    - `count`: an array after an estimate to a tolerance, a Python integer otherwise.
    """

    buffers: PyTree[Array]
    count: int | Int[Array, ""]
    room: int = eqx.field(static=True)


class Start(eqx.Module):
    """Beginning of an estimate, which may take `num_new` units more than `count`.

    `room` is larger than both together where an earlier loop left some of its units.
    """

    buffers: PyTree[Array]
    count: int | Int[Array, ""]
    room: int = eqx.field(static=True)
    num_new: int = eqx.field(static=True)


class GrowingEstimator(TraceEstimator):
    """Abstract base class of estimators that fill buffers, a unit at a time.

    A unit is what is taken together: a probe, or a few, with all of their products. A
    subclass writes `begin`, `grow`, `judge` and `stand_in`; budgets, tolerances and going on
    from earlier estimates are written here, once.

    **Attributes:**

    - `products_per_unit`: a class variable.
    """

    products_per_unit: ClassVar[int]

    @abc.abstractmethod
    def begin(self, state: Any, room: int) -> PyTree[Array]:
        """Buffers of zeros for `room` units, along every axis that holds units."""

    @abc.abstractmethod
    def grow(
        self, state: Any, buffers: Any, count: int | Int[Array, ""], width: int
    ) -> PyTree[Array]:
        """The buffers of `count` units with the next `width` units put after these."""

    @abc.abstractmethod
    def judge(
        self, state: Any, buffers: Any, count: int | Int[Array, ""]
    ) -> tuple[ErrorBar, RESULTS | None]:
        """The error bar of `count` units, whose mean is the value, and a failure to report,
        or `None`."""

    @abc.abstractmethod
    def stand_in(
        self, state: Any, buffers: Any, count: int | Int[Array, ""]
    ) -> list[tuple[Array, Array]] | Columns:
        """Pairs of blocks V and Z, n x room, columns beyond `count` being 0. The derivative of
        the value is the sum over all pairs of `<Z, dA V>`."""

    def fallback(self, state: Any, k: int) -> Any:
        """For budgets too small for this algorithm: the result of another one, as `compute`
        returns it; `None` to go on. Optional."""
        return None

    def more_stats(self, buffers: Any) -> dict[str, Array]:
        """Entries of `stats` besides those of all estimators. Optional."""
        return {}

    def least_of_loop(self, state):
        return max(LEAST_PRODUCTS, 2 * self.products_per_unit)

    def compute(self, state, k):
        other = self.fallback(state, k)
        if other is not None:
            return other
        start = self._start(state, k)
        drawn = self._drawn(state, start.room)
        buffers, count = start.buffers, start.count + start.num_new
        if start.num_new:
            buffers = drawn.grow(state, buffers, start.count, start.num_new)
        grown = Grown(buffers, count, start.room)
        return drawn._results(state, grown, self._check(state, buffers, grown.count))

    def compute_until(self, state, k, stop):
        minimum = max(LEAST_PRODUCTS // self.products_per_unit, 2)
        kept = kept_of(state)
        if kept is not None and not _can_go_on(kept.parts, minimum):
            # Too few to go on from: forgotten, though their products are spent.
            state, k = replace_parts(state, kept=None), k - kept.budget
        if k < LEAST_PRODUCTS:
            value, error, stats, blocks = self.compute(state, k)
            # Too few products for a forecast: it is not known.
            return value, error, {**stats, "products_needed": jnp.inf}, blocks
        start = self._start(state, k)
        drawn = self._drawn(state, start.room)
        step = step_width(start.num_new, minimum)
        loop = run_until(
            stop,
            lambda buffers, count: drawn.grow(state, buffers, count, step),
            lambda buffers, count: self._check(state, buffers, count),
            start.buffers,
            start=start.count,
            width=step,
            limit=start.count + start.num_new,
            minimum=min(minimum, max(start.num_new, 1)),
        )
        grown = Grown(loop.buffers, loop.count, start.room)
        value, error, stats, blocks = drawn._results(state, grown, loop.check)
        stats["products_needed"] = self.products_per_unit * loop.forecast.needed
        return value, error, stats, blocks

    def _drawn(self, state: Any, room: int) -> "GrowingEstimator":
        """The estimator, whose samplers have drawn what they draw at once."""
        return with_drawn(self, state.key, room, state_space(state))

    def _check(self, state, buffers, count) -> Check:
        bar, result = self.judge(state, buffers, count)
        return Check(bar, RESULTS.successful if result is None else result)

    def _start(self, state: Any, k: int) -> Start:
        """The units that the state keeps, with room for k products in all."""
        self.check(state.operator, f"{type(self).__name__}.estimate")
        kept, units = kept_of(state), k // self.products_per_unit
        if kept is None:
            return Start(self.begin(state, units), 0, units, units)
        grown = kept.parts
        more = max(units - kept.budget // self.products_per_unit, 0)
        room = grown.room + more
        return Start(self._resize(state, grown, room), grown.count, room, more)

    def _resize(self, state: Any, grown: Grown, room: int) -> PyTree[Array]:
        """The buffers, cut or padded with zeros to room for other units."""

        def resize(x, like):
            if x.shape == like.shape:
                return x
            common = [min(a, b) for a, b in zip(x.shape, like.shape, strict=True)]
            missing = [(0, b - c) for b, c in zip(like.shape, common, strict=True)]
            return jnp.pad(x[tuple(map(slice, common))], missing)

        shapes = jax.eval_shape(lambda: self.begin(state, room))
        return jtu.tree_map(resize, grown.buffers, shapes)

    def _results(self, state, grown: Grown, check: Check):
        """What `compute` returns: the value, its standard error, `stats` and blocks."""
        bar, result, _ = check
        stats = {
            "num_matvecs": self.products_per_unit * grown.count,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "result": result,
            "kept": grown,
            **self.more_stats(grown.buffers),
        }
        blocks = self.stand_in(state, grown.buffers, grown.count)
        if isinstance(blocks, list) and isinstance(grown.count, int):
            blocks = tuple(side_by_side(*pair) for pair in zip(*blocks, strict=True))
        elif isinstance(blocks, list):
            blocks = Blocks(blocks, grown.count)
        return bar.mean, bar.standard_error, stats, blocks

    def trim(self, state):
        # Not where buffers are full, nor a count that is traced, or one of many lanes.
        kept = kept_of(state)
        if kept is None or not isinstance(kept.parts, Grown):
            return state
        count = kept.parts.count
        if isinstance(count, int | jax.core.Tracer) or count.ndim > 0:
            return state
        count = int(count)
        grown = Grown(self._resize(state, kept.parts, count), count, count)
        budget = self.products_per_unit * count
        return replace_parts(state, kept=Kept(budget, grown, kept.owner))


def put_units(buffers: PyTree, new: PyTree, count: int | Int[Array, ""]) -> Any:
    """Buffers with new units from unit `count` on, along the last axis of each."""
    return jtu.tree_map(lambda buffer, x: put(buffer, x, count), buffers, new)


def _can_go_on(parts: Any, minimum: int) -> bool:
    """Whether a loop can go on from what a state keeps: `minimum` units or more.

    Counts that are arrays are of loops, which took enough.
    """
    if not isinstance(parts, Grown):
        return False
    return not isinstance(parts.count, int) or parts.count >= minimum
