"""Error bars for means of independent or leave-one-out samples, and running moments."""

import functools as ft
import operator as op
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int

from ._functional import Functional
from ._linalg.dense import (
    divisor,
    inner,
    leading,
    matmul,
    power_of_two_scale,
    ratio,
    squares,
)
from ._linalg.leave_one_out import PairedSamples

# From a squared skewness we subtract this share of its variance. We tuned it for coverage.
_SUBTRACTED_NOISE = 0.5


class Moments(NamedTuple):
    """Running moments of a functional's samples, updated one block at a time."""

    mean: Inexact[Array, "*g"]  # sample mean / unit
    deviations: Float[Array, "*g"]  # sum of |sample / unit - mean|^2
    energy: Float[Array, "*g"]  # sum of |A w_j / unit|^2, for equal samples
    unit: Float[Array, ""]  # a power of two near the largest entry in the first block


def empty_moments(functional: Functional, n: int, dtype) -> Moments:
    zero = functional.sum(jnp.zeros(n, dtype))
    return Moments(zero, zero.real, zero.real, jnp.zeros((), zero.real.dtype))


def add_samples(
    moments: Moments,
    functional: Functional,
    probes: Inexact[Array, "n c"],
    products: Inexact[Array, "n c"],
    count: ArrayLike,
) -> Moments:
    """Updates moments from `count` samples with c more samples.

    Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", Am. Stat. 37
    (1983), doi:10.1080/00031305.1983.10483115.
    """
    c = probes.shape[1]
    unit = jnp.where(moments.unit == 0, power_of_two_scale(products), moments.unit)
    products = products / unit.astype(products.dtype)
    samples = functional.samples(probes, products)
    energy = functional.sum(jnp.sum(jnp.abs(products) ** 2, axis=1))
    old_count = jnp.asarray(count).astype(unit.dtype)
    mean = jnp.mean(samples, axis=-1)
    mean_shift, new_share = mean - moments.mean, c / (old_count + c)
    spread = jnp.sum(jnp.abs(samples - mean[..., None]) ** 2, axis=-1)
    return Moments(
        moments.mean + mean_shift * new_share.astype(mean.dtype),
        moments.deviations + spread + jnp.abs(mean_shift) ** 2 * old_count * new_share,
        moments.energy + energy,
        unit,
    )


def skewness_term(gamma_squared: ArrayLike, m: ArrayLike) -> Float[Array, "*g"]:
    """The part of `1 / nu` that skewness gamma adds, with nu the degrees of freedom.

    The coverage of a two-sided t interval has the expansion (Hall, "The Bootstrap and
    Edgeworth Expansion" (1992), doi:10.1007/978-1-4612-4384-7, section 2.6)

        2 Phi(x) - 1 - 2 x phi(x) [(x^4 + 2 x^2 - 3) gamma^2 / 18 + ...] / m,

    and a t distribution has `- 2 x phi(x) (x^2 + 1) / (4 nu)` as its last term. Both agree
    at x = 1.96 if `1 / nu = 0.9 gamma^2 / m`. We replace m by `m + 2`, which improves the
    coverage for few samples: docs/error-bars-derived.md has the table.
    """
    return jnp.asarray(0.9 * gamma_squared / (m + 2))


def power_sums(deviations: Inexact[Array, "*g m"]) -> tuple[list[Array], list[Array]]:
    """Sums of squares and sums of cubes, each for the real and any imaginary part."""
    parts = [jnp.real(deviations)]
    if jnp.iscomplexobj(deviations):
        parts.append(jnp.imag(deviations))
    sums = [[jnp.sum(x**p, axis=-1) for x in parts] for p in (2, 3)]
    return sums[0], sums[1]


def squared_skewness(square_sums, cube_sums, m: ArrayLike) -> Float[Array, "*g"]:
    """The larger squared skewness of the parts. `m eps^2` hides deviations from rounding."""
    eps = float(jnp.finfo(square_sums[0].dtype).eps)
    pairs = zip(cube_sums, square_sums, strict=True)
    ratios = [_cubed_ratio(cube, square + m * eps**2) for cube, square in pairs]
    return jnp.asarray(m * ft.reduce(jnp.maximum, ratios))


