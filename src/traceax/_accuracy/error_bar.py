r"""Error bars: of independent samples, and of leave-one-out samples.

Pure kernels on arrays. docs/error-bars.md has the derivations.
"""

import functools as ft
import operator as op
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int

from .._linalg.pairs import PairedSamples
from .._linalg.small import divisor, leading, matmul, ratio, squares
from .._linalg.tall import inner
from .moments import Moments

# How many probes the skewness is estimated from: n x 16 x 16 operations at most.
GRAM_PROBES = 16
# Errors in units of eps and of what is added up, for results exact but for rounding.
_ROUNDING = 4


class ErrorBar(NamedTuple):
    """The mean of samples, its root mean square error, and how well that is known."""

    mean: Inexact[Array, ""]
    standard_error: Float[Array, ""]
    degrees_of_freedom: Float[Array, ""]


def independent_samples(
    samples: Inexact[Array, " m"],
    norms: Float[Array, " m"],
    gram: Inexact[Array, "g g"],
    exact: Inexact[Array, " e"] | None = None,
    *,
    dimension: int | None = None,
    active: Bool[Array, " m"] | None = None,
    off_diagonal: Float[Array, ""] | None = None,
) -> ErrorBar:
    r"""The error bar of the mean of independent samples `w_j^* A w_j`.

    `active` says which samples there are, all by default; at least two of them.

    `norms` are the `|A w_j|`, `gram` is `w_i^* A w_j` of the first probes (see
    `gram_of`), and `exact` what else is added up to the value, for the error of
    rounding. The error is unknown (NaN) for a single sample.

    *Variance.* `V = s^2 / m`, with `s^2` the sample variance, but for ties: m signs can
    agree by chance, with probability `2^(1 - m)`, so that `s^2 = 0` though the samples
    vary. Where samples agree, `s^2` is the largest variance that samples of signs can
    have, `2 |A|_F^2`, times that probability; `|A|_F^2` is the mean of `|A w_j|^2`.
    Without it few probes would report an error of 0 for a wrong answer. Signs don't see a
    multiple of the identity: given the `dimension` n, it is that of the traceless part,
    the mean of `(|A w_j|^2 - |w_j^* A w_j|^2 / n) n / (n - 2)`, unbiased if the traceless
    part has a diagonal of 0. Where A is almost diagonal that is far too much: given
    `off_diagonal`, it is the square of that, unless rows have all agreed.

    *Degrees of freedom* nu, of the Student t interval: one less than m for normal
    samples, and fewer the more skewed they are, `1/nu = 1/(m-1) + c gamma^2 / m` (see
    `_skewed`). Few samples don't show their skewness; their products do. The squared
    skewness of `w^* A w` for a Hermitian A is `8 (tr A^3)^2 / (tr A^2)^3`, and
    `M_ij M_jl M_li`, of three probes, is an unbiased estimate of `tr A^3`.
    """
    m = _number(samples, active)
    samples, norms = leading(samples, active), leading(norms, active)
    mean = jnp.sum(samples) / jnp.asarray(m).astype(samples.dtype)
    if samples.shape[0] == 1:
        return _unknown(mean)
    magnitude = jnp.sum(jnp.abs(samples) + norms) / m
    # Divided by it, squares neither over- nor underflow.
    unit = divisor(magnitude)
    deviations = leading((samples - mean) / unit.astype(samples.dtype), active)
    lengths, sizes = norms / unit, jnp.abs(samples) / unit
    seconds, thirds = _moments(deviations)
    squares, along = jnp.sum(lengths**2), jnp.sum(sizes**2)
    variance = sum(seconds) / (m - 1)
    if dimension is not None and dimension > 2:
        squares = jnp.maximum(dimension * squares - along, 0) / (dimension - 2)
    agree = jnp.asarray(0.01, variance.dtype)
    if off_diagonal is not None:
        seen, eps = off_diagonal / unit, jnp.finfo(lengths.dtype).eps
        vary = seen > 100 * eps * jnp.sqrt(squares / m)
        squares = jnp.where(vary, m * seen**2, squares)
        # Two samples whose rows vary are within a tenth by chance too often: 4 % of t_1.
        agree = jnp.where(vary, 1e-4, agree)
    tied = jnp.exp2(1.0 - m) * 2 * squares / m
    variance = jnp.where(variance < agree * tied, tied, variance) / m
    skewness = jnp.maximum(
        _squared_skewness(seconds, thirds, m),
        _gram_squared_skewness(gram / unit.astype(gram.dtype), active),
    )
    inverse = 1 / (m - 1) + _skewed(skewness, m)
    if exact is not None:
        magnitude = magnitude + jnp.sum(jnp.abs(exact))
    return _error_bar(mean, unit, variance, inverse, magnitude)


