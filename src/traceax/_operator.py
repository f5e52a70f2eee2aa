"""From a lineax operator to products with tall blocks.

Algorithms see an operator as a function from `(n, k)` blocks to `(n, k)` blocks of one
dtype. This file is the only one that knows of PyTrees, leaf dtypes and structure tags.
"""

import functools as ft
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Inexact, PyTree

from ._arguments import kind_of
from ._product_cost import is_cheap, reads_large_matrix
from ._sharding import (
    block_layout,
    columns,
    lay_out,
    on_one_cpu,
    rows_of,
    side_by_side,
)


class Space(NamedTuple):
    """The space an operator maps to itself, flattened.

    - `size`: its dimension n.
    - `dtype`: the common dtype of the leaves, in which values are returned.
    - `compute_dtype`: the dtype of blocks; at least 32-bit.
    - `structure`: the PyTree of `jax.ShapeDtypeStruct`s.
    """

    size: int
    dtype: np.dtype
    compute_dtype: np.dtype
    structure: PyTree[jax.ShapeDtypeStruct]

    @property
    def layout(self) -> NamedSharding | None:
        """How a block's rows are laid out over devices, where the structure says so."""
        leaves = jtu.tree_leaves(self.structure)
        if len(leaves) != 1 or leaves[0].ndim != 1:
            return None
        return block_layout(leaves[0])

    @property
    def is_complex(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def real_dtype(self) -> np.dtype:
        """The dtype of real numbers that belong to blocks, such as error bars."""
        return jnp.finfo(self.compute_dtype).dtype


def _describe(structure: PyTree[jax.ShapeDtypeStruct]) -> str:
    if isinstance(structure, jax.ShapeDtypeStruct):
        return f"shape {structure.shape}, dtype {structure.dtype}"
    return eqx.tree_pformat(structure)


# The operator that passed `check_operator` last: each is checked by several functions in a
# row, and lineax evaluates the output structure of one made of a function each time.
_passed: list[Callable[[], Any]] = [lambda: None]


def check_operator(
    operator: Any, where: str, arguments: str = "(key, operator)"
) -> Space:
    """The space of a square lineax operator; a clear error for anything else."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        raise TypeError(
            f"{where}: operator must be a lineax linear operator, got "
            f"{kind_of(operator)}; wrap a matrix as "
            "lineax.MatrixLinearOperator(matrix), a linear function as "
            "lineax.FunctionLinearOperator(fn, structure). The arguments start "
            f"{arguments}."
        )
    if _passed[0]() is operator:
        return space_of(operator)
    in_structure = operator.in_structure()
    out_structure = operator.out_structure()
    in_leaves, in_treedef = jtu.tree_flatten(in_structure)
    out_leaves, out_treedef = jtu.tree_flatten(out_structure)
    if in_treedef != out_treedef or any(
        x.shape != y.shape or x.dtype != y.dtype
        for x, y in zip(in_leaves, out_leaves, strict=True)
    ):
        raise ValueError(
            f"{where}: operator must map a space to itself, got one from "
            f"{_describe(in_structure)} to {_describe(out_structure)}; its input and "
            "output structures (PyTree, shapes and dtypes) must be equal."
        )
    for leaf in in_leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"{where}: operator must act on floating-point or complex leaves, got "
                f"one of dtype {leaf.dtype}; cast it, or leave it out of the "
                "operator's structure."
            )
    kinds = {jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in in_leaves}
    if len(kinds) == 2:
        raise ValueError(
            f"{where}: operator must act on leaves that are all real or all complex, "
            f"got {_describe(in_structure)}; make the real leaves complex, or estimate "
            "the blocks one by one."
        )
    _passed[0] = weakref.ref(operator)
    return space_of(operator)


def space_of(operator: lx.AbstractLinearOperator) -> Space:
    """The space of an operator that passed `check_operator`."""
    leaves, treedef = jtu.tree_flatten(operator.in_structure())
    return _space(jax.config.jax_enable_x64, treedef, *leaves)  # pyright: ignore


@ft.lru_cache(maxsize=256)
def _space(x64: bool, treedef: Any, *leaves: jax.ShapeDtypeStruct) -> Space:
    del x64  # which decides what dtypes there are
    structure = jtu.tree_unflatten(treedef, leaves)
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*[leaf.dtype for leaf in leaves] or [float])
        compute_dtype = jnp.promote_types(dtype, jnp.float32)
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    return Space(size, dtype, compute_dtype, structure)


# Entries of a block that are multiplied at once: 4 MiB in 32-bit precision. They stay in a
# CPU's cache with what a few operations make of them, and in memory that a program is given
# again: larger pieces are handed out page by page each time. The same for all devices, for
# estimates go on from what they keep of each chunk.
_CACHED = 2**20
# Where they are multiplied by a matrix.
_MULTIPLIED = 2**22
# So that a set of probes tells of its skewness.
_FEWEST = 4


def most_columns(n: int, entries: int | None = None) -> int:
    """How many columns of length n are worth one pass over the operator at most."""
    return max(_FEWEST, (entries or _CACHED) // max(n, 1))


def columns_at_once(n: int, k: int, most: int | None = None) -> int:
    """How many of k columns to take in one pass."""
    most = most_columns(n) if most is None else most
    if most >= k:
        return k
    # Fewer in the last pass would be a second program to compile.
    even = [size for size in range(most, most // 2, -1) if k % size == 0]
    return even[0] if even else most


# Columns of a matrix product that a CPU's vector units take together, and up to how many
# the matrix is read only once.
_COLUMNS = 8
_MOST_COLUMNS = 64
# How many are multiplied at once for products that don't depend on their number.
_SAME_COLUMNS = 32


def apply_block(
    operator: lx.AbstractLinearOperator,
    block: Inexact[Array, "n k"],
    *,
    resumable: bool = False,
) -> Inexact[Array, "n k"]:
    """The product of the operator with every column of a block.

    One `vmap` of `operator.mv`: a dense operator becomes one matrix product. Over the
    leading axis, as networks are batched; a stencil is twice as fast that way. Over the
    trailing axis where a matrix is read that doesn't fit into the cache: a matrix
    product of few columns then needs no copy of it, and takes half of the time.

    On a CPU a large block is multiplied by a few columns at a time. That stays in the
    cache, needs the memory of a few products, and keeps the compiler from repeating a
    cheap product in everything that uses its result.

    `resumable`: the same to the last bit, whatever the number of columns.
    """
    n, k = block.shape
    if n == 0 or k == 0:
        return block
    size, apply = columns_at_once(n, k), _apply_at_once
    if size < k and not on_one_cpu():
        size = k
    if size < k and is_cheap(operator):
        size = columns_at_once(n, k, max(1, _CACHED // n))
    if reads_large_matrix(operator):
        if resumable:
            size, apply = _SAME_COLUMNS, _apply_by_columns
        elif k <= _MOST_COLUMNS:
            size, apply = k + -k % _COLUMNS, _apply_by_columns
        else:
            # A derivative with respect to the matrix is written again for each pass.
            size = columns_at_once(n, k, most_columns(n, _MULTIPLIED))
    if size == k:
        if resumable and k == 1 and isinstance(operator, lx.MatrixLinearOperator):
            # A matrix and a single vector would be summed in another order. The barrier,
            # or what isn't used would not be computed.
            products = apply(operator, side_by_side(block, block)).T
            return jax.lax.optimization_barrier(products)[:1].T
        return apply(operator, block)
    if apply is _apply_by_columns:
        # With more of the same: a solver in the operator may not like vectors of zeros.
        block = jnp.pad(block.T, ((0, -k % size), (0, 0)), mode="edge").T
    rows = block.T
    rest = len(rows) % size
    whole = len(rows) - rest

    def some(start, size):
        some_rows = jax.lax.dynamic_slice_in_dim(rows, start, size)
        return apply(operator, some_rows.T).T

    if whole == size:
        products = some(0, size)
    else:

        def turn(i, products):
            new = some(i * size, size)
            # Never negated. A branch, for on a CPU what is written where it is computed
            # is computed by a single thread.
            new = jax.lax.cond(i < 0, jnp.negative, lambda x: x, new)
            return jax.lax.dynamic_update_slice_in_dim(products, new, i * size, 0)

        products = jax.lax.fori_loop(0, whole // size, turn, rows[:whole])
    if rest:
        products = jnp.concatenate([products, some(whole, rest)])
    return products[:k].T


def extend_products(
    operator: lx.AbstractLinearOperator,
    *blocks: tuple[Inexact[Array, "n _"], Inexact[Array, "n _"] | None],
) -> list[Inexact[Array, "n _"]]:
    """Products of the operator with blocks, given with those of their first columns.

    All new ones are taken at once, if that saves anything.
    """

    # Barriers, so that what comes before and after is compiled alike, whatever is known.
    def alone(x):
        return jax.lax.optimization_barrier(x.T).T

    known = [None if y is None else columns(y, 0, x.shape[1]) for x, y in blocks]
    new = [
        x if y is None else columns(x, y.shape[1], x.shape[1])
        for (x, _), y in zip(blocks, known, strict=True)
    ]
    widths = [x.shape[1] for x in new]
    n, total = new[0].shape[0], sum(widths)
    if columns_at_once(n, total) < total and on_one_cpu() and is_cheap(operator):
        # To put large blocks together takes as long as the products.
        parts = [apply_block(operator, alone(x), resumable=True) for x in new]
    else:
        block = alone(side_by_side(*new))
        products = alone(apply_block(operator, block, resumable=True))
        ends = list(itertools.accumulate(widths, initial=0))
        parts = [columns(products, i, j) for i, j in itertools.pairwise(ends)]
    return [
        alone(part if y is None else side_by_side(y, part))
        for part, y in zip(parts, known, strict=True)
    ]


def _apply_at_once(
    operator: lx.AbstractLinearOperator, block: Inexact[Array, "n k"]
) -> Inexact[Array, "n k"]:
    space = space_of(operator)
    leaves, treedef = jtu.tree_flatten(space.structure)
    _, k = block.shape
    parts = [block.T]
    if len(leaves) > 1:
        ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
        parts = jnp.split(lay_out(block.T, None), ends[:-1], axis=1)
    flat = []
    for part, leaf in zip(parts, leaves, strict=True):
        shaped = part
        if leaf.ndim != 1:
            shaped = lay_out(part, None).reshape(k, *leaf.shape)
        flat.append(lay_out(shaped.astype(leaf.dtype), leaf))
    out = jax.vmap(operator.mv)(jtu.tree_unflatten(treedef, flat))
    out = [rows_of(x).astype(block.dtype) for x in jtu.tree_leaves(out)]
    if len(out) == 1:
        return out[0].T
    # Leaves may be laid out over devices each in its own way.
    return jnp.concatenate([lay_out(x, None) for x in out], axis=1).T


def _apply_by_columns(
    operator: lx.AbstractLinearOperator, block: Inexact[Array, "n k"]
) -> Inexact[Array, "n k"]:
    """For an operator on vectors of one axis, laid out in memory as (n, k)."""
    space = space_of(operator)
    treedef = jtu.tree_structure(space.structure)
    # Barriers, so that the compiler doesn't lay them out otherwise.
    columns = jax.lax.optimization_barrier(block.astype(space.dtype))
    vectors = jtu.tree_unflatten(treedef, [columns])
    (products,) = jtu.tree_leaves(jax.vmap(operator.mv, in_axes=1, out_axes=1)(vectors))
    return jax.lax.optimization_barrier(products.astype(block.dtype))


def is_known(check: Callable[[lx.AbstractLinearOperator], bool], operator) -> bool:
    """Whether a check of lineax's holds.

    Operators from elsewhere need not register them.
    """
    try:
        return bool(check(operator))
    except NotImplementedError:
        return False


def is_positive_semidefinite(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is known to be positive semidefinite."""
    return is_known(lx.is_positive_semidefinite, operator)


def is_negative_semidefinite(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is known to be negative semidefinite."""
    return is_known(lx.is_negative_semidefinite, operator)


def is_diagonal(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is known to be diagonal."""
    return is_known(lx.is_diagonal, operator)


def is_symmetric(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is known to equal its transpose."""
    return is_known(lx.is_symmetric, operator)


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is known to equal its conjugate transpose."""
    if is_positive_semidefinite(operator) or is_negative_semidefinite(operator):
        return True
    return not space_of(operator).is_complex and is_symmetric(operator)


def has_real_trace(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the trace is known to be real: a real or a semidefinite operator."""
    return (
        not space_of(operator).is_complex
        or is_positive_semidefinite(operator)
        or is_negative_semidefinite(operator)
    )
