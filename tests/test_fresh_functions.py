"""Functions that change between two calls give current numbers.

A compiled program that we keep for later calls must not keep values that a Python
function read.
"""

import functools
import random
import sys
import types

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
)
from problems import PSD, float_dtype

import traceax as tx

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = pytest.mark.x64
N = 6
SIGNS = tx.HutchinsonEstimator()  # exact for diagonal operators


class Holding(lx.AbstractLinearOperator):
    """A custom operator whose `mv` reads its field."""

    held: object

    def mv(self, vector):
        return self.held(vector) if callable(self.held) else self.held.product(vector)

    def in_structure(self):
        return jax.ShapeDtypeStruct((N,), float_dtype())

    out_structure = in_structure
    as_matrix = transpose = None  # not needed


for check in (
    lx.is_symmetric,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
):
    check.register(Holding)(lambda operator: False)


def _function(fn, n=N, closure_convert=False):
    structure = jax.ShapeDtypeStruct((n,), float_dtype())
    return lx.FunctionLinearOperator(fn, structure, closure_convert=closure_convert)


MAKERS = {
    "converted": functools.partial(_function, closure_convert=True),
    "unconverted": _function,
    "jacobian": lambda fn: lx.JacobianLinearOperator(
        lambda x, _: fn(x), jnp.ones(N, float_dtype()), closure_convert=False
    ),
    "custom": Holding,
    "mean": lambda fn, n=N: tx.MeanLinearOperator(
        lambda batch: _function(lambda v: batch * fn(v), n), jnp.ones(2, float_dtype())
    ),
}


def _trace(operator, estimator=SIGNS, k=4):
    return tx.trace(jr.key(0), operator, k, estimator, throw=False).value


#
# Values set from outside
#


class Scale:
    """Equal to every other instance with the same name."""

    name, scale = "scale", 1.0

    def product(self, v):
        return self.scale * v

    def __eq__(self, other):
        return isinstance(other, Scale) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


MODULE = types.ModuleType("settings_of_a_test")


def _times_module_value(v):
    import settings_of_a_test  # noqa: PLC0415  # pyright: ignore

    return v * settings_of_a_test.scale


def _times_default(v, values=[1.0]):  # noqa: B006
    return values[0] * v


def _reads(file=""):
    """Pairs: a setter for a number, and a fixed function that reads the number."""
    table, numbers, array, scale = {}, [1.0], np.ones(N, float_dtype()), Scale()
    (default,) = _times_default.__defaults__  # pyright: ignore
    rule = jax.custom_jvp(lambda x: x)
    rule.defjvp(lambda x, t: (x[0], numbers[-1] * t[0]))

    def save(c):
        np.save(file, np.full(N, c, float_dtype()))

    def setter(x, name="scale"):
        return functools.partial(setattr, x, name)

    return {
        "dictionary": (lambda c: table.update(a=c), lambda v: table["a"] * v),
        "number": (
            lambda c: table.update(a=jnp.asarray(c)),
            lambda v: float(table["a"]) * v,
        ),
        "rule": (numbers.append, lambda v: jax.jvp(rule, (v,), (v,))[1]),
        "NumPy array": (array.fill, lambda v: array * v),
        "file": (save, lambda v: np.load(file) * v),
        "module": (setter(MODULE), _times_module_value),
        "default": (functools.partial(default.__setitem__, 0), _times_default),
        "bound method": (setter(scale), scale.product),
        "partial": (setter(scale), functools.partial(Scale.product, scale)),
        "class": (setter(Scale), Scale().product),
    }


@pytest.fixture
def reads(tmp_path, monkeypatch):
    monkeypatch.setattr(Scale, "scale", 1.0)
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)
    return _reads(tmp_path / "array.npy")


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        *((name, "unconverted") for name in ("dictionary", "number", "bound method")),
        *((name, "converted") for name in ("rule", "default", "class")),
        *((name, "custom") for name in ("file", "module")),
        *(("partial", "jacobian"), ("NumPy array", "mean")),
    ],
)
def test_functions_read_current_values(name, maker, reads):
    assign, fn = reads[name]
    for c in (2.0, 3.0):
        assign(c)
        assert_close(_trace(MAKERS[maker](fn)), N * c)


