"""Error bars of independent and of leave-one-out samples, and moments of samples."""

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

# The share of the noise of a squared skewness that is subtracted, by the coverage of intervals.
_NOISE_SHARE = 0.5


class Moments(NamedTuple):
    """Moments of samples of a functional, taken a block at a time."""

    mean: Inexact[Array, "*g"]  # of samples / unit
    deviations: Float[Array, "*g"]  # summed squares of these
    energy: Float[Array, "*g"]  # the sum over |A w_j / unit|^2: what equal samples hide
    unit: Float[Array, ""]  # a power of two of the size of the first


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
    """The moments of `count` samples and c more.

    Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", Am. Stat. 37
    (1983), doi:10.1080/00031305.1983.10483115.
    """
    c = probes.shape[1]
    unit = jnp.where(moments.unit == 0, power_of_two_scale(products), moments.unit)
    products = products / unit.astype(products.dtype)
    samples = functional.samples(probes, products)
    energy = functional.sum(jnp.sum(jnp.abs(products) ** 2, axis=1))
    number = jnp.asarray(count).astype(unit.dtype)
    mean = jnp.mean(samples, axis=-1)
    change, share = mean - moments.mean, c / (number + c)
    spread = jnp.sum(jnp.abs(samples - mean[..., None]) ** 2, axis=-1)
    return Moments(
        moments.mean + change * share.astype(mean.dtype),
        moments.deviations + spread + jnp.abs(change) ** 2 * number * share,
        moments.energy + energy,
        unit,
    )


def off_diagonal_size(
    probes: Inexact[Array, "n g"],
    products: Inexact[Array, "n g"],
    active: Bool[Array, " g"] | None = None,
) -> Float[Array, ""]:
    """An estimate of `|B - diag B|_F`, of the products `B w_j` with signs; 0 for one.

    Signs see the diagonal in each row alike: `conj(w_j) (B w_j)` varies by what is off it.
    """
    rows = probes.T.conj() * products.T
    unit = power_of_two_scale(rows)
    rows = leading(rows / unit.astype(rows.dtype), active)
    g = rows.shape[0]
    if active is not None:
        g = jnp.sum(active).astype(unit.dtype)
    mean = jnp.sum(rows, axis=0) / jnp.asarray(g).astype(rows.dtype)
    deviations = leading(rows - mean[None], active)
    return unit * jnp.sqrt(jnp.sum(squares(deviations)) / jnp.maximum(g - 1, 1))


def skewness_term(gamma_squared: ArrayLike, m: ArrayLike) -> Float[Array, "*g"]:
    """Part of `1 / nu` that is due to skewness gamma.

    The coverage of a two-sided t interval has the expansion (Hall, "The Bootstrap and
    Edgeworth Expansion" (1992), doi:10.1007/978-1-4612-4384-7, section 2.6)

        2 Phi(x) - 1 - 2 x phi(x) [(x^4 + 2 x^2 - 3) gamma^2 / 18 + ...] / m,

    that of a t distribution `- 2 x phi(x) (x^2 + 1) / (4 nu)`. They agree at x = 1.96 for
    `1 / nu = 0.9 gamma^2 / m`. For few samples `m + 2` in place of m is chosen by the
    coverage in the table of docs/error-bars-derived.md.
    """
    return jnp.asarray(0.9 * gamma_squared / (m + 2))


def power_sums(deviations: Inexact[Array, "*g m"]) -> tuple[list[Array], list[Array]]:
    """Sums of squares and of cubes, each of real parts and, if any, imaginary parts."""
    parts = [jnp.real(deviations)]
    if jnp.iscomplexobj(deviations):
        parts.append(jnp.imag(deviations))
    sums = [[jnp.sum(x**p, axis=-1) for x in parts] for p in (2, 3)]
    return sums[0], sums[1]


def squared_skewness(square_sums, cube_sums, m: ArrayLike) -> Float[Array, "*g"]:
    """Squared sample skewness of real or imaginary parts, the larger; of rounding none."""
    eps = float(jnp.finfo(square_sums[0].dtype).eps)
    pairs = zip(cube_sums, square_sums, strict=True)
    ratios = [_cubed_ratio(cube, square + m * eps**2) for cube, square in pairs]
    return jnp.asarray(m * ft.reduce(jnp.maximum, ratios))


