"""f(A) and the inverse of A as linear operators."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.flatten_util as jfu
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from ._frechet import (
    constant_in,
    frechet,
    lanczos_blocks,
    not_again,
    product_tangent,
)
from ._krylov import arnoldi, lanczos
from ._leaves import with_array_leaves
from ._operator import (
    apply_block,
    check_operator,
    is_hermitian,
    is_known,
    is_symmetric,
    space_of,
)
from ._orthogonal import combine
from ._spectral_function import SpectralFunction, spectral_function
from ._stream import without_numpy


class MatrixFunctionLinearOperator(lx.AbstractLinearOperator):
    r"""The operator `f(A)`, applied by a Krylov space of the vector.

    ```python
    square_root = traceax.MatrixFunctionLinearOperator(operator, jnp.sqrt, 30)
    traceax.trace(key, square_root, 40)
    ```

    A product takes `num_steps` products with A. It is exact for polynomials of degree
    below that, and for a space that stops growing.

    *Symmetric and Hermitian operators* take Lanczos. They are those tagged symmetric
    (real) or semidefinite (real or complex). The product is differentiable once with
    respect to A, and to what `fn` closes over, and to any order with respect to the
    vector. Other operators take Arnoldi and a small nonsymmetric eigendecomposition,
    which JAX has on CPUs, and are differentiable with respect to the vector alone, in
    forward mode.

    O(n s^2) time beyond the products, and s vectors of memory.

    **Arguments:**

    - `operator`: a square lineax operator, over arrays or PyTrees.
    - `fn`: a function of a scalar; of a complex one for an operator that isn't
        Hermitian.
    - `num_steps`: s, a positive int; more than n are not used.
    - `tags`: what is known of f(A), such as `lineax.positive_semidefinite_tag`.

    **Raises:** `TypeError` and `ValueError` as [`traceax.trace_function`][] does.
    """

    operator: lx.AbstractLinearOperator
    fn: SpectralFunction
    num_steps: int = eqx.field(static=True)
    tags: frozenset[object] = eqx.field(static=True)

    def __init__(
        self,
        operator: lx.AbstractLinearOperator,
        fn: Callable,
        num_steps: int,
        tags: object = (),
    ):
        where = "traceax.MatrixFunctionLinearOperator"
        space = check_operator(operator, where)
        num_steps = without_numpy(num_steps)
        if isinstance(num_steps, bool) or not isinstance(num_steps, int):
            raise TypeError(
                f"{where}: num_steps must be an int, got {num_steps!r} of type "
                f"{type(num_steps).__name__}."
            )
        if num_steps < 1:
            raise ValueError(f"{where}: num_steps must be at least 1, got {num_steps}.")
        self.operator = with_array_leaves(operator)
        self.fn = spectral_function(fn, space.real_dtype, where)
        if len(self.fn(jnp.ones((), space.real_dtype))) != 1:
            raise ValueError(f"{where}: fn must return one scalar, not several.")
        self.num_steps = min(num_steps, space.size)
        tags = tags if isinstance(tags, set | frozenset | tuple | list) else (tags,)
        self.tags = frozenset(tags)

    def mv(self, vector):
        space = space_of(self.operator)
        flat, unravel = jfu.ravel_pytree(vector)
        x = flat.astype(space.compute_dtype)
        if is_hermitian(self.operator):
            y = _apply(self.operator, self.fn, x, self.num_steps)
        else:
            y = _apply_general(self.operator, self.fn, x, self.num_steps)
        return unravel(y.astype(flat.dtype))

    def as_matrix(self):
        return _dense(self)

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        if is_symmetric(self.operator) or not is_hermitian(self.operator):
            inner = self.operator.transpose()
        else:
            inner = lx.conj(self.operator)
        return MatrixFunctionLinearOperator(
            inner, self.fn.fn, self.num_steps, self.tags
        )

    def in_structure(self):
        return self.operator.in_structure()

    def out_structure(self):
        return self.operator.out_structure()


def _dense(operator) -> Inexact[Array, "n n"]:
    space = space_of(operator)
    identity = jnp.eye(space.size, dtype=space.compute_dtype)
    return apply_block(operator, identity).astype(space.dtype)


def _spaces(operator, x, steps):
    krylov = lanczos(lambda X: apply_block(operator, X), x[:, None], steps)
    return lanczos_blocks(krylov)


def _product(operator, function, x, steps) -> Inexact[Array, " n"]:
    blocks = _spaces(operator, x, steps)
    (f,) = function(blocks.values)
    return combine(blocks.basis, f[:, None].astype(x.dtype) * blocks.probes)[:, 0]


def _linear_product(operator, function, x, steps) -> Inexact[Array, " n"]:
    """`f(A) x`, linear in x for JAX."""

    def forward(_, x):
        return _product(operator, function, x, steps)

    def backward(_, y):
        return _product(operator, function, y.conj(), steps).conj()

    # Nothing is solved: the identity that stands for the system is never applied.
    product = jax.lax.custom_linear_solve(lambda x: x, x, forward, backward)
    # Its derivative with respect to A would be lost.
    return product + constant_in((operator, function), jnp.zeros((), x.dtype))


@eqx.filter_custom_jvp
def _apply(operator, function, x, steps) -> Inexact[Array, " n"]:
    return _linear_product(operator, function, x, steps)


@_apply.def_jvp
def _apply_jvp(primals, tangents):
    operator, function, x, steps = primals
    t_operator, t_function, t_x, _ = tangents
    y = _apply(operator, function, x, steps)
    t_y = jnp.zeros_like(y)
    if t_x is not None:
        t_y = t_y + _linear_product(operator, function, t_x, steps)
    if not jtu.tree_leaves((t_operator, t_function)):
        return y, t_y
    operator, function, x = not_again((operator, function, x))
    blocks = _spaces(operator, x, steps)
    if jtu.tree_leaves(t_function):

        def of(fn):
            (f,) = fn(blocks.values)
            inside = f[:, None].astype(x.dtype) * blocks.probes
            return combine(blocks.basis, inside)[:, 0]

        t_y = t_y + eqx.filter_jvp(of, (function,), (t_function,))[1]
    W = None
    if jtu.tree_leaves(t_operator):
        W = product_tangent(operator, t_operator, blocks.basis)
    if W is not None:
        (image,) = frechet(operator, function, blocks, W)
        # `L(A, dA) V D` with D = c c^*, of which c is the vector's coordinates.
        c = blocks.probes
        squared = jnp.sum(jnp.abs(c) ** 2)
        c = c / jnp.where(squared == 0, 1, squared).astype(c.dtype)
        t_y = t_y + combine(image, c)[:, 0]
    return y, t_y


def _apply_general(operator, function, x, steps) -> Inexact[Array, " n"]:
    operator, function = not_again((operator, function))

    def forward(_, x):
        K, H, _ = arnoldi(
            lambda X: apply_block(operator, X), x[:, None], steps, hermitian=False
        )
        values, vectors = jnp.linalg.eig(H)
        (f,) = jtu.tree_leaves(jax.vmap(function.fn)(values))
        start = jnp.vdot(K[:, 0], x).astype(vectors.dtype)
        start = start * jnp.eye(steps, 1, dtype=vectors.dtype)
        inside = vectors @ (
            f[:, None].astype(vectors.dtype) * jnp.linalg.solve(vectors, start)
        )
        y = K.astype(inside.dtype) @ inside
        return (y if jnp.iscomplexobj(x) else jnp.real(y)).astype(x.dtype)[:, 0]

    return jax.lax.custom_linear_solve(lambda x: x, x, forward)


class InverseLinearOperator(lx.AbstractLinearOperator):
    r"""The operator `A^-1`, applied by `lineax.linear_solve`.

    ```python
    inverse = traceax.InverseLinearOperator(operator, lx.CG(rtol=1e-6, atol=1e-6))
    traceax.trace(key, inverse, 40)
    ```

    A product is a solve: a budget of k is k solves. Differentiable to any order. It is
    semidefinite or symmetric where A is.

    Where a solve fails, what comes out is NaN, and the `result` of an estimate is
    `traceax.RESULTS.solver_failed`.

    **Arguments:**

    - `operator`: a square, nonsingular lineax operator.
    - `solver`: a lineax solver.
    - `options`: for the solver, as in `lineax.linear_solve`.
    """

    operator: lx.AbstractLinearOperator
    solver: lx.AbstractLinearSolver
    options: dict[str, Any]

    def __init__(
        self,
        operator: lx.AbstractLinearOperator,
        solver: lx.AbstractLinearSolver,
        options: dict[str, Any] | None = None,
    ):
        where = "traceax.InverseLinearOperator"
        check_operator(operator, where)
        if not isinstance(solver, lx.AbstractLinearSolver):
            raise TypeError(
                f"{where}: solver must be a lineax solver, got {solver!r}; pass "
                "lineax.CG(rtol=1e-6, atol=1e-6), for example."
            )
        self.operator, self.solver = operator, solver
        self.options = {} if options is None else options

    def mv(self, vector):
        solution = lx.linear_solve(
            self.operator, vector, self.solver, options=self.options, throw=False
        )
        failed = solution.result != lx.RESULTS.successful
        return jtu.tree_map(
            lambda x: jnp.where(failed, jnp.full_like(x, jnp.nan), x), solution.value
        )

    def as_matrix(self):
        return _dense(self)

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        return InverseLinearOperator(
            self.operator.transpose(), self.solver, self.options
        )

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.out_structure()

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()


#
# What lineax asks of an operator
#


_KEPT = {
    lx.is_symmetric: lx.symmetric_tag,
    lx.is_diagonal: lx.diagonal_tag,
    lx.is_lower_triangular: lx.lower_triangular_tag,
    lx.is_upper_triangular: lx.upper_triangular_tag,
    lx.is_positive_semidefinite: lx.positive_semidefinite_tag,
    lx.is_negative_semidefinite: lx.negative_semidefinite_tag,
}


def _materialised(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    tags = [tag for check, tag in _KEPT.items() if is_known(check, operator)]
    structure = operator.in_structure()
    return lx.materialise(lx.FunctionLinearOperator(operator.mv, structure, tags))


def _register():
    both = (MatrixFunctionLinearOperator, InverseLinearOperator)

    for cls in both:
        lx.linearise.register(cls, lambda operator: operator)
        lx.materialise.register(cls, _materialised)
        lx.diagonal.register(cls, lambda operator: lx.diagonal(_materialised(operator)))
        lx.tridiagonal.register(
            cls, lambda operator: lx.tridiagonal(_materialised(operator))
        )
        for check in (lx.has_unit_diagonal, lx.is_tridiagonal):
            check.register(cls, lambda operator: False)

    @lx.conj.register(MatrixFunctionLinearOperator)
    def _(operator):
        if not space_of(operator.operator).is_complex:
            return operator
        return MatrixFunctionLinearOperator(
            lx.conj(operator.operator),
            operator.fn.fn,
            operator.num_steps,
            operator.tags,
        )

    @lx.conj.register(InverseLinearOperator)
    def _(operator):
        if not space_of(operator.operator).is_complex:
            return operator
        inner = lx.conj(operator.operator)
        return InverseLinearOperator(inner, operator.solver, operator.options)

    signs = (lx.is_positive_semidefinite, lx.is_negative_semidefinite)
    for check, tag in _KEPT.items():
        # The inverse is what the operator is; a function keeps the structure, and
        # has the sign that it is tagged with.

        def of_inverse(operator, check=check):
            return is_known(check, operator.operator)

        def of_function(operator, check=check, tag=tag):
            inherited = check not in signs and is_known(check, operator.operator)
            return tag in operator.tags or inherited

        check.register(InverseLinearOperator, of_inverse)
        check.register(MatrixFunctionLinearOperator, of_function)


_register()
