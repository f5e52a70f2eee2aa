"""The abstract class of estimators, and the contract for writing a new one."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, PyTree

from ._estimate import RESULTS, Estimate, raise_failure
from ._kept import Kept, is_settled, settled, with_kept
from ._operator import Space, apply_block, has_real_trace, space_of
from ._orthogonal import products_to_check
from ._primitive import Outcome, estimate_trace
from ._progress import NO_PROGRESS_METER, ProgressMeter, check_meter
from ._sharding import replicate
from ._standard_error import ErrorBar
from ._state import check_budget, check_settled, check_state, described
from ._stream import ProbeStream
from ._tolerance import FEWEST, SMALL, Tolerance, make_tolerance


class TraceEstimator(eqx.Module):
    r"""Abstract base class of trace estimators.

    A concrete estimator is a frozen module whose fields are configuration, so that
    equal estimators compile once. It writes `init` and `compute` in plain JAX; it gets
    `estimate` from here, and with it exact answers for `k >= n`, failure reporting, and
    the derivative rule: the value's derivative is `<Z, dA V>`, whatever `compute` does
    inside. `compute` itself is never differentiated.
    """

    @abc.abstractmethod
    def init(self, key: Key[Array, ""], operator: lx.AbstractLinearOperator) -> Any:
        """Checks, and set-up that doesn't depend on the budget.

        **Arguments:**

        - `key`: as for `jax.random`; a typed key or a legacy `uint32` key.
        - `operator`: a square lineax operator.

        **Returns:**

        A state: a PyTree with at least the attributes `.key` and `.operator`, of which
        only `.operator` is differentiable. Begin with
        `traceax.init_state(key, operator)`, which checks both and is enough for most.
        """

    @abc.abstractmethod
    def compute(
        self, state: Any, k: int
    ) -> tuple[
        Inexact[Array, ""],
        Float[Array, ""],
        dict[str, PyTree],
        tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]] | ProbeStream,
    ]:
        r"""The algorithm. Called with `1 <= k < n`.

        **Arguments:**

        - `state`: as `init` returned it.
        - `k`: a Python int, the most products that may be used. Use all but at most
            two.

        **Returns:**

        A tuple `(value, standard_error, stats, (V, Z))`:

        - the estimate and its standard error (NaN where it cannot be known);
        - a dictionary with at least `"num_matvecs"`. `"degrees_of_freedom"` of the
            standard error makes the interval a Student t interval; a
            [`traceax.RESULTS`][] item under `"result"` reports a failure. Arrays under
            `"kept"` are handed to a later estimate that goes on from this one, as
            `state.kept.parts`, and `k` is then the sum of both budgets. A method
            `carry_over(state, fresh)` puts what is kept into the fresh state of an
            operator that has changed, see `refresh`;
        - blocks of shape `(n, p)`, in the order of the operator's flattened structure,
            with `E[V Z^*] = I`; or a [`traceax.ProbeStream`][], which draws them when
            they are needed.
        """

    def estimate(
        self,
        state: PyTree,
        k: int,
        *,
        rtol: ArrayLike | None = None,
        atol: ArrayLike | None = None,
        level: float = 0.95,
        progress_meter: ProgressMeter = NO_PROGRESS_METER,
        throw: bool = True,
    ) -> Estimate:
        """Estimates the trace of the state's operator with at most `k` products.

        **Arguments:**

        - `state`: as `init` returned it, or the `state` of an earlier estimate. The
            same state and `k` give the same number. From the state of an earlier
            estimate of Hutchinson, Hutch++, XTrace and XNysTrace `k` *more* products are
            taken, and the estimate is that of one run with the sum of the budgets: to the
            last bit, where an operator's product with a vector doesn't depend on the
            vectors that are multiplied beside it.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact and takes n products.
        - `rtol`, `atol`, `level`, `progress_meter`: as for [`traceax.trace`][], of
            estimators that take a tolerance: at most `k` more products are taken than the
            state keeps. The state keeps those that were taken. Their number is known
            outside of programs only: return the estimate, or its state, and go on from
            that.
        - `throw`: whether a failure raises an error, at run time. If `False` it is
            only reported in `result`, and there is no host callback in the program.

        **Returns:**

        A [`traceax.Estimate`][].

        **Raises:**

        - `TypeError` if `k` is traced or not an integer, for a tolerance that the
            estimator does not take, or for a state of which it is not known how many
            products it keeps; `ValueError` if `k` is below 1.
        - A run-time error for what only values can tell, such as NaN in the operator
            (see [`traceax.RESULTS`][]), unless `throw=False`.
        """
        where = f"{type(self).__name__}.estimate"
        check_state(state, self, where)
        state = settled(state)
        check_settled(state, self, where)
        k = check_budget(k, where)
        space = space_of(state.operator)
        tolerance = make_tolerance(rtol, atol, level, space, where)
        check_meter(progress_meter, where)
        if tolerance is None:
            return _go_on(self, self, state, k, throw=throw)
        return estimate_until(self, state, k, tolerance, progress_meter, throw=throw)

    def refresh(
        self, state: Any, key: Key[Array, ""], operator: lx.AbstractLinearOperator
    ) -> Any:
        """The state for an operator that has changed, as by a step of training.

        What an earlier estimate found helps to estimate the trace of the changed operator
        from fresh probes. With directions in which products were large, the trace on them
        is exact, and the probes test the rest. They don't depend on the fresh probes: the
        estimate is as unbiased as one that begins anew.

        | | what is used again |
        |---|---|
        | XTrace, Hutch++ | directions in which products were large, for half of the products |
        | DeltaShift | the estimate, its probes, and such directions |
        | others | nothing: the state is that of `init` |

        **Arguments:**

        - `state`: of an estimate, or of `init`, of this estimator. Of an estimate to a
            tolerance in the same program nothing is used. Its operator isn't used, and may
            be `None`, as in the carry of a loop.
        - `key`: a single key. Probes are fresh also for the same one again.
        - `operator`: of the same structure as that of the state.

        **Returns:**

        A state, which keeps no products: what is taken up from it is a new budget.

        **Raises:**

        - as `init`; `ValueError` for an operator of another structure.
        """
        where = f"{type(self).__name__}.refresh"
        check_state(state, self, where)
        fresh = self.init(key, operator)
        if state.operator is not None:
            old, new = (space_of(x.operator) for x in (state, fresh))
            if (old.structure, old.compute_dtype) != (new.structure, new.compute_dtype):
                raise ValueError(
                    f"{where}: the operator must have the structure of the state's, "
                    f"{old.structure}, got {new.structure}; begin anew with init."
                )
        state = settled(state)
        if not is_settled(state):
            state = with_kept(state, None)
        carry_over = getattr(self, "carry_over", None)
        return fresh if carry_over is None else carry_over(state, fresh)

    def evaluate(self, state: Any, k: int, compute: Callable | None = None):
        """`compute`, or another, or the exact answer where the budget allows it."""
        if k < space_of(state.operator).size:
            return (compute or self.compute)(state, k)
        return _exact(state.operator)


def _go_on(
    estimator: TraceEstimator, evaluated: Any, state: Any, k: int, *, throw: bool
) -> Estimate:
    """An estimate by what the primitive evaluates, with k products more than are kept."""
    real = has_real_trace(state.operator)
    total, kept = k, getattr(state, "kept", None)
    if kept is not None:
        total = k + kept.budget
        # Exact answers take n products of their own.
        size = space_of(state.operator).size
        if total >= size > k:
            total = max(size - 1, kept.budget)
    outcome = estimate_trace(evaluated, state, total, real=real)
    if outcome.kept is not None and hasattr(state, "kept"):
        kept = outcome.kept
        if not isinstance(kept, Kept):
            kept = Kept(total, kept, described(estimator))
        state = with_kept(state, kept)
    return finish(outcome, state, throw=throw)


def estimate_until(
    estimator: TraceEstimator,
    state: Any,
    k: int,
    tolerance: Tolerance,
    meter: ProgressMeter,
    *,
    throw: bool,
) -> Estimate:
    """An estimate that stops at a tolerance."""
    takers = (
        "traceax.HutchinsonEstimator, traceax.XTraceEstimator or "
        "traceax.XNysTraceEstimator"
    )
    adaptive = adaptive_estimator(estimator, tolerance, meter, takers)
    kept = getattr(state, "kept", None)
    if kept is not None and not adaptive.estimator.loop_goes_on(state):
        state = with_kept(state, None)
    return _go_on(estimator, adaptive, state, k, throw=throw)


def finish(outcome: Outcome, state: Any, *, throw: bool) -> Estimate:
    """What the primitive returned as an estimate."""
    value, error, result, stats, _ = outcome
    estimate = Estimate(value, error, result, stats, state)
    return raise_failure(estimate) if throw else estimate


def adaptive_estimator(
    estimator: Any, tolerance: Tolerance, meter: ProgressMeter, takers: str
) -> "_Adaptive":
    """The estimator, stopping at a tolerance. `takers` are those that can."""
    if not hasattr(estimator, "compute_until"):
        raise TypeError(
            f"{type(estimator).__name__}.estimate: this estimator takes no tolerance; "
            f"use {takers}, or leave out rtol and atol."
        )
    return _Adaptive(estimator, tolerance, meter)


class _Adaptive(eqx.Module):
    """An estimator that stops at a tolerance, as the primitive takes it."""

    estimator: Any
    tolerance: Tolerance
    meter: ProgressMeter = eqx.field(static=True)

    def evaluate(self, state: Any, k: int):
        def until(state, k):
            return self.estimator.compute_until(state, k, self.tolerance, self.meter)

        size = space_of(state.operator).size
        if size > SMALL:
            # A loop that fails to meet the tolerance leaves nothing for an exact answer.
            k = min(k, size - 1)
        outcome = self.estimator.evaluate(state, k, until if k >= FEWEST else None)
        value, error, stats, blocks = outcome
        # An exact answer has none.
        infinite = jtu.tree_map(lambda x: jnp.full_like(x, jnp.inf), error)
        freedom = stats.get("degrees_of_freedom", infinite)
        bars = zip(*map(jtu.tree_leaves, (value, error, freedom)), strict=True)
        # What is not finite has a cause of its own.
        met = [
            self.tolerance.judge(ErrorBar(*bar))[0] | ~jnp.isfinite(bar[0])
            for bar in bars
        ]
        met = jnp.stack(met).all()
        result = stats.get("result", RESULTS.successful)
        unmet = RESULTS.where(met, RESULTS.successful, RESULTS.tolerance_not_met)
        result = RESULTS.where(result == RESULTS.successful, unmet, result)
        return value, error, {**stats, "result": result}, blocks


def _exact(operator: lx.AbstractLinearOperator):
    space = space_of(operator)
    return exact_answer(space, apply_block(operator, identity_block(space)))


def identity_block(space: Space) -> Inexact[Array, "n n"]:
    """The coordinate vectors, n products with which make an answer exact."""
    return jnp.eye(space.size, dtype=space.compute_dtype)


def exact_answer(space: Space, products: Inexact[Array, "n n"]):
    """What `evaluate` returns, from the products with the coordinate vectors."""
    identity = identity_block(space)
    value = jnp.trace(replicate(products))
    stats = {"num_matvecs": space.size, "largest_product": products_to_check(products)}
    return value, jnp.zeros((), space.real_dtype), stats, (identity, identity)
