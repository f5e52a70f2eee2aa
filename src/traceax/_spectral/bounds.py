r"""Truncation errors of Krylov approximations.

For operator monotone functions, `smallest_extension` gives a bracket. For others we
extrapolate the error from the last two steps. Both methods can miss how f varies
between the outermost Ritz values and the outermost eigenvalues: `1 / (1 + 1e6 t)` or a
heat kernel may be flat on all Ritz values. So we add an error for each end of the
spectrum. Let theta be the outermost Ritz value, w its weight, and t the number at its
residual norm further out, or a closer known bound. The error is the smaller estimate:

- 0.4 times the change from f(T) to f(E), where E extends T with the bound t. It is too
    large if the outermost eigenvalue is isolated and found: E adds more next to it.
- `2 w |f(t) - f(theta)|`. It is too large if the eigenvalue is closer than t.

If `|f - f(theta)|` is larger between theta and t than at t, we add 2 w times the
difference. A function may return several scalars and arrays, its leaves.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

from .._linalg.dense import divisor, matmul, power_of_two_scale, squares
from .._linalg.krylov import ritz_pairs, smallest_extension
from .._linalg.left_out_krylov import (
    LeftOut,
    Samples,
    ShorterRule,
    sample_weights,
    tested_weights,
)
from .._linalg.types import fori_loop
from .._results import per_entry
from .function import (
    SpectralFunction,
    derivative,
    remaining,
    weighted_sums,
)
from .state import SpectralState

# A bound is loose if the smallest Ritz value exceeds it by this factor. After few steps
# the factor is some hundreds if the bound is a kernel's noise, and 1e5 for jitter.
_LOOSE = 1e4
# We chose this factor for coverage and interval length. For `tr sqrt(A)`, eigenvalues
# `i^-2`, 0.5 makes intervals up to 1.2 times as long, and those with 0.4 are reliable.
_CHANGE_FACTOR = 0.4
# If f isn't finite at t, we take the first fraction in this list for which it is.
_TRIED_FRACTIONS = *(0.75**i for i in range(16)), 0.0
# We compare f(theta) with f at these fractions along the way to t.
_CHECKED_FRACTIONS = 0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16, 1


def lower_ends(
    function: SpectralFunction, theta: Float[Array, " k"], state: SpectralState
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Lower bounds for the bracket and for the value, and whether the first is proven.

    The function is finite at both. The first is the known bound, at least 0 because
    operator monotone functions take positive numbers. If the function isn't finite
    there, we take a quarter of the smallest positive Ritz value. It is a guess: with
    it, intervals for log-determinants of kernels kept their coverage. A loose bound
    would make the bracket's middle worse than f(T), so the value then uses a quarter.
    """
    zero, lower = jnp.zeros_like(theta, shape=()), state.lower
    known = zero if lower is None else jnp.maximum(lower, zero)
    smallest = theta[0]
    positive = jnp.min(jnp.where(theta > 0, theta, theta[-1]))
    is_finite = function.is_finite(known)
    proven = jnp.asarray(state.space.is_positive)
    if lower is not None:
        proven = proven | (lower >= 0)
    bound = jnp.where(is_finite, known, positive / 4)
    loose = (bound > 0) & (smallest > _LOOSE * bound)
    return bound, jnp.where(loose, smallest / 4, bound), is_finite & proven


class End(NamedTuple):
    """A bound on the spectrum: we assume that no eigenvalue lies beyond `value`.

    - `sign`: 1 for a lower end, -1 for an upper one.
    """

    sign: Float[Array, ""]
    value: Float[Array, ""]


def evaluate_at_bounds(fn: Callable[[End], Any], first: End, second: End) -> Any:
    """`fn` at two ends, computed once if they are equal, and compiled once."""
    shapes = jax.eval_shape(fn, first)
    values = jtu.tree_map(lambda x: jnp.zeros((2, *x.shape), x.dtype), shapes)
    ends = jtu.tree_map(lambda *x: jnp.stack(x), first, second)

    def step(i, values):
        end = jtu.tree_map(lambda x: x[i], ends)
        return jtu.tree_map(lambda x, new: x.at[i].set(new), values, fn(end))

    are_equal = (first.sign == second.sign) & (first.value == second.value)
    count = 2 - are_equal.astype(jnp.int32)
    values = fori_loop(count, step, values)
    return tuple(jtu.tree_map(lambda x, i=i: x[i], values) for i in (0, count - 1))


