"""What an estimate is: a value, how far to trust it, and what it took."""

import functools as ft
import inspect
import math
import operator as op
import warnings
from statistics import NormalDist
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, PyTree

from ._arguments import check_level
from ._results import RESULTS, any_unmet, has_failed, map_results, results_of

# Below so many degrees of freedom quantiles are interpolated from those at 1 / node.
_FEW = 3
_NODES = (1.0, 1 / 2, 1 / 3, 1 / 4)


def student_t_quantile(level: float, freedom: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The quantile of Student's t distribution, of two-sided intervals.

    Hill (1970), "Algorithm 396: Student's t-quantiles", doi:10.1145/355598.355600. Below
    three degrees of freedom the logarithm is interpolated in `1 / freedom`, at least 1,
    from closed forms. Relative error below 1e-3 from three degrees on, below 1 % at levels
    up to 0.99 and 4 % at all.
    """
    tails = 1 - level
    inverse = 1 / jnp.maximum(freedom, 1)
    logarithm = jnp.zeros_like(inverse)
    for node, quantile in zip(_NODES, _closed_forms(level, tails), strict=True):
        others = [x for x in _NODES if x != node]
        weight = math.prod((inverse - x) / (node - x) for x in others)
        logarithm = logarithm + weight * math.log(max(quantile, 1e-30))
    expansion = _hill(tails, -NormalDist().inv_cdf(tails / 2), freedom)
    return jnp.where(freedom < _FEW, jnp.exp(logarithm), expansion)


def _closed_forms(level: float, tails: float) -> tuple[float, ...]:
    one = 1 / math.tan(math.pi / 2 * tails)
    two = level / math.sqrt((1 + level) * tails / 2)
    # Of three, `tails = (x - sin x) / pi` and the quantile is `sqrt(3) / tan(x / 2)`:
    # by Newton's method from the root of the leading term.
    x = math.cbrt(6 * math.pi * tails)
    for _ in range(6):
        x -= (x - math.sin(x) - math.pi * tails) / (1 - math.cos(x))
    three = math.sqrt(3) / math.tan(x / 2)
    # Of four, with the cosine of a third of an angle; differences as products of sines.
    angle = math.asin(level)
    sines = math.sin(2 * angle / 3) * math.sin(angle / 3)
    four = 2 * math.sqrt(2 * sines / math.sqrt((1 + level) * tails))
    return one, two, three, four


def _hill(tails: float, x: float, freedom: Array) -> Array:
    nu = jnp.clip(freedom, _FEW, 1e6)
    a = 1 / (nu - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * jnp.sqrt(a * np.pi / 2) * nu
    y = (d * tails) ** (2 / nu)

    y1 = x**2
    c1 = jnp.where(nu < 5, c + 0.3 * (nu - 4.5) * (x + 0.6), c)
    c1 = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c1
    y1 = (((((0.4 * y1 + 6.3) * y1 + 36) * y1 + 94.5) / c1 - y1 - 3) / b + 1) * x
    central = jnp.expm1(a * y1**2)

    outer = 1 / (((nu + 6) / (nu * y) - 0.089 * d - 0.822) * (nu + 2) * 3)
    outer = ((outer + 0.5 / (nu + 4)) * y - 1) * (nu + 1) / (nu + 2) + 1 / y
    return jnp.sqrt(nu * jnp.where(y > 0.05 + a, central, outer))


# So many estimates of a `vmap` are printed.
_LANES = 8
_OURS = "traceax", "equinox", "jaxtyping", "beartype"


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

    def __reduce__(self):
        # A tree, since the structure of a module doesn't survive pickling.
        return _Box, (self.unbox(),)

    def unbox(self) -> PyTree:
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x[0] for x in self.rest]
        return jtu.tree_unflatten(self.treedef, leaves)

    def unbox_tangent(self) -> PyTree:
        """The tree of tangents, where this is the tangent of a box."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else None for x in self.rest]
        return jtu.tree_unflatten(self.treedef, leaves)


class Estimate(eqx.Module):
    r"""An estimate, its error bar, and what it took to get it.

    A PyTree of arrays: it can be returned from `jax.jit` and `jax.vmap`, and carried
    through loops. Differentiable are `value` and the ends of `stats["bracket"]`.

    **Attributes:**

    - `value`: the estimate, a scalar of at least 32 bits. Real where the quantity is known
        to be real (an operator whose products with real vectors are real, or one known to
        be semidefinite), else complex.
        Of a function that returns a PyTree a PyTree of scalars, as are the standard
        error and the ends of the interval.
    - `standard_error`: an estimate of the root mean square error, a real scalar in the
        unit of `value`. Of exact answers that of rounding, 0 where nothing is rounded; NaN
        where it cannot be known (from one probe).
    - `result`: a [`traceax.RESULTS`][] item; for a function with several results, one for
        each of them.
    - `stats`: a dictionary. `"num_matvecs"` is how many products with the operator
        were used, `"degrees_of_freedom"` how many the error bar rests on; the front
        door [`traceax.trace`][] adds `"choice"`, which says how the estimate was made
        and why.
    - `str(estimate)`: a line for people, as `print` shows outside of a program.
        `float(estimate)` and `f"{estimate:.3f}"` are those of the value. Compute with
        `value`: an estimate is no number.
    - `state`: what the estimator's `estimate` takes. Hand it back with another budget
        to refine: estimators that can go on keep the products that were taken, and take so
        many more. [`traceax.AdaptiveXTraceEstimator`][] can't.

    !!! note

        `state` holds the operator and products with it. Return `estimate.value` rather
        than the whole estimate from a function that is `vmap`ped over keys alone, or
        the operator is copied once per key.
    """

    value: PyTree[Inexact[Array, "..."]]
    # Infinite where it cannot be known: `jax_debug_nans` would take NaN for a failure.
    _standard_error: PyTree[Float[Array, "..."]]
    result: Any
    stats: dict[str, PyTree]
    _state: _Box = eqx.field(repr=False)
    # An `Evidence`, for error bars of derivatives, or None.
    _evidence: _Box = eqx.field(repr=False)
    # The estimator's name, and the products of an exact answer.
    _by: tuple[str, int | float] = eqx.field(static=True, repr=False)

    def __init__(
        self,
        value: PyTree[Inexact[Array, "..."]],
        standard_error: PyTree[Float[Array, "..."]],
        result: PyTree[RESULTS],
        stats: dict[str, PyTree],
        state: PyTree,
        by: tuple[str, int | float] = ("", math.inf),
        evidence: PyTree = None,
    ):

        # A number that must not be used is none, and neither is its derivative.
        failed = map_results(has_failed, result)

        def usable(failed, value):
            factor = jnp.where(failed, jnp.nan, 1.0)
            return jtu.tree_map(lambda x: x * factor.astype(x.dtype), value)

        def known(failed, error):
            return jtu.tree_map(
                lambda x: jnp.where(failed | jnp.isnan(x), jnp.inf, x), error
            )

        self.value = jtu.tree_map(usable, failed, value)
        # Not differentiable: 0 times infinity would spoil slopes of values.
        self._standard_error = jax.lax.stop_gradient(
            jtu.tree_map(known, failed, standard_error)
        )
        self._by = by
        self.result = result
        self.stats = stats
        self._state = _Box(state)
        self._evidence = _Box(evidence)

    @property
    def standard_error(self) -> Any:
        """An estimate of the root mean square error; NaN where it cannot be known."""
        with jax.debug_nans(False):
            return jtu.tree_map(
                lambda x: jnp.where(jnp.isinf(x), jnp.nan, x), self._standard_error
            )

    def replaced(self, **changes: object) -> "Estimate":
        """The estimate with other values of some arguments of `__init__`."""
        arguments = {
            "value": self.value,
            "standard_error": self._standard_error,
            "result": self.result,
            "stats": self.stats,
            "state": self.state,
            "by": self._by,
            "evidence": self._evidence.unbox(),
        }
        return Estimate(**{**arguments, **changes})

    def times(self, factor: Inexact[Array, ""]) -> "Estimate":
        """The estimate of `factor` times the value."""
        evidence = self._evidence.unbox()
        if evidence is not None:
            evidence = evidence.times(factor, self._standard_error)
        return self.replaced(
            value=self.value * factor.astype(self.value.dtype),
            standard_error=jnp.abs(factor) * self._standard_error,
            evidence=evidence,
        )

    @property
    def state(self) -> PyTree:
        """The state that the estimator's `estimate` takes."""
        return self._state.unbox()

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self.value)[()], spec) if spec else str(self)

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "traceax.Estimate: an estimate is a value with an error bar, and no number or "
            "array; compute with estimate.value."
        )

    def __str__(self) -> str:
        if any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(self)):
            return eqx.tree_pformat(self)
        lanes = np.shape(results_of(self.result)[0]._value)
        if not lanes:
            return self._in_words()
        shown = list(np.ndindex(*lanes))[:_LANES]
        lines = [f"{math.prod(lanes)} estimates, shape {lanes}:"]
        for lane in shown:
            one = jtu.tree_map(lambda x, lane=lane: jnp.asarray(x)[lane], self)
            lines.append(f"  {one._in_words()}")
        return "\n".join(lines + ["  ..."] * (math.prod(lanes) > _LANES))

    def _in_words(self) -> str:
        """A line for one lane, and one more for each leaf of its value."""
        low, high = self.confidence_interval()
        parts = (self.value, self.standard_error, low, high)
        leaves = zip(*(jtu.tree_flatten_with_path(x)[0] for x in parts), strict=True)
        lines = []
        for (path, value), *rest in leaves:
            words = _number_with_error(value, *(leaf for _, leaf in rest))
            lines.append(f"{jtu.keystr(path)}: {words}" if path else words)
        used = int(self.stats["num_matvecs"])
        lines[-1] += f", {used} product{'s' * (used != 1)}"
        lines[-1] += self._bracket_in_words()
        name, products_of_exact = self._by
        name = name.removesuffix("Estimator")
        if used >= products_of_exact:
            # The error of an iterative solver may be unknown.
            errors = jtu.tree_leaves(self._standard_error)
            said = any(np.isinf(x).any() for x in errors) or "(exact)" in lines[-1]
            name = "" if said else "exact"
        lines[-1] += f", {name}" if name else ""
        if bool(any_unmet(self.result)):
            lines[-1] += f"; tolerance not met: {self._forecast()}"
        failures = [RESULTS[x] for x in results_of(self.result) if bool(has_failed(x))]
        lines += dict.fromkeys(failures)
        return "\n".join(lines)

    def _bracket_in_words(self) -> str:
        """Half of the bracket, where it is most of the error bar."""
        if "bracket" not in self.stats or len(jtu.tree_leaves(self.value)) > 1:
            return ""
        # In NumPy, where an unknown error is no failure to `jax_debug_nans`.
        parts = self.stats["bracket"], self.standard_error
        low, high, error = map(np.asarray, jtu.tree_leaves(parts))
        half, bar = float(np.max(high - low)) / 2, float(np.max(error))
        # A bracket whose bottom is loose is longer.
        if not 0.7 * bar < half <= 1.01 * bar:
            return ""
        return f", half of the bracket {half:.2g}"

    def _forecast(self) -> str:
        needed = float(np.max(self.stats.get("products_needed", math.inf)))
        if not math.isfinite(needed):
            return (
                "how many products it would take is not known; an iterative solver within "
                "the operator, if there is one, may need a smaller tolerance"
            )
        return f"at this rate it would take about {math.ceil(needed)} products"

    def confidence_interval(self, level: float = 0.95) -> tuple[Any, Any]:
        """The interval that holds the truth with probability `level`.

        A Student t interval about `value` with `stats["degrees_of_freedom"]`.
        Calibrated at the level 0.95: see the page on error bars for what was measured.

        **Arguments:**

        - `level`: the probability, a Python number between 0 and 1.

        **Returns:**

        A tuple `(low, high)` of scalars of `value`'s dtype. Infinite where the standard error
        is unknown, NaN after a failure; `low == high` where it is 0. For a complex value
        the real parts bound the real part and the imaginary parts the imaginary part.

        **Raises:**

        - `TypeError` if `level` isn't a Python number, `ValueError` if it doesn't lie
            between 0 and 1.
        """
        level = check_level(level, "traceax.Estimate.confidence_interval")
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


