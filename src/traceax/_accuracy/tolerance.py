r"""Estimates to a tolerance: how many products are taken is decided while they are taken.

Shapes are those of the largest budget. One loop fills buffers of that size, a few probes
at a time, and judges the error bar whenever there are a third more than the last time.
docs/budgets.md has the rule and its derivation.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int

from .._estimate import RESULTS
from .._linalg.small import divisor
from .._progress import ProgressMeter, check_meter
from .._student_t import check_level, student_t_quantile, two_sided
from .error_bar import ErrorBar

# In units of 1 / count. The smallest integer for which intervals of normal samples keep
# their level for every tolerance, simulated.
_WIDENED = 2.0
# Up to so many dimensions an answer is exact where the budget allows it.
SMALL = 32
# Products that are taken before a loop may stop, and in each of its steps.
FEWEST = 8


class Stop(eqx.Module):
    """When a loop may stop: once an error bar is short enough.

    - `rtol`, `atol`: half of the interval at most `atol + rtol |value|`.
    - `level`: of the interval.
    - `meter`: shows how far the loop is.
    - `factor`, `offset`: the value is `factor` times that of the loop, plus `offset`.
    - `norm`: of several values, `"largest"` or `"root mean square"`, of which the
        tolerance is; `None` for each on its own.
    """

    rtol: Float[Array, ""]
    atol: Float[Array, ""]
    level: float = eqx.field(static=True)
    meter: ProgressMeter = eqx.field(static=True)
    factor: Inexact[Array, ""]
    offset: Inexact[Array, "*g"]
    norm: str | None = eqx.field(static=True, default=None)

    def excess(self, bar: ErrorBar) -> Float[Array, ""]:
        """The length of the value's interval over the length asked for.

        That of the worst, if `bar` holds several. Infinite for an unknown error.
        """
        error, freedom = bar.standard_error, bar.degrees_of_freedom
        quantile = student_t_quantile(two_sided(self.level), freedom)
        scaled = jnp.abs(self.factor).astype(error.dtype) * error
        half_width = jnp.where(error == 0, 0, quantile * scaled)
        # The loop's value may be known to be real where the whole is not.
        dtype = np.result_type(bar.mean.dtype, self.factor.dtype, self.offset.dtype)
        factor, offset, mean = (
            x.astype(dtype) for x in (self.factor, self.offset, bar.mean)
        )
        size = jnp.abs(factor * mean + offset).astype(error.dtype)
        rtol, atol = self.rtol.astype(error.dtype), self.atol.astype(error.dtype)
        if self.norm == "largest":
            half_width, size = jnp.max(half_width), jnp.max(size)
        elif self.norm == "root mean square":
            half_width, size = (root_mean_square(x) for x in (half_width, size))
        allowed = atol + rtol * size
        ratio = half_width / jnp.where(allowed > 0, allowed, 1)
        ratio = jnp.where(allowed > 0, ratio, jnp.inf)
        ratio = jnp.where(half_width == 0, 0, ratio)
        return jnp.max(jnp.where(jnp.isnan(ratio), jnp.inf, ratio))

    def met(self, bar: ErrorBar) -> Bool[Array, ""]:
        """Whether every interval is short enough."""
        return self.excess(bar) <= 1

    def for_part(
        self, factor: Inexact[Array, ""] | None, offset: Inexact[Array, ""] | None
    ) -> "Stop":
        """The same, with the factor and offset of a loop that finds a part of the value."""
        factor = self.factor if factor is None else factor
        offset = self.offset if offset is None else offset
        return dataclasses.replace(self, factor=factor, offset=offset)


def root_mean_square(x: Float[Array, " g"]) -> Float[Array, ""]:
    """The root mean square of numbers that may be too small to square."""
    unit = divisor(jnp.max(jnp.abs(x)))
    return unit * jnp.sqrt(jnp.mean((x / unit) ** 2))


def make_stop(
    rtol: ArrayLike | None,
    atol: ArrayLike | None,
    level: float,
    meter: ProgressMeter,
    dtype: Any,
    where: str,
    norm: str | None = None,
) -> Stop | None:
    """Checks; `None` if neither tolerance is given. `dtype` is that of the value."""
    check_meter(meter, where)
    if isinstance(level, bool) or not isinstance(level, float | int):
        raise TypeError(
            f"{where}: level must be a Python number, got {level!r} of type "
            f"{type(level).__name__}; write 0.95 for an interval of 95 %."
        )
    check_level(level, where)
    if rtol is None and atol is None:
        return None
    relative, absolute = (
        check_tolerance(0.0 if x is None else x, name, dtype, where)
        for name, x in (("rtol", rtol), ("atol", atol))
    )
    one = jnp.ones((), dtype)
    nothing = jnp.zeros_like(one)
    return Stop(relative, absolute, float(level), meter, one, nothing, norm)


def check_tolerance(x: Any, name: str, dtype: Any, where: str) -> Float[Array, ""]:
    """A relative or absolute tolerance as an array."""
    if isinstance(x, bool | str) or jnp.ndim(x) != 0 or jnp.iscomplexobj(x):
        raise TypeError(
            f"{where}: {name} must be a real number, got {x!r}; write 1e-2 for two digits."
        )
    known = not isinstance(x, jax.core.Tracer)
    if known and not 0 <= float(np.asarray(x)) < math.inf:
        raise ValueError(f"{where}: {name} must be finite and not negative, got {x}.")
    return jnp.asarray(x).astype(jnp.finfo(dtype).dtype)


def met_or_failed(stop: Stop, bar: ErrorBar, result: RESULTS) -> RESULTS:
    """`result`, or that the tolerance was not met. A value that is not finite has a cause
    of its own."""
    met = stop.met(bar) | ~jnp.isfinite(bar.mean).all()
    unmet = RESULTS.where(met, RESULTS.successful, RESULTS.tolerance_not_met)
    return RESULTS.where(result == RESULTS.successful, unmet, result)


class Check(NamedTuple):
    """The error bar after some probes, and what `judge` wants returned beside it."""

    bar: ErrorBar
    extra: Any


class Forecast(NamedTuple):
    """The number of probes that it would take at this rate, from the first check to the last.

    Error bars fall with a power of the number of probes, of at least 1/2: Monte Carlo's.

    - `first_count`, `first_excess`: the number of probes at the first check that had an
        error bar, and how many times too long it was.
    - `needed`: the number of probes that it would take.
    """

    first_count: Float[Array, ""]
    first_excess: Float[Array, ""]
    needed: Float[Array, ""]

    def after(self, excess: Float[Array, ""], count: Int[Array, ""]) -> "Forecast":
        number = count.astype(excess.dtype)
        is_first = ~jnp.isfinite(self.first_excess)
        first_count = jnp.where(is_first, number, self.first_count)
        first = jnp.where(is_first, excess, self.first_excess)
        power = jnp.log(first / excess) / jnp.log(number / first_count)
        power = jnp.clip(jnp.where(number > first_count, power, 0.5), 0.5, 8.0)
        needed = number * jnp.exp(jnp.log(excess) / power)
        needed = jnp.where(excess > 1, needed, number)
        needed = jnp.where(jnp.isnan(needed), jnp.inf, needed)
        return Forecast(first_count, first, needed)


class Loop(eqx.Module):
    """The variables of a loop.

    - `count`: how many probes the buffers hold.
    - `next_check`: the number of probes at which the error bar is judged again.
    - `check`, `forecast`: of the last time that it was.
    - `stop`: whether it was short enough then.
    - `meter`: the state of the progress meter.
    """

    buffers: Any
    count: Int[Array, ""]
    next_check: Int[Array, ""]
    check: Check
    forecast: Forecast
    stop: Bool[Array, ""]
    meter: Any


def run_until(
    stop: Stop,
    grow: Callable[[Any, Int[Array, ""]], Any],
    judge: Callable[[Any, Int[Array, ""]], Check],
    buffers: Any,
    *,
    start: int | Int[Array, ""],
    width: int,
    most: int | Int[Array, ""],
    fewest: int,
    samples: int | None = None,
) -> Loop:
    """Takes steps of `width` until the tolerance is met, or `most` would be exceeded.

    - `grow` returns the buffers with the probes `count, ..., count + width - 1`.
    - `judge` returns a `Check` of the first `count` of them.
    - `start`: how many probes the buffers hold at the beginning; these are judged first.
    - `fewest`: no loop stops with less, unless the value is not finite.
    - `samples`: how many an error bar is made of, where that isn't the number of probes.
    """
    meter = stop.meter

    def check(buffers, count, forecast):
        bar, extra = judge(buffers, count)
        # Stopping at the first short bar picks bars that are too short by chance.
        error = bar.standard_error
        number = jnp.asarray(count if samples is None else samples).astype(error.dtype)
        bar = bar._replace(standard_error=error * (1 + _WIDENED / number))
        excess = stop.excess(bar)
        forecast = forecast.after(excess, jnp.asarray(count))
        enough = (excess <= 1) & (count >= fewest)
        return Check(bar, extra), forecast, enough | ~jnp.isfinite(bar.mean).all()

    def body(loop: Loop) -> Loop:
        buffers = grow(loop.buffers, loop.count)
        count = loop.count + width
        due = (count >= loop.next_check) | (count + width > most)
        # One condition for all lanes of a `vmap`, or both branches would be computed. A
        # lane that has stopped keeps what it had.
        due = eqxi.unvmap_any(due & ~loop.stop)
        last, forecast, enough = jax.lax.cond(
            due,
            lambda: check(buffers, count, loop.forecast),
            lambda: (loop.check, loop.forecast, jnp.array(False)),
        )
        next_check = count + jnp.maximum(width, count // 3)
        next_check = jnp.where(due, next_check, loop.next_check)
        shown = meter.step(loop.meter, jnp.where(enough, 1, count / most))
        return Loop(buffers, count, next_check, last, forecast, enough, shown)

    def proceed(loop: Loop) -> Bool[Array, ""]:
        return ~loop.stop & (loop.count + width <= most)

    count = jnp.asarray(start, jnp.int32)
    unknown = jnp.full((), jnp.inf, stop.rtol.dtype)
    forecast = Forecast(unknown, unknown, unknown)
    if isinstance(start, int) and start == 0:
        shapes = jax.eval_shape(lambda: check(buffers, count, forecast))
        last, _, enough = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    else:
        last, forecast, enough = check(buffers, count, forecast)
    next_check = jnp.asarray(fewest, jnp.int32)
    loop = Loop(buffers, count, next_check, last, forecast, enough, meter.init())
    loop = jax.lax.while_loop(proceed, body, loop)
    meter.close(loop.meter)
    return loop


def step_width(most: int, fewest: int) -> int:
    """Probes a step: `fewest`, or up to twice as many, so that steps leave few over."""
    if most < 2 * fewest:
        return max(most, 1)
    widths = range(fewest, 2 * fewest)
    return min(widths, key=lambda width: most % width)
