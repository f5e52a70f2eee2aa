"""Probes drawn a chunk at a time, so that memory does not grow with their number."""

import functools as ft
import operator as op
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Inexact, Key, PyTree

from ._operator import columns_at_once
from ._samplers import Sampler, ranges_of


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

    def map(
        self, fn: Callable[[Inexact[Array, "n c"]], PyTree[Array]]
    ) -> tuple[PyTree[Array] | None, PyTree[Array] | None]:
        """`fn` of every chunk: results stacked, and that of a smaller last chunk.

        Either is `None` if there is no such chunk.
        """
        return self._map(fn, lambda of: of)

    def sum(self, fn: Callable[[Inexact[Array, "n c"]], Array]) -> Array:
        """The sum of `fn` over chunks. Derivatives draw the probes again."""

        def saving_nothing(of):
            return jax.checkpoint(of, static_argnums=1)

        parts = self._map(lambda block: jnp.sum(fn(block)), saving_nothing)
        return ft.reduce(op.add, [jnp.sum(part) for part in jtu.tree_leaves(parts)])

    def _map(self, fn, transform):
        whole, rest = divmod(self.k, self.chunk_size)
        probes = ranges_of(self.sampler)
        assert probes is not None

        def of(start: Any, size: int):
            return fn(probes(self.key, start, self.n, size, self.dtype))

        of = transform(of)
        stacked = last = None
        if whole:
            starts = jnp.arange(whole) * self.chunk_size
            stacked = jax.lax.map(lambda start: of(start, self.chunk_size), starts)
        if rest:
            last = of(whole * self.chunk_size, rest)
        return stacked, last


def chunk_size(given: int | None, sampler: Sampler, n: int, k: int) -> int:
    """How many of k probes to draw at once; k for samplers that draw all or none."""
    if ranges_of(sampler) is None:
        return k
    if given is not None:
        return min(given, k)
    return columns_at_once(n, k)


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
