"""Progress meters of loops.

A meter has two halves that meet in callbacks. On the device, a loop carries small integers:
how far it got, and what was shown last. On the host, a table holds a display for each run.
A run is numbered when it starts, by the host: a number chosen at trace time would be shared
by all runs of a compiled program.
"""

import abc
import importlib
import itertools as it
import numbers
import operator as op
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import mlir
from jaxtyping import Array, Bool, Float, Int32, PyTree

# Progress in hundredths of a percent, in which it is shown. Integers compare alike on the
# device and on the host, and have no derivatives.
_DONE = 10_000


class ProgressMeter(eqx.Module):
    """Abstract base class of progress meters.

    A meter follows one loop: `state = init()` before it, `state = step(state, progress)`
    in its body, `close(state)` after it. The loop carries the state.

    Under `jax.vmap` there is one display for all lanes, which shows the slowest. A lane
    that stops early should report a progress of 1 with its last step, as it would else
    hold the display back.
    """

    @abc.abstractmethod
    def init(self) -> PyTree[Array]:
        """The state of a run that begins. Call it outside of the loop.

        **Returns:**

        A PyTree of arrays for the loop to carry.
        """

    @abc.abstractmethod
    def step(self, state: PyTree[Array], progress: Float[Array, ""]) -> PyTree[Array]:
        """Reports how far the loop is.

        **Arguments:**

        - `state`: as `init` or the last `step` returned it.
        - `progress`: from 0 to 1. What falls back behind an earlier report is taken for
            that report, NaN for 0.

        **Returns:**

        The new state, of the same structure and dtypes.
        """

    @abc.abstractmethod
    def close(self, state: PyTree[Array]) -> None:
        """Ends the run. Call it outside of the loop.

        **Arguments:**

        - `state`: as the last `step` returned it.
        """


class NoProgressMeter(ProgressMeter):
    """Shows nothing, and puts no host callback into the program."""

    def init(self) -> PyTree[Array]:
        """Nothing."""
        return None

    def step(self, state: PyTree[Array], progress: Float[Array, ""]) -> PyTree[Array]:
        """The state as it was."""
        return state

    def close(self, state: PyTree[Array]) -> None:
        """Nothing."""


class _RunState(NamedTuple):
    run: Int32[Array, ""]
    reached: Int32[Array, ""]
    shown: Int32[Array, ""]  # what the meter counts: progress shown, or steps


class _HostMeter(ProgressMeter):
    """Abstract base class of meters that show something on the host."""

    @abc.abstractmethod
    def _display(self) -> "Callable[[], _Display]":
        """The class of its displays."""

    @abc.abstractmethod
    def _due(
        self, slowest: Int32[Array, ""], shown: Int32[Array, ""]
    ) -> tuple[Bool[Array, ""], Int32[Array, ""]]:
        """Whether to show the progress, and what `shown` is then."""

    def init(self) -> _RunState:
        # Constants have no mesh in their types, as a loop over lanes that are spread
        # along an axis of an explicit mesh needs. Results of operations have.
        run = _open_p.bind(make=self._display()) + 0
        return _RunState(run, run * 0, run * 0)

    def step(self, state: _RunState, progress: Float[Array, ""]) -> _RunState:
        run, slowest, reached = _advance(state.run, state.reached, progress)
        # A lane that is done keeps its old state: what was shown is the largest.
        due, shown = self._due(slowest, eqxi.unvmap_max(state.shown))
        _call_if(due, _show, run, slowest)
        return _RunState(state.run, reached, shown)

    def close(self, state: _RunState) -> None:
        run, slowest = eqxi.unvmap_max(state.run), _slowest(state.reached)
        jax.debug.callback(_finish, run, slowest)


class TextProgressMeter(_HostMeter):
    """Prints a line such as ` 42.00%`, which is overwritten.

    It is printed when the progress grew by `minimum_increase`, and at the end, with a line
    break: `100.00%`, or how far the loop got. The host is called for this only. Percentages
    grow.

    **Arguments:**

    - `minimum_increase`: the least growth between two prints, from 0 to 1. Growth is
        measured in hundredths of a percent, of which it takes at least one.

    **Raises:**

    - `TypeError` if `minimum_increase` isn't a number known at trace time, `ValueError`
        if it isn't between 0 and 1.
    """

    minimum_increase: float = eqx.field(default=0.02, static=True)

    def __check_init__(self):
        given = self.minimum_increase
        where = "traceax.TextProgressMeter"
        if isinstance(given, bool) or not isinstance(given, numbers.Real):
            raise TypeError(
                f"{where}: minimum_increase must be a number known at trace time, got "
                f"an object of type {type(given).__name__}; pass a Python float."
            )
        if not 0 <= given <= 1:
            raise ValueError(
                f"{where}: minimum_increase must be from 0 to 1, got {given}; pass 0.02 "
                "for a line every 2 %."
            )

    def _display(self):
        return _TextDisplay

    def _due(self, slowest, shown):
        due = slowest - shown >= max(1, round(float(self.minimum_increase) * _DONE))
        return due, jnp.where(due, slowest, shown)


