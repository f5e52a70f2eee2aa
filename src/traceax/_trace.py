"""The entry point for traces: checks, exact structure, and the default estimator."""

import functools as ft
import operator as op
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key

from ._arguments import resolve_budget
from ._error_bar import ErrorBar, exact_bar
from ._estimate import Estimate, raise_failure
from ._estimator import outcome_of
from ._estimators.adaptive_xtrace import AdaptiveXTraceEstimator
from ._estimators.hutchinson import HutchinsonEstimator
from ._estimators.xnystrace import XNysTraceEstimator
from ._estimators.xtrace import XTraceEstimator
from ._functional import Functional, Trace
from ._linalg.dense import exact_split
from ._linalg.types import automatic
from ._operators.check import as_complex, jitted, with_data
from ._operators.entries import KnownDiagonal, Term, known_diagonal, parts
from ._operators.inverse import InverseLinearOperator, expand_inverse
from ._operators.space import is_semidefinite, parts_of, space_of
from ._outcome import Change, Evidence, Outcome, make_estimate
from ._plan import make_plan
from ._results import RESULTS
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
    if estimator is None:
        # We expand inverses only for estimates: an exact answer takes n solves anyway.
        split = _split(operator, k, expand=k < space.size or stop is not None)
    else:
        split = _Split(None, 0, None, operator)
    given, by, known = state, ("", 0), None
    if split.exact is not None:
        bars_from = jtu.Partial(_bars_from_diagonals, functional)
        evidence = Evidence(split.exact.terms, bars_from)
        known = _exact_bar(functional, split.exact), evidence
    if split.remainder is None:
        choice = CHOICES.structure
        stats = {"num_matvecs": jnp.asarray(split.num_matvecs)}
        if stop is not None:
            stats["products_needed"] = jnp.zeros((), space.real_dtype)
        assert known is not None
        outcome = Outcome([known[0]], [RESULTS.successful], stats, known[1])
    else:
        budget, choice, start = k - split.num_matvecs, CHOICES.given, state
        if estimator is None:
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
        plan = make_plan(estimator, start, budget, stop)
        outcome, start = outcome_of(plan, start)
        by, used = plan.by, outcome.stats["num_matvecs"]
        if stop is not None and choice is not CHOICES.given:
            choice = CHOICES.where(used >= space.size, CHOICES.budget, choice)
        if split.factor is not None:
            outcome = outcome.times(split.factor)
        if known is not None:
            outcome = outcome.plus(*known)
            outcome = outcome.with_stats(num_matvecs=used + split.num_matvecs)
        # The kept products are with the remainder alone: a later estimate starts over.
        is_whole = known is None and split.factor is None
        given = start.given if is_whole else state
    (bar,) = outcome.bars
    if space.has_real_trace:
        outcome = outcome._replace(bars=[bar._replace(mean=jnp.real(bar.mean))])
    if change is not None:
        outcome, given = change(outcome)
    return make_estimate(outcome.with_stats(choice=choice), state.treedef, given, by)


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


class _Exact(NamedTuple):
    """The diagonals of terms, and the moduli whose rounding errors they carry."""

    terms: list[Inexact[Array, " n"]]
    computed: Float[Array, " n"]


def _exact_bar(functional: Functional, exact: _Exact) -> ErrorBar:
    """The sum of known diagonals, whose error is 0 if nothing is rounded."""
    high, low, sizes = _split_sums(functional, exact.terms)
    rows = jnp.asarray(functional.num_rows(len(exact.computed))) * len(exact.terms)
    value = high + low
    rounded = jnp.where(rows > 1, sizes + jnp.abs(value), 0)
    rounded = rounded + functional.sum(exact.computed)
    return exact_bar(value, jnp.where(sizes > 0, rounded, 0))


def _bars_from_diagonals(
    functional: Functional, terms: list[Inexact[Array, " n"]]
) -> list[ErrorBar]:
    *_, sizes = _split_sums(functional, terms)
    moduli = functional.sum(ft.reduce(op.add, map(jnp.abs, terms)))
    value = functional.sum(ft.reduce(op.add, terms))
    return [exact_bar(value, jnp.where(sizes > 0, moduli, 0))]


def _split_sums(
    functional: Functional, terms: list[Inexact[Array, " n"]]
) -> list[Inexact[Array, "*g"]]:
    """Exact sums, the sums that are missing in them, and their terms' moduli."""
    high, low = exact_split(*terms)
    parts = high, low, list(map(jnp.abs, low))
    return [functional.sum(ft.reduce(op.add, x)) for x in parts]


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


