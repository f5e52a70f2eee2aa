"""The front door: checks, structure shortcuts, the choice of an estimator."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, Key

from ._base import TraceEstimator, estimate_until
from ._estimate import RESULTS, Estimate, raise_failure
from ._estimators.hutchinson import HutchinsonEstimator
from ._estimators.xnystrace import XNysTraceEstimator
from ._estimators.xtrace import XTraceEstimator
from ._failure import explain
from ._known_diagonal import known_diagonal
from ._operator import (
    Space,
    check_operator,
    has_real_trace,
    is_negative_semidefinite,
    is_positive_semidefinite,
    space_of,
)
from ._progress import NO_PROGRESS_METER, ProgressMeter, check_meter
from ._state import TraceState, check_budget, check_key
from ._tolerance import SMALL, make_tolerance


class CHOICES(eqx.Enumeration):
    """How [`traceax.trace`][] made an estimate, and why: `stats["choice"]`.

    `CHOICES[estimate.stats["choice"]]` is the reason in words.
    """

    given = "The estimator that the caller gave."
    structure = "Exact: the structure of the operator gives its diagonal."
    budget = "Exact: the budget allows a product with every coordinate vector."
    xnystrace = "XNysTrace: what is estimated is known to be semidefinite."
    xtrace = "XTrace: what is estimated is not known to be semidefinite."
    hutchinson = "Hutchinson: the budget is too small for XTrace or XNysTrace."


def trace(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
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
        `K + D` only `K` is estimated, and a factor doesn't hide a semidefinite tag;
    2. the rest is exact if the budget allows a product with every coordinate vector;
    3. else [`traceax.XNysTraceEstimator`][] if it is known to be positive or negative
        semidefinite (and `k >= 2`), [`traceax.XTraceEstimator`][] if not (and
        `k >= 4`), and [`traceax.HutchinsonEstimator`][] for smaller budgets.

    `stats["choice"]` tells which, a [`traceax.CHOICES`][] item.

    Differentiable with respect to `operator`, forward and reverse, to any order: the
    derivative of the value is an unbiased estimate of the derivative of the trace.

    **Arguments:**

    - `key`: a single key, typed or legacy.
    - `operator`: a square lineax operator, over arrays or PyTrees, real or complex.
    - `k`: a positive Python int, the budget of products.
    - `estimator`: a [`traceax.TraceEstimator`][], used on the whole operator as given.
    - `rtol`, `atol`: if one is given, products are taken until half of the interval at
        `level` is at most `atol + rtol |value|`, and at most k of them. Each
        a real number, which may be traced: one program serves all. The interval is
        valid though it was looked at repeatedly; see the page on tolerances. Taken by
        [`traceax.HutchinsonEstimator`][], [`traceax.XTraceEstimator`][] and
        [`traceax.XNysTraceEstimator`][].
    - `level`: of that interval, a Python number between 0 and 1.
    - `progress_meter`: shows how far an estimate to a tolerance is; nothing by default.
        See [`traceax.TextProgressMeter`][].
    - `throw`: whether a failure raises an error at run time, or is only reported in
        `result`. A tolerance that is not met is one.

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
    space, key = check_operator(operator, where), check_key(key, where)
    k = check_budget(k, where)
    tolerance = make_tolerance(rtol, atol, level, space, where)
    check_meter(progress_meter, where)
    if estimator is not None:
        if not isinstance(estimator, TraceEstimator):
            raise TypeError(
                f"{where}: estimator must be a traceax.TraceEstimator, got "
                f"{estimator!r}; pass an instance, such as traceax.XTraceEstimator()."
            )
        estimate = estimator.estimate(
            estimator.init(key, operator),
            k,
            rtol=rtol,
            atol=atol,
            level=level,
            progress_meter=progress_meter,
            throw=throw,
        )
        return _with_choice(estimate, CHOICES.given)

    state = TraceState(key, operator)
    split = _split(operator, k)
    if split.rest is None:
        estimate = Estimate(
            jnp.zeros((), space.compute_dtype),
            jnp.zeros((), space.real_dtype),
            RESULTS.successful,
            {"num_matvecs": jnp.asarray(0), "degrees_of_freedom": jnp.asarray(jnp.inf)},
            state,
        )
        choice = CHOICES.structure
        factor = None
    else:
        budget = k - split.num_matvecs
        factor, rest = _without_factors(split.rest)
        few = tolerance is None or space_of(rest).size <= SMALL
        estimator, choice = _choose(rest, budget, exact=few)
        rest_state = estimator.init(key, rest)
        if tolerance is None:
            estimate = estimator.estimate(rest_state, budget, throw=False)
        else:
            part = tolerance.of_part(factor, split.exact)
            estimate = estimate_until(
                estimator, rest_state, budget, part, progress_meter, throw=False
            )
    if split.exact is not None or factor is not None:
        real = has_real_trace(operator)
        # What was kept is of the rest alone: the state is one that begins anew.
        estimate = _combine(estimate, state, factor, split, space, real=real)
    estimate = _with_choice(estimate, choice)
    return raise_failure(estimate) if throw else estimate


def _combine(
    estimate: Estimate,
    state: TraceState,
    factor: Inexact[Array, ""] | None,
    split: "_Split",
    space: Space,
    *,
    real: bool,
) -> Estimate:
    """`factor * estimate + exact part`."""
    value = estimate.value.astype(space.compute_dtype)
    error = estimate._standard_error.astype(space.real_dtype)
    if factor is not None:
        factor = factor.astype(space.compute_dtype)
        value, error = value * factor, error * jnp.abs(factor)
    if split.exact is not None:
        # The sum is rounded; an error of 0 says that all of it is exact.
        magnitude = jnp.abs(value) + jnp.abs(split.exact)
        rounding = 4 * jnp.finfo(error.dtype).eps * magnitude
        error = jnp.where(error > 0, jnp.maximum(error, rounding), error)
        value = value + split.exact
    dtype = space.dtype
    if real:
        value, dtype = jnp.real(value), jnp.finfo(dtype).dtype
    result = RESULTS.where(
        estimate.result == RESULTS.successful,
        explain(
            RESULTS.successful,
            value,
            state.operator,
            jnp.abs(estimate.value),
            solves=False,
        ),
        estimate.result,
    )
    used = estimate.stats["num_matvecs"] + split.num_matvecs
    return Estimate(
        value.astype(dtype),
        error.astype(jnp.finfo(dtype).dtype),
        result,
        {**estimate.stats, "num_matvecs": used},
        state,
    )


def _with_choice(estimate: Estimate, choice: CHOICES) -> Estimate:
    stats = {**estimate.stats, "choice": choice}
    return eqx.tree_at(lambda e: e.stats, estimate, stats)


def _is_semidefinite(operator: lx.AbstractLinearOperator) -> bool:
    return is_positive_semidefinite(operator) or is_negative_semidefinite(operator)


def _without_factors(
    operator: lx.AbstractLinearOperator,
) -> tuple[Inexact[Array, ""] | None, lx.AbstractLinearOperator]:
    """`(c, A)` for `c A` with A known to be semidefinite, of which c may hide the sign.

    Else `(None, operator)`.
    """
    factor, inner = jnp.ones(()), operator
    while not _is_semidefinite(inner):
        with jax.numpy_dtype_promotion("standard"):
            match inner:
                case lx.MulLinearOperator():
                    factor = factor * inner.scalar
                case lx.DivLinearOperator():
                    factor = factor / inner.scalar
                case lx.NegLinearOperator():
                    factor = -factor
                case lx.TaggedLinearOperator():
                    pass
                case _:
                    return None, operator
        inner = inner.operator
    return (None, operator) if inner is operator else (factor, inner)


def _choose(
    operator: lx.AbstractLinearOperator, k: int, *, exact: bool
) -> tuple[TraceEstimator, CHOICES]:
    semidefinite = _is_semidefinite(operator)
    if exact and k >= space_of(operator).size:
        return HutchinsonEstimator(), CHOICES.budget
    if semidefinite and k >= 2:
        return XNysTraceEstimator(), CHOICES.xnystrace
    if not semidefinite and k >= 4:
        return XTraceEstimator(), CHOICES.xtrace
    return HutchinsonEstimator(), CHOICES.hutchinson


class _Split(NamedTuple):
    """An operator as a part of known trace and a rest. `None` stands for zero."""

    exact: Inexact[Array, ""] | None
    num_matvecs: int
    rest: lx.AbstractLinearOperator | None


def _split(operator: lx.AbstractLinearOperator, k: int) -> _Split:
    split = _split_off(operator, most_products=2)
    if split.num_matvecs > k or (split.rest is not None and split.num_matvecs == k):
        # Too few products to read every diagonal: take those that cost none.
        split = _split_off(operator, most_products=0)
    return split


def _split_off(operator: lx.AbstractLinearOperator, most_products: int) -> _Split:
    diagonal = known_diagonal(operator)
    if diagonal is not None and diagonal.num_matvecs <= most_products:
        return _Split(jnp.sum(diagonal.read()), diagonal.num_matvecs, None)
    match operator:
        case lx.AddLinearOperator():
            first = _split_off(operator.operator1, most_products)
            second = _split_off(operator.operator2, most_products)
            if first.exact is None and second.exact is None:
                return _Split(None, 0, operator)
            return _Split(
                _add(first.exact, second.exact),
                first.num_matvecs + second.num_matvecs,
                _add(first.rest, second.rest),
            )
        case lx.MulLinearOperator():
            return _map_split(operator, most_products, lambda x: x * operator.scalar)
        case lx.DivLinearOperator():
            return _map_split(operator, most_products, lambda x: x / operator.scalar)
        case lx.NegLinearOperator():
            return _map_split(operator, most_products, lambda x: -x)
        case lx.TaggedLinearOperator():
            # Tags say nothing of a part, and belong to the whole if nothing is split.
            return _map_split(operator, most_products, lambda x: x)
    return _Split(None, 0, operator)


def _map_split(operator, most_products: int, fn: Callable) -> _Split:
    inner = _split_off(operator.operator, most_products)
    if inner.exact is None:
        return _Split(None, 0, operator)
    rest = None if inner.rest is None else fn(inner.rest)
    return _Split(fn(inner.exact), inner.num_matvecs, rest)


def _add(x, y):
    if x is None or y is None:
        return y if x is None else x
    return x + y
