"""Adaptive XTrace: half of the budget decides between a basis and fresh probes."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from .._error_bar import ErrorBar, weighted_bar
from .._linalg import adaptive, dense
from .._linalg.dense import squares
from .._operators.space import apply_block
from .._outcome import Evidence
from .._rule import Blocks
from .._samplers import RademacherSampler, Sampler, check_sampler
from .._trace_estimator import TraceEstimator, average

# Below this budget we have too few tests for a choice.
_LEAST_PRODUCTS = 8


class AdaptiveXTraceEstimator(TraceEstimator):
    r"""Hutchinson's estimator or nearly XTrace, whichever suits the operator.

    The first h = k/2 products are with probes `w_i`. Each is a test, and all but the
    last span a basis. The other half is either with the basis and one or two fresh
    probes, or with fresh probes alone. The value is a weighted mean of tests:

        t_i = tr(P_i A) + g_i^* A g_i - c_i (|g_i|^2 - n + rank P_i),   g_i = (I - P_i) w_i

    `P_i` projects onto the basis without product i, or is 0. All other tests choose
    between the two. The shift `c_i` makes multiples of the identity exact.

    *Use when* you know nothing about the operator. The error is close to the smaller
    error from Hutchinson's estimator and XTrace.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used; Hutchinson's estimator for k < 8 |
    | beyond the products | O(n k^2 + k^3) time; four n x k/2 blocks, eight in the derivative |
    | bias | none: a probe influences neither the choice nor the basis for its own test |
    | standard error | from independent samples, plus the covariance between tests that share the basis |
    | derivative | `<Z, dA V>`, k products with dA; unbiased for any dA |

    `stats["basis"]` is the number of basis vectors, 0 without a basis. You can neither
    resume an estimate nor request a tolerance.

    **Arguments:** `sampler`: draws the probes, which must be independent.

    **Reference:** see [`traceax.XTraceEstimator`][] for leaving one out. We know of no
    source for the choice and the shift.
    """

    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        check_sampler(self.sampler, type(self).__name__, independent=True)

    def compute(self, state, k):
        if k < _LEAST_PRODUCTS:
            return average(state, k, self.sampler, resphere=False)
        operator, space = state.operator, state.space
        n, h = space.size, k // 2
        probes = self.sampler.draw_range(state.key, 0, k, k, space)
        W, fresh = probes[:, :h], probes[:, h:]
        AW = apply_block(operator, W)
        unit = dense.power_of_two_scale(AW).astype(AW.dtype)
        Q, R = dense.orthonormalise(AW / unit)
        C, duals = dense.inner(Q, W), adaptive.dual_basis(R)
        uses_basis, energies = adaptive.choose_basis(duals, R, C, n, k)
        plan = adaptive.plan_tests(duals, uses_basis, k - h)
        # X has one more column than Q if k is odd. We mask all of Q but the basis.
        padding = ((0, k - 2 * h), (0, 0))
        X = jnp.where(plan.in_basis[:, None], jnp.pad(Q.T, padding), fresh.T).T
        AX = apply_block(operator, X) / unit
        tested, XAX = dense.column_dots(C, R), dense.inner(X, AX)
        form = _form(tested, dense.inner(W, AX), jnp.pad(R, padding), XAX)
        lengths, WX = dense.column_dots(W, W), dense.inner(W, X)
        gram = _form(lengths, WX, WX.conj().T, dense.inner(X, X))
        samples, transpose, shifts = jax.vjp(
            lambda form: adaptive.samples_of(form, gram, n, plan), form, has_aux=True
        )
        bar = _bar((samples, shifts), form, gram, n, plan, jnp.mean(energies))
        # For a fixed plan the value is linear in the form. Its coefficients K, with
        # `value = sum_ab K_ab v_a^* A v_b`, satisfy `E[V K^T V^*] = I`.
        (K,) = transpose(adaptive.weights_of(plan).astype(form.dtype))
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "basis": jnp.sum(plan.in_basis),
            "kept": (),  # marks the state as used
        }
        V = dense.side_by_side(W, X)
        error = bar.standard_error * jnp.real(unit)
        bars_from = jtu.Partial(_bars_from_form, gram, plan, n)
        evidence = Evidence((jnp.zeros_like(K), None), bars_from)
        blocks = Blocks([(V, dense.combine(V, K.conj()))], evidence)
        return bar.mean * unit, error, stats, blocks


def _bars_from_form(
    gram: Inexact[Array, "k k"],
    plan: adaptive.Plan,
    n: int,
    products: tuple[Inexact[Array, "k k"], None],
) -> list[ErrorBar]:
    D, h = products[0], len(plan.uses_basis)
    unit = dense.power_of_two_scale(D)
    D = D / unit.astype(D.dtype)
    form = _form(jnp.diagonal(D)[:h], D[:h, h:], D[h:, :h], D[h:, h:])
    # `half_variance` keeps the bar from vanishing if our tests agree by chance.
    tests = adaptive.samples_of(form, gram, n, plan)
    bar = _bar(tests, form, gram, n, plan, jnp.mean(squares(D[:h, h:])))
    return [bar._replace(standard_error=unit * bar.standard_error)]


def _bar(tests, form, gram, n: int, plan: adaptive.Plan, half_variance) -> ErrorBar:
    """The error bar for a form, from its samples and shifts."""
    (samples, shifts), h = tests, len(plan.uses_basis)
    weights = adaptive.weights_of(plan)
    sizes = jnp.abs(jnp.diagonal(form))
    return weighted_bar(
        samples,
        weights,
        jnp.mean(sizes[:h]) + jnp.sum(jnp.where(plan.in_basis, sizes[h:], 0)),
        half_variance=half_variance,
        shared=adaptive.covariance(form, gram, n, plan, shifts, weights),
        # Tests share the basis, so we halve h. See `benchmarks/choice.py`.
        freedom=h / 2,
    )


def _form(
    diagonal: Inexact[Array, " h"],
    upper: Inexact[Array, "h l"],
    lower: Inexact[Array, "l h"],
    second: Inexact[Array, "l l"],
) -> Inexact[Array, "k k"]:
    """A form on `[W, X]` from its blocks. The block on W has a diagonal only."""
    return jnp.block([[jnp.diag(diagonal), upper], [lower, second]])
