"""Error bars of derivatives: directional derivatives as estimates.

The samples of an estimate are linear in products `A V` with blocks V that are held fixed. The
samples of its derivative along dA are the same function of `dA V`, products that the
derivative takes anyway. An estimate carries them as `Evidence`, whose tangents they are.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._arguments import kind_of, require
from ._estimate import Estimate
from ._results import finite_or_failed, results_of


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

    **Returns:** a tuple of two [`traceax.Estimate`][]s. For traces the slope's
    value can be differentiated. Its `stats` hold the degrees of freedom, and its `result`
    that of both.

    **Raises:** `TypeError` for an `fn` that returns no estimate, and for tangents that don't
    match; `NotImplementedError` for an estimator whose derivatives have no error bar, and
    for a slope of a slope.
    """
    where = "traceax.jvp"
    for name, given in (("primals", primals), ("tangents", tangents)):
        what = f"{name} must be a tuple, one for each argument of fn"
        hint = f"write ({name[:-1]},) for a single one"
        require(isinstance(given, tuple | list), where, what, given, hint, TypeError)
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

    value, tangent = eqx.filter_jvp(checked, primals, tangents)
    lanes = np.shape(results_of(value.result)[0]._value)
    what = "fn must return a single estimate"
    require(lanes == (), where, what, f"{lanes}", "write jax.vmap around traceax.jvp")
    if value._evidence.unbox() is None:
        raise NotImplementedError(
            "traceax.jvp: derivatives of this estimate have no error bar; use jax.jvp of "
            "its value, or one of traceax.HutchinsonEstimator, HutchPlusPlusEstimator, "
            "XTraceEstimator, XNysTraceEstimator, AdaptiveXTraceEstimator and "
            "KrylovAwareEstimator, for a trace or a spectral function. Diagonals have none, and a "
            "slope of a slope has none."
        )
    return value, _slope(value, tangent)


@eqx.filter_jit
def _slope(value: Estimate, tangent: Estimate) -> Estimate:
    """The derivative of an estimate as an estimate."""

    def slope_of(x, t):
        return jnp.zeros_like(x) if t is None else t

    slope = jtu.tree_map(slope_of, value.value, tangent.value)
    treedef = jtu.tree_structure(value.value)
    evidence, changed = value._evidence.unbox(), tangent._evidence.unbox_tangent()
    bars = evidence.slopes(jtu.tree_leaves(slope), changed)
    known = [jnp.isfinite(x) for x in treedef.flatten_up_to(value._standard_error)]
    # The error of a slope is unknown where the error of the value is.
    pairs = zip(known, bars, strict=True)
    errors = [jnp.where(x, bar.standard_error, jnp.inf) for x, bar in pairs]
    freedoms = [x.degrees_of_freedom for x in bars]
    freedoms = [jnp.where(x > 0, x, jnp.inf) for x in freedoms]
    stats = {
        "num_matvecs": value.stats["num_matvecs"],
        "degrees_of_freedom": treedef.unflatten(freedoms),
    }
    return value.replaced(
        value=slope,
        standard_error=treedef.unflatten(errors),
        result=finite_or_failed(slope, value.result),
        stats=stats,
        evidence=None,
    )


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
