"""What an estimate keeps of its products, for a later one to go on from."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Int, PyTree


class Kept(eqx.Module):
    """What an estimate keeps of its products.

    **Attributes:**

    - `budget`: how many products were allowed so far.
    - `parts`: arrays, as the estimator's `compute` returned them.
    - `owner`: the estimator, as `described` writes it.
    - `count`: how many probes there are, where that is known at run time only: parts
        are `Counted` then, and `budget` is that of one probe.
    """

    budget: int = eqx.field(static=True)
    parts: PyTree[Any]
    owner: str = eqx.field(static=True)
    count: Int[Array, ""] | None = None


class Counted(eqx.Module):
    """A part with room for more probes than there are.

    - `array`: of all probes there could be, one along each of its first `axes` axes.
    - `as_columns`: whether the part is its transpose.
    """

    array: Array
    axes: int = eqx.field(static=True, default=1)
    as_columns: bool = eqx.field(static=True, default=False)

    def first(self, count: int) -> Array:
        """Of the first probes, at most as many as there is room for."""
        x = self.array
        for axis in range(self.axes):
            end = min(count, x.shape[axis])
            x = jax.lax.slice_in_dim(x, 0, end, axis=axis)
        return x.T if self.as_columns else x


def is_settled(state: Any) -> bool:
    """Whether it is known how many products a state keeps."""
    kept = getattr(state, "kept", None)
    return not isinstance(kept, Kept) or kept.count is None


def settled(state: Any) -> Any:
    """The same state, of which parts are of as many probes as there are, if their number
    is known outside of programs."""
    if is_settled(state):
        return state
    kept = state.kept
    if isinstance(kept.count, jax.core.Tracer) or jnp.ndim(kept.count) > 0:
        return state
    count = int(kept.count)

    def is_counted(x):
        return isinstance(x, Counted)

    parts = jtu.tree_map(
        lambda x: x.first(count) if is_counted(x) else x, kept.parts, is_leaf=is_counted
    )
    return with_kept(state, Kept(count * kept.budget, parts, kept.owner))


def with_kept(state: Any, kept: Kept | None) -> Any:
    """A state that keeps something else."""
    return eqx.tree_at(lambda x: x.kept, state, kept, is_leaf=lambda x: x is None)


def kept_parts(state: Any, number: int) -> Sequence[Any]:
    """What a state keeps, of so many parts; `None` for each if it keeps nothing."""
    kept = getattr(state, "kept", None)
    return [None] * number if kept is None else kept.parts