def extended_pairs(
    T: Inexact[Array, "k k"],
    R: Inexact[Array, "w w"],
    pairs: tuple[Float[Array, " k"], Inexact[Array, "k k"]],
    end: End,
    steps: int | Int[Array, ""],
    sizes: tuple[int, ...] = (),
) -> tuple[Float[Array, " kw"], Inexact[Array, "k kw"]]:
    """Eigenvalues of E for an end's bound, and the first k rows of its eigenvectors."""
    width, (theta, S) = len(R), pairs
    sign, value = end.sign, end.sign * end.value
    E = smallest_extension(sign.astype(T.dtype) * T, R, (sign * theta, S), value, steps)
    sizes = tuple(size + width for size in sizes)
    nodes, vectors = ritz_pairs(E, width * (steps + 1), sizes)
    return sign * jnp.maximum(nodes, value), vectors[: len(T)]


def reachable_end(
    function: SpectralFunction,
    theta: Float[Array, ""],
    residual: Float[Array, ""],
    bound: Float[Array, ""],
    sign: int,
) -> End:
    """The number t that an outermost Ritz value may reach: down for sign 1, up for -1.

    It moves by its residual norm, but not beyond the bound, and less far if a leaf is
    not finite there.
    """
    end = sign * jnp.maximum(sign * theta - residual, sign * bound)
    points = theta + (end - theta) * jnp.asarray(_TRIED_FRACTIONS, theta.dtype)
    is_finite = function.is_finite(points)
    return End(jnp.full_like(theta, sign), points[jnp.argmax(is_finite)])


def outer_ends(
    function: SpectralFunction,
    theta: Float[Array, " k"],
    last: int | Int[Array, ""],
    residuals: Float[Array, " k"],
    state: SpectralState,
) -> tuple[End, End]:
    """`reachable_end` for the smallest and for the largest Ritz value (index `last`).

    If all Ritz values have the same sign, we assume that all eigenvalues have it.
    """
    low, high = theta[0], theta[last]
    unknown = jnp.asarray(jnp.inf, theta.dtype)
    bottom = jnp.where(low >= 0, 0, -unknown)
    if state.lower is not None:
        bottom = jnp.maximum(bottom, state.lower)
    top = jnp.where(high <= 0, 0, unknown)
    return (
        reachable_end(function, low, residuals[0], bottom, 1),
        reachable_end(function, high, residuals[last], top, -1),
    )


def end_errors(
    function: Callable[[Array], list[Array]],
    theta: Float[Array, ""],
    weight: Float[Array, ""],
    end: End,
    changes: list[Float[Array, "..."]],
    monotone: bool = False,
) -> list[Float[Array, "..."]]:
    """Errors that an end adds for each leaf, whose sum changes from f(T) to f(E)."""
    fractions = (0, 1) if monotone else _CHECKED_FRACTIONS
    points = theta + (end.value - theta) * jnp.asarray(fractions, theta.dtype)

    def leaf_error(f, change):
        moves = 2 * jnp.abs(weight) * jnp.abs(f[1:] - f[0])
        # `fmin` ignores NaN: after rounding, f may be undefined at an eigenvalue of E.
        error = jnp.fmin(moves[-1], _CHANGE_FACTOR * change)
        # f(E) can miss how f varies between theta and t.
        return error + jnp.nanmax(moves) - moves[-1]

    leaves = zip(function(points), changes, strict=True)
    return [per_entry(leaf_error, f.ndim - 1)(f, change) for f, change in leaves]


