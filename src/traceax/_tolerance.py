r"""Estimates to a tolerance: the number of products is decided while they are taken.

A loop fills buffers of the size of the largest budget, a few *units* at a time: probes with
their products, or steps of a Krylov space. docs/tolerances.md derives its rule.
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

_WHOLE = 10_000  # hundredths of a percent: integers have no derivatives

# How far a lane of a loop is, and what was shown.
Position = tuple[Int32[Array, ""], Int32[Array, ""]]


def _checked(given: object) -> Any:
    right = isinstance(given, float | int) and (0 <= given <= 1 or given == math.inf)
    what, hint = "minimum_increase must be from 0 to 1", "0.02 shows every 2 %"
    require(right, "traceax.ProgressMeter", what, kind_of(given), hint)
    return given


class ProgressMeter(eqx.Module):
    """Abstract base class of progress meters, which say how to show a progress.

    A meter follows one loop, which carries `state`: `state = init()` before it,
    `state = step(state, progress)` in its body, `close(state)` after it. Loops that run at
    the same time share a display. Under `jax.vmap` it shows the slowest lane; one that
    stops early reports 1 with its last step.

    **Arguments:**

    - `minimum_increase`: the progress is shown when it grew by so much, a number from 0 to
        1 (by 0.0001 at least), and at the end. The host is called for this only.
    """

    minimum_increase: float = eqx.field(default=0.02, static=True, converter=_checked)

    @abc.abstractmethod
    def show(self, percent: float, last: bool) -> None:
        """Shows the progress, on the host, and ends the display with the last."""

    def init(self) -> Position:
        # A sum, as loops over lanes on an explicit mesh refuse constants.
        zero = jnp.zeros((), jnp.int32) + 0
        return zero, zero

    def step(self, state: Position, progress: Float[Array, ""]) -> Position:
        """The state of a loop that is so far, from 0 to 1. It never goes back; NaN is 0."""
        if math.isinf(self.minimum_increase):
            return state
        progress = jnp.nan_to_num(jax.lax.stop_gradient(progress)).astype(jnp.float32)
        far = jnp.round(jnp.clip(progress, 0, 1) * _WHOLE).astype(jnp.int32)
        # Only what is done is shown as 100.00%, by `close`.
        far = jnp.minimum(far, _WHOLE - (progress < 1).astype(jnp.int32))
        far = jnp.maximum(state[0], far)
        # One call for all lanes. Those that are done keep their old states.
        slowest, shown = -eqxi.unvmap_max(-far), eqxi.unvmap_max(state[1])
        least = max(1, round(self.minimum_increase * _WHOLE))
        due = (slowest - shown >= least) & (slowest < _WHOLE)
        jax.lax.cond(due, self._report, lambda _: None, slowest)
        return far, jnp.where(due, slowest, shown)

    def close(self, state: Position) -> None:
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
    """A bar of [tqdm](https://tqdm.github.io), which moves at every `minimum_increase`."""

    def __check_init__(self):
        found, hint = importlib.util.find_spec("tqdm"), "`pip install tqdm` installs it"
        where, what = "traceax.TqdmProgressMeter", "tqdm must be installed"
        require(found, where, what, "no such module", hint, ImportError)

    def show(self, percent, last):
        if _bars and percent < _bars[0].n:
            _bars.pop().close()  # of a run that was cut off
        if not _bars:
            layout = "{percentage:6.2f}%|{bar}| {elapsed}<{remaining}"
            tqdm = importlib.import_module("tqdm").tqdm
            _bars.append(tqdm(total=100, initial=percent, bar_format=layout))
        _bars[0].n = percent
        _bars[0].refresh()
        if last:
            _bars.pop().close()


_bars: list[Any] = []  # the bar on the screen, if there is one
NO_PROGRESS_METER = NoProgressMeter()


Count = Int[Array, ""]
Scalar = Float[Array, ""]

# Error bars of m samples are multiplied by 1 + _WIDENING / m: the smallest integer for which
# `benchmarks/tolerances.py normal` finds 95 % intervals to keep their level.
_WIDENING = 2.0
# Products before a loop may stop, and in each of its steps; after a check of so many units the
# next one is at count // 3 more. Both are chosen, and in the rule that this script simulates.
LEAST_PRODUCTS = 8
_CHECK_DIVISOR = 3
# Of the error of probes, what a Krylov space may leave: measured on whole fits of likelihoods.
_SHARE_LEFT = 0.1
# Size of an operator up to which the answer is exact at once where the budget allows it, or is
# left out: a few steps of probes would take as many products.
EXACT_SIZE = 32
# Powers of the number of units by which a forecast lets error bars fall: that of Monte Carlo
# at least, and at most one that is chosen.
_LEAST_POWER, _LARGEST_POWER = 0.5, 8.0


class Stop(eqx.Module):
    """Condition for a loop to stop: half of an interval is at most `atol + rtol |value|`.

    `norm` of several values and of their half intervals, `"largest"` or
    `"root mean square"`, is what the tolerance applies to; `None` for each value on its
    own.
    """

    rtol: Scalar
    atol: Scalar
    level: float = eqx.field(static=True)
    meter: ProgressMeter = eqx.field(static=True)
    factor: Inexact[Array, ""]  # the value is so many times that of the loop,
    offset: Inexact[Array, "*g"]  # plus so much
    norm: str | None = eqx.field(static=True, default=None)
    solvers: Scalar | None = None  # the relative error of solvers within the operator

    @property
    def dtype(self) -> np.dtype:
        return self.rtol.dtype

    def ratio(self, bar: ErrorBar) -> Scalar:
        """Ratio of the interval's length to the length asked for, the largest of several.

        `bar` is that of the loop's value. Infinite for an unknown error.
        """
        error, freedom = bar.standard_error, bar.degrees_of_freedom
        quantile = student_t_quantile(self.level, freedom)
        scaled = jnp.abs(self.factor).astype(error.dtype) * error
        half_width = jnp.where(error == 0, 0, quantile * scaled)
        # The loop's value may be known to be real where the whole is not.
        dtype = np.result_type(bar.mean.dtype, self.factor.dtype, self.offset.dtype)
        value = self.factor.astype(dtype) * bar.mean.astype(dtype)
        size = jnp.abs(value + self.offset.astype(dtype)).astype(error.dtype)
        # A value that isn't finite has failed, and no tolerance is for it.
        finite = jnp.isfinite(bar.mean)
        half_width, size = (jnp.where(finite, x, 0) for x in (half_width, size))
        rtol, atol = self.rtol.astype(error.dtype), self.atol.astype(error.dtype)
        norms: dict[Any, Callable[..., Array]] = {
            "largest": jnp.max,
            "root mean square": root_mean_square,
        }
        norm = norms.get(self.norm, jnp.asarray)
        half_width, size = norm(half_width), norm(size)
        allowed = atol + rtol * size
        if self.solvers is not None:
            # Squares add up: solvers leave less for probes to make of the tolerance.
            part = norm(quantile * self.solvers * jnp.abs(value).astype(error.dtype))
            rest = 1 - (part / divisor(allowed)) ** 2
            allowed = jnp.where(rest > 0, allowed * jnp.sqrt(rest), -1)
        ratio = jnp.where(allowed > 0, half_width / divisor(allowed), jnp.inf)
        ratio = jnp.where((half_width == 0) & (allowed >= 0), 0, ratio)
        return jnp.max(jnp.where(jnp.isnan(ratio), jnp.inf, ratio))

    def for_part(
        self, factor: Inexact[Array, ""] | None, offset: Inexact[Array, ""] | None
    ) -> "Stop":
        """The condition of a loop that finds another part of the value; `None` to keep."""
        factor = self.factor if factor is None else factor
        offset = self.offset if offset is None else offset
        return dataclasses.replace(self, factor=factor, offset=offset)


class Depth(eqx.Module):
    """Condition for a loop to stop: what a Krylov space leaves no longer matters."""

    meter: ProgressMeter = eqx.field(static=True)
    dtype: DTypeLike = eqx.field(static=True)  # of real numbers
    # What doesn't matter in any case, in the unit of the value.
    negligible: float = eqx.field(static=True, default=0.0)

    def ratio(self, left: Float[Array, "*g"], error: Float[Array, "*g"]) -> Scalar:
        """Ratio of what is left to what doesn't matter beside the error of probes."""
        allowed = jnp.maximum(_SHARE_LEFT * error, self.negligible)
        ratio = jnp.where(left == 0, 0, left / divisor(allowed))
        return jnp.max(jnp.where(jnp.isnan(ratio), jnp.inf, ratio))


def widened_for_loop(
    error: Float[Array, "*g"], m: int | Int[Array, ""]
) -> Float[Array, "*g"]:
    """Standard error of m samples, for a loop: it stops at bars too short by chance."""
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
    """The condition, from arguments; `None` if neither tolerance is given."""
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
    """A tolerance, checked, as a real array of the precision of `dtype`."""
    number = not (isinstance(x, bool | str) or jnp.ndim(x) != 0 or jnp.iscomplexobj(x))
    what, hint = f"{name} must be a real number", "write 1e-2 for two digits"
    require(number, where, what, f"{x!r}", hint, TypeError)
    right = isinstance(x, jax.core.Tracer) or 0 <= float(np.asarray(x)) < math.inf
    require(right, where, f"{name} must be finite and not negative", f"{x}", hint)
    return jnp.asarray(x, jnp.finfo(dtype).dtype)


def tolerance_result(stop: Stop, bar: ErrorBar, result: PyTree[RESULTS]) -> Any:
    """`result`, or that the tolerance was not met if it is a success."""
    met = stop.ratio(bar) <= 1
    unmet = RESULTS.where(met, RESULTS.successful, RESULTS.tolerance_not_met)
    return map_results(
        lambda x: RESULTS.where(x == RESULTS.successful, unmet, x), result
    )


class Check(NamedTuple):
    """Check of the units so far."""

    bar: ErrorBar  # which `run_until` widens for a tolerance
    extra: PyTree[
        Any
    ]  # anything that the caller of a loop wants to have of its last check
    ratio: Scalar | None = None  # where that isn't `Stop.ratio`


class Forecast(NamedTuple):
    """Forecast of how many units meet the tolerance, as error bars fell between checks."""

    first_count: Scalar  # units at the first check of a known error
    first_ratio: Scalar  # and the ratio then; infinite before
    needed: Scalar  # units that meet the tolerance; infinite where not known

    def after(self, ratio: Scalar, count: Count) -> "Forecast":
        number = count.astype(ratio.dtype)
        is_first = ~jnp.isfinite(self.first_ratio)
        first_count = jnp.where(is_first, number, self.first_count)
        first_ratio = jnp.where(is_first, ratio, self.first_ratio)
        power = jnp.log(first_ratio / ratio) / jnp.log(number / first_count)
        power = jnp.where(number > first_count, power, _LEAST_POWER)
        power = jnp.clip(power, _LEAST_POWER, _LARGEST_POWER)
        needed = number * jnp.exp(jnp.log(ratio) / power)
        needed = jnp.where(ratio > 1, needed, number)
        needed = jnp.where(jnp.isnan(needed), jnp.inf, needed)
        return Forecast(first_count, first_ratio, needed)


class Loop(eqx.Module):
    buffers: PyTree[Any]  # what `grow` fills
    count: Count  # how many units they hold
    next_check: Count  # the number from which on they are checked again
    check: Check  # the last one
    forecast: Forecast  # after it
    done: Bool[Array, ""]  # whether it met the tolerance, or its value isn't finite
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
    """The loop at its end: when the tolerance is met, or another step would exceed `limit`.

    - `grow(buffers, count)`: the buffers with `width` units more.
    - `judge(buffers, count)`: a `Check` of the first `count` units.
    - `start`, `limit`: units in the buffers at the beginning, which are checked before the
        first step, and at most.
    - `minimum`: units that the first check after a step waits for. With less only a value
        that isn't finite stops the loop.
    - `num_samples`: the m by which error bars are widened, where it isn't the number of
        units.
    """
    meter = stop.meter

    def check(buffers, count, forecast):
        found = judge(buffers, count)
        bar, ratio = found.bar, found.ratio
        if isinstance(stop, Stop):
            m = count if num_samples is None else num_samples
            bar = bar._replace(standard_error=widened_for_loop(bar.standard_error, m))
            ratio = stop.ratio(bar)
        assert ratio is not None
        forecast = forecast.after(ratio, jnp.asarray(count))
        done = (ratio <= 1) & (count >= minimum)
        done = done | ~jnp.isfinite(bar.mean).any()
        return found._replace(bar=bar), forecast, done

    def body(loop: Loop) -> Loop:
        # Lanes of a `vmap` take the steps that any of them waits for.
        def waits(run):
            _, count, _ = run
            return (count < loop.next_check) & (count + width <= limit) & ~loop.done

        def step(run):
            buffers, count, shown = run
            buffers, count = grow(buffers, count), count + width
            return buffers, count, meter.step(shown, count / limit)

        run = loop.buffers, loop.count, loop.meter
        buffers, count, shown = while_loop(waits, step, run)
        last, forecast, done = check(buffers, count, loop.forecast)
        next_check = count + jnp.maximum(width, count // _CHECK_DIVISOR)
        shown = meter.step(shown, jnp.where(done, 1, count / limit))
        return Loop(buffers, count, next_check, last, forecast, done, shown)

    def proceed(loop: Loop) -> Bool[Array, ""]:
        return ~loop.done & (loop.count + width <= limit)

    count = jnp.asarray(start, jnp.int32)
    unknown = jnp.full((), jnp.inf, stop.dtype)
    forecast = Forecast(unknown, unknown, unknown)
    if isinstance(start, int) and start == 0:
        shapes = jax.eval_shape(lambda: check(buffers, count, forecast))
        last, _, done = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    else:
        last, forecast, done = check(buffers, count, forecast)
    next_check = jnp.maximum(count + width, minimum)
    loop = Loop(buffers, count, next_check, last, forecast, done, meter.init())
    loop = while_loop(proceed, body, loop)
    meter.close(loop.meter)
    return loop


def loop_products(k: int, size: int, least: int = LEAST_PRODUCTS) -> int:
    """How many of k products a loop may take: what the exact answer's n leave, less than n.

    All of them where there are less than n. 0 where the answer is exact at once: where less
    is left than a loop takes, and for few unknowns.
    """
    if k < size:
        return k
    left = min(k - size, size - 1)
    return left if size > EXACT_SIZE and left >= least else 0


def step_width(limit: int, minimum: int) -> int:
    """Units in a step, `minimum` to less than twice that, which leave the fewest over."""
    if limit < 2 * minimum:
        return max(limit, 1)
    return min(range(minimum, 2 * minimum), key=lambda width: limit % width)
