"""Preconditioners from operator columns, and the choice of their pivots."""

import functools as ft
import math
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, Key

from ._arguments import (
    check_key,
    check_real_scalar,
    known_minimum,
    require,
    without_numpy,
)
from ._linalg.pivoted_cholesky import Pivots, choose, spread
from ._linalg.types import without_derivatives
from ._linalg.whitening import Preconditioner, Whitening, scale_only, whiten
from ._operators.check import as_data, checked_operator, jitted, shift_of
from ._operators.entries import columns_of, diagonal_of, has_known_entries
from ._operators.space import ByProducts, apply_block, space_of

# We fold this into the key for pivots. Probe j folds in j, and j is always smaller.
_PIVOT_FOLD = np.uint32(2**32 - 1)
# Without a number, we take up to 24 sqrt(n) columns, and up to 2^26 entries.
_PAYING, _MOST_NUMBERS = 24, 2**26
# If few columns reach the noise, we keep twice their number, rounded up to 64.
_ROUND_TO, _SPARE = 64, 2
# From 12 sqrt(n) columns on, we eliminate rows. A preconditioner from columns takes about
# four times as long, and is more accurate if few columns leave little of the noise.
_ELIMINATING, _SUFFICIENT = 12, 0.03


def choose_pivots(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    columns: int | None = None,
    *,
    shift: ArrayLike,
    throw: bool = True,
) -> Int[Array, " columns"]:
    r"""Chooses the operator columns (pivots) that a preconditioner is made from.

    ```python
    pivots = traceax.choose_pivots(key, operator, shift=noise)
    ```

    Call this outside of the loss that you minimise: pivots that change at every
    evaluation make the loss jump. Pivots are data and have no derivative.

    A randomly pivoted Cholesky factorisation chooses up to `12 sqrt(n)` pivots, until
    the mean residual diagonal is below 0.001 times the noise, or columns reduce it too
    little, as for the identity. It reads the diagonal and at least one column per
    pivot. We spread the rest over the rows, at one column each: a preconditioner needs
    them later in a fit, when length scales and noise have shrunk, and rows to eliminate
    needn't be chosen better. A preconditioner uses only pivots with a residual that is
    large enough relative to the noise, and `stats["num_columns"]` counts them. Pass
    diagonal terms of the operator as `shift`.

    **Arguments:**

    - `key`: as for [`traceax.trace`][].
    - `operator`: a positive semidefinite operator on n unknowns with readable entries:
        a [`traceax.KernelLinearOperator`][], a dense or sparse matrix, or their sum.
    - `columns`: the maximum number of columns, a Python int up to n. By default, twice
        the number that reaches the noise, up to `12 sqrt(n)`. If these leave over 0.03
        of the noise, and inside `jax.jit`, it is the number that pays, `24 sqrt(n)`
        or 3n/4. To save memory, it is at most `2^26 / n`.
    - `shift`: the noise variance, a positive scalar or n positive numbers.
    - `throw`: whether to raise a run-time error if `shift` isn't positive, or if
        columns show that the operator isn't finite and positive semidefinite.

    **Returns:** an integer array of shape `(columns,)`: distinct indices, followed by
    -1 if all further rows are multiples of chosen ones.

    **Raises:** `TypeError` for an operator whose entries can't be read.
    """
    where = "traceax.choose_pivots"
    key, operator = check_key(key, where), checked_operator(operator, where)
    operator = _with_entries(operator, where)
    n = space_of(operator).size
    noise = noise_of(operator, shift, where, throw=throw)
    automatic = columns is None
    number = default_columns(n)
    if not automatic:
        number = _check_number(columns, n, "columns", where)
    pivots = _choose(key, operator, noise, number)
    number = _paying_columns(pivots, n) if automatic else number
    pivots = _spread(key, operator, noise, pivots, number)
    indices = pivots.indices
    failures = {
        "shift must be positive, got 0, a negative number or NaN; it is the noise.": ~(
            jnp.all(noise > 0)
        ),
        "the operator's diagonal and columns must be finite, got NaN or infinity; "
        "check its parameters and the points of a kernel.": ~pivots.finite,
        "the operator must be positive semidefinite, got a negative entry in its "
        "diagonal or residual diagonal; pass the noise as shift=, and compute a kernel "
        "in a precision that keeps it semidefinite.": ~pivots.semidefinite,
    }
    for message, failed in failures.items() if throw else ():
        indices = eqx.error_if(indices, failed, f"{where}: {message}")
    return indices


