r"""The derivative of `tr f(A)`, and the Frechet derivative of `f(A)`.

With Ritz pairs `(theta, V)` and a Hermitian matrix C such that `E[V C V^*] = I`, the
estimate `tr(C f(Theta))` of `tr f(A)` has the derivative

    tr((F o C) V^* dA V),    F_ij = (f(theta_i) - f(theta_j)) / (theta_i - theta_j),

V and C held fixed (Daleckii and Krein; Higham, "Functions of Matrices" (2008), theorem
3.11, doi:10.1137/1.9780898717778): `V (F o C) V^*` stands in for `f'(A)`.

*Second derivatives.* `f'(A)` depends on A as well:

    d f'(A) [dB] = L(A, dB),   the Frechet derivative of f',

for which `L(A, dB) V D V^*` stands in, with `E[V D V^*] = I`, too. So the block
`Z = V (F o C)`, which is paired with `dA V`, is given the tangent `L(A, dB) V D`. It is
linear in `W = dB V`, and found by projection to a space G that holds it, with Ritz values
mu of A:

    L(A, dB) V D ~ G (N o (G^* W)) D,    N the divided differences of f' at (mu, theta).

Here D is made of the probes alone. C, which holds all of the Krylov space, would be of
lower variance, but needs `L(A, dB)` on that whole space: the next space is too small for
it, and the derivative would be biased. The transpose is of the same form. G comes from
the block Krylov space of `[[A, W], [0, T]]`, of which the function f' holds `L(A, dB)` in
its corner (Mathias, "A Chain Rule for Matrix Functions and Applications", SIAM J. Matrix
Anal. Appl. 17 (1996), doi:10.1137/S0895479895283409).
"""

import math
from collections.abc import Callable

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ._krylov import KrylovSpaces, arnoldi
from ._operator import apply_block, most_columns
from ._orthogonal import column_dots, combine, inner, largest_entry, orthonormalise
from ._sharding import laid_out_like, replicate
from ._small_matrices import eigh, matmul
from ._spectral_function import SpectralFunction, derivative, divided_differences
from ._stream import columns_derived_at_once, sum_of_needed


