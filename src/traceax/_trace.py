"""The front door: checks, structure shortcuts, the choice of an estimator."""

import functools as ft
import operator as op
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, Key

from ._arguments import resolve_budget
from ._error_bar import ErrorBar, exact_bar
from ._estimate import Estimate, raise_failure
from ._estimator import estimate_state
from ._estimators.adaptive_xtrace import AdaptiveXTraceEstimator
from ._estimators.hutchinson import HutchinsonEstimator
from ._estimators.xnystrace import XNysTraceEstimator
from ._estimators.xtrace import XTraceEstimator
from ._functional import Functional, Trace
from ._operators.check import as_complex, jitted, with_data
from ._operators.entries import KnownDiagonal, Term, known_diagonal, parts
from ._operators.inverse import InverseLinearOperator, expand_inverse
from ._operators.space import is_semidefinite, parts_of
from ._results import RESULTS, finite_or_failed
from ._rule import Evidence
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
    """How [`traceax.trace`][] made an estimate, and why: `stats["choice"]`.

    `CHOICES[estimate.stats["choice"]]` is the reason in words.
    """

    given = "The estimator that the caller gave."
    structure = "Exact: the structure of the operator gives its diagonal."
    budget = "Exact: the budget allows a product with every coordinate vector."
    xnystrace = "XNysTrace: what is estimated is known to be semidefinite."
    adaptive = "AdaptiveXTrace: what is estimated is not known to be semidefinite."
    xtrace = (
        "XTrace: what is estimated is not known to be semidefinite, and it is a diagonal, "
        "or the budget isn't known in advance."
    )
    hutchinson = "Hutchinson: the budget is too small for the others."
    signs = "Hutchinson: of a batch of derivatives signs take the least time for their error."


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

    Without an estimator:

    1. parts whose diagonal is known are summed, never estimated: identity, diagonal,
        tridiagonal, triangular and unit-diagonal operators, by class or by tag, and
        products of these where the diagonal is the product of diagonals. Sums,
        scalings, negations, tags and transposes are looked through, so that of
        `K + D` only `K` is estimated, and a factor doesn't hide a semidefinite tag.
        Of a [`traceax.InverseLinearOperator`][] two terms of a series, see there;
    2. the rest is exact if the budget allows a product with every coordinate vector;
    3. else [`traceax.XNysTraceEstimator`][] if it is known to be positive or negative
        semidefinite (and `k >= 3`). If not, [`traceax.AdaptiveXTraceEstimator`][] (and
        `k >= 8`), or [`traceax.XTraceEstimator`][] with a tolerance (and `k >= 4`);
        [`traceax.HutchinsonEstimator`][] for smaller budgets.

    `stats["choice"]` tells which, a [`traceax.CHOICES`][] item.

    Differentiable with respect to `operator`, forward and reverse, to any order: the
    derivative of the value is an unbiased estimate of the derivative of the trace.

    **Arguments:**

    - `key`: a single key, typed or legacy.
    - `operator`: a square lineax operator, over arrays or PyTrees, real or complex.
    - `k`: a positive Python int, the budget of products. It may be left out with a
        tolerance: then 1,000 products are the most, and fewer where blocks of 2^27
        entries are full before; 2 n for `n <= 1000`, to end with the exact answer.
    - `estimator`: a [`traceax.TraceEstimator`][], used on the whole operator as given.
    - `rtol`, `atol`: if one is given, products are taken until half of the interval at
        `level` is at most `atol + rtol |value|`, and at most k of them. If `k >= n`, the
        last n are for the exact answer, where those before don't meet the tolerance. Each
        a real number, which may be traced: one program serves all. The interval is
        valid though it was judged repeatedly; see the page on tolerances. Taken by
        [`traceax.HutchinsonEstimator`][], [`traceax.XTraceEstimator`][] and
        [`traceax.XNysTraceEstimator`][].
    - `level`: of that interval, a Python number between 0 and 1.
    - `progress_meter`: shows how far an estimate to a tolerance is; nothing by default.
        Without a tolerance it does nothing, as `level`.
        See [`traceax.TextProgressMeter`][].
    - `throw`: whether a failure raises an error at run time, or is only reported in
        `result`. A tolerance that is not met is none: the value is kept, `result` says
        so, `stats["products_needed"]` how many products it would take at this rate, and
        outside of a program so does a warning, unless `throw=False`.

    **Returns:**

    A [`traceax.Estimate`][]. Its `state` belongs to the estimator that was used. Where an
    exact part or a factor was taken apart, it is one that begins anew, of the whole
    operator: what was kept is of a part.

    **Raises:**

    - `TypeError` for a wrong key, operator, `k` or estimator, `ValueError` for an
        operator that isn't square or mixes real and complex leaves.
    - A run-time error for what only values can tell (see [`traceax.RESULTS`][]).
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
) -> Estimate:
    """The estimate of a new state's functional: exact parts, and an estimator for the rest."""
    k = resolve_budget(k, stop, state.space.size, where)
    if estimator is not None:
        _check_estimator(estimator, state.functional, where)
    estimate = _estimate(with_data(state), k, estimator, stop)
    return raise_failure(estimate) if throw else estimate


