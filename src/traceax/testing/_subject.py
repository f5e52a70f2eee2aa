"""The estimator that is checked, the operators it gets, and how far off numbers are."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Key

from .._base import TraceEstimator
from .._estimate import Estimate

N = 18  # large enough for every budget below, small enough to be quick
K = 9
NUM_KEYS = 2000


class Subject:
    """The estimator, and operators that it accepts."""

    def __init__(self, estimator: TraceEstimator, seed: int):
        self.estimator = estimator
        self.seed = seed
        self.key = jr.key(seed)
        self.values = self.over_keys(
            lambda key, matrix: self.run(matrix, key=key).value
        )
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

    def run(self, x: Any, k: int = K, key: Key[Array, ""] | None = None) -> Estimate:
        """The estimate, of a matrix or an operator."""
        if not isinstance(x, lx.AbstractLinearOperator):
            x = lx.MatrixLinearOperator(x, self.tags)
        state = self.estimator.init(self.key if key is None else key, x)
        return self.estimator.estimate(state, k, throw=False)

    def over_keys(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a key and more, of all keys, in one program."""

        @jax.jit
        def program(keys, *args):
            return jax.vmap(lambda key: function(key, *args))(keys)

        keys = jr.split(jr.fold_in(self.key, 1), NUM_KEYS)
        return lambda *args: jax.tree.map(np.asarray, program(keys, *args))


def unit_roundoff(x: Any) -> float:
    return float(jnp.finfo(jnp.asarray(x).dtype).eps)


def roundings(x: Any, y: Any, scale: Any = None) -> float:
    """The difference in units of rounding."""
    x, y = np.asarray(x), np.asarray(y)
    scale = np.max(np.abs(y)) if scale is None else scale
    return float(np.max(np.abs(x - y)) / (unit_roundoff(x) * (scale + 1e-30)))


def z_score(samples: np.ndarray, truth: Any) -> float:
    """How many standard errors the mean is off, the worse of re and im."""
    if np.iscomplexobj(samples) or np.iscomplexobj(truth):
        parts = [(f(samples), f(complex(truth))) for f in (np.real, np.imag)]
        return max(z_score(*part) for part in parts)
    samples, truth = samples.astype(np.float64), float(truth)
    error = np.std(samples, ddof=1) / math.sqrt(len(samples))
    largest = max(np.max(np.abs(samples)), abs(truth))
    rounding = 100 * unit_roundoff(jnp.zeros(())) * largest
    z = abs(np.mean(samples) - truth) / (error + rounding + 1e-300)
    return float(z) if np.isfinite(z) else math.inf


class CountingLinearOperator(lx.AbstractLinearOperator):
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
        return CountingLinearOperator(self.matrix.T, self.on_product, self.positive)

    def in_structure(self):
        return jax.ShapeDtypeStruct((N,), self.matrix.dtype)

    def out_structure(self):
        return self.in_structure()


@lx.is_symmetric.register
@lx.is_positive_semidefinite.register
def _(operator: CountingLinearOperator) -> bool:
    return operator.positive


@lx.is_negative_semidefinite.register
def _(operator: CountingLinearOperator) -> bool:
    return False
