"""Python functions as data: what they close over, apart from the code.

An operator is often made of a new lambda each time. As functions two such lambdas differ,
and a program compiled for one is of no use to the other. Here a function is its code, which
is equal for both, and the arrays it closes over, which are ordinary inputs of the program.
"""

import enum
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._bytecode import assigns_outside, names


class PortableFunction(eqx.Module):
    """A function whose arrays are leaves. Equal code gives equal structure.

    **Attributes:**

    - `arrays`: what the function closes over that can vary.
    - `code`: the rest; hashable.
    """

    arrays: list[Any]
    code: "_Code" = eqx.field(static=True)

    # As functions are, so that transformations which keep a cache by function take it.
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)

    def __call__(self, *args, **kwargs):
        return self.code.build(iter(self.arrays))(*args, **kwargs)


class Opaque:
    """A function that may change unseen, as it is now: equal to itself alone, so that a
    program of another time is not taken for one of it."""

    def __init__(self, fn: Callable):
        self.__wrapped__ = fn

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)


class _NotPortableError(Exception):
    """Something that may change unseen is within reach of the function."""


class _Array:
    """Stands for an array, wherever one is."""

    def __eq__(self, other):
        return isinstance(other, _Array)

    def __hash__(self):
        return 0


_ARRAY = _Array()


