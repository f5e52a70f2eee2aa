"""The solvers that an operator contains, and the error that they leave."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, PyTree

_ITERATIVE = lx.CG, lx.BiCGStab, lx.GMRES, lx.LSMR
_DIRECT = (
    *(lx.Cholesky, lx.Diagonal, lx.LU, lx.QR, lx.SVD, lx.Triangular, lx.Tridiagonal),
    lx.AutoLinearSolver,
)


def inexact_solvers(tree: PyTree[Any]) -> list[lx.AbstractLinearSolver]:
    """The solvers in a PyTree that aren't known to be direct."""

    def is_solver(x):  # `lineax.Normal` contains another one
        return isinstance(x, lx.AbstractLinearSolver) and not isinstance(x, lx.Normal)

    found = jtu.tree_leaves(tree, is_leaf=is_solver)
    return [x for x in found if is_solver(x) and not isinstance(x, _DIRECT)]


def solver_tolerance(tree: PyTree[Any], dtype: Any) -> Float[Array, ""] | None:
    """The largest relative tolerance of the iterative solvers in a PyTree, or `None`.

    Infinite for a fixed number of steps. A custom solver counts as 0: only its residuals,
    which exact answers measure, show an error.
    """

    def tolerance(solver):
        if not isinstance(solver, _ITERATIVE):
            return jnp.zeros((), dtype)
        # An absolute tolerance is relative to entries of size 1, as probes have.
        given = (jnp.asarray(x).astype(dtype) for x in (solver.rtol, solver.atol))
        larger = jnp.maximum(*given)
        return jnp.where(larger == 0, jnp.inf, larger)

    found = [tolerance(solver) for solver in inexact_solvers(tree)]
    return jax.lax.stop_gradient(ft.reduce(jnp.maximum, found)) if found else None
