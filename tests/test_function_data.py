# ruff: noqa: PLC3002, PLW0108
"""Functions of any make: their numbers as they are now, one compilation while those stay."""

import collections
import dataclasses
import enum
import functools
import operator as operators

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, float_dtype
from jax import grad, jvp, vmap
from jax.nn import silu
from jax.numpy import einsum, where

import traceax as tx
from traceax._closures import Opaque, PortableFunction, portable

N = 6
runs = []


class Counting(tx.TraceEstimator):
    """The exact trace of what `mv` says, counting how often it is traced."""

    def init(self, key, operator):
        return tx.init_state(key, operator)

    def compute(self, state, k):
        runs.append(k)
        identity = jnp.eye(N, dtype=float_dtype())
        value = jnp.trace(jax.vmap(state.operator.mv)(identity))
        return value, jnp.zeros(()), {"num_matvecs": N}, (identity, identity)


def _trace(fn, closure_convert=False):
    structure = jax.ShapeDtypeStruct((N,), float_dtype())
    a = lx.FunctionLinearOperator(fn, structure, closure_convert=closure_convert)
    return tx.trace(jr.key(0), a, 4, Counting()).value


def _array(*shape, fill=1.0):
    return jnp.full(shape, fill, float_dtype())


@pytest.fixture
def assign(monkeypatch):
    def set_globals(**values):
        for name, x in values.items():
            monkeypatch.setitem(globals(), name, x)

    return set_globals


def test_arrays_keep_their_places():
    # In cells, in defaults, in keywords, in globals, in functions within.
    def make(one, two, three, four):
        def inner(v, held=four):
            return 1000 * held * v

        def product(v, held=two, *, named=three):
            return one * v + 10 * held * v + 100 * named * v + inner(v)

        return product

    numbers = [_array(N, fill=x) for x in (1.0, 2.0, 3.0, 4.0)]
    for arrays in (numbers, numbers[::-1]):
        expected = sum(10**i * x[0] for i, x in enumerate(arrays))
        for closure_convert in (True, False):
            assert_close(_trace(make(*arrays), closure_convert), expected * N)


# Globals that are assigned anew


ARRAY = MODEL = FACTOR = MASK = FLAG = None


def _energy(x):
    return jnp.sum(ARRAY * x**2)


class Model(eqx.Module):
    weight: jax.Array
    act: str = eqx.field(static=True, default="tanh")

    def __call__(self, v):
        return self.weight * v

    def product(self, v):
        return self.weight * v

    @property
    def doubled(self):
        return 2 * self.weight


GLOBAL_ARRAYS = {
    "array": lambda v: ARRAY * v,
    "of a function": lambda v: jvp(grad(_energy), (v,), (v,))[1] / 2,
    "of a function in a closure": (lambda g: lambda v: g(v) / 2)(grad(_energy)),
    "model": lambda v: MODEL(v),
    "method of a model": lambda v: MODEL.product(v),
    "property of a model": lambda v: MODEL.doubled * v / 2,
    "by name": lambda v: globals()["ARRAY"] * v,
}


@pytest.mark.parametrize("closure_convert", [True, False])
@pytest.mark.parametrize("name", GLOBAL_ARRAYS)
def test_global_arrays_are_inputs(assign, name, closure_convert):
    counts = []
    for factor in (1.0, 2.0, 3.0):
        array = _array(N, fill=factor)
        assign(ARRAY=array, MODEL=Model(array))
        before = len(runs)
        assert_close(_trace(GLOBAL_ARRAYS[name], closure_convert), factor * N)
        counts.append(len(runs) - before)
    # lineax converts functions that have a closure when it makes the operator.
    assert sum(counts[1:]) == 0


def test_globals_are_not_attributes(assign):
    # The functions read `jnp.sum`, not the global of this name.
    before = []
    for factor in (1, 2, 3):
        assign(ARRAY=_array(N, fill=factor), sum=_array(factor))
        before.append(len(runs))
        assert_close(_trace(lambda v: ARRAY * v + 0 * jnp.sum(v)), factor * N)
    assert len(runs) == before[1]


def test_means_with_global_arrays(assign):
    def make(batch):
        structure = jax.ShapeDtypeStruct((N,), float_dtype())
        return lx.FunctionLinearOperator(lambda v: ARRAY * batch * v, structure)

    before = []
    for factor in (1.0, 2.0, 3.0):
        assign(ARRAY=_array(N, fill=factor))
        before.append(len(runs))
        mean = tx.MeanLinearOperator(make, jnp.arange(3, dtype=float_dtype()))
        value = tx.trace(jr.key(0), mean, 4, Counting()).value
        assert_close(value, factor * N, rtol=1e-5)
    assert len(runs) == before[1]


