"""What a product with an operator consists of, and so how blocks are best multiplied."""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import lineax as lx

from ._sharding import on_one_cpu

# Operations that take as long as reading and writing memory.
_CHEAP = frozenset(
    [
        *("add", "add_any", "sub", "mul", "neg", "div", "select_n"),
        *("convert_element_type", "copy", "broadcast_in_dim", "reshape", "squeeze"),
        *("expand_dims", "transpose", "rev", "concatenate", "split", "pad"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "jit", "pjit"),
    ]
)
# Of this size a matrix is read from memory in every pass over it.
_LARGE_MATRIX = 2**25
# Of fewer dimensions an operator isn't traced to find one.
_SMALL_SPACE = 512


class Operation(NamedTuple):
    """A primitive operation, and what it takes."""

    name: str
    operands: tuple[Any, ...]  # avals


# Of the operator that was looked at last.
_last: list[Any] = [None]


def operations(operator: lx.AbstractLinearOperator) -> tuple[Operation, ...]:
    """What a product with a vector consists of.

    Traced once for all who ask about an operator before another is asked about.
    """
    if _last[0] is not None and _last[0][0]() is operator:
        return _last[0][1]

    # A function of its own: equal methods are compared, and traced values can't be.
    def product(vector):
        return operator.mv(vector)

    found = tuple(_operations(jax.make_jaxpr(product)(operator.in_structure())))
    _last[0] = weakref.ref(operator), found
    return found


def _operations(program: Any) -> Iterator[Operation]:
    program = getattr(program, "jaxpr", program)  # of a closed program
    for equation in getattr(program, "eqns", ()):
        avals = tuple(x.aval for x in equation.invars)
        yield Operation(equation.primitive.name, avals)
        for parameter in jtu.tree_leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            yield from _operations(parameter)


def is_cheap(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a product only moves and adds numbers: columns have nothing to share."""
    return all(x.name in _CHEAP for x in operations(operator))


def reads_large_matrix(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a product of vectors of one axis multiplies one by a large matrix."""

    def is_large(x: Any) -> bool:
        return getattr(x, "ndim", 0) == 2 and x.size * x.dtype.itemsize >= _LARGE_MATRIX

    structure = jtu.tree_leaves(operator.in_structure())
    if len(structure) != 1 or structure[0].ndim != 1 or not on_one_cpu():
        return False
    # What a function reads of globals is no leaf, and seen in its operations only.
    small = structure[0].size < _SMALL_SPACE
    if small and not any(is_large(x) for x in jtu.tree_leaves(operator)):
        return False
    return any(
        name == "dot_general"
        and sorted(x.ndim for x in operands) == [1, 2]
        and any(is_large(x) for x in operands)
        for name, operands in operations(operator)
    )
