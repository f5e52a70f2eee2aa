"""Log-determinants, inverses, norms, densities: uses of `trace_function`."""

import functools as ft
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, Real

from ._accuracy.tolerance import check_tolerance
from ._arguments import check_real_scalar, known_number
from ._estimate import Estimate, finite_or_failed, raise_failure
from ._likelihood import Preconditioner, preconditioned_logdet
from ._operators.block import is_positive_semidefinite, space_of
from ._operators.check import ShiftedLinearOperator
from ._progress import NO_PROGRESS_METER, ProgressMeter
from ._spectral.base import SpectralEstimator
from ._spectral.function import LOG, Power, SpectralFunction
from ._state import init_state
from ._trace_function import Options, estimate_function


# Functions of this module, which can be pickled as JAX's can't.
def _reciprocal(x):
    return jnp.reciprocal(x)


def _identity(x):
    return x


# Made once: programs for these are kept.
_RECIPROCAL = SpectralFunction(_reciprocal, monotone=True)
_IDENTITY = SpectralFunction(_identity)


def logdet(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: SpectralEstimator | None = None,
    *,
    shift: ArrayLike = 0.0,
    preconditioner: Preconditioner = None,
    trace: ArrayLike | None = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `log det(A + shift I)` from at most `k` products with A.

    The first job of a Gaussian process: `traceax.logdet(key, kernel, 100,
    shift=noise)`, differentiable with respect to the kernel and to the noise.

    A shift costs nothing and takes nothing of the accuracy: Krylov spaces of A and of
    `A + shift I` are the same, and eigenvalues that are all but `shift` drop out of
    the error. Of an operator that is tagged positive semidefinite a shift also says
    what no eigenvalue is below, which bounds the error of the Krylov space; the same
    multiple of the identity inside of the operator does not.

    **Arguments:** those of [`traceax.trace_function`][], and

    - `operator`: symmetric or Hermitian; `A + shift I` must be positive definite.
    - `shift`: a real scalar, may be traced and differentiated; or a positive number for
        each of the n unknowns, of a positive semidefinite A.
    - `preconditioner`: of a positive semidefinite A and a positive shift, as for
        [`traceax.inv_quad_logdet`][], which estimates both terms of a likelihood at once.
    - `trace`: that of A, without the shift. Columns make no use of it.

    **Returns:** a [`traceax.Estimate`][]. `stats["bracket"]` holds the ends between which
    the value would be but for the error of probes, of operators that are tagged positive
    semidefinite, and `stats["bracket_is_proven"]` says whether they are: see
    [`traceax.KrylovAwareEstimator`][], also for what happens where k is left out.
    """
    where = "traceax.logdet"
    options = Options(rtol, atol, level, progress_meter, throw, trace)
    if preconditioner is not None or np.ndim(shift) == 1:
        return preconditioned_logdet(
            where, key, operator, k, estimator, shift, preconditioner, options
        )
    operator, lower, options = _shifted(operator, shift, options, where)
    return estimate_function(where, key, LOG, operator, k, estimator, options, lower)


def trace_inverse(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: SpectralEstimator | None = None,
    *,
    shift: ArrayLike = 0.0,
    trace: ArrayLike | None = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `tr (A + shift I)^-1` from at most `k` products with A.

    For an operator that isn't Hermitian, or one that has a good solver, use
    `traceax.trace(key, traceax.InverseLinearOperator(operator, solver), k)`, whose k
    counts solves.

    **Arguments:** those of [`traceax.logdet`][].

    **Returns:** a [`traceax.Estimate`][].
    """
    where = "traceax.trace_inverse"
    options = Options(rtol, atol, level, progress_meter, throw, trace)
    operator, lower, options = _shifted(operator, shift, options, where)
    return estimate_function(
        where, key, _RECIPROCAL, operator, k, estimator, options, lower
    )


def schatten_norm(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: SpectralEstimator | None = None,
    *,
    p: ArrayLike = 1.0,
    trace: ArrayLike | None = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `(sum_i |lambda_i|^p)^(1/p)` of a symmetric or Hermitian operator.

    `p=1` is the nuclear norm, `p=2` the Frobenius norm.

    **Arguments:** those of [`traceax.trace_function`][] but `atol`, and

    - `p`: a positive scalar, may be traced.
    - `rtol`: relative to the norm.

    **Returns:** a [`traceax.Estimate`][]; its error bar is that of the sum, through the
    derivative of the root. `stats["bracket"]` is that of the norm: there is one for an
    operator that is tagged positive semidefinite, and a known p of at most 1.
    """
    where = "traceax.schatten_norm"
    hint = "write p=1.0 for the nuclear norm, p=2.0 for that of Frobenius."
    check_real_scalar(p, "p", where, hint)
    known = known_number(p)
    if atol is not None:
        raise TypeError(f"{where}: a norm takes no atol, got one; pass rtol.")
    if known is not None and not 0 < known < math.inf:
        raise ValueError(f"{where}: p must be positive and finite, got {p}; {hint}")
    space = space_of(init_state(key, operator, where).operator)
    power = jnp.asarray(p, space.real_dtype)
    # A relative error of the norm is one p times as large of the sum.
    if rtol is not None:
        rtol = power * check_tolerance(rtol, "rtol", space.real_dtype, where)
    options = Options(rtol, None, level, progress_meter, False, trace)
    function = SpectralFunction(Power(power), monotone=known is not None and known <= 1)
    total = estimate_function(where, key, function, operator, k, estimator, options)
    stats = dict(total.stats)
    unit = stats.pop("unit", jnp.ones((), space.real_dtype))
    root = ft.partial(_root, power=power, unit=unit)
    if "bracket" in stats:
        stats["bracket"] = tuple(root(x) for x in stats["bracket"])
    value, positive = root(total.value), total.value > 0
    # The slope of the root, for its error.
    slope = power.astype(value.dtype) * jnp.where(positive, total.value, 1)
    slope = jnp.where(positive, value / slope, 1)
    error = total._standard_error * jax.lax.stop_gradient(slope)
    result = finite_or_failed(value, total.result)
    estimate = Estimate(value, error, result, stats, total.state, total._by)
    return raise_failure(estimate) if throw else estimate


def _root(
    total: Float[Array, ""], power: Float[Array, ""], unit: Float[Array, ""]
) -> Float[Array, ""]:
    """`unit total^(1 / power)`, 0 for what isn't positive, and NaN for NaN."""
    positive = total > 0
    safe = jnp.where(positive, total, 1)
    exponent = (1 / power).astype(safe.dtype)
    value = jnp.where(positive, unit.astype(safe.dtype) * safe**exponent, 0)
    return jnp.where(jnp.isnan(total), total, value)


class SpectralDensity(eqx.Module):
    """An estimated distribution of eigenvalues: weights at points, n in all.

    **Attributes:**

    - `points`: real, where the weights are.
    - `weights`: how many eigenvalues each stands for. Leaving probes out can make
        single ones slightly negative; sums of many are not.
    """

    points: Float[Array, " p"]
    weights: Float[Array, " p"]

    def integrate(self, fn: Callable[[Array], Array]) -> Inexact[Array, ""]:
        """The sum of a function over the eigenvalues, of arrays elementwise."""
        return jnp.sum(self.weights * fn(self.points))

    def count(self, upper: Real[Array, "..."]) -> Float[Array, "..."]:
        """How many eigenvalues are at most `upper`."""

        def count_below(bound):
            return jnp.sum(jnp.where(self.points <= bound, self.weights, 0))

        return jnp.vectorize(count_below)(jnp.asarray(upper))

    def density(self, at: Real[Array, "..."], width: ArrayLike) -> Float[Array, "..."]:
        """Eigenvalues per unit, every point spread to a normal density of `width`.

        Raises `ValueError` for a width that isn't positive, as far as it is known.
        """
        where = "traceax.SpectralDensity.density"
        hint = "it is the standard deviation of what each point is spread to."
        check_real_scalar(width, "width", where, hint)
        known = known_number(width)
        if known is not None and not known > 0:
            raise ValueError(f"{where}: width must be positive, got {width}; {hint}")

        def at_point(point):
            z = (point.astype(self.points.dtype) - self.points) / width
            return jnp.sum(self.weights * jnp.exp(-(z**2) / 2))

        return jnp.vectorize(at_point)(jnp.asarray(at)) / (
            width * math.sqrt(2 * math.pi)
        )


def spectral_density(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    throw: bool = True,
) -> SpectralDensity:
    """Estimates the distribution of eigenvalues of a symmetric or Hermitian operator.

    **Arguments:** those of [`traceax.trace_function`][], without a tolerance.

    **Returns:** a [`traceax.SpectralDensity`][]. Not differentiable.
    """
    where = "traceax.spectral_density"
    estimate = estimate_function(
        where, key, _IDENTITY, operator, k, estimator, Options(throw=throw)
    )
    points, weights = jax.lax.stop_gradient(
        (estimate.stats["ritz_values"], estimate.stats["ritz_weights"])
    )
    return SpectralDensity(points, weights)


def _shifted(
    operator: lx.AbstractLinearOperator, shift: ArrayLike, options: Options, where: str
) -> tuple[lx.AbstractLinearOperator, Float[Array, ""] | None, Options]:
    """`A + shift I`, what no eigenvalue of it is below, if A is semidefinite, and the
    options with its trace, if that of A is given."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        return operator, None, options  # refused later
    if isinstance(shift, int | float) and shift == 0:
        return operator, None, options
    check_real_scalar(
        shift,
        "shift",
        where,
        "add anything else to the operator, such as a lineax.DiagonalLinearOperator.",
    )
    dtype = space_of(operator).dtype
    scalar = jnp.asarray(shift).astype(jnp.finfo(dtype).dtype)
    total = ShiftedLinearOperator(operator, scalar)
    if options.trace is not None:
        hint = "it is that of the operator without its shift."
        check_real_scalar(options.trace, "trace", where, hint)
        trace = jnp.asarray(options.trace).astype(scalar.dtype)
        options = options._replace(trace=trace + space_of(operator).size * scalar)
    if not is_positive_semidefinite(operator):
        return total, None, options
    if isinstance(shift, int | float) and shift > 0:
        total = lx.TaggedLinearOperator(total, lx.positive_semidefinite_tag)
    return total, jax.lax.stop_gradient(scalar), options
