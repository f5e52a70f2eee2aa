r"""Elimination of rows S from `A = K + N` by a Cholesky factorisation.

With `J = A_SS^-1 A_SR` for the other rows R, and `T = [-J; I]`, the Schur complement
`T^* A T` has no eigenvalue below N_R, and

    log det A = log det A_SS + log det (T^* A T),
    y^* A^-1 y = y_S^* A_SS^-1 y_S + (T^* y)^* (T^* A T)^-1 (T^* y).

Only the terms with `T^* A T` need an estimate, and the trace of this matrix is known. As
`(A T)_S = 0`, errors in J enter only as squares, and derivatives hold J fixed.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Bool, Float, Inexact, Int

from ._error_bar import ErrorBar, add_known_error
from ._exact.cholesky import (
    Rounding,
    entry_rounding,
    roots_of,
    solve_exactly,
    solve_from,
)
from ._linalg.dense import column_dots, frobenius, matmul, residual_of, squares
from ._linalg.pivoted_cholesky import rounding_of
from ._linalg.whitening import Block, Preconditioner
from ._operators.entries import columns_of, diagonal_of, sizes_of
from ._operators.space import apply_block, space_of
from ._outcome import Outcome
from ._preconditioner import PreconditionedLinearOperator
from ._results import RESULTS


class Elimination(Preconditioner):
    """`M = N_R^-1/2 T^*`, from all n rows to the rows R."""

    logdet: Float[Array, ""]  # log det A_SS + log det N_R, for fixed N_R
    trace: Float[Array, ""]  # tr B, B = M A M^*
    order: Int[Array, " n"]  # rows in S, followed by rows in R
    factor: Inexact[Array, "r r"]  # the Cholesky factor of A_SS
    interpolation: Inexact[Array, "r m"]  # J
    inverse_sqrt_noise: Float[Array, " m"]  # N_R^-1/2
    rounding: Rounding  # in numbers from A_SS, with D for all rows
    trace_of_sizes: Float[Array, ""]  # tr(N_R^-1/2 T^* D^2 T N_R^-1/2)
    changes: Float[Array, " q"]  # in `y_S^* A_SS^-1 y_S`, from the last refinement
    semidefinite: Bool[Array, ""]
    finite: Bool[Array, ""]  # whether entries are finite
    norm: Float[Array, ""]  # the root mean square eigenvalue of columns, over noise

    @property
    def lower(self):
        return jnp.ones_like(self.logdet)

    @property
    def magnitude(self):
        return self.norm

    @property
    def default_probes(self):
        # Products with 25 vectors take hardly longer than with 6.
        return 24

    def num_rows(self, n):
        return n - len(self.interpolation)

    def verdict(self, n):
        r, m = self.interpolation.shape
        exact = self.rounding.result
        failures = [
            (~self.semidefinite, RESULTS.not_semidefinite),
            (exact != RESULTS.successful, exact),
            (~self.finite, RESULTS.nonfinite),
        ]
        return {"num_columns": jnp.int32(r), "residual": (self.trace - m) / n}, failures

    def apply(self, block: Block) -> Array:  # M V
        r, block = len(self.interpolation), block[self.order]
        rest = block[r:] - matmul(self.interpolation.conj().T, block[:r])
        return rest * self.inverse_sqrt_noise[:, None].astype(block.dtype)

    def apply_adjoint(self, block: Block) -> Array:  # M^* V
        block = block * self.inverse_sqrt_noise[:, None].astype(block.dtype)
        block = jnp.concatenate([-matmul(self.interpolation, block), block])
        return self._in_rows(block)

    def _in_rows(self, block: Block) -> Array:
        return jnp.zeros_like(block).at[self.order].set(block, unique_indices=True)

    def solve(self, inverse: Callable[[Block], Array], block: Block) -> Array:
        head = solve_from(self.factor, block[self.order[: len(self.factor)]])
        head = jnp.pad(head, ((0, len(block) - len(head)), (0, 0)))
        rest = self.apply_adjoint(inverse(self.apply(block)))
        return self._in_rows(head) + rest

    def with_rounding(
        self,
        outcome: Outcome,
        answers: tuple[Float[Array, " q"], Inexact[Array, "n q"]] | None,
        moving: tuple[lx.AbstractLinearOperator, Array, Array | None],
    ) -> Outcome:
        """Adds rounding errors in entries of A to the outcome for B.

        - `answers`: `y^* A^-1 y` and `A^-1 y`.
        - `moving`: K, N and y, whose tangents determine errors in slopes.
        """
        points, weights = outcome.stats["ritz_values"], outcome.stats["ritz_weights"]
        m = len(self.inverse_sqrt_noise)
        mean, mean_square = (jnp.sum(weights / points**p) / m for p in (1, 2))
        scale = jnp.sqrt(jnp.clip(mean_square, 0, 1))
        trace = self.rounding.trace + mean * self.trace_of_sizes
        rounding = self.rounding._replace(trace=trace)
        errors = [rounding.error(self.logdet + outcome.bars[0].mean)]
        if answers is not None:
            errors.append(rounding.errors_of_forms(*answers) + self.changes)
        bars = list(map(add_known_error, outcome.bars, errors))
        evidence = outcome.evidence
        if evidence is not None:
            solution = None if answers is None else answers[1]
            bars_from = jtu.Partial(
                _slope_bars, self, scale, solution, moving, evidence.bars_from
            )
            products = evidence.products, moving
            evidence = dataclasses.replace(
                evidence, products=products, bars_from=bars_from
            )
        return outcome._replace(bars=bars, evidence=evidence)


def _slope_bars(
    elimination: Elimination,
    scale: Float[Array, ""],
    solution: Inexact[Array, "n q"] | None,
    primal: tuple[lx.AbstractLinearOperator, Array, Array | None],
    bars_from: jtu.Partial,
    products: tuple[Any, tuple[Any, Array, Array | None]],
) -> list[ErrorBar]:
    """Error bars for slopes, with rounding errors in entries of A and dA."""
    inner_products, (*tangent, dy) = products

    def product(block):
        def apply(operator, noise):
            noise = noise[:, None].astype(block.dtype)
            return apply_block(operator, block) + noise * block

        return eqx.filter_jvp(apply, primal[:2], tuple(tangent))[1]

    rounding = elimination.rounding
    solve = ft.partial(elimination.solve, lambda x: scale.astype(x.dtype) * x)
    errors = [rounding.slope_error(solve, product)]
    if solution is not None and dy is not None:
        change = dy - product(solution)
        errors.append(rounding.slope_errors_of_forms(solve, change, dy, solution))
    return list(map(add_known_error, bars_from(inner_products), errors))


class Eliminated(NamedTuple):
    """The problem for the rows R, and the terms from the rows S."""

    elimination: Elimination  # fixed, but for its log-determinant
    operator: PreconditionedLinearOperator  # B, at least 1
    rhs: Inexact[Array, "m q"] | None  # M y
    forms: Float[Array, " q"] | None  # y_S^* A_SS^-1 y_S
    solution: Inexact[Array, "n q"] | None  # A_SS^-1 y_S, and zeros


def eliminate(
    operator: lx.AbstractLinearOperator,
    noise: Float[Array, " n"],
    pivots: Int[Array, " r"],
    semidefinite: Bool[Array, ""],
    rhs: Inexact[Array, "n q"] | None,
) -> Eliminated:
    """Eliminates the rows in `pivots`. Other rows take the place of -1 and of copies."""
    n, r = len(noise), len(pivots)
    is_pivot = jnp.zeros(n, bool).at[jnp.where(pivots < 0, n, pivots)].set(True)
    order = jnp.argsort(~is_pivot, stable=True).astype(jnp.int32)
    S, R = order[:r], order[r:]
    columns = columns_of(operator, S)
    columns = columns.at[S, jnp.arange(r)].add(noise[S].astype(columns.dtype))
    A_SS = (columns[S] + columns[S].conj().T) / 2
    y_S = A_SS[:, :0] if rhs is None else rhs[S]
    space = space_of(operator)._replace(is_positive=True)
    D = roots_of(sizes_of(operator) + noise, A_SS)
    solved = solve_exactly(A_SS, y_S, D[S])
    rounding = entry_rounding(A_SS, D[S], solved, space, order=n)

    A_RS = jax.lax.stop_gradient(columns)[R]
    J = solve_from(jax.lax.stop_gradient(solved.lower), A_RS.conj().T)
    fixed_noise = jax.lax.stop_gradient(noise[R])
    diagonal = jax.lax.stop_gradient(jnp.real(diagonal_of(operator)))[R]
    captured = jnp.real(column_dots(J, A_RS.conj().T))
    residual = diagonal - captured
    in_range = jnp.all(pivots < n)
    squared_sizes = squares(D[R, 0]) + jnp.sum(squares(D[S] * J), axis=0)
    # The root mean square eigenvalue, |A|_F / sqrt(n), if all columns are alike.
    size = frobenius(jax.lax.stop_gradient(columns)) / r**0.5
    negative = rounding_of(diagonal).negative
    elimination = Elimination(  # pyright: ignore
        logdet=solved.logdet + jnp.sum(jnp.log(fixed_noise)),
        trace=jnp.where(in_range, len(R) + jnp.sum(residual / fixed_noise), jnp.nan),
        order=order,
        factor=solved.lower,
        interpolation=J,
        inverse_sqrt_noise=jax.lax.rsqrt(fixed_noise),
        norm=size / jnp.min(fixed_noise),
        rounding=rounding._replace(D=D),
        trace_of_sizes=jnp.sum(squared_sizes / fixed_noise),
        changes=solved.changes,
        semidefinite=semidefinite & jnp.all(residual >= -negative),
        finite=jnp.isfinite(size + jnp.sum(diagonal)) & in_range,
    )
    fixed = jax.lax.stop_gradient(elimination)
    B = PreconditionedLinearOperator(operator, fixed, noise)
    if rhs is None:
        return Eliminated(elimination, B, None, None, None)
    head = jax.lax.stop_gradient(solved.solutions)
    # This equals M y, and has the derivative of M too.
    rest = fixed.apply(residual_of(columns, head, rhs))
    solution = jnp.zeros_like(rhs).at[S].set(head)
    return Eliminated(elimination, B, rest, solved.forms, solution)
