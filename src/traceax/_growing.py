"""Estimators that can go on: they fill buffers with units, probes and their products."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Int, PyTree

from ._accuracy.error_bar import ErrorBar
from ._accuracy.tolerance import LEAST_PRODUCTS, Check, run_until, step_width
from ._base import TraceEstimator
from ._linalg.tall import put, side_by_side
from ._operators.block import space_of
from ._primitive import Blocks, Columns
from ._results import RESULTS
from ._samplers import with_drawn
from ._state import Grown, grown_of, with_grown


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
        grown, more = self._room(state, k)
        drawn = with_drawn(self, state.key, grown.room, space_of(state.operator))
        buffers, count = grown.buffers, grown.count + more
        if more:
            buffers = drawn.grow(state, buffers, grown.count, more)
        grown = Grown(buffers, count, grown.room, k)
        return drawn._results(state, grown, *drawn.judge(state, buffers, count))

    def compute_until(self, state, k, stop):
        minimum = max(LEAST_PRODUCTS // self.products_per_unit, 2)
        grown, budget = grown_of(state), k
        # Counts that are arrays are of loops, which took enough.
        if grown is not None and isinstance(grown.count, int) and grown.count < minimum:
            # Too few to go on from: forgotten, though their products are spent.
            state, k = with_grown(state, None), k - grown.budget
        if k < LEAST_PRODUCTS:
            value, error, stats, blocks = self.compute(state, k)
            # Too few products for a forecast: it is not known.
            return value, error, {**stats, "products_needed": jnp.inf}, blocks
        grown, more = self._room(state, k)
        drawn = with_drawn(self, state.key, grown.room, space_of(state.operator))
        step = step_width(more, minimum)

        def judge(buffers, count):
            bar, result = drawn.judge(state, buffers, count)
            return Check(bar, RESULTS.successful if result is None else result)

        loop = run_until(
            stop,
            lambda buffers, count: drawn.grow(state, buffers, count, step),
            judge,
            grown.buffers,
            start=grown.count,
            width=step,
            limit=grown.count + more,
            minimum=min(minimum, max(more, 1)),
        )
        grown = Grown(loop.buffers, loop.count, grown.room, budget)
        bar, result, _ = loop.check
        value, error, stats, blocks = drawn._results(state, grown, bar, result)
        stats["products_needed"] = self.products_per_unit * loop.forecast.needed
        return value, error, stats, blocks

    def _room(self, state: Any, k: int) -> tuple[Grown, int]:
        """What the state has, with room for k products in all, and how many units more."""
        self.check(state.operator, f"{type(self).__name__}.estimate")
        grown, units = grown_of(state), k // self.products_per_unit
        if grown is None:
            return Grown(self.begin(state, units), 0, units), units
        more = max(units - grown.budget // self.products_per_unit, 0)
        return self._resize(state, grown, grown.room + more), more

    def _resize(self, state: Any, grown: Grown, room: int) -> Grown:
        """The same units, with buffers cut or padded with zeros to another room."""

        def resize(x, like):
            if x.shape == like.shape:
                return x
            common = [min(a, b) for a, b in zip(x.shape, like.shape, strict=True)]
            missing = [(0, b - c) for b, c in zip(like.shape, common, strict=True)]
            return jnp.pad(x[tuple(map(slice, common))], missing)

        shapes = jax.eval_shape(lambda: self.begin(state, room))
        buffers = jtu.tree_map(resize, grown.buffers, shapes)
        return dataclasses.replace(grown, buffers=buffers, room=room)

    def _results(self, state, grown: Grown, bar: ErrorBar, result: RESULTS | None):
        """What `compute` returns: the value, its standard error, `stats` and blocks."""
        stats = {
            "num_matvecs": self.products_per_unit * grown.count,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "result": RESULTS.successful if result is None else result,
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
        grown = grown_of(state)
        if grown is None or isinstance(grown.count, int | jax.core.Tracer):
            return state
        if grown.count.ndim > 0:
            return state
        count = int(grown.count)
        grown = self._resize(state, grown, count)
        budget = self.products_per_unit * count
        return with_grown(state, dataclasses.replace(grown, count=count, budget=budget))


def put_units(buffers: PyTree, new: PyTree, count: int | Int[Array, ""]) -> Any:
    """Buffers with new units from unit `count` on, along the last axis of each."""
    return jtu.tree_map(lambda buffer, x: put(buffer, x, count), buffers, new)
