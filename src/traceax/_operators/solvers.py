"""Solvers inside an operator, and their tolerances."""

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
    """A tag for functions, and a part of operators, with inexact solves in products."""

    tolerance: float = eqx.field(static=True)


@lx.transpose_tags_rules.append
def _(tags):
    return next((x for x in tags if isinstance(x, SolverTag)), None)


def solver_tolerances(tree: PyTree[Any]) -> list[ArrayLike]:
    """Relative tolerances of the solvers in a PyTree that aren't known to be direct.

    A solver with a fixed step count counts as infinite. A custom solver counts as 0:
    only residuals, which exact answers measure, show its error.
    """
    kinds = lx.AbstractLinearSolver | lx.FunctionLinearOperator | SolverTag

    def is_candidate(x):  # `lineax.Normal` contains another solver
        return isinstance(x, kinds) and not isinstance(x, lx.Normal)

    sizes = []
    for x in jtu.tree_leaves(tree, is_leaf=is_candidate):
        if isinstance(x, lx.FunctionLinearOperator):
            sizes += [tag.tolerance for tag in x.tags if isinstance(tag, SolverTag)]
        elif isinstance(x, SolverTag):
            sizes.append(x.tolerance)
        elif isinstance(x, _ITERATIVE):
            # We count absolute tolerances as relative: probes have unit entries.
            pair = x.rtol, x.atol
            known = all(isinstance(y, int | float) for y in pair)
            sizes.append((max(pair) or math.inf) if known else jnp.maximum(*pair))
        elif is_candidate(x) and not isinstance(x, _DIRECT):
            sizes.append(0.0)
    return sizes


def solver_tags(tree: PyTree[Any]) -> frozenset[object]:
    """The tag for a function whose products use the solvers in a PyTree, if any."""
    tolerances = solver_tolerances(tree)
    known = [x if isinstance(x, int | float) else math.inf for x in tolerances]
    return frozenset([SolverTag(max(known))] if known else [])


def solver_tolerance(tree: PyTree[Any], dtype: DTypeLike) -> Float[Array, ""] | None:
    """The largest of the `solver_tolerances` in a PyTree; `None` without solvers."""
    sizes = [jnp.asarray(x).astype(dtype) for x in solver_tolerances(tree)]
    return jax.lax.stop_gradient(ft.reduce(jnp.maximum, sizes)) if sizes else None
