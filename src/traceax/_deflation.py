"""Traces beside an orthonormal basis, and means over independent probes.

With an orthonormal basis B of r vectors, whatever it is, that doesn't depend on the probes,

    tr A = tr(B^* A B) + tr(P A P),    P = I - B B^*,

where the first part takes a product for each vector of the basis, and probes see the second.
"""

import functools as ft
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from ._accuracy.error_bar import ErrorBar, gram_of, independent_samples
from ._linalg.small import svd
from ._linalg.tall import (
    column_dots,
    column_norms,
    combine,
    inner,
    orthonormalise,
    side_by_side,
)
from ._operators.block import apply_block
from ._samplers import Sampler
from ._slope import with_bar
from ._state import TraceState


class Deflated(NamedTuple):
    """Probes without their part in a basis, `E[G G^*] = P` for each column, and products."""

    G: Inexact[Array, "n l"]
    AG: Inexact[Array, "n l"]

    @property
    def samples(self) -> Inexact[Array, " l"]:
        return column_dots(self.G, self.AG)

    def gram(self, dimension: int) -> Inexact[Array, "g g"]:
        """`w_i^* A w_j` of the first probes, for the traceless part of A in that dimension."""
        mean = jnp.mean(self.samples) / dimension
        return gram_of(self.G, self.AG) - mean * gram_of(self.G, self.G)


def deflate(
    B: Inexact[Array, "n r"],
    AB: Inexact[Array, "n r"],
    Omega: Inexact[Array, "n l"],
    AOmega: Inexact[Array, "n l"],
    *,
    resphere: bool,
) -> Deflated:
    """Probes without their part in the span of B. `r < n`."""
    n, r = B.shape
    inside = inner(B, Omega)
    G, AG = Omega - combine(B, inside), AOmega - combine(AB, inside)
    if not resphere:
        return Deflated(G, AG)
    # A uniform direction in n - r dimensions, of the length that makes E[G G^*] = P.
    scale = (math.sqrt(n - r) / column_norms(G)).astype(G.dtype)[None, :]
    return Deflated(G * scale, AG * scale)


@ft.partial(jax.jit, static_argnames="number")
def leading_range(
    products: Inexact[Array, "n r"], tested: Inexact[Array, "n l"], *, number: int
) -> Inexact[Array, "n {number}"]:
    """The basis of so many directions in which products are largest.

    `products` are those of orthonormal vectors, `tested` those of probes, as long as they
    would be for probes of length 1.
    """
    n = products.shape[0]
    block = side_by_side(products, tested / math.sqrt(n))
    # An operator that isn't finite is forgotten.
    block = jnp.where(jnp.isfinite(block).all(), block, 0)
    Q, R = orthonormalise(block)
    W, _, _ = svd(R)
    return combine(Q, W[:, :number])


def _slope_bar(V, W) -> ErrorBar:
    return _bar(Deflated(V, W), len(V))


def _bar(tests: Deflated, n: int) -> ErrorBar:
    norms = column_norms(tests.AG)
    return independent_samples(tests.samples, norms, tests.gram(n), may_miss=True)


def average(state: TraceState, k: int, sampler: Sampler, *, resphere: bool):
    """The mean over k probes, as `compute` returns it."""
    n, dtype = state.space.size, state.space.compute_dtype
    Omega, B = sampler.sample(state.key, n, k, dtype), jnp.zeros((n, 0), dtype)
    tests = deflate(B, B, Omega, apply_block(state.operator, Omega), resphere=resphere)
    bar = _bar(tests, n)
    stats = {"num_matvecs": k, "degrees_of_freedom": bar.degrees_of_freedom}
    blocks = with_bar((tests.G, tests.G / k), _slope_bar)
    return bar.mean, bar.standard_error, stats, blocks
