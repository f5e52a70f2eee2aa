"""States, the contract of estimators, and the one way from a state to an estimate."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int, Key, PyTree

from ._accuracy.error_bar import ErrorBar
from ._accuracy.tolerance import (
    EXACT_SIZE,
    LEAST_PRODUCTS,
    Depth,
    Stop,
    make_stop,
    products_of_loop,
    tolerance_result,
)
from ._arguments import StoredKey, budget_of, check_key, kind_of, most_products
from ._estimate import Estimate, raise_failure
from ._functional import TRACE, Functional
from ._linalg.types import alike, automatic
from ._operators.block import Space, as_data, columns_at_once, jitted, space_of
from ._operators.check import checked_operator
from ._operators.entries import unit_columns
from ._operators.solvers import solver_tolerance
from ._progress import NO_PROGRESS_METER, ProgressMeter
from ._results import RESULTS
from ._rule import Evidence, Outcome, StandIn, bind, run

#
# States
#


class Grown(eqx.Module):
    """Products that an estimate took, for a later estimate to resume from.

    **Attributes:**

    - `buffers`: arrays, as the estimator's `compute` returned them; for a
        [`traceax.GrowingEstimator`][] with space for `room` units, the first `count` of
        which are taken.
    - `count`: an array after an estimate to a tolerance, a Python integer otherwise.
    - `budget`: how many products were allowed so far.
    - `estimator`: the estimator that filled the buffers.
    """

    buffers: PyTree[Array]
    count: int | Int[Array, ""] = 0
    room: int = eqx.field(static=True, default=0)
    budget: int = eqx.field(static=True, default=0)
    estimator: "Estimator | None" = None


class State(eqx.Module):
    """Abstract base class of states: a key, a checked operator and a question about it."""

    operator: eqx.AbstractVar[lx.AbstractLinearOperator]
    space: eqx.AbstractVar[Space]
    grown: eqx.AbstractVar[Grown | None]

    @property
    def given(self) -> Any:
        """The state as `init` returned it. Optional."""
        return self

    def tree(self, values: list[Any]) -> Any:
        """A number for each value, in the structure of the answer. Optional."""
        return values[0]

    def bar(self, bars: list[ErrorBar]) -> ErrorBar:
        """The error bar that a tolerance applies to. Optional."""
        return bars[0]

    def resumed(self, grown: Grown) -> "State":
        """The state with the products of an estimate. Optional."""
        return self

    def stats_of_exact(self, stats: dict[str, Any]) -> dict[str, Any]:
        """`stats` of a loop in the shapes of those of an exact answer. Optional."""
        return stats


class TraceState(State):
    """The state of an estimator that needs no set-up.

    A PyTree of ordinary arrays, besides the operator's leaves: it can be saved by
    `eqx.tree_serialise_leaves`, and loaded into the state of an equal run.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: the operator whose trace is estimated.
    - `grown`: products that earlier estimates took; `None` for a new state.
    - `functional`: the linear functional of the diagonal: the sum for a trace.
    - `space`: the space that the operator maps to itself.
    """

    _key: StoredKey
    operator: lx.AbstractLinearOperator
    grown: Grown | None
    functional: Functional = eqx.field(static=True)
    space: Space = eqx.field(static=True)

    def __init__(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        grown: Grown | None = None,
        functional: Functional = TRACE,
    ):
        self._key = StoredKey(key)
        self.operator = operator
        self.grown = grown
        self.functional = functional
        self.space = space_of(operator)

    @property
    def key(self) -> Key[Array, ""]:
        """A typed key."""
        return self._key.typed

    def resumed(self, grown):
        return eqx.tree_at(lambda x: x.grown, self, grown, is_leaf=lambda x: x is None)


class CustomState(State):
    """A state that a custom estimator's `init` returned, which has a key and an operator."""

    own: Any
    space: Space = eqx.field(static=True)
    grown: ClassVar[None] = None  # pyright: ignore
    functional: ClassVar[Functional] = TRACE

    @property
    def operator(self) -> lx.AbstractLinearOperator:  # pyright: ignore
        return self.own.operator

    @property
    def given(self) -> Any:
        return self.own


def init_state(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    where: str = "traceax.init_state",
) -> TraceState:
    """Checks a key and an operator, and puts them into a state.

    **Arguments:**

    - `key`: a typed key or a legacy `uint32` key; the state holds a typed one.
    - `operator`: a lineax operator.
    - `where`: the name that error messages start with.

    **Raises:**

    - `TypeError` for anything but a single key, or for an operator that isn't a lineax
        operator or that acts on integers.
    - `ValueError` for an operator that isn't square (equal input and output
        structures), or that mixes real and complex leaves.
    """
    operator = checked_operator(operator, where)
    return TraceState(check_key(key, where), operator)


