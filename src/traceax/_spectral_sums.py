"""Entry points for sums over eigenvalues: traces of functions, norms and densities."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from ._arguments import check_real_scalar, known_minimum, known_number, require
from ._estimate import Estimate
from ._exact.structure import STRUCTURES
from ._likelihood import Given, preconditioned_logdet
from ._operators.check import checked_operator, shift_of
from ._operators.space import (
    ShiftedLinearOperator,
    is_known,
    is_positive_semidefinite,
    space_of,
)
from ._outcome import Outcome
from ._spectral.base import SpectralEstimator
from ._spectral.function import LOG, RECIPROCAL, Power, SpectralFunction
from ._spectral_estimate import Options, estimate_function
from ._state import DerivedState, init_state
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
    r"""Estimates `tr f(A)`, a sum over the eigenvalues, from at most `k` products.

    ```python
    estimate = traceax.trace_function(key, jnp.sqrt, operator, 120)
    ```

    You can differentiate the value once, in forward and reverse mode, with respect to
    `operator` and to arrays that `fn` closes over. Derivatives estimate the derivatives
    of `tr f(A)`; they are not derivatives of an algorithm.

    **Arguments:**

    - `key`: a single key, typed or legacy.
    - `fn`: a function of a real scalar that JAX can differentiate. It may return an
        array or a PyTree: all entries are estimated from the same products. For many
        parameters, return one array, which compiles like a scalar.
    - `operator`: a symmetric lineax operator (Hermitian if complex) on arrays or
        PyTrees. It needs no tag, but its products are checked.
    - `k`: the budget of products, a positive Python int. The answer is exact for
        `k >= n`. It is optional with a tolerance, as in [`traceax.trace`][], and if the
        estimate has a bracket, as in [`traceax.KrylovAwareEstimator`][].
    - `estimator`: a [`traceax.SpectralEstimator`][], by default
        [`traceax.KrylovAwareEstimator`][], or the exact sum for a known diagonal
        operator. For sparse matrices see [`traceax.logdet`][].
    - `lower`: a lower bound on the eigenvalues, a real scalar. An operator tagged
        positive semidefinite has the bound 0.
    - `monotone`: whether every leaf of `fn`, or its negative, is operator monotone on
        positive numbers: `log`, `-1 / x`, `x**p` with `0 < p < 1`, and sums of these
        with positive weights. With `lower`, the truncation error of the Krylov space is
        then bounded, not extrapolated. Nothing checks this claim.
    - `trace`: the trace of `operator`, a real scalar that may be traced. Pass it if you
        know it and the diagonal can't be read. (It is read for kernels, dense and
        sparse matrices, and their sums, multiples and shifts.) It removes most of the
        sampling error at no product, and plays no part in derivatives. A wrong trace
        need not show in the error bar.
    - `rtol`, `atol`, `level`, `progress_meter`, `throw`: as for [`traceax.trace`][]. A
        tolerance applies to every entry, and needs a [`traceax.KrylovAwareEstimator`][].

    **Returns:** a [`traceax.Estimate`][] whose value has the structure that `fn`
    returns. Its error bar includes sampling error and truncation error. For monotone
    functions `stats["bracket"]` is the pair `(low, high)` that would contain the value
    without sampling and rounding errors; both ends have the derivative of the value.
    `stats["bracket_is_proven"]` says whether the ends are proven, or rest on a guess of
    the smallest eigenvalue. With `stats["ritz_values"]` and `stats["ritz_weights"]`,
    `sum(ritz_weights * g(ritz_values))` estimates `tr g(A)` without more products.

    **Raises:** as [`traceax.trace`][]; `ValueError` if `fn` returns no arrays; a
    run-time error if the operator isn't Hermitian or `fn` isn't finite on its spectrum.
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

    For a covariance matrix, `traceax.logdet(key, kernel, 100, shift=noise)` has
    derivatives with respect to the kernel and the noise. *Use when* you need this term
    alone; [`traceax.inv_quad_logdet`][] estimates both terms of a likelihood at once.

    Pass a multiple of the identity as `shift`, not inside the operator. A shift costs
    no accuracy: the Krylov spaces stay the same, and eigenvalues almost equal to the
    shift drop out of the error. If A is tagged positive semidefinite, the shift is also
    a lower bound on the eigenvalues, and `stats` has a bracket.

    For a sparse matrix whose pattern is known at trace time, the default estimator is a
    [`traceax.LanczosQuadratureEstimator`][] with colours of the pattern, if k pays for two
    rounds of at least four colours. `k` is then optional (400 products), and `stats` have
    no Ritz values: see the page on sparse operators. For a lattice or a graph given as a
    function, pass such an estimator yourself, with colours if you have them. On 2-D
    lattices at k = 400 the default has over twice its error, and takes 15 times as long.

    The answer is exact, from one Cholesky factorisation, if you omit `k` and
    `estimator`, n is at most 4,000, and the entries can be read (see
    [`traceax.columns`][]). It is also exact for tridiagonal operators, by class or tag,
    for triangular ones with a readable diagonal, and for products of such operators
    without a shift. If such an operator isn't tagged as symmetric or positive
    semidefinite, the value is `log |det(A + shift I)|`, and `stats["sign"]` is the sign
    or phase.

    **Arguments:** as for [`traceax.trace_function`][], without `fn`, `lower` and
    `monotone`, and with

    - `operator`: symmetric or Hermitian, with `A + shift I` positive definite. If this
        is singular, the truth is minus infinity but the estimate finite: pass a shift,
        or lift a known null space (see the recipe for pseudo-determinants).
    - `shift`: a real scalar that may be traced and differentiated; or n numbers, or a
        PyTree in the operator's structure with scalar or array leaves. Several numbers
        must be positive and A positive semidefinite, unless A is diagonal, triangular
        or tridiagonal.
    - `preconditioner`: as for [`traceax.inv_quad_logdet`][]. A must be positive
        semidefinite and the shift positive, or, if the preconditioner is custom,
        `A + shift I` positive definite.
    - `trace`: the trace of A without the shift. Preconditioner columns don't use it.

    **Returns:** a [`traceax.Estimate`][], with a bracket as described above.
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

    If the operator isn't Hermitian, or has a good solver, use
    `traceax.trace(key, traceax.InverseLinearOperator(operator, solver), k)` instead.
    Its k counts solves.

    Arguments, exact answers and the returned estimate are as for [`traceax.logdet`][],
    without products, `preconditioner` and `stats["sign"]`.
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
    r"""Estimates a Schatten norm `(sum_i |lambda_i|^p)^(1/p)` of a Hermitian operator.

    `p=1` is the nuclear norm, `p=2` the Frobenius norm.

    **Arguments:** as for [`traceax.logdet`][], for any symmetric or Hermitian operator,
    without `shift`, `preconditioner` and `atol`, and with

    - `p`: a positive scalar that may be traced.
    - `rtol`: the tolerance relative to the norm.

    **Returns:** a [`traceax.Estimate`][]. Its error bar comes from the sum, through the
    derivative of the root. If the operator is tagged positive semidefinite and p is
    known to be at most 1, `stats["bracket"]` is the bracket for the norm.
    """
    where = "traceax.schatten_norm"
    hint = "write p=1.0 for the nuclear norm, p=2.0 for the Frobenius norm"
    check_real_scalar(p, "p", where, hint)
    known = known_number(p)
    if atol is not None:
        raise TypeError(f"{where}: atol must be left out, got one; pass rtol.")
    is_valid = known is None or 0 < known < math.inf
    require(is_valid, where, "p must be positive and finite", f"{p}", hint)
    dtype = init_state(key, operator, where).space.real_dtype
    power = jnp.asarray(p, dtype)
    # If the norm has relative error r, the sum has p r.
    if rtol is not None:
        rtol = power * check_tolerance(rtol, "rtol", dtype, where)
    options = Options(rtol, None, level, progress_meter, throw, trace)
    function = SpectralFunction(Power(power), monotone=known is not None and known <= 1)
    change = jtu.Partial(_norm, power)
    return estimate_function(
        where, key, function, operator, k, estimator, options, change=change
    )


