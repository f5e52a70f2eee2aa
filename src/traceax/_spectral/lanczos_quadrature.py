"""Stochastic Lanczos quadrature."""

import functools as ft
import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from .._arguments import check_optional_integer, require, without_numpy
from .._error_bar import gram_of, independent_samples, off_diagonal_size
from .._linalg.dense import column_norms, divisor, eigh, largest_entry, matmul
from .._linalg.krylov import KrylovSpaces, RitzPairs, lanczos, residual_norms
from .._operators.space import apply_block
from .._results import per_entry
from .._samplers import RademacherSampler, Sampler, check_rounds, check_sampler
from .base import SpectralEstimator, domain_results, probes_and_steps, spectral_outcome
from .bounds import end_errors, extended_pairs, outer_ends
from .function import (
    SpectralFunction,
    remaining,
    ritz_values,
    rounding_errors,
    weighted_sums,
)
from .stand_in import RitzStandIn
from .state import SpectralState


class LanczosQuadratureEstimator(SpectralEstimator):
    r"""Stochastic Lanczos quadrature: the mean of `w_j^* f(A) w_j` over m probes.

    Each form is a Gauss quadrature, from s Lanczos steps that start at the probe.

    *Use when* the spectrum is flat, or O(n k^2) work beyond the products is too much.
    Otherwise [`traceax.KrylovAwareEstimator`][] is more accurate.

    | | |
    |---|---|
    | operator | symmetric or Hermitian, PyTrees, complex |
    | products | m s, at least k - 2 |
    | beyond the products | O(n k s) time, three n x k blocks; derivatives hold five |
    | bias | the quadrature error; none for polynomials of degree 2 s - 1 |
    | standard error | sampling error, from the spread of the forms; quadrature error, extrapolated from the last steps |
    | derivative | `tr((F o C) V^* dA V)` with all probes' Ritz vectors V, k products with dA |

    **Arguments:**

    - `num_probes`: m. The default is about `0.9 sqrt(k)`.
    - `sampler`: draws the probes, by default [`traceax.RademacherSampler`][]. For p
        colours ([`traceax.ColouredSampler`][]), k and m are multiples of p, and m is at
        least `2 p` by default, for an error bar. Up to `2 p` products may be unused.

    **Reference:** Golub and Meurant, "Matrices, Moments and Quadrature with
    Applications" (2010), doi:10.1515/9781400833889; Ubaru, Chen and Saad, "Fast
    Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", SIAM J. Matrix Anal.
    Appl. 38 (2017), doi:10.1137/16M1104974.
    """

    num_probes: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )
    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        name, meaning = type(self).__name__, "how many forms we average"
        check_optional_integer(
            self.num_probes, "num_probes", name, least=1, meaning=meaning
        )
        check_sampler(self.sampler, name, independent=True, rounds=True)
        if self.num_probes is not None:
            p, requirement = self.sampler.round_size, "num_probes must be whole rounds"
            hint = f"pass {p} for one round, or {2 * p} for an error bar"
            received = str(self.num_probes)
            require(self.num_probes % p == 0, name, requirement, received, hint)

    def check_budget(self, k, *, at_most):
        where = f"{type(self).__name__}.estimate"
        check_rounds(self.sampler, k, where, at_most=at_most)

    def compute(self, state, k):
        operator, space = state.operator, state.space
        n, p = space.size, self.sampler.round_size
        rounds = None if self.num_probes is None else self.num_probes // p
        target = max(0.9 * math.sqrt(k) / p, 2.0)
        rounds, steps = probes_and_steps(rounds, k // p, target)
        m = p * rounds
        Omega = self.sampler.sample(state.key, n, m, space.compute_dtype)
        krylov = lanczos(ft.partial(apply_block, operator), Omega, steps)
        pairs = krylov.ritz_pairs()
        facts = krylov.asymmetry, space, state.lower, state.magnitude, state.solvers
        flat, resolution, result = ritz_values(pairs.values, *facts)
        pairs = eqx.tree_at(lambda pairs: pairs.values, pairs, flat)
        function = state.function.in_range(flat)
        coupling = matmul(pairs.probes, pairs.probes.conj().T)
        weights = jnp.real(jnp.diagonal(coupling))
        squares = m * weights.reshape(m, steps)
        rounding, decided = rounding_errors(
            function, flat, weights, resolution, state.lower
        )
        results = domain_results(decided, result)
        quadrature = _quadrature_errors(function, krylov, flat)
        end_changes = _end_errors(function, krylov, flat, state)
        quadrature = list(map(jnp.maximum, quadrature, end_changes))

        def form_bar(leaf, *others):
            f = leaf.reshape(m, steps)
            samples = jnp.mean(weighted_sums(squares, f).reshape(rounds, p), axis=1)
            # A multiple of I adds nothing to the spread, so we drop it. In this unit
            # squares neither overflow nor underflow.
            varying = f - jnp.mean(samples) / n
            unit = divisor(largest_entry(varying))
            images = _images(krylov, pairs, varying / unit.astype(f.dtype))
            vectors, images = self.sampler.per_sample(
                Omega.astype(images.dtype), images
            )
            off = unit * off_diagonal_size(vectors, images) if p > 1 else None
            sizes, gram = unit * column_norms(images), gram_of(vectors, images)
            bar = independent_samples(samples, sizes, gram, off_diagonal=off)
            error = ft.reduce(jnp.hypot, others, bar.standard_error)
            return bar._replace(standard_error=error)

        bars = [
            per_entry(form_bar, leaf.ndim - 1)(leaf, *others)
            for leaf, *others in zip(function(flat), quadrature, rounding, strict=True)
        ]
        stats = {"num_matvecs": m * steps, **function.unit}
        outcome = spectral_outcome(state, bars, results, stats, flat, weights)
        return outcome, RitzStandIn(pairs.basis, flat, pairs.vectors, coupling)


def _images(
    krylov: KrylovSpaces, pairs: RitzPairs, f: Inexact[Array, "m s"]
) -> Inexact[Array, "n m"]:
    """`f(A) w_i` for each probe, from f at its Ritz values."""
    m, steps = f.shape
    dtype = np.result_type(f.dtype, krylov.basis.dtype)
    f, basis, S, probes = (
        x.astype(dtype) for x in (f, krylov.basis, pairs.vectors, pairs.probes)
    )
    own = math.sqrt(m) * jnp.einsum("iri->ir", probes.reshape(m, steps, m))
    weights = jnp.where(own == 0, 0, f * own)
    S = S.reshape(steps, m, m, steps)
    coordinates = jnp.einsum("jiir,ir->ji", S, weights, precision="highest")
    return jnp.einsum("jin,ji->in", basis, coordinates, precision="highest").T


def _quadrature_errors(
    function: SpectralFunction, krylov: KrylovSpaces, values: Float[Array, " ms"]
) -> list[Float[Array, "..."]]:
    """Quadrature error for each leaf, extrapolated from thirds of the steps.

    The last third changed the mean by b, the third before by a. One step gives
    infinity.
    """
    steps = krylov.projected.shape[1]
    if steps == 1:
        return [jnp.full_like(f.real[..., 0], jnp.inf) for f in function(values)]
    h = max(steps // 3, 1)

    def means(s):
        nodes, vectors = jax.vmap(eigh)(krylov.projected[:, :s, :s])
        weights = krylov.norms[:, None] ** 2 * vectors[:, 0, :] ** 2
        # We clip, or f could be undefined at a node after rounding.
        nodes = jnp.clip(nodes, jnp.min(values), jnp.max(values))
        return [jnp.mean(weighted_sums(weights, f), axis=-1) for f in function(nodes)]

    runs = [means(s) for s in (steps, steps - h, steps - 2 * h) if s >= 1]
    changes = [
        [jnp.abs(x - y) for x, y in zip(*pair, strict=True)]
        for pair in itertools.pairwise(runs)
    ]
    if len(changes) == 1:
        return changes[0]
    return [remaining(b, a, 0.9) for b, a in zip(*changes, strict=True)]


def _end_errors(
    function: SpectralFunction,
    krylov: KrylovSpaces,
    values: Float[Array, " ms"],
    state: SpectralState,
) -> list[Float[Array, "..."]]:
    """The errors that both ends of the spectrum add for each leaf."""
    m, steps, _ = krylov.projected.shape

    def probe_errors(T, following, theta, norm):
        _, S = eigh(T)
        R = following.reshape(1, 1)
        residuals = residual_norms(R, S, steps)
        ends = outer_ends(function, theta, steps - 1, residuals, state)
        weights, leaves, errors = (norm * S[0]) ** 2, function(theta), []
        for end, j in zip(ends, (0, steps - 1), strict=True):
            nodes, vectors = extended_pairs(T, R, (theta, S), end, steps)
            moved = (norm * vectors[0]) ** 2
            changes = [
                jnp.abs(weighted_sums(moved, new) - weighted_sums(weights, f))
                for new, f in zip(function(nodes), leaves, strict=True)
            ]
            errors.append(end_errors(function, theta[j], weights[j], end, changes))
        return [jnp.maximum(*x) for x in zip(*errors, strict=True)]

    probes = krylov.projected, krylov.following, values.reshape(m, steps), krylov.norms
    return [jnp.mean(x, axis=0) for x in jax.vmap(probe_errors)(*probes)]