def _checked_state(given: Any, estimator: "Estimator", where: str) -> State:
    """The library's view of a state; an error for products of another estimator."""
    state = given
    if not isinstance(given, State):
        operator = getattr(given, "operator", None)
        if operator is None:
            hint = "its `.state`" if isinstance(given, Estimate) else "that of `init`"
            raise TypeError(
                f"{where}: state must be that of an estimator, got "
                f"{kind_of(given)}; pass {hint}."
            )
        state = CustomState(own=given, space=space_of(operator))  # pyright: ignore
    grown = state.grown
    if grown is not None and grown.buffers == ():
        raise TypeError(
            f"{where}: an estimate can't resume from an earlier one; start over with init "
            "and another key, or use traceax.XTraceEstimator()."
        )
    if grown is not None and not _equal(grown.estimator, estimator):
        raise TypeError(
            f"{where}: the state keeps products of another estimator or configuration, "
            f"of which {estimator} can't make use; start over with "
            f"{type(estimator).__name__}.init."
        )
    return state


def _equal(x: Any, y: Any) -> bool:
    """Whether two modules are equal. Traced arrays are assumed equal."""
    (xs, structure), (ys, other) = jtu.tree_flatten(x), jtu.tree_flatten(y)
    return structure == other and all(
        any(isinstance(z, jax.core.Tracer) for z in pair) or np.array_equal(*pair)
        for pair in zip(xs, ys, strict=True)
    )


#
# Estimators
#


class Estimator(eqx.Module):
    """Abstract base class of estimators of traces and of spectral functions."""

    # Whether JAX may differentiate exact answers itself.
    _plain_exact: ClassVar[bool] = False
    # Whether error bars of `compute` hold the errors of solvers within the operator.
    _bars_hold_solvers: ClassVar[bool] = False

    @abc.abstractmethod
    def compute(self, state: Any, k: int) -> Any:
        """The algorithm. Called with `1 <= k < n`."""

    def compute_until(self, state: Any, k: int, stop: Stop | Depth) -> Any:
        """As `compute`, until a `Stop` or `Depth`; for a `Stop` with `"products_needed"` in
        `stats`. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: this estimator takes no tolerance; use "
            "traceax.XTraceEstimator(), traceax.KrylovAwareEstimator() for spectral "
            "functions, or leave out rtol and atol."
        )

    def least_of_loop(self, state: Any) -> int:
        """The fewest products that a loop to a tolerance is worth starting with. Optional."""
        return LEAST_PRODUCTS

    def depth(self, state: Any, meter: ProgressMeter) -> Depth | None:
        """When a loop may stop whose budget is left out; `None` if it must be given. Optional."""
        return None

    def check_budget(self, k: int, *, at_most: bool) -> None:
        """Refuses budgets that can't be spent; `at_most`: caps of a tolerance. Optional."""

    def trim(self, state: Any) -> Any:
        """Cuts buffers to the units taken, where their number is known (outside of jit).

        Optional.
        """
        return state

    @abc.abstractmethod
    def _exact(self, state: Any) -> tuple[Outcome, StandIn]:
        """The exact answer from n products."""

    @abc.abstractmethod
    def _finish(self, state: Any, computed: Any) -> tuple[Outcome, StandIn]:
        """The outcome and its stand-in, from the result of `compute`."""

    def run(
        self, state: State, k: int, stop: Stop | Depth | None
    ) -> tuple[Outcome, StandIn]:
        """The exact answer, or the estimate from k products at most, or until `stop`."""
        space = state.space
        exact = k >= space.size
        solvers = solver_tolerance(state.operator, space.real_dtype)
        # Exact answers measure the errors of solvers.
        part = None if exact or self._bars_hold_solvers else solvers
        if exact:
            outcome, stand_in = self._exact(state)
        elif stop is None:
            outcome, stand_in = self._finish(state, self.compute(state.given, k))
        else:
            if isinstance(stop, Stop):
                stop = dataclasses.replace(stop, solvers=part)
            computed = self.compute_until(state.given, k, stop)
            outcome, stand_in = self._finish(state, computed)
        if isinstance(stop, Stop):
            results = outcome.results
            if not exact or solvers is not None:
                bar = state.bar(outcome.bars)
                results = [tolerance_result(stop, bar, x) for x in results]
            needed = outcome.stats.get("products_needed", float(space.size))
            needed = jnp.asarray(needed, space.real_dtype)
            # Where it isn't known, it stays infinite, and where products don't help.
            most = jnp.minimum(needed, space.size)
            needed = jnp.where(jnp.isfinite(needed), most, needed)
            if solvers is not None and part is None:
                needed = jnp.where(_any_unmet(results), jnp.inf, needed)
            stats = {**outcome.stats, "products_needed": needed}
            outcome = outcome._replace(results=results, stats=stats)
        if part is not None:
            outcome = outcome._replace(bars=[_longer(x, part) for x in outcome.bars])
        if solvers is not None and outcome.evidence is not None:
            # No residual of the two solves in a slope is measured.
            share = jnp.full_like(solvers, jnp.inf) if exact else 2 * solvers
            evidence = dataclasses.replace(outcome.evidence, solvers=share)
            outcome = outcome._replace(evidence=evidence)
        return outcome, stand_in

    def estimate(
        self,
        state: PyTree,
        k: int | None = None,
        *,
        rtol: ArrayLike | None = None,
        atol: ArrayLike | None = None,
        level: float = 0.95,
        progress_meter: ProgressMeter = NO_PROGRESS_METER,
        throw: bool = True,
    ) -> Estimate:
        """Estimates the functional of the state's operator with at most `k` products.

        **Arguments:**

        - `state`: as `init` returned it, or the `state` of an earlier estimate, from
            which Hutchinson, XTrace and XNysTrace take `k` *more* products: the
            estimate is that of one run with the sum of the budgets, up to rounding.
            Budgets below 4 keep nothing.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact and takes n products, if no tolerance was met before; for a spectral
            function an eigendecomposition, too.
        - `rtol`, `atol`, `level`, `progress_meter`, `throw`: as for [`traceax.trace`][],
            for estimators that take a tolerance. The state keeps the products.

        **Returns:** a [`traceax.Estimate`][].

        **Raises:** as [`traceax.trace`][]; `TypeError` for the state of another estimator.
        """
        where = f"{type(self).__name__}.estimate"
        checked = _checked_state(state, self, where)
        dtype = checked.space.compute_dtype
        stop = make_stop(rtol, atol, level, progress_meter, dtype, where)
        k, stop = limits(self, checked, k, stop, progress_meter, where)
        estimate = estimate_state(self, checked, k, stop)
        return raise_failure(estimate) if throw else estimate


