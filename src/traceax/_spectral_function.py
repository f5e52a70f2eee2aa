"""A function of one real variable, as data, and its divided differences."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ._arguments import kind_of
from ._closures import portable
from ._programs import interned
from ._tracers import closes_over_tracer

_NEEDS_NUMBERS = (
    "fn is traced, for an eigenvalue that is not known yet; write it with jax.numpy, "
    "such as jnp.log for math.log, and jnp.where for if."
)


class SpectralFunction(eqx.Module):
    """A function of eigenvalues, one by one. What it closes over are leaves.

    **Attributes:**

    - `fn`: maps a real scalar to a PyTree of scalars.
    """

    fn: Any

    def __call__(self, points: Float[Array, "..."]) -> list[Inexact[Array, "..."]]:
        """The leaves of `fn` at every point."""
        flat = jtu.tree_leaves(jax.vmap(_of_arrays(self.fn))(points.reshape(-1)))
        return [_inexact(x, points.dtype).reshape(points.shape) for x in flat]

    def structure(self, dtype) -> Any:
        """The structure of what `fn` returns."""
        return jtu.tree_structure(jax.eval_shape(_of_arrays(self.fn), _scalar(dtype)))


class _Bound(eqx.Module):
    fn: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, x):
        return self.fn(*self.args, x, **self.keywords)


def _of_arrays(fn: Callable) -> Callable:
    # A constant may be a Python number.
    return lambda x: jtu.tree_map(jnp.asarray, fn(x))


def _scalar(dtype):
    return jax.ShapeDtypeStruct((), dtype)


def _inexact(x: Array, real) -> Inexact[Array, "..."]:
    kind = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return x.astype(np.result_type(real, np.complex64) if kind else real)


def spectral_function(fn: Any, dtype, where: str) -> SpectralFunction:
    """The function, once checked.

    Raises `TypeError` for what can't be called, `ValueError` for a function that
    doesn't map a scalar to scalars.
    """
    if not callable(fn):
        raise TypeError(
            f"{where}: fn must be a function of a real scalar, got "
            f"{kind_of(fn)}; pass jnp.log, for example. The arguments start "
            "(key, fn, operator, k)."
        )
    if isinstance(fn, functools.partial):
        # Its arguments become leaves.
        fn = _Bound(fn.func, fn.args, fn.keywords)
    made = jtu.tree_map(lambda x: interned(portable(x)), fn)
    functions = [x for x in jtu.tree_leaves(made) if callable(x)]
    if any(closes_over_tracer(x, set()) for x in functions if not eqx.is_array(x)):
        # lineax converts functions of operators in the same way.
        made = eqx.filter_closure_convert(made, _scalar(dtype))
    try:
        leaves = jtu.tree_leaves(jax.eval_shape(_of_arrays(made), _scalar(dtype)))
    except jax.errors.JAXTypeError as error:
        error.add_note(f"{where}: {_NEEDS_NUMBERS}")
        raise
    if not leaves or any(x.shape != () for x in leaves):
        shapes = [x.shape for x in leaves]
        raise ValueError(
            f"{where}: fn must map a scalar to a scalar, or to a PyTree of scalars, "
            f"got results of shapes {shapes}; it is applied to every eigenvalue alone."
        )
    return SpectralFunction(made)


def derivative(
    function: Callable[[Array], list[Array]], points: Float[Array, "..."]
) -> list[Inexact[Array, "..."]]:
    """The derivative of every leaf."""
    return jax.jvp(function, (points,), (jnp.ones_like(points),))[1]


def divided_differences(
    function: Callable[[Array], list[Array]],
    x: Float[Array, " p"],
    y: Float[Array, " q"],
) -> list[Inexact[Array, "p q"]]:
    """`(f(x_i) - f(y_j)) / (x_i - y_j)` for every leaf f, and f' where they are equal.

    The quotient cancels where f changes little. There it is the mean of f' between the
    points, by the Gauss rule of two points. Of the two the one with the smaller error is
    taken: the rounding of f divided by the distance, or the square of how much the rule
    differs from the middle or the mean of the ends.

    An infinite f' (a square root at 0) is replaced by the difference quotient over a
    distance of rounding size: the points are no better known.
    """
    X, Y = jnp.broadcast_arrays(x[:, None], y[None, :])
    eps = jnp.finfo(x.dtype).eps
    distance = X - Y
    middle, offset = (X + Y) / 2, distance / (2 * 3**0.5)
    below = derivative(function, middle - offset)
    above = derivative(function, middle + offset)
    between = derivative(function, middle)
    largest = [jnp.max(jnp.abs(points), initial=0) for points in (x, y)]
    tiny = eps * jnp.maximum(*largest)
    tiny = jnp.where(tiny == 0, eps, tiny)
    base, shifted = function(middle), function(middle + tiny)
    at_x, at_y = function(x), function(y)
    ends = derivative(function, x), derivative(function, y)
    equal = distance == 0
    safe = jnp.where(equal, 1, distance)
    differences = []
    for i, leaf in enumerate(at_x):
        f_x, f_y = jnp.broadcast_arrays(leaf[:, None], at_y[i][None, :])
        secant = (f_x - f_y) / safe.astype(leaf.dtype)
        mean = (below[i] + above[i]) / 2
        size = jnp.abs(mean)
        of_ends = (ends[0][i][:, None] + ends[1][i][None, :]) / 2
        off = jnp.maximum(jnp.abs(mean - between[i]), jnp.abs(mean - of_ends))
        of_mean = off * (off / jnp.where(size == 0, 1, size))
        of_secant = eps * jnp.maximum(jnp.abs(f_x), jnp.abs(f_y)) / jnp.abs(safe)
        near = equal | (of_mean <= of_secant)
        quotient = (shifted[i] - base[i]) / tiny.astype(leaf.dtype)
        mean = jnp.where(jnp.isfinite(mean), mean, quotient)
        differences.append(jnp.where(near, mean, secant))
    return differences


def tree_of(function: SpectralFunction, dtype, leaves: list) -> PyTree:
    """Leaves, one for each of the function's, in the structure of its result."""
    return jtu.tree_unflatten(function.structure(dtype), leaves)
