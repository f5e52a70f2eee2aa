"""Columns and diagonals of operators, read where they are known."""

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int

from .block import apply_block, space_of
from .convert import SparseLinearOperator
from .kernel import KernelLinearOperator
from .shifted import ShiftedLinearOperator


def columns_of(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " r"]
) -> Inexact[Array, "n r"]:
    """Columns of the matrix of an operator.

    - `operator`: one that `has_known_entries`, of which no product is taken that costs more
        than to read them.
    """
    space = space_of(operator)
    dtype = space.compute_dtype

    def unit_vectors():
        rows = jnp.arange(space.size, dtype=indices.dtype)
        return (rows[None, :] == indices[:, None]).T.astype(dtype)

    match operator:
        case KernelLinearOperator():
            columns = operator.columns(indices)
        case lx.MatrixLinearOperator() | lx.PyTreeLinearOperator():
            columns = operator.as_matrix().T[indices].T
        case SparseLinearOperator():
            columns = operator.columns_at(indices)
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
        case _:  # diagonal or tridiagonal
            columns = apply_block(operator, unit_vectors())
    return columns.astype(dtype)


def diagonal_of(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The diagonal of the matrix of an operator that `has_known_entries`."""
    space = space_of(operator)
    dtype = space.compute_dtype
    match operator:
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
            diagonal = lx.diagonal(operator)
    return diagonal.astype(dtype)


def has_known_entries(operator: lx.AbstractLinearOperator) -> bool:
    """Whether columns and the diagonal are read, and take no products."""
    match operator:
        case (
            KernelLinearOperator()
            | SparseLinearOperator()
            | lx.MatrixLinearOperator()
            | lx.PyTreeLinearOperator()
            | lx.DiagonalLinearOperator()
            | lx.IdentityLinearOperator()
            | lx.TridiagonalLinearOperator()
        ):
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
