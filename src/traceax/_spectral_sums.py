"""Sums over eigenvalues: traces of functions, and the doors that are made of them."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, Real

from ._arguments import check_real_scalar, inexact, known_minimum, known_number, require
from ._estimate import Estimate, raise_failure
from ._likelihood import Given, preconditioned_logdet
from ._operators.check import checked_operator, jitted, shift_of
from ._operators.space import (
    ShiftedLinearOperator,
    is_known,
    is_positive_semidefinite,
    space_of,
)
from ._results import finite_or_failed
from ._spectral.base import SpectralEstimator
from ._spectral.estimate import Options, estimate_function
from ._spectral.function import IDENTITY, LOG, RECIPROCAL, Power, SpectralFunction
from ._spectral.structure import STRUCTURES
from ._state import init_state
from ._tolerance import NO_PROGRESS_METER, ProgressMeter, check_tolerance


def trace_function(
    key: Key[Array, ""],
    fn: Callable[[Float[Array, ""]], Any],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: SpectralEstimator | None = None,
    *,
    lower: ArrayLike | None = None,
    monotone: bool = False,
    trace: ArrayLike | None = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `tr f(A)`, a sum over eigenvalues, from at most `k` products.

    ```python
    estimate = traceax.trace_function(key, jnp.sqrt, operator, 120)
    ```

    Differentiable once with respect to `operator`, and to what `fn` closes over, in forward
    and reverse mode. Derivatives are estimates
    of the derivatives of `tr f(A)`, not derivatives of an algorithm.

    **Arguments:**

    - `key`: a single key, typed or legacy.
    - `fn`: a function of a real scalar, which JAX can differentiate. It may return a
        PyTree of scalars: all are estimated from the same products.
    - `operator`: a symmetric lineax operator (complex: Hermitian), over arrays or
        PyTrees. It need not be tagged so; its products must show it.
    - `k`: a positive Python int, the budget of products. For `k >= n` the answer is
        exact. It may be left out with a tolerance, as in [`traceax.trace`][], and where
        there is a bracket: see [`traceax.KrylovAwareEstimator`][].
    - `estimator`: a [`traceax.SpectralEstimator`][]; by default
        [`traceax.KrylovAwareEstimator`][], but for operators known to be diagonal, of
        which the sum is exact.
    - `lower`: a real scalar that no eigenvalue is below, where one is known; 0 of an
        operator that is tagged positive semidefinite.
    - `monotone`: whether `fn`, or minus it, is operator monotone on positive numbers:
        `log`, `-1 / x`, `x**p` with `0 < p < 1`, sums of these with positive weights;
        every leaf of it. With `lower` the error of the Krylov space is then known in
        place of guessed. Nothing checks this.
    - `trace`: that of `operator`, a real scalar, which may be traced, where it is known but
        can't be read: of kernels, matrices, dense or sparse, and sums, multiples and shifts
        of these the diagonal is read. It takes most of the error of probes away, at no
        product, and has no part in derivatives. A wrong one need not show in the error
        bar.
    - `rtol`, `atol`, `level`, `progress_meter`, `throw`: as for [`traceax.trace`][]; a
        tolerance is for every leaf of what `fn` returns, and is taken by
        [`traceax.KrylovAwareEstimator`][].

    **Returns:**

    A [`traceax.Estimate`][], whose value is of the structure that `fn` returns. Its
    error bar holds the error of probes and that of the Krylov space. For monotone functions
    `stats["bracket"]` is the pair of the ends between which the value would be but for the
    error of probes; `stats["bracket_is_proven"]` says whether they are, or rest on a guess
    of the smallest eigenvalue. The ends have the derivative of the value.
    `stats["ritz_values"]` and `stats["ritz_weights"]` evaluate more functions without
    another product: `sum(ritz_weights * g(ritz_values))` estimates `tr g(A)`.

    **Raises:** as [`traceax.trace`][]; `ValueError` for a function that isn't one of
    scalars; a run-time error for an operator that isn't Hermitian, or a function that isn't
    finite on its spectrum.
    """
    where = "traceax.trace_function"
    if not isinstance(operator, lx.AbstractLinearOperator):
        checked_operator(operator, where, "(key, fn, operator, k)")
    options = Options(rtol, atol, level, progress_meter, throw, trace)
    return estimate_function(
        where, key, fn, operator, k, estimator, options, lower, monotone
    )


