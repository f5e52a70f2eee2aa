"""Checks of single calls: each yields what is wrong."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact

from .._base import TraceEstimator
from .._estimate import RESULTS, Estimate

N = 18  # large enough for every budget below, small enough to be quick
K = 9
NUM_KEYS = 2000


class Subject:
    """The estimator, and matrices that it accepts."""

    def __init__(self, estimator: TraceEstimator, seed: int):
        self.estimator = estimator
        self.seed = seed
        self.key = jr.key(seed)
        try:
            estimator.init(self.key, lx.MatrixLinearOperator(jnp.eye(3)))
            self.tags: Any = ()
        except ValueError:
            self.tags = lx.positive_semidefinite_tag

    def matrix(self, *, complex: bool = False, n: int = N) -> Inexact[Array, "n n"]:
        """Of small variance: a bias of 2 % is seen. Nonsymmetric if it may be."""
        rng = np.random.default_rng(self.seed)
        a = rng.normal(size=(n, n)) / math.sqrt(n)
        if complex:
            a = (a + 1j * rng.normal(size=(n, n)) / math.sqrt(n)) / math.sqrt(2)
        if self.tags:
            a = a @ a.conj().T
        elif complex:
            a = a + 1j * np.eye(n)
        return jnp.asarray(a + np.eye(n))

    def operator(self, matrix: Array) -> lx.AbstractLinearOperator:
        return lx.MatrixLinearOperator(matrix, self.tags)

    def run(self, matrix: Array, k: int = K, key: Array | None = None) -> Estimate:
        key = self.key if key is None else key
        state = self.estimator.init(key, self.operator(matrix))
        return self.estimator.estimate(state, k, throw=False)

    def over_keys(self, function: Callable[[Array], Any]) -> Any:
        keys = jr.split(jr.fold_in(self.key, 1), NUM_KEYS)
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(function))(keys))

    def values(self, matrix: Array) -> np.ndarray:
        return self.over_keys(lambda key: self.run(matrix, key=key).value)


def unit_roundoff(x: Any) -> float:
    return float(jnp.finfo(jnp.asarray(x).dtype).eps)


def roundings(x: Any, y: Any, scale: Any = None) -> float:
    """The difference in units of rounding."""
    x, y = np.asarray(x), np.asarray(y)
    scale = np.max(np.abs(y)) if scale is None else scale
    return float(np.max(np.abs(x - y)) / (unit_roundoff(x) * (scale + 1e-30)))


def trace_of(matrix: Array) -> Any:
    return np.trace(np.asarray(matrix))


def _check_configuration(subject: Subject) -> Iterator[str]:
    leaves, structure = jax.tree.flatten(subject.estimator)
    copy = jax.tree.unflatten(structure, leaves)
    if copy != subject.estimator:
        yield "a copy is not equal to the estimator; use frozen modules, static fields"
    elif not leaves and hash(copy) != hash(subject.estimator):
        yield "a copy has another hash; use frozen modules with static fields"


def _check_one_product(subject: Subject) -> Iterator[str]:
    estimate = subject.run(subject.matrix(), 1)
    if estimate.standard_error == 0:
        yield "the standard error from one product is 0; it cannot be known: NaN"
    low, high = estimate.confidence_interval()
    if not low < high:
        yield f"the interval from one product is [{low}, {high}]"


def _check_transforms(subject: Subject) -> Iterator[str]:
    matrix = subject.matrix()
    eager = subject.run(matrix)
    scale = abs(float(trace_of(matrix).real))

    def parts(matrix, key):
        estimate = subject.run(matrix, key=key)
        return estimate.value, estimate.standard_error

    keys = jr.split(subject.key, 3)
    one_by_one = [parts(matrix, key) for key in keys]
    expected = np.array([v for v, _ in one_by_one])
    stack = jnp.stack([matrix, 2 * matrix])
    twice = np.array([parts(a, subject.key)[0] for a in stack])
    _, scanned = jax.lax.scan(lambda c, key: (c, parts(matrix, key)[0]), 0, keys)
    results = {
        "jit": (jax.jit(parts)(matrix, subject.key)[0], eager.value),
        "vmap over keys": (jax.vmap(parts, (None, 0))(matrix, keys)[0], expected),
        "jit of vmap": (
            jax.jit(jax.vmap(parts, (None, 0)))(matrix, keys)[0],
            expected,
        ),
        "vmap over operators": (
            jax.vmap(parts, (0, None))(stack, subject.key)[0],
            twice,
        ),
        "scan": (scanned, expected),
    }
    for name, (got, want) in results.items():
        off = roundings(got, want, scale)
        if not off < 1e4:
            yield f"{name} differs from the eager call by {off:.1e} roundings"
    struct = jax.eval_shape(parts, matrix, subject.key)[0]
    if (struct.shape, struct.dtype) != (eager.value.shape, eager.value.dtype):
        yield f"eval_shape says {struct} for a value of dtype {eager.value.dtype}"


def _check_scale(subject: Subject) -> Iterator[str]:
    matrix = subject.matrix()
    reference = subject.run(matrix)
    for exponent in (-60, -20, 20, 60):
        factor = 2.0**exponent
        scaled = subject.run(matrix * factor)
        off = roundings(scaled.value / factor, reference.value)
        if not off < 1e3:
            yield f"2^{exponent} A gives {off:.1e} roundings off 2^{exponent} times A's"
        error = abs(scaled.standard_error / factor - reference.standard_error)
        if not error <= 1e-3 * abs(reference.value):
            yield f"2^{exponent} A has the error bar {scaled.standard_error}"


def _check_pytree(subject: Subject) -> Iterator[str]:
    matrix = subject.matrix()
    cut = 5
    blocks = {
        "a": {"a": matrix[:cut, :cut], "b": matrix[:cut, cut:]},
        "b": {"a": matrix[cut:, :cut], "b": matrix[cut:, cut:]},
    }
    structure = {
        "a": jax.ShapeDtypeStruct((cut,), matrix.dtype),
        "b": jax.ShapeDtypeStruct((N - cut,), matrix.dtype),
    }
    operator = lx.PyTreeLinearOperator(blocks, structure, subject.tags)
    state = subject.estimator.init(subject.key, operator)
    value = subject.estimator.estimate(state, K, throw=False).value
    off = roundings(value, subject.run(matrix).value)
    if not off < 1e4:
        yield f"over a PyTree the value differs by {off:.1e} roundings"


def _check_prefix(subject: Subject) -> Iterator[str]:
    sampler = getattr(subject.estimator, "sampler", None)
    if sampler is None:
        return
    few = sampler.sample(subject.key, 40, 3, jnp.zeros(()).dtype)
    many = sampler.sample(subject.key, 40, 7, jnp.zeros(()).dtype)
    if not roundings(many[:, :3], few) < 10:
        yield "seven probes don't begin with the three of a smaller budget"


class _Counting(lx.AbstractLinearOperator):
    """Counts its products: once for every vector of a block, used or not."""

    matrix: Array
    on_product: Callable[[], None] = eqx.field(static=True)
    positive: bool = eqx.field(static=True)

    def mv(self, vector):
        jax.debug.callback(lambda _: self.on_product(), vector)
        return self.matrix @ vector

    def as_matrix(self):
        return jax.vmap(self.mv, out_axes=1)(jnp.eye(N, dtype=self.matrix.dtype))

    def transpose(self):
        return _Counting(self.matrix.T, self.on_product, self.positive)

    def in_structure(self):
        return jax.ShapeDtypeStruct((N,), self.matrix.dtype)

    def out_structure(self):
        return self.in_structure()


@lx.is_symmetric.register
@lx.is_positive_semidefinite.register
def _(operator: _Counting) -> bool:
    return operator.positive


@lx.is_negative_semidefinite.register
def _(operator: _Counting) -> bool:
    return False


def _check_budget(subject: Subject) -> Iterator[str]:
    count = 0

    def on_product():
        nonlocal count
        count += 1

    operator = _Counting(subject.matrix(), on_product, bool(subject.tags))
    for k in (1, 3, 5, 8, N - 1, N + 5):
        jax.effects_barrier()
        count = 0
        state = subject.estimator.init(subject.key, operator)
        estimate = subject.estimator.estimate(state, k, throw=False)
        jax.block_until_ready(estimate.value)
        jax.effects_barrier()
        said = int(estimate.stats["num_matvecs"])
        if count > k:
            yield f"k = {k} took {count} products"
        elif count < min(k, N) - 2:
            yield f"k = {k} took {count} products only; all but at most two must be used"
        if said != count:
            yield f"k = {k} reports num_matvecs = {said} for {count} products"


def _check_dtype(subject: Subject) -> Iterator[str]:
    widths = [jnp.float32, jnp.complex64]
    if jnp.zeros(()).dtype == jnp.float64:
        widths += [jnp.float64, jnp.complex128]
    for dtype in widths:
        complex = jnp.issubdtype(dtype, jnp.complexfloating)
        estimate = subject.run(subject.matrix(complex=complex).astype(dtype))
        real = jnp.finfo(dtype).dtype
        want = real if subject.tags else jnp.dtype(dtype)
        if estimate.value.dtype != want:
            yield f"{jnp.dtype(dtype)} operators give {estimate.value.dtype} values"
        if estimate.standard_error.dtype != real:
            yield f"{jnp.dtype(dtype)}: standard error of {estimate.standard_error.dtype}"
        if estimate.value.shape != () or estimate.standard_error.shape != ():
            yield f"value of shape {estimate.value.shape}; it must be a scalar"


def _check_exact(subject: Subject) -> Iterator[str]:
    matrix = subject.matrix()
    for k in (N, N + 3):
        estimate = subject.run(matrix, k)
        if not roundings(estimate.value, trace_of(matrix)) < 1e3:
            yield f"k = {k} gives {estimate.value} for a trace of {trace_of(matrix)}"
        if (
            not roundings(estimate.value + estimate.standard_error, estimate.value)
            < 1e3
        ):
            yield f"k = {k} has standard error {estimate.standard_error}, not of rounding"


def _check_edge(subject: Subject) -> Iterator[str]:
    ones = jnp.full((N, N), 0.5)
    cases = {"zero": jnp.zeros((N, N)), "rank-one": ones, "1 x 1": ones[:1, :1]}
    for name, matrix in cases.items():
        for k in (1, 2, K):
            estimate = subject.run(matrix, k)
            value, truth = float(estimate.value.real), float(trace_of(matrix))
            error = float(estimate.standard_error)
            if not math.isfinite(value):
                yield f"the {name} operator gives {value} for k = {k}"
            elif (name != "rank-one" or error == 0) and abs(value - truth) > 1e-5:
                yield f"the {name} operator gives {value} for {truth}, with k = {k}"
            elif k > 3 and not math.isfinite(error):
                yield f"the {name} operator has standard error {error} for k = {k}"


def _check_failure(subject: Subject) -> Iterator[str]:
    good = subject.matrix()
    stack = jnp.stack([good, good.at[0, 1].set(jnp.nan), good])
    estimates = jax.vmap(subject.run)(stack)
    failed = np.asarray(estimates.result != RESULTS.successful)
    if not failed[1]:
        yield "NaN in the operator is not reported in `result`"
    if failed[0] or failed[2]:
        yield "a failing lane of a vmap makes the others fail"
    elif not roundings(estimates.value[::2], subject.run(good).value) < 1e4:
        yield "a failing lane of a vmap changes the values of the others"


CHECKS: list[Callable[[Subject], Iterator[str]]] = [
    _check_configuration,
    _check_one_product,
    _check_transforms,
    _check_scale,
    _check_pytree,
    _check_prefix,
    _check_budget,
    _check_dtype,
    _check_exact,
    _check_edge,
    _check_failure,
]
