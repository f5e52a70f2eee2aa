"""The abstract class of estimators of spectral functions."""

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, PyTree

from ._arguments import check_real_scalar
from ._base import adaptive_estimator, identity_block
from ._estimate import RESULTS, Estimate, raise_failure
from ._frechet import SpectralBlocks
from ._operator import apply_block, is_positive_semidefinite, space_of
from ._orthogonal import products_to_check
from ._primitive import estimate_trace
from ._progress import NO_PROGRESS_METER, ProgressMeter, check_meter
from ._sharding import replicate
from ._small_matrices import eigh
from ._spectral_function import SpectralFunction, spectral_function, tree_of
from ._state import StoredKey, check_budget, init_state
from ._tolerance import make_tolerance


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
        - `fn`: from a real scalar to a scalar, or a PyTree of scalars.
        - `lower`: a real scalar that no eigenvalue is below, where it is known. An
            estimator may take it for its error bar.

        **Raises:** as [`traceax.trace_function`][].
        """
        where = f"{type(self).__name__}.init"
        state = init_state(key, operator, where)
        real = space_of(operator).real_dtype
        function = spectral_function(fn, real, where)
        if lower is not None:
            check_real_scalar(lower, "lower", where, "no eigenvalue may be below it.")
            lower = jnp.asarray(lower).astype(real)
        return SpectralState(state.key, operator, function, lower)

    @abc.abstractmethod
    def compute(self, state: SpectralState, k: int) -> SpectralOutcome:
        """The algorithm. Called with `1 <= k < n`.

        **Arguments:**

        - `state`: as `init` returned it.
        - `k`: a Python int, the most products that may be used.
        """

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
        k = check_budget(k, where)
        space = space_of(state.operator)
        real = space.real_dtype
        tolerance = make_tolerance(rtol, atol, level, space, where)
        check_meter(progress_meter, where)
        estimator = self
        if tolerance is not None:
            takers = "traceax.KrylovAwareEstimator"
            estimator = adaptive_estimator(self, tolerance, progress_meter, takers)
        outcome = estimate_trace(estimator, state, k, real=False)

        def structured(leaves):
            return tree_of(state.function, real, leaves)

        stats = dict(outcome.stats)
        stats["degrees_of_freedom"] = structured(stats["degrees_of_freedom"])
        estimate = Estimate(
            structured(outcome.value),
            structured(outcome.standard_error),
            outcome.result,
            stats,
            state,
        )
        return raise_failure(estimate) if throw else estimate

    def evaluate(self, state: SpectralState, k: int, compute: Callable | None = None):
        """`compute`, or another, or the exact answer, as the primitive takes it."""
        exact = k >= space_of(state.operator).size
        outcome = _exact(state) if exact else (compute or self.compute)(state, k)
        values, errors, freedoms, stats, blocks = outcome
        result = evaluation_result(
            stats.get("result", RESULTS.successful), state.function, blocks.values
        )
        stats = {
            **stats,
            "degrees_of_freedom": freedoms,
            "ritz_values": blocks.values,
            "ritz_weights": jnp.real(jnp.diagonal(blocks.coupling)),
            "result": result,
        }
        return values, errors, stats, blocks


def evaluation_result(
    result: RESULTS, function: SpectralFunction, values: Float[Array, " k"]
) -> RESULTS:
    """`result`, unless the function is not finite at finite values."""
    leaves = jnp.stack([jnp.abs(x) for x in function(values)])
    found = jnp.isfinite(values).all() & ~jnp.isfinite(leaves).all()
    # Infinite at 0, or no number at all, is a point outside of the domain.
    at_zero = jnp.broadcast_to((values == 0)[None, :], leaves.shape)
    outside = jnp.isnan(leaves).any() | jnp.isinf(jnp.where(at_zero, leaves, 0)).any()
    failure = RESULTS.where(outside, RESULTS.outside_domain, RESULTS.overflow)
    return RESULTS.where(found & (result == RESULTS.successful), failure, result)


def _exact(state: SpectralState) -> SpectralOutcome:
    operator = state.operator
    space = space_of(operator)
    identity = identity_block(space)
    A = replicate(apply_block(operator, identity))
    hermitian = (A + A.conj().T) / 2
    norm = jnp.linalg.norm(hermitian)
    asymmetry = jnp.linalg.norm(A - hermitian) / jnp.where(norm == 0, 1, norm)
    values, vectors = eigh(hermitian)
    values, result = ritz_values(values, asymmetry, operator)
    leaves = [jnp.sum(f) for f in state.function(values)]
    zeros = [jnp.zeros((), space.real_dtype) for _ in leaves]
    stats = {
        "num_matvecs": space.size,
        "result": result,
        "largest_product": products_to_check(A),
    }
    blocks = SpectralBlocks(vectors, values, identity, identity, identity, space.size)
    infinite = [jnp.full((), jnp.inf, space.real_dtype) for _ in leaves]
    return SpectralOutcome(leaves, zeros, infinite, stats, blocks)


def ritz_values(
    values: Float[Array, " k"],
    asymmetry: Float[Array, ""],
    operator: lx.AbstractLinearOperator,
) -> tuple[Float[Array, " k"], RESULTS]:
    """Ritz values, and whether they may be those of the operator as it is tagged.

    Negative values of rounding size are 0 exactly: a root, a logarithm or an entropy
    is real at 0, and not below.
    """
    largest = jnp.max(jnp.abs(values), initial=0)
    eps = jnp.finfo(values.dtype).eps
    rounding = 8 * math.sqrt(values.shape[0]) * eps * largest
    values = jnp.where((values < 0) & (values > -rounding), 0, values)
    result = RESULTS.successful
    if is_positive_semidefinite(operator):
        wrong = jnp.min(values, initial=0) < -jnp.sqrt(eps) * largest
        result = RESULTS.where(wrong, RESULTS.not_semidefinite, result)
        values = jnp.where(wrong, values, jnp.maximum(values, 0))
    wrong = asymmetry > 100 * jnp.sqrt(eps)
    result = RESULTS.where(wrong, RESULTS.not_hermitian, result)
    return values, result


def weighted_sums(
    weights: Inexact[Array, "... k"], f: Inexact[Array, "... k"]
) -> Inexact[Array, "..."]:
    """`sum_j weights_j f_j`, where a weight of 0 counts for nothing.

    Also if f is infinite there.
    """
    f = jnp.broadcast_to(f, weights.shape)
    dtype = np.result_type(weights.dtype, f.dtype)
    terms = weights.astype(dtype) * f.astype(dtype)
    return jnp.sum(jnp.where(weights == 0, 0, terms), axis=-1)


def rounding_errors(
    function: SpectralFunction,
    values: Float[Array, " k"],
    weights: Float[Array, " k"],
) -> list[Float[Array, ""]]:
    """What errors of rounding in the operator make of each leaf's sum.

    They move every eigenvalue by up to about eps times the largest: nothing to most
    functions, much to a root or a logarithm of a small one.
    """
    moved = values + jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values))
    changes = []
    for f, f_moved in zip(function(values), function(moved), strict=True):
        change = jnp.abs(f_moved - f)
        changes.append(weighted_sums(jnp.abs(weights), change))
    return changes


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


def probes_until(num_probes: int | None, k: int) -> tuple[int, int]:
    """How many probes, and how many steps at most, of which not all may be taken.

    As many as if half of them were, but at least 5, whose error bar is reliable, and not
    so many that there are less than three steps.
    """
    if num_probes is None:
        num_probes = max(round(0.9 * math.sqrt(k / 2)), min(5, k // 3))
    m = min(num_probes, k)
    return m, k // m


def check_probes(num_probes: Any, where: str) -> None:
    """Refuses what is neither `None` nor a positive integer."""
    if num_probes is None:
        return
    if isinstance(num_probes, bool) or not isinstance(num_probes, int):
        raise TypeError(
            f"{where}: num_probes must be an int or None, got {num_probes!r} of type "
            f"{type(num_probes).__name__}."
        )
    if num_probes < 1:
        raise ValueError(f"{where}: num_probes must be at least 1, got {num_probes}.")
