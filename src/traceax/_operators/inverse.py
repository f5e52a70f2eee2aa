"""The inverse of an operator as an operator."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, Inexact, PyTree

from .._arguments import kind_of
from .._linalg.small import frobenius
from .._linalg.tall import column_dots, column_norms
from .block import Dense, apply_block, as_function, is_hermitian, is_known, register
from .check import ComplexLinearOperator, checked_operator
from .shifted import ShiftedLinearOperator

_WHERE = "traceax.InverseLinearOperator"


class InverseLinearOperator(Dense):
    r"""The operator `A^-1`, applied by `lineax.linear_solve`.

    ```python
    inverse = traceax.InverseLinearOperator(operator, lx.CG(rtol=1e-6, atol=1e-6))
    traceax.trace(key, inverse, 40)
    ```

    A product is a solve: a budget of k is k solves. Differentiable to any order. It is
    semidefinite, symmetric, diagonal or triangular where A is.

    The error bar of an exact answer holds what the solver leaves, by residuals, which take
    products with A; it is unknown where a solver that iterates is within a product of
    operators, or in several terms of a sum.

    Where a solve fails, what comes out is NaN, and the `result` of an estimate is
    `traceax.RESULTS.nonfinite`.

    **Arguments:**

    - `operator`: a square, nonsingular lineax operator.
    - `solver`: a lineax solver.
    - `options`: for the solver, as in `lineax.linear_solve`.

    **Raises:**

    - `TypeError` and `ValueError` as [`traceax.trace`][] does for a wrong operator;
        `TypeError` if `solver` isn't a lineax solver.
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
        operator = checked_operator(operator, _WHERE, "(operator, solver)")
        if not isinstance(solver, lx.AbstractLinearSolver):
            raise TypeError(
                f"{_WHERE}: solver must be a lineax solver, got {kind_of(solver)}; pass "
                "lineax.CG(rtol=1e-6, atol=1e-6), for example."
            )
        self.operator, self.solver = operator, solver
        self.options = {} if options is None else options

    def mv(self, vector):
        solution = lx.linear_solve(
            self.operator, vector, self.solver, options=self.options, throw=False
        )
        failed = solution.result != lx.RESULTS.successful
        return jtu.tree_map(lambda x: jnp.where(failed, jnp.nan, x), solution.value)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        return as_function(self).as_matrix()

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        inner = self.operator.transpose()
        return InverseLinearOperator(inner, self.solver, self.options)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()


# Of other solvers, which iterate, nothing is known but by their residuals.
_DIRECT = (
    lx.AutoLinearSolver,
    lx.Cholesky,
    lx.Diagonal,
    lx.LU,
    lx.QR,
    lx.SVD,
    lx.Triangular,
    lx.Tridiagonal,
)


class SolveErrors(NamedTuple):
    """What solves make of the diagonal of an operator, and of each of its columns."""

    diagonal: Float[Array, " n"]
    columns: Float[Array, " n"]


def solve_errors(
    operator: lx.AbstractLinearOperator, products: Inexact[Array, "n n"]
) -> SolveErrors | None:
    """The errors of the products with the identity; `None` if no solver made them.

    With the residual `R = I - A X` the error of a solve is `A^-1 R`, and A^-1 is
    `X (I - R)^-1`. Of a Hermitian A the error of entry i of the diagonal is
    `x_i^* r_i + r_i^* A^-1 r_i`. Residuals take products with A, but no solve. Infinite
    where a solver that iterates is inside of a product, or of a sum of several.
    """
    match operator:
        case InverseLinearOperator():
            return _residual_errors(operator.operator, products)
        case lx.TaggedLinearOperator() | ComplexLinearOperator():
            return solve_errors(operator.operator, products)
        case lx.NegLinearOperator():
            return solve_errors(operator.operator, -products)
        case lx.MulLinearOperator() | lx.DivLinearOperator():
            scalar = jnp.asarray(operator.scalar).astype(products.dtype)
            scalar = (
                1 / scalar if isinstance(operator, lx.DivLinearOperator) else scalar
            )
            inside = solve_errors(operator.operator, products / scalar)
            return jtu.tree_map(lambda x: jnp.abs(scalar) * x, inside)
        case ShiftedLinearOperator():
            shift = operator.shift.astype(products.dtype)
            identity = jnp.eye(len(products), dtype=products.dtype)
            return solve_errors(operator.operator, products - shift * identity)
        case lx.AddLinearOperator():
            parts = operator.operator1, operator.operator2
            solved = [x for x in parts if has_iterations(x)]
            if len(solved) == 1:
                other = parts[0] if solved[0] is parts[1] else parts[1]
                identity = jnp.eye(len(products), dtype=products.dtype)
                return solve_errors(solved[0], products - apply_block(other, identity))
    if not has_iterations(operator):
        return None
    unknown = jnp.full_like(jnp.real(products[0]), jnp.inf)
    return SolveErrors(unknown, unknown)


def has_iterations(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a solver that iterates is a part of an operator."""

    def is_inverse(x):
        return isinstance(x, InverseLinearOperator)

    parts = jtu.tree_leaves(operator, is_leaf=is_inverse)
    return any(is_inverse(x) and not isinstance(x.solver, _DIRECT) for x in parts)


def _residual_errors(
    A: lx.AbstractLinearOperator, X: Inexact[Array, "n n"]
) -> SolveErrors:
    X = jax.lax.stop_gradient(X)
    R = jnp.eye(len(X), dtype=X.dtype) - apply_block(A, X)
    lengths = column_norms(R)
    # At most; a residual as large as the right-hand side says nothing.
    total = frobenius(R)
    size = frobenius(X) / jnp.maximum(1 - total, 0)
    columns = size * lengths
    if not is_hermitian(A):
        return SolveErrors(columns, columns)
    return SolveErrors(jnp.abs(column_dots(X, R)) + size * lengths**2, columns)


def _known(check, operator: InverseLinearOperator) -> bool:
    # An inverse need not share the others.
    inherited = check not in (lx.is_tridiagonal, lx.has_unit_diagonal)
    return inherited and is_known(check, operator.operator)


def _conj(operator: InverseLinearOperator) -> InverseLinearOperator:
    inner = lx.conj(operator.operator)
    return InverseLinearOperator(inner, operator.solver, operator.options)


register(InverseLinearOperator, _known, _conj)