def gram_squared_skewness(
    gram: Inexact[Array, "g g"], active: Bool[Array, " m"] | None = None
) -> Float[Array, ""]:
    """Squared skewness of samples `w^* A w` by the Gram matrix `w_i^* A w_j` of probes."""
    g = len(gram)
    # The largest squared skewness, as (tr A^3)^2 <= (tr A^2)^3; and the variance of the mean
    # of M_ij M_jl M_li, over (tr A^2)^3, times `triples`. Complex probes have half of both.
    largest, noise = (4.0, 3.0) if jnp.iscomplexobj(gram) else (8.0, 6.0)
    if g < 3:
        return jnp.full((), largest, jnp.finfo(gram.dtype).dtype)
    if active is not None:
        # Probes that are not active have zeros in the Gram matrix.
        g = jnp.minimum(jnp.sum(active), g).astype(jnp.finfo(gram.dtype).dtype)
    triples = g * (g - 1) * (g - 2)
    gram = jnp.where(jnp.eye(len(gram), dtype=bool), 0, gram)

    def from_hermitian(hermitian):
        squared = matmul(hermitian, hermitian)
        trace_2 = jnp.sum(jnp.abs(hermitian) ** 2) / (g * (g - 1))
        trace_3 = jnp.sum(jnp.real(squared * hermitian.conj())) / triples
        # The square of an estimate exceeds that of its mean by its variance. A share of
        # it is subtracted: from five probes rather a wide interval than a short one.
        share = _cubed_ratio(trace_3, trace_2) - _NOISE_SHARE * noise / triples
        return largest * jnp.clip(share, 0, 1)

    adjoint = gram.conj().T
    skewness = from_hermitian((gram + adjoint) / 2)
    if jnp.iscomplexobj(gram):
        skewness = jnp.maximum(skewness, from_hermitian((gram - adjoint) / 2j))
    return skewness


def _cubed_ratio(x: Float[Array, "*g"], y: Float[Array, "*g"]) -> Float[Array, "*g"]:
    """`x^2 / y^3`, of which neither may be representable."""
    return ratio(x, y * jnp.sqrt(y)) ** 2


Active = Bool[Array, " m"] | None

# Probes that the skewness is estimated from, for n x 16 x 16 operations at most; chosen.
GRAM_PROBES = 16
# Rounding in units of eps and of what is added up, measured on estimates that had converged.
_ROUNDING = 4
# Share of the variance that ties hide below which a sample variance is a tie's; chosen. Less
# where what is off the diagonal was measured, as two samples are near by chance.
_TIE_SHARE, _TIE_SHARE_OFF_DIAGONAL = 0.01, 1e-4
# In 1/nu of leave-one-out samples, the weights of 1/(m-1) and of J, by the coverage of 95 %
# intervals.
_NORMAL_WEIGHT, _UNEVEN_WEIGHT = 0.5, 0.7


