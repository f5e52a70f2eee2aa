"""Sums of a spectral function, and their error bars, from one block Krylov space."""

import math
import operator as op
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, Int

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
)
from .._linalg.small import squares
from .._linalg.tall import column_norms, inner
from .._operators.entries import known_trace
from . import control
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
from .bracket import bottom_of, lower_end, middles_of, of_both, quadrature_errors
from .function import SpectralFunction, rounding_errors, weighted_sums
from .ritz import ritz_values


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


class _Space(NamedTuple):
    """A Krylov space in coordinates of its basis, and what it leaves of probes.

    - `projected`: the operator and the starting vectors, k coordinates each.
    - `theta`, `S`: Ritz values, cleaned of rounding, and vectors.
    - `left_out`: the spaces without probes, in the first `S_first` rows of S.
    - `steps`, `orders`: steps taken, and sizes that there are eigendecompositions for.
    """

    projected: Projected
    theta: Float[Array, " k"]
    S: Inexact[Array, "k k"]
    left_out: LeftOut
    S_first: Inexact[Array, "f k"]
    steps: int | Int[Array, ""]
    orders: tuple[int, ...]


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
    # The space, with and without each probe.
    projected = block_lanczos(factor)
    T, omega, asymmetry = projected
    n, width = state.space.size, omega.shape[1]
    kept = 0 if state.right is None else state.right.shape[1]
    m, orders = width - kept, tuple(width * size for size in sizes)
    theta, S = ritz_pairs(T, width * steps, sizes=orders)
    theta, noise, result = ritz_values(
        theta, asymmetry, state.operator, state.lower, state.size
    )
    shallow, first = steps, len(T)
    if most_left_out is not None:
        shallow = jnp.minimum(steps, most_left_out)
        first = min(width * most_left_out, first)
    left_out = leave_probes_out(T[:first, :first], omega[:first], n, shallow, kept)
    space = _Space(projected, theta, S, left_out, S[:first], steps, orders)

    # Samples, what controls them, and the errors of rounding.
    function = state.function.in_range(theta)
    leaves = function(theta)
    weights = sample_weights(left_out, space.S_first)
    samples = _samples(weights, leaves)
    coupling = coupling_of(left_out, space.S_first, m)
    diagonal = jnp.real(jnp.diagonal(coupling))
    rounding, decided = rounding_errors(function, theta, diagonal, noise, state.lower)
    magnitudes = [weighted_sums(weights.samples, jnp.abs(f)).mean() for f in leaves]
    P, trace = state.preconditioner, state.trace
    if P is not None and P.basis.shape[1] == 0:
        P = None
    if trace is None:
        trace = known_trace(state.operator)
    if m == 1:
        P = trace = None  # no neighbours to take slopes from
    controls = None
    if P is not None:
        inside = basis.T[:first].T
        controls, of_tests = control.of_columns(
            P, left_out, inside, space.S_first, leaves
        )
        coupling = coupling + of_tests
    elif trace is not None:
        controls, cancelled = control.of_trace(
            trace, left_out, weights, theta, space.S_first, function
        )
        magnitudes = list(map(op.add, magnitudes, cancelled))
    if controls is not None:
        rounding = list(map(jnp.hypot, rounding, map(control.bias_of, controls)))

    # What the space leaves of every sample.
    forms, ends = None, {}
    if has_bracket(state):
        samples, unfound, forms, ends = _middles(
            state, space, function, samples, controls, R
        )
    else:
        unfound = quadrature_errors(function, projected, left_out, (theta, S), n, steps)
        samples = _sum(samples, controls)

    bars = [
        leave_one_out_bar(paired_samples(*sample, magnitude))
        for sample, magnitude in zip(samples, magnitudes, strict=True)
    ]
    stats = {
        "result": outside_if(decided, result),
        "known_trace": jnp.asarray(P is None and trace is not None),
        **function.unit,
        **ends,
    }
    return KrylovSums(
        [x.mean for x in bars],
        unfound,
        [jnp.hypot(x.standard_error, y) for x, y in zip(bars, rounding, strict=True)],
        [x.degrees_of_freedom for x in bars],
        theta,
        S,
        coupling,
        stats,
        forms,
    )


def _middles(
    state: SpectralState,
    space: _Space,
    function: SpectralFunction,
    samples: list[SampleWeights],
    controls: list[SampleWeights] | None,
    R: Inexact[Array, "m m"],
) -> tuple[list[SampleWeights], list[Float[Array, ""]], Forms | None, dict[str, Any]]:
    """The middles of the samples' brackets, half of each, the quadratic forms, and what
    `stats` say of the ends."""
    T, omega, _ = space.projected
    theta, S, steps, width = space.theta, space.S, space.steps, omega.shape[1]
    lower, proven = lower_end(function, theta, state)
    bottom = bottom_of(theta, lower)
    right = jnp.zeros_like(omega, shape=(len(omega), 0))
    if state.right is not None:
        lengths = column_norms(state.right)[None, :] / math.sqrt(state.space.size)
        kept = state.right.shape[1]
        right = omega[:, :kept] * lengths.astype(omega.dtype)

    def of_extension(lower):
        E = smallest_extension(T, R, (theta, S), lower, steps)
        nodes, vectors = ritz_pairs(E, width * steps, width, space.orders)
        nodes, vectors = jnp.maximum(nodes, lower), vectors[: len(T)]
        weights = sample_weights(space.left_out, vectors[: len(space.S_first)])
        form = jnp.sum(squares(inner(vectors, right)) / nodes[:, None], axis=0)
        return _samples(weights, function(nodes)), form

    # The second only where it differs.
    (of_bound, *highs), (of_bottom, *others) = of_both(of_extension, lower, bottom)
    forms = None
    if state.right is not None:
        rounding = form_rounding(state, theta)
        forms = forms_between(inner(S, right), theta, (*highs, *others), rounding)
    # All ends by the same, which is no part of the bracket.
    samples, of_bound, of_bottom = (
        _sum(x, controls) for x in (samples, of_bound, of_bottom)
    )
    positive = jnp.min(theta) >= 0
    _, ends = middles_of(samples, of_bound, positive)
    samples, sides = middles_of(samples, of_bottom, positive)
    # Before convergence the truth may be close to either end.
    unfound = [
        jnp.where(positive, jnp.abs(high - low) / 2, jnp.inf) for low, high in sides
    ]
    stats = {
        "bottom": bottom,
        "bracket": tuple(
            function.tree(list(x), theta.dtype) for x in zip(*ends, strict=True)
        ),
        "bracket_is_proven": proven & positive,
    }
    return samples, unfound, forms, stats


def _sum(
    samples: list[SampleWeights], controls: list[SampleWeights] | None
) -> list[SampleWeights]:
    return samples if controls is None else jtu.tree_map(op.add, samples, controls)


def _samples(
    weights: SampleWeights, leaves: list[Inexact[Array, " k"]]
) -> list[SampleWeights]:
    """The samples of every leaf, and those of pairs."""
    return [jtu.tree_map(lambda w, f=f: weighted_sums(w, f), weights) for f in leaves]