def test_kept_operators_have_the_arrays_of_their_time(assign):
    structure = jax.ShapeDtypeStruct((N,), float_dtype())
    assign(ARRAY=_array(N), FACTOR=1.0)
    a = lx.FunctionLinearOperator(
        lambda v: FACTOR * ARRAY * v, structure, lx.symmetric_tag, closure_convert=False
    )
    squared = tx.MatrixFunctionLinearOperator(a, jnp.square, N)
    assign(ARRAY=_array(N, fill=5.0))
    assert_close(tx.trace(jr.key(0), squared, N).value, N, rtol=1e-5)
    assert_close(tx.trace(jr.key(0), a, N).value, 5 * N, rtol=1e-5)


def test_values_that_python_must_know(assign):
    kinds = {
        "number": lambda v: float(FACTOR) * v,
        "NumPy": lambda v: np.sqrt(FACTOR) ** 2 * v,
        "mask": lambda v: v.at[MASK].set(FACTOR * v[MASK]),
        "branch": lambda v: FACTOR * v if FLAG else v,
    }
    for fn in kinds.values():
        for factor in (_array(fill=2.0), _array(fill=3.0)):
            assign(FACTOR=factor, FLAG=jnp.asarray(True), MASK=jnp.ones(N, bool))
            assert_close(_trace(fn), float(factor) * N, rtol=1e-5)
            held = (lambda x: lambda v: float(x) * v)(factor)
            assert_close(_trace(held), float(factor) * N)
    with pytest.raises(jax.errors.JAXTypeError):
        jax.grad(lambda x: _trace(lambda v: float(x) * v))(_array())


# Functions of libraries, and functions made of others


class Named(collections.namedtuple("Named", ["scale"])):
    def product(self, v):
        return self.scale * v


COMPARABLE = {
    "jax": lambda x: lambda v: jvp(lambda y: x * y, (v,), (v,))[1],
    "jax.numpy": lambda x: lambda v: einsum("i,i->i", where(x > 0, x, x), v),
    "vmapped": lambda x: lambda v: vmap(lambda y, z: y * z)(x, v),
    "differentiated": lambda x: (lambda g: lambda v: g(v))(
        grad(lambda v: jnp.vdot(v, x * v) / 2)
    ),
    "activation": lambda x: lambda v: x * v + silu(0 * v),
    "partial": lambda x: functools.partial(lambda y, v: y * v, x),
    "partial of names": lambda x: functools.partial(lambda v, *, y: y * v, y=x),
    "partial in a closure": lambda x: (lambda p: lambda v: p(v))(
        functools.partial(jnp.multiply, x)
    ),
    "bound method": lambda x: Model(x).product,
    "of a named tuple": lambda x: Named(x).product,
    "method in a closure": lambda x: (lambda m: lambda v: m(v))(Named(x).product),
    "callable model": lambda x: Model(x),
    "enumeration": lambda x: (lambda kind: lambda v: x * v if kind is Kind.one else v)(
        Kind.one
    ),
}


class Kind(enum.Enum):
    one = 1


@pytest.mark.parametrize("closure_convert", [True, False])
@pytest.mark.parametrize("name", COMPARABLE)
def test_equal_functions_compile_once(name, closure_convert):
    counts = []
    for factor in (1.0, 2.0, 3.0):
        before = len(runs)
        fn = COMPARABLE[name](_array(N, fill=factor))
        assert_close(_trace(fn, closure_convert), factor * N)
        counts.append(len(runs) - before)
    assert sum(counts[1:]) == 0


# What is written to


class Base:
    factor = 1.0


class Held(Base):
    @staticmethod
    def static():
        return Base.factor

    @classmethod
    def of_class(cls):
        return cls.factor

    @property
    def of_instance(self):
        return self.factor

    def method(self):
        return self._inner()

    def _inner(self):
        return Base.factor


class Text(str):
    factor = 1.0


@dataclasses.dataclass(eq=False)
class ById:
    factor: float

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


def _helper(v):
    return _helper.factor * v  # pyright: ignore


@jax.custom_jvp
def _custom(v):
    return Base.factor * v


