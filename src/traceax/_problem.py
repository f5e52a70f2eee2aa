"""The problem behind all likelihoods: one log-determinant, and quadratic forms."""

import dataclasses
import functools as ft
import math
import operator as op
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, Key, PyTree

from ._arguments import check_key, require
from ._elimination import Elimination, eliminate
from ._error_bar import ErrorBar, add_known_error, exact_bar
from ._estimate import Estimate
from ._estimator import outcome_of
from ._exact.cholesky import BY_CHOLESKY, is_small
from ._linalg.types import automatic, without_derivatives
from ._linalg.whitening import Preconditioner, Unscaled, scale_only
from ._operators.check import checked_operator, is_data, jitted
from ._operators.entries import diagonal_of, has_known_entries, readable_data
from ._operators.kernel import is_dense
from ._operators.space import ShiftedLinearOperator, Space, apply_block, space_of
from ._outcome import Outcome, make_estimate
from ._plan import ExactAnswer, Plan, make_plan
from ._preconditioner import (
    PreconditionedLinearOperator,
    check_preconditioner,
    default_columns,
    eliminates,
    make_preconditioner,
    noise_of,
    pivots_of,
)
from ._results import RESULTS
from ._spectral.function import LOG, final
from ._spectral.krylov_aware import KrylovAwareEstimator
from ._spectral.state import SpectralState, likelihood_bar
from ._spectral_estimate import Options
from ._state import DerivedState
from ._tolerance import ProgressMeter, Stop

T = TypeVar("T")
By = tuple[str, int | float]  # the method's name, and products for an exact answer
Given = int | Int[Array, " r"] | Preconditioner | None
_FIRST, _SECOND = map(jtu.Partial, (op.itemgetter(0), op.itemgetter(1)))
_B_STATS = ("ritz_values", "ritz_weights", "inv_quad_bracket", "solution")


def solve(
    where: str,
    answer: Callable[["Problem", Outcome, By], T],
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    y: object,
    k: int | None,
    estimator: object,
    shift: ArrayLike,
    preconditioner: Given,
    options: Options,
) -> T:
    """Checks the arguments of an entry point, and runs one program for its answer."""
    key, operator = check_key(key, where), checked_operator(operator, where)
    data, space = readable_data(operator), space_of(operator)
    is_zero = isinstance(shift, int | float | np.number) and shift == 0
    if is_zero and preconditioner is None:
        preconditioner = Unscaled(jnp.zeros((), space.real_dtype))
    custom = isinstance(preconditioner, Preconditioner)
    rule = "shift must be positive to take columns"
    hint = "leave preconditioner= out, or pass a custom traceax.Preconditioner"
    require(custom or not is_zero, where, rule, shift, hint)
    noise = noise_of(operator, shift, where, throw=options.throw, positive=not custom)
    preconditioner = check_preconditioner(preconditioner, operator, where)
    y = None if y is None else _check_rhs(y, space, where)
    stop = options.stop(space.compute_dtype, where)
    automatic = k is None and estimator is None
    can_choose = is_dense(operator) and has_known_entries(operator)
    if automatic and preconditioner is None and can_choose:
        preconditioner = default_columns(space.size)
    is_hard = eliminates(preconditioner, space.size)
    exact = BY_CHOLESKY if automatic and is_small(operator, is_hard) else None
    estimator = KrylovAwareEstimator() if estimator is None else estimator
    require(
        isinstance(estimator, KrylovAwareEstimator),
        where,
        "estimator must be a traceax.KrylovAwareEstimator",
        estimator,
        "pass an instance, or None",
        TypeError,
    )
    meter = options.progress_meter
    # We reuse a compiled program only for data: other leaves may have changed since.
    reusable = data is not None and all(map(is_data, jtu.tree_leaves(preconditioner)))
    run = _jitted if reusable else _answer
    inputs = where, key, operator if data is None else data, y, noise, preconditioner
    return run(answer, inputs, k, estimator, stop, meter, exact)


@automatic
def _answer(answer, inputs, k, estimator, stop, meter, exact):
    problem = _pose(*inputs, exact=exact is not None)
    plan = problem.plan(k, estimator, stop, meter, exact)
    return answer(problem, problem.outcome(plan), plan.by)


_jitted = jitted(_answer)


