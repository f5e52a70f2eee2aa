"""Columns and diagonals of operators, read where they are known."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, Inexact, Int, PyTree

from .block import (
    FEWEST,
    apply_block,
    columns_at_once,
    has_one_pass,
    out_structure_of,
    space_of,
)
from .convert import SparseLinearOperator
from .kernel import KernelLinearOperator
from .shifted import ShiftedLinearOperator

# Entries of a block of columns of the identity on accelerators, and of operators of which
# many products are one pass, where more at once is faster: 256 MiB in 32-bit precision.
_HELD = 2**26


def columns_of(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " r"]
) -> Inexact[Array, "n r"]:
    """Columns of the matrix of an operator.

    - `operator`: one that `has_known_entries`, of which no product is taken that costs more
        than to read them.
    """
    space = space_of(operator)
    dtype = space.compute_dtype

    def at_indices():
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
            columns = columns + _as(dtype, operator.shift) * at_indices()
        case _:  # diagonal or tridiagonal
            columns = apply_block(operator, at_indices())
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


def known_trace(operator: lx.AbstractLinearOperator) -> Float[Array, ""] | None:
    """The trace, where the diagonal is read; `None` for any other operator."""
    if not has_known_entries(operator):
        return None
    return jax.lax.stop_gradient(jnp.sum(jnp.real(diagonal_of(operator))))


def _as(dtype, scalar) -> Array:
    return jnp.asarray(scalar).astype(dtype)


#
# All columns, by products
#


def unit_vectors(
    start: int | Int[Array, ""], n: int, k: int, dtype: Any
) -> Inexact[Array, "n k"]:
    """Columns of the identity from `start` on, 0 beyond the last."""
    columns = jnp.arange(k, dtype=jnp.int32) + start
    rows = jnp.arange(n, dtype=jnp.int32)
    return (columns[:, None] == rows[None, :]).astype(dtype).T


def unit_columns(operator: lx.AbstractLinearOperator) -> int:
    """How many columns of the identity are multiplied at once, where all of them are."""
    rows = sum(math.prod(x.shape) for x in jtu.tree_leaves(out_structure_of(operator)))
    n = max(space_of(operator).size, rows, 1)
    few = max(FEWEST, _HELD // n)
    return few if has_one_pass(operator) else min(few, columns_at_once(n))


def map_columns(
    operator: lx.AbstractLinearOperator,
    fn: Callable[[Inexact[Array, " m"], Int[Array, ""]], PyTree[Array]],
) -> PyTree[Array]:
    """`fn(A e_j, j)` of every column j, of which a chunk is in memory at a time.

    Derivatives of several chunks compute each again.
    """
    space, few = space_of(operator), unit_columns(operator)
    indices = jnp.arange(space.size, dtype=jnp.int32)
    if space.size <= few:
        products = apply_block(operator, jnp.eye(space.size, dtype=space.compute_dtype))
        return jax.vmap(fn)(products.T, indices)

    @jax.checkpoint
    def of_column(j):
        unit = (indices == j).astype(space.compute_dtype)
        return fn(apply_block(operator, unit[:, None])[:, 0], j)

    return jax.lax.map(of_column, indices, batch_size=few)


def entry_of(column: Inexact[Array, " m"], j: Int[Array, ""]) -> Inexact[Array, ""]:
    """`column[j]`, which JAX refuses to trace of a column without entries."""
    return column[j] if len(column) else jnp.zeros((), column.dtype)


def diagonal_by_products(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The diagonal, from a product with each column of the identity."""
    return map_columns(operator, entry_of)
