"""Entries that an operator gives away: what it is a sum of, and what is read of its terms.

An expression is a sum of multiples of terms. What a term has to read, its columns and its
diagonal, is asked of its class, as lineax asks its own questions.
"""

import functools as ft
import operator as op
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Inexact, Int

from .block import apply_block, complex_dtype, is_known, space_of
from .check import ComplexLinearOperator, as_complex
from .convert import SparseLinearOperator
from .kernel import KernelLinearOperator
from .shifted import ShiftedLinearOperator


class Term(NamedTuple):
    """A multiple of an operator; `None` stands for a factor of 1."""

    factor: Any
    operator: lx.AbstractLinearOperator

    def times(self, x: Any) -> Any:
        if self.factor is None:
            return x
        with jax.numpy_dtype_promotion("standard"):
            return x * self.factor

    def after(self, part: "Term") -> "Term":
        """The multiple of a part of the operator."""
        if part.factor is None:
            return Term(self.factor, part.operator)
        return Term(self.times(part.factor), part.operator)


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
            identity = lx.IdentityLinearOperator(operator.in_structure())
            return [Term(None, operator.operator), Term(operator.shift, identity)]
    return [Term(None, operator)]


def terms(operator: lx.AbstractLinearOperator) -> list[Term]:
    """What an operator is the sum of, all the way down."""
    found = parts(operator)
    if found[0].operator is operator:
        return found
    return [x.after(y) for x in found for y in terms(x.operator)]


@ft.singledispatch
def columns(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " r"]
) -> Inexact[Array, "n r"]:
    """Columns of the matrix of an operator, for less than the products with them."""
    raise NotImplementedError(f"{type(operator)} has no columns to read")


