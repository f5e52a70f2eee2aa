"""Estimates: a value, its error bar, and the products that it took."""

import functools as ft
import inspect
import math
import operator as op
import warnings
from contextlib import AbstractContextManager
from statistics import NormalDist
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, PyTree

from ._arguments import check_level, require
from ._results import (
    RESULTS,
    any_unmet,
    first_failure,
    has_failed,
    map_results,
    results_of,
)

# Below `_FEW` degrees of freedom, we interpolate quantiles between `1 / node` degrees.
_FEW = 3
_NODES = (1.0, 1 / 2, 1 / 3, 1 / 4)


def student_t_quantile(level: float, freedom: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The quantile of Student's t distribution for two-sided intervals.

    Hill (1970), "Algorithm 396: Student's t-quantiles", doi:10.1145/355598.355600, has a
    relative error below 1e-3 from three degrees on. Below three degrees, we interpolate the
    logarithm between closed forms, in `1 / freedom` up to 1. The relative error is then
    below 1 % at levels up to 0.99, and below 4 % at all levels.
    """
    tails = 1 - level
    inverse = 1 / jnp.maximum(freedom, 1)
    logarithm = jnp.zeros_like(inverse)
    for node, quantile in zip(_NODES, _closed_forms(level, tails), strict=True):
        other_nodes = [x for x in _NODES if x != node]
        weight = math.prod((inverse - x) / (node - x) for x in other_nodes)
        logarithm = logarithm + weight * math.log(max(quantile, 1e-30))
    expansion = _hill(tails, -NormalDist().inv_cdf(tails / 2), freedom)
    return jnp.where(freedom < _FEW, jnp.exp(logarithm), expansion)


def _closed_forms(level: float, tails: float) -> tuple[float, ...]:
    one = 1 / math.tan(math.pi / 2 * tails)
    two = level / math.sqrt((1 + level) * tails / 2)
    # For three degrees, `tails = (x - sin x) / pi`, and the quantile is
    # `sqrt(3) / tan(x / 2)`. We use Newton's method from the leading term's root.
    x = math.cbrt(6 * math.pi * tails)
    for _ in range(6):
        x -= (x - math.sin(x) - math.pi * tails) / (1 - math.cos(x))
    three = math.sqrt(3) / math.tan(x / 2)
    # For four, we write differences between cosines of angle / 3 as products of sines.
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


# We print only the first estimates in a batch, or numbers in an array, and point warnings
# past these packages.
_MOST_PRINTED = 8
_SKIPPED = "traceax", "equinox", "jaxtyping", "beartype"


class Box(eqx.Module):
    """A PyTree whose leaves are arrays only; every other leaf is part of its structure.

    Operators may hold functions and strings as leaves. In a box, `jax.jit` can return them
    and `jax.lax` loops can carry them.
    """

    arrays: list[Array]
    rest: tuple[Any, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)

    def __init__(self, tree: PyTree):
        leaves, self.treedef = jtu.tree_flatten(tree)
        self.arrays = [x for x in leaves if eqx.is_array(x)]
        self.rest = tuple(None if eqx.is_array(x) else (x,) for x in leaves)

    def __reduce__(self):
        # We pickle the tree, since a module's structure doesn't survive pickling.
        return Box, (self.unbox(),)

    def unbox(self) -> PyTree:
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x[0] for x in self.rest]
        return jtu.tree_unflatten(self.treedef, leaves)

    def unbox_tangent(self) -> PyTree:
        """The tree of tangents in a box's tangent."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else None for x in self.rest]
        return jtu.tree_unflatten(self.treedef, leaves)


class Estimate(eqx.Module):
    r"""An estimated value with its error bar, its result and its cost.

    An estimate is a PyTree of arrays, so `jax.jit` and `jax.vmap` can return it and loops
    can carry it. You can differentiate `value` and the ends of `stats["bracket"]`.

    **Attributes:**

    - `value`: the estimate, a scalar with at least 32 bits. It is real if the quantity is
        known to be real (the operator's products with real vectors are real, or the
        operator is known to be semidefinite), otherwise complex. For a function that
        returns a PyTree, `value`, the standard error and the ends of the interval are
        PyTrees of scalars.
    - `standard_error`: an estimate of the root mean square error, a real scalar in the
        unit of `value`. For an exact answer, the rounding error (0 if nothing is rounded).
        NaN if it is unknown, as after a single probe.
    - `result`: a [`traceax.RESULTS`][] item, or one for each of a function's results.
    - `stats`: a dictionary. `"num_matvecs"` is the number of products with the operator,
        and `"degrees_of_freedom"` is the number behind the error bar. The entry point
        [`traceax.trace`][] adds `"choice"`: how the estimate was made, and why.
    - `str(estimate)`: a line for people, which `print` shows outside `jax.jit`.
        `float(estimate)` and `f"{estimate:.3f}"` use the value. Compute with `value`,
        since an estimate is not a number.
    - `state`: pass it to the estimator's `estimate`, with another budget, to refine the
        estimate. Estimators that can resume keep the products taken, and take the new
        budget on top. [`traceax.AdaptiveXTraceEstimator`][] can't resume, and estimators
        refuse states from likelihoods, preconditioned log-determinants, norms, leaf traces
        and slopes.

    !!! note

        `state` holds the operator and products with it. If you `vmap` a function over keys
        alone, return `estimate.value` rather than the whole estimate. Otherwise each key
        gets a copy of the operator.
    """

    value: PyTree[Inexact[Array, "..."]]
    # We store unknown errors as inf: `jax_debug_nans` would take NaN for a failure.
    _standard_error: PyTree[Float[Array, "..."]]
    result: Any
    stats: dict[str, PyTree]
    _state: Box = eqx.field(repr=False)
    # An `Evidence` for the error bars of derivatives, or None.
    _evidence: Box = eqx.field(repr=False)
    # The estimator's name, and the number of products in an exact answer.
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
        # We make failed values and their derivatives NaN, so that nobody uses them.
        failed = map_results(has_failed, result)

        def value_or_nan(failed, value):
            factor = jnp.where(failed, jnp.nan, 1.0)
            return jtu.tree_map(lambda x: x * factor.astype(x.dtype), value)

        def error_or_inf(failed, error):
            return jtu.tree_map(
                lambda x: jnp.where(failed | jnp.isnan(x), jnp.inf, x), error
            )

        self.value = jtu.tree_map(value_or_nan, failed, value)
        # We stop gradients: 0 times infinity would make derivatives of values NaN.
        self._standard_error = jax.lax.stop_gradient(
            jtu.tree_map(error_or_inf, failed, standard_error)
        )
        self._by = by
        self.result = result
        self.stats = stats
        self._state = Box(state)
        self._evidence = Box(evidence)

    @property
    def standard_error(self) -> Any:
        """An estimate of the root mean square error; NaN if it is unknown."""
        with self._precision(), jax.debug_nans(False):
            return jtu.tree_map(
                lambda x: jnp.where(jnp.isinf(x), jnp.nan, x), self._standard_error
            )

    def replaced(self, **changes: object) -> "Estimate":
        """The estimate with some arguments of `__init__` replaced."""
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

    @property
    def state(self) -> PyTree:
        """The state that the estimator's `estimate` takes."""
        return self._state.unbox()

    def __float__(self) -> float:
        return float(self._number(jnp.floating))

    def __format__(self, spec: str) -> str:
        return format(self._number(jnp.inexact), spec) if spec else str(self)

    def _number(self, kind: Any) -> Any:
        value, what = self.value, "value must be one number, and a real one for float()"
        is_number = eqx.is_array(value) and value.ndim == 0
        is_number = is_number and jnp.issubdtype(value.dtype, kind)
        hint = "convert or format the numbers in estimate.value"
        require(is_number, "traceax.Estimate", what, value, hint, TypeError)
        return np.asarray(value)[()]

    def _precision(self) -> AbstractContextManager:
        """64-bit mode for an estimate with 64 bits, otherwise the mode at present."""
        parts = self.value, self._standard_error, self.stats
        dtypes = [x.dtype for x in jtu.tree_leaves(parts) if eqx.is_array(x)]
        is_cut = any(jax.dtypes.canonicalize_dtype(x) != x for x in dtypes)
        return jax.enable_x64(is_cut or jax.config.jax_enable_x64)  # pyright: ignore

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "traceax.Estimate: an estimate has a value and an error bar, and is not an "
            "array; compute with estimate.value."
        )

    def __str__(self) -> str:
        if any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(self)):
            return eqx.tree_pformat(self)
        shape = np.shape(self.stats["num_matvecs"])
        if not shape:
            return self._in_words()
        indices = list(np.ndindex(*shape))[:_MOST_PRINTED]
        lines = [f"{math.prod(shape)} estimates, shape {shape}:"]
        for index in indices:
            with self._precision():
                element = jtu.tree_map(lambda x, i=index: jnp.asarray(x)[i], self)
            lines.append(f"  {element._in_words()}")
        return "\n".join(lines + ["  ..."] * (math.prod(shape) > _MOST_PRINTED))

    def _in_words(self) -> str:
        """A line for each leaf in a single estimate's value, and for each failure."""
        low, high = self.confidence_interval()
        parts = (self.value, self.standard_error, low, high)
        leaves = zip(*(jtu.tree_flatten_with_path(x)[0] for x in parts), strict=True)
        lines = []
        for (path, value), *rest in leaves:
            words = _number_with_error(value, *(leaf for _, leaf in rest))
            lines.append(f"{jtu.keystr(path)}: {words}" if path else words)
        # Several leaves share the products.
        lines = lines if len(lines) == 1 else [*lines, "in all"]
        used = int(self.stats["num_matvecs"])
        lines[-1] += f", {used} product{'s' * (used != 1)}"
        lines[-1] += self._bracket_in_words()
        name, products_of_exact = self._by
        name = name.removesuffix("Estimator")
        if used >= products_of_exact:
            # We don't call it exact if an iterative solver's error is unknown.
            errors = jtu.tree_leaves(self._standard_error)
            is_marked = any(np.isinf(x).any() for x in errors)
            is_marked = is_marked or any("(exact)" in line for line in lines)
            name = "" if is_marked else "exact"
        lines[-1] += f", {name}" if name else ""
        if bool(any_unmet(self.result)):
            lines[-1] += f"; tolerance not met: {self._forecast()}"
        firsts = map(first_failure, results_of(self.result))
        failures = [RESULTS[x] for x in firsts if bool(has_failed(x))]
        lines += dict.fromkeys(failures)
        return "\n".join(lines)

    def _bracket_in_words(self) -> str:
        """Half of the bracket, if it makes up most of the error bar."""
        if "bracket" not in self.stats or len(jtu.tree_leaves(self.value)) > 1:
            return ""
        # We use NumPy, since `jax_debug_nans` would take an unknown error for a failure.
        parts = self.stats["bracket"], self.standard_error
        low, high, error = map(np.asarray, jtu.tree_leaves(parts))
        half, bar = float(np.max(high - low)) / 2, float(np.max(error))
        # With a loose lower end, the bracket is longer than the error bar.
        if not 0.7 * bar < half <= 1.01 * bar:
            return ""
        return f", half of the bracket {half:.2g}"

    def _forecast(self) -> str:
        needed = float(np.max(self.stats.get("products_needed", math.inf)))
        if not math.isfinite(needed):
            return (
                "how many products it would take is not known; if the operator uses an "
                "iterative solver, the solver may need a smaller tolerance"
            )
        return f"at this rate it would take about {math.ceil(needed)} products"

    def confidence_interval(self, level: float = 0.95) -> tuple[Any, Any]:
        """The interval that contains the truth with probability `level`.

        It is a Student t interval about `value` with `stats["degrees_of_freedom"]`,
        calibrated at level 0.95. The page on error bars has the measured coverage.

        **Arguments:**

        - `level`: the probability, a Python number between 0 and 1.

        **Returns:**

        A tuple `(low, high)` in `value`'s dtype. The ends are infinite if the standard error
        is unknown, equal if it is 0, and NaN after a failure. For a complex value, their
        real parts bound the real part, and their imaginary parts the imaginary part.

        **Raises:**

        - `TypeError` if `level` isn't a Python number, `ValueError` if it isn't in (0, 1).
        """
        level = check_level(level, "traceax.Estimate.confidence_interval")
        values, treedef = jtu.tree_flatten(self.value)
        errors = treedef.flatten_up_to(self._standard_error)
        infinite = treedef.unflatten([jnp.asarray(jnp.inf)] * len(values))
        freedoms = self.stats.get("degrees_of_freedom", infinite)
        parts = zip(values, errors, treedef.flatten_up_to(freedoms), strict=True)
        with self._precision():
            low, high = zip(*[_interval(*x, level) for x in parts], strict=True)
        return treedef.unflatten(low), treedef.unflatten(high)


