"""The abstract class of estimators, its state, and the contract for writing one."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, PyTree

from ._accuracy.tolerance import SMALL, Tolerance, make_tolerance
from ._arguments import check_budget, check_key, kind_of
from ._estimate import Estimate, raise_failure
from ._operators.block import (
    apply_block,
    as_data,
    check_operator,
    has_real_trace,
    space_of,
)
from ._primitive import Algorithm, Blocks, StandIn, estimate, outcome_of
from ._progress import NO_PROGRESS_METER, ProgressMeter, check_meter

#
# State
#


class StoredKey(eqx.Module):
    """A typed key as an ordinary array, which `eqx.tree_serialise_leaves` can save."""

    data: Array
    implementation: Any = eqx.field(static=True)

    def __init__(self, key: Key[Array, ""]):
        self.data = jax.random.key_data(key)
        self.implementation = jax.random.key_impl(key)

    @property
    def typed(self) -> Key[Array, ""]:
        return jax.random.wrap_key_data(self.data, impl=self.implementation)


class Kept(eqx.Module):
    """What an estimate keeps of its products, for a later one to go on from.

    **Attributes:**

    - `budget`: how many products were allowed so far.
    - `parts`: arrays, as the estimator's `compute` returned them.
    - `owner`: the structure of the estimator, its configuration included.
    """

    budget: int = eqx.field(static=True)
    parts: PyTree[Any]
    owner: Any = eqx.field(static=True, default=None)


class TraceState(eqx.Module):
    """The state of an estimator that needs no set-up.

    A PyTree of ordinary arrays, besides the operator's leaves: it can be saved by
    `eqx.tree_serialise_leaves`, and loaded into the state of an equal run.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: the operator whose trace is estimated.
    - `kept`: what earlier estimates keep of their products; `None` for a new state.
    - `basis`: orthonormal vectors, found for an operator that has changed since, of which
        the exact trace is taken; `None` without such.
    """

    _key: StoredKey
    operator: lx.AbstractLinearOperator
    kept: Kept | None
    basis: Inexact[Array, "n r"] | None

    def __init__(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        kept: Kept | None = None,
        basis: Inexact[Array, "n r"] | None = None,
    ):
        self._key = StoredKey(key)
        self.operator = operator
        self.kept = kept
        self.basis = basis

    @property
    def key(self) -> Key[Array, ""]:
        """A typed key."""
        return self._key.typed


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
    check_operator(operator, where)
    return TraceState(check_key(key, where), operator)


_MISSING = object()


def kept_of(state: Any) -> Kept | None:
    """What a state keeps. States of estimators of one's own need not keep anything."""
    return getattr(state, "kept", None)


def with_parts(state: Any, **parts: Any) -> Any:
    """The state with other parts, of those that it has."""
    names = [name for name in parts if getattr(state, name, _MISSING) is not _MISSING]
    return eqx.tree_at(
        lambda x: [getattr(x, name) for name in names],
        state,
        [parts[name] for name in names],
        is_leaf=lambda x: x is None,
    )


