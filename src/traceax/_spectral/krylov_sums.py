"""Sums for a spectral function, and their error bars, from one block Krylov space."""

import math
import operator as op
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from .._error_bar import ErrorBar, add_known_error, leave_one_out_bar
from .._linalg.dense import column_norms, inner, matmul, squares
from .._linalg.krylov import (
    Arnoldi,
    Projected,
    arnoldi_factor,
    block_lanczos,
    residual_norms,
    ritz_pairs,
)
from .._linalg.left_out_krylov import (
    LeftOut,
    Samples,
    ShorterRule,
    coupling_of,
    leave_probes_out,
    paired_samples,
    sample_weights,
    shorter_rules,
)
from .._operators.entries import known_trace
from .._results import RESULTS, per_entry
from .._tolerance import Depth
from .base import Forms, domain_results, forms_between
from .bounds import (
    ColumnControl,
    End,
    bias_of,
    bracket_midpoints,
    columns_control,
    end_errors,
    evaluate_at_bounds,
    extended_pairs,
    leaf_samples,
    lower_ends,
    outer_ends,
    quadrature_errors,
    sample_mean,
    trace_control,
)
from .function import ritz_values, rounding_errors, weighted_sums
from .state import SpectralState


class KrylovSums(NamedTuple):
    """Sums over a Krylov space. Lists have an entry for each leaf of the function.

    - `bars`: error bars for the sums.
    - `truncation_errors`: half the bracket that the value uses, or extrapolated errors.
    - `sampling_errors`: sampling and rounding errors.
    - `rounding`: rounding errors.
    - `theta`, `S`, `coupling`: Ritz pairs, and the matrix C that derivatives need.
    - `columns`: the control variate from columns, or `None`.
    """

    bars: list[ErrorBar]
    results: list[RESULTS]
    truncation_errors: list[Float[Array, "..."]]
    sampling_errors: list[Float[Array, "..."]]
    rounding: list[Float[Array, "..."]]
    theta: Float[Array, " k"]
    unclipped: Float[Array, " k"]  # theta before rounding errors are removed
    S: Inexact[Array, "k k"]
    coupling: Inexact[Array, "k k"]
    stats: dict[str, Any]
    forms: Forms | None
    columns: ColumnControl | None

    @property
    def all_bars(self) -> list[ErrorBar]:
        """Error bars for sums and quadratic forms."""
        return self.bars if self.forms is None else [*self.bars, self.forms.bar]

    def ratio(self, depth: Depth, half: float) -> Float[Array, ""]:
        """The truncation error over its tolerance, at most 1 if the space is enough.

        `half`: from the state.
        """
        lists = self.truncation_errors, self.sampling_errors, self.rounding
        flat = [jnp.concatenate([x.reshape(-1) for x in errors]) for errors in lists]
        if self.forms is not None:
            low, high = self.forms.bracket
            bias, rounding = jnp.sum(high - low) / 2, jnp.sum(self.forms.rounding)
            pairs = zip(flat, (bias, rounding, rounding), strict=True)
            flat = [half * (len(low) * x + y) for x, y in pairs]
        return depth.ratio(*flat)


class Decomposition(NamedTuple):
    """T on a Krylov space, and the spaces without a probe: the same for all functions.

    - `values`, `S`: Ritz values before clipping, and coordinates of Ritz vectors.
    - `weights`, `coupling`: the samples' weights of Ritz values, and `S^* C S`.
    - `R`: the next block's coordinates.
    - `rules`: for truncation errors, empty if the state has a bracket.
    """

    projected: Projected
    R: Inexact[Array, "w w"]
    values: Float[Array, " k"]
    S: Inexact[Array, "k k"]
    left_out: LeftOut
    weights: Float[Array, "3 m k"]
    coupling: Inexact[Array, "k k"]
    rules: list[ShorterRule]


def decompose(
    state: SpectralState,
    run: Arnoldi,
    steps: int | Int[Array, ""],
    sizes: tuple[int, ...] = (),
    most_left_out: int | None = None,
) -> Decomposition:
    """The decomposition after `steps`, which may be fewer than `run` has room for.

    - `run`: from `arnoldi`, for w = q + m starting vectors: the state's right-hand sides
        and the probes.
    - `sizes`: ascending. We decompose the smallest block that holds all steps.
    - `most_left_out`: the largest number of steps for spaces without a probe, by
        default all. Any space that doesn't depend on the probe gives unbiased samples.
    """
    factor, R = arnoldi_factor(run, steps)
    projected = block_lanczos(factor)
    T, omega, _ = projected
    n, width = state.space.size, omega.shape[1]
    values, S = ritz_pairs(T, width * steps, sizes)
    shallow, rows = steps, len(T)  # spaces without a probe use these coordinates
    if most_left_out is not None:
        shallow = jnp.minimum(steps, most_left_out)
        rows = min(width * most_left_out, rows)
    left_out = leave_probes_out(
        T[:rows, :rows], omega[:rows], n, shallow, state.num_rhs
    )
    weights = sample_weights(left_out, S[:rows])
    coupling = inner(S[:rows], matmul(coupling_of(left_out), S[:rows]))
    rules = []
    if not state.has_bracket:
        rules = shorter_rules(projected, left_out, (values, S), n, steps)
    return Decomposition(projected, R, values, S, left_out, weights, coupling, rules)


