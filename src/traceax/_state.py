"""States: a key, a checked operator and a question about it; and products to resume from."""

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
from ._operators.solvers import solver_tolerance
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
    estimator: eqx.Module | None = None


class State(eqx.Module):
    """Abstract base class of states: a key, a checked operator and a question about it."""

    _key: eqx.AbstractVar[StoredKey]
    operator: eqx.AbstractVar[lx.AbstractLinearOperator]
    space: eqx.AbstractVar[Space]
    grown: eqx.AbstractVar[Grown | None]

    @property
    def key(self) -> Key[Array, ""]:
        """A typed key."""
        return self._key.typed

    @property
    def solvers(self) -> Float[Array, ""] | None:
        """The relative error of iterative solvers inside the operator; `None` without any."""
        return solver_tolerance(self.operator, self.space.real_dtype)

    @property
    def given(self) -> Any:
        """The state as `init` returned it. Optional."""
        return self

    @property
    def treedef(self) -> Any:
        """The structure of the answer. Optional."""
        return jtu.tree_structure(0)

    def bar(self, bars: list[ErrorBar]) -> ErrorBar:
        """The error bar that a tolerance applies to. Optional."""
        return bars[0]

    def resumed(self, grown: Grown | None) -> "State":
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
        self.space = state_space(operator)

    def resumed(self, grown):
        return eqx.tree_at(lambda x: x.grown, self, grown, is_leaf=lambda x: x is None)


class CustomState(State):
    """A state that a custom estimator's `init` returned, which has a key and an operator."""

    own: Any
    space: Space = eqx.field(static=True)
    grown: ClassVar[None] = None  # pyright: ignore
    functional: ClassVar[Functional] = TRACE

    @property
    def _key(self) -> StoredKey:  # pyright: ignore
        return StoredKey(self.own.key)

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


def checked_state(given: Any, estimator: eqx.Module, where: str) -> State:
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
        state = CustomState(own=given, space=state_space(operator))  # pyright: ignore
    grown = state.grown
    if grown is not None and not _equal(grown.estimator, estimator):
        raise TypeError(
            f"{where}: the state keeps products of another estimator or configuration, "
            f"of which {estimator} can't make use; start over with "
            f"{type(estimator).__name__}.init."
        )
    if grown is not None and grown.buffers == ():
        raise TypeError(
            f"{where}: an estimate can't resume from an earlier one; start over with init "
            "and another key, or use traceax.XTraceEstimator()."
        )
    return state


def _equal(x: object, y: object) -> bool:
    """Whether two modules are equal. Traced arrays are assumed equal."""
    (xs, structure), (ys, other) = jtu.tree_flatten(x), jtu.tree_flatten(y)
    return structure == other and all(
        any(isinstance(z, jax.core.Tracer) for z in pair) or np.array_equal(*pair)
        for pair in zip(xs, ys, strict=True)
    )
