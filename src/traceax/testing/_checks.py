"""The checks: each yields pairs of what is wrong, and whether it is."""

import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jaxtyping import Array

from .._estimate import RESULTS
from ._subject import (
    NUM_KEYS,
    CountingLinearOperator,
    K,
    N,
    Subject,
    roundings,
    unit_roundoff,
    z_score,
)

# A right estimator is further off by chance once in 1e5 checks.
_Z = 4.5

Verdicts = Iterator[tuple[Any, str]]


def _configuration(subject: Subject) -> Verdicts:
    leaves, structure = jax.tree.flatten(subject.estimator)
    copy = jax.tree.unflatten(structure, leaves)
    same = copy == subject.estimator
    hint = "use frozen modules, static fields"
    yield not same, f"a copy is not equal to the estimator; {hint}"
    if same and not leaves:
        yield hash(copy) != hash(subject.estimator), f"a copy has another hash; {hint}"


# Operators whose estimates must have the trace as their mean, over keys.
MEANS: dict[str, Callable[[Subject], dict[str, Array]]] = {
    "unbiasedness": lambda subject: {
        "a real operator": subject.matrix(),
        "a complex operator": subject.matrix(complex=True),
    },
    "shift": lambda subject: {"A + c I": subject.matrix() + 2.5 * jnp.eye(N)},
    "permutation": lambda subject: {
        "P^* A P": jr.permutation(
            subject.key, jr.permutation(subject.key, subject.matrix()), axis=1
        )
    },
}


def _means(operators: Callable, subject: Subject) -> Verdicts:
    for name, matrix in operators(subject).items():
        what = f"on {name} the mean of {NUM_KEYS} estimates"
        yield _mean(what, subject.values(matrix), _trace(subject, matrix))


def _trace(subject: Subject, matrix: Array) -> Any:
    truth = np.trace(np.asarray(matrix))
    return truth.real if subject.tags else truth


def _mean(what: str, samples: np.ndarray, truth: Any) -> tuple[bool, str]:
    z = z_score(samples, truth)
    off = f"{z:.1f} standard errors off, of at most {_Z}"
    return z > _Z, f"{what} is {np.mean(samples):.6g} for {truth:.6g}: {off}"


def _derivative(subject: Subject) -> Verdicts:
    t = jnp.asarray(0.1, subject.matrix().dtype)
    what = f"the mean of {NUM_KEYS} {{}} derivatives".format

    def along(key, base, direction, square):
        def value(t):
            s = t.astype(base.dtype)
            matrix = base + s * direction + s**2 * square
            return subject.run(matrix, key=key).value

        return value

    def forward(key, *path):
        return jax.jvp(along(key, *path), (t,), (jnp.ones_like(t),))[1]

    def derivatives(key, *path):
        value = along(key, *path)
        return jax.grad(value)(t), forward(key, *path), jax.grad(jax.grad(value))(t)

    base = subject.matrix()
    square = base @ base.conj().T
    direction = jnp.eye(N) + (0.1 * square if subject.tags else _skewed(base))
    path = base, direction, square
    first, tangent, second = subject.over_keys(derivatives)(*path)
    off = roundings(first, tangent)
    yield not off < 1e4, f"forward and reverse mode differ by {off:.1e} roundings"
    yield _mean(what("first"), first, np.trace(direction + 2 * t * square))
    yield _mean(what("second"), second, np.trace(2 * square))

    base = subject.matrix(complex=True)
    direction = 0.1 * base @ base.conj().T if subject.tags else _skewed(base)
    tangent = subject.over_keys(forward)(base, direction, jnp.zeros_like(base))
    yield _mean(what("complex"), tangent, _trace(subject, direction))


def _skewed(matrix: Array) -> Array:
    """A direction whose antisymmetric part is large and that is not conjugation's."""
    return jnp.eye(N, dtype=matrix.dtype) * matrix[0, 0] + jnp.triu(matrix, 1)


def _error_bar(subject: Subject) -> Verdicts:
    for complex, k in ((False, K), (False, N - 3), (True, K)):
        matrix = subject.matrix(complex=complex)
        run = subject.over_keys(ft.partial(_with_interval, subject, k))
        yield from _calibration(
            f"with k = {k} on a {matrix.dtype} operator", matrix, run
        )


def _with_interval(subject: Subject, k: int, key: Array, matrix: Array) -> tuple:
    estimate = subject.run(matrix, k, key)
    low, high = estimate.confidence_interval()
    freedom = estimate.stats["degrees_of_freedom"]
    return estimate.value, estimate.standard_error, low.real, high.real, freedom


