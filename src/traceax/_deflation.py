r"""Traces with the help of a basis from elsewhere, such as an earlier operator's.

With an orthonormal basis B of r vectors that doesn't depend on the probes,

    tr A = tr(B^* A B) + tr(P A P),    P = I - B B^*,

where the first part takes a product for each vector of the basis, and probes see the second
only. What B was made for takes no part in the argument: the better it fits, the smaller the
error; the expectation is the trace for any.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from ._kept import kept_parts
from ._operator import extend_products, space_of
from ._orthogonal import (
    column_dots,
    column_norms,
    combine,
    inner,
    nan_unless_finite,
    orthonormalise,
    products_to_check,
)
from ._samplers import Sampler, draw_probes
from ._sharding import side_by_side
from ._small_matrices import svd
from ._standard_error import gram, independent_samples
from ._state import TraceState


class Deflated(NamedTuple):
    """What a basis leaves of probes, `E[G G^*] = P` for each column, and its products."""

    G: Inexact[Array, "n l"]
    AG: Inexact[Array, "n l"]

    @property
    def samples(self) -> Inexact[Array, " l"]:
        """Of the trace of `P A P`."""
        return column_dots(self.G, self.AG)

    @property
    def norms(self) -> Float[Array, " l"]:
        return column_norms(self.AG)

    def gram(self, dimension: int) -> Inexact[Array, "g g"]:
        """`w_i^* A w_j` of the first probes, for the traceless part of A.

        In so many dimensions. Probes of fixed length don't see a multiple of the identity.
        """
        mean = jnp.mean(self.samples) / dimension
        return gram(self.G, self.AG) - mean * gram(self.G, self.G)


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
    G, AG = Omega, AOmega
    if r:
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
    block = jnp.where(jnp.isfinite(nan_unless_finite(block.T)), block, 0)
    Q, R = orthonormalise(block)
    W, _, _ = svd(R)
    return combine(Q, W[:, :number])


def deflated_trace(state: TraceState, k: int, sampler: Sampler, *, resphere: bool):
    """What `compute` returns, for a state with a basis.

    At most half of the products are those of the basis, the others of probes.
    """
    operator, basis = state.operator, state.basis
    assert basis is not None
    space = space_of(operator)
    known_AB, known_AOmega = kept_parts(state, 2)
    r = min(basis.shape[1], k // 2, max(k - 2, 0))
    if known_AB is not None:
        r = known_AB.shape[1]
    B, number = basis[:, :r], k - r
    Omega = draw_probes(sampler, state.key, number, space)
    AB, AOmega = extend_products(operator, (B, known_AB), (Omega, known_AOmega))
    deflated = deflate(B, AB, Omega, AOmega, resphere=resphere)
    exact = column_dots(B, AB)
    mean, standard_error, freedom = independent_samples(
        deflated.samples,
        deflated.norms,
        deflated.gram(space.size - r)[None],
        exact,
    )
    stats = {
        "num_matvecs": k,
        "degrees_of_freedom": freedom,
        "largest_product": products_to_check(AOmega),
        "kept": [AB, AOmega],
    }
    G = deflated.G
    blocks = side_by_side(B, G), side_by_side(B, G / number)
    return jnp.sum(exact) + mean, standard_error, stats, blocks


def with_basis(state: TraceState, fresh: TraceState, *products: Any) -> TraceState:
    """A fresh state, with a basis from what an earlier one keeps.

    `products` are those with an orthonormal basis and with probes, of a state that had
    no basis yet.
    """
    if state.kept is None:
        if state.basis is None:
            return fresh
        basis = state.basis
    else:
        if state.basis is not None:
            products = tuple(state.kept.parts)
        of_basis, of_probes = products
        if of_basis is None or of_basis.shape[1] == 0:
            return fresh
        # Half of what a budget like the last one allows for.
        most = of_basis.shape[1] + of_probes.shape[1]
        number = min(state.kept.budget // 2, most)
        basis = leading_range(of_basis, of_probes, number=number)
    # Fresh probes for the key of the state as well: the basis was found with these.
    word = jnp.sum(jax.random.key_data(state.key), dtype=jnp.uint32)
    key = jax.random.fold_in(fresh.key, word)
    return TraceState(key, fresh.operator, basis=basis)