@jitted
def _estimate(
    state: TraceState, k: int, estimator: TraceEstimator | None, stop: Stop | None
) -> Estimate:
    operator, space, functional = state.operator, state.space, state.functional
    if estimator is None:
        # An exact answer takes as many solves without its terms apart.
        split = _split(operator, k, expand=k < space.size or stop is not None)
    else:
        split = _Split(None, 0, None, operator)
    if split.remainder is None:
        choice = CHOICES.structure
        nothing = functional.sum(jnp.zeros(space.size, space.compute_dtype))
        stats = {"num_matvecs": jnp.asarray(0)}
        stats["degrees_of_freedom"] = jnp.full_like(nothing, jnp.inf, space.real_dtype)
        if stop is not None:
            stats["products_needed"] = jnp.zeros((), space.real_dtype)
        error = nothing.real
        if split.exact is not None and split.num_matvecs:  # products are rounded
            error = exact_bar(error, functional.sum(jnp.abs(split.exact)))[1]
        evidence = Evidence(nothing, jtu.Partial(_judge_exact))
        estimate = Estimate(
            nothing, error, RESULTS.successful, stats, state, evidence=evidence
        )
    else:
        budget, choice, part = k - split.num_matvecs, CHOICES.given, state
        if estimator is None:
            if split.remainder is not operator:
                part = TraceState(state.key, split.remainder, functional=functional)
            estimator, choice = _choose(part, budget, stop)
        else:
            part = estimator.init(state.key, operator)
            if not isinstance(functional, Trace):
                part = TraceState(part.key, part.operator, functional=functional)
            part = checked_state(part, estimator, "traceax.trace")
        if stop is not None:
            exact = None if split.exact is None else functional.sum(split.exact)
            stop = stop.for_part(split.factor, exact)
        estimate = estimate_state(estimator, part, budget, stop)
        if stop is not None and choice is not CHOICES.given:
            all_taken = estimate.stats["num_matvecs"] >= space.size
            choice = CHOICES.where(all_taken, CHOICES.budget, choice)
    if split.exact is not None or split.factor is not None:
        real = space.has_real_trace
        # What was kept is of the rest alone: the state is one that begins anew.
        estimate = _combine(estimate, state, split, real=real)
    return set_choice(estimate, choice)


def _check_estimator(estimator: object, functional: Functional, where: str) -> None:
    if not isinstance(estimator, TraceEstimator):
        raise TypeError(
            f"{where}: estimator must be a traceax.TraceEstimator, got "
            f"{estimator!r}; pass an instance, such as traceax.XTraceEstimator()."
        )
    if not isinstance(functional, Trace) and not estimator.gives_diagonals:
        raise TypeError(
            f"{where}: estimator must be one that gives diagonals and traces of leaves, "
            f"got {estimator!r}; use traceax.HutchinsonEstimator() or "
            "traceax.XTraceEstimator()."
        )


def _combine(
    estimate: Estimate, state: TraceState, split: "_Split", *, real: bool
) -> Estimate:
    """`factor * estimate + exact part`."""
    space = state.space
    estimate = estimate.replaced(
        value=estimate.value.astype(space.compute_dtype),
        standard_error=estimate._standard_error.astype(space.real_dtype),
    )
    if split.factor is not None:
        estimate = estimate.times(split.factor.astype(space.compute_dtype))
    value, error = estimate.value, estimate._standard_error
    if split.exact is not None:
        exact = state.functional.sum(split.exact)
        # The sum is rounded; an error of 0 says that all of it is exact.
        magnitude = jnp.abs(value) + jnp.abs(exact)
        rounding = 4 * jnp.finfo(error.dtype).eps * magnitude
        error = jnp.where(error > 0, jnp.maximum(error, rounding), error)
        value = value + exact
    if real:
        value = jnp.real(value)
    used = estimate.stats["num_matvecs"] + split.num_matvecs
    return estimate.replaced(
        value=value,
        standard_error=error,
        result=finite_or_failed(value, estimate.result),
        stats={**estimate.stats, "num_matvecs": used},
        state=state,
    )


