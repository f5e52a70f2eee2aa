"""The inverse of an operator as an operator."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from .._arguments import kind_of
from .block import Dense, as_data, as_function, is_known, register
from .check import checked_operator

_WHERE = "traceax.InverseLinearOperator"


class InverseLinearOperator(Dense):
    r"""The operator `A^-1`, applied by `lineax.linear_solve`.

    ```python
    inverse = traceax.InverseLinearOperator(operator, lx.CG(rtol=1e-6, atol=1e-6))
    traceax.trace(key, inverse, 40)
    ```

    A product is a solve: a budget of k is k solves. Differentiable to any order. It is
    semidefinite, symmetric, diagonal or triangular where A is.

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
        self.operator, self.solver = as_data(operator), solver
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


def _known(check, operator: InverseLinearOperator) -> bool:
    # An inverse need not share the others.
    inherited = check not in (lx.is_tridiagonal, lx.has_unit_diagonal)
    return inherited and is_known(check, operator.operator)


def _conj(operator: InverseLinearOperator) -> InverseLinearOperator:
    inner = lx.conj(operator.operator)
    return InverseLinearOperator(inner, operator.solver, operator.options)


register(InverseLinearOperator, _known, _conj)
