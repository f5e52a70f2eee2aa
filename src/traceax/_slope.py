"""Error bars of derivatives: directional derivatives as estimates.

The samples of an estimate are linear in `V^* A V` for blocks V that are held fixed. Those of
its derivative along dA are the same function of `V^* dA V`, of products that the derivative
takes anyway, and so is its error bar.

An estimate has no room for a second error bar: along a tangent, that of the slope is passed
on in the place of the tangents of the standard error and of its degrees of freedom. Neither
is linear in the tangent; nothing transposes them.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Inexact, Int

from ._accuracy.error_bar import ErrorBar, leave_one_out_bar
from ._arguments import kind_of, require
from ._estimate import SLOPES, Estimate
from ._functional import Trace
from ._linalg.leave_one_out import LeaveOneOut, leave_one_out_forms
from ._linalg.small import matmul
from ._linalg.tall import column_dots, inner, side_by_side
from ._operators.block import derived, product_tangent
from ._primitive import Blocks, StandIn, refuse_slope
from ._results import finite_or_failed
from ._state import TraceState, functional_of


def jvp(
    fn: Callable[..., Estimate],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Estimate, Estimate]:
    r"""An estimate and its directional derivative, which is an estimate, too.

    ```python
    def log_likelihood(length):
        return traceax.gaussian_log_likelihood(key, kernel(length), y, shift=noise)

    value, slope = traceax.jvp(log_likelihood, (0.3,), (1.0,))
    ```

    As `jax.jvp` of the estimate's value, and with the error bar that the samples of the
    slope have. From one run; `jax.vmap` over tangents gives one for each parameter.

    | | |
    |---|---|
    | estimators | Hutchinson, Hutch++, XTrace, XNysTrace, AdaptiveXTrace, KrylovAware |
    | of | traces and spectral functions; not of diagonals |
    | products | those of the estimate and of its derivative |
    | standard error | as of the value, from samples of the slope; of spectral functions also what the Krylov space leaves |

    **Arguments:**

    - `fn`: from the primals to a [`traceax.Estimate`][], as one of the library's functions
        returns it: what else is done to its value isn't done to its error bar.
    - `primals`, `tangents`: tuples of PyTrees of equal structures, shapes and dtypes.

    **Returns:** a tuple of two [`traceax.Estimate`][]s. The slope's value can be
    differentiated; its `stats` hold the degrees of freedom, and its `result` that of both.

    **Raises:** `TypeError` for an `fn` that returns no estimate, and for tangents that don't
    match; `NotImplementedError` for an estimator whose derivatives have no error bar, and
    for a slope of a slope.
    """
    where = "traceax.jvp"
    for name, given in (("primals", primals), ("tangents", tangents)):
        what = f"{name} must be a tuple, one for each argument of fn"
        hint = f"write ({name[:-1]},) for a single one"
        require(isinstance(given, tuple | list), where, what, given, hint, TypeError)
    if SLOPES.value:
        raise NotImplementedError(
            f"{where}: a slope of a slope has no error bar; take jax.jvp or jax.grad of "
            "the slope's value."
        )
    primals, tangents = tuple(primals), tuple(tangents)
    _check_tangents(primals, tangents, where)
    tangents = jtu.tree_map(
        lambda x, t: jnp.asarray(t, jnp.result_type(x)), primals, tangents
    )

    def checked(*arguments):
        estimate = fn(*arguments)
        what, right = (
            "fn must return a traceax.Estimate",
            isinstance(estimate, Estimate),
        )
        hint = "return the estimate itself, such as `.logdet` of several, not its value"
        require(right, where, what, estimate, hint, TypeError)
        return estimate

    with SLOPES(True):
        value, tangent = eqx.filter_jvp(checked, primals, tangents)

    if not isinstance(functional_of(value.state), Trace):
        refuse_slope()  # of what no rule saw, such as an identity

    def slope_of(x, t):
        return jnp.zeros_like(x) if t is None else t

    def error_of(x, t):
        # What is not known of the value is not known of its slope.
        return jnp.where(jnp.isfinite(x), jnp.abs(slope_of(x, t)), jnp.inf)

    def freedom_of(x, t):
        return jnp.full_like(x, jnp.inf) if t is None else jnp.where(t > 0, t, jnp.inf)

    slope = jtu.tree_map(slope_of, value.value, tangent.value)
    error = jtu.tree_map(error_of, value._standard_error, tangent._standard_error)
    freedom = jtu.tree_map(
        freedom_of,
        value.stats["degrees_of_freedom"],
        tangent.stats["degrees_of_freedom"],
    )
    stats = {"num_matvecs": value.stats["num_matvecs"], "degrees_of_freedom": freedom}
    result = finite_or_failed(slope, value.result)
    return value, Estimate(slope, error, result, stats, value.state, value._by)


def _check_tangents(primals: tuple, tangents: tuple, where: str) -> None:
    hint = "give each primal a tangent of its structure, shapes and dtypes"
    asked, got = jtu.tree_structure(primals), jtu.tree_structure(tangents)
    what = f"tangents must have the structure of primals, {asked}"
    require(asked == got, where, what, str(got), hint, TypeError)
    for x, t in zip(jtu.tree_leaves(primals), jtu.tree_leaves(tangents), strict=True):
        numbers = isinstance(x, float | complex | np.ndarray | np.generic | jax.Array)
        inexact = numbers and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        what = "primals must be floating-point numbers and arrays"
        close = "close over what is not differentiated"
        require(inexact, where, what, x, close, TypeError)
        matches = jnp.iscomplexobj(x) or not jnp.iscomplexobj(t)
        matches = matches and jnp.shape(x) == jnp.shape(t)
        got = f"{kind_of(t)} for {kind_of(x)}"
        require(matches, where, "tangents must match primals", got, hint, TypeError)


class TestedBlocks(StandIn):
    """Blocks V and Z, and the error bar that products W with V have, `bar(V, W)`."""

    V: Inexact[Array, "n p"]
    Z: Inexact[Array, "n p"]
    bar: jtu.Partial
    count: int | Int[Array, ""] | None = None

    def derivative(self, state, tangent):
        return Blocks([(self.V, self.Z)], self.count).derivative(state, tangent)

    def slope(self, state, tangent):
        W = product_tangent(state.operator, tangent.operator, self.V)
        if W is None:
            return None
        _, error, freedom = self.bar(self.V, W)
        return functional_of(state).pair(self.Z, W), error, freedom


def with_bar(blocks: Any, bar: Callable[..., ErrorBar], *arguments: Any) -> Any:
    """Blocks V and Z; where slopes are wanted with `bar(*arguments, V, W)`."""
    if not SLOPES.value:
        return blocks
    V, Z = blocks
    return TestedBlocks(V, Z, jtu.Partial(bar, *arguments))


def leave_one_out_blocks(
    pairs: list[tuple[Array, Array]], loo: LeaveOneOut, count: int | Int[Array, ""]
) -> Any:
    """The blocks `[Q, G]` of leave-one-out estimates; with their bar, too."""
    if not SLOPES.value:
        return pairs
    bar = jtu.Partial(_leave_one_out_bar, loo)
    V, Z = (side_by_side(*x) for x in zip(*pairs, strict=True))
    return TestedBlocks(V, Z, bar, None if isinstance(count, int) else count)


def _leave_one_out_bar(loo: LeaveOneOut, V: Array, W: Array) -> ErrorBar:
    (Q, G), (WQ, WG) = (jnp.split(x, 2, axis=1) for x in (V, W))
    H, L, K = inner(Q, WQ), inner(Q, WG), inner(WQ, G)
    if loo.basis is not None:
        adjoint = loo.basis.conj().T
        H, L, K = (matmul(adjoint, x) for x in (matmul(H, loo.basis), L, K))
    paired = leave_one_out_forms(H, L, K, column_dots(G, WG), loo)
    return leave_one_out_bar(paired, loo.probes.active)


def slope_of_linear(
    estimator: Any, state: Any, tangent: Any, room: int, count: int | Int[Array, ""]
) -> tuple[Any, ...] | None:
    """Of an estimate that is linear in the operator: that of dA, by the same probes."""
    if not jtu.tree_leaves(tangent.operator):
        return None
    operator = derived(state.operator, tangent.operator)
    part = TraceState(state.key, operator, functional=functional_of(state))
    buffers = estimator.grow(part, estimator.begin(part, room), 0, room)
    return tuple(estimator.judge(part, buffers, count)[0])
