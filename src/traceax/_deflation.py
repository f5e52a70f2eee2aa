r"""Traces with the help of a basis from elsewhere, such as an earlier operator's.

With an orthonormal basis B of r vectors that doesn't depend on the probes,

    tr A = tr(B^* A B) + tr(P A P),    P = I - B B^*,

where the first part takes a product for each vector of the basis, and probes see the second
only. What B was made for takes no part in the argument: the better it fits, the smaller the
error; the expectation is the trace for any. The second part is estimated as any trace is.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact

from ._accuracy.error_bar import ErrorBar, exact_bar, gram_of, independent_samples
from ._base import TraceEstimator
from ._linalg.small import svd
from ._linalg.tall import (
    column_dots,
    column_norms,
    combine,
    inner,
    orthonormalise,
    side_by_side,
)
from ._operators.block import (
    apply_block,
    as_function,
    is_known,
    register,
    unflatten,
)
from ._samplers import Sampler
from ._state import Kept, TraceState


class Deflated(NamedTuple):
    """Probes without their part in a basis, `E[G G^*] = P` for each column, and products."""

    G: Inexact[Array, "n l"]
    AG: Inexact[Array, "n l"]

    @property
    def samples(self) -> Inexact[Array, " l"]:
        """Samples of the trace of `P A P`."""
        return column_dots(self.G, self.AG)

    def gram(self, dimension: int) -> Inexact[Array, "g g"]:
        """`w_i^* A w_j` of the first probes, for the traceless part of A.

        In so many dimensions. Probes of fixed length don't see a multiple of the identity.
        """
        mean = jnp.mean(self.samples) / dimension
        return gram_of(self.G, self.AG) - mean * gram_of(self.G, self.G)

    def error_bar(self, dimension: int, exact: Inexact[Array, " r"]) -> ErrorBar:
        """The error bar of the mean of the samples, beside an exact part."""
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


def mean_of_tests(state: TraceState, k: int, sampler: Sampler, *, resphere: bool):
    """The estimate, as `compute` returns it, whose products beside the basis are tests.

    Without a basis this is the mean over probes.
    """
    operator, space = state.operator, state.space
    n, dtype = space.size, space.compute_dtype
    nothing = jnp.zeros((n, 0), dtype)
    B = nothing if state.basis is None else state.basis[:, : basis_size(state, k)]
    known = [nothing] * 2 if state.kept is None else state.kept.parts
    number = k - B.shape[1]
    Omega = sampler.sample(state.key, n, number, dtype)
    new = [x[:, y.shape[1] :] for x, y in zip((B, Omega), known, strict=True)]
    products = apply_block(operator, side_by_side(*new))
    first, second = jnp.split(products, [new[0].shape[1]], axis=1)
    AB, AOmega = side_by_side(known[0], first), side_by_side(known[1], second)
    deflated = deflate(B, AB, Omega, AOmega, resphere=resphere)
    exact = column_dots(B, AB)
    bar = deflated.error_bar(n - B.shape[1], exact)
    stats = {"num_matvecs": k, "degrees_of_freedom": bar.degrees_of_freedom}
    if state.basis is not None:
        stats["kept"] = AB, AOmega
    blocks = side_by_side(B, deflated.G), side_by_side(B, deflated.G / number)
    return jnp.sum(exact) + bar.mean, bar.standard_error, stats, blocks


def basis_size(state: TraceState, k: int) -> int:
    """The number of vectors of the basis that are used: at most half of the products."""
    if state.kept is not None:
        return state.kept.parts[0].shape[1]
    return min(jnp.asarray(state.basis).shape[1], k // 2, max(k - 2, 0))


def takes_only_tests(state: TraceState, k: int) -> bool:
    """Whether what a basis leaves is seen by tests alone.

    Products that are no more than twice those of the basis find little beside it: XTrace
    on them had 1.5 times the error on decaying spectra and 2.3 on flat ones, with as many.
    """
    if state.kept is not None:
        return isinstance(state.kept.parts[1], jax.Array)
    r = basis_size(state, k)
    return k - r <= 2 * r


def trace_beside_basis(estimator: TraceEstimator, state: TraceState, k: int):
    """The estimate for a state with a basis, as `compute` returns it: that of `P A P`."""
    r = basis_size(state, k)
    B = jnp.asarray(state.basis)[:, :r]
    if state.kept is None:
        AB, inner_kept = apply_block(state.operator, B), None
    else:
        AB, parts = state.kept.parts
        inner_kept = Kept(state.kept.budget - r, parts)
    deflated = DeflatedLinearOperator(state.operator, B)
    inner_state = TraceState(state.key, deflated, inner_kept)
    value, error, stats, (V, Z) = estimator.compute(inner_state, k - r)
    stats = {**stats, "num_matvecs": r + stats["num_matvecs"]}
    if "kept" in stats:
        stats["kept"] = AB, stats["kept"]
    exact = column_dots(B, AB)
    # That of rounding in the exact part.
    bar = exact_bar(jnp.sum(exact), jnp.sum(jnp.abs(exact)))
    V, Z = (side_by_side(B, x - combine(B, inner(B, x))) for x in (V, Z))
    return bar.mean + value, jnp.hypot(error, bar.standard_error), stats, (V, Z)


class DeflatedLinearOperator(lx.AbstractLinearOperator):
    """`P A P`, with `P = I - B B^*`."""

    operator: lx.AbstractLinearOperator
    basis: Inexact[Array, "n r"]

    def mv(self, vector):
        B, structure = self.basis, self.in_structure()

        def project(tree):
            parts = [x.reshape(-1).astype(B.dtype) for x in jtu.tree_leaves(tree)]
            x = jnp.concatenate(parts)[:, None]
            left = unflatten((x - combine(B, inner(B, x)))[:, 0], structure)
            return jtu.tree_map(lambda y, like: y.astype(like.dtype), left, structure)

        return project(self.operator.mv(project(vector)))

    def as_matrix(self):
        return as_function(self).as_matrix()

    def transpose(self):
        return DeflatedLinearOperator(self.operator.transpose(), self.basis.conj())

    def in_structure(self):
        return self.operator.in_structure()

    def out_structure(self):
        return self.operator.out_structure()


# Properties that `P A P` shares with A.
_SHARED = (lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite)

register(
    DeflatedLinearOperator,
    lambda check, x: check in _SHARED and is_known(check, x.operator),
    lambda x: DeflatedLinearOperator(lx.conj(x.operator), x.basis.conj()),
)


def basis_from_products(
    state: TraceState, fresh: TraceState, A_basis: Any, A_probes: Any
) -> TraceState:
    """The fresh state, with the leading range of the old products as a basis.

    `A_basis` are products with an orthonormal basis, beside that of the old state, and
    `A_probes` those with probes; `None` if it keeps none.
    """
    kept, basis = state.kept, state.basis
    if kept is not None:
        if basis is not None:
            A_basis = side_by_side(kept.parts[0], A_basis)
        if A_basis is None or A_basis.shape[1] == 0:
            return fresh
        # Half of what a budget like the last one allows for.
        most = A_basis.shape[1] + A_probes.shape[1]
        number = min(kept.budget // 2, most)
        basis = leading_range(A_basis, A_probes, number=number)
    if basis is None:
        return fresh
    # Fresh probes for the key of the state as well: the basis was found with these.
    word = jnp.sum(jax.random.key_data(state.key), dtype=jnp.uint32)
    return TraceState(jax.random.fold_in(fresh.key, word), fresh.operator, basis=basis)
