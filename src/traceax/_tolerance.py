r"""Estimates to a tolerance: a loop takes products until an error bar is small enough.

The loop fills buffers, with room for the largest budget, a few *units* at a time. A unit is
a probe with its products, or a Krylov step. docs/tolerances.md derives the stopping rule.
"""

import abc
import dataclasses
import importlib.util
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
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, Int32, PyTree

from ._arguments import check_level, kind_of, require
from ._error_bar import ErrorBar
from ._estimate import student_t_quantile
from ._linalg.dense import divisor
from ._linalg.types import while_loop
from ._results import RESULTS, map_results

# Progress is an integer, in hundredths of a percent, so that JAX doesn't differentiate it.
_FULL = 10_000
# The progress in a loop, and the progress last shown.
MeterState = tuple[Int32[Array, ""], Int32[Array, ""]]


def _checked(x: object) -> Any:
    valid = isinstance(x, float | int) and (0 <= x <= 1 or x == math.inf)
    rule, hint = "minimum_increase must be inf or from 0 to 1", "0.02 shows every 2 %"
    require(valid, "traceax.ProgressMeter", rule, kind_of(x), hint)
    return x


class ProgressMeter(eqx.Module):
    """Abstract base class for progress meters, which show how far a loop is.

    A meter follows one loop, which carries `state`: `state = init()` before the loop,
    `state = step(state, progress)` in its body, `close(state)` after it. Loops that run at
    the same time share a display. Under `jax.vmap`, the display shows the slowest batch
    element. A loop that stops early reports progress 1 with its last step.

    **Arguments:**

    - `minimum_increase`: from 0 to 1. The meter calls the host to show the progress again
        after it has grown by this number, at least 0.0001. It always shows the end.
    """

    minimum_increase: float = eqx.field(default=0.02, static=True, converter=_checked)

    @abc.abstractmethod
    def show(self, percent: float, last: bool) -> None:
        """Shows the progress, on the host. The `last` call ends the display."""

    def init(self) -> MeterState:
        # Adding 0 makes a computed array: batched loops on explicit meshes refuse constants.
        zero = jnp.zeros((), jnp.int32) + 0
        return zero, zero

    def step(self, state: MeterState, progress: Float[Array, ""]) -> MeterState:
        """Updates the state to a progress from 0 to 1, or keeps a larger one. NaN is 0."""
        if math.isinf(self.minimum_increase):
            return state
        progress = jnp.nan_to_num(jax.lax.stop_gradient(progress)).astype(jnp.float32)
        current = jnp.round(jnp.clip(progress, 0, 1) * _FULL).astype(jnp.int32)
        # Progress below 1 must not round up to 100.00%; we leave that to `close`.
        current = jnp.minimum(current, _FULL - (progress < 1).astype(jnp.int32))
        current = jnp.maximum(state[0], current)
        # We make one call for the whole batch, with the slowest element's progress.
        slowest, shown = -eqxi.unvmap_max(-current), eqxi.unvmap_max(state[1])
        least = max(1, round(self.minimum_increase * _FULL))
        is_due = (slowest - shown >= least) & (slowest < _FULL)
        jax.lax.cond(is_due, self._report, lambda _: None, slowest)
        return current, jnp.where(is_due, slowest, shown)

    def close(self, state: MeterState) -> None:
        if not math.isinf(self.minimum_increase):
            self._report(-eqxi.unvmap_max(-state[0]), last=True)

    def _report(self, hundredths: Int32[Array, ""], last: bool = False) -> None:
        jax.debug.callback(lambda x: self.show(float(x) / 100, last), hundredths)


class NoProgressMeter(ProgressMeter):
    """Shows nothing, without a host callback. Its `minimum_increase` is infinite."""

    minimum_increase: float = eqx.field(default=math.inf, static=True)  # pyright: ignore

    def show(self, percent, last): ...


class TextProgressMeter(ProgressMeter):
    """Prints a line such as ` 42.00%`, overwritten at every `minimum_increase`."""

    def show(self, percent, last):
        print(f"\r{percent:6.2f}%", end="\n" if last else "", flush=True)


class TqdmProgressMeter(ProgressMeter):
    """Draws a [tqdm](https://tqdm.github.io) bar, moved at every `minimum_increase`."""

    def __check_init__(self):
        spec, hint = importlib.util.find_spec("tqdm"), "`pip install tqdm` installs it"
        where, rule = "traceax.TqdmProgressMeter", "tqdm must be installed"
        require(spec, where, rule, "no such module", hint, ImportError)

    def show(self, percent, last):
        if _bars and percent < _bars[0].n:
            _bars.pop().close()  # an interrupted run left this bar
        if not _bars:
            layout = "{percentage:6.2f}%|{bar}| {elapsed}<{remaining}"
            tqdm = importlib.import_module("tqdm").tqdm
            _bars.append(tqdm(total=100, initial=percent, bar_format=layout))
        _bars[0].n = percent
        _bars[0].refresh()
        if last:
            _bars.pop().close()


