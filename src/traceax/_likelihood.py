"""The likelihood of a Gaussian process: a log-determinant, a solve and a quadratic form."""

import equinox as eqx
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, Key

from ._arguments import check_real_scalar
from ._estimate import Estimate, raise_failure
from ._problem import Given, Problem, solve
from ._spectral.estimate import Options
from ._spectral.krylov_aware import KrylovAwareEstimator
from ._tolerance import NO_PROGRESS_METER, ProgressMeter


class InvQuadLogdet(eqx.Module):
    """What the likelihood of a Gaussian process is made of.

    **Attributes:**

    - `logdet`: a [`traceax.Estimate`][] of `log det (K + N)`.
    - `inv_quad`: a [`traceax.Estimate`][] of `y^T (K + N)^-1 y`, in the middle of the
        bracket `stats["bracket"]`; of shape `(q,)` for q right-hand sides.
    - `solution`: `(K + N)^-1 y`, of the shape of y. Not differentiable.
    """

    logdet: Estimate
    inv_quad: Estimate
    solution: Inexact[Array, "n ..."]


def inv_quad_logdet(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    y: Inexact[Array, "n ..."],
    k: int | None = None,
    estimator: KrylovAwareEstimator | None = None,
    *,
    shift: ArrayLike,
    preconditioner: Given = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> InvQuadLogdet:
    r"""Estimates `log det (K + N)`, and `y^T (K + N)^-1 y` with the solution.

    ```python
    pivots = traceax.choose_pivots(key, kernel, 600, shift=noise)
    terms = traceax.inv_quad_logdet(key, kernel, y, shift=noise, preconditioner=pivots)
    ```

    All from one block Krylov space, which starts from y and from random probes, of the
    matrix with its noise N scaled to 1 and preconditioned. Each of the two has first
    derivatives of any kind with respect to the operator, the noise and y; exact answers have
    higher ones, too.

    | | |
    |---|---|
    | products | k, less those that don't fill a step of all probes and y; and r/n of one for r columns |
    | beyond the products | O(n k^2 + n r^2) time, O(n k + n r) memory |
    | bias | of the solution, that of conjugate gradients; half of each bracket at most |
    | standard errors | as for [`traceax.logdet`][]; of `inv_quad` from its bracket alone, as nothing about it is random |

    Exact, by one Cholesky factorisation, if `k` and `estimator` are left out, n is at most
    2,000, and entries are read, as in [`traceax.columns`][]: `n^3 / 3` operations, `2 n^3`
    more for a derivative, and memory for about five matrices. No preconditioner is made then.

    **Arguments:** those of [`traceax.logdet`][] except `trace`. `k` is optional: above 2,000
    observations the estimator chooses the depth ([`traceax.KrylovAwareEstimator`][]). And

    - `operator`: K, symmetric or Hermitian and positive semidefinite, without noise, such
        as a [`traceax.KernelLinearOperator`][]. It need not be tagged.
    - `y`: an array of shape `(n,)`, or `(n, q)` for q right-hand sides. Each takes as many
        products as a probe. Of what is missing see `RESULTS.y_not_finite`.
    - `estimator`: a [`traceax.KrylovAwareEstimator`][].
    - `shift`: N, the noise: a positive number, an array of one for each of the n
        observations, or a PyTree in the structure of the operator.
    - `preconditioner`: how many columns of K a preconditioner is made of, at most; or
        which, from [`traceax.choose_pivots`][], as along a fit; or one of your own, a
        [`traceax.Preconditioner`][], beside which the noise may be 0; none by default.
    - `rtol`, `atol`: of the Gaussian log likelihood that both terms make.

    **Returns:** a [`traceax.InvQuadLogdet`][]. `stats["num_columns"]` says how many columns
    take part, `stats["residual"]` the mean diagonal of what they leave of K, beside the
    noise: above 1 more columns would save products.

    **Raises:** as [`traceax.trace_function`][]; `ValueError` for a y of another length, or
    a noise that isn't positive; `TypeError` for a complex y of a real operator, whose real
    and imaginary parts are two right-hand sides.

    **Reference:** Gardner, Pleiss, Bindel, Weinberger and Wilson, "GPyTorch", NeurIPS
    (2018), arXiv:1809.11165, for both terms from the same products; Chen, Epperly, Tropp and
    Webber, arXiv:2207.06503, for the columns; Zimmerling, Druskin and Simoncini,
    doi:10.1007/s10915-025-02799-z, for the brackets.
    """
    where = "traceax.inv_quad_logdet"
    options = Options(rtol, atol, level, progress_meter, throw)
    given = key, operator, y, k, estimator, shift, preconditioner, options
    logdet, inv_quad, solution = solve(where, Problem.terms, *given)
    if throw:
        # One warning for both.
        logdet, inv_quad = raise_failure(logdet), raise_failure(inv_quad, warn=False)
    return InvQuadLogdet(logdet, inv_quad, solution)


def gaussian_log_likelihood(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    y: Inexact[Array, "n ..."],
    k: int | None = None,
    estimator: KrylovAwareEstimator | None = None,
    *,
    shift: ArrayLike,
    preconditioner: Given = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates the log density of y under a normal distribution of covariance `K + N`.

        -1/2 y^T (K + N)^-1 y - 1/2 log det (K + N) - n/2 log(2 pi)

    ```python
    def loss(parameters):
        kernel = traceax.KernelLinearOperator(Kernel(parameters), x)
        return -traceax.gaussian_log_likelihood(
            key, kernel, y, shift=parameters.noise, preconditioner=pivots
        ).value
    ```

    The marginal likelihood of a Gaussian process of mean 0, differentiable in the
    parameters of the kernel, the noise, x and y.

    **Arguments:** those of [`traceax.inv_quad_logdet`][]. The log densities of the columns
    of y are summed.

    **Returns:** a [`traceax.Estimate`][]. `stats["solution"]` is `(K + N)^-1 y`, from which
    predictions are made; `stats["bracket"]` the pair of ends between which the value would
    be but for the error of probes, as far as K is positive semidefinite. Both have the
    derivative of the value: minus the lower one is a loss that can't be exploited where the
    bracket is long. `stats["num_matvecs"]` and `stats["num_columns"]` say what was taken.

    **Raises:** as [`traceax.inv_quad_logdet`][].
    """
    where = "traceax.gaussian_log_likelihood"
    options = Options(rtol, atol, level, progress_meter, throw)
    given = key, operator, y, k, estimator, shift, preconditioner, options
    estimate = solve(where, Problem.likelihood, *given)
    return raise_failure(estimate) if throw else estimate


def preconditioned_logdet(
    where: str,
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None,
    estimator: object,
    shift: ArrayLike,
    preconditioner: Given,
    options: Options,
) -> Estimate:
    """`traceax.logdet` with columns, or with a noise for every observation."""
    if options.trace is not None:
        hint = "it is the trace of the operator without its shift"
        check_real_scalar(options.trace, "trace", where, hint)
    given = key, operator, None, k, estimator, shift, preconditioner, options
    estimate = solve(where, Problem.logdet, *given)
    return raise_failure(estimate) if options.throw else estimate
