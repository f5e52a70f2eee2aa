"""Checks of what [`traceax.StreamedMean`][] is given."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PyTree

from ._arguments import kind_of
from ._operator import (
    check_operator,
    is_negative_semidefinite,
    is_positive_semidefinite,
    space_of,
)

WHERE = "traceax.StreamedMean"
SIGNS = {
    "positive": (is_positive_semidefinite, lx.positive_semidefinite_tag),
    "negative": (is_negative_semidefinite, lx.negative_semidefinite_tag),
}


def structure_of(like: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """The structure of what operators act on."""
    for leaf in jtu.tree_leaves(like):
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray):
            raise TypeError(
                f"{WHERE}.init: like must be an operator, or a PyTree of arrays or "
                f"jax.ShapeDtypeStructs, got one with {kind_of(leaf)}; pass "
                "equinox.filter(module, equinox.is_inexact_array) of a module."
            )
    return jax.eval_shape(lambda x: x, like)


def check_passes_left(state: Any, where: str) -> None:
    """Refuses the state after the last pass."""
    if not state.passes_left:
        raise ValueError(
            f"{where}: all {len(state.products)} passes have ended; ask for the estimate "
            "of this state, or begin anew with init."
        )


def check_operator_of(operator: Any, state: Any, where: str) -> None:
    """Refuses operators other than `init` was told of."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        raise TypeError(
            f"{where}: operator must be a lineax linear operator, got "
            f"{kind_of(operator)}. The arguments are (state, operator, weight)."
        )
    check_operator(operator, where)
    like = state.inner.operator
    got, asked = operator.in_structure(), like.in_structure()
    if _shapes(got) != _shapes(asked):
        raise ValueError(
            f"{where}: operators must all act on one structure, that of init, "
            f"{eqx.tree_pformat(asked)}, got {eqx.tree_pformat(got)}."
        )
    for sign, (check, tag) in SIGNS.items():
        if tag in like.tags and not check(operator):
            raise ValueError(
                f"{where}: operator must be tagged {sign} semidefinite, as init was told "
                f"that all are, got a {type(operator).__name__} that is not; if it is, "
                "wrap it as lineax.TaggedLinearOperator(operator, "
                f"lineax.{sign}_semidefinite_tag), else tell init of no tag."
            )


def _shapes(structure: PyTree[jax.ShapeDtypeStruct]):
    leaves, treedef = jtu.tree_flatten(structure)
    return [(leaf.shape, leaf.dtype) for leaf in leaves], treedef


def check_weight(weight: Any, inner: Any, where: str) -> Float[Array, ""]:
    """The weight as an array."""
    got = kind_of(weight)
    if isinstance(weight, int | float) and not isinstance(weight, bool):
        weight = np.asarray(weight, float)
    if isinstance(weight, jax.Array | np.ndarray | np.generic):
        kinds = (jnp.floating, jnp.integer)
        if weight.shape == () and any(jnp.issubdtype(weight.dtype, x) for x in kinds):
            # A value on a device isn't waited for.
            known = not isinstance(weight, jax.Array)
            if known and inner.operator.tags and float(weight) < 0:
                raise ValueError(
                    f"{where}: weights of semidefinite operators must not be negative, "
                    f"got {weight}; tell init of no tag."
                )
            return jnp.asarray(weight).astype(space_of(inner.operator).real_dtype)
    raise TypeError(
        f"{where}: weight must be a real scalar, got {got}; give each operator one, such "
        "as the number of its examples."
    )


def check_stream(state: Any, made_by: tuple[str, int], where: str) -> None:
    """Refuses the state of another stream."""
    if state.made_by != made_by:
        (owner, k), (other, budget) = made_by, state.made_by
        raise ValueError(
            f"{where}: state must be of a StreamedMean with {owner} and k = {k}, got that "
            f"of one with {other} and k = {budget}; go on with that one."
        )
