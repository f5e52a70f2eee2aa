"""Progress meters show increasing numbers up to the end, under every transform."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from traceax import NoProgressMeter, TextProgressMeter, TqdmProgressMeter

pytestmark = pytest.mark.x64  # integers and text

TENTHS = [float(percent) for percent in range(10, 101, 10)]


def ratio(part, whole):
    return jnp.asarray(part, float) / jnp.asarray(whole, float)


def count(meter, x: Any, num_steps: Any = 100, stop=None) -> Any:
    """`x + 1 + ... + 1` with `stop` terms, by a loop with at most `num_steps` steps."""
    stop = num_steps if stop is None else stop

    def body(carry):
        i, x, state = carry
        return i + 1, x + 1, meter.step(state, ratio(i + 1, num_steps))

    start = jnp.asarray(0), x, meter.init()
    _, x, state = jax.lax.while_loop(lambda carry: carry[0] < stop, body, start)
    meter.close(state)
    return x


@pytest.fixture
def printed(capfd):
    """A function that returns every run's percentages since its last call."""

    def runs():
        jax.effects_barrier()
        out, err = capfd.readouterr()
        *lines, rest = (out + err).split("\n")
        assert not rest
        return [[float(x) for x in re.findall(r"([\d.]+)%", line)] for line in lines]

    return runs


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("increase", "num_steps", "stop", "shown"),
    [
        (0.1, 100, 100, TENTHS),
        (0.07, 100, 100, [*range(7, 99, 7), 100]),
        (0, 7, 7, [14.29, 28.57, 42.86, 57.14, 71.43, 85.71, 100]),
        (1, 5, 5, [100]),
        (0.25, 100, 60, [25, 50, 60]),
        (0.25, 100, 0, [0]),
        (0.5, 1_000_000, 999_999, [50, 99.99]),  # we show 100 only for a finished run
    ],
)
def test_every_run_is_printed(printed, increase, num_steps, stop, shown):
    run = jax.jit(lambda x: count(TextProgressMeter(increase), x, num_steps, stop))
    for _ in range(2):
        assert run(1.0) == stop + 1
        assert printed() == [shown]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_any_real_number(printed, dtype):
    @jax.jit
    def run(values):
        meter = TextProgressMeter(0.1)
        state = meter.init()
        state, _ = jax.lax.scan(lambda *x: (meter.step(*x), None), state, values)
        meter.close(state)

    run(jnp.asarray([-jnp.inf, -1, 0.25, jnp.nan, 0.125, 0.5, 0.25, 7], dtype))
    assert printed() == [[25, 50, 100]]


def test_the_slowest_batch_element_is_shown(printed):
    def run(speed, stop):
        return count(TextProgressMeter(0.1), 0.0, ratio(stop, speed), stop)

    stops = jnp.asarray([3, 40, 100, 7])
    over_stops = jax.vmap(run, (None, 0))
    for mapped in (over_stops, jax.jit(over_stops), jax.vmap(jax.jit(run), (None, 0))):
        assert jnp.all(mapped(1.0, stops) == ratio(stops, 1))
        assert printed() == [TENTHS]
    jax.vmap(over_stops, (None, 0))(1.0, stops.reshape(2, 2))
    assert printed() == [TENTHS]
    # The slowest batch element isn't the one with most steps.
    jax.vmap(run)(jnp.asarray([0.5, 1.0]), jnp.asarray([100, 10]))
    assert printed() == [[10, 20, 30, 40, 50, 50]]


def test_derivatives_around_the_loop(printed):
    meter = TextProgressMeter(0.1)

    def stopped(x):
        return x * count(meter, jax.lax.stop_gradient(x))

    assert jax.jit(jax.grad(stopped))(1.0) == 101
    assert printed() == [TENTHS]
    assert jnp.all(jax.vmap(jax.grad(stopped))(jnp.ones(2)) == 101)
    assert printed() == [TENTHS]
    assert jax.jvp(lambda x: count(meter, x), (1.0,), (1.0,))[1] == 1
    assert printed() == [TENTHS]
    jax.grad(jax.checkpoint(stopped))(1.0)
    assert printed()[0] == TENTHS


def test_inside_of_other_loops(printed):
    @jax.jit
    @jax.vmap
    def repeat(limit):
        step = lambda x: count(TextProgressMeter(0.5), x)  # noqa: E731
        return jax.lax.while_loop(lambda x: x < limit, step, 0.0)

    repeat(jnp.asarray([50.0, 250.0]))
    assert printed() == 3 * [[50, 100]]


def test_no_meter_puts_no_callback_into_the_program():
    meters = NoProgressMeter(), TextProgressMeter()
    programs = [jax.jit(lambda x, m=m: count(m, x)).lower(1.0) for m in meters]
    assert ["callback" in program.as_text() for program in programs] == [False, True]
    assert hash(TextProgressMeter()) == hash(TextProgressMeter())


def test_bars(printed):
    pytest.importorskip("tqdm")
    run = jax.jit(lambda stop: count(TqdmProgressMeter(0.3), 0.0, 100, stop))
    mapped = jax.vmap(lambda n: count(TqdmProgressMeter(0.5), 0.0, n, n))
    for call, stop, shown in (
        (run, 100, [30, 60, 90, 100]),
        (run, 45, [30, 45]),
        (mapped, jnp.asarray([3, 100, 60]), [50, 100]),  # the slowest element counts
    ):
        call(stop)
        (drawn,) = printed()
        assert drawn == sorted(drawn)
        assert sorted(set(drawn)) == shown
    # An interrupted run leaves its bar to the next run.
    for percent, last in ((60.0, False), (30.0, True)):
        TqdmProgressMeter().show(percent, last)
    assert [set(bar) for bar in printed()] == [{60}, {30}]


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("make", "given", "match"),
    [
        (TextProgressMeter, -0.1, r"from 0 to 1, got -0\.1 of type float; 0"),
        (TextProgressMeter, float("nan"), "from 0 to 1, got nan of"),
        (TqdmProgressMeter, "0.1", "from 0 to 1, got '0.1' of type str; 0"),
        (TqdmProgressMeter, 20, "from 0 to 1, got 20 of type int"),
    ],
)
def test_wrong_arguments(make, given, match):
    with pytest.raises(ValueError, match=match):
        make(given)


def test_missing_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"tqdm must be installed.*pip install"):
        TqdmProgressMeter()
