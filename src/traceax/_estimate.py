"""What an estimate is: a value, how far to trust it, and what it took."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, PyTree

from ._kept import settled
from ._student_t import Level, check_level, student_t_quantile, two_sided

# Stands for a standard error that cannot be known. NaN inside a program would be taken
# for a failure by `jax_debug_nans`.
UNKNOWN = -1.0


class RESULTS(eqx.Enumeration):
    """What became of an estimate: `successful`, or what went wrong and the mend.

    Compare with `==`; `RESULTS[estimate.result]` is the message.
    """

    successful = ""
    nonfinite = (
        "The estimate is not finite: the operator's parameters hold NaN or infinite "
        "values, or the operator returned NaN or infinite values from finite "
        "parameters. Check the parameters, and what the operator computes (a division "
        "by zero, a logarithm or root of a negative number, an exponential)."
    )
    overflow = (
        "The estimate is not finite: products with the operator, a function of its "
        "eigenvalues, or the sums that the estimator takes of them exceed the largest "
        "number of their dtype. Scale the operator down and the estimate up again, or "
        "use a dtype of wider range."
    )
    solver_failed = (
        "The estimate is not finite: a linear solve inside the operator failed. Give "
        "the solver more steps or a looser tolerance, precondition or shift its "
        "operator, or use a direct solver; check that its operator is not singular."
    )
    not_semidefinite = (
        "The operator is tagged positive (or negative) semidefinite, but its products "
        "show that it is not. Remove the tag, or use an estimator that does not need "
        "it, such as traceax.XTraceEstimator."
    )
    not_hermitian = (
        "A function of the operator's eigenvalues was asked for, but its products show "
        "that it is not symmetric (complex: Hermitian). Check what it computes; "
        "functions of other operators are not estimated."
    )
    tolerance_not_met = (
        "The tolerance was not met with the products that were allowed, n - 1 at most. "
        "The value and its error bar are those of all of them. Allow for more products, or "
        "a larger tolerance; n products without a tolerance give the exact answer; "
        "throw=False returns the estimate as it is."
    )
    wrong_weights = (
        "The weights of a streamed mean sum to zero, are not finite, or sum to another "
        "number in another pass. Go over all of the data in every pass, with the same "
        "weights; if there are several passes, the data must be read anew in each, which "
        "an exhausted iterator does not."
    )
    outside_domain = (
        "The function is not finite at an eigenvalue of the operator, such as a "
        "logarithm at 0 or of a negative number. Shift the operator (traceax.logdet "
        "takes shift=), check that it is positive definite, or give a function that is "
        "finite on its spectrum."
    )


class _Box(eqx.Module):
    """A PyTree whose leaves are arrays only; every other leaf is part of its structure.

    Operators may hold functions and strings as leaves. Boxed, they can be returned
    from `jax.jit` and carried by `jax.lax` loops.
    """

    arrays: list[Array]
    rest: tuple[Any, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)

    def __init__(self, tree: PyTree):
        leaves, self.treedef = jtu.tree_flatten(tree)
        self.arrays = [x for x in leaves if eqx.is_array(x)]
        self.rest = tuple(None if eqx.is_array(x) else (x,) for x in leaves)

    def unbox(self) -> PyTree:
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x[0] for x in self.rest]
        return jtu.tree_unflatten(self.treedef, leaves)


class Estimate(eqx.Module):
    r"""An estimate, its error bar, and what it took to get it.

    A PyTree of arrays: it can be returned from `jax.jit` and `jax.vmap`, and carried
    through loops. Only `value` is differentiable.

    **Attributes:**

    - `value`: the estimate, a scalar. Real where the quantity is known to be real (a
        real operator, or one known to be semidefinite), else of the operator's dtype.
        Of a function that returns a PyTree a PyTree of scalars, as are the standard
        error and the ends of the interval.
    - `standard_error`: an estimate of the root mean square error, a real scalar in the
        unit of `value`. 0 for an exact answer, NaN where it cannot be known (from one
        probe).
    - `result`: a [`traceax.RESULTS`][] item.
    - `stats`: a dictionary. `"num_matvecs"` is how many products with the operator
        were used, `"degrees_of_freedom"` how many the error bar rests on; the front
        door [`traceax.trace`][] adds `"choice"`, which says how the estimate was made
        and why.
    - `state`: what the estimator's `estimate` takes. Hand it back with another budget
        to refine: it keeps the products that were taken, and takes so many more.

    !!! note

        `state` holds the operator and products with it. Return `estimate.value` rather than the whole
        estimate from a function that is `vmap`ped over keys alone, or the operator is
        copied once per key.
    """

    value: PyTree[Inexact[Array, ""]]
    _standard_error: PyTree[Float[Array, ""]]  # `UNKNOWN` for NaN
    result: RESULTS
    stats: dict[str, PyTree[Array]]
    _state: _Box = eqx.field(repr=False)

    def __init__(
        self,
        value: PyTree[Inexact[Array, ""]],
        standard_error: PyTree[Float[Array, ""]],
        result: RESULTS,
        stats: dict[str, PyTree[Array]],
        state: PyTree,
    ):
        self.value = value
        self._standard_error = jtu.tree_map(
            lambda x: known_or(x, UNKNOWN), standard_error
        )
        self.result = result
        self.stats = stats
        self._state = _Box(state)

    @property
    def standard_error(self) -> Any:
        """An estimate of the root mean square error; NaN where it cannot be known."""

        def known(error):
            return jnp.where(error < 0, jnp.full_like(error, jnp.nan), error)

        with jax.debug_nans(False):
            return jtu.tree_map(known, self._standard_error)

    @property
    def state(self) -> PyTree:
        """The state that the estimator's `estimate` takes."""
        return settled(self._state.unbox())

    def confidence_interval(self, level: ArrayLike = 0.95) -> tuple[Any, Any]:
        """The interval that holds the truth with probability `level`.

        A Student t interval about `value` with `stats["degrees_of_freedom"]`.
        Calibrated at the level 0.95: see the page on error bars for what was measured.

        **Arguments:**

        - `level`: the probability, between 0 and 1.

        **Returns:**

        A tuple `(low, high)` of scalars of `value`'s dtype. Infinite where the
        standard error is NaN; `low == high` for an exact answer. For a complex value
        the real parts bound the real part and the imaginary parts the imaginary part.

        **Raises:**

        - `TypeError` if `level` isn't a real number, `ValueError` if it is known not to
            lie between 0 and 1.
        """
        level = _checked(level)
        values, treedef = jtu.tree_flatten(self.value)
        errors = treedef.flatten_up_to(self._standard_error)
        infinite = treedef.unflatten([jnp.asarray(jnp.inf)] * len(values))
        freedoms = self.stats.get("degrees_of_freedom", infinite)
        of = two_sided(level) if isinstance(level, float) else level
        intervals = [
            _interval(*parts, of)
            for parts in zip(
                values, errors, treedef.flatten_up_to(freedoms), strict=True
            )
        ]
        low, high = zip(*intervals, strict=True)
        return treedef.unflatten(low), treedef.unflatten(high)


