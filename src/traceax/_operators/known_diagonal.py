"""Diagonals that the structure of an operator gives away."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact

from .block import apply_block, complex_dtype, is_known, space_of
from .check import ComplexLinearOperator
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
    known = {check for check in _CHECKS if is_known(check, operator)}
    if not known:
        return None
    space = space_of(operator)
    dtype, n = space.compute_dtype, space.size
    if lx.has_unit_diagonal in known:
        return KnownDiagonal(0, lambda: jnp.ones(n, dtype))
    inner = operator
    while isinstance(inner, lx.TaggedLinearOperator | ComplexLinearOperator):
        inner = inner.operator
    match inner:
        case lx.DiagonalLinearOperator():
            leaves = jtu.tree_leaves(inner.diagonal)
            return KnownDiagonal(0, lambda: _concatenate(leaves, dtype))
        case lx.IdentityLinearOperator():
            return KnownDiagonal(0, lambda: jnp.ones(n, dtype))
        case lx.TridiagonalLinearOperator():
            return KnownDiagonal(0, lambda: inner.diagonal.astype(dtype))
        case lx.MatrixLinearOperator():
            return KnownDiagonal(0, lambda: jnp.diagonal(inner.matrix).astype(dtype))
        case lx.PyTreeLinearOperator():
            return KnownDiagonal(0, lambda: _pytree_diagonal(inner, dtype))
        case lx.ComposedLinearOperator():
            parts = inner.operator1, inner.operator2
            return _combined(jnp.multiply, *parts) if _multiplies(*parts) else None
        case lx.NegLinearOperator():
            return _combined(jnp.negative, inner.operator)
        case lx.MulLinearOperator():
            return _combined(lambda d: d * inner.scalar, inner.operator)
        case ShiftedLinearOperator():
            return _combined(lambda d: d + inner.shift, inner.operator)
        case lx.DivLinearOperator():
            return _combined(lambda d: d / inner.scalar, inner.operator)
        case lx.AddLinearOperator():
            return _combined(jnp.add, inner.operator1, inner.operator2)
    if lx.is_diagonal in known:
        return KnownDiagonal(1, lambda: _coloured_diagonal(operator, 1))
    if lx.is_tridiagonal in known:
        return KnownDiagonal(2, lambda: _coloured_diagonal(operator, 2))
    return None  # a triangular function: n products to read


def _combined(
    fn: Callable[..., Array], *operators: lx.AbstractLinearOperator
) -> KnownDiagonal | None:
    """`fn` of the diagonals; complex where a scalar makes it so."""
    parts = [known_diagonal(x) for x in operators]
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
    space = space_of(operator)
    colour = np.arange(space.size) % colours
    block = jnp.asarray(colour[:, None] == np.arange(colours)[None, :])
    block = block.astype(space.compute_dtype)
    return jnp.sum(block * apply_block(operator, block), axis=1)
