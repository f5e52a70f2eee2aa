"""Preconditioners made of columns of an operator, and their pivots."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Inexact, Int, Key

from ._arguments import (
    check_key,
    check_real_scalar,
    known_minimum,
    require,
    without_numpy,
)
from ._linalg.pivoted_cholesky import Pivots, choose, spread
from ._linalg.whitening import Preconditioner, Whitening, scale_only, whiten
from ._operators.check import as_data, checked_operator, jitted, shift_of
from ._operators.entries import columns_of, diagonal_of, has_known_entries
from ._operators.space import ByProducts, apply_block, space_of

# Probe j is drawn from `fold_in(key, j)`.
_KEY_OF_PIVOTS = np.uint32(2**32 - 1)


def choose_pivots(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    columns: int,
    *,
    shift: ArrayLike,
    throw: bool = True,
) -> Int[Array, " columns"]:
    r"""Columns of a positive semidefinite operator to make a preconditioner of.

    ```python
    pivots = traceax.choose_pivots(key, operator, 600, shift=noise)
    ```

    Outside of the loss that is minimised: pivots that are chosen anew at every
    evaluation make it jump. They are data, of which there is no derivative.

    A randomly pivoted Cholesky factorisation reads as many columns of the operator and its
    diagonal, until the mean of the residual diagonal is below 0.001 of the noise, or columns
    buy nothing, as those of the identity. The rest of `columns` is spread over the rows, for
    as many columns more: these are for later, when length scales and the noise have shrunk.
    They take part wherever they leave enough beside the noise: `stats["num_columns"]`. A
    diagonal part of the operator belongs into `shift`: columns hold none of it but their own.

    **Arguments:**

    - `key`: as of [`traceax.trace`][].
    - `operator`: positive semidefinite, of n unknowns, whose entries can be read: a
        [`traceax.KernelLinearOperator`][], a matrix, dense or sparse, or a sum of such.
    - `columns`: how many at most, a Python int up to n.
    - `shift`: the noise: a positive scalar, or n of them.
    - `throw`: whether to raise an error at run time, if an array of `shift` isn't positive,
        or the operator is seen not to be finite and positive semidefinite.

    **Returns:** an array of `columns` integers, the indices, no two equal; the last ones
    are -1 where no row is left that differs from the others.

    **Raises:** `TypeError` for an operator known by its products alone.
    """
    where = "traceax.choose_pivots"
    key, operator = check_key(key, where), checked_operator(operator, where)
    operator = _with_entries(operator, where)
    columns = _check_number(columns, space_of(operator).size, "columns", where)
    noise = noise_of(operator, shift, where, throw=throw)
    pivots = _choose(key, operator, noise, columns, later=True)
    indices = pivots.indices
    failures = {
        "shift must be positive, got one that isn't; it is the noise.": ~jnp.all(
            noise > 0
        ),
        "the operator's diagonal and columns must be finite, got NaN or infinity; check its "
        "parameters and the points of a kernel.": ~pivots.finite,
        "the operator must be positive semidefinite, got one whose diagonal, or what "
        "columns leave of it, is below 0; the noise belongs into shift=, and a kernel must "
        "be so in the precision it is computed in.": ~pivots.semidefinite,
    }
    for message, failed in failures.items() if throw else ():
        indices = eqx.error_if(indices, failed, f"{where}: {message}")
    return indices


def check_preconditioner(
    given: object, operator: lx.AbstractLinearOperator, where: str
) -> int | Int[Array, " r"] | Preconditioner | None:
    """A number of columns, pivots, a preconditioner or `None`, for this operator."""
    space, given = space_of(operator), without_numpy(given)
    if given is None:
        return None
    if isinstance(given, Preconditioner):
        return check_own(given, space.size, space.compute_dtype, where)
    _with_entries(operator, where)
    if isinstance(given, int):
        return _check_number(given, space.size, "preconditioner", where)
    return _check_pivots(given, space.size, where)


def make_preconditioner(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    preconditioner: int | Int[Array, " r"] | Preconditioner | None,
    noise: Float[Array, " n"],
) -> Preconditioner:
    """That of `operator + noise`, of so many columns at most, of pivots chosen before, or
    the given one, once checked."""
    if preconditioner is None:
        return scale_only(noise, space_of(operator).compute_dtype)
    if isinstance(preconditioner, Preconditioner):
        return preconditioner
    if isinstance(preconditioner, int):
        key = jax.random.fold_in(key, _KEY_OF_PIVOTS)
        pivots = _choose(key, operator, noise, preconditioner)
        made = _make(operator, noise, pivots.indices)
        semidefinite = made.semidefinite & pivots.semidefinite
        return eqx.tree_at(lambda x: x.semidefinite, made, semidefinite)
    return _make(operator, noise, preconditioner)


class PreconditionedLinearOperator(ByProducts):
    """`B = M (K + N) M^*` on flat vectors: a product with it is one with K.

    Of K and N themselves: `log det (K + N) = log det P + log det B` to rounding for any P.
    """

    operator: lx.AbstractLinearOperator  # K
    preconditioner: Preconditioner
    noise: Float[Array, " n"] | None = None  # N, unless the preconditioner knows it

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        # Of a `vmap` over vectors all of this makes products of blocks.
        product = ft.partial(apply_block, self.operator)
        block = vector[:, None]
        return self.preconditioner.sandwich(product, self.noise, block)[:, 0]

    def in_structure(self) -> jax.ShapeDtypeStruct:
        space = space_of(self.operator)
        return jax.ShapeDtypeStruct((space.size,), space.compute_dtype)

    def _satisfies(self, check):
        symmetric = check is lx.is_symmetric and not space_of(self).is_complex
        return symmetric or check is lx.is_positive_semidefinite


@jitted
def _choose(
    key, operator, noise: Float[Array, "*n"], number: int, later=False
) -> Pivots:
    """Pivots that the noise asks for, and with `later` those that `spread` adds."""
    noise = jnp.broadcast_to(noise, space_of(operator).size)
    arrays, others = eqx.partition((operator, noise), eqx.is_array)
    operator, noise = eqx.combine(jax.lax.stop_gradient(arrays), others)
    scale = jax.lax.rsqrt(noise)

    def columns(indices):
        block = columns_of(operator, indices)
        return block * (scale[:, None] * scale[indices][None, :]).astype(block.dtype)

    diagonal = jnp.real(diagonal_of(operator)) * scale**2
    pivots = choose(key, columns, diagonal, number)
    return spread(key, columns, diagonal, pivots) if later else pivots


@jitted
def _make(operator, noise: Float[Array, " n"], pivots: Int[Array, " r"]) -> Whitening:
    pivots = pivots.astype(jnp.int32)
    columns = columns_of(operator, jnp.maximum(pivots, 0))
    made = whiten(columns, jnp.real(diagonal_of(operator)), pivots, noise)
    # Of pivots that are traced it can't be told before.
    inside = jnp.all(pivots < noise.shape[0])
    logdet = jnp.where(inside, made.logdet, jnp.nan)
    return eqx.tree_at(lambda x: x.logdet, made, logdet)


def _with_entries(operator: lx.AbstractLinearOperator, where: str):
    """The operator as data, whose columns take no products that k doesn't count."""
    data = as_data(operator)
    what = "operator must have entries that can be read, to take columns of it"
    hint = (
        "take a traceax.KernelLinearOperator or a matrix, register the class in both of "
        "traceax.columns and traceax.diagonal_entries, or leave preconditioner= out"
    )
    require(has_known_entries(data), where, what, operator, hint, TypeError)
    return data