@ft.partial(jax.jit, static_argnames="level")
def _interval(value, error, freedom, level):
    # We compute quantiles at least in single precision.
    if jnp.finfo(error.dtype).bits < 32:
        error = error.astype(jnp.float32)
    freedom = jnp.asarray(freedom).astype(error.dtype)
    quantile = student_t_quantile(level, freedom)
    half = jnp.where(error == 0, jnp.zeros_like(error), quantile * error)
    if jnp.iscomplexobj(value):
        half = jax.lax.complex(half, half)
    half = half.astype(value.dtype)
    return value - half, value + half


def _number_with_error(value: Any, error: Any, low: Any, high: Any) -> str:
    """A number, rounded to the digits that its error supports, and its interval."""
    if np.ndim(value):
        size = np.sqrt(np.mean(np.asarray(error) ** 2)) if np.size(value) else 0
        words = "(exact)" if size == 0 else f"+- {size:.2g} (root mean square)"
        first = [f"{x:.4g}" for x in np.ravel(value)[:_MOST_PRINTED]]
        first += ["..."] * (np.size(value) > _MOST_PRINTED)
        return f"array of shape {np.shape(value)} {words}: [{' '.join(first)}]"
    number, error = np.asarray(value).item(), float(error)
    if error == 0:
        return f"{number:.6g} (exact)"
    if not math.isfinite(abs(number) + error):
        return f"{number:.6g} +- unknown"
    if isinstance(number, complex):
        return f"{number:.6g} +- {error:.2g}"
    magnitudes = max(abs(number), error), error
    first, last = (math.floor(math.log10(x)) for x in magnitudes)

    def rounded(x, digits):
        return f"{float(x):#.{min(digits, 17)}g}".rstrip(".")

    number, low, high = (rounded(x, 2 + first - last) for x in (number, low, high))
    return f"{number} +- {rounded(error, 2)} (95 %: {low} to {high})"


