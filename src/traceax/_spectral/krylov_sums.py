"""Sums of a spectral function, and their error bars, from one block Krylov space."""

import math
import operator as op
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Inexact, Int

from .._accuracy.error_bar import ErrorBar, leave_one_out_bar
from .._accuracy.tolerance import Depth
from .._linalg.krylov import (
    Projected,
    RitzPairs,
    block_lanczos,
    ritz_pairs,
    smallest_extension,
)
from .._linalg.left_out_krylov import (
    LeftOut,
    SampleWeights,
    coupling_of,
    leave_probes_out,
    paired_samples,
    sample_weights,
    shortened,
    test_weights,
)
from .._linalg.small import squares
from .._linalg.tall import column_norms, inner
from .._linalg.whitening import Whitening
from .._operators.block import is_positive_semidefinite
from .base import (
    Forms,
    SpectralState,
    form_rounding,
    forms_between,
    has_bracket,
    likelihood_bar,
    outside_if,
)
from .blocks import SpectralBlocks, Terms
from .function import SpectralFunction, remaining, rounding_errors, weighted_sums
from .ritz import ritz_values

# A bound is loose if the smallest Ritz value is so many times as large.
_LOOSE = 1e4

Ends = tuple[Inexact[Array, ""], Inexact[Array, ""]]


class KrylovSums(NamedTuple):
    """What a Krylov space tells, of functions a list entry for each leaf.

    - `unfound`: the errors of what the space leaves: half of the bracket.
    - `of_probes`: those of probes, and of rounding.
    """

    means: list[Inexact[Array, ""]]
    unfound: list[Float[Array, ""]]
    of_probes: list[Float[Array, ""]]
    freedoms: list[Float[Array, ""]]
    values: Float[Array, " k"]
    vectors: Inexact[Array, "k k"]
    coupling: Inexact[Array, "k k"]
    stats: dict[str, Any]
    forms: Forms | None

    @property
    def errors(self) -> list[Float[Array, ""]]:
        return [jnp.hypot(*x) for x in zip(self.unfound, self.of_probes, strict=True)]

    def padded(self, missing: int) -> "KrylovSums":
        """With so many Ritz pairs more, of zeros at the last Ritz value."""
        forms = self.forms
        if forms is not None:
            coordinates = jnp.pad(forms.coordinates, ((0, missing), (0, 0)))
            forms = forms._replace(coordinates=coordinates)
        return self._replace(
            values=jnp.pad(self.values, (0, missing), mode="edge"),
            vectors=jnp.pad(self.vectors, (0, missing)),
            coupling=jnp.pad(self.coupling, (0, missing)),
            forms=forms,
        )

    def ratio(self, depth: Depth) -> Float[Array, ""]:
        """How much of what doesn't matter the space leaves, 1 being enough."""
        left, error = jnp.stack(self.unfound), jnp.stack(self.of_probes)
        if self.forms is not None:
            low, high = self.forms.bracket
            number = len(low)
            left = (number * left + jnp.sum(high - low) / 2) / 2
            error = number * error / 2
        return depth.ratio(left, error)

    def bar(self) -> ErrorBar:
        """The error bar that a tolerance is for."""
        leaves = self.means, self.errors, self.freedoms
        if self.forms is None:
            # Complex leaves or real ones.
            sizes = [jnp.abs(x) for x in self.means]
            return ErrorBar(*map(jnp.stack, (sizes, *leaves[1:])))
        (mean,), (error,), (freedom,) = leaves
        values = Terms(mean, self.forms.values)
        return likelihood_bar(values, Terms(error, self.forms.standard_errors), freedom)

    def blocks(
        self,
        basis: Inexact[Array, "n k"],
        omega: Inexact[Array, "k w"],
        count: Int[Array, ""] | None = None,
        sizes: tuple[int, ...] = (),
    ) -> SpectralBlocks:
        """The Ritz pairs, with probes of length `sqrt(n / m)`, for derivatives."""
        width = omega.shape[1]
        forms = self.forms
        kept = 0 if forms is None else forms.values.shape[0]
        probes = omega.T[kept:].T
        lengths = jnp.linalg.norm(probes, axis=0)
        scales = math.sqrt(basis.shape[0] / (width - kept)) / lengths
        probes = inner(self.vectors, probes * scales[None, :].astype(omega.dtype))
        pairs = RitzPairs(basis, self.values, self.vectors, probes, width)
        solutions = None if forms is None else forms.coordinates
        return SpectralBlocks(pairs, self.coupling, count, sizes, solutions)


