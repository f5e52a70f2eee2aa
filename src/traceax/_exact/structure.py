"""Exact sums over eigenvalues for diagonal, triangular and tridiagonal operators.

The log-determinant of a product is the sum of its factors' log-determinants.

Let a tridiagonal matrix have the diagonal a, and b and c above and below it. Elimination
from above gives the pivots `d_i = a_i - p_i / d_(i-1)` for `p_i = b_(i-1) c_(i-1)`, and
elimination from below the pivots e. Then `(A^-1)_ii = 1 / (d_i + e_i - a_i)` (Meurant,
"A review on the inverse of symmetric tridiagonal and block tridiagonal matrices", SIAM J.
Matrix Anal. Appl. 13 (1992), doi:10.1137/0613045), and the determinant is the product of
all d, so that `d log det A / d p_i = -1 / (d_(i-1) e_i - p_i)`.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Bool, Float, Inexact

from .._arguments import check_budget
from .._error_bar import ErrorBar
from .._linalg.dense import divisor, exact_split, largest_entry, power_of_two_scale
from .._linalg.types import scan
from .._operators.check import as_complex
from .._operators.entries import KnownDiagonal, known_diagonal, known_sizes, terms
from .._operators.space import Space, apply_block, is_known
from .._outcome import Evidence, Outcome
from .._plan import ExactAnswer
from .._results import RESULTS, per_entry
from .._spectral.base import domain_results, exact_stats, spectral_outcome
from .._spectral.function import HIDDEN, LOG, RECIPROCAL, derivative, largest_asymmetry
from .._spectral.state import SpectralState

_TRIANGULAR = lx.is_lower_triangular, lx.is_upper_triangular
STRUCTURES = lx.is_diagonal, lx.is_tridiagonal, *_TRIANGULAR
# JAX adds derivatives up without compensation, which gave errors up to 5 eps times the
# sum of moduli (equal terms, n = 2 to 300,000, 32 bits, one CPU).
_PLAIN_SUM = 4.0
# One rounding changes a number by at most this many eps.
_ROUNDOFF = 0.5


def by_structure(state: SpectralState, k: int | None, where: str) -> ExactAnswer | None:
    """The exact answer that the structure allows with at most k products, if any."""
    known = _known(state)
    if known is None or (k is not None and known.num_matvecs > check_budget(k, where)):
        return None
    return _BY_STRUCTURE


def _answer(state: SpectralState) -> Outcome:
    known = _known(state)
    assert known is not None
    return known.answer(_is_hermitian(state))


_BY_STRUCTURE = ExactAnswer("structure", _answer)


class _Known(NamedTuple):
    """An exact answer, given whether the operator must be Hermitian."""

    num_matvecs: int
    answer: Callable[[bool], Outcome]


def _known(state: SpectralState) -> _Known | None:
    operator, is_basic, diagonal = state.operator, _is_basic(state), None
    if is_known(operator, lx.is_diagonal, *(_TRIANGULAR if is_basic else ())):
        diagonal = known_diagonal(operator)
    if diagonal is not None:
        answer = ft.partial(_by_diagonal, state, diagonal)
        return _Known(diagonal.num_matvecs, answer)
    if is_basic and is_known(operator, lx.is_tridiagonal):
        return _Known(3, ft.partial(_by_bands, state))
    factors = [_known(x) for x in _factors(state)]
    known = [x for x in factors if x is not None]
    if not known or len(known) < len(factors):
        return None
    num_matvecs = sum(x.num_matvecs for x in known)
    return _Known(num_matvecs, ft.partial(_by_factors, state, known))


def _factors(state: SpectralState) -> list[SpectralState]:
    """The states of both factors of a product, for a log-determinant."""
    operator = state.operator
    while isinstance(operator, lx.TaggedLinearOperator):
        operator = operator.operator
    if not isinstance(operator, lx.ComposedLinearOperator):
        return []
    factors = operator.operator1, operator.operator2
    is_square = factors[0].in_structure() == factors[0].out_structure()
    if not (is_square and state.function.evaluates(LOG)):
        return []
    return [SpectralState(state.key, as_complex(x), state.function) for x in factors]


def _is_basic(state: SpectralState) -> bool:
    """Whether the quantity exists for matrices that aren't Hermitian, too."""
    return state.function.evaluates(LOG) or state.function.evaluates(RECIPROCAL)


