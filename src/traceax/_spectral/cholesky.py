r"""Exact log-determinants, traces of inverses and quadratic forms, from entries.

One Cholesky factorisation `A = L L^*` gives all three and, with the inverse, their
derivatives: `tr(A^-1 dA)`, `-tr(A^-1 dA A^-1)`, and `-u^* dA u + 2 Re(u^* db)` for
`u = A^-1 b`. JAX transposes these formulas and differentiates them again.
"""

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
    squares,
)
from .._operators.entries import has_known_entries, matrix_of
from .._operators.space import space_of
from .._results import RESULTS
from .._rule import Evidence, Outcome
from .base import exact_stats, spectral_outcome
from .function import HIDDEN, RECIPROCAL, largest_asymmetry
from .state import SpectralState

# Up to this many unknowns the exact answer takes no longer than an estimate:
# `benchmarks/exact.py`.
LARGEST = 4000
# Blocks with at most this many rows are inverted at once: `benchmarks/exact.py`.
_SMALL_BLOCK = 512
# We estimate traces for error bars with this many random vectors.
_NUM_PROBES = 8
# Entries have errors of 2 eps: `benchmarks/exact.py rounding`.
_ROUNDING = 2.0
# We refine solutions this many times.
_REFINEMENTS = 2


def is_small(operator: lx.AbstractLinearOperator) -> bool:
    """Whether an exact answer is cheap: few rows, and entries that cost no product."""
    return 0 < space_of(operator).size <= LARGEST and has_known_entries(operator)


class _Solved(NamedTuple):
    solutions: Inexact[Array, "n q"]  # A^-1 B
    logdet: Float[Array, ""]
    forms: Float[Array, " q"]  # b^* A^-1 b
    changes: Float[Array, " q"]  # in forms, from the last refinement
    lower: Inexact[Array, "n n"]  # L
    # M Z and M^2 Z for random signs Z, where M = D A^-1 D and D^2 = diag A.
    tests: Inexact[Array, "2 n m"]


@sequential_vmap
def _factorise(
    A: Inexact[Array, "n n"], B: Inexact[Array, "n q"]
) -> tuple[Array, Array, Array, Array, Array]:
    lower = jnp.linalg.cholesky(A, symmetrize_input=False)
    D, q = _root_of_diagonal(A), B.shape[1]

    def solve(x):
        return cho_solve((lower, True), x)

    solutions = solve(jnp.concatenate([B, D * _signs(A)], axis=1))
    U, once = solutions[:, :q], D * solutions[:, q:]
    twice, forms = D * solve(D * once), []
    # A factor has coherent errors, up to 400 eps |u|^2 in forms (600 points, 32 bits).
    # With the residual r, `u^* (b + r)` has only the square of the error in u.
    for step in range(_REFINEMENTS + 1):
        residual = B - matmul(A, U)
        forms.append(jnp.real(column_dots(U, B + residual)))
        if step < _REFINEMENTS:
            U = U + solve(residual)
    change = jnp.abs(forms[-1] - forms[-2])
    return lower, U, forms[-1], change, jnp.stack([once, twice])


def _root_of_diagonal(A: Inexact[Array, "n n"]) -> Inexact[Array, "n 1"]:
    return jnp.sqrt(jnp.abs(jnp.diagonal(A)))[:, None].astype(A.dtype)


def _signs(A: Inexact[Array, "n n"]) -> Inexact[Array, "n m"]:
    # These are constants: JAX's generator takes a sixth of a likelihood's compile time.
    signs = np.random.default_rng(0).choice([-1, 1], (len(A), _NUM_PROBES))
    return jnp.asarray(signs, A.dtype)


@jax.custom_jvp
def solve_exactly(A: Inexact[Array, "n n"], B: Inexact[Array, "n q"]) -> _Solved:
    """Log-determinant and quadratic forms. Factor and tests have no derivative."""
    lower, solutions, forms, changes, tests = _factorise(A, B)
    logdet = 2 * jnp.sum(jnp.log(jnp.real(jnp.diagonal(lower))))
    return _Solved(solutions, logdet, forms, changes, lower, tests)


@solve_exactly.defjvp
def _solve_jvp(primals, tangents):
    (A, B), (dA, dB) = primals, tangents
    solved = solve_exactly(A, B)
    inverse, U = inverse_of(A, solved.lower), solved.solutions
    change = dB - matmul(dA, U)
    return solved, _Solved(
        matmul(inverse, change),
        jnp.sum(jnp.real(inverse.conj() * dA)),
        jnp.real(column_dots(U, dB + change)),
        *map(jnp.zeros_like, solved[3:]),
    )


