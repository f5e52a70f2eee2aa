"""Exact sums over eigenvalues for diagonal, triangular and tridiagonal operators.

A tridiagonal matrix with diagonal a, and b and c above and below it, has leading
determinants `f_i = a_i f_(i-1) - b_(i-1) c_(i-1) f_(i-2)` (Golub and Van Loan, "Matrix
Computations" (2013), section 8.4.2). `tr A^-1` is `d log det(A + s I) / ds` at s = 0.
"""

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
from .._linalg.dense import column_norms, divisor, largest_entry, power_of_two_scale
from .._operators.entries import known_diagonal
from .._operators.space import Space, apply_block, is_known
from .._results import RESULTS
from .._rule import Evidence, Outcome
from .base import domain_results, exact_stats, spectral_outcome
from .function import HIDDEN, LOG, RECIPROCAL, largest_asymmetry
from .state import SpectralState

Method = Callable[[SpectralState], Outcome]

_TRIANGULAR = lx.is_lower_triangular, lx.is_upper_triangular
STRUCTURES = lx.is_diagonal, lx.is_tridiagonal, *_TRIANGULAR


def by_structure(state: SpectralState, k: int | None, where: str) -> Method | None:
    """The exact method that the structure allows with at most k products, if any."""
    operator, function = state.operator, state.function
    is_basic = function.evaluates(LOG) or function.evaluates(RECIPROCAL)
    diagonal = None
    if is_known(operator, lx.is_diagonal, *(_TRIANGULAR if is_basic else ())):
        diagonal = known_diagonal(operator)
    if diagonal is not None:
        num_matvecs, method = diagonal.num_matvecs, _by_diagonal
    elif is_basic and is_known(operator, lx.is_tridiagonal):
        num_matvecs, method = 3, _by_bands
    else:
        return None
    return method if k is None or num_matvecs <= check_budget(k, where) else None


class _Bands(NamedTuple):
    """The diagonal of a tridiagonal matrix, and `b_(i-1) c_(i-1)` for each row i."""

    diagonal: Inexact[Array, " n"]
    products: Inexact[Array, " n"]


class _Scaled(NamedTuple):
    """Bands divided by `unit` (a power of two), and their largest asymmetry."""

    bands: _Bands
    unit: Float[Array, ""]
    asymmetry: Float[Array, ""]


def _by_diagonal(state: SpectralState) -> Outcome:
    """The sum over the diagonal, whose entries are the eigenvalues."""
    operator, space, function = state.operator, state.space, state.function
    diagonal = known_diagonal(operator)
    assert diagonal is not None
    entries = diagonal.read().astype(space.compute_dtype)
    points, result, stats = jnp.real(entries), RESULTS.successful, {}
    if _is_hermitian(state):
        imaginary = largest_entry(entries - points.astype(entries.dtype))
        rounding = 100 * jnp.sqrt(jnp.finfo(points.dtype).eps) * largest_entry(entries)
        result = RESULTS.where(imaginary > rounding, RESULTS.not_hermitian, result)
        function = function.in_range(points)
        values = [jnp.sum(f, axis=-1) for f in function(points)]
    else:
        if function.evaluates(LOG):
            sizes = jnp.abs(entries)
            values = [jnp.sum(jnp.log(sizes))]
            stats["sign"] = jnp.prod(entries / divisor(sizes).astype(entries.dtype))
        else:
            values = [jnp.sum(1 / entries)]
        singular = jnp.any(entries == 0)
        result = RESULTS.where(singular, RESULTS.outside_domain, result)
        points = jnp.full_like(points, jnp.inf)
    bars = [_rounded(x, jnp.zeros(x.shape, points.dtype)) for x in values]
    stats.update(num_matvecs=diagonal.num_matvecs, **function.unit)
    weights = jnp.where(jnp.isinf(points), jnp.inf, jnp.ones_like(points))
    evidence = Evidence(values, jtu.Partial(_judge_sums))
    return _made(state, bars, result, stats, points, weights, evidence)


def _rounded(value: Inexact[Array, "*s"], error: Float[Array, "*s"]) -> ErrorBar:
    return ErrorBar(value, error, jnp.full_like(error, jnp.inf))


def _judge_sums(values: list[Inexact[Array, "..."]]) -> list[ErrorBar]:
    return [_rounded(x, jnp.zeros_like(jnp.real(x))) for x in values]


