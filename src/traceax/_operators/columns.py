"""All columns of operators, by products."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, Int, PyTree

from .block import (
    FEWEST,
    apply_block,
    columns_at_once,
    has_one_pass,
    out_structure_of,
    space_of,
)

# Entries of a block of columns of the identity on accelerators, and of operators of which
# many products are one pass, where more at once is faster: 256 MiB in 32-bit precision.
_HELD = 2**26


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