def _any_unmet(results: list[RESULTS]):
    return jnp.stack([x == RESULTS.tolerance_not_met for x in results]).any()


def _longer(bar: ErrorBar, share: ArrayLike) -> ErrorBar:
    """The error bar with a relative error more, of solvers."""
    error = jnp.hypot(bar.standard_error, share * jnp.abs(bar.mean))
    return bar._replace(standard_error=error)


#
# The driver
#


def limits(
    estimator: Estimator,
    state: State,
    k: int | None,
    stop: Stop | None,
    meter: ProgressMeter,
    where: str,
) -> tuple[int, Stop | Depth | None]:
    """The budget, and when a loop may stop. Left out without a tolerance: `most_products`,
    less than n, or n where that is few."""
    size = state.space.size
    depth = estimator.depth(state, meter) if k is None and stop is None else None
    if depth is None:
        return budget_of(k, stop, size, where), stop
    if size <= EXACT_SIZE:
        return size, None
    return min(size - 1, most_products(size)), depth


def outcome_of(
    estimator: Estimator, state: State, k: int, stop: Stop | Depth | None
) -> tuple[Outcome, State]:
    """The outcome of k products more than the state's, or the exact one, and the state that
    a later estimate resumes from. Arguments are checked."""
    state = estimator.trim(state)
    size = state.space.size
    spent, loop = 0 if state.grown is None else state.grown.budget, k
    if isinstance(stop, Stop):
        # A loop that fails to meet the tolerance leaves n products for the exact answer.
        loop = products_of_loop(k, size, estimator.least_of_loop(state))
    exact = not 0 < loop < size
    total = size if exact else min(spent + loop, size - 1)
    if not exact:
        estimator.check_budget(k if stop is None else total, at_most=stop is not None)
    operator = as_data(state.operator)
    primal = state
    if operator is not state.operator:
        primal = eqx.tree_at(lambda x: x.operator, state, operator)
    if isinstance(stop, Stop) and not exact and size <= k:
        outcome = _estimate_or_exact(estimator, primal, total, stop)
    else:
        # For few columns, let JAX differentiate the products directly. Our rule repeats them,
        # which made a ten-dimensional PINN step 1.2 times slower.
        few = min(columns_at_once(size), unit_columns(operator))
        plain = exact and estimator._plain_exact and size <= few
        outcome = _outcome(estimator, primal, total, stop, plain)
    kept = outcome.kept
    if kept is not None:
        kept = kept if isinstance(kept, Grown) else Grown(kept, budget=total)
        state = state.resumed(dataclasses.replace(kept, estimator=estimator))
    return outcome, state