@ft.partial(jax.jit, static_argnames="level")
def _interval(value, error, freedom, level):
    # At least single precision.
    if jnp.finfo(error.dtype).bits < 32:
        error = error.astype(jnp.float32)
    freedom = jnp.asarray(freedom).astype(error.dtype)
    quantile = student_t_quantile(level, freedom)
    half = jnp.where(error == 0, jnp.zeros_like(error), quantile * error)
    if jnp.iscomplexobj(value):
        half = jax.lax.complex(half, half)
    half = half.astype(value.dtype)
    return value - half, value + half


def with_slopes(ends: PyTree[Array], value: PyTree[Array]) -> PyTree[Array]:
    """The ends of a bracket, with the derivative of the value."""
    return jtu.tree_map(
        lambda end, x: jax.lax.stop_gradient(end) + (x - jax.lax.stop_gradient(x)),
        ends,
        value,
    )


def _number_with_error(value: Any, error: Any, low: Any, high: Any) -> str:
    """A number with the digits that its error leaves, and its interval."""
    if np.ndim(value):
        return f"array of shape {np.shape(value)}"
    number, error = np.asarray(value).item(), float(error)
    if error == 0:
        return f"{number:.6g} (exact)"
    if not math.isfinite(abs(number) + error):
        return f"{number:.6g} +- unknown"
    if isinstance(number, complex):
        return f"{number:.6g} +- {error:.2g}"
    sizes = max(abs(number), error), error
    first, last = (math.floor(math.log10(x)) for x in sizes)

    def rounded(x, digits):
        return f"{float(x):#.{min(digits, 17)}g}".rstrip(".")

    number, low, high = (rounded(x, 2 + first - last) for x in (number, low, high))
    return f"{number} +- {rounded(error, 2)} (95 %: {low} to {high})"