def gram_squared_skewness(
    gram: Inexact[Array, "g g"], active: Bool[Array, " m"] | None = None
) -> Float[Array, ""]:
    """Estimates the squared skewness of `w^* A w` from the Gram matrix `w_i^* A w_j`."""
    g = len(gram)
    # The squared skewness is at most 8: (tr A^3)^2 <= (tr A^2)^3. If tr A^3 = 0, the mean
    # over triples has variance 6 (tr A^2)^3 / triples. Complex probes halve both numbers.
    bound, noise = (4.0, 3.0) if jnp.iscomplexobj(gram) else (8.0, 6.0)
    if g < 3:
        return jnp.full((), bound, jnp.finfo(gram.dtype).dtype)
    if active is not None:
        # Inactive probes have zeros in the Gram matrix, so we only correct the count.
        g = jnp.minimum(jnp.sum(active), g).astype(jnp.finfo(gram.dtype).dtype)
    triples = g * (g - 1) * (g - 2)
    gram = jnp.where(jnp.eye(len(gram), dtype=bool), 0, gram)

    def hermitian_skewness(hermitian):
        squared = matmul(hermitian, hermitian)
        trace_2 = jnp.sum(jnp.abs(hermitian) ** 2) / (g * (g - 1))
        trace_3 = jnp.sum(jnp.real(squared * hermitian.conj())) / triples
        # On average, a squared estimate exceeds the squared mean by the estimate's variance.
        # We subtract only a share, because all of it would make intervals too short.
        fraction = _cubed_ratio(trace_3, trace_2) - _SUBTRACTED_NOISE * noise / triples
        return bound * jnp.clip(fraction, 0, 1)

    adjoint = gram.conj().T
    skewness = hermitian_skewness((gram + adjoint) / 2)
    if jnp.iscomplexobj(gram):
        skewness = jnp.maximum(skewness, hermitian_skewness((gram - adjoint) / 2j))
    return skewness


def _cubed_ratio(x: Float[Array, "*g"], y: Float[Array, "*g"]) -> Float[Array, "*g"]:
    """`x^2 / y^3`, without overflow or underflow in `x^2` and `y^3`."""
    return ratio(x, y * jnp.sqrt(y)) ** 2


Active = Bool[Array, " m"] | None

# We estimate the skewness from at most 16 probes, with n x 16 x 16 operations.
GRAM_PROBES = 16
# Rounding error, in units of eps times a value's terms. We measured it after convergence.
_ROUNDING = 4
# Samples are tied if their variance is below this share of a tie's variance. The share is
# smaller if we know the off-diagonal norm, because two samples can be close by chance.
_TIE_SHARE, _TIE_SHARE_OFF_DIAGONAL = 0.01, 1e-4
# Weights on 1/(m-1) and on J in `leave_one_out_bar`, tuned for coverage at 95 %.
_NORMAL_WEIGHT, _UNEVENNESS_WEIGHT = 0.5, 0.7


class ErrorBar(NamedTuple):
    """A mean of samples, its standard error, and the error's degrees of freedom."""

    mean: Inexact[Array, "*g"]
    standard_error: Float[Array, "*g"]
    degrees_of_freedom: Float[Array, "*g"]


