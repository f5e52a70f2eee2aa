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
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Int

from ._accuracy.error_bar import leave_one_out_bar
from ._arguments import kind_of
from ._estimate import SLOPES, Estimate, finite_or_failed
from ._linalg.leave_one_out import LeaveOneOut, leave_one_out_forms
from ._linalg.small import matmul
from ._linalg.tall import column_dots, inner
from ._primitive import Blocks


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
    | estimators | Hutchinson, Hutch++, XTrace, XNysTrace, AdaptiveXTrace and KrylovAware, of traces and spectral functions |
    | products | those of the estimate and of its derivative |
    | standard error | as of the value, from samples of the slope; of spectral functions also what the last step changed |

    **Arguments:**

    - `fn`: from the primals to a [`traceax.Estimate`][], as one of the library's functions
        returns it.
    - `primals`, `tangents`: tuples of PyTrees of equal structures, shapes and dtypes.

    **Returns:** a tuple of two [`traceax.Estimate`][]s. The slope's value can be
    differentiated; its `stats` hold the degrees of freedom, and its `result` that of both.

    **Raises:** `TypeError` for an `fn` that returns no estimate, and for tangents that don't
    match; `NotImplementedError` for an estimator whose derivatives have no error bar.
    """
    where = "traceax.jvp"
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise TypeError(
                f"{where}: {name} must be a tuple, one for each argument of fn, got "
                f"{kind_of(given)}; write ({name[:-1]},) for a single one."
            )
    primals, tangents = tuple(primals), tuple(tangents)
    _check_tangents(primals, tangents, where)

    def checked(*arguments):
        estimate = fn(*arguments)
        if not isinstance(estimate, Estimate):
            raise TypeError(
                f"{where}: fn must return a traceax.Estimate, got {kind_of(estimate)}; "
                "return the estimate itself rather than its value."
            )
        return estimate

    with SLOPES(True):
        value, tangent = eqx.filter_jvp(checked, primals, tangents)

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
    if jtu.tree_structure(primals) != jtu.tree_structure(tangents):
        raise TypeError(
            f"{where}: tangents must have the structure of primals, "
            f"{jtu.tree_structure(primals)}, got {jtu.tree_structure(tangents)}; {hint}."
        )
    for x, t in zip(jtu.tree_leaves(primals), jtu.tree_leaves(tangents), strict=True):
        if not eqx.is_inexact_array_like(x):
            raise TypeError(
                f"{where}: primals must be floating-point numbers and arrays, got "
                f"{kind_of(x)}; close over what is not differentiated."
            )
        if jnp.shape(x) != jnp.shape(t) or (
            jnp.iscomplexobj(t) and not jnp.iscomplexobj(x)
        ):
            raise TypeError(
                f"{where}: tangents must match primals, got {kind_of(t)} for "
                f"{kind_of(x)}; {hint}."
            )


class LeaveOneOutBlocks(Blocks):
    """The blocks `[Q, G]` of leave-one-out estimates, and their downdates."""

    loo: LeaveOneOut

    def __init__(self, pairs, loo: LeaveOneOut, count: int | Int[Array, ""]):
        super().__init__(pairs, None if isinstance(count, int) else count)
        self.loo = loo

    def bar(self, V, W, n):
        m, basis = self.most, self.loo.basis
        Q, G, WQ, WG = V[:, :m], V[:, m:], W[:, :m], W[:, m:]
        H, L, K = inner(Q, WQ), inner(Q, WG), inner(WQ, G)
        if basis is not None:
            H, L, K = (matmul(basis.conj().T, x) for x in (matmul(H, basis), L, K))
        paired = leave_one_out_forms(H, L, K, column_dots(G, WG), self.loo)
        return leave_one_out_bar(paired, self.loo.probes.active)
