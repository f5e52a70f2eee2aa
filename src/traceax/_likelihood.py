"""The likelihood of a Gaussian process: a log-determinant, a solve and a quadratic form."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, Key

from ._accuracy.tolerance import Stop
from ._arguments import check_key, check_real_scalar, require
from ._drive import limits, run_estimator
from ._estimate import Estimate, joint_error, raise_failure, with_slopes
from ._linalg.whitening import Preconditioner, Whitening
from ._operators.block import Space, as_data, space_of
from ._operators.check import checked_operator
from ._operators.entries import diagonal_of, has_known_entries
from ._preconditioner import PreconditionedLinearOperator, make_preconditioner, noise_of
from ._progress import NO_PROGRESS_METER, ProgressMeter
from ._results import RESULTS, finite_or_failed
from ._spectral.base import SpectralState, likelihood_bar
from ._spectral.blocks import Terms
from ._spectral.estimate import Options
from ._spectral.function import LOG
from ._spectral.krylov_aware import KrylovAwareEstimator

Given = int | Int[Array, " r"] | Preconditioner | None
_OF_B = ("ritz_values", "ritz_weights", "inv_quad_bracket", "solution")


class InvQuadLogdet(eqx.Module):
    """What the likelihood of a Gaussian process is made of.

    **Attributes:**

    - `logdet`: a [`traceax.Estimate`][] of `log det (K + N)`.
    - `inv_quad`: a [`traceax.Estimate`][] of `y^T (K + N)^-1 y`, in the middle of the
        bracket `stats["bracket"]`; of shape `(q,)` for q right-hand sides.
    - `solution`: `(K + N)^-1 y`, of the shape of y. Not differentiable.
    """

    logdet: Estimate
    inv_quad: Estimate
    solution: Inexact[Array, "n ..."]


def inv_quad_logdet(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    y: Inexact[Array, "n ..."],
    k: int | None = None,
    estimator: KrylovAwareEstimator | None = None,
    *,
    shift: ArrayLike,
    preconditioner: Given = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> InvQuadLogdet:
    r"""Estimates `log det (K + N)`, and `y^T (K + N)^-1 y` with the solution.

    ```python
    pivots = traceax.choose_pivots(key, kernel, 600, shift=noise)
    terms = traceax.inv_quad_logdet(key, kernel, y, shift=noise, preconditioner=pivots)
    ```

    All from one block Krylov space, which starts from y and from random probes, of the
    matrix with its noise N scaled to 1 and preconditioned. Each of the two has first
    derivatives of any kind with respect to the operator, the noise and y, and second ones.

    | | |
    |---|---|
    | products | k, less those that don't fill a step of all probes and y; and r/n of one for r columns |
    | beyond the products | O(n k^2 + n r^2) time, O(n k + n r) memory |
    | bias | of the solution, that of conjugate gradients; half of each bracket at most |
    | standard errors | as for [`traceax.logdet`][]; of `inv_quad` from its bracket alone, as nothing about it is random |

    **Arguments:** those of [`traceax.logdet`][] but `trace`, of which k may always be left
    out, as [`traceax.KrylovAwareEstimator`][] describes; and

    - `operator`: K, symmetric or Hermitian and positive semidefinite, without noise, such
        as a [`traceax.KernelLinearOperator`][]. It need not be tagged.
    - `y`: an array of shape `(n,)`, or `(n, q)` for q right-hand sides. Each takes as many
        products as a probe. Of what is missing see `RESULTS.y_not_finite`.
    - `estimator`: a [`traceax.KrylovAwareEstimator`][].
    - `shift`: N, the noise: a positive number, or an array of one for each of the n
        observations.
    - `preconditioner`: how many columns of K a preconditioner is made of, at most; or
        which, from [`traceax.choose_pivots`][], as along a fit; or one of your own, a
        [`traceax.Preconditioner`][], beside which the noise may be 0; none by default.
    - `rtol`, `atol`: of the Gaussian log likelihood that both terms make.

    **Returns:** a [`traceax.InvQuadLogdet`][]. `stats["num_columns"]` says how many columns
    take part, `stats["residual"]` the mean diagonal of what they leave of K, beside the
    noise: above 1 more columns would save products.

    **Raises:** as [`traceax.trace_function`][]; `ValueError` for a y of another length, or
    a noise that isn't positive; `TypeError` for a complex y of a real operator, whose real
    and imaginary parts are two right-hand sides.

    **Reference:** Gardner, Pleiss, Bindel, Weinberger and Wilson, "GPyTorch", NeurIPS
    (2018), arXiv:1809.11165, for both terms from the same products; Chen, Epperly, Tropp and
    Webber, arXiv:2207.06503, for the columns; Zimmerling, Druskin and Simoncini,
    doi:10.1007/s10915-025-02799-z, for the brackets.
    """
    where = "traceax.inv_quad_logdet"
    problem = _pose(where, key, operator, shift, preconditioner, y, throw)
    options = Options(rtol, atol, level, progress_meter, throw)
    estimate = problem.estimate(k, estimator, options)
    logdet, inv_quad = problem.logdet(estimate), problem.inv_quad(estimate)
    solution = problem.solution(estimate)
    if throw:
        # One warning for both.
        logdet, inv_quad = raise_failure(logdet), raise_failure(inv_quad, warn=False)
    return InvQuadLogdet(logdet, inv_quad, solution)


def gaussian_log_likelihood(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    y: Inexact[Array, "n ..."],
    k: int | None = None,
    estimator: KrylovAwareEstimator | None = None,
    *,
    shift: ArrayLike,
    preconditioner: Given = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates the log density of y under a normal distribution of covariance `K + N`.

        -1/2 y^T (K + N)^-1 y - 1/2 log det (K + N) - n/2 log(2 pi)

    ```python
    def loss(parameters):
        kernel = traceax.KernelLinearOperator(Kernel(parameters), x)
        return -traceax.gaussian_log_likelihood(
            key, kernel, y, shift=parameters.noise, preconditioner=pivots
        ).value
    ```

    The marginal likelihood of a Gaussian process of mean 0, differentiable in the
    parameters of the kernel, the noise, x and y.

    **Arguments:** those of [`traceax.inv_quad_logdet`][]. The log densities of the columns
    of y are summed.

    **Returns:** a [`traceax.Estimate`][]. `stats["solution"]` is `(K + N)^-1 y`, from which
    predictions are made; `stats["bracket"]` the pair of ends between which the value would
    be but for the error of probes, as far as K is positive semidefinite. Both have the
    derivative of the value: minus the lower one is a loss that can't be exploited where the
    bracket is long. `stats["num_matvecs"]` and `stats["num_columns"]` say what was taken.

    **Raises:** as [`traceax.inv_quad_logdet`][].
    """
    where = "traceax.gaussian_log_likelihood"
    problem = _pose(where, key, operator, shift, preconditioner, y, throw)
    options = Options(rtol, atol, level, progress_meter, throw)
    estimate = problem.likelihood(problem.estimate(k, estimator, options))
    return raise_failure(estimate) if throw else estimate


