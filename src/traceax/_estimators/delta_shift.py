"""DeltaShift: the trace of an operator that changes slowly, from its changes.

A basis of r vectors, p probes of the past, fresh at the last estimate, and f fresh ones; g
is the weight of the fresh probes of the last estimate in it.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, Inexact, Int, Key

from .._accuracy.error_bar import (
    GRAM_PROBES,
    ErrorBar,
    independent_samples,
    sum_of_independent,
)
from .._arguments import (
    StoredKey,
    check_budget,
    check_optional_integer,
    without_numpy,
)
from .._base import TraceEstimator
from .._deflation import average, deflate, leading_range
from .._linalg.mixing import Counts, mean_product, mix_with_past
from .._linalg.tall import column_dots, orthonormalise, side_by_side
from .._operators.block import apply_block
from .._samplers import NormalSampler, Sampler, check_sampler
from .._state import Grown, TraceState, check_state, init_state

# Products that are enough for three probes of the past and three fresh ones.
_FEWEST = 6


class _Past(eqx.Module):
    """The last estimate, of the operator as it was.

    It was `rest + weight * mean(samples)`, of fresh probes and of what doesn't depend on
    these, and `rest_variance` is in units of the variance of a sample.
    """

    key: StoredKey  # of the fresh probes
    number: Int[Array, ""]  # of estimates so far
    basis: Inexact[Array, "n r"]  # orthonormal, of no fresh probe
    samples: Inexact[Array, " f"]
    gram: Inexact[Array, "g g"]
    error: ErrorBar
    weight: Float[Array, ""]
    rest: ErrorBar
    rest_variance: Float[Array, ""]
    ratios: Float[Array, "2"]  # of variances and covariances, see `mix_with_past`


class DeltaShiftEstimator(TraceEstimator):
    r"""The trace of an operator that changes from estimate to estimate, from its changes.

    `refresh` the state of each estimate with the next operator:

    ```python
    estimate = estimator.estimate(estimator.init(key, operator), k)
    for key, operator in steps:
        state = estimator.refresh(estimate.state, key, operator)
        estimate = estimator.estimate(state, k)
    ```

    In a loop of JAX begin with `estimator.init(key, operator, k)`.

    Half of the probes are those that were fresh at the last estimate, where the samples
    `s_j` of the operator as it was are known. What they find now, `u_j`, and what probes
    that are fresh now find, `x_j`, are mixed with the last estimate
    `rest + g mean(s_j)`:

        value = a mean(x_j) + b mean(u_j) + c (rest - (1 - g) mean(s_j)),    a + b = 1

    with the weights of least variance. Where the operator changes little, `c` is near 1, and
    the probes of many steps count; where it jumps, `c`, which is `stats["weight_of_past"]`,
    is near 0. All samples are of what a basis leaves, on which the trace is exact: found by
    half of the probes at first, it follows the operator by subspace iteration at no cost.

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

    The weights are found from the changes before, by other probes. Where those of this
    change disagree, as they do where the operator jumps, they bound c, and bias the value
    by a part of its standard error. Fewer than 6 products are those of independent probes.

    **Arguments:** `sampler` and `resphere` of [`traceax.XTraceEstimator`][], and

    - `basis_size`: the most vectors of the basis; 3 k / 10 by default, and never more.
        With 0, and signs, there is no linear algebra beside the products.

    **Reference:** Dharangutte and Musco, "Dynamic Trace Estimation", NeurIPS 2021,
    arXiv:2110.13752, for the recursion. They apply both operators to fresh probes: 2 k
    products for as many differences.
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

    def init(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        k: int | None = None,
    ) -> TraceState:
        """Checks, and a past that counts for nothing.

        As that of [`traceax.TraceEstimator`][]. With `k`, the budget of each estimate, the
        arrays of the state have the shapes of those of all that follow.
        """
        where = "DeltaShiftEstimator.init"
        state = init_state(key, operator, where)
        if k is None:
            return state
        k = min(check_budget(k, where), max(state.space.size - 1, 1))
        past = Grown(self._nothing_yet(state, k), budget=0, estimator=self)
        return TraceState(state.key, state.operator, past)

    def refresh(
        self,
        state: TraceState,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
    ) -> TraceState:
        """The state for an operator that has changed, whose estimate goes on from the last.

        **Arguments:**

        - `state`: of an estimate, or of `init`. Its operator may be `None`.
        - `key`: a single key. Probes are fresh also for the same one.
        - `operator`: of the same structure as that of the state; else a `ValueError`.
        """
        where = "DeltaShiftEstimator.refresh"
        check_state(state, self, where)
        fresh = init_state(key, operator, where)
        old, new = state.space, fresh.space
        if (old.leaves, old.treedef) != (new.leaves, new.treedef):
            raise ValueError(
                f"{where}: the operator must have the structure of the state's, "
                f"{old.structure}, got {new.structure}; begin anew with init."
            )
        return TraceState(fresh.key, fresh.operator, state.grown)

    def compute(self, state, k):
        if k < _FEWEST:
            value, error, stats, blocks = average(
                state, k, self.sampler, resphere=self.resphere
            )
            return value, error, {**stats, "weight_of_past": 0 * error}, blocks
        grown = state.grown
        past = self._nothing_yet(state, k) if grown is None else grown.buffers
        return self._next(state, past, k)

    def _nothing_yet(self, state, k: int) -> _Past:
        """A past without estimates, which counts for nothing."""
        space, r = state.space, self._most_vectors(k)
        f = (k - r + 1) // 2
        g = min(f, GRAM_PROBES)
        basis, samples, gram, mean = (
            jnp.zeros(shape, space.compute_dtype)
            for shape in ((space.size, r), (f,), (g, g), ())
        )
        zero, ratios = (jnp.zeros(shape, space.real_dtype) for shape in ((), (2,)))
        bar, number = ErrorBar(mean, zero, zero), jnp.zeros((), jnp.int32)
        key = StoredKey(jax.random.fold_in(state.key, 0))
        return _Past(*(key, number, basis, samples, gram, bar, zero, bar, zero, ratios))

    def _next(self, state, past: _Past, k: int):
        r = min(self._most_vectors(k), past.basis.shape[1])
        p = min((k - r) // 2, past.samples.shape[0])
        f = k - r - p
        # Not the key of the state: an estimate may be asked for again.
        key = jax.random.fold_in(state.key, past.number + 1)
        space, operator = state.space, state.operator
        old, new = self._probes(past.key.typed, p, space), self._probes(key, f, space)
        of_old = apply_block(operator, old)
        B, begins = past.basis[:, :r], (past.number == 0) & (r > 0)
        if r:
            # Where there is no past its probes are a sketch, and no tests.
            vectors = B
            B = jax.lax.cond(
                begins, lambda: orthonormalise(of_old)[0][:, :r], lambda: vectors
            )
        AB, of_new = _split(apply_block(operator, side_by_side(B, new)), r)
        again, fresh = (
            deflate(B, AB, *given, resphere=self.resphere)
            for given in ((old, of_old), (new, of_new))
        )
        exact = jnp.sum(column_dots(B, AB))
        u, s, x = exact + again.samples, past.samples[:p], exact + fresh.samples

        past = _reduced(past, p)
        g = past.weight
        outside = space.size - r
        gram, fresh_gram = (part.gram(outside) for part in (again, fresh))
        counts = Counts(p, f, past.number)
        last = 1 - g, past.rest_variance
        mix = mix_with_past(gram, past.gram, past.ratios, last, counts, begins)
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
            "kept": Grown(_finite(kept), budget=0),
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
    norms = jnp.full(samples.shape, jnp.sqrt(mean_product(gram, gram)))
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