def _calibration(where: str, matrix: Array, run: Callable) -> Verdicts:
    value, error, low, high, freedom = run(matrix)
    truth = np.trace(np.asarray(matrix))
    off = np.abs(value - truth).astype(np.float64)
    rms, error = math.sqrt(np.mean(off**2)), np.mean(error)
    if rms < 1e3 * unit_roundoff(value) * abs(truth):
        wrong = f"standard error {error:.2g} at a rounding error of {rms:.2g}"
        yield not error >= rms / 3, wrong
        return
    ratio = error / rms
    wrong = f"{where} the mean standard error is {ratio:.2f} times the root mean square"
    yield not 0.75 <= ratio <= 1.6, f"{wrong} error; it must be 0.75 to 1.6 times"
    coverage = 100 * np.mean((low <= truth.real) & (truth.real <= high))
    # Without degrees of freedom an interval is normal, and too short for few samples.
    least = 91 if np.all(np.isfinite(freedom)) else 85
    interval = f"{where} the 95 % interval"
    yield coverage < least, f"{interval} holds the truth in {coverage:.1f} % of runs"
    wide = np.mean(high - low) / 2 / np.quantile(off, 0.95)
    yield wide > 6, f"{interval} is {wide:.1f} times as wide as need be"


# Operators with the value and error of `factor A`, to so many roundings.
RELATIONS: dict[str, Callable[[Subject], list[tuple[str, Any, float, float]]]] = {
    "scale": lambda subject: [
        (f"2^{power} A", subject.matrix() * 2.0**power, 2.0**power, 1e3)
        for power in (-60, -20, 20, 60)
    ],
    "pytree": lambda subject: [("A over a PyTree", _over_a_pytree(subject), 1, 1e4)],
}


def _over_a_pytree(subject: Subject) -> lx.PyTreeLinearOperator:
    parts = {"a": slice(5), "b": slice(5, N)}
    matrix = subject.matrix()
    blocks = {i: {j: matrix[parts[i], parts[j]] for j in parts} for i in parts}
    structure = jax.eval_shape(lambda: {i: matrix[0, parts[i]] for i in parts})
    return lx.PyTreeLinearOperator(blocks, structure, subject.tags)


def _relations(related: Callable, subject: Subject) -> Verdicts:
    reference = subject.run(subject.matrix())
    for what, operator, factor, most in related(subject):
        estimate = subject.run(operator)
        off = roundings(estimate.value / factor, reference.value)
        yield not off < most, f"{what} gives a value {off:.1e} roundings off that of A"
        error = abs(estimate.standard_error / factor - reference.standard_error)
        wrong = f"{what} has the error bar {estimate.standard_error}"
        yield not error <= 1e-3 * abs(reference.value), wrong


def _transforms(subject: Subject) -> Verdicts:
    matrix = subject.matrix()
    scale = abs(float(np.trace(matrix).real))

    def value(matrix, key):
        return subject.run(matrix, key=key).value

    keys = jr.split(subject.key, 3)
    eager = value(matrix, subject.key)
    expected = np.array([value(matrix, key) for key in keys])
    stack = jnp.stack([matrix, 2 * matrix])
    twice = np.array([eager, value(2 * matrix, subject.key)])
    over_keys, over_operators = jax.vmap(value, (None, 0)), jax.vmap(value, (0, None))
    results = {
        "jit": (jax.jit(value)(matrix, subject.key), eager),
        "vmap over keys": (over_keys(matrix, keys), expected),
        "jit of vmap": (jax.jit(over_keys)(matrix, keys), expected),
        "vmap over operators": (over_operators(stack, subject.key), twice),
        "scan": (jax.lax.map(lambda key: value(matrix, key), keys), expected),
    }
    for name, (got, want) in results.items():
        off = roundings(got, want, scale)
        wrong = f"{name} differs from the eager call by {off:.1e} roundings"
        yield not off < 1e4, wrong
    struct = jax.eval_shape(value, matrix, subject.key)
    wrong = f"eval_shape says {struct} for a value of dtype {eager.dtype}"
    yield (struct.shape, struct.dtype) != (eager.shape, eager.dtype), wrong


def _prefix(subject: Subject) -> Verdicts:
    sampler = getattr(subject.estimator, "sampler", None)
    if sampler is not None:
        dtype = jnp.zeros(()).dtype
        few, many = (sampler.sample(subject.key, 40, k, dtype) for k in (3, 7))
        wrong = "seven probes don't begin with the three of a smaller budget"
        yield not roundings(many[:, :3], few) < 10, wrong


