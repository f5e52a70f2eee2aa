"""Python functions as data: code, what it depends on that is compared, and arrays."""

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._reads import (
    appended_to,
    cells,
    defaults,
    goes_outside,
    is_offered_by_library,
    read_attributes,
    read_globals,
)


class NotComparableError(Exception):
    """Something that may change unseen is within reach of the function."""


@dataclasses.dataclass(frozen=True)
class _Array:
    """Stands for an array that can be replaced."""

    index: int


class Same:
    """An object that is equal to itself alone, and only while its parts are, kept alive."""

    def __init__(self, value, *parts):
        self.value, self.parts = value, parts

    def __eq__(self, other):
        same = isinstance(other, Same) and self.value is other.value
        return same and self.parts == other.parts

    def __hash__(self):
        return hash((id(self.value), self.parts))


class _Frozen:
    """A NumPy array as it is now. It may be written to later."""

    def __init__(self, value: np.ndarray):
        if value.dtype.hasobject:
            raise NotComparableError
        self.value = value.copy()
        digest = hashlib.blake2b(self.value.tobytes()).digest()
        self._key = value.dtype.str, value.shape, digest

    def __eq__(self, other):
        return isinstance(other, _Frozen) and self._key == other._key

    def __hash__(self):
        return hash(self._key)


class _Record:
    """A list or dictionary as it is now, of what is compared. It may be written to."""

    def __init__(self, value: list | dict, within: tuple):
        if any(value is x for x in within):
            raise NotComparableError
        within = (*within, value)
        keys = tuple(value) if isinstance(value, dict) else ()
        values = value.values() if isinstance(value, dict) else value
        held = tuple(_describe(x, None, within) for x in (*keys, *values))
        self.value = value
        self._key = type(value), len(keys), held

    def __eq__(self, other):
        return isinstance(other, _Record) and self._key == other._key

    def __hash__(self):
        return hash(self._key)


@dataclasses.dataclass(frozen=True)
class _Made:
    """A callable that is made of others."""

    make: Callable
    parts: tuple[Any, tuple]


def _partial(function, args, keywords, values):
    return functools.partial(
        function, *args, **dict(zip(keywords, values, strict=True))
    )


class _Arrays:
    """The arrays that were found, and globals, which several functions may read."""

    def __init__(self):
        self.found: list[Any] = []
        self.globals: dict[tuple[int, str, bool], Any] = {}


class FunctionData:
    """A Python function without its arrays.

    - `function`: one of the functions of this code.
    - `held`: cells, defaults, keywords, attributes and globals that it reads, as pairs of a
        name and a `(treedef, leaves)` pair.
    - `reached`: attributes of modules and classes that it may read. They are compared, not
        replaced.
    """

    def __init__(self, function, held, reached):
        self.function, self.held, self.reached = function, held, reached
        self.holds_arrays = any(_holds_arrays(x) for kind in held for _, x in kind)
        self._hash = hash((function.__code__, held, reached))

    def _key(self):
        like = self.function
        return like.__code__, Same(like.__globals__), self.held, self.reached

    def __eq__(self, other):
        return self is other or (
            isinstance(other, FunctionData)
            and self._hash == other._hash
            and self._key() == other._key()
        )

    def __hash__(self):
        return self._hash

    def build(self, arrays: list[Any], *, with_globals: bool = True) -> Callable:
        """The function of these arrays. Without globals it reads those as they are."""
        if not self.holds_arrays:
            return self.function
        *own, read = self.held
        cells, defaults, keywords, attributes = (
            {name: _restore(x, arrays, with_globals) for name, x in kind}
            for kind in own
        )
        like = self.function
        replaced = {
            name: _restore(x, arrays, with_globals)
            for name, x in read
            if with_globals and _holds_arrays(x)
        }
        built = types.FunctionType(
            like.__code__,
            {**like.__globals__, **replaced} if replaced else like.__globals__,
            like.__name__,
            tuple(defaults.values()) or None,
            tuple(map(types.CellType, cells.values())),
        )
        built.__kwdefaults__ = keywords or None
        built.__dict__.update(attributes)
        return built


def _restore(described, arrays: list[Any], with_globals: bool):
    treedef, leaves = described
    restored = [_restore_leaf(x, arrays, with_globals) for x in leaves]
    return jtu.tree_unflatten(treedef, restored)


def _restore_leaf(x, arrays: list[Any], with_globals: bool):
    if isinstance(x, _Array):
        return arrays[x.index]
    if isinstance(x, FunctionData):
        return x.build(arrays, with_globals=with_globals)
    if isinstance(x, _Made):
        return x.make(*_restore(x.parts, arrays, with_globals))
    return x.value if isinstance(x, Same | _Frozen | _Record) else x[1]


def _holds_arrays(described) -> bool:
    return any(
        isinstance(x, _Array)
        or (isinstance(x, FunctionData) and x.holds_arrays)
        or (isinstance(x, _Made) and _holds_arrays(x.parts))
        for x in described[1]
    )


def function_data(fn: types.FunctionType) -> tuple[list[Any], FunctionData]:
    """The arrays that a function depends on, and the rest of it.

    Raises `NotComparableError` for functions that reach what may change unseen.
    """
    arrays = _Arrays()
    try:
        data = _describe_function(fn, arrays, ())
    except NotComparableError:
        raise
    except Exception as error:  # Methods of a user's objects may raise anything.
        raise NotComparableError from error
    return arrays.found, data


