"""Checks for estimators. Each yields pairs: whether it fails, and a message."""

import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Key

from .._estimate import Estimate
from .._results import RESULTS
from .._trace_estimator import TraceEstimator

N, K, NUM_KEYS = 18, 9, 2000
_Z = 4.5  # by chance, a right estimator is further off once in 1e5 checks

Verdicts = Iterator[tuple[Any, str]]


class Subject:
    def __init__(self, estimator: TraceEstimator, seed: int):
        self.estimator, self.seed = estimator, seed
        self.key = jr.key(seed)
        self.samples = ft.cache(self._samples)
        try:
            estimator.init(self.key, lx.MatrixLinearOperator(jnp.eye(3)))
            self.tags: Any = ()
        except ValueError:
            self.tags = lx.positive_semidefinite_tag

    def matrix(self, complex: bool = False) -> Inexact[Array, "n n"]:
        """A matrix with small variance, to detect a 2 % bias. Nonsymmetric if allowed."""
        rng = np.random.default_rng(self.seed)
        a = rng.normal(size=(N, N)) / math.sqrt(N)
        if complex:
            a = (a + 1j * rng.normal(size=(N, N)) / math.sqrt(N)) / math.sqrt(2)
        if self.tags:
            a = a @ a.conj().T
        elif complex:
            a = a + 1j * np.eye(N)
        return jnp.asarray(a + np.eye(N))

    def trace(self, matrix: Array) -> Any:
        truth = np.trace(np.asarray(matrix))
        return truth.real if self.tags else truth

    def run(self, x: Any, k: int = K, key: Key[Array, ""] | None = None) -> Estimate:
        is_operator = isinstance(x, lx.AbstractLinearOperator)
        x = x if is_operator else lx.MatrixLinearOperator(x, self.tags)
        state = self.estimator.init(self.key if key is None else key, x)
        return self.estimator.estimate(state, k, throw=False)

    def over_keys(self, function: Callable[..., Any], *args: Any) -> Any:
        keys = jr.split(jr.fold_in(self.key, 1), NUM_KEYS)
        batched = jax.jit(jax.vmap(function, (0, *(None for _ in args))))
        return jax.tree.map(np.asarray, batched(keys, *args))

    def _samples(self, complex: bool, k: int) -> tuple[np.ndarray, ...]:
        def run(key, matrix):
            estimate = self.run(matrix, k, key)
            low, high = estimate.confidence_interval()
            freedom = estimate.stats["degrees_of_freedom"]
            return estimate.value, estimate.standard_error, low.real, high.real, freedom

        return self.over_keys(run, self.matrix(complex))


def _rounding(x: object) -> float:
    return float(jnp.finfo(jnp.asarray(x).dtype).eps)


def _apart(x: object, y: object) -> bool:
    """Whether numbers differ by more than 1e4 times one operation's rounding error."""
    x, y = np.asarray(x), np.asarray(y)
    return not np.max(np.abs(x - y)) <= 1e4 * _rounding(x) * np.max(np.abs(y))


def _mean(name: str, samples: np.ndarray, truth: Any) -> tuple[bool, str]:
    """Whether the mean is off, in its real or imaginary part."""
    off = np.asarray(samples - truth, np.complex128)
    small = 100 * _rounding(jnp.zeros(())) * max(np.max(np.abs(samples)), abs(truth))
    parts = np.stack([off.real, off.imag])
    error = np.std(parts, axis=1, ddof=1) / math.sqrt(NUM_KEYS) + small + 1e-300
    z = np.max(np.abs(np.mean(parts, axis=1)) / error)
    mean = f"the mean of {NUM_KEYS} {name} is {np.mean(samples):.6g} for {truth:.6g}"
    return not z <= _Z, f"{mean}: {z:.1f} standard errors off, at most {_Z} allowed"


def _unbiased(subject: Subject) -> Verdicts:
    for complex in (False, True):
        matrix = subject.matrix(complex)
        name = f"estimates for a {matrix.dtype} operator"
        yield _mean(name, subject.samples(complex, K)[0], subject.trace(matrix))


def _derivative(subject: Subject) -> Verdicts:
    t = jnp.asarray(0.1, subject.matrix().dtype)

    def value(t, key, base, direction, square):
        s = t.astype(base.dtype)
        return subject.run(base + s * direction + s**2 * square, key=key).value

    def forward(key, *path):
        return jax.jvp(lambda t: value(t, key, *path), (t,), (jnp.ones_like(t),))[1]

    def derivatives(*args):
        first, second = jax.grad(value), jax.grad(jax.grad(value))
        return first(t, *args), forward(*args), second(t, *args)

    def direction(base):
        if subject.tags:
            return 0.1 * base @ base.conj().T
        # We make the antisymmetric part large, and conjugation change the direction.
        return jnp.eye(N, dtype=base.dtype) * base[0, 0] + jnp.triu(base, 1)

    base = subject.matrix()
    path = base, direction(base), base @ base.T
    first, tangent, second = subject.over_keys(derivatives, *path)
    yield _apart(first, tangent), "forward and reverse mode differ"
    yield _mean("first derivatives", first, np.trace(path[1] + 2 * t * path[2]))
    yield _mean("second derivatives", second, np.trace(2 * path[2]))
    base = subject.matrix(complex=True)
    path = base, direction(base), jnp.zeros_like(base)
    tangent = subject.over_keys(forward, *path)
    yield _mean("complex derivatives", tangent, subject.trace(path[1]))


