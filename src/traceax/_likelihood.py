"""Gaussian-process likelihoods: log-determinants, solves and quadratic forms."""

import equinox as eqx
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, Key

from ._arguments import check_real_scalar
from ._estimate import Estimate, raise_failure
from ._problem import Given, Problem, solve
from ._spectral.krylov_aware import KrylovAwareEstimator
from ._spectral_estimate import Options
from ._tolerance import NO_PROGRESS_METER, ProgressMeter


class InvQuadLogdet(eqx.Module):
    """The terms of a Gaussian-process likelihood.

    **Attributes:**

    - `logdet`: a [`traceax.Estimate`][] for `log det (K + N)`.
    - `inv_quad`: a [`traceax.Estimate`][] for `y^T (K + N)^-1 y`, the middle of the
        bracket `stats["bracket"]`. It has shape `(q,)` for q right-hand sides.
    - `solution`: `(K + N)^-1 y` in the shape of y. Its first derivative takes one more
        solve, by conjugate gradients for estimates. It is NaN if these don't converge.
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
    r"""Estimates `log det (K + N)` and `y^T (K + N)^-1 y`, and returns the solution.

    ```python
    pivots = traceax.choose_pivots(key, kernel, 600, shift=noise)
    terms = traceax.inv_quad_logdet(key, kernel, y, shift=noise, preconditioner=pivots)
    ```

    One block Krylov space gives all three. It starts from y and random probes, and uses
    the preconditioned matrix with its noise scaled to 1. Both terms have all first
    derivatives in operator, noise and y, and exact answers have higher ones.

    | | |
    |---|---|
    | products | k, rounded down to whole steps over probes and y, plus r/n of a product for r columns |
    | beyond the products | O(n k^2 + n r^2) time, O(n k + n r) memory |
    | bias | the solution is as biased as with conjugate gradients; the terms by at most half their brackets |
    | standard errors | as for [`traceax.logdet`][]; `inv_quad` isn't random, and its error comes from its bracket alone |

    As in [`traceax.logdet`][], the answer is exact if you omit `k` and `estimator`, n
    is at most 4,000, and the entries can be read; up to 6,000 for kernels and dense
    matrices, unless you pass few pivots. The Cholesky factorisation takes
    `n^3 / 3` operations, `n^3` more for a derivative, memory for about six matrices,
    and no preconditioner.

    **Arguments:** as for [`traceax.logdet`][], without `trace`. `k` is optional: above
    6,000 observations the estimator chooses the number of steps. And

    - `operator`: K without noise, symmetric or Hermitian and positive semidefinite,
        such as a [`traceax.KernelLinearOperator`][]. It needs no tag. Without noise it
        may be a precision matrix, which must be positive definite.
    - `y`: an array of shape `(n,)`, or `(n, q)` for q right-hand sides. Each right-hand
        side costs as a probe does. `RESULTS.y_not_finite` is about missing values.
    - `estimator`: a [`traceax.KrylovAwareEstimator`][].
    - `shift`: the noise variance N: a positive number, an array with one for each of
        the n observations, or a PyTree in the operator's structure. The number 0, not an
        array, stands for no noise, and takes no columns. Brackets are then not proven.
    - `preconditioner`: how many columns of K a preconditioner may use; or their indices
        from [`traceax.choose_pivots`][], for a fit; or a custom
        [`traceax.Preconditioner`][], which allows a noise of 0. From `12 sqrt(n)`
        columns on, their rows are eliminated by a Cholesky factorisation. The default
        is none if you pass k or an estimator, and else the number that pays, for
        kernels and dense matrices.
    - `rtol`, `atol`: the tolerance for the Gaussian log likelihood from both terms.

    **Returns:** a [`traceax.InvQuadLogdet`][]. `stats["num_columns"]` is the number of
    columns that take part. `stats["residual"]` is the mean residual diagonal of K after
    these columns, relative to the noise: above 1, more columns would save products.

    **Raises:** as [`traceax.trace_function`][]; `ValueError` for a y of another length,
    or noise that isn't positive; `TypeError` for a complex y with a real operator (pass
    its real and imaginary parts as two right-hand sides).

    **Reference:** Gardner, Pleiss, Bindel, Weinberger and Wilson, "GPyTorch", NeurIPS
    (2018), arXiv:1809.11165, for both terms from the same products; Chen, Epperly,
    Tropp and Webber, arXiv:2207.06503, for the columns; Zimmerling, Druskin and
    Simoncini, doi:10.1007/s10915-025-02799-z, for the brackets.
    """
    where = "traceax.inv_quad_logdet"
    options = Options(rtol, atol, level, progress_meter, throw)
    arguments = key, operator, y, k, estimator, shift, preconditioner, options
    logdet, inv_quad, solution = solve(where, Problem.terms, *arguments)
    if throw:
        # We warn once for both.
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
    r"""Estimates the log density of y under a normal distribution, covariance `K + N`.

        -1/2 y^T (K + N)^-1 y - 1/2 log det (K + N) - n/2 log(2 pi)

    For a complex K, y is circular complex normal, with the log density
    `-y^* (K + N)^-1 y - log det (K + N) - n log pi`.

    ```python
    def loss(parameters):
        kernel = traceax.KernelLinearOperator(Kernel(parameters), x)
        return -traceax.gaussian_log_likelihood(
            key, kernel, y, shift=parameters.noise, preconditioner=pivots
        ).value
    ```

    This is the log marginal likelihood of a zero-mean Gaussian process. You can
    differentiate it with respect to kernel parameters, noise, x and y.

    **Arguments:** as for [`traceax.inv_quad_logdet`][]. If y has several columns, their
    log densities are summed.

    **Returns:** a [`traceax.Estimate`][]. `stats["solution"]` is `(K + N)^-1 y`, for
    predictions. `stats["bracket"]` is the pair `(low, high)` that would contain the
    value without sampling error if K is positive semidefinite. Both ends have the
    value's derivative. If the bracket is long, minimise `-low`, which an optimiser
    can't exploit. `stats["num_matvecs"]` and `stats["num_columns"]` are the costs.

    **Raises:** as [`traceax.inv_quad_logdet`][].
    """
    where = "traceax.gaussian_log_likelihood"
    options = Options(rtol, atol, level, progress_meter, throw)
    arguments = key, operator, y, k, estimator, shift, preconditioner, options
    estimate = solve(where, Problem.likelihood, *arguments)
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
    """Estimates `traceax.logdet` with a preconditioner, or with a noise vector."""
    if options.trace is not None:
        hint = "it is the trace of the operator without its shift"
        check_real_scalar(options.trace, "trace", where, hint)
    arguments = key, operator, None, k, estimator, shift, preconditioner, options
    estimate = solve(where, Problem.logdet, *arguments)
    return raise_failure(estimate) if options.throw else estimate
