"""Estimators that take one unit after the other: one way to budgets and tolerances."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Bool, Int, PyTree

from ._accuracy.error_bar import ErrorBar
from ._accuracy.tolerance import FEWEST, Looked, met_or_failed, step_width, until
from ._base import TraceEstimator
from ._estimate import RESULTS
from ._linalg.tall import Rows, side_by_side
from ._primitive import Blocks, Columns
from ._state import Kept, init_state, kept_of, with_parts


class Grown(eqx.Module):
    """What a [`traceax.GrowingEstimator`][] keeps: buffers, and how many units they hold.

    `count` is known at run time only for an estimate to a tolerance. There is `room` for
    more.
    """

    buffers: PyTree[Array]
    count: int | Int[Array, ""]
    room: int = eqx.field(static=True)


class GrowingEstimator(TraceEstimator):
    """Abstract base class of estimators that take one unit after the other.

    A unit is what is taken together: a probe, with its 1, 2 or 3 products. A subclass
    writes `begin`, `grow`, `judge` and `stand_in`; budgets, tolerances and going on from
    earlier estimates are written here, once.

    **Attributes:**

    - `products_per_unit`: a class variable.
    """

    products_per_unit: ClassVar[int]

    def init(self, key, operator):
        where = f"{type(self).__name__}.init"
        state = init_state(key, operator, where)
        self.check(operator, where)
        return state

    def check(self, operator: lx.AbstractLinearOperator, where: str) -> None:
        """Refuses what the estimator can't take. Optional."""

    @abc.abstractmethod
    def begin(self, state: Any, room: int) -> PyTree[Array]:
        """Buffers of zeros for so many units, along every axis that grows with them."""

    @abc.abstractmethod
    def grow(
        self, state: Any, buffers: PyTree, count: int | Int[Array, ""], width: int
    ) -> PyTree[Array]:
        """The buffers with the units `count, ..., count + width - 1`."""

    @abc.abstractmethod
    def judge(
        self, state: Any, buffers: PyTree, count: int | Int[Array, ""]
    ) -> tuple[ErrorBar, RESULTS | None]:
        """The error bar of `count` units, and a failure to report, or `None`."""

    @abc.abstractmethod
    def stand_in(
        self, state: Any, buffers: PyTree, count: int | Int[Array, ""]
    ) -> list[tuple[Array, Array]] | Columns:
        """Pairs of blocks V and Z, side by side; columns beyond count are 0."""

    def instead(self, state: Any, k: int) -> Any:
        """What `compute` returns for a state, or a budget, that has another algorithm.
        Optional: by default `None`, for none."""
        return None

    def judge_rows(
        self,
        state: Any,
        buffers: PyTree,
        count: int | Int[Array, ""],
        rows: Rows,
    ) -> tuple[ErrorBar, RESULTS | None]:
        """As `judge`, of groups of rows of the diagonal, for `ByRows`. Optional."""
        raise NotImplementedError

    def more_stats(self, buffers: PyTree) -> dict[str, Array]:
        """More `stats`. Optional."""
        return {}

    def compute(self, state, k):
        other = self.instead(state, k)
        if other is not None:
            return other
        buffers, count, room, width = self._begun(state, k)
        if width:
            buffers = self.grow(state, buffers, count, width)
        grown = Grown(buffers, count + width, room)
        return self._found(state, grown, *self._judged(state, buffers, grown.count))

    def compute_until(self, state, k, tolerance, meter):
        fewest = FEWEST // self.products_per_unit
        kept = kept_of(state)
        if kept is not None and not _enough(kept.parts, fewest):
            state, k = with_parts(state, kept=None), k - kept.budget
        state = with_parts(state, basis=None)  # a loop finds one of its own
        if k < FEWEST:
            value, error, stats, blocks = self.compute(state, k)
            freedom = stats.get("degrees_of_freedom", jnp.inf)
            bar = ErrorBar(value, error, jnp.asarray(freedom, error.dtype))
            result = stats.get("result", RESULTS.successful)
            stats = {**stats, "result": met_or_failed(tolerance, bar, result)}
            # A rate takes more products than these.
            return value, error, {**stats, "products_needed": jnp.inf}, blocks
        buffers, count, room, width = self._begun(state, k)
        step = step_width(width, fewest)
        reached = until(
            tolerance,
            meter,
            lambda buffers, count: self.grow(state, buffers, count, step),
            lambda buffers, count: Looked(*self._judged(state, buffers, count)),
            buffers,
            done=count,
            width=step,
            most=count + width,
            fewest=min(fewest, max(width, 1)),
        )
        bar, result = reached.looked
        result = met_or_failed(tolerance, bar, result)
        grown = Grown(reached.buffers, reached.count, room)
        value, error, stats, blocks = self._found(state, grown, bar, result)
        stats["products_needed"] = self.products_per_unit * reached.forecast.needed
        return value, error, stats, blocks

    def _judged(self, state, buffers, count) -> tuple[ErrorBar, RESULTS]:
        bar, result = self.judge(state, buffers, count)
        return bar, RESULTS.successful if result is None else result

    def _begun(self, state: Any, k: int) -> tuple[PyTree, int | Array, int, int]:
        """Buffers with what a state keeps, how many units they hold, for how many there
        is room, and how many may be added."""
        self.check(state.operator, f"{type(self).__name__}.estimate")
        kept, units = kept_of(state), k // self.products_per_unit
        if kept is None:
            return self.begin(state, units), 0, units, units
        grown = kept.parts
        more = max(units - kept.budget // self.products_per_unit, 0)
        room = grown.room + more
        return self._resized(state, grown, room), grown.count, room, more

    def _resized(self, state: Any, grown: Grown, room: int) -> PyTree[Array]:
        def resize(x, like):
            if x.shape == like.shape:
                return x
            common = [min(a, b) for a, b in zip(x.shape, like.shape, strict=True)]
            missing = [(0, b - c) for b, c in zip(like.shape, common, strict=True)]
            return jnp.pad(x[tuple(map(slice, common))], missing)

        shapes = jax.eval_shape(lambda: self.begin(state, room))
        return jtu.tree_map(resize, grown.buffers, shapes)

    def _found(self, state, grown: Grown, bar: ErrorBar, result: RESULTS):
        stats = {
            "num_matvecs": self.products_per_unit * grown.count,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "result": result,
            "kept": grown,
            **self.more_stats(grown.buffers),
        }
        found = self.stand_in(state, grown.buffers, grown.count)
        if isinstance(found, list) and isinstance(grown.count, int):
            found = tuple(side_by_side(*blocks) for blocks in zip(*found, strict=True))
        elif isinstance(found, list):
            found = Blocks(found, grown.count)
        return bar.mean, bar.standard_error, stats, found

    def settled(self, state):
        kept = kept_of(state)
        if kept is None or not isinstance(kept.parts, Grown):
            return state
        count = kept.parts.count
        if isinstance(count, int | jax.core.Tracer) or count.ndim > 0:
            return state
        count = int(count)
        grown = Grown(self._resized(state, kept.parts, count), count, count)
        budget = self.products_per_unit * count
        return with_parts(state, kept=Kept(budget, grown, kept.owner))


def active_of(count: int | Int[Array, ""], most: int) -> Bool[Array, " {most}"] | None:
    """Which of the units that there is room for there are; `None` for a full buffer."""
    if isinstance(count, int):
        return None
    return jnp.arange(most, dtype=jnp.int32) < count


def _enough(parts: Any, fewest: int) -> bool:
    """Whether a loop can go on from these."""
    if not isinstance(parts, Grown):
        return False
    return not isinstance(parts.count, int) or parts.count >= fewest


class ByRows(GrowingEstimator):
    """The same estimator, of sums over groups of rows of the diagonal."""

    estimator: GrowingEstimator
    rows: Rows = eqx.field(static=True)

    @property
    def products_per_unit(self) -> int:  # pyright: ignore
        return self.estimator.products_per_unit

    def check(self, operator, where):
        self.estimator.check(operator, where)

    def begin(self, state, room):
        return self.estimator.begin(state, room)

    def grow(self, state, buffers, count, width):
        return self.estimator.grow(state, buffers, count, width)

    def judge(self, state, buffers, count):
        return self.estimator.judge_rows(state, buffers, count, self.rows)

    def stand_in(self, state, buffers, count):
        return self.estimator.stand_in(state, buffers, count)
