"""Diagonals that an operator's structure gives, and the sums over them.

A sum is split into terms with known diagonals, and a remainder that needs products.
"""

import functools as ft
import operator as op
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, Inexact

from .._error_bar import ErrorBar, exact_bar
from .._functional import Functional
from .._linalg.dense import exact_split
from .._operators.check import as_complex
from .._operators.entries import KnownDiagonal, Term, known_diagonal, parts
from .._operators.inverse import InverseLinearOperator, expand_inverse
from .._operators.space import is_semidefinite, parts_of, space_of
from .._outcome import Evidence, Outcome, as_arrays
from .._results import RESULTS
from .._state import TraceState


class Known(NamedTuple):
    """The diagonals of terms, and the moduli whose rounding errors they carry."""

    terms: list[Inexact[Array, " n"]]
    computed: Float[Array, " n"]

    def sum(self, functional: Functional) -> tuple[ErrorBar, Evidence]:
        """The sum, whose error is 0 if nothing is rounded, and evidence for slopes."""
        high, low, sizes = _split_sums(functional, self.terms)
        rows = jnp.asarray(functional.num_rows(len(self.computed))) * len(self.terms)
        value = high + low
        rounded = jnp.where(rows > 1, sizes + jnp.abs(value), 0)
        rounded = rounded + functional.sum(self.computed)
        evidence = Evidence(self.terms, jtu.Partial(_bars_from_diagonals, functional))
        return exact_bar(value, jnp.where(sizes > 0, rounded, 0)), evidence


def _bars_from_diagonals(
    functional: Functional, terms: list[Inexact[Array, " n"]]
) -> list[ErrorBar]:
    *_, sizes = _split_sums(functional, terms)
    moduli = functional.sum(ft.reduce(op.add, map(jnp.abs, terms)))
    value = functional.sum(ft.reduce(op.add, terms))
    return [exact_bar(value, jnp.where(sizes > 0, moduli, 0))]


def _split_sums(
    functional: Functional, terms: list[Inexact[Array, " n"]]
) -> list[Inexact[Array, "*g"]]:
    """Exact sums, the sums that are missing in them, and their terms' moduli."""
    high, low = exact_split(*terms)
    parts = high, low, list(map(jnp.abs, low))
    return [functional.sum(ft.reduce(op.add, x)) for x in parts]


class Split(NamedTuple):
    """An operator as `factor * remainder` plus terms whose diagonals are known.

    `None` stands for a factor of 1, and for an absent part.
    """

    known: Known | None
    num_matvecs: int
    factor: Inexact[Array, ""] | None
    remainder: lx.AbstractLinearOperator | None

    def outcome(self, state: TraceState) -> Outcome:
        """The exact answer without a remainder."""
        assert self.known is not None
        bar, evidence = self.known.sum(state.functional)
        stats = as_arrays({"num_matvecs": self.num_matvecs})
        return Outcome([bar], [RESULTS.successful], stats, evidence)


class _SplitTerm(NamedTuple):
    """A term of a sum, with its diagonal if that is known, and whether it is stored."""

    term: Term
    diagonal: KnownDiagonal | None
    is_stored: bool = False


def split_known(operator: lx.AbstractLinearOperator, k: int, *, expand: bool) -> Split:
    terms = _split_sum(Term(None, operator), most_products=2)
    num_matvecs = sum(x.diagonal.num_matvecs for x in terms if x.diagonal is not None)
    if num_matvecs > k or (num_matvecs == k and any(x.diagonal is None for x in terms)):
        # The budget is too small to read every diagonal: we read those that are free.
        terms, num_matvecs = _split_sum(Term(None, operator), most_products=0), 0
    if expand and parts_of(operator, InverseLinearOperator):
        terms = [y for x in terms for y in _expand(x)]
    known = [(x.term.times(x.diagonal.read()), x) for x in terms if x.diagonal]
    remaining = [x.term for x in terms if x.diagonal is None]
    with jax.numpy_dtype_promotion("standard"):
        part = _known_part(known) if known else None
        if not remaining:
            return Split(part, num_matvecs, None, None)
        # lineax drops the semidefinite tag of a multiple. So we estimate the tagged
        # operator itself, and multiply its estimate by the factor.
        factor, base = remaining[0]
        is_scaled = len(remaining) == 1 and factor is not None and is_semidefinite(base)
        if is_scaled and (known or not is_semidefinite(operator)):
            return Split(part, num_matvecs, jnp.asarray(factor), base)
        if not known:
            return Split(None, num_matvecs, None, operator)
        remaining = ft.reduce(op.add, [x.times(x.operator) for x in remaining])
        return Split(part, num_matvecs, None, as_complex(remaining))


def _known_part(known: list[tuple[Inexact[Array, " n"], _SplitTerm]]) -> Known:
    dtype = jnp.result_type(*[x for x, _ in known])
    terms = [x.astype(dtype) for x, _ in known]
    factors = [
        0.0 if x.is_stored else space_of(x.term.operator).rounding for _, x in known
    ]
    sizes = [factor * jnp.abs(x) for factor, x in zip(factors, terms, strict=True)]
    return Known(terms, ft.reduce(op.add, sizes))


def _split_sum(term: Term, most_products: int) -> list[_SplitTerm]:
    """Splits a sum into terms, but only where this separates a known diagonal."""
    diagonal = known_diagonal(term.operator)
    if diagonal is not None and diagonal.num_matvecs > most_products:
        diagonal = None
    inner, whole = parts(term.operator), [_SplitTerm(term, diagonal)]
    if inner[0].operator is term.operator:
        is_product = isinstance(term.operator, lx.ComposedLinearOperator)
        is_stored = term.factor is None and not is_product
        is_stored &= diagonal is not None and diagonal.num_matvecs == 0
        return [whole[0]._replace(is_stored=is_stored)]
    terms = [y for x in inner for y in _split_sum(term.after(x), most_products)]
    known = [x.diagonal.num_matvecs for x in terms if x.diagonal is not None]
    if diagonal is not None:
        # We read terms where we can, because sums of their diagonals round.
        is_cheap = len(known) == len(terms) and sum(known) <= diagonal.num_matvecs
        return terms if is_cheap else whole
    # A tag holds for a sum, not for its terms. So we split only for known diagonals.
    tagged = isinstance(term.operator, lx.TaggedLinearOperator)
    return whole if tagged and not known else terms


def _expand(split: _SplitTerm) -> list[_SplitTerm]:
    """Splits an inverse into two terms with a readable diagonal, and the remainder."""
    expansion = None
    if split.diagonal is None:
        expansion = expand_inverse(split.term.operator)
    if expansion is None:
        return [split]
    diagonal = KnownDiagonal(0, lambda: expansion.diagonal)
    remainder = split.term.after(Term(None, expansion.remainder))
    return [_SplitTerm(split.term, diagonal), _SplitTerm(remainder, None)]