def independent_samples(
    samples: Inexact[Array, " m"],
    norms: Float[Array, " l"],
    gram: Inexact[Array, "g g"],
    exact: Inexact[Array, " e"] | None = None,
    *,
    dimension: int | None = None,
    active: Active = None,
    off_diagonal: Float[Array, ""] | None = None,
    may_miss: bool = False,
) -> ErrorBar:
    r"""The error bar for a mean of independent samples `w_j^* A w_j`.

    - `norms`, `gram`: `|A w_j|` and `w_i^* A w_j` for the first probes.
    - `exact`: terms that the caller adds to the mean, for the rounding error of the sum.
    - `dimension`: n, so that multiples of the identity don't enlarge a tie's variance.
    - `active`: mask that selects at least two samples; by default all.
    - `off_diagonal`: an estimate of A's off-diagonal norm, for ties.
    - `may_miss`: whether few probes can miss a large eigenvalue (see `_cap_freedom`).

    *Variance.* `V = s^2 / m`, with the sample variance `s^2`. Samples are *tied* if they are
    equal by chance, with probability `2^(1 - m)` if signs give two equally likely values. We
    then replace `s^2` by this probability times `2 |A|_F^2`, the largest variance that signs
    can give. The mean of `|A w_j|^2` estimates `|A|_F^2`. A multiple of the identity only
    adds a constant to samples. So with n we use the traceless part's squared norm, the mean
    of `(|A w_j|^2 - |w_j^* A w_j|^2 / n) n / (n - 2)`. It is unbiased if the traceless part
    has a zero diagonal. For an almost diagonal A both norms are far too large, so we use
    `off_diagonal` instead if it is given and above rounding level.

    *Degrees of freedom.* `1/nu = 1/(m-1) + 0.9 gamma^2 / (m+2)`: m - 1 for normal samples,
    fewer with skewness gamma (see `skewness_term`). Few samples hide their skewness, but
    products reveal it. Real normal probes and a symmetric A have `gamma^2 = 8 (tr A^3)^2 /
    (tr A^2)^3` (4 if complex), and `M_ij M_jl M_li` from a Gram matrix M estimates `tr A^3`.
    """
    m, count = len(samples), len(norms)
    if active is not None:
        samples, norms = leading(samples, active), leading(norms, active[:count])
        m, count = (jnp.sum(x).astype(norms.dtype) for x in (active, active[:count]))
    mean = jnp.sum(samples) / jnp.asarray(m).astype(samples.dtype)
    if samples.shape[0] == 1:
        return _unknown(mean)
    magnitude = jnp.sum(jnp.abs(samples)) / m + jnp.sum(norms) / count
    # We divide by the magnitude, so that squares neither over- nor underflow.
    unit = divisor(magnitude)
    deviations = leading((samples - mean) / unit.astype(samples.dtype), active)
    square_sums, cube_sums = power_sums(deviations)
    energy = jnp.sum((norms / unit) ** 2) / count  # estimates |A / unit|_F^2
    if dimension is not None and dimension > 2:
        mean_square = jnp.sum((jnp.abs(samples[: len(norms)]) / unit) ** 2) / count
        energy = jnp.maximum(dimension * energy - mean_square, 0) / (dimension - 2)
    tie_share: ArrayLike = _TIE_SHARE
    if off_diagonal is not None:
        scaled_norm, eps = off_diagonal / unit, jnp.finfo(norms.dtype).eps
        is_significant = scaled_norm > 100 * eps * jnp.sqrt(energy)
        energy = jnp.where(is_significant, scaled_norm**2, energy)
        tie_share = jnp.where(is_significant, _TIE_SHARE_OFF_DIAGONAL, _TIE_SHARE)
    variance = _fix_ties(sum(square_sums) / (m - 1), 2 * energy, m, tie_share) / m
    skewness = jnp.maximum(
        squared_skewness(square_sums, cube_sums, m),
        gram_squared_skewness(gram / unit.astype(gram.dtype), active),
    )
    inverse_freedom = 1 / (m - 1) + skewness_term(skewness, m)
    if exact is not None:
        magnitude = magnitude + jnp.sum(jnp.abs(exact))
    bar = _error_bar(mean, unit, variance, inverse_freedom, magnitude)
    return _cap_freedom(bar, m) if may_miss else bar