class _Split(NamedTuple):
    """An operator as `factor * remainder` plus terms whose diagonals are known.

    `None` stands for a factor of 1, and for an absent part.
    """

    exact: _Exact | None
    num_matvecs: int
    factor: Inexact[Array, ""] | None
    remainder: lx.AbstractLinearOperator | None


class _SplitTerm(NamedTuple):
    """A term of a sum, with its diagonal if that is known, and whether it is stored."""

    term: Term
    diagonal: KnownDiagonal | None
    is_stored: bool = False


def _split(operator: lx.AbstractLinearOperator, k: int, *, expand: bool) -> _Split:
    terms = _split_sum(Term(None, operator), most_products=2)
    num_matvecs = sum(x.diagonal.num_matvecs for x in terms if x.diagonal is not None)
    if num_matvecs > k or (num_matvecs == k and any(x.diagonal is None for x in terms)):
        # The budget is too small to read every diagonal: we read those that are free.
        terms, num_matvecs = _split_sum(Term(None, operator), most_products=0), 0
    if expand and parts_of(operator, InverseLinearOperator):
        terms = [y for x in terms for y in _expand(x)]
    known = [(x.term.times(x.diagonal.read()), x) for x in terms if x.diagonal]
    remaining = [x.term for x in terms if x.diagonal is None]
    with jax.numpy_dtype_promotion("standard"):
        exact = _known_part(known) if known else None
        if not remaining:
            return _Split(exact, num_matvecs, None, None)
        # lineax drops the semidefinite tag of a multiple. So we estimate the tagged
        # operator itself, and multiply its estimate by the factor.
        factor, base = remaining[0]
        is_scaled = len(remaining) == 1 and factor is not None and is_semidefinite(base)
        if is_scaled and (known or not is_semidefinite(operator)):
            return _Split(exact, num_matvecs, jnp.asarray(factor), base)
        if not known:
            return _Split(None, num_matvecs, None, operator)
        remaining = ft.reduce(op.add, [x.times(x.operator) for x in remaining])
        return _Split(exact, num_matvecs, None, as_complex(remaining))


def _known_part(known: list[tuple[Inexact[Array, " n"], _SplitTerm]]) -> _Exact:
    dtype = jnp.result_type(*[x for x, _ in known])
    terms = [x.astype(dtype) for x, _ in known]
    factors = [
        0.0 if x.is_stored else space_of(x.term.operator).rounding for _, x in known
    ]
    sizes = [factor * jnp.abs(x) for factor, x in zip(factors, terms, strict=True)]
    return _Exact(terms, ft.reduce(op.add, sizes))


def _split_sum(term: Term, most_products: int) -> list[_SplitTerm]:
    """Splits a sum into terms, but only where this separates a known diagonal."""
    diagonal = known_diagonal(term.operator)
    if diagonal is not None and diagonal.num_matvecs > most_products:
        diagonal = None
    inner, whole = parts(term.operator), [_SplitTerm(term, diagonal)]
    if inner[0].operator is term.operator:
        is_product = isinstance(term.operator, lx.ComposedLinearOperator)
        is_stored = term.factor is None and not is_product
        is_stored &= diagonal is not None and diagonal.num_matvecs == 0
        return [whole[0]._replace(is_stored=is_stored)]
    terms = [y for x in inner for y in _split_sum(term.after(x), most_products)]
    known = [x.diagonal.num_matvecs for x in terms if x.diagonal is not None]
    if diagonal is not None:
        # We read terms where we can, because sums of their diagonals round.
        is_cheap = len(known) == len(terms) and sum(known) <= diagonal.num_matvecs
        return terms if is_cheap else whole
    # A tag holds for a sum, not for its terms. So we split only for known diagonals.
    tagged = isinstance(term.operator, lx.TaggedLinearOperator)
    return whole if tagged and not known else terms


def _expand(split: _SplitTerm) -> list[_SplitTerm]:
    """Splits an inverse into two terms with a readable diagonal, and the remainder."""
    expansion = None
    if split.diagonal is None:
        expansion = expand_inverse(split.term.operator)
    if expansion is None:
        return [split]
    diagonal = KnownDiagonal(0, lambda: expansion.diagonal)
    remainder = split.term.after(Term(None, expansion.remainder))
    return [_SplitTerm(split.term, diagonal), _SplitTerm(remainder, None)]
