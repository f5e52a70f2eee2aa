"""What a Python function reads besides its arguments, as far as its code tells."""

import dis
import functools
import inspect
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

# What reads by a name that is given as a string, and what may read anything.
_READ_BY_NAME = {"getattr", "globals", "vars", "__dict__"}
_READ_ANYTHING = {"eval", "exec"}


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType, *, of_globals: bool) -> frozenset[str]:
    """Names that code reads: all of them, or those of globals."""
    found = set(code.co_names)
    if of_globals:
        # An attribute may be called as a global is.
        steps = dis.get_instructions(code)
        found = {x.argval for x in steps if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    if not _READ_BY_NAME.isdisjoint(code.co_names):
        found.update(x for x in code.co_consts if isinstance(x, str))
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return frozenset(found).union(*(_names_in(x, of_globals=of_globals) for x in inner))


@functools.lru_cache(maxsize=4096)
def goes_outside(code: types.CodeType) -> bool:
    """Whether a function rebinds a variable that isn't its own, or may read any."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    own = not _READ_ANYTHING.isdisjoint(code.co_names) or any(
        step.opname == "STORE_GLOBAL"
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )
    return own or any(map(goes_outside, inner))


@functools.lru_cache(maxsize=4096)
def appended_to(code: types.CodeType) -> frozenset[str]:
    """Names of variables that aren't a function's own and that it does nothing with but
    append to, which tells it nothing of what they hold."""
    if not _READ_BY_NAME.isdisjoint(code.co_names):
        return frozenset()
    steps = list(dis.get_instructions(code))
    after = zip(steps, [x.argval for x in steps[1:]], strict=False)
    uses = [(x.argval, y) for x, y in after if x.opname in _LOADS]
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    found = {x for x, y in uses if y == "append"}.union(*map(appended_to, inner))
    otherwise = {x for x, y in uses if y != "append"}
    for x in inner:
        otherwise |= _names_in(x, of_globals=False).union(x.co_freevars) - appended_to(
            x
        )
    return frozenset(found - otherwise)


_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}


def cells(fn: types.FunctionType) -> dict[str, Any]:
    # Raises `ValueError` for a variable that isn't assigned yet.
    values = (cell.cell_contents for cell in fn.__closure__ or ())
    return dict(zip(fn.__code__.co_freevars, values, strict=True))


def defaults(fn: types.FunctionType) -> dict[int, Any]:
    return dict(enumerate(fn.__defaults__ or ()))


def read_globals(fn: types.FunctionType) -> dict[str, Any]:
    """The globals that a function may read."""
    read = _names(fn, of_globals=True).intersection(fn.__globals__)
    return {name: fn.__globals__[name] for name in sorted(read)}


def _names(fn: types.FunctionType, *, of_globals: bool) -> frozenset[str]:
    read = _names_in(fn.__code__, of_globals=of_globals)
    if _READ_BY_NAME.isdisjoint(read):
        return read
    held = [*cells(fn).values(), *defaults(fn).values()]
    held += [fn.__globals__.get(name) for name in read]
    return read.union(x for x in held if isinstance(x, str))


class Attribute(NamedTuple):
    owner: Any
    name: str
    value: Any
    functions: list[types.FunctionType]


def read_attributes(fn: types.FunctionType) -> Iterator[Attribute]:
    """What a function may read of modules and classes, which can be assigned to, and the
    functions that methods consist of.

    Those of libraries are taken not to change.
    """
    read = _all_names(fn, set())
    held = [*read_globals(fn).values(), *cells(fn).values()]
    owners: list[Any] = []
    done = set()
    while True:
        for x in held:
            owner = isinstance(x, type | types.ModuleType) and not _is_of_library(x)
            if owner and not any(x is other for other in owners):
                owners.append(x)
        pairs = [(i, name) for i in range(len(owners)) for name in sorted(read)]
        new = [pair for pair in pairs if pair not in done]
        if not new:
            return
        done.update(new)
        held = []
        for i, name in new:
            x = inspect.getattr_static(owners[i], name, done)
            if x is not done and not isinstance(x, _SLOTS):
                functions = _functions_of(x)
                read = read.union(*(_all_names(y, set()) for y in functions))
                held.append(x)
                yield Attribute(owners[i], name, x, functions)


_SLOTS = types.GetSetDescriptorType, types.MemberDescriptorType


def _functions_of(x) -> list[types.FunctionType]:
    """The functions of a user that an attribute of a class consists of."""
    if isinstance(x, property):
        parts = [x.fget]
    elif isinstance(x, classmethod | staticmethod):
        parts = [x.__func__]
    else:
        parts = [x]
    return [y for y in parts if isinstance(y, types.FunctionType)]


def _all_names(fn: types.FunctionType, seen: set[types.FunctionType]) -> frozenset[str]:
    """Names that a function reads, and Python functions that it calls."""
    if fn in seen or is_offered_by_library(fn):
        return frozenset()
    seen.add(fn)
    held = [*read_globals(fn).values(), *cells(fn).values()]
    inner = [x for x in held if isinstance(x, types.FunctionType)]
    return _names(fn, of_globals=False).union(*(_all_names(x, seen) for x in inner))


def is_offered_by_library(x: Any) -> bool:
    """Whether a function is one of those that a library offers."""
    return _is_of_library(x) and "<locals>" not in x.__qualname__


def _is_of_library(x) -> bool:
    where = getattr(x, "__module__", None) or getattr(x, "__name__", None)
    return _is_library(str(where).partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _is_library(package: str) -> bool:
    """Whether a package belongs to Python, or is installed."""
    if package in _LIBRARIES:
        return True
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(pathlib.Path(path).parts)


_LIBRARIES = {"jax", "jaxlib", "jaxtyping", "numpy", "scipy", "equinox", "lineax"}
_LIBRARIES |= {"traceax", *sys.stdlib_module_names} - {"__main__", "os"}
