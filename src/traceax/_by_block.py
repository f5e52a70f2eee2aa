r"""Traces of diagonal blocks, one for each leaf of an operator's structure.

Probes on one leaf never see what couples the leaves: the variance of `w^* A w` is
`2 |A|_F^2` for probes of the whole (less the diagonal), and the sum of those of the blocks
for probes of each. A pilot of p probes a leaf finds the standard deviations `s_l` of
samples; the rest of the budget is divided in proportion, `m_l ~ s_l`, which makes the
variance of the total least. With b fixed beforehand the estimate of a block is

    b mean(pilot) + (1 - b) mean(rest),

which is unbiased: given the pilot, the rest is a mean of so many independent samples. A
weight that followed `m_l` would not be.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, Int, Key

from ._accuracy.error_bar import (
    ErrorBar,
    exact_bar,
    gram_of,
    independent_samples,
    sum_of_independent,
)
from ._functional import TRACE
from ._linalg.small import divisor
from ._linalg.tall import column_dots, column_norms
from ._linalg.types import axes_of, fori_loop, widened
from ._operators.block import (
    Space,
    apply_block,
    columns_at_once,
    has_real_trace,
    linear_function,
    space_of,
    structure_of,
)
from ._operators.entries import diagonal_by_products, unit_vectors
from ._operators.solvers import solver_tolerance
from ._primitive import Algorithm, Columns, StandIn, make_outcome, with_solvers
from ._samplers import Sampler


def block_of(
    operator: lx.AbstractLinearOperator, index: int
) -> lx.AbstractLinearOperator:
    """The diagonal block of a leaf.

    The derivative of the product with respect to that leaf alone: what the other leaves of
    the input would take is never computed, nor what the others of the output.
    """
    leaves, treedef = jtu.tree_flatten(operator.in_structure())
    zeros = [jnp.zeros(x.shape, x.dtype) for x in leaves]

    def product(x):
        given = treedef.unflatten([*zeros[:index], x, *zeros[index + 1 :]])
        return jtu.tree_leaves(operator.mv(given))[index]

    def mv(x):
        zero = widened(zeros[index], axes_of(x))
        return jax.jvp(product, (zero,), (x,))[1]

    return linear_function(mv, structure_of(leaves[index]))


class ByBlock(Algorithm):
    """Hutchinson's estimates of the blocks and of their sum, k products in all."""

    sampler: Sampler

    def run(self, state, k, stop):
        primal, space = state.operator, state.space
        sizes = [math.prod(x.shape) for x in jtu.tree_leaves(space.structure)]
        # Leaves of size 0 have trace 0.
        places = [i for i, n in enumerate(sizes) if n > 0]
        number, sizes = len(sizes), [sizes[i] for i in places]
        # Blocks that are smaller than a pilot are exact.
        pilot = max(2, k // (8 * len(sizes)))
        pilots = [min(n, pilot) for n in sizes]
        left = k - sum(pilots)
        keys = jax.random.split(state.key, number)
        blocks = [
            _Block(keys[i], self.sampler, space.compute_dtype, i, n, pilot, left)
            for i, n in zip(places, sizes, strict=True)
        ]
        firsts = [block.tested(primal, 0, block.pilot) for block in blocks]
        spreads = jnp.stack([_spread(x, n) for x, n in zip(firsts, sizes, strict=True)])
        is_open = jnp.asarray([not block.exact for block in blocks])
        shares = _divided(left, spreads, is_open)
        bars = [
            block.judge(primal, first, share)
            for block, first, share in zip(blocks, firsts, shares, strict=True)
        ]
        bars.append(sum_of_independent(*bars))
        value, error, freedom = (
            _at_places(list(x), places, number) for x in zip(*bars, strict=True)
        )
        used = sum(pilots) + jnp.sum(shares)
        stats = {"num_matvecs": used, "degrees_of_freedom": freedom}
        real = has_real_trace(primal)
        error = with_solvers(value, error, solver_tolerance(primal, space.real_dtype))
        outcome = make_outcome(value, error, stats, space.compute_dtype, real=real)
        parts = zip(blocks, shares, strict=True)
        return outcome, _Blocks([_Probes(*part) for part in parts], places, number)


class _Block(eqx.Module):
    """A diagonal block, and the sequence of its probes."""

    key: Key[Array, ""]
    sampler: Sampler
    dtype: Any = eqx.field(static=True)
    index: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    exact: bool = eqx.field(static=True)
    pilot: int = eqx.field(static=True)
    most: int = eqx.field(static=True)

    def __init__(self, key, sampler, dtype, index, size: int, pilot: int, left: int):
        self.key, self.sampler, self.dtype = key, sampler, dtype
        self.index, self.size, self.exact = index, size, size <= pilot
        self.pilot = min(size, pilot)
        self.most = self.pilot if self.exact else pilot + left

    @property
    def weight(self) -> float:
        """That of the pilot: its share if the block had the whole of the rest."""
        return self.pilot / self.most

    def probes(self, start, width: int) -> Inexact[Array, "n {width}"]:
        if self.exact:
            return unit_vectors(start, self.size, width, self.dtype)
        space = Space(self.size, self.dtype, self.dtype)
        return self.sampler._draw_range(self.key, start, width, self.most, space)

    def product(self, operator, V):
        return apply_block(block_of(operator, self.index), V)

    def tested(self, operator, start, width: int):
        """Samples, `|A w_j|`, and the first probes and products.

        Of an exact block the entries of the diagonal, and nothing more that is looked at.
        """
        if self.exact:
            entries = diagonal_by_products(block_of(operator, self.index))
            entries = entries.astype(self.dtype)
            return entries, jnp.abs(entries), None
        Omega = self.probes(start, width)
        Y = self.product(operator, Omega)
        return column_dots(Omega, Y), column_norms(Y), gram_of(Omega, Y)

    def judge(self, operator, first, share: Int[Array, ""]) -> ErrorBar:
        samples, norms, gram = first
        if self.exact:
            sizes = space_of(operator).rounding * jnp.sum(norms)
            return exact_bar(jnp.sum(samples), sizes)
        count = self.pilot + share
        buffers = [jnp.zeros(self.most, x.dtype) for x in (samples, norms)]

        def put(buffers, new, at):
            pairs = zip(buffers, new, strict=True)
            return [jax.lax.dynamic_update_slice(x, y, (at,)) for x, y in pairs]

        buffers = put(buffers, (samples, norms), 0)
        samples, norms = fori_loop(
            count,
            lambda j, x: put(x, self.tested(operator, j, 1)[:2], j),
            buffers,
            self.pilot,
        )
        active = jnp.arange(self.most, dtype=jnp.int32) < count
        bar = independent_samples(
            samples, norms, gram, dimension=self.size, active=active
        )
        pilot, rest = self.pilot, share.astype(norms.dtype)
        value = jnp.sum(self.weights(share) * samples)
        # That of unequal weights, in place of the mean of all.
        larger = self.weight**2 / pilot + (1 - self.weight) ** 2 / rest
        error = bar.standard_error * jnp.sqrt(larger * (pilot + rest))
        return ErrorBar(value, error, bar.degrees_of_freedom)

    def weights(self, share: Int[Array, ""]) -> Inexact[Array, " most"]:
        if self.exact:
            return jnp.ones(self.most, self.dtype)
        here = jnp.arange(self.most, dtype=jnp.int32)
        rest = (1 - self.weight) / share.astype(jnp.finfo(self.dtype).dtype)
        weights = jnp.where(here < self.pilot, self.weight / self.pilot, rest)
        return jnp.where(here < self.pilot + share, weights, 0).astype(self.dtype)


class _Probes(Columns):
    """Blocks V and Z of the probes of a diagonal block, drawn again when needed."""

    block: _Block
    count: int | Int[Array, ""]
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __init__(self, block: _Block, share: Int[Array, ""]):
        self.block, self.most = block, block.most
        self.count = block.most if block.exact else block.pilot + share
        few = columns_at_once(block.size) if block.exact else max(block.pilot, 8)
        self.size = min(few, block.most)

    def product(self, operator, V):
        return self.block.product(operator, V)

    def chunk(self, start):
        V = self.block.probes(start, self.size)
        share = jnp.asarray(self.count - self.block.pilot)
        weights = jnp.pad(self.block.weights(share), (0, self.size))
        weights = jax.lax.dynamic_slice_in_dim(weights, start, self.size)
        return V, (V.T * weights[:, None]).T


class _Blocks(StandIn):
    """Of all blocks, and of their sum; `places` are theirs among the leaves."""

    blocks: list[_Probes]
    places: list[int] = eqx.field(static=True)
    number: int = eqx.field(static=True)

    def derivative(self, state, tangent):
        parts = [
            probes.pair(state.operator, tangent.operator, TRACE)
            for probes in self.blocks
        ]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        zero = jnp.zeros_like(known[0])
        parts = [zero if part is None else part for part in parts]
        return _at_places([*parts, sum(known, zero)], self.places, self.number)


def _at_places(parts: list[Array], places: list[int], number: int) -> Array:
    """The parts at their places among so many leaves, others 0, and the last behind."""
    all_parts = [jnp.zeros_like(parts[0])] * number + parts[-1:]
    for i, part in zip(places, parts[:-1], strict=True):
        all_parts[i] = part
    return jnp.stack(all_parts)


def _spread(first, n: int) -> Array:
    """About the standard deviation of samples: `|A - (tr A / n) I|_F`.

    That of two or three samples would be far off by chance; `|A w|^2` is not.
    """
    samples, norms, _ = first
    unit = divisor(jnp.max(norms))
    trace = jnp.abs(jnp.mean(samples)) / unit
    rest = jnp.mean((norms / unit) ** 2) - trace**2 / n
    return unit * jnp.sqrt(jnp.maximum(rest, 0))


def _divided(left: int, spreads: Array, is_open: Array) -> Int[Array, " l"]:
    """`left` in proportion to spreads, at least one for each block that isn't exact."""
    number = jnp.sum(is_open, dtype=jnp.int32)
    weights = jnp.where(jnp.isfinite(spreads) & is_open, spreads, 0)
    total = jnp.sum(weights)
    equal = is_open.astype(weights.dtype) / jnp.maximum(number, 1).astype(weights.dtype)
    weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), equal)
    spare = (left - number).astype(weights.dtype)
    ends = jnp.round(jnp.cumsum(weights) * spare).astype(jnp.int32)
    return jnp.diff(ends, prepend=jnp.int32(0)) + is_open.astype(jnp.int32)
