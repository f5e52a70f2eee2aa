"""Probe distributions: isotropic random vectors, `E[w w^*] = I`."""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Int, Key, PyTree

from ._arguments import require
from ._linalg.dense import column_norms, orthonormalise, signs
from ._operators.space import Space, apply_block

Block = Inexact[Array, "n k"]
Start = int | Int[Array, ""]


class Sampler(eqx.Module):
    """Abstract base class of probe distributions.

    Probe `j` must depend on the key and on the probes before it alone, so that a larger
    budget extends the sequence.

    **Attributes:**

    - `rotation_invariant`: whether a probe's direction is uniform, which resphering needs.
    - `independent`: whether probes are, which leaving one out needs; `True` by default.
    - `round_size`: how many probes make one sample, 1 by default. Isotropic is the mean of
        `w w^*` over a round.
    """

    rotation_invariant: ClassVar[bool]
    independent: ClassVar[bool] = True
    round_size: ClassVar[int] = 1

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""], n: int, k: int, dtype: np.dtype) -> Block:
        """The first `k` probes, of length `n`, a probe a column.

        `key` is a typed key, `dtype` real or complex, of at least 32-bit precision.
        """

    def check(self, operator: lx.AbstractLinearOperator, where: str) -> None:
        """Refuses operators of which probes would be wrong. Optional."""

    @property
    def _is_exact(self) -> bool:
        return False  # whether a sample of an operator is known to be its trace

    def _draw_range(
        self, key: Key[Array, ""], start: Start, width: int, most: int, space: Space
    ) -> Inexact[Array, "n {width}"]:
        """The vectors w of `width` samples from `start` on, of `most`. Optional."""
        return self._drawn(key, most, space)._draw_range(key, start, width, most, space)

    def _drawn(self, key: Key[Array, ""], most: int, space: Space) -> "Sampler":
        """The sampler with what it draws for all samples at once in memory. Optional."""
        return _Drawn(self, self.sample(key, space.size, most, space.compute_dtype))

    def _apply(
        self, operator: lx.AbstractLinearOperator, block: Inexact[Array, "n m"]
    ) -> Inexact[Array, "n m"]:
        """What samples `w^* B w` are made of, `B w`; of one probe `A w`. Optional."""
        return apply_block(operator, block)

    def _rounds(
        self, probes: Block, products: Block
    ) -> tuple[Inexact[Array, "n m"], Inexact[Array, "n m"]]:
        """w and `B w` of each sample, from the probes and products with them. Optional."""
        return probes, products


class IndexedSampler(Sampler):
    """Abstract base class of samplers whose probe `j` depends on `(key, j)` alone.

    A subclass defines `probes`, any range of the sequence.
    """

    @abc.abstractmethod
    def probes(
        self,
        key: Key[Array, ""],
        start: int | Int[Array, ""],
        n: int,
        k: int,
        dtype: np.dtype,
    ) -> Inexact[Array, "n k"]:
        """The probes `start, ..., start + k - 1`, as `sample`; `start` may be traced."""

    def sample(self, key, n, k, dtype):
        return self.probes(key, 0, n, k, dtype)

    def _draw_range(self, key, start, width, most, space):
        return self.probes(key, start, space.size, width, space.compute_dtype)

    def _drawn(self, key, most, space):
        return self


class _Drawn(Sampler):
    sampler: Sampler
    block: Block

    @property
    def rotation_invariant(self) -> bool:  # pyright: ignore
        return self.sampler.rotation_invariant

    @property
    def independent(self) -> bool:  # pyright: ignore
        return self.sampler.independent

    def sample(self, key, n, k, dtype):
        return self.sampler.sample(key, n, k, dtype)

    def _draw_range(self, key, start, width, most, space):
        # A range may end beyond the last.
        rows = jnp.pad(self.block.T, ((0, width), (0, 0)))
        return jax.lax.dynamic_slice_in_dim(rows, start, width).T

    def _drawn(self, key, most, space):
        return self


def _each(
    key: Key[Array, ""],
    start: Start,
    k: int,
    draw: Callable[[Key[Array, ""]], Inexact[Array, " n"]],
) -> Block:
    """A probe a column, each from the key of its position."""
    positions = jnp.arange(k, dtype=jnp.int32) + start
    keys = jax.vmap(lambda j: jax.random.fold_in(key, j))(positions)
    if "threefry" in str(jax.random.key_impl(key)):
        return jax.vmap(draw)(keys).T
    # Of other generators `vmap` draws a block from the first key.
    return jax.lax.map(draw, keys).T


