"""Progress meters: what is printed, once, in order, whatever surrounds the loop."""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import threading

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from traceax import _progress
from traceax._progress import (
    NoProgressMeter,
    ProgressMeter,
    TextProgressMeter,
    TqdmProgressMeter,
)

pytestmark = pytest.mark.x64  # integers and text

HERE = pathlib.Path(__file__).parent
TENTHS = [f"{percent:6.2f}%" for percent in range(10, 101, 10)]


def ratio(part, whole):
    return jnp.asarray(part, float) / jnp.asarray(whole, float)


def count(meter, x, num_steps=100, stop=None):
    """`x + 1 + ... + 1` of `stop` terms, by a loop of at most `num_steps`."""
    stop = num_steps if stop is None else stop

    def proceed(carry):
        return carry[0] < stop

    def body(carry):
        i, x, state = carry
        state = meter.step(state, ratio(i + 1, num_steps))
        return i + 1, x + 1, state

    # A sum, as JAX refuses constants where lanes are spread over an explicit mesh.
    start = jnp.asarray(0) + 0
    _, x, state = jax.lax.while_loop(proceed, body, (start, x, meter.init()))
    meter.close(state)
    return x


@pytest.fixture
def printed(capfd):
    """A function that returns the lines printed since its last call.

    At the end nothing is left on the host.
    """

    def lines():
        jax.effects_barrier()
        out, err = capfd.readouterr()
        assert not err
        # Prints overwrite one line; runs end it.
        return [x for x in out.replace("\n", "").split("\r") if x]

    yield lines
    jax.effects_barrier()
    left = dict(_progress._displays)
    _progress._displays.clear()
    assert not left


def has_callback(function, *args):
    return "callback" in str(jax.make_jaxpr(function)(*args)) or (
        "callback" in jax.jit(function).lower(*args).as_text()
    )


