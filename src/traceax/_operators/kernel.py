"""Kernel matrices as linear operators, a tile of rows at a time."""

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
    space_of,
    structure_of,
)

_WHERE = "traceax.KernelLinearOperator"
# Numbers that a tile and the differences of its rows are: 16 MiB in 32-bit precision.
_NUMBERS_ON_CPU, _NUMBERS = 2**22, 2**26
# Entries of a matrix that is stored, 256 MiB: see `benchmarks/likelihood.py stored`.
_MOST_STORED = 2**26


class KernelLinearOperator(OnePass):
    r"""The kernel matrix `K_ij = kernel(x_i, x_j)` of n rows, in tiles.

    ```python
    def kernel(a, b):
        return jnp.exp(-sum((a[i] - b[i]) ** 2 for i in range(len(a))) / 2)

    operator = traceax.KernelLinearOperator(kernel, x)
    traceax.logdet(key, operator, 40, shift=noise)
    ```

    | | |
    |---|---|
    | time | a product with a block of vectors is one pass: `n^2` evaluations; reverse mode repeats them |
    | memory | that of a tile, beside the block, for products and for derivatives |
    | known to be | symmetric and positive semidefinite, as a kernel must be |
    | differentiable | with respect to `x` and to arrays of `kernel`, or that it closes over, to any order that `kernel` is |

    Spectral functions keep matrices of up to 2^26 entries for the value, 256 MiB in 32-bit
    precision, in each lane of a `jax.vmap`: `jax.lax.map` keeps one at a time.

    Differences of rows lose no digits, where `|a|^2 + |b|^2 - 2 a.b` loses most of them in
    32 bits. The kernel is called with equal rows, too: its derivative must be finite there.
    A sum over few coordinates written out, as above, takes XLA on CPUs a quarter of the
    time of `jnp.sum`. A sum of kernels is one kernel, and one pass. `lineax.linearise` does
    nothing. With rows of `x` over several devices, each computes its columns of a tile.

    **Arguments:**

    - `kernel`: a function of two rows that returns a real scalar, symmetric and positive
        semidefinite, which isn't checked. An `equinox.Module` of arrays stays what it is;
        any other function is traced when the operator is made.
    - `x`: an array of shape `(n, d)`, or a PyTree of arrays with a leading axis of
        length n. Row i is the PyTree of their i-th entries.
    - `tile`: how many rows there are in a tile, at most; by default some megabytes.

    **Raises:** `TypeError` for a `kernel` of other values or a `tile` that isn't an integer;
    `ValueError` for an `x` of other leaves, or without rows.
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
        meaning = "the number of rows of a tile of the matrix"
        check_optional_integer(tile, "tile", _WHERE, least=1, meaning=meaning)
        self.x = with_leading_axis(x, _WHERE, "x", "rows", "kernel")
        row = first_of(self.x)
        fn = cast(Any, kernel)
        hint = "it is called with two rows, not with arrays of them"
        self._dtype = check_scalar(fn, (row, row), "kernel", _WHERE, hint).dtype
        leaves = jtu.tree_leaves(fn)
        if not isinstance(fn, eqx.Module) or not all(map(is_data, leaves)):
            # Partial: equinox leaves functions that close over nothing as they are.
            fn = closure(ft.partial(kernel), row, row)
        self.kernel = cast(Any, fn)

    @automatic
    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        if jnp.iscomplexobj(vector):
            return ComplexLinearOperator(self).mv(vector)
        # Under `vmap` over vectors, one matrix product for each tile.
        dtype = space_of(self).compute_dtype
        vector = vector.astype(dtype)
        times = self._by_tiles(self.x, lambda rows: matmul(rows.astype(dtype), vector))
        return times.astype(self._dtype)

    @automatic
    def columns(self, indices: Int[Array, " r"]) -> Float[Array, "n r"]:
        """Columns of the matrix, for r n evaluations of the kernel."""
        rows = jtu.tree_map(lambda a: a[indices], self.x)
        return self._by_tiles(rows, lambda rows: rows).T

    @automatic
    def diagonal(self) -> Float[Array, " n"]:
        """The diagonal of the matrix, for n evaluations of the kernel."""
        x = made_here(self.x)
        return jax.vmap(self.kernel)(x, x)

    @automatic
    def _by_tiles(self, rows: PyTree[Array], fn: Callable[[Array], Array]) -> Array:
        """`fn` of the rows of the matrix that belong to `rows`, for a tile of them."""
        x, rows = made_here((self.x, rows))
        n, m = length_of(x), length_of(rows)
        numbers = _NUMBERS_ON_CPU if on_cpu() else _NUMBERS
        size_of_row = sum(leaf.size // n for leaf in jtu.tree_leaves(x))
        most = self.tile or max(1, numbers // (n * (1 + size_of_row)))
        # All about as long, so that few rows are padded. At least two, which stay a loop:
        # XLA on CPUs (jaxlib 0.10.2) fuses a single one with what is done with the
        # product, and gets `sum(W * (K V))` wrong by O(1).
        count = max(2, -(-m // most))
        tile = -(-m // count)

        # What a derivative needs of each tile are its rows.
        @ft.partial(jax.checkpoint, prevent_cse=False)
        def of_tile(rows):
            against_all = jax.vmap(self.kernel, (None, 0))
            return fn(jax.vmap(against_all, (0, None))(rows, x))

        def split(a):
            # The last row again, fewer times than there are tiles.
            last = jnp.broadcast_to(a[-1:], (count * tile - m, *a.shape[1:]))
            return jnp.concatenate([a, last]).reshape(count, tile, *a.shape[1:])

        out = jax.lax.map(of_tile, jtu.tree_map(split, rows))
        return out.reshape(count * tile, *out.shape[2:])[:m]

    def as_matrix(self) -> Float[Array, "n n"]:
        return self._by_tiles(self.x, lambda rows: rows)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        shape = (length_of(self.x),)
        return structure_of(jax.ShapeDtypeStruct(shape, self._dtype))

    def _satisfies(self, check):
        return check in (lx.is_symmetric, lx.is_positive_semidefinite)


def stored(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator with matrices of kernels in memory where they fit, one a lane."""

    def is_kernel(x):
        return isinstance(x, KernelLinearOperator)

    def store(x):
        if not is_kernel(x) or space_of(x).size ** 2 > _MOST_STORED:
            return x
        return lx.MatrixLinearOperator(x.as_matrix(), lx.positive_semidefinite_tag)

    return jtu.tree_map(store, operator, is_leaf=is_kernel)


lx.diagonal.register(KernelLinearOperator, lambda operator: operator.diagonal())
