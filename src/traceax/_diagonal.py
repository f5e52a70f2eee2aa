"""Entry points for diagonals, leaf traces and Frobenius norms."""

import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, PyTree

from ._arguments import check_budget, check_key, require
from ._error_bar import ErrorBar, exact_bar, sum_of_independent
from ._estimate import Estimate, raise_failure
from ._estimator import outcome_of
from ._estimators.hutchinson import HutchinsonEstimator
from ._exact.products import norm_squared
from ._functional import Diagonal, LeafSums
from ._linalg.types import automatic, axes_of, widened
from ._operators.check import (
    as_complex,
    as_data,
    checked_operator,
    jitted,
    product_size,
    with_data,
)
from ._operators.entries import known_diagonal
from ._operators.solvers import solver_tags
from ._operators.space import (
    is_hermitian,
    linear_function,
    space_of,
    structure_of,
    unflatten,
)
from ._outcome import Outcome, cast_bar, make_estimate
from ._plan import make_plan
from ._results import RESULTS
from ._state import DerivedState, TraceState, init_state
from ._tolerance import NO_PROGRESS_METER, ProgressMeter, make_stop
from ._trace import estimate_whole
from ._trace_estimator import TraceEstimator


def diagonal(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: TraceEstimator | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    norm: Literal["root mean square", "largest"] = "root mean square",
    level: float = 0.95,
    progress_meter: ProgressMeter = NO_PROGRESS_METER,
    throw: bool = True,
) -> Estimate:
    r"""Estimates the diagonal of a linear operator from at most `k` products with it.

    ```python
    estimate = traceax.diagonal(jax.random.key(0), operator, 40)
    ```

    A trace estimate is a sum over rows, `value = sum_r conj(Z(r)) (A V)(r)`, with
    blocks V and Z from an estimator. Here each row estimates a diagonal entry, without
    bias, and with unbiased derivatives in `operator` to any order. Terms with a known
    diagonal are exact, and for `k >= n` every entry is.

    **Arguments:** as for [`traceax.trace`][], and

    - `estimator`: one of [`traceax.HutchinsonEstimator`][],
        [`traceax.HutchPlusPlusEstimator`][], [`traceax.XTraceEstimator`][] (from
        `k = 4` on) and [`traceax.XNysTraceEstimator`][], which name their sources.
    - `rtol`, `atol`, `norm`: products are taken until the half intervals are at most
        `atol + rtol |value|` in this norm over entries.

    **Returns:** a [`traceax.Estimate`][]. Its value and standard error have the
    structure of the operator's input. Error bars of single entries use few samples
    each. On average they are right, or up to twice too long for fast spectral decay.
    """
    where = "traceax.diagonal"
    state = init_state(key, operator, where)
    rule = "norm must be 'root mean square' or 'largest'"
    hint = "the tolerance applies to this norm over entries"
    require(norm in ("root mean square", "largest"), where, rule, repr(norm), hint)
    dtype, structure = state.space.compute_dtype, state.space.structure
    stop = make_stop(rtol, atol, level, progress_meter, dtype, where, norm)
    functional = Diagonal(state.space.has_real_trace)
    state = TraceState(state.key, state.operator, functional=functional)
    estimate = estimate_whole(where, state, k, estimator, stop, throw=throw)
    return _with_parts(estimate, lambda x: unflatten(x, structure), estimate.state)