def _by_bands(state: SpectralState) -> Outcome:
    """Log-determinant or trace of the inverse for a tridiagonal operator."""
    operator, space = state.operator, state.space
    bands, unit, asymmetry = _read_bands(operator, space)
    _, sign, positive = _log_det(bands)

    def log_det(bands):
        return jnp.real(_log_det(bands)[0])

    def trace_inverse(bands):
        def shifted(s):
            return _log_det(_Bands(bands.diagonal + s, bands.products))[0]

        zero = jnp.zeros_like(bands.diagonal, shape=())
        return jax.jvp(shifted, (zero,), (jnp.ones_like(zero),))[1]

    fixed = jax.lax.stop_gradient(bands)

    def gradient(fn):
        return jax.grad(lambda bands: jnp.real(fn(bands)))(fixed)

    value, slopes = log_det(bands), gradient(log_det)
    error = _band_errors(slopes, fixed, value)
    log_unit = space.size * jnp.log(unit)
    stats = dict[str, Any](num_matvecs=3)
    # Here `error` is the relative error in the determinant.
    wrong = jnp.isinf(value) | (error > 1 / HIDDEN)
    hermitian, result = _is_hermitian(state), RESULTS.successful
    if state.function.evaluates(RECIPROCAL):
        value, slopes = trace_inverse(bands), gradient(trace_inverse)
        slopes = jtu.tree_map(lambda x: x / unit.astype(x.dtype), slopes)
        value = value / unit.astype(value.dtype)
        error = _band_errors(slopes, fixed, value)
    else:
        eps = jnp.finfo(space.real_dtype).eps
        value, error = value + log_unit, error + eps * jnp.abs(log_unit)
        if hermitian:
            wrong = wrong | ~positive
        else:
            stats["sign"] = sign
    result = RESULTS.where(wrong, RESULTS.outside_domain, result)
    if hermitian:
        asymmetric = asymmetry > largest_asymmetry(space)
        result = RESULTS.where(asymmetric, RESULTS.not_hermitian, result)
    unknown = jnp.full(space.size, jnp.inf, space.real_dtype)
    bars = [_rounded(value, error)]
    evidence = Evidence((bands, value), jtu.Partial(_judge_bands, slopes))
    return _made(state, bars, result, stats, unknown, unknown, evidence)


def _band_errors(slopes: _Bands, bands: _Bands, value: Array) -> Float[Array, ""]:
    """The error from rounding the entries."""
    terms = jnp.stack([x * y for x, y in zip(slopes, bands, strict=True)])
    size = column_norms(terms.reshape(-1, 1))[0] + jnp.abs(value)
    return jnp.finfo(size.dtype).eps * size


def _judge_bands(slopes: _Bands, products: tuple[_Bands, Array]) -> list[ErrorBar]:
    # We count rounding twice, in the entries and in their inverse.
    bands, value = products
    return [_rounded(value, 2 * _band_errors(slopes, bands, value))]


def _is_hermitian(state: SpectralState) -> bool:
    return state.space.is_hermitian or is_known(state.operator, lx.is_diagonal)


def _read_bands(operator: lx.AbstractLinearOperator, space: Space) -> _Scaled:
    """The bands, from three products: each row has one entry per colour."""
    rows = jnp.arange(space.size)
    block = jax.nn.one_hot(rows % 3, 3, dtype=space.compute_dtype)
    products = apply_block(operator, block)
    unit = jax.lax.stop_gradient(power_of_two_scale(products))
    products = products / unit.astype(products.dtype)
    below, diagonal, above = (products[rows, (rows + i) % 3] for i in (-1, 0, 1))
    above = jnp.roll(above, 1)
    difference = largest_entry(jnp.where(rows == 0, 0, below - above.conj()))
    imaginary = largest_entry(jnp.imag(diagonal))
    bands = _Bands(diagonal, jnp.where(rows == 0, 0, below * above))
    return _Scaled(bands, unit, jnp.maximum(difference, imaginary))


def _log_det(bands: _Bands) -> tuple[Array, Array, Bool[Array, ""]]:
    """Log-determinant, sign, and whether all leading determinants are positive."""

    def step(carry, row):
        before, last, exponent, positive = carry
        diagonal, product = row
        new = diagonal * last - product * before
        positive = positive & (jnp.real(new * last.conj()) > 0)
        pair = jax.lax.stop_gradient(jnp.stack([last, new]))
        scale = power_of_two_scale(pair)
        last, new = last / scale.astype(last.dtype), new / scale.astype(last.dtype)
        exponent = exponent + jnp.round(jnp.log2(scale))
        return (last, new, exponent, positive), None

    dtype = bands.diagonal.dtype
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    start = zero, one, jnp.zeros_like(one.real), jnp.asarray(True)
    (_, last, exponent, positive), _ = jax.lax.scan(step, start, bands)
    size, log = jnp.abs(last), exponent * math.log(2)
    sign = last / divisor(size).astype(dtype)
    # A complex determinant needs a complex logarithm for its derivative.
    log_last = jnp.log(last) if jnp.iscomplexobj(last) else jnp.log(size)
    return log_last + log.astype(dtype), jax.lax.stop_gradient(sign), positive


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
    stats = {**stats, **exact_stats(state, [x.mean for x in bars], points)}
    results = domain_results([jnp.zeros(x.mean.shape, bool) for x in bars], result)
    return spectral_outcome(
        state, bars, results, stats, points, weights, evidence=evidence
    )