def _bar(subject: Subject) -> Verdicts:
    for complex, k in ((False, K), (False, N - 3), (True, K)):
        value, error, low, high, freedom = subject.samples(complex, k)
        truth = subject.trace(subject.matrix(complex))
        where = f"with k = {k} on a {value.dtype} operator"
        off = np.abs(value - truth).astype(np.float64)
        small = 1e3 * _rounding(value) * abs(truth)
        rms, mean = math.sqrt(np.mean(off**2)), np.mean(error)
        wrong = f"{where} the mean standard error is {mean:.3g}; it must be 0.75 to 1.6"
        wrong += f" times the root mean square error, {rms:.3g}"
        yield not 0.75 * rms - small <= mean <= 1.6 * rms + small, wrong
        covered = np.mean((low - small <= truth.real) & (truth.real <= high + small))
        # We ask less without degrees of freedom, since normal intervals are too short.
        least = 0.91 if np.all(np.isfinite(freedom)) else 0.85
        yield covered < least, f"{where} 95 % intervals have {covered:.1%} coverage"
        wide = np.mean(high - low) / 2 / (np.quantile(off, 0.95) + small)
        yield wide > 6, f"{where} the 95 % interval is {wide:.1f} times too wide"
    matrix = subject.matrix()
    for power in (-60, 60):
        error = subject.run(matrix * 2.0**power).standard_error / 2.0**power
        wrong = f"2^{power} A has the error bar 2^{power} {error}, squared too early"
        yield _apart(error, subject.run(matrix).standard_error), wrong
    low, high = subject.run(matrix, 1).confidence_interval()
    wrong = f"the interval from one product is [{low}, {high}]; the error bar must be"
    yield not low < high, f"{wrong} NaN, because it is unknown"


def _budget(subject: Subject) -> Verdicts:
    matrix, products = subject.matrix(), []

    def product(matrix, _, x):
        # We count every vector in a block, used or not.
        jax.debug.callback(lambda _: products.append(None), x)
        return matrix @ x

    def mv(x):
        # We give the function a transpose, which JAX allows in no other way.
        solve, transposed = (ft.partial(product, a) for a in (matrix, matrix.T))
        return jax.lax.custom_linear_solve(lambda x: x, x, solve, transposed)

    structure = jax.eval_shape(lambda: matrix[0])
    operator = lx.FunctionLinearOperator(mv, structure, subject.tags)
    for k in (1, 5, N - 1, N + 5):
        products.clear()
        reported = int(subject.run(operator, k).stats["num_matvecs"])
        jax.effects_barrier()
        took = f"k = {k} took {len(products)} products"
        least = min(k, N) - 2
        yield not least <= len(products) <= k, f"{took}; it may leave at most two out"
        yield reported != len(products), f"{took}, and reports num_matvecs = {reported}"


def _transforms(subject: Subject) -> Verdicts:
    def value(matrix, key):
        return subject.run(matrix, key=key).value

    def halves(x):
        return {"a": x[:5], "b": x[5:]}

    def mv(x):
        return halves(A @ jnp.concatenate([x["a"], x["b"]]))

    over_operators = jax.jit(jax.vmap(value, (0, None)))
    A, keys = subject.matrix(), jr.split(subject.key, 3)
    eager = np.array([value(A, key) for key in keys])
    twice = np.array([eager[0], value(2 * A, keys[0])])
    structure = jax.eval_shape(halves, A[0])
    tree = lx.FunctionLinearOperator(mv, structure, subject.tags)
    for name, result, want in (
        ("jit", jax.jit(value)(A, keys[0]), eager[0]),
        ("vmap over keys", jax.vmap(value, (None, 0))(A, keys), eager),
        ("vmap over operators", over_operators(jnp.stack([A, 2 * A]), keys[0]), twice),
        ("scan", jax.lax.map(lambda key: value(A, key), keys), eager),
        ("a PyTree", value(tree, keys[0]), eager[0]),
    ):
        yield _apart(result, want), f"{name} gives {result}, the eager call {want}"


def _exact(subject: Subject) -> Verdicts:
    ones = jnp.full((N, N), 0.5)
    edges = {"0": 0 * ones, "a rank-one": ones, "a 1 x 1": ones[:1, :1]}
    cases = [("an", subject.matrix(), k) for k in (N, N + 3)]
    cases += [(name, edge, k) for name, edge in edges.items() for k in (1, 2, K)]
    for name, matrix, k in cases:
        estimate, truth = subject.run(matrix, k), np.trace(matrix)
        whole = k >= len(matrix)
        value, error = estimate.value.real, float(estimate.standard_error)
        small = 1e3 * _rounding(value) * (1 + abs(truth))
        # We check the value if it claims certainty: few sign probes may agree by chance.
        certain = whole or truth == 0 or error == 0
        off = not math.isfinite(value) or (certain and abs(value - truth) > small)
        wrong = f"{name} operator with k = {k} gives {value} +- {error} for {truth}"
        unknown = k > 3 and not math.isfinite(error)
        yield off or unknown or (whole and error > small), wrong


def _failure(subject: Subject) -> Verdicts:
    good = subject.matrix()
    stack = jnp.stack([good, good.at[0, 1].set(jnp.nan), good])
    estimates = jax.vmap(subject.run)(stack)
    failed = np.asarray(estimates.result != RESULTS.successful)
    yield not failed[1], "NaN in the operator is not reported in `result`"
    changed = failed[::2].any() or _apart(estimates.value[::2], subject.run(good).value)
    yield changed, "a failing batch element changes the others, or makes them fail"


_ALL = (_unbiased, _derivative, _bar, _budget, _transforms, _exact, _failure)
CHECKS = {check.__name__[1:]: check for check in _ALL}


def failures(subject: Subject, name: str) -> list[str]:
    """Lines that describe a check's failures, or the exception that it raises."""
    try:
        return [f"{name}: {line}" for wrong, line in CHECKS[name](subject) if wrong]
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return [f"{name}: raised {type(error).__name__}: {lines[0]}"]