_custom.defjvp(lambda x, t: (_custom(*x), t[0]))
TEXT, BY_ID, NAME = Text("a"), ById(1.0), "factor"
SETTINGS = {1: 1.0, "a": 2.0}
_helper.factor = 1.0  # pyright: ignore

WRITTEN_TO = {
    "static method": lambda v: Held.static() * v,
    "class method": lambda v: Held.of_class() * v,
    "property": lambda v: Held().of_instance * v,
    "method": lambda v: Held().method() * v,
    "base class": lambda v: Held.factor * v,
    "attribute of a function": _helper,
    "attribute of a function in a closure": (lambda h: lambda v: h.factor * h(v))(
        _helper
    ),
    "attribute of a string": lambda v: TEXT.factor * v,
    "hash of an identity": lambda v: BY_ID.factor * v,
    "name in a variable": lambda v: getattr(Base, NAME) * v,
    "name in a closure": (lambda name: lambda v: getattr(Base, name) * v)("factor"),
    "getter": (lambda get: lambda v: get(Base) * v)(operators.attrgetter("factor")),
    "evaluated": lambda v: eval("Base.factor") * v,
    "custom derivative": _custom,
    "custom derivative in a closure": (lambda fn: lambda v: fn(v))(_custom),
    "keys of several kinds": lambda v: SETTINGS[1] * v,
}


@pytest.mark.parametrize("name", WRITTEN_TO)
def test_what_is_written_to_is_read_anew(name, monkeypatch):
    for factor in (1.0, 2.0, 3.0):
        for owner in (Base, TEXT, BY_ID):
            monkeypatch.setattr(owner, "factor", factor)
        squared = name.startswith("attribute of a function in")
        monkeypatch.setattr(_helper, "factor", factor)
        monkeypatch.setitem(SETTINGS, 1, factor)
        expected = factor**2 if squared else factor
        assert_close(_trace(WRITTEN_TO[name]), expected * N)


CALLS = []


def _recording(calls):
    def product(v):
        calls.append(v.shape)
        return 2 * v

    return product


def _recording_within(calls):
    def product(v):
        note = lambda: calls.append(v.shape)  # noqa: E731
        note()
        return 2 * v

    return product


def _recording_in_a_global(_):
    def product(v):
        CALLS.append(None)
        return 2 * v

    return product


@pytest.mark.parametrize(
    "make", [_recording, _recording_within, _recording_in_a_global]
)
def test_functions_that_append_compile_once(make):
    CALLS.clear()
    counts = []
    for _ in range(3):
        before = len(runs)
        assert_close(_trace(make(CALLS)), 2 * N)
        counts.append(len(runs) - before)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    assert CALLS


READERS = {
    "length": lambda calls: lambda v: (calls.append(0.0), len(calls))[1] * v,
    "within": lambda calls: (
        lambda v: (calls.append(0.0), (lambda: len(calls))())[1] * v
    ),
    "by name": lambda _: lambda v: (CALLS.append(0), len(globals()["CALLS"]))[1] * v,
    "by name within": lambda _: (
        lambda v: (
            (
                CALLS.append(0),
                (lambda: len(globals()["CALLS"]))(),
            )[1]
            * v
        )
    ),
    "another": lambda calls: (
        lambda v: (
            (
                calls.append(0.0),
                (lambda other=calls: len(other))(),
            )[1]
            * v
        )
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_lists_that_are_read_are_compared(name):
    CALLS.clear()
    product = READERS[name](CALLS)
    values = [_trace(product) for _ in range(3)]
    assert values[0] < values[1] < values[2]


def test_objects_that_refuse_a_hash():
    view = memoryview(bytearray(8))

    class Odd:
        def __eq__(self, other):
            raise RuntimeError("no")

        def __hash__(self):
            raise ValueError("no")

    for x in (view, Odd()):
        fn = lambda v, x=x: 2 * v if x is not None else v  # noqa: E731
        assert isinstance(portable(fn), Opaque)
        assert_close(_trace(fn), 2 * N)


def test_functions_that_hold_no_array_are_called_themselves():
    def product(v):
        return 2 * v

    made = portable(lambda v: product(v) + 0)
    assert isinstance(made, PortableFunction)
    assert made.arrays == []
    product.note = "kept"  # pyright: ignore
    moved = portable((lambda x: lambda v: (x * v, product.note))(_array(N)))  # pyright: ignore
    assert moved(_array(N))[1] == "kept"
