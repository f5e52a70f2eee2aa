r"""Truncation error of the Krylov approximation.

For an operator monotone function it is bracketed, see `smallest_extension`. For any other
function it is extrapolated from the last two steps. Both can miss what happens between the
outermost Ritz values and the ends of the spectrum, where the function may vary although it is
flat on the Ritz values: `1 / (1 + 1e6 t)`, or a heat kernel. So each end adds an error of its
own. The outermost Ritz value theta may still move by its residual norm, down (or up) to a number
that is not beyond a known bound. The error is the smaller one of two estimates:

- 0.4 of the change from f(T) to f(E), with E extended to that number: too large where the
    outermost eigenvalue is isolated and found, as E adds more eigenvalues next to it;
- twice the change of f from theta to that number, times the weight of theta: too large where
    theta moves less than that.

Where f changes more on the way than to its end, twice the rest is added, times the weight.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Inexact, Int

from .._linalg.dense import column_dots, divisor, matmul, power_of_two_scale, squares
from .._linalg.krylov import Projected, ritz_pairs, smallest_extension
from .._linalg.left_out_krylov import (
    LeftOut,
    Samples,
    coupling_of_fewer,
    sample_weights,
    tested_weights,
)
from .._linalg.types import fori_loop
from .function import SpectralFunction, derivative, remaining, weighted_sums
from .state import SpectralState

# A bound is loose if the smallest Ritz value is so many times as large: kernels have it
# within a factor of some hundreds of their noise after few steps, jitter is off by 1e5.
_LOOSE = 1e4
# Share of the change from f(T) to f(E), chosen by the coverage and the length of bars: half made
# bars of the root of `i^-2` 1.4 times as long, though the shorter ones covered.
_SHARE_OF_CHANGE = 0.4
# Shares of the way of a Ritz value that are tried where the function isn't finite at its end, and
# those that it is evaluated at.
_SHARES = *(0.75**i for i in range(16)), 0.0
_BETWEEN = 0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16, 1


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
    least = theta[0]
    positive = jnp.min(jnp.where(theta > 0, theta, theta[-1]))
    finite = jnp.stack([jnp.isfinite(f) for f in function(known)]).all()
    proven = jnp.asarray(state.space.is_positive)
    if lower is not None:
        proven = proven | (lower >= 0)
    end = jnp.where(finite, known, positive / 4)
    loose = (end > 0) & (least > _LOOSE * end)
    return end, jnp.where(loose, least / 4, end), finite & proven


class End(NamedTuple):
    """A number that no eigenvalue is beyond.

    - `sign`: 1 for a lower end, -1 for an upper one.
    """

    sign: Float[Array, ""]
    value: Float[Array, ""]


def evaluate_at_bounds(fn: Callable[[End], Any], first: End, second: End) -> Any:
    """`fn` of two ends, computed once if they are equal, and compiled once."""
    shapes = jax.eval_shape(fn, first)
    both = jtu.tree_map(lambda x: jnp.zeros((2, *x.shape), x.dtype), shapes)
    ends = jtu.tree_map(lambda *x: jnp.stack(x), first, second)

    def step(i, both):
        end = jtu.tree_map(lambda x: x[i], ends)
        return jtu.tree_map(lambda x, new: x.at[i].set(new), both, fn(end))

    same = (first.sign == second.sign) & (first.value == second.value)
    number = 2 - same.astype(jnp.int32)
    both = fori_loop(number, step, both)
    return tuple(jtu.tree_map(lambda x, i=i: x[i], both) for i in (0, number - 1))


def extended_pairs(
    T: Inexact[Array, "k k"],
    R: Inexact[Array, "w w"],
    pairs: tuple[Float[Array, " k"], Inexact[Array, "k k"]],
    end: End,
    steps: int | Int[Array, ""],
    sizes: tuple[int, ...] = (),
) -> tuple[Float[Array, " kw"], Inexact[Array, "k kw"]]:
    """Eigenvalues of T extended to an end, and the part of their vectors in the space."""
    width, (theta, S) = len(R), pairs
    sign, value = end.sign, end.sign * end.value
    E = smallest_extension(sign.astype(T.dtype) * T, R, (sign * theta, S), value, steps)
    sizes = tuple(size + width for size in sizes)
    nodes, vectors = ritz_pairs(E, width * (steps + 1), sizes)
    return sign * jnp.maximum(nodes, value), vectors[: len(T)]


def reach(
    function: Callable[[Array], list[Array]],
    theta: Float[Array, ""],
    residual: Float[Array, ""],
    bound: Float[Array, ""],
    sign: int,
) -> End:
    """How far down (up, for a sign of -1) an outermost Ritz value may still move.

    By its residual norm, but not beyond the bound. Where a leaf isn't finite there, by the
    largest of some shares of it.
    """
    end = sign * jnp.maximum(sign * theta - residual, sign * bound)
    points = theta + (end - theta) * jnp.asarray(_SHARES, theta.dtype)
    finite = jnp.stack([jnp.isfinite(f) for f in function(points)]).all(axis=0)
    return End(jnp.full_like(theta, sign), points[jnp.argmax(finite)])


def outer_ends(
    function: Callable[[Array], list[Array]],
    theta: Float[Array, " k"],
    last: int | Int[Array, ""],
    residuals: Float[Array, " k"],
    state: SpectralState,
) -> tuple[End, End]:
    """The reach of the smallest Ritz value, and of the largest, at the index `last`.

    Where all Ritz values are of one sign, so are all eigenvalues, by assumption.
    """
    low, high = theta[0], theta[last]
    unknown = jnp.asarray(jnp.inf, theta.dtype)
    bottom = jnp.where(low >= 0, 0, -unknown)
    if state.lower is not None:
        bottom = jnp.maximum(bottom, state.lower)
    top = jnp.where(high <= 0, 0, unknown)
    return (
        reach(function, low, residuals[0], bottom, 1),
        reach(function, high, residuals[last], top, -1),
    )


def end_errors(
    function: Callable[[Array], list[Array]],
    theta: Float[Array, ""],
    weight: Float[Array, ""],
    end: End,
    changes: list[Float[Array, ""]],
    monotone: bool = False,
) -> list[Float[Array, ""]]:
    """The error that an end adds to each leaf, given the changes from f(T) to f(E)."""
    shares = (0, 1) if monotone else _BETWEEN
    between = theta + (end.value - theta) * jnp.asarray(shares, theta.dtype)
    errors = []
    for f, change in zip(function(between), changes, strict=True):
        moves = 2 * jnp.abs(weight) * jnp.abs(f[1:] - f[0])
        # Rounding may take eigenvalues of E out of the function's domain.
        error = jnp.fmin(moves[-1], _SHARE_OF_CHANGE * change)
        # E tells nothing of what the function does on the way.
        errors.append(error + jnp.nanmax(moves) - moves[-1])
    return errors


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
        earlier = jnp.clip(theta, values[0], values[-1]), S
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


# Standard errors that the mean of a control is away from 0 by chance: of three samples in 1 %.
_CHANCE = 10


class ColumnControl(NamedTuple):
    """What is known of every sample's weight on the range of columns.

    - `excess`: of `tr(C_i Pi)`, over `tr Pi`.
    - `outside`: the dimensions outside of Pi that a space without two probes leaves.
    """

    excess: Float[Array, "3 m"]
    outside: Float[Array, " m"]

    def of(self, tested: Samples) -> Samples:
        """What is to be added to samples whose estimated parts these are."""
        slopes = tested[1:] / self.outside.astype(tested.dtype)[None]
        return _times(self.excess, _of_neighbours(slopes), jnp.mean(slopes))


def columns_control(
    inside: Inexact[Array, "r k"],
    trace_inside: Float[Array, ""],
    left_out: LeftOut,
    S: Inexact[Array, "k p"],
    leaves: list[Inexact[Array, " p"]],
) -> tuple[list[Samples], Inexact[Array, "p p"], ColumnControl]:
    r"""What is to be added to the samples of every leaf, by the range of columns; and to
    the coupling, so that derivatives are of what is estimated.

    A test g of a complement of d dimensions, which holds `r_i = r - tr(P_i Pi)` of Pi,
    estimates the total there by `d g^* f g`, and `r_i` by `d g^* Pi g`. The total spreads
    over the `d - r_i` dimensions outside of Pi, so that a sample is too small by

        d g^* f g / (d - r_i) (d g^* Pi g - r_i) .
    """
    inside = inside.conj().T
    tested, excess = (
        jnp.sum(of(left_out, inside), axis=2) for of in (tested_weights, sample_weights)
    )
    excess = excess - trace_inside
    # `d - r_i` of the spaces without two probes.
    d = left_out.dimensions[1]
    outside = jnp.maximum(d - (tested[1] - excess[1]), 1)
    unfound, control = tested_weights(left_out, S), ColumnControl(excess, outside)
    # Every test is of a neighbour.
    of_tested = jnp.stack([jnp.roll(excess[0], -1), excess[0]])
    weights = ((d / outside)[None] * of_tested / of_tested.size).reshape(-1, 1)
    g = matmul(left_out.tests[1:].reshape(-1, len(S)), S.conj())
    of_pairs = matmul(g.T, weights.astype(g.dtype) * g.conj())
    controls = [control.of(weighted_sums(unfound, f)) for f in leaves]
    return controls, of_pairs, control


def trace_control(
    trace: Float[Array, ""],
    left_out: LeftOut,
    weights: Float[Array, "3 m p"],
    samples: list[Samples],
    theta: Float[Array, " p"],
    S: Inexact[Array, "k p"],
    function: SpectralFunction,
) -> tuple[list[Samples], list[Float[Array, ""]]]:
    r"""What is to be added to the samples of every leaf, by the trace of the operator; and
    the size of what cancels in it: nothing where its rounding is more than samples differ by.

    With a test g of the complement of a space Y, `P = I - Y Y^*`, the slope is

        c = (E[g^* T P f g] - E[g^* T g] E[g^* f g]) / (E|P T g|^2 - E[g^* T g]^2) ,

    in the spaces without two probes; in those without one it is as much smaller or larger
    as f' is at the mean `(tr A - tr Y^* T Y) / d` of the spectrum there, which is known.
    """
    leaves = function(theta)
    # Squares neither overflow nor underflow.
    scale = power_of_two_scale(jnp.stack([theta[0], theta[-1]]))
    theta, trace = theta / scale, trace / scale
    # The spectrum itself, and real and imaginary parts of leaves, a row each.
    parts = [part for f in leaves for part in _parts(f)]
    F = jnp.stack([theta, *(f.astype(theta.dtype) for f in parts)])
    both = jnp.stack([theta, jnp.abs(theta)], axis=1)
    sums, tested = (
        matmul(x, both.astype(x.dtype)) for x in (weights, tested_weights(left_out, S))
    )
    excess, magnitude = sums[..., 0] - trace, sums[0, :, 1].mean()
    tested = tested[..., 0]
    means = (tested - excess)[:2] / jnp.maximum(left_out.dimensions, 1)
    # Rounding must not take them out of the function's domain.
    means = jnp.clip(means, theta[0], theta[-1])

    # Tests of pairs, in Ritz vectors; and what the space Y holds of products of tests with
    # `S diag(f) S^*`.
    u, spaces = matmul(left_out.tests[1:], S.conj()), left_out.spaces[1].conj()
    einsum = ft.partial(jnp.einsum, precision="highest")
    held = einsum("mpk,tmq,fq,kq->ftmp", spaces, u, F.astype(u.dtype), S)
    held = jnp.sum(jnp.real(held[:1].conj() * held), axis=3)
    squared = squares(u)
    first = _of_neighbours(einsum("tmq,fq->tfm", squared, F))
    second = einsum("tmq,fq->tfm", squared, theta[None, :] * F)
    second = _of_neighbours(second - held.swapaxes(0, 1))
    eps = jnp.finfo(theta.dtype).eps
    beta, b_b = first[0], second[0]
    variance = b_b - beta**2
    # That of rounding gives no slope.
    varies = variance > 1e3 * eps * jnp.maximum(b_b, beta**2)
    slopes = second - first * beta[None, :]
    slopes = slopes / jnp.where(varies, variance, 1)[None, :]
    slopes = jnp.where(varies[None, :] & jnp.isfinite(slopes), slopes, 0)
    slopes = iter(slopes[1:])

    def of_leaf(f, with_pairs, at_mean):
        real, *imaginary = [next(slopes) for _ in _parts(f)]
        c = jax.lax.complex(real, *imaginary) if imaginary else real
        of_pairs = _of_neighbours(jnp.stack([at_mean[1], at_mean[1]]))
        ratio = jnp.real(at_mean[0] / divisor(of_pairs))
        ratio = jnp.where(jnp.isfinite(ratio), jnp.clip(ratio, 0.25, 4), 1)
        size = jnp.mean(jnp.abs(c)) * magnitude
        samples = with_pairs[0]
        spread = _deviation(samples) / len(samples) ** 0.5
        seen = 4 * eps * size < spread.astype(size.dtype)
        c = jnp.where(seen, -c, 0).astype(samples.dtype)
        control = _times(excess, c * ratio.astype(c.dtype), jnp.mean(c))
        return control, jnp.where(seen, size, 0).astype(spread.dtype)

    at_means = derivative(function, means * scale)
    per_leaf = zip(leaves, samples, at_means, strict=True)
    controls, sizes = zip(*(of_leaf(*of) for of in per_leaf), strict=True)
    return list(controls), list(sizes)


def _parts(f: Inexact[Array, " p"]) -> list[Float[Array, " p"]]:
    """The real part, and that which is imaginary of a complex f."""
    return [f.real, f.imag] if jnp.iscomplexobj(f) else [f]


def bias_of(control: Samples) -> Float[Array, ""]:
    """How much samples are off by together, as the mean of a control shows; else 0.

    It is far from 0 where rounding carried a probe into the spaces that leave it out, as
    along many equal eigenvalues, far from all others, that were found long before.
    """
    samples = control[0]
    mean, error = jnp.mean(samples), _deviation(samples) / (len(samples) - 1) ** 0.5
    return jnp.where(jnp.abs(mean) > _CHANCE * error, jnp.abs(mean), 0)


def _deviation(x: Inexact[Array, " m"]) -> Float[Array, ""]:
    """The root mean square distance from the mean."""
    scale = power_of_two_scale(x)
    unit = x / scale.astype(x.dtype)
    return scale * jnp.sqrt(jnp.mean(squares(unit - jnp.mean(unit))))


def _of_neighbours(pairs: Inexact[Array, "2 *f m"]) -> Inexact[Array, "*f m"]:
    """The means over tests of probes i - 1 and i + 1 in spaces without probe i.

    Of the space without probes i and i + 1, the first are of i, the second of i + 1.
    """
    return (pairs[1] + jnp.roll(pairs[0], 1, axis=-1)) / 2


def _times(excess: Float[Array, "3 m"], c: Array, mean: Array) -> Samples:
    of_pairs = jnp.full_like(c, mean)
    return jnp.stack([c, of_pairs, of_pairs]) * excess.astype(c.dtype)
