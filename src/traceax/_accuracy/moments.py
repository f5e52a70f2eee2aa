"""Moments of independent samples, taken a block at a time."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact

from .._functional import Functional
from .._linalg.small import leading, squares
from .._linalg.tall import power_of_two_scale


class Moments(NamedTuple):
    """Moments of samples of a functional.

    - `mean`, `deviations`: of `samples / unit`, the latter being summed squares.
    - `energy`: the sum over `|A w_j / unit|^2`, to see what equal samples hide.
    - `unit`: a power of two of the size of the first, as squares may underflow.
    """

    mean: Inexact[Array, "*g"]
    deviations: Float[Array, "*g"]
    energy: Float[Array, "*g"]
    unit: Float[Array, ""]


def empty_moments(functional: Functional, n: int, dtype) -> Moments:
    """The moments of no sample, of n rows."""
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

    Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", Am. Stat.
    37 (1983), doi:10.1080/00031305.1983.10483115.
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
