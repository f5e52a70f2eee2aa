"""Sets of probes that leave one out, and samples with their pairs."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int


class ProbeSet(NamedTuple):
    """Probes of which each is left out in turn.

    - `n`: their length.
    - `room`: how many columns a block of them has.
    - `active`: which of the columns are probes, the others being 0; `None` for all.
    - `resphere`: whether a probe's direction is uniform in what the others leave.
    """

    n: int
    room: int
    active: Bool[Array, " m"] | None
    resphere: bool

    def number(self, dtype) -> int | Float[Array, ""]:
        """How many probes there are."""
        if self.active is None:
            return self.room
        return jnp.sum(self.active).astype(jnp.finfo(dtype).dtype)

    def complement(self, dtype, left_out: int = 1) -> int | Float[Array, ""]:
        """The dimension of what all but so many probes leave; 1 without resphering."""
        return self.n - self.number(dtype) + left_out if self.resphere else 1


def make_probe_set(
    block: Inexact[Array, "n room"], count: int | Int[Array, ""], resphere: bool
) -> ProbeSet:
    """The probe set of a block whose first `count` columns are probes."""
    n, room = block.shape
    return ProbeSet(n, room, active_units(room, count), resphere)


def active_units(
    room: int, count: int | Int[Array, ""]
) -> Bool[Array, " {room}"] | None:
    """Which of the units that buffers have room for are taken; `None` for all."""
    if isinstance(count, int):
        return None
    return jnp.arange(room, dtype=jnp.int32) < count


class PairedSamples(NamedTuple):
    """Leave-one-out samples, each with partners: all others, or its neighbours.

    - `samples`: `t_i`.
    - `partners`: `t_j`, for each of the d partners j of sample i.
    - `without`: `t_ij`, sample i with probe j left out as well.
    - `swapped`: `t_ji`.
    - `is_pair`: which pairs are given.
    - `magnitude`: of what is added up to a sample, for the error of rounding.
    - `dimension`: that of the complement of all probes but two, where these are
        orthogonal to each other; `None` for independent probes.
    """

    samples: Inexact[Array, "*g m"]
    partners: Inexact[Array, "*g m d"]
    without: Inexact[Array, "*g m d"]
    swapped: Inexact[Array, "*g m d"]
    is_pair: Bool[Array, "m d"]
    magnitude: Float[Array, "*g"]
    dimension: ArrayLike | None = None


def all_pairs(
    samples: Inexact[Array, " m"],
    pairs: Inexact[Array, "m m"],
    magnitude: Float[Array, ""],
    active: Bool[Array, " m"] | None = None,
    dimension: ArrayLike | None = None,
) -> PairedSamples:
    """Samples with all others as partners; `pairs[i, j]` is `t_ij`."""
    is_pair = ~jnp.eye(len(samples), dtype=bool)
    if active is not None:
        is_pair = is_pair & active[:, None] & active[None, :]
    partners = jnp.broadcast_to(samples[None, :], pairs.shape)
    return PairedSamples(
        samples, partners, pairs, pairs.T, is_pair, magnitude, dimension
    )


def neighbour_pairs(
    samples: Inexact[Array, "*g m"],
    without_partner: Callable[[Int[Array, " m"]], Inexact[Array, "*g m"]],
    active: Bool[Array, " m"] | None,
    dimension: ArrayLike | None = None,
) -> PairedSamples:
    """Samples with the next one as partner, the first being next to the last.

    `without_partner(j)` is every sample i with probe `j_i` left out as well.
    """
    m = samples.shape[-1]
    position = jnp.arange(m, dtype=jnp.int32)
    is_active = jnp.ones(m, bool) if active is None else active
    last = m - 1 if active is None else jnp.sum(active, dtype=jnp.int32) - 1
    after = jnp.where(position < last, position + 1, 0)
    before = jnp.where(position > 0, position - 1, last)
    sizes = jnp.where(is_active, jnp.abs(samples), 0)
    partners, swapped = samples[..., after], without_partner(before)[..., after]
    return PairedSamples(
        samples,
        partners[..., None],
        without_partner(after)[..., None],
        swapped[..., None],
        is_active[:, None],
        jnp.sum(sizes, axis=-1) / jnp.sum(is_active).astype(sizes.dtype),
        dimension,
    )
