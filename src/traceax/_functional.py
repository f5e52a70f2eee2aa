"""Linear functionals of the diagonal: the trace, the trace of each leaf, or every entry.

An estimator's samples are sums over rows, `sum_r conj(z(r)) (A v)(r)`. Not summed they
estimate the diagonal, summed leaf by leaf the traces of its blocks.
"""

import abc
import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Inexact


@dataclasses.dataclass(frozen=True)
class Functional(abc.ABC):
    """Abstract base class of linear functionals of a diagonal, with values of shape `*g`.

    Estimators have two ways: `Trace` is a scalar, whose estimates have error bars of slopes.
    The values of all others have one axis.

    - `real`: whether the entries are known to be real.
    """

    real: bool = False

    @abc.abstractmethod
    def sum(self, rows: Inexact[Array, "n ..."]) -> Inexact[Array, "..."]:
        """The sums over the first axis, or over groups along it."""

    @abc.abstractmethod
    def num_rows(self, n: int) -> ArrayLike:
        """How many of n rows each value sums."""

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

    def num_rows(self, n):
        return n

    def sum(self, rows):
        return jnp.sum(rows, axis=0)

    def samples(self, X, Y):
        return jnp.sum(X.T.conj() * Y.T, axis=1)  # as blocks lie in memory

    def pair(self, Z, B):
        return jnp.sum(self.samples(Z, B))


class Diagonal(Functional):
    """The rows themselves."""

    def num_rows(self, n):
        return 1

    def sum(self, rows):
        return jnp.real(rows) if self.real else rows


@dataclasses.dataclass(frozen=True)
class LeafSums(Functional):
    """The sums over groups of adjacent rows, and over all of them behind.

    - `sizes`: how many rows each group has.
    """

    sizes: tuple[int, ...] = ()

    def num_rows(self, n):
        return np.array([*self.sizes, n])

    def sum(self, rows):
        rows = jnp.real(rows) if self.real else rows
        parts = jnp.split(rows, np.cumsum(self.sizes)[:-1])
        sums = jnp.stack([jnp.sum(part, axis=0) for part in parts])
        return jnp.concatenate([sums, jnp.sum(sums, axis=0, keepdims=True)])


TRACE = Trace()