@eqx.filter_jit
def _verdict(results: list[RESULTS]) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
    """Whether any value must not be used, and whether a tolerance is not met."""
    return ft.reduce(op.or_, map(has_failed, results)), any_unmet(results)


def raise_failure(estimate: Estimate, *, warn: bool = True) -> Estimate:
    """The estimate; using it, or a derivative of it, raises if it failed.

    A tolerance that is not met is no failure: outside of a program it is a warning.
    """
    results = results_of(estimate.result)
    failed, unmet = _verdict(results)
    known = not isinstance(unmet, jax.core.Tracer) and unmet.ndim == 0
    if warn and known and bool(unmet):
        # We point at the user's line, which wrappers of methods may hide.
        frame, level = inspect.currentframe(), 1
        while frame and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
            frame, level = frame.f_back, level + 1
        text = f"The tolerance was not met; {estimate._forecast()}."
        warnings.warn(text, stacklevel=level)
    if not isinstance(failed, jax.core.Tracer) and not bool(failed):
        return estimate
    real = jnp.finfo(jtu.tree_leaves(estimate.value)[0].dtype).dtype
    # A factor rather than the value itself: a derivative is multiplied by it too, and
    # so raises where the value is not asked for.
    one = jnp.ones((), real)
    for result in results:
        one = result.error_if(one, has_failed(result))
    return eqx.tree_at(
        lambda e: jtu.tree_leaves((e.value, e._standard_error)),
        estimate,
        replace_fn=lambda x: x * one.astype(x.dtype),
    )
