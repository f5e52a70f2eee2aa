"""Traces of functions of an operator: the front door, which other functions share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Key

from ._accuracy.tolerance import Stop, make_stop
from ._arguments import check_budget
from ._drive import limits, run_estimator
from ._estimate import RESULTS, Estimate, raise_failure, with_slopes
from ._linalg.tall import largest_entry
from ._operators.block import is_known
from ._operators.check import checked_operator
from ._operators.entries import known_diagonal
from ._progress import NO_PROGRESS_METER, ProgressMeter
from ._spectral.base import (
    SpectralEstimator,
    SpectralState,
    init_spectral_state,
    spectral_outcome,
)
from ._spectral.krylov_aware import KrylovAwareEstimator


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

    Differentiable with respect to `operator`, and to what `fn` closes over: first
    derivatives of any kind, and second derivatives with respect to the operator. They
    are estimates of the derivatives of `tr f(A)`, not derivatives of an algorithm.

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
        place of guessed: see [`traceax.KrylovAwareEstimator`][]. Nothing checks this.
    - `trace`: that of `operator`, a real scalar, which may be traced, where it is known but
        can't be read: of kernels, matrices, dense or sparse, and sums, multiples and shifts
        of these the diagonal is read. It takes most of the error of probes away, at no
        product, and has no part in derivatives. A wrong one need not show in the error
        bar.
    - `rtol`, `atol`: if one is given, products are taken until half of the interval at
        `level` is at most `atol + rtol |value|`, for every leaf of what `fn` returns,
        and at most k of them. If `k >= n`, the last n are for the exact answer, where
        those before don't meet the tolerance. Each a real number, which may be traced:
        one program serves all. Taken by [`traceax.KrylovAwareEstimator`][]; see the page
        on tolerances.
    - `level`: of that interval, a Python number between 0 and 1.
    - `progress_meter`: shows how far an estimate to a tolerance is; nothing by default.
    - `throw`: whether a failure raises an error at run time, or is only reported in
        `result`.

    **Returns:**

    A [`traceax.Estimate`][], whose value is of the structure that `fn` returns. Its
    error bar holds the error of probes and that of the Krylov space.
    For monotone functions `stats["bracket"]` is the pair of the ends between which the
    value would be but for the error of probes; `stats["bracket_is_proven"]` says whether
    they are, or rest on a guess of the smallest eigenvalue. The ends have the derivative
    of the value. `stats["ritz_values"]` and
    `stats["ritz_weights"]` evaluate more functions without another product:
    `sum(ritz_weights * g(ritz_values))` estimates `tr g(A)`.

    **Raises:**

    - `TypeError` for a wrong key, function, operator, `k` or estimator, `ValueError`
        for an operator that isn't square, or a function that isn't one of scalars.
    - A run-time error for an operator that isn't Hermitian, a function that isn't
        finite on its spectrum, and whatever failure [`traceax.RESULTS`][] names.
    """
    where = "traceax.trace_function"
    if not isinstance(operator, lx.AbstractLinearOperator):
        checked_operator(operator, where, "(key, fn, operator, k)")
    options = Options(rtol, atol, level, progress_meter, throw, trace)
    return estimate_function(
        where, key, fn, operator, k, estimator, options, lower, monotone
    )


class Options(NamedTuple):
    """The options that functions of this kind share; see [`traceax.trace_function`][]."""

    rtol: ArrayLike | None = None
    atol: ArrayLike | None = None
    level: float = 0.95
    progress_meter: ProgressMeter = NO_PROGRESS_METER
    throw: bool = True
    trace: ArrayLike | None = None

    def stop(self, dtype: Any, where: str) -> Stop | None:
        """What a tolerance is, of an estimate of that dtype; `None` without one."""
        return make_stop(
            self.rtol, self.atol, self.level, self.progress_meter, dtype, where
        )


def estimate_function(
    where: str,
    key: Key[Array, ""],
    fn: Callable[[Float[Array, ""]], Any],
    operator: lx.AbstractLinearOperator,
    k: int | None,
    estimator: SpectralEstimator | None,
    options: Options,
    lower: ArrayLike | None = None,
    monotone: bool = False,
) -> Estimate:
    """`trace_function`, by another name in errors."""
    state = init_spectral_state(
        where, key, operator, fn, lower, monotone, options.trace
    )
    space = state.space
    k = k if k is None else check_budget(k, where)
    stop, throw = options.stop(space.compute_dtype, where), options.throw
    if estimator is None:
        exact = _sum_over_diagonal(state, k)
        if exact is not None:
            return raise_failure(exact) if throw else exact
        estimator = KrylovAwareEstimator()
    elif not isinstance(estimator, SpectralEstimator):
        raise TypeError(
            f"{where}: estimator must be a traceax.SpectralEstimator, got "
            f"{estimator!r}; pass an instance, such as "
            "traceax.KrylovAwareEstimator()."
        )
    most, stop = limits(estimator, state, k, stop, options.progress_meter, where)
    estimate = run_estimator(estimator, state, most, stop, throw=False)
    if "bracket" in estimate.stats:
        low, high = estimate.stats["bracket"]
        ends = with_slopes(low, estimate.value), with_slopes(high, estimate.value)
        stats = {**estimate.stats, "bracket": ends}
        estimate = eqx.tree_at(lambda e: e.stats, estimate, stats)
    return raise_failure(estimate) if throw else estimate


def _sum_over_diagonal(state: SpectralState, k: int | None) -> Estimate | None:
    """The sum over a diagonal, where structure gives it for at most k products."""
    operator, space = state.operator, state.space
    diagonal = known_diagonal(operator) if is_known(lx.is_diagonal, operator) else None
    if diagonal is None or (k is not None and diagonal.num_matvecs > k):
        return None
    entries = diagonal.read().astype(space.compute_dtype)
    points = jnp.real(entries)
    imaginary = largest_entry(entries - points.astype(entries.dtype))
    rounding = 100 * jnp.sqrt(jnp.finfo(points.dtype).eps) * largest_entry(entries)
    result = RESULTS.where(
        imaginary > rounding, RESULTS.not_hermitian, RESULTS.successful
    )
    function = state.function.in_range(points)
    values = [jnp.sum(f) for f in function(points)]
    errors = [jnp.zeros_like(points, shape=()) for _ in values]
    freedoms = [jnp.asarray(jnp.inf) for _ in values]
    stats = {"num_matvecs": diagonal.num_matvecs, "result": result, **function.unit}
    weights = jnp.ones_like(points)
    outcome = spectral_outcome(
        function, space, values, errors, freedoms, stats, points, weights
    )
    return Estimate(*outcome[:4], state)