def _is_hermitian(state: SpectralState) -> bool:
    """Whether the operator must be Hermitian. lineax calls a real diagonal symmetric."""
    is_real = not state.space.is_complex
    is_symmetric = is_real and is_known(state.operator, lx.is_diagonal)
    return state.space.is_hermitian or is_symmetric or not _is_basic(state)


class _Terms(NamedTuple):
    """The terms of a sum, and how relative errors in diagonal entries change them."""

    values: Inexact[Array, "*s n"]
    changes: Float[Array, "*s n"]


def _by_factors(
    state: SpectralState, factors: list[_Known], hermitian: bool
) -> Outcome:
    """`log |det A B| = log |det A| + log |det B|`."""
    first, second = [x.answer(False) for x in factors]
    assert second.evidence is not None
    outcome = first.plus(second.bars[0], second.evidence)
    (first_result,), (result,) = first.results, second.results
    failed = first_result != RESULTS.successful
    result = RESULTS.where(failed, first_result, result)
    stats: dict[str, Any] = {"num_matvecs": sum(x.num_matvecs for x in factors)}
    sign = first.stats["sign"] * second.stats["sign"]
    if hermitian:
        wrong = (jnp.real(sign) <= 0) & (result == RESULTS.successful)
        result = RESULTS.where(wrong, RESULTS.outside_domain, result)
    else:
        stats["sign"] = sign
    unknown = jnp.zeros(0, state.space.real_dtype)
    assert outcome.evidence is not None
    made = outcome.bars, result, stats, unknown, unknown, outcome.evidence
    return _made(state, *made)


def _by_diagonal(
    state: SpectralState, diagonal: KnownDiagonal, hermitian: bool
) -> Outcome:
    """The sum over the diagonal, whose entries are the eigenvalues."""
    operator, space, function = state.operator, state.space, state.function
    entries = diagonal.read().astype(space.compute_dtype)
    at = points = jnp.real(entries)
    result, stats = RESULTS.successful, {}
    if hermitian:
        imaginary = largest_entry(entries - points.astype(entries.dtype))
        rounding = 100 * jnp.sqrt(jnp.finfo(points.dtype).eps) * largest_entry(entries)
        result = RESULTS.where(imaginary > rounding, RESULTS.not_hermitian, result)
        function = function.in_range(points)
    else:
        at = entries
        if function.evaluates(LOG):
            at = jnp.abs(entries)
            stats["sign"] = jnp.prod(entries / divisor(at).astype(entries.dtype))
        singular = jnp.any(entries == 0)
        result = RESULTS.where(singular, RESULTS.outside_domain, result)
        points = jnp.zeros(0, points.dtype)
    values = function(at)
    changes = [jnp.zeros_like(jnp.real(x)) for x in values]
    sizes = _computed_sizes(operator, entries, diagonal.num_matvecs)
    if sizes is not None:

        def effect(slope):
            # A slope may be infinite at 0, where it has no effect.
            return space.rounding * sizes * jnp.abs(jnp.where(sizes > 0, slope, 0))

        slopes = derivative(function, at)
        changes = [per_entry(effect, x.ndim - 1)(x) for x in slopes]
    summands = list(map(_Terms, values, changes))
    # Logarithms and reciprocals have errors below eps, and other functions a few eps.
    bars = _sum_bars(1.0 if _is_basic(state) else 4.0, summands)
    stats.update(num_matvecs=diagonal.num_matvecs, **function.unit)
    weights = jnp.ones_like(points)
    evidence = Evidence(summands, jtu.Partial(_sum_bars, _PLAIN_SUM))
    return _made(state, bars, result, stats, points, weights, evidence)


def _computed_sizes(
    operator: lx.AbstractLinearOperator,
    entries: Inexact[Array, " n"],
    num_matvecs: int,
) -> Float[Array, " n"] | None:
    """The moduli whose rounding errors the entries carry; `None` for stored entries."""
    sizes, summands = known_sizes(operator), terms(operator)
    if sizes is not None:
        return sizes
    is_stored = len(summands) == 1 and num_matvecs == 0 and summands[0].factor is None
    is_stored &= not isinstance(summands[0].operator, lx.ComposedLinearOperator)
    return None if is_stored else jnp.abs(jax.lax.stop_gradient(entries))


def _sum_bars(unit: float, summands: list[_Terms]) -> list[ErrorBar]:
    """Sums of terms with errors of `unit` eps. Equal terms may have equal errors."""

    def bar(values, changes):
        sizes = unit * jnp.sum(jnp.abs(values)) + jnp.sum(jnp.abs(changes))
        return _rounded(_sum(values), jnp.finfo(sizes.dtype).eps * sizes)

    return [per_entry(bar, x.values.ndim - 1)(*x) for x in summands]