def _pose(
    where: str,
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    y: Inexact[Array, "n ..."] | None,
    noise: Float[Array, "*n"],
    preconditioner: Given,
    exact: bool,
) -> "Problem":
    """Poses the original problem for an exact answer, else the preconditioned one."""
    space = space_of(operator)
    n, custom = space.size, isinstance(preconditioner, Preconditioner)
    noise, shape, finite = jnp.broadcast_to(noise, n), (n, 0), jnp.asarray(True)
    if y is not None:
        shape, finite = y.shape, jnp.isfinite(y).all()
    rhs = None if y is None else y.reshape(n, -1)
    if exact:
        total = ShiftedLinearOperator(operator, noise)
        total = lx.TaggedLinearOperator(total, lx.positive_semidefinite_tag)
        # A custom preconditioner allows any noise, so we assume no bound.
        lower = None if custom else jax.lax.stop_gradient(jnp.min(noise))
        state, one = SpectralState(key, total, LOG, lower, rhs), jnp.ones_like(noise)
        P = scale_only(one, space.compute_dtype)
        return Problem(where, state, P, one if custom else noise, shape, finite)
    if eliminates(preconditioner, n):
        pivots = pivots_of(key, operator, preconditioner, noise)
        P, B, rest, forms, head = eliminate(operator, noise, *pivots, rhs)
        one = jnp.ones((), space.real_dtype)
        state = SpectralState(key, B, LOG, one, rest, P, P.trace)
        return Problem(where, state, P, noise, shape, finite, forms, head, rhs)
    P = make_preconditioner(key, operator, preconditioner, noise)
    # We fix a preconditioner that has a `drift`: the stand-in adds this derivative.
    block = jax.ShapeDtypeStruct((n, 1), space.compute_dtype)
    fixed = P
    if eqx.filter_eval_shape(P.drift, block) is not None:
        fixed = without_derivatives(P)
    y, rhs = rhs, None if rhs is None else fixed.apply(rhs)
    lower = P.lower
    if lower is not None:
        lower = jax.lax.stop_gradient(jnp.asarray(lower, space.real_dtype))
    B = PreconditionedLinearOperator(operator, fixed, noise)
    trace = None
    unscaled = isinstance(P, Unscaled)
    if (preconditioner is None or unscaled) and has_known_entries(operator):
        # We pass the trace of B. With columns it would cost a product each.
        diagonal = jnp.real(diagonal_of(operator))
        trace = jnp.sum(diagonal) if unscaled else n + jnp.sum(diagonal / noise)
    state = SpectralState(key, B, LOG, lower, rhs, P, trace)
    # With a custom preconditioner we don't check the noise: ones always pass.
    noise = jnp.ones_like(noise) if custom else noise
    return Problem(where, state, P, noise, shape, finite, y=y)