class ErrorBar(NamedTuple):
    """The mean of samples, its RMS error, and the latter's degrees of freedom."""

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
    r"""The error bar of the mean of independent samples `w_j^* A w_j`.

    - `norms`, `gram`: `|A w_j|` and `w_i^* A w_j` for the first probes.
    - `exact`: what else is added up to the value, for the error of rounding.
    - `dimension`: n, for the remedy for ties.
    - `active`: which samples there are, at least two; all by default. The error of a single
        one is infinite.

    *Variance.* `V = s^2 / m`, with `s^2` the sample variance, but for ties: m signs can
    agree by chance, with probability `2^(1 - m)`. Then `s^2` is the largest variance that
    samples of signs can have, `2 |A|_F^2`, times that probability; `|A|_F^2` is the mean of
    `|A w_j|^2`. Signs don't see a multiple of the identity: given n, it is that of the
    traceless part, the mean of `(|A w_j|^2 - |w_j^* A w_j|^2 / n) n / (n - 2)`, unbiased if
    that has a diagonal of 0. Given `off_diagonal`, an estimate of the norm of what is off
    the diagonal, it is of that, unless that is rounding: where A is almost diagonal
    `2 |A|_F^2` is far too much.

    *Degrees of freedom.* `1/nu = 1/(m-1) + 0.9 gamma^2 / (m+2)`: one less than m for normal
    samples, and fewer the larger their skewness gamma (see `skewness_term`). Few samples
    don't show it; their products do. Its square for `w^* A w` and a Hermitian A is
    `8 (tr A^3)^2 / (tr A^2)^3`, and `M_ij M_jl M_li`, of three probes with the Gram matrix
    M, is an unbiased estimate of `tr A^3`. With `may_miss` see `_of_few_probes`.
    """
    m, l = len(samples), len(norms)  # noqa: E741
    if active is not None:
        samples, norms = leading(samples, active), leading(norms, active[:l])
        m, l = (jnp.sum(x).astype(norms.dtype) for x in (active, active[:l]))  # noqa: E741
    mean = jnp.sum(samples) / jnp.asarray(m).astype(samples.dtype)
    if samples.shape[0] == 1:
        return _unknown(mean)
    magnitude = jnp.sum(jnp.abs(samples)) / m + jnp.sum(norms) / l
    # Divided by it, squares neither over- nor underflow.
    unit = divisor(magnitude)
    deviations = leading((samples - mean) / unit.astype(samples.dtype), active)
    square_sums, cube_sums = power_sums(deviations)
    energy = jnp.sum((norms / unit) ** 2) / l
    if dimension is not None and dimension > 2:
        along = jnp.sum((jnp.abs(samples[: len(norms)]) / unit) ** 2) / l
        energy = jnp.maximum(dimension * energy - along, 0) / (dimension - 2)
    share: ArrayLike = _TIE_SHARE
    if off_diagonal is not None:
        seen, eps = off_diagonal / unit, jnp.finfo(norms.dtype).eps
        varies = seen > 100 * eps * jnp.sqrt(energy)
        energy = jnp.where(varies, seen**2, energy)
        share = jnp.where(varies, _TIE_SHARE_OFF_DIAGONAL, _TIE_SHARE)
    variance = _untie(sum(square_sums) / (m - 1), 2 * energy, m, share) / m
    skewness = jnp.maximum(
        squared_skewness(square_sums, cube_sums, m),
        gram_squared_skewness(gram / unit.astype(gram.dtype), active),
    )
    inverse_freedom = 1 / (m - 1) + skewness_term(skewness, m)
    if exact is not None:
        magnitude = magnitude + jnp.sum(jnp.abs(exact))
    bar = _error_bar(mean, unit, variance, inverse_freedom, magnitude)
    return _of_few_probes(bar, m) if may_miss else bar


def _of_few_probes(bar: ErrorBar, m: ArrayLike) -> ErrorBar:
    """The error bar with at most `exp((m - 3) / 6)` degrees of freedom, or 1.

    A single large eigenvalue may be seen by one probe in several. The chance that none of m
    probes sees it falls exponentially in m, and neither samples nor products show it then.
    The rate was chosen by the coverage for spectra with one or two large eigenvalues.
    """
    most = jnp.maximum(jnp.exp((jnp.asarray(m) - 3) / 6), 1)
    freedom = bar.degrees_of_freedom
    return bar._replace(
        degrees_of_freedom=jnp.minimum(freedom, most.astype(freedom.dtype))
    )


def sum_of_independent(*bars: ErrorBar) -> ErrorBar:
    """The error bar of a sum of independent estimates, by Satterthwaite's rule."""
    means, errors, freedoms = (jnp.stack(x) for x in zip(*bars, strict=True))
    unit = divisor(jnp.max(errors))
    variances = (errors / unit) ** 2
    variance = jnp.sum(variances)
    known = jnp.where(freedoms > 0, freedoms, 1)  # 0 for what counts for nothing
    freedom = ratio(variance**2, jnp.sum(variances**2 / known))
    freedom = jnp.where(variance == 0, jnp.max(freedoms), freedom)
    return ErrorBar(jnp.sum(means), unit * jnp.sqrt(variance), freedom)


