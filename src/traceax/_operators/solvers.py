"""The solvers that an operator contains, and the error that they leave."""

import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax.typing import DTypeLike
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


def solver_tolerances(tree: PyTree[Any]) -> list[ArrayLike]:
    """Relative tolerances of the solvers in a PyTree that aren't known to be direct.

    Infinite for a fixed number of steps. A custom solver counts as 0: only its residuals,
    which exact answers measure, show an error.
    """
    kinds = lx.AbstractLinearSolver | lx.FunctionLinearOperator | SolverTag

    def is_found(x):  # `lineax.Normal` contains another solver
        return isinstance(x, kinds) and not isinstance(x, lx.Normal)

    found = []
    for x in jtu.tree_leaves(tree, is_leaf=is_found):
        if isinstance(x, lx.FunctionLinearOperator):
            found += [tag.tolerance for tag in x.tags if isinstance(tag, SolverTag)]
        elif isinstance(x, SolverTag):
            found.append(x.tolerance)
        elif isinstance(x, _ITERATIVE):
            # An absolute tolerance is relative to entries of size 1, as probes have.
            given = x.rtol, x.atol
            known = all(isinstance(y, int | float) for y in given)
            found.append((max(given) or math.inf) if known else jnp.maximum(*given))
        elif is_found(x) and not isinstance(x, _DIRECT):
            found.append(0.0)
    return found


def solver_tags(tree: PyTree[Any]) -> frozenset[object]:
    """The tag of a function whose products take the solvers in a PyTree, if there are any."""
    found = solver_tolerances(tree)
    known = [x if isinstance(x, int | float) else math.inf for x in found]
    return frozenset([SolverTag(max(known))] if known else [])


def solver_tolerance(tree: PyTree[Any], dtype: DTypeLike) -> Float[Array, ""] | None:
    """The largest of the `solver_tolerances` in a PyTree; `None` without solvers."""
    found = [jnp.asarray(x).astype(dtype) for x in solver_tolerances(tree)]
    return jax.lax.stop_gradient(ft.reduce(jnp.maximum, found)) if found else None