_bars: list[Any] = []  # holds at most one bar, the one on the screen
NO_PROGRESS_METER = NoProgressMeter()


Count = Int[Array, ""]
Scalar = Float[Array, ""]

# We multiply error bars from m samples by 1 + _WIDENING / m. 2 is the smallest integer
# with which 95 % intervals keep their level in `benchmarks/tolerances.py normal`.
_WIDENING = 2.0
# A loop takes at least 8 products in a step, and before it may stop. After a check at
# `count` units, it waits for `count // 3` more. The same script simulates both choices.
LEAST_PRODUCTS = 8
_CHECK_DIVISOR = 3
# Allowed truncation error, relative to the sampling error. We chose it on likelihood fits.
_TRUNCATION_SHARE = 0.1
# Up to this n, we compute the exact answer at once if k is at least n or omitted, because
# a few steps with probes would also take n products.
EXACT_SIZE = 32
# Forecasts assume that error bars fall with a power of the number of units. It is at least
# 1/2, the Monte Carlo rate, and at most a power that we chose.
_LEAST_POWER, _LARGEST_POWER = 0.5, 8.0


class Stop(eqx.Module):
    """Stops a loop when half of the interval is at most `atol + rtol |value|`.

    For several values, we compare a norm of half intervals with the same norm of values:
    `"largest"` or `"root mean square"`. With `None`, each value must meet the condition.
    """

    rtol: Scalar
    atol: Scalar
    level: float = eqx.field(static=True)
    meter: ProgressMeter = eqx.field(static=True)
    factor: Inexact[Array, ""]  # value = factor * (loop's value) + offset
    offset: Inexact[Array, "*g"]  # see `factor`
    norm: str | None = eqx.field(static=True, default=None)
    inner: jtu.Partial | None = None  # errors from iterations within the operator

    @property
    def dtype(self) -> np.dtype:
        return self.rtol.dtype

    def ratio(self, bar: ErrorBar) -> Scalar:
        """The largest ratio of an interval's length to its allowed length.

        `bar` belongs to the loop's value, without `factor` and `offset`. The ratio is
        infinite if the error is unknown.
        """
        error, freedom = bar.standard_error, bar.degrees_of_freedom
        quantile = student_t_quantile(self.level, freedom)
        scaled = jnp.abs(self.factor).astype(error.dtype) * error
        half_width = jnp.where(error == 0, 0, quantile * scaled)
        # The loop's value may be real although `factor` or `offset` is complex.
        dtype = np.result_type(bar.mean.dtype, self.factor.dtype, self.offset.dtype)
        value = self.factor.astype(dtype) * bar.mean.astype(dtype)
        modulus = jnp.abs(value + self.offset.astype(dtype)).astype(error.dtype)
        # A value that isn't finite has failed, so we ignore it here.
        finite = jnp.isfinite(bar.mean)
        half_width, modulus = (jnp.where(finite, x, 0) for x in (half_width, modulus))
        rtol, atol = self.rtol.astype(error.dtype), self.atol.astype(error.dtype)
        norms: dict[Any, Callable[..., Array]] = {
            "largest": jnp.max,
            "root mean square": root_mean_square,
        }
        norm = norms.get(self.norm, jnp.asarray)
        half_width, modulus = norm(half_width), norm(modulus)
        allowed = atol + rtol * modulus
        if self.inner is not None:
            # Squared errors from iterations and probes add up, so we reduce `allowed`.
            size = jnp.abs(self.factor).astype(error.dtype)
            width = norm(quantile * size * self.inner(bar.mean).astype(error.dtype))
            remaining = 1 - (width / divisor(allowed)) ** 2
            allowed = jnp.where(remaining > 0, allowed * jnp.sqrt(remaining), -1)
        ratio = jnp.where(allowed > 0, half_width / divisor(allowed), jnp.inf)
        ratio = jnp.where((half_width == 0) & (allowed >= 0), 0, ratio)
        return jnp.max(jnp.where(jnp.isnan(ratio), jnp.inf, ratio))

    def for_part(
        self, factor: Inexact[Array, ""] | None, offset: Inexact[Array, ""] | None
    ) -> "Stop":
        """The condition for a loop over a part of the value. `None` keeps the old number."""
        factor = self.factor if factor is None else factor
        offset = self.offset if offset is None else offset
        return dataclasses.replace(self, factor=factor, offset=offset)