#
# Estimators
#


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
        """As `compute`, with as many products as the tolerance takes. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: this estimator takes no tolerance; use "
            "traceax.HutchinsonEstimator, traceax.XTraceEstimator or "
            "traceax.XNysTraceEstimator, or leave out rtol and atol."
        )

    def settled(self, state: Any) -> Any:
        """The state of an estimate to a tolerance, once the number of products is known.
        Optional."""
        return state

    def carry_over(self, state: Any, fresh: Any) -> Any:
        """The fresh state of an operator that has changed, with what `refresh` uses again
        of the state of an earlier estimate. Optional: by default nothing."""
        return fresh

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
            taken, and the estimate is that of one run with the sum of the budgets, up to
            rounding. Budgets below 4 keep nothing.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact and takes n products.
        - `rtol`, `atol`, `level`, `progress_meter`: as for [`traceax.trace`][], of
            estimators that take a tolerance: at most `k` more products are taken than the
            state keeps. The state keeps those that were taken.
        - `throw`: whether a failure raises an error, at run time. If `False` it is
            only reported in `result`, and there is no host callback in the program.

        **Returns:** a [`traceax.Estimate`][].

        **Raises:**

        - `TypeError` if `k` is traced or not an integer, for a tolerance that the
            estimator does not take, or for the state of another estimator; `ValueError` if
            `k` is below 1.
        - A run-time error for what only values can tell, such as NaN in the operator
            (see [`traceax.RESULTS`][]), unless `throw=False`.
        """
        where = f"{type(self).__name__}.estimate"
        _check_state(state, self, where)
        k = check_budget(k, where)
        dtype = space_of(state.operator).compute_dtype
        tolerance = None
        if rtol is not None or atol is not None:
            tolerance = make_tolerance(rtol, atol, level, dtype, where)
        check_meter(progress_meter, where)
        return estimate_trace(self, state, k, tolerance, progress_meter, throw=throw)

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

        - `state`: of an estimate, or of `init`, of this estimator. Its operator isn't
            used, and may be `None`, as in the carry of a loop.
        - `key`: a single key. Probes are fresh also for the same one again.
        - `operator`: of the same structure as that of the state.

        **Returns:** a state, which keeps no products: a budget is a new one.

        **Raises:** as `init`; `ValueError` for an operator of another structure.
        """
        where = f"{type(self).__name__}.refresh"
        _check_state(state, self, where)
        fresh = self.init(key, operator)
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
    throw: bool,
) -> Estimate:
    """An estimate with k products more than the state keeps, from checked arguments."""
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
    algorithm = _Trace(estimator, rest, total, real, tolerance, meter)
    outcome = estimate(algorithm, as_data(state.operator))
    kept = outcome.kept
    if kept is not None:
        if not isinstance(kept, Kept):
            kept = Kept(total, kept)
        kept = Kept(kept.budget, kept.parts, jtu.tree_structure(estimator))
        state = with_parts(state, kept=kept)
    found = Estimate(*outcome[:4], state)
    return raise_failure(found) if throw else found


class _Trace(Algorithm):
    """An estimator as the primitive takes it."""

    estimator: TraceEstimator
    rest: Any  # of the state
    k: int = eqx.field(static=True)
    real: bool = eqx.field(static=True)
    tolerance: Tolerance | None
    meter: ProgressMeter = eqx.field(static=True)

    def run(self, primal):
        space = space_of(primal)
        state = eqx.tree_at(
            lambda x: x.operator, self.rest, primal, is_leaf=lambda x: x is None
        )
        if self.k >= space.size:
            value, error, stats, blocks = _exact(primal)
        elif self.tolerance is None:
            value, error, stats, blocks = self.estimator.compute(state, self.k)
        else:
            value, error, stats, blocks = self.estimator.compute_until(
                state, self.k, self.tolerance, self.meter
            )
        stand_in = blocks if isinstance(blocks, StandIn) else Blocks([blocks])
        return outcome_of(value, error, stats, space.dtype, real=self.real), stand_in


def _exact(operator: lx.AbstractLinearOperator):
    space = space_of(operator)
    identity = jnp.eye(space.size, dtype=space.compute_dtype)
    value = jnp.trace(apply_block(operator, identity))
    error = jnp.zeros((), space.real_dtype)
    return value, error, {"num_matvecs": space.size}, (identity, identity)


def _check_state(state: Any, estimator: TraceEstimator, where: str) -> None:
    """Refuses what isn't a state, and what another estimator keeps."""
    if getattr(state, "operator", _MISSING) is _MISSING:
        hint = "its `.state`" if isinstance(state, Estimate) else "that of `init`"
        raise TypeError(
            f"{where}: state must be that of an estimator, got "
            f"{kind_of(state)}; pass {hint}."
        )
    kept = kept_of(state)
    if kept is not None and kept.owner != jtu.tree_structure(estimator):
        raise TypeError(
            f"{where}: the state keeps products of another estimator or configuration, "
            f"of which {estimator} can't make use; begin anew with "
            f"{type(estimator).__name__}.init."
        )
