"""Columns and diagonals of operators, read where they are known."""

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int

from .block import apply_block, columns_at_once, space_of
from .kernel import KernelLinearOperator
from .known_diagonal import known_diagonal
from .shifted import ShiftedLinearOperator


def columns_of(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " r"]
) -> Inexact[Array, "n r"]:
    """Columns of the matrix of an operator.

    Those of kernels and matrices are read, also in sums and multiples of them; those of
    any other operator are products with unit vectors.
    """
    space = space_of(operator)
    dtype = space.compute_dtype

    def unit_vectors():
        rows = jnp.arange(space.size, dtype=indices.dtype)
        return (rows[None, :] == indices[:, None]).T.astype(dtype)

    match operator:
        case KernelLinearOperator():
            columns = operator.columns(indices)
        case lx.MatrixLinearOperator():
            columns = operator.matrix.T[indices].T
        case lx.TaggedLinearOperator():
            columns = columns_of(operator.operator, indices)
        case lx.AddLinearOperator():
            first, second = operator.operator1, operator.operator2
            columns = columns_of(first, indices) + columns_of(second, indices)
        case lx.MulLinearOperator():
            columns = columns_of(operator.operator, indices) * _as(
                dtype, operator.scalar
            )
        case lx.DivLinearOperator():
            columns = columns_of(operator.operator, indices) / _as(
                dtype, operator.scalar
            )
        case lx.NegLinearOperator():
            columns = -columns_of(operator.operator, indices)
        case ShiftedLinearOperator():
            columns = columns_of(operator.operator, indices)
            columns = columns + _as(dtype, operator.shift) * unit_vectors()
        case _:
            columns = apply_block(operator, unit_vectors())
    return columns.astype(dtype)


def diagonal_of(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The diagonal of the matrix of an operator.

    That of an operator whose entries aren't known takes n products.
    """
    space = space_of(operator)
    dtype = space.compute_dtype
    known = known_diagonal(operator)
    if known is not None:
        return known.read().astype(dtype)
    match operator:
        case KernelLinearOperator():
            diagonal = operator.diagonal()
        case lx.MatrixLinearOperator():
            diagonal = jnp.diagonal(operator.matrix)
        case lx.TaggedLinearOperator():
            diagonal = diagonal_of(operator.operator)
        case lx.AddLinearOperator():
            diagonal = diagonal_of(operator.operator1) + diagonal_of(operator.operator2)
        case lx.MulLinearOperator():
            diagonal = diagonal_of(operator.operator) * _as(dtype, operator.scalar)
        case lx.DivLinearOperator():
            diagonal = diagonal_of(operator.operator) / _as(dtype, operator.scalar)
        case lx.NegLinearOperator():
            diagonal = -diagonal_of(operator.operator)
        case ShiftedLinearOperator():
            diagonal = diagonal_of(operator.operator) + _as(dtype, operator.shift)
        case _:
            diagonal = _diagonal_by_products(operator)
    return diagonal.astype(dtype)


def has_known_entries(operator: lx.AbstractLinearOperator) -> bool:
    """Whether columns and the diagonal are read, and take no products."""
    match operator:
        case KernelLinearOperator() | lx.MatrixLinearOperator():
            return True
        case lx.DiagonalLinearOperator() | lx.IdentityLinearOperator():
            return True
        case lx.AddLinearOperator():
            parts = operator.operator1, operator.operator2
            return all(map(has_known_entries, parts))
        case (
            lx.TaggedLinearOperator()
            | lx.MulLinearOperator()
            | lx.DivLinearOperator()
            | lx.NegLinearOperator()
            | ShiftedLinearOperator()
        ):
            return has_known_entries(operator.operator)
    return False


def _as(dtype, scalar) -> Array:
    return jnp.asarray(scalar).astype(dtype)


def _diagonal_by_products(
    operator: lx.AbstractLinearOperator,
) -> Inexact[Array, " n"]:
    n, dtype = space_of(operator).size, space_of(operator).compute_dtype

    def entry(i):
        unit = (jnp.arange(n) == i).astype(dtype)
        return apply_block(operator, unit[:, None])[i, 0]

    few = min(n, columns_at_once(n))
    return jax.lax.map(entry, jnp.arange(n), batch_size=few)
