"""The inverse of an operator as an operator."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, Inexact, Int, PyTree

from .._arguments import require
from .._linalg.dense import column_norms, divisor, hashed_signs, power_of_two_scale
from .._linalg.types import automatic, fori_loop
from .check import as_data, checked_operator, jitted, with_data
from .entries import parts, readable_diagonal, unit_vectors
from .solvers import solver_tolerances
from .space import (
    Dense,
    apply_block,
    is_hermitian,
    is_known,
    is_semidefinite,
    parts_of,
    space_of,
    unflatten,
)

_WHERE = "traceax.InverseLinearOperator"


class InverseLinearOperator(Dense):
    r"""The operator `A^-1`, applied by `lineax.linear_solve`.

    ```python
    inverse = traceax.InverseLinearOperator(operator, lx.CG(rtol=1e-6, atol=1e-6))
    ```

    A product is a solve, NaN if it fails: a budget of k is k solves. Differentiable to any
    order. It is semidefinite, symmetric, diagonal or triangular where A is.

    Where the diagonal of A is read, as of matrices dense and sparse, of kernels, of sums and
    of multiples of these, or known by a tag, [`traceax.diagonal`][] and [`traceax.trace`][]
    estimate less than all of `A^-1`, at as many solves: they take two terms of a series
    apart, whose diagonal is exact.

    The error bar of an exact answer holds the error of an iterative solver, by residuals,
    which take products with A; it is unknown where the inverse is a factor of a product, or
    in several terms of a sum. With fewer products, and in loops to a tolerance, the bar holds
    the solver's tolerance times the value. Products scale their vectors: an absolute
    tolerance is for a largest entry of about 1. Solves that a function takes don't show.

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
        self.options = with_data({} if options is None else options)

    @automatic
    def mv(self, vector):
        # An absolute tolerance is for entries of size 1: the product stays homogeneous.
        real, leaves = space_of(self).real_dtype, jtu.tree_leaves(vector)
        sizes = [jnp.max(jnp.abs(x), initial=0).astype(real) for x in leaves]
        unit = jax.lax.stop_gradient(power_of_two_scale(jnp.stack(sizes)))
        vector = jtu.tree_map(lambda x: x / unit.astype(x.dtype), vector)
        solution = lx.linear_solve(
            self.operator, vector, self.solver, options=self.options, throw=False
        )
        failed = solution.result != lx.RESULTS.successful
        scale = jnp.where(failed, jnp.nan, unit)
        return jtu.tree_map(lambda x: x * scale.astype(x.dtype), solution.value)

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        return eqx.tree_at(lambda x: x.operator, self, self.operator.transpose())

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()

    def _satisfies(self, check):
        # An inverse need not share the others.
        inherited = check not in (lx.is_tridiagonal, lx.has_unit_diagonal)
        return inherited and is_known(self.operator, check)

    def _conj(self):
        return eqx.tree_at(lambda x: x.operator, self, lx.conj(self.operator))


# Steps of the power method, for a size that need not be right to more than a digit.
_STEPS = 8
_INHERITED = (
    lx.is_symmetric,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
)


