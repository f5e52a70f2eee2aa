"""The one way from a checked state to an estimate, for all estimators."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import ArrayLike, PyTree

from ._accuracy.error_bar import ErrorBar, joint_bar
from ._accuracy.tolerance import (
    EXACT_SIZE,
    LEAST_PRODUCTS,
    Depth,
    Stop,
    make_stop,
    products_of_loop,
    tolerance_result,
)
from ._arguments import budget_of, most_products
from ._estimate import Estimate, raise_failure
from ._linalg.types import alike
from ._operators.block import as_data, columns_at_once, space_of
from ._operators.entries import unit_columns
from ._operators.solvers import solver_tolerance
from ._primitive import Algorithm, Outcome, StandIn, estimate, with_solvers
from ._progress import NO_PROGRESS_METER, ProgressMeter
from ._results import any_unmet
from ._state import Grown, check_state, grown_of, with_grown


class Estimator(Algorithm):
    """Abstract base class of estimators of traces and of spectral functions."""

    # Whether JAX may differentiate exact answers itself.
    _plain_exact: ClassVar[bool] = False
    # Whether error bars of `compute` hold the errors of solvers within the operator.
    _bars_hold_solvers: ClassVar[bool] = False

    @abc.abstractmethod
    def compute(self, state: Any, k: int) -> Any:
        """The algorithm. Called with `1 <= k < n`."""

    def compute_until(self, state: Any, k: int, stop: Any) -> Any:
        """As `compute`, until a `Stop` or `Depth`; of a `Stop` with `"products_needed"` in
        `stats`. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: this estimator takes no tolerance; use "
            "traceax.XTraceEstimator(), traceax.KrylovAwareEstimator() for spectral "
            "functions, or leave out rtol and atol."
        )

    def least_of_loop(self, state: Any) -> int:
        """The fewest products that a loop to a tolerance is worth beginning with. Optional."""
        return LEAST_PRODUCTS

    def stats_of_size(self, stats: dict[str, Any], size: int) -> dict[str, Any]:
        """`stats` of a loop in the shapes of those of an exact answer. Optional."""
        return stats

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

    def bar_of(self, outcome: Outcome) -> ErrorBar:
        """The error bar that a tolerance is for. Optional."""
        freedom = outcome.stats["degrees_of_freedom"]
        parts = outcome.value, outcome.standard_error, freedom
        return joint_bar(*map(jtu.tree_leaves, parts))

    @abc.abstractmethod
    def _exact(self, state: Any) -> Any:
        """The exact answer from n products, as `compute` would return it."""

    @abc.abstractmethod
    def _finish(self, state: Any, computed: Any) -> tuple[Outcome, StandIn]:
        """The outcome and its stand-in, from what `compute` returned."""

    def run(self, state, k, stop):
        space = space_of(state.operator)
        size, exact = space.size, k >= space.size
        solvers = solver_tolerance(state.operator, space.real_dtype)
        # Exact answers measure what solvers leave.
        part = None if exact or self._bars_hold_solvers else solvers
        if exact:
            computed = self._exact(state)
        elif stop is None:
            computed = self.compute(state, k)
        else:
            if isinstance(stop, Stop):
                stop = dataclasses.replace(stop, solvers=part)
            computed = self.compute_until(state, k, stop)
        outcome, stand_in = self._finish(state, computed)
        if isinstance(stop, Stop):
            result = outcome.result
            if not exact or solvers is not None:
                result = tolerance_result(stop, self.bar_of(outcome), result)
            needed = outcome.stats.get("products_needed", float(size))
            needed = jnp.asarray(needed, space.real_dtype)
            # Where it isn't known, it stays infinite, and where products don't help.
            needed = jnp.where(jnp.isfinite(needed), jnp.minimum(needed, size), needed)
            if solvers is not None and part is None:
                needed = jnp.where(any_unmet(result), jnp.inf, needed)
            stats = {**outcome.stats, "products_needed": needed}
            outcome = outcome._replace(result=result, stats=stats)
        error = with_solvers(outcome.value, outcome.standard_error, part)
        return outcome._replace(standard_error=error), stand_in

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
            which Hutchinson, Hutch++, XTrace and XNysTrace take `k` *more* products: the
            estimate is that of one run with the sum of the budgets, up to rounding.
            Budgets below 4 keep nothing.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact and takes n products, if no tolerance was met before; of a spectral
            function an eigendecomposition, too.
        - `rtol`, `atol`, `level`, `progress_meter`, `throw`: as for [`traceax.trace`][],
            of estimators that take a tolerance. The state keeps what was taken.

        **Returns:** a [`traceax.Estimate`][].

        **Raises:** as [`traceax.trace`][]; `TypeError` for the state of another estimator.
        """
        where = f"{type(self).__name__}.estimate"
        check_state(state, self, where)
        dtype = space_of(state.operator).compute_dtype
        stop = make_stop(rtol, atol, level, progress_meter, dtype, where)
        k, stop = limits(self, state, k, stop, progress_meter, where)
        return run_estimator(self, state, k, stop, throw=throw)


def limits(
    estimator: Estimator,
    state: Any,
    k: int | None,
    stop: Stop | None,
    meter: ProgressMeter,
    where: str,
) -> tuple[int, Stop | Depth | None]:
    """The budget, and when a loop may stop. Left out without a tolerance: `most_products`,
    less than n, or n where that is few."""
    size = space_of(state.operator).size
    depth = estimator.depth(state, meter) if k is None and stop is None else None
    if depth is None:
        return budget_of(k, stop, size, where), stop
    if size <= EXACT_SIZE:
        return size, None
    return min(size - 1, most_products(size)), depth


def run_estimator(
    estimator: Estimator,
    state: Any,
    k: int,
    stop: Stop | Depth | None,
    *,
    throw: bool,
) -> Estimate:
    """The estimate with k products more than the state's, or the exact one, from checked
    arguments."""
    state = estimator.trim(state)
    size, grown = space_of(state.operator).size, grown_of(state)
    spent, loop = 0 if grown is None else grown.budget, k
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
        # Of few products: of the loss of a physics-informed network in ten dimensions the
        # rule, which takes them again, made the training step 1.2 times as long.
        plain = exact and estimator._plain_exact
        plain = plain and size <= min(columns_at_once(size), unit_columns(operator))
        outcome = estimate(estimator, primal, total, stop, plain)
    kept = outcome.kept
    if kept is not None:
        kept = kept if isinstance(kept, Grown) else Grown(kept, budget=total)
        state = with_grown(state, dataclasses.replace(kept, estimator=estimator))
    result = Estimate(*outcome[:4], state, (type(estimator).__name__, size))
    return raise_failure(result) if throw else result


@eqx.filter_jit
def _estimate_or_exact(estimator: Estimator, state: Any, k: int, stop: Stop) -> Outcome:
    """The estimate of a loop; the exact answer where it doesn't meet the tolerance."""
    size = space_of(state.operator).size
    outcome = estimate(estimator, state, k, stop)
    stats = estimator.stats_of_size(outcome.stats, size)
    parts = (*outcome[:3], stats)
    unmet = any_unmet(outcome.result)

    def exactly():
        found = estimate(estimator, state, size, stop)
        used = stats["num_matvecs"] + found.stats["num_matvecs"]
        needed = {"products_needed": jnp.full_like(stats["products_needed"], size)}
        others = {**stats, **needed, **found.stats, "num_matvecs": used}
        return jtu.tree_map(
            lambda new, old: jnp.where(unmet, new, old).astype(old.dtype),
            (*found[:3], others),
            parts,
        )

    # One condition for all lanes of a `vmap`, or all would take n products more.
    value, error, result, stats = jax.lax.cond(
        eqxi.unvmap_any(unmet), *alike(exactly, lambda: parts)
    )
    return Outcome(value, error, result, stats, outcome.kept)
