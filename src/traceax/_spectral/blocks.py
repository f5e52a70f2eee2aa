r"""The derivative of `tr f(A)`.

With Ritz pairs `(theta, V)` and a Hermitian matrix C such that `E[V C V^*] = I`, the
estimate `tr(C f(Theta))` of `tr f(A)` has the derivative

    tr((F o C) V^* dA V),    F_ij = (f(theta_i) - f(theta_j)) / (theta_i - theta_j),

V and C held fixed (Daleckii and Krein; Higham, "Functions of Matrices" (2008), theorem
3.11, doi:10.1137/1.9780898717778): `V (F o C) V^*` stands in for `f'(A)`.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Inexact, Int

from .._linalg.krylov import RitzPairs, smallest_of
from .._linalg.small import frobenius, squares
from .._linalg.tall import column_dots, combine
from .._primitive import StandIn
from .frechet import product_tangents, second_order, solution_of, sum_of
from .function import divided_differences, final
from .slope import Tests, slope_errors


class SpectralBlocks(StandIn):
    r"""Ritz pairs, and the matrix C that makes them a stand-in for the identity.

    - `pairs`: of p Ritz values.
    - `coupling`: the matrix C.
    - `count`: how many of the pairs there are, where that is known at run time only.
        Values beyond are copies of one of them, everything else is 0 there.
    - `sizes`: numbers of pairs, ascending up to p, that derivatives may cut the blocks
        to.
    - `solutions`: coordinates in the Ritz vectors of `U = A^-1 B`, B the right-hand sides
        of the state; `None` without such.
    - `tests`: for the error bars of derivatives, where they are asked for.
    """

    pairs: RitzPairs
    coupling: Inexact[Array, "p p"]
    count: Int[Array, ""] | None = None
    sizes: tuple[int, ...] = eqx.field(static=True, default=())
    solutions: Inexact[Array, "p q"] | None = None
    tests: Tests | None = None

    def derivative(self, state, tangent):
        """The derivative of `tr f(A)`, in the structure of the function's results; and of
        `b^* A^-1 b` for right-hand sides b."""
        return self._derivative(state, tangent, self._products(state, tangent))

    def _products(self, state, tangent) -> Inexact[Array, "n p"] | None:
        """`dA K`, of the basis."""
        return product_tangents(
            state.operator, tangent.operator, self.pairs.basis, self.count
        )

    def _derivative(self, state, tangent, products):
        primal = state.operator, state.function, state.right
        tangent = tangent.operator, tangent.function, tangent.right
        if not jtu.tree_leaves(tangent):
            return None
        # Products serve all sizes: most of what there is to compile.
        if self.count is None:
            leaves, forms = self._of_first(
                len(self.coupling), primal, tangent, products
            )
        else:
            # As many pairs as any lane needs.
            branches = [
                lambda size=size: self._of_first(size, primal, tangent, products)
                for size in self.sizes
            ]
            which = smallest_of(self.sizes, self.count)
            leaves, forms = jax.lax.switch(which, branches)
        tree = primal[1].tree(leaves, self.pairs.values.dtype)
        return tree if self.solutions is None else Terms(tree, forms)

    def slope(self, state, tangent):
        pairs, tests = self.pairs, self.tests
        n, p = pairs.basis.shape
        if tests is None and p < n:
            return super().slope(state, tangent)
        products = self._products(state, tangent)
        value = self._derivative(state, tangent, products)
        if value is None:
            return None
        tree, dtype = state.function.tree, pairs.values.dtype
        if tests is None:
            freedom = [jnp.asarray(jnp.inf, dtype)] * len(state.function(pairs.values))
            error = self._rounding(state, value, products)
            return value, error, tree(freedom, dtype)
        errors, freedoms, of_forms = slope_errors(
            tests, pairs, self.solutions, state, tangent, products
        )
        error = tree(errors, dtype)
        if self.solutions is not None:
            error = Terms(error, of_forms)
        return value, error, tree(freedoms, dtype)

    def _rounding(self, state, value, products):
        """The error that rounding makes of exact slopes, `tr(f'(A) dA)` and of forms.

        Eigenvalues that are off by eps |A| change f'(A), and entries of dA may cancel.
        """
        theta, coordinates = self.pairs.values, self.solutions
        eps, size = jnp.finfo(theta.dtype).eps, jnp.max(jnp.abs(theta))
        dA = (
            jnp.zeros_like(theta, shape=()) if products is None else frobenius(products)
        )
        function = state.function.in_range(theta)
        # f', of which an infinite one is replaced.
        exact, moved = (
            [jnp.diagonal(F) for F in divided_differences(function, x, x)]
            for x in (theta, theta + eps * size)
        )
        bounds = [
            dA * (jnp.linalg.norm(y - x) + eps * jnp.linalg.norm(x))
            for x, y in zip(exact, moved, strict=True)
        ]
        of_sums = len(theta) * eps

        def error(x, bound):
            return bound + of_sums * jnp.abs(x)

        tree = state.function.tree(bounds, theta.dtype)
        if coordinates is None:
            return jtu.tree_map(error, value, tree)
        condition = size / jnp.maximum(jnp.min(theta), eps * size)
        of_forms = 2 * eps * condition * dA * jnp.sum(squares(coordinates), axis=0)
        logdet = jtu.tree_map(error, value.logdet, tree)
        return Terms(logdet, error(value.inv_quad, of_forms))

    def _of_first(self, size, primal, tangent, products):
        pairs, C = self.pairs.first(size), self.coupling[:size, :size]
        operator, function, right = primal
        _, t_function, t_right = tangent
        function = function.in_range(pairs.values)
        W = None
        if products is not None:
            W = combine(products.T[:size].T, jax.lax.stop_gradient(pairs.vectors))
        of_operator = _of_operator(pairs, C, operator, function, W)
        of_function = _of_function(pairs, C, operator, function, t_function)
        leaves = [sum_of(*x) for x in zip(of_operator, of_function, strict=True)]
        if self.solutions is None:
            return leaves, None
        coordinates = self.solutions[:size]
        return leaves, _of_forms(pairs, coordinates, operator, right, W, t_right)


class Terms(NamedTuple):
    """What a Gaussian likelihood is made of: `tr f(A)`, and `b^* A^-1 b` for each b."""

    logdet: Any
    inv_quad: Any


def _of_operator(pairs, C, operator, function, W):
    if W is None:
        return [None for _ in function(pairs.values)]
    V = pairs.ritz_vectors
    differences = divided_differences(function, pairs.values, pairs.values)
    corrections = second_order(operator, function, pairs)

    def of_leaf(F, correction):
        dtype = np.result_type(F.dtype, V.dtype)
        inside = F.conj().astype(dtype) * C.astype(dtype)
        Z = combine(V.astype(dtype), inside) + correction.astype(dtype)
        total = jnp.sum(column_dots(Z, W.astype(dtype)))
        return total if jnp.iscomplexobj(F) else jnp.real(total)

    return list(map(of_leaf, differences, corrections))


def _of_function(pairs, C, operator, function, t_function):
    if not jtu.tree_leaves(t_function):
        return [None for _ in function(pairs.values)]
    points = final(pairs.values, of=operator)
    _, slopes = eqx.filter_jvp(lambda fn: fn(points), (function,), (t_function,))
    weights = jnp.real(jnp.diagonal(C))
    # A leaf may not depend on what others close over.
    return [None if x is None else jnp.sum(weights.astype(x.dtype) * x) for x in slopes]


def _of_forms(pairs, coordinates, operator, right, W, t_right):
    """`2 u^* db - u^* dA u`, with `u = A^-1 b` of the Krylov space."""
    u = combine(pairs.ritz_vectors, coordinates)
    n, p = pairs.basis.shape
    # The same, but for its derivative.
    steps = n if p == n else p // pairs.width
    solution = solution_of(operator, right, u, steps)
    of_operator, of_right = None, None
    if W is not None:
        # `dA u` has two factors u, of which W holds one fixed.
        both = 2 * solution - u
        of_operator = -jnp.real(column_dots(both, combine(W, coordinates)))
    if t_right is not None:
        of_right = 2 * jnp.real(column_dots(solution, t_right))
    return sum_of(of_operator, of_right)
