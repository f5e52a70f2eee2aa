"""The abstract class of estimators, its state, and the contract for writing one."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, PyTree

from ._accuracy.error_bar import exact_bar
from ._accuracy.tolerance import SMALL, Tolerance, make_tolerance
from ._arguments import budget_of
from ._estimate import Estimate, raise_failure
from ._linalg.tall import Rows, summed
from ._operators.block import (
    apply_block,
    as_data,
    columns_at_once,
    has_real_trace,
    space_of,
)
from ._primitive import Algorithm, Blocks, Columns, RowWise, estimate, outcome_of
from ._progress import NO_PROGRESS_METER, ProgressMeter, check_meter
from ._state import Kept, check_state, kept_of, with_parts


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
        tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]] | Any,
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
            `state.kept.parts`, and `k` is then the sum of both budgets;
        - blocks of shape `(n, p)`, in the order of the operator's flattened structure,
            with `E[V Z^*] = I`.
        """

    def compute_until(
        self, state: Any, k: int, tolerance: Tolerance, meter: ProgressMeter
    ) -> Any:
        """As `compute`, with the products that the tolerance takes. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: this estimator takes no tolerance; use "
            "traceax.XTraceEstimator(), or leave out rtol and atol."
        )

    def by_rows(self, rows: Rows) -> "TraceEstimator":
        """The same, of sums over groups of rows of the diagonal, as arrays. Optional."""
        raise TypeError(
            f"{type(self).__name__}: this estimator gives neither diagonals nor traces of "
            "leaves; use traceax.HutchinsonEstimator() or traceax.XTraceEstimator()."
        )

    def settled(self, state: Any) -> Any:
        """The state, once an estimate to a tolerance has been taken. Optional."""
        return state

    def carry_over(self, state: Any, fresh: Any) -> Any:
        """The fresh state of `refresh`, with what it uses again. Optional."""
        return fresh

    def estimate(
        self,
        state: PyTree,
        k: int | None = None,
        *,
        rtol: ArrayLike | None = None,
        atol: ArrayLike | None = None,
        level: float = 0.95,
        give_up: bool = False,
        progress_meter: ProgressMeter = NO_PROGRESS_METER,
        throw: bool = True,
    ) -> Estimate:
        """Estimates the trace of the state's operator with at most `k` products.

        **Arguments:**

        - `state`: as `init` returned it, or the `state` of an earlier estimate, from
            which Hutchinson, Hutch++, XTrace and XNysTrace take `k` *more* products: the
            estimate is that of one run with the sum of the budgets, up to rounding.
            Budgets below 4 keep nothing.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact and takes n products.
        - `rtol`, `atol`, `level`, `give_up`, `progress_meter`, `throw`: as for
            [`traceax.trace`][], of estimators that take a tolerance. The state keeps
            what was taken.

        **Returns:** a [`traceax.Estimate`][].

        **Raises:**

        - as [`traceax.trace`][]; `TypeError` for the state of another estimator.
        """
        where = f"{type(self).__name__}.estimate"
        check_state(state, self, where)
        space = space_of(state.operator)
        tolerance = make_tolerance(
            rtol, atol, level, space.compute_dtype, where, give_up=give_up
        )
        k = budget_of(k, tolerance, space.size, where)
        check_meter(progress_meter, where)
        return estimate_trace(self, state, k, tolerance, progress_meter, throw=throw)

    def refresh(
        self, state: Any, key: Key[Array, ""], operator: lx.AbstractLinearOperator
    ) -> Any:
        """The state for an operator that has changed, as by a step of training.

        On directions in which products were large the trace is exact; what they leave is
        tested by fresh probes, on which they don't depend, or estimated by the estimator
        itself where budgets are more than three times as large; going on keeps to the one
        that was begun. Other estimators begin anew, with the probes of the key.

        | | what is used again |
        |---|---|
        | XTrace, Hutch++ | directions in which products were large, for at most half of the products |
        | DeltaShift | the estimate, its probes, and such directions |

        **Arguments:**

        - `state`: of an estimate, or of `init`, of this estimator. Its operator may be
            `None`, as in the carry of a loop.
        - `key`: a single key. Probes of those in the table are fresh also for the same one.
        - `operator`: of the same structure as that of the state.

        An estimate to a tolerance finds a basis of its own.

        **Returns:** a state that keeps no products. **Raises:** as `init`; `ValueError`
        for an operator of another structure.
        """
        where = f"{type(self).__name__}.refresh"
        check_state(state, self, where)
        state, fresh = self.settled(state), self.init(key, operator)
        if state.operator is not None:
            old, new = (space_of(x.operator) for x in (state, fresh))
            if (old.structure, old.compute_dtype) != (new.structure, new.compute_dtype):
                raise ValueError(
                    f"{where}: the operator must have the structure of the state's, "
                    f"{old.structure}, got {new.structure}; begin anew with init."
                )
        return self.carry_over(state, fresh)


#
# Estimates
#


def estimate_trace(
    estimator: TraceEstimator,
    state: Any,
    k: int,
    tolerance: Tolerance | None,
    meter: ProgressMeter,
    *,
    rows: Rows | None = None,
    throw: bool,
) -> Estimate:
    """An estimate with k products more than the state keeps, from checked arguments.

    Of groups of rows of the diagonal if `rows` are given, as an array.
    """
    name = type(estimator).__name__
    estimator = estimator if rows is None else estimator.by_rows(rows)
    state = estimator.settled(state)
    size, total, kept = space_of(state.operator).size, k, kept_of(state)
    if kept is not None:
        total = k + kept.budget
        if total >= size > k:
            # An exact answer takes n products of its own.
            total = max(size - 1, kept.budget)
    if tolerance is not None and size > SMALL:
        # A loop that fails to meet the tolerance leaves nothing for an exact answer.
        total = min(total, size - 1)
    real = has_real_trace(state.operator)
    rest = eqx.tree_at(lambda x: x.operator, state, None)
    algorithm = _Trace(estimator, rest, total, real, tolerance, meter, rows)
    outcome = estimate(algorithm, as_data(state.operator))
    kept = outcome.kept
    if kept is not None:
        if not isinstance(kept, Kept):
            kept = Kept(total, kept)
        kept = Kept(kept.budget, kept.parts, estimator)
        state = with_parts(state, kept=kept)
    found = Estimate(*outcome[:4], state, name)
    return raise_failure(found) if throw else found


class _Trace(Algorithm):
    """An estimator as the primitive takes it."""

    estimator: TraceEstimator
    rest: Any  # of the state
    k: int = eqx.field(static=True)
    real: bool = eqx.field(static=True)
    tolerance: Tolerance | None
    meter: ProgressMeter = eqx.field(static=True)
    rows: Rows | None = eqx.field(static=True)

    def plain(self, primal):
        # Exact answers of few products: of the loss of a physics-informed network in ten
        # dimensions the rule, which takes them again, made the training step 1.2 times
        # as long.
        size = space_of(primal).size
        return self.k >= size and size <= columns_at_once(size)

    def run(self, primal):
        space = space_of(primal)
        state = eqx.tree_at(
            lambda x: x.operator, self.rest, primal, is_leaf=lambda x: x is None
        )
        if self.k >= space.size:
            value, error, stats, blocks = _exact(primal, self.rows)
        elif self.tolerance is None:
            value, error, stats, blocks = self.estimator.compute(state, self.k)
        else:
            value, error, stats, blocks = self.estimator.compute_until(
                state, self.k, self.tolerance, self.meter
            )
        stand_in = blocks if isinstance(blocks, Columns) else Blocks([blocks])
        if self.rows is not None:
            stand_in = RowWise(stand_in, self.rows)
        return outcome_of(
            value, error, stats, space.compute_dtype, real=self.real
        ), stand_in


def _exact(operator: lx.AbstractLinearOperator, rows: Rows | None):
    space = space_of(operator)
    identity = jnp.eye(space.size, dtype=space.compute_dtype)
    entries = jnp.diagonal(apply_block(operator, identity))
    bar = exact_bar(summed(entries, rows), summed(jnp.abs(entries), rows))
    return *bar[:2], {"num_matvecs": space.size}, (identity, identity)
