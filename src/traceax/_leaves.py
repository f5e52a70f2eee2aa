"""Operators as data: everything that can vary in array leaves, and the rest hashable."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np

from ._closures import PortableFunction, is_function, portable
from ._programs import interned
from ._tracers import closes_over_tracer


def with_array_leaves(operator: lx.AbstractLinearOperator) -> Any:
    """The operator with everything that can vary in array leaves.

    - NumPy arrays and Python floats become JAX arrays: another value is other data,
        not another structure to compile for. Ask for tags that depend on a scalar's
        sign before this.
    - What its functions close over becomes leaves, too, where that is all that they
        depend on: operators made of a new lambda each time compile once.
    - If a function still closes over traced values, `operator.mv` is converted. lineax
        does so for its own classes unless told `closure_convert=False`. A traced value
        may neither be hidden from differentiation nor kept in a cache.
    """
    operator = _map_leaves(lambda x: interned(portable(x)), operator)
    functions = [
        leaf
        for leaf in jtu.tree_leaves(operator)
        if callable(leaf) and not eqx.is_array(leaf)
    ]
    if any(closes_over_tracer(fn, set()) for fn in functions):
        operator = lx.FunctionLinearOperator(operator.mv, operator.in_structure())
    return _map_leaves(lambda x: jnp.asarray(x) if _is_data(x) else x, operator)


def of_array_leaves(
    fn: Callable[[Any], Any], operator: lx.AbstractLinearOperator
) -> Any:
    """`fn(with_array_leaves(operator))`, or with arrays that functions hold as constants
    if Python must know them: for `float(array)`, or indexing by a mask."""
    made = with_array_leaves(operator)
    try:
        return fn(made)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        functions = [x for x in _functions(made) if isinstance(x, PortableFunction)]
        arrays = jtu.tree_leaves(functions)
        if not arrays or any(isinstance(x, jax.core.Tracer) for x in arrays):
            raise
    return fn(
        jtu.tree_map(
            lambda x: x.with_known_arrays() if isinstance(x, PortableFunction) else x,
            made,
            is_leaf=is_function,
        )
    )


def _functions(operator: Any) -> list[Any]:
    return list(filter(is_function, jtu.tree_leaves(operator, is_leaf=is_function)))


def _map_leaves(fn: Callable[[Any], Any], operator: lx.AbstractLinearOperator) -> Any:
    def is_converted(x: Any) -> bool:
        jacobian = isinstance(x, lx.JacobianLinearOperator)
        return jacobian and not is_function(x.fn)

    def is_leaf(x: Any) -> bool:
        return is_function(x) or is_converted(x)

    def of(x: Any) -> Any:
        if not is_converted(x):
            return fn(x)
        # Its function was converted for these arguments, and takes no other functions and
        # no arrays for numbers.
        rest = jtu.tree_map(fn, eqx.tree_at(_arguments, x, None, is_leaf=_is_none))
        args = jtu.tree_map(lambda x: fn(x) if _is_numpy(x) else x, x.args)
        return eqx.tree_at(_arguments, rest, args, is_leaf=_is_none)

    return jtu.tree_map(of, operator, is_leaf=is_leaf)


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic)


def _is_none(x: Any) -> bool:
    return x is None


def _arguments(operator: lx.JacobianLinearOperator) -> Any:
    return operator.args


def _is_data(x: Any) -> bool:
    if _is_numpy(x):
        return x.dtype.kind in "biufc" or jnp.issubdtype(x.dtype, jnp.inexact)
    return isinstance(x, float | complex)