def _rounded(value: Inexact[Array, "*s"], error: Float[Array, "*s"]) -> ErrorBar:
    error = jax.lax.stop_gradient(error)
    return ErrorBar(value, error, jnp.full_like(error, jnp.inf))


class _Bands(NamedTuple):
    """The diagonal of a tridiagonal matrix, and `p_i = b_(i-1) c_(i-1)`, with `p_0 = 0`.

    The same class holds derivatives with respect to both.
    """

    diagonal: Inexact[Array, " n"]
    products: Inexact[Array, " n"]


class _Scaled(NamedTuple):
    """Bands whose rows are divided by `units` (powers of two), and A's asymmetry."""

    bands: _Bands
    units: Float[Array, " n"]
    asymmetry: Float[Array, ""]


def _by_bands(state: SpectralState, hermitian: bool) -> Outcome:
    """Log-determinant or trace of the inverse for a tridiagonal operator.

    Elimination rounds as if the entries had relative errors of a few eps. In long chains
    with equal entries all these errors are equal, and they add up. So we add up moduli.
    """
    space = state.space
    bands, units, asymmetry = _read_bands(state.operator, space, hermitian)
    fixed, eps = jax.lax.stop_gradient(bands), jnp.finfo(units.dtype).eps
    factors, positive, slopes = _factorised(fixed)
    # This is the error in the determinant if errors in entries are independent.
    change = eps * jnp.linalg.norm(_effects(slopes, fixed))
    wrong = jnp.any(factors == 0) | (change > 1 / HIDDEN)
    stats = dict[str, Any](num_matvecs=3)
    if state.function.evaluates(RECIPROCAL):
        weights = 1 / units.astype(fixed.diagonal.dtype)
        quantity, added = (
            jtu.Partial(_trace_inverse, weights),
            jnp.zeros_like(asymmetry),
        )
        summands, slopes = weights * slopes.diagonal, _gradient(quantity, fixed)
    else:
        quantity, summands = jtu.Partial(_log_det), jnp.log(jnp.abs(factors))
        added = math.log(2) * jnp.sum(jnp.round(jnp.log2(units)))
        if hermitian:
            wrong = wrong | ~positive
        else:
            stats["sign"] = jnp.prod(factors / jnp.abs(factors).astype(factors.dtype))
    value = quantity(bands)
    sizes = space.rounding * jnp.sum(_effects(slopes, fixed))
    sizes = sizes + jnp.sum(jnp.abs(summands))
    error = eps * (_ROUNDOFF * sizes + jnp.abs(added))
    result = RESULTS.where(wrong, RESULTS.outside_domain, RESULTS.successful)
    if hermitian:
        asymmetric = asymmetry > largest_asymmetry(space)
        result = RESULTS.where(asymmetric, RESULTS.not_hermitian, result)
    unknown = jnp.zeros(0, space.real_dtype)
    bars = [_rounded(value + added.astype(value.dtype), error)]
    bars_from = jtu.Partial(_bars_from_bands, quantity, space.rounding, fixed)
    evidence = Evidence(bands, bars_from)
    return _made(state, bars, result, stats, unknown, unknown, evidence)


def _read_bands(
    operator: lx.AbstractLinearOperator, space: Space, hermitian: bool
) -> _Scaled:
    """The bands, from three products: each row has one entry per colour."""
    rows = jnp.arange(space.size)
    block = jax.nn.one_hot(rows % 3, 3, dtype=space.compute_dtype)
    products = apply_block(operator, block)
    units = jax.lax.stop_gradient(jax.vmap(power_of_two_scale)(products))

    def entries(products):
        below, diagonal, above = (products[rows, (rows + i) % 3] for i in (-1, 0, 1))
        return jnp.where(rows == 0, 0, below), diagonal, jnp.roll(above, 1)

    below, diagonal, above = entries(products)
    difference = jnp.where(rows == 0, 0, below - above.conj())
    asymmetry = jnp.maximum(largest_entry(difference), largest_entry(diagonal.imag))
    asymmetry = asymmetry / power_of_two_scale(products)
    below, diagonal, above = entries(products / units[:, None].astype(products.dtype))
    bands = _Bands(diagonal, below * above)
    if hermitian:
        bands = jtu.tree_map(jnp.real, bands)
    return _Scaled(bands, units, asymmetry)