class Problem(NamedTuple):
    """The operator `B = M (K + N) M^*`, at least 1, and right-hand sides `M y`.

    - `where`: the name that error messages start with.
    - `state`: the state for B.
    - `preconditioner`: M, differentiable.
    - `noise`: N.
    - `shape`: the shape of y, or `(n, 0)` without y.
    - `finite`: whether y is finite.
    - `forms`, `head`: the quadratic forms and the solution for eliminated rows.
    - `y`: the right-hand sides.
    """

    where: str
    state: SpectralState
    preconditioner: Preconditioner
    noise: Float[Array, " n"]
    shape: tuple[int, ...]
    finite: Bool[Array, ""]
    forms: Float[Array, " q"] | None = None
    head: Inexact[Array, "n q"] | None = None
    y: Inexact[Array, "n q"] | None = None

    @property
    def number(self) -> int:
        """The number of right-hand sides."""
        return math.prod(self.shape[1:])

    def plan(
        self,
        k: int | None,
        estimator: KrylovAwareEstimator,
        stop: Stop | None,
        meter: ProgressMeter,
        exact: ExactAnswer | None,
    ) -> Plan:
        state, where, least = self.state, self.where, 1 + self.number
        if stop is not None and exact is None:
            stop = self._stop(stop)
        plan = make_plan(estimator, state, k, stop, meter, where, exact)
        rule = f"k must be at least {least}, a product for a probe and each column of y"
        most = plan.products if k is None else k
        received = "none, and its default is too small" if k is None else str(most)
        hint = f"pass more for accuracy, or n = {plan.size} for the exact answer"
        is_enough = exact is not None or most >= min(least, plan.size)
        require(is_enough, where, rule, received, hint)
        return plan

    def outcome(self, plan: Plan) -> Outcome:
        """Estimates `tr log B` and the quadratic forms."""
        outcome, _ = outcome_of(plan, self.state)
        P, B = self.preconditioner, self.state.operator
        if not isinstance(P, Elimination):
            return outcome
        assert isinstance(B, PreconditionedLinearOperator)
        answers = None
        if self.forms is not None:
            forms = self.forms + outcome.bars[1].mean
            solution = self.solution(outcome).reshape(len(self.noise), -1)
            answers = jax.lax.stop_gradient((forms, solution))
        return P.with_rounding(outcome, answers, (B.operator, B.noise, self.y))

    def _stop(self, stop: Stop) -> Stop:
        known = self.preconditioner.logdet if self.number == 0 else self._constant()
        offset = jax.lax.stop_gradient(known)
        return stop.for_part(None, offset.astype(self.state.space.compute_dtype))

    def _constant(self) -> Float[Array, ""]:
        """The log likelihood without the terms that depend on B."""
        half = self.state.half
        normalisation = self.shape[0] * math.log(math.pi / half)
        known = -self.number * half * (self.preconditioner.logdet + normalisation)
        return known if self.forms is None else known - half * jnp.sum(self.forms)

    def logdet(self, outcome: Outcome, by: By) -> Estimate:
        """`log det P + tr log B`."""
        known, bar = self.preconditioner.logdet, outcome.bars[0]
        bracket = tuple(x + jax.lax.stop_gradient(known) for x in _bracket(outcome))
        stats = self._stats(outcome, bracket)
        return self._estimate(outcome, _plus(bar, known), stats, _FIRST, by)

    def inv_quad(self, outcome: Outcome, by: By) -> Estimate:
        """`b^* B^-1 b` for each right-hand side."""
        kept = "num_matvecs", "products_needed", "bracket_is_proven"
        stats = {name: x for name, x in outcome.stats.items() if name in kept}
        ends, bar = outcome.stats["inv_quad_bracket"], outcome.bars[1]
        if self.forms is not None:
            known = jax.lax.stop_gradient(self.forms)
            ends = tuple(x + known for x in ends)
            bar = _plus(bar, self.forms)
        stats["bracket"] = tuple(x.reshape(self.shape[1:]) for x in ends)
        bar = ErrorBar(*(x.reshape(self.shape[1:]) for x in bar))
        return self._estimate(outcome, bar, stats, _SECOND, by)

    def terms(self, outcome: Outcome, by: By) -> tuple[Estimate, Estimate, Array]:
        """The log-determinant, the quadratic forms and the solution."""
        logdet, inv_quad = self.logdet(outcome, by), self.inv_quad(outcome, by)
        return logdet, inv_quad, self.solution(outcome)

    def solution(self, outcome: Outcome) -> Inexact[Array, "n ..."]:
        """`A^-1 y = M^* B^-1 M y`."""
        B, solution = self.state.operator, outcome.stats["solution"]
        if isinstance(B, PreconditionedLinearOperator):
            solution = B.preconditioner.apply_adjoint(solution)
            if self.head is not None:
                solution = solution + self.head
            solution = jax.lax.stop_gradient(solution)
            solution = _with_slope(solution, B, self.y)
        return solution.reshape(self.shape)

    def likelihood(self, outcome: Outcome, by: By) -> Estimate:
        """The log density of y."""
        half, constant = self.state.half, self._constant()
        bar = likelihood_bar(half, outcome.bars)
        ends = zip(_bracket(outcome), outcome.stats["inv_quad_bracket"], strict=True)
        totals = [-half * (self.number * x + jnp.sum(y)) for x, y in ends]
        known = jax.lax.stop_gradient(constant)
        stats = self._stats(outcome, tuple(known + x for x in reversed(totals)))
        bar = _plus(bar, constant)
        combine = jtu.Partial(likelihood_bar, half)
        stats["solution"] = self.solution(outcome)
        return self._estimate(outcome, bar, stats, combine, by)

    def _stats(self, outcome: Outcome, bracket: tuple[Array, ...]) -> dict[str, Any]:
        # Ritz values and weights belong to B, not to A, so we drop them.
        stats = {name: x for name, x in outcome.stats.items() if name not in _B_STATS}
        return {**stats, "bracket": bracket}

    def _estimate(
        self,
        outcome: Outcome,
        bar: ErrorBar,
        stats: dict[str, Any],
        combine: jtu.Partial,
        by: By,
    ) -> Estimate:
        P, evidence = self.preconditioner, outcome.evidence
        own_stats, failures = P.verdict(self.shape[0])
        failures += [
            (~jnp.all(self.noise > 0), RESULTS.noise_not_positive),
            (~self.finite, RESULTS.y_not_finite),
        ]
        result = outcome.results[0]
        for failed, reason in failures:
            result = RESULTS.where(failed, reason, result)
        if evidence is not None:
            bars_from = jtu.Partial(_combined_bars, combine, evidence.bars_from)
            evidence = dataclasses.replace(evidence, bars_from=bars_from)
        whole = Outcome([bar], [result], {**stats, **own_stats}, evidence)
        treedef, state = jtu.tree_structure(0), DerivedState(self.where)
        return make_estimate(whole, treedef, state, by)