def stratified_samples(samples: Inexact[Array, "r p"]) -> ErrorBar:
    """The error bar for `sum_c mean_r x_rc` of independent samples, for p strata of r.

    `V = sum_c s_c^2 / r`, with the sample variances `s_c^2` in the strata. Degrees of
    freedom follow Welch (1947), doi:10.1093/biomet/34.1-2.28, with unbiased moments.
    """
    r = len(samples)
    mean = jnp.sum(jnp.mean(samples, axis=0))
    if r == 1:
        return _unknown(mean)
    magnitude = jnp.sum(jnp.abs(samples)) / r
    unit = divisor(magnitude)
    deviations = (samples - jnp.mean(samples, axis=0, keepdims=True)) / unit.astype(
        samples.dtype
    )
    variances = jnp.sum(squares(deviations), axis=0) / (r - 1)
    total = jnp.sum(variances)
    freedom = (r + 1) * ratio(total, jnp.linalg.norm(variances)) ** 2 - 2
    freedom = jnp.maximum(freedom, r - 1)
    return _error_bar(mean, unit, total / r, 1 / freedom, magnitude)


def _cap_freedom(bar: ErrorBar, m: ArrayLike) -> ErrorBar:
    """Caps the degrees of freedom at `max(1, exp((m - 3) / 6))`.

    A single large eigenvalue may affect only one probe in several. The probability that all
    m probes miss it falls exponentially in m, and then neither samples nor products reveal
    it. We chose the rate for the coverage with one or two large eigenvalues.
    """
    cap = jnp.maximum(jnp.exp((jnp.asarray(m) - 3) / 6), 1)
    freedom = bar.degrees_of_freedom
    return bar._replace(
        degrees_of_freedom=jnp.minimum(freedom, cap.astype(freedom.dtype))
    )


def sum_of_independent(*bars: ErrorBar) -> ErrorBar:
    """The error bar for a sum of independent estimates, by Satterthwaite's rule."""
    if len(bars) == 1:
        return bars[0]
    means, errors, freedoms = (jnp.stack(x) for x in zip(*bars, strict=True))
    unit = divisor(jnp.max(errors))
    variances = (errors / unit) ** 2
    variance = jnp.sum(variances)
    positive = jnp.where(freedoms > 0, freedoms, 1)  # 0 for an unknown error
    freedom = ratio(variance**2, jnp.sum(variances**2 / positive))
    freedom = jnp.where(variance == 0, jnp.max(freedoms), freedom)
    return ErrorBar(jnp.sum(means), unit * jnp.sqrt(variance), freedom)


def add_known_error(bar: ErrorBar, error: Float[Array, "*g"]) -> ErrorBar:
    """Adds an error of known size, such as rounding, by Satterthwaite's rule."""
    sampling, freedom = bar.standard_error, bar.degrees_of_freedom
    total = jnp.hypot(sampling, error)
    more = jnp.maximum(total / divisor(sampling), 1) ** 4 * freedom
    return ErrorBar(bar.mean, total, jnp.where(jnp.isfinite(sampling), more, freedom))


def gram_of(probes: Inexact[Array, "n _"], products: Inexact[Array, "n _"]) -> Array:
    """The Gram matrix `w_i^* A w_j` for the first `GRAM_PROBES` probes."""
    return inner(probes[:, :GRAM_PROBES], products[:, :GRAM_PROBES])


