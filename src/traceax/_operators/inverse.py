"""The inverse of an operator as an operator."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Int, PyTree

from .._arguments import require
from .._linalg.tall import column_norms
from .block import Dense, apply_block, as_data, is_hermitian, is_known, parts_of
from .check import checked_operator
from .entries import parts, unit_vectors

_WHERE = "traceax.InverseLinearOperator"


class InverseLinearOperator(Dense):
    r"""The operator `A^-1`, applied by `lineax.linear_solve`.

    ```python
    inverse = traceax.InverseLinearOperator(operator, lx.CG(rtol=1e-6, atol=1e-6))
    ```

    A product is a solve, NaN if it fails: a budget of k is k solves. Differentiable to any
    order. It is semidefinite, symmetric, diagonal or triangular where A is.

    The error bar of an exact answer holds what the solver leaves, by residuals, which take
    products with A; it is unknown where a solver that iterates is within a product of
    operators, or in several terms of a sum.

    **Arguments:**

    - `operator`: a square, nonsingular lineax operator.
    - `solver`, `options`: as in `lineax.linear_solve`.
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
        right = isinstance(solver, lx.AbstractLinearSolver)
        hint = "pass lineax.CG(rtol=1e-6, atol=1e-6), for example"
        what = "solver must be a lineax solver"
        require(right, _WHERE, what, solver, hint, TypeError)
        self.operator, self.solver = as_data(operator), solver
        self.options = {} if options is None else options

    def mv(self, vector):
        solution = lx.linear_solve(
            self.operator, vector, self.solver, options=self.options, throw=False
        )
        failed = solution.result != lx.RESULTS.successful
        return jtu.tree_map(lambda x: jnp.where(failed, jnp.nan, x), solution.value)

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        return eqx.tree_at(lambda x: x.operator, self, self.operator.transpose())

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()

    def _knows(self, check):
        # An inverse need not share the others.
        inherited = check not in (lx.is_tridiagonal, lx.has_unit_diagonal)
        return inherited and is_known(check, self.operator)

    def _conj(self):
        return eqx.tree_at(lambda x: x.operator, self, lx.conj(self.operator))


_ITERATIVE = lx.CG, lx.BiCGStab, lx.GMRES, lx.LSMR
# Of other solvers, which iterate, nothing is known but by their residuals.
_DIRECT = (
    *(lx.Cholesky, lx.Diagonal, lx.LU, lx.QR, lx.SVD, lx.Triangular, lx.Tridiagonal),
    lx.AutoLinearSolver,
)


class SolveErrors(NamedTuple):
    """What solves make of the diagonal of an operator, and of each of its columns."""

    diagonal: Float[Array, " n"]
    columns: Float[Array, " n"]


class Solves(NamedTuple):
    """Solutions x of `A x = e_j`, with residuals r: a scalar each, or one a column."""

    residuals: Float[Array, "..."]  # |r|
    sizes: Float[Array, "..."]  # |x|
    forms: Float[Array, "..."]  # |x^* r|; infinite where A isn't Hermitian


def solve_of_column(
    operator: lx.AbstractLinearOperator, column: Inexact[Array, " n"], j: Int[Array, ""]
) -> Solves | None:
    """The solve that column j is made of; `None` if none iterated, infinite if unknown."""
    if solver_tolerance(operator) is None:
        return None
    column = jax.lax.stop_gradient(column)
    unit = unit_vectors(j, operator.in_size(), 1, column.dtype)[:, 0]

    def product(operator, x):
        return apply_block(operator, x[:, None])[:, 0]

    if isinstance(operator, InverseLinearOperator):
        A = operator.operator
        r = unit - product(A, column)
        vectors = r, column, product(A, unit)
        residual, size, size_of_A = (column_norms(x[:, None])[0] for x in vectors)
        rounding = jnp.finfo(size.dtype).eps * size_of_A * size
        form = jnp.abs(jnp.vdot(column, r)) if is_hermitian(A) else jnp.inf
        return Solves(residual + rounding, size, form + rounding * size)
    found = parts(operator)
    solved = [x for x in found if solver_tolerance(x.operator) is not None]
    if len(solved) == 1 and solved[0].operator is not operator:
        (term,) = solved
        for x in found:
            if x is not term:
                column = column - x.times(product(x.operator, unit)).astype(unit.dtype)
        factor = jnp.asarray(term.times(1.0)).astype(unit.dtype)
        inside = solve_of_column(term.operator, column / factor, j)
        if inside is None:
            return None
        size = jnp.abs(factor)
        return Solves(inside.residuals, size * inside.sizes, size * inside.forms)
    unknown = jnp.full((), jnp.inf, jnp.finfo(column.dtype).dtype)
    return Solves(unknown, unknown, unknown)


def errors_of_solves(solves: Solves) -> SolveErrors:
    """The errors of all columns of an inverse.

    With `R = I - A X` the error of a solve is `A^-1 R`, and A^-1 is `X (I - R)^-1`. Of a
    Hermitian A the error of entry i of the diagonal is `x_i^* r_i + r_i^* A^-1 r_i`.
    """
    residuals, sizes, forms = solves
    total = jnp.linalg.norm(residuals)
    size = jnp.linalg.norm(sizes) / jnp.maximum(1 - total, 0)
    columns = size * residuals
    return SolveErrors(jnp.minimum(forms + size * residuals**2, columns), columns)


def solver_tolerance(operator: lx.AbstractLinearOperator) -> ArrayLike | None:
    """The largest relative tolerance of solvers that iterate; `None` without such."""
    solvers = [x.solver for x in parts_of(operator, InverseLinearOperator)]
    iterating = [x for x in solvers if not isinstance(x, _DIRECT)]
    if not iterating:
        return None
    return max((x.rtol for x in iterating if isinstance(x, _ITERATIVE)), default=0.0)
