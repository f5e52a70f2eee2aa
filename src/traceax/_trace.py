"""The entry point for traces: checks, exact structure, and the default estimator."""

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Key

from ._arguments import resolve_budget
from ._estimate import Estimate, raise_failure
from ._estimator import outcome_of
from ._estimators.adaptive_xtrace import AdaptiveXTraceEstimator
from ._estimators.hutchinson import HutchinsonEstimator
from ._estimators.xnystrace import XNysTraceEstimator
from ._estimators.xtrace import XTraceEstimator
from ._exact.diagonals import Split, split_known
from ._functional import Functional, Trace
from ._linalg.types import automatic
from ._operators.check import jitted, with_data
from ._outcome import Change, make_estimate
from ._plan import ExactAnswer, make_plan
from ._samplers import NormalSampler, RademacherSampler
from ._state import TraceState, checked_state, init_state
from ._tolerance import (
    NO_PROGRESS_METER,
    ProgressMeter,
    Stop,
    loop_products,
    make_stop,
)
from ._trace_estimator import TraceEstimator


class CHOICES(eqx.Enumeration):
    """Which estimator [`traceax.trace`][] used, and why: `stats["choice"]`.

    `CHOICES[estimate.stats["choice"]]` is the reason in words.
    """

    given = "The estimator that the caller passed."
    structure = "Exact: the operator's structure gives its diagonal."
    budget = "Exact: the budget allows a product with every coordinate vector."
    xnystrace = "XNysTrace: the estimated part is known to be semidefinite."
    adaptive = "AdaptiveXTrace: the estimated part is not known to be semidefinite."
    xtrace = (
        "XTrace: the estimated part is not known to be semidefinite, and "
        "AdaptiveXTrace supports neither diagonals nor tolerances."
    )
    hutchinson = "Hutchinson: the budget is too small for the other estimators."
    signs = "Hutchinson: over a batch, random signs reach an error in the least time."


