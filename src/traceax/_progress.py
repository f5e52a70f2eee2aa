"""Progress meters of loops."""

import abc
import importlib.util
import math
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ._arguments import kind_of, require

_WHOLE = 10_000  # hundredths of a percent: integers have no derivatives

# How far a lane of a loop is, and what was shown.
Position = tuple[Int32[Array, ""], Int32[Array, ""]]


def _checked(given: Any) -> Any:
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