def krylov_sums(
    state: SpectralState,
    decomposition: Decomposition,
    steps: int | Int[Array, ""],
    basis: Inexact[Array, "n k"],
    sizes: tuple[int, ...] = (),
) -> KrylovSums:
    """`KrylovSums` after `steps`, from `decompose` for the same steps and sizes.

    Only preconditioners use the basis.
    """
    projected, R, unclipped, S, left_out, weights, coupling, rules = decomposition
    T, omega, asymmetry = projected
    n, width, q = state.space.size, omega.shape[1], state.num_rhs
    m, cancelling = width - q, state.magnitude
    theta, resolution, result = ritz_values(
        unclipped, asymmetry, state.space, state.lower, cancelling, state.solvers
    )
    rows = left_out.tests.shape[-1]
    S_rows = S[:rows]

    # We compute samples, their control variates, and rounding errors.
    function = state.function.in_range(theta)
    leaves = function(theta)
    weight = jnp.mean(weights[0], axis=0)
    rounding, decided = rounding_errors(
        function, theta, weight, resolution, state.lower
    )
    magnitudes = [weighted_sums(weight, jnp.abs(f)) for f in leaves]
    P, trace, inside = state.preconditioner, None, None
    if m > 1:  # a control needs neighbours
        inside = None if P is None else P.inside(basis.T[:rows].T)
        if inside is None:
            trace = state.trace
            trace = known_trace(state.operator) if trace is None else trace
    sums, controls, columns = leaf_samples(weights, leaves), None, None
    if inside is not None:
        controls, change, columns = columns_control(*inside, left_out, S_rows, leaves)
        coupling = coupling + change
    elif trace is not None:
        controls, cancelled = trace_control(
            trace, left_out, weights, sums, theta, S_rows, function
        )
        magnitudes = list(map(op.add, magnitudes, cancelled))
    if controls is not None:
        biases = [per_entry(bias_of, x.ndim - 2)(x) for x in controls]
        rounding = list(map(jnp.hypot, rounding, biases))
    samples = _controlled(sums, controls)

    # We get truncation errors by extending T to the ends of the spectrum.
    stats: dict[str, Any] = {
        "known_trace": jnp.asarray(trace is not None),
        **function.unit,
    }
    rhs = omega[:, :q]
    if state.rhs is not None:
        lengths = column_norms(state.rhs)[None, :] / math.sqrt(n)
        rhs = rhs * lengths.astype(omega.dtype)

    def at_end(end: End):
        nodes, vectors = extended_pairs(T, R, (theta, S), end, steps, sizes)
        form = jnp.sum(squares(inner(vectors, rhs)) / nodes[:, None], axis=0)
        end_weights = sample_weights(left_out, vectors[:rows])
        # We use the controls for T, so they don't change the bracket's length.
        return _controlled(leaf_samples(end_weights, function(nodes)), controls), form

    def changes(others):
        pairs = zip(samples, others, strict=True)
        return [jnp.abs(sample_mean(y) - sample_mean(x)) for x, y in pairs]

    forms, last = None, width * steps - 1
    residuals = residual_norms(R, S, steps)
    if state.has_bracket:
        lower, bottom, proven = lower_ends(function, theta, state)
        one = jnp.ones_like(lower)
        ends = evaluate_at_bounds(at_end, End(one, lower), End(one, bottom))
        (at_lower, form_at_lower), (at_bottom, form_at_bottom) = ends
        end = End(one, jnp.maximum(theta[0] - residuals[0], lower))
        least_errors = end_errors(
            function, theta[0], weight[0], end, changes(at_lower), monotone=True
        )
        if state.rhs is not None:
            highs = form_at_lower, form_at_bottom
            forms = forms_between(inner(S, rhs), theta, highs, cancelling)
        positive = theta[0] >= 0
        _, brackets = bracket_midpoints(samples, at_lower, positive)
        samples, value_brackets = bracket_midpoints(samples, at_bottom, positive)
        # The truth may be close to either end until the space converges.
        truncation_errors = [
            jnp.where(positive, jnp.maximum(jnp.abs(high - low) / 2, more), jnp.inf)
            for (low, high), more in zip(value_brackets, least_errors, strict=True)
        ]
        ends = map(state.treedef.unflatten, zip(*brackets, strict=True))
        stats["bracket"] = tuple(ends)
        stats["bracket_is_proven"], stats["bottom"] = proven & positive, bottom
    else:
        truncation_errors = quadrature_errors(function, rules, theta, steps)
        ends = outer_ends(function, theta, last, residuals, state)
        for end, j, (others, _) in zip(
            ends, (0, last), evaluate_at_bounds(at_end, *ends), strict=True
        ):
            more = end_errors(function, theta[j], weight[j], end, changes(others))
            truncation_errors = list(map(jnp.maximum, truncation_errors, more))
    sampling_errors, bars = [], []
    for sample, magnitude, rounded, more in zip(
        samples, magnitudes, rounding, truncation_errors, strict=True
    ):
        bar = per_entry(_bar, magnitude.ndim)(sample, magnitude)
        bar = add_known_error(bar, rounded)
        sampling_errors.append(bar.standard_error)
        error = jnp.hypot(bar.standard_error, more)
        bars.append(bar._replace(standard_error=error))
    return KrylovSums(
        bars=bars,
        results=domain_results(decided, result),
        truncation_errors=truncation_errors,
        sampling_errors=sampling_errors,
        rounding=rounding,
        theta=theta,
        unclipped=unclipped,
        S=S,
        coupling=coupling,
        stats=stats,
        forms=forms,
        columns=columns,
    )


def _bar(samples: Samples, magnitude: Float[Array, ""]) -> ErrorBar:
    return leave_one_out_bar(paired_samples(samples, magnitude))


def _controlled(
    samples: list[Inexact[Array, "... 3 m"]],
    controls: list[Inexact[Array, "... 3 m"]] | None,
) -> list[Inexact[Array, "... 3 m"]]:
    return samples if controls is None else list(map(op.add, samples, controls))
