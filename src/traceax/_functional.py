"""What is summed of a diagonal: all of it, the entries of each leaf, or nothing.

An estimator's samples are sums over rows, `sum_r conj(z(r)) (A v)(r)`. Not summed they
estimate the diagonal, summed leaf by leaf the traces of its blocks.
"""

import abc
import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact


@dataclasses.dataclass(frozen=True)
class Functional(abc.ABC):
    """Abstract base class of linear functions of a diagonal, of shape `*g`.

    - `real`: whether the entries are known to be real.
    """

    real: bool = False

    @abc.abstractmethod
    def sum(self, rows: Inexact[Array, "n ..."]) -> Inexact[Array, "..."]:
        """The sums over the first axis."""

    def samples(
        self, X: Inexact[Array, "n m"], Y: Inexact[Array, "n m"]
    ) -> Inexact[Array, "*g m"]:
        """The sums of `conj(x_j) y_j` for each column j."""
        return self.sum(X.conj() * Y)

    def pair(
        self, Z: Inexact[Array, "n p"], B: Inexact[Array, "n p"]
    ) -> Inexact[Array, "*g"]:
        """The sums of the diagonal of `B Z^*`."""
        return self.sum(jnp.sum(Z.conj() * B, axis=1))


class Trace(Functional):
    """The sum over all rows."""

    def sum(self, rows):
        return jnp.sum(rows, axis=0)

    def samples(self, X, Y):
        return jnp.sum(X.T.conj() * Y.T, axis=1)  # as blocks lie in memory

    def pair(self, Z, B):
        return jnp.sum(self.samples(Z, B))


class Diagonal(Functional):
    """The rows themselves."""

    def sum(self, rows):
        return jnp.real(rows) if self.real else rows


@dataclasses.dataclass(frozen=True)
class LeafSums(Functional):
    """The sums over groups of adjacent rows, and over all of them behind.

    - `sizes`: how many rows each group has.
    """

    sizes: tuple[int, ...] = ()

    def sum(self, rows):
        rows = jnp.real(rows) if self.real else rows
        parts = jnp.split(rows, np.cumsum(self.sizes)[:-1])
        sums = jnp.stack([jnp.sum(part, axis=0) for part in parts])
        return jnp.concatenate([sums, jnp.sum(sums, axis=0, keepdims=True)])


TRACE = Trace()
