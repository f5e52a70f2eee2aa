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
    """Abstract base class for probe distributions.

    Probe `j` must depend only on the key and on earlier probes, so that a larger budget
    extends the sequence.

    **Attributes:**

    - `rotation_invariant`: whether directions are uniform, which resphering needs.
    - `independent`: whether probes are independent, for leave-one-out; default `True`.
    - `round_size`: the number of probes per sample, 1 by default. The mean of `w w^*`
        over one round must have expectation I.
    """

    rotation_invariant: ClassVar[bool]
    independent: ClassVar[bool] = True
    round_size: ClassVar[int] = 1

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""], n: int, k: int, dtype: np.dtype) -> Block:
        """The first `k` probes, of length `n`, one per column.

        `key` is a typed key; `dtype` is real or complex, and at least 32-bit.
        """

    def check(self, operator: lx.AbstractLinearOperator, where: str) -> None:
        """Refuses operators that these probes would be wrong for. Optional."""

    @property
    def is_exact(self) -> bool:
        """Whether one sample is known to equal the trace. Optional."""
        return False

    def draw_range(
        self, key: Key[Array, ""], start: Start, width: int, most: int, space: Space
    ) -> Inexact[Array, "n {width}"]:
        """The vectors w for `width` samples from `start` on, of `most`. Optional."""
        return self.drawn(key, most, space).draw_range(key, start, width, most, space)

    def drawn(self, key: Key[Array, ""], most: int, space: Space) -> "Sampler":
        """The sampler, which stores its probes if it draws all at once. Optional."""
        return _Drawn(self, self.sample(key, space.size, most, space.compute_dtype))

    def multiply(
        self, operator: lx.AbstractLinearOperator, block: Inexact[Array, "n m"]
    ) -> Inexact[Array, "n m"]:
        """`B w` for samples `w^* B w`; `A w` for single probes. Optional."""
        return apply_block(operator, block)