def sum_of_independent(*bars: ErrorBar) -> ErrorBar:
    """The error bar of a sum of independent estimates, by Satterthwaite's rule."""
    errors = jnp.stack([bar.standard_error for bar in bars])
    freedoms = jnp.stack([bar.degrees_of_freedom for bar in bars])
    unit = divisor(jnp.max(errors))
    variances = (errors / unit) ** 2
    variance = jnp.sum(variances)
    known = jnp.where(freedoms > 0, freedoms, 1)  # 0 for what counts for nothing
    uncertain = jnp.sum(variances**2 / known)
    freedom = jnp.where(variance == 0, jnp.max(freedoms), ratio(variance**2, uncertain))
    mean = jnp.sum(jnp.stack([bar.mean for bar in bars]))
    return ErrorBar(mean, unit * jnp.sqrt(variance), freedom)


def gram_of(
    probes: Inexact[Array, "n m"], products: Inexact[Array, "n m"]
) -> Inexact[Array, "g g"]:
    """`w_i^* A w_j` of the first probes, from which `independent_samples` sees the
    skewness."""
    return inner(probes[:, :GRAM_PROBES], products[:, :GRAM_PROBES])


def leave_one_out_bar(
    paired: PairedSamples, active: Bool[Array, " m"] | None = None
) -> ErrorBar:
    r"""The error bar of the mean of leave-one-out samples.

    Sample i, `t_i`, tests on probe i what the other probes built. The samples share
    probes, are correlated, and their sample variance understates the error of their
    mean up to tenfold. `t_ij` is sample i with probe j left out of everything. Where not
    all pairs are given the mean over these stands for the mean over all. `active` says
    which samples there are, all by default; at least two of them.

    *Derivation.* Let t be the truth. `E[t_i | all but i] = t`, and `t_ij` does not
    depend on probe j. So `t_j - t` has mean 0 against `t_ij - t`, `t_i - t` against
    `t_ji - t`, and

        E[(t_i - t_ij)(t_j - t_ji)] = cov(t_i, t_j) + E[(t_ij - t)(t_ji - t)] .

    For independent probes the last term is 0: given all but i and j, `t_ij` depends on
    probe i alone, `t_ji` on probe j alone, and both have mean t. So the products on
    the left estimate the covariances without bias. With `s^2` the sample variance,

        V = s^2 / m + 1 / (m (m-1)) sum_{i != j} (t_i - t_ij)(t_j - t_ji)

    is then an unbiased estimate of the variance of the mean: `E s^2` is the variance
    of a sample less the mean covariance c of two, and that of the mean is
    `(variance - c) / m + c`.

    *Orthogonal probes.* Given all but i and j, orthonormal `u_i`, `u_j` are a uniform
    pair in the complement, of dimension `N = paired.dimension`. The quadratic
    forms of a full orthonormal basis add up to a constant, so those of a pair have
    correlation `-1 / (N - 1)`. The last term is `-var(t_ij) / (N - 1)` instead of 0,
    and `var(t_ij) / (N - 1)` is added to V. About their mean, in place of t, the `t_ij`
    vary less, by about V; adding that back gives the factor `(N - 1) / (N - 2)`.

    The second term is noisy where it is small: V is kept at half of `s^2 / m` or above.

    *Degrees of freedom.* V is the sum of what each probe contributes, `h_i`. By
    Satterthwaite's rule a sum V has `2 V^2 / var V` of them, and contributions that
    differ tell of its variance: `J = (sum_i h_i^2 / V^2 - 1/m) / 2`. For normal
    samples `J = 1/m`; where few probes make up V, J is larger. Half of the normal
    value and 0.7 J are added; these two weights are measured, not derived. Skewness
    counts as for independent samples.
    """
    samples, partners, without, swapped, is_pair, magnitude, dimension = paired
    room = samples.shape[-1]
    m = room if active is None else jnp.sum(active).astype(magnitude.dtype)
    is_active = jnp.ones(room, bool) if active is None else active
    mean = jnp.sum(jnp.where(is_active, samples, 0), axis=-1)
    mean = mean / jnp.asarray(m).astype(samples.dtype)
    if room == 1:
        return _unknown(mean)
    unit = divisor(jnp.max(magnitude))

    def scaled(x, mask):
        return jnp.where(mask, x / unit.astype(x.dtype), 0)

    deviations = scaled(samples - mean[..., None], is_active)
    alone = squares(deviations)
    first = scaled(samples[..., None] - without, is_pair)
    second = scaled(partners - swapped, is_pair)
    shared = jnp.sum(jnp.real(first * second.conj()), axis=-1)
    factor = 1.0
    if dimension is not None:
        about = scaled(without - mean[..., None, None], is_pair)
        shared = shared + jnp.sum(squares(about), axis=-1) / (dimension - 1)
        factor = (dimension - 1) / (dimension - 2)
    given = jnp.maximum(jnp.sum(is_pair), 1).astype(shared.dtype)
    shared = shared * (m * (m - 1) / given).astype(shared.dtype)
    scale = factor / (m * (m - 1))
    contributions = scale * (alone + shared)
    seconds, thirds = _moments(deviations)
    variance = jnp.maximum(
        jnp.sum(contributions, axis=-1), scale * ft.reduce(op.add, seconds) / 2
    )
    uneven = ratio(jnp.sum(contributions**2, axis=-1), variance**2) - 1 / m
    uneven = jnp.clip(uneven, 0, 1) / 2
    skewness = _squared_skewness(seconds, thirds, m)
    inverse = 0.5 / (m - 1) + 0.7 * uneven + _skewed(skewness, m)
    return _error_bar(mean, unit, variance, inverse, magnitude)


