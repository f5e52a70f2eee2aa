"""The interfaces for trace estimators: a fixed budget, or buffers that grow."""

import abc
import dataclasses
import functools as ft
import math
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, Inexact, Int, Key, PyTree

from ._arguments import require
from ._error_bar import (
    GRAM_PROBES,
    ErrorBar,
    gram_of,
    independent_samples,
    leave_one_out_bar,
)
from ._estimator import Estimator
from ._functional import Trace
from ._linalg.dense import column_dots, column_norms, matmul, put
from ._linalg.leave_one_out import LeaveOneOut, leave_one_out_forms
from ._operators.space import apply_block
from ._outcome import Evidence, Outcome, as_arrays, cast_bar
from ._results import RESULTS, finite_or_failed
from ._rule import Blocks, Columns, StandIn
from ._samplers import Sampler, with_drawn
from ._state import Grown, TraceState, init_state
from ._tolerance import LEAST_PRODUCTS, Check, run_until, step_width


class TraceEstimator(Estimator[TraceState]):
    r"""Abstract base class for trace estimators.

    A concrete estimator is a frozen module whose fields are configuration, so that
    equal estimators compile once. You write `compute`, and `init` if it needs set-up,
    in plain JAX. You inherit `estimate`, exact answers for `k >= n`, failure reports,
    and the derivative rule: the value's derivative is `<Z, dA V>`, whatever `compute`
    does, and `compute` is never differentiated.

    **Attributes:**

    - `gives_diagonals`: a class variable, `False` by default. If `True`, `compute` must
        sum rows with `state.functional`, and [`traceax.diagonal`][] accepts the
        estimator.
    """

    gives_diagonals: ClassVar[bool] = False

    def init(self, key: Key[Array, ""], operator: lx.AbstractLinearOperator) -> Any:
        """Checks the arguments, and does set-up that doesn't depend on k. Optional.

        **Arguments:**

        - `key`: a typed `jax.random` key, or a legacy `uint32` key.
        - `operator`: a square lineax operator.

        **Returns:** a state, by default a [`traceax.TraceState`][]. A custom state is a
        PyTree with the attributes `.key` and `.operator`; only `.operator` is
        differentiable. Start with `traceax.init_state(key, operator)`, which checks
        both.
        """
        where = f"{type(self).__name__}.init"
        state = init_state(key, operator, where)
        self.check(state.operator, where)
        return state

    def check(self, operator: lx.AbstractLinearOperator, where: str) -> None:
        """Refuses operators that the estimator can't take. Optional."""

    @abc.abstractmethod
    def compute(
        self, state: TraceState, k: int
    ) -> tuple[
        Inexact[Array, ""],
        Float[Array, ""],
        dict[str, PyTree],
        tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]] | Any,
    ]:
        r"""Runs the algorithm. Called with `1 <= k < n`.

        **Arguments:**

        - `state`: the state that `init` returned.
        - `k`: the budget of products, a Python int. Leave at most two unused.

        **Returns:** a tuple `(value, standard_error, stats, (V, Z))`:

        - the estimate and its standard error (NaN if that is unknown);
        - a dictionary with at least `"num_matvecs"`. With `"degrees_of_freedom"` the
            interval becomes a Student t interval, and a [`traceax.RESULTS`][] item
            under `"result"` reports a failure. A later estimate that resumes from this
            one gets the arrays under `"kept"` as `state.grown.buffers`, and k is then
            the sum of both budgets;
        - blocks of shape `(n, p)`, in the order of the operator's flattened structure,
            with `E[V Z^*] = I`.
        """

    def finish(self, state, computed):
        value, error, stats, blocks = computed
        space, where = state.space, f"{type(self).__name__}.compute"
        rule, hint = 'stats must contain "num_matvecs"', "see TraceEstimator.compute"
        require("num_matvecs" in stats, where, rule, f"{[*stats]}", hint)
        if not isinstance(blocks, StandIn):
            V, Z = map(jnp.shape, blocks)
            rule = f"blocks V and Z must have one shape ({space.size}, p)"
            fits = V == Z and V[:-1] == (space.size,)
            require(fits, where, rule, f"{V} and {Z}", hint)
            blocks = Blocks([blocks])
        # We copy `stats`, which may belong to the estimator.
        stats = {"degrees_of_freedom": jnp.inf, **stats}
        kept, result = stats.pop("kept", None), stats.pop("result", RESULTS.successful)
        real = space.has_real_trace
        dtype = space.real_dtype if real else space.compute_dtype
        bar = cast_bar(ErrorBar(value, error, stats.pop("degrees_of_freedom")), dtype)
        result = finite_or_failed(bar.mean, result)
        evidence = None
        if isinstance(blocks, Columns) and isinstance(state.functional, Trace):
            evidence = blocks.evidence
        return Outcome([bar], [result], as_arrays(stats), evidence, kept), blocks