class RademacherSampler(IndexedSampler):
    """Random signs, the lowest variance of independent entries. Not rotation invariant.

    Entries are `+1` or `-1`; for a complex operator `(+-1 +- i) / sqrt(2)`.
    """

    rotation_invariant: ClassVar[bool] = False

    def probes(self, key, start, n, k, dtype):
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        number, real = (2 * n if is_complex else n), jnp.finfo(dtype).dtype

        def draw(key):
            words = jax.random.bits(key, (-(-number // 32),), jnp.uint32)
            drawn = signs(words, number, real)
            if not is_complex:
                return drawn
            return jax.lax.complex(drawn[:n], drawn[n:]) * math.sqrt(0.5)

        return _each(key, start, k, draw)


class NormalSampler(IndexedSampler):
    """Standard normal entries, for a complex operator circular. Rotation invariant."""

    rotation_invariant: ClassVar[bool] = True

    def probes(self, key, start, n, k, dtype):
        return _each(key, start, k, lambda key: jax.random.normal(key, (n,), dtype))


class SphereSampler(IndexedSampler):
    """Uniform on the real or complex sphere of radius `sqrt(n)`. Rotation invariant.

    A normal probe without the fluctuation of its length, which only adds variance.
    """

    rotation_invariant: ClassVar[bool] = True

    def probes(self, key, start, n, k, dtype):
        block = NormalSampler().probes(key, start, n, k, dtype)
        scale = math.sqrt(n) / column_norms(block)
        return (block.T * scale[:, None].astype(dtype)).T


class OrthogonalSampler(Sampler):
    r"""Probes orthogonal to each other, of length `sqrt(n)`: columns of a Haar matrix.

    The variance of Hutchinson's estimator falls by `1 - k / n`. Worth its O(n k^2) time
    where k is not small against n. All probes are held, also by an estimator that takes
    products in chunks. Rotation invariant. Not independent: estimators that leave one probe
    out refuse it.

    **Raises:** `ValueError` for more than n probes.

    **Reference:** Yu, Suresh, Choromanski, Holtmann-Rice and Kumar, "Orthogonal Random
    Features", NeurIPS (2016), arXiv:1610.09072; Stewart, "The Efficient Generation of
    Random Orthogonal Matrices", SIAM J. Numer. Anal. 17 (1980), doi:10.1137/0717034.
    """

    rotation_invariant: ClassVar[bool] = True
    independent: ClassVar[bool] = False

    def sample(self, key, n, k, dtype):
        what, hint = f"at most n = {n} probes are orthogonal", "pass k <= n"
        require(k <= n, "OrthogonalSampler.sample", what, f"k = {k}", hint)
        Q, R = orthonormalise(NormalSampler().sample(key, n, k, dtype))
        # Haar needs a positive diagonal of R, which lets a larger block begin as this one.
        diagonal = jnp.diagonal(R)
        phase = diagonal / jnp.abs(diagonal).astype(dtype)
        return Q * (math.sqrt(n) * phase)[None, :].astype(dtype)


def with_drawn(tree: PyTree[Any], key: Key[Array, ""], most: int, space: Space) -> Any:
    """A module with its samplers' probes in memory, of those that draw all at once."""

    def is_sampler(x):
        return isinstance(x, Sampler)

    return jtu.tree_map(
        lambda x: x._drawn(key, most, space) if is_sampler(x) else x,
        tree,
        is_leaf=is_sampler,
    )


def check_rounds(sampler: Sampler, k: int, where: str, *, at_most: bool) -> None:
    """Refuses budgets that are not whole rounds; as caps, those below one round."""
    p = sampler.round_size
    below, above = k // p * p, -(-k // p) * p
    right = below == k or (at_most and below > 0)
    nearby = f"{below} or {above}" if below > 0 else f"{above}"
    what = f"k must be a whole number of rounds of {p} products, one a colour"
    require(right, where, what, f"{k}", f"pass {nearby}")


def check_sampler(
    sampler: Sampler,
    where: str,
    *,
    resphere: bool = False,
    independent: bool = False,
    rounds: bool = False,
) -> None:
    """Refuses probes that an estimator would be biased with.

    Resphering needs a uniform direction, testing on some probes what others found
    independent ones. `rounds` says that samples may be of several probes.
    """
    sphere, what = "traceax.SphereSampler()", "sampler must be a traceax.Sampler"
    hint = f"pass an instance, such as {sphere}"
    require(isinstance(sampler, Sampler), where, what, sampler, hint, TypeError)
    name, hint = type(sampler).__name__, f"use {sphere} or traceax.NormalSampler()"
    require(
        sampler.round_size == 1 or rounds,
        where,
        "each probe must be isotropic",
        f"those of {name}, which are so only in rounds of {sampler.round_size}",
        "use it in traceax.HutchinsonEstimator or traceax.LanczosQuadratureEstimator, or "
        f"{sphere} in this one",
    )
    right = sampler.rotation_invariant or not resphere
    what = "resphere=True needs a rotation-invariant sampler"
    require(right, where, what, name, f"{hint}, or pass resphere=False")
    right = sampler.independent or not independent
    what = "probes that test what others found must be independent"
    require(right, where, what, f"those of {name}", hint)
