"""Entries of an operator: those that it gives away, and columns by products."""

import functools as ft
import math
import operator as op
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact, Int, PyTree

from .._arguments import require
from .check import as_complex, as_data
from .convert import SparseLinearOperator
from .kernel import KernelLinearOperator
from .solvers import solver_tolerances
from .space import (
    FEWEST,
    ComplexLinearOperator,
    ShiftedLinearOperator,
    apply_block,
    columns_at_once,
    complex_dtype,
    has_one_pass,
    is_known,
    out_structure_of,
    space_of,
)

# Entries of a block of the identity on accelerators, and of `OnePass` operators: 256 MiB.
_HELD = 2**26


class Term(NamedTuple):
    """A multiple of an operator; `None` stands for a factor of 1."""

    factor: object
    operator: lx.AbstractLinearOperator

    def times(self, x: Any) -> Any:
        if self.factor is None:
            return x
        with jax.numpy_dtype_promotion("standard"):
            return x * self.factor

    def after(self, part: "Term") -> "Term":
        """The multiple of a part of the operator."""
        factor = self.factor if part.factor is None else self.times(part.factor)
        return Term(factor, part.operator)


def parts(operator: lx.AbstractLinearOperator) -> list[Term]:
    """What an operator is the sum of, one level down; itself if it is no expression."""
    match operator:
        case lx.AddLinearOperator():
            return [Term(None, operator.operator1), Term(None, operator.operator2)]
        case lx.MulLinearOperator():
            return [Term(operator.scalar, operator.operator)]
        case lx.DivLinearOperator():
            return [Term(1 / operator.scalar, operator.operator)]
        case lx.NegLinearOperator():
            return [Term(-1.0, operator.operator)]
        case lx.TaggedLinearOperator() | ComplexLinearOperator():
            return [Term(None, operator.operator)]
        case ShiftedLinearOperator():
            factor = operator.shift if operator.shift.ndim == 0 else None
            return [Term(None, operator.operator), Term(factor, operator.added)]
    return [Term(None, operator)]


def terms(operator: lx.AbstractLinearOperator) -> list[Term]:
    found = parts(operator)
    if found[0].operator is operator:
        return found
    return [x.after(y) for x in found for y in terms(x.operator)]


@ft.singledispatch
def columns(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " r"]
) -> Inexact[Array, "n r"]:
    """Columns of the matrix of an operator that can read them, without a product.

    ```python
    @traceax.columns.register
    def _(operator: MyOperator, indices):
        return operator.entries[:, indices]
    ```

    A class that registers here and in [`traceax.diagonal_entries`][] can be preconditioned,
    and so can sums and multiples of such. Kernels, matrices, dense, sparse and diagonal, are
    registered. lineax asks an operator class for `is_symmetric`, and in sums for
    `is_diagonal` and `is_tridiagonal`; of one that registers `is_positive_semidefinite` too
    there are brackets, and k may be left out. [`traceax.testing.check_entries`][] compares
    with products: a wrong diagonal is a wrong number.

    **Arguments:**

    - `operator`: of n unknowns.
    - `indices`: an integer array of shape `(r,)`, which may be traced and need not differ.

    **Returns:** an array of shape `(n, r)`, in the order of the flattened structure.
    """
    raise NotImplementedError(f"traceax.columns: {type(operator)} is not registered.")


