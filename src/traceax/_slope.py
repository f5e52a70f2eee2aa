"""Error bars for derivatives: directional derivatives as estimates.

An estimate's samples are linear in products `A V` with fixed blocks V. Samples for its
derivative along dA are the same function applied to `dA V`, and the derivative takes these
products anyway. An estimate carries `A V` as `Evidence`, whose tangents are `dA V`.
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
from ._results import finite_or_failed
from ._state import DerivedState


def jvp(
    fn: Callable[..., Estimate],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Estimate, Estimate]:
    r"""An estimate and its directional derivative, which is an estimate too.

    ```python
    def log_likelihood(length):
        return traceax.gaussian_log_likelihood(key, kernel(length), y, shift=noise)

    value, slope = traceax.jvp(log_likelihood, (0.3,), (1.0,))
    ```

    The slope equals `jax.jvp` of the estimate's value, and its error bar follows from its
    own samples. One run gives both; `jax.vmap` over tangents gives a slope per parameter.

    | | |
    |---|---|
    | estimators | Hutchinson, Hutch++, XTrace, XNysTrace, AdaptiveXTrace, KrylovAware, LanczosQuadrature |
    | quantities | traces and spectral functions; not diagonals |
    | products | as for the estimate and its derivative |
    | standard error | as for the value, from the slope's samples; spectral functions add the truncation error |

    **Arguments:**

    - `fn`: a function from the primals to a [`traceax.Estimate`][]. Return it as the library
        does: if you change its value, its error bar does not follow.
    - `primals`, `tangents`: tuples of PyTrees with equal structures, shapes and dtypes.

    **Returns:** a tuple of two [`traceax.Estimate`][]s. For traces, you can differentiate the
    slope's value. Its `stats` hold the degrees of freedom, and its `result` covers both.

    **Raises:** `TypeError` if `fn` returns no estimate or tangents don't match;
    `NotImplementedError` if derivatives have no error bar, and for a slope of a slope.
    """
    where = "traceax.jvp"
    for name, entries in (("primals", primals), ("tangents", tangents)):
        rule = f"{name} must be a tuple with one entry for each argument of fn"
        hint = f"write ({name[:-1]},) for a single argument"
        require(
            isinstance(entries, tuple | list), where, rule, entries, hint, TypeError
        )
    primals, tangents = tuple(primals), tuple(tangents)
    _check_tangents(primals, tangents, where)
    tangents = jtu.tree_map(
        lambda x, t: jnp.asarray(t, jnp.result_type(x)), primals, tangents
    )

    def checked(*arguments):
        estimate = fn(*arguments)
        rule, valid = (
            "fn must return a traceax.Estimate",
            isinstance(estimate, Estimate),
        )
        hint = "return one estimate itself, such as `.logdet`, and not its value"
        require(valid, where, rule, estimate, hint, TypeError)
        return estimate

    value, tangent = eqx.filter_jvp(checked, primals, tangents)
    shape = np.shape(value.stats["num_matvecs"])
    rule = "fn must return a single estimate, with shape ()"
    require(shape == (), where, rule, f"{shape}", "write jax.vmap around traceax.jvp")
    if value._evidence.unbox() is None:
        raise NotImplementedError(
            "traceax.jvp: fn returns an estimate whose derivatives have no error bar, such "
            "as a diagonal, or a slope of a slope; use jax.jvp on its value, or estimate a "
            "trace or a spectral function with traceax.HutchinsonEstimator, "
            "HutchPlusPlusEstimator, XTraceEstimator, XNysTraceEstimator, "
            "AdaptiveXTraceEstimator or KrylovAwareEstimator."
        )
    return value, _slope(value, tangent)


@eqx.filter_jit
def _slope(value: Estimate, tangent: Estimate) -> Estimate:
    """The derivative of an estimate, as an estimate."""

    def slope_of(x, t):
        return jnp.zeros_like(x) if t is None else t

    slope = jtu.tree_map(slope_of, value.value, tangent.value)
    treedef = jtu.tree_structure(value.value)
    evidence, tangents = value._evidence.unbox(), tangent._evidence.unbox_tangent()
    bars = evidence.slopes(jtu.tree_leaves(slope), tangents)
    known = [jnp.isfinite(x) for x in treedef.flatten_up_to(value._standard_error)]
    # We do not know the slope's error unless we know the value's error.
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
        state=DerivedState("traceax.jvp"),
        evidence=None,
    )


def _check_tangents(primals: tuple, tangents: tuple, where: str) -> None:
    hint = "give each primal a tangent with its structure, shapes and dtypes"
    expected, received = jtu.tree_structure(primals), jtu.tree_structure(tangents)
    rule = f"tangents must have the structure of primals, {expected}"
    require(expected == received, where, rule, str(received), hint, TypeError)
    for x, t in zip(jtu.tree_leaves(primals), jtu.tree_leaves(tangents), strict=True):
        number = isinstance(x, float | complex | np.ndarray | np.generic | jax.Array)
        inexact = number and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        rule = "primals must be floating-point numbers and arrays"
        remedy = "close over arguments that you don't differentiate"
        require(inexact, where, rule, x, remedy, TypeError)
        matches = jnp.iscomplexobj(x) or not jnp.iscomplexobj(t)
        matches = matches and jnp.shape(x) == jnp.shape(t)
        pair = f"{kind_of(t)} for {kind_of(x)}"
        require(matches, where, "tangents must match primals", pair, hint, TypeError)
