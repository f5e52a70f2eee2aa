"""Diagonals that the structure of an operator gives away."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact

from .block import apply_block, is_known, space_of


class KnownDiagonal(NamedTuple):
    """A diagonal that structure gives away, and the products that it takes to read."""

    num_matvecs: int
    read: Callable[[], Inexact[Array, " n"]]


def known_diagonal(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, where the operator's structure gives it for at most two products.

    Diagonal, tridiagonal, triangular and unit-diagonal operators, by class or by tag,
    and their compositions. `None` for any other.
    """
    space = space_of(operator)
    dtype, n = space.compute_dtype, space.size

    def known(check) -> bool:
        return is_known(check, operator)

    if known(lx.has_unit_diagonal):
        return KnownDiagonal(0, lambda: jnp.ones(n, dtype))
    triangular = known(lx.is_lower_triangular) or known(lx.is_upper_triangular)
    if not (triangular or known(lx.is_diagonal) or known(lx.is_tridiagonal)):
        return None
    inner = operator
    while isinstance(inner, lx.TaggedLinearOperator):
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
            return _composed_diagonal(inner.operator1, inner.operator2)
        case lx.NegLinearOperator():
            return _map_diagonal(lambda d: -d, inner.operator)
        case lx.MulLinearOperator():
            return _map_diagonal(
                lambda d: (d * inner.scalar).astype(dtype), inner.operator
            )
        case lx.DivLinearOperator():
            return _map_diagonal(
                lambda d: (d / inner.scalar).astype(dtype), inner.operator
            )
        case lx.AddLinearOperator():
            first = known_diagonal(inner.operator1)
            second = known_diagonal(inner.operator2)
            if first is None or second is None:
                return None
            return KnownDiagonal(
                first.num_matvecs + second.num_matvecs,
                lambda: first.read() + second.read(),
            )
    if known(lx.is_diagonal):
        return KnownDiagonal(1, lambda: _coloured_diagonal(operator, 1))
    if known(lx.is_tridiagonal):
        return KnownDiagonal(2, lambda: _coloured_diagonal(operator, 2))
    return None  # a triangular function: n products to read


def _map_diagonal(fn, operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    inner = known_diagonal(operator)
    if inner is None:
        return None
    return KnownDiagonal(inner.num_matvecs, lambda: fn(inner.read()))


def _composed_diagonal(
    first: lx.AbstractLinearOperator, second: lx.AbstractLinearOperator
) -> KnownDiagonal | None:
    # diag(A B) = diag(A) diag(B) if one is diagonal, or both triangular on one side.
    def both(check) -> bool:
        return is_known(check, first) and is_known(check, second)

    if not (
        is_known(lx.is_diagonal, first)
        or is_known(lx.is_diagonal, second)
        or both(lx.is_lower_triangular)
        or both(lx.is_upper_triangular)
    ):
        return None
    if first.in_structure() != first.out_structure():
        return None
    a, b = known_diagonal(first), known_diagonal(second)
    if a is None or b is None:
        return None
    return KnownDiagonal(a.num_matvecs + b.num_matvecs, lambda: a.read() * b.read())


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
