"""The one way from a checked state to an estimate, for all estimators."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import ArrayLike, PyTree

from ._accuracy.error_bar import ErrorBar
from ._accuracy.tolerance import EXACT_SIZE, Stop, make_stop, tolerance_result
from ._arguments import budget_of
from ._estimate import Estimate, raise_failure
from ._operators.block import as_data, columns_at_once
from ._primitive import Algorithm, Outcome, StandIn, estimate
from ._progress import NO_PROGRESS_METER, ProgressMeter
from ._state import Kept, check_state, kept_of, replace_parts, state_space


class Estimator(eqx.Module):
    """Abstract base class of estimators of traces and of spectral functions."""

    # Whether JAX may differentiate exact answers itself.
    _plain_exact: ClassVar[bool] = False

    @abc.abstractmethod
    def compute(self, state: Any, k: int) -> Any:
        """The algorithm. Called with `1 <= k < n`."""

    def compute_until(self, state: Any, k: int, stop: Stop) -> Any:
        """As `compute`, with the products that a tolerance takes. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: this estimator takes no tolerance; use "
            "traceax.XTraceEstimator(), traceax.KrylovAwareEstimator() for spectral "
            "functions, or leave out rtol and atol."
        )

    def check_budget(self, k: int, *, at_most: bool) -> None:
        """Refuses budgets that can't be spent; `at_most`: caps of a tolerance. Optional."""

    def trim(self, state: Any) -> Any:
        """Cuts buffers to the units taken, where their number is known (outside of jit).

        Optional.
        """
        return state

    def bar_of(self, outcome: Outcome) -> ErrorBar:
        """The error bar that a tolerance is for; one of several leaves holds their moduli.

        Optional.
        """
        freedom = outcome.stats["degrees_of_freedom"]
        parts = outcome.value, outcome.standard_error, freedom
        values, errors, freedoms = map(jtu.tree_leaves, parts)
        if len(values) == 1:
            return ErrorBar(values[0], errors[0], freedoms[0].astype(errors[0].dtype))
        sizes = [jnp.abs(x) for x in values]
        return ErrorBar(*map(jnp.stack, (sizes, errors, freedoms)))

    @abc.abstractmethod
    def _exact(self, state: Any) -> Any:
        """The exact answer from n products, as `compute` would return it."""

    @abc.abstractmethod
    def _finish(self, state: Any, computed: Any) -> tuple[Outcome, StandIn]:
        """The outcome and its stand-in, from what `compute` returned."""

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
            is exact and takes n products; of a spectral function an eigendecomposition,
            too.
        - `rtol`, `atol`, `level`, `progress_meter`, `throw`: as for [`traceax.trace`][],
            of estimators that take a tolerance. The state keeps what was taken.

        **Returns:**

        A [`traceax.Estimate`][]. Of a spectral function its value is of the structure
        that `fn` returns; `stats["ritz_values"]` and `stats["ritz_weights"]` are the
        estimated distribution of eigenvalues: `sum(ritz_weights * g(ritz_values))` is an
        estimate of `tr g(A)`.

        **Raises:**

        - as [`traceax.trace`][]; `TypeError` for the state of another estimator.
        """
        where = f"{type(self).__name__}.estimate"
        check_state(state, self, where)
        space = state_space(state)
        stop = make_stop(rtol, atol, level, progress_meter, space.compute_dtype, where)
        k = budget_of(k, stop, space.size, where)
        return run_estimator(self, state, k, stop, throw=throw)


def run_estimator(
    estimator: Estimator, state: Any, k: int, stop: Stop | None, *, throw: bool
) -> Estimate:
    """The estimate with k products more than the state keeps, from checked arguments."""
    state = estimator.trim(state)
    size, total, kept = state_space(state).size, k, kept_of(state)
    if kept is not None:
        total = k + kept.budget
        if total >= size > k:
            # An exact answer takes n products of its own.
            total = max(size - 1, kept.budget)
    if stop is not None and size > EXACT_SIZE:
        # A loop that fails to meet the tolerance leaves nothing for an exact answer.
        total = min(total, size - 1)
    if total < size:
        estimator.check_budget(k if stop is None else total, at_most=stop is not None)
    operator = as_data(state.operator)
    primal = state
    if operator is not state.operator:
        primal = eqx.tree_at(lambda x: x.operator, state, operator)
    outcome = estimate(_Run(estimator, total, stop), primal)
    kept = outcome.kept
    if kept is not None:
        if not isinstance(kept, Kept):
            kept = Kept(total, kept)
        kept = Kept(kept.budget, kept.parts, estimator)
        state = replace_parts(state, kept=kept)
    result = Estimate(*outcome[:4], state, type(estimator).__name__)
    return raise_failure(result) if throw else result


class _Run(Algorithm):
    """An estimator as the primitive takes it."""

    estimator: Estimator
    k: int = eqx.field(static=True)
    stop: Stop | None

    def plain(self, state):
        # Exact answers of few products: of the loss of a physics-informed network in ten
        # dimensions the rule, which takes them again, made the training step 1.2 times
        # as long.
        size = state_space(state).size
        small = self.k >= size and size <= columns_at_once(size)
        return self.estimator._plain_exact and small

    def run(self, state):
        if self.k >= state_space(state).size:
            return self.estimator._finish(state, self.estimator._exact(state))
        if self.stop is None:
            computed = self.estimator.compute(state, self.k)
            return self.estimator._finish(state, computed)
        computed = self.estimator.compute_until(state, self.k, self.stop)
        outcome, stand_in = self.estimator._finish(state, computed)
        bar = self.estimator.bar_of(outcome)
        result = tolerance_result(self.stop, bar, outcome.result)
        return outcome._replace(result=result), stand_in
