r"""Derivatives of `f(A)`: of products with it, and second ones of its trace.

*Second derivatives.* `f'(A)` depends on A as well:

    d f'(A) [dB] = L(A, dB),   the Frechet derivative of f',

for which `L(A, dB) V D V^*` stands in, with `E[V D V^*] = I`, too. So the block
`Z = V (F o C)`, which is paired with `dA V`, is given the tangent `L(A, dB) V D`. It is
linear in `W = dB V`, and found by projection to a space G that holds it, with Ritz
values mu of A:

    L(A, dB) V D ~ G (N o (G^* W)) D,    N the divided differences of f' at (mu, theta).

D is made of the probes alone: of C, which holds all of the Krylov space, the next space
would be too small for `L(A, dB) V`, and the derivative biased. The transpose is of the
same form. G comes from the block Krylov space of `[[A, W], [0, T]]`, of which the function
f' holds `L(A, dB)` in its corner (Mathias, "A Chain Rule for Matrix Functions and
Applications", SIAM J. Matrix Anal. Appl. 17 (1996), doi:10.1137/S0895479895283409).
"""

import functools as ft
import operator as op
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, Inexact, Int, PyTree

from .._linalg.krylov import RitzPairs, arnoldi, lanczos
from .._linalg.small import divisor, eigh, matmul, squares
from .._linalg.tall import combine, inner, largest_entry, orthonormalise
from .._linalg.types import alike
from .._operators.block import apply_block, product_tangent
from .function import (
    HIDDEN,
    RECIPROCAL,
    SpectralFunction,
    derivative,
    divided_differences,
    final,
)
from .ritz import ritz_values

# Columns that are multiplied at once where their number is known at run time only.
_CHUNK = 64


def sum_of(*parts: Array | None) -> Array | None:
    """The sum of tangents, of which `None` stands for 0."""
    known = [x for x in parts if x is not None]
    return ft.reduce(op.add, known) if known else None


