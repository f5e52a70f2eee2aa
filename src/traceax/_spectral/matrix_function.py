r"""f(A) as a linear operator.

With Ritz values theta, Ritz vectors V and the coordinates c of x from s Lanczos steps,

    f(A) x ~ V f(theta) c,    L(A, dA) x ~ sum_j c_j g_j(A) W_j,    W = dA V.

The derivative L has divided differences `g_j(t) = f[t, theta_j]` (Higham, "Functions of
Matrices", 2008, doi:10.1137/1.9780898717778, theorem 3.11) and is linear in W. Its
transpose maps y to all `c_j g_j(A)^T y`, which share the Krylov space of y.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.flatten_util as jfu
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact

from .._arguments import without_numpy
from .._linalg.dense import (
    column_norms,
    combine,
    divisor,
    eigh,
    hashed_signs,
    inner,
    largest_entry,
    matmul,
    orthonormalise,
    ratio,
)
from .._linalg.krylov import RitzPairs, arnoldi, lanczos
from .._linalg.types import automatic, without_derivatives
from .._operators import space as spaces
from .._operators.check import as_data, checked_operator
from .._operators.solvers import Truncated, Truncation, solver_tolerance
from .._operators.space import (
    ComplexLinearOperator,
    apply_block,
    product_tangent,
    space_of,
    state_space,
)
from .function import (
    HIDDEN,
    SpectralFunction,
    checked_lower,
    divided_differences,
    final,
    ritz_values,
    spectral_function,
)

# Weights that are rounding errors, in units of eps times the largest weight.
_ROUNDING = 100.0
# The number of vectors that measure truncation errors, because one change can be small
# by chance, and the largest factor between the changes by two steps.
_TESTS, _SLOWEST = 4, 0.9


class MatrixFunctionLinearOperator(spaces.Dense, Truncated):
    r"""The operator `f(A)` for a symmetric or Hermitian A, applied by Lanczos.

    ```python
    square_root = traceax.MatrixFunctionLinearOperator(operator, jnp.sqrt, 30)
    traceax.trace(key, square_root, 40)
    ```

    A product takes s products with A, O(n s^2) time and memory for s vectors. It is
    exact for polynomials of degree below s, and if the Krylov space stops growing.
    Otherwise it has an error, which error bars include. If `s < n`, each estimate
    measures the error for four fixed vectors, with 4 s products with A that k doesn't
    count. It is unknown for `s = 1` and in means over minibatches, and goes undetected
    in functions.

    You can differentiate products to any order with respect to the vector, and once
    with respect to A and to arrays that `fn` closes over. These derivatives use the
    formula for f(A), not the Lanczos algorithm, so they are also right if the space
    stops growing. They differentiate s products. Reverse mode adds 2 s products and
    4 s vectors, forward mode 5 s products and 8 s vectors.

    **Arguments:**

    - `operator`: a square lineax operator, over arrays or PyTrees, that is tagged
        symmetric (real) or semidefinite (real or complex).
    - `fn`: a function of a real scalar. If it is complex, such as `exp(i t)`, f(A) acts
        on complex vectors, and a product takes 2 s products with a real A.
    - `num_steps`: s, a positive int. More than n steps are not used.
    - `tags`: lineax tags for f(A), such as `lineax.positive_semidefinite_tag`.
    - `lower`: a real scalar that no eigenvalue of A is below, 0 if A is tagged positive
        semidefinite. It keeps rounded eigenvalues in the domain of `fn`.

    **Raises:** as [`traceax.trace_function`][], and `ValueError` without such a tag.
    """

    operator: lx.AbstractLinearOperator
    fn: SpectralFunction
    num_steps: int = eqx.field(static=True)
    tags: frozenset[object] = eqx.field(static=True)
    lower: Float[Array, ""] | None

    def __init__(
        self,
        operator: lx.AbstractLinearOperator,
        fn: Callable,
        num_steps: int,
        tags: object = (),
        *,
        lower: ArrayLike | None = None,
    ):
        where = "traceax.MatrixFunctionLinearOperator"
        operator = checked_operator(operator, where, "(operator, fn, num_steps)")
        space = space_of(operator)
        if not spaces.is_hermitian(operator):
            raise ValueError(
                f"{where}: operator must be known to be Hermitian, got one without such "
                "a tag; give it lineax.symmetric_tag (if it is real) or "
                "lineax.positive_semidefinite_tag."
            )
        num_steps = without_numpy(num_steps)
        if type(num_steps) is not int or num_steps < 1:
            kind = ValueError if type(num_steps) is int else TypeError
            raise kind(f"{where}: num_steps must be a positive int, got {num_steps!r}.")
        self.operator = as_data(operator)
        self.fn = spectral_function(fn, space.real_dtype, where)
        values = jax.eval_shape(self.fn, jnp.ones((), space.real_dtype))
        if len(values) != 1 or values[0].shape:
            raise ValueError(
                f"{where}: fn must return one scalar, not several; select one."
            )
        if jnp.iscomplexobj(values[0]) and not space.is_complex:
            # The wrapper below loses the tag, so we keep its bound.
            is_bounded = lower is None and spaces.is_positive_semidefinite(operator)
            lower = 0.0 if is_bounded else lower
            self.operator = ComplexLinearOperator(self.operator)
        self.num_steps = min(num_steps, max(space.size, 1))
        is_group = isinstance(tags, set | frozenset | tuple | list)
        self.tags = frozenset(tags if is_group else (tags,))
        lower = checked_lower(lower, space.real_dtype, where)
        self.lower = jax.lax.stop_gradient(lower)

    @automatic
    def mv(self, vector):
        space = space_of(self.operator)
        x, _ = jfu.ravel_pytree(vector)
        if jnp.iscomplexobj(x) and not space.is_complex:
            return ComplexLinearOperator(self).mv(vector)
        y = _product(self, x.astype(space.compute_dtype))
        parts = spaces.unflatten(y, space.structure)
        return jtu.tree_map(lambda y, x: y.astype(x.dtype), parts, space.structure)

    def as_matrix(self):
        space = space_of(self.operator)
        identity = jnp.eye(space.size, dtype=space.compute_dtype)
        return apply_block(self, identity).astype(space.dtype)

    def in_structure(self):
        return self.operator.in_structure()

    def satisfies(self, check):
        # f(A) is symmetric or diagonal if A is. To be semidefinite it needs a tag.
        tag, *_ = spaces.TAGS[check]
        is_kept = check in (lx.is_symmetric, lx.is_diagonal)
        return tag in self.tags or (is_kept and spaces.is_known(self.operator, check))

    def points(
        self,
        values: Float[Array, " s"],
        asymmetry: Float[Array, ""],
        weights: Inexact[Array, "s q"],
    ) -> Float[Array, " s"]:
        """Ritz values. Those within rounding of `lower` or 0 move there, if f is finite
        there. Other values where f is infinite move to the largest one, if rounding
        explains their weights: a vector in A's range has a small part in its null space.
        """
        values, resolution, _ = ritz_values(
            values,
            asymmetry,
            state_space(self.operator),
            self.lower,
            error=solver_tolerance(self.operator, values.dtype),
        )
        # High-order roots magnify rounding, so we move close Ritz values to the end.
        end = jnp.zeros_like(resolution) if self.lower is None else self.lower
        largest = values[jnp.argmax(jnp.abs(values))]
        is_close = jnp.abs(values - end) <= HIDDEN * resolution * jnp.abs(largest)
        values = jnp.where(is_close & self.is_finite(end), end, values)
        is_bad = jnp.where(is_close, ~self.is_finite(end), ~self.is_finite(values))
        rounding = _ROUNDING * jnp.finfo(weights.dtype).eps * largest_entry(weights)
        has_weight = jnp.any(jnp.abs(weights) > rounding, axis=1)
        return jnp.where(is_bad & ~has_weight, largest, values)

    def is_finite(self, points: Float[Array, "*p"]) -> Bool[Array, "*p"]:
        return jnp.isfinite(self.fn(points)[0])

    def ritz_pairs(self, x: Inexact[Array, " n"]) -> RitzPairs:
        # For a zero vector we need values in A's range, so we start with signs instead.
        is_zero = ~jnp.any(x)
        start = jnp.where(is_zero, hashed_signs(1, len(x), x.dtype, 0)[0], x)
        product = ft.partial(apply_block, self.operator)
        krylov = lanczos(product, start[:, None], self.num_steps)
        norms = jnp.where(is_zero, 0, krylov.norms)
        pairs = krylov._replace(norms=norms).ritz_pairs()
        values = self.points(pairs.values, krylov.asymmetry, pairs.probes)
        return eqx.tree_at(lambda x: x.values, pairs, values)

    @property
    def is_truncated(self):
        return self.num_steps < space_of(self.operator).size

    def truncation(self):
        """Extrapolates errors from products after fewer steps.

        The last step changes a product by d, and each step shrinks changes by a factor
        q, which we take from the last two thirds. Further changes add up to
        `d q / (1 - q)`. We allow for twice this error, at most `d / (1 - q)`. One step
        shows no change, so its error is unknown.
        """
        op = without_derivatives(self)
        space, most = space_of(op.operator), self.num_steps
        signs = hashed_signs(_TESTS, space.size, space.compute_dtype, 0).T
        krylov = lanczos(ft.partial(apply_block, op.operator), signs, most)

        def products(steps):
            """Coordinates of `f(A) w` for each unit vector w."""

            def product(T):
                values, S = eigh(T[:steps, :steps])
                f = op.fn(op.points(values, krylov.asymmetry, S[0, :, None]))[0]
                S = S.astype(f.dtype)
                return jnp.pad(matmul(S, f * S[0]), (0, most - steps))

            return jax.vmap(product)(krylov.projected)

        third = max(most // 3, 1)
        last = products(most)
        earlier, second, first = (
            products(steps) if steps > 0 else jnp.zeros_like(last)
            for steps in (most - 1, most - third, most - 2 * third)
        )
        changes = last - earlier, last - second, second - first
        length = jnp.mean(column_norms(last.T))
        rounding = 16 * jnp.finfo(length.dtype).eps * length

        def error(size):
            d, b, a = (jnp.mean(size(x)) for x in changes)
            q = jnp.clip((b / divisor(a)) ** (1 / third), 0, _SLOWEST)
            if most == 1:
                return jnp.full_like(d, jnp.inf)
            return jnp.where(b > rounding, d * jnp.minimum(2 * q, 1) / (1 - q), 0)

        in_products = error(lambda x: column_norms(x.T))
        in_forms = error(lambda x: jnp.abs(x[:, 0]))
        return Truncation(ratio(in_products, length), in_forms)


def _combine(pairs: RitzPairs, f: Inexact[Array, "s q"]) -> Inexact[Array, "n q"]:
    """`V f c` for q functions, given the values f at theta."""
    weights = f.astype(pairs.basis.dtype) * pairs.probes
    return combine(pairs.basis, matmul(pairs.vectors, weights))


def _linear(op: Any, forward: Callable, functions: Callable, X: Array) -> Array:
    """The vector `forward(X)`; its transpose maps y to `g_j(A)^T y` for all j."""

    def solve(_, X):
        # JAX wants a solution shaped like X, so we put the result in its first column.
        return jnp.zeros_like(X).at[:, 0].set(forward(X))

    def transpose(_, Y):
        # A is Hermitian, so `g(A)^T y = conj(conj(g)(A) conj(y))`.
        pairs = op.ritz_pairs(Y[:, 0].conj())
        return _combine(pairs, functions(pairs.values).conj()).conj()

    # The system is the identity: we only need JAX's custom transpose for linear solves.
    return jax.lax.custom_linear_solve(lambda X: X, X, solve, transpose)[:, 0]


@eqx.filter_custom_jvp
def _product(op: MatrixFunctionLinearOperator, x: Inexact[Array, " n"]) -> Array:
    """`f(A) x`, linear in x."""

    def f(points):
        return op.fn(points)[0][:, None]

    def forward(X):
        pairs = op.ritz_pairs(X[:, 0])
        return _combine(pairs, f(pairs.values))[:, 0]

    return _linear(op, forward, f, x[:, None])


@_product.def_jvp
def _product_jvp(primals, tangents):
    (op, x), (t_op, t_x) = primals, tangents
    y = _product(op, x)
    t_y = jnp.zeros_like(y) if t_x is None else _product(op, t_x)
    if not jtu.tree_leaves(t_op):
        return y, t_y
    op, x = final((op, x))
    pairs = op.ritz_pairs(x)
    if jtu.tree_leaves(t_op.fn):
        _, t_f = eqx.filter_jvp(lambda f: f(pairs.values)[0], (op.fn,), (t_op.fn,))
        t_y += _combine(pairs, t_f[:, None])[:, 0]
    W = product_tangent(op.operator, t_op.operator, pairs.ritz_vectors)
    return y, t_y if W is None else t_y + _frechet(op, pairs, W)


def _frechet(
    op: MatrixFunctionLinearOperator, pairs: RitzPairs, W: Inexact[Array, "n s"]
) -> Inexact[Array, " n"]:
    """`L(A, dA) x`, linear in `W = dA V`.

    For `M = [[A, W], [0, diag(theta)]]`, f(M) maps `(0, c)` to
    `(L(A, dA) x, f(theta) c)` (Mathias 1996, doi:10.1137/S0895479895283409). We project
    A to G, the span of the upper halves in the Krylov space of M and `(0, c)`.
    """
    (n, s), c, theta = W.shape, pairs.probes, pairs.values

    def functions(points):
        g = divided_differences(op.fn, points, theta)[0]
        return g.astype(c.dtype) * c.T

    def forward(W):
        # The result is linear in W, so we scale W freely in M.
        unit = divisor(largest_entry(W)) / divisor(largest_entry(theta))

        def product(z):
            above = apply_block(op.operator, z[:n])
            above += combine(W / unit.astype(W.dtype), z[n:])
            return jnp.concatenate([above, theta[:, None].astype(W.dtype) * z[n:]])

        start = jnp.pad(c, ((n, 0), (0, 0)))
        krylov = arnoldi(product, start, min(2 * s, n) + 1).basis
        G, _ = orthonormalise(krylov[:n, 1:])
        T = inner(G, apply_block(op.operator, G))
        values, vectors = eigh((T + T.conj().T) / 2)
        G = combine(G, vectors)
        weights = inner(G, W)
        g = functions(op.points(values, jnp.zeros_like(values[0]), weights))
        return combine(G, jnp.sum(g * weights, axis=1)[:, None])[:, 0]

    return _linear(op, forward, functions, W)