@eqx.filter_jit
def _verdict(results: list[RESULTS]) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
    """Whether any value must not be used, and whether any tolerance is not met."""
    failed = [has_failed(first_failure(x)) for x in results]
    return ft.reduce(op.or_, failed), any_unmet(results)


def raise_failure(estimate: Estimate, *, warn: bool = True) -> Estimate:
    """The estimate. If it failed, using it or its derivatives raises.

    A tolerance that is not met is no failure. Outside `jax.jit`, it causes a warning.
    """
    results = results_of(estimate.result)
    failed, unmet = _verdict(results)
    is_known = not isinstance(unmet, jax.core.Tracer) and unmet.ndim == 0
    if warn and is_known and bool(unmet):
        # We point at the user's line, which wrappers around methods may hide.
        frame, level = inspect.currentframe(), 1
        while frame and frame.f_globals.get("__name__", "").split(".")[0] in _SKIPPED:
            frame, level = frame.f_back, level + 1
        text = f"The tolerance was not met; {estimate._forecast()}."
        warnings.warn(text, stacklevel=level)
    if not isinstance(failed, jax.core.Tracer) and not bool(failed):
        return estimate
    real = jnp.finfo(jtu.tree_leaves(estimate.value)[0].dtype).dtype
    # We raise through a factor of 1 rather than through the value. It multiplies
    # derivatives too, so they raise even if nobody uses the value.
    factor = jnp.ones((), real)
    for result in map(first_failure, results):
        factor = result.error_if(factor, has_failed(result))
    return eqx.tree_at(
        lambda e: jtu.tree_leaves((e.value, e._standard_error)),
        estimate,
        replace_fn=lambda x: x * factor.astype(x.dtype),
    )
