"""The abstract class of estimators of spectral functions."""

import abc
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Key, PyTree

from .._accuracy.error_bar import ErrorBar
from .._accuracy.tolerance import SMALL, Tolerance, make_tolerance, met_or_failed
from .._arguments import StoredKey, budget_of, check_real_scalar
from .._estimate import RESULTS, Estimate, raise_failure
from .._linalg.krylov import RitzPairs
from .._linalg.small import divisor, eigh, frobenius
from .._linalg.tall import power_of_two_scale
from .._operators.block import (
    Space,
    apply_block,
    as_data,
    complex_dtype,
    space_of,
)
from .._primitive import Algorithm, Outcome, estimate, outcome_of
from .._progress import NO_PROGRESS_METER, ProgressMeter, check_meter
from .._state import init_state
from .blocks import SpectralBlocks
from .function import SpectralFunction, rounding_errors, spectral_function
from .ritz import ritz_values


class SpectralState(eqx.Module):
    """The state of an estimator of spectral functions.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: a symmetric or Hermitian operator.
    - `function`: of its eigenvalues.
    - `lower`: a number that no eigenvalue is below, or `None`.
    """

    _key: StoredKey
    operator: lx.AbstractLinearOperator
    function: SpectralFunction
    lower: Float[Array, ""] | None

    def __init__(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        function: SpectralFunction,
        lower: Float[Array, ""] | None = None,
    ):
        self._key = StoredKey(key)
        self.operator = operator
        self.function = function
        self.lower = lower

    @property
    def key(self) -> Key[Array, ""]:
        """A typed key."""
        return self._key.typed


class SpectralOutcome(NamedTuple):
    """What an estimator computes, a list entry for each leaf of the function.

    - `values`, `standard_errors`, `degrees_of_freedom`: scalars.
    - `stats`: a dictionary with at least `"num_matvecs"`.
    - `blocks`: what the derivative is made of.
    """

    values: list[Inexact[Array, ""]]
    standard_errors: list[Float[Array, ""]]
    degrees_of_freedom: list[Float[Array, ""]]
    stats: dict[str, PyTree]
    blocks: SpectralBlocks


class Accuracy(NamedTuple):
    """What a tolerance is, as users give it."""

    rtol: ArrayLike | None = None
    atol: ArrayLike | None = None
    level: float = 0.95
    progress_meter: ProgressMeter = NO_PROGRESS_METER

    def checked(self, dtype: Any, where: str) -> Tolerance | None:
        check_meter(self.progress_meter, where)
        return make_tolerance(self.rtol, self.atol, self.level, dtype, where)