class TqdmProgressMeter(_HostMeter):
    """Draws a bar with [tqdm](https://tqdm.github.io), which must be installed.

    **Arguments:**

    - `refresh_steps`: how many steps to take between two updates of the bar, each of
        which calls the host.

    **Raises:**

    - `TypeError` if `refresh_steps` isn't an integer known at trace time, `ValueError` if
        it is below 1.
    - `ImportError`, when the meter is used, if tqdm isn't installed.
    """

    refresh_steps: int = eqx.field(default=20, static=True)

    def __check_init__(self):
        given = self.refresh_steps
        where = "traceax.TqdmProgressMeter"
        if isinstance(given, bool) or not isinstance(given, numbers.Integral):
            raise TypeError(
                f"{where}: refresh_steps must be an integer known at trace time, got an "
                f"object of type {type(given).__name__}; pass a Python int."
            )
        if given < 1:
            raise ValueError(
                f"{where}: refresh_steps must be at least 1, got {given}; it is the "
                "number of steps between two updates of the bar."
            )

    def _display(self):
        _import_tqdm()  # to fail here, and not inside of a callback
        return _TqdmDisplay

    def _due(self, slowest, shown):
        return (shown + 1) % op.index(self.refresh_steps) == 0, shown + 1


# On the device. Callbacks take no batched arguments, of which `vmap` would make one call a
# lane: every number passes through `unvmap_max` first.


def _advance(
    run: Int32[Array, ""], reached: Int32[Array, ""], progress: Float[Array, ""]
) -> tuple[Int32[Array, ""], Int32[Array, ""], Int32[Array, ""]]:
    # The run, how far the slowest lane is, and how far this lane is.
    progress = jax.lax.stop_gradient(jnp.asarray(progress))
    hundredths = jnp.round(progress.astype(jnp.float32) * _DONE).astype(jnp.int32)
    # Only what is done is shown as 100.00%.
    hundredths = jnp.where(progress < 1, jnp.minimum(hundredths, _DONE - 1), _DONE)
    hundredths = jnp.where(progress > 0, hundredths, 0)  # NaN is not above 0
    reached = jnp.maximum(reached, hundredths)
    return eqxi.unvmap_max(run), _slowest(reached), reached


def _slowest(reached: Int32[Array, ""]) -> Int32[Array, ""]:
    return -eqxi.unvmap_max(-reached)


def _call_if(
    predicate: Bool[Array, ""], callback: Callable[..., None], *args: Array
) -> None:
    jax.lax.cond(
        predicate,
        lambda *args: jax.debug.callback(callback, *args),
        lambda *args: None,
        *args,
    )


def _open_impl(*, make: "Callable[[], _Display]") -> Int32[Array, ""]:
    return io_callback(lambda: _start(make), jax.ShapeDtypeStruct((), jnp.int32))


def _open_abstract_eval(*, make: "Callable[[], _Display]"):
    return jax.core.ShapedArray((), np.dtype(np.int32))


# JAX refuses the effect of `io_callback` in `jax.checkpoint`, and in loops whose lanes stop
# at different steps. A primitive doesn't tell of it. XLA still knows that the call must
# neither be dropped, nor shared by two runs, nor moved out of a loop.
_open_p = jax.extend.core.Primitive("traceax_open_progress_meter")
_open_p.def_impl(_open_impl)
_open_p.def_abstract_eval(_open_abstract_eval)
mlir.register_lowering(
    _open_p, mlir.lower_fun(_open_impl, multiple_results=False), cacheable=False
)


# On the host.


class _Display(Protocol):
    def show(self, hundredths: int) -> None: ...

    def close(self) -> None: ...


class _TextDisplay:
    def __init__(self):
        self.printed = -1

    def show(self, hundredths: int) -> None:
        # Callbacks are not ordered.
        if hundredths > self.printed:
            self.printed = hundredths
            print(f"\r{hundredths / 100:6.2f}%", end="", flush=True)

    def close(self) -> None:
        print(flush=True)


class _TqdmDisplay:
    def __init__(self):
        self.bar = _import_tqdm().tqdm(
            total=100, bar_format="{percentage:6.2f}%|{bar}| {elapsed}<{remaining}"
        )

    def show(self, hundredths: int) -> None:
        self.bar.n = max(self.bar.n, hundredths / 100)
        self.bar.refresh()

    def close(self) -> None:
        self.bar.close()


def _import_tqdm() -> Any:
    try:
        return importlib.import_module("tqdm")
    except ImportError as error:
        raise ImportError(
            "traceax.TqdmProgressMeter: tqdm must be installed, got "
            f"{type(error).__name__}: {error}; install it with `pip install tqdm`, or "
            "use traceax.TextProgressMeter."
        ) from error


_runs = it.count()
_displays: dict[int, _Display] = {}
_lock = threading.Lock()


def _start(make: Callable[[], _Display]) -> np.ndarray:
    with _lock:
        run = next(_runs)
        _displays[run] = make()
    return np.asarray(run, np.int32)


def _show(run: Array, hundredths: Array) -> None:
    number, reached = int(run), int(hundredths)
    with _lock:
        display = _displays.get(number)
        # A call may come after the run was closed.
        if display is not None:
            display.show(reached)


def _finish(run: Array, hundredths: Array) -> None:
    number, reached = int(run), int(hundredths)
    with _lock:
        display = _displays.pop(number, None)
        if display is not None:
            display.show(reached)
            display.close()


NO_PROGRESS_METER = NoProgressMeter()


def check_meter(meter: Any, where: str) -> None:
    """Refuses what is not a progress meter."""
    if not isinstance(meter, ProgressMeter):
        raise TypeError(
            f"{where}: progress_meter must be a traceax.ProgressMeter, got "
            f"{meter!r}; pass an instance, such as traceax.TextProgressMeter()."
        )
