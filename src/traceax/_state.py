"""The state of an estimator, and the checks of what it is made from."""

import dataclasses
import operator as op
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Key, UInt32

from ._arguments import kind_of
from ._kept import Kept, is_settled
from ._operator import check_operator


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


def described(x: Any) -> str:
    """A module as it would be written, with every field; the same inside of programs."""
    if eqx.is_array(x):
        return f"{x.dtype}{list(x.shape)}"
    if not isinstance(x, eqx.Module):
        return repr(x)
    fields = [
        f"{field.name}={described(getattr(x, field.name))}"
        for field in dataclasses.fields(x)
    ]
    return f"{type(x).__name__}({', '.join(fields)})"


def check_state(state: Any, estimator: Any, where: str) -> None:
    """Refuses what isn't a state, and what another estimator keeps."""
    if not hasattr(state, "operator"):
        hint = "its `.state`" if hasattr(state, "standard_error") else "that of `init`"
        raise TypeError(
            f"{where}: state must be that of an estimator, got "
            f"{kind_of(state)}; pass {hint}."
        )
    kept = getattr(state, "kept", None)
    if kept is not None and kept.owner != (owner := described(estimator)):
        raise TypeError(
            f"{where}: the state keeps products of {kept.owner}, of which {owner} can't "
            f"make use; begin anew with {type(estimator).__name__}.init."
        )


def check_settled(state: Any, estimator: Any, where: str) -> None:
    """Refuses a state of which it is not known how many products it keeps."""
    if not is_settled(state):
        raise TypeError(
            f"{where}: state is that of an estimate to a tolerance, and how many "
            "products it keeps is not known here: the estimate was made in the same "
            "program, or is of several lanes of a vmap. Return the estimate from its "
            "program and go on from its .state, of one lane at a time; ask for the "
            "smaller tolerance at once, "
            f"or begin anew with {type(estimator).__name__}.init."
        )


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


def check_key(key: Any, where: str) -> Key[Array, ""]:
    """A single typed key from a typed or legacy key."""
    got = kind_of(key)
    if isinstance(key, jax.Array | np.ndarray):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            if key.shape == ():
                return key if isinstance(key, jax.Array) else jnp.asarray(key)
            got = f"an array of keys of shape {key.shape}"
        elif key.dtype == jnp.uint32 and key.ndim == 1 and key.shape[0] in (2, 4):
            try:
                return jax.random.wrap_key_data(jnp.asarray(key))
            except (TypeError, ValueError):
                got = f"uint32 key data of shape {key.shape}"
    raise TypeError(
        f"{where}: key must be a single key, got {got}; make one with "
        "jax.random.key(0), split several with jax.random.split and use jax.vmap over "
        "them. It is the first argument."
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