def test_kept_operators_read_current_values(reads):
    assign, fn = reads["module"]
    operator = _function(fn)
    for c in (2.0, 3.0):
        assign(c)
        assert_close(_trace(operator), N * c)


def test_objects_without_call_read_current_values():
    first, second = Scale(), Scale()
    for c in (2.0, 3.0):
        first.scale, second.scale = c, -c
        assert_close(_trace(Holding(first)), N * c)
        assert_close(_trace(Holding(second)), -N * c)


#
# Values that change at every call
#

COUNT = [0]


def _count(v):
    COUNT[0] += 1
    return COUNT[0] * v


@pytest.mark.parametrize(
    ("maker", "draw"),
    [
        ("converted", lambda v: 1.0 * _count(v)),
        *(("custom", _count), ("unconverted", _count)),
        *((name, lambda v: random.random() * v) for name in ("mean", "jacobian")),
    ],
)
def test_changing_values_are_not_kept(maker, draw):
    first, second = (_trace(MAKERS[maker](draw)) for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    ("maker", "as_array", "simplified"),
    [
        *(("converted", np.asarray, False), ("unconverted", jnp.asarray, True)),
    ],
)
def test_constants_that_differ_in_one_entry(maker, as_array, simplified):
    # The array becomes a constant in the program. Some JAX versions abbreviate
    # constants, and some compare them.
    name = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, name)
    jax.config.update(name, simplified)
    try:
        for c in (1.0, 5.0):
            diagonal = np.ones(3000, float_dtype())
            diagonal[1234] = c
            array = as_array(diagonal)
            operator = MAKERS[maker](lambda v, d=array: d * v, 3000)
            assert_close(_trace(operator, k=1), 2999 + c, rtol=1e-6)
    finally:
        jax.config.update(name, before)


#
# Traced values
#

MODEL = types.SimpleNamespace()
HOLDERS = {
    "object": lambda w: (setattr(MODEL, "w", w), lambda v: MODEL.w * v)[1],
    "closure": lambda w: lambda v: w * v,
    "partial": lambda w: functools.partial(jnp.multiply, w),
    "jitted": lambda w: jax.jit(lambda v: w * v),
}


@pytest.mark.parametrize(
    ("holder", "maker"),
    [
        *(("object", "converted"), ("object", "mean"), ("closure", "jacobian")),
        *(("partial", "custom"), ("jitted", "unconverted"), ("jitted", "mean")),
    ],
)
def test_traced_values(holder, maker):
    def value(w):
        return _trace(MAKERS[maker](HOLDERS[holder](w)))

    @jax.jit
    def transformed(w, batch):
        total, _ = jax.lax.scan(lambda t, w: (t + value(w), None), 0 * w, batch)
        return jax.value_and_grad(value)(w), jax.vmap(value)(batch), total

    batch = np.asarray([2.0, 3.0])
    assert_close(value(jnp.asarray(2.0)), 2 * N)
    assert_close(jax.grad(value)(jnp.asarray(2.0)), N)
    pair, batch_values, total = transformed(4.0, batch)
    assert_close(pair, (4 * N, N))
    assert_close(batch_values, N * batch)
    assert_close(total, 5 * N)


def test_inverses_of_functions_that_close_over_traced_values():
    def value(w):
        operator = lx.TaggedLinearOperator(_function(HOLDERS["jitted"](w)), PSD)
        solver = lx.CG(rtol=1e-6, atol=1e-6)
        return _trace(tx.InverseLinearOperator(operator, solver))

    for transformed in (jax.value_and_grad(value), jax.jit(jax.value_and_grad(value))):
        assert_close(transformed(jnp.asarray(2.0)), (N / 2, -N / 4))