@ft.singledispatch
def diagonal_entries(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The diagonal of the matrix of an operator, for less than a product."""
    raise NotImplementedError(f"{type(operator)} has no diagonal to read")


for _kind in (
    KernelLinearOperator,
    SparseLinearOperator,
    lx.MatrixLinearOperator,
    lx.PyTreeLinearOperator,
    lx.DiagonalLinearOperator,
    lx.IdentityLinearOperator,
    lx.TridiagonalLinearOperator,
):
    diagonal_entries.register(_kind, lx.diagonal)

columns.register(KernelLinearOperator, lambda x, indices: x.columns(indices))
columns.register(SparseLinearOperator, lambda x, indices: x.columns_at(indices))
for _kind in (lx.MatrixLinearOperator, lx.PyTreeLinearOperator):
    columns.register(_kind, lambda x, indices: x.as_matrix().T[indices].T)


@columns.register(lx.DiagonalLinearOperator)
@columns.register(lx.IdentityLinearOperator)
@columns.register(lx.TridiagonalLinearOperator)
def _(operator, indices):
    space = space_of(operator)
    rows = jnp.arange(space.size, dtype=indices.dtype)
    units = (rows[None, :] == indices[:, None]).T
    return apply_block(operator, units.astype(space.compute_dtype))


def _reads(question: Any, operator: lx.AbstractLinearOperator) -> bool:
    return question.dispatch(type(operator)) is not question.dispatch(object)


def has_known_entries(operator: lx.AbstractLinearOperator) -> bool:
    """Whether columns and the diagonal are read, and take no products."""
    questions = columns, diagonal_entries
    return all(_reads(q, x.operator) for x in terms(operator) for q in questions)


def columns_of(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " r"]
) -> Inexact[Array, "n r"]:
    """Columns of the matrix of an operator that `has_known_entries`."""
    return _sum(operator, lambda x: columns(x, indices))


def diagonal_of(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The diagonal of the matrix of an operator that `has_known_entries`."""
    return _sum(operator, diagonal_entries)


def _sum(
    operator: lx.AbstractLinearOperator, of_term: Callable
) -> Inexact[Array, "..."]:
    dtype = space_of(operator).compute_dtype
    found = [x.times(of_term(x.operator)).astype(dtype) for x in terms(operator)]
    return ft.reduce(op.add, found)


def known_trace(operator: lx.AbstractLinearOperator) -> Float[Array, ""] | None:
    """The trace, where the diagonal is read; `None` for any other operator."""
    if not has_known_entries(operator):
        return None
    return jax.lax.stop_gradient(jnp.sum(jnp.real(diagonal_of(operator))))


#
# Diagonals of structures
#


_CHECKS = (
    lx.has_unit_diagonal,
    lx.is_diagonal,
    lx.is_tridiagonal,
    lx.is_lower_triangular,
    lx.is_upper_triangular,
)


class KnownDiagonal(NamedTuple):
    """A diagonal that structure gives away, and the products that it takes to read."""

    num_matvecs: int
    read: Callable[[], Inexact[Array, " n"]]


def known_diagonal(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, where the operator's structure gives it for at most two products.

    Diagonal, tridiagonal, triangular and unit-diagonal operators, by class or by tag,
    and their compositions. `None` for any other.
    """
    known = any(is_known(check, operator) for check in _CHECKS)
    return _readable(operator) if known else None


def _readable(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal, also where the entries are stored; by the fewest products."""
    space = space_of(operator)
    if is_known(lx.has_unit_diagonal, operator):
        return KnownDiagonal(0, lambda: jnp.ones(space.size, space.compute_dtype))
    ways = [_from_parts(operator)]
    # A tag holds of the expression that it is on, whatever is known of its parts. A
    # triangular function takes n products to read.
    for products, check in ((1, lx.is_diagonal), (2, lx.is_tridiagonal)):
        if is_known(check, operator):
            read = ft.partial(_coloured_diagonal, operator, products)
            ways.append(KnownDiagonal(products, read))
    found = [way for way in ways if way is not None]
    return min(found, key=lambda way: way.num_matvecs, default=None)


def _from_parts(operator: lx.AbstractLinearOperator) -> KnownDiagonal | None:
    """The diagonal by entries that are read, and by the diagonals of the parts."""
    dtype = space_of(operator).compute_dtype
    if _reads(diagonal_entries, operator):
        return KnownDiagonal(0, lambda: diagonal_entries(operator).astype(dtype))
    if isinstance(operator, lx.ComposedLinearOperator):
        factors = operator.operator1, operator.operator2
        if not _multiplies(*factors):
            return None
        found, combine = [Term(None, x) for x in factors], jnp.multiply
    else:
        found, combine = parts(operator), jnp.add
    if found[0].operator is operator:
        return None
    ways = [_readable(x.operator) for x in found]
    known = [x for x in ways if x is not None]
    if len(known) < len(ways):
        return None
    real = space_of(operator).real_dtype

    def read():
        with jax.numpy_dtype_promotion("standard"):
            pairs = zip(found, known, strict=True)
            d = ft.reduce(combine, [x.times(y.read()) for x, y in pairs])
        # Complex where a scalar makes it so.
        return d.astype(complex_dtype(real) if jnp.iscomplexobj(d) else real)

    return KnownDiagonal(sum(x.num_matvecs for x in known), read)


def _multiplies(
    first: lx.AbstractLinearOperator, second: lx.AbstractLinearOperator
) -> bool:
    # diag(A B) = diag(A) diag(B) if one is diagonal, or both triangular on one side.
    def both(check) -> bool:
        return is_known(check, first) and is_known(check, second)

    diagonal = is_known(lx.is_diagonal, first) or is_known(lx.is_diagonal, second)
    triangular = both(lx.is_lower_triangular) or both(lx.is_upper_triangular)
    square = first.in_structure() == first.out_structure()
    return square and (diagonal or triangular)


def _coloured_diagonal(
    operator: lx.AbstractLinearOperator, colours: int
) -> Inexact[Array, " n"]:
    # Column c of the block is 1 at every entry of colour c. Entries of one colour are
    # too far apart to meet in a row of the operator. Within one on complex vectors an
    # operator acts on real ones.
    operator = as_complex(operator)
    space = space_of(operator)
    colour = np.arange(space.size) % colours
    block = jnp.asarray(colour[:, None] == np.arange(colours)[None, :])
    block = block.astype(space.compute_dtype)
    return jnp.sum(block * apply_block(operator, block), axis=1)
