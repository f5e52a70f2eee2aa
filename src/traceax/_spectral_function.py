"""A function of one real variable, as data, and its divided differences."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, PyTree

from ._closures import closes_over_tracer, portable
from ._programs import interned


class SpectralFunction(eqx.Module):
    """A function of eigenvalues, one by one. What it closes over are leaves.

    **Attributes:**

    - `fn`: maps a real scalar to a PyTree of scalars.
    """

    fn: Any

    def __call__(self, points: Float[Array, "..."]) -> list[Inexact[Array, "..."]]:
        """The leaves of `fn` at every point."""
        flat = jtu.tree_leaves(jax.vmap(self.fn)(points.reshape(-1)))
        return [_inexact(x, points.dtype).reshape(points.shape) for x in flat]

    def structure(self, dtype) -> Any:
        """The structure of what `fn` returns."""
        return jtu.tree_structure(eqx.filter_eval_shape(self.fn, _scalar(dtype)))


def _scalar(dtype):
    return jax.ShapeDtypeStruct((), dtype)


def _inexact(x: Array, real) -> Inexact[Array, "..."]:
    kind = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return x.astype(jnp.promote_types(real, jnp.complex64) if kind else real)


def spectral_function(fn: Any, dtype, where: str) -> SpectralFunction:
    """The function, once checked.

    Raises `TypeError` for what can't be called, `ValueError` for a function that
    doesn't map a scalar to scalars.
    """
    if not callable(fn):
        raise TypeError(
            f"{where}: fn must be a function of a real scalar, got {fn!r} of type "
            f"{type(fn).__name__}; pass jnp.log, for example. The arguments start "
            "(key, fn, operator, k)."
        )
    made = jtu.tree_map(lambda x: interned(portable(x)), fn)
    functions = [x for x in jtu.tree_leaves(made) if callable(x)]
    if any(closes_over_tracer(x, set()) for x in functions if not eqx.is_array(x)):
        # lineax converts functions of operators in the same way.
        made = eqx.filter_closure_convert(made, _scalar(dtype))
    leaves = jtu.tree_leaves(eqx.filter_eval_shape(made, _scalar(dtype)))
    if not leaves or any(getattr(x, "shape", None) != () for x in leaves):
        shapes = [getattr(x, "shape", x) for x in leaves]
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

    Close points would cancel. There it is the mean of f' between them, by the Gauss
    rule of two points, whose error is of fourth order in their distance.

    An infinite f' (a square root at 0) is replaced by the difference quotient over a
    distance of rounding size: the points are no better known.
    """
    X, Y = jnp.broadcast_arrays(x[:, None], y[None, :])
    eps = jnp.finfo(x.dtype).eps
    distance = X - Y
    near = jnp.abs(distance) <= eps**0.2 * jnp.maximum(jnp.abs(X), jnp.abs(Y))
    # Away from the branch that is taken, points at which f is known to be evaluated.
    middle = jnp.where(near, (X + Y) / 2, X)
    offset = jnp.where(near, distance, 0) / (2 * 3**0.5)
    below = derivative(function, middle - offset)
    above = derivative(function, middle + offset)
    tiny = eps * jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))
    tiny = jnp.where(tiny == 0, eps, tiny)
    base, shifted = function(middle), function(middle + tiny)
    at_x, at_y = function(x), function(y)
    differences = []
    for i, f_x in enumerate(at_x):
        mean = (below[i] + above[i]) / 2
        quotient = (shifted[i] - base[i]) / tiny.astype(f_x.dtype)
        mean = jnp.where(jnp.isfinite(mean), mean, quotient)
        safe = jnp.where(near, 1, distance).astype(f_x.dtype)
        secant = (f_x[:, None] - at_y[i][None, :]) / safe
        differences.append(jnp.where(near, mean, secant))
    return differences


def tree_of(function: SpectralFunction, dtype, leaves: list) -> PyTree:
    """Leaves, one for each of the function's, in the structure of its result."""
    return jtu.tree_unflatten(function.structure(dtype), leaves)
