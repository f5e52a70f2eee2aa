r"""Conformance checks for trace estimators, for people who write their own.

```python
from traceax.testing import check_trace_estimator


def test_my_estimator():
    check_trace_estimator(MyEstimator())
```
"""

from .._base import TraceEstimator
from ._checks import CHECKS, Subject, failures


def check_trace_estimator(estimator: TraceEstimator, *, seed: int = 0) -> None:
    r"""Checks that an estimator keeps what [`traceax.TraceEstimator`][] promises.

    What is checked, on dense operators of order 18:

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

    Estimators whose `init` refuses untagged operators are given semidefinite ones
    throughout. Works in both 64-bit modes; takes up to a minute, nearly all of it to
    compile.

    **Arguments:**

    - `estimator`: the estimator to check.
    - `seed`: of all keys and matrices. The checks are deterministic given a seed.

    **Raises:**

    - `AssertionError` that lists every failed check.
    """
    if not isinstance(estimator, TraceEstimator):
        raise TypeError(
            "traceax.testing.check_trace_estimator: estimator must be a "
            f"traceax.TraceEstimator, got {estimator!r}; pass an instance."
        )
    subject = Subject(estimator, seed)
    found = [line for name in CHECKS for line in failures(subject, name)]
    if found:
        raise AssertionError(
            f"{type(estimator).__name__} fails {len(found)} of traceax's checks:\n"
            + "\n".join(f"- {line}" for line in found)
        )
