"""The inverse as a linear operator."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, PyTree

from .._arguments import require
from .._linalg.dense import (
    column_norms,
    divisor,
    hashed_signs,
    largest_entry,
    power_of_two_scale,
)
from .._linalg.types import automatic, fori_loop
from .check import as_data, checked_operator, jitted, with_data
from .entries import parts, readable_diagonal, terms, unit_vectors
from .solvers import solver_tolerance, solver_tolerances, truncated_parts
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

    A product is one solve, NaN if it fails, so k counts solves. `A^-1` is semidefinite,
    symmetric, diagonal or triangular if A is. It is differentiable to any order.

    If traceax can read A's diagonal, [`traceax.diagonal`][] and [`traceax.trace`][]
    split off two series terms whose diagonal is exact, and estimate the remainder with
    the same number of solves. They read it from dense and sparse matrices, kernels,
    sums and multiples of these, and operators with a structure tag.

    Error bars include an iterative solver's error. Exact answers measure it from
    residuals, which take products with A; it is unknown if the inverse is a factor in a
    product, or in several terms of a sum. With fewer products, and in loops to a
    tolerance, the bar includes the solver's tolerance times the value. Absolute
    tolerances apply to vectors scaled to size 1. Solves in functions go undetected.

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
        is_solver = isinstance(solver, lx.AbstractLinearSolver)
        hint = "pass lineax.CG(rtol=1e-6, atol=1e-6), for example"
        what = "solver must be a lineax solver"
        require(is_solver, _WHERE, what, solver, hint, TypeError)
        self.operator, self.solver = as_data(operator), solver
        self.options = with_data({} if options is None else options)

    @automatic
    def mv(self, vector):
        leaves, (size, _, dtype, *_) = jtu.tree_leaves(vector), space_of(self)
        if size == 0:
            return vector
        # We scale entries to size 1: absolute tolerances then keep products homogeneous.
        sizes = [largest_entry(x).astype(jnp.finfo(dtype).dtype) for x in leaves]
        unit = jax.lax.stop_gradient(power_of_two_scale(jnp.stack(sizes)))
        vector = jtu.tree_map(lambda x: x / unit.astype(x.dtype), vector)
        solution = lx.linear_solve(
            self.operator, vector, self.solver, options=self.options, throw=False
        )
        # lineax's CG ends at once if products are NaN, and calls its zeros a solution.
        lost = ~_any_nonzero(solution.value) & _any_nonzero(vector)
        failed = solution.result != lx.RESULTS.successful
        failed |= lost & self.solver.assume_full_rank()
        scale = jnp.where(failed, jnp.nan, unit)
        return jtu.tree_map(lambda x: x * scale.astype(x.dtype), solution.value)

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        return eqx.tree_at(lambda x: x.operator, self, self.operator.transpose())

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()

    def satisfies(self, check):
        # We exclude the two properties that an inverse need not share.
        inherited = check not in (lx.is_tridiagonal, lx.has_unit_diagonal)
        return inherited and is_known(self.operator, check)

    def conj(self):
        return eqx.tree_at(lambda x: x.operator, self, lx.conj(self.operator))


def _any_nonzero(tree: PyTree[Array]) -> Bool[Array, ""]:
    return jnp.any(jnp.stack([jnp.any(x != 0) for x in jtu.tree_leaves(tree)]))


# Steps of the power method: we need only one digit.
_STEPS = 8
_INHERITED = (
    lx.is_symmetric,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
)


class InverseRemainder(Dense):
    r"""The remainder `D^-1 O A^-1 O D^-1` for a diagonal D and `O = A - D`.

    Two terms of the Neumann series have this remainder:

        A^-1 = D^-1 - D^-1 O D^-1 + D^-1 O A^-1 O D^-1 .

    A product takes one solve and two products with A. The remainder is symmetric or
    semidefinite if `A^-1` is. D must be real if A is Hermitian.
    """

    inverse: lx.AbstractLinearOperator  # an `InverseLinearOperator`, perhaps tagged
    diagonal: Inexact[Array, " n"]  # D

    @property
    def operator(self) -> lx.AbstractLinearOperator:
        """A."""
        (inverse,) = parts_of(self.inverse, InverseLinearOperator)
        return inverse.operator

    def mv(self, vector):
        A, d = self.operator, unflatten(self.diagonal, self.in_structure())

        def divide(x):
            return jtu.tree_map(lambda x, d: x / d.astype(x.dtype), x, d)

        def apply_off(x):
            y = A.mv(x)
            return jtu.tree_map(lambda y, x, d: y - d.astype(x.dtype) * x, y, x, d)

        return divide(apply_off(self.inverse.mv(apply_off(divide(vector)))))

    def terms(self, unit: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        """Multiplies the two terms by a vector: `D^-1 (2 v - A D^-1 v)`."""
        d = self.diagonal
        product = apply_block(self.operator, (unit / d)[:, None])[:, 0]
        return (2 * unit - product) / d

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.inverse.in_structure()

    def satisfies(self, check):
        return check in _INHERITED and is_known(self.inverse, check)


class Expansion(NamedTuple):
    """The diagonal of two terms, `2 D^-1 - D^-1 A D^-1`, and the remainder."""

    diagonal: Inexact[Array, " n"]
    remainder: InverseRemainder


def expand_inverse(operator: lx.AbstractLinearOperator) -> Expansion | None:
    """Splits two terms off `A^-1`; `None` for other operators, or an unreadable diagonal.

    **Reference:** Siden, Lindgren, Bolin and Villani, "Efficient Covariance
    Approximations for Large Sparse Precision Matrices", J. Comput. Graph. Stat. 27
    (2018), arXiv:1705.08656, which estimates the remainder from normal samples.
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
    """D: a multiple of A's diagonal, with entries that are safe to divide by.

    If `A <= 2 D`, the remainder for a semidefinite A is at most `A^-1`, as a quadratic
    form. The diagonal is enough if A is diagonally dominant. For covariances with long
    rows D is many times the diagonal; with less, errors would be up to twice the errors
    for `A^-1`. The larger D is, the larger is the remainder. For any other A, we
    replace entries below the root mean square norm of O's rows by 4 times that norm.

    D is at least `1 + sqrt(eps)` times the diagonal. If A is diagonal, products with O
    then consist of more than rounding errors, and the remainder is `eps A^-1`.
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
        # We iterate the power method: its norms estimate the size of D^-1 A.
        block, _ = state
        block = apply_block(A, block) / d
        size = column_norms(block)[0]
        return block / divisor(size).astype(dtype), size

    start = signs / max(n, 1) ** 0.5, jnp.ones((), jnp.finfo(dtype).dtype)
    _, size = jax.lax.stop_gradient(fori_loop(_STEPS, step, start))
    least = 1 + math.sqrt(jnp.finfo(dtype).eps)
    return (d * jnp.maximum(size / 2, least).astype(dtype))[:, 0]


class SolveErrors(NamedTuple):
    """Solver errors in an operator's diagonal, and in each of its columns."""

    diagonal: Float[Array, " n"]
    columns: Float[Array, " n"]