@eqx.filter_custom_jvp
def _with_slope(
    solution: Inexact[Array, "n q"],
    B: PreconditionedLinearOperator,
    y: Inexact[Array, "n q"] | None,
) -> Inexact[Array, "n q"]:
    """The solution, with the derivative `A^-1 (dy - dA A^-1 y)`, from one more solve."""
    return solution


@_with_slope.def_jvp
def _solution_jvp(primals, tangents):
    solution, B, y = primals
    if not jtu.tree_leaves(tangents[1:]):
        return solution, None

    def residual(B, y):
        noise = B.noise[:, None].astype(y.dtype)
        return y - apply_block(B.operator, solution) - noise * solution

    _, t_residual = eqx.filter_jvp(residual, (B, y), tuple(tangents[1:]))
    solution, B = final((solution, B))
    info = jnp.finfo(solution.dtype)
    # A positive absolute tolerance lets it stop for a zero residual.
    tolerances = float(info.eps) ** (2 / 3), float(info.tiny)
    solver = lx.CG(*tolerances, stabilise_every=None)

    def column(v):
        solved = lx.linear_solve(B, v, solver, throw=False)
        converged = solved.result == lx.RESULTS.successful
        return solved.value * jnp.where(converged, 1, jnp.nan).astype(v.dtype)

    def solve(_, block):
        return jax.vmap(column, 1, 1)(block)

    def transposed(_, block):
        return solve(_, block.conj()).conj()

    # The system is the identity: we only need JAX's custom transpose for linear solves.
    inverse = ft.partial(
        jax.lax.custom_linear_solve,
        lambda block: block,
        solve=solve,
        transpose_solve=transposed,
    )
    return solution, B.preconditioner.solve(inverse, t_residual)


def _bracket(outcome: Outcome) -> tuple[Array, Array]:
    return jax.lax.stop_gradient(outcome.stats["bracket"])


def _combined_bars(
    combine: jtu.Partial, bars_from: jtu.Partial, products: PyTree
) -> list[ErrorBar]:
    """Combines the log-determinant's and the forms' error bars for an entry point."""
    return [combine(bars_from(products))]


def _plus(bar: ErrorBar, known: Float[Array, "*q"]) -> ErrorBar:
    """Adds a known term, with the rounding error of the sum."""
    rounding = exact_bar(known, jnp.abs(bar.mean) + jnp.abs(known)).standard_error
    return add_known_error(bar._replace(mean=bar.mean + known), rounding)


def _check_rhs(y: Any, space: Space, where: str) -> Inexact[Array, "n ..."]:
    n = space.size
    hint = f"pass n = {n} observations, or a column of them for each output"
    is_array = isinstance(y, jax.Array | np.ndarray)
    require(is_array, where, "y must be an array", y, hint, TypeError)
    is_numeric = jnp.issubdtype(y.dtype, jnp.number)
    require(is_numeric, where, "y must hold numbers", y, hint, TypeError)
    fits = y.ndim in (1, 2) and y.shape[0] == n and y.size > 0
    rule = f"y must have shape ({n},) or ({n}, q)"
    require(fits, where, rule, y, hint)
    is_real = space.is_complex or not jnp.iscomplexobj(y)
    rule = "y must be real, as the operator is"
    hint = (
        "pass its real and imaginary parts as two columns, "
        "jnp.stack([y.real, y.imag], axis=1)"
    )
    require(is_real, where, rule, y, hint, TypeError)
    return jnp.asarray(y, space.compute_dtype)