def leave_one_out_bar(
    paired: PairedSamples, active: Active = None, *, may_miss: bool = False
) -> ErrorBar:
    r"""The error bar for a mean of leave-one-out samples.

    The samples `t_i` share probes, so `s^2 / m` with their sample variance can be far too
    small. We correct it with `t_ij`, which is sample i with probe j left out of everything.
    We average over the partners j in `paired`, instead of over all j.

    *Derivation.* Let t be the truth. `E[t_i | all but i] = t`, and `t_ij` does not depend
    on probe j. So `t_j - t` is uncorrelated with `t_ij - t`, `t_i - t` is uncorrelated with
    `t_ji - t`, and

        E[(t_i - t_ij)(t_j - t_ji)] = cov(t_i, t_j) + E[(t_ij - t)(t_ji - t)] .

    For independent probes the last term is 0: given all but i and j, `t_ij` depends on
    probe i alone, `t_ji` on probe j alone, and both have mean t. So the products on the
    left estimate the covariance c without bias. The sample variance `s^2` has expectation
    `var t_i - c`, and the mean has variance `(var t_i - c) / m + c`. An unbiased estimate is

        V = s^2 / m + 1 / (m (m-1)) sum_{i != j} (t_i - t_ij)(t_j - t_ji) .

    *Orthogonal probes.* Given the others, orthonormal `u_i`, `u_j` are a uniform pair in
    their complement, of dimension `N = paired.dimension`. Quadratic forms over a full
    orthonormal basis add up to a constant, so any two have correlation `-1 / (N - 1)`. The
    last term is `-var(t_ij) / (N - 1)` instead of 0, so we add `var(t_ij) / (N - 1)` to V.
    We compute this variance about the samples' mean instead of t, which makes it smaller by
    about V; the factor `(N - 1) / (N - 2)` corrects V for this.

    A small sum over pairs has a large relative error, so V is at least `s^2 / (2 m)`.

    *Degrees of freedom.* `1/nu = 0.5/(m-1) + 0.7 J + 0.9 gamma^2 / (m+2)`. Satterthwaite's
    rule is `nu = 2 V^2 / var V`. V is a sum of contributions `h_i`, one for each probe, and
    their spread estimates var V: `J = (sum_i h_i^2 / V^2 - 1/m) / 2`. For normal samples
    `J = 1/m`; if few probes make up V, J is larger. The weights are chosen, not derived.
    """
    t_i, t_j, t_ij, t_ji, is_pair, magnitude, dimension = paired
    capacity = t_i.shape[-1]
    m = capacity if active is None else jnp.sum(active).astype(magnitude.dtype)
    is_active = jnp.ones(capacity, bool) if active is None else active
    mean = jnp.sum(jnp.where(is_active, t_i, 0), axis=-1)
    mean = mean / jnp.asarray(m).astype(t_i.dtype)
    if capacity == 1:
        return _unknown(mean)
    unit = divisor(jnp.max(magnitude))

    def scaled(x, mask):
        return jnp.where(mask, x / unit.astype(x.dtype), 0)

    deviations = scaled(t_i - mean[..., None], is_active)
    d_ij, d_ji = scaled(t_i[..., None] - t_ij, is_pair), scaled(t_j - t_ji, is_pair)
    covariances = jnp.sum(jnp.real(d_ij * d_ji.conj()), axis=-1)
    factor = 1.0
    if dimension is not None:
        pair_deviations = scaled(t_ij - mean[..., None, None], is_pair)
        correction = jnp.sum(squares(pair_deviations), axis=-1) / (dimension - 1)
        covariances = covariances + correction
        factor = (dimension - 1) / (dimension - 2)
    num_pairs = jnp.maximum(jnp.sum(is_pair), 1).astype(covariances.dtype)
    covariances = covariances * (m * (m - 1) / num_pairs).astype(covariances.dtype)
    scale = factor / (m * (m - 1))
    contributions = scale * (squares(deviations) + covariances)
    square_sums, cube_sums = power_sums(deviations)
    variance = jnp.maximum(
        jnp.sum(contributions, axis=-1), scale * ft.reduce(op.add, square_sums) / 2
    )
    unevenness = ratio(jnp.sum(contributions**2, axis=-1), variance**2) - 1 / m
    unevenness = jnp.clip(unevenness, 0, 1) / 2
    skewness = squared_skewness(square_sums, cube_sums, m)
    inverse_freedom = _NORMAL_WEIGHT / (m - 1) + _UNEVENNESS_WEIGHT * unevenness
    inverse_freedom = inverse_freedom + skewness_term(skewness, m)
    bar = _error_bar(mean, unit, variance, inverse_freedom, magnitude)
    return _cap_freedom(bar, m) if may_miss else bar