class IndexedSampler(Sampler):
    """Abstract base class for samplers whose probe `j` depends only on `(key, j)`.

    A subclass defines `probes`, which draws any range of the sequence.
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
        """The probes `start, ..., start + k - 1`; `start` may be traced."""

    def sample(self, key, n, k, dtype):
        return self.probes(key, 0, n, k, dtype)

    def draw_range(self, key, start, width, most, space):
        return self.probes(key, start, space.size, width, space.compute_dtype)

    def drawn(self, key, most, space):
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

    def draw_range(self, key, start, width, most, space):
        # We pad, because a range may end beyond the last probe.
        rows = jnp.pad(self.block.T, ((0, width), (0, 0)))
        return jax.lax.dynamic_slice_in_dim(rows, start, width).T

    def drawn(self, key, most, space):
        return self


def _each(
    key: Key[Array, ""],
    start: Start,
    k: int,
    draw: Callable[[Key[Array, ""]], Inexact[Array, " n"]],
) -> Block:
    """Draws one probe per column, each from the key for its position."""
    positions = jnp.arange(k, dtype=jnp.int32) + start
    keys = jax.vmap(lambda j: jax.random.fold_in(key, j))(positions)
    if jax.random.key_impl(key) == "threefry2x32":
        return jax.vmap(draw)(keys).T
    # We loop: with other generators, `vmap` draws a block from the first key.
    return jax.lax.map(draw, keys).T


class RademacherSampler(IndexedSampler):
    """Random signs, with the lowest variance among independent entries.

    Entries are `+-1`, or `(+-1 +- i) / sqrt(2)` if complex. Not rotation invariant.
    """

    rotation_invariant: ClassVar[bool] = False

    def probes(self, key, start, n, k, dtype):
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        count, real = (2 * n if is_complex else n), jnp.finfo(dtype).dtype

        def draw(key):
            words = jax.random.bits(key, (-(-count // 32),), jnp.uint32)
            entries = signs(words, count, real)
            if not is_complex:
                return entries
            return jax.lax.complex(entries[:n], entries[n:]) * math.sqrt(0.5)

        return _each(key, start, k, draw)


class NormalSampler(IndexedSampler):
    """Standard normal entries, circular if complex. Rotation invariant."""

    rotation_invariant: ClassVar[bool] = True

    def probes(self, key, start, n, k, dtype):
        return _each(key, start, k, lambda key: jax.random.normal(key, (n,), dtype))


class SphereSampler(IndexedSampler):
    """Uniform on the real or complex sphere with radius `sqrt(n)`. Rotation invariant.

    These are normal probes without fluctuations in length, which only add variance.
    """

    rotation_invariant: ClassVar[bool] = True

    def probes(self, key, start, n, k, dtype):
        block = NormalSampler().probes(key, start, n, k, dtype)
        scale = math.sqrt(n) / column_norms(block)
        return (block.T * scale[:, None].astype(dtype)).T


class OrthogonalSampler(Sampler):
    r"""Orthogonal probes with length `sqrt(n)`, from the columns of a Haar matrix.

    They reduce the variance of Hutchinson's estimator by the factor `1 - k / n`, which
    is worth O(n k^2) time unless k is much smaller than n. All probes stay in memory,
    even if an estimator takes products in chunks. The probes are rotation invariant but
    dependent: estimators that leave one probe out refuse them.

    **Raises:** `ValueError` for more than n probes.

    **Reference:** Yu, Suresh, Choromanski, Holtmann-Rice and Kumar, "Orthogonal Random
    Features", NeurIPS (2016), arXiv:1610.09072; Stewart, "The Efficient Generation of
    Random Orthogonal Matrices", SIAM J. Numer. Anal. 17 (1980), doi:10.1137/0717034.
    """

    rotation_invariant: ClassVar[bool] = True
    independent: ClassVar[bool] = False

    def sample(self, key, n, k, dtype):
        what, hint = f"k must be at most n = {n}, for orthogonal probes", "pass k <= n"
        require(k <= n, "OrthogonalSampler.sample", what, f"{k}", hint)
        Q, R = orthonormalise(NormalSampler().sample(key, n, k, dtype))
        # We make R's diagonal positive, for Haar columns that larger blocks repeat.
        diagonal = jnp.diagonal(R)
        phase = diagonal / jnp.abs(diagonal).astype(dtype)
        return Q * (math.sqrt(n) * phase)[None, :].astype(dtype)


def with_drawn(tree: PyTree[Any], key: Key[Array, ""], most: int, space: Space) -> Any:
    """A module whose samplers store their probes, if they draw all at once."""

    def is_sampler(x):
        return isinstance(x, Sampler)

    return jtu.tree_map(
        lambda x: x.drawn(key, most, space) if is_sampler(x) else x,
        tree,
        is_leaf=is_sampler,
    )


def check_rounds(sampler: Sampler, k: int, where: str, *, at_most: bool) -> None:
    """Refuses budgets that are not whole rounds; as caps, budgets below one round."""
    p = sampler.round_size
    below, above = k // p * p, -(-k // p) * p
    is_valid = below == k or (at_most and below > 0)
    nearby = f"{below} or {above}" if below > 0 else f"{above}"
    what = f"k must be a multiple of the round size, {p} products, one per colour"
    require(is_valid, where, what, f"{k}", f"pass {nearby}")


def check_sampler(
    sampler: Sampler,
    where: str,
    *,
    resphere: bool = False,
    independent: bool = False,
    rounds: bool = False,
) -> None:
    """Refuses probes that would bias an estimator.

    Resphering needs a uniform direction, and leaving probes out needs independent
    probes. `rounds` allows samples that take several probes.
    """
    sphere, what = "traceax.SphereSampler()", "sampler must be a traceax.Sampler"
    hint = f"pass an instance, such as {sphere}"
    require(isinstance(sampler, Sampler), where, what, sampler, hint, TypeError)
    name, hint = type(sampler).__name__, f"use {sphere} or traceax.NormalSampler()"
    require(
        sampler.round_size == 1 or rounds,
        where,
        "sampler must draw probes that are isotropic one by one",
        f"{name}, whose probes are isotropic only in rounds of {sampler.round_size}",
        "use it in traceax.HutchinsonEstimator or traceax.LanczosQuadratureEstimator, or "
        f"{sphere} in this one",
    )
    is_valid = sampler.rotation_invariant or not resphere
    what = "sampler must be rotation-invariant with resphere=True"
    require(is_valid, where, what, name, f"{hint}, or pass resphere=False")
    is_valid = sampler.independent or not independent
    what = "sampler must draw independent probes, which are tested against each other"
    require(is_valid, where, what, f"{name}", hint)
