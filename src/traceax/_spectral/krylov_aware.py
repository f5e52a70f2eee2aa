"""Leave-one-out estimates for spectral functions, from one block Krylov space."""

import functools as ft
import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Int

from .._arguments import check_optional_integer, without_numpy
from .._error_bar import ErrorBar
from .._linalg.dense import column_norms, combine, divisor, side_by_side
from .._linalg.krylov import (
    Arnoldi,
    arnoldi,
    arnoldi_residual,
    arnoldi_start,
    arnoldi_step,
)
from .._linalg.whitening import PROBES_TO_DEPTH
from .._operators.kernel import stored
from .._operators.space import apply_block
from .._outcome import Evidence, Outcome
from .._samplers import NormalSampler, Sampler, check_sampler
from .._tolerance import LEAST_PRODUCTS, Check, Depth, run_until, widened_for_loop
from .base import SpectralEstimator, probes_and_steps, spectral_outcome
from .krylov_sums import Decomposition, KrylovSums, decompose, krylov_sums
from .stand_in import RitzStandIn, Truncated, bars_from_krylov
from .state import SpectralState

# Limits without a budget: steps, vectors in the space and in spaces without a probe.
_STEPS_TO_DEPTH, _VECTORS_TO_DEPTH, _VECTORS_LEFT_OUT = 80, 480, 96
# We compile smaller decompositions for up to 9 and up to 27 steps.
_STEP_SIZES = 9, 27


