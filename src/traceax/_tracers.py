"""Traced values that functions hide, out of sight of transformations and of caches."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu

from ._closures import PortableFunction


def closes_over_tracer(x: Any, seen: set[int]) -> bool:
    """Whether a function holds a traced value, itself or through other functions."""
    if isinstance(x, jax.core.Tracer):
        return True
    if id(x) in seen:
        return False
    seen.add(id(x))
    held: list[Any] = []
    x = inspect.unwrap(x) if callable(x) else x
    if isinstance(x, functools.partial):
        held = [x.func, *x.args, *x.keywords.values()]
    elif callable(x):
        held = [getattr(x, "__self__", None)]
        for cell in getattr(x, "__closure__", None) or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
    # The leaves of a function are the function itself.
    leaves = [leaf for value in held for leaf in jtu.tree_leaves(value)]
    return any(closes_over_tracer(leaf, seen) for leaf in leaves)


def hides_arrays(make: Callable) -> bool:
    """Whether arrays that a function depends on aren't among its leaves."""
    if jtu.all_leaves([make]):
        return not isinstance(make, type)
    functions = [make, *jtu.tree_leaves(make)]
    if isinstance(make, PortableFunction):
        # Functions that it calls may be opaque, such as those of `jax.jit`.
        functions = [make.runs()]
    return any(
        closes_over_tracer(x, set())
        for x in functions
        if callable(x) and not eqx.is_array(x)
    )