def independent_bar(moments: Moments, m: int | Int[Array, ""]) -> ErrorBar:
    """The error bar of the means of m independent samples: `V = s^2 / m`.

    Signs may agree by chance (see `independent_samples`): then the variance is that of
    `sum_s A_rs w_s`, times that probability.
    """
    mean, deviations, energy, unit = moments
    number = jnp.asarray(m).astype(deviations.dtype)
    tied = jnp.exp2(1 - number) * jnp.maximum(energy / number - squares(mean), 0)
    variance = deviations / jnp.maximum(number - 1, 1)
    variance = jnp.where(variance < 0.01 * tied, tied, variance) / number
    size, mean = jnp.sqrt(energy / number) * unit, mean * unit.astype(mean.dtype)
    inverse = jnp.broadcast_to(1 / jnp.maximum(number - 1, 1), size.shape)
    bar = _error_bar(mean, unit, variance, inverse, size)
    error = jnp.where(number > 1, bar.standard_error, jnp.nan)
    return bar._replace(standard_error=error)


def weighted_samples(
    samples: Inexact[Array, "*s"],
    weight: Float[Array, "*s"],
    magnitude: Float[Array, ""],
    *,
    energy: Float[Array, ""],
    freedom: ArrayLike,
    shared: ArrayLike = 0.0,
) -> ErrorBar:
    """The error bar of a weighted sum of samples of one mean; the weights add up to 1.

    What has weight 0 is no sample. `V = s^2 sum_i weight_i^2 + shared`, the last of what
    samples have in common. Where they agree by chance `s^2` is, as for
    `independent_samples`, from the `energy`, half of the largest variance of a sample.
    """
    real = weight.dtype
    m = jnp.sum(weight != 0).astype(real)
    value = jnp.sum(jnp.where(weight != 0, samples * weight.astype(samples.dtype), 0))
    deviations = jnp.where(weight != 0, samples - value, 0)
    spread = jnp.sum(squares(deviations)) / (m - 1)
    tied = jnp.exp2(1 - m) * 2 * energy
    spread = jnp.where(spread < 0.01 * tied, tied, spread)
    variance = spread * jnp.sum(weight**2) + jnp.asarray(shared).astype(real)
    one = jnp.ones((), real)
    return _error_bar(
        value, one, variance, 1 / jnp.asarray(freedom).astype(real), magnitude
    )


def _error_bar(mean, unit, variance, inverse_freedom, magnitude) -> ErrorBar:
    # The root of an estimated variance is too small on average, by 1 - 1 / (4 nu).
    inverse_freedom = jnp.minimum(inverse_freedom, 1)
    error = unit * jnp.sqrt(variance) * (1 + inverse_freedom / 4)
    eps = jnp.finfo(error.dtype).eps
    return ErrorBar(
        mean, jnp.maximum(error, _ROUNDING * eps * magnitude), 1 / inverse_freedom
    )


