r"""Exact log-determinants, traces of inverses and quadratic forms, from entries.

One Cholesky factorisation `A = L L^*` gives all three and, with the inverse, their
derivatives: `tr(A^-1 dA)`, `-tr(A^-1 dA A^-1)`, and `-u^* dA u + 2 Re(u^* db)` for
`u = A^-1 b`. JAX transposes these formulas and differentiates them again.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Bool, Float, Inexact

from .._error_bar import ErrorBar
from .._linalg.dense import (
    column_dots,
    divisor,
    frobenius,
    largest_entry,
    matmul,
    residual_of,
    squares,
)
from .._operators.entries import has_known_entries, matrix_of, sizes_of
from .._operators.space import Space, space_of
from .._outcome import Evidence, Outcome
from .._plan import ExactAnswer
from .._results import RESULTS
from .._spectral.base import exact_stats, spectral_outcome
from .._spectral.function import HIDDEN, RECIPROCAL, largest_asymmetry
from .._spectral.state import SpectralState

# Up to this many unknowns the exact answer takes no longer than an estimate:
# `benchmarks/exact.py`. For hard kernels, whose rows an estimate would eliminate, 30
# evaluations take no longer, compilation included.
LARGEST, LARGEST_HARD = 4000, 6000
# We halve a matrix twice at most, as every block costs compile time, and blocks with at
# most this many rows not at all: `benchmarks/exact.py`.
_SMALL_BLOCK, _HALVINGS = 512, 2
# We estimate traces for error bars with this many random vectors.
_NUM_PROBES = 8
# Entries have errors of 2 eps: `benchmarks/exact.py rounding`.
_ROUNDING = 2.0
# Coherent errors in a slope, relative to independent ones: see `slope_error`.
_COHERENT = 0.4
# We compare this many rows with columns at once.
_TILE = 64
# We refine solutions this many times.
_REFINEMENTS = 2


def is_small(operator: lx.AbstractLinearOperator, hard: bool = False) -> bool:
    """Whether an exact answer is cheap: few rows, and entries that cost no product."""
    largest = LARGEST_HARD if hard else LARGEST
    return 0 < space_of(operator).size <= largest and has_known_entries(operator)


class Solved(NamedTuple):
    """The answers for A and B."""

    solutions: Inexact[Array, "n q"]  # A^-1 B
    logdet: Float[Array, ""]
    forms: Float[Array, " q"]  # b^* A^-1 b
    changes: Float[Array, " q"]  # in forms, from the last refinement
    lower: Inexact[Array, "n n"]  # L
    tests: Inexact[Array, "2 n m"]  # M Z and M^2 Z for random signs Z and M = D A^-1 D


@sequential_vmap
def _factorise(
    A: Inexact[Array, "n n"], B: Inexact[Array, "n q"], D: Inexact[Array, "n 1"]
) -> tuple[Array, Array, Array, Array, Array]:
    # LAPACK reads columns, which A^T has in memory where A has rows.
    lower = jnp.linalg.cholesky(A.T, symmetrize_input=False).conj()
    q = B.shape[1]

    def solve(x):
        return cho_solve((lower, True), x)

    solutions = solve(jnp.concatenate([B, D * _signs(A)], axis=1))
    U, once = solutions[:, :q], D * solutions[:, q:]
    twice, forms = D * solve(D * once), []
    # A factor has coherent errors, up to 400 eps |u|^2 in forms (600 points, 32 bits).
    # With the residual r, `u^* (b + r)` has only the square of the error in u.
    for step in range(_REFINEMENTS + 1):
        residual = residual_of(A, U, B)
        forms.append(jnp.real(column_dots(U, B + residual)))
        if step < _REFINEMENTS:
            U = U + solve(residual)
    change = jnp.abs(forms[-1] - forms[-2])
    return lower, U, forms[-1], change, jnp.stack([once, twice])


def _signs(A: Inexact[Array, "n _"]) -> Inexact[Array, "n m"]:
    # These are constants: JAX's generator takes a sixth of a likelihood's compile time.
    signs = np.random.default_rng(0).choice([-1, 1], (len(A), _NUM_PROBES))
    return jnp.asarray(signs, A.dtype)


@jax.custom_jvp
def solve_exactly(
    A: Inexact[Array, "n n"], B: Inexact[Array, "n q"], D: Inexact[Array, "n 1"]
) -> Solved:
    """Log-determinant, quadratic forms, and products with M for tests.

    Only log-determinant, forms and solutions have derivatives.
    """
    lower, solutions, forms, changes, tests = _factorise(A, B, D)
    logdet = 2 * jnp.sum(jnp.log(jnp.real(jnp.diagonal(lower))))
    return Solved(solutions, logdet, forms, changes, lower, tests)


@solve_exactly.defjvp
def _solve_jvp(primals, tangents):
    (A, B, D), (dA, dB, _) = primals, tangents
    solved = solve_exactly(A, B, D)
    inverse, U = inverse_of(A, solved.lower), solved.solutions
    change = dB - matmul(dA, U)
    return solved, Solved(
        matmul(inverse, change),
        jnp.sum(jnp.real(inverse.conj() * dA)),
        jnp.real(column_dots(U, dB + change)),
        *map(jnp.zeros_like, solved[3:]),
    )


@sequential_vmap
def _solve_from(lower: Inexact[Array, "n n"], B: Inexact[Array, "n q"]) -> Array:
    return cho_solve((lower, True), B)


def solve_from(
    lower: Inexact[Array, "n n"], B: Inexact[Array, "n q"]
) -> Inexact[Array, "n q"]:
    """`A^-1 B`, from the Cholesky factor. JAX can transpose it in B."""
    return jax.lax.custom_linear_solve(
        lambda x: matmul(lower, matmul(lower.conj().T, x)),
        B,
        lambda _, B: _solve_from(lower, B),
        lambda _, B: _solve_from(lower, B.conj()).conj(),
    )


@jax.custom_jvp
def inverse_of(A: Inexact[Array, "n n"], lower: Inexact[Array, "n n"]) -> Array:
    """`A^-1`, from the Cholesky factor."""
    return _inverse(lower)


def _inverse(
    lower: Inexact[Array, "n n"], halvings: int = _HALVINGS
) -> Inexact[Array, "n n"]:
    """The inverse of `L L^*`, in about `0.9 n^3` operations.

    For `L = [[P, 0], [Q, R]]` and `J = Q P^-1`, the Schur complement is `S = R R^*`, and

        (L L^*)^-1 = [[(P P^*)^-1 + J^* S^-1 J, -J^* S^-1], [-S^-1 J, S^-1]].
    """
    n, half = len(lower), len(lower) // 2
    if n <= _SMALL_BLOCK or halvings == 0:
        return solve_from(lower, jnp.eye(n, dtype=lower.dtype))
    P, Q, R = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    J = solve_triangular(P, Q.conj().T, trans="C", lower=True).conj().T
    last = _inverse(R, halvings - 1)
    corner = -matmul(last, J)
    first = _inverse(P, halvings - 1) - matmul(J.conj().T, corner)
    return jnp.block([[first, corner.conj().T], [corner, last]])


@inverse_of.defjvp
def _inverse_jvp(primals, tangents):
    inverse = inverse_of(*primals)
    return inverse, -matmul(matmul(inverse, tangents[0]), inverse)


def factorised(state: SpectralState) -> Outcome:
    """The exact answer from one Cholesky factorisation, which JAX differentiates.

    It takes `n^3 / 3` operations, and a derivative about `n^3` more. About six matrices
    are in memory. `Rounding` describes the error bars.
    """
    space, rhs = state.space, state.rhs
    A = matrix_of(state.operator)
    D = roots_of(sizes_of(state.operator), A)
    solved = solve_exactly(A, A[:, :0] if rhs is None else rhs, D)
    rounding = entry_rounding(A, D, solved, space)
    value, forms = solved.logdet, solved.forms
    error = rounding.error(value)
    if state.function.evaluates(RECIPROCAL):
        value = jnp.trace(jnp.real(inverse_of(A, solved.lower)))
        # The first tests are M Z, and `|A^-1 D|_F^2` takes the place of tr M.
        changes = jnp.sum(squares(solved.tests[0] / divisor(D))) / _NUM_PROBES
        error = rounding._replace(trace=changes).error(value)
    unknown = jnp.zeros(0, space.real_dtype)
    stats = {"num_matvecs": 0, **exact_stats(state, [value])}
    bar = None
    if rhs is not None:
        errors = rounding.errors_of_forms(forms, solved.solutions) + solved.changes
        bar = ErrorBar(forms, errors, jnp.full_like(forms, jnp.inf))
        stats["inv_quad_bracket"] = forms, forms
        stats["solution"] = solved.solutions
    bars = [ErrorBar(value, error, jnp.asarray(jnp.inf, error.dtype))]
    evidence = Evidence((state.operator, rhs), jtu.Partial(_slope_bars, state))
    return spectral_outcome(
        state, bars, [rounding.result], stats, unknown, unknown, bar, evidence
    )


BY_CHOLESKY = ExactAnswer("Cholesky", factorised)


class Rounding(NamedTuple):
    """Rounding errors of numbers from a factorisation, and whether these hide it.

    Entries have errors near `eps D_i D_j` for the sizes `D^2`, which are A's diagonal,
    or larger if its terms cancel (Higham, "Accuracy and Stability of Numerical
    Algorithms" (2002), theorem 10.5, doi:10.1137/1.9780898718027). On constant diagonals
    they can be equal. With `M = D A^-1 D`, they change the log-determinant by `eps tr M`,
    and a quadratic form by `eps |D u|^2`, to first order. Independent errors move
    eigenvalues of `M^-1` by about `eps sqrt(n)`. Let c be this number divided by the
    smallest eigenvalue. We divide errors by 1 - c, and report a failure if `c >= 1`.

    - `unit`: the relative error in entries over 1 - c.
    - `D`: the roots of the sizes.
    - `trace`: an estimate of `tr M`.
    """

    unit: Float[Array, ""]
    result: RESULTS
    D: Inexact[Array, "n 1"]
    trace: Float[Array, ""]

    def error(self, logdet: Float[Array, ""]) -> Float[Array, ""]:
        """The error in the log-determinant."""
        return self.unit * (self.trace + jnp.abs(jax.lax.stop_gradient(logdet)))

    def errors_of_forms(
        self, forms: Float[Array, " q"], solutions: Inexact[Array, "n q"]
    ) -> Float[Array, " q"]:
        """Errors in quadratic forms with these solutions."""
        forms, U = jax.lax.stop_gradient((forms, solutions))
        return self.unit * (jnp.sum(squares(self.D * U), axis=0) + jnp.abs(forms))

    def slope_error(
        self,
        solve: Callable[[Array], Array],
        product: Callable[[Array], Array],
        of_inverse: bool = False,
    ) -> Float[Array, ""]:
        """The error in the slope `tr(A^-1 dA)`, or in the slope of `tr A^-1`.

        Entries enter twice, through `A^-1` and dA. In the first slope they enter through
        `W = D A^-1 dA A^-1 D`. We take a number between `|W|_F`, for independent errors,
        and their largest effect, the sum of `|W_ij|`. The geometric mean of both was 0.35
        to 0.85 times `sqrt(n) |W|_F` (14 kernels, n = 150 to 800).

        - `solve`, `product`: multiply blocks with `A^-1` and with dA.
        """
        D, Z = self.D, _signs(self.D)
        X = solve(D * Z)
        Y, left = product(X), Z / divisor(D)
        if of_inverse:
            left = solve(left)
            W = solve(solve(Y)) + solve(product(solve(X)))
        else:
            W = solve(Y)
        value = jnp.sum(jnp.real(left.conj() * Y)) / _NUM_PROBES
        coherent = max(_COHERENT * len(D) ** 0.5, 1.0)
        size = coherent * frobenius(D * W) / _NUM_PROBES**0.5
        return 2 * self.unit * (size + jnp.abs(value))

    def slope_errors_of_forms(
        self,
        solve: Callable[[Array], Array],
        change: Inexact[Array, "n q"],
        dB: Inexact[Array, "n q"],
        U: Inexact[Array, "n q"],
    ) -> Float[Array, " q"]:
        """Errors in slopes of quadratic forms, for `change = dB - dA U`."""
        vectors = self.D * solve(change), self.D * U
        moved, size = (jnp.linalg.norm(x, axis=0) for x in vectors)
        terms = jnp.linalg.norm(U, axis=0) * jnp.linalg.norm(dB + change, axis=0)
        return 2 * self.unit * (2 * moved * size + terms)


def roots_of(sizes: Float[Array, " n"], A: Inexact[Array, "..."]) -> Array:
    """D, in the dtype of A."""
    return jnp.sqrt(jax.lax.stop_gradient(sizes))[:, None].astype(A.dtype)


def entry_rounding(
    A: Inexact[Array, "n n"],
    D: Inexact[Array, "n 1"],
    solved: Solved,
    space: Space,
    order: int | None = None,
) -> Rounding:
    """Rounding in numbers from `solve_exactly(A, ..., D)`, without derivatives.

    `order`: the number of rows, if A is a block of a larger matrix.
    """
    A, solved = jax.lax.stop_gradient((A, solved))
    once, twice = solved.tests
    asymmetry, finite = _compared_with_adjoint(A)
    size = largest_entry(D) ** 2
    asymmetry = asymmetry / divisor(size)
    eps = jnp.asarray(jnp.finfo(size.dtype).eps * space.rounding, size.dtype)
    unit = _ROUNDING * jnp.maximum(eps, asymmetry)
    # This bounds the smallest eigenvalue of M^-1 from above.
    smallest = frobenius(once) / divisor(frobenius(twice))
    change = (
        unit * max((order or len(A)) ** 0.5, HIDDEN / _ROUNDING) / divisor(smallest)
    )
    hidden = change >= 1
    result = RESULTS.where(hidden, RESULTS.outside_domain, RESULTS.successful)
    symmetric = asymmetry <= largest_asymmetry(space)
    result = RESULTS.where(symmetric, result, RESULTS.not_hermitian)
    result = RESULTS.where(finite, result, RESULTS.nonfinite)
    failed = jnp.isnan(solved.logdet) & (result == RESULTS.successful)
    result = RESULTS.where(failed, _failure_reason(failed, A, space), result)
    unit = unit / jnp.where(hidden, 1, 1 - change)
    trace = jnp.sum(jnp.real(_signs(A) * once)) / _NUM_PROBES
    return Rounding(unit, result, D, trace)


def _compared_with_adjoint(
    A: Inexact[Array, "n n"],
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The largest entry of `(A - A^*) / 2`, and whether A is finite.

    We take a few rows at a time: another matrix in memory would take longer to make.
    """
    tile = min(_TILE, len(A))

    def compare(start):
        rows = jax.lax.dynamic_slice_in_dim(A, start, tile)
        columns = jax.lax.dynamic_slice_in_dim(A, start, tile, 1)
        return largest_entry(rows - columns.conj().T) / 2, jnp.isfinite(rows).all()

    # A slice that would pass the end starts earlier.
    differences, finite = jax.lax.map(compare, jnp.arange(0, len(A), tile))
    return jnp.max(differences, initial=0), finite.all()


def _failure_reason(
    failed: Bool[Array, ""], A: Inexact[Array, "n n"], space: Space
) -> RESULTS:
    """Why a factorisation fails: an eigenvalue is negative, or hidden by rounding."""
    if not space.is_positive:
        return RESULTS.outside_domain
    eps, size = jnp.finfo(A.dtype).eps, jnp.max(jnp.sum(jnp.abs(A), axis=1))

    def is_negative():
        more = (size * jnp.sqrt(eps)).astype(A.dtype) * jnp.eye(len(A), dtype=A.dtype)
        D = jnp.ones((len(A), 1), A.dtype)
        return jnp.isnan(_factorise(A + more, A[:, :0], D)[0][0, 0])

    # We use one condition for all batch elements, or all would be factorised again.
    negative = jax.lax.cond(
        eqxi.unvmap_any(failed), is_negative, lambda: jnp.zeros_like(failed)
    )
    return RESULTS.where(negative, RESULTS.not_semidefinite, RESULTS.outside_domain)


def _slope_bars(state: SpectralState, products: tuple[Any, Any]) -> list[ErrorBar]:
    """Rounding errors in derivatives along tangents of A and b."""
    primal = state.operator, state.rhs
    (A, B), (dA, dB) = eqx.filter_jvp(
        lambda operator, rhs: (matrix_of(operator), rhs), primal, products
    )
    dA = jnp.zeros_like(A) if dA is None else dA
    D = roots_of(sizes_of(state.operator), A)
    solved = solve_exactly(A, A[:, :0] if B is None else B, D)
    rounding = entry_rounding(A, D, solved, state.space)
    solve, product = ft.partial(solve_from, solved.lower), ft.partial(matmul, dA)
    of_inverse = state.function.evaluates(RECIPROCAL)
    errors = [rounding.slope_error(solve, product, of_inverse)]
    if B is not None:
        U, dB = solved.solutions, jnp.zeros_like(B) if dB is None else dB
        errors.append(rounding.slope_errors_of_forms(solve, dB - product(U), dB, U))
    # Callers read only errors and degrees of freedom, so the means are dummies.
    return [ErrorBar(x, x, jnp.full_like(x, jnp.inf)) for x in errors]
