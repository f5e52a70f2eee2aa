"""The interface of all estimators, and the driver from a state to an outcome."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Bool, PyTree

from ._arguments import most_products, resolve_budget
from ._error_bar import ErrorBar
from ._estimate import Estimate, raise_failure
from ._linalg.types import automatic, same_layouts
from ._operators.check import as_data, is_nonlinear, jitted
from ._operators.entries import unit_columns
from ._operators.inverse import DiagonalErrors, diagonal_errors
from ._operators.solvers import is_inexact, solver_tolerances
from ._operators.space import FUNCTIONS, columns_at_once, parts_of
from ._results import RESULTS, any_unmet, map_results
from ._rule import Evidence, Outcome, StandIn, bind, run
from ._state import CustomState, Grown, State, TraceState, checked_state
from ._tolerance import (
    EXACT_SIZE,
    LEAST_PRODUCTS,
    NO_PROGRESS_METER,
    Depth,
    ProgressMeter,
    Stop,
    loop_products,
    make_stop,
    tolerance_result,
)

S = TypeVar("S", bound=State)


class Estimator(eqx.Module, Generic[S]):
    """Abstract base class for estimators of traces and spectral functions."""

    # The states that `estimate` takes.
    state_classes: ClassVar[tuple[type[State], ...]] = (TraceState, CustomState)
    # We set this if JAX may differentiate exact answers directly.
    _plain_exact: ClassVar[bool] = False
    # We set this if error bars from `compute` include solver errors in the operator.
    _bars_include_solver_errors: ClassVar[bool] = False

    @abc.abstractmethod
    def compute(self, state: S, k: int) -> Any:
        """Runs the algorithm. Called with `1 <= k < n`."""

    def compute_until(self, state: S, k: int, stop: Stop | Depth) -> Any:
        """Runs to `stop`. A `Stop` needs `stats["products_needed"]`. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: rtol and atol must be None, as this "
            "estimator takes no tolerance; use traceax.XTraceEstimator(), or "
            "traceax.KrylovAwareEstimator() for spectral functions."
        )

    def least_loop_products(self, state: S) -> int:
        """The fewest products for which a loop to a tolerance pays. Optional."""
        return LEAST_PRODUCTS

    def depth(self, state: S, meter: ProgressMeter) -> Depth | None:
        """When a loop without k may stop; `None` if k is required. Optional."""
        return None

    def check_budget(self, k: int, *, at_most: bool) -> None:
        """Refuses unusable budgets; with `at_most`, k caps a tolerance. Optional."""

    def trim(self, state: S) -> S:
        """Cuts buffers to the units taken, if their number is known. Optional."""
        return state

    @abc.abstractmethod
    def _exact(self, state: S) -> tuple[Outcome, StandIn]:
        """Computes the exact answer from n products."""

    @abc.abstractmethod
    def _finish(self, state: S, computed: Any) -> tuple[Outcome, StandIn]:
        """The outcome of `compute`, and its stand-in, which carries the derivative."""

    def run(
        self, state: S, k: int, stop: Stop | Depth | None
    ) -> tuple[Outcome, StandIn]:
        """The exact answer if `k >= n`, else an estimate by k products or to `stop`."""
        space = state.space
        exact = k >= space.size
        errors = None
        if is_inexact(state.operator) and not self._bars_include_solver_errors:
            # Exact answers measure solver errors, so we don't add them again.
            errors = diagonal_errors(state.operator, solves_are_measured=exact)
        solvers = state.solvers if errors is None else errors.products
        if exact:
            outcome, stand_in = self._exact(state)
        elif stop is None:
            outcome, stand_in = self._finish(state, self.compute(state.given, k))
        else:
            remaining = stop
            if isinstance(stop, Stop) and errors is not None:
                remaining = dataclasses.replace(stop, solvers=errors.share)
            computed = self.compute_until(state.given, k, remaining)
            outcome, stand_in = self._finish(state, computed)
        if space.is_complex and parts_of(state.operator, FUNCTIONS):
            is_wrong = is_nonlinear(state.operator)
            results = map_results(
                lambda x: RESULTS.where(is_wrong, RESULTS.not_linear, x),
                outcome.results,
            )
            outcome = outcome._replace(results=results)
        if errors is not None and isinstance(state, TraceState | CustomState):
            counts = state.functional.num_rows(space.size)
            bars = [_with_errors(x, errors, counts) for x in outcome.bars]
            outcome = outcome._replace(bars=bars)
        if isinstance(stop, Stop):
            results = outcome.results
            if not exact or solvers is not None:
                bar = state.bar(outcome.bars)
                results = [tolerance_result(stop, bar, x) for x in results]
            needed = outcome.stats.get("products_needed", float(space.size))
            needed = jnp.asarray(needed, space.real_dtype)
            # We keep infinity, which means unknown, or that products don't help.
            most = jnp.minimum(needed, space.size)
            needed = jnp.where(jnp.isfinite(needed), most, needed)
            if solvers is not None and (exact or self._bars_include_solver_errors):
                needed = jnp.where(any_unmet(results), jnp.inf, needed)
            stats = {**outcome.stats, "products_needed": needed}
            outcome = outcome._replace(results=results, stats=stats)
        if solvers is not None and outcome.evidence is not None:
            # A slope contains two solves, whose residuals we don't measure.
            is_unknown = exact and bool(solver_tolerances(state.operator))
            relative = jnp.full_like(solvers, jnp.inf) if is_unknown else 2 * solvers
            evidence = dataclasses.replace(outcome.evidence, solvers=relative)
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

        - `state`: the state from `init`, or `estimate.state` from an earlier estimate.
            From the latter, Hutchinson, XTrace and XNysTrace take `k` *more* products:
            the result equals one run with the total budget, up to rounding. Budgets
            below 4 keep nothing.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact, unless a tolerance is met before. It takes n products, and for a
            spectral function an eigendecomposition.
        - `rtol`, `atol`, `level`, `progress_meter`, `throw`: as for
            [`traceax.trace`][], if the estimator takes a tolerance.

        **Returns:** a [`traceax.Estimate`][], whose state keeps the products.

        **Raises:** as [`traceax.trace`][]; `TypeError` for another estimator's state.
        """
        where = f"{type(self).__name__}.estimate"
        checked = checked_state(state, self, where, self.state_classes)
        dtype = checked.space.compute_dtype
        stop = make_stop(rtol, atol, level, progress_meter, dtype, where)
        k, stop = limits(self, checked, k, stop, progress_meter, where)
        estimate = estimate_state(self, checked, k, stop)
        return raise_failure(estimate) if throw else estimate


def _with_errors(bar: ErrorBar, errors: DiagonalErrors, counts: ArrayLike) -> ErrorBar:
    """Adds errors that iterations leave in sums of diagonal entries to an error bar."""
    error = jnp.hypot(bar.standard_error, errors.of_sums(bar.mean, counts))
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
    """The budget, and when a loop may stop. Without k and tolerance, the budget is
    `most_products`, less than n, or n if n is small."""
    size = state.space.size
    depth = estimator.depth(state, meter) if k is None and stop is None else None
    if depth is None:
        monotone = not isinstance(state, TraceState | CustomState)
        return resolve_budget(k, stop, size, where, monotone=monotone), stop
    if size <= EXACT_SIZE:
        return size, None
    return min(size - 1, most_products(size)), depth


def outcome_of(
    estimator: Estimator, state: State, k: int, stop: Stop | Depth | None
) -> tuple[Outcome, State]:
    """The outcome of k more products, or the exact one; and the state to resume."""
    state = estimator.trim(state)
    size = state.space.size
    spent, loop = 0 if state.grown is None else state.grown.budget, k
    if isinstance(stop, Stop):
        # We reserve n products for the exact answer, in case the loop fails.
        loop = loop_products(k, size, estimator.least_loop_products(state))
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
        # For few columns, we let JAX differentiate the products. Our rule repeats them,
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
    """The estimate from `outcome_of`, in the structure of the requested quantity."""
    outcome, state = outcome_of(estimator, state, k, stop)
    by = type(estimator).__name__, state.space.size
    return make_estimate(outcome, state, by)


def make_estimate(
    outcome: Outcome, state: State, by: tuple[str, int | float]
) -> Estimate:
    """The estimate from an outcome, in the structure of the requested quantity."""
    tree = state.treedef.unflatten
    bars = ErrorBar(*map(tree, zip(*outcome.bars, strict=True)))
    stats = {**outcome.stats, "degrees_of_freedom": bars.degrees_of_freedom}
    return Estimate(
        value=bars.mean,
        standard_error=bars.standard_error,
        result=tree(outcome.results),
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

    With `plain`, JAX differentiates `run` without our rule. On a mesh with explicit
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
    """A loop's outcome, or the exact one if the loop doesn't meet the tolerance."""
    size = state.space.size
    first = _outcome(estimator, state, k, stop, False)
    unmet = any_unmet(first.results)
    used = first.stats["num_matvecs"]
    first = first._replace(stats=state.stats_of_exact(first.stats))

    statics: list[Any] = []

    def run_exact():
        exact = _outcome(estimator, state, size, stop, False)
        needed = {
            "products_needed": jnp.full_like(first.stats["products_needed"], size)
        }
        taken = {"num_matvecs": used + exact.stats["num_matvecs"]}
        stats = {**first.stats, **exact.stats, **needed, **taken}
        answer = jtu.tree_map(
            lambda new, old: jnp.where(unmet, new, old).astype(old.dtype),
            (exact.bars, exact.results, stats),
            (first.bars, first.results, first.stats),
        )
        arrays, static = eqx.partition(exact.evidence, eqx.is_array)
        statics.append(static)
        return answer, arrays

    shapes = jax.eval_shape(run_exact)[1]
    zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def keep_first():
        return (first.bars, first.results, first.stats), zeros

    # We use one condition for a whole `vmap`: one per batch element would run both.
    answer, arrays = jax.lax.cond(
        eqxi.unvmap_any(unmet), *same_layouts(run_exact, keep_first)
    )
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


def _chosen_bars(
    second: Bool[Array, ""],
    first_judge: jtu.Partial,
    second_judge: jtu.Partial,
    products: tuple[PyTree, PyTree],
) -> list[ErrorBar]:
    """The error bars from the second judge if `second`, else from the first."""
    bars = first_judge(products[0]), second_judge(products[1])
    return [
        jtu.tree_map(lambda x, y: jnp.where(second, y, x), *pair)
        for pair in zip(*bars, strict=True)
    ]
