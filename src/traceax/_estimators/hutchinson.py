"""The Girard-Hutchinson estimator."""

from .._base import TraceEstimator, init_state
from .._operator import apply_block, space_of
from .._orthogonal import column_dots, column_norms
from .._samplers import RademacherSampler, Sampler, check_resphere
from .._standard_error import independent_samples


class HutchinsonEstimator(TraceEstimator):
    r"""The Girard-Hutchinson estimator, the mean of `w_j^* A w_j` over k probes.

    *Use when* the budget is a handful of products, as in a Jacobian trace inside a
    training loop, or when the spectrum is flat. Its error falls as `1 / sqrt(k)`
    whatever the spectrum: with more than about ten products the other estimators are
    better wherever the spectrum decays.

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used |
    | beyond the products | O(n k) time, two n x k blocks |
    | bias | none |
    | variance | real symmetric A, signs: `2 (|A|_F^2 - sum_i A_ii^2) / k` |
    | derivative | the exact gradient of the estimate, k products with dA |

    **Arguments:**

    - `sampler`: of the probes; [`traceax.RademacherSampler`][] by default.

    **Reference:** Girard, "A fast 'Monte-Carlo cross-validation' procedure for large
    least squares problems with noisy data", Numer. Math. 56 (1989),
    doi:10.1007/BF01395775; Hutchinson, "A stochastic estimator of the trace of the
    influence matrix for Laplacian smoothing splines", Commun. Stat. Simul. Comput. 18
    (1989), doi:10.1080/03610918908812806.
    """

    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        check_resphere(False, self.sampler, type(self).__name__)

    def init(self, key, operator):
        return init_state(key, operator, "HutchinsonEstimator.init")

    def compute(self, state, k):
        space = space_of(state.operator)
        Omega = self.sampler.sample(state.key, space.size, k, space.compute_dtype)
        Y = apply_block(state.operator, Omega)
        value, standard_error = independent_samples(
            column_dots(Omega, Y), column_norms(Y)
        )
        stats = {"num_matvecs": k, "degrees_of_freedom": k - 1}
        return value, standard_error, stats, (Omega, Omega / k)