def krylov_sums(
    state: SpectralState,
    factor: Inexact[Array, "k km"],
    R: Inexact[Array, "m m"],
    steps: int | Int[Array, ""],
    basis: Inexact[Array, "n k"],
    sizes: tuple[int, ...] = (),
    most_left_out: int | None = None,
) -> KrylovSums:
    """`KrylovSums` of so many steps, which may be fewer than the factor has room for.

    The right-hand sides of the state are the first starting vectors. Every sample is the
    middle of its bracket, where there is one.

    - `sizes`: numbers of steps, ascending, that there are eigendecompositions for.
    - `most_left_out`: how many steps spaces without a probe take at most. Any space that
        doesn't depend on a probe can be tested on it.
    """
    projected = block_lanczos(factor)
    T, omega, asymmetry = projected
    n, width = state.space.size, omega.shape[1]
    kept = 0 if state.right is None else state.right.shape[1]
    m = width - kept
    orders = tuple(width * size for size in sizes)
    theta, S = ritz_pairs(T, width * steps, sizes=orders)
    theta, noise, result = ritz_values(
        theta, asymmetry, state.operator, state.lower, state.size
    )
    function = state.function.in_range(theta)
    shallow, first = steps, len(T)
    if most_left_out is not None:
        shallow = jnp.minimum(steps, most_left_out)
        first = min(width * most_left_out, first)
    left_out = leave_probes_out(T[:first, :first], omega[:first], n, shallow, kept)
    C = coupling_of(left_out, S[:first], m)
    diagonal = jnp.real(jnp.diagonal(C))
    rounding, decided = rounding_errors(function, theta, diagonal, noise, state.lower)
    stats = {"result": outside_if(decided, result), **function.unit}
    weights, leaves = sample_weights(left_out, S[:first]), function(theta)
    magnitudes = [weighted_sums(weights.samples, jnp.abs(f)).mean() for f in leaves]
    samples, forms = _samples(weights, leaves), None
    controls = _controls(
        state.preconditioner, left_out, basis.T[:first].T, S[:first], leaves
    )
    if has_bracket(state):
        lower, proven = _lower_end(function, theta, state)
        bottom = _bottom(theta, lower)
        right = jnp.zeros_like(omega, shape=(len(omega), 0))
        if state.right is not None:
            lengths = column_norms(state.right)[None, :] / math.sqrt(n)
            right = omega[:, :kept] * lengths.astype(omega.dtype)

        def of_extension(lower):
            E = smallest_extension(T, R, (theta, S), lower, steps)
            nodes, vectors = ritz_pairs(E, width * steps, width, orders)
            nodes, vectors = jnp.maximum(nodes, lower), vectors[: len(T)]
            weights = sample_weights(left_out, vectors[:first])
            form = jnp.sum(squares(inner(vectors, right)) / nodes[:, None], axis=0)
            return _samples(weights, function(nodes)), form

        # The second only where it differs.
        of_bound, others = _of_both(of_extension, lower, bottom)
        if state.right is not None:
            highs = of_bound[1], others[1]
            forms = forms_between(
                inner(S, right), theta, highs, form_rounding(state, theta)
            )
        of_bound, others = of_bound[0], others[0]
        if controls is not None:
            # All ends by the same, which is no part of the bracket.
            samples, of_bound, others = (
                jtu.tree_map(op.add, x, controls) for x in (samples, of_bound, others)
            )
        positive = jnp.min(theta) >= 0
        _, ends = _middles(samples, of_bound, positive)
        samples, sides = _middles(samples, others, positive)
        # Before convergence the truth may be close to either end.
        krylov = [
            jnp.where(positive, jnp.abs(high - low) / 2, jnp.inf) for low, high in sides
        ]
        stats["bottom"] = bottom
        stats["bracket"] = tuple(
            function.tree(list(x), theta.dtype) for x in zip(*ends, strict=True)
        )
        stats["bracket_is_proven"] = proven & positive
    else:
        krylov = _quadrature_errors(function, projected, left_out, (theta, S), n, steps)
    means, of_probes, freedoms = [], [], []
    for sample, magnitude, rounded in zip(samples, magnitudes, rounding, strict=True):
        bar = leave_one_out_bar(paired_samples(*sample, magnitude))
        means.append(bar.mean)
        of_probes.append(jnp.hypot(bar.standard_error, rounded))
        freedoms.append(bar.degrees_of_freedom)
    return KrylovSums(means, krylov, of_probes, freedoms, theta, S, C, stats, forms)