def leaf_traces(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: TraceEstimator | None = None,
    *,
    probes: Literal["whole", "blocks"] = "whole",
    groups: PyTree = None,
    throw: bool = True,
) -> tuple[Estimate, Estimate]:
    r"""Estimates the trace of each diagonal block of an operator, one per leaf.

    ```python
    by_layer, total = traceax.leaf_traces(key, hessian, 120, probes="blocks")
    ```

    - `probes="whole"`: every probe covers all leaves. *Use when* the spectrum decays:
        XTrace and XNysTrace find the directions that couple leaves.
    - `probes="blocks"`: random signs on one leaf at a time, and products with its block
        alone. *Use for* networks early in training: flat spectra, strong coupling.

    With blocks, every leaf gets the same number of probes. Leaves with fewer entries
    are exact, and the others share their remaining products. Both ways are unbiased,
    run as one program, and are differentiable with respect to `operator`.

    **Arguments:** `key`, `operator` and `throw` as for [`traceax.trace`][], and

    - `k`: the budget of products. With blocks it counts products with blocks, and must
        be at least three per leaf.
    - `estimator`: as for [`traceax.diagonal`][]. Blocks always use Hutchinson's.
    - `groups`: labels for leaves, all strings or all integers, as a prefix PyTree of
        the operator's input. Leaves with the same label form a group, such as a layer.

    **Returns:** a tuple of two [`traceax.Estimate`][]s. The first has a scalar per
    leaf, in the structure of the operator's input, or a dictionary with a scalar per
    label. The second, the total, has its own error bar.
    """
    where = "traceax.leaf_traces"
    state = init_state(key, operator, where)
    operator, space = state.operator, state.space
    leaves, treedef = jtu.tree_flatten(space.structure)
    rule, hint = "probes must be 'whole' or 'blocks'", "see traceax.leaf_traces"
    require(probes in ("whole", "blocks"), where, rule, repr(probes), hint)
    known = known_diagonal(operator) is not None
    sizes = tuple(math.prod(leaf.shape) for leaf in leaves)
    labels = list(range(len(leaves)))
    if groups is not None:
        labels = _broadcast_labels(groups, space.structure, where)
    members = {x: tuple(i for i, y in enumerate(labels) if x == y) for x in labels}
    indices = tuple(members.values())
    if probes == "whole" or known or check_budget(k, where) >= space.size:
        functional = LeafSums(space.has_real_trace, sizes, indices)
        state = TraceState(state.key, operator, functional=functional)
        estimate = estimate_whole(where, state, k, estimator, throw=throw)
    else:
        k = check_budget(k, where)
        rule, hint = "estimator must be None", "leave it out, or use probes='whole'"
        require(estimator is None, where, rule, repr(estimator), hint)
        number = sum(size > 0 for size in sizes)
        rule, hint = f"k must be at least {3 * number}", "or leave out probes='blocks'"
        rule = f"{rule}, three products for each of {number} blocks"
        require(k >= 3 * number, where, rule, str(k), hint)
        estimate = _by_block(with_data(state), k, indices)
        estimate = raise_failure(estimate) if throw else estimate

    def by_group(x):
        if groups is None:
            return treedef.unflatten(list(x[:-1]))
        return dict(zip(members, x[:-1], strict=True))

    state = DerivedState(where)
    by_leaf = _with_parts(estimate, by_group, state)
    return by_leaf, _with_parts(estimate, lambda x: x[-1], state)


def _broadcast_labels(groups: PyTree, structure: PyTree, where: str) -> list[Hashable]:
    def is_labelled(*kinds):
        labels = jtu.tree_leaves(groups)
        return all(isinstance(x, kinds) and not isinstance(x, bool) for x in labels)

    valid = is_labelled(str) or is_labelled(int, np.integer)
    rule, hint = (
        "groups must have labels of one kind",
        "use strings, or Python integers",
    )
    require(valid, where, rule, f"{groups}", hint, TypeError)
    try:
        return jtu.tree_leaves(jax.tree.broadcast(groups, structure))
    except ValueError as error:
        raise ValueError(
            f"{where}: groups must be a prefix of the operator's input "
            f"{jtu.tree_structure(structure)}, got {groups}; label every subtree."
        ) from error


@jitted
@automatic
def _by_block(
    state: TraceState, k: int, groups: tuple[tuple[int, ...], ...]
) -> Estimate:
    """Hutchinson's estimates for the block traces in every group, and their sum.

    Blocks that are exact with fewer probes leave the rest of their share to the others.
    """
    operator, space = state.operator, state.space
    dtype = space.real_dtype if space.has_real_trace else space.compute_dtype
    sizes = [math.prod(leaf.shape) for leaf in space.leaves]
    keys = jax.random.split(state.key, len(sizes))
    # Empty leaves have trace 0.
    zero = jnp.zeros((), dtype)
    bars, used = [exact_bar(zero, jnp.abs(zero))] * len(sizes), 0
    order = sorted((size, i) for i, size in enumerate(sizes) if size > 0)
    for finished, (size, i) in enumerate(order):
        share = (k - used) // (len(order) - finished)
        block = TraceState(keys[i], block_of(operator, i))
        plan = make_plan(HutchinsonEstimator(), block, share, None)
        outcome, _ = outcome_of(plan, block)
        bars[i] = cast_bar(outcome.bars[0], dtype)
        used += min(share, size)
    # Probes on different leaves are independent.
    sums = [sum_of_independent(*(bars[i] for i in group)) for group in groups]
    bars = [*sums, sum_of_independent(*bars)]
    bar = ErrorBar(*map(jnp.stack, zip(*bars, strict=True)))
    outcome = Outcome([bar], [RESULTS.successful], {"num_matvecs": jnp.int32(used)})
    return make_estimate(outcome, state.treedef, state)


