"""Matrix entries: entries that an operator can read, and columns from products."""

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
from .solvers import is_inexact
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

# We multiply identity blocks of 256 MiB on accelerators, or if one pass suffices.
_BLOCK_ENTRIES = 2**26


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
        """Scales a part of the operator by this factor too."""
        factor = self.factor if part.factor is None else self.times(part.factor)
        return Term(factor, part.operator)


def parts(operator: lx.AbstractLinearOperator) -> list[Term]:
    """Terms that sum to an operator, one level down; itself if it has no parts."""
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
    summands = parts(operator)
    if summands[0].operator is operator:
        return summands
    return [x.after(y) for x in summands for y in terms(x.operator)]


@ft.singledispatch
def columns(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " r"]
) -> Inexact[Array, "n r"]:
    """Reads matrix columns from an operator, without a product.

    ```python
    @traceax.columns.register
    def _(operator: MyOperator, indices):
        return operator.entries[:, indices]
    ```

    Register your class here and in [`traceax.diagonal_entries`][] to precondition its
    operators, their sums, multiples and products with diagonal operators. Kernels and
    matrices (dense, sparse, diagonal) are already registered. lineax also calls `is_symmetric` for your class, and
    `is_diagonal` and `is_tridiagonal` in sums. If you register
    `is_positive_semidefinite` too, you get brackets and may leave out k. A wrong
    diagonal gives a wrong number: test with [`traceax.testing.check_entries`][].

    **Arguments:**

    - `operator`: an operator with n unknowns.
    - `indices`: an integer array with shape `(r,)`, which may be traced and may repeat.

    **Returns:** an array with shape `(n, r)`, in the order of the flattened structure.
    """
    raise NotImplementedError(f"traceax.columns: {type(operator)} is not registered.")


