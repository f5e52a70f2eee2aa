"""Leave-one-out estimates of spectral functions from one block Krylov space."""

import functools as ft
import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, Int

from .._arguments import check_optional_integer, without_numpy
from .._error_bar import ErrorBar
from .._linalg.dense import column_norms, combine, divisor, side_by_side
from .._linalg.krylov import arnoldi, arnoldi_factor, arnoldi_start, arnoldi_step
from .._operators.kernel import stored
from .._operators.space import apply_block
from .._rule import Evidence, Outcome
from .._samplers import NormalSampler, Sampler, check_sampler
from .._tolerance import LEAST_PRODUCTS, Check, Depth, run_until, widened_for_loop
from .base import SpectralEstimator, probes_and_steps, spectral_outcome
from .krylov_sums import KrylovSums, krylov_sums
from .stand_in import RitzStandIn, Truncated, judge_truncated
from .state import SpectralState

# Of an estimate whose budget is left out: probes, steps at most, and steps at most of the
# spaces that leave a probe out, which are most of the work where there are many.
_PROBES_TO_DEPTH, _STEPS_TO_DEPTH, _STEPS_LEFT_OUT = 5, 80, 16
# Numbers of steps for which small matrices have programs of their own.
_STEP_SIZES = 9, 27


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
    shifts `A + c I` change neither the space nor the accuracy.

    *The bracket.* For f operator monotone, a logarithm, an inverse or a root, and no
    eigenvalue below a known number, f(A) lies between f(T) and f(E), E the smallest matrix
    that A can be on the space and the next block of it. So does each `tr_i`. The value is
    the mean of their middles, `stats["bracket"]` holds the means of both ends, and the
    standard error half of their distance. Of operators tagged positive semidefinite the
    number is 0, or, where f is infinite there, a quarter of the smallest Ritz value: no
    theorem then, and `stats["bracket_is_proven"]` is false. Where the known number is less
    than 1e-4 of that Ritz value, as jitter is, value and standard error take the quarter as
    well, and the ends stay; `stats["bottom"]` is what the value takes. Without a bracket
    the value is that of f(T), and what more steps would change is extrapolated.

    *Where the trace of A is known*, each `tr_i` is corrected by a multiple of what it gets
    wrong of `tr A`: no product more, and most of the error of probes less.

    | | |
    |---|---|
    | operator | symmetric or Hermitian, PyTrees, complex |
    | products | m s, k less at most 2 |
    | beyond the products | O(n k^2 + k^3 m) time, three n x k blocks; derivatives hold five |
    | bias | of the Krylov space: at most half of the bracket, or that of f(T). None where f is a polynomial of degree 1 |
    | standard error | of probes, from leaving out pairs; and of the Krylov space, from the bracket or from its last block |
    | derivative | `tr((F o C) V^* dA V)` with Ritz vectors V, that of f(T); k products with dA |

    *Without k*, where there is a bracket, m is 5, and s grows until half of the bracket is
    at most a tenth of the standard error of probes; of a likelihood at most 0.1, if that
    is more, with the bracket of the quadratic term. At most 80 steps, 1,000 products and
    n - 1 are taken; up to n = 32 all n are, for the exact answer.

    *To a tolerance* m is fixed, and s grows until the tolerance is met. The estimate,
    and its derivatives, are those of a fixed budget of m s products.

    **Arguments:**

    - `num_probes`: m. By default about `0.5 sqrt(k)`, at least 3; to a tolerance about
        `0.5 sqrt(k / 2)`, at least 5; 5 without k. Few probes reach deeper into the
        spectrum, many average more.
    - `sampler`: of the probes; rotation invariant and independent, or `ValueError`.

    **Reference:** Chen and Hallman, "Krylov-Aware Stochastic Trace Estimation", SIAM J.
    Matrix Anal. Appl. 44 (2023), doi:10.1137/22M1494257, arXiv:2205.01736, for the
    block Krylov space in place of products with f(A); Zimmerling, Druskin and Simoncini,
    doi:10.1007/s10915-025-02799-z, for block Gauss-Radau rules. Probes are left out as in
    [`traceax.XTraceEstimator`][], but of the *whole* Krylov space, which is of this
    library: see the page on spectral functions.
    """

    num_probes: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )
    sampler: Sampler = NormalSampler()
    _gives_brackets: ClassVar[bool] = True

    def __check_init__(self):
        name = type(self).__name__
        meaning = "how many vectors the Krylov space starts from"
        check_optional_integer(
            self.num_probes, "num_probes", name, least=1, meaning=meaning
        )
        check_sampler(self.sampler, name, resphere=True, independent=True)

    def least_loop_products(self, state):
        return LEAST_PRODUCTS + 2 * state.num_rhs

    def compute(self, state, k):
        q = state.num_rhs
        m, steps = probes_and_steps(self.num_probes, k, best_probes(k), q)
        product, start = self._begin(state, m)
        basis, factor, R = arnoldi(product, start, steps)
        sums = krylov_sums(state, factor, R, steps, basis)
        return _outcome(state, sums, basis, factor, steps)

    def depth(self, state, meter):
        if not state.has_bracket:
            return None
        # A tenth of a nat for a likelihood.
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
            num_probes = min(_PROBES_TO_DEPTH, max((k - q) // 3, 1))
        elif num_probes is None:
            # As if half of the steps were taken, but so many that the error bar is
            # reliable, and not so many that there are less than three steps.
            num_probes = max(round(best_probes(k // 2)), min(5, k // 3))
        m, most = probes_and_steps(num_probes, k, num_probes, q)
        most = min(most, _STEPS_TO_DEPTH) if to_depth else most
        product, start = self._begin(state, m)
        width, most_left_out = m + q, _STEPS_LEFT_OUT if to_depth else None
        # An early look is O(k^3) in the steps taken, not in all there could be.
        sizes = tuple(size for size in _STEP_SIZES if size < most)

        def judge(run, count):
            factor, R = arnoldi_factor(run, count)
            sums = krylov_sums(state, factor, R, count, run.basis, sizes, most_left_out)
            if isinstance(stop, Depth):
                return Check(sums.bars[0], sums, sums.ratio(stop))
            return Check(state.bar(sums.all_bars), sums)

        loop = run_until(
            stop,
            lambda run, count: arnoldi_step(product, run, count),
            judge,
            arnoldi_start(start, most),
            start=0,
            width=1,
            limit=most,
            minimum=min(2, most),
            num_samples=m,
        )
        _, sums, _ = loop.check
        basis, factor, _ = loop.buffers
        outcome, stand_in = _outcome(
            state, sums, basis, factor, loop.count, most_left_out
        )
        if not to_depth:
            bars = [_widened(x, m) for x in outcome.bars]
            stats = {**outcome.stats, "products_needed": width * loop.forecast.needed}
            outcome = outcome._replace(bars=bars, stats=stats)
        return outcome, stand_in

    def _begin(self, state: SpectralState, m: int):
        """Products, and what the space starts from: right-hand sides, and m probes."""
        space = state.space
        start = self.sampler.sample(state.key, space.size, m, space.compute_dtype)
        if state.rhs is not None:
            # As long as probes: what is rounding is told by the size of them all.
            lengths = divisor(column_norms(state.rhs)) / math.sqrt(space.size)
            unit = lengths[None, :].astype(start.dtype)
            start = side_by_side(state.rhs / unit, start)
        return ft.partial(apply_block, stored(state.operator)), start


def best_probes(k: int) -> float:
    """How many probes are best: 3 at least, where they leave two steps.

    Over kernels, noises and budgets `0.9 sqrt(k)` had 1.6 times the error of derivatives.
    """
    return max(0.5 * math.sqrt(k), min(3.0, max(k / 2, 2.0)))


def _widened(bar: ErrorBar, m: int) -> ErrorBar:
    return bar._replace(standard_error=widened_for_loop(bar.standard_error, m))


def _outcome(
    state: SpectralState,
    sums: KrylovSums,
    basis: Inexact[Array, "n k"],
    factor: Inexact[Array, "k kw"],
    steps: int | Int[Array, ""],
    most_left_out: int | None = None,
) -> tuple[Outcome, RitzStandIn]:
    """The outcome and its stand-in, from the sums after so many steps."""
    k, width = len(factor), factor.shape[1] - len(factor)
    shallow, rows = steps, k // width
    if most_left_out is not None:
        shallow, rows = jnp.minimum(steps, most_left_out), min(most_left_out, rows)
    theta, S, forms = sums.theta, sums.S, sums.forms
    stats = {"num_matvecs": width * steps, **sums.stats}
    solutions = t_rhs = form_errors = None
    if forms is not None:
        solutions, form_errors = forms.coordinates, forms.bar.standard_error
        t_rhs = jnp.zeros_like(solutions)
        solution = combine(combine(basis, S), solutions)
        stats.update(inv_quad_bracket=forms.bracket, solution=solution)
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
    nothing = jnp.zeros_like(S), state.function, t_rhs
    evidence = Evidence(nothing, jtu.Partial(judge_truncated, space, state.function))
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
    parts = basis, theta, S, sums.coupling, count, solutions, evidence
    return outcome, RitzStandIn(*parts)