class Depth(eqx.Module):
    """Stops a loop when the truncation error of a Krylov space is negligible."""

    meter: ProgressMeter = eqx.field(static=True)
    dtype: DTypeLike = eqx.field(static=True)  # a real dtype
    # We always neglect truncation errors below this, in the unit of the value.
    negligible: float = eqx.field(static=True, default=0.0)

    def ratio(
        self,
        bias: Float[Array, "*g"],
        error: Float[Array, "*g"],
        rounding: Float[Array, "*g"],
    ) -> Scalar:
        """`bias`, the truncation error, over its limit for `error`, the sampling error.

        Below the rounding error, further steps don't reduce it.
        """
        known = jnp.maximum(rounding, self.negligible)
        allowed = jnp.maximum(_TRUNCATION_SHARE * error, known)
        ratio = jnp.where(bias == 0, 0, bias / divisor(allowed))
        return jnp.max(jnp.where(jnp.isnan(ratio), jnp.inf, ratio))


def widened_for_loop(
    error: Float[Array, "*g"], m: int | Int[Array, ""]
) -> Float[Array, "*g"]:
    """A larger standard error, as loops tend to stop when it is too small by chance."""
    return error * (1 + _WIDENING / jnp.asarray(m).astype(error.dtype))


def root_mean_square(x: Float[Array, " g"]) -> Scalar:
    unit = divisor(jnp.max(jnp.abs(x)))
    return unit * jnp.sqrt(jnp.mean((x / unit) ** 2))


def make_stop(
    rtol: ArrayLike | None,
    atol: ArrayLike | None,
    level: float,
    meter: ProgressMeter,
    dtype: DTypeLike,
    where: str,
    norm: str | None = None,
) -> Stop | None:
    """Checks the arguments and makes a `Stop`; `None` without `rtol` and `atol`."""
    if not isinstance(meter, ProgressMeter):
        raise TypeError(
            f"{where}: progress_meter must be a traceax.ProgressMeter, got "
            f"{kind_of(meter)}; pass an instance, such as traceax.TextProgressMeter()."
        )
    level = check_level(level, where)
    if rtol is None and atol is None:
        return None
    relative, absolute = (
        check_tolerance(0.0 if x is None else x, name, dtype, where)
        for name, x in (("rtol", rtol), ("atol", atol))
    )
    one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
    return Stop(relative, absolute, level, meter, one, zero, norm)


def check_tolerance(x: Any, name: str, dtype: DTypeLike, where: str) -> Scalar:
    """Checks a tolerance and makes it a real array with the precision of `dtype`."""
    kinds = int | float | np.number | np.ndarray | jax.Array
    number = isinstance(x, kinds) and not isinstance(x, bool)
    number = number and jnp.ndim(x) == 0 and not jnp.iscomplexobj(x)
    rule, hint = f"{name} must be a real number", "write 1e-2 for two digits"
    require(number, where, rule, f"{x!r}", hint, TypeError)
    valid = isinstance(x, jax.core.Tracer) or 0 <= float(np.asarray(x)) < math.inf
    require(valid, where, f"{name} must be finite and not negative", f"{x}", hint)
    return jnp.asarray(x, jnp.finfo(dtype).dtype)


def tolerance_result(stop: Stop, bar: ErrorBar, result: PyTree[RESULTS]) -> Any:
    """`result`. If `bar` misses the tolerance, a success becomes `tolerance_not_met`."""
    met = stop.ratio(bar) <= 1
    unmet = RESULTS.where(met, RESULTS.successful, RESULTS.tolerance_not_met)
    return map_results(
        lambda x: RESULTS.where(x == RESULTS.successful, unmet, x), result
    )


class Check(NamedTuple):
    """An evaluation of the units taken so far."""

    bar: ErrorBar  # `run_until` widens it for a `Stop`
    output: PyTree[Any]  # anything; the caller gets it from the last check
    ratio: Scalar | None = None  # for a `Depth`; a `Stop` computes it from `bar`


class Forecast(NamedTuple):
    """Extrapolates error bars from earlier checks to the number of units needed."""

    first_count: Scalar  # units at the first check with a known error
    first_ratio: Scalar  # the ratio at this check, and infinity before this check
    needed: Scalar  # units that meet the tolerance; infinite if unknown

    def after(self, ratio: Scalar, count: Count) -> "Forecast":
        units = count.astype(ratio.dtype)
        is_first = ~jnp.isfinite(self.first_ratio)
        first_count = jnp.where(is_first, units, self.first_count)
        first_ratio = jnp.where(is_first, ratio, self.first_ratio)
        power = jnp.log(first_ratio / ratio) / jnp.log(units / first_count)
        power = jnp.where(units > first_count, power, _LEAST_POWER)
        power = jnp.clip(power, _LEAST_POWER, _LARGEST_POWER)
        needed = units * jnp.exp(jnp.log(ratio) / power)
        needed = jnp.where(ratio > 1, needed, units)
        needed = jnp.where(jnp.isnan(needed), jnp.inf, needed)
        return Forecast(first_count, first_ratio, needed)


