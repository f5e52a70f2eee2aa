"""Stochastic Lanczos quadrature."""

import functools as ft
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from .._arguments import check_optional_integer, require, without_numpy
from .._error_bar import ErrorBar, gram_of, independent_samples, stratified_samples
from .._linalg.dense import column_norms, eigh
from .._linalg.krylov import KrylovSpaces, lanczos, residual_norms
from .._operators.space import apply_block, product_tangent
from .._outcome import Evidence
from .._results import per_entry
from .._rule import Derivative, StandIn
from .._samplers import RademacherSampler, Sampler, check_rounds, check_sampler
from .base import SpectralEstimator, domain_results, probes_and_steps, spectral_outcome
from .bounds import (
    End,
    bracket_midpoints,
    end_errors,
    evaluate_at_bounds,
    extended_pairs,
    lower_ends,
    outer_ends,
)
from .function import (
    SpectralFunction,
    final,
    remaining,
    ritz_values,
    rounding_errors,
    weighted_sums,
)
from .stand_in import slope_error, slope_matrices
from .state import SpectralState


class LanczosQuadratureEstimator(SpectralEstimator):
    r"""Stochastic Lanczos quadrature: the mean of `w_j^* f(A) w_j` over m probes.

    Each form is a Gauss quadrature, from s Lanczos steps that start at the probe. With a
    bracket, as in [`traceax.KrylovAwareEstimator`][], it is the middle between this and a
    Gauss-Radau quadrature.

    *Use when* the spectrum is flat, or O(n k^2) work beyond the products is too much.
    Otherwise [`traceax.KrylovAwareEstimator`][] is more accurate.

    | | |
    |---|---|
    | operator | symmetric or Hermitian, PyTrees, complex |
    | products | m s, at least k - 2 |
    | beyond the products | O(n k s) time, three n x k blocks; derivatives hold five |
    | bias | the quadrature error; none for polynomials of degree 2 s - 1 |
    | standard error | sampling error, from the spread of forms of a colour; half of the bracket, or an extrapolated error |
    | derivative | `w^* V M V^* w` for every probe, with its Ritz vectors V and M from `V^* dA V`; k products with dA |

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
    gives_brackets: ClassVar[bool] = True

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
        theta, S = jax.vmap(eigh)(krylov.projected)
        facts = krylov.asymmetry, space, state.lower, state.magnitude, state.solvers
        points, resolution, result = ritz_values(theta.reshape(-1), *facts)
        function = state.function.in_range(points)
        quadratures = Quadratures(krylov, points.reshape(m, steps), S, p, [])
        weights = quadratures.probes.reshape(-1) ** 2 / m
        rounding, decided = rounding_errors(
            function, points, weights, resolution, state.lower
        )
        results = domain_results(decided, result)
        stats = {"num_matvecs": m * steps, "known_trace": jnp.asarray(False)}
        stats.update(function.unit)
        samples = quadratures.samples(function)
        if state.has_bracket:
            samples, errors, bracket = _bracketed(function, quadratures, state, samples)
            stats.update(bracket)
        else:
            runs = zip(*(x.means(function) for x in quadratures.thirds), strict=True)
            errors = [_extrapolated(means) for means in runs]
        end_changes = _end_errors(function, quadratures, state)
        errors = list(map(jnp.maximum, errors, end_changes))
        quadratures = quadratures._replace(leaf_errors=errors)

        def form_bar(leaf, samples, *others):
            f = leaf.reshape(m, steps)
            bar = quadratures.bar(samples, f * quadratures.probes.astype(f.dtype))
            error = ft.reduce(jnp.hypot, others, bar.standard_error)
            return bar._replace(standard_error=error)

        leaves = function(points), samples, errors, rounding
        bars = [
            per_entry(form_bar, leaf[0].ndim - 1)(*leaf)
            for leaf in zip(*leaves, strict=True)
        ]
        zero_products = jnp.zeros_like(krylov.projected, krylov.basis.dtype)
        evidence = Evidence(
            (zero_products, state.function),
            jtu.Partial(_slope_bars, quadratures, state.function),
        )
        outcome = spectral_outcome(
            state, bars, results, stats, points, weights, evidence=evidence
        )
        return outcome, LanczosStandIn(quadratures, evidence)


class Quadratures(NamedTuple):
    """Gauss quadratures for m probes.

    - `theta`, `S`: Ritz values, and their vectors in the Krylov space of each probe.
    - `num_colours`: p; probes i and `i + p` have the same colour.
    - `leaf_errors`: quadrature errors for each leaf of the function.
    """

    krylov: KrylovSpaces
    theta: Float[Array, "m s"]
    S: Float[Array, "m s s"]
    num_colours: int
    leaf_errors: list[Float[Array, "..."]]

    @property
    def probes(self) -> Float[Array, "m s"]:
        """Coordinates of every probe in its Ritz vectors."""
        return self.krylov.norms[:, None] * self.S[:, 0]

    def after(self, steps: int) -> "Quadratures":
        """The quadratures after fewer steps."""
        theta, S = jax.vmap(eigh)(self.krylov.projected[:, :steps, :steps])
        # We clip, or f could be undefined at a node after rounding.
        theta = jnp.clip(theta, jnp.min(self.theta), jnp.max(self.theta))
        return self._replace(theta=theta, S=S)

    @property
    def thirds(self) -> list["Quadratures"]:
        """The quadratures after all steps, and after a third and two thirds fewer."""
        steps = self.theta.shape[1]
        h = max(steps // 3, 1)
        return [self, *(self.after(s) for s in (steps - h, steps - 2 * h) if s >= 1)]

    def samples(self, function: SpectralFunction) -> list[Inexact[Array, "... m"]]:
        """The form `c^* f(Theta) c` for every leaf and probe."""
        f = function(self.theta.reshape(-1))
        f = [x.reshape(*x.shape[:-1], *self.theta.shape) for x in f]
        return [weighted_sums(self.probes**2, x) for x in f]

    def means(self, function: SpectralFunction) -> list[Inexact[Array, "..."]]:
        return [jnp.mean(x, axis=-1) for x in self.samples(function)]

    def slopes(
        self, function: SpectralFunction, D: Inexact[Array, "m l l"], t_function: PyTree
    ) -> tuple[list[Inexact[Array, "... m"]], list[Inexact[Array, "... m s"]]]:
        """`c^* M c` and `M c` for every leaf and probe c, with M from `slope_matrices`."""
        steps, c = self.theta.shape[1], self.probes

        def matrices(theta, S, D):
            D = D[:steps, :steps].astype(np.result_type(D.dtype, S.dtype))
            return slope_matrices(theta, S.astype(D.dtype), D, function, t_function)

        images = [
            jnp.einsum("m...rq,mq->...mr", M, c.astype(M.dtype), precision="highest")
            for M in jax.vmap(matrices)(self.theta, self.S, D)
        ]
        return [jnp.sum(c.astype(x.dtype) * x, axis=-1) for x in images], images

    def bar(
        self, samples: Inexact[Array, " m"], images: Inexact[Array, "m s"]
    ) -> ErrorBar:
        """The error bar for the samples' mean, from images `B w` in Ritz vectors."""
        m, p = len(samples), self.num_colours
        if p > 1:
            return stratified_samples(samples.reshape(m // p, p) / p)
        krylov = self.krylov
        # A multiple of I adds nothing to the spread, so we drop it.
        shift = jnp.mean(samples) / krylov.basis.shape[2]
        images = images - shift * self.probes.astype(images.dtype)
        dtype = np.result_type(images.dtype, krylov.basis.dtype)
        basis, S, images = (x.astype(dtype) for x in (krylov.basis, self.S, images))
        einsum = ft.partial(jnp.einsum, precision="highest")
        images = einsum("ijn,ij->in", basis, einsum("ijr,ir->ij", S, images)).T
        probes = basis[:, 0].T * krylov.norms.astype(dtype)[None]
        return independent_samples(
            samples, column_norms(images), gram_of(probes, images)
        )


class LanczosStandIn(StandIn):
    """Derivatives of the mean of `c^* f(Theta) c`, `c^* M c` with D from each space."""

    quadratures: Quadratures
    evidence: Evidence

    def derivative(self, state, tangent):
        if not jtu.tree_leaves((tangent.operator, tangent.function)):
            return None
        basis = self.quadratures.krylov.basis
        m, steps, n = basis.shape
        V = basis.reshape(m * steps, n).T
        W = product_tangent(state.operator, tangent.operator, V)
        D = jnp.zeros((m, steps, steps), basis.dtype)
        if W is not None:
            W = W.T.reshape(basis.shape)
            D = jnp.einsum("ijn,iln->ijl", basis.conj(), W, precision="highest")
        # Second derivatives would need tangents for these parts, so we forbid them.
        quadratures = final(self.quadratures, of=(state.operator, state.function))
        function = state.function.in_range(quadratures.theta.reshape(-1))
        slopes, _ = quadratures.slopes(function, D, tangent.function)

        def value(slopes, f):
            slopes = slopes if jnp.iscomplexobj(f) else jnp.real(slopes)
            return jnp.where(jnp.all(jnp.isfinite(f)), jnp.mean(slopes), jnp.nan)

        leaves = zip(slopes, function(quadratures.theta.reshape(-1)), strict=True)
        values = [per_entry(value, leaf[0].ndim - 1)(*leaf) for leaf in leaves]
        return Derivative(values, (D, tangent.function))


def _slope_bars(
    quadratures: Quadratures, function: SpectralFunction, products: tuple[Any, Any]
) -> list[ErrorBar]:
    """Error bars for the derivatives of every leaf."""
    D, t_function = products
    D = (D + D.swapaxes(1, 2).conj()) / 2
    runs = quadratures.thirds
    function = function.in_range(quadratures.theta.reshape(-1))
    slopes, images = zip(
        *(x.slopes(function, D, t_function) for x in runs), strict=True
    )
    values = zip(*(x.means(function) for x in runs[:2]), strict=True)
    changes = [jnp.abs(x[0] - x[-1]) for x in values]

    def slope_bar(images, leaf_error, change, *slopes):
        bar = quadratures.bar(slopes[0], images)
        means = [jnp.mean(samples) for samples in slopes]
        error = _extrapolated(means)
        if len(means) > 1:
            # Slopes converge more slowly than values, and not always steadily.
            b = jnp.abs(means[0] - means[1])
            error = jnp.maximum(error, b)
            error = jnp.maximum(error, slope_error(leaf_error, change, b))
        return bar._replace(standard_error=jnp.hypot(bar.standard_error, error))

    leaves = images[0], quadratures.leaf_errors, changes, *slopes
    return [
        per_entry(slope_bar, leaf[0].ndim - 2)(*leaf)
        for leaf in zip(*leaves, strict=True)
    ]


def _bracketed(
    function: SpectralFunction,
    quadratures: Quadratures,
    state: SpectralState,
    samples: list[Inexact[Array, "... m"]],
) -> tuple[list[Inexact[Array, "... m"]], list[Float[Array, "..."]], dict[str, Any]]:
    """Midpoints between Gauss and Gauss-Radau quadratures, half their distance, and
    `stats`."""
    krylov, steps = quadratures.krylov, quadratures.theta.shape[1]
    theta = jnp.sort(quadratures.theta.reshape(-1))
    lower, bottom, proven = lower_ends(function, theta, state)

    def at_end(end):
        def forms(T, following, theta, S, norm):
            R, pairs = following.reshape(1, 1), (theta, S)
            nodes, vectors = extended_pairs(T, R, pairs, end, steps)
            weights = (norm * vectors[0]) ** 2
            return [weighted_sums(weights, f) for f in function(nodes)]

        probes = quadratures.theta, quadratures.S, krylov.norms
        forms = jax.vmap(forms, out_axes=-1)
        return forms(krylov.projected, krylov.following, *probes)

    one, positive = jnp.ones_like(lower), theta[0] >= 0
    ends = evaluate_at_bounds(at_end, End(one, lower), End(one, bottom))
    rows = [x[..., None, :] for x in samples]
    (_, brackets), (middles, own) = (
        bracket_midpoints(rows, [x[..., None, :] for x in end], positive)
        for end in ends
    )
    errors = [
        jnp.where(positive, jnp.abs(high - low) / 2, jnp.inf) for low, high in own
    ]
    pair = tuple(map(state.treedef.unflatten, zip(*brackets, strict=True)))
    proven = proven & positive
    stats = {"bracket": pair, "bracket_is_proven": proven, "bottom": bottom}
    return [x[..., 0, :] for x in middles], errors, stats


def _extrapolated(means: Sequence[Inexact[Array, "..."]]) -> Float[Array, "..."]:
    """The error that remains after all steps, from means as in `Quadratures.thirds`.

    The last third changed the mean by b, the third before by a. One step gives
    infinity.
    """
    changes = [jnp.abs(x - y) for x, y in itertools.pairwise(means)]
    if not changes:
        return jnp.full_like(jnp.real(means[0]), jnp.inf)
    return changes[0] if len(changes) == 1 else remaining(changes[0], changes[1], 0.9)


def _end_errors(
    function: SpectralFunction, quadratures: Quadratures, state: SpectralState
) -> list[Float[Array, "..."]]:
    """The errors that both ends of the spectrum add for each leaf."""
    krylov, steps = quadratures.krylov, quadratures.theta.shape[1]

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

    probes = krylov.projected, krylov.following, quadratures.theta, krylov.norms
    return [jnp.mean(x, axis=0) for x in jax.vmap(probe_errors)(*probes)]