def _samples(
    weights: SampleWeights, leaves: list[Inexact[Array, " k"]]
) -> list[SampleWeights]:
    """The samples of every leaf, and those of pairs."""
    return [jtu.tree_map(lambda w, f=f: weighted_sums(w, f), weights) for f in leaves]


#
# What is known of the space of a preconditioner
#


def _controls(
    preconditioner: Whitening | None,
    left_out: LeftOut,
    basis: Inexact[Array, "n k"],
    S: Inexact[Array, "k k"],
    leaves: list[Inexact[Array, " k"]],
) -> list[SampleWeights] | None:
    r"""What is chance in samples, of every leaf: control variates of mean 0.

    Let Pi be the matrix of known trace r of the columns' range, where f is about 0, as
    `log(B)` is where a preconditioner makes B the identity. A test g of a complement of
    d dimensions, which holds `r_i = r - tr(P_i Pi)` of Pi, estimates the total there, by
    `d g^* f g`, and `r_i` by `d g^* Pi g`, which is known. The total spreads over the
    `d - r_i` dimensions outside of Pi, so that a sample is too small by

        d g^* f g / (d - r_i) (d g^* Pi g - r_i) .

    Nothing is estimated where the space has found all of f, and nothing is controlled
    then. The first factor is taken from the two neighbours of probe i, in the spaces
    without both: it doesn't depend on probe i, over which the second has mean 0.
    """
    m = len(left_out.spaces) // 2
    if preconditioner is None or preconditioner.basis.shape[1] == 0 or m == 1:
        return None
    inside = preconditioner.inside(basis).conj().T
    tested, found = (
        jtu.tree_map(lambda x: jnp.sum(x, axis=1), of(left_out, inside))
        for of in (test_weights, sample_weights)
    )
    excess = jtu.tree_map(lambda x: x - preconditioner.trace_inside, found)
    # `d - r_i` of the spaces without two probes.
    inside = tested.pairs_first - excess.pairs_first
    outside = jnp.maximum(left_out.dimensions[m:] - inside, 1)
    unfound = test_weights(left_out, S)

    def of_leaf(f):
        first, second = (
            weighted_sums(x, f) / outside
            for x in (unfound.pairs_first, unfound.pairs_second)
        )
        rates = (second + jnp.roll(first, 1)) / 2
        mean = jnp.mean(rates)
        return SampleWeights(
            rates * excess.samples,
            mean * excess.pairs_first,
            mean * excess.pairs_second,
        )

    return [of_leaf(f) for f in leaves]


#
# The bracket of the Krylov error
#


def _lower_end(
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


def _bottom(theta: Float[Array, " k"], lower: Float[Array, ""]) -> Float[Array, ""]:
    """What the value takes for the lower end of the spectrum.

    A bound far below the smallest Ritz value, as jitter is, makes the bracket long and its
    middle worse than f(T); there a quarter of that Ritz value. Kernels have it within a
    factor of some hundreds of their noise after few steps, jitter is off by 1e5 and more.
    """
    smallest = jnp.min(theta)
    loose = (lower > 0) & (smallest > _LOOSE * lower)
    return jnp.where(loose, smallest / 4, lower)


def _of_both(fn: Callable, lower: Float[Array, ""], bottom: Float[Array, ""]) -> Any:
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


def _middles(
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
# And where there is none
#


def _quadrature_errors(
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