@ft.singledispatch
def diagonal_entries(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The diagonal of the matrix of an operator that can read it, without a product.

    Register a class as in [`traceax.columns`][]; of shape `(n,)`. On its own a diagonal lowers
    the error of [`traceax.logdet`][] and [`traceax.trace_function`][]; [`traceax.trace`][] and
    [`traceax.diagonal`][] don't read it.
    """
    raise NotImplementedError(
        f"traceax.diagonal_entries: {type(operator)} is not registered."
    )


@columns.register
def _(operator: KernelLinearOperator, indices):
    return operator.columns(indices)


@columns.register
def _(operator: SparseLinearOperator, indices):
    return operator.columns_at(indices)


def _of_matrix(operator, indices):
    return operator.as_matrix().T[indices].T


def _of_few(operator, indices):
    n, _, dtype, *_ = space_of(operator)
    return apply_block(operator, jax.nn.one_hot(indices, n, dtype=dtype).T)


for cls in (lx.MatrixLinearOperator, lx.PyTreeLinearOperator):
    columns.register(cls, _of_matrix)
for cls in (
    lx.DiagonalLinearOperator,
    lx.IdentityLinearOperator,
    lx.TridiagonalLinearOperator,
):
    columns.register(cls, _of_few)
# Classes of which `as_matrix` reads entries.
_READ = tuple(cls for cls in columns.registry if cls is not object)
for cls in _READ:
    diagonal_entries.register(cls, lx.diagonal)


def _is_registered(question: Any, operator: lx.AbstractLinearOperator) -> bool:
    return question.dispatch(type(operator)) is not question.dispatch(object)


def has_known_entries(operator: lx.AbstractLinearOperator) -> bool:
    """Whether columns and the diagonal are read, for less than the products with them."""
    both = columns, diagonal_entries
    return all(_is_registered(x, y.operator) for x in both for y in terms(operator))


def readable_data(
    operator: lx.AbstractLinearOperator,
) -> lx.AbstractLinearOperator | None:
    """The operator as data that a program can keep; `None` if its entries would be lost.

    A class with entries may hold Python functions, which become data with its products alone.
    """
    data = as_data(operator)
    lost = has_known_entries(operator) and not has_known_entries(data)
    return None if lost else data


def columns_of(operator, indices: Int[Array, " r"]) -> Inexact[Array, "n r"]:
    """Columns of the matrix of an operator that `has_known_entries`."""
    return _sum(operator, lambda x: columns(x, indices), "columns", len(indices))


def diagonal_of(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The diagonal of the matrix of an operator, all of whose terms are registered."""
    return _sum(operator, diagonal_entries, "diagonal_entries")


def matrix_of(operator: lx.AbstractLinearOperator) -> Inexact[Array, "n n"]:
    """The matrix of an operator that `has_known_entries`."""
    n = space_of(operator).size

    def read(x):
        return x.as_matrix() if isinstance(x, _READ) else columns(x, jnp.arange(n))

    return _sum(operator, read, "columns", n)


def _sum(
    operator: lx.AbstractLinearOperator, read: Any, name: str, *more: int
) -> Array:
    """The sum of what is read of the terms, each of shape `(n, *more)`."""
    space, found = space_of(operator), []
    shape, where = (space.size, *more), f"traceax.{name}"
    for x in terms(operator):
        entries = read(x.operator)
        what = f"that of {type(x.operator).__name__} must be of shape {shape}"
        require(jnp.shape(entries) == shape, where, what, entries, f"see help({where})")
        found.append(x.times(entries).astype(space.compute_dtype))
    return ft.reduce(op.add, found)


def known_trace(operator: lx.AbstractLinearOperator) -> Float[Array, ""] | None:
    """The trace, where the diagonal is read; `None` for any other operator."""
    if not all(_is_registered(diagonal_entries, x.operator) for x in terms(operator)):
        return None
    return jax.lax.stop_gradient(jnp.sum(jnp.real(diagonal_of(operator))))


class KnownDiagonal(NamedTuple):
    """A diagonal that structure gives away, and the products that it takes to read."""

    num_matvecs: int
    read: Callable[[], Inexact[Array, " n"]]


def known_diagonal(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, where the operator's structure, by class or by tag, gives it.

    Diagonal, tridiagonal, triangular and unit-diagonal operators, and their compositions.
    """
    checks = lx.has_unit_diagonal, lx.is_diagonal, lx.is_tridiagonal
    triangular = lx.is_lower_triangular, lx.is_upper_triangular
    known = is_known(operator, *checks, *triangular)
    return readable_diagonal(operator) if known else None


def readable_diagonal(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, also where the entries are stored; by the fewest products."""
    space = space_of(operator)
    if is_known(operator, lx.has_unit_diagonal):
        return KnownDiagonal(0, lambda: jnp.ones(space.size, space.compute_dtype))
    ways = [_from_parts(operator)]
    # A tag holds of the expression that it is on, whatever is known of its parts.
    for products, check in ((1, lx.is_diagonal), (2, lx.is_tridiagonal)):
        # A diagonal by inexact products is no exact one.
        if is_known(operator, check) and not solver_tolerances(operator):
            read = ft.partial(_coloured_diagonal, operator, products)
            ways.append(KnownDiagonal(products, read))
    found = [way for way in ways if way is not None]
    return min(found, key=lambda way: way.num_matvecs, default=None)


def _from_parts(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal by entries that are read, and by the diagonals of the parts."""
    if _is_registered(diagonal_entries, operator):
        return KnownDiagonal(0, lambda: diagonal_of(operator))
    found, combine = parts(operator), jnp.add
    if isinstance(operator, lx.ComposedLinearOperator):
        factors = operator.operator1, operator.operator2
        if not _multiplies(*factors):
            return None
        found, combine = [Term(None, x) for x in factors], jnp.multiply
    if found[0].operator is operator:
        return None
    ways = [readable_diagonal(x.operator) for x in found]
    known = [x for x in ways if x is not None]
    if len(known) < len(ways):
        return None

    def read():
        with jax.numpy_dtype_promotion("standard"):
            pairs = zip(found, known, strict=True)
            d = ft.reduce(combine, [x.times(y.read()) for x, y in pairs])
        # Complex where a scalar makes it so.
        real = space_of(operator).real_dtype
        return d.astype(complex_dtype(real) if jnp.iscomplexobj(d) else real)

    return KnownDiagonal(sum(x.num_matvecs for x in known), read)


def _multiplies(*factors: lx.AbstractLinearOperator) -> bool:
    """Whether diag(A B) = diag(A) diag(B): one diagonal, or both triangular on one side."""

    def known(check) -> list[bool]:
        return [is_known(x, check) for x in factors]

    lower, upper = known(lx.is_lower_triangular), known(lx.is_upper_triangular)
    square = factors[0].in_structure() == factors[0].out_structure()
    return square and (any(known(lx.is_diagonal)) or all(lower) or all(upper))


def _coloured_diagonal(operator, colours: int) -> Inexact[Array, " n"]:
    # Entries of one colour are too far apart to meet in a row of the operator, which acts
    # on real vectors within one on complex vectors.
    operator = as_complex(operator)
    space = space_of(operator)
    colour = jnp.arange(space.size, dtype=jnp.int32) % colours
    block = jax.nn.one_hot(colour, colours, dtype=space.compute_dtype)
    return jnp.sum(block * apply_block(operator, block), axis=1)


def unit_vectors(
    start: int | Int[Array, ""], n: int, k: int, dtype: DTypeLike
) -> Inexact[Array, "n k"]:
    """Columns of the identity from `start` on, 0 beyond the last."""
    return jax.nn.one_hot(jnp.arange(k, dtype=jnp.int32) + start, n, dtype=dtype).T


def unit_columns(operator: lx.AbstractLinearOperator) -> int:
    """How many columns of the identity are multiplied at once, where all of them are."""
    rows = sum(math.prod(x.shape) for x in jtu.tree_leaves(out_structure_of(operator)))
    n = max(space_of(operator).size, rows, 1)
    few = max(FEWEST, _HELD // n)
    return few if has_one_pass(operator) else min(few, columns_at_once(n))


def map_columns(operator: lx.AbstractLinearOperator, fn: Callable) -> PyTree[Array]:
    """`fn(A e_j, j)` of every column j, by chunks, which derivatives compute again."""
    space, few = space_of(operator), unit_columns(operator)
    n, dtype = space.size, space.compute_dtype
    indices = jnp.arange(n, dtype=jnp.int32)
    if n <= few:
        return jax.vmap(fn)(apply_block(operator, jnp.eye(n, dtype=dtype)).T, indices)

    @jax.checkpoint
    def of_column(j):
        return fn(apply_block(operator, unit_vectors(j, n, 1, dtype))[:, 0], j)

    return jax.lax.map(of_column, indices, batch_size=few)


def entry_of(column: Inexact[Array, " m"], j: Int[Array, ""]) -> Inexact[Array, ""]:
    """`column[j]`, which JAX refuses to trace of a column without entries."""
    return column[j] if len(column) else jnp.zeros((), column.dtype)
