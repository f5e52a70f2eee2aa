"""Why an estimate is not finite."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Bool, Inexact, PyTree

from ._estimate import RESULTS
from ._orthogonal import nan_unless_finite
from ._product_cost import operations
from ._small_matrices import in_one_loop
from ._staging import inlined
from ._unavailable import UnavailableLinearOperator


def explain(
    result: RESULTS,
    value: Inexact[Array, "..."],
    parameters: PyTree,
    largest_product: Inexact[Array, "..."],
    *,
    solves: bool,
) -> RESULTS:
    """`result` for finite values and for known failures, else what went wrong.

    - `parameters`: of the operator. Looked at only if the value isn't finite.
    - `largest_product`: the first products, or the largest modulus of their entries, NaN
        if one is NaN (or if it isn't known). Looked at only if the value isn't finite.
    - `solves`: whether the operator solves linear systems.
    """
    leaves = [x for x in jtu.tree_leaves(parameters) if eqx.is_inexact_array(x)]
    return _explain(result, value, leaves, largest_product, solves)


# Compiled once, also for estimates that are put together outside of a program.
@functools.partial(jax.jit, static_argnums=4)
def _explain(result, value, leaves, largest_product, solves) -> RESULTS:
    def cause() -> RESULTS:
        finite, overflow = _seen(leaves, largest_product, value.real.dtype)
        fault = RESULTS.solver_failed if solves else RESULTS.nonfinite
        found = RESULTS.where(overflow, RESULTS.overflow, fault)
        return RESULTS.where(finite, found, RESULTS.nonfinite)

    finite: Bool[Array, ""] = _all_finite(value)
    known = finite | (result != RESULTS.successful)
    return jax.lax.cond(known, lambda: result, cause)


@inlined
def _all_finite(value: Inexact[Array, "..."]) -> Bool[Array, ""]:
    return jnp.isfinite(value).all()


@inlined
def _seen(
    leaves: list[Inexact[Array, "..."]],
    largest_product: Inexact[Array, "..."],
    real: np.dtype,
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """Whether parameters are finite, and whether products show an overflow."""
    info = jnp.finfo(real)
    # Sums of squares of finite numbers are finite in this unit. NaN and infinity stay.
    unit = 2.0 ** (-5 * info.maxexp // 8)

    def squares(x):
        return jnp.square(jnp.abs(x).astype(real) * unit)

    sums = [in_one_loop(jnp.sum, squares, x) for x in leaves]
    total = functools.reduce(jnp.add, sums, jnp.zeros((), real))
    # Overflow inside an operator can come out as NaN, from infinity less infinity;
    # infinite products of small parameters are a division by zero or the like.
    wide = ~(total <= float(info.max) * unit * unit)
    products = jnp.isfinite(nan_unless_finite(largest_product))
    return jnp.isfinite(total), wide | products


def solves_systems(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a function in an operator solves linear systems with lineax."""
    if isinstance(operator, UnavailableLinearOperator):
        return False

    return any(x.name == "linear_solve" for x in operations(operator))
