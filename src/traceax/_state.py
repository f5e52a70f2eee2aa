"""The states of estimators, and what they keep for later."""

from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Key, PyTree

from ._arguments import StoredKey, check_key, kind_of
from ._estimate import Estimate
from ._functional import TRACE, Functional
from ._operators.block import Space, space_of
from ._operators.check import checked_operator


class Kept(eqx.Module):
    """What an estimate keeps of its products, for a later one to go on from.

    **Attributes:**

    - `budget`: how many products were allowed so far.
    - `parts`: arrays, as the estimator's `compute` returned them.
    - `owner`: the estimator.
    """

    budget: int = eqx.field(static=True)
    parts: PyTree[Any]
    owner: Any = None


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
    - `kept`: what earlier estimates keep of their products; `None` for a new state.
    - `functional`: what is summed of the diagonal: all of it for a trace.
    - `space`: the space that the operator maps to itself.
    """

    _key: StoredKey
    operator: lx.AbstractLinearOperator
    kept: Kept | None
    functional: Functional = eqx.field(static=True)
    space: Space = eqx.field(static=True)

    def __init__(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        kept: Kept | None = None,
        functional: Functional = TRACE,
    ):
        self._key = StoredKey(key)
        self.operator = operator
        self.kept = kept
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


# States of a user's own estimators have a key and an operator, and need not have more.
_MISSING = object()


def kept_of(state: Any) -> Kept | None:
    """What a state keeps."""
    return getattr(state, "kept", None)


def functional_of(state: Any) -> Functional:
    """What is summed of the diagonal."""
    return getattr(state, "functional", TRACE)


def state_space(state: Any) -> Space:
    """The space of the state's operator."""
    space = getattr(state, "space", None)
    return space_of(state.operator) if space is None else space


def replace_parts(state: Any, **parts: Any) -> Any:
    """The state with other parts, of those that it has."""
    names = [name for name in parts if getattr(state, name, _MISSING) is not _MISSING]
    return eqx.tree_at(
        lambda x: [getattr(x, name) for name in names],
        state,
        [parts[name] for name in names],
        is_leaf=lambda x: x is None,
    )


def check_state(state: Any, estimator: eqx.Module, where: str) -> None:
    """Refuses what isn't a state, and what another estimator keeps."""
    if getattr(state, "operator", _MISSING) is _MISSING:
        hint = "its `.state`" if isinstance(state, Estimate) else "that of `init`"
        raise TypeError(
            f"{where}: state must be that of an estimator, got "
            f"{kind_of(state)}; pass {hint}."
        )
    kept = kept_of(state)
    if kept is not None and not _equal(kept.owner, estimator):
        raise TypeError(
            f"{where}: the state keeps products of another estimator or configuration, "
            f"of which {estimator} can't make use; begin anew with "
            f"{type(estimator).__name__}.init."
        )


def _equal(x: Any, y: Any) -> bool:
    """Whether modules are equal as far as it is known: arrays may be traced."""
    (xs, structure), (ys, other) = jtu.tree_flatten(x), jtu.tree_flatten(y)
    if structure != other:
        return False
    known = [z for z in zip(xs, ys, strict=True) if not _is_traced(*z)]
    return all(np.array_equal(*z) for z in known)


def _is_traced(*arrays: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)