def _norm(power: Float[Array, ""], total: Outcome) -> tuple[Outcome, DerivedState]:
    """The norm from an estimated sum of powers."""
    (bar,), stats = total.bars, dict(total.stats)
    unit = stats.pop("unit", jnp.ones_like(power))
    root = ft.partial(_root, power=power, unit=unit)
    if "bracket" in stats:
        stats["bracket"] = tuple(root(x) for x in stats["bracket"])
    value, positive = root(bar.mean), bar.mean > 0
    # We multiply the error bar by the slope of the root.
    slope = power.astype(value.dtype) * jnp.where(positive, bar.mean, 1)
    scaled = total.times(jnp.where(positive, value / slope, 1))
    bars = [scaled.bars[0]._replace(mean=value)]
    outcome = scaled._replace(bars=bars, stats=stats)
    return outcome, DerivedState("traceax.schatten_norm")


def _root(
    total: Float[Array, ""], power: Float[Array, ""], unit: Float[Array, ""]
) -> Float[Array, ""]:
    """`unit total^(1 / power)` for a positive total, NaN for NaN, otherwise 0."""
    positive = total > 0
    safe = jnp.where(positive, total, 1)
    exponent = (1 / power).astype(safe.dtype)
    value = jnp.where(positive, unit.astype(safe.dtype) * safe**exponent, 0)
    return jnp.where(jnp.isnan(total), total, value)


_SHIFT = "add anything else to the operator, such as a lineax.DiagonalLinearOperator"


def _is_noise_vector(operator: object, shift: object, where: str) -> bool:
    """Whether a shift is a noise vector, which structured operators take as a term."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        return False
    scalar = np.ndim(shift_of(shift, space_of(operator), where, _SHIFT)) == 0
    return not scalar and not is_known(operator, *STRUCTURES)


def _shifted(
    operator: lx.AbstractLinearOperator, shift: ArrayLike, options: Options, where: str
) -> tuple[lx.AbstractLinearOperator, Float[Array, ""] | None, Options]:
    """Returns `A + shift I`, a lower bound on its eigenvalues if A is positive
    semidefinite, and the options with its trace if A's trace is given."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        return operator, None, options  # refused later
    if isinstance(shift, int | float) and shift == 0:
        return operator, None, options
    space = space_of(operator)
    added = shift_of(shift, space, where, _SHIFT)
    total = ShiftedLinearOperator(operator, added)
    if options.trace is not None:
        hint = "it is the trace of the operator without its shift"
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