def _checked(level: Any) -> Any:
    """A level as a Python number, or traced."""
    where = "traceax.Estimate.confidence_interval"
    is_number = isinstance(level, int | float | np.number | np.ndarray | jax.Array)
    if not is_number or np.ndim(level) != 0 or np.iscomplexobj(level):
        raise TypeError(
            f"{where}: level must be a real number, got {level!r}; write 0.95 for an "
            "interval of 95 %."
        )
    if isinstance(level, jax.core.Tracer):
        return level
    check_level(float(level), where)
    return float(level)


@jax.jit
def _interval(value, error, freedom, level):
    # At least single precision; a level next to 1 would round to 1.
    if jnp.finfo(error.dtype).bits < 32:
        error = error.astype(jnp.float32)
    if not isinstance(level, Level):
        level = jnp.minimum(level, 1 - 2 * jnp.finfo(error.dtype).eps)
        level = two_sided(level.astype(error.dtype))
    freedom = jnp.asarray(freedom).astype(error.dtype)
    quantile = student_t_quantile(level, freedom)
    half = jnp.where(error == 0, jnp.zeros_like(error), quantile * error)
    half = jnp.where(error < 0, jnp.full_like(error, jnp.inf), half)
    if jnp.iscomplexobj(value):
        half = jax.lax.complex(half, half)
    half = half.astype(value.dtype)
    return value - half, value + half


@ft.partial(jax.jit, static_argnums=1, inline=True)
def known_or(standard_error: Float[Array, ""], unknown: float) -> Float[Array, ""]:
    """The standard error, with `unknown` for NaN."""
    nan = jnp.isnan(standard_error)
    return jax.lax.select(
        nan, jax.lax.full_like(nan, unknown, standard_error.dtype), standard_error
    )


def raise_failure(estimate: Estimate) -> Estimate:
    """The estimate; using it, or a derivative of it, raises unless it is successful."""
    failed = estimate.result != RESULTS.successful
    if not isinstance(failed, jax.core.Tracer) and not bool(failed):
        return estimate
    real = jnp.finfo(jtu.tree_leaves(estimate.value)[0].dtype).dtype
    # A factor rather than the value itself: a derivative is multiplied by it too, and
    # so raises where the value is not asked for.
    one = estimate.result.error_if(jnp.ones((), real), failed)
    return eqx.tree_at(
        lambda e: jtu.tree_leaves((e.value, e._standard_error)),
        estimate,
        replace_fn=lambda x: x * one.astype(x.dtype),
    )
