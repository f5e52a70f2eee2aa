"""What a Krylov space leaves of a spectral function: a bracket, or an extrapolation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Inexact, Int

from .._linalg.krylov import Projected, ritz_pairs
from .._linalg.left_out_krylov import LeftOut, SampleWeights, coupling_of, shortened
from .._operators.block import is_positive_semidefinite
from .base import SpectralState
from .function import SpectralFunction, remaining, weighted_sums

# A bound is loose if the smallest Ritz value is so many times as large.
_LOOSE = 1e4

Ends = tuple[Inexact[Array, ""], Inexact[Array, ""]]


def lower_end(
    function: SpectralFunction, theta: Float[Array, " k"], state: SpectralState
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """A number below the spectrum, at which the function is finite; whether that is known.

    The known one, at least 0, as the function is one of positive numbers. Where it isn't
    finite there, a quarter of the smallest positive Ritz value, of which nothing is
    proven: the intervals of log-determinants of kernels cover.
    """
    nothing, lower = jnp.zeros_like(theta, shape=()), state.lower
    known = nothing if lower is None else jnp.maximum(lower, nothing)
    smallest = jnp.min(jnp.where(theta > 0, theta, jnp.max(theta)))
    finite = jnp.stack([jnp.isfinite(f) for f in function(known)]).all()
    tagged = is_positive_semidefinite(state.operator)
    positive = jnp.asarray(tagged) if lower is None else tagged | (lower >= 0)
    return jnp.where(finite, known, smallest / 4), finite & positive


def bottom_of(theta: Float[Array, " k"], lower: Float[Array, ""]) -> Float[Array, ""]:
    """What the value takes for the lower end of the spectrum.

    A bound far below the smallest Ritz value, as jitter is, makes the bracket long and its
    middle worse than f(T); there a quarter of that Ritz value. Kernels have it within a
    factor of some hundreds of their noise after few steps, jitter is off by 1e5 and more.
    """
    smallest = jnp.min(theta)
    loose = (lower > 0) & (smallest > _LOOSE * lower)
    return jnp.where(loose, smallest / 4, lower)


def of_both(fn: Callable, lower: Float[Array, ""], bottom: Float[Array, ""]) -> Any:
    """`fn` of both, computed once where they are equal, and compiled once."""
    shapes = jax.eval_shape(fn, lower)
    both = jtu.tree_map(lambda x: jnp.zeros((2, *x.shape), x.dtype), shapes)
    ends = jnp.stack([lower, bottom])

    def step(i, both):
        return jtu.tree_map(lambda x, new: x.at[i].set(new), both, fn(ends[i]))

    number = 1 + (bottom != lower).astype(jnp.int32)
    both = jax.lax.fori_loop(0, number, step, both)
    return (
        jtu.tree_map(lambda x: x[0], both),
        jtu.tree_map(lambda x: jnp.where(number == 2, x[1], x[0]), both),
    )


def middles_of(
    samples: list[SampleWeights], others: list[SampleWeights], positive: Bool[Array, ""]
) -> tuple[list[SampleWeights], list[Ends]]:
    """The means of both, and the ends of every leaf, the lower one first.

    The ends of a falling function come in the other order, and rounding may exchange them.
    With negative eigenvalues the function isn't operator monotone on the spectrum: the
    samples are those of f(T).
    """
    middles, ends = [], []
    others = jtu.tree_map(lambda x, y: jnp.where(positive, y, x), samples, others)
    for x, y in zip(samples, others, strict=True):
        middles.append(jtu.tree_map(lambda a, b: (a + b) / 2, x, y))
        sides = x.samples.mean(), y.samples.mean()
        ends.append((jnp.minimum(*sides), jnp.maximum(*sides)))
    return middles, ends


#
# Without a bracket
#


def quadrature_errors(
    function: SpectralFunction,
    projected: Projected,
    left_out: LeftOut,
    pairs: tuple[Float[Array, " k"], Inexact[Array, "k k"]],
    n: int,
    steps: int | Int[Array, ""],
) -> list[Float[Array, ""]]:
    """How far each leaf is from its limit in the number of steps.

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
    # Rounding must not take a node out of the function's domain.
    low, high = jnp.min(values), jnp.max(values)
    changes = []
    for fewer in range(1, min(k // m, 3)):
        depth = steps - fewer
        shorter = shortened(left_out, omega, n, depth)
        theta, S = ritz_pairs(T, m * depth)
        earlier = jnp.clip(theta, low, high), S
        sums = []
        for theta, S in (pairs, earlier):
            weights = jnp.real(jnp.diagonal(coupling_of(shorter, S, m)))
            sums.append([weighted_sums(weights, f) for f in function(theta)])
        changes.append([jnp.abs(x - y) for x, y in zip(*sums, strict=True)])
        pairs = earlier
    if len(changes) == 1:
        return changes[0]
    return [
        jnp.where(steps == 2, b, jnp.maximum(b, remaining(b, a, 2 / 3)))
        for b, a in zip(*changes, strict=True)
    ]