class TestText:
    def test_every_run_prints(self, printed):
        run = jax.jit(lambda x: count(TextProgressMeter(0.1), x))
        for _ in range(2):
            assert run(1.0) == 101
            assert printed() == TENTHS
        with jax.disable_jit():
            count(TextProgressMeter(0.5), jnp.asarray(0.0), 10)
        assert printed() == [" 50.00%", "100.00%"]
        count(TextProgressMeter(0.5), 0.0)
        assert printed() == [" 50.00%", "100.00%"]

    @pytest.mark.parametrize(
        ("increase", "num_steps", "stop", "lines"),
        [
            (0.02, 1000, 1000, 50),
            (0.02, 7, 7, 7),
            (0.07, 100, 100, 15),  # 14 of them, and the end
            (0, 3000, 3000, 3000),
            (1, 5, 5, 1),
            (0.25, 100, 60, 3),  # 25 %, 50 %, 60 %
            (0.25, 100, 0, 1),
        ],
    )
    def test_number_of_lines(self, printed, increase, num_steps, stop, lines):
        count(TextProgressMeter(increase), 0.0, num_steps, stop)
        got = printed()
        assert len(got) == lines
        assert got == sorted(set(got))  # of equal length, so in the order of numbers
        assert got[-1] == f"{100 * stop / num_steps:6.2f}%"

    def test_only_what_is_done_is_complete(self, printed):
        count(TextProgressMeter(0.5), 0.0, 1_000_000, 999_999)
        assert printed() == [" 50.00%", " 99.99%"]

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
    def test_any_real_number(self, printed, dtype):
        @jax.jit
        def run(values):
            meter = TextProgressMeter(0.1)

            def body(state, value):
                return meter.step(state, value), None

            state, _ = jax.lax.scan(body, meter.init(), values)
            meter.close(state)

        run(jnp.asarray([-jnp.inf, -1, 0.25, jnp.nan, 0.125, 0.5, 0.25, 7], dtype))
        assert printed() == [" 25.00%", " 50.00%", "100.00%"]
        run(jnp.asarray([jnp.nan, 0.5, jnp.inf], dtype))
        assert printed() == [" 50.00%", "100.00%"]

    def test_the_slowest_lane_is_shown(self, printed):
        def run(speed, stop):
            meter = TextProgressMeter(0.1)

            def body(carry):
                i, state = carry
                return i + 1, meter.step(state, speed * ratio(i + 1, stop))

            i, state = jax.lax.while_loop(
                lambda carry: carry[0] < stop, body, (0, meter.init())
            )
            meter.close(state)
            return i

        stops = jnp.asarray([3, 40, 100, 7])
        for over in (
            jax.vmap(run, (None, 0)),
            jax.jit(jax.vmap(run, (None, 0))),
            jax.vmap(jax.jit(run), (None, 0)),
        ):
            assert (over(1.0, stops) == stops).all()
            assert printed() == TENTHS
        jax.vmap(jax.vmap(run, (None, 0)), (None, 0))(1.0, stops.reshape(2, 2))
        assert printed() == TENTHS
        # Equal numbers of steps, unequal progress.
        speeds = jnp.asarray([0.5, 1.0])
        jax.vmap(run, (0, None))(speeds, 100)
        assert printed() == TENTHS[:5]
        jax.vmap(run)(speeds, jnp.asarray([100, 10]))
        assert printed() == TENTHS[:5]
        jax.vmap(run, (None, None), axis_size=3)(1.0, 100)
        assert printed() == TENTHS

    def test_derivatives_of_what_surrounds_the_loop(self, printed):
        meter = TextProgressMeter(0.1)

        def stopped(x):
            return x * count(meter, jax.lax.stop_gradient(x))

        @jax.custom_vjp
        def ruled(x):
            return count(meter, x)

        ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (g,))

        def impl(x):
            return [count(meter, x)]

        primitive = eqxi.create_vprim(
            "count_with_meter",
            jax.jit(impl),
            lambda x: [x],
            lambda primals, tangents: (primitive.bind(*primals), tangents),
            None,
        )

        def bound(x):
            # Of a primitive whose value nobody needs, nothing runs.
            return x * primitive.bind(x)[0]

        def forward(x):
            # The loop itself is differentiated, in forward mode.
            return jax.jvp(lambda x: count(meter, x), (x,), (jnp.ones_like(x),))[1]

        for function, slope in ((stopped, 101), (ruled, 1), (bound, 102)):
            for transform in (lambda f: f, jax.jit):
                assert transform(jax.grad(function))(1.0) == slope
                assert printed() == TENTHS
            xs = jnp.asarray([1.0, 1.0])
            assert (jax.vmap(jax.grad(function))(xs) == slope).all()
            assert printed() == TENTHS
        assert jax.jit(forward)(1.0) == 1
        assert printed() == TENTHS
        jax.grad(jax.checkpoint(stopped))(1.0)
        lines = printed()
        assert lines[:10] == TENTHS
        assert lines[10:] in ([], TENTHS)

    def test_inside_of_other_loops(self, printed):
        meter = TextProgressMeter(0.5)

        @jax.jit
        def scan(x):
            return jax.lax.scan(lambda x, _: (count(meter, x), None), x, length=3)[0]

        assert scan(0.0) == 300
        assert printed() == 3 * [" 50.00%", "100.00%"]

        @jax.jit
        @jax.vmap
        def repeat(limit):
            return jax.lax.while_loop(
                lambda x: x < limit, lambda x: count(meter, x), jnp.zeros_like(limit)
            )

        repeat(jnp.asarray([50.0, 250.0]))
        assert printed() == 3 * [" 50.00%", "100.00%"]

    def test_two_meters_of_one_program(self, printed):
        @jax.jit
        def run(x):
            meter = TextProgressMeter(0.5)

            def body(states, i):
                return [meter.step(state, x * ratio(i, 10)) for state in states], None

            states = [meter.init(), meter.init()]
            states, _ = jax.lax.scan(body, states, jnp.arange(1, 11))
            for state in states:
                meter.close(state)

        run(1.0)
        assert sorted(printed()) == 2 * [" 50.00%"] + 2 * ["100.00%"]

    def test_steps_that_run_in_any_order(self, printed):
        @jax.jit
        def run():
            # Without a loop nothing makes one call wait for another.
            meter = TextProgressMeter(0.1)
            state = meter.init()
            for i in range(1, 11):
                state = meter.step(state, ratio(i, 10))
            meter.close(state)

        for _ in range(5):
            run()
            lines = printed()
            assert lines == sorted(set(lines))
            assert lines[-1] == "100.00%"

    def test_programs_at_the_same_time(self, printed):
        run = jax.jit(lambda n: count(TextProgressMeter(0.1), 0.0, n))
        run(1)
        assert printed() == ["100.00%"]
        threads = [threading.Thread(target=run, args=(n,)) for n in (3000, 4000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(printed()) == sorted(2 * TENTHS)

    def test_late_and_disordered_calls(self, printed):
        run = _progress._start(_progress._TextDisplay)
        for hundredths in (1000, 3000, 2000, 3000):
            _progress._show(run, hundredths)
        _progress._finish(run, 3000)
        _progress._show(run, 4000)
        assert printed() == [" 10.00%", " 30.00%"]

    def test_calls_are_for_lines_only(self, printed, monkeypatch):
        calls = []
        show = _progress._show
        monkeypatch.setattr(
            _progress, "_show", lambda *args: (calls.append(args), show(*args))
        )
        count(TextProgressMeter(0.25), 0.0, 1000)
        assert len(printed()) == len(calls) == 4

    @pytest.mark.parametrize(
        ("given", "error", "match"),
        [
            (-0.1, ValueError, r"from 0 to 1, got -0\.1; pass"),
            (float("nan"), ValueError, "from 0 to 1, got nan"),
            (2, ValueError, "from 0 to 1, got 2"),
            (
                "0.1",
                TypeError,
                "must be a number known at trace time, got .* str; pass",
            ),
            (True, TypeError, "got an object of type bool"),
        ],
    )
    def test_wrong_increases(self, given, error, match):
        with pytest.raises(error, match=match):
            TextProgressMeter(given)


def test_four_devices():
    done = subprocess.run(
        [sys.executable, "-c", FOUR_DEVICES],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), os.environ.get("PYTHONPATH", "")]
            ),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # As text a carriage return is a line break.
    shown = [x for x in done.stdout.splitlines() if x]
    assert shown == 6 * TENTHS, done.stdout


