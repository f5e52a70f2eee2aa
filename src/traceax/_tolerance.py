r"""Estimates to a tolerance: how many products are taken is decided while they are taken.

Shapes are those of the largest budget. Loops over probes fill buffers of that size, and
an error bar is looked at after every step. Steps grow with what was taken before, so that
there are few looks, that products stay products of blocks, and that what is taken beyond
need is a fraction of it. Between looks nothing is computed twice but error bars.

The loops are in phases of equal steps. Each phase sees as much of the buffers as it can
fill, so that early looks are cheap. docs/budgets.md has the rule and its derivation.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int

from ._operator import Space, apply_block, space_of
from ._progress import ProgressMeter
from ._sharding import explicit_sharding, laid_out_like, lay_out
from ._staging import inlined
from ._standard_error import ErrorBar
from ._student_t import check_level, student_t_quantile, two_sided

# In units of 1 / count. The smallest integer for which intervals of normal samples keep
# their level for every tolerance, simulated.
_WIDENED = 2.0
# An error bar that many times too long is not met by half as many probes more, or hardly
# ever, and what is overshot then is less than an octave.
_FAR = 4
# Up to so many dimensions an answer is exact where the budget allows it.
SMALL = 32
# Products that are taken before a loop may stop, and probes of the first steps.
FEWEST = 8


class Tolerance(eqx.Module):
    """When an error bar is good enough.

    - `rtol`, `atol`: half of the interval at most `atol + rtol |value|`.
    - `level`: of the interval.
    - `factor`, `offset`: the value is `factor` times that of the loop, plus `offset`.
    """

    rtol: Float[Array, ""]
    atol: Float[Array, ""]
    level: float = eqx.field(static=True)
    factor: Inexact[Array, ""]
    offset: Inexact[Array, ""]

    @jax.jit  # traced once for all the looks of a program
    @inlined
    def judge(self, bar: ErrorBar) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        """Whether the interval of the whole value is good enough, and whether that would
        take many more probes. Neither for an unknown error."""
        half_width, allowed = self._half_width(bar), self._allowed(bar)
        far = (half_width > _FAR * allowed) & jnp.isfinite(half_width)
        return (half_width <= allowed).all(), far.all()

    def _half_width(self, bar: ErrorBar) -> Float[Array, "..."]:
        error = bar.standard_error
        quantile = student_t_quantile(two_sided(self.level), bar.degrees_of_freedom)
        scaled = jnp.abs(self.factor).astype(error.dtype) * error
        return jnp.where(error == 0, 0, quantile * scaled)

    def _allowed(self, bar: ErrorBar) -> Float[Array, "..."]:
        dtype = bar.standard_error.dtype
        # The loop's may be known to be real where the whole is not.
        dtype_of_all = np.result_type(bar.mean.dtype, self.factor.dtype)
        factor, offset, mean = (
            x.astype(dtype_of_all) for x in (self.factor, self.offset, bar.mean)
        )
        value = jnp.abs(factor * mean + offset)
        return self.atol.astype(dtype) + self.rtol.astype(dtype) * value.astype(dtype)

    def of_part(
        self, factor: Inexact[Array, ""] | None, offset: Inexact[Array, ""] | None
    ) -> "Tolerance":
        """The same tolerance, seen from a part of the value."""
        return Tolerance(
            self.rtol,
            self.atol,
            self.level,
            self.factor if factor is None else jax.lax.stop_gradient(factor),
            self.offset if offset is None else jax.lax.stop_gradient(offset),
        )


def make_tolerance(
    rtol: ArrayLike | None,
    atol: ArrayLike | None,
    level: float,
    space: Space,
    where: str,
) -> Tolerance | None:
    """Checks; `None` if neither is given."""
    if isinstance(level, bool) or not isinstance(level, float | int):
        raise TypeError(
            f"{where}: level must be a Python number, got {level!r} of type "
            f"{type(level).__name__}; write 0.95 for an interval of 95 %."
        )
    check_level(level, where)
    if rtol is None and atol is None:
        return None
    given = []
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
        given.append(jnp.asarray(x).astype(space.real_dtype))
    one = jnp.ones((), space.compute_dtype)
    relative, absolute = given
    return Tolerance(relative, absolute, float(level), one, jnp.zeros_like(one))


class Phase(NamedTuple):
    """Equal steps of `width` probes, until there are `end`."""

    width: int
    end: int
    # Whether wider steps take less time, so that they may begin before the end.
    hurried: bool = True

    def may_follow_early(self, before: "Phase") -> bool:
        """Whether its steps are worth to be taken instead of those before."""
        return before.hurried and self.width > before.width

    def leads_to_its_end(self, count: Int[Array, ""] | int) -> Bool[Array, ""] | bool:
        """Whether its steps can be taken from so many probes on."""
        return (self.end - count) % self.width == 0


def phases(
    most: int,
    widest: int | None = None,
    first: int = FEWEST,
    *,
    wide: bool = False,
    done: int = 0,
) -> list[Phase]:
    """Four steps of `first` probes, then of a half and a third of those before, in turn.

    None is wider than `widest`. `wide`: for operators whose products take the time of
    reading a large matrix, for 16 columns more than half of that for 32. Steps begin with
    32 then, in two phases, and the last one takes what would be left, up to 16 more. Of a
    loop that goes on from `done` probes those that follow, the first of which leads to
    where a loop from the beginning looks.
    """
    first = 32 if wide else first
    found: list[Phase] = []
    count, width = 0, min(first, widest or first)
    while count < most:
        steps = 2 if found or wide else 4
        if widest is not None and 2 * width > widest:
            steps = most  # no wider ones follow
        left = most - count
        if found and not wide and width < left <= 2 * width and left % 2 == 0:
            width = left // 2  # rather than in a step and a phase of the rest
        steps = min(steps, left // width)
        rest = left - steps * width
        last = steps == 0
        if wide and 0 < rest <= min(48, widest or most) - width:
            # All but the first step, which is one to look at.
            steps -= count + steps * width > width
            last = True
        if steps > 0:
            count += steps * width
            found.append(Phase(width, count, not wide))
        if last:
            found.append(Phase(most - count, most, not wide))
            break
        if count >= 4 * width and (widest is None or 2 * width <= widest):
            width *= 2
    found = [phase for phase in found if phase.end > done]
    if found and (beside := (found[0].end - done) % found[0].width):
        found.insert(0, Phase(beside, done + beside, hurried=False))
    return found


def widened(bar: ErrorBar, count: Int[Array, ""]) -> ErrorBar:
    """The error bar, for being looked at again and again.

    Of errors estimated too small and too large, the small ones end the loop.
    """
    error = bar.standard_error
    return bar._replace(
        standard_error=error * (1 + _WIDENED / count.astype(error.dtype))
    )


class Progress(NamedTuple):
    """Where the loop of an estimate to a tolerance is."""

    carry: Any
    found: Any
    taken: Int[Array, ""]
    looked: Int[Array, ""]  # how many were taken at the last look
    bar: ErrorBar
    far: Bool[Array, ""]  # whether it would take many more
    stop: Bool[Array, ""]
    meter: Any


def until(
    tolerance: Tolerance,
    meter: ProgressMeter,
    schedule: list[Phase],
    carry: Any,
    found: Any,
    step: Callable[[Any, Int[Array, ""], Phase], Any],
    look: Callable[[Any, Any, Int[Array, ""], Phase], tuple[ErrorBar, Any]],
    bar: ErrorBar,
    fewest: int = FEWEST,
    samples: int | None = None,
    done: int = 0,
) -> Progress:
    """Takes steps until the tolerance is met, the value is not finite, or all are taken.

    `step` returns what a loop carries, after the probes `count, ..., count + width - 1`;
    `look` the error bar of the first `count` probes, and what else it found. `bar` has the
    dtypes of what `look` returns; of a function with several results each of its entries
    holds one of each, and all are to be met. No loop stops with less than `fewest` probes.
    `samples` is how many an error bar is made of where it isn't the number of probes that
    were taken. `carry` holds `done` probes of an earlier loop, which are looked at first.

    Where the last error bar was far too long, the next look is at twice the probes, and
    steps are as wide as the schedule allows for; not where `samples` is given, and `step`
    finds more for the same probes.
    """
    most = schedule[-1].end if schedule else done
    taken, looked = jnp.asarray(done, jnp.int32), jnp.zeros((), jnp.int32)
    dtypes = [x.dtype for x in bar]
    no = jnp.asarray(False)

    def looked_at(carry, found, count, phase):
        bar, found = look(carry, found, count, phase)
        bar = widened(bar, count if samples is None else jnp.asarray(samples))
        parts = zip(bar, dtypes, strict=True)
        bar = ErrorBar(*(x.astype(dtype) for x, dtype in parts))
        met, far = tolerance.judge(bar)
        stop = (met & (count >= fewest)) | ~jnp.isfinite(bar.mean).all()
        return bar, found, far if samples is None else no, stop

    progress = Progress(carry, found, taken, looked, bar, no, no, meter.init())
    if done >= fewest:
        bar, found, far, stop = looked_at(carry, found, taken, Phase(done, done))
        progress = progress._replace(
            found=found, looked=taken, bar=bar, far=far, stop=stop
        )
    for phase, following in itertools.zip_longest(schedule, schedule[1:]):

        def body(progress: Progress, phase=phase) -> Progress:
            carry = step(progress.carry, progress.taken, phase)
            count = progress.taken + phase.width
            skip = progress.far & (count < 2 * progress.looked)
            skip = (skip | (count < fewest)) & (count < most)
            last = progress.bar, progress.found, progress.far, no

            # Of all lanes: a condition that differs between them would be no condition.
            new = jax.lax.cond(
                eqxi.unvmap_all(skip),
                lambda: last,
                lambda: looked_at(carry, progress.found, count, phase),
            )
            bar, found, far, stop = jtu.tree_map(
                lambda x, y: jnp.where(skip, x, y), last, new
            )
            looked = jnp.where(skip, progress.looked, count)
            fraction = count.astype(bar.standard_error.dtype) / most
            fraction = jnp.where(stop, 1, fraction)
            shown = meter.step(progress.meter, fraction)
            return Progress(carry, found, count, looked, bar, far, stop, shown)

        def proceed(
            progress: Progress, phase=phase, following=following
        ) -> Bool[Array, ""]:
            more = ~progress.stop & (progress.taken < phase.end)
            if samples is not None or following is None:
                return more
            if not following.may_follow_early(phase):
                return more
            wider = following.leads_to_its_end(progress.taken) & (progress.looked > 0)
            return more & ~(wider & progress.far)

        progress = jax.lax.while_loop(proceed, body, progress)
    meter.close(progress.meter)
    return progress


def empty_rows(
    number: int,
    operator: lx.AbstractLinearOperator,
    draw: Callable[[Any, int], Inexact[Array, "n _"]],
) -> Inexact[Array, "{number} n"]:
    """Zeros for `put` to replace, laid out as products are."""
    space = space_of(operator)
    structure = jax.ShapeDtypeStruct((space.size,), space.compute_dtype)
    leaves = filter(eqx.is_array, jtu.tree_leaves(operator))
    if any(explicit_sharding(x) is not None for x in leaves):
        structure = jax.eval_shape(lambda: apply_block(operator, draw(0, 1))[:, 0])
    return lay_out(jnp.zeros((number, space.size), space.compute_dtype), structure)


def put(
    buffers: list[Inexact[Array, "most ..."]],
    new: list[Inexact[Array, "width ..."]],
    count: Int[Array, ""] | int,
) -> list[Inexact[Array, "most ..."]]:
    """Buffers with what a step found of each probe, from probe `count` on."""
    return [
        jax.lax.dynamic_update_slice_in_dim(x, laid_out_like(y, x), count, 0)
        for x, y in zip(buffers, new, strict=True)
    ]


def unknown_error(space: Space, *, real: bool = False) -> ErrorBar:
    """Before the first look."""
    dtype = space.real_dtype if real else space.compute_dtype
    nothing = jnp.zeros((), space.real_dtype)
    return ErrorBar(
        jnp.zeros((), dtype), jnp.full((), jnp.inf, space.real_dtype), nothing
    )