def joint_bar(bars: list[ErrorBar]) -> ErrorBar:
    """The error bar that a tolerance of several values is for: of their moduli, as some may
    be complex; of a single one its own."""
    if len(bars) > 1:
        means, errors, freedoms = zip(*bars, strict=True)
        return ErrorBar(*map(jnp.stack, (list(map(jnp.abs, means)), errors, freedoms)))
    (bar,) = bars
    freedom = jnp.asarray(bar.degrees_of_freedom, bar.standard_error.dtype)
    return bar._replace(degrees_of_freedom=freedom)


def gram_of(probes: Inexact[Array, "n _"], products: Inexact[Array, "n _"]) -> Array:
    """The Gram matrix `w_i^* A w_j` of the first `GRAM_PROBES` probes."""
    return inner(probes[:, :GRAM_PROBES], products[:, :GRAM_PROBES])


def leave_one_out_bar(
    paired: PairedSamples, active: Active = None, *, may_miss: bool = False
) -> ErrorBar:
    r"""The error bar of the mean of leave-one-out samples.

    The sample variance of `t_i`, which share probes, understates the error of their mean up
    to tenfold. `t_ij` is sample i with probe j left out of everything; the mean over the
    partners j that are given stands for that over all.

    *Derivation.* Let t be the truth. `E[t_i | all but i] = t`, and `t_ij` does not depend
    on probe j. So `t_j - t` has mean 0 against `t_ij - t`, `t_i - t` against `t_ji - t`,
    and

        E[(t_i - t_ij)(t_j - t_ji)] = cov(t_i, t_j) + E[(t_ij - t)(t_ji - t)] .

    For independent probes the last term is 0: given all but i and j, `t_ij` depends on
    probe i alone, `t_ji` on probe j alone, and both have mean t. So the products on the
    left estimate the covariances c without bias. With the sample variance `s^2`, of mean
    `var t_i - c`, an unbiased estimate of the variance `(var t_i - c) / m + c` of the mean
    is

        V = s^2 / m + 1 / (m (m-1)) sum_{i != j} (t_i - t_ij)(t_j - t_ji) .

    *Orthogonal probes.* Given all but i and j, orthonormal `u_i`, `u_j` are a uniform pair
    in the complement, of dimension `N = paired.dimension`. The quadratic forms of a full
    orthonormal basis add up to a constant, so those of a pair have correlation
    `-1 / (N - 1)`. The last term is `-var(t_ij) / (N - 1)` instead of 0, and
    `var(t_ij) / (N - 1)` is added to V. About their mean, in place of t, the `t_ij` vary
    less, by about V; adding that back gives the factor `(N - 1) / (N - 2)`.

    The second term is noisy where it is small: V is kept at half of `s^2 / m` or above.

    *Degrees of freedom.* `1/nu = 0.5/(m-1) + 0.7 J + 0.9 gamma^2 / (m+2)`. By
    Satterthwaite's rule `nu = 2 V^2 / var V`. V is the sum of what each probe contributes,
    `h_i`, and those that differ tell of its variance: `J = (sum_i h_i^2 / V^2 - 1/m) / 2`.
    For normal samples `J = 1/m`; where few probes make up V, J is larger. Weights are
    chosen, not derived. With `may_miss` see `_of_few_probes`.
    """
    t_i, t_j, t_ij, t_ji, is_pair, magnitude, dimension = paired
    room = t_i.shape[-1]
    m = room if active is None else jnp.sum(active).astype(magnitude.dtype)
    is_active = jnp.ones(room, bool) if active is None else active
    mean = jnp.sum(jnp.where(is_active, t_i, 0), axis=-1)
    mean = mean / jnp.asarray(m).astype(t_i.dtype)
    if room == 1:
        return _unknown(mean)
    unit = divisor(jnp.max(magnitude))

    def scaled(x, mask):
        return jnp.where(mask, x / unit.astype(x.dtype), 0)

    deviations = scaled(t_i - mean[..., None], is_active)
    first, second = scaled(t_i[..., None] - t_ij, is_pair), scaled(t_j - t_ji, is_pair)
    covariances = jnp.sum(jnp.real(first * second.conj()), axis=-1)
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
    uneven = ratio(jnp.sum(contributions**2, axis=-1), variance**2) - 1 / m
    uneven = jnp.clip(uneven, 0, 1) / 2
    skewness = squared_skewness(square_sums, cube_sums, m)
    inverse_freedom = _NORMAL_WEIGHT / (m - 1) + _UNEVEN_WEIGHT * uneven
    inverse_freedom = inverse_freedom + skewness_term(skewness, m)
    bar = _error_bar(mean, unit, variance, inverse_freedom, magnitude)
    return _of_few_probes(bar, m) if may_miss else bar