FOUR_DEVICES = """
import contextlib
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_progress import count
from traceax._progress import TextProgressMeter

assert jax.device_count() == 4
meter = TextProgressMeter(0.1)

@jax.jit
def norm(x):
    # The number of steps depends on what is spread over the devices.
    return count(meter, x, stop=jnp.sum(x).astype(int))

lanes = jax.jit(jax.vmap(lambda x, stop: count(meter, x, stop, stop)))

for axes in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axes,))
    explicit = axes is AxisType.Explicit
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        x = jax.device_put(jnp.full(8, 100 / 8), NamedSharding(mesh, P("x")))
        stop = jax.device_put(
            jnp.asarray([3, 40, 100, 7] * 2), NamedSharding(mesh, P("x"))
        )
        for _ in range(2):
            assert (norm(x) == 100 + 100 / 8).all()
            jax.effects_barrier()
        assert (lanes(x, stop) == stop + 100 / 8).all()
        jax.effects_barrier()
"""


class TestNone:
    def test_no_callback(self, printed):
        def run(x):
            return count(NoProgressMeter(), x)

        assert not has_callback(run, 1.0)
        assert not has_callback(jax.vmap(run), jnp.ones(3))
        assert has_callback(lambda x: count(TextProgressMeter(), x), 1.0)
        assert jax.tree.leaves(NoProgressMeter().init()) == []
        exported = jax.export.export(jax.jit(run))(
            jax.ShapeDtypeStruct((), jnp.float32)
        )
        restored = jax.export.deserialize(exported.serialize())
        assert restored.call(jnp.float32(1)) == 101
        error, value = jax.jit(checkify.checkify(run))(1.0)
        error.throw()
        assert value == 101
        assert not printed()


class TestTqdm:
    def test_bar(self, capfd):
        pytest.importorskip("tqdm")
        run = jax.jit(lambda x, stop: count(TqdmProgressMeter(30), x, 100, stop))

        def drawn():
            jax.effects_barrier()
            out, err = capfd.readouterr()
            assert not out
            assert err.endswith("\n")  # as a bar that is closed leaves it
            assert not _progress._displays
            shown = [float(number) for number in re.findall(r"([\d.]+)%", err)]
            assert shown == sorted(shown)
            return sorted(set(shown))

        for _ in range(2):
            run(0.0, 100)
            assert drawn() == [0, 30, 60, 90, 100]
        run(0.0, 45)
        assert drawn() == [0, 30, 45]
        # One bar, of the lane that takes longest.
        jax.vmap(lambda n: count(TqdmProgressMeter(50), 0.0, n, n))(
            jnp.asarray([3, 100, 60])
        )
        assert drawn() == [0, 50, 100]

    def test_bar_without_tqdm(self, monkeypatch, capfd):
        """The calls that a bar gets, whether or not tqdm is installed."""
        bars = []

        class Bar:
            def __init__(self, total, **_):
                self.total, self.n, self.seen, self.closed = total, 0, [], False
                bars.append(self)

            def refresh(self):
                assert not self.closed
                self.seen.append(self.n)

            def close(self):
                self.closed = True

        class Module:
            tqdm = Bar

        monkeypatch.setattr(importlib, "import_module", lambda name: Module)
        count(TqdmProgressMeter(40), 0.0)
        jax.effects_barrier()
        (bar,) = bars
        assert bar.seen == [40, 80, 100]
        assert bar.n == bar.total
        assert bar.closed

    def test_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tqdm", None)
        meter = TqdmProgressMeter()
        with pytest.raises(ImportError, match=r"tqdm must be installed.*pip install"):
            meter.init()

    @pytest.mark.parametrize(
        ("given", "error", "match"),
        [
            (0, ValueError, "must be at least 1, got 0"),
            (1.0, TypeError, "integer known at trace time, got .* float; pass"),
            (True, TypeError, "got an object of type bool"),
        ],
    )
    def test_wrong_steps(self, given, error, match):
        with pytest.raises(error, match=match):
            TqdmProgressMeter(given)


def test_equal_meters_are_equal():
    makers = (
        NoProgressMeter,
        TextProgressMeter,
        lambda: TextProgressMeter(0.5),
        TqdmProgressMeter,
        lambda: TqdmProgressMeter(5),
    )
    for make in makers:
        assert isinstance(make(), ProgressMeter)
        assert make() == make()
        assert hash(make()) == hash(make())
        assert jax.tree.leaves(make()) == []
    assert len({make() for make in makers}) == len(makers)

    traces = []

    @jax.jit
    def run(meter, x):
        traces.append(meter)
        return x

    run(TextProgressMeter(0.5), 1.0)
    run(TextProgressMeter(0.5), 1.0)
    assert len(traces) == 1
