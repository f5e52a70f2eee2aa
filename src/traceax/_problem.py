"""The problem behind a likelihood's doors: one log-determinant, and quadratic forms."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, Key

from ._accuracy.tolerance import Stop
from ._arguments import check_key, require
from ._drive import limits, run_estimator
from ._estimate import Estimate, joint_error, with_slopes
from ._linalg.whitening import Preconditioner, Whitening, scale_only
from ._operators.block import Space, is_data, jitted, space_of
from ._operators.check import ShiftedLinearOperator, checked_operator
from ._operators.entries import diagonal_of, has_known_entries, readable_data
from ._preconditioner import (
    PreconditionedLinearOperator,
    check_preconditioner,
    make_preconditioner,
    noise_of,
)
from ._progress import ProgressMeter
from ._results import RESULTS, finite_or_failed
from ._spectral.base import SpectralState, likelihood_bar
from ._spectral.blocks import Terms
from ._spectral.cholesky import factorised, is_small
from ._spectral.estimate import Options
from ._spectral.function import LOG
from ._spectral.krylov_aware import KrylovAwareEstimator

T = TypeVar("T")
Given = int | Int[Array, " r"] | Preconditioner | None
_OF_B = ("ritz_values", "ritz_weights", "inv_quad_bracket", "solution")


def solve(
    where: str,
    answer: Callable[["Problem", Estimate], T],
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    y: Any,
    k: int | None,
    estimator: Any,
    shift: ArrayLike,
    preconditioner: Given,
    options: Options,
) -> T:
    """What a door returns, by one program, from arguments that are checked before it."""
    key, operator = check_key(key, where), checked_operator(operator, where)
    data, space = readable_data(operator), space_of(operator)
    own = isinstance(preconditioner, Preconditioner)
    noise = noise_of(operator, shift, where, throw=options.throw, positive=not own)
    preconditioner = check_preconditioner(preconditioner, operator, where)
    y = None if y is None else _check_right(y, space, where)
    stop = options.stop(space.compute_dtype, where)
    exact = k is None and estimator is None and is_small(operator)
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
    # Anything that isn't data may have changed since a program was made.
    kept = data is not None and all(map(is_data, jtu.tree_leaves(preconditioner)))
    run = _jitted if kept else _answer
    posed = where, key, operator if data is None else data, y, noise, preconditioner
    return run(answer, posed, k, estimator, stop, meter, exact)


def _answer(answer, posed, k, estimator, stop, meter, exact):
    problem = _pose(*posed, exact=exact)
    if exact:
        bounded = problem.state.lower is not None
        return answer(problem, factorised(problem.state, bounded))
    return answer(problem, problem.estimate(k, estimator, stop, meter))


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
    """The problem itself for an exact answer, else scaled and preconditioned."""
    space = space_of(operator)
    n, own = space.size, isinstance(preconditioner, Preconditioner)
    noise, shape, finite = jnp.broadcast_to(noise, n), (n, 0), jnp.asarray(True)
    if y is not None:
        shape, finite = y.shape, jnp.isfinite(y).all()
    right = None if y is None else y.reshape(n, -1)
    if exact:
        total = ShiftedLinearOperator(operator, noise)
        total = lx.TaggedLinearOperator(total, lx.positive_semidefinite_tag)
        # The noise need not be positive next to a custom preconditioner.
        lower = None if own else jax.lax.stop_gradient(jnp.min(noise))
        state, one = SpectralState(key, total, LOG, lower, right), jnp.ones_like(noise)
        P = scale_only(one, space.compute_dtype)
        return Problem(where, state, P, one if own else noise, shape, finite)
    P = make_preconditioner(key, operator, preconditioner, noise)
    right = None if right is None else P.apply(right)
    lower = P.lower
    if lower is not None:
        lower = jax.lax.stop_gradient(jnp.asarray(lower, space.real_dtype))
    B = PreconditionedLinearOperator(operator, P, noise if own else None)
    trace = None
    if preconditioner is None and has_known_entries(operator):
        # The trace of B. Columns would make it cost a product each.
        trace = n + jnp.sum(jnp.real(diagonal_of(operator)) / noise)
    state = SpectralState(key, B, LOG, lower, right, P, trace)
    return Problem(where, state, P, noise, shape, finite)


class Problem(NamedTuple):
    """The operator `B = M (K + N) M^*`, at least 1, and right-hand sides `M y`.

    - `where`: the name that error messages start with.
    - `state`: of B.
    - `preconditioner`: M, differentiable.
    - `noise`: N.
    - `shape`: the shape of y; `(n, 0)` if there is none.
    - `finite`: whether y is.
    """

    where: str
    state: SpectralState
    preconditioner: Preconditioner
    noise: Float[Array, " n"]
    shape: tuple[int, ...]
    finite: Bool[Array, ""]

    @property
    def number(self) -> int:
        """How many right-hand sides there are."""
        return math.prod(self.shape[1:])

    def estimate(
        self, k: int | None, estimator: Any, stop: Stop | None, meter: ProgressMeter
    ) -> Estimate:
        """`tr log B`, and the quadratic forms."""
        state, where = self.state, self.where
        space = state.space
        most, end = limits(estimator, state, k, stop, meter, where)
        least = 1 + self.number
        what = f"k must be at least {least}, a product for a probe and for each column of y"
        got = "none, and its default is too small" if k is None else str(most)
        hint = f"more steps make it accurate; n = {space.size} give the exact answer"
        require(most >= min(least, space.size), where, what, got, hint)
        if isinstance(end, Stop):
            end = self._stop(end)
        return run_estimator(estimator, state, most, end, throw=False)

    def _stop(self, stop: Stop) -> Stop:
        known = self.preconditioner.logdet if self.number == 0 else self._constant()
        offset = jax.lax.stop_gradient(known)
        return stop.for_part(None, offset.astype(self.state.space.compute_dtype))

    def _constant(self) -> Float[Array, ""]:
        """The log likelihood but for the terms of B."""
        of_two_pi = self.state.space.size * math.log(2 * math.pi)
        return -self.number * (self.preconditioner.logdet + of_two_pi) / 2

    def logdet(self, estimate: Estimate) -> Estimate:
        """`log det P + tr log B`."""
        known = self.preconditioner.logdet
        value, error = _of_terms(estimate, "logdet")
        stats = dict(estimate.stats)
        stats["bracket"] = tuple(
            x + jax.lax.stop_gradient(known) for x in self._bracket(estimate)
        )
        error = _with_rounding(error, value, known)
        return self._made(estimate, value + known, error, stats)

    def inv_quad(self, estimate: Estimate) -> Estimate:
        """`b^* B^-1 b` of each right-hand side."""
        value, error = _of_terms(estimate, "inv_quad")
        kept = "num_matvecs", "products_needed", "bracket_is_proven"
        stats = {
            **{name: x for name, x in estimate.stats.items() if name in kept},
            "bracket": tuple(map(self._like_y, estimate.stats["inv_quad_bracket"])),
            "degrees_of_freedom": jnp.full(self.shape[1:], jnp.inf, error.dtype),
        }
        value, error = self._like_y(value), self._like_y(error)
        return self._made(estimate, value, error, stats)

    def terms(self, estimate: Estimate) -> tuple[Estimate, Estimate, Array]:
        """The log-determinant, quadratic forms and the solution."""
        logdet, inv_quad = self.logdet(estimate), self.inv_quad(estimate)
        return logdet, inv_quad, self.solution(estimate)

    def _like_y(self, x: Array) -> Array:
        return x.reshape(self.shape[1:])

    def solution(self, estimate: Estimate) -> Inexact[Array, "n ..."]:
        """`A^-1 y = M^* B^-1 M y`."""
        P = jax.lax.stop_gradient(self.preconditioner)
        return P.apply_adjoint(estimate.stats["solution"]).reshape(self.shape)

    def likelihood(self, estimate: Estimate) -> Estimate:
        """The log density of y."""
        error = Terms(*(_of_terms(estimate, name)[1] for name in Terms._fields))
        stats = dict(estimate.stats)
        bar = likelihood_bar(estimate.value, error, stats["degrees_of_freedom"])
        constant = self._constant()
        ends = zip(self._bracket(estimate), stats.pop("inv_quad_bracket"), strict=True)
        totals = [-(self.number * x + jnp.sum(y)) / 2 for x, y in ends]
        known = jax.lax.stop_gradient(constant)
        stats["bracket"] = tuple(known + x for x in reversed(totals))
        error = _with_rounding(bar.standard_error, bar.mean, constant)
        likelihood = self._made(estimate, bar.mean + constant, error, stats)
        stats = {**likelihood.stats, "solution": self.solution(estimate)}
        return eqx.tree_at(lambda e: e.stats, likelihood, stats)

    def _bracket(self, estimate: Estimate) -> tuple[Array, Array]:
        return jax.lax.stop_gradient(estimate.stats["bracket"])

    def _made(self, estimate: Estimate, value, error, stats) -> Estimate:
        P = self.preconditioner
        # Ritz values and weights of B are not those of A, so we drop them.
        kept = {name: x for name, x in stats.items() if name not in _OF_B}
        stats, result = kept, estimate.result
        failures = [(~self.finite, RESULTS.y_not_finite)]
        if isinstance(P, Whitening):
            residual = jax.lax.stop_gradient(P.residual_trace) / self.state.space.size
            stats = {**kept, "num_columns": P.num_columns, "residual": residual}
            failures = [
                (~P.semidefinite, RESULTS.not_semidefinite),
                (~jnp.isfinite(P.residual_trace), RESULTS.nonfinite),
                (~jnp.all(self.noise > 0), RESULTS.noise_not_positive),
                *failures,
            ]
        for bad, reason in failures:
            result = RESULTS.where(bad, reason, result)
        result = finite_or_failed(value, result)
        stats["bracket"] = tuple(with_slopes(x, value) for x in stats["bracket"])
        return Estimate(value, error, result, stats, self.state, estimate._by)


def _of_terms(estimate: Estimate, name: str) -> tuple[Array, Array]:
    value, error = estimate.value, estimate._standard_error
    if not isinstance(value, Terms):
        return value, error
    return getattr(value, name), getattr(error, name)


def _with_rounding(error, *parts) -> Float[Array, ""]:
    """The standard error of a sum, which is rounded."""
    size = sum(jnp.abs(jax.lax.stop_gradient(x)) for x in parts)
    rounding = 4 * jnp.finfo(error.dtype).eps * size
    return joint_error(error, rounding)


def _check_right(y: Any, space: Space, where: str) -> Inexact[Array, "n ..."]:
    n = space.size
    hint = f"pass the n = {n} observations, or a column of them for each output"
    is_array = isinstance(y, jax.Array | np.ndarray)
    require(is_array, where, "y must be an array", y, hint, TypeError)
    numbers = jnp.issubdtype(y.dtype, jnp.number)
    require(numbers, where, "y must hold numbers", y, hint, TypeError)
    shaped = y.ndim in (1, 2) and y.shape[0] == n and y.size > 0
    what = f"y must be of shape ({n},) or ({n}, q)"
    require(shaped, where, what, y, hint)
    real = space.is_complex or not jnp.iscomplexobj(y)
    what = "y must be real, as the operator is"
    hint = (
        "pass its real and imaginary parts as two columns, "
        "jnp.stack([y.real, y.imag], axis=1)"
    )
    require(real, where, what, y, hint, TypeError)
    return jnp.asarray(y, space.compute_dtype)