def _check_number(given: Any, n: int, name: str, where: str) -> int:
    given, hint = without_numpy(given), "it is how many columns there are at most"
    is_int = isinstance(given, int) and not isinstance(given, bool)
    require(is_int, where, f"{name} must be a Python int", given, hint, TypeError)
    what = f"{name} must be from 1 to n = {n}, the size of the operator"
    require(1 <= given <= n, where, what, str(given), hint)
    return given


def check_own(
    given: Preconditioner, n: int, dtype: DTypeLike, where: str
) -> Preconditioner:
    """Refuses a preconditioner that isn't of that size and dtype."""
    block = jax.ShapeDtypeStruct((n, 2), dtype)
    hint = f"the operator acts on n = {n} unknowns of {dtype}"
    for name in ("apply", "apply_adjoint"):
        what = f"preconditioner.{name} must keep the shape and dtype of a block (n, k)"
        try:
            out = eqx.filter_eval_shape(getattr(given, name), block)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{where}: {what}, got an error; {hint}.") from error
        same = eqx.tree_equal(out, block) is True
        require(same, where, what, f"{out} of {block}", hint)
    for name in ("logdet", "lower"):
        number = getattr(given, name)
        if name == "logdet" or number is not None:
            check_real_scalar(number, f"preconditioner.{name}", where, hint)
    return given


def _check_pivots(given: Any, n: int, where: str) -> Int[Array, " r"]:
    hint = (
        "pass an int, what traceax.choose_pivots returned for this operator, or an instance "
        "of a traceax.Preconditioner"
    )
    what = (
        "preconditioner must be an int, an array of indices or a traceax.Preconditioner"
    )
    is_array = isinstance(given, jax.Array | np.ndarray)
    integers = is_array and jnp.issubdtype(given.dtype, jnp.integer)
    require(integers, where, what, given, hint, TypeError)
    what = f"pivots must be an array of shape (r,), r from 1 to n = {n}"
    require(given.ndim == 1 and 1 <= given.size <= n, where, what, given, hint)
    if not isinstance(given, jax.core.Tracer):
        numbers = np.asarray(given)
        least, largest = numbers.min(), numbers.max()
        what = f"pivots must be below n = {n}, and -1 where there is none"
        inside = least >= -1 and largest < n
        require(inside, where, what, f"{least} to {largest}", hint)
    return jnp.asarray(given)


def noise_of(
    operator: lx.AbstractLinearOperator,
    shift: ArrayLike,
    where: str,
    *,
    throw: bool,
    positive: bool = True,
) -> Float[Array, "*n"]:
    """The noise, a scalar or `(n,)`; positive unless it is traced, or not to throw."""
    space = space_of(operator)
    hint = "it is the noise, a positive number or one for each observation"
    noise = shift_of(shift, space, where, hint)
    for x in jtu.tree_leaves(shift) if throw and positive else ():
        least = known_minimum(x)
        if least is not None:
            require(least > 0, where, "shift must be positive", f"{least:.3g}", hint)
    return noise