class _Same:
    """An object that is equal to itself alone, kept alive."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self):
        return id(self.value)


class _Frozen:
    """A NumPy array as it is now. It may be written to later."""

    def __init__(self, value: np.ndarray):
        if value.dtype.hasobject:
            raise _NotPortableError
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
            raise _NotPortableError
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


class _Code:
    """A Python function without its arrays.

    - `function`: one of the functions of this code.
    - `cells`, `defaults`, `keywords`: what it holds, as `(treedef, leaves)` pairs.
    - `reached`: the globals that it reads, and attributes of modules and classes, by name.
        They are compared, not replaced.
    """

    def __init__(self, function, cells, defaults, keywords, reached):
        self.function = function
        self.cells, self.defaults, self.keywords = cells, defaults, keywords
        self.reached = reached
        self._hash = hash((function.__code__, cells, defaults, keywords, reached))

    def _key(self):
        function = self.function.__code__, _Same(self.function.__globals__)
        return *function, self.cells, self.defaults, self.keywords, self.reached

    def __eq__(self, other):
        return self is other or (
            isinstance(other, _Code)
            and self._hash == other._hash
            and self._key() == other._key()
        )

    def __hash__(self):
        return self._hash

    def build(self, arrays: Iterator[Any]) -> Callable:
        """The function of these arrays."""
        like = self.function
        built = types.FunctionType(
            like.__code__,
            like.__globals__,
            like.__name__,
            tuple(_restore(x, arrays) for x in self.defaults) or None,
            tuple(types.CellType(_restore(x, arrays)) for x in self.cells),
        )
        if self.keywords:
            built.__kwdefaults__ = {
                name: _restore(x, arrays) for name, x in self.keywords
            }
        return built


def _restore(described, arrays: Iterator[Any]):
    treedef, leaves = described
    return jtu.tree_unflatten(treedef, [_restore_leaf(x, arrays) for x in leaves])


def _restore_leaf(x, arrays: Iterator[Any]):
    if isinstance(x, _Array):
        return next(arrays)
    if isinstance(x, _Code):
        return x.build(arrays)
    return x.value if isinstance(x, _Same | _Frozen | _Record) else x[1]


def portable(fn: Callable) -> Callable:
    """A [`PortableFunction`][] that does what a Python function does, or an [`Opaque`][]
    one. What doesn't change, or isn't a function, is returned as it is.

    Portable are functions that reach nothing that could change unseen: they may close over
    arrays, PyTrees of arrays, plain constants, lists and dictionaries of these, modules,
    classes and functions of this kind, objects with a hash of their own, and read such
    globals.
    """
    if isinstance(fn, PortableFunction):
        # As what it reads is now.
        fn = fn.code.build(iter(fn.arrays))
    elif isinstance(fn, Opaque):
        fn = fn.__wrapped__
    if not isinstance(fn, types.FunctionType):
        return fn if _stays_as_it_is(fn) else Opaque(fn)
    arrays: list[Any] = []
    try:
        code = _describe_function(fn, arrays, ())
    except _NotPortableError:
        return Opaque(fn)
    return PortableFunction(arrays, code)


def is_function(x: Any) -> bool:
    """Whether `portable` makes another function of it."""
    return isinstance(x, types.FunctionType | PortableFunction | Opaque)


def _describe_function(fn: types.FunctionType, arrays: list, within: tuple) -> _Code:
    if fn in within or assigns_outside(fn.__code__):
        raise _NotPortableError  # recursive, or with an effect
    within = (*within, fn)
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(_describe(cell.cell_contents, arrays, within))
        except ValueError:  # not assigned yet
            raise _NotPortableError from None
    defaults = tuple(_describe(x, arrays, within) for x in fn.__defaults__ or ())
    keywords = tuple(
        (name, _describe(x, arrays, within))
        for name, x in (fn.__kwdefaults__ or {}).items()
    )
    return _Code(fn, tuple(cells), defaults, keywords, _reached(fn, within))


def _may_decide(x: jax.Array) -> bool:
    # An integer or a boolean that Python may have to know the value of.
    known = not isinstance(x, jax.core.Tracer)
    return known and x.ndim == 0 and not jnp.issubdtype(x.dtype, jnp.inexact)


def _is_record(x) -> bool:
    # A list or dictionary of arrays alone is a PyTree. Another may be what the function
    # writes to.
    return isinstance(x, list | dict) and not (
        x and all(eqx.is_array(leaf) for leaf in jtu.tree_leaves(x))
    )


def _describe(x, arrays: list | None, within: tuple):
    leaves, treedef = jtu.tree_flatten(x, is_leaf=_is_record)
    try:
        hash(treedef)
    except TypeError:
        raise _NotPortableError from None
    return treedef, tuple(_describe_leaf(leaf, arrays, within) for leaf in leaves)


def _describe_leaf(x, arrays: list | None, within: tuple):
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
            raise _NotPortableError
        if arrays is None or _may_decide(x):
            return _Same(x)
        arrays.append(x)
        return _ARRAY
    if isinstance(x, types.FunctionType):
        # Of a global, arrays are compared: they can't be replaced.
        inner: list[Any] = []
        code = _describe_function(x, inner if arrays is None else arrays, within)
        return (
            (code, tuple(_Same(array) for array in inner)) if arrays is None else code
        )
    if isinstance(x, _IMMUTABLE) or type(x) in _TRANSFORMED:
        return _Same(x)
    if _has_own_hash(x):
        # The class says that it doesn't change, and which others are equal.
        return type(x), x
    raise _NotPortableError


def _stays_as_it_is(x) -> bool:
    return (
        not callable(x)
        or isinstance(x, _IMMUTABLE)
        or type(x) in _TRANSFORMED
        or _has_own_hash(x)
    )


def _has_own_hash(x) -> bool:
    own = type(x)
    if own.__hash__ is object.__hash__ or own.__eq__ is object.__eq__:
        return False
    if isinstance(x, _METHODS):
        return False  # equal for the same object, whatever that holds
    try:
        hash(x)
    except TypeError:
        return False
    return True


_CONSTANTS = (np.generic, bool, int, float, complex, str, bytes, type(None))
_IMMUTABLE = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    np.ufunc,
    np.dtype,
    jax.custom_jvp,
    jax.custom_vjp,
    jax.numpy.ufunc,
)
_METHODS = types.MethodType, types.MethodWrapperType
# What `jax.jit` returns has a cache of its own, under the same assumptions.
_TRANSFORMED = (type(jax.jit(lambda: None)),)


def _reached(fn: types.FunctionType, within: tuple):
    reached, read = [], names(fn.__code__)
    found = {name: fn.__globals__[name] for name in read if name in fn.__globals__}
    for name, x in sorted(found.items()):
        reached.append((name, *_describe(x, None, within)))
    held = [*found.values(), *(cell.cell_contents for cell in fn.__closure__ or ())]
    return *reached, *_attributes(_all_names(fn, set()), held, within)


def _all_names(fn: types.FunctionType, seen: set[types.FunctionType]) -> set[str]:
    """Names that a function reads, and Python functions that it calls."""
    if fn in seen:
        return set()
    seen.add(fn)
    read = names(fn.__code__)
    held = [fn.__globals__.get(name) for name in read]
    held += [cell.cell_contents for cell in fn.__closure__ or ()]
    inner = [x for x in held if isinstance(x, types.FunctionType)]
    return read.union(*(_all_names(x, seen) for x in inner))


def _attributes(read: set[str], held: list[Any], within: tuple) -> Iterator[Any]:
    """What a function may read of modules and classes, which can be assigned to.

    Those of libraries are taken not to change.
    """
    seen, held = set(), list(held)
    while held:
        owner = held.pop()
        if not isinstance(owner, type | types.ModuleType) or id(owner) in seen:
            continue
        seen.add(id(owner))
        where = getattr(owner, "__module__", None) or owner.__name__
        if str(where).partition(".")[0] in _LIBRARIES:
            continue
        for name in sorted(read):
            x = inspect.getattr_static(owner, name, _NotPortableError)
            if x is _NotPortableError or isinstance(x, _DESCRIPTORS):
                continue
            if isinstance(x, enum.Enum):
                x = _Same(x)
            elif isinstance(x, _CONSTANTS):
                x = type(x), repr(x)
            elif isinstance(x, np.ndarray):
                x = _Frozen(x)
            elif isinstance(x, types.FunctionType) and not isinstance(owner, type):
                x = _describe(x, None, within)
            elif callable(x) or isinstance(x, jax.Array | types.ModuleType | np.dtype):
                held.append(x)
                x = _Same(x)
            else:
                raise _NotPortableError
            yield name, _Same(owner), x


_DESCRIPTORS = (
    property,
    classmethod,
    staticmethod,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_LIBRARIES = {"builtins", "jax", "jaxlib", "jaxtyping", "numpy", "scipy", "equinox"}
_LIBRARIES |= {"lineax", *sys.stdlib_module_names} - {"__main__", "os"}