def bracket_midpoints(
    samples: list[Inexact[Array, "... r m"]],
    bounds: list[Inexact[Array, "... r m"]],
    positive: Bool[Array, ""],
) -> tuple[
    list[Inexact[Array, "... r m"]],
    list[tuple[Inexact[Array, "..."], Inexact[Array, "..."]]],
]:
    """Midpoints between samples with f(T) and f(E), and the bracket for each leaf, which
    takes the first of r rows.

    A function isn't operator monotone on a spectrum with a negative eigenvalue. We then
    keep the samples with f(T).
    """
    bounds = [jnp.where(positive, y, x) for x, y in zip(samples, bounds, strict=True)]
    pairs = list(zip(samples, bounds, strict=True))
    ends = [(sample_mean(x), sample_mean(y)) for x, y in pairs]
    midpoints = [(x + y) / 2 for x, y in pairs]
    # If f decreases, or after rounding, f(E) gives the high end.
    return midpoints, [(jnp.minimum(*x), jnp.maximum(*x)) for x in ends]


def leaf_samples(
    weights: Float[Array, "3 m k"], leaves: list[Inexact[Array, "... k"]]
) -> list[Inexact[Array, "... 3 m"]]:
    """Samples, and samples with a second probe left out, for every leaf."""
    return [weighted_sums(weights, f[..., None, None, :]) for f in leaves]


def sample_mean(samples: Inexact[Array, "*s r m"]) -> Inexact[Array, "*s"]:
    return jnp.mean(samples[..., 0, :], axis=-1)


def quadrature_errors(
    function: SpectralFunction,
    rules: list[ShorterRule],
    points: Float[Array, " k"],
    steps: int | Int[Array, ""],
) -> list[Float[Array, "..."]]:
    """Extrapolated truncation error of `tr f(A)` for every leaf.

    Step s changed the sum by `b = |tr C_(s-1) (f(T_s) - f(T_(s-1)))|`, and step s - 1
    by a. We continue these as a geometric series. The result is from b to 2 b, because
    spaces without a probe never quite stop changing. Without rules it is infinite.
    """
    if not rules:
        return [jnp.full_like(f.real[..., 0], jnp.inf) for f in function(points)]

    def sums(weights, points):
        return [weighted_sums(weights, f) for f in function(points)]

    changes, low, high = [], points[0], points[-1]
    for rule in rules:
        # We clip, or f could be undefined at a node after rounding.
        earlier = jnp.clip(rule.points, low, high)
        now, before = sums(rule.weights, points), sums(rule.earlier_weights, earlier)
        changes.append([jnp.abs(x - y) for x, y in zip(now, before, strict=True)])
        points = earlier
    if len(changes) == 1:
        return changes[0]
    return [
        jnp.where(steps == 2, b, jnp.maximum(b, remaining(b, a, 2 / 3)))
        for b, a in zip(*changes, strict=True)
    ]


# If the corrections' mean exceeds this many standard errors, we call it a bias. With
# three samples, chance alone does this in 1 % of cases.
_SIGNIFICANT = 10


class ColumnControl(NamedTuple):
    """A control variate: `tr Pi` for `Pi = Q Q^*` from `Preconditioner.inside`.

    - `excess`: `tr(C_i Pi) - tr Pi`.
    - `codimension`: `d - r_i` from `columns_control`, for spaces without two probes.
    """

    excess: Float[Array, "3 m"]
    codimension: Float[Array, " m"]

    def corrections(self, tested: Samples) -> Samples:
        """Corrections to samples, from their estimated parts `d g^* f g`."""
        slopes = tested[1:] / self.codimension.astype(tested.dtype)[None]
        return _corrections(self.excess, _neighbour_means(slopes), jnp.mean(slopes))