def trace(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: TraceEstimator | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates the trace of a linear operator from at most `k` products with it.

    ```python
    estimate = traceax.trace(jax.random.key(0), operator, 40)
    estimate.value, estimate.standard_error
    ```

    If you pass no estimator:

    1. `trace` expands sums, scalings, negations, tags and transposes, and adds up the
        terms whose class or tag gives their diagonal: identity, diagonal, tridiagonal,
        triangular and unit-diagonal operators, products whose diagonal is the product
        of the diagonals, and two terms of an [`traceax.InverseLinearOperator`][]'s
        series. For `K + D` it estimates only `K`; for `2 K` it uses `K`'s tag.
    2. The remainder's trace is exact if k allows products with all coordinate vectors.
    3. Otherwise `trace` estimates it. A semidefinite remainder, positive or negative,
        goes to [`traceax.XNysTraceEstimator`][] from `k = 3` on. Any other goes to
        [`traceax.AdaptiveXTraceEstimator`][] from `k = 8` on. With a tolerance, it goes
        to [`traceax.XTraceEstimator`][] from `k = 4` on instead. Smaller budgets go to
        [`traceax.HutchinsonEstimator`][].

    `stats["choice"]`, a [`traceax.CHOICES`][] item, says which estimator was used.

    You can differentiate the value with respect to `operator`, in forward and reverse
    mode, to any order. For a budget without a tolerance, the derivative is unbiased.

    **Arguments:**

    - `key`: a single key, typed or legacy.
    - `operator`: a square lineax operator on arrays or PyTrees, real or complex.
    - `k`: the budget of products, a positive Python int. With a tolerance you may omit
        it. The cap is then `2 n` up to `n = 1000`, with n for the exact answer. For
        larger n it is 1,000, or less if blocks would have more than 2^27 entries. A
        function of complex vectors takes two products more, which test its linearity.
    - `estimator`: a [`traceax.TraceEstimator`][]. It estimates the operator as a whole.
    - `rtol`, `atol`: the tolerance. If you give either, `trace` takes products until
        half of the confidence interval is at most `atol + rtol |value|`, or k are used.
        If `k >= n`, it reserves n for the exact answer, in case the loop fails. `rtol`
        and `atol` are real and may be traced: one program serves all tolerances. The
        interval is valid although the loop checks it repeatedly. The estimators
        [`traceax.HutchinsonEstimator`][], [`traceax.XTraceEstimator`][] and
        [`traceax.XNysTraceEstimator`][] take a tolerance; see the page on tolerances.
    - `level`: the level of this interval, a Python number between 0 and 1.
    - `progress_meter`: shows the progress towards a tolerance, for example a
        [`traceax.TextProgressMeter`][]. By default nothing is shown.
    - `throw`: whether a failure raises a run-time error. If `False`, only `result`
        reports it. An unmet tolerance is no failure: you get the value. `result`
        reports the miss, and `stats["products_needed"]` forecasts how many products
        would be enough. Outside of jitted code `throw=True` gives a warning.

    **Returns:** a [`traceax.Estimate`][]. Its `state` belongs to the estimator that was
    used. If `trace` split off known terms or a factor, a later estimate from `state`
    starts over with the whole operator, because the products are with the remainder.

    **Raises:** `TypeError` for a wrong key, operator, `k` or estimator; `ValueError`
    for an operator that isn't square, or that mixes real and complex leaves; a run-time
    error for failures that depend on values (see [`traceax.RESULTS`][]).
    """
    where = "traceax.trace"
    state = init_state(key, operator, where)
    dtype = state.space.compute_dtype
    stop = make_stop(rtol, atol, level, progress_meter, dtype, where)
    return estimate_whole(where, state, k, estimator, stop, throw=throw)


def estimate_whole(
    where: str,
    state: TraceState,
    k: int | None,
    estimator: TraceEstimator | None,
    stop: Stop | None = None,
    *,
    throw: bool,
    change: Change | None = None,
) -> Estimate:
    """Estimates a new state's functional: known terms exactly, the rest by products."""
    k = resolve_budget(k, stop, state.space.size, where)
    if estimator is not None:
        _check_estimator(estimator, state.functional, where)
    estimate = _estimate(with_data(state), k, estimator, stop, change)
    return raise_failure(estimate) if throw else estimate


@jitted
@automatic
def _estimate(
    state: TraceState,
    k: int,
    estimator: TraceEstimator | None,
    stop: Stop | None,
    change: Change | None,
) -> Estimate:
    operator, space, functional = state.operator, state.space, state.functional
    split, choice = Split(None, 0, None, operator), CHOICES.given
    if estimator is None:
        # We expand inverses only for estimates: an exact answer takes n solves anyway.
        expand = k < space.size or stop is not None
        split = split_known(operator, k, expand=expand)
    budget, start, exact, known = k - split.num_matvecs, state, None, None
    if split.known is not None and split.remainder is not None:
        known = split.known.sum(functional)
    if split.remainder is None:
        exact, choice = ExactAnswer("structure", split.outcome), CHOICES.structure
    elif estimator is None:
        if split.remainder is not operator:
            start = TraceState(state.key, split.remainder, functional=functional)
        estimator, choice = _choose(start, budget, stop)
    else:
        start = estimator.init(state.key, operator)
        if not isinstance(functional, Trace):
            start = TraceState(start.key, start.operator, functional=functional)
        start = checked_state(start, estimator, "traceax.trace")
    if stop is not None:
        stop = stop.for_part(split.factor, None if known is None else known[0].mean)
    plan = make_plan(estimator, start, budget, stop, exact=exact)
    outcome, start = outcome_of(plan, start)
    given = start.given
    if split.remainder is not None:
        used = outcome.stats["num_matvecs"]
        if stop is not None and choice is not CHOICES.given:
            choice = CHOICES.where(used >= space.size, CHOICES.budget, choice)
        if split.factor is not None:
            outcome = outcome.times(split.factor)
        if known is not None:
            outcome = outcome.plus(*known)
            outcome = outcome.with_stats(num_matvecs=used + split.num_matvecs)
        if known is not None or split.factor is not None:
            # The kept products are with the remainder: a later estimate starts over.
            given = state
    (bar,) = outcome.bars
    if space.has_real_trace:
        outcome = outcome._replace(bars=[bar._replace(mean=jnp.real(bar.mean))])
    if change is not None:
        outcome, given = change(outcome)
    outcome = outcome.with_stats(choice=choice)
    return make_estimate(outcome, state.treedef, given, plan.by)


def _check_estimator(estimator: object, functional: Functional, where: str) -> None:
    if not isinstance(estimator, TraceEstimator):
        raise TypeError(
            f"{where}: estimator must be a traceax.TraceEstimator, got "
            f"{estimator!r}; pass an instance, such as traceax.XTraceEstimator()."
        )
    if not isinstance(functional, Trace) and not estimator.gives_diagonals:
        raise TypeError(
            f"{where}: estimator must support diagonals and leaf traces, got "
            f"{estimator!r}; use traceax.HutchinsonEstimator() or "
            "traceax.XTraceEstimator()."
        )


def set_choice(estimate: Estimate, choice: CHOICES) -> Estimate:
    """Adds a choice to the `stats` of an estimate."""
    stats = {**estimate.stats, "choice": choice}
    return eqx.tree_at(lambda e: e.stats, estimate, stats)


def _choose(
    state: TraceState, k: int, stop: Stop | None
) -> tuple[TraceEstimator, CHOICES]:
    size, fixed_budget = state.space.size, stop is None
    if k >= size and (fixed_budget or loop_products(k, size) == 0):
        return HutchinsonEstimator(), CHOICES.budget
    # Probe lengths hardly affect single diagonal entries, so diagonals need no
    # resphering. Random signs add the least noise from other entries.
    sampling = RademacherSampler(), False
    if isinstance(state.functional, Trace):
        sampling = NormalSampler(), True
    semidefinite = state.space.is_semidefinite
    can_adapt = fixed_budget and isinstance(state.functional, Trace)
    # With two products XNysTrace has one pair of samples, and its intervals are short.
    if semidefinite and k >= 3:
        return XNysTraceEstimator(*sampling), CHOICES.xnystrace
    if not semidefinite and can_adapt and k >= 8:
        return AdaptiveXTraceEstimator(), CHOICES.adaptive
    if not semidefinite and not can_adapt and k >= 4:
        return XTraceEstimator(*sampling), CHOICES.xtrace
    return HutchinsonEstimator(), CHOICES.hutchinson