def preconditioned_logdet(
    where: str,
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None,
    estimator: Any,
    shift: ArrayLike,
    preconditioner: Given,
    options: Options,
) -> Estimate:
    """`traceax.logdet` with columns, or with a noise for every observation."""
    throw, hint = options.throw, "it is that of the operator, without its shift"
    if options.trace is not None:
        check_real_scalar(options.trace, "trace", where, hint)
    problem = _pose(where, key, operator, shift, preconditioner, None, throw)
    estimate = problem.logdet(problem.estimate(k, estimator, options))
    return raise_failure(estimate) if throw else estimate


def _pose(
    where: str,
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    shift: ArrayLike,
    preconditioner: Given,
    y: Any,
    throw: bool,
) -> "_Problem":
    """The problem of these arguments, once checked."""
    key, operator = check_key(key, where), checked_operator(operator, where)
    space = space_of(operator)
    own = isinstance(preconditioner, Preconditioner)
    noise = noise_of(operator, shift, where, throw=throw, positive=not own)
    P = make_preconditioner(key, operator, preconditioner, noise, where)
    shape, right, finite = (space.size, 0), None, jnp.asarray(True)
    if y is not None:
        y = _check_right(y, space, where)
        shape, right = y.shape, P.apply(y.reshape(space.size, -1))
        finite = jnp.isfinite(y).all()
    lower = P.lower
    if lower is not None:
        lower = jax.lax.stop_gradient(jnp.asarray(lower, space.real_dtype))
    B = PreconditionedLinearOperator(as_data(operator), P, noise if own else None)
    trace = None
    if preconditioner is None and has_known_entries(operator):
        # That of B; with columns it takes a product for each.
        trace = space.size + jnp.sum(jnp.real(diagonal_of(operator)) / noise)
    state = SpectralState(key, B, LOG, lower, right, P, trace)
    return _Problem(where, state, P, noise, shape, finite)


class _Problem(NamedTuple):
    """The operator `B = M (K + N) M^*`, at least 1, and right-hand sides `M y`.

    - `where`: the name that error messages start with.
    - `state`: of B.
    - `preconditioner`: M, differentiable.
    - `noise`: N.
    - `shape`: that of y; `(n, 0)` without it.
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

    def estimate(self, k: int | None, estimator: Any, options: Options) -> Estimate:
        """`tr log B`, and the quadratic forms."""
        state, where = self.state, self.where
        space = state.space
        stop = options.stop(space.compute_dtype, where)
        estimator = KrylovAwareEstimator() if estimator is None else estimator
        require(
            isinstance(estimator, KrylovAwareEstimator),
            where,
            "estimator must be a traceax.KrylovAwareEstimator",
            estimator,
            "pass an instance, or None",
            TypeError,
        )
        most, stop = limits(estimator, state, k, stop, options.progress_meter, where)
        least = 1 + self.number
        what = f"k must be at least {least}, a product for a probe and for each column of y"
        got = "none, and its default is too small" if k is None else str(most)
        hint = f"more steps make it accurate; n = {space.size} give the exact answer"
        require(most >= min(least, space.size), where, what, got, hint)
        if isinstance(stop, Stop):
            stop = self._stop(stop)
        return run_estimator(estimator, state, most, stop, throw=False)

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
        # Those of B say little of A.
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
