"""Stand-ins: the fixed blocks that determine derivatives."""

import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ._linalg.dense import column_dots, inner, side_by_side
from ._linalg.types import if_any, scan
from ._operators.entries import unit_columns, unit_vectors
from ._operators.space import apply_block, columns_at_once, product_tangent, space_of
from ._outcome import Evidence


class Derivative(NamedTuple):
    """Derivatives of an outcome's values and its evidence; `None` stands for 0."""

    values: list[Array | None]
    products: PyTree[Any] = None


class StandIn(eqx.Module):
    """Abstract base class for the fixed blocks that determine a value's derivative."""

    @abc.abstractmethod
    def derivative(self, state: PyTree, tangent: PyTree) -> Derivative | None:
        """The derivative along `tangent`. In the result and in `tangent`, `None` means 0.

        We differentiate only a state's operator and, for a spectral function, the function
        and the right-hand sides. The result is linear in `tangent`, so JAX can transpose it.
        """


class Columns(StandIn):
    """Abstract base class for blocks V and Z. We make them in chunks, to save memory.

    **Attributes:**

    - `most`, `size`: the number of columns, and the number of columns in a chunk.
    - `count`: the number of columns in use. Columns beyond it are 0.
    - `evidence`: its `products` are the output of `observe` for all columns, and either the
        first columns of `A V` as rows or `None`. We use only tangents, so arrays may be 0.
    """

    evidence: eqx.AbstractVar[Evidence | None]
    count: eqx.AbstractVar[int | Int[Array, ""]]
    most: eqx.AbstractVar[int]
    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def chunk(self, start: int | Int[Array, ""]) -> tuple[Array, Array]:
        """Columns `start` to `start + size` of V and Z."""

    @abc.abstractmethod
    def whole(self) -> tuple[Array, Array]:
        """All columns of V and Z."""

    def __iter__(self) -> Iterator[Array]:
        return iter(self.whole())

    def __getitem__(self, i: int) -> Array:
        return self.whole()[i]

    def product(
        self, operator: PyTree, V: Inexact[Array, "n c"]
    ) -> Inexact[Array, "n c"]:
        """The product `A V`, which the rule differentiates. Optional in subclasses."""
        return apply_block(operator, V)

    def observe(
        self, V: Inexact[Array, "n c"], W: Inexact[Array, "n c"]
    ) -> Inexact[Array, "... c"]:
        """The evidence from a chunk V and its products W. Optional in subclasses."""
        return column_dots(V, W)

    def joined(self, observed: Inexact[Array, "i ... c"]) -> Inexact[Array, "... p"]:
        """Joins evidence from chunks, without padding. Optional in subclasses."""
        return _join_chunks(observed)[..., : self.most]

    @property
    def num_first(self) -> int:
        first = None if self.evidence is None else self.evidence.products[1]
        return 0 if first is None else len(first)

    def derivative(self, state, tangent):
        """`<Z, dA V>`, chunk by chunk, so that only one chunk is in memory."""
        num_first, contract = self.num_first, state.functional.pair

        def products(V):
            return product_tangent(state.operator, tangent.operator, V, self.product)

        @jax.checkpoint
        def chunk_terms(start):
            V, Z = jax.lax.stop_gradient(self.chunk(start))
            W = products(V)
            return () if W is None else (contract(Z, W), self.observe(V, W))

        if self.size >= self.most:
            V, Z = jax.lax.stop_gradient(self.chunk(0))
            W = products(V)
            if W is None:
                return None
            first = W.T[:num_first] if num_first else None
            return Derivative([contract(Z, W)], (self.observe(V, W), first))
        if not (shapes := jax.eval_shape(chunk_terms, jnp.int32(0))):
            return None

        @jax.checkpoint
        def used_terms(start):
            if isinstance(self.count, int):
                return chunk_terms(start)
            return if_any(start < self.count, chunk_terms, shapes, start)

        def step(value, start):
            term, observed = used_terms(start)
            return value + term, observed

        starts = jnp.arange(0, self.most, self.size, dtype=jnp.int32)
        zero = jnp.zeros(shapes[0].shape, shapes[0].dtype)
        value, observed = scan(step, zero, starts)
        V, first = self.chunk(0)[0], None
        if num_first and (W := products(V[:, :num_first])) is not None:
            first = W.T
        return Derivative([value], (self.joined(observed), first))


def _join_chunks(observed: Inexact[Array, "i ... c"]) -> Inexact[Array, "... ic"]:
    observed = jnp.moveaxis(observed, 0, -2)
    return observed.reshape(*observed.shape[:-2], -1)


class Blocks(Columns):
    """Pairs of blocks `(V_i, Z_i)`, side by side.

    In each block, columns beyond `count` are 0. If `evidence.products[0]` is a matrix,
    `observe` returns `V^* W` for products W, and otherwise the diagonal of `V^* W`.
    """

    pairs: list[tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]]
    evidence: Evidence | None
    count: int | Int[Array, ""]
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __init__(
        self,
        pairs: list[tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]],
        evidence: Evidence | None = None,
        count: int | Int[Array, ""] | None = None,
    ):
        (n, self.most), self.pairs, self.evidence = pairs[0][0].shape, pairs, evidence
        self.count = self.most if count is None else count
        width = columns_at_once(n) // len(pairs)
        if not isinstance(self.count, int):
            # We use small chunks, so that we can skip unused ones after an early stop.
            width = min(width, max(8, self.most // 8))
        self.size = min(max(width, 1, self.num_first), self.most)

    def whole(self):
        V, Z = zip(*self.pairs, strict=True)
        return side_by_side(*V), side_by_side(*Z)

    def chunk(self, start):
        if self.size >= self.most:
            return self.whole()

        def columns(block):
            # We pad the last chunk with zeros.
            rows = jnp.pad(block.T, ((0, -self.most % self.size), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(rows, start, self.size).T

        V, Z = zip(*jtu.tree_map(columns, self.pairs), strict=True)
        return side_by_side(*V), side_by_side(*Z)

    @property
    def _has_matrix(self) -> bool:
        return self.evidence is not None and self.evidence.products[0].ndim == 2

    def observe(self, V, W):
        if not self._has_matrix:
            return column_dots(V, W)
        return inner(self.whole()[0], W)

    def joined(self, observed):
        # A chunk has columns from each pair, so we join the pairs separately.
        parts = jnp.split(observed, len(self.pairs), axis=-1)
        return jnp.concatenate([_join_chunks(x)[..., : self.most] for x in parts], -1)


class Identity(Columns):
    """The blocks `V = Z = I`. Only one chunk is in memory at a time."""

    evidence: Evidence | None
    count: int | Int[Array, ""] = eqx.field(static=True)
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def __init__(self, operator: lx.AbstractLinearOperator, evidence: Evidence | None):
        space = space_of(operator)
        self.count = self.most = space.size
        self.size = min(unit_columns(operator), space.size)
        self.dtype, self.evidence = space.compute_dtype, evidence

    def whole(self):
        E = jnp.eye(self.most, dtype=self.dtype)
        return E, E

    def chunk(self, start):
        E = unit_vectors(start, self.most, self.size, self.dtype)
        return E, E