def estimate_state(
    estimator: Estimator, state: State, k: int, stop: Stop | Depth | None
) -> Estimate:
    """The estimate that `outcome_of` gives, in the structure of the question."""
    outcome, state = outcome_of(estimator, state, k, stop)
    by = type(estimator).__name__, state.space.size
    return made_of(outcome, state, by)


def made_of(outcome: Outcome, state: State, by: tuple[str, float]) -> Estimate:
    bars = ErrorBar(*(state.tree(list(x)) for x in zip(*outcome.bars, strict=True)))
    stats = {**outcome.stats, "degrees_of_freedom": bars.degrees_of_freedom}
    return Estimate(
        value=bars.mean,
        standard_error=bars.standard_error,
        result=state.tree(outcome.results),
        stats=stats,
        state=state.given,
        by=by,
        evidence=outcome.evidence,
    )


@jitted
@automatic
def _outcome(
    estimator: Estimator, state: State, k: int, stop: Stop | Depth | None, plain: bool
) -> Outcome:
    """The outcome, differentiable with respect to the state alone.

    With `plain` JAX differentiates `run` itself, without the rule. On a mesh with explicit
    axes the compiler finds layouts, and every device has the result.
    """
    (arrays, stop), static = eqx.partition((estimator, stop), eqx.is_array)
    estimator, stop = eqx.combine(jax.lax.stop_gradient((arrays, stop)), static)
    if plain:
        return run(estimator, state, k, stop)[0]
    return bind(estimator, state, k, stop)


@eqx.filter_jit
def _estimate_or_exact(
    estimator: Estimator, state: State, k: int, stop: Stop
) -> Outcome:
    """The estimate of a loop; the exact answer where it doesn't meet the tolerance."""
    size = state.space.size
    first = _outcome(estimator, state, k, stop, False)
    unmet = _any_unmet(first.results)
    used = first.stats["num_matvecs"]
    first = first._replace(stats=state.stats_of_exact(first.stats))

    statics: list[Any] = []

    def exactly():
        found = _outcome(estimator, state, size, stop, False)
        needed = {
            "products_needed": jnp.full_like(first.stats["products_needed"], size)
        }
        taken = {"num_matvecs": used + found.stats["num_matvecs"]}
        stats = {**first.stats, **found.stats, **needed, **taken}
        answer = jtu.tree_map(
            lambda new, old: jnp.where(unmet, new, old).astype(old.dtype),
            (found.bars, found.results, stats),
            (first.bars, first.results, first.stats),
        )
        arrays, static = eqx.partition(found.evidence, eqx.is_array)
        statics.append(static)
        return answer, arrays

    shapes = jax.eval_shape(exactly)[1]
    nothing = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def kept():
        return (first.bars, first.results, first.stats), nothing

    # One condition for all lanes of a `vmap`, or all would take n products more.
    answer, arrays = jax.lax.cond(eqxi.unvmap_any(unmet), *alike(exactly, kept))
    evidence = eqx.combine(arrays, statics[0])
    if first.evidence is not None:
        judges = first.evidence.judge, evidence.judge
        evidence = Evidence(
            (first.evidence.products, evidence.products),
            jtu.Partial(_chosen_bars, unmet, *judges),
            evidence.solvers,
        )
    bars, results, stats = answer
    return Outcome(bars, results, stats, evidence, first.kept)


def _chosen_bars(second: Bool[Array, ""], *judges_and_products: Any) -> list[ErrorBar]:
    """The bars of the second of two judges, or of the first."""
    *judges, products = judges_and_products
    bars = [judge(x) for judge, x in zip(judges, products, strict=True)]
    return [
        jtu.tree_map(lambda x, y: jnp.where(second, y, x), *pair)
        for pair in zip(*bars, strict=True)
    ]
