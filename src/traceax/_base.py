"""The abstract class of estimators, and the contract for writing a new one."""

import abc
import operator as op
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, PyTree, UInt32

from ._estimate import RESULTS, Estimate, raise_failure
from ._operator import apply_block, check_operator, has_real_trace, space_of
from ._orthogonal import largest_entry
from ._primitive import Outcome, estimate_trace
from ._progress import NO_PROGRESS_METER, ProgressMeter, check_meter
from ._standard_error import ErrorBar
from ._stream import ProbeStream
from ._tolerance import FEWEST, Tolerance, make_tolerance


class StoredKey(eqx.Module):
    """A typed key as an ordinary array, which `eqx.tree_serialise_leaves` can save."""

    data: UInt32[Array, "..."]
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
    """

    budget: int = eqx.field(static=True)
    parts: PyTree[Array]


class TraceState(eqx.Module):
    """The state of an estimator that needs no set-up.

    A PyTree of ordinary arrays, besides the operator's leaves: it can be saved by
    `eqx.tree_serialise_leaves`, and loaded into the state of an equal run.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: the operator whose trace is estimated.
    - `kept`: what earlier estimates keep of their products; `None` for a new state.
    """

    _key: StoredKey
    operator: lx.AbstractLinearOperator
    kept: Kept | None

    def __init__(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        kept: Kept | None = None,
    ):
        self._key = StoredKey(key)
        self.operator = operator
        self.kept = kept

    @property
    def key(self) -> Key[Array, ""]:
        """A typed key."""
        return self._key.typed


def kept_parts(state: Any, number: int) -> Sequence[Any]:
    """What a state keeps, of so many parts; `None` for each if it keeps nothing."""
    kept = getattr(state, "kept", None)
    return [None] * number if kept is None else kept.parts


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
            `state.kept.parts`, and `k` is then the sum of both budgets;
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
            estimate of the estimators of this library, `k` *more* products are taken,
            and the estimate is that of one run with the sum of the budgets: to the
            last bit, where an operator's product with a vector doesn't depend on the
            vectors that are multiplied beside it.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact and takes n products.
        - `rtol`, `atol`, `level`, `progress_meter`: as for [`traceax.trace`][], of
            estimators that take a tolerance. Such an estimate begins anew, whatever
            the state keeps, and its state keeps nothing.
        - `throw`: whether a failure raises an error, at run time. If `False` it is
            only reported in `result`, and there is no host callback in the program.

        **Returns:**

        A [`traceax.Estimate`][].

        **Raises:**

        - `TypeError` if `k` is traced or not an integer, or for a tolerance that the
            estimator does not take; `ValueError` if `k` is below 1.
        - A run-time error for what only values can tell, such as NaN in the operator
            (see [`traceax.RESULTS`][]), unless `throw=False`.
        """
        where = f"{type(self).__name__}.estimate"
        k = check_budget(k, where)
        space = space_of(state.operator)
        tolerance = make_tolerance(rtol, atol, level, space, where)
        check_meter(progress_meter, where)
        if tolerance is None:
            return _estimate(self, state, k, throw=throw)
        return estimate_until(self, state, k, tolerance, progress_meter, throw=throw)

    def evaluate(self, state: Any, k: int):
        """`compute`, or the exact answer where the budget allows it."""
        if k < space_of(state.operator).size:
            return self.compute(state, k)
        return _exact(state.operator)


def _estimate(
    estimator: TraceEstimator, state: Any, k: int, *, throw: bool
) -> Estimate:
    real = has_real_trace(state.operator)
    total, kept = k, getattr(state, "kept", None)
    if kept is not None:
        total = k + kept.budget
        # Exact answers take n products of their own.
        size = space_of(state.operator).size
        if total >= size > k:
            total = max(size - 1, kept.budget)
    outcome = estimate_trace(estimator, state, total, real=real)
    if outcome.kept is not None and hasattr(state, "kept"):
        state = _with_kept(state, Kept(total, outcome.kept))
    return _finish(outcome, state, throw=throw)


