"""Exact answers from products with all n unit vectors."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array

from .._error_bar import ErrorBar, exact_bar
from .._functional import Functional, Trace
from .._linalg.dense import (
    combine,
    divisor,
    eigh,
    frobenius,
    inner,
    power_of_two_scale,
    squares,
)
from .._operators.entries import entry_of, known_sizes, map_columns
from .._operators.inverse import errors_of_solves, solve_of_column
from .._operators.solvers import truncation_error
from .._operators.space import apply_block, space_of
from .._outcome import Evidence, Outcome, as_arrays, cast_bar
from .._plan import from_all_products
from .._results import RESULTS, finite_or_failed
from .._rule import Identity
from .._spectral.base import (
    domain_results,
    exact_stats,
    forms_between,
    spectral_outcome,
)
from .._spectral.function import ritz_values, rounding_errors
from .._spectral.stand_in import Exact, RitzStandIn, bars_from_eigenvectors
from .._spectral.state import SpectralState
from .._state import CustomState, TraceState


@from_all_products.register(TraceState)
@from_all_products.register(CustomState)
def sum_of_entries(state, estimator):
    operator, space, functional = state.operator, state.space, state.functional

    def entry(column, j):
        return entry_of(column, j), solve_of_column(operator, column, j)

    entries, solves = map_columns(operator, entry)
    bar = _exact_bar(functional, space.rounding, entries, known_sizes(operator))
    if solves is not None:
        # We add solver errors without cancellation: all may have the same sign.
        solver_error = functional.sum(errors_of_solves(solves).diagonal)
        bar = bar._replace(standard_error=bar.standard_error + solver_error)
    evidence = None
    if isinstance(functional, Trace):
        bars_from = jtu.Partial(_bars_from_entries, functional, space.rounding)
        evidence = Evidence((entries, None), bars_from)
    dtype = space.real_dtype if space.has_real_trace else space.compute_dtype
    bar = cast_bar(bar._replace(degrees_of_freedom=jnp.inf), dtype)
    result = finite_or_failed(bar.mean, RESULTS.successful)
    stats = as_arrays({"num_matvecs": space.size})
    return Outcome([bar], [result], stats, evidence), Identity(operator, evidence)


def _exact_bar(
    functional: Functional, rounding: float, entries: Array, sizes: Array | None = None
) -> ErrorBar:
    """The sum of entries, whose rounding errors are relative to `sizes` if these are
    larger: terms may cancel in an entry."""
    moduli = jnp.abs(entries)
    moduli = moduli if sizes is None else jnp.maximum(moduli, sizes)
    return exact_bar(functional.sum(entries), rounding * functional.sum(moduli))


def _bars_from_entries(
    functional: Functional, rounding: float, products: tuple[Array, None]
) -> list[ErrorBar]:
    return [_exact_bar(functional, rounding, products[0])]


@from_all_products.register(SpectralState)
def sum_over_eigenvalues(state, estimator):
    operator, space = state.operator, state.space
    identity = jnp.eye(space.size, dtype=space.compute_dtype)
    A = apply_block(operator, identity)
    hermitian = A / 2 + A.conj().T / 2
    unit = power_of_two_scale(A).astype(A.dtype)
    size = divisor(frobenius(hermitian / unit))
    asymmetry = frobenius((A - hermitian) / unit) / size
    theta, S = eigh(hermitian)
    indices = jnp.arange(space.size, dtype=jnp.int32)
    solves = jax.vmap(ft.partial(solve_of_column, operator), (1, 0))(A, indices)
    error = state.solvers
    if solves is not None:
        solve_error = jnp.linalg.norm(errors_of_solves(solves).columns)
        error = solve_error / divisor(jnp.max(jnp.abs(theta), initial=0))
        truncated = truncation_error(operator, space.real_dtype)
        error = error if truncated is None else jnp.maximum(error, truncated)
    magnitude = state.magnitude
    theta, resolution, result = ritz_values(
        theta, asymmetry, space, state.lower, magnitude, error
    )
    function, ones = state.function.in_range(theta), jnp.ones_like(theta)
    values = [jnp.sum(f, axis=-1) for f in function(theta)]
    errors, decided = rounding_errors(function, theta, ones, resolution, state.lower)
    bars = [
        ErrorBar(value, error, jnp.full_like(error, jnp.inf))
        for value, error in zip(values, errors, strict=True)
    ]
    results = domain_results(decided, result)
    stats = {"num_matvecs": space.size, **function.unit}
    if estimator.gives_brackets:
        stats.update(exact_stats(state, values))
    forms, solutions, t_rhs = None, None, None
    if state.rhs is not None:
        exact = forms_between(inner(S, state.rhs), theta, None, magnitude)
        forms, solutions = exact.bar, exact.coordinates
        stats.update(inv_quad_bracket=exact.bracket, solution=combine(S, solutions))
        t_rhs = jnp.zeros_like(solutions)
    bars_from = jtu.Partial(
        bars_from_eigenvectors, Exact(theta, S, solutions), state.function
    )
    evidence = Evidence((jnp.zeros_like(A), state.function, t_rhs), bars_from)
    outcome = spectral_outcome(
        state, bars, results, stats, theta, ones, forms, evidence
    )
    pairs = identity, theta, S, identity
    return outcome, RitzStandIn(*pairs, solutions=solutions, evidence=evidence)


def norm_squared(operator: lx.AbstractLinearOperator) -> Outcome:
    """`|A|_F^2`, from products with A alone. JAX differentiates it."""
    space = space_of(operator)

    def norm(column, j):
        unit = jax.lax.stop_gradient(power_of_two_scale(column))
        square = jnp.sum(squares(column / unit.astype(column.dtype)))
        return square, unit, solve_of_column(operator, column, j)

    norms, units, solves = map_columns(operator, norm)
    # We give zero columns the unit 0.
    units = jnp.where(norms == 0, 0, units)
    unit = divisor(jnp.max(units, initial=0))
    value = jnp.sum(norms * (units / unit) ** 2) * unit * unit
    bar = exact_bar(value, value)
    if solves is not None:
        lengths = jax.lax.stop_gradient(units * jnp.sqrt(norms))
        more = 2 * jnp.sum(lengths * errors_of_solves(solves).columns)
        bar = bar._replace(standard_error=bar.standard_error + more)
    truncated = truncation_error(operator, space.real_dtype)
    if truncated is not None:
        more = 2 * truncated * jax.lax.stop_gradient(value)
        bar = bar._replace(standard_error=bar.standard_error + more)
    bars, stats = [cast_bar(bar, space.real_dtype)], {"num_matvecs": space.size}
    evidence = Evidence(bar.mean, jtu.Partial(_bars_from_norm))
    return Outcome(bars, [RESULTS.successful], as_arrays(stats), evidence)


def _bars_from_norm(value: Array) -> list[ErrorBar]:
    return [exact_bar(value, value)]