class KrylovAwareEstimator(SpectralEstimator):
    r"""Leave-one-out estimates of `tr f(A)` from one block Krylov space.

    We multiply m probes by the operator, s times in a row, and project the operator to
    all these vectors: T on `K_s(Omega)`. We take the trace on the space of all probes
    but one. The probe left out estimates the remainder:

        tr_i = tr(P_i f(A)) + (n - rank P_i) g_i^* f(A) g_i / |g_i|^2,
        P_i the projector to K_s(Omega without w_i),   g_i = (I - P_i) w_i,

    where f(A) is f(T). The value is the mean of the `tr_i`.

    *Use when* the operator is symmetric or Hermitian. Eigenvalues that the Krylov space
    has found add no error. Neither do shifts: `A + c I` has the same Krylov space.

    *The bracket.* If f is operator monotone (a logarithm, an inverse, a root) and no
    eigenvalue lies below a known number, f(A) lies between f(T) and f(E), where E is
    the smallest matrix that A can be on the space and its next block. So each `tr_i`
    has two ends. The value is the mean of their middles, `stats["bracket"]` has the
    means of both ends, and the standard error includes half their distance. If A is
    tagged positive semidefinite, the known number is 0. If f is infinite there, we take
    a quarter of the smallest Ritz value, and `stats["bracket_is_proven"]` is false. If
    a positive known number is below 1e-4 times that Ritz value (jitter), value and bar
    use the quarter, but the bracket doesn't. `stats["bottom"]` is the value's number.
    Without a bracket the value is from f(T), and we extrapolate the truncation error.

    *A known trace of A* corrects each `tr_i` by a multiple of its error in `tr A`. It
    costs no product and removes most sampling error.

    | | |
    |---|---|
    | operator | symmetric or Hermitian, PyTrees, complex |
    | products | m s, at least k - 2 |
    | beyond the products | O(n k^2 + k^3 m) time, three n x k blocks; derivatives hold five |
    | bias | truncation error: at most half of the bracket, or the error with f(T). None for polynomials of degree 1 |
    | standard error | sampling error, from leaving out pairs; truncation error, from the bracket or the last block |
    | derivative | `tr((F o C) V^* dA V)` for f(T), with Ritz vectors V; k products with dA |

    *Without k*, if f has a bracket, m is 5. Likelihoods take 10 with a preconditioner
    from columns, and 24 if they eliminate rows. s grows until half the bracket is at
    most a tenth of the sampling error, or the rounding error. Likelihoods add the
    quadratic term's bracket, and may stop at 0.1. We take at most 80 steps, 480
    products and n - 1 products. Up to n = 32 we take all n, for the exact answer.

    *To a tolerance*, m is fixed, and s grows until the tolerance is met. A budget of
    `m s` products gives the same estimate and derivatives.

    **Arguments:**

    - `num_probes`: m, by default about `0.5 sqrt(k)`, at least 3; to a tolerance about
        `0.5 sqrt(k / 2)`, at least 5; without k as above. With few probes the truncation
        error is smaller, with many the sampling error.
    - `sampler`: draws the probes: rotation invariant and independent, or `ValueError`.

    **Reference:** Chen and Hallman, "Krylov-Aware Stochastic Trace Estimation", SIAM J.
    Matrix Anal. Appl. 44 (2023), doi:10.1137/22M1494257, arXiv:2205.01736, whose block
    Krylov space replaces products with f(A); Zimmerling, Druskin and Simoncini,
    doi:10.1007/s10915-025-02799-z, for block Gauss-Radau rules. As in
    [`traceax.XTraceEstimator`][] we leave probes out, but from the *whole* Krylov
    space, which is new: see the page on spectral functions.
    """

    num_probes: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )
    sampler: Sampler = NormalSampler()
    gives_brackets: ClassVar[bool] = True

    def __check_init__(self):
        name = type(self).__name__
        meaning = "the number of starting vectors"
        check_optional_integer(
            self.num_probes, "num_probes", name, least=1, meaning=meaning
        )
        check_sampler(self.sampler, name, resphere=True, independent=True)

    def least_loop_products(self, state):
        return LEAST_PRODUCTS + 2 * state.num_rhs

    def compute(self, state, k):
        return self.space(state, k).compute(state, k)

    def space(self, state: SpectralState, k: int) -> "KrylovSpace":
        """The Krylov space, from at most k products."""
        q = state.num_rhs
        m, steps = probes_and_steps(self.num_probes, k, best_probes(k), q)
        product, start = self._begin(state, m)
        run = arnoldi(product, start, steps)
        return KrylovSpace(run, decompose(state, run, steps))

    def depth(self, state, meter):
        if not state.has_bracket:
            return None
        # We neglect 0.1 nat in a likelihood.
        negligible = 0.0 if state.rhs is None else 0.1
        return Depth(meter, state.space.real_dtype, negligible)

    def compute_until(self, state, k, stop):
        to_depth = isinstance(stop, Depth)
        if k < LEAST_PRODUCTS:
            outcome, stand_in = self.compute(state, k)
            stats = {**outcome.stats, "products_needed": jnp.inf}
            return outcome if to_depth else outcome._replace(stats=stats), stand_in
        q, num_probes = state.num_rhs, self.num_probes
        if num_probes is None and to_depth:
            P = state.preconditioner
            wanted = PROBES_TO_DEPTH if P is None else P.default_probes
            num_probes = min(wanted, max((k - q) // 3, 1))
        elif num_probes is None:
            # We expect to take half the steps. For a reliable error bar we want 5
            # probes, if at least three steps remain.
            num_probes = max(round(best_probes(k // 2)), min(5, k // 3))
        m, max_steps = probes_and_steps(num_probes, k, num_probes, q)
        product, start = self._begin(state, m)
        width, most_left_out = m + q, None
        if to_depth:
            most = max(min(_STEPS_TO_DEPTH, _VECTORS_TO_DEPTH // width), 1)
            max_steps = min(max_steps, most)
            most_left_out = max(3, _VECTORS_LEFT_OUT // width)
        # With `sizes`, a check takes O(k^3) time for the steps taken so far, not for
        # `max_steps`.
        sizes = tuple(width * size for size in _STEP_SIZES if size < max_steps)

        def judge(run, count):
            decomposition = decompose(state, run, count, sizes, most_left_out)
            sums = krylov_sums(state, decomposition, count, run.basis, sizes)
            if isinstance(stop, Depth):
                return Check(sums.bars[0], sums, sums.ratio(stop, state.half))
            return Check(state.bar(sums.all_bars), sums)

        loop = run_until(
            stop,
            lambda run, count: arnoldi_step(product, run, count),
            judge,
            arnoldi_start(start, max_steps),
            start=0,
            width=1,
            limit=max_steps,
            minimum=min(2, max_steps),
            num_samples=m,
        )
        _, sums, _ = loop.check
        run = loop.buffers
        outcome, stand_in = _outcome(state, sums, run, loop.count, most_left_out)
        if not to_depth:
            bars = [_widened(x, m) for x in outcome.bars]
            stats = {**outcome.stats, "products_needed": width * loop.forecast.needed}
            outcome = outcome._replace(bars=bars, stats=stats)
        return outcome, stand_in

    def _begin(self, state: SpectralState, m: int):
        """The product, and the starting block: right-hand sides and m probes."""
        space = state.space
        start = self.sampler.sample(state.key, space.size, m, space.compute_dtype)
        if state.rhs is not None:
            # We scale them to the probes' length: rounding is relative to the block.
            lengths = divisor(column_norms(state.rhs)) / math.sqrt(space.size)
            unit = lengths[None, :].astype(start.dtype)
            start = side_by_side(state.rhs / unit, start)
        return ft.partial(apply_block, stored(state.operator)), start


class KrylovSpace(SpectralEstimator):
    """The same estimates, from a Krylov space in memory and without a product."""

    run: Arnoldi
    decomposition: Decomposition
    gives_brackets: ClassVar[bool] = True

    def compute(self, state, k):
        steps = len(self.run.rows) // len(self.run.last_rows)
        sums = krylov_sums(state, self.decomposition, steps, self.run.basis)
        return _outcome(state, sums, self.run, steps)


def best_probes(k: int) -> float:
    """The default for m: at least 3, if these leave two steps."""
    # On kernels, `0.9 sqrt(k)` gave 1.6 times the error in derivatives.
    return max(0.5 * math.sqrt(k), min(3.0, max(k / 2, 2.0)))


def _widened(bar: ErrorBar, m: int) -> ErrorBar:
    return bar._replace(standard_error=widened_for_loop(bar.standard_error, m))


def _outcome(
    state: SpectralState,
    sums: KrylovSums,
    run: Arnoldi,
    steps: int | Int[Array, ""],
    most_left_out: int | None = None,
) -> tuple[Outcome, RitzStandIn]:
    """The outcome, and the stand-in that carries its derivative, from sums after
    `steps`."""
    basis, factor = run.basis, run.factor
    k, width = len(factor), factor.shape[1] - len(factor)
    shallow, rows = steps, k // width
    if most_left_out is not None:
        shallow, rows = jnp.minimum(steps, most_left_out), min(most_left_out, rows)
    theta, S, forms = sums.theta, sums.S, sums.forms
    stats = {"num_matvecs": width * steps, **sums.stats}
    solutions = residuals = t_rhs = form_errors = None
    if forms is not None:
        solutions, form_errors = forms.coordinates, forms.bar.standard_error
        t_rhs = jnp.zeros_like(solutions)
        u = combine(S, solutions)
        residuals = arnoldi_residual(run, u, steps)
        stats.update(inv_quad_bracket=forms.bracket, solution=combine(basis, u))
    space = Truncated(
        omega=factor[:, :width],
        theta=theta,
        S=S,
        n=state.space.size,
        q=state.num_rhs,
        steps=steps,
        shallow=shallow,
        most_left_out=rows,
        columns=sums.columns,
        solutions=solutions,
        leaf_errors=sums.truncation_errors,
        form_errors=form_errors,
    )
    zero_products = jnp.zeros_like(S), state.function, t_rhs
    evidence = Evidence(
        zero_products, jtu.Partial(bars_from_krylov, space, state.function)
    )
    count = None if isinstance(steps, int) else width * steps
    outcome = spectral_outcome(
        state,
        sums.bars,
        sums.results,
        stats,
        theta,
        jnp.real(jnp.diagonal(sums.coupling)),
        None if forms is None else forms.bar,
        evidence,
    )
    parts = basis, theta, S, sums.coupling, count, solutions, residuals, evidence
    return outcome, RitzStandIn(*parts, unclipped=sums.unclipped)