class _Factorised(NamedTuple):
    """A factorisation of a tridiagonal matrix.

    - `factors`: numbers whose product is the determinant.
    - `positive`: whether all pivots are positive.
    - `slopes`: the derivatives of `log det A`.
    """

    factors: Inexact[Array, " m"]
    positive: Bool[Array, ""]
    slopes: _Bands


def _factorised(bands: _Bands) -> _Factorised:
    """Eliminates from above and from below in one loop.

    A pivot may be 0, and the next one is then infinite. So we keep pivots as fractions
    whose larger part is 1. These have derivatives everywhere.
    """

    def step(last, row):
        (numerator, denominator), (diagonal, product) = last, row
        new = diagonal * numerator - product * denominator
        is_large = jnp.abs(new) > jnp.abs(numerator)
        factor = jnp.where(is_large, new, numerator)
        share = jnp.where(is_large, numerator, new) / divisor(factor)
        one = jnp.ones_like(share)
        pivot = jnp.where(is_large, one, share), jnp.where(is_large, share, one)
        return pivot, (*pivot, factor)

    diagonal, products = bands
    upwards = diagonal[::-1], jnp.roll(products[::-1], 1)
    rows = tuple(jnp.stack(x, axis=1) for x in zip(bands, upwards, strict=True))
    one = jnp.ones_like(diagonal, shape=2)
    _, pivots = scan(step, (one, jnp.zeros_like(one)), rows)
    (s, up_s), (c, up_c), (factors, _) = (x.T for x in pivots)
    factors = jnp.concatenate([factors, s[-1:]])
    positive = jnp.all(jnp.real(s * c) > 0)
    up_s, up_c = up_s[::-1], up_c[::-1]
    of_diagonal = c * up_c / (s * up_c + c * up_s - diagonal * c * up_c)
    s, c = jnp.roll(s, 1), jnp.roll(c, 1)
    of_products = -c * up_c / (s * up_s - products * c * up_c)
    return _Factorised(factors, positive, _Bands(of_diagonal, of_products))


@jax.custom_jvp
def _log_det(bands: _Bands) -> Float[Array, ""]:
    return _sum(jnp.log(jnp.abs(_factorised(bands).factors)))


@_log_det.defjvp
def _log_det_jvp(primals, tangents):
    (bands,), (change,) = primals, tangents
    pairs = zip(_factorised(bands).slopes, change, strict=True)
    return _log_det(bands), jnp.real(sum(jnp.sum(slope * x) for slope, x in pairs))


def _trace_inverse(weights: Inexact[Array, " n"], bands: _Bands) -> Inexact[Array, ""]:
    return _sum(weights * _factorised(bands).slopes.diagonal)


def _sum(x: Inexact[Array, " n"]) -> Inexact[Array, ""]:
    (high,), (low,) = exact_split(x)
    return jnp.sum(high) + jnp.sum(low)


def _gradient(fn: Callable[[_Bands], Array], bands: _Bands) -> _Bands:
    return jax.grad(lambda x: jnp.real(fn(x)))(bands)


def _effects(slopes: _Bands, bands: _Bands) -> Float[Array, " m"]:
    """How relative changes in entries change a number with these derivatives."""
    pairs = zip(slopes, bands, strict=True)
    return jnp.abs(jnp.concatenate([slope * x for slope, x in pairs]))


def _bars_from_bands(
    quantity: Callable[[_Bands], Array],
    rounding: float,
    bands: _Bands,
    change: _Bands,
) -> list[ErrorBar]:
    """The error in a slope: from errors in the entries, and from its own terms."""

    def slope(bands):
        return jax.jvp(quantity, (bands,), (change,))[1]

    effects = _effects(_gradient(slope, bands), bands)
    pairs = zip(_gradient(quantity, bands), change, strict=True)
    sizes = [_PLAIN_SUM * jnp.abs(x * y) for x, y in pairs]
    size = _ROUNDOFF * rounding * jnp.sum(effects) + jnp.sum(jnp.stack(sizes))
    return [_rounded(slope(bands), jnp.finfo(size.dtype).eps * size)]


def _made(
    state: SpectralState,
    bars: list[ErrorBar],
    result: RESULTS,
    stats: dict[str, Any],
    points: Float[Array, " n"],
    weights: Float[Array, " n"],
    evidence: Evidence,
) -> Outcome:
    """The outcome for an exact answer."""
    stats = {**stats, **exact_stats(state, [x.mean for x in bars])}
    results = domain_results([jnp.zeros(x.mean.shape, bool) for x in bars], result)
    return spectral_outcome(
        state, bars, results, stats, points, weights, evidence=evidence
    )
