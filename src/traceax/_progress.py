"""Progress meters of loops."""

import abc
import importlib
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ._arguments import check_installed, kind_of, require

_WHOLE = 10_000  # hundredths of a percent: integers have no derivatives


class Position(NamedTuple):
    """How far a lane of a loop is, and what was shown."""

    left: Int32[Array, ""]
    shown: Int32[Array, ""]
    steps: Int32[Array, ""]


class ProgressMeter(eqx.Module):
    """Abstract base class of progress meters, which say what to show and how.

    A meter follows one loop: `state = init()` before it, `state = step(state, progress)`
    in its body with a progress from 0 to 1, `close(state)` after it. The loop carries the
    state. Loops that run at the same time share a display, and are not told apart.

    Under `jax.vmap` there is one display for all lanes, which shows the slowest. A lane that
    stops early reports 1 with its last step, as it would else hold the display back.
    """

    @abc.abstractmethod
    def due(
        self, increase: Int32[Array, ""], steps: Int32[Array, ""]
    ) -> Bool[Array, ""] | None:
        """Whether to call `show` after so many steps, and after an increase of so many
        hundredths of a percent since the last call. `None` for never, not even at the end."""

    @abc.abstractmethod
    def show(self, percent: float, last: bool) -> None:
        """Shows the progress, on the host, and ends the display with the last."""

    def init(self) -> Position:
        """The state of a run that begins."""
        # A sum, as loops over lanes on an explicit mesh refuse constants.
        zero = jnp.zeros((), jnp.int32) + 0
        return Position(zero + _WHOLE, zero, zero)

    def step(self, state: Position, progress: Float[Array, ""]) -> Position:
        """The state of a loop that is so far. It never goes back; NaN counts as 0."""
        progress = jnp.nan_to_num(jax.lax.stop_gradient(progress))
        left = jnp.round((1 - jnp.clip(progress, 0, 1)).astype(jnp.float32) * _WHOLE)
        # Only what is done is shown as 100.00%.
        left = jnp.maximum(left.astype(jnp.int32), (progress < 1).astype(jnp.int32))
        left, steps = jnp.minimum(state.left, left), state.steps + 1
        # One call for all lanes. Those that are done keep their old states.
        far, shown = _WHOLE - eqxi.unvmap_max(left), eqxi.unvmap_max(state.shown)
        due = self.due(far - shown, eqxi.unvmap_max(steps))
        if due is None:
            return state
        due = due & (far < _WHOLE)  # the end is shown by `close`
        jax.lax.cond(due, self._report, lambda _: None, far)
        return Position(left, jnp.where(due, far, shown), steps)

    def close(self, state: Position) -> None:
        """Shows where the loop ended."""
        if self.due(state.left, state.steps) is not None:
            self._report(_WHOLE - eqxi.unvmap_max(state.left), last=True)

    def _report(self, hundredths: Int32[Array, ""], last: bool = False) -> None:
        jax.debug.callback(lambda x: self.show(float(x) / 100, last), hundredths)


class NoProgressMeter(ProgressMeter):
    """Shows nothing, and puts no host callback into the program."""

    def due(self, increase, steps):
        return None

    def show(self, percent, last): ...


class TextProgressMeter(ProgressMeter):
    """Prints a line such as ` 42.00%`, which is overwritten.

    It is printed when the progress grew by `minimum_increase`, of 0.0001 at least, and at
    the end, with a line break. The host is called for this only.

    **Arguments:**

    - `minimum_increase`: the least growth between two prints, a number from 0 to 1.
    """

    minimum_increase: float = eqx.field(default=0.02, static=True)

    def __check_init__(self):
        given, what = self.minimum_increase, "minimum_increase must be from 0 to 1"
        right = isinstance(given, float | int) and 0 <= given <= 1
        where, hint = "traceax.TextProgressMeter", "pass 0.02 for a line every 2 %"
        require(right, where, what, kind_of(given), hint)

    def due(self, increase, steps):
        return increase >= max(1, round(self.minimum_increase * _WHOLE))

    def show(self, percent, last):
        print(f"\r{percent:6.2f}%", end="\n" if last else "", flush=True)


class TqdmProgressMeter(ProgressMeter):
    """Draws a bar with [tqdm](https://tqdm.github.io), which must be installed.

    **Arguments:**

    - `refresh_steps`: after how many steps the host is called to update the bar.
    """

    refresh_steps: int = eqx.field(default=20, static=True)

    def __check_init__(self):
        given, where = self.refresh_steps, "traceax.TqdmProgressMeter"
        what, hint = "refresh_steps must be an int of at least 1", "20 is the default"
        require(
            isinstance(given, int) and given >= 1, where, what, kind_of(given), hint
        )
        check_installed("tqdm", where)

    def due(self, increase, steps):
        return steps % self.refresh_steps == 0

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


def check_meter(meter: Any, where: str) -> None:
    """Refuses what is not a progress meter."""
    what = "progress_meter must be a traceax.ProgressMeter"
    hint = "pass an instance, such as traceax.TextProgressMeter()"
    require(isinstance(meter, ProgressMeter), where, what, meter, hint, TypeError)
