"""Probe distributions: isotropic random vectors, `E[w w^*] = I`."""

import abc
import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Key


class Sampler(eqx.Module):
    """Abstract base class of probe distributions.

    A sampler has no dtype and no size: probes take the operator's. Probe `j` must
    depend on the key and `j` alone, so that a larger budget extends the sequence.

    **Attributes:**

    - `rotation_invariant`: whether the direction of a probe is uniform on the sphere,
        which resphering needs.
    """

    rotation_invariant: ClassVar[bool]

    @abc.abstractmethod
    def sample(
        self, key: Key[Array, ""], n: int, k: int, dtype: np.dtype
    ) -> Inexact[Array, "n k"]:
        """Draws `k` probes.

        **Arguments:**

        - `key`: a typed key.
        - `n`: the length of a probe.
        - `k`: how many.
        - `dtype`: a real or complex dtype of at least 32-bit precision.

        **Returns:**

        An array of shape `(n, k)` and dtype `dtype`, a probe a column.
        """


def _draw(
    draw: Callable[[Key[Array, ""]], Inexact[Array, " n"]], key: Key[Array, ""], k: int
) -> Inexact[Array, "n k"]:
    keys = jax.vmap(lambda j: jax.random.fold_in(key, j))(jnp.arange(k))
    return jax.vmap(draw)(keys).T


def _signs(key: Key[Array, ""], n: int, dtype: np.dtype) -> Inexact[Array, " n"]:
    # 32 signs a random word.
    words = jax.random.bits(key, (-(-n // 32),), jnp.uint32)
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None, :]) & 1
    return 1 - 2 * bits.reshape(-1)[:n].astype(dtype)


class RademacherSampler(Sampler):
    """Random signs, the lowest variance of independent entries.

    Entries are `+1` or `-1`; for a complex operator `(+-1 +- i) / sqrt(2)`, of modulus
    1. Not rotation invariant.
    """

    rotation_invariant: ClassVar[bool] = False

    def sample(self, key, n, k, dtype):
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            return _draw(lambda key: _signs(key, n, dtype), key, k)
        real = jnp.finfo(dtype).dtype

        def draw(key):
            signs = _signs(key, 2 * n, real) * math.sqrt(0.5)
            return jax.lax.complex(signs[:n], signs[n:])

        return _draw(draw, key, k)


class NormalSampler(Sampler):
    """Standard normal entries; for a complex operator circular ones, `E|w|^2 = 1`.

    Rotation invariant.
    """

    rotation_invariant: ClassVar[bool] = True

    def sample(self, key, n, k, dtype):
        return _draw(lambda key: jax.random.normal(key, (n,), dtype), key, k)


class SphereSampler(Sampler):
    """Uniform on the real or complex sphere of radius `sqrt(n)`.

    A normal probe without the fluctuation of its length, which only adds variance.
    Rotation invariant.
    """

    rotation_invariant: ClassVar[bool] = True

    def sample(self, key, n, k, dtype):
        def draw(key):
            probe = jax.random.normal(key, (n,), dtype)
            length = jnp.linalg.norm(probe)
            return probe * (math.sqrt(n) / length).astype(dtype)

        return _draw(draw, key, k)


def check_resphere(resphere: bool, sampler: Sampler, where: str) -> None:
    """Refuses resphering with probes whose direction isn't uniform."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"{where}: sampler must be a traceax.Sampler, got "
            f"{type(sampler).__name__}; pass an instance, such as "
            "traceax.SphereSampler()."
        )
    if resphere and not sampler.rotation_invariant:
        raise ValueError(
            f"{where}: resphere=True needs a rotation-invariant sampler, got "
            f"{type(sampler).__name__}; use traceax.SphereSampler() or "
            "traceax.NormalSampler(), or pass resphere=False."
        )