class GrowingEstimator(TraceEstimator):
    """Abstract base class for estimators that fill buffers, one unit at a time.

    A unit is one probe, or a few that belong together, with all products. You write
    `begin`, `grow`, `judge` and `stand_in`. You inherit fixed budgets, tolerances, and
    resuming from earlier estimates.

    **Attributes:**

    - `products_per_unit`: a class variable, the number of products in a unit.
    """

    products_per_unit: ClassVar[int]

    @abc.abstractmethod
    def begin(self, state: TraceState, room: int) -> PyTree[Array]:
        """Makes zero buffers for `room` units, along every axis that holds units."""

    @abc.abstractmethod
    def grow(
        self,
        state: TraceState,
        buffers: PyTree[Any],
        count: int | Int[Array, ""],
        width: int,
    ) -> PyTree[Array]:
        """Puts the next `width` units into buffers that hold `count` units."""

    @abc.abstractmethod
    def judge(
        self, state: TraceState, buffers: PyTree[Any], count: int | Int[Array, ""]
    ) -> tuple[ErrorBar, RESULTS | None]:
        """The error bar from `count` units, whose mean is the value, and a failure or
        `None`."""

    @abc.abstractmethod
    def stand_in(
        self, state: TraceState, buffers: PyTree[Any], count: int | Int[Array, ""]
    ) -> list[tuple[Array, Array]] | Columns:
        """Pairs of n x room blocks V and Z, zero beyond `count`. The value's
        derivative is the sum of `<Z, dA V>` over all pairs."""

    def fallback(self, state: TraceState, k: int) -> Any:
        """Another algorithm's result, as from `compute`, if k is too small here, else
        `None`. Optional."""
        return None

    def more_stats(self, buffers: PyTree[Any]) -> dict[str, Array]:
        """Additional entries for `stats`. Optional."""
        return {}

    def least_loop_products(self, state):
        return max(LEAST_PRODUCTS, 2 * self.products_per_unit)

    def compute(self, state, k):
        fallback = self.fallback(state, k)
        if fallback is not None:
            return fallback
        grown, more = self._room(state, k)
        drawn = with_drawn(self, state.key, grown.room, state.space)
        buffers, count = grown.buffers, grown.count + more
        if more:
            buffers = drawn.grow(state, buffers, grown.count, more)
        grown = Grown(buffers, count, grown.room, k)
        return drawn._results(state, grown, *drawn.judge(state, buffers, count))

    def compute_until(self, state, k, stop):
        minimum = max(LEAST_PRODUCTS // self.products_per_unit, 2)
        grown, budget = state.grown, k
        # A count is an array after a loop, which has taken enough units.
        if grown is not None and isinstance(grown.count, int) and grown.count < minimum:
            # We drop units that are too few to resume from, but count their products.
            state, k = state.resumed(None), k - grown.budget
        if k < LEAST_PRODUCTS:
            value, error, stats, blocks = self.compute(state, k)
            # We can't forecast from so few products.
            return value, error, {**stats, "products_needed": jnp.inf}, blocks
        grown, more = self._room(state, k)
        drawn = with_drawn(self, state.key, grown.room, state.space)
        step = step_width(more, minimum)

        def judge(buffers, count):
            bar, result = drawn.judge(state, buffers, count)
            return Check(bar, RESULTS.successful if result is None else result)

        loop = run_until(
            stop,
            lambda buffers, count: drawn.grow(state, buffers, count, step),
            judge,
            grown.buffers,
            start=grown.count,
            width=step,
            limit=grown.count + more,
            minimum=min(minimum, max(more, 1)),
        )
        grown = Grown(loop.buffers, loop.count, grown.room, budget)
        bar, result, _ = loop.check
        value, error, stats, blocks = drawn._results(state, grown, bar, result)
        stats["products_needed"] = self.products_per_unit * loop.forecast.needed
        return value, error, stats, blocks

    def _room(self, state: TraceState, k: int) -> tuple[Grown, int]:
        """The state's buffers with room for k products, and how many units to add."""
        self.check(state.operator, f"{type(self).__name__}.estimate")
        grown, units = state.grown, k // self.products_per_unit
        if grown is None:
            return Grown(self.begin(state, units), 0, units), units
        more = max(units - grown.budget // self.products_per_unit, 0)
        return self._resize(state, grown, grown.room + more), more

    def _resize(self, state: TraceState, grown: Grown, room: int) -> Grown:
        """Cuts buffers, or pads them with zeros, to another room."""

        def resize(x, like):
            if x.shape == like.shape:
                return x
            common = [min(a, b) for a, b in zip(x.shape, like.shape, strict=True)]
            missing = [(0, b - c) for b, c in zip(like.shape, common, strict=True)]
            return jnp.pad(x[tuple(map(slice, common))], missing)

        shapes = jax.eval_shape(lambda: self.begin(state, room))
        buffers = jtu.tree_map(resize, grown.buffers, shapes)
        return dataclasses.replace(grown, buffers=buffers, room=room)

    def _results(self, state, grown: Grown, bar: ErrorBar, result: RESULTS | None):
        """The value, its standard error, `stats` and blocks, as `compute` returns."""
        stats = {
            "num_matvecs": self.products_per_unit * grown.count,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "result": RESULTS.successful if result is None else result,
            "kept": grown,
            **self.more_stats(grown.buffers),
        }
        blocks = self.stand_in(state, grown.buffers, grown.count)
        if isinstance(blocks, list):
            blocks = Blocks(blocks, None, grown.count)
        return bar.mean, bar.standard_error, stats, blocks

    def trim(self, state):
        # Full buffers have an int count. We can't cut to a traced or batched count.
        grown = state.grown
        if grown is None or isinstance(grown.count, int | jax.core.Tracer):
            return state
        if grown.count.ndim > 0:
            return state
        count = int(grown.count)
        grown = self._resize(state, grown, count)
        budget = self.products_per_unit * count
        return state.resumed(dataclasses.replace(grown, count=count, budget=budget))


def put_units(buffers: PyTree, new: PyTree, count: int | Int[Array, ""]) -> Any:
    """Puts new units into buffers from unit `count` on, along their last axes."""
    return jtu.tree_map(ft.partial(put, start=count), buffers, new)


def left_out_blocks(
    pairs: list[tuple[Array, Array]], loo: LeaveOneOut, count: int | Int[Array, ""]
) -> Blocks:
    """The blocks `[Q, G]` for leave-one-out estimates. Slopes get error bars from their
    evidence, the products `V^* W`."""
    m, dtype = pairs[0][0].shape[1], pairs[0][0].dtype
    form = jnp.zeros((2 * m, 2 * m), dtype)
    return Blocks(
        pairs, Evidence((form, None), jtu.Partial(_bars_from_form, loo)), count
    )


def _bars_from_form(
    loo: LeaveOneOut, products: tuple[Inexact[Array, "k k"], None]
) -> list[ErrorBar]:
    """The error bar for leave-one-out samples, from their form on `[Q, G]`."""
    (H, L), (K, on_G) = (jnp.split(x, 2, 1) for x in jnp.split(products[0], 2))
    K = K.conj().T
    if loo.basis is not None:
        adjoint = loo.basis.conj().T
        H, L, K = (matmul(adjoint, x) for x in (matmul(H, loo.basis), L, K))
    paired = leave_one_out_forms(H, L, K, jnp.diagonal(on_G), loo)
    return [leave_one_out_bar(paired, loo.probes.active)]


def average(
    state: TraceState, k: int, sampler: Sampler, *, resphere: bool, kept: Any = ()
) -> Any:
    """The mean over k probes, as `compute` returns it. `kept` is `Outcome.kept`."""
    n = state.space.size
    W = sampler.sample(state.key, n, k, state.space.compute_dtype)
    if resphere:
        W = W * (math.sqrt(n) / column_norms(W)).astype(W.dtype)[None, :]
    AW = apply_block(state.operator, W)
    samples, first = column_dots(W, AW), AW.T[:GRAM_PROBES]
    (bar,) = _bars_from_samples(W, (samples, first))
    stats = {"num_matvecs": k, "degrees_of_freedom": bar.degrees_of_freedom}
    stats["kept"] = kept
    zeros = jnp.zeros_like(samples), jnp.zeros_like(first)
    evidence = Evidence(zeros, jtu.Partial(_bars_from_samples, W))
    return bar.mean, bar.standard_error, stats, Blocks([(W, W / k)], evidence)


def _bars_from_samples(
    W: Inexact[Array, "n k"],
    products: tuple[Inexact[Array, " k"], Inexact[Array, "few n"]],
) -> list[ErrorBar]:
    samples, first = products
    # We subtract a multiple of the identity, which causes no skewness.
    mean = samples.mean() / len(W)
    gram = gram_of(W, first.T) - mean * gram_of(W, W)
    norms = column_norms(first.T)
    return [independent_samples(samples, norms, gram, may_miss=True)]
