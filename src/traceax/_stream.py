"""Probes drawn a chunk at a time, so that memory does not grow with their number."""

import abc
import dataclasses
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
from ._orthogonal import TILE, there
from ._samplers import Sampler, ranges_of
from ._sharding import on_one_cpu


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
        probes = ranges_of(self.sampler)
        assert probes is not None

        def of(start: Any):
            return fn(probes(self.key, start, self.n, self.chunk_size, self.dtype))

        whole = jnp.arange(first, self.k // self.chunk_size)
        return jax.lax.map(of, whole * self.chunk_size)

    def counted(self) -> "CountedStream":
        """V and Z in chunks of equal size, of which none is smaller and padded."""
        number = -(-self.k // self.chunk_size)
        stream = dataclasses.replace(self, chunk_size=-(-self.k // number))
        return CountedStream(jnp.asarray(self.k, jnp.int32), stream)


class Blocks(eqx.Module):
    """Blocks V and Z, taken in `number` chunks of `size` columns."""

    @property
    @abc.abstractmethod
    def size(self) -> int: ...

    @property
    @abc.abstractmethod
    def number(self) -> int: ...

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype: ...

    @abc.abstractmethod
    def needed(self) -> int | Int[Array, ""]:
        """How many chunks hold columns that are not 0."""

    @abc.abstractmethod
    def chunks(
        self,
    ) -> Callable[[Any], tuple[Inexact[Array, "n c"], Inexact[Array, "n c"]]]:
        """V and Z from a column on, as a function of it. Call it outside of a loop."""

    @abc.abstractmethod
    def sum(
        self,
        fn: Callable[[Inexact[Array, "n c"], Inexact[Array, "n c"]], PyTree[Array]],
    ) -> PyTree[Array]:
        """The sum of `fn(V, Z)` over chunks."""


class GivenBlocks(Blocks):
    """Blocks of p columns as they are, in chunks."""

    V: Inexact[Array, "n p"]
    Z: Inexact[Array, "n p"]
    p: int = eqx.field(static=True)
    chunk_size: int = eqx.field(static=True)

    @property
    def size(self) -> int:
        return self.chunk_size

    @property
    def number(self) -> int:
        return max(1, -(-self.p // self.size))

    @property
    def dtype(self) -> np.dtype:
        return np.result_type(self.V.dtype, self.Z.dtype)

    def needed(self):
        return self.number

    def chunks(self):
        if self.number == 1:
            return lambda start: (self.V, self.Z)
        rows = self.V.T, self.Z.T

        def of(start):
            # The last chunk begins earlier, with columns that there were already.
            first = jnp.minimum(start, self.p - self.size)
            V, Z = (jax.lax.dynamic_slice_in_dim(x, first, self.size) for x in rows)
            fresh = first + jnp.arange(self.size, dtype=first.dtype) >= start
            return V.T, jnp.where(fresh[:, None], Z, 0).T

        return of

    def sum(self, fn):
        return fn(self.V, self.Z)


class CountedBlocks(Blocks):
    """Blocks V and Z of which columns beyond a count, known at run time, are 0."""

    count: eqx.AbstractVar[Int[Array, ""]]

    def needed(self):
        return -(-jnp.max(self.count) // self.size)

    def sum(self, fn):
        """Derivatives keep nothing of a chunk."""
        columns = self.chunks()
        return sum_of_needed(
            lambda start: fn(*columns(start)), self.number, self.size, self.count
        )


class CountedStream(CountedBlocks):
    """As `ProbeStream`, of as many probes as a count that is known at run time.

    **Attributes:**

    - `count`: how many there are.
    - `stream`: of the most probes there could be.
    """

    count: Int[Array, ""]
    stream: ProbeStream

    @property
    def size(self) -> int:
        return self.stream.chunk_size

    @property
    def number(self) -> int:
        return -(-self.stream.k // self.size)

    @property
    def dtype(self) -> np.dtype:
        return self.stream.dtype

    def chunks(self):
        draw = self.stream.source()

        def of(start):
            block = draw(start, self.size)
            V = jnp.where(there(self.count - start, self.size)[None, :], block, 0)
            return V, V / self.count.astype(V.dtype)

        return of


def columns_derived_at_once(V: Inexact[Array, "n p"], gradient_size: int) -> int:
    """How many columns of given blocks derivatives take at once.

    Of large blocks half as many as are multiplied at once, or a derivative keeps what
    all products with them are made of. Not if it is itself larger than the blocks, as
    that of a matrix is: it would be written again for each chunk.
    """
    n, p = V.shape
    if p <= most_columns(n) or gradient_size > V.size or not on_one_cpu():
        return max(1, p)
    # Of equal chunks.
    return -(-p // -(-p // most_columns(2 * n)))


def sum_of_needed(
    of: Callable[[Int[Array, ""]], PyTree[Array]],
    number: int,
    size: int,
    count: Int[Array, ""] | None,
) -> PyTree[Array]:
    """The sum of `of(start)` over `number` chunks, those that start below a count."""
    shapes = jax.eval_shape(of, jnp.zeros((), jnp.int32))
    zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # Around the condition: what a branch keeps for its derivative, such as the
    # operator, would else be an output of it, and be stacked by the loop.
    @jax.checkpoint
    def part(start):
        if count is None:
            return of(start)
        # Of all lanes: a condition that differs between them would be no condition.
        needed = eqxi.unvmap_any(start < count)
        return jax.lax.cond(needed, of, lambda _: zeros, start)

    def add(total, i):
        return jtu.tree_map(jnp.add, total, part(i * size)), None

    return jax.lax.scan(add, zeros, jnp.arange(number, dtype=jnp.int32))[0]


def counted_chunk(n: int, most: int, *, wide: bool, columns: int = 1) -> int:
    """Of how many probes counted blocks are taken at once, of so many columns a probe.

    As many as a loop of few steps has taken, so that hardly one is 0; `wide`, as in
    `traceax._tolerance.phases`: as many as take the time of a few.
    """
    size = 32 // columns if wide else max(16 // columns, -(-most // 8))
    return min(most_columns(n), size, most)


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