def check_preconditioner(
    preconditioner: object, operator: lx.AbstractLinearOperator, where: str
) -> int | Int[Array, " r"] | Preconditioner | None:
    """Checks a column count, pivots, a `Preconditioner` or `None` for this operator."""
    space, preconditioner = space_of(operator), without_numpy(preconditioner)
    if preconditioner is None:
        return None
    if isinstance(preconditioner, Preconditioner):
        return check_own(preconditioner, space.size, space.compute_dtype, where)
    _with_entries(operator, where)
    if isinstance(preconditioner, int):
        return _check_number(preconditioner, space.size, "preconditioner", where)
    return _check_pivots(preconditioner, space.size, where)


def make_preconditioner(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    preconditioner: int | Int[Array, " r"] | Preconditioner | None,
    noise: Float[Array, " n"],
) -> Preconditioner:
    """Makes the preconditioner of `operator + noise` from checked arguments."""
    if preconditioner is None:
        return scale_only(noise, space_of(operator).compute_dtype)
    if isinstance(preconditioner, Preconditioner):
        return preconditioner
    pivots, semidefinite = pivots_of(key, operator, preconditioner, noise)
    whitening = _make(operator, noise, pivots)
    semidefinite = whitening.semidefinite & semidefinite
    return eqx.tree_at(lambda x: x.semidefinite, whitening, semidefinite)


def pivots_of(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    preconditioner: int | Int[Array, " r"],
    noise: Float[Array, " n"],
) -> tuple[Int[Array, " r"], Bool[Array, ""]]:
    """Pivots from the user, or chosen for a number of columns. Then we also say whether
    no residual was negative."""
    if not isinstance(preconditioner, int):
        return preconditioner, jnp.asarray(True)
    key, number = jax.random.fold_in(key, _PIVOT_FOLD), preconditioner
    pivots = _choose(key, operator, noise, number)
    if eliminates(preconditioner, len(noise)):
        pivots = _spread(key, operator, noise, pivots, number)
    return pivots.indices, pivots.semidefinite


class PreconditionedLinearOperator(ByProducts):
    """`B = M (K + N) M^*` on flat vectors. A product with B takes one product with K.

    With `P = (M^* M)^-1`, `log det (K + N) = log det P + log det B` up to rounding.
    """

    operator: lx.AbstractLinearOperator  # K
    preconditioner: Preconditioner
    noise: Float[Array, " n"]  # N

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        # We work on a block, so that a `vmap` over vectors multiplies matrices.
        product = ft.partial(apply_block, self.operator)
        block = vector[:, None]
        return self.preconditioner.sandwich(product, self.noise, block)[:, 0]

    def in_structure(self) -> jax.ShapeDtypeStruct:
        space = space_of(self.operator)
        size = self.preconditioner.num_rows(space.size)
        return jax.ShapeDtypeStruct((size,), space.compute_dtype)

    def satisfies(self, check):
        symmetric = check is lx.is_symmetric and not space_of(self).is_complex
        return symmetric or check is lx.is_positive_semidefinite


