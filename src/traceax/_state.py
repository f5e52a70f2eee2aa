"""The states of estimators, and what they keep for later."""

from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from ._arguments import StoredKey, check_key, kind_of
from ._estimate import Estimate
from ._functional import TRACE, Functional
from ._operators.block import Space, space_of
from ._operators.check import checked_operator


class Grown(eqx.Module):
    """What an estimate took, for a later one to go on from.

    **Attributes:**

    - `buffers`: arrays, as the estimator's `compute` returned them; of a
        [`traceax.GrowingEstimator`][] with space for `room` units, the first `count` of
        which are taken.
    - `count`: an array after an estimate to a tolerance, a Python integer otherwise.
    - `budget`: how many products were allowed so far.
    - `estimator`: whose they are.
    """

    buffers: PyTree[Any]
    count: int | Int[Array, ""] = 0
    room: int = eqx.field(static=True, default=0)
    budget: int = eqx.field(static=True, default=0)
    estimator: Any = None


class State(eqx.Module):
    """Abstract base class of the library's states: a key and a checked operator."""

    _key: eqx.AbstractVar[StoredKey]
    operator: eqx.AbstractVar[lx.AbstractLinearOperator]
    space: eqx.AbstractVar[Space]

    @property
    def key(self) -> Key[Array, ""]:
        """A typed key."""
        return self._key.typed


class TraceState(State):
    """The state of an estimator that needs no set-up.

    A PyTree of ordinary arrays, besides the operator's leaves: it can be saved by
    `eqx.tree_serialise_leaves`, and loaded into the state of an equal run.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: the operator whose trace is estimated.
    - `grown`: what earlier estimates took; `None` for a new state.
    - `functional`: what is summed of the diagonal: all of it for a trace.
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
        self.space = space_of(operator)


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


# States of a user's own have a key and an operator, and need not have more.
def grown_of(state: Any) -> Grown | None:
    """What earlier estimates took."""
    return state.grown if isinstance(state, TraceState) else None


def functional_of(state: Any) -> Functional:
    """What is summed of the diagonal."""
    return state.functional if isinstance(state, TraceState) else TRACE


def with_grown(state: Any, grown: Grown | None) -> Any:
    """The state with something else to go on from."""
    if not isinstance(state, TraceState):
        return state
    return eqx.tree_at(lambda x: x.grown, state, grown, is_leaf=lambda x: x is None)


def check_state(state: Any, estimator: eqx.Module, where: str) -> None:
    """Refuses what isn't a state, and what another estimator took."""
    if getattr(state, "operator", None) is None:
        hint = "its `.state`" if isinstance(state, Estimate) else "that of `init`"
        raise TypeError(
            f"{where}: state must be that of an estimator, got "
            f"{kind_of(state)}; pass {hint}."
        )
    grown = grown_of(state)
    if grown is not None and not _equal(grown.estimator, estimator):
        raise TypeError(
            f"{where}: the state keeps products of another estimator or configuration, "
            f"of which {estimator} can't make use; begin anew with "
            f"{type(estimator).__name__}.init."
        )


def _equal(x: Any, y: Any) -> bool:
    """Whether modules are equal as far as it is known: arrays may be traced."""
    (xs, structure), (ys, other) = jtu.tree_flatten(x), jtu.tree_flatten(y)
    return structure == other and all(
        any(isinstance(z, jax.core.Tracer) for z in pair) or np.array_equal(*pair)
        for pair in zip(xs, ys, strict=True)
    )