def moments_bar(moments: Moments, m: int | Int[Array, ""], rows: ArrayLike) -> ErrorBar:
    """Error bars for means of m independent samples, elementwise, from their moments.

    `V = s^2 / m` and `nu = m - 1`. For tied samples (see `independent_samples`) we need the
    largest variance that signs can give. For row r it is `sum_s |A_rs|^2 - |A_rr|^2`. For a
    sum over several `rows`, we bound the trace over these rows.
    """
    mean, square_sum, energy, unit = moments
    count = jnp.asarray(m).astype(square_sum.dtype)
    freedom = jnp.maximum(count - 1, 1)
    energies, square = energy / count, squares(mean)
    rows = jnp.asarray(rows, count.dtype)
    traceless = jnp.maximum(rows * energies - square, 0) / jnp.maximum(rows - 2, 1)
    sum_bound = 2 * jnp.where(rows > 2, traceless, energies)
    bound = jnp.where(rows > 1, sum_bound, jnp.maximum(energies - square, 0))
    variance = _fix_ties(square_sum / freedom, bound, count) / count
    magnitude, mean = jnp.sqrt(energy / count) * unit, mean * unit.astype(mean.dtype)
    inverse_freedom = jnp.broadcast_to(1 / freedom, magnitude.shape)
    bar = _error_bar(mean, unit, variance, inverse_freedom, magnitude)
    error = jnp.where(count > 1, bar.standard_error, jnp.inf)
    return bar._replace(standard_error=error)


def weighted_bar(
    samples: Inexact[Array, "*s"],
    weights: Float[Array, "*s"],
    magnitude: Float[Array, ""],
    *,
    half_variance: Float[Array, ""],
    freedom: ArrayLike,
    shared: ArrayLike = 0.0,
) -> ErrorBar:
    """The error bar for a weighted sum of samples with one expectation.

    `V = s^2 sum_i weight_i^2 + shared`, where `shared` comes from covariances between
    samples. Weights add up to 1, and samples with weight 0 don't count. If samples are tied,
    we assume that each has at most the variance `2 half_variance`.
    """
    dtype = weights.dtype
    m = jnp.sum(weights != 0).astype(dtype)
    value = jnp.sum(jnp.where(weights != 0, samples * weights.astype(samples.dtype), 0))
    deviations = jnp.where(weights != 0, samples - value, 0)
    variance = _fix_ties(jnp.sum(squares(deviations)) / (m - 1), 2 * half_variance, m)
    variance = variance * jnp.sum(weights**2) + jnp.asarray(shared).astype(dtype)
    inverse_freedom, unit = 1 / jnp.asarray(freedom).astype(dtype), jnp.ones((), dtype)
    return _error_bar(value, unit, variance, inverse_freedom, magnitude)


def _fix_ties(variance, bound, m, share: ArrayLike = _TIE_SHARE) -> Array:
    """Sample variance from m samples; if they are tied, `2^(1 - m)` times `bound`."""
    tied = jnp.exp2(1.0 - m) * bound
    return jnp.where(variance < share * tied, tied, variance)


def _error_bar(mean, unit, variance, inverse_freedom, magnitude) -> ErrorBar:
    """The error bar from the variance of `mean / unit` and from `1 / nu`, capped at 1."""
    # The root of an estimated variance is too small on average, by a factor 1 - 1 / (4 nu).
    inverse_freedom = jnp.minimum(inverse_freedom, 1)
    error = unit * jnp.sqrt(variance) * (1 + inverse_freedom / 4)
    rounding = _ROUNDING * jnp.finfo(error.dtype).eps * magnitude
    return ErrorBar(mean, jnp.maximum(error, rounding), 1 / inverse_freedom)


def exact_bar(value: Inexact[Array, "*g"], magnitude: Float[Array, "*g"]) -> ErrorBar:
    """The error bar for a value that is exact up to rounding."""
    size = jax.lax.stop_gradient(jnp.abs(magnitude))
    error = _ROUNDING * jnp.finfo(size.dtype).eps * size
    return ErrorBar(value, error, jnp.full_like(error, jnp.inf))


def _unknown(mean: Inexact[Array, "*g"]) -> ErrorBar:
    """The error bar from a single sample, which is infinite."""
    real = jnp.finfo(mean.dtype).dtype
    return ErrorBar(mean, jnp.full((), jnp.inf, real), jnp.zeros((), real))