@ft.singledispatch
def diagonal_entries(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """Reads the matrix diagonal, with shape `(n,)`, from an operator without a product.

    Register a class as for [`traceax.columns`][]. Without columns, a diagonal still
    lowers the error in [`traceax.logdet`][] and [`traceax.trace_function`][];
    [`traceax.trace`][] and [`traceax.diagonal`][] don't read it.
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


def _read_columns(operator, indices):
    return operator.as_matrix().T[indices].T


def _multiply_columns(operator, indices):
    n, _, dtype, *_ = space_of(operator)
    return apply_block(operator, jax.nn.one_hot(indices, n, dtype=dtype).T)


for cls in (lx.MatrixLinearOperator, lx.PyTreeLinearOperator):
    columns.register(cls, _read_columns)
for cls in (
    lx.DiagonalLinearOperator,
    lx.IdentityLinearOperator,
    lx.TridiagonalLinearOperator,
):
    columns.register(cls, _multiply_columns)
# We read entries from `as_matrix` for these classes.
_READ = tuple(cls for cls in columns.registry if cls is not object)
for cls in _READ:
    diagonal_entries.register(cls, lx.diagonal)


class _Scaling(NamedTuple):
    """A product `D A`, or `A D`, with a diagonal D that can be read."""

    diagonal: Callable[[], Inexact[Array, " n"]]
    operator: lx.AbstractLinearOperator
    of_rows: bool


def _scaling(operator: lx.ComposedLinearOperator) -> _Scaling | None:
    pairs = (
        (operator.operator1, operator.operator2, True),
        (operator.operator2, operator.operator1, False),
    )
    for D, A, of_rows in pairs:
        if is_known(D, lx.is_diagonal) and has_known_entries(D):
            return _Scaling(ft.partial(diagonal_of, D), A, of_rows)
    return None


@columns.register
def _(operator: lx.ComposedLinearOperator, indices):
    scaling = _readable_scaling(operator, "columns")
    block, d = columns_of(scaling.operator, indices), scaling.diagonal()
    d = d[:, None] if scaling.of_rows else d[indices][None, :]
    with jax.numpy_dtype_promotion("standard"):
        return d * block


@diagonal_entries.register
def _(operator: lx.ComposedLinearOperator):
    scaling = _readable_scaling(operator, "diagonal_entries")
    with jax.numpy_dtype_promotion("standard"):
        return scaling.diagonal() * diagonal_of(scaling.operator)


def _readable_scaling(operator: lx.ComposedLinearOperator, name: str) -> _Scaling:
    scaling = _scaling(operator)
    if scaling is None:
        raise NotImplementedError(
            f"traceax.{name}: a product of operators can be read if one of them is "
            "diagonal with readable entries, got another product; multiply its factors "
            "to one matrix."
        )
    return scaling


def _is_readable(reader: Any, operator: lx.AbstractLinearOperator) -> bool:
    if isinstance(operator, lx.ComposedLinearOperator):
        scaling = _scaling(operator)
        return scaling is not None and _is_sum_readable(reader, scaling.operator)
    return reader.dispatch(type(operator)) is not reader.dispatch(object)


def _is_sum_readable(reader: Any, operator: lx.AbstractLinearOperator) -> bool:
    return all(_is_readable(reader, x.operator) for x in terms(operator))


def has_known_entries(operator: lx.AbstractLinearOperator) -> bool:
    """Whether columns and the diagonal can be read, for less than the products cost."""
    return all(_is_sum_readable(x, operator) for x in (columns, diagonal_entries))


def readable_data(
    operator: lx.AbstractLinearOperator,
) -> lx.AbstractLinearOperator | None:
    """The operator as data that a program can keep; `None` if its entries would be lost.

    A class with entries may hold Python functions: then only its products become data.
    """
    data = as_data(operator)
    lost = has_known_entries(operator) and not has_known_entries(data)
    return None if lost else data


def columns_of(operator, indices: Int[Array, " r"]) -> Inexact[Array, "n r"]:
    """Reads matrix columns from an operator that `has_known_entries`."""
    return _sum(
        operator,
        terms(operator),
        lambda x: columns(x, indices),
        "columns",
        len(indices),
    )


def diagonal_of(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """Reads the matrix diagonal from an operator whose terms are all registered."""
    return _sum(operator, terms(operator), diagonal_entries, "diagonal_entries")


def matrix_of(operator: lx.AbstractLinearOperator) -> Inexact[Array, "n n"]:
    """Reads the matrix from an operator that `has_known_entries`."""
    indices = jnp.arange(space_of(operator).size)

    def read(x):
        return x.as_matrix() if isinstance(x, _READ) else columns(x, indices)

    # We add diagonals in place: a second matrix in memory takes longer to make.
    kinds = lx.IdentityLinearOperator | lx.DiagonalLinearOperator
    diagonals = [x for x in terms(operator) if isinstance(x.operator, kinds)]
    full = [x for x in terms(operator) if not isinstance(x.operator, kinds)]
    full = full or [diagonals.pop(0)]
    matrix = _sum(operator, full, read, "columns", len(indices))
    if not diagonals:
        return matrix
    added = _sum(operator, diagonals, diagonal_entries, "diagonal_entries")
    return matrix.at[indices, indices].add(added)


def sizes_of(operator: lx.AbstractLinearOperator) -> Float[Array, " n"]:
    """The sum over terms of the diagonal's modulus, for an operator as in `diagonal_of`.

    Terms may cancel in a sum, and its entries have rounding errors relative to these.
    """

    def read(x):
        if not isinstance(x, lx.ComposedLinearOperator):
            return jnp.abs(diagonal_entries(x))
        scaling = _readable_scaling(x, "diagonal_entries")
        return jnp.abs(scaling.diagonal()) * sizes_of(scaling.operator)

    arrays = [jnp.abs(x.times(read(x.operator))) for x in terms(operator)]
    return ft.reduce(op.add, [x.astype(space_of(operator).real_dtype) for x in arrays])


def _has_terms(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is a sum of several terms, perhaps scaled by diagonals."""
    first, *others = terms(operator)
    if others or not isinstance(first.operator, lx.ComposedLinearOperator):
        return bool(others)
    scaling = _scaling(first.operator)
    return scaling is not None and _has_terms(scaling.operator)


def known_sizes(operator: lx.AbstractLinearOperator) -> Float[Array, " n"] | None:
    """`sizes_of` a sum of several terms, without a derivative; `None` if unknown."""
    if not _has_terms(operator) or not _is_sum_readable(diagonal_entries, operator):
        return None
    return jax.lax.stop_gradient(sizes_of(operator))


def _sum(
    operator: lx.AbstractLinearOperator,
    summands: list[Term],
    read: Any,
    name: str,
    *more: int,
) -> Array:
    """Sums the entries that are read from each term, with shape `(n, *more)`."""
    space, arrays = space_of(operator), []
    shape, where = (space.size, *more), f"traceax.{name}"
    for x in summands:
        entries = read(x.operator)
        what = f"the result for {type(x.operator).__name__} must be of shape {shape}"
        require(jnp.shape(entries) == shape, where, what, entries, f"see help({where})")
        arrays.append(x.times(entries).astype(space.compute_dtype))
    return ft.reduce(op.add, arrays)


for _class in (
    *(lx.AddLinearOperator, lx.MulLinearOperator, lx.DivLinearOperator),
    *(lx.NegLinearOperator, lx.TaggedLinearOperator),
    *(ComplexLinearOperator, ShiftedLinearOperator),
):
    columns.register(_class, columns_of)
    diagonal_entries.register(_class, diagonal_of)


def known_trace(operator: lx.AbstractLinearOperator) -> Float[Array, ""] | None:
    """The trace, if the diagonal can be read; `None` for any other operator."""
    if not _is_sum_readable(diagonal_entries, operator):
        return None
    return jax.lax.stop_gradient(jnp.sum(jnp.real(diagonal_of(operator))))


class KnownDiagonal(NamedTuple):
    """A diagonal that structure provides, and the number of products to read it."""

    num_matvecs: int
    read: Callable[[], Inexact[Array, " n"]]


def known_diagonal(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, if the operator's class or tag declares enough structure.

    That is: diagonal, tridiagonal, triangular, unit diagonal, and their compositions.
    """
    checks = lx.has_unit_diagonal, lx.is_diagonal, lx.is_tridiagonal
    triangular = lx.is_lower_triangular, lx.is_upper_triangular
    known = is_known(operator, *checks, *triangular)
    return readable_diagonal(operator) if known else None


def readable_diagonal(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, from structure or stored entries, with the fewest products."""
    space = space_of(operator)
    if is_known(operator, lx.has_unit_diagonal):
        return KnownDiagonal(0, lambda: jnp.ones(space.size, space.compute_dtype))
    candidates = [_from_parts(operator)]
    # We use a tag on the whole expression, even if its parts are unknown.
    for products, check in ((1, lx.is_diagonal), (2, lx.is_tridiagonal)):
        # We skip inexact products, because this diagonal must be exact.
        if is_known(operator, check) and not is_inexact(operator):
            read = ft.partial(_coloured_diagonal, operator, products)
            candidates.append(KnownDiagonal(products, read))
    known = [x for x in candidates if x is not None]
    return min(known, key=lambda x: x.num_matvecs, default=None)


def _from_parts(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal from registered entries, or from the parts' diagonals."""
    if _is_sum_readable(diagonal_entries, operator):
        return KnownDiagonal(0, lambda: diagonal_of(operator))
    summands, combine = parts(operator), jnp.add
    if isinstance(operator, lx.ComposedLinearOperator):
        factors = operator.operator1, operator.operator2
        if not _multiplies(*factors):
            return None
        summands, combine = [Term(None, x) for x in factors], jnp.multiply
    if summands[0].operator is operator:
        return None
    diagonals = [readable_diagonal(x.operator) for x in summands]
    known = [x for x in diagonals if x is not None]
    if len(known) < len(diagonals):
        return None

    def read():
        with jax.numpy_dtype_promotion("standard"):
            pairs = zip(summands, known, strict=True)
            d = ft.reduce(combine, [x.times(y.read()) for x, y in pairs])
        # We keep complex numbers only if a scalar is complex.
        real = space_of(operator).real_dtype
        return d.astype(complex_dtype(real) if jnp.iscomplexobj(d) else real)

    return KnownDiagonal(sum(x.num_matvecs for x in known), read)


def _multiplies(*factors: lx.AbstractLinearOperator) -> bool:
    """Whether diag(A B) = diag(A) diag(B): one diagonal, or both triangular alike."""

    def known(check) -> list[bool]:
        return [is_known(x, check) for x in factors]

    lower, upper = known(lx.is_lower_triangular), known(lx.is_upper_triangular)
    square = factors[0].in_structure() == factors[0].out_structure()
    return square and (any(known(lx.is_diagonal)) or all(lower) or all(upper))


def _coloured_diagonal(operator, colours: int) -> Inexact[Array, " n"]:
    # Unknowns with one colour are too far apart to share a row. We call `as_complex`
    # because parts of a complex operator may act on real vectors.
    operator = as_complex(operator)
    space = space_of(operator)
    colour = jnp.arange(space.size, dtype=jnp.int32) % colours
    block = jax.nn.one_hot(colour, colours, dtype=space.compute_dtype)
    return jnp.sum(block * apply_block(operator, block), axis=1)


def unit_vectors(
    start: int | Int[Array, ""], n: int, k: int, dtype: DTypeLike
) -> Inexact[Array, "n k"]:
    """Identity columns from `start` on, and zeros beyond the last."""
    return jax.nn.one_hot(jnp.arange(k, dtype=jnp.int32) + start, n, dtype=dtype).T


def unit_columns(operator: lx.AbstractLinearOperator) -> int:
    """The number of identity columns to multiply at once, if all n are needed."""
    rows = sum(math.prod(x.shape) for x in jtu.tree_leaves(out_structure_of(operator)))
    n = max(space_of(operator).size, rows, 1)
    width = max(FEWEST, _BLOCK_ENTRIES // n)
    return width if has_one_pass(operator) else min(width, columns_at_once(n))


def map_columns(operator: lx.AbstractLinearOperator, fn: Callable) -> PyTree[Array]:
    """`fn(A e_j, j)` for every column j, in chunks that derivatives compute again."""
    space, width = space_of(operator), unit_columns(operator)
    n, dtype = space.size, space.compute_dtype
    indices = jnp.arange(n, dtype=jnp.int32)
    if n <= width:
        return jax.vmap(fn)(apply_block(operator, jnp.eye(n, dtype=dtype)).T, indices)

    @jax.checkpoint
    def apply_to_column(j):
        return fn(apply_block(operator, unit_vectors(j, n, 1, dtype))[:, 0], j)

    return jax.lax.map(apply_to_column, indices, batch_size=width)


def entry_of(column: Inexact[Array, " m"], j: Int[Array, ""]) -> Inexact[Array, ""]:
    """`column[j]`, or 0 for an empty column, which JAX refuses to index."""
    return column[j] if len(column) else jnp.zeros((), column.dtype)
