"""Kernels as users write them: functions of two rows."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float


class Matern(eqx.Module):
    """Matern 3/2, with a length scale for every coordinate."""

    length: Float[Array, " d"]

    def __call__(self, a, b):
        a, b = a / self.length, b / self.length
        squared = sum((a[i] - b[i]) ** 2 for i in range(len(a)))
        r = jnp.sqrt(3 * jnp.where(squared == 0, 1, squared))
        return jnp.where(squared == 0, 1, (1 + r) * jnp.exp(-r))


class RationalQuadratic(eqx.Module):
    """`1 / (1 + |a - b|^2)`, without parameters."""

    def __call__(self, a, b):
        return 1 / (1 + jnp.sum((a - b) ** 2))
