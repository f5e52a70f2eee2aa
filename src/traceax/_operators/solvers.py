"""The solvers that an operator contains, and the error that they leave."""

import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, PyTree

_ITERATIVE = lx.CG, lx.BiCGStab, lx.GMRES, lx.LSMR
_DIRECT = (
    *(lx.Cholesky, lx.Diagonal, lx.LU, lx.QR, lx.SVD, lx.Triangular, lx.Tridiagonal),
    lx.AutoLinearSolver,
)


class SolverTag(eqx.Module):
    """A tag of functions, and a part of operators, whose products take inexact solves."""

    tolerance: float = eqx.field(static=True)


@lx.transpose_tags_rules.append
def _(tags):
    return next((x for x in tags if isinstance(x, SolverTag)), None)


def inexact_solvers(tree: PyTree[Any]) -> list[Any]:
    """The solvers in a PyTree that aren't known to be direct, and tags in place of such."""
    kinds = lx.AbstractLinearSolver | lx.FunctionLinearOperator | SolverTag

    def is_found(x):  # `lineax.Normal` contains another solver
        return isinstance(x, kinds) and not isinstance(x, lx.Normal)

    found = []
    for x in jtu.tree_leaves(tree, is_leaf=is_found):
        is_function = isinstance(x, lx.FunctionLinearOperator)
        found += [tag for tag in x.tags if is_found(tag)] if is_function else [x]
    return [x for x in found if is_found(x) and not isinstance(x, _DIRECT)]


def _tolerance(solver: Any) -> ArrayLike:
    if isinstance(solver, SolverTag):
        return solver.tolerance
    if not isinstance(solver, _ITERATIVE):
        return 0.0
    # An absolute tolerance is relative to entries of size 1, as probes have.
    given = solver.rtol, solver.atol
    if all(isinstance(x, int | float) for x in given):
        return float(max(given)) or math.inf
    return jnp.maximum(*given)


def solver_tags(tree: PyTree[Any]) -> frozenset[object]:
    """The tag of a function whose products take the solvers in a PyTree, if there are any."""
    found = [_tolerance(x) for x in inexact_solvers(tree)]
    known = [x if isinstance(x, float) else math.inf for x in found]
    return frozenset([SolverTag(max(known))] if known else [])


def solver_tolerance(tree: PyTree[Any], dtype: Any) -> Float[Array, ""] | None:
    """The largest relative tolerance of the iterative solvers in a PyTree, or `None`.

    Infinite for a fixed number of steps. A custom solver counts as 0: only its residuals,
    which exact answers measure, show an error.
    """
    found = [jnp.asarray(_tolerance(x)).astype(dtype) for x in inexact_solvers(tree)]
    return jax.lax.stop_gradient(ft.reduce(jnp.maximum, found)) if found else None