def product_tangents(
    operator: lx.AbstractLinearOperator,
    t_operator: PyTree,
    basis: Inexact[Array, "n p"],
    count: Int[Array, ""] | None,
) -> Inexact[Array, "n p"] | None:
    """`dA K`, of the first `count` columns of K, the others being 0."""
    n, p = basis.shape
    if count is None or p <= _CHUNK or not jtu.tree_leaves(t_operator):
        return product_tangent(operator, t_operator, basis)
    number = -(-p // _CHUNK)
    rows = jnp.pad(basis.T, ((0, number * _CHUNK - p), (0, 0)))
    chunks = rows.reshape(number, _CHUNK, n)

    def product(chunk):
        found = product_tangent(operator, t_operator, chunk.T)
        return None if found is None else found.T

    shape = jax.eval_shape(product, chunks[0])
    if shape is None:
        return None

    @jax.checkpoint
    def part(start, chunk):
        # Of all lanes: a condition that differs between them would be no condition.
        needed = eqxi.unvmap_any(start < count)
        nothing = jnp.zeros(shape.shape, shape.dtype)
        return jax.lax.cond(needed, *alike(product, lambda _: nothing), chunk)

    starts = _CHUNK * jnp.arange(number, dtype=jnp.int32)
    found = jax.lax.map(lambda x: part(*x), (starts, chunks))
    return found.reshape(-1, n)[:p].T


@eqx.filter_custom_jvp
def second_order(
    operator: lx.AbstractLinearOperator, function: SpectralFunction, pairs: RitzPairs
) -> list[Inexact[Array, "n p"]]:
    """Zeros for every leaf of the function, whose derivative is that of Z."""
    return [jnp.zeros_like(pairs.basis) for _ in function(pairs.values)]


@second_order.def_jvp
def _second_order_jvp(primals, tangents):
    operator, function, pairs = primals
    zeros = second_order(operator, function, pairs)
    W = product_tangent(operator, tangents[0], pairs.ritz_vectors)
    if W is None:
        return zeros, [None for _ in zeros]
    operator, function = final((operator, function))
    return zeros, frechet(operator, ft.partial(derivative, function), pairs, W)


@eqx.filter_custom_jvp
def solution_of(
    operator: lx.AbstractLinearOperator,
    right: Inexact[Array, "n q"],
    u: Inexact[Array, "n q"],
    steps: int,
) -> Inexact[Array, "n q"]:
    """`u = A^-1 B`, whose derivative is `A^-1 (dB - dA u)`, by Lanczos."""
    return u


@solution_of.def_jvp
def _solution_jvp(primals, tangents):
    operator, right, u, steps = primals
    t_operator, t_right, *_ = tangents
    solution = solution_of(operator, right, u, steps)
    W = product_tangent(operator, t_operator, u)
    residual = sum_of(t_right, None if W is None else -W)
    if residual is None:
        return solution, None
    operator = final(operator)

    def solve(x):
        return function_product(operator, RECIPROCAL, x, steps, None)

    return solution, jax.vmap(solve, 1, 1)(residual)


def frechet(
    operator: lx.AbstractLinearOperator,
    function: Callable[[Array], list[Array]],
    pairs: RitzPairs,
    W: Inexact[Array, "n p"],
    lower: Float[Array, ""] | None = None,
) -> list[Inexact[Array, "n p"]]:
    """`L(A, dB) V D` for every leaf of a function, of `W = dB V`, by about `4 p` products."""

    def paired(x):
        # `x D`. XLA on CPUs (jaxlib 0.10.2) gets `x (p p^*)` wrong by O(1) for p of few
        # columns and 180 to 256 rows.
        return matmul(matmul(x, pairs.probes), pairs.probes.conj().T)

    def of_leaf(i):
        def weights(values):
            N = divided_differences(function, values, pairs.values)[i]
            return N.astype(W.dtype)

        def forward(W):
            values, G = _space(operator, W, pairs, lower)
            return combine(G, paired(weights(values) * inner(G, W)))

        def backward(cotangent):
            Y = cotangent.conj()
            values, G = _space(operator, Y, pairs, lower)
            inside = weights(values).conj() * paired(inner(G, Y))
            return combine(G, inside).conj()

        return with_transpose(forward, backward, W)

    return [of_leaf(i) for i in range(len(function(pairs.values)))]


def with_transpose(forward: Callable, backward: Callable, x: Any) -> Any:
    """`forward(x)`, whose transpose is `backward`."""
    # Nothing is solved: the identity that stands for the system is never applied.
    return jax.lax.custom_linear_solve(
        lambda x: x, x, lambda _, x: forward(x), lambda _, y: backward(y)
    )


def _space(
    operator: lx.AbstractLinearOperator,
    W: Inexact[Array, "n p"],
    pairs: RitzPairs,
    lower: Float[Array, ""] | None,
) -> tuple[Float[Array, " q"], Inexact[Array, "n q"]]:
    """Ritz pairs of A in a space that holds `L(A, dB) V`, for `W = dB V`."""
    n, p = W.shape
    m = pairs.width
    steps = p // m
    if (2 * steps + 1) * m >= n:
        basis = jnp.eye(n, dtype=W.dtype)
    else:
        S = pairs.vectors
        T = matmul(S * pairs.values[None, :].astype(S.dtype), S.conj().T)
        W = combine(W, S.conj().T)
        # The size of W is free: the corner is linear in it.
        ratio = divisor(largest_entry(T)) / divisor(largest_entry(W))
        W = W * ratio.astype(W.dtype)

        def product(block):
            above = apply_block(operator, block[:n]) + combine(W, block[n:])
            return jnp.concatenate([above, matmul(T, block[n:])])

        start = jnp.eye(n + p, m, -n, dtype=W.dtype)
        whole, *_ = arnoldi(product, start, 2 * steps + 1)
        basis, _ = orthonormalise(whole[:n, m:])
    projected = inner(basis, apply_block(operator, basis))
    values, vectors = eigh((projected + projected.conj().T) / 2)
    values = ritz_values(values, jnp.zeros_like(values[0]), operator, lower).values
    return values, combine(basis, vectors)


def _in_krylov_space(operator, function, x, steps, lower):
    """`V f(Theta) c`, with the vector's coordinates c; and the Ritz pairs.

    A Ritz value that can't be told from `lower`, or from 0, is taken for it where f is
    finite there: a root of high order makes much of rounding.
    """
    krylov = lanczos(ft.partial(apply_block, operator), x[:, None], steps)
    pairs = krylov.ritz_pairs()
    values, noise, _ = ritz_values(pairs.values, krylov.asymmetry, operator, lower)
    end = jnp.zeros_like(values[0]) if lower is None else lower
    hidden = jnp.abs(values - end) <= HIDDEN * noise * largest_entry(values)
    finite = jnp.stack([jnp.isfinite(f) for f in function(end)]).all()
    values = jnp.where(hidden & finite, end, values)
    pairs = eqx.tree_at(lambda x: x.values, pairs, values)
    (f,) = function(values)
    inside = matmul(pairs.vectors, f[:, None].astype(x.dtype) * pairs.probes)
    return combine(pairs.basis, inside)[:, 0], pairs


@eqx.filter_custom_jvp
def function_product(operator, function, x, steps, lower) -> Inexact[Array, " n"]:
    """`f(A) x`, by Lanczos. Linear in x. No eigenvalue is below `lower`."""

    def forward(x):
        return _in_krylov_space(operator, function, x, steps, lower)[0]

    def conjugate(points):
        return [f.conj() for f in function(points)]

    def backward(y):
        return _in_krylov_space(operator, conjugate, y.conj(), steps, lower)[0].conj()

    return with_transpose(forward, backward, x)


@function_product.def_jvp
def _function_product_jvp(primals, tangents):
    operator, function, x, steps, lower = primals
    t_operator, t_function, t_x, *_ = tangents

    def product(x):
        return function_product(operator, function, x, steps, lower)

    y = product(x)
    parts = [None if t_x is None else product(t_x)]
    if jtu.tree_leaves((t_operator, t_function)):
        operator, function, x = final((operator, function, x))

    def in_krylov_space(fn):
        return _in_krylov_space(operator, fn, x, steps, lower)

    if jtu.tree_leaves(t_function):
        _, t_y = eqx.filter_jvp(
            lambda fn: in_krylov_space(fn)[0], (function,), (t_function,)
        )
        parts.append(t_y)
    if jtu.tree_leaves(t_operator):
        _, pairs = in_krylov_space(function)
        W = product_tangent(operator, t_operator, pairs.ritz_vectors)
        if W is not None:
            (image,) = frechet(operator, function, pairs, W, lower)
            # `L(A, dA) V D` with D = c c^*.
            c = pairs.probes / divisor(jnp.sum(squares(pairs.probes))).astype(x.dtype)
            parts.append(combine(image, c)[:, 0])
    return y, sum_of(*parts)