def _paying_columns(pivots: Pivots, n: int) -> int:
    """The number for a preconditioner where one suffices, else to eliminate rows."""
    number, residual = jnp.sum(pivots.indices >= 0), pivots.residual_trace / n
    if isinstance(number, jax.core.Tracer) or residual > _SUFFICIENT:
        return default_columns(n)
    # We round up, so that few numbers of columns need a program each.
    kept = _ROUND_TO * max(1, -(-_SPARE * int(number) // _ROUND_TO))
    return min(kept, len(pivots.indices))


def default_columns(n: int) -> int:
    """The number of columns that pay, for n unknowns.

    Eliminating r rows takes O(n r^2) time, and everything else O(n^2). With fewer columns
    error bars grow, and time hardly falls (8,000 points on one core).
    """
    most = min(_PAYING * n**0.5, _MOST_NUMBERS / n)
    return min(_ROUND_TO * max(1, round(most / _ROUND_TO)), max(1, 3 * n // 4))


def eliminates(
    columns: int | Int[Array, " r"] | Preconditioner | None, n: int
) -> TypeGuard[int | Int[Array, " r"]]:
    """Whether we eliminate rows, for this number of columns, or these pivots."""
    if columns is None or isinstance(columns, Preconditioner):
        return False
    number = columns if isinstance(columns, int) else len(columns)
    return _ELIMINATING * n**0.5 <= number < n


@jitted
def _choose(key, operator, noise: Float[Array, "*n"], number: int) -> Pivots:
    """Chooses pivots down to the noise, but fewer than would eliminate rows."""
    n = space_of(operator).size
    most = min(number, math.ceil(_ELIMINATING * n**0.5) - 1)
    return choose(key, *_scaled(operator, noise), most)


@jitted
def _spread(key, operator, noise: Float[Array, "*n"], pivots: Pivots, number: int):
    indices = pivots.indices[:number]
    room = number - len(indices)
    indices = jnp.pad(indices, (0, room), constant_values=-1)
    pivots = pivots._replace(indices=indices)
    return spread(key, *_scaled(operator, noise), pivots)


def _scaled(operator, noise: Float[Array, "*n"]):
    """Columns and the diagonal of `N^-1/2 K N^-1/2`, without derivatives."""
    noise = jnp.broadcast_to(noise, space_of(operator).size)
    operator, noise = without_derivatives((operator, noise))
    scale = jax.lax.rsqrt(noise)

    def columns(indices):
        block = columns_of(operator, indices)
        return block * (scale[:, None] * scale[indices][None, :]).astype(block.dtype)

    return columns, jnp.real(diagonal_of(operator)) * scale**2


@jitted
def _make(operator, noise: Float[Array, " n"], pivots: Int[Array, " r"]) -> Whitening:
    pivots = pivots.astype(jnp.int32)
    columns = columns_of(operator, jnp.maximum(pivots, 0))
    whitening = whiten(columns, jnp.real(diagonal_of(operator)), pivots, noise)
    # We can't check traced pivots earlier, so pivots beyond n give NaN.
    in_range = jnp.all(pivots < noise.shape[0])
    logdet = jnp.where(in_range, whitening.logdet, jnp.nan)
    return eqx.tree_at(lambda x: x.logdet, whitening, logdet)


def _with_entries(operator: lx.AbstractLinearOperator, where: str):
    """The operator as data, with readable entries: columns don't count towards k."""
    data = as_data(operator)
    rule = "operator must have entries that can be read, to take its columns"
    hint = (
        "pass a traceax.KernelLinearOperator or a matrix, register the class in both "
        "traceax.columns and traceax.diagonal_entries, or leave preconditioner= out"
    )
    require(has_known_entries(data), where, rule, operator, hint, TypeError)
    return data


def _check_number(number: Any, n: int, name: str, where: str) -> int:
    number, hint = without_numpy(number), "pass the maximum number of columns"
    is_int = isinstance(number, int) and not isinstance(number, bool)
    require(is_int, where, f"{name} must be a Python int", number, hint, TypeError)
    rule = f"{name} must be from 1 to n = {n}, the size of the operator"
    require(1 <= number <= n, where, rule, str(number), hint)
    return number


def check_own(
    preconditioner: Preconditioner, n: int, dtype: DTypeLike, where: str
) -> Preconditioner:
    """Refuses a custom preconditioner that doesn't fit n unknowns of this dtype."""
    block = jax.ShapeDtypeStruct((n, 2), dtype)
    hint = f"the operator acts on n = {n} unknowns of {dtype}"
    for name in ("apply", "apply_adjoint"):
        rule = f"preconditioner.{name} must keep the shape and dtype of a block (n, k)"
        try:
            out = eqx.filter_eval_shape(getattr(preconditioner, name), block)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{where}: {rule}, but it raised an error; {hint}.") from error
        keeps_shape = eqx.tree_equal(out, block) is True
        require(keeps_shape, where, rule, f"{out} for {block}", hint)
    for name in ("logdet", "lower"):
        number = getattr(preconditioner, name)
        if name == "logdet" or number is not None:
            check_real_scalar(number, f"preconditioner.{name}", where, hint)
    return preconditioner


def _check_pivots(pivots: Any, n: int, where: str) -> Int[Array, " r"]:
    hint = (
        "pass an int, pivots from traceax.choose_pivots for this operator, or an "
        "instance of a traceax.Preconditioner"
    )
    rule = (
        "preconditioner must be an int, an array of indices or a traceax.Preconditioner"
    )
    is_array = isinstance(pivots, jax.Array | np.ndarray)
    integers = is_array and jnp.issubdtype(pivots.dtype, jnp.integer)
    require(integers, where, rule, pivots, hint, TypeError)
    rule = f"pivots must be an array of shape (r,), r from 1 to n = {n}"
    require(pivots.ndim == 1 and 1 <= pivots.size <= n, where, rule, pivots, hint)
    if not isinstance(pivots, jax.core.Tracer):
        indices = np.asarray(pivots)
        smallest, largest = indices.min(), indices.max()
        rule = f"pivots must be indices below n = {n}, or -1 for no column"
        in_range = smallest >= -1 and largest < n
        require(in_range, where, rule, f"{smallest} to {largest}", hint)
    return jnp.asarray(pivots)


def noise_of(
    operator: lx.AbstractLinearOperator,
    shift: ArrayLike,
    where: str,
    *,
    throw: bool,
    positive: bool = True,
) -> Float[Array, "*n"]:
    """The noise, a scalar or `(n,)`. We check it if `throw` and `positive`."""
    space = space_of(operator)
    hint = "it is the noise, a positive number or one for each observation"
    noise = shift_of(shift, space, where, hint)
    for x in jtu.tree_leaves(shift) if throw and positive else ():
        least = known_minimum(x)
        if least is not None:
            require(least > 0, where, "shift must be positive", f"{least:.3g}", hint)
    return noise
