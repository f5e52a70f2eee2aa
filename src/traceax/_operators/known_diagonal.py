"""Diagonals that the structure of an operator gives away."""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact

from .block import apply_block, complex_dtype, is_known, space_of
from .check import ComplexLinearOperator, as_complex
from .shifted import ShiftedLinearOperator

_CHECKS = (
    lx.has_unit_diagonal,
    lx.is_diagonal,
    lx.is_tridiagonal,
    lx.is_lower_triangular,
    lx.is_upper_triangular,
)


class KnownDiagonal(NamedTuple):
    """A diagonal that structure gives away, and the products that it takes to read."""

    num_matvecs: int
    read: Callable[[], Inexact[Array, " n"]]


def known_diagonal(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, where the operator's structure gives it for at most two products.

    Diagonal, tridiagonal, triangular and unit-diagonal operators, by class or by tag,
    and their compositions. `None` for any other.
    """
    known = any(is_known(check, operator) for check in _CHECKS)
    return _readable(operator) if known else None


def _readable(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, also where the entries are stored; by the fewest products."""
    space = space_of(operator)
    if is_known(lx.has_unit_diagonal, operator):
        return KnownDiagonal(0, lambda: jnp.ones(space.size, space.compute_dtype))
    ways = [_from_parts(operator, space.compute_dtype)]
    # A tag holds of the expression that it is on, whatever is known of its parts. A
    # triangular function takes n products to read.
    for products, check in ((1, lx.is_diagonal), (2, lx.is_tridiagonal)):
        if is_known(check, operator):
            read = ft.partial(_coloured_diagonal, operator, products)
            ways.append(KnownDiagonal(products, read))
    found = [way for way in ways if way is not None]
    return min(found, key=lambda way: way.num_matvecs, default=None)


def _from_parts(operator: lx.AbstractLinearOperator, dtype) -> KnownDiagonal | None:
    """The diagonal by stored entries, and by the diagonals of the operator's parts."""
    match operator:
        case lx.TaggedLinearOperator() | ComplexLinearOperator():
            return _combined(lambda d: d, operator.operator)
        case lx.DiagonalLinearOperator():
            leaves = jtu.tree_leaves(operator.diagonal)
            return KnownDiagonal(0, lambda: _concatenate(leaves, dtype))
        case lx.IdentityLinearOperator():
            size = space_of(operator).size
            return KnownDiagonal(0, lambda: jnp.ones(size, dtype))
        case lx.TridiagonalLinearOperator():
            return KnownDiagonal(0, lambda: operator.diagonal.astype(dtype))
        case lx.MatrixLinearOperator():
            return KnownDiagonal(0, lambda: jnp.diagonal(operator.matrix).astype(dtype))
        case lx.PyTreeLinearOperator():
            return KnownDiagonal(0, lambda: _pytree_diagonal(operator, dtype))
        case lx.ComposedLinearOperator():
            parts = operator.operator1, operator.operator2
            return _combined(jnp.multiply, *parts) if _multiplies(*parts) else None
        case lx.NegLinearOperator():
            return _combined(jnp.negative, operator.operator)
        case lx.MulLinearOperator():
            return _combined(lambda d: d * operator.scalar, operator.operator)
        case ShiftedLinearOperator():
            return _combined(lambda d: d + operator.shift, operator.operator)
        case lx.DivLinearOperator():
            return _combined(lambda d: d / operator.scalar, operator.operator)
        case lx.AddLinearOperator():
            return _combined(jnp.add, operator.operator1, operator.operator2)
    return None


def _combined(
    fn: Callable[..., Array], *operators: lx.AbstractLinearOperator
) -> KnownDiagonal | None:
    """`fn` of the diagonals; complex where a scalar makes it so."""
    parts = [_readable(x) for x in operators]
    known = [x for x in parts if x is not None]
    if len(known) < len(parts):
        return None
    real = space_of(operators[0]).real_dtype

    def read():
        with jax.numpy_dtype_promotion("standard"):
            d = fn(*(x.read() for x in known))
        return d.astype(complex_dtype(real) if jnp.iscomplexobj(d) else real)

    return KnownDiagonal(sum(x.num_matvecs for x in known), read)


def _multiplies(
    first: lx.AbstractLinearOperator, second: lx.AbstractLinearOperator
) -> bool:
    # diag(A B) = diag(A) diag(B) if one is diagonal, or both triangular on one side.
    def both(check) -> bool:
        return is_known(check, first) and is_known(check, second)

    diagonal = is_known(lx.is_diagonal, first) or is_known(lx.is_diagonal, second)
    triangular = both(lx.is_lower_triangular) or both(lx.is_upper_triangular)
    square = first.in_structure() == first.out_structure()
    return square and (diagonal or triangular)


def _concatenate(leaves: list[Array], dtype) -> Inexact[Array, " n"]:
    return jnp.concatenate([jnp.ravel(x).astype(dtype) for x in leaves])


def _pytree_diagonal(operator: lx.PyTreeLinearOperator, dtype) -> Inexact[Array, " n"]:
    blocks = jtu.tree_map(
        lambda struct, row: _Row(struct, jtu.tree_leaves(row)),
        operator.out_structure(),
        operator.pytree,
    )
    rows = jtu.tree_leaves(blocks, is_leaf=lambda x: isinstance(x, _Row))
    return _concatenate(
        [
            jnp.diagonal(row.leaves[i].reshape(row.struct.size, row.struct.size))
            for i, row in enumerate(rows)
        ],
        dtype,
    )


class _Row(NamedTuple):
    struct: jax.ShapeDtypeStruct
    leaves: list[Array]


def _coloured_diagonal(
    operator: lx.AbstractLinearOperator, colours: int
) -> Inexact[Array, " n"]:
    # Column c of the block is 1 at every entry of colour c. Entries of one colour are
    # too far apart to meet in a row of the operator.
    operator = as_complex(
        operator
    )  # within one on complex vectors it acts on real ones
    space = space_of(operator)
    colour = np.arange(space.size) % colours
    block = jnp.asarray(colour[:, None] == np.arange(colours)[None, :])
    block = block.astype(space.compute_dtype)
    return jnp.sum(block * apply_block(operator, block), axis=1)
