"""Leave-one-out estimates of spectral functions from one block Krylov space."""

import functools as ft
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from .._accuracy.error_bar import leave_one_out_bar
from .._accuracy.tolerance import FEWEST, Check, run_until
from .._arguments import check_optional_integer, without_numpy
from .._estimate import RESULTS
from .._linalg.krylov import (
    Projected,
    RitzPairs,
    arnoldi,
    arnoldi_factor,
    arnoldi_start,
    arnoldi_step,
    block_lanczos,
)
from .._linalg.left_out_krylov import (
    LeftOut,
    coupling_of,
    leave_probes_out,
    paired_samples,
    ritz_pairs,
    sample_weights,
    shortened,
)
from .._linalg.tall import inner
from .._operators.block import apply_block
from .._samplers import NormalSampler, Sampler, check_sampler
from .base import (
    SpectralEstimator,
    SpectralOutcome,
    SpectralState,
    bar_of_leaves,
    outside_if,
    probes_and_steps,
)
from .blocks import SpectralBlocks, smallest_of
from .function import (
    SpectralFunction,
    remaining,
    rounding_errors,
    weighted_sums,
)
from .ritz import ritz_values


class KrylovAwareEstimator(SpectralEstimator):
    r"""Leave-one-out estimates of `tr f(A)` from one block Krylov space.

    Applies the operator to the m probes, to what comes out, and so on, s times; `T`
    is the operator projected to the space `K_s(Omega)` of all of this. The space of
    all probes but one is exact for its part of the trace, and the probe left out
    estimates the rest:

        tr_i = tr(P_i f(A)) + (n - rank P_i) g_i^* f(A) g_i / |g_i|^2,
        P_i the projector to K_s(Omega without w_i),   g_i = (I - P_i) w_i,

    all within `K_s(Omega)`, where f(A) is f(T). The value is the mean of the `tr_i`.

    *Use when* f(A) is wanted of a symmetric or Hermitian operator. An eigenvalue that
    the Krylov space has found takes no part in the error, whether it is large or not;
    shifts `A + c I` change neither the space nor the accuracy, so that a small noise
    variance added to a kernel matrix needs no preconditioner.

    | | |
    |---|---|
    | operator | symmetric or Hermitian, PyTrees, complex |
    | products | m s, k less at most 2 |
    | beyond the products | O(n k^2 + k^3 m) time, three n x k blocks; derivatives hold five |
    | bias | of the Krylov space: f(T) for f(A). None where f is a polynomial of degree 1 |
    | standard error | of probes, from leaving out pairs; and of the Krylov space, from the last block of it |
    | derivative | `tr((F o C) V^* dA V)` with Ritz vectors V, k products with dA; second ones take 4 k more |

    *To a tolerance* m is fixed, and s grows until the tolerance is met. The estimate,
    and its derivatives, are those of a fixed budget of m s products.

    **Arguments:**

    - `num_probes`: m. By default about `0.9 sqrt(k)`, and `0.9 sqrt(k / 2)` for an
        estimate to a tolerance. Few probes reach deeper into the spectrum, many average
        more; with at least 5 the error bar is reliable.
    - `sampler`: of the probes; rotation invariant, as resphering needs.

    **Raises:**

    - `ValueError` for a sampler that isn't rotation invariant and independent.

    **Reference:** Chen and Hallman, "Krylov-Aware Stochastic Trace Estimation", SIAM J.
    Matrix Anal. Appl. 44 (2023), doi:10.1137/22M1494257, arXiv:2205.01736, for the
    block Krylov space in place of products with f(A); Epperly, Tropp and Webber,
    doi:10.1137/23M1548323, for leaving probes out. Leaving a probe out of the *whole*
    Krylov space is of this library: see the page on spectral functions.
    """

    num_probes: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )
    sampler: Sampler = NormalSampler()

    def __check_init__(self):
        name = type(self).__name__
        what = "how many vectors the Krylov space starts from"
        check_optional_integer(self.num_probes, "num_probes", name, least=1, what=what)
        check_sampler(self.sampler, name, resphere=True, independent=True)

    def compute(self, state, k):
        m, steps = probes_and_steps(self.num_probes, k)
        product, Omega = self._begin(state, m)
        basis, factor = arnoldi(product, Omega, steps)
        found = _found(state, factor, m, steps)
        blocks = SpectralBlocks(found.pairs(basis, factor[:, :m]), found.coupling)
        stats = {"num_matvecs": m * steps, "result": found.result, **found.unit}
        return SpectralOutcome(*found[:3], stats, blocks)

    def compute_until(self, state, k, stop):
        if k < FEWEST:
            found = self.compute(state, k)
            stats = {**found.stats, "products_needed": jnp.inf}
            return found._replace(stats=stats)
        m, most = probes_until(self.num_probes, k)
        product, Omega = self._begin(state, m)
        sizes = _sizes(most)

        def judge(run, count):
            factor = arnoldi_factor(run, count)

            def at(size):
                of_size = factor[: m * size, : m * (size + 1)]
                return _found(state, of_size, m, count).padded(m * (most - size))

            branches = [lambda size=size: at(size) for size in sizes]
            found = jax.lax.switch(smallest_of(sizes, count), branches)
            return Check(bar_of_leaves(*found[:3]), found)

        loop = run_until(
            stop,
            lambda run, count: arnoldi_step(product, run, count),
            judge,
            arnoldi_start(Omega, most),
            start=0,
            width=1,
            most=most,
            fewest=min(2, most),
            samples=m,
        )
        bar, found = loop.check
        basis, factor, _ = loop.buffers
        used, pairs = m * loop.count, found.pairs(basis, factor[:, :m])
        of_sizes = tuple(m * size for size in sizes)
        blocks = SpectralBlocks(pairs, found.coupling, used, of_sizes)
        errors, stats = list(bar.standard_error), {"num_matvecs": used}
        stats = {**stats, "result": found.result, **found.unit}
        stats["products_needed"] = m * loop.forecast.needed
        return SpectralOutcome(found.means, errors, found.freedoms, stats, blocks)

    def _begin(self, state: SpectralState, m: int):
        space = state.space
        Omega = self.sampler.sample(state.key, space.size, m, space.compute_dtype)
        return ft.partial(apply_block, state.operator), Omega


