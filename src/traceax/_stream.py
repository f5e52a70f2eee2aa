"""Probes drawn a chunk at a time, so that memory does not grow with their number."""

import functools as ft
import operator as op
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Inexact, Int, Key, PyTree

from ._operator import most_columns
from ._orthogonal import TILE
from ._samplers import Sampler, ranges_of
from ._sharding import side_by_side


class ProbeStream(eqx.Module):
    """The blocks `V = Omega` and `Z = Omega / k` of k probes, drawn again when needed.

    An estimator's `compute` may return it in place of `(V, Z)`.

    **Attributes:**

    - `key`, `sampler`: of the probes; an [`traceax.IndexedSampler`][], or a
        [`traceax.ShardedSampler`][] of one.
    - `n`, `k`, `dtype`: length, number and dtype of the probes.
    - `chunk_size`: how many are drawn at once.
    """

    key: Key[Array, ""]
    sampler: Sampler
    n: int = eqx.field(static=True)
    k: int = eqx.field(static=True)
    chunk_size: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def draw(self, start: int, number: int) -> Inexact[Array, "n {number}"]:
        """The probes `start, ..., start + number - 1`."""
        return self.source()(start, number)

    def source(self) -> Callable[[Any, int], Inexact[Array, "n _"]]:
        """`draw`, for a start that may be traced. Call it outside of a loop.

        A sampler that draws all or none does so here.
        """
        probes = ranges_of(self.sampler)
        if probes is not None:
            return lambda start, number: probes(
                self.key, start, self.n, number, self.dtype
            )
        rows = self.sampler.sample(self.key, self.n, self.k, self.dtype).T

        def drawn(start, number):
            if isinstance(start, int):
                return rows[start : start + number].T
            padded = jnp.pad(rows, ((0, number), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(padded, start, number).T

        return drawn

    def map(
        self, fn: Callable[[Inexact[Array, "n c"]], PyTree[Array]], first: int = 0
    ) -> PyTree[Array]:
        """`fn` of every whole chunk from the first one on, stacked."""
        stacked, _ = self._map(fn, lambda of: of, first=first, last=False)
        return stacked

    def sum(self, fn: Callable[[Inexact[Array, "n c"]], Array]) -> Array:
        """The sum of `fn` over chunks. Derivatives draw the probes again."""

        def saving_nothing(of):
            return jax.checkpoint(of, static_argnums=1)

        parts = self._map(lambda block: jnp.sum(fn(block)), saving_nothing)
        return ft.reduce(op.add, [jnp.sum(part) for part in jtu.tree_leaves(parts)])

    def _map(self, fn, transform, *, first: int = 0, last: bool = True):
        whole, rest = divmod(self.k, self.chunk_size)
        probes = ranges_of(self.sampler)
        assert probes is not None

        def of(start: Any, size: int):
            return fn(probes(self.key, start, self.n, size, self.dtype))

        of = transform(of)
        stacked = of_last = None
        if whole > first:
            starts = jnp.arange(first, whole) * self.chunk_size
            stacked = jax.lax.map(lambda start: of(start, self.chunk_size), starts)
        if rest and last:
            of_last = of(whole * self.chunk_size, rest)
        return stacked, of_last


class CountedBlocks(eqx.Module):
    """Blocks V and Z of which columns beyond a count, known at run time, are 0.

    Each is given in parts of the same width, the columns of which are counted alike. A
    chunk of columns is looked at only if it is needed, by any lane of a `vmap`.

    **Attributes:**

    - `V`, `Z`: the parts.
    - `count`: how many columns of each part there are.
    - `chunk_size`: how many are looked at at once.
    """

    V: list[Inexact[Array, "n m"]]
    Z: list[Inexact[Array, "n m"]]
    count: Int[Array, ""]
    chunk_size: int = eqx.field(static=True)

    def sum(
        self, fn: Callable[[Inexact[Array, "n c"], Inexact[Array, "n c"]], Array]
    ) -> Array:
        """The sum of `fn(V, Z)` over chunks. Derivatives keep nothing of a chunk."""
        size, most = self.chunk_size, self.V[0].shape[1]
        missing = -most % size

        def rows(block):
            return jnp.pad(block.T, ((0, missing), (0, 0)))

        parts = [[rows(block) for block in blocks] for blocks in (self.V, self.Z)]

        def of(start):
            V, Z = (
                side_by_side(
                    *[jax.lax.dynamic_slice_in_dim(x, start, size).T for x in blocks]
                )
                for blocks in parts
            )
            return fn(V, Z)

        return sum_of_needed(of, -(-most // size), size, self.count)


class CountedStream(eqx.Module):
    """As `ProbeStream`, of as many probes as a count that is known at run time.

    **Attributes:**

    - `stream`: of the most probes there could be.
    - `count`: how many there are.
    """

    stream: ProbeStream
    count: Int[Array, ""]

    def sum(
        self, fn: Callable[[Inexact[Array, "n c"], Inexact[Array, "n c"]], Array]
    ) -> Array:
        """The sum of `fn(V, Z)` over chunks. Derivatives draw the probes again."""
        stream, size = self.stream, self.stream.chunk_size
        draw = stream.source()

        def of(start):
            block = draw(start, size)
            there = jnp.arange(size, dtype=start.dtype) + start < self.count
            V = jnp.where(there[None, :], block, 0)
            return fn(V, V / self.count.astype(V.dtype))

        return sum_of_needed(of, -(-stream.k // size), size, self.count)


def sum_of_needed(
    of: Callable[[Int[Array, ""]], PyTree[Array]],
    number: int,
    size: int,
    count: Int[Array, ""],
) -> PyTree[Array]:
    """The sum of `of(start)` over `number` chunks, those that start below a count."""
    shapes = jax.eval_shape(of, jnp.zeros((), jnp.int32))
    zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # Around the condition: what a branch keeps for its derivative, such as the
    # operator, would else be an output of it, and be stacked by the loop.
    @jax.checkpoint
    def part(start):
        # Of all lanes: a condition that differs between them would be no condition.
        needed = eqxi.unvmap_any(start < count)
        return jax.lax.cond(needed, of, lambda _: zeros, start)

    def add(total, i):
        return jtu.tree_map(jnp.add, total, part(i * size)), None

    return jax.lax.scan(add, zeros, jnp.arange(number, dtype=jnp.int32))[0]


def counted_halves(
    V: Inexact[Array, "n 2m"], Z: Inexact[Array, "n 2m"], count: Int[Array, ""]
) -> CountedBlocks:
    """Blocks of two parts side by side, of which each has `count` columns."""
    n, m = V.shape[0], V.shape[1] // 2
    size = min(most_columns(n), max(8, -(-m // 8)), m)
    of_V, of_Z = ([block[:, :m], block[:, m:]] for block in (V, Z))
    return CountedBlocks(of_V, of_Z, count, size)


def chunk_size(given: int | None, sampler: Sampler, n: int) -> int:
    """How many probes to draw at once; n for samplers that draw all or none."""
    if ranges_of(sampler) is None:
        return n
    if given is not None:
        return given
    most = most_columns(n)
    # In tiles that are summed at once, without a rest.
    return most - most % TILE if most > TILE else most


def without_numpy(given: Any) -> Any:
    """A NumPy integer as a Python one; anything else as it is."""
    return int(given) if isinstance(given, np.integer) else given


def check_chunk_size(given: Any, where: str) -> None:
    """Refuses what is neither `None` nor a positive integer."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(
            f"{where}: chunk_size must be an int or None, got {given!r} of type "
            f"{type(given).__name__}; it is the number of probes drawn at once."
        )
    if given < 1:
        raise ValueError(f"{where}: chunk_size must be at least 1, got {given}.")
