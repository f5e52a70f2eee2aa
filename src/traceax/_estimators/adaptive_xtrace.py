"""A budget of which half decides whether the other half is a basis or more tests."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from .._error_bar import ErrorBar, weighted_bar
from .._linalg import adaptive, dense
from .._linalg.dense import squares
from .._operators.space import apply_block
from .._rule import Blocks, Evidence
from .._samplers import RademacherSampler, Sampler, check_sampler
from .._trace_estimator import TraceEstimator, average

# With fewer products there are too few tests to choose by.
_LEAST_PRODUCTS = 8


class AdaptiveXTraceEstimator(TraceEstimator):
    r"""Hutchinson's estimator or nearly XTrace, as half of its products advise.

    The first half of the products is with h = k/2 probes `w_i`. They are tests, and the
    products of all but the last span a basis. Either the second half is with the basis and
    a fresh probe or two, or with fresh probes alone. Test i sees what the basis leaves
    without its own product,

        t_i = tr(P_i A) + g_i^* A g_i - c_i (|g_i|^2 - n + rank P_i),   g_i = (I - P_i) w_i

    and the value is a weighted mean. Whether a test uses the basis is chosen by all others.

    *Use when* nothing is known of the operator: the error is about that of the better one of
    Hutchinson's estimator and XTrace. A multiple of the identity is exact.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used; k < 8 is Hutchinson's estimator |
    | beyond the products | O(n k^2) time and four n x k/2 blocks; O(k^3) for the rest; the derivative holds eight |
    | bias | none: no test has a say in what it is tested on |
    | standard error | that of independent samples, and the covariance of those in the basis |
    | derivative | `<Z, dA V>`, k products with dA; unbiased for any dA |

    `stats["basis"]` is the size of the basis, 0 if there is none. Budgets are fixed: an
    estimate can't go on from an earlier one, nor to a tolerance.

    **Arguments:** `sampler`: of the probes, independent ones.

    **Reference:** that of [`traceax.XTraceEstimator`][], for leaving one out. The choice by
    the other tests, and the shift, are not in the literature as far as we know.
    """

    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        check_sampler(self.sampler, type(self).__name__, independent=True)

    def compute(self, state, k):
        if k < _LEAST_PRODUCTS:
            return average(state, k, self.sampler, resphere=False)
        operator, space = state.operator, state.space
        n, h = space.size, k // 2
        probes = self.sampler._draw_range(state.key, 0, k, k, space)
        W, fresh = probes[:, :h], probes[:, h:]
        AW = apply_block(operator, W)
        unit = dense.power_of_two_scale(AW).astype(AW.dtype)
        Q, R = dense.orthonormalise(AW / unit)
        C, duals = dense.inner(Q, W), adaptive.dual_basis(R)
        uses_basis, energies = adaptive.choose_basis(duals, R, C, n, k)
        plan = adaptive.plan_tests(duals, uses_basis, k - h)
        # X has a column more than Q if k is odd. Masks leave out all but the basis.
        odd = ((0, k - 2 * h), (0, 0))
        X = jnp.where(plan.in_basis[:, None], jnp.pad(Q.T, odd), fresh.T).T
        AX = apply_block(operator, X) / unit
        tested, XAX = dense.column_dots(C, R), dense.inner(X, AX)
        form = _form(tested, dense.inner(W, AX), jnp.pad(R, odd), XAX)
        lengths, WX = dense.column_dots(W, W), dense.inner(W, X)
        gram = _form(lengths, WX, WX.conj().T, dense.inner(X, X))
        samples, transpose, shifts = jax.vjp(
            lambda form: adaptive.samples_of(form, gram, n, plan), form, has_aux=True
        )
        bar = _bar((samples, shifts), form, gram, n, plan, jnp.mean(energies))
        # The plan being fixed, the value is linear in the form. Its coefficients K, with
        # `value = sum_ab K_ab v_a^* A v_b`, have `E[V K^T V^*] = I`.
        (K,) = transpose(adaptive.weights_of(plan).astype(form.dtype))
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "basis": jnp.sum(plan.in_basis),
            "kept": (),  # marks a state that was used
        }
        V = dense.side_by_side(W, X)
        error = bar.standard_error * jnp.real(unit)
        judge = jtu.Partial(_judge_form, gram, plan, n)
        evidence = Evidence((jnp.zeros_like(K), None), judge)
        blocks = Blocks([(V, dense.combine(V, K.conj()))], evidence)
        return bar.mean * unit, error, stats, blocks


def _judge_form(
    gram: Inexact[Array, "k k"],
    plan: adaptive.Plan,
    n: int,
    products: tuple[Inexact[Array, "k k"], None],
) -> list[ErrorBar]:
    D, h = products[0], len(plan.uses_basis)
    unit = dense.power_of_two_scale(D)
    D = D / unit.astype(D.dtype)
    form = _form(jnp.diagonal(D)[:h], D[:h, h:], D[h:, :h], D[h:, h:])
    # Tests that agree by chance have no shorter bar than others.
    samples = adaptive.samples_of(form, gram, n, plan)
    bar = _bar(samples, form, gram, n, plan, jnp.mean(squares(D[:h, h:])))
    return [bar._replace(standard_error=unit * bar.standard_error)]


def _bar(found, form, gram, n: int, plan: adaptive.Plan, half_variance) -> ErrorBar:
    """The error bar of a form, by its samples and shifts."""
    (samples, shifts), h = found, len(plan.uses_basis)
    weights = adaptive.weights_of(plan)
    sizes = jnp.abs(jnp.diagonal(form))
    return weighted_bar(
        samples,
        weights,
        jnp.mean(sizes[:h]) + jnp.sum(jnp.where(plan.in_basis, sizes[h:], 0)),
        half_variance=half_variance,
        shared=adaptive.covariance(form, gram, n, plan, shifts, weights),
        # Tests share the basis: coverage in `benchmarks/choice.py`.
        freedom=h / 2,
    )


def _form(
    diagonal: Inexact[Array, " h"],
    upper: Inexact[Array, "h l"],
    lower: Inexact[Array, "l h"],
    second: Inexact[Array, "l l"],
) -> Inexact[Array, "k k"]:
    """A form on `[W, X]` by its blocks, of that on W the diagonal only."""
    return jnp.block([[jnp.diag(diagonal), upper], [lower, second]])
