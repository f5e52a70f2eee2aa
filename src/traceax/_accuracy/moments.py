"""Moments of samples, and what skewness takes of their degrees of freedom."""

import functools as ft
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact

from .._functional import Functional
from .._linalg.small import leading, matmul, ratio, squares
from .._linalg.tall import power_of_two_scale

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
