"""The contract of estimators, and the one way from a state to an outcome."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from ._arguments import most_products, resolve_budget
from ._error_bar import ErrorBar
from ._estimate import Estimate, raise_failure
from ._linalg.types import automatic, same_layouts
from ._operators.check import as_data, jitted
from ._operators.entries import unit_columns
from ._operators.space import columns_at_once
from ._results import any_unmet
from ._rule import Evidence, Outcome, StandIn, bind, run
from ._state import Grown, State, checked_state
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
    """Abstract base class of estimators of traces and of spectral functions."""

    # Whether JAX may differentiate exact answers itself.
    _plain_exact: ClassVar[bool] = False
    # Whether error bars of `compute` hold the errors of solvers within the operator.
    _bars_include_solver_errors: ClassVar[bool] = False

    @abc.abstractmethod
    def compute(self, state: S, k: int) -> Any:
        """The algorithm. Called with `1 <= k < n`."""

    def compute_until(self, state: S, k: int, stop: Stop | Depth) -> Any:
        """As `compute`, until a `Stop` or `Depth`; for a `Stop` with `"products_needed"` in
        `stats`. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: this estimator takes no tolerance; use "
            "traceax.XTraceEstimator(), traceax.KrylovAwareEstimator() for spectral "
            "functions, or leave out rtol and atol."
        )

    def least_loop_products(self, state: S) -> int:
        """The fewest products that a loop to a tolerance is worth starting with. Optional."""
        return LEAST_PRODUCTS

    def depth(self, state: S, meter: ProgressMeter) -> Depth | None:
        """When a loop may stop whose budget is left out; `None` if it must be given. Optional."""
        return None

    def check_budget(self, k: int, *, at_most: bool) -> None:
        """Refuses budgets that can't be spent; `at_most`: caps of a tolerance. Optional."""

    def trim(self, state: S) -> S:
        """Cuts buffers to the units taken, where their number is known (outside of jit).

        Optional.
        """
        return state

    @abc.abstractmethod
    def _exact(self, state: S) -> tuple[Outcome, StandIn]:
        """The exact answer from n products."""

    @abc.abstractmethod
    def _finish(self, state: S, computed: Any) -> tuple[Outcome, StandIn]:
        """The outcome and its stand-in, from the result of `compute`."""

    def run(
        self, state: S, k: int, stop: Stop | Depth | None
    ) -> tuple[Outcome, StandIn]:
        """The exact answer, or the estimate from k products at most, or until `stop`."""
        space = state.space
        exact = k >= space.size
        solvers = state.solvers
        # Exact answers measure the errors of solvers.
        unmeasured = None if exact or self._bars_include_solver_errors else solvers
        if exact:
            outcome, stand_in = self._exact(state)
        elif stop is None:
            outcome, stand_in = self._finish(state, self.compute(state.given, k))
        else:
            if isinstance(stop, Stop):
                stop = dataclasses.replace(stop, solvers=unmeasured)
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
            if solvers is not None and unmeasured is None:
                needed = jnp.where(any_unmet(results), jnp.inf, needed)
            stats = {**outcome.stats, "products_needed": needed}
            outcome = outcome._replace(results=results, stats=stats)
        if unmeasured is not None:
            bars = [_with_solvers(x, unmeasured) for x in outcome.bars]
            outcome = outcome._replace(bars=bars)
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
        checked = checked_state(state, self, where)
        dtype = checked.space.compute_dtype
        stop = make_stop(rtol, atol, level, progress_meter, dtype, where)
        k, stop = limits(self, checked, k, stop, progress_meter, where)
        estimate = estimate_state(self, checked, k, stop)
        return raise_failure(estimate) if throw else estimate


def _with_solvers(bar: ErrorBar, solvers: Float[Array, ""]) -> ErrorBar:
    """The error bar with the relative error of solvers in products."""
    error = jnp.hypot(bar.standard_error, solvers * jnp.abs(bar.mean))
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
        return resolve_budget(k, stop, size, where), stop
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
    return make_estimate(outcome, state, by)


def make_estimate(
    outcome: Outcome, state: State, by: tuple[str, int | float]
) -> Estimate:
    """The estimate of an outcome, in the structure of the question."""
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
    unmet = any_unmet(first.results)
    used = first.stats["num_matvecs"]
    first = first._replace(stats=state.stats_of_exact(first.stats))

    statics: list[Any] = []

    def run_exact():
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

    shapes = jax.eval_shape(run_exact)[1]
    nothing = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def keep_first():
        return (first.bars, first.results, first.stats), nothing

    # One condition for all lanes of a `vmap`, or all would take n products more.
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
    """The bars of the second of two judges, or of the first."""
    bars = first_judge(products[0]), second_judge(products[1])
    return [
        jtu.tree_map(lambda x, y: jnp.where(second, y, x), *pair)
        for pair in zip(*bars, strict=True)
    ]