def exact_bar(value: Inexact[Array, "*g"], magnitude: Float[Array, "*g"]) -> ErrorBar:
    """The error bar of a value that is exact but for rounding."""
    size = jax.lax.stop_gradient(jnp.abs(magnitude))
    error = _ROUNDING * jnp.finfo(size.dtype).eps * size
    return ErrorBar(value, error, jnp.full_like(error, jnp.inf))


def _unknown(mean: Inexact[Array, ""]) -> ErrorBar:
    real = jnp.finfo(mean.dtype).dtype
    return ErrorBar(mean, jnp.full((), jnp.nan, real), jnp.zeros((), real))


def _number(samples, active) -> int | Float[Array, ""]:
    """How many samples there are."""
    if active is None:
        return samples.shape[0]
    return jnp.sum(active).astype(jnp.finfo(samples.dtype).dtype)


def _skewed(squared_skewness: ArrayLike, m: ArrayLike) -> Float[Array, ""]:
    """What skewness adds to `1 / nu`.

    The coverage of a two-sided t interval has the expansion (Hall, "The Bootstrap and
    Edgeworth Expansion" (1992), doi:10.1007/978-1-4612-4384-7, section 2.6)

        2 Phi(x) - 1 - 2 x phi(x) [(x^4 + 2 x^2 - 3) gamma^2 / 18 + ...] / m,

    that of a t distribution `- 2 x phi(x) (x^2 + 1) / (4 nu)`. They agree at x = 1.96
    for `1 / nu = 0.9 gamma^2 / m`. For few samples the expansion overstates: `m + 2` in
    place of m, which is measured.
    """
    return jnp.asarray(0.9 * squared_skewness / (m + 2))


def _moments(
    deviations: Inexact[Array, "*g m"],
) -> tuple[list[Float[Array, "*g"]], list[Float[Array, "*g"]]]:
    """Sums of squares and of cubes of the real and of the imaginary parts."""
    parts = [jnp.real(deviations)]
    if jnp.iscomplexobj(deviations):
        parts.append(jnp.imag(deviations))
    powers = [[jnp.sum(x**p, axis=-1) for x in parts] for p in (2, 3)]
    return powers[0], powers[1]


def _squared_skewness(
    seconds: list[Float[Array, ""]], thirds: list[Float[Array, ""]], m: ArrayLike
) -> Float[Array, ""]:
    # Of the real and the imaginary parts, the larger; of rounding none.
    eps = float(jnp.finfo(seconds[0].dtype).eps)
    ratios = [
        _cubed_ratio(third, second + m * eps**2)
        for third, second in zip(thirds, seconds, strict=True)
    ]
    return jnp.asarray(m * ft.reduce(jnp.maximum, ratios))


def _gram_squared_skewness(
    gram: Inexact[Array, "g g"], active: Bool[Array, " m"] | None = None
) -> Float[Array, ""]:
    g, _ = gram.shape
    # (tr A^3)^2 <= (tr A^2)^3, and a circular complex probe is half as skewed.
    most = 4.0 if jnp.iscomplexobj(gram) else 8.0
    if g < 3:
        return jnp.full((), most, jnp.finfo(gram.dtype).dtype)
    if active is not None:
        # Probes that there are not have a Gram matrix of zeros.
        g = jnp.minimum(jnp.sum(active), g).astype(jnp.finfo(gram.dtype).dtype)
    triples = g * (g - 1) * (g - 2)
    gram = jnp.where(jnp.eye(len(gram), dtype=bool), 0, gram)

    def of(hermitian):
        squared = matmul(hermitian, hermitian)
        second = jnp.sum(jnp.abs(hermitian) ** 2) / (g * (g - 1))
        third = jnp.sum(jnp.real(squared * hermitian.conj())) / triples
        # The square of an estimate exceeds that of its mean by its variance, which is
        # known for samples without skewness. Half of it is subtracted: from four or
        # five probes rather a wide interval than a short one.
        noise = 0.375 * most / triples
        beyond = jnp.maximum(_cubed_ratio(third, second) - noise, 0)
        return most * jnp.minimum(beyond, 1)

    adjoint = gram.conj().T
    skewness = of((gram + adjoint) / 2)
    if jnp.iscomplexobj(gram):
        skewness = jnp.maximum(skewness, of((gram - adjoint) / 2j))
    return skewness


def _cubed_ratio(third: Float[Array, ""], second: Float[Array, ""]) -> Float[Array, ""]:
    # Of the square of the one to the cube of the other, which may not be representable.
    return ratio(third, second * jnp.sqrt(second)) ** 2
