"""Iterations inside an operator, and the errors that they leave in its products."""

import abc
import functools as ft
import math
from typing import Any, NamedTuple

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


class Truncation(NamedTuple):
    """Errors of a truncated iteration, measured for a few vectors.

    - `products`: in products, relative to their lengths.
    - `entries`: in diagonal entries, on average.
    """

    products: Float[Array, ""]
    entries: Float[Array, ""]


class Truncated(eqx.Module):
    """Abstract base class for functions of an operator, from iterations that may end early."""

    operator: eqx.AbstractVar[Any]

    @property
    @abc.abstractmethod
    def is_truncated(self) -> bool:
        """Whether more steps could change the products."""

    @abc.abstractmethod
    def truncation(self) -> Truncation:
        """Measures errors by products with a few fixed vectors."""


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


def truncated_parts(tree: PyTree[Any]) -> list[Truncated]:
    """The operators in a PyTree, and inside each other, whose products are truncated."""

    def is_inside(x):
        return x is not tree and isinstance(x, Truncated)

    leaves = jtu.tree_leaves(tree, is_leaf=is_inside)
    parts = [y for x in leaves if isinstance(x, Truncated) for y in truncated_parts(x)]
    is_part = isinstance(tree, Truncated) and tree.is_truncated
    return [tree, *parts] if is_part else parts


def is_inexact(tree: PyTree[Any]) -> bool:
    """Whether a PyTree contains truncated operators, or solvers not known to be direct."""
    return bool(solver_tolerances(tree) or truncated_parts(tree))


def solver_tags(tree: PyTree[Any]) -> frozenset[object]:
    """The tag for a function whose products use the solvers in a PyTree, if any.

    A tag can't measure the errors of truncated operators, so these count as infinite.
    """
    tolerances = solver_tolerances(tree)
    known = [x if isinstance(x, int | float) else math.inf for x in tolerances]
    known += [math.inf for _ in truncated_parts(tree)]
    return frozenset([SolverTag(max(known))] if known else [])


def solver_tolerance(tree: PyTree[Any], dtype: DTypeLike) -> Float[Array, ""] | None:
    """The largest of the `solver_tolerances` in a PyTree; `None` without solvers."""
    return _largest(solver_tolerances(tree), dtype)


def truncation_error(tree: PyTree[Any], dtype: DTypeLike) -> Float[Array, ""] | None:
    """The largest relative error from truncated operators in products, measured now."""
    return _largest([x.truncation().products for x in truncated_parts(tree)], dtype)


def product_error(tree: PyTree[Any], dtype: DTypeLike) -> Float[Array, ""] | None:
    """The largest relative error from solvers and truncated operators in products."""
    errors = solver_tolerance(tree, dtype), truncation_error(tree, dtype)
    return _largest([x for x in errors if x is not None], dtype)


def _largest(sizes: list[ArrayLike], dtype: DTypeLike) -> Float[Array, ""] | None:
    arrays = [jnp.asarray(x).astype(dtype) for x in sizes]
    return jax.lax.stop_gradient(ft.reduce(jnp.maximum, arrays)) if arrays else None