def _one_product(subject: Subject) -> Verdicts:
    estimate = subject.run(subject.matrix(), 1)
    wrong = "the standard error from one product is 0; it cannot be known: NaN"
    yield estimate.standard_error == 0, wrong
    low, high = estimate.confidence_interval()
    yield not low < high, f"the interval from one product is [{low}, {high}]"


def _budget(subject: Subject) -> Verdicts:
    products = []
    tagged, matrix = bool(subject.tags), subject.matrix()
    operator = CountingLinearOperator(matrix, lambda: products.append(None), tagged)
    for k in (1, 3, 5, 8, N - 1, N + 5):
        jax.effects_barrier()
        products.clear()
        said = int(subject.run(operator, k).stats["num_matvecs"])
        jax.effects_barrier()
        count = len(products)
        took = f"k = {k} took {count} products"
        yield count > k, took
        yield count < min(k, N) - 2, f"{took} only; all but at most two must be used"
        yield (
            said != count,
            f"k = {k} reports num_matvecs = {said} for {count} products",
        )


def _dtype(subject: Subject) -> Verdicts:
    wide = jnp.zeros(()).dtype == jnp.float64
    for dtype in ("float32", "complex64", *(("float64", "complex128") if wide else ())):
        matrix = subject.matrix(complex=dtype.startswith("complex")).astype(dtype)
        estimate = subject.run(matrix)
        value, error = estimate.value, estimate.standard_error
        real = jnp.finfo(dtype).dtype
        want = real if subject.tags else jnp.dtype(dtype)
        yield value.dtype != want, f"{dtype} operators give {value.dtype} values"
        yield error.dtype != real, f"{dtype}: standard error of {error.dtype}"
        wrong = f"value of shape {value.shape}; it must be a scalar"
        yield value.shape != () or error.shape != (), wrong


def _exact(subject: Subject) -> Verdicts:
    matrix = subject.matrix()
    truth = np.trace(np.asarray(matrix))
    for k in (N, N + 3):
        estimate = subject.run(matrix, k)
        value, error = estimate.value, estimate.standard_error
        off = roundings(value, truth)
        yield not off < 1e3, f"k = {k} gives {value} for a trace of {truth}"
        off = roundings(value + error, value)
        yield not off < 1e3, f"k = {k} has standard error {error}, not of rounding"


def _edge(subject: Subject) -> Verdicts:
    ones = jnp.full((N, N), 0.5)
    cases = {"zero": jnp.zeros((N, N)), "rank-one": ones, "1 x 1": ones[:1, :1]}
    for name, matrix in cases.items():
        for k in (1, 2, K):
            estimate = subject.run(matrix, k)
            value, truth = float(estimate.value.real), float(np.trace(matrix))
            error = float(estimate.standard_error)
            gives = f"the {name} operator gives {value} for"
            yield not math.isfinite(value), f"{gives} k = {k}"
            certain = name != "rank-one" or error == 0
            yield (
                certain and abs(value - truth) > 1e-5,
                f"{gives} {truth}, with k = {k}",
            )
            wrong = f"the {name} operator has standard error {error} for k = {k}"
            yield k > 3 and not math.isfinite(error), wrong


def _failure(subject: Subject) -> Verdicts:
    good = subject.matrix()
    stack = jnp.stack([good, good.at[0, 1].set(jnp.nan), good])
    estimates = jax.vmap(subject.run)(stack)
    failed = np.asarray(estimates.result != RESULTS.successful)
    yield not failed[1], "NaN in the operator is not reported in `result`"
    others = failed[0] or failed[2]
    yield others, "a failing lane of a vmap makes the others fail"
    off = roundings(estimates.value[::2], subject.run(good).value)
    wrong = "a failing lane of a vmap changes the values of the others"
    yield not others and not off < 1e4, wrong


CHECKS: dict[str, Callable[[Subject], Verdicts]] = {
    **{name: ft.partial(_means, operators) for name, operators in MEANS.items()},
    "error bar": _error_bar,
    "derivative": _derivative,
    "configuration": _configuration,
    "one product": _one_product,
    "transforms": _transforms,
    **{name: ft.partial(_relations, related) for name, related in RELATIONS.items()},
    "prefix": _prefix,
    "budget": _budget,
    "dtype": _dtype,
    "exact": _exact,
    "edge": _edge,
    "failure": _failure,
}


def failures(subject: Subject, name: str) -> list[str]:
    """What a check finds, as lines, and what it raises."""
    try:
        return [f"{name}: {what}" for wrong, what in CHECKS[name](subject) if wrong]
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return [f"{name}: raised {type(error).__name__}: {lines[0]}"]
