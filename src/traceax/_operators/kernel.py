"""Kernel matrices as linear operators, computed row tile by row tile."""

import functools as ft
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, Int, PyTree, Shaped

from .._arguments import check_optional_integer, require, without_numpy
from .._linalg.dense import matmul
from .._linalg.types import automatic
from .check import check_scalar, first_of, is_data, length_of, with_leading_axis
from .closure import closure
from .space import (
    ComplexLinearOperator,
    OnePass,
    made_here,
    on_cpu,
    parts_of,
    space_of,
    structure_of,
)

_WHERE = "traceax.KernelLinearOperator"
# Largest count of numbers in a tile and its row differences: 16 and 256 MiB in 32 bits.
_NUMBERS_ON_CPU, _NUMBERS = 2**22, 2**26
# Short tiles stay in a CPU's caches: `benchmarks/likelihood.py tiles`.
_ROWS_ON_CPU = 64
# We store matrices with up to 2^26 entries: see `benchmarks/likelihood.py stored`.
_MOST_STORED = 2**26


class KernelLinearOperator(OnePass):
    r"""The kernel matrix `K_ij = kernel(x_i, x_j)` for n rows, computed in tiles.

    ```python
    def kernel(a, b):
        return jnp.exp(-sum((a[i] - b[i]) ** 2 for i in range(len(a))) / 2)

    operator = traceax.KernelLinearOperator(kernel, x)
    traceax.logdet(key, operator, 40, shift=noise)
    ```

    | | |
    |---|---|
    | time | a product with a block of vectors is one pass, `n^2` kernel evaluations; reverse mode repeats them |
    | memory | one tile in addition to the block, for products and for derivatives |
    | known to be | symmetric and positive semidefinite, as a kernel must be |
    | differentiable | with respect to `x`, arrays in `kernel` and arrays that it closes over, to any order that `kernel` allows |

    Spectral functions store matrices with up to 2^26 entries to compute values, 256 MiB
    in 32 bits, 512 MiB in 64: one per batch element under `jax.vmap`, one in
    `jax.lax.map`. Devices that share `x` split the columns of a tile.

    Compute distances from row differences, as above: `|a|^2 + |b|^2 - 2 a.b` loses most
    digits in 32 bits. We also evaluate your kernel at two equal rows, where it needs a
    finite derivative. With few coordinates, a written-out sum is four times faster than
    `jnp.sum` on CPUs. Add kernels inside one function: the sum then costs one pass.

    **Arguments:**

    - `kernel`: a function of two rows that returns a real scalar. It must be symmetric
        and positive semidefinite, which isn't checked. An `equinox.Module` of arrays
        is kept. Any other function is traced now, so that its arrays become leaves.
    - `x`: an array with shape `(n, d)`, or a PyTree of arrays with leading axis n. Row
        i is the PyTree of their i-th entries.
    - `tile`: largest row count in a tile. By default a tile has at most 64 rows and 16
        MiB on CPUs, and 256 MiB on other devices.

    **Raises:** `TypeError` if `kernel` doesn't return a real scalar, or `tile` isn't an
    int; `ValueError` if leaves of `x` don't share a leading axis of at least one row.
    """

    kernel: Callable[[Any, Any], Float[Array, ""]]
    x: PyTree[Shaped[Array, "n ..."]]
    tile: int | None = eqx.field(static=True)
    _dtype: np.dtype = eqx.field(static=True)

    def __init__(
        self,
        kernel: Callable[[Any, Any], Float[Array, ""]],
        x: PyTree[Shaped[ArrayLike, "n ..."]],
        *,
        tile: int | None = None,
    ):
        what, hint = "kernel must be a function of two rows", "pass (kernel, x)"
        require(callable(kernel), _WHERE, what, kernel, hint, TypeError)
        self.tile = tile = without_numpy(tile)
        meaning = "the number of matrix rows in a tile"
        check_optional_integer(tile, "tile", _WHERE, least=1, meaning=meaning)
        self.x = with_leading_axis(x, _WHERE, "x", "rows", "kernel")
        row = first_of(self.x)
        fn = cast(Any, kernel)
        hint = "it gets two rows at a time"
        self._dtype = check_scalar(fn, (row, row), "kernel", _WHERE, hint).dtype
        leaves = jtu.tree_leaves(fn)
        if not isinstance(fn, eqx.Module) or not all(map(is_data, leaves)):
            # We wrap it, as equinox doesn't convert functions that close over nothing.
            fn = closure(ft.partial(kernel), row, row)
        self.kernel = cast(Any, fn)

    @automatic
    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        if jnp.iscomplexobj(vector):
            return ComplexLinearOperator(self).mv(vector)
        # Under `vmap` over vectors, XLA computes one matrix product per tile.
        dtype = space_of(self).compute_dtype
        vector = vector.astype(dtype)
        times = self._by_tiles(self.x, lambda rows: matmul(rows.astype(dtype), vector))
        return times.astype(self._dtype)

    @automatic
    def columns(self, indices: Int[Array, " r"]) -> Float[Array, "n r"]:
        """Computes matrix columns, with r n kernel evaluations."""
        rows = jtu.tree_map(lambda a: a[indices], self.x)
        return self._by_tiles(rows, lambda rows: rows).T

    @automatic
    def diagonal(self) -> Float[Array, " n"]:
        """Computes the matrix diagonal, with n kernel evaluations."""
        x = made_here(self.x)
        return jax.vmap(self.kernel)(x, x)

    @automatic
    def _by_tiles(self, rows: PyTree[Array], fn: Callable[[Array], Array]) -> Array:
        """Applies `fn` to the matrix rows that belong to `rows`, a tile at a time."""
        x, rows = made_here((self.x, rows))
        n, m = length_of(x), length_of(rows)
        numbers, most = (_NUMBERS_ON_CPU, _ROWS_ON_CPU) if on_cpu() else (_NUMBERS, m)
        size_of_row = sum(leaf.size // n for leaf in jtu.tree_leaves(x))
        fit = max(1, numbers // (n * (1 + size_of_row)))
        most = self.tile or min(most, fit)
        # We make tiles equally long, and at least two, so that a loop remains. Without a
        # loop, XLA on CPUs (jaxlib 0.10.2) fuses the tile with operations on the product,
        # and gets `sum(W * (K V))` wrong by O(1). Rows to fill the last tile cost a copy
        # of the result, so we look for a count that divides m.
        least = max(2, -(-m // most))
        count = next((x for x in range(least, 2 * least) if m % x == 0), least)
        tile = -(-m // count)

        # We checkpoint, so that derivatives store only rows of `x`, and no tiles.
        @ft.partial(jax.checkpoint, prevent_cse=False)
        def apply_to_tile(rows):
            against_all = jax.vmap(self.kernel, (None, 0))
            return fn(jax.vmap(against_all, (0, None))(rows, x))

        def split(a):
            # We repeat the last row, fewer than `count` times, to fill the tiles.
            last = jnp.broadcast_to(a[-1:], (count * tile - m, *a.shape[1:]))
            return jnp.concatenate([a, last]).reshape(count, tile, *a.shape[1:])

        out = jax.lax.map(apply_to_tile, jtu.tree_map(split, rows))
        return out.reshape(count * tile, *out.shape[2:])[:m]

    def as_matrix(self) -> Float[Array, "n n"]:
        return self._by_tiles(self.x, lambda rows: rows)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        shape = (length_of(self.x),)
        return structure_of(jax.ShapeDtypeStruct(shape, self._dtype))

    def satisfies(self, check):
        return check in (lx.is_symmetric, lx.is_positive_semidefinite)


def is_dense(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is, or contains, a kernel matrix or a dense matrix."""
    kinds = KernelLinearOperator, lx.MatrixLinearOperator
    return any(parts_of(operator, kind) for kind in kinds)


def stored(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator with kernel matrices stored if they fit, one per batch element."""

    def is_kernel(x):
        return isinstance(x, KernelLinearOperator)

    def store(x):
        if not is_kernel(x) or space_of(x).size ** 2 > _MOST_STORED:
            return x
        return lx.MatrixLinearOperator(x.as_matrix(), lx.positive_semidefinite_tag)

    return jtu.tree_map(store, operator, is_leaf=is_kernel)


lx.diagonal.register(KernelLinearOperator, lambda operator: operator.diagonal())
