"""Sums of a spectral function, and their error bars, from one block Krylov space."""

import math
import operator as op
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from .._accuracy.error_bar import ErrorBar, joint_bar, leave_one_out_bar
from .._accuracy.tolerance import Depth
from .._estimate import SLOPES
from .._linalg.krylov import (
    RitzPairs,
    block_lanczos,
    residual_norms,
    ritz_pairs,
)
from .._linalg.left_out_krylov import (
    Samples,
    coupling_of,
    leave_probes_out,
    paired_samples,
    sample_weights,
)
from .._linalg.small import matmul, squares
from .._linalg.tall import column_norms, inner
from .._operators.entries import known_trace
from . import control
from .base import (
    Forms,
    SpectralState,
    forms_between,
    has_bracket,
    likelihood_bar,
    outside_if,
)
from .blocks import SpectralBlocks, Terms
from .bracket import (
    End,
    at_both,
    end_errors,
    extended_pairs,
    lower_ends,
    middles_of,
    outer_ends,
    quadrature_errors,
    reach,
)
from .function import rounding_errors, weighted_sums
from .ritz import ritz_values
from .slope import Tests


class KrylovSums(NamedTuple):
    """What a Krylov space tells, with a list entry for each leaf of the function.

    - `unfound`: errors of what the space leaves, half of the distance to the end that the
        value takes, or extrapolated.
    - `of_probes`: errors of probes, and of rounding.
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
    tests: Tests | None

    @property
    def errors(self) -> list[Float[Array, ""]]:
        return [jnp.hypot(*x) for x in zip(self.unfound, self.of_probes, strict=True)]

    def padded(self, missing: int) -> "KrylovSums":
        """With so many Ritz pairs more, copies of the last value with vectors of 0."""
        forms = self.forms
        if forms is not None:
            coordinates = jnp.pad(forms.coordinates, ((0, missing), (0, 0)))
            forms = forms._replace(coordinates=coordinates)
        tests = self.tests
        if tests is not None:
            tests = tests.padded(missing)
        return self._replace(
            tests=tests,
            values=jnp.pad(self.values, (0, missing), mode="edge"),
            vectors=jnp.pad(self.vectors, (0, missing)),
            coupling=jnp.pad(self.coupling, (0, missing)),
            forms=forms,
        )

    def ratio(self, depth: Depth) -> Float[Array, ""]:
        """What the space leaves, over what it may leave: enough at 1 or less."""
        left, error = jnp.stack(self.unfound), jnp.stack(self.of_probes)
        if self.forms is not None:
            low, high = self.forms.bracket
            left = (len(low) * left + jnp.sum(high - low) / 2) / 2
            error = len(low) * error / 2
        return depth.ratio(left, error)

    def bar(self) -> ErrorBar:
        """The error bar that a tolerance is for."""
        if self.forms is None:
            return joint_bar(self.means, self.errors, self.freedoms)
        values = Terms(self.means[0], self.forms.values)
        errors = Terms(self.errors[0], self.forms.standard_errors)
        return likelihood_bar(values, errors, self.freedoms[0])

    def blocks(
        self,
        basis: Inexact[Array, "n k"],
        omega: Inexact[Array, "k w"],
        count: Int[Array, ""] | None = None,
        sizes: tuple[int, ...] = (),
    ) -> SpectralBlocks:
        """The Ritz pairs, with probes of length `sqrt(n / m)`, for derivatives.

        `count` and `sizes` are those of `SpectralBlocks`.
        """
        solutions = None if self.forms is None else self.forms.coordinates
        q, width = 0 if solutions is None else solutions.shape[1], omega.shape[1]
        probes = omega.T[q:].T
        length = math.sqrt(basis.shape[0] / (width - q))
        scales = length / jnp.linalg.norm(probes, axis=0)
        probes = inner(self.vectors, probes * scales[None, :].astype(omega.dtype))
        pairs = RitzPairs(basis, self.values, self.vectors, probes, width)
        return SpectralBlocks(pairs, self.coupling, count, sizes, solutions, self.tests)


def num_right(state: SpectralState) -> int:
    """How many right-hand sides there are."""
    return 0 if state.right is None else state.right.shape[1]


def krylov_sums(
    state: SpectralState,
    factor: Inexact[Array, "k kw"],
    R: Inexact[Array, "w w"],
    steps: int | Int[Array, ""],
    basis: Inexact[Array, "n k"],
    step_sizes: tuple[int, ...] = (),
    most_left_out: int | None = None,
) -> KrylovSums:
    """`KrylovSums` of so many steps, which may be fewer than the factor has room for.

    - `factor`, `R`, `basis`: as `arnoldi` returns them, of w = q + m starting vectors, the
        right-hand sides of the state and the probes. The basis is for preconditioners.
    - `step_sizes`: numbers of steps, ascending, that there are eigendecompositions for.
    - `most_left_out`: how many steps spaces without a probe take at most; all by default.
        Any space that doesn't depend on a probe can be tested on it.
    """
    # The space, with and without each probe.
    projected = block_lanczos(factor)
    T, omega, asymmetry = projected
    n, width, q = state.space.size, omega.shape[1], num_right(state)
    m, orders = width - q, tuple(width * size for size in step_sizes)
    theta, S = ritz_pairs(T, width * steps, sizes=orders)
    theta, noise, result = ritz_values(
        theta, asymmetry, state.operator, state.lower, state.size
    )
    shallow, rows = steps, len(T)  # coordinates that spaces without a probe reach
    if most_left_out is not None:
        shallow = jnp.minimum(steps, most_left_out)
        rows = min(width * most_left_out, rows)
    left_out = leave_probes_out(T[:rows, :rows], omega[:rows], n, shallow, q)
    S_rows = S[:rows]

    # Samples, what controls them, and the errors of rounding.
    function = state.function.in_range(theta)
    leaves = function(theta)
    weights = sample_weights(left_out, S_rows)
    coupling = inner(S_rows, matmul(coupling_of(left_out), S_rows))
    diagonal = jnp.real(jnp.diagonal(coupling))
    rounding, decided = rounding_errors(function, theta, diagonal, noise, state.lower)
    magnitudes = [weighted_sums(weights[0], jnp.abs(f)).mean() for f in leaves]
    P, trace, inside = state.preconditioner, None, None
    if m > 1:  # slopes are those of neighbours
        inside = None if P is None else P.inside(basis.T[:rows].T)
        if inside is None:
            known = state.trace
            trace = known_trace(state.operator) if known is None else known
    controls = columns = None
    if inside is not None:
        controls, of_tests, columns = control.of_columns(
            *inside, left_out, S_rows, leaves
        )
        coupling = coupling + of_tests
    elif trace is not None:
        controls, cancelled = control.of_trace(
            trace, left_out, weights, theta, S_rows, function
        )
        magnitudes = list(map(op.add, magnitudes, cancelled))
    if controls is not None:
        rounding = list(map(jnp.hypot, rounding, map(control.bias_of, controls)))
    samples = _samples(weights, leaves, controls)

    # Truncation errors, from extensions of T to the ends of the spectrum.
    stats = {
        "result": [outside_if(x, result) for x in decided],
        "known_trace": jnp.asarray(trace is not None),
        **function.unit,
    }
    right = omega[:, :q]
    if state.right is not None:
        lengths = column_norms(state.right)[None, :] / math.sqrt(n)
        right = right * lengths.astype(omega.dtype)

    def at_end(end: End):
        nodes, vectors = extended_pairs(T, R, (theta, S), end, steps, orders)
        form = jnp.sum(squares(inner(vectors, right)) / nodes[:, None], axis=0)
        of_end = sample_weights(left_out, vectors[:rows])
        # Controlled as those of T: no part of the bracket.
        return _samples(of_end, function(nodes), controls), form

    def changes(others):
        pairs = zip(samples, others, strict=True)
        return [jnp.abs(y[0].mean() - x[0].mean()) for x, y in pairs]

    forms, last = None, width * steps - 1
    residuals = residual_norms(R, S, steps)
    weight = jnp.mean(weights[0], axis=0)
    if has_bracket(state):
        lower, bottom, proven = lower_ends(function, theta, state)
        one = jnp.ones_like(lower)
        both = at_both(at_end, End(one, lower), End(one, bottom))
        (of_lower, form_of_lower), (of_bottom, form_of_bottom) = both
        end = reach(function, theta[0], residuals[0], lower, 1)
        of_reach = end_errors(function, theta[0], weight[0], end, changes(of_lower))
        if state.right is not None:
            highs = form_of_lower, form_of_bottom
            forms = forms_between(inner(S, right), theta, highs, state.size)
        positive = jnp.min(theta) >= 0
        _, brackets = middles_of(samples, of_lower, positive)
        samples, sides = middles_of(samples, of_bottom, positive)
        # Before convergence the truth may be close to either end.
        unfound = [
            jnp.where(positive, jnp.maximum(jnp.abs(high - low) / 2, more), jnp.inf)
            for (low, high), more in zip(sides, of_reach, strict=True)
        ]
        stats["bracket"] = tuple(
            function.tree(list(x), theta.dtype) for x in zip(*brackets, strict=True)
        )
        stats["bracket_is_proven"], stats["bottom"] = proven & positive, bottom
    else:
        unfound = quadrature_errors(function, projected, left_out, (theta, S), n, steps)
        ends = outer_ends(function, theta, last, residuals, state)
        for end, j, (others, _) in zip(
            ends, (0, last), at_both(at_end, *ends), strict=True
        ):
            more = end_errors(function, theta[j], weight[j], end, changes(others))
            unfound = list(map(jnp.maximum, unfound, more))
    bars = [
        leave_one_out_bar(paired_samples(sample, magnitude))
        for sample, magnitude in zip(samples, magnitudes, strict=True)
    ]
    tests = None
    if SLOPES.value:
        left = unfound, None if forms is None else forms.standard_errors
        tests = Tests(left_out, projected, steps, shallow, columns, left)
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
        tests,
    )


def _samples(
    weights: Float[Array, "3 m k"],
    leaves: list[Inexact[Array, " k"]],
    controls: list[Samples] | None,
) -> list[Samples]:
    """The samples of every leaf, and those of pairs."""
    samples = [weighted_sums(weights, f) for f in leaves]
    return samples if controls is None else list(map(op.add, samples, controls))