class SpectralEstimator(eqx.Module):
    r"""Abstract base class of estimators of `tr f(A)`, A symmetric or Hermitian.

    A subclass is a frozen module whose fields are configuration. It writes `compute`,
    in plain JAX, which is never differentiated: derivatives come from the Ritz pairs
    that it returns.
    """

    def init(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        fn: Any,
        *,
        lower: ArrayLike | None = None,
    ) -> SpectralState:
        """Checks of key, operator and function.

        **Arguments:**

        - `key`: a single key, typed or legacy.
        - `operator`: a square lineax operator.
        - `fn`: from a real scalar to a scalar, or a PyTree of scalars. What it reads is
            read now.
        - `lower`: a real scalar that no eigenvalue is below, where it is known. An
            estimator may take it for its error bar.

        **Raises:** as [`traceax.trace_function`][].
        """
        where = f"{type(self).__name__}.init"
        return spectral_state(where, key, operator, fn, lower)

    @abc.abstractmethod
    def compute(self, state: SpectralState, k: int) -> SpectralOutcome:
        """The algorithm. Called with `1 <= k < n`.

        **Arguments:**

        - `state`: as `init` returned it.
        - `k`: a Python int, the most products that may be used.
        """

    def compute_until(
        self, state: SpectralState, k: int, tolerance: Tolerance, meter: ProgressMeter
    ) -> SpectralOutcome:
        """As `compute`, with as many products as the tolerance takes. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: this estimator takes no tolerance; use "
            "traceax.KrylovAwareEstimator, or leave out rtol and atol."
        )

    def estimate(
        self,
        state: SpectralState,
        k: int,
        *,
        rtol: ArrayLike | None = None,
        atol: ArrayLike | None = None,
        level: float = 0.95,
        progress_meter: ProgressMeter = NO_PROGRESS_METER,
        throw: bool = True,
    ) -> Estimate:
        """Estimates `tr f(A)` with at most `k` products.

        **Arguments:**

        - `state`: as `init` returned it.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact, from n products and an eigendecomposition.
        - `rtol`, `atol`, `level`, `progress_meter`: as for
            [`traceax.trace_function`][], of estimators that take a tolerance.
        - `throw`: whether a failure raises an error, at run time.

        **Returns:**

        A [`traceax.Estimate`][], whose value is of the structure that `fn` returns.
        `stats["ritz_values"]` and `stats["ritz_weights"]` are the estimated
        distribution of eigenvalues: `sum(ritz_weights * g(ritz_values))` is an
        estimate of `tr g(A)`.
        """
        where = f"{type(self).__name__}.estimate"
        accuracy = Accuracy(rtol, atol, level, progress_meter)
        return estimate_spectral(where, self, state, k, accuracy, throw=throw)


def spectral_state(
    where: str,
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    fn: Any,
    lower: ArrayLike | None,
) -> SpectralState:
    """Checks key, operator and function, and puts them into a state."""
    state = init_state(key, operator, where)
    operator = state.operator
    real = space_of(operator).real_dtype
    function = spectral_function(fn, real, where)
    if lower is not None:
        check_real_scalar(lower, "lower", where, "no eigenvalue may be below it.")
        lower = jnp.asarray(lower).astype(real)
    return SpectralState(state.key, operator, function, lower)


def estimate_spectral(
    where: str,
    estimator: SpectralEstimator,
    state: SpectralState,
    k: int | None,
    accuracy: Accuracy,
    *,
    throw: bool,
) -> Estimate:
    """An estimate; `where` is what errors begin with."""
    space = space_of(state.operator)
    tolerance = accuracy.checked(space.real_dtype, where)
    k = budget_of(k, tolerance, space.size, where)
    if tolerance is not None and space.size > SMALL:
        # A loop that fails to meet the tolerance leaves nothing for an exact answer.
        k = min(k, space.size - 1)
    algorithm = _Spectral(
        estimator, state._key, state.lower, k, tolerance, accuracy.progress_meter
    )
    outcome = estimate(algorithm, (as_data(state.operator), state.function))
    found = Estimate(*outcome[:4], state, type(estimator).__name__)
    return raise_failure(found) if throw else found


class _Spectral(Algorithm):
    """An estimator as the primitive takes it."""

    estimator: SpectralEstimator
    key: StoredKey
    lower: Float[Array, ""] | None
    k: int = eqx.field(static=True)
    tolerance: Tolerance | None
    meter: ProgressMeter = eqx.field(static=True)

    def run(self, primal):
        operator, function = primal
        space = space_of(operator)
        state = SpectralState(self.key.typed, operator, function, self.lower)
        if self.k >= space.size:
            found = _exact(state)
        elif self.tolerance is None:
            found = self.estimator.compute(state, self.k)
        else:
            found = self.estimator.compute_until(
                state, self.k, self.tolerance, self.meter
            )
        blocks = found.blocks
        points, weights = blocks.pairs.values, jnp.real(jnp.diagonal(blocks.coupling))
        outcome = spectral_outcome(function, space, *found[:4], points, weights)
        if self.tolerance is not None and self.k < space.size:
            result = met_or_failed(
                self.tolerance, bar_of_leaves(*found[:3]), outcome.result
            )
            outcome = outcome._replace(result=result)
        return outcome, blocks


def spectral_outcome(
    function: SpectralFunction,
    space: Space,
    values: list[Inexact[Array, ""]],
    errors: list[Float[Array, ""]],
    freedoms: list[Float[Array, ""]],
    stats: dict[str, PyTree],
    points: Float[Array, " p"],
    weights: Float[Array, " p"],
) -> Outcome:
    """The outcome in the structure of the function, from its values at some points."""
    real = not any(jnp.iscomplexobj(x) for x in values)
    dtype = space.compute_dtype
    dtype = dtype if real else complex_dtype(dtype)
    values, errors, freedoms = (
        function.tree(x, space.real_dtype) for x in (values, errors, freedoms)
    )
    result = _in_domain(stats.get("result", RESULTS.successful), function, points)
    stats = {
        **stats,
        "degrees_of_freedom": freedoms,
        "ritz_values": points,
        "ritz_weights": weights,
        "result": result,
    }
    outcome = outcome_of(values, errors, stats, dtype, real=real)

    def as_real(x, found):
        return found if jnp.iscomplexobj(x) else jnp.real(found)

    return outcome._replace(value=jtu.tree_map(as_real, values, outcome.value))


def _in_domain(
    result: RESULTS, function: SpectralFunction, points: Float[Array, " p"]
) -> RESULTS:
    """`result`, unless finite points are outside of the function's domain: it is no
    number, or infinite at 0."""
    leaves = jnp.stack([jnp.abs(x) for x in function(points)])
    infinite = jnp.isinf(leaves) & (points == 0)[None, :]
    outside = jnp.any(jnp.isnan(leaves) | infinite) & jnp.isfinite(points).all()
    return outside_if(outside, result)


def outside_if(outside: Bool[Array, ""], result: RESULTS) -> RESULTS:
    """`result`, or that the function is not finite, unless another failure is known."""
    outside = outside & (result == RESULTS.successful)
    return RESULTS.where(outside, RESULTS.outside_domain, result)


def _exact(state: SpectralState) -> SpectralOutcome:
    operator = state.operator
    space = space_of(operator)
    identity = jnp.eye(space.size, dtype=space.compute_dtype)
    A = apply_block(operator, identity)
    hermitian = A / 2 + A.conj().T / 2
    unit = power_of_two_scale(A).astype(A.dtype)
    size = divisor(frobenius(hermitian / unit))
    asymmetry = frobenius((A - hermitian) / unit) / size
    values, vectors = eigh(hermitian)
    values, noise, result = ritz_values(values, asymmetry, operator)
    function = state.function.in_range(values)
    leaves = [jnp.sum(f) for f in function(values)]
    errors, decided = rounding_errors(
        function, values, jnp.ones_like(values), noise, state.lower
    )
    infinite = [jnp.full((), jnp.inf, space.real_dtype) for _ in leaves]
    result = outside_if(decided, result)
    stats = {"num_matvecs": space.size, "result": result, **function.unit}
    pairs = RitzPairs(identity, values, vectors, identity, space.size)
    blocks = SpectralBlocks(pairs, identity)
    return SpectralOutcome(leaves, errors, infinite, stats, blocks)


#
# What estimators share
#


def bar_of_leaves(
    values: list[Inexact[Array, ""]],
    errors: list[Float[Array, ""]],
    freedoms: list[Float[Array, ""]],
) -> ErrorBar:
    """Of all leaves, complex ones or real ones, for a tolerance."""
    sizes = [jnp.abs(x) for x in values]
    return ErrorBar(*map(jnp.stack, (sizes, errors, freedoms)))


def probes_and_steps(num_probes: int | None, k: int) -> tuple[int, int]:
    """How many probes, and how many steps from each, with k less at most 2 products.

    As many steps as probes, about: the error of probes falls with their number, that
    of the Krylov space with the number of steps.
    """
    if num_probes is not None:
        m = min(num_probes, k)
        return m, k // m
    target = max(0.9 * math.sqrt(k), 2.0)
    candidates = [
        (m, used // m)
        for used in range(k, max(k - 3, 0), -1)
        for m in range(1, used + 1)
        if used % m == 0
    ]

    def off(candidate):
        m, steps = candidate
        return abs(math.log(m / target)) + (k - m * steps) / k

    return min(candidates, key=off)
