r"""Conformance checks for trace estimators, for people who write their own.

```python
from traceax.testing import check_trace_estimator


def test_my_estimator():
    check_trace_estimator(MyEstimator())
```
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._base import TraceEstimator
from ._calls import (
    CHECKS,
    NUM_KEYS,
    K,
    N,
    Subject,
    roundings,
    trace_of,
    unit_roundoff,
)

# A right estimator is further off by chance once in 1e5 checks.
_Z = 4.5


def _z_score(samples: np.ndarray, truth: Any) -> float:
    """How many standard errors the mean is off, the worse of re and im."""
    if np.iscomplexobj(samples) or np.iscomplexobj(truth):
        truth = complex(truth)
        return max(
            _z_score(np.real(samples), truth.real),
            _z_score(np.imag(samples), truth.imag),
        )
    samples, truth = samples.astype(np.float64), float(truth)
    error = np.std(samples, ddof=1) / math.sqrt(len(samples))
    rounding = (
        100 * unit_roundoff(jnp.zeros(())) * max(np.max(np.abs(samples)), abs(truth))
    )
    z = abs(np.mean(samples) - truth) / (error + rounding + 1e-300)
    return float(z) if np.isfinite(z) else math.inf


def _check_unbiasedness(subject: Subject) -> Iterator[str]:
    for complex in (False, True):
        matrix = subject.matrix(complex=complex)
        values, truth = subject.values(matrix), trace_of(matrix)
        z = _z_score(values, truth.real if subject.tags else truth)
        if z > _Z:
            kind = "complex" if complex else "real"
            yield (
                f"on a {kind} operator the mean of {NUM_KEYS} estimates is "
                f"{np.mean(values):.6g} for a trace of {truth:.6g}: {z:.1f} standard "
                f"errors off, of at most {_Z}"
            )


def _check_error_bar(subject: Subject) -> Iterator[str]:
    yield from _error_bar(subject, subject.matrix(), K)
    yield from _error_bar(subject, subject.matrix(), N - 3)
    yield from _error_bar(subject, subject.matrix(complex=True), K)


def _error_bar(subject: Subject, matrix: Array, k: int) -> Iterator[str]:
    def one(key):
        estimate = subject.run(matrix, k, key)
        low, high = estimate.confidence_interval()
        freedom = estimate.stats["degrees_of_freedom"]
        return estimate.value, estimate.standard_error, low, high, freedom

    value, error, low, high, freedom = subject.over_keys(one)
    where = f"with k = {k} on a {matrix.dtype} operator"
    truth = trace_of(matrix)
    off = np.abs(value - truth).astype(np.float64)
    rms = math.sqrt(np.mean(off**2))
    if rms < 1e3 * unit_roundoff(value) * abs(truth):
        if not np.mean(error) >= rms / 3:
            yield f"standard error {np.mean(error):.2g} at a rounding error of {rms:.2g}"
        return
    ratio = np.mean(error) / rms
    if not 0.75 <= ratio <= 1.6:
        yield (
            f"{where} the mean standard error is {ratio:.2f} times the root mean square "
            "error; it must be 0.75 to 1.6 times"
        )
    inside = (low.real <= truth.real) & (truth.real <= high.real)
    coverage = 100 * np.mean(inside)
    # Without degrees of freedom an interval is normal, and too short for few samples.
    least = 91 if np.all(np.isfinite(freedom)) else 85
    if coverage < least:
        yield f"{where} the 95 % interval holds the truth in {coverage:.1f} % of runs"
    wide = np.mean(high.real - low.real) / 2 / np.quantile(off, 0.95)
    if wide > 6:
        yield f"{where} the 95 % interval is {wide:.1f} times as wide as need be"


def _check_derivative(subject: Subject) -> Iterator[str]:
    base = subject.matrix()
    square = base @ base.conj().T
    direction = jnp.eye(N) + (0.1 * square if subject.tags else _skewed(base))

    def value(t, key):
        return subject.run(base + t * direction + t**2 * square, key=key).value

    t = jnp.asarray(0.1, base.dtype)
    exact = {
        "first": np.trace(direction + 2 * t * square),
        "second": np.trace(2 * square),
    }

    def derivatives(key):
        first = jax.grad(value)(t, key)
        forward = jax.jvp(lambda t: value(t, key), (t,), (jnp.ones_like(t),))[1]
        second = jax.grad(jax.grad(value))(t, key)
        return first, forward, second

    first, forward, second = subject.over_keys(derivatives)
    off = roundings(first, forward)
    if not off < 1e4:
        yield f"forward and reverse mode differ by {off:.1e} roundings"
    yield from _derivative("first", first, exact["first"])
    yield from _derivative("second", second, exact["second"])

    base = subject.matrix(complex=True)
    direction = 0.1 * base @ base.conj().T if subject.tags else _skewed(base)

    def along(key):
        def value(t):
            matrix = base + t.astype(base.dtype) * direction
            return subject.run(matrix, key=key).value

        return jax.jvp(value, (t,), (jnp.ones_like(t),))[1]

    exact = np.trace(direction)
    exact = exact.real if subject.tags else exact
    yield from _derivative("complex", subject.over_keys(along), exact)


def _skewed(matrix: Array) -> Array:
    """A direction whose antisymmetric part is large and that is not conjugation's."""
    return jnp.eye(N, dtype=matrix.dtype) * matrix[0, 0] + jnp.triu(matrix, 1)


def _derivative(name: str, samples: np.ndarray, exact: Any) -> Iterator[str]:
    z = _z_score(samples, exact)
    if z > _Z:
        yield (
            f"the mean of {NUM_KEYS} {name} derivatives is {np.mean(samples):.6g}, "
            f"that of the trace {exact:.6g}: {z:.1f} standard errors off"
        )


def _check_shift(subject: Subject) -> Iterator[str]:
    matrix = subject.matrix() + 2.5 * jnp.eye(N)
    z = _z_score(subject.values(matrix), trace_of(matrix))
    if z > _Z:
        yield f"A + c I has a mean {z:.1f} standard errors off tr A + c n"


def _check_permutation(subject: Subject) -> Iterator[str]:
    matrix = subject.matrix()
    order = np.random.default_rng(subject.seed).permutation(N)
    z = _z_score(subject.values(matrix[order][:, order]), trace_of(matrix))
    if z > _Z:
        yield f"a permuted operator has a mean {z:.1f} standard errors off"


STATISTICAL_CHECKS: list[Callable[[Subject], Iterator[str]]] = [
    _check_unbiasedness,
    _check_error_bar,
    _check_derivative,
    _check_shift,
    _check_permutation,
]


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
    failures = []
    for check in STATISTICAL_CHECKS + CHECKS:
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        try:
            failures += [f"{name}: {message}" for message in check(subject)]
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            failures.append(f"{name}: raised {type(error).__name__}: {lines[0]}")
    if failures:
        raise AssertionError(
            f"{type(estimator).__name__} fails {len(failures)} of traceax's checks:\n"
            + "\n".join(f"- {failure}" for failure in failures)
        )
