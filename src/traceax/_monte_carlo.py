"""The mean of independent samples and its standard error."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


def mean_and_standard_error(
    samples: Inexact[Array, " m"],
) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
    """The sample mean and its standard error; NaN for a single sample.

    The error of complex samples is that of their modulus.
    """
    (m,) = samples.shape
    mean = jnp.mean(samples)
    if m == 1:
        return mean, jnp.full((), jnp.nan, jnp.finfo(samples.dtype).dtype)
    deviations = samples - mean
    # Scaled by the largest deviation, so that no square under- or overflows.
    largest = jnp.max(jnp.abs(deviations))
    unit = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    relative = jnp.sum(jnp.abs(deviations / unit) ** 2) / (m * (m - 1))
    return mean, unit * jnp.sqrt(relative)