def block_of(
    operator: lx.AbstractLinearOperator, index: int
) -> lx.AbstractLinearOperator:
    """The diagonal block for one leaf.

    Its product is the derivative with respect to that leaf alone, so that JAX computes
    neither products with other input leaves nor other output leaves.
    """
    leaves, treedef = jtu.tree_flatten(operator.in_structure())
    zeros = [jnp.zeros(x.shape, x.dtype) for x in leaves]

    def product(x):
        vector = treedef.unflatten([*zeros[:index], x, *zeros[index + 1 :]])
        return jtu.tree_leaves(operator.mv(vector))[index]

    def mv(x):
        zero = widened(zeros[index], axes_of(x))
        return jax.jvp(product, (zero,), (x,))[1]

    return linear_function(mv, structure_of(leaves[index]), solver_tags(operator))


_NORM = "traceax.frobenius_norm_squared"


def frobenius_norm_squared(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: TraceEstimator | None = None,
    *,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `|A|_F^2 = tr(A^* A)` from at most `k` products with A or `A^*`.

    A may be any linear operator, square or not, that is Hermitian or that lineax can
    transpose. `A^* A` is semidefinite, so [`traceax.XNysTraceEstimator`][] estimates
    its trace, from two products each. With `k >= n`, the number of columns, the answer
    is exact from products with A alone. The value is differentiable in `operator`.

    **Arguments:** as for [`traceax.trace`][] with `A^* A`, without tolerances; `k` is
    at least 2, unless `n = 1`.

    **Returns:** a [`traceax.Estimate`][] with a real value. `num_matvecs` counts both.
    """
    where = _NORM
    if not isinstance(operator, lx.AbstractLinearOperator):
        checked_operator(operator, where)
    operator = as_complex(operator)
    k, space = check_budget(k, where), space_of(operator)
    if k >= space.size:
        check_key(key, where)
        estimate = _exact_norm(as_data(operator))
        return raise_failure(estimate) if throw else estimate
    hint = "an estimate takes a product with A and one with its adjoint"
    require(k > 1, where, "k must be at least 2", "1", hint)
    # Squared products may over- or underflow: we scale A by the size of one product.
    spent, unit = int(k > 2), jnp.ones((), space.real_dtype)
    if spent:
        unit = product_size(as_data(operator))
    scaled = operator * (1 / unit).astype(space.dtype)
    adjoint = scaled
    if not is_hermitian(operator):
        adjoint = scaled.transpose()
        adjoint = lx.conj(adjoint) if space.is_complex else adjoint
    gram = lx.TaggedLinearOperator(adjoint @ scaled, lx.positive_semidefinite_tag)
    state, change = init_state(key, gram, where), jtu.Partial(_unscaled, unit, spent)
    k = (k - spent) // 2
    return estimate_whole(where, state, k, estimator, throw=throw, change=change)


def _unscaled(
    unit: Float[Array, ""], spent: int, outcome: Outcome
) -> tuple[Outcome, DerivedState]:
    """`unit^2` times the outcome. Each product counts twice, for A and its adjoint."""
    used = 2 * outcome.stats["num_matvecs"] + spent
    # We multiply twice, because the squared unit may over- or underflow.
    outcome = outcome.times(unit).times(unit).with_stats(num_matvecs=used)
    return outcome, DerivedState(_NORM)


@jitted
@automatic
def _exact_norm(operator: lx.AbstractLinearOperator) -> Estimate:
    outcome = norm_squared(operator)
    return make_estimate(outcome, jtu.tree_structure(0), DerivedState(_NORM))


def _with_parts(
    estimate: Estimate, part: Callable[[Array], Any], state: PyTree
) -> Estimate:
    freedom = estimate.stats["degrees_of_freedom"]
    freedom = part(jnp.broadcast_to(freedom, estimate.value.shape))
    value, error = part(estimate.value), part(estimate._standard_error)
    stats = {**estimate.stats, "degrees_of_freedom": freedom}
    return estimate.replaced(
        value=value, standard_error=error, stats=stats, state=state, evidence=None
    )
