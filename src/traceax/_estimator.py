r"""Estimators, the driver behind all estimates, and the derivative rule that they share.

An estimator returns its values with a `StandIn`, which carries their derivative. For a
trace, it holds two fixed blocks V and Z (n x p) with `E[V Z^*] = I`, and the derivative is

    d value = <Z, dA V> = sum_j z_j^* (dA v_j),    V and Z held fixed.

This derivative is unbiased: as `<Z, dA V> = tr(dA V Z^*)`, its expectation is the true
derivative `tr dA`. It is also linear in dA, so it is unbiased to every order: with the same
blocks, the second derivative `<Z, A''(t) V>` has expectation `tr A''(t)`. Stand-ins for
other quantities hold other blocks, and other linear functions of dA's products with these.

The rule never differentiates an estimator's algorithm. It runs the algorithm once, takes the
stand-in, and differentiates only "multiply the operator by V", which JAX can transpose. So
`compute` may use anything, such as factorisations and loops.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar, cast

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Bool, PyTree

from ._error_bar import ErrorBar
from ._estimate import Estimate, raise_failure
from ._linalg.types import automatic, same_layouts, without_derivatives
from ._operators.check import as_data, is_nonlinear, jitted
from ._operators.entries import unit_columns
from ._operators.inverse import DiagonalErrors, diagonal_errors
from ._operators.solvers import is_inexact, solver_tolerances
from ._operators.space import FUNCTIONS, columns_at_once, parts_of
from ._outcome import Evidence, Outcome, make_estimate
from ._plan import Plan, from_all_products, make_plan
from ._results import RESULTS, any_unmet, map_results
from ._rule import StandIn
from ._state import CustomState, Grown, State, TraceState, checked_state
from ._tolerance import (
    LEAST_PRODUCTS,
    NO_PROGRESS_METER,
    Depth,
    ProgressMeter,
    Stop,
    make_stop,
    tolerance_result,
)

S = TypeVar("S", bound=State)


class Estimator(eqx.Module, Generic[S]):
    """Abstract base class for estimators of traces and spectral functions."""

    # The states that `estimate` takes.
    state_classes: ClassVar[tuple[type[State], ...]] = (TraceState, CustomState)

    @abc.abstractmethod
    def compute(self, state: S, k: int) -> Any:
        """Runs the algorithm. Called with `1 <= k < n`."""

    def compute_until(self, state: S, k: int, stop: Stop | Depth) -> Any:
        """Runs to `stop`. A `Stop` needs `stats["products_needed"]`. Optional."""
        raise TypeError(
            f"{type(self).__name__}.estimate: rtol and atol must be None, as this "
            "estimator takes no tolerance; use traceax.XTraceEstimator(), or "
            "traceax.KrylovAwareEstimator() for spectral functions."
        )

    def least_loop_products(self, state: S) -> int:
        """The fewest products for which a loop to a tolerance pays. Optional."""
        return LEAST_PRODUCTS

    def depth(self, state: S, meter: ProgressMeter) -> Depth | None:
        """When a loop without k may stop; `None` if k is required. Optional."""
        return None

    def check_budget(self, k: int, *, at_most: bool) -> None:
        """Refuses unusable budgets; with `at_most`, k caps a tolerance. Optional."""

    def trim(self, state: S) -> S:
        """Cuts buffers to the units taken, if their number is known. Optional."""
        return state

    @abc.abstractmethod
    def finish(self, state: S, computed: Any) -> tuple[Outcome, StandIn]:
        """The outcome of `compute`, and its stand-in, which carries the derivative."""

    def estimate(
        self,
        state: PyTree,
        k: int | None = None,
        *,
        rtol: ArrayLike | None = None,
        atol: ArrayLike | None = None,
        level: float = 0.95,
        progress_meter: ProgressMeter = NO_PROGRESS_METER,
        throw: bool = True,
    ) -> Estimate:
        """Estimates the functional of the state's operator with at most `k` products.

        **Arguments:**

        - `state`: the state from `init`, or `estimate.state` from an earlier estimate.
            From the latter, Hutchinson, XTrace and XNysTrace take `k` *more* products:
            the result equals one run with the total budget, up to rounding. Budgets
            below 4 keep nothing.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact, unless a tolerance is met before. It takes n products, and for a
            spectral function an eigendecomposition.
        - `rtol`, `atol`, `level`, `progress_meter`, `throw`: as for
            [`traceax.trace`][], if the estimator takes a tolerance.

        **Returns:** a [`traceax.Estimate`][], whose state keeps the products.

        **Raises:** as [`traceax.trace`][]; `TypeError` for another estimator's state.
        """
        where = f"{type(self).__name__}.estimate"
        given = checked_state(state, self, where, self.state_classes)
        checked = self.trim(cast(S, given))
        dtype = checked.space.compute_dtype
        stop = make_stop(rtol, atol, level, progress_meter, dtype, where)
        plan = make_plan(self, checked, k, stop, progress_meter, where)
        outcome, resumed = outcome_of(plan, checked)
        estimate = make_estimate(outcome, resumed.treedef, resumed.given, plan.by)
        return raise_failure(estimate) if throw else estimate


#
# The driver
#


def outcome_of(plan: Plan, state: State) -> tuple[Outcome, State]:
    """The outcome of a plan, and the state to resume."""
    if plan.exact is not None:
        outcome = plan.exact.answer(state)
        if plan.stop is not None:
            needed = jnp.asarray(outcome.stats["num_matvecs"], state.space.real_dtype)
            outcome = outcome.with_stats(products_needed=needed)
        return outcome, state
    operator = as_data(state.operator)
    primal = state
    if operator is not state.operator:
        primal = eqx.tree_at(lambda x: x.operator, state, operator)
    if plan.falls_back:
        outcome = _estimate_or_exact(plan, primal)
    else:
        # For few columns, we let JAX differentiate the products. Our rule repeats them,
        # which made a ten-dimensional PINN step 1.2 times slower.
        few = min(columns_at_once(plan.size), unit_columns(operator))
        plain = plan.takes_all and state.is_linear and plan.size <= few
        outcome = _outcome(plan, primal, plain)
    kept = outcome.kept
    if kept is not None:
        kept = kept if isinstance(kept, Grown) else Grown(kept, budget=plan.products)
        state = state.resumed(dataclasses.replace(kept, estimator=plan.estimator))
    return outcome, state


@jitted
@automatic
def _outcome(plan: Plan, state: State, plain: bool) -> Outcome:
    """The outcome, differentiable with respect to the state alone.

    With `plain`, JAX differentiates `_run` without our rule. On a mesh with explicit
    axes the compiler finds layouts, and every device has the result.
    """
    plan = without_derivatives(plan)
    if plain:
        return _run(plan, state)[0]
    x64 = jax.config.jax_enable_x64  # pyright: ignore
    return eqxi.filter_primitive_bind(estimate_p, plan, state, False, x64)


# JAX evaluates this abstractly, compiles it and differentiates it. With `jit` all share one
# trace, which saved a third of a first call.
@eqx.filter_jit
def _run(plan: Plan, state: State) -> tuple[Outcome, StandIn]:
    """The outcome, with errors from iterations inside the operator, and its stand-in."""
    estimator, space = plan.estimator, state.space
    stop, exact, solvers, inner = plan.stop, plan.takes_all, None, None
    if not isinstance(state, TraceState | CustomState):
        solvers = state.solvers  # they enter through errors in Ritz values
    elif is_inexact(state.operator):
        # Exact answers measure solver errors, so we don't add them again.
        errors = diagonal_errors(state.operator, solves_are_measured=exact)
        solvers, counts = errors.products, state.functional.num_rows(space.size)
        inner = jtu.Partial(DiagonalErrors.of_sums, errors, counts)
    if exact:
        outcome, stand_in = from_all_products(state, estimator)
    elif stop is None:
        outcome, stand_in = estimator.finish(
            state, estimator.compute(state.given, plan.products)
        )
    else:
        remaining = stop
        if isinstance(stop, Stop):
            remaining = dataclasses.replace(stop, inner=inner)
        computed = estimator.compute_until(state.given, plan.products, remaining)
        outcome, stand_in = estimator.finish(state, computed)
    if space.is_complex and parts_of(state.operator, FUNCTIONS):
        is_wrong = is_nonlinear(state.operator)
        results = map_results(
            lambda x: RESULTS.where(is_wrong, RESULTS.not_linear, x),
            outcome.results,
        )
        outcome = outcome._replace(results=results)
    if inner is not None:
        bars = [
            x._replace(standard_error=jnp.hypot(x.standard_error, inner(x.mean)))
            for x in outcome.bars
        ]
        outcome = outcome._replace(bars=bars)
    if isinstance(stop, Stop):
        results = outcome.results
        if not exact or solvers is not None:
            bar = state.bar(outcome.bars)
            results = [tolerance_result(stop, bar, x) for x in results]
        needed = outcome.stats.get("products_needed", float(space.size))
        needed = jnp.asarray(needed, space.real_dtype)
        # We keep infinity, which means unknown, or that products don't help.
        most = jnp.minimum(needed, space.size)
        needed = jnp.where(jnp.isfinite(needed), most, needed)
        if solvers is not None and (exact or inner is None):
            needed = jnp.where(any_unmet(results), jnp.inf, needed)
        stats = {**outcome.stats, "products_needed": needed}
        outcome = outcome._replace(results=results, stats=stats)
    if solvers is not None and outcome.evidence is not None:
        # A slope contains two solves, whose residuals we don't measure.
        is_unknown = exact and bool(solver_tolerances(state.operator))
        relative = jnp.full_like(solvers, jnp.inf) if is_unknown else 2 * solvers
        evidence = dataclasses.replace(outcome.evidence, solvers=relative)
        outcome = outcome._replace(evidence=evidence)
    return outcome, stand_in


#
# The primitive
#


def _implementation(plan, state, with_stand_in, x64):
    if x64 != jax.config.jax_enable_x64:  # pyright: ignore
        raise RuntimeError(
            "traceax: jax.enable_x64 was changed inside a jitted function, which JAX "
            "compiles in the caller's mode; change it around the call, as in "
            "`with jax.enable_x64(True): jitted(x)`."
        )
    # Without a mesh, JAX lowers in an empty mesh but traces in none. Its trace cache treats
    # these as different, so we always set a mesh.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        outcome, stand_in = _run(plan, state)
    return (outcome, stand_in) if with_stand_in else outcome


def _abstract(*arguments):
    leaves, treedef = jtu.tree_flatten(arguments)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.core.ShapedArray):
            leaves[i] = jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                weak_type=x.weak_type,
                sharding=x.sharding,
                manual_axis_type=x.manual_axis_type,
            )

    def to_aval(x):
        return jax.typeof(x) if isinstance(x, jax.ShapeDtypeStruct) else x

    out = eqx.filter_eval_shape(_implementation, *treedef.unflatten(leaves))
    return jtu.tree_map(to_aval, out)


def _jvp(primals, tangents):
    # JAX calls this in the caller's mesh, so we switch to the mesh of the state's arrays.
    meshes = [
        jax.typeof(x).sharding.mesh
        for x in jtu.tree_leaves(eqx.filter(primals[1], eqx.is_array))
    ]
    mesh = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(next((x for x in meshes if not x.empty), mesh)):
        return _derivative(primals, tangents)


def _derivative(primals, tangents):
    plan, state, with_stand_in, x64 = primals
    outcome, stand_in = eqxi.filter_primitive_bind(estimate_p, plan, state, True, x64)

    def cast(t, x):
        if t is None:
            return None
        return (t if jnp.iscomplexobj(x) else t.real).astype(x.dtype)

    def cast_tree(t, x):
        return jtu.tree_map(cast, t, x, is_leaf=lambda x: x is None)

    t_outcome = jtu.tree_map(lambda _: None, outcome)
    derivative = stand_in.derivative(state, tangents[1])
    if derivative is not None:
        pairs = zip(outcome.bars, t_outcome.bars, derivative.values, strict=True)
        bars = [t_x._replace(mean=cast_tree(value, x.mean)) for x, t_x, value in pairs]
        t_outcome = t_outcome._replace(bars=bars)
        if outcome.evidence is not None and derivative.products is not None:
            products = cast_tree(derivative.products, outcome.evidence.products)
            evidence = eqx.tree_at(
                lambda x: x.products,
                t_outcome.evidence,
                products,
                is_leaf=lambda x: x is None,
            )
            t_outcome = t_outcome._replace(evidence=evidence)
    if not with_stand_in:
        return outcome, t_outcome
    return (outcome, stand_in), (t_outcome, jtu.tree_map(lambda _: None, stand_in))


def _transpose(*args, **kwargs):
    # JAX never calls this: tangents pass through products, not through the primitive.
    raise NotImplementedError("estimate is not linear in any argument.")


# In a jaxpr its equation is named "estimate", and "vprim" under `jax.vmap`. Exact answers
# for few columns have no such equation.
estimate_p = eqxi.create_vprim(
    "estimate",
    eqxi.filter_primitive_def(_implementation),
    eqxi.filter_primitive_def(_abstract),
    eqxi.filter_primitive_jvp(_jvp),
    eqxi.filter_primitive_transpose(_transpose),
)
eqxi.register_impl_finalisation(estimate_p)


#
# A tolerance with the exact answer in reserve
#


@eqx.filter_jit
def _estimate_or_exact(plan: Plan, state: State) -> Outcome:
    """A loop's outcome, or the exact one if the loop doesn't meet the tolerance."""
    first, size = _outcome(plan, state, False), plan.size
    unmet = any_unmet(first.results)
    used = first.stats["num_matvecs"]
    first = first._replace(stats=state.stats_of_exact(first.stats))

    statics: list[Any] = []

    def run_exact():
        last = dataclasses.replace(plan, products=size, falls_back=False)
        exact = _outcome(last, state, False)
        needed = {
            "products_needed": jnp.full_like(first.stats["products_needed"], size)
        }
        taken = {"num_matvecs": used + exact.stats["num_matvecs"]}
        stats = {**first.stats, **exact.stats, **needed, **taken}
        answer = jtu.tree_map(
            lambda new, old: jnp.where(unmet, new, old).astype(old.dtype),
            (exact.bars, exact.results, stats),
            (first.bars, first.results, first.stats),
        )
        arrays, static = eqx.partition(exact.evidence, eqx.is_array)
        statics.append(static)
        return answer, arrays

    shapes = jax.eval_shape(run_exact)[1]
    zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def keep_first():
        return (first.bars, first.results, first.stats), zeros

    # We use one condition for a whole `vmap`: one per batch element would run both.
    answer, arrays = jax.lax.cond(
        eqxi.unvmap_any(unmet), *same_layouts(run_exact, keep_first)
    )
    evidence = eqx.combine(arrays, statics[0])
    if first.evidence is not None:
        makers = first.evidence.bars_from, evidence.bars_from
        evidence = Evidence(
            (first.evidence.products, evidence.products),
            jtu.Partial(_chosen_bars, unmet, *makers),
            evidence.solvers,
        )
    bars, results, stats = answer
    return Outcome(bars, results, stats, evidence, first.kept)


def _chosen_bars(
    second: Bool[Array, ""],
    first_maker: jtu.Partial,
    second_maker: jtu.Partial,
    products: tuple[PyTree, PyTree],
) -> list[ErrorBar]:
    """The error bars from the second maker if `second`, else from the first."""
    bars = first_maker(products[0]), second_maker(products[1])
    return [
        jtu.tree_map(lambda x, y: jnp.where(second, y, x), *pair)
        for pair in zip(*bars, strict=True)
    ]