class Solves(NamedTuple):
    """Solutions x to `A x = e_j`, with residuals r: scalars, or one per column."""

    residuals: Float[Array, "..."]  # |r|
    sizes: Float[Array, "..."]  # |x|
    forms: Float[Array, "..."]  # |x^* r|; infinite where A isn't Hermitian


def solve_of_column(
    operator: lx.AbstractLinearOperator, column: Inexact[Array, " n"], j: Int[Array, ""]
) -> Solves | None:
    """The solve behind column j; `None` if no solver iterates, infinite if unknown."""
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
        # We add the two known terms back, to get the inverse's column.
        column = column + jax.lax.stop_gradient(operator.terms(unit))
        return solve_of_column(operator.inverse, column, j)
    summands = parts(operator)
    solved = [x for x in summands if solver_tolerances(x.operator)]
    if len(solved) == 1 and solved[0].operator is not operator:
        (term,) = solved
        for x in summands:
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
    """Solver errors in all columns of an inverse, and in its diagonal.

    With `R = I - A X` the error in X is `A^-1 R`, and A^-1 is `X (I - R)^-1`. For a
    Hermitian A, the error in diagonal entry i is `x_i^* r_i + r_i^* A^-1 r_i`.
    """
    residuals, sizes, forms = solves
    total = jnp.linalg.norm(residuals)
    size = jnp.linalg.norm(sizes) / jnp.maximum(1 - total, 0)
    columns = size * residuals
    return SolveErrors(jnp.minimum(forms + size * residuals**2, columns), columns)


class DiagonalErrors(NamedTuple):
    """Errors that iterations inside an operator leave in sums of diagonal entries.

    - `relative`: errors relative to the sum.
    - `entries`: further errors in entries.
    - `products`: the largest relative error in products.
    """

    relative: Float[Array, ""]
    entries: Float[Array, ""]
    products: Float[Array, ""]

    def of_sums(
        self, counts: ArrayLike, sums: Inexact[Array, "*g"]
    ) -> Float[Array, "*g"]:
        """Errors in sums of this number of entries."""
        counts = jnp.asarray(counts).astype(self.entries.dtype)
        return self.relative * jnp.abs(sums) + counts * self.entries


def diagonal_errors(
    operator: lx.AbstractLinearOperator, *, solves_are_measured: bool
) -> DiagonalErrors:
    """Errors in a diagonal, from solver tolerances and truncated operators.

    Errors in a truncated term are known for its entries, which may cancel in a sum.
    Inside another operator we know only the relative error in products.
    """
    dtype = space_of(operator).real_dtype
    zero, tolerance = jnp.zeros((), dtype), solver_tolerance(operator, dtype)
    tolerance = zero if tolerance is None else tolerance
    relative = zero if solves_are_measured else tolerance
    entries, products = zero, tolerance
    for term in terms(operator):
        for part in truncated_parts(term.operator):
            errors = part.truncation()
            products = jnp.maximum(products, errors.products)
            if part is term.operator:
                entries += jnp.abs(term.times(errors.entries)).astype(dtype)
            else:
                relative = jnp.maximum(relative, errors.products)
    return jax.lax.stop_gradient(DiagonalErrors(relative, entries, products))
