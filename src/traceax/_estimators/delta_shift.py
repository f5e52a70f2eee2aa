"""DeltaShift: the trace of an operator that changes slowly, from its changes.

| symbol | meaning |
|---|---|
| r | vectors of the basis B |
| p | probes of the past: fresh at the last estimate, used again at this one |
| f | fresh probes, of this estimate |
| g | weight of the fresh probes of the last estimate in it |
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, Int

from .._accuracy.error_bar import (
    ErrorBar,
    independent_samples,
    sum_of_independent,
)
from .._arguments import StoredKey, check_optional_integer, without_numpy
from .._base import TraceEstimator
from .._deflation import Deflated, deflate, leading_range
from .._linalg.tall import column_dots, orthonormalise, side_by_side
from .._operators.block import apply_block
from .._samplers import NormalSampler, Sampler, check_sampler
from .._state import Kept, TraceState

# Products that are enough for three probes of the past and three fresh ones.
_FEWEST = 6


class _Past(eqx.Module):
    """The last estimate, of the operator as it was.

    The estimate was `rest + weight * mean(samples)`, of fresh probes and of what doesn't
    depend on these.

    - `key`, `number`: of the fresh probes, and of estimates so far.
    - `basis`: orthonormal, of no fresh probe.
    - `samples`, `gram`, `error`: of the fresh probes, and the error of their mean.
    - `rest`: with its error.
    - `rest_variance`: of `rest`, in units of the variance of a sample.
    - `ratios`: of variances and covariances, over the changes so far (see `_mix`).
    """

    key: StoredKey
    number: Int[Array, ""]
    basis: Inexact[Array, "n r"]
    samples: Inexact[Array, " f"]
    gram: Inexact[Array, "g g"]
    error: ErrorBar
    weight: Float[Array, ""]
    rest: ErrorBar
    rest_variance: Float[Array, ""]
    ratios: Float[Array, "2"]


class DeltaShiftEstimator(TraceEstimator):
    r"""The trace of an operator that changes from estimate to estimate, from its changes.

    `refresh` the state of each estimate with the next operator:

    ```python
    estimate = estimator.estimate(estimator.init(key, operator), k)
    for key, operator in steps:
        state = estimator.refresh(estimate.state, key, operator)
        estimate = estimator.estimate(state, k)
    ```

    Half of the probes are those that were fresh at the last estimate, where the samples
    `s_j` of the operator as it was are known. What they find now, `u_j`, and what probes
    that are fresh now find, `x_j`, are mixed with the last estimate
    `rest + g mean(s_j)`:

        value = a mean(x_j) + b mean(u_j) + c (rest - (1 - g) mean(s_j)),    a + b = 1

    with the weights of least variance. Where the operator changes little the difference
    of the two samples of a probe is small, `c` is near 1, and the probes of many steps
    count; where it jumps, `c` is near 0. All samples are of what a basis leaves, on which
    the trace is exact, and which follows the operator by a step of subspace iteration at
    no cost.

    *Use when* a trace is wanted again and again along a path: the Hessian in training, a
    kernel matrix while its parameters are found. For a single operator use
    [`traceax.XTraceEstimator`][].

    | | |
    |---|---|
    | operator | any, PyTrees, complex |
    | products | k, all used; none with the operator as it was |
    | beyond the products | O(n k^2) time, six n x k blocks; a state keeps the basis |
    | bias | none where the weights are found from earlier changes; see below |
    | standard error | of independent parts, by step; NaN for k = 1 |
    | derivative | `<Z, dA V>`, about k products with dA; unbiased but for the weights |

    `stats["weight_of_past"]` is c.

    The weights are found from the changes before, by other probes. Where those of this
    change disagree, as they do where the operator jumps, or where few probes find most of
    it by chance, they bound c, and bias the value by a part of its standard error.

    Fewer than 6 products are those of independent probes, and nothing is carried over.

    **Arguments:**

    - `sampler`: of the probes, independent ones. Rotation invariant if `resphere`.
    - `resphere`: whether to divide by the length of each projected probe, which
        removes its fluctuation.
    - `basis_size`: the most vectors of the basis; 3 k / 10 by default, and never more.
        With 0, and signs, there is no linear algebra beside the products.

    **Raises:**

    - `ValueError` for `resphere=True` with a sampler that isn't rotation invariant, or
        for a sampler whose probes aren't independent.

    **Reference:** Dharangutte and Musco, "Dynamic Trace Estimation", NeurIPS 2021,
    arXiv:2110.13752, for the recursion. They apply both operators to fresh probes. Here
    the probes of the last estimate are used again: k products instead of 2 k for as many
    differences, and the operator as it was isn't needed.
    """

    sampler: Sampler = NormalSampler()
    resphere: bool = eqx.field(default=True, static=True)
    basis_size: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )

    def __check_init__(self):
        name = type(self).__name__
        check_sampler(self.sampler, name, resphere=self.resphere, independent=True)
        what = "the most vectors of the basis"
        check_optional_integer(self.basis_size, "basis_size", name, least=0, what=what)

    def start_from(self, state, fresh):
        return TraceState(fresh.key, fresh.operator, state.kept)

    def compute(self, state, k):
        if state.kept is None or k < _FEWEST:
            return self._first(state, k)
        return self._next(state, state.kept.parts, k)

    def _first(self, state, k):
        sketch_key, key = jax.random.split(state.key)
        space = state.space
        n, r = space.size, self._most_vectors(k)
        B = jnp.zeros((n, r), space.compute_dtype)
        if r:
            sketch = self._probes(sketch_key, r, space)
            B, _ = orthonormalise(apply_block(state.operator, sketch))
        Omega = self._probes(key, k - 2 * r, space)
        AB, products = _split(apply_block(state.operator, side_by_side(B, Omega)), r)
        exact = column_dots(B, AB)
        fresh = deflate(B, AB, Omega, products, resphere=self.resphere)
        gram, total = fresh.gram(n - r), jnp.sum(exact)
        bar = fresh.error_bar(n - r, exact)
        one, nothing = jnp.ones_like(bar.standard_error), jnp.zeros_like
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "weight_of_past": nothing(one),
        }
        if k >= _FEWEST:
            past = _Past(
                StoredKey(key),
                jnp.asarray(1, jnp.int32),
                leading_range(AB, fresh.G[:, :0], number=r),
                total + fresh.samples,
                gram,
                bar,
                one,
                ErrorBar(nothing(bar.mean), nothing(one), jnp.full_like(one, jnp.inf)),
                nothing(one),
                jnp.zeros(2, space.real_dtype),
            )
            stats["kept"] = Kept(0, _finite(past))
        G = fresh.G
        blocks = side_by_side(B, G), side_by_side(B, G / G.shape[1])
        return total + bar.mean, bar.standard_error, stats, blocks

    def _next(self, state, past: _Past, k: int):
        r = min(self._most_vectors(k), past.basis.shape[1])
        p = min((k - r) // 2, past.samples.shape[0])
        f = k - r - p
        # Not the key of the state: an estimate may be asked for again.
        key = jax.random.fold_in(state.key, past.number)
        B = past.basis[:, :r]
        space = state.space
        Omega = side_by_side(
            B,
            self._probes(past.key.typed, p, space),
            self._probes(key, f, space),
        )
        products = apply_block(state.operator, Omega)
        (AB, of_probes), (_, probes) = _split(products, r), _split(Omega, r)
        deflated = deflate(B, AB, probes, of_probes, resphere=self.resphere)
        parts = [_split(block, p) for block in deflated]
        again, fresh = (Deflated(*part) for part in zip(*parts, strict=True))
        exact = jnp.sum(column_dots(B, AB))
        u, s, x = exact + again.samples, past.samples[:p], exact + fresh.samples

        past = _reduced(past, p)
        g = past.weight
        outside = space.size - r
        gram, fresh_gram = (part.gram(outside) for part in (again, fresh))
        mix = _mix(gram, past.gram, past, p, f)
        a, b, c = (y.astype(x.dtype) for y in mix.weights)
        back = (1 - g).astype(x.dtype)
        changes = b * u - c * back * s
        gram = b * gram - c * back * past.gram
        change = _error_bar(changes, gram, exact)
        rest = sum_of_independent(change, _times(c, past.rest))
        newest = _error_bar(x, fresh_gram, exact)
        total = sum_of_independent(rest, _times(a, newest))

        kept = _Past(
            StoredKey(key),
            past.number + 1,
            leading_range(AB, again.AG, number=min(self._most_vectors(k), r + p)),
            x,
            fresh_gram,
            newest,
            mix.weights[0],
            rest,
            mix.rest_variance,
            mix.ratios,
        )
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": total.degrees_of_freedom,
            "weight_of_past": mix.weights[2],
            "kept": Kept(0, _finite(kept)),
        }
        V = side_by_side(B, fresh.G, again.G)
        Z = side_by_side(B, a / f * fresh.G, b / p * again.G)
        return total.mean, total.standard_error, stats, (V, Z)

    def _probes(self, key, number: int, space):
        return self.sampler.sample(key, space.size, number, space.compute_dtype)

    def _most_vectors(self, k: int) -> int:
        size = max(min(3 * k // 10, k - _FEWEST), 0)
        return size if self.basis_size is None else min(self.basis_size, size)


def _finite(past: _Past) -> _Past:
    """A past that counts for nothing, if an operator was not finite."""
    arrays = past.samples, past.gram, past.error, past.weight, past.rest
    arrays = (*arrays, past.rest_variance, past.ratios)
    largest = [jnp.max(jnp.abs(x)) for x in jtu.tree_leaves(arrays)]
    # Degrees of freedom may be infinite.
    unknown = jnp.stack([jnp.isnan(x) for x in largest]).any()
    finite = ~unknown & jnp.isfinite(jnp.stack(largest[:4])).all()
    arrays = jtu.tree_map(lambda x: jnp.where(finite, x, jnp.zeros_like(x)), arrays)
    return _Past(past.key, past.number, past.basis, *arrays)


def _split(block: Inexact[Array, "n k"], first: int):
    return block[:, :first], block[:, first:]


def _error_bar(samples, gram, exact) -> ErrorBar:
    # In place of |A w|, that of what samples vary with: sqrt(mean |w_i^* A w_j|^2).
    norms = jnp.full(samples.shape, jnp.sqrt(_mean_product(gram, gram)))
    return independent_samples(samples, norms, gram, exact[None])


def _times(factor: Inexact[Array, ""], bar: ErrorBar) -> ErrorBar:
    error = jnp.abs(factor) * bar.standard_error
    return ErrorBar(factor * bar.mean, error, bar.degrees_of_freedom)


def _reduced(past: _Past, p: int) -> _Past:
    """The same estimate, with p fresh probes; the others are part of the rest."""
    (f,) = past.samples.shape
    if p == f:
        return past
    g, others = past.weight, past.samples[p:]
    share = (f - p) / f
    mean = share * g.astype(others.dtype) * jnp.mean(others)
    error = math.sqrt(share) * g * past.error.standard_error
    more = ErrorBar(mean, error, past.error.degrees_of_freedom)
    return _Past(
        past.key,
        past.number,
        past.basis,
        past.samples[:p],
        past.gram[:p, :p],
        past.error,
        g * (p / f),
        sum_of_independent(past.rest, more),
        past.rest_variance + share * g**2 / f,
        past.ratios,
    )


class _Mix(NamedTuple):
    """The weights a, b, c, and `rest_variance` and `ratios` as `_Past` has them."""

    weights: tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]
    rest_variance: Float[Array, ""]
    ratios: Float[Array, "2"]


def _mix(
    now: Inexact[Array, "g g"],
    before: Inexact[Array, "g g"],
    past: _Past,
    p: int,
    f: int,
) -> _Mix:
    r"""The weights a, b, c of least variance.

    In units of the variance of a sample of the operator as it is, let `kappa` be that of
    the operator as it was, `rho` the covariance of the two samples of a probe, and `nu` the
    variance of the rest. With `h = 1 - g` the variance of the value is

        a^2 / f + (b^2 - 2 b c h rho + c^2 h^2 kappa) / p + c^2 nu,    a = 1 - b .

    It is least for

        c = b h rho / (p D),    D = h^2 kappa / p + nu,
        b = (1 / f) / (1 / f + 1 / p - (h rho / p)^2 / D) .

    The covariance of `w^* A w` and `w^* B w` is proportional to `tr A B`, of which
    `w_i^* A w_j` and `w_i^* B w_j` are an estimate from p (p - 1) pairs of probes.

    *Bias.* Weights that follow the samples they weigh bias an estimate, and here the bias
    would add up over steps: a probe that finds much of the operator would count for more.
    So `kappa` and `rho` are those of the changes before this one, from other probes, which
    are averaged. Only for the first change there are none. What the probes themselves say
    of this change is an upper bound for c, of twice what they ask for: an operator that
    jumps isn't estimated from its past. And c is at most 1.
    """
    unit = jnp.maximum(jnp.max(jnp.abs(now)), jnp.max(jnp.abs(before)))
    unit = jnp.where(unit == 0, 1, unit).astype(now.dtype)
    now, before = now / unit, before / unit
    products = [_mean_product(*x) for x in ((before, before), (now, before))]
    size = _mean_product(now, now)
    found = jnp.stack(products) / jnp.where(size == 0, jnp.inf, size)
    expected = jnp.where(past.number == 1, found, past.ratios)
    h, nu = 1 - past.weight, past.rest_variance

    def best(ratios):
        kappa, rho = ratios
        D = (h**2 / p + nu) * kappa
        shared = jnp.where(D == 0, 0, h * rho / (p * jnp.where(D == 0, 1, D)))
        return (1 / f) / (1 / f + 1 / p - h * rho / p * shared) * shared

    c = jnp.minimum(best(expected), 2 * best(found))
    c = jnp.clip(c, 0, 1)
    kappa, rho = expected
    b = jnp.clip((1 / f + c * h * rho / p) / (1 / f + 1 / p), 0, 1)
    ratios = (expected + found) / 2
    kappa, rho = ratios
    change = (b**2 - 2 * b * c * h * rho + (c * h) ** 2 * kappa) / p
    return _Mix((1 - b, b, c), change + c**2 * nu * kappa, ratios)


def _mean_product(
    x: Inexact[Array, "g g"], y: Inexact[Array, "g g"]
) -> Float[Array, ""]:
    """The mean of `x_ij^* y_ij`, i and j different, of the parts that forms see."""
    g = x.shape[0]
    if not jnp.iscomplexobj(x):
        x, y = (x + x.T) / 2, (y + y.T) / 2
    products = jnp.where(jnp.eye(g, dtype=bool), 0, jnp.real(x.conj() * y))
    return jnp.sum(products) / (g * (g - 1))