def _judge_exact(value: Array) -> list[ErrorBar]:
    error = jnp.zeros_like(value.real)
    return [ErrorBar(value, error, jnp.full_like(error, jnp.inf))]


def set_choice(estimate: Estimate, choice: CHOICES) -> Estimate:
    """The estimate, with a choice among its `stats`."""
    stats = {**estimate.stats, "choice": choice}
    return eqx.tree_at(lambda e: e.stats, estimate, stats)


def _choose(
    state: TraceState, k: int, stop: Stop | None
) -> tuple[TraceEstimator, CHOICES]:
    size, fixed = state.space.size, stop is None
    if k >= size and (fixed or loop_products(k, size) == 0):
        return HutchinsonEstimator(), CHOICES.budget
    # Of a single entry probes of any length see little; signs see the least of the others.
    given = RademacherSampler(), False
    if isinstance(state.functional, Trace):
        given = NormalSampler(), True
    semidefinite = state.space.is_semidefinite
    fixed = fixed and isinstance(state.functional, Trace)
    # Two products leave XNysTrace a single sample pair: intervals hold less often.
    if semidefinite and k >= 3:
        return XNysTraceEstimator(*given), CHOICES.xnystrace
    if not semidefinite and fixed and k >= 8:
        return AdaptiveXTraceEstimator(), CHOICES.adaptive
    if not semidefinite and not fixed and k >= 4:
        return XTraceEstimator(*given), CHOICES.xtrace
    return HutchinsonEstimator(), CHOICES.hutchinson


class _Split(NamedTuple):
    """An operator as `factor * remainder` and a part of known diagonal.

    `None` stands for a factor of 1, and for a part of 0.
    """

    exact: Inexact[Array, " n"] | None
    num_matvecs: int
    factor: Inexact[Array, ""] | None
    remainder: lx.AbstractLinearOperator | None


class _Known(NamedTuple):
    """A term of a sum, perhaps of known diagonal."""

    term: Term
    diagonal: KnownDiagonal | None


def _split(operator: lx.AbstractLinearOperator, k: int, *, expand: bool) -> _Split:
    found = _known(Term(None, operator), most_products=2)
    used = sum(x.diagonal.num_matvecs for x in found if x.diagonal is not None)
    if used > k or (used == k and any(x.diagonal is None for x in found)):
        # Too few products to read every diagonal: take those that cost none.
        found, used = _known(Term(None, operator), most_products=0), 0
    if expand and parts_of(operator, InverseLinearOperator):
        found = [y for x in found for y in _expanded(x)]
    known = [x.term.times(x.diagonal.read()) for x in found if x.diagonal]
    rest = [x.term for x in found if x.diagonal is None]
    with jax.numpy_dtype_promotion("standard"):
        exact = ft.reduce(op.add, known) if known else None
        if not rest:
            return _Split(exact, used, None, None)
        # A factor hides whether the operator is semidefinite.
        factor, inner = rest[0]
        multiple = len(rest) == 1 and factor is not None and is_semidefinite(inner)
        if multiple and (known or not is_semidefinite(operator)):
            return _Split(exact, used, jnp.asarray(factor), inner)
        if not known:
            return _Split(None, used, None, operator)
        rest = ft.reduce(op.add, [x.times(x.operator) for x in rest])
        return _Split(exact, used, None, as_complex(rest))


def _known(term: Term, most_products: int) -> list[_Known]:
    """The terms of a sum, split only as far as it tells diagonals apart."""
    diagonal = known_diagonal(term.operator)
    if diagonal is not None and diagonal.num_matvecs <= most_products:
        return [_Known(term, diagonal)]
    inner = parts(term.operator)
    if inner[0].operator is term.operator:
        return [_Known(term, None)]
    found = [y for x in inner for y in _known(term.after(x), most_products)]
    # Tags say nothing of a part.
    tagged = isinstance(term.operator, lx.TaggedLinearOperator)
    if tagged and all(x.diagonal is None for x in found):
        return [_Known(term, None)]
    return found


def _expanded(known: _Known) -> list[_Known]:
    """Of an inverse the terms whose diagonal is read, and the remainder."""
    expansion = None
    if known.diagonal is None:
        expansion = expand_inverse(known.term.operator)
    if expansion is None:
        return [known]
    diagonal = KnownDiagonal(0, lambda: expansion.diagonal)
    remainder = known.term.after(Term(None, expansion.remainder))
    return [_Known(known.term, diagonal), _Known(remainder, None)]
