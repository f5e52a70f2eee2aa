"""Estimated eigenvalue distributions, which answer questions without a product."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, Real

from ._arguments import (
    check_budget,
    check_real_scalar,
    inexact,
    known_number,
    require,
)
from ._error_bar import add_known_error
from ._estimate import Box, Estimate
from ._exact.structure import by_structure
from ._linalg.types import automatic, owned, without_derivatives
from ._operators.check import jitted
from ._operators.entries import readable_data
from ._outcome import Outcome
from ._spectral.base import SpectralEstimator
from ._spectral.function import HIDDEN, IDENTITY, SpectralFunction
from ._spectral.krylov_aware import KrylovAwareEstimator, KrylovSpace
from ._spectral.state import SpectralState, init_spectral_state
from ._spectral_estimate import Options, estimate_function
from ._state import DerivedState, StoredKey


class SpectralDensity(eqx.Module):
    """An estimated eigenvalue distribution: weights at points, with sum n.

    **Attributes:**

    - `points`: the real points that carry the weights.
    - `weights`: the number of eigenvalues at each point. Leaving probes out can make
        single weights slightly negative, but not sums of many.

    From [`traceax.KrylovAwareEstimator`][] it also keeps the Krylov space for `trace`
    and `count`: `n k + k^(5/2)` numbers.
    """

    points: Float[Array, " p"]
    weights: Float[Array, " p"]
    _source: Box | None = eqx.field(default=None, repr=False)  # holds a `_Source`

    def integrate(self, fn: Callable[[Array], Array]) -> Inexact[Array, ""]:
        """The sum of an elementwise function over the eigenvalues, without an error."""
        return jnp.sum(self.weights * fn(self.points))

    def trace(
        self,
        fn: Callable[[Float[Array, ""]], Any],
        *,
        lower: ArrayLike | None = None,
        monotone: bool = False,
        throw: bool = True,
    ) -> Estimate:
        """`tr fn(A)` without a product, as from [`traceax.trace_function`][].

        Estimate and derivatives equal `traceax.trace_function(key, fn, operator, k)` up
        to rounding, and arguments are the same. It takes O(n k + k^3) time.

        **Raises:** `TypeError` if the density didn't keep a Krylov space.
        """
        return self._ask("trace", fn, lower, monotone, throw)

    def count(
        self, lower: Real[ArrayLike, "*s"], upper: Real[ArrayLike, "*s"]
    ) -> Estimate:
        """The number of eigenvalues from `lower` to `upper`, without a product.

        Both may be infinite, or arrays, which broadcast to the value's shape. An end of
        the interval splits the point next to it, so the error bar includes half of that
        point's weight, and eigenvalues that rounding may move across an end. Intervals
        shorter than the distance of points can be empty. **Raises:** as `trace`;
        `TypeError` if an end isn't real.
        """
        for end in (lower, upper):
            is_number = eqx.is_array_like(end) and not isinstance(end, bool)
            what, hint = "ends must be real numbers or arrays", "an end may be infinite"
            where = "traceax.SpectralDensity.count"
            is_real = is_number and not jnp.iscomplexobj(end)
            require(is_real, where, what, end, hint, TypeError)
        inside = _Inside(*jnp.broadcast_arrays(inexact(lower), inexact(upper)))
        return self._ask("count", SpectralFunction(inside), inside=inside)

    def _ask(self, name, fn, lower=None, monotone=False, throw=True, inside=None):
        where, change = f"traceax.SpectralDensity.{name}", None
        if self._source is None:
            raise TypeError(
                f"{where}: the density must have a Krylov space, got none; make it by "
                "traceax.spectral_density with a KrylovAwareEstimator, or use integrate."
            )
        source, options = self._source.unbox(), Options(throw=throw)
        if inside is not None:
            is_estimated = isinstance(source.estimator, KrylovSpace)
            change = jtu.Partial(_with_split_points, inside, is_estimated)
        problem = source.key.typed, fn, source.operator, source.k, source.estimator
        return estimate_function(where, *problem, options, lower, monotone, change)

    def density(
        self, at: Real[ArrayLike, "..."], width: ArrayLike
    ) -> Float[Array, "..."]:
        """Eigenvalues per unit, with points smoothed to normal densities of `width`."""
        where = "traceax.SpectralDensity.density"
        hint = "it is the standard deviation that smooths each point"
        check_real_scalar(width, "width", where, hint)
        known = known_number(width)
        is_valid = known is None or known > 0
        require(is_valid, where, "width must be positive", f"{width}", hint)
        width = inexact(width)

        def at_point(point):
            z = (point.astype(self.points.dtype) - self.points) / width
            return jnp.sum(self.weights * jnp.exp(-(z**2) / 2))

        heights = jnp.vectorize(at_point)(inexact(at))
        return heights / (width * math.sqrt(2 * math.pi))


def spectral_density(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    throw: bool = True,
) -> SpectralDensity:
    """Estimates the eigenvalue distribution of a symmetric or Hermitian operator.

    ```python
    spectrum = traceax.spectral_density(key, operator, 100)
    small = spectrum.count(0, 1e-3)  # eigenvalues from 0 to 1e-3
    energy = spectrum.trace(lambda x: x * jnp.exp(-x))  # no further product
    ```

    Arguments are as for [`traceax.trace_function`][]. Points and weights have no
    derivative, but the answers of `trace` have: differentiate a function that calls
    `spectral_density` and `trace`.
    """
    where = "traceax.spectral_density"
    source, options = None, Options(throw=throw)
    if estimator is None or isinstance(estimator, KrylovAwareEstimator):
        state = init_spectral_state(where, key, operator, IDENTITY, None)
        k, data = check_budget(k, where), readable_data(operator)
        operator = owned(operator if data is None else data)
        state = eqx.tree_at(lambda x: x.operator, state, operator)
        has_structure = estimator is None and by_structure(state, k, where) is not None
        if not has_structure and k >= state.space.size:
            matrix = operator.as_matrix()
            tags = lx.positive_semidefinite_tag if state.space.is_positive else ()
            operator = lx.MatrixLinearOperator(matrix, tags)
        elif not has_structure:
            run = _krylov_space if data is None else _jitted
            estimator = run(estimator or KrylovAwareEstimator(), state, k)
        source = Box(_Source(StoredKey(state.key), operator, k, estimator))
    estimate = estimate_function(where, key, IDENTITY, operator, k, estimator, options)
    stats = jax.lax.stop_gradient(estimate.stats)
    return SpectralDensity(stats["ritz_values"], stats["ritz_weights"], source)


class _Source(eqx.Module):
    """The problem behind a density, and its Krylov space for an estimator."""

    key: StoredKey
    operator: lx.AbstractLinearOperator
    k: int = eqx.field(static=True)
    estimator: SpectralEstimator | None


@automatic
def _krylov_space(
    estimator: KrylovAwareEstimator, state: SpectralState, k: int
) -> KrylovSpace:
    estimator, state = without_derivatives((estimator, state))
    return estimator.space(state, k)


_jitted = jitted(_krylov_space)


class _Inside(eqx.Module):
    """1 from `low` to `high`, else 0. A module compiles once for all intervals."""

    low: Float[Array, "*s"]
    high: Float[Array, "*s"]

    def __call__(self, x):
        low, high, x = self.low, self.high, x.astype(self.low.dtype)
        outside = jnp.where(jnp.isnan(low) | jnp.isnan(high), jnp.nan, 0.0)
        return jnp.where((low <= x) & (x <= high), 1.0, outside)


def _with_split_points(
    inside: _Inside, is_estimated: bool, total: Outcome
) -> tuple[Outcome, DerivedState]:
    """The outcome with weights that either end may split in its error bar."""
    points, weights = total.stats["ritz_values"], jnp.abs(total.stats["ritz_weights"])
    resolution = HIDDEN * jnp.finfo(points.dtype).eps * jnp.max(jnp.abs(points))

    @jnp.vectorize
    def split(end):
        distances = jnp.abs(points - end.astype(points.dtype))
        nearby = jnp.sum(jnp.where(distances <= resolution, weights, 0))
        half = weights[jnp.argmin(distances)] / 2 if is_estimated else 0.0
        return jnp.where(jnp.isfinite(end), jnp.maximum(nearby, half), 0)

    error = split(inside.low) + split(inside.high)
    bars = [add_known_error(bar, error) for bar in total.bars]
    return total._replace(bars=bars), DerivedState("traceax.SpectralDensity.count")