@sequential_vmap
def solve_from(
    lower: Inexact[Array, "n n"], B: Inexact[Array, "n q"]
) -> Inexact[Array, "n q"]:
    """`A^-1 B`, from the Cholesky factor."""
    return cho_solve((lower, True), B)


@jax.custom_jvp
def inverse_of(A: Inexact[Array, "n n"], lower: Inexact[Array, "n n"]) -> Array:
    """`A^-1`, from the Cholesky factor."""
    return _inverse(lower)


def _inverse(lower: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """The inverse of `L L^*`, in `5/6 n^3` operations.

    For `L = [[P, 0], [Q, R]]` and `J = Q P^-1`, the Schur complement is `S = R R^*`, and

        (L L^*)^-1 = [[(P P^*)^-1 + J^* S^-1 J, -J^* S^-1], [-S^-1 J, S^-1]].
    """
    n, half = len(lower), len(lower) // 2
    if n <= _SMALL_BLOCK:
        return solve_from(lower, jnp.eye(n, dtype=lower.dtype))
    P, Q, R = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    J = solve_triangular(P, Q.conj().T, trans="C", lower=True).conj().T
    last = _inverse(R)
    corner = -matmul(last, J)
    first = _inverse(P) - matmul(J.conj().T, corner)
    return jnp.block([[first, corner.conj().T], [corner, last]])


@inverse_of.defjvp
def _inverse_jvp(primals, tangents):
    inverse = inverse_of(*primals)
    return inverse, -matmul(matmul(inverse, tangents[0]), inverse)


def factorised(state: SpectralState, bounded: bool = False) -> Outcome:
    """The exact answer from one Cholesky factorisation, which JAX differentiates.

    It takes `n^3 / 3` operations, and a derivative about `n^3` more. About five matrices
    are in memory.

    Entries have errors near `eps sqrt(A_ii A_jj)` (Higham, "Accuracy and Stability of
    Numerical Algorithms" (2002), theorem 10.5, doi:10.1137/1.9780898718027). On constant
    diagonals they can be equal. With `M = D A^-1 D` and `D^2 = diag A`, they change
    the log-determinant by `eps tr M`, and a quadratic form by `eps |D u|^2`, to first
    order. Independent errors move eigenvalues of `M^-1` by `eps sqrt(n)`. If that is a
    part c of the smallest one, we divide error bars by 1 - c, and fail from 1 on.

    - `bounded`: whether a noise in the operator bounds its spectrum from below.
    """
    space, rhs = state.space, state.rhs
    A = matrix_of(state.operator)
    solved = solve_exactly(A, A[:, :0] if rhs is None else rhs)
    fixed = jax.lax.stop_gradient(A)
    tests = jax.lax.stop_gradient(solved.tests)
    unit, result = _rounding(fixed, tests, state)
    D = _root_of_diagonal(fixed)
    once, _ = tests
    value, change = solved.logdet, jnp.sum(_signs(A) * once)
    if state.function.evaluates(RECIPROCAL):
        inverse = inverse_of(A, solved.lower)
        value = jnp.trace(jnp.real(inverse))
        change = jnp.sum(squares(once / D))
    error = unit * (jnp.real(change) / _NUM_PROBES + jnp.abs(value))
    failed = jnp.isnan(solved.logdet) & (result == RESULTS.successful)
    if bounded:
        result = RESULTS.where(failed, RESULTS.not_semidefinite, result)
    else:
        result = RESULTS.where(failed, _failure_reason(failed, fixed, state), result)
    unknown = jnp.full(space.size, jnp.inf, space.real_dtype)
    bars = [ErrorBar(value, error, unknown[0])]
    stats = {"num_matvecs": 0, **exact_stats(state, [value], unknown)}
    forms = None
    if rhs is not None:
        solutions = jax.lax.stop_gradient(solved.solutions)
        errors = unit * (jnp.sum(squares(D * solutions), axis=0) + solved.forms)
        forms = ErrorBar(
            solved.forms, errors + solved.changes, jnp.full_like(errors, jnp.inf)
        )
        stats["inv_quad_bracket"] = solved.forms, solved.forms
        stats["solution"] = solutions
    evidence = Evidence((state.operator, rhs), jtu.Partial(_judge, state))
    results = [result]
    return spectral_outcome(
        state, bars, results, stats, unknown, unknown, forms, evidence
    )


def _rounding(
    A: Inexact[Array, "n n"], tests: Inexact[Array, "2 n m"], state: SpectralState
) -> tuple[Float[Array, ""], RESULTS]:
    """The relative error in entries over 1 - c, and whether we can tell A from others."""
    size, asymmetry = largest_entry(A), largest_entry(A - A.conj().T) / 2
    asymmetry = asymmetry / divisor(size)
    eps = jnp.asarray(jnp.finfo(size.dtype).eps * state.space.rounding, size.dtype)
    unit = _ROUNDING * jnp.maximum(eps, asymmetry)
    # This bounds the smallest eigenvalue of M^-1 from above.
    smallest = frobenius(tests[0]) / divisor(frobenius(tests[1]))
    change = unit * max(len(A) ** 0.5, HIDDEN / _ROUNDING) / divisor(smallest)
    hidden = change >= 1
    result = RESULTS.where(hidden, RESULTS.outside_domain, RESULTS.successful)
    symmetric = asymmetry <= largest_asymmetry(state.space)
    result = RESULTS.where(symmetric, result, RESULTS.not_hermitian)
    # We test A, not `size`: XLA's maximum on CPUs (jaxlib 0.10.2) ignores NaN.
    result = RESULTS.where(jnp.isfinite(A).all(), result, RESULTS.nonfinite)
    return unit / jnp.where(hidden, 1, 1 - change), result


def _failure_reason(
    failed: Bool[Array, ""], A: Inexact[Array, "n n"], state: SpectralState
) -> RESULTS:
    """Why a factorisation fails: an eigenvalue is negative, or hidden by rounding."""
    if not state.space.is_positive:
        return RESULTS.outside_domain
    eps, size = jnp.finfo(A.dtype).eps, jnp.max(jnp.sum(jnp.abs(A), axis=1))

    def is_negative():
        more = (size * jnp.sqrt(eps)).astype(A.dtype) * jnp.eye(len(A), dtype=A.dtype)
        return jnp.isnan(_factorise(A + more, A[:, :0])[0][0, 0])

    # We use one condition for all batch elements, or all would be factorised again.
    negative = jax.lax.cond(
        eqxi.unvmap_any(failed), is_negative, lambda: jnp.zeros_like(failed)
    )
    return RESULTS.where(negative, RESULTS.not_semidefinite, RESULTS.outside_domain)


def _judge(state: SpectralState, products: tuple[Any, Any]) -> list[ErrorBar]:
    """Rounding errors in derivatives along tangents of A and b."""
    primal = state.operator, state.rhs
    (A, B), (dA, dB) = eqx.filter_jvp(
        lambda operator, rhs: (matrix_of(operator), rhs), primal, products
    )
    dA = jnp.zeros_like(A) if dA is None else dA
    solved = solve_exactly(A, A[:, :0] if B is None else B)
    U, D = solved.solutions, _root_of_diagonal(A)
    unit, _ = _rounding(A, solved.tests, state)
    # Errors in entries enter twice, through the inverse and through dA.
    inverse, unit = inverse_of(A, solved.lower), 2 * unit
    N = matmul(inverse, dA)
    value, terms = jnp.trace(N), inverse.conj() * dA
    if state.function.evaluates(RECIPROCAL):
        value, N = -jnp.sum(N.T * inverse), 2 * matmul(inverse, N)
        terms = N
    moved = D * matmul(N, inverse) * D.T
    # We take the geometric mean between independent and coherent errors in entries.
    size = jnp.sqrt(frobenius(moved)) * jnp.sqrt(jnp.sum(jnp.abs(moved)))
    error = unit * (size + frobenius(terms))
    freedom = jnp.full_like(unit, jnp.inf)
    bars = [ErrorBar(jnp.real(value), error, freedom)]
    if B is None:
        return bars
    dB = jnp.zeros_like(U) if dB is None else dB
    change = dB - matmul(dA, U)
    forms = jnp.real(column_dots(U, dB + change))
    sizes = [jnp.linalg.norm(D * x, axis=0) for x in (matmul(inverse, change), U)]
    terms = jnp.linalg.norm(U, axis=0) * jnp.linalg.norm(dB + change, axis=0)
    errors = unit * (2 * sizes[0] * sizes[1] + terms)
    return [*bars, ErrorBar(forms, errors, jnp.full_like(errors, jnp.inf))]