class Loop(eqx.Module):
    buffers: PyTree[Any]  # filled by `grow`
    count: Count  # units in the buffers
    next_check: Count  # units at the next check
    check: Check  # the last check
    forecast: Forecast  # after the last check
    done: Bool[Array, ""]  # whether the tolerance is met, or the value isn't finite
    meter: Any


def run_until(
    stop: Stop | Depth,
    grow: Callable[[Any, Count], Any],
    judge: Callable[[Any, Count], Check],
    buffers: PyTree[Any],
    *,
    start: int | Count,
    width: int,
    limit: int | Count,
    minimum: int,
    num_samples: int | None = None,
) -> Loop:
    """Runs a loop until the tolerance is met, or until another step would exceed `limit`.

    - `grow(buffers, count)`: a callback that adds `width` units to the buffers.
    - `judge(buffers, count)`: a callback that returns a `Check` for `count` units.
    - `start`: units in the buffers at the beginning. We check them before the first step.
    - `limit`: the largest number of units.
    - `minimum`: the least number of units to stop with, unless a value isn't finite. The
        first check after a step waits for them.
    - `num_samples`: the m for `widened_for_loop`; by default the number of units.
    """
    meter = stop.meter

    def check(buffers, count, forecast):
        judged = judge(buffers, count)
        bar, ratio = judged.bar, judged.ratio
        if isinstance(stop, Stop):
            m = count if num_samples is None else num_samples
            bar = bar._replace(standard_error=widened_for_loop(bar.standard_error, m))
            ratio = stop.ratio(bar)
        assert ratio is not None
        forecast = forecast.after(ratio, jnp.asarray(count))
        done = (ratio <= 1) & (count >= minimum)
        done = done | ~jnp.isfinite(bar.mean).any()
        return judged._replace(bar=bar), forecast, done

    def body(loop: Loop) -> Loop:
        # Under `vmap`, we take steps until no batch element waits for its next check.
        def waits(carry):
            _, count, _ = carry
            return (count < loop.next_check) & (count + width <= limit) & ~loop.done

        def step(carry):
            buffers, count, shown = carry
            buffers, count = grow(buffers, count), count + width
            return buffers, count, meter.step(shown, count / limit)

        carry = loop.buffers, loop.count, loop.meter
        buffers, count, shown = while_loop(waits, step, carry)
        latest, forecast, done = check(buffers, count, loop.forecast)
        next_check = count + jnp.maximum(width, count // _CHECK_DIVISOR)
        shown = meter.step(shown, jnp.where(done, 1, count / limit))
        return Loop(buffers, count, next_check, latest, forecast, done, shown)

    def proceed(loop: Loop) -> Bool[Array, ""]:
        return ~loop.done & (loop.count + width <= limit)

    count = jnp.asarray(start, jnp.int32)
    unknown = jnp.full((), jnp.inf, stop.dtype)
    forecast = Forecast(unknown, unknown, unknown)
    if isinstance(start, int) and start == 0:
        shapes = jax.eval_shape(lambda: check(buffers, count, forecast))
        latest, _, done = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    else:
        latest, forecast, done = check(buffers, count, forecast)
    next_check = jnp.maximum(count + width, minimum)
    loop = Loop(buffers, count, next_check, latest, forecast, done, meter.init())
    loop = while_loop(proceed, body, loop)
    meter.close(loop.meter)
    return loop


def loop_products(k: int, size: int, least: int = LEAST_PRODUCTS) -> int:
    """How many products a loop may take from a budget k.

    If k is below n, it takes all. Otherwise we reserve n products for the exact answer, and
    the loop takes the rest, at most n - 1, or 0 if this is below `least` or n is small.
    """
    if k < size:
        return k
    remaining = min(k - size, size - 1)
    return remaining if size > EXACT_SIZE and remaining >= least else 0


def step_width(limit: int, minimum: int) -> int:
    """Units in a step, from `minimum` to `2 minimum - 1`, with the least `limit % width`."""
    if limit < 2 * minimum:
        return max(limit, 1)
    return min(range(minimum, 2 * minimum), key=lambda width: limit % width)