def columns_control(
    Q: Inexact[Array, "r k"],
    trace_Pi: Float[Array, ""],
    left_out: LeftOut,
    S: Inexact[Array, "k p"],
    leaves: list[Inexact[Array, "... p"]],
) -> tuple[list[Inexact[Array, "... 3 m"]], Inexact[Array, "p p"], ColumnControl]:
    r"""Corrections to every leaf's samples, from `Q^* K` and `r = tr Pi`.

    We also return what to add to the matrix C, for derivatives of the corrected values.
    In a space's complement, with the dimension d and the test g, `d g^* f g` estimates
    the trace of f, and `d g^* Pi g` the trace `r_i = r - tr(P_i Pi)`. If f is 0 along
    Pi, its trace is from the other `d - r_i` dimensions. So a sample is too small by

        d g^* f g / (d - r_i) (d g^* Pi g - r_i) .
    """
    Q = Q.conj().T
    tested, excess = (
        jnp.sum(fn(left_out, Q), axis=2) for fn in (tested_weights, sample_weights)
    )
    excess = excess - trace_Pi
    # In `d - r_i`, d belongs to the spaces without two probes.
    d = left_out.dimensions[1]
    codimension = jnp.maximum(d - (tested[1] - excess[1]), 1)
    weights, control = tested_weights(left_out, S), ColumnControl(excess, codimension)
    # Without two probes, the test on one gives the slope for the other's sample.
    neighbours = jnp.stack([jnp.roll(excess[0], -1), excess[0]])
    factors = ((d / codimension)[None] * neighbours / neighbours.size).reshape(-1, 1)
    g = matmul(left_out.tests[1:].reshape(-1, len(S)), S.conj())
    coupling = matmul(g.T, factors.astype(g.dtype) * g.conj())
    controls = [
        per_entry(control.corrections, x.ndim - 2)(x)
        for x in leaf_samples(weights, leaves)
    ]
    return controls, coupling, control


def trace_control(
    trace: Float[Array, ""],
    left_out: LeftOut,
    weights: Float[Array, "3 m p"],
    samples: list[Inexact[Array, "... 3 m"]],
    theta: Float[Array, " p"],
    S: Inexact[Array, "k p"],
    function: SpectralFunction,
) -> tuple[list[Inexact[Array, "... 3 m"]], list[Float[Array, "..."]]]:
    r"""Corrections to every leaf's samples, from the operator's known trace.

    We also return the magnitude of the terms that cancel in them. A leaf has no
    correction if the rounding error would exceed the spread between samples.

    Let g be a test for a space Y without two probes, `P = I - Y Y^*`, and <.> the mean
    over both neighbours' tests. Then `f = f(T)` has the slope

        c = (<g^* T P f g> - <g^* T g> <g^* f g>) / (<|P T g|^2> - <g^* T g>^2) .

    For samples, in spaces without one probe, we multiply c by `f'(mu_1) / f'(mu_2)`.
    Here `mu = (tr A - tr Y^* T Y) / d` is the mean eigenvalue outside either space.
    """
    leaves = function(theta)
    # In this unit squares neither overflow nor underflow.
    scale = power_of_two_scale(jnp.stack([theta[0], theta[-1]]))
    theta, trace = theta / scale, trace / scale
    # The rows of F are theta, and the leaves' real and imaginary parts at theta.
    parts = [part for f in leaves for part in _parts(f)]
    F = [part.reshape(-1, len(theta)).astype(theta.dtype) for part in parts]
    F = jnp.concatenate([theta[None], *F])
    sizes = jnp.stack([theta, jnp.abs(theta)], axis=1)
    sums, tested = (
        matmul(x, sizes.astype(x.dtype)) for x in (weights, tested_weights(left_out, S))
    )
    excess, magnitude = sums[..., 0] - trace, sums[0, :, 1].mean()
    tested = tested[..., 0]
    means = (tested - excess)[:2] / jnp.maximum(left_out.dimensions, 1)
    # We clip, or f could be undefined at a mean after rounding.
    means = jnp.clip(means, theta[0], theta[-1])

    # In Ritz coordinates `u = S^* g`, we project `S diag(f) u` to the space Y.
    u, spaces = matmul(left_out.tests[1:], S.conj()), left_out.spaces[1].conj()
    einsum = ft.partial(jnp.einsum, precision="highest")
    inside = einsum("mpk,tmq,fq,kq->ftmp", spaces, u, F.astype(u.dtype), S)
    inside = jnp.sum(jnp.real(inside[:1].conj() * inside), axis=3)
    squared = squares(u)
    means_of_f = _neighbour_means(einsum("tmq,fq->tfm", squared, F))
    products = einsum("tmq,fq->tfm", squared, theta[None, :] * F)
    products = _neighbour_means(products - inside.swapaxes(0, 1))
    eps = jnp.finfo(theta.dtype).eps
    beta, mean_square = means_of_f[0], products[0]
    variance = mean_square - beta**2
    # A variance at rounding level gives no slope.
    is_large = variance > 1e3 * eps * jnp.maximum(mean_square, beta**2)
    slopes = products - means_of_f * beta[None, :]
    slopes = slopes / jnp.where(is_large, variance, 1)[None, :]
    slopes = jnp.where(is_large[None, :] & jnp.isfinite(slopes), slopes, 0)
    ends = np.cumsum([math.prod(part.shape[:-1]) for part in parts])
    blocks = zip(jnp.split(slopes[1:], ends[:-1]), parts, strict=True)
    blocks = iter([x.reshape(*part.shape[:-1], -1) for x, part in blocks])

    def correct(c, all_samples, slope):
        pair_slope = _neighbour_means(jnp.stack([slope[1], slope[1]]))
        ratio = jnp.real(slope[0] / divisor(pair_slope))
        ratio = jnp.where(jnp.isfinite(ratio), jnp.clip(ratio, 0.25, 4), 1)
        size = jnp.mean(jnp.abs(c)) * magnitude
        samples = all_samples[0]
        spread = _deviation(samples) / len(samples) ** 0.5
        is_accurate = 4 * eps * size < spread.astype(size.dtype)
        c = jnp.where(is_accurate, -c, 0).astype(samples.dtype)
        control = _corrections(excess, c * ratio.astype(c.dtype), jnp.mean(c))
        return control, jnp.where(is_accurate, size, 0).astype(spread.dtype)

    controls, sizes = [], []
    slopes_at_means = derivative(function, means * scale)
    for f, all_samples, slope in zip(leaves, samples, slopes_at_means, strict=True):
        real, *imaginary = [next(blocks) for _ in _parts(f)]
        c = jax.lax.complex(real, *imaginary) if imaginary else real
        control, size = per_entry(correct, f.ndim - 1)(c, all_samples, slope)
        controls.append(control)
        sizes.append(size)
    return controls, sizes


