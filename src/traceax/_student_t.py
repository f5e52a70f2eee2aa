"""Quantiles of Student's t distribution."""

import math
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Up to this many degrees of freedom quantiles are interpolated from those at 1 / node.
_FEW = 3
_NODES = (1.0, 1 / 2, 1 / 3, 1 / 4)

# A Python number, or a traced one.
_Number = float | Float[Array, ""]


def check_level(level: float, where: str) -> None:
    """Refuses what is no level of an interval."""
    if not 0 < level < 1:
        raise ValueError(
            f"{where}: level must lie strictly between 0 and 1, got {level}; write "
            "0.95 for an interval of 95 %."
        )


class Level(NamedTuple):
    """What quantiles of a two-sided interval are made of: Python numbers where its level
    is one, so that nothing of it is traced.
    """

    tails: _Number  # what the level lacks of 1
    normal: _Number  # the quantile of the normal distribution
    logarithms: tuple[_Number, ...]  # of the quantiles at the nodes


def two_sided(level: float | Float[Array, ""]) -> Level:
    """Of an interval that holds the truth with probability `level`."""
    if isinstance(level, float):
        normal = -NormalDist().inv_cdf((1 - level) / 2)
        return jax.tree.map(float, _two_sided(level, normal, np))
    return _two_sided(level, -jax.scipy.special.ndtri((1 - level) / 2), jnp)


def _two_sided(level, normal, numbers) -> Level:
    tails = 1 - level
    one = 1 / numbers.tan(np.pi / 2 * tails)
    two = level / numbers.sqrt((1 + level) * tails / 2)
    three, four = (_hill(tails, normal, nu, numbers) for nu in (3.0, 4.0))
    quantiles = (numbers.maximum(x, 1e-30) for x in (one, two, three, four))
    return Level(tails, normal, tuple(numbers.log(x) for x in quantiles))


def student_t_quantile(of: Level, freedom: Float[Array, "*s"]) -> Any:
    """The quantile of Student's t distribution.

    Hill (1970), "Algorithm 396: Student's t-quantiles", doi:10.1145/355598.355600.
    Its expansion is poor below three degrees of freedom: there the logarithm is
    interpolated in `1 / freedom` from the closed forms at one and two and from three
    and four. Relative error below 1 % (below 1e-3 from three degrees on). At least
    one degree of freedom is taken.
    """
    inverse = 1 / jnp.maximum(freedom, 1)
    logarithm = jnp.zeros_like(inverse)
    for node, value in zip(_NODES, of.logarithms, strict=True):
        others = [x for x in _NODES if x != node]
        weight = math.prod((inverse - x) / (node - x) for x in others)
        logarithm = logarithm + weight * value
    expansion = _hill(of.tails, of.normal, freedom, jnp)
    return jnp.where(freedom < _FEW, jnp.exp(logarithm), expansion)


def _hill(tails, x, freedom, numbers):
    # By operations of `numbers`, NumPy or `jax.numpy`.
    nu = numbers.clip(freedom, _FEW, 1e6)
    a = 1 / (nu - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * numbers.sqrt(a * np.pi / 2) * nu
    y = (d * tails) ** (2 / nu)

    y1 = x**2
    c1 = numbers.where(nu < 5, c + 0.3 * (nu - 4.5) * (x + 0.6), c)
    c1 = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c1
    y1 = (((((0.4 * y1 + 6.3) * y1 + 36) * y1 + 94.5) / c1 - y1 - 3) / b + 1) * x
    central = numbers.expm1(a * y1**2)

    outer = (
        (
            1 / (((nu + 6) / (nu * y) - 0.089 * d - 0.822) * (nu + 2) * 3)
            + 0.5 / (nu + 4)
        )
        * y
        - 1
    ) * (nu + 1) / (nu + 2) + 1 / y
    return numbers.sqrt(nu * numbers.where(y > 0.05 + a, central, outer))
