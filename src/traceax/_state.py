"""States: a key, a checked operator, a requested quantity, products to resume from."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from ._arguments import check_key, kind_of
from ._error_bar import ErrorBar
from ._estimate import Estimate
from ._functional import TRACE, Functional
from ._operators.check import checked_operator
from ._operators.solvers import product_error
from ._operators.space import Space, state_space


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


class Grown(eqx.Module):
    """Products that an estimate took, for a later estimate to resume from.

    **Attributes:**

    - `buffers`: arrays, as the estimator's `compute` returned them. A
        [`traceax.GrowingEstimator`][] has taken `count` of the `room` units that fit.
    - `count`: an array after an estimate to a tolerance, a Python integer otherwise.
    - `budget`: the number of products allowed so far.
    - `estimator`: the estimator that filled the buffers.
    """

    buffers: PyTree[Array]
    count: int | Int[Array, ""] = 0
    room: int = eqx.field(static=True, default=0)
    budget: int = eqx.field(static=True, default=0)
    estimator: eqx.Module | None = None


class State(eqx.Module):
    """Abstract base class for states: a key, a checked operator, a requested quantity."""

    _key: eqx.AbstractVar[StoredKey]
    operator: eqx.AbstractVar[lx.AbstractLinearOperator]
    space: eqx.AbstractVar[Space]
    grown: eqx.AbstractVar[Grown | None]
    # Whether the quantity is linear in the operator.
    is_linear: ClassVar[bool] = True

    @property
    def key(self) -> Key[Array, ""]:
        """A typed key."""
        return self._key.typed

    @property
    def solvers(self) -> Float[Array, ""] | None:
        """The relative error that iterations inside the operator leave in products;
        `None` without any."""
        return product_error(self.operator, self.space.real_dtype)

    @property
    def given(self) -> Any:
        """The state as `init` returned it. Optional."""
        return self

    @property
    def treedef(self) -> Any:
        """The structure of the value. Optional."""
        return jtu.tree_structure(0)

    def bar(self, bars: list[ErrorBar]) -> ErrorBar:
        """The error bar that a tolerance applies to. Optional."""
        return bars[0]

    def resumed(self, grown: Grown | None) -> "State":
        """The state with products to resume from. Optional."""
        return self

    def stats_of_exact(self, stats: dict[str, Any]) -> dict[str, Any]:
        """A loop's `stats`, with the shapes in an exact answer's `stats`. Optional."""
        return stats


class DerivedState(eqx.Module):
    """Stands for the state of an estimate that an estimator can't refine.

    - `door`: the function that made the estimate from several numbers, or from another
        operator than the caller's.
    """

    door: str = eqx.field(static=True)


class TraceState(State):
    """The state for an estimator that needs no set-up.

    Apart from the operator's leaves, its leaves are ordinary arrays, so that
    `eqx.tree_serialise_leaves` can save it, and an equal run can load it into its state.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: the operator whose trace is estimated.
    - `grown`: products that earlier estimates took; `None` for a new state.
    - `functional`: the linear functional on the diagonal, such as the sum for a trace.
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
        self.space = state_space(operator)

    def resumed(self, grown):
        return eqx.tree_at(lambda x: x.grown, self, grown, is_leaf=lambda x: x is None)


class CustomState(State):
    """A state that a custom estimator's `init` returned, with a key and an operator."""

    custom: Any
    space: Space = eqx.field(static=True)
    grown: ClassVar[None] = None  # pyright: ignore
    functional: ClassVar[Functional] = TRACE

    @property
    def _key(self) -> StoredKey:  # pyright: ignore
        return StoredKey(self.custom.key)

    @property
    def operator(self) -> lx.AbstractLinearOperator:  # pyright: ignore
        return self.custom.operator

    @property
    def given(self) -> Any:
        return self.custom


def init_state(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    where: str = "traceax.init_state",
) -> TraceState:
    """Checks a key and an operator, and returns them in a state.

    **Arguments:**

    - `key`: a typed key or a legacy `uint32` key; the state holds a typed one.
    - `operator`: a lineax operator.
    - `where`: the name that error messages start with.

    **Raises:**

    - `TypeError` unless `key` is a single key and `operator` is a lineax operator that
        doesn't act on integers.
    - `ValueError` for an operator that isn't square (equal input and output structures),
        or that mixes real and complex leaves.
    """
    operator = checked_operator(operator, where)
    return TraceState(check_key(key, where), operator)


def checked_state(
    given: Any,
    estimator: eqx.Module,
    where: str,
    classes: tuple[type[State], ...] = (TraceState, CustomState),
) -> State:
    """Wraps a custom state, and raises if its class isn't among `classes`, or if its
    products are from another estimator."""
    state = given
    if isinstance(given, DerivedState):
        raise TypeError(
            f"{where}: state must come from init or from an estimator's estimate, got one "
            f"from {given.door}, whose value this estimator doesn't compute; call "
            f"{given.door} again with a larger budget."
        )
    if not isinstance(given, State):
        operator = getattr(given, "operator", None)
        if operator is None:
            hint = "its `.state`" if isinstance(given, Estimate) else "`init`'s result"
            raise TypeError(
                f"{where}: state must come from an estimator, got {kind_of(given)}; "
                f"pass {hint}."
            )
        state = CustomState(custom=given, space=state_space(operator))  # pyright: ignore
    if not isinstance(state, classes):
        raise TypeError(
            f"{where}: state must be a {classes[0].__name__}, got {kind_of(state)}; start "
            f"with {type(estimator).__name__}.init."
        )
    grown = state.grown
    if grown is not None and not _equal(grown.estimator, estimator):
        raise TypeError(
            f"{where}: state keeps products of another estimator or configuration, which "
            f"{estimator} can't use; start over with {type(estimator).__name__}.init."
        )
    if grown is not None and grown.buffers == ():
        raise TypeError(
            f"{where}: state is from an estimate, and this estimator can't resume from an "
            "earlier one; start over with init and another key, or use "
            "traceax.XTraceEstimator()."
        )
    return state


def _equal(x: object, y: object) -> bool:
    """Whether two modules are equal. Traced arrays are assumed equal."""
    (xs, structure), (ys, other) = jtu.tree_flatten(x), jtu.tree_flatten(y)
    return structure == other and all(
        any(isinstance(z, jax.core.Tracer) for z in pair) or np.array_equal(*pair)
        for pair in zip(xs, ys, strict=True)
    )
