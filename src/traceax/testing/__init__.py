r"""Conformance checks for trace estimators, for people who write their own.

```python
from traceax.testing import check_trace_estimator


def test_my_estimator():
    check_trace_estimator(MyEstimator())
```
"""

from .._base import TraceEstimator
from ._checks import CHECKS, failures
from ._subject import Subject


def check_trace_estimator(estimator: TraceEstimator, *, seed: int = 0) -> None:
    r"""Checks that an estimator keeps what [`traceax.TraceEstimator`][] promises.

    What is checked, on dense operators of order 18:

    | check | what must hold |
    |---|---|
    | configuration | equal estimators are equal and hash alike, so that they compile once |
    | unbiasedness | the mean over 2,000 keys is the trace: real, and complex with its imaginary part |
    | error bar | the standard error is 0.75 to 1.6 times the RMS error |
    | interval | 95 % intervals hold the truth in 91 % of runs, and aren't 6 times too wide |
    | one product | its standard error is not 0, unless the answer is exact |
    | transforms | `jit`, `vmap` over keys and operators, `scan` and `eval_shape` agree with the eager call |
    | derivative | forward and reverse mode agree; first and second derivatives are unbiased, over 2,000 keys |
    | scale | `c A` gives `c` times the value and error of `A`, for `c` from `2^-60` to `2^60` |
    | shift | `A + c I` adds `c n` to the mean |
    | permutation | `P^* A P` has the mean of `A` |
    | PyTree | the same matrix over a PyTree gives the same number |
    | prefix | a larger budget extends the sampler's sequence of probes, if it has a `sampler` |
    | budget | operators that count are applied `num_matvecs` times: at most k, and all but two |
    | dtype | the value has the operator's dtype (real for semidefinite operators), the standard error the real one |
    | exact | `k >= n` gives the trace, with standard error 0 |
    | edge | zero, rank-one and 1 x 1 operators give finite, right answers |
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