class SpectralBlocks(eqx.Module):
    r"""Ritz pairs, and the matrix that makes them a stand-in for the identity.

    **Attributes:**

    - `basis`: `V`, of shape (n, p), Ritz vectors of one or more Krylov spaces.
    - `values`: theta, their Ritz values.
    - `coupling`: the matrix C.
    - `probes`: coordinates of the starting vectors, scaled so that `D = probes probes^*`
        has `E[V D V^*] = I`.
    - `vectors`: from Ritz vectors to the Krylov basis, of which the first `width`
        columns span the starting vectors: `K = V S^*`.
    - `width`: the number of starting vectors.
    - `count`: how many of the p Ritz pairs there are, where that is known at run time
        only. Values beyond are copies of one of them, everything else is 0 there.
    - `sizes`: numbers of pairs, ascending up to p, that second derivatives may cut the
        blocks to.
    """

    basis: Inexact[Array, "n p"]
    values: Float[Array, " p"]
    coupling: Inexact[Array, "p p"]
    probes: Inexact[Array, "p m"]
    vectors: Inexact[Array, "p p"]
    width: int = eqx.field(static=True)
    count: Int[Array, ""] | None = None
    sizes: tuple[int, ...] = eqx.field(static=True, default=())

    def first(self, size: int) -> "SpectralBlocks":
        """The blocks of the first pairs alone."""
        return SpectralBlocks(
            self.basis[:, :size],
            self.values[:size],
            self.coupling[:size, :size],
            self.probes[:size],
            self.vectors[:size, :size],
            self.width,
        )

    def tangents(
        self,
        function: SpectralFunction,
        operator: lx.AbstractLinearOperator,
        t_function: PyTree,
        t_operator: PyTree,
    ) -> list[Inexact[Array, ""]] | None:
        """Of `tr f(A)`, for every leaf of the function; `None` if all are 0."""
        totals = None
        if jtu.tree_leaves(t_operator):
            totals = self._of_operator(function, operator, t_operator)
        if jtu.tree_leaves(t_function):
            points = constant_in(operator, self.values)
            _, slopes = eqx.filter_jvp(
                lambda fn: fn(points), (function,), (t_function,)
            )
            weights = jnp.real(jnp.diagonal(self.coupling))
            if totals is None:
                totals = [jnp.zeros((), x.dtype) for x in function(points)]
            # A leaf may not depend on what others close over.
            totals = [
                total if x is None else total + jnp.sum(weights.astype(x.dtype) * x)
                for total, x in zip(totals, slopes, strict=True)
            ]
        return totals

    def _of_operator(self, function, operator, t_operator):
        n, p = self.basis.shape
        differences = divided_differences(function, self.values, self.values)
        corrections = _second_order(operator, self, function)
        if self.count is None:
            tangents = jtu.tree_leaves(t_operator)
            size = columns_derived_at_once(self.basis, sum(x.size for x in tangents))
        else:
            size = min(most_columns(n), max(8, -(-p // 8)), p)

        def columns(x, start):
            # All of them, if there is one chunk.
            if size >= p:
                return x
            padded = jnp.pad(x.T, ((0, -p % size), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(padded, start, size).T

        def of(start):
            V = columns(self.basis, start)
            W = product_tangent(operator, t_operator, V)
            if W is None:
                return None
            totals = []
            for F, correction in zip(differences, corrections, strict=True):
                dtype = np.result_type(F.dtype, V.dtype)
                inside = F.conj().astype(dtype) * self.coupling.astype(dtype)
                Z = combine(self.basis.astype(dtype), columns(inside, start))
                Z = Z + columns(correction, start).astype(dtype)
                total = jnp.sum(column_dots(Z, W.astype(Z.dtype)))
                totals.append(total if jnp.iscomplexobj(F) else jnp.real(total))
            return totals

        if self.count is None and size >= p:
            return of(0)
        return sum_of_needed(of, -(-p // size), size, self.count)


def lanczos_blocks(spaces: KrylovSpaces) -> SpectralBlocks:
    """Of m starting vectors, each in its own space; Ritz vector r of i at `i s + r`."""
    steps, m, n = spaces.basis.shape
    dtype = spaces.basis.dtype
    values, vectors = jax.vmap(eigh)(spaces.projected)  # (m, s), (m, s, s)
    precision = jax.lax.Precision.HIGHEST
    V = jnp.einsum(
        "jin,ijr->irn", spaces.basis, vectors.astype(dtype), precision=precision
    )
    own = jnp.eye(m, dtype=bool)
    first = vectors[:, 0, :] * spaces.norms[:, None]
    probes = jnp.where(own[:, None, :], first[:, :, None], 0) / math.sqrt(m)
    probes = probes.reshape(m * steps, m).astype(dtype)
    # In Krylov coordinates vector j of i comes at `j m + i`.
    S = jnp.where(own[None, :, :, None], vectors.swapaxes(0, 1)[:, :, None], 0)
    return SpectralBlocks(
        V.reshape(m * steps, n).T,
        values.reshape(-1),
        matmul(probes, probes.conj().T),
        probes,
        S.reshape(m * steps, m * steps).astype(dtype),
        m,
    )


def product_tangent(
    operator: lx.AbstractLinearOperator, t_operator: PyTree, V: Inexact[Array, "n p"]
) -> Inexact[Array, "n p"] | None:
    """`dA V`."""
    V = jax.lax.stop_gradient(V)
    return eqx.filter_jvp(lambda op: apply_block(op, V), (operator,), (t_operator,))[1]


@eqx.filter_custom_jvp
def _second_order(operator, blocks, function) -> list[Inexact[Array, "n p"]]:
    # Zeros whose derivative is that of Z.
    del operator
    return [jnp.zeros_like(blocks.basis) for _ in function(blocks.values)]


@_second_order.def_jvp
def _second_order_jvp(primals, tangents):
    operator, blocks, function = primals
    zeros = _second_order(operator, blocks, function)
    p = blocks.basis.shape[1]

    def of(size):
        part = blocks.first(size)
        W = product_tangent(operator, tangents[0], part.basis)
        if W is None:
            return [None for _ in zeros]
        inside, outer = not_again((operator, function))

        def slopes(points):
            return derivative(outer, points)

        found = frechet(inside, slopes, part, replicate(W))
        found = [jnp.pad(x, ((0, 0), (0, p - size))) for x in found]
        both = zip(found, zeros, strict=True)
        return [laid_out_like(x.T, zero.T).T for x, zero in both]

    if blocks.count is None:
        return zeros, of(p)
    # As many pairs as any lane needs.
    needed = eqxi.unvmap_max(blocks.count) > jnp.asarray(blocks.sizes[:-1], jnp.int32)
    branches = [lambda size=size: of(size) for size in blocks.sizes]
    return zeros, jax.lax.switch(jnp.sum(needed), branches)


@eqx.filter_custom_jvp
def _not_again(arrays: PyTree) -> PyTree:
    return arrays


def _refuse(primals, tangents):
    raise NotImplementedError(
        "This derivative is not implemented. Estimates of spectral functions have first "
        "derivatives of any kind, and second derivatives with respect to the operator; "
        "f(A) as an operator has first derivatives. Third derivatives, and second ones "
        "that mix the operator and what the function closes over, are missing."
    )


_not_again.def_jvp(_refuse)


@eqx.filter_custom_jvp
def _constant_in(arrays: PyTree, x: Array) -> Array:
    del arrays
    return x


_constant_in.def_jvp(_refuse)


def not_again(tree: PyTree) -> PyTree:
    """The same, of which derivatives raise an error."""
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(_not_again(arrays), rest)


def constant_in(tree: PyTree, x: Array) -> Array:
    """`x`, whose derivatives raise an error, with respect to the tree's arrays too."""
    return _constant_in(eqx.filter(tree, eqx.is_array), x)


def frechet(
    operator: lx.AbstractLinearOperator,
    slopes: Callable[[Array], list[Array]],
    blocks: SpectralBlocks,
    W: Inexact[Array, "n p"],
) -> list[Inexact[Array, "n p"]]:
    """`L(A, dB) V D` for every leaf of a function, of `W = dB V`. Linear in W.

    Takes about `4 p` products with A, and as many again where it is transposed.
    """
    D = matmul(blocks.probes, blocks.probes.conj().T)

    def weights(values, i):
        return divided_differences(slopes, values, blocks.values)[i]

    results = []
    for i, _ in enumerate(slopes(blocks.values)):

        def forward(_, W, i=i):
            values, G = _space(operator, W, blocks)
            inside = weights(values, i).astype(W.dtype) * inner(G, W)
            return combine(G, matmul(inside, D))

        def backward(_, cotangent, i=i):
            Y = cotangent.conj()
            values, G = _space(operator, Y, blocks)
            inside = matmul(inner(G, Y), D)
            inside = weights(values, i).astype(Y.dtype) * inside
            return combine(G, inside).conj()

        # A linear function with its transpose: nothing is solved, and the identity
        # that stands for the system is never applied.
        results.append(jax.lax.custom_linear_solve(lambda x: x, W, forward, backward))
    return results


def _space(
    operator: lx.AbstractLinearOperator,
    W: Inexact[Array, "n p"],
    blocks: SpectralBlocks,
) -> tuple[Float[Array, " q"], Inexact[Array, "n q"]]:
    """Ritz pairs of A in a space that holds `L(A, dB) V`, for `W = dB V`."""
    n, p = W.shape
    m = blocks.width
    steps = p // m

    def products(block):
        return replicate(apply_block(operator, block))

    if (2 * steps + 1) * m >= n:
        basis = jnp.eye(n, dtype=W.dtype)
    else:
        S = blocks.vectors
        T = matmul(S * blocks.values[None, :].astype(S.dtype), S.conj().T)
        W = combine(W, S.conj().T)
        # The size of W is free: the corner is linear in it.
        size, of_T = largest_entry(W), largest_entry(T)
        ratio = jnp.where(of_T == 0, 1, of_T) / jnp.where(size == 0, 1, size)
        W = W * ratio.astype(W.dtype)

        def product(block):
            x, y = block[:n], block[n:]
            return jnp.concatenate([products(x) + combine(W, y), T @ y])

        start = jnp.concatenate(
            [jnp.zeros((n, m), W.dtype), jnp.eye(p, m, dtype=W.dtype)]
        )
        whole, _, _ = arnoldi(product, start, 2 * steps + 1, hermitian=False)
        basis, _ = orthonormalise(whole[:n, m:])
    projected = inner(basis, products(basis))
    values, vectors = eigh((projected + projected.conj().T) / 2)
    return values, combine(basis, vectors)
