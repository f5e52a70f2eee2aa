"""From the arguments of an entry point for spectral functions to an estimate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import lineax as lx
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Key

from ._arguments import known_number
from ._coloured_default import coloured_quadrature, scaled_outcome
from ._estimate import Estimate, raise_failure
from ._estimator import outcome_of
from ._exact.cholesky import BY_CHOLESKY, is_small
from ._exact.structure import by_structure
from ._linalg.types import automatic
from ._operators.check import jitted
from ._operators.entries import readable_data
from ._outcome import Change, make_estimate
from ._plan import Plan, make_plan
from ._spectral.base import SpectralEstimator
from ._spectral.function import LOG, RECIPROCAL
from ._spectral.krylov_aware import KrylovAwareEstimator
from ._spectral.state import SpectralState, init_spectral_state
from ._tolerance import NO_PROGRESS_METER, ProgressMeter, Stop, make_stop


class Options(NamedTuple):
    """The options that all entry points share: see [`traceax.trace_function`][]."""

    rtol: ArrayLike | None = None
    atol: ArrayLike | None = None
    level: float = 0.95
    progress_meter: ProgressMeter = NO_PROGRESS_METER
    throw: bool = True
    trace: ArrayLike | None = None

    def stop(self, dtype: DTypeLike, where: str) -> Stop | None:
        """The stopping rule for a tolerance, or `None` without one."""
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
    change: Change | None = None,
) -> Estimate:
    """Like `trace_function`. Errors name the entry point `where`."""
    state = init_spectral_state(
        where, key, operator, fn, lower, monotone, options.trace
    )
    stop, exact = options.stop(state.space.compute_dtype, where), None
    scaled = False
    if estimator is None:
        exact = by_structure(state, k, where)
        if exact is None and k is None and is_small(state.operator):
            lower = None if state.lower is None else known_number(state.lower)
            indefinite = not state.has_bracket or (lower is not None and lower < 0)
            inverse = state.function.evaluates(RECIPROCAL)
            if state.function.evaluates(LOG) or (inverse and not indefinite):
                exact = BY_CHOLESKY
            elif inverse and stop is None:
                k = state.space.size  # we use eigenvalues, as some may be negative
        estimator = KrylovAwareEstimator()
        # Tolerances need a loop.
        if exact is None and stop is None and state.function.evaluates(LOG):
            found = coloured_quadrature(state.operator, k)
            if found is not None:
                (estimator, k), scaled = found, True
    elif not isinstance(estimator, SpectralEstimator):
        raise TypeError(
            f"{where}: estimator must be a traceax.SpectralEstimator, got "
            f"{estimator!r}; pass an instance, such as "
            "traceax.KrylovAwareEstimator()."
        )
    plan = make_plan(estimator, state, k, stop, options.progress_meter, where, exact)
    data, run = readable_data(state.operator), _jitted
    if data is None:
        data, run = state.operator, _estimate
    state = eqx.tree_at(lambda x: x.operator, state, data)
    estimate = run(plan, state, change, scaled)
    return raise_failure(estimate) if options.throw else estimate


@automatic
def _estimate(
    plan: Plan, state: SpectralState, change: Change | None, scaled: bool
) -> Estimate:
    if scaled:
        outcome, given = scaled_outcome(plan, state), state
    else:
        outcome, resumed = outcome_of(plan, state)
        given = resumed.given
    if change is not None:
        outcome, given = change(outcome)
    return make_estimate(outcome, state.treedef, given, plan.by)


_jitted = jitted(_estimate)
