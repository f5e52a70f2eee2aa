"""Conformance checks for estimators, preconditioners and operators of your own."""

from .._arguments import require
from .._trace_estimator import TraceEstimator
from ._checks import CHECKS, Subject, failures
from ._parts import check_entries as check_entries
from ._parts import check_operator as check_operator
from ._parts import check_preconditioner as check_preconditioner
from ._parts import report


def check_trace_estimator(estimator: TraceEstimator, *, seed: int = 0) -> None:
    r"""Checks what [`traceax.TraceEstimator`][] promises, on dense operators of order 18.

    | check | what must hold |
    |---|---|
    | unbiased | the mean over 2,000 keys is the trace: real, and complex with its imaginary part |
    | derivative | forward and reverse mode agree; first and second derivatives are unbiased, over 2,000 keys |
    | bar | the standard error is 0.75 to 1.6 times the RMS error, and not 0 from one product |
    | | 95 % intervals hold the truth in 91 % of runs, and aren't 6 times too wide |
    | | `c A` has c times the error bar of A, for c of `2^-60` and `2^60` |
    | budget | operators that count are applied `num_matvecs` times: at most k, and all but two |
    | transforms | `jit`, `vmap` over keys and operators, `scan` and PyTrees agree with the eager call |
    | exact | `k >= n` gives the trace, with the error of rounding |
    | | operators that are zero, of rank one or 1 x 1 give finite, right answers |
    | failure | NaN in the operator gives a `result` that isn't successful, in its own lane only |

    Estimators whose `init` refuses untagged operators are given semidefinite ones. Takes up
    to a minute, nearly all of it to compile, in both 64-bit modes.

    **Arguments:**

    - `estimator`: the estimator to check.
    - `seed`: of all keys and matrices, which decides all.

    **Raises:** `AssertionError` that lists every failed check.
    """
    where, what = (
        "traceax.testing.check_trace_estimator",
        "must be a traceax.TraceEstimator",
    )
    right, hint = isinstance(estimator, TraceEstimator), "pass an instance"
    require(right, where, f"estimator {what}", estimator, hint, TypeError)
    subject = Subject(estimator, seed)
    report(estimator, [line for name in CHECKS for line in failures(subject, name)])
