"""What a Krylov space leaves of a spectral function: a bracket, or an extrapolation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Inexact, Int

from .._linalg.krylov import Projected, ritz_pairs
from .._linalg.left_out_krylov import LeftOut, Samples, coupling_of_fewer
from .._linalg.small import matmul
from .._linalg.tall import column_dots
from .._linalg.types import fori_loop
from .._operators.block import is_positive_semidefinite
from .base import SpectralState
from .function import SpectralFunction, remaining, weighted_sums

# A bound is loose if the smallest Ritz value is so many times as large: kernels have it
# within a factor of some hundreds of their noise after few steps, jitter is off by 1e5.
_LOOSE = 1e4


def lower_ends(
    function: SpectralFunction, theta: Float[Array, " k"], state: SpectralState
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Numbers below the spectrum, at which the function is finite: for the bracket, and for
    the value; and whether the first is known to be one.

    The first is the known one, at least 0, as the function is one of positive numbers, or,
    where it isn't finite there, a quarter of the smallest positive Ritz value, of which
    nothing is proven: the intervals of log-determinants of kernels cover. A loose bound
    makes the middle of the bracket worse than f(T): the value takes that quarter then.
    """
    zero, lower = jnp.zeros_like(theta, shape=()), state.lower
    known = zero if lower is None else jnp.maximum(lower, zero)
    least = jnp.min(theta)
    positive = jnp.min(jnp.where(theta > 0, theta, jnp.max(theta)))
    finite = jnp.stack([jnp.isfinite(f) for f in function(known)]).all()
    proven = jnp.asarray(is_positive_semidefinite(state.operator))
    if lower is not None:
        proven = proven | (lower >= 0)
    end = jnp.where(finite, known, positive / 4)
    loose = (end > 0) & (least > _LOOSE * end)
    return end, jnp.where(loose, least / 4, end), finite & proven


def of_both(fn: Callable, lower: Float[Array, ""], bottom: Float[Array, ""]) -> Any:
    """`fn` of both, computed once where they are equal, and compiled once."""
    shapes = jax.eval_shape(fn, lower)
    both = jtu.tree_map(lambda x: jnp.zeros((2, *x.shape), x.dtype), shapes)
    ends = jnp.stack([lower, bottom])

    def step(i, both):
        return jtu.tree_map(lambda x, new: x.at[i].set(new), both, fn(ends[i]))

    number = 1 + (bottom != lower).astype(jnp.int32)
    both = fori_loop(number, step, both)
    return tuple(jtu.tree_map(lambda x, i=i: x[i], both) for i in (0, number - 1))


def middles_of(
    samples: list[Samples], others: list[Samples], positive: Bool[Array, ""]
) -> tuple[list[Samples], list[tuple[Inexact[Array, ""], Inexact[Array, ""]]]]:
    """The means of both, and the ends of every leaf, the lower one first.

    With negative eigenvalues the function isn't operator monotone on the spectrum: the
    samples are those of f(T).
    """
    others = [jnp.where(positive, y, x) for x, y in zip(samples, others, strict=True)]
    pairs = list(zip(samples, others, strict=True))
    # Of a falling function, or by rounding, they may come in the other order.
    sides = [(x[0].mean(), y[0].mean()) for x, y in pairs]
    middles = [(x + y) / 2 for x, y in pairs]
    return middles, [(jnp.minimum(*x), jnp.maximum(*x)) for x in sides]


def quadrature_errors(
    function: SpectralFunction,
    projected: Projected,
    left_out: LeftOut,
    pairs: tuple[Float[Array, " k"], Inexact[Array, "k k"]],
    n: int,
    steps: int | Int[Array, ""],
) -> list[Float[Array, ""]]:
    """How far each leaf is from its limit in the number of steps, without a bracket.

    Without right-hand sides.

    With spaces without a probe of one step less, and f(A) taken in the space of one
    step less, one step more of the latter changes the sum by b. The step before it
    changed it by a, measured likewise. No less than b is taken for what is left, and no
    more than 2 b: the spaces without a probe change by a little forever. Infinite for a
    single step, which tells nothing.
    """
    T, omega, _ = projected
    k, m = omega.shape
    values, _ = pairs
    if m == 1 or k == m:
        return [jnp.full((), jnp.inf, values.dtype) for _ in function(values)]
    changes = []
    for fewer in range(1, min(k // m, 3)):
        depth = steps - fewer
        C = coupling_of_fewer(left_out, omega, n, depth)
        theta, S = ritz_pairs(T, m * depth)
        # Rounding must not take a node out of the function's domain.
        earlier = jnp.clip(theta, jnp.min(values), jnp.max(values)), S
        sums = []
        for theta, S in (pairs, earlier):
            weights = jnp.real(column_dots(S, matmul(C, S)))
            sums.append([weighted_sums(weights, f) for f in function(theta)])
        changes.append([jnp.abs(x - y) for x, y in zip(*sums, strict=True)])
        pairs = earlier
    if len(changes) == 1:
        return changes[0]
    return [
        jnp.where(steps == 2, b, jnp.maximum(b, remaining(b, a, 2 / 3)))
        for b, a in zip(*changes, strict=True)
    ]