class InverseRemainder(Dense):
    r"""The remainder `D^-1 O A^-1 O D^-1` of an inverse, for a diagonal D and `O = A - D`.

    Two terms of the Neumann series leave it:

        A^-1 = D^-1 - D^-1 O D^-1 + D^-1 O A^-1 O D^-1 .

    A product is a solve and two products with A. Symmetric or semidefinite where `A^-1` is:
    D must be real where A is Hermitian.
    """

    inverse: lx.AbstractLinearOperator  # an `InverseLinearOperator`, perhaps in tags
    diagonal: Inexact[Array, " n"]  # D

    @property
    def operator(self) -> lx.AbstractLinearOperator:
        """A."""
        (inverse,) = parts_of(self.inverse, InverseLinearOperator)
        return inverse.operator

    def mv(self, vector):
        A, d = self.operator, unflatten(self.diagonal, self.in_structure())

        def over(x):
            return jtu.tree_map(lambda x, d: x / d.astype(x.dtype), x, d)

        def off(x):
            y = A.mv(x)
            return jtu.tree_map(lambda y, x, d: y - d.astype(x.dtype) * x, y, x, d)

        return over(off(self.inverse.mv(off(over(vector)))))

    def terms(self, unit: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        """The product of the two terms with a vector, `D^-1 (2 v - A D^-1 v)`."""
        d = self.diagonal
        product = apply_block(self.operator, (unit / d)[:, None])[:, 0]
        return (2 * unit - product) / d

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.inverse.in_structure()

    def _satisfies(self, check):
        return check in _INHERITED and is_known(self.inverse, check)


class Expansion(NamedTuple):
    """The diagonal of two terms of an inverse, `2 D^-1 - D^-1 A D^-1`, and what they leave."""

    diagonal: Inexact[Array, " n"]
    remainder: InverseRemainder


def expand_inverse(operator: lx.AbstractLinearOperator) -> Expansion | None:
    """Two terms of an inverse; `None` if it isn't one, or if A's diagonal isn't read.

    **Reference:** Siden, Lindgren, Bolin and Villani, "Efficient Covariance Approximations
    for Large Sparse Precision Matrices", J. Comput. Graph. Stat. 27 (2018),
    arXiv:1705.08656, where the remainder is estimated from samples of a normal distribution.
    """
    inverse = operator
    while isinstance(inverse, lx.TaggedLinearOperator):
        inverse = inverse.operator
    if not isinstance(inverse, InverseLinearOperator):
        return None
    known = readable_diagonal(inverse.operator)
    if known is None:
        return None
    entries = known.read().astype(space_of(operator).compute_dtype)
    if is_hermitian(operator):
        entries = jnp.real(entries).astype(entries.dtype)
    d = _divisors(inverse.operator, entries, is_semidefinite(operator))
    return Expansion((1 - (entries - d) / d) / d, InverseRemainder(operator, d))


@jitted
def _divisors(
    A: lx.AbstractLinearOperator, entries: Inexact[Array, " n"], semidefinite: bool
) -> Inexact[Array, " n"]:
    """D: a multiple of the diagonal of A, without what is too small to divide by.

    Where `A <= 2 D` the remainder of a semidefinite A is at most `A^-1`, as a form: the diagonal
    is enough if A is diagonally dominant, and of covariances of long rows it is many times
    the diagonal, or errors would be up to twice those of `A^-1`. The larger D, the more of
    `A^-1` remains. Of another A entries smaller than the root mean square of rows of O are
    replaced by 4 times that.
    """
    n, dtype = entries.shape[0], entries.dtype
    signs = hashed_signs(1, n, dtype, 0).T
    d = entries[:, None]
    if not semidefinite:
        rows = apply_block(A, signs) - d * signs
        size = column_norms(rows)[0] / max(n, 1) ** 0.5
        d = jnp.where(jnp.abs(d) >= size, d, (4 * size).astype(dtype))
    d = jnp.where(d == 0, 1, d)

    def step(_, state):
        # Iterates of the power method, whose norms are the size of D^-1 A.
        block, _ = state
        block = apply_block(A, block) / d
        size = column_norms(block)[0]
        return block / divisor(size).astype(dtype), size

    start = signs / max(n, 1) ** 0.5, jnp.ones((), jnp.finfo(dtype).dtype)
    _, size = jax.lax.stop_gradient(fori_loop(_STEPS, step, start))
    return (d * jnp.maximum(size / 2, 1).astype(dtype))[:, 0]


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
    if not solver_tolerances(operator):
        return None
    column = jax.lax.stop_gradient(column)
    unit = unit_vectors(j, operator.in_size(), 1, column.dtype)[:, 0]

    def product(operator, x):
        return apply_block(operator, x[:, None])[:, 0]

    A = operator.operator if isinstance(operator, InverseLinearOperator) else None
    if A is not None and not solver_tolerances(A):
        r = unit - product(A, column)
        vectors = r, column, product(A, unit)
        residual, size, size_of_A = (column_norms(x[:, None])[0] for x in vectors)
        rounding = jnp.finfo(size.dtype).eps * size_of_A * size
        form = jnp.abs(jnp.vdot(column, r)) if is_hermitian(A) else jnp.inf
        return Solves(residual + rounding, size, form + rounding * size)
    if isinstance(operator, InverseRemainder):
        # That of the inverse: the terms are known.
        column = column + jax.lax.stop_gradient(operator.terms(unit))
        return solve_of_column(operator.inverse, column, j)
    found = parts(operator)
    solved = [x for x in found if solver_tolerances(x.operator)]
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
