"""Linear functionals on the diagonal: the trace, each leaf's trace, or every entry.

Samples are sums over rows, `sum_r conj(z(r)) (A v)(r)`. Without the sum, they estimate
the diagonal; summed leaf by leaf, they estimate each leaf's trace.
"""

import abc
import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Inexact


@dataclasses.dataclass(frozen=True)
class Functional(abc.ABC):
    """Abstract base class for linear functionals on a diagonal, with shape `*g`.

    A `Trace` is a scalar, and its derivatives have error bars. All other functionals have
    values with one axis, and estimators treat them separately.

    - `real`: whether the entries are known to be real.
    """

    real: bool = False

    @abc.abstractmethod
    def sum(self, rows: Inexact[Array, "n ..."]) -> Inexact[Array, "..."]:
        """Sums over the first axis, or over groups along it."""

    @abc.abstractmethod
    def num_rows(self, n: int) -> ArrayLike:
        """The number of rows that each value sums, given n rows in all."""

    def samples(
        self, X: Inexact[Array, "n m"], Y: Inexact[Array, "n m"]
    ) -> Inexact[Array, "*g m"]:
        """Sums `conj(x_j) y_j` for each column j."""
        return self.sum(X.conj() * Y)

    def pair(
        self, Z: Inexact[Array, "n p"], B: Inexact[Array, "n p"]
    ) -> Inexact[Array, "*g"]:
        """Sums the diagonal entries of `B Z^*`."""
        return self.sum(jnp.sum(Z.conj() * B, axis=1))


class Trace(Functional):
    """The sum over all rows."""

    def num_rows(self, n):
        return n

    def sum(self, rows):
        return jnp.sum(rows, axis=0)

    def samples(self, X, Y):
        return jnp.sum(X.T.conj() * Y.T, axis=1)  # columns are contiguous

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
    """The sums over groups of leaves, followed by their total.

    - `sizes`: the number of rows in each leaf. A leaf's rows are adjacent.
    - `groups`: the leaves in each group.
    """

    sizes: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def num_rows(self, n):
        return np.array([*(sum(self.sizes[i] for i in x) for x in self.groups), n])

    def sum(self, rows):
        rows = jnp.real(rows) if self.real else rows
        ends, total = np.cumsum(self.sizes, dtype=int), jnp.sum(rows, axis=0)
        parts = [rows[end - x : end] for x, end in zip(self.sizes, ends, strict=True)]
        leaves, zero = [jnp.sum(part, axis=0) for part in parts], jnp.zeros_like(total)
        sums = [sum((leaves[i] for i in group), zero) for group in self.groups]
        return jnp.stack([*sums, total])


TRACE = Trace()
