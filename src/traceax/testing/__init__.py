"""Conformance checks for custom estimators, preconditioners and operators."""

from .._arguments import require
from .._trace_estimator import TraceEstimator
from ._checks import CHECKS, Subject, failures
from ._parts import check_entries as check_entries
from ._parts import check_operator as check_operator
from ._parts import check_preconditioner as check_preconditioner
from ._parts import report


def check_trace_estimator(estimator: TraceEstimator, *, seed: int = 0) -> None:
    r"""Checks an estimator against [`traceax.TraceEstimator`][], with dense operators.

    | check | requirement, for order 18 |
    |---|---|
    | unbiased | the mean over 2,000 keys is the trace, also its imaginary part for complex operators |
    | derivative | forward and reverse mode agree; first and second derivatives are unbiased over 2,000 keys |
    | bar | the standard error is 0.75 to 1.6 times the RMS error, and not 0 from one product |
    | | 95 % intervals contain the truth in 91 % of runs, and are at most 6 times too wide |
    | | `c A` has c times the error bar for A, with `c = 2^-60` and `c = 2^60` |
    | budget | the operator counts `num_matvecs` products: at most k, and all but at most two |
    | transforms | `jit`, `vmap` over keys and operators, `scan` and PyTrees agree with the eager call |
    | exact | `k >= n` gives the trace, and the rounding error as error bar |
    | | zero, rank-one and 1 x 1 operators give finite, right answers |
    | failure | NaN in the operator gives an unsuccessful `result`, for its own batch element only |

    If `init` refuses untagged operators, the estimator gets semidefinite ones. The
    checks take up to a minute, mostly to compile, with or without 64-bit mode.

    **Arguments:**

    - `estimator`: the estimator to check.
    - `seed`: fixes all keys and matrices, and so the result.

    **Raises:** `AssertionError` that lists every failed check.
    """
    where, what = (
        "traceax.testing.check_trace_estimator",
        "must be a traceax.TraceEstimator",
    )
    is_valid, hint = isinstance(estimator, TraceEstimator), "pass an instance"
    require(is_valid, where, f"estimator {what}", estimator, hint, TypeError)
    subject = Subject(estimator, seed)
    report(estimator, [line for name in CHECKS for line in failures(subject, name)])
