"""From arguments of spectral functions, whatever their door, to an estimate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Key

from .._accuracy.tolerance import Stop, make_stop
from .._arguments import check_budget
from .._drive import limits, run_estimator
from .._estimate import Estimate, raise_failure, with_slopes
from .._linalg.tall import largest_entry
from .._operators.block import is_known
from .._operators.entries import known_diagonal
from .._progress import NO_PROGRESS_METER, ProgressMeter
from .._results import RESULTS
from .base import (
    SpectralEstimator,
    SpectralState,
    exact_stats,
    init_spectral_state,
    spectral_outcome,
)
from .krylov_aware import KrylovAwareEstimator


class Options(NamedTuple):
    """The options that all doors share; see [`traceax.trace_function`][]."""

    rtol: ArrayLike | None = None
    atol: ArrayLike | None = None
    level: float = 0.95
    progress_meter: ProgressMeter = NO_PROGRESS_METER
    throw: bool = True
    trace: ArrayLike | None = None

    def stop(self, dtype: Any, where: str) -> Stop | None:
        """What a tolerance is, of an estimate of that dtype; `None` without one."""
        return make_stop(*self[:4], dtype, where)


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
    """`trace_function`, by the name of a door in errors."""
    state = init_spectral_state(
        where, key, operator, fn, lower, monotone, options.trace
    )
    stop, throw = options.stop(state.space.compute_dtype, where), options.throw
    if estimator is None:
        exact = _sum_over_diagonal(state, k, where)
        if exact is not None:
            if stop is not None:
                needed = exact.stats["num_matvecs"].astype(state.space.real_dtype)
                stats = {**exact.stats, "products_needed": needed}
                exact = eqx.tree_at(lambda e: e.stats, exact, stats)
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
        ends = tuple(with_slopes(x, estimate.value) for x in estimate.stats["bracket"])
        estimate = eqx.tree_at(lambda e: e.stats["bracket"], estimate, ends)
    return raise_failure(estimate) if throw else estimate


def _sum_over_diagonal(
    state: SpectralState, k: int | None, where: str
) -> Estimate | None:
    """The sum over a diagonal, where structure gives it for at most k products."""
    operator, space = state.operator, state.space
    diagonal = known_diagonal(operator) if is_known(operator, lx.is_diagonal) else None
    if diagonal is None:
        return None
    if k is not None and diagonal.num_matvecs > check_budget(k, where):
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
    results = [result] * len(values)
    stats = {"num_matvecs": diagonal.num_matvecs, "result": results, **function.unit}
    stats.update(exact_stats(state, values, points))
    weights = jnp.ones_like(points)
    outcome = spectral_outcome(
        function, space, values, errors, freedoms, stats, points, weights
    )
    return Estimate(*outcome[:4], state)
