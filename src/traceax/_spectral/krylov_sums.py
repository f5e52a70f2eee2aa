"""Sums of a spectral function, and their error bars, from one block Krylov space."""

import math
import operator as op
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, Int

from .._accuracy.error_bar import ErrorBar, leave_one_out_bar
from .._accuracy.tolerance import Depth
from .._linalg.krylov import RitzPairs, block_lanczos, ritz_pairs, smallest_extension
from .._linalg.left_out_krylov import (
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
from .function import rounding_errors, weighted_sums
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
    controls, P, trace = None, state.preconditioner, state.trace
    if trace is None:
        trace = known_trace(state.operator)
    P = None if P is None or P.basis.shape[1] == 0 else P
    # A single probe has no neighbours to take slopes from.
    stats["known_trace"] = jnp.asarray(trace is not None and m > 1 and P is None)
    if P is not None and m > 1:
        inside = basis.T[:first].T
        controls, of_pairs = control.of_columns(P, left_out, inside, S[:first], leaves)
        C = C + of_pairs
    elif trace is not None and m > 1:
        controls, sizes_of_controls = control.of_trace(
            trace, left_out, weights, theta, S[:first], function
        )
        magnitudes = list(map(op.add, magnitudes, sizes_of_controls))

    def controlled(samples):
        return samples if controls is None else jtu.tree_map(op.add, samples, controls)

    if has_bracket(state):
        lower, proven = lower_end(function, theta, state)
        bottom = bottom_of(theta, lower)
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
        of_bound, others = of_both(of_extension, lower, bottom)
        if state.right is not None:
            highs = of_bound[1], others[1]
            forms = forms_between(
                inner(S, right), theta, highs, form_rounding(state, theta)
            )
        of_bound, others = of_bound[0], others[0]
        # All ends by the same, which is no part of the bracket.
        samples, of_bound, others = map(controlled, (samples, of_bound, others))
        positive = jnp.min(theta) >= 0
        _, ends = middles_of(samples, of_bound, positive)
        samples, sides = middles_of(samples, others, positive)
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
        krylov = quadrature_errors(function, projected, left_out, (theta, S), n, steps)
        samples = controlled(samples)
    if controls is not None:
        rounding = list(map(jnp.hypot, rounding, map(control.bias_of, controls)))
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
