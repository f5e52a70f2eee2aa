r"""Estimates to a tolerance: how many products are taken is decided while they are taken.

Shapes are those of the largest budget. One loop fills buffers of that size, a few probes
at a time, and looks at the error bar whenever there are a third more than at the last
look. docs/budgets.md has the rule and its derivation.
"""

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
from .._progress import ProgressMeter
from .._student_t import check_level, student_t_quantile, two_sided
from .error_bar import ErrorBar

# In units of 1 / count. The smallest integer for which intervals of normal samples keep
# their level for every tolerance, simulated.
_WIDENED = 2.0
# Up to so many dimensions an answer is exact where the budget allows it.
SMALL = 32
# How many times too small a budget is when a loop gives up.
_CLEAR = 2.0
# Products that are taken before a loop may stop, and in each of its steps.
FEWEST = 8


class Tolerance(eqx.Module):
    """When an error bar is short enough.

    - `rtol`, `atol`: half of the interval at most `atol + rtol |value|`.
    - `level`: of the interval.
    - `factor`, `offset`: the value is `factor` times that of the loop, plus `offset`.
    - `norm`: of several values, `"largest"` or `"root mean square"`, of which the
        tolerance is; `None` for each on its own.
    - `give_up`: whether to stop once it is clear that it won't be met.
    """

    rtol: Float[Array, ""]
    atol: Float[Array, ""]
    level: float = eqx.field(static=True)
    factor: Inexact[Array, ""]
    offset: Inexact[Array, "*g"]
    norm: str | None = eqx.field(static=True, default=None)
    give_up: bool = eqx.field(static=True, default=False)

    def excess(self, bar: ErrorBar) -> Float[Array, ""]:
        """How many times as long as asked for the interval of the whole value is.

        Of the worst, if the entries of `bar` hold several. Infinite for an unknown error.
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

    def of_part(
        self, factor: Inexact[Array, ""] | None, offset: Inexact[Array, ""] | None
    ) -> "Tolerance":
        """The same tolerance, seen from a part of the value."""
        return Tolerance(
            self.rtol,
            self.atol,
            self.level,
            self.factor if factor is None else factor,
            self.offset if offset is None else offset,
            self.norm,
            self.give_up,
        )


def root_mean_square(x: Float[Array, " g"]) -> Float[Array, ""]:
    """Of what may be too small to square."""
    unit = divisor(jnp.max(jnp.abs(x)))
    return unit * jnp.sqrt(jnp.mean((x / unit) ** 2))


def make_tolerance(
    rtol: ArrayLike | None,
    atol: ArrayLike | None,
    level: float,
    dtype: Any,
    where: str,
    norm: str | None = None,
    give_up: bool = False,
) -> Tolerance | None:
    """Checks; `None` if neither is given. `dtype` is that of the value."""
    if isinstance(level, bool) or not isinstance(level, float | int):
        raise TypeError(
            f"{where}: level must be a Python number, got {level!r} of type "
            f"{type(level).__name__}; write 0.95 for an interval of 95 %."
        )
    check_level(level, where)
    if rtol is None and atol is None:
        return None
    given: list[Array] = []
    for name, asked in (("rtol", rtol), ("atol", atol)):
        x = 0.0 if asked is None else asked
        if isinstance(x, bool | str) or jnp.ndim(x) != 0 or jnp.iscomplexobj(x):
            raise TypeError(
                f"{where}: {name} must be a real number, got {x!r}; write 1e-2 for two "
                "digits."
            )
        known = not isinstance(x, jax.core.Tracer)
        if known and not 0 <= float(np.asarray(x)) < math.inf:
            raise ValueError(
                f"{where}: {name} must be finite and not negative, got {x}."
            )
        given.append(jnp.asarray(x).astype(jnp.finfo(dtype).dtype))
    one = jnp.ones((), dtype)
    relative, absolute = given
    nothing = jnp.zeros_like(one)
    return Tolerance(relative, absolute, float(level), one, nothing, norm, give_up)


def met_or_failed(tolerance: Tolerance, bar: ErrorBar, result: RESULTS) -> RESULTS:
    """`result`, or that the tolerance was not met. A value that is not finite has a cause
    of its own."""
    met = tolerance.met(bar) | ~jnp.isfinite(bar.mean).all()
    unmet = RESULTS.where(met, RESULTS.successful, RESULTS.tolerance_not_met)
    return RESULTS.where(result == RESULTS.successful, unmet, result)


class Looked(NamedTuple):
    """What a look at the probes so far tells: an error bar, and what else was found."""

    bar: ErrorBar
    found: Any


class Forecast(NamedTuple):
    """How many probes it would take at this rate, from the first look to the last.

    Error bars fall with a power of the number of probes, of at least 1/2: Monte Carlo's.
    """

    begun: Float[Array, ""]  # at the first look
    excess: Float[Array, ""]  # there
    needed: Float[Array, ""]
    looks: Int[Array, ""]

    def after(self, excess: Float[Array, ""], count: Int[Array, ""]) -> "Forecast":
        number = count.astype(excess.dtype)
        first = (self.looks == 0) | ~jnp.isfinite(self.excess)
        begun = jnp.where(first, number, self.begun)
        start = jnp.where(first, excess, self.excess)
        fell = jnp.log(start / excess) / jnp.log(number / begun)
        power = jnp.clip(jnp.where(number > begun, fell, 0.5), 0.5, 8.0)
        needed = number * jnp.exp(jnp.log(excess) / power)
        needed = jnp.where(excess > 1, needed, number)
        needed = jnp.where(jnp.isnan(needed), jnp.inf, needed)
        return Forecast(begun, start, needed, self.looks + 1)


class Progress(eqx.Module):
    """Where a loop is."""

    buffers: Any
    count: Int[Array, ""]
    next_look: Int[Array, ""]
    looked: Looked
    forecast: Forecast
    stop: Bool[Array, ""]
    meter: Any


def until(
    tolerance: Tolerance,
    meter: ProgressMeter,
    grow: Callable[[Any, Int[Array, ""]], Any],
    judge: Callable[[Any, Int[Array, ""]], Looked],
    buffers: Any,
    *,
    done: int | Int[Array, ""],
    width: int,
    most: int | Int[Array, ""],
    fewest: int,
    samples: int | None = None,
) -> Progress:
    """Takes steps of `width` until the tolerance is met, or `most` would be exceeded.

    `grow` returns the buffers with what it found of the probes `count, ..., count + width
    - 1`, `judge` looks at the first `count` of them. No loop stops with less than `fewest`,
    unless the value is not finite. `done` probes are there from the beginning, and are
    looked at first. `samples` is how many an error bar is made of, where that isn't the
    number of probes.
    """

    def look(buffers, count, forecast):
        bar, found = judge(buffers, count)
        # Of errors estimated too small and too large, the small ones end the loop.
        error = bar.standard_error
        number = jnp.asarray(count if samples is None else samples).astype(error.dtype)
        bar = bar._replace(standard_error=error * (1 + _WIDENED / number))
        excess = tolerance.excess(bar)
        forecast = forecast.after(excess, jnp.asarray(count))
        stop = (excess <= 1) & (count >= fewest)
        if tolerance.give_up:
            hopeless = forecast.needed > _CLEAR * most
            stop = stop | (hopeless & (forecast.looks > 1))
        return Looked(bar, found), forecast, stop | ~jnp.isfinite(bar.mean).all()

    def body(progress: Progress) -> Progress:
        buffers = grow(progress.buffers, progress.count)
        count = progress.count + width
        due = (count >= progress.next_look) | (count + width > most)
        # One condition for all lanes of a `vmap`, or both branches would be computed. A
        # lane that has stopped keeps what it had.
        due = eqxi.unvmap_any(due & ~progress.stop)
        looked, forecast, stop = jax.lax.cond(
            due,
            lambda: look(buffers, count, progress.forecast),
            lambda: (progress.looked, progress.forecast, jnp.array(False)),
        )
        following = count + jnp.maximum(width, count // 3)
        following = jnp.where(due, following, progress.next_look)
        fraction = jnp.where(stop, 1, count / most)
        shown = meter.step(progress.meter, fraction)
        return Progress(buffers, count, following, looked, forecast, stop, shown)

    def proceed(progress: Progress) -> Bool[Array, ""]:
        return ~progress.stop & (progress.count + width <= most)

    start = jnp.asarray(done, jnp.int32)
    real = tolerance.rtol.dtype
    unknown = jnp.full((), jnp.inf, real)
    forecast = Forecast(unknown, unknown, unknown, jnp.asarray(0, jnp.int32))
    if isinstance(done, int) and done == 0:
        shapes = jax.eval_shape(lambda: look(buffers, start, forecast))
        looked, _, stop = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    else:
        looked, forecast, stop = look(buffers, start, forecast)
    following = jnp.asarray(fewest, jnp.int32)
    progress = Progress(buffers, start, following, looked, forecast, stop, meter.init())
    progress = jax.lax.while_loop(proceed, body, progress)
    meter.close(progress.meter)
    return progress


def step_width(most: int, fewest: int) -> int:
    """Probes a step: `fewest`, or up to twice as many, so that steps leave few over."""
    if most < 2 * fewest:
        return max(most, 1)
    widths = range(fewest, 2 * fewest)
    return min(widths, key=lambda width: most % width)
