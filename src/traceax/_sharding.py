"""Blocks laid out over several devices.

Under a mesh of `Auto` axes the compiler finds layouts, and nothing here does anything.
Under one of `Explicit` axes an array's type says how it is laid out, and operations
whose result could be laid out in several ways must say in which.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Inexact


def place(
    block: Inexact[Array, "n k"], sharding: NamedSharding
) -> Inexact[Array, "n k"]:
    """The block laid out as asked, under a mesh of either kind."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        # Types can't tell of uneven parts: an axis of such is whole on every device.
        spec = [
            part if _divides(sharding, axis, block.shape[axis]) else None
            for axis, part in enumerate(sharding.spec)
        ]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return jax.sharding.reshard(block, sharding)
    return jax.lax.with_sharding_constraint(block, sharding)


def _divides(sharding: NamedSharding, axis: int, size: int) -> bool:
    """Whether so many entries along an axis are in parts of equal size."""
    part = sharding.spec[axis]
    names = part if isinstance(part, tuple) else (part,)
    parts = math.prod(sharding.mesh.shape[x] for x in names if x is not None)
    return size % parts == 0


def on_one_cpu() -> bool:
    """Whether all there is is one CPU, where some work is better done in pieces.

    Pieces of what is spread over devices would have to be gathered.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def explicit_sharding(x: Array) -> NamedSharding | None:
    """How an array is laid out, where its type says so; else `None`."""
    return _explicit(jax.typeof(x).sharding)


def _explicit(sharding: Any) -> NamedSharding | None:
    is_explicit = (
        isinstance(sharding, NamedSharding)
        and AxisType.Explicit in sharding.mesh.axis_types
        and any(axis is not None for axis in sharding.spec)
    )
    return sharding if is_explicit else None


def replicated_like(*arrays: Array) -> NamedSharding | None:
    """A copy on every device that one of the arrays is on, where types say so.

    For arrays of as many axes as the first.
    """
    for x in arrays:
        sharding = explicit_sharding(x)
        if sharding is not None:
            spec = PartitionSpec(*[None] * arrays[0].ndim)
            return NamedSharding(sharding.mesh, spec)
    return None


def lay_out(rows: Inexact[Array, "k *s"], structure: Any) -> Inexact[Array, "k *s"]:
    """Arrays of a structure, stacked along the first axis, each laid out as it says.

    A function that was traced for one layout refuses others.
    """
    asked, now = (
        _explicit(getattr(structure, "sharding", None)),
        explicit_sharding(rows),
    )
    either = asked or now
    if either is None:
        return rows
    first = None if now is None else now.spec[0]
    rest = [None] * (rows.ndim - 1) if asked is None else asked.spec
    spec = PartitionSpec(first, *rest)
    return jax.sharding.reshard(rows, NamedSharding(either.mesh, spec))


def block_layout(structure: Any) -> NamedSharding | None:
    """The layout of blocks whose columns have a structure, where that says so."""
    asked = _explicit(getattr(structure, "sharding", None))
    if asked is None:
        return None
    return NamedSharding(asked.mesh, PartitionSpec(*asked.spec, None))


def rows_of(x: Inexact[Array, "k *s"]) -> Inexact[Array, "k n"]:
    """All axes but the first flattened. Several must not be spread over devices."""
    if x.ndim > 2:
        x = lay_out(x, None)
    return x.reshape(x.shape[0], -1)


def columns(
    block: Inexact[Array, "n k"], start: int, end: int
) -> Inexact[Array, "n _"]:
    """The columns from one to before another. Sliced as they are in memory: the compiler
    would else copy the block."""
    sharding = explicit_sharding(block)
    if sharding is not None and not _divides(sharding, 1, end - start):
        block = whole_columns(block)
    return block.T[start:end].T


def side_by_side(*blocks: Inexact[Array, "n _"]) -> Inexact[Array, "n k"]:
    """The columns of all blocks, laid out as the first ones. Several must not be spread
    over devices."""
    first, *others = (whole_columns(block).T for block in blocks)
    rows = [first, *(laid_out_like(x, first) for x in others)]
    return jnp.concatenate(rows, axis=0).T


def whole_columns(block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
    """The block with every column on every device that holds its rows."""
    sharding = explicit_sharding(block)
    if sharding is None:
        return block
    spec = PartitionSpec(sharding.spec[0], None)
    return jax.sharding.reshard(block, NamedSharding(sharding.mesh, spec))


def replicate(x: Array) -> Array:
    """A copy of all of `x` on every device, where its type says that it is spread."""
    sharding = replicated_like(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def zeros_beside(x: Array, shape: tuple[int, int]) -> Array:
    """Zeros on every device of the mesh that a block is on."""
    zeros, sharding = jnp.zeros(shape, x.dtype), jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return zeros
    everywhere = NamedSharding(sharding.mesh, PartitionSpec(None, None))
    return jax.sharding.reshard(zeros, everywhere)


def laid_out_like(x: Array, like: Array) -> Array:
    """The rows, laid out as others are."""
    here, asked = (explicit_sharding(y) for y in (x, like))
    if here == asked:
        return x
    return replicate(x) if asked is None else jax.sharding.reshard(x, asked)