def moments_bar(moments: Moments, m: int | Int[Array, ""], rows: ArrayLike) -> ErrorBar:
    """Error bars of the means of m independent samples each, elementwise, by their moments.

    `V = s^2 / m` and `nu = m - 1`. Signs may agree by chance (see `independent_samples`):
    the largest variance of a sample of row r is `sum_s |A_rs|^2 - |A_rr|^2`. For a sum over
    several `rows` it is that of the trace of their part of A.
    """
    mean, square_sum, energy, unit = moments
    number = jnp.asarray(m).astype(square_sum.dtype)
    freedom = jnp.maximum(number - 1, 1)
    energies, along = energy / number, squares(mean)
    rows = jnp.asarray(rows, number.dtype)
    traceless = jnp.maximum(rows * energies - along, 0) / jnp.maximum(rows - 2, 1)
    of_sum = 2 * jnp.where(rows > 2, traceless, energies)
    largest = jnp.where(rows > 1, of_sum, jnp.maximum(energies - along, 0))
    variance = _untie(square_sum / freedom, largest, number) / number
    size, mean = jnp.sqrt(energy / number) * unit, mean * unit.astype(mean.dtype)
    inverse_freedom = jnp.broadcast_to(1 / freedom, size.shape)
    bar = _error_bar(mean, unit, variance, inverse_freedom, size)
    error = jnp.where(number > 1, bar.standard_error, jnp.inf)
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
    """The error bar of a weighted sum of samples of one mean.

    `V = s^2 sum_i weight_i^2 + shared`, the latter from covariances. Weights add up to 1;
    what has weight 0 is no sample. Samples that agree by chance have at most twice
    `half_variance`.
    """
    real = weights.dtype
    m = jnp.sum(weights != 0).astype(real)
    value = jnp.sum(jnp.where(weights != 0, samples * weights.astype(samples.dtype), 0))
    deviations = jnp.where(weights != 0, samples - value, 0)
    variance = _untie(jnp.sum(squares(deviations)) / (m - 1), 2 * half_variance, m)
    variance = variance * jnp.sum(weights**2) + jnp.asarray(shared).astype(real)
    inverse_freedom, unit = 1 / jnp.asarray(freedom).astype(real), jnp.ones((), real)
    return _error_bar(value, unit, variance, inverse_freedom, magnitude)


def _untie(variance, largest, m, share: ArrayLike = _TIE_SHARE) -> Array:
    """Sample variance of m samples; where they agree, `2^(1 - m)` of the largest."""
    tied = jnp.exp2(1.0 - m) * largest
    return jnp.where(variance < share * tied, tied, variance)


def _error_bar(mean, unit, variance, inverse_freedom, magnitude) -> ErrorBar:
    """Error bar by the variance of `mean / unit` and by `1 / nu`, at most 1."""
    # The root of an estimated variance is too small on average, by 1 - 1 / (4 nu).
    inverse_freedom = jnp.minimum(inverse_freedom, 1)
    error = unit * jnp.sqrt(variance) * (1 + inverse_freedom / 4)
    rounding = _ROUNDING * jnp.finfo(error.dtype).eps * magnitude
    return ErrorBar(mean, jnp.maximum(error, rounding), 1 / inverse_freedom)


def exact_bar(value: Inexact[Array, "*g"], magnitude: Float[Array, "*g"]) -> ErrorBar:
    """The error bar of a value that is exact but for rounding."""
    size = jax.lax.stop_gradient(jnp.abs(magnitude))
    error = _ROUNDING * jnp.finfo(size.dtype).eps * size
    return ErrorBar(value, error, jnp.full_like(error, jnp.inf))


def _unknown(mean: Inexact[Array, "*g"]) -> ErrorBar:
    """Error bar of a single sample."""
    real = jnp.finfo(mean.dtype).dtype
    return ErrorBar(mean, jnp.full((), jnp.inf, real), jnp.zeros((), real))