class _Found(NamedTuple):
    """What is known after some steps; of functions a list entry for each leaf."""

    means: list[Inexact[Array, ""]]
    errors: list[Float[Array, ""]]
    freedoms: list[Float[Array, ""]]
    values: Float[Array, " k"]
    vectors: Inexact[Array, "k k"]
    coupling: Inexact[Array, "k k"]
    result: RESULTS
    unit: dict[str, Array]

    def padded(self, missing: int) -> "_Found":
        """With so many Ritz pairs more, of zeros at the last Ritz value."""
        return self._replace(
            values=jnp.pad(self.values, (0, missing), mode="edge"),
            vectors=jnp.pad(self.vectors, (0, missing)),
            coupling=jnp.pad(self.coupling, (0, missing)),
        )

    def pairs(
        self, basis: Inexact[Array, "n k"], omega: Inexact[Array, "k m"]
    ) -> RitzPairs:
        """The Ritz pairs, and probes of length `sqrt(n / m)`."""
        m = omega.shape[1]
        scales = math.sqrt(basis.shape[0] / m) / jnp.linalg.norm(omega, axis=0)
        probes = inner(self.vectors, omega * scales[None, :].astype(omega.dtype))
        return RitzPairs(basis, self.values, self.vectors, probes, m)


def _found(
    state: SpectralState,
    factor: Inexact[Array, "k km"],
    m: int,
    steps: int | Int[Array, ""],
) -> _Found:
    """Of so many steps, which may be fewer than the factor has room for."""
    function, n = state.function, state.space.size
    projected = block_lanczos(factor)
    T, omega, asymmetry = projected
    values, vectors = ritz_pairs(T, m * steps)
    values, noise, result = ritz_values(values, asymmetry, state.operator)
    function = function.in_range(values)
    left_out = leave_probes_out(T, omega, n, steps)
    coupling = coupling_of(left_out, vectors, m)
    weights = sample_weights(left_out, vectors)
    diagonal = jnp.real(jnp.diagonal(coupling))
    rounding, decided = rounding_errors(function, values, diagonal, noise, state.lower)
    result = outside_if(decided, result)
    quadrature = _quadrature_errors(
        function, projected, left_out, (values, vectors), n, steps
    )
    means, errors, freedoms = [], [], []
    for f, *others in zip(function(values), quadrature, rounding, strict=True):
        samples, first, second = (weighted_sums(w, f) for w in weights)
        magnitude = weighted_sums(weights.samples, jnp.abs(f)).mean()
        bar = leave_one_out_bar(paired_samples(samples, first, second, magnitude))
        means.append(bar.mean)
        errors.append(ft.reduce(jnp.hypot, others, bar.standard_error))
        freedoms.append(bar.degrees_of_freedom)
    return _Found(
        means, errors, freedoms, values, vectors, coupling, result, function.unit
    )


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
    more than 2 b: the spaces without a probe change by a little forever. NaN for a
    single step, which tells nothing.
    """
    T, omega, _ = projected
    k, m = omega.shape
    values, _ = pairs
    if m == 1 or k == m:
        return [jnp.full((), jnp.nan, values.dtype) for _ in function(values)]
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


def probes_until(num_probes: int | None, k: int) -> tuple[int, int]:
    """How many probes, and how many steps at most, of which not all may be taken.

    As many as if half of them were, but at least 5, whose error bar is reliable, and
    not so many that there are less than three steps.
    """
    if num_probes is None:
        num_probes = max(round(0.9 * math.sqrt(k / 2)), min(5, k // 3))
    m = min(num_probes, k)
    return m, k // m


def _sizes(most: int) -> tuple[int, ...]:
    """Numbers of steps that small matrices have room for, each twice the one before.

    An early look is O(k^3 m) in the steps that were taken, not in all there could be.
    """
    sizes = [most]
    while sizes[0] > 12:
        sizes.insert(0, -(-sizes[0] // 2))
    return tuple(sizes)
