"""What an estimate is: a value, how far to trust it, and what it took."""

import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Float, Inexact, PyTree

from ._kept import settled

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

        - `ValueError` if `level` is a Python number that is not between 0 and 1.
        """
        if isinstance(level, int | float) and not 0 < level < 1:
            raise ValueError(
                "traceax.Estimate.confidence_interval: level must lie strictly between "
                f"0 and 1, got {level}; write 0.95 for an interval of 95 %."
            )
        values, treedef = jtu.tree_flatten(self.value)
        errors = treedef.flatten_up_to(self._standard_error)
        infinite = treedef.unflatten([jnp.asarray(jnp.inf)] * len(values))
        freedoms = self.stats.get("degrees_of_freedom", infinite)
        intervals = [
            _interval(*parts, level)
            for parts in zip(
                values, errors, treedef.flatten_up_to(freedoms), strict=True
            )
        ]
        low, high = zip(*intervals, strict=True)
        return treedef.unflatten(low), treedef.unflatten(high)


@jax.jit
def _interval(value, error, freedom, level):
    # At least single precision; a level next to 1 would round to 1.
    if jnp.finfo(error.dtype).bits < 32:
        error = error.astype(jnp.float32)
    level = jnp.minimum(level, 1 - 2 * jnp.finfo(error.dtype).eps).astype(error.dtype)
    freedom = jnp.asarray(freedom).astype(error.dtype)
    quantile = student_t_quantile((1 + level) / 2, freedom)
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


def student_t_quantile(
    probability: Float[Array, ""], freedom: Float[Array, ""]
) -> Float[Array, ""]:
    """The quantile of Student's t distribution, for probabilities of 1/2 and above.

    Hill (1970), "Algorithm 396: Student's t-quantiles", doi:10.1145/355598.355600.
    Its expansion is poor below three degrees of freedom: there the logarithm is
    interpolated in `1 / freedom` from the closed forms at one and two and from three
    and four. Relative error below 1 % (below 1e-3 from three degrees on). At least
    one degree of freedom is taken.
    """
    one = jnp.tan(jnp.pi * (probability - 0.5))
    two = (2 * probability - 1) * jnp.sqrt(2 / (4 * probability * (1 - probability)))
    three, four = _hill(probability, 3.0), _hill(probability, 4.0)
    nodes = (1.0, 1 / 2, 1 / 3, 1 / 4)
    values = [jnp.log(jnp.maximum(x, 1e-30)) for x in (one, two, three, four)]
    inverse = 1 / jnp.maximum(freedom, 1)
    log_quantile = jnp.zeros_like(inverse)
    for i, value in enumerate(values):
        others = [x for j, x in enumerate(nodes) if j != i]
        weight = math.prod((inverse - x) / (nodes[i] - x) for x in others)
        log_quantile = log_quantile + weight * value
    return jnp.where(freedom < 3, jnp.exp(log_quantile), _hill(probability, freedom))


def _hill(probability: Float[Array, ""], freedom: ArrayLike) -> Float[Array, ""]:
    tail = 2 * (1 - probability)  # of both sides
    nu = jnp.clip(freedom, 3, 1e6)
    a = 1 / (nu - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * jnp.sqrt(a * jnp.pi / 2) * nu
    y = (d * tail) ** (2 / nu)

    x = jax.scipy.special.ndtri(probability)
    y1 = x**2
    c1 = jnp.where(nu < 5, c + 0.3 * (nu - 4.5) * (x + 0.6), c)
    c1 = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c1
    y1 = (((((0.4 * y1 + 6.3) * y1 + 36) * y1 + 94.5) / c1 - y1 - 3) / b + 1) * x
    central = jnp.expm1(a * y1**2)

    outer = (
        (
            1 / (((nu + 6) / (nu * y) - 0.089 * d - 0.822) * (nu + 2) * 3)
            + 0.5 / (nu + 4)
        )
        * y
        - 1
    ) * (nu + 1) / (nu + 2) + 1 / y
    return jnp.sqrt(nu * jnp.where(y > 0.05 + a, central, outer))