def _describe_function(
    fn: types.FunctionType, arrays: _Arrays, within: tuple
) -> FunctionData:
    if fn in within or goes_outside(fn.__code__):
        raise NotComparableError  # recursive, or with an effect
    within = (*within, fn)
    unread = appended_to(fn.__code__)

    def describe(name, x):
        if name in unread and type(x) is list:
            return _LEAF, (Same(x),)
        return _describe(x, arrays, within)

    def describe_global(name, x):
        key = id(fn.__globals__), name, name in unread
        if key not in arrays.globals:
            arrays.globals[key] = describe(name, x)
        return arrays.globals[key]

    held = tuple(
        tuple((name, describe(name, x)) for name, x in kind.items())
        for kind in (cells(fn), defaults(fn), fn.__kwdefaults__ or {}, fn.__dict__)
    )
    read = tuple(
        (name, describe_global(name, x)) for name, x in read_globals(fn).items()
    )
    reached = tuple(
        (
            Same(owner),
            name,
            type(x),
            *(_describe(y, None, within) for y in parts or [x]),
        )
        for owner, name, x, parts in read_attributes(fn)
    )
    return FunctionData(fn, (*held, read), reached)


def _may_decide(x: Any) -> bool:
    # An integer or a boolean that Python may have to know the value of.
    known = not isinstance(x, jax.core.Tracer)
    return known and x.ndim == 0 and not jnp.issubdtype(x.dtype, jnp.inexact)


def _is_record(x) -> bool:
    # A list or dictionary of arrays alone is a PyTree. Another may be what the function
    # writes to.
    if not isinstance(x, list | dict):
        return False
    try:
        leaves = jtu.tree_leaves(x)
    except ValueError:  # keys that have no order
        return True
    return not leaves or not all(map(eqx.is_array, leaves))


def _describe(x, arrays: _Arrays | None, within: tuple):
    leaves, treedef = jtu.tree_flatten(x, is_leaf=_is_record)
    hash(treedef)  # raises an error if it can't be compared
    return treedef, tuple(_describe_leaf(leaf, arrays, within) for leaf in leaves)


def _describe_leaf(x, arrays: _Arrays | None, within: tuple):
    if isinstance(x, enum.Enum):
        return Same(x)
    if isinstance(x, (*_CONSTANTS, list, dict)) and getattr(x, "__dict__", None):
        raise NotComparableError  # what a subclass adds
    if isinstance(x, _CONSTANTS):
        # 0.0 and -0.0 are equal, and print differently.
        return type(x), x, repr(x)
    if isinstance(x, np.ndarray):
        # May be a shape, or indices that must be known.
        return _Frozen(x)
    if _is_record(x):
        return _Record(x, within)
    if eqx.is_array(x):
        if arrays is None and isinstance(x, jax.core.Tracer):
            raise NotComparableError
        if arrays is None or _may_decide(x):
            return Same(x)
        arrays.found.append(x)
        return _Array(len(arrays.found) - 1)
    if stays_as_it_is(x):
        # Objects with a hash say themselves which others are equal.
        return (type(x), x) if _has_own_hash(x) else Same(x)
    if arrays is None:
        # Arrays are compared: they can't be replaced.
        inner = _Arrays()
        return _describe_leaf(x, inner, within), tuple(map(Same, inner.found))
    if isinstance(x, types.FunctionType):
        return _describe_function(x, arrays, within)
    if isinstance(x, _CUSTOM_RULES):
        rules = (vars(x).get(name) for name in ("fun", "jvp", "fwd", "bwd"))
        return Same(x, *(_describe(rule, None, within) for rule in rules))
    if type(x) is functools.partial:
        parts = x.func, x.args, tuple(x.keywords), tuple(x.keywords.values())
        return _Made(_partial, _describe(parts, arrays, within))
    if type(x) is types.MethodType:
        parts = x.__func__, x.__self__
        return _Made(types.MethodType, _describe(parts, arrays, within))
    raise NotComparableError


def stays_as_it_is(x) -> bool:
    """Whether a callable doesn't change, as far as can be told."""
    if isinstance(x, types.FunctionType | _CUSTOM_RULES):
        return is_offered_by_library(x)
    return isinstance(x, _IMMUTABLE) or type(x) in _TRANSFORMED or _has_own_hash(x)


def _has_own_hash(x) -> bool:
    own = type(x)
    if own.__hash__ is object.__hash__ or own.__eq__ is object.__eq__:
        return False
    if isinstance(x, _METHODS):
        return False  # equal for the same object, whatever that holds
    try:
        return hash(x) not in (object.__hash__(x), hash(id(x)))
    except Exception:
        return False


_LEAF = jtu.tree_structure(0)
_CONSTANTS = (np.generic, bool, int, float, complex, str, bytes, type(None))
_IMMUTABLE = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    np.ufunc,
    np.dtype,
    jax.numpy.ufunc,
)
_METHODS = types.MethodType, types.MethodWrapperType
_CUSTOM_RULES = jax.custom_jvp | jax.custom_vjp
# What `jax.jit` returns has a cache of its own, under the same assumptions.
_TRANSFORMED = (type(jax.jit(lambda: None)),)