def _parts(f: Inexact[Array, "*s p"]) -> list[Float[Array, "... p"]]:
    """The real part of f and, if f is complex, the imaginary part."""
    return [f.real, f.imag] if jnp.iscomplexobj(f) else [f]


def bias_of(control: Samples) -> Float[Array, ""]:
    """The samples' common error: their mean correction if it is significant, else 0.

    Rounding can mix a probe into the spaces that leave it out. This happens if many
    equal eigenvalues lie far from all others, and were found many steps ago.
    """
    samples = control[0]
    mean, error = jnp.mean(samples), _deviation(samples) / (len(samples) - 1) ** 0.5
    return jnp.where(jnp.abs(mean) > _SIGNIFICANT * error, jnp.abs(mean), 0)


def _deviation(x: Inexact[Array, " m"]) -> Float[Array, ""]:
    """Root mean square distance from the mean."""
    scale = power_of_two_scale(x)
    unit = x / scale.astype(x.dtype)
    return scale * jnp.sqrt(jnp.mean(squares(unit - jnp.mean(unit))))


def _neighbour_means(pairs: Inexact[Array, "2 *f m"]) -> Inexact[Array, "*f m"]:
    """For sample i, means over the tests on both neighbours in spaces without i.

    `pairs[0]` at i - 1 and `pairs[1]` at i hold the tests on i - 1 and on i + 1.
    """
    return (pairs[1] + jnp.roll(pairs[0], 1, axis=-1)) / 2


def _corrections(excess: Float[Array, "3 m"], c: Array, mean: Array) -> Samples:
    mean = jnp.full_like(c, mean)
    return jnp.stack([c, mean, mean]) * excess.astype(c.dtype)
