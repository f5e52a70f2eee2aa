r"""Traces with the help of a basis from elsewhere, such as an earlier operator's.

With an orthonormal basis B of r vectors that doesn't depend on the probes,

    tr A = tr(B^* A B) + tr(P A P),    P = I - B B^*,

where the first part takes a product for each vector of the basis, and probes see the second
only. What B was made for takes no part in the argument: the better it fits, the smaller the
error; the expectation is the trace for any. Without a basis it is the mean over probes.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from ._accuracy.error_bar import ErrorBar, gram_of, independent_samples
from ._base import TraceState, kept_of
from ._linalg.small import svd
from ._linalg.tall import (
    column_dots,
    column_norms,
    combine,
    inner,
    orthonormalise,
    side_by_side,
)
from ._operators.block import apply_block, space_of
from ._samplers import Sampler


class Deflated(NamedTuple):
    """What a basis leaves of probes, `E[G G^*] = P` for each column, and its products."""

    G: Inexact[Array, "n l"]
    AG: Inexact[Array, "n l"]

    @property
    def samples(self) -> Inexact[Array, " l"]:
        """Of the trace of `P A P`."""
        return column_dots(self.G, self.AG)

    def gram(self, dimension: int) -> Inexact[Array, "g g"]:
        """`w_i^* A w_j` of the first probes, for the traceless part of A.

        In so many dimensions. Probes of fixed length don't see a multiple of the identity.
        """
        mean = jnp.mean(self.samples) / dimension
        return gram_of(self.G, self.AG) - mean * gram_of(self.G, self.G)

    def error_bar(self, dimension: int, exact: Inexact[Array, " r"]) -> ErrorBar:
        """Of the mean of the samples, beside an exact part."""
        norms, gram = column_norms(self.AG), self.gram(dimension)
        return independent_samples(self.samples, norms, gram, exact)


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

    `products` are those of orthonormal vectors, `tested` those of probes, which find
    directions that the vectors lacked. Their columns are taken as long as they would be
    for probes of length 1.
    """
    n = products.shape[0]
    block = side_by_side(products, tested / math.sqrt(n))
    # An operator that isn't finite is forgotten.
    block = jnp.where(jnp.isfinite(block).all(), block, 0)
    Q, R = orthonormalise(block)
    W, _, _ = svd(R)
    return combine(Q, W[:, :number])


def deflated_trace(state: TraceState, k: int, sampler: Sampler, *, resphere: bool):
    """What `compute` returns, for a state with a basis.

    At most half of the products are those of the basis, the others of probes.
    """
    operator, space = state.operator, space_of(state.operator)
    n, dtype = space.size, space.compute_dtype
    B = jnp.zeros((n, 0), dtype) if state.basis is None else state.basis
    kept, known = kept_of(state), [jnp.zeros((n, 0), dtype)] * 2
    r = min(B.shape[1], k // 2, max(k - 2, 0))
    if kept is not None:
        known, r = kept.parts, kept.parts[0].shape[1]
    B, number = B[:, :r], k - r
    Omega = sampler.sample(state.key, n, number, dtype)
    new = [x[:, y.shape[1] :] for x, y in zip((B, Omega), known, strict=True)]
    products = apply_block(operator, side_by_side(*new))
    first, second = jnp.split(products, [new[0].shape[1]], axis=1)
    AB, AOmega = side_by_side(known[0], first), side_by_side(known[1], second)
    deflated = deflate(B, AB, Omega, AOmega, resphere=resphere)
    exact = column_dots(B, AB)
    bar = deflated.error_bar(n - r, exact)
    stats = {"num_matvecs": k, "degrees_of_freedom": bar.degrees_of_freedom}
    if state.basis is not None:
        stats["kept"] = [AB, AOmega]
    G = deflated.G
    blocks = side_by_side(B, G), side_by_side(B, G / number)
    return jnp.sum(exact) + bar.mean, bar.standard_error, stats, blocks


def with_basis(state: TraceState, fresh: TraceState, of_basis: Any, of_probes: Any):
    """A fresh state, with a basis from what an earlier one keeps.

    The products are those with an orthonormal basis and with probes, of a state that had
    no basis yet; `None` if it keeps none.
    """
    kept = kept_of(state)
    basis = state.basis
    if kept is not None:
        if basis is not None:
            of_basis, of_probes = kept.parts
        if of_basis is None or of_basis.shape[1] == 0:
            return fresh
        # Half of what a budget like the last one allows for.
        most = of_basis.shape[1] + of_probes.shape[1]
        number = min(kept.budget // 2, most)
        basis = leading_range(of_basis, of_probes, number=number)
    if basis is None:
        return fresh
    # Fresh probes for the key of the state as well: the basis was found with these.
    word = jnp.sum(jax.random.key_data(state.key), dtype=jnp.uint32)
    return TraceState(jax.random.fold_in(fresh.key, word), fresh.operator, basis=basis)
