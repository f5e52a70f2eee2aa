"""Estimates of the mean of operators that come one at a time, from a Python loop."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, PyTree

from ._base import (
    TraceEstimator,
    exact_answer,
    finish,
    identity_block,
)
from ._estimate import RESULTS, Estimate
from ._kept import Kept, with_kept
from ._leaves import of_array_leaves
from ._operator import (
    apply_block,
    check_operator,
    has_real_trace,
    space_of,
)
from ._primitive import estimate_trace
from ._state import check_budget, described
from ._streamed_arguments import (
    SIGNS,
    WHERE,
    check_operator_of,
    check_passes_left,
    check_stream,
    check_weight,
    structure_of,
)
from ._unavailable import UnavailableLinearOperator


class StreamedMeanState(eqx.Module):
    """How far a [`traceax.StreamedMean`][] is.

    A PyTree of ordinary arrays: `eqx.tree_serialise_leaves` saves it in the middle of a
    pass, and `eqx.tree_deserialise_leaves` loads it into a state of the same pass, such
    as that of `init`, or of `end_pass` of that.

    `total` and `weight` are sums over operators. Where several processes go over a part
    of the data each, with the same key, add these up before they end a pass.

    **Attributes:**

    - `inner`: the state of the estimator. Its operator stands for the mean, and has no
        products.
    - `block`, `total`, `weight`: the vectors that this pass multiplies, the weighted
        sum of their products so far, and that of the weights; `None` after the last.
    - `products`, `weights`: products with the mean, and sums of weights, of the passes
        before this one.
    - `passes_left`: how many passes have not ended, a Python int.
    - `made_by`: the estimator, as it would be written, and k.
    """

    inner: Any
    block: Inexact[Array, "n m"] | None
    total: Inexact[Array, "n m"] | None
    weight: Float[Array, ""] | None
    products: list[Inexact[Array, "n _"]]
    weights: list[Float[Array, ""]]
    passes_left: int = eqx.field(static=True)
    made_by: tuple[str, int] = eqx.field(static=True)


class StreamedMean(eqx.Module):
    r"""The trace of the mean `sum_b w_b A_b / sum_b w_b` of operators that come one by one.

    ```python
    stream = traceax.StreamedMean(traceax.XTraceEstimator(), 40)
    state = stream.init(key, parameters)
    for _ in range(state.passes_left):
        for batch in loader:
            state = stream.update(state, hessian(batch), weight=len(batch))
        state = stream.end_pass(state)
    estimate = stream.estimate(state)
    ```

    The estimate is that of `estimator` with `k` products of the mean, up to rounding.

    *Use when* operators come from a Python loop, as with a data loader. Batches that fit
    into memory together are better a [`traceax.MeanLinearOperator`][], which has
    derivatives and is an operator as any other.

    | | |
    |---|---|
    | passes over the data | Hutchinson and XNysTrace 1; XTrace and Hutch++ 2, or 1 if `k < 4` |
    | products | with each operator as many as with the mean, k at most, as one block in each pass |
    | `k >= n` | the exact answer: 1 pass, n products with the coordinate vectors |
    | state, vectors | Hutchinson and XNysTrace 2k, XTrace 3k/2, Hutch++ 4k/3; 2n if `k >= n` |
    | accumulated in | the dtype of the operators, and at least 32 bits |
    | differentiable | no: a derivative with respect to operators or weights is an error |

    `update` compiles once for operators of equal structure, in or out of `jax.jit`.

    **Arguments:**

    - `estimator`: [`traceax.HutchinsonEstimator`][], [`traceax.XNysTraceEstimator`][],
        [`traceax.XTraceEstimator`][] or [`traceax.HutchPlusPlusEstimator`][].
    - `k`: a positive Python int, the budget of products with the mean.

    **Raises:**

    - `TypeError` for another estimator, or a `k` that is traced or not an integer;
        `ValueError` if `k` is below 1.
    """

    estimator: TraceEstimator
    k: int = eqx.field(static=True, converter=lambda k: check_budget(k, WHERE))

    def __check_init__(self):
        if not isinstance(self.estimator, TraceEstimator) or not hasattr(
            self.estimator, "passes"
        ):
            raise TypeError(
                f"{WHERE}: estimator must be one that can be given products, got "
                f"{self.estimator!r}; use traceax.HutchinsonEstimator, "
                "traceax.XNysTraceEstimator, traceax.XTraceEstimator or "
                "traceax.HutchPlusPlusEstimator, or write a method `passes`."
            )

    def init(
        self,
        key: Key[Array, ""],
        like: lx.AbstractLinearOperator | PyTree[Array | jax.ShapeDtypeStruct],
        *,
        tags: object = (),
    ) -> StreamedMeanState:
        """The state before the first operator.

        **Arguments:**

        - `key`: a single key, typed or legacy.
        - `like`: the first operator, which is not applied; or a PyTree of arrays or
            `jax.ShapeDtypeStruct`s as operators act on, such as a network's parameters.
        - `tags`: `lineax.positive_semidefinite_tag` or its negative, if `like` isn't an
            operator that says so itself. All operators must be tagged alike then.

        **Raises:**

        - `TypeError` or `ValueError` as the estimator's `init` does, and for a PyTree
            of anything else.
        """
        tags = tags if isinstance(tags, set | frozenset | tuple | list) else (tags,)
        known = {tag for _, tag in SIGNS.values() if tag in tags}
        if isinstance(like, lx.AbstractLinearOperator):
            check_operator(like, f"{WHERE}.init")
            structure = like.in_structure()
            known |= {tag for check, tag in SIGNS.values() if check(like)}
        else:
            structure = structure_of(like)
        operator = UnavailableLinearOperator(structure, frozenset(known))
        inner = self.estimator.init(key, operator)
        return _begin_pass(self, inner, [], [], len(_passes(self, inner)[0]))

    def update(
        self,
        state: StreamedMeanState,
        operator: lx.AbstractLinearOperator,
        weight: ArrayLike = 1.0,
    ) -> StreamedMeanState:
        """The state after one more operator, each of whose products is taken here.

        **Arguments:**

        - `state`: from `init`, `update`, or `end_pass`.
        - `operator`: of the structure that `init` was given.
        - `weight`: a real scalar, traced or not, such as the number of examples.

        **Raises:**

        - `TypeError` for what isn't a lineax operator, or a weight that isn't real.
        - `ValueError` for another structure, an operator that isn't tagged semidefinite
            where `init` was told that all are, or a negative weight of one that is, the
            state of another stream, and after the last pass.
        """
        where = f"{WHERE}.update"
        check_operator_of(operator, state, where)
        check_stream(state, self._signature, where)
        check_passes_left(state, where)
        weight = check_weight(weight, state.inner, where)
        total, weight = of_array_leaves(
            lambda x: _add(x, state.block, state.total, state.weight, weight), operator
        )
        return eqx.tree_at(lambda s: (s.total, s.weight), state, (total, weight))

    def end_pass(self, state: StreamedMeanState) -> StreamedMeanState:
        """The state before the first operator of the next pass, or after the last one.

        Every pass must go over the same operators with the same weights, in any order.

        **Arguments:**

        - `state`: after the `update`s with all operators.

        **Raises:**

        - `ValueError` if the last pass has ended already, or for the state of another
            stream.
        """
        where = f"{WHERE}.end_pass"
        check_stream(state, self._signature, where)
        check_passes_left(state, where)
        products = [*state.products, _mean(state.total, state.weight)]
        weights = [*state.weights, state.weight]
        return _begin_pass(self, state.inner, products, weights, state.passes_left - 1)

    def estimate(self, state: StreamedMeanState, *, throw: bool = True) -> Estimate:
        """The estimate of the trace of the mean.

        **Arguments:**

        - `state`: after the `update`s of the last pass, whether that has ended or not.
            Of a single pass it may be asked for at any time, of the mean so far.
        - `throw`: as for [`traceax.TraceEstimator`][]'s `estimate`.

        **Returns:**

        A [`traceax.Estimate`][]. `stats["num_matvecs"]` is the number of products with
        the mean. `state` is that of the estimator and keeps the products, but it can't
        take more: to go on from them, put an operator in place of `state.operator`.

        **Raises:**

        - `ValueError` if there are passes to come, or for the state of another stream.
        - A run-time error for what only values can tell, unless `throw=False`: also if
            weights sum to zero, or to another number in another pass.
        """
        check_stream(state, self._signature, f"{WHERE}.estimate")
        if state.passes_left > 1:
            raise ValueError(
                f"{WHERE}.estimate: {state.passes_left} passes over the data are left, "
                "with this one; call end_pass after each, and go over the data again."
            )
        state = self.end_pass(state) if state.passes_left else state
        inner, operator = state.inner, state.inner.operator
        owner = described(self.estimator)
        # Of no entries: derivatives with respect to what the products depend on reach
        # the operator, which refuses.
        depends_on = [x[:, :0] for x in state.products]
        known = eqx.tree_at(
            lambda s: s.operator,
            with_kept(inner, Kept(0, (state.products, state.weights), owner)),
            eqx.tree_at(lambda x: x.depends_on, operator, depends_on),
        )
        outcome = estimate_trace(
            _OfProducts(self.estimator), known, self.k, real=has_real_trace(operator)
        )
        if outcome.kept is not None:
            inner = with_kept(inner, Kept(self.k, outcome.kept, owner))
        return finish(outcome, inner, throw=throw)

    @property
    def _signature(self) -> tuple[str, int]:
        return described(self.estimator), self.k


class _OfProducts(eqx.Module):
    """An estimator that is given all products, as the primitive takes it."""

    estimator: Any

    def evaluate(self, state: Any, k: int):
        products, weights = state.kept.parts
        state, space = with_kept(state, None), space_of(state.operator)
        if k >= space.size:
            outcome = exact_answer(space, *products)
        else:
            _, parts = self.estimator.passes(state, k)
            owner = described(self.estimator)
            known = with_kept(state, Kept(k, parts(*products), owner))
            outcome = self.estimator.compute(known, k)
        value, error, stats, blocks = outcome
        wrong = _are_wrong(jnp.stack(weights))
        value = jnp.where(wrong, jnp.nan, value)
        result = stats.get("result", RESULTS.successful)
        result = RESULTS.where(wrong, RESULTS.wrong_weights, result)
        return value, error, {**stats, "result": result}, blocks


def _are_wrong(weights: Float[Array, " passes"]):
    """Whether sums of weights are zero, not finite, or differ between passes."""
    largest = jnp.max(jnp.abs(weights))
    rounding = jnp.finfo(weights.dtype).eps ** 0.5 * largest  # of any number of terms
    return ~(jnp.ptp(weights) <= rounding) | jnp.any(weights == 0)


#
# Passes
#


def _passes(
    stream: StreamedMean, inner: Any
) -> tuple[list[Callable[..., Inexact[Array, "n m"]]], Callable[..., Any] | None]:
    """What the passes multiply, each a function of the products of those before it."""
    space = space_of(inner.operator)
    if stream.k >= space.size:
        return [lambda: identity_block(space)], None
    return stream.estimator.passes(inner, stream.k)  # pyright: ignore


def _begin_pass(stream, inner, products, weights, left: int) -> StreamedMeanState:
    block = total = weight = None
    if left:
        block = _block(stream, inner, products)
        total = jnp.zeros_like(block)
        weight = jnp.zeros((), jnp.finfo(block.dtype).dtype)
    return StreamedMeanState(
        inner, block, total, weight, products, weights, left, stream._signature
    )


@eqx.filter_jit
def _block(stream, inner, products):
    blocks, _ = _passes(stream, inner)
    return blocks[len(products)](*jax.lax.stop_gradient(products))


@eqx.filter_jit
def _add(operator, block, total, weights, weight):
    products = apply_block(operator, jax.lax.stop_gradient(block))
    return total + weight.astype(total.dtype) * products, weights + weight


@jax.jit
def _mean(total, weight):
    # A sum of 0 is reported with the estimate.
    return total / jnp.where(weight == 0, 1, weight).astype(total.dtype)