def logdet(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: SpectralEstimator | None = None,
    *,
    shift: ArrayLike = 0.0,
    preconditioner: Given = None,
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

    A shift takes nothing of the accuracy: Krylov spaces of A and of `A + shift I` are the
    same, and eigenvalues that are all but `shift` drop out of the error. Of an operator that
    is tagged positive semidefinite it also says what no eigenvalue is below, which bounds
    the error of the Krylov space; the same multiple of the identity inside of the operator
    does not.

    The answer is exact, by one Cholesky factorisation, if `k` and `estimator` are left out, there
    are at most 2,000 unknowns, and entries are read, as in [`traceax.columns`][]. It is exact for
    tridiagonal operators by class or tag, and for triangular ones whose diagonal is read. If
    neither tag says that such an operator is symmetric or positive semidefinite, the value is
    `log |det(A + shift I)|`, and `stats["sign"]` the sign or phase.

    **Arguments:** those of [`traceax.trace_function`][] but `fn`, `lower`, `monotone`, and

    - `operator`: symmetric or Hermitian; `A + shift I` must be positive definite. For a singular
        one an estimate is finite, though the truth is minus infinity: pass a shift, or lift a
        null space that is known (the recipe for pseudo-determinants).
    - `shift`: a real scalar, may be traced and differentiated; or n numbers, or a PyTree in the
        structure of the operator whose leaves are scalars or arrays. They must be positive, and
        A positive semidefinite, unless it is diagonal, triangular or tridiagonal.
    - `preconditioner`: of a positive semidefinite A and a positive shift, or one of your own
        of a positive definite `A + shift I`, as for [`traceax.inv_quad_logdet`][], which
        estimates both terms of a likelihood at once.
    - `trace`: that of A, without the shift. Columns make no use of it.

    **Returns:** a [`traceax.Estimate`][], with a bracket for operators that are tagged
    positive semidefinite.
    """
    where = "traceax.logdet"
    options = Options(rtol, atol, level, progress_meter, throw, trace)
    if preconditioner is not None or _is_noise_vector(operator, shift, where):
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

    Arguments, exact answers and the returned estimate are as for [`traceax.logdet`][], without a
    preconditioner or `stats["sign"]`.
    """
    where = "traceax.trace_inverse"
    options = Options(rtol, atol, level, progress_meter, throw, trace)
    operator, lower, options = _shifted(operator, shift, options, where)
    return estimate_function(
        where, key, RECIPROCAL, operator, k, estimator, options, lower
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

    **Arguments:** those of [`traceax.logdet`][] but `shift`, `preconditioner`, `atol`, and

    - `p`: a positive scalar, may be traced.
    - `rtol`: relative to the norm.

    **Returns:** a [`traceax.Estimate`][]; its error bar is that of the sum, through the
    derivative of the root. `stats["bracket"]` is that of the norm: there is one for an
    operator that is tagged positive semidefinite, and a known p of at most 1.
    """
    where = "traceax.schatten_norm"
    hint = "write p=1.0 for the nuclear norm, p=2.0 for that of Frobenius"
    check_real_scalar(p, "p", where, hint)
    known = known_number(p)
    if atol is not None:
        raise TypeError(f"{where}: a norm takes no atol, got one; pass rtol.")
    right = known is None or 0 < known < math.inf
    require(right, where, "p must be positive and finite", f"{p}", hint)
    dtype = init_state(key, operator, where).space.real_dtype
    power = jnp.asarray(p, dtype)
    # A relative error of the norm is one p times as large of the sum.
    if rtol is not None:
        rtol = power * check_tolerance(rtol, "rtol", dtype, where)
    options = Options(rtol, None, level, progress_meter, False, trace)
    function = SpectralFunction(Power(power), monotone=known is not None and known <= 1)
    total = estimate_function(where, key, function, operator, k, estimator, options)
    estimate = _norm(total, power)
    return raise_failure(estimate) if throw else estimate


@jitted
def _norm(total: Estimate, power: Float[Array, ""]) -> Estimate:
    """The root of a sum of powers."""
    stats = dict(total.stats)
    unit = stats.pop("unit", jnp.ones_like(power))
    root = ft.partial(_root, power=power, unit=unit)
    if "bracket" in stats:
        stats["bracket"] = tuple(root(x) for x in stats["bracket"])
    value, positive = root(total.value), total.value > 0
    # The slope of the root, for its error.
    slope = power.astype(value.dtype) * jnp.where(positive, total.value, 1)
    slope = jnp.where(positive, value / slope, 1)
    result = finite_or_failed(value, total.result)
    scaled = total.times(slope)
    return scaled.replaced(value=value, result=result, stats=stats)


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

    def count(self, upper: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
        """How many eigenvalues are at most `upper`."""

        def count_below(bound):
            return jnp.sum(jnp.where(self.points <= bound, self.weights, 0))

        return jnp.vectorize(count_below)(inexact(upper))

    def density(
        self, at: Real[ArrayLike, "..."], width: ArrayLike
    ) -> Float[Array, "..."]:
        """Eigenvalues per unit, every point spread to a normal density of `width`."""
        where = "traceax.SpectralDensity.density"
        hint = "it is the standard deviation of what each point is spread to"
        check_real_scalar(width, "width", where, hint)
        known = known_number(width)
        right = known is None or known > 0
        require(right, where, "width must be positive", f"{width}", hint)
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
    """Estimates the distribution of eigenvalues of a symmetric or Hermitian operator.

    `key`, `operator`, `k`, `estimator` and `throw` are as for [`traceax.trace_function`][]; k
    must be given. Not differentiable.
    """
    where = "traceax.spectral_density"
    estimate = estimate_function(
        where, key, IDENTITY, operator, k, estimator, Options(throw=throw)
    )
    stats = jax.lax.stop_gradient(estimate.stats)
    return SpectralDensity(stats["ritz_values"], stats["ritz_weights"])


_SHIFT = "add anything else to the operator, such as a lineax.DiagonalLinearOperator"


def _is_noise_vector(operator: object, shift: object, where: str) -> bool:
    """Whether a shift is a noise for each unknown. It is a part of structured operators."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        return False
    scalar = np.ndim(shift_of(shift, space_of(operator), where, _SHIFT)) == 0
    return not scalar and not is_known(operator, *STRUCTURES)


def _shifted(
    operator: lx.AbstractLinearOperator, shift: ArrayLike, options: Options, where: str
) -> tuple[lx.AbstractLinearOperator, Float[Array, ""] | None, Options]:
    """`A + shift I`, what no eigenvalue of it is below, if A is semidefinite, and the
    options with its trace, if that of A is given."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        return operator, None, options  # refused later
    if isinstance(shift, int | float) and shift == 0:
        return operator, None, options
    space = space_of(operator)
    added = shift_of(shift, space, where, _SHIFT)
    total = ShiftedLinearOperator(operator, added)
    if options.trace is not None:
        hint = "it is that of the operator without its shift"
        check_real_scalar(options.trace, "trace", where, hint)
        trace = jnp.asarray(options.trace, space.real_dtype)
        more = space.size * added if added.ndim == 0 else jnp.sum(added)
        options = options._replace(trace=trace + more)
    if not is_positive_semidefinite(operator):
        return total, None, options
    minima = [known_minimum(x) for x in jax.tree.leaves(shift)]
    if all(x is not None and x > 0 for x in minima):
        total = lx.TaggedLinearOperator(total, lx.positive_semidefinite_tag)
    lower = jnp.min(added) if added.ndim else added
    return total, jax.lax.stop_gradient(lower), options
