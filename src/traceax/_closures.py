"""Python functions as PyTrees: what they close over, apart from the code.

An operator is often made of a new lambda each time. As functions two such lambdas differ,
and a program compiled for one is of no use to the other. Here a function is its code, which
is equal for both, and the arrays it closes over, which are ordinary inputs of the program.
"""

import types
from collections.abc import Callable
from typing import Any

import equinox as eqx

from ._function_data import (
    FunctionData,
    NotComparableError,
    Same,
    function_data,
    stays_as_it_is,
)


class PortableFunction(eqx.Module):
    """A function whose arrays are leaves. Equal code gives equal structure.

    **Attributes:**

    - `arrays`: what the function closes over that can vary.
    - `code`: the rest; hashable.
    - `known`: the arrays instead, if Python must know their values.
    """

    arrays: list[Any]
    code: FunctionData = eqx.field(static=True)
    known: tuple[Same, ...] = eqx.field(static=True, default=())

    # As functions are, so that transformations which keep a cache by function take it.
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)

    def __call__(self, *args, **kwargs):
        return self.code.build(self._all())(*args, **kwargs)

    def _all(self) -> list[Any]:
        return self.arrays or [x.value for x in self.known]

    def as_it_is_now(self) -> Any:
        """The function with all that it reads as that is now, but for its arrays."""
        again = portable(self.code.build(self._all(), with_globals=False))
        same = isinstance(again, PortableFunction) and again.code == self.code
        return self if same else again

    def with_known_arrays(self) -> "PortableFunction":
        """The function whose arrays are compared, and are no leaves."""
        return PortableFunction([], self.code, tuple(map(Same, self._all())))

    def runs(self) -> Callable:
        """The function that is called, without its arrays."""
        return self.code.build([None] * len(self._all()))


class Opaque:
    """A function that may change unseen, as it is now: equal to itself alone, so that a
    program of another time is not taken for one of it."""

    def __init__(self, fn: Callable):
        self.__wrapped__ = fn

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)


def portable(fn: Any) -> Any:
    """A [`PortableFunction`][] that does what a callable does, or an [`Opaque`][] one. What
    doesn't change, or isn't a function, is returned as it is.

    Portable are functions that reach nothing that could change unseen: they may close over,
    and read as globals, arrays, PyTrees of arrays, plain constants, lists and dictionaries
    of these, modules, classes and functions of this kind, and objects with a hash of their
    own.
    """
    if isinstance(fn, PortableFunction):
        return fn.as_it_is_now()
    if isinstance(fn, Opaque):
        fn = fn.__wrapped__
    if not callable(fn) or stays_as_it_is(fn):
        return fn
    try:
        return PortableFunction(*function_data(_as_function(fn)))
    except NotComparableError:
        return Opaque(fn)


def _as_function(fn: Callable) -> types.FunctionType:
    if isinstance(fn, types.FunctionType):
        return fn

    def call(*args, **keywords):
        return fn(*args, **keywords)

    return call


def is_function(x: Any) -> bool:
    """Whether `portable` makes another function of it."""
    return isinstance(x, types.FunctionType | PortableFunction | Opaque)