def _with_kept(state: Any, kept: Kept | None) -> Any:
    return eqx.tree_at(lambda x: x.kept, state, kept, is_leaf=lambda x: x is None)


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
    if not hasattr(estimator, "compute_until"):
        raise TypeError(
            f"{type(estimator).__name__}.estimate: this estimator takes no tolerance; "
            "use traceax.HutchinsonEstimator, traceax.XTraceEstimator or "
            "traceax.XNysTraceEstimator, or leave out rtol and atol."
        )
    if getattr(state, "kept", None) is not None:
        state = _with_kept(state, None)
    real = has_real_trace(state.operator)
    adaptive = _Adaptive(estimator, tolerance, meter)
    outcome = estimate_trace(adaptive, state, k, real=real)
    return _finish(outcome, state, throw=throw)


def _finish(outcome: Outcome, state: Any, *, throw: bool) -> Estimate:
    value, error, result, stats, _ = outcome
    estimate = Estimate(value, error, result, stats, state)
    return raise_failure(estimate) if throw else estimate


class _Adaptive(eqx.Module):
    """An estimator that stops at a tolerance, as the primitive takes it."""

    estimator: Any
    tolerance: Tolerance
    meter: ProgressMeter = eqx.field(static=True)

    def evaluate(self, state: Any, k: int):
        size = space_of(state.operator).size
        if k >= size and size <= FEWEST:
            return _exact(state.operator)
        # A loop that fails to meet the tolerance leaves nothing for an exact answer.
        k = min(k, size - 1)
        if k < FEWEST:
            value, error, stats, blocks = self.estimator.compute(state, k)
            stats = {name: x for name, x in stats.items() if name != "kept"}
        else:
            value, error, stats, blocks = self.estimator.compute_until(
                state, k, self.tolerance, self.meter
            )
        met = self.tolerance.met(ErrorBar(value, error, stats["degrees_of_freedom"]))
        result = stats.get("result", RESULTS.successful)
        met = met | ~jnp.isfinite(value)  # that has a cause of its own
        unmet = RESULTS.where(met, RESULTS.successful, RESULTS.tolerance_not_met)
        result = RESULTS.where(result == RESULTS.successful, unmet, result)
        return value, error, {**stats, "result": result}, blocks


def _exact(operator: lx.AbstractLinearOperator):
    # n products with the coordinate vectors.
    space = space_of(operator)
    identity = jnp.eye(space.size, dtype=space.compute_dtype)
    products = apply_block(operator, identity)
    value = jnp.trace(products)
    stats = {"num_matvecs": space.size, "largest_product": largest_entry(products)}
    return value, jnp.zeros((), space.real_dtype), stats, (identity, identity)


def init_state(
    key: Key[Array, ""], operator: lx.AbstractLinearOperator, where: str = "init"
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


def check_key(key: Any, where: str) -> Key[Array, ""]:
    """A single typed key from a typed or legacy key."""
    if isinstance(key, jax.Array | np.ndarray):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            if key.shape == ():
                return jnp.asarray(key)
            got = f"an array of keys of shape {key.shape}"
        elif key.dtype == jnp.uint32 and key.ndim == 1 and key.shape[0] in (2, 4):
            try:
                return jax.random.wrap_key_data(jnp.asarray(key))
            except (TypeError, ValueError):
                got = f"uint32 key data of shape {key.shape}"
        else:
            got = f"an array of shape {key.shape} and dtype {key.dtype}"
    else:
        got = f"an object of type {type(key).__name__}"
    raise TypeError(
        f"{where}: key must be a single key, got {got}; make one with "
        "jax.random.key(0), split several with jax.random.split and use jax.vmap over "
        "them. The arguments start (key, operator)."
    )


def check_budget(k: Any, where: str) -> int:
    """`k` as a positive Python int."""
    if isinstance(k, jax.core.Tracer):
        raise TypeError(
            f"{where}: k must be a Python int known at trace time, got a traced value; "
            "pass it as a static argument."
        )
    if isinstance(k, bool | np.bool_):
        raise TypeError(
            f"{where}: k must be an integer, got the boolean {k}; pass the number of "
            "matrix-vector products that may be used."
        )
    try:
        if isinstance(k, jax.Array):
            raise TypeError
        budget = op.index(k)
    except TypeError:
        raise TypeError(
            f"{where}: k must be a Python int, got {k!r} of type {type(k).__name__}; "
            "pass the number of matrix-vector products that may be used, for example "
            "int(k)."
        ) from None
    if budget < 1:
        raise ValueError(
            f"{where}: k must be at least 1, got {budget}; it is the number of "
            "matrix-vector products that may be used."
        )
    return budget
