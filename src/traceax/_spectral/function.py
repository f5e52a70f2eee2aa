"""Functions of a real variable as data, their divided differences, and their sums."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, PyTree

from .._arguments import check_real_scalar, kind_of
from .._linalg.dense import divisor, largest_entry, power_of_two_scale
from .._linalg.types import owned
from .._operators.closure import closure
from .._operators.space import Space, structure_of
from .._results import RESULTS, per_entry

# Errors in eigenvalues, in units of eps times the largest one: the standard error, and
# the largest that we saw (Laplacians and Gram matrices, order 5 to 1,000, 32 bits).
_MOVED, HIDDEN = 1.0, 6.0


class SpectralFunction(eqx.Module):
    """A function to apply to each eigenvalue. Arrays that it closes over are leaves.

    - `fn`: maps a real scalar to a PyTree of scalars and arrays.
    - `monotone`: whether each result, or minus it, is operator monotone on (0, inf).
    """

    fn: Any
    monotone: bool = eqx.field(static=True, default=False)

    def evaluates(self, other: "SpectralFunction") -> bool:
        """Whether both have the same `fn`. JIT rebuilds modules, but not functions."""
        return self.fn is other.fn

    def __call__(self, points: Inexact[Array, "*p"]) -> list[Inexact[Array, "..."]]:
        """The leaves of `fn`, with shapes s, at every point."""

        def inexact(x):
            kind = np.complex64 if jnp.iscomplexobj(x) else points.dtype
            shape = *x.shape[:-1], *points.shape
            return x.astype(np.result_type(points.dtype, kind)).reshape(shape)

        flat = jax.vmap(self.fn, out_axes=-1)(points.reshape(-1))
        return [inexact(x) for x in jtu.tree_leaves(flat)]

    def is_finite(self, points: Float[Array, "*p"]) -> Bool[Array, "*p"]:
        """Whether every entry is finite at a point."""
        finite = [jnp.isfinite(f).reshape(-1, *points.shape) for f in self(points)]
        return jnp.concatenate(finite).all(axis=0)

    def treedef(self, dtype: DTypeLike) -> Any:
        """The structure of the results."""
        scalar = structure_of(jax.ShapeDtypeStruct((), dtype))
        return jtu.tree_structure(jax.eval_shape(self.fn, scalar))

    def in_range(self, values: Float[Array, " k"]) -> "SpectralFunction":
        """This function. A power gets a unit that keeps powers of `values` in range."""
        if not isinstance(self.fn, Power):
            return self
        unit = jax.lax.stop_gradient(power_of_two_scale(values))
        return SpectralFunction(Power(self.fn.p, unit), self.monotone)

    @property
    def unit(self) -> dict[str, Array]:
        """The entry `unit` for `stats`; empty if the function has none."""
        unit = self.fn.unit if isinstance(self.fn, Power) else None
        return {} if unit is None else {"unit": unit}


# We need functions that can be pickled, and JAX's can't.
def _log(x):
    return jnp.log(x)


def _reciprocal(x):
    return jnp.reciprocal(x)


def _identity(x):
    return x


# We create these once, so that JAX reuses their compiled programs.
LOG = SpectralFunction(_log, monotone=True)
RECIPROCAL = SpectralFunction(_reciprocal, monotone=True)
IDENTITY = SpectralFunction(_identity)


class Power(eqx.Module):
    """`|x / unit|^p`."""

    p: Float[Array, ""]
    unit: Float[Array, ""] | None = None

    def __call__(self, x):
        magnitude = jnp.abs(x if self.unit is None else x / self.unit)
        # We avoid the two-argument form at 0, which has the wrong derivative there.
        zero = magnitude == 0
        safe = jnp.where(zero, 1, magnitude)
        power = jnp.where(zero, 0, safe ** self.p.astype(x.dtype))
        # A power p <= 0 gives no norm. We return NaN, because p may be traced.
        return jnp.where(self.p > 0, power, jnp.nan)


def spectral_function(
    fn: Any, dtype: DTypeLike, where: str, monotone: bool = False
) -> SpectralFunction:
    """`fn`, checked and with its arrays captured, as `as_data` does for operators."""
    if isinstance(fn, SpectralFunction):
        return fn
    if not callable(fn):
        raise TypeError(
            f"{where}: fn must be a function of a real scalar, got "
            f"{kind_of(fn)}; pass jnp.log, for example. The arguments start "
            "(key, fn, operator, k)."
        )
    scalar = structure_of(jax.ShapeDtypeStruct((), dtype))
    try:
        # `fn` may return a Python number.
        made = closure(lambda x: jtu.tree_map(jnp.asarray, fn(x)), scalar, vectors=True)
    except jax.errors.JAXTypeError as error:
        error.add_note(
            f"{where}: fn is traced, with an eigenvalue that is not known yet; write it with "
            "jax.numpy, such as jnp.log for math.log, and jnp.where for if."
        )
        raise
    shapes = jtu.tree_leaves(jax.eval_shape(made, scalar))
    if not shapes or any(0 in x.shape for x in shapes):
        raise ValueError(
            f"{where}: fn must return a scalar, an array or a PyTree of these, got a "
            "result without arrays, or an empty one; write it for one eigenvalue."
        )
    traced = any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(made))
    if isinstance(fn, jax.stages.Wrapped) and not traced:
        return SpectralFunction(fn, monotone)
    return SpectralFunction(owned(made), monotone)


def checked_lower(
    lower: ArrayLike | None, dtype: DTypeLike, where: str
) -> Float[Array, ""] | None:
    if lower is None:
        return None
    check_real_scalar(lower, "lower", where, "no eigenvalue may lie below it")
    return jnp.asarray(lower, dtype)


def derivative(
    function: Callable[[Array], list[Array]], points: Inexact[Array, "..."]
) -> list[Inexact[Array, "..."]]:
    return jax.jvp(function, (points,), (jnp.ones_like(points),))[1]


def divided_differences(
    function: Callable[[Array], list[Array]],
    x: Float[Array, " p"],
    y: Float[Array, " q"],
) -> list[Inexact[Array, "... p q"]]:
    """`(f(x_i) - f(y_j)) / (x_i - y_j)` for every leaf f, and f' where they are equal.

    If f changes little, the quotient loses digits. We then take the mean of f' by the
    two-point Gauss rule, if its error is smaller. We estimate this error from squared
    differences to f' at the midpoint, and to the mean of f' at both ends. We replace an
    infinite f' (a square root at 0) by the quotient over a distance at rounding level.
    """
    X, Y = jnp.broadcast_arrays(x[:, None], y[None, :])
    eps = jnp.finfo(x.dtype).eps
    distance = X - Y
    middle, offset = (X + Y) / 2, distance / (2 * 3**0.5)
    tiny = eps * jnp.maximum(largest_entry(x), largest_entry(y))
    tiny = jnp.where(tiny == 0, eps, tiny)
    equal = distance == 0
    safe = jnp.where(equal, 1, distance)

    def quotients(f_x, f_y, f_moved, slope_x, slope_y, below, above, between):
        f_x, f_y, f_moved = f_x[:, None], f_y[None, :], f_moved[:, None]
        secant = (f_x - f_y) / safe.astype(f_x.dtype)
        mean = (below + above) / 2
        end_mean = (slope_x[:, None] + slope_y[None, :]) / 2
        off = jnp.maximum(jnp.abs(mean - between), jnp.abs(mean - end_mean))
        mean_error = off * (off / divisor(jnp.abs(mean)))
        secant_error = eps * jnp.maximum(jnp.abs(f_x), jnp.abs(f_y)) / jnp.abs(safe)
        quotient = (f_moved - f_x) / tiny.astype(f_x.dtype)
        mean = jnp.where(jnp.isfinite(mean), mean, quotient)
        return jnp.where(equal | (mean_error <= secant_error), mean, secant)

    parts = (
        *(function(points) for points in (x, y, x + tiny)),
        *(derivative(function, points) for points in (x, y)),
        *(derivative(function, middle + by) for by in (-offset, offset, 0)),
    )
    leaves = zip(*parts, strict=True)
    return [per_entry(quotients, leaf[0].ndim - 1)(*leaf) for leaf in leaves]


@eqx.filter_custom_jvp
def _final(_, x: PyTree) -> PyTree:
    return x


@_final.def_jvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "traceax: estimates of spectral functions and likelihoods, and f(A) as an operator, "
        "have first derivatives only, got a second one. For log-determinants, traces of "
        "inverses and likelihoods, leave out k and estimator: up to 4,000 unknowns with "
        "readable entries (likelihoods: 6,000), a Cholesky factorisation makes them "
        "exact, with derivatives of any order. Otherwise take differences between "
        "gradients with one key, or a Fisher matrix instead: see the recipe for "
        "standard errors."
    )


def final(tree: PyTree, of: PyTree = ()) -> PyTree:
    """`tree`, whose derivatives raise an error, also with respect to arrays in `of`."""
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(_final(eqx.filter(of, eqx.is_array), arrays), rest)


def weighted_sums(
    weights: Inexact[Array, "... k"], f: Inexact[Array, "... k"]
) -> Inexact[Array, "..."]:
    """`sum_j weights_j f_j`. We skip weights 0, where f may be infinite."""
    weights = jnp.expand_dims(weights, range(f.ndim - weights.ndim))
    dtype = np.result_type(weights.dtype, f.dtype)
    terms = weights.astype(dtype) * f.astype(dtype)
    return jnp.sum(jnp.where(weights == 0, 0, terms), axis=-1)


def rounding_errors(
    function: SpectralFunction,
    values: Float[Array, " k"],
    weights: Float[Array, " k"],
    resolution: Float[Array, ""],
    lower: Float[Array, ""] | None,
) -> tuple[list[Float[Array, "..."]], list[Bool[Array, "..."]]]:
    """Errors in leaves' sums from errors in eigenvalues, and whether they decide sums.

    Errors in eigenvalues are a few times `resolution |A|`. They hardly change most
    functions, but change roots and logarithms of small eigenvalues. They decide a sum
    if a leaf is infinite, or steep and NaN, within them. Infinite errors don't.
    """
    unknown, eps = jnp.isinf(resolution), jnp.finfo(values.dtype).eps
    resolution = jnp.where(unknown, eps, resolution)
    largest = jnp.max(jnp.abs(values), initial=0)
    moved = _MOVED * resolution * largest
    hidden = (HIDDEN if lower is None else 1) * resolution * largest
    down = values - moved if lower is None else jnp.maximum(values - moved, lower)
    down = jnp.where(jnp.abs(values) <= hidden, 0, down)
    counts = jnp.abs(weights) > jnp.sqrt(eps)

    def leaf_errors(f, *ends):
        changes = jnp.stack([jnp.abs(end - f) for end in ends])
        change = jnp.max(jnp.where(jnp.isfinite(changes), changes, 0), axis=0)
        error = weighted_sums(jnp.abs(weights), change)
        # With the resolution, changes in a root shrink; changes in a logarithm don't.
        size = jnp.max(jnp.where(counts, jnp.abs(f), 0), initial=0)
        steep = change > resolution**0.25 * size
        bad = jnp.isinf(changes) | (jnp.isnan(changes) & steep[None, :])
        # If f is infinite at both ends as well, we have an overflow.
        alone = jnp.isinf(f)[None, :] & ~jnp.isinf(jnp.stack(ends))
        bad = bad & (jnp.isfinite(f)[None, :] | alone) & counts[None, :]
        return jnp.where(unknown, jnp.inf, error), jnp.any(bad)

    leaves = zip(*map(function, (values, down, values + moved)), strict=True)
    results = [per_entry(leaf_errors, leaf[0].ndim - 1)(*leaf) for leaf in leaves]
    errors, decided = zip(*results, strict=True)
    return list(errors), list(decided)


def remaining(
    b: Float[Array, "*s"], a: Float[Array, "*s"], most: float
) -> Float[Array, "*s"]:
    """Extrapolated error after changes by a, and then by b in the same number of steps.

    It is the geometric series `b r / (1 - r)` with `r = min(b / a, most)`.
    """
    ratio = jnp.clip(b / divisor(a), 0, most)
    return b * ratio / (1 - ratio)


# Asymmetry that we accept: from rounding, in units of eps, and from solvers in 64 bits.
# Rounding gave at most 50 eps with Lanczos, 4 eps with Arnoldi (kernels, normal
# equations and Hessians of networks, n = 1,000 to 36,000, 32 bits).
_ASYMMETRY, _SOLVERS = 200.0, 1e-6


class RitzValues(NamedTuple):
    """Eigenvalues of a projected operator.

    - `values`: eigenvalues, moved to 0 or a known `lower` if rounding put them below.
    - `resolution`: errors relative to the largest eigenvalue: eps, or the asymmetry if
        rounding doesn't explain it.
    - `result`: whether the eigenvalues agree with the operator's tags and `lower`.
    """

    values: Float[Array, " k"]
    resolution: Float[Array, ""]
    result: RESULTS


def largest_asymmetry(space: Space) -> float:
    """Asymmetry, relative to the operator, that rounding and solvers may cause."""
    rounding = 4 * float(jnp.finfo(space.dtype).eps)
    return max(
        _ASYMMETRY * float(jnp.finfo(space.compute_dtype).eps), _SOLVERS, rounding
    )


def ritz_values(
    values: Float[Array, " k"],
    asymmetry: Float[Array, ""],
    space: Space,
    lower: Float[Array, ""] | None = None,
    magnitude: Float[Array, ""] | None = None,
    error: Float[Array, ""] | None = None,
) -> RitzValues:
    """`RitzValues` from the projected operator's eigenvalues and relative asymmetry.

    `magnitude`: magnitude of the terms that cancel in a product. `error`: errors that
    solvers inside the operator cause in products, relative to the largest value.
    """
    eps = jnp.finfo(values.dtype).eps
    if values.size == 0:
        return RitzValues(values, jnp.asarray(eps, values.dtype), RESULTS.successful)
    ordered = jnp.sort(values)  # NaN comes last
    low, high = ordered[0], ordered[-1]
    largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
    cancelled = 1.0
    if magnitude is not None:
        cancelled = jnp.maximum(magnitude / divisor(largest), 1)
    asymmetry = asymmetry / cancelled
    rounding = 8 * math.sqrt(values.shape[0])
    values = jnp.where((values < 0) & (values > -rounding * eps * largest), 0, values)
    # We test nothing if numbers left the range of their dtype.
    finite = jnp.isfinite(largest) & jnp.isfinite(asymmetry + cancelled)
    result = RESULTS.where(finite, RESULTS.successful, RESULTS.nonfinite)
    if space.is_positive:
        wrong = finite & (low < -jnp.sqrt(eps) * largest)
        result = RESULTS.where(wrong, RESULTS.not_semidefinite, result)
        values = jnp.where(wrong, values, jnp.maximum(values, 0))
    limit = largest_asymmetry(space)
    limit = limit if error is None else jnp.maximum(limit, error)
    asymmetric = finite & (asymmetry > limit)
    result = RESULTS.where(asymmetric, RESULTS.not_hermitian, result)
    resolution = (
        jnp.where(asymmetry <= _ASYMMETRY / 4 * eps, eps, asymmetry) * cancelled
    )
    resolution = resolution if error is None else jnp.maximum(resolution, error)
    if lower is not None:
        below = values < lower - rounding * resolution * largest
        wrong = jnp.any(below) & (result == RESULTS.successful)
        result = RESULTS.where(wrong, RESULTS.below_lower, result)
        values = jnp.where(below, values, jnp.maximum(values, lower))
    return RitzValues(values, resolution, result)
