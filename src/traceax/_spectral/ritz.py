"""Ritz values: their errors, and whether they are those of a symmetric operator."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

from .._linalg.small import divisor
from .._operators.block import Space, is_positive_semidefinite, space_of
from .._operators.solvers import solver_tolerance
from .._results import RESULTS

# Asymmetry, relative to the operator. Rounding makes at most 50 eps of it: kernels, normal
# equations and Hessians of networks, n = 1,000 to 36,000, 32 bits, by Lanczos (4 eps by
# Arnoldi). Iterative solvers in 64 bits leave more.
_ASYMMETRY, _SOLVERS = 200.0, 1e-6


class RitzValues(NamedTuple):
    """Eigenvalues of a projected operator.

    - `values`: those of rounding size below 0, or a known `lower` end, are 0, or that end.
    - `noise`: their errors, relative to the largest: eps, or how far products are from
        those of a symmetric operator where rounding alone doesn't explain it.
    - `result`: whether they may be those of the operator as it is tagged and bounded.
    """

    values: Float[Array, " k"]
    noise: Float[Array, ""]
    result: RESULTS


def largest_asymmetry(space: Space) -> float:
    """Asymmetry, relative to the operator, that rounding and solvers may make."""
    of_dtype = 4 * float(jnp.finfo(space.dtype).eps)
    return max(
        _ASYMMETRY * float(jnp.finfo(space.compute_dtype).eps), _SOLVERS, of_dtype
    )


def ritz_values(
    values: Float[Array, " k"],
    asymmetry: Float[Array, ""],
    operator: lx.AbstractLinearOperator,
    lower: Float[Array, ""] | None = None,
    size: Float[Array, ""] | None = None,
    error: Float[Array, ""] | None = None,
) -> RitzValues:
    """`RitzValues`, given how far from symmetric the projected operator is.

    `size` is that of the numbers that products are made of, where these cancel; `error`
    what is known of the error of products, relative to the largest: by default the
    tolerance of the solvers within the operator.
    """
    if error is None:
        error = solver_tolerance(operator, values.dtype)
    largest = jnp.max(jnp.abs(values), initial=0)
    cancelled = 1 if size is None else jnp.maximum(size / divisor(largest), 1)
    asymmetry = asymmetry / cancelled
    eps = jnp.finfo(values.dtype).eps
    rounding = 8 * math.sqrt(values.shape[0])
    values = jnp.where((values < 0) & (values > -rounding * eps * largest), 0, values)
    # Numbers that left the range say nothing about the operator.
    finite = jnp.isfinite(values).all() & jnp.isfinite(asymmetry + cancelled)
    result = RESULTS.where(finite, RESULTS.successful, RESULTS.nonfinite)
    if is_positive_semidefinite(operator):
        wrong = finite & (jnp.min(values, initial=0) < -jnp.sqrt(eps) * largest)
        result = RESULTS.where(wrong, RESULTS.not_semidefinite, result)
        values = jnp.where(wrong, values, jnp.maximum(values, 0))
    limit = largest_asymmetry(space_of(operator))
    limit = limit if error is None else jnp.maximum(limit, error)
    asymmetric = finite & (asymmetry > limit)
    result = RESULTS.where(asymmetric, RESULTS.not_hermitian, result)
    noise = jnp.where(asymmetry <= _ASYMMETRY / 4 * eps, eps, asymmetry) * cancelled
    noise = noise if error is None else jnp.maximum(noise, error)
    if lower is not None:
        below = values < lower - rounding * noise * largest
        wrong = jnp.any(below) & (result == RESULTS.successful)
        result = RESULTS.where(wrong, RESULTS.below_lower, result)
        values = jnp.where(below, values, jnp.maximum(values, lower))
    return RitzValues(values, noise, result)
