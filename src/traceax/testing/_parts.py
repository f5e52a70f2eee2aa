"""What preconditioners and operators promise that estimates take them for."""

import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import ArrayLike

from .._linalg.whitening import Preconditioner
from .._operators.block import apply_block, space_of
from .._operators.check import checked_operator
from .._operators.entries import columns_of, diagonal_of
from .._preconditioner import check_own


def check_preconditioner(
    preconditioner: Preconditioner,
    operator: lx.AbstractLinearOperator,
    *,
    shift: ArrayLike = 0.0,
) -> None:
    """Checks what [`traceax.Preconditioner`][] promises, of an operator of small order n.

    | check | what must hold |
    |---|---|
    | linear | `apply` of a sum is the sum |
    | adjoint | `apply` and `apply_adjoint` are matrices that are each other's adjoint |
    | invertible | no singular value of M is 0 beside the largest |
    | logdet | is `-log det (M^* M)` |
    | lower | no eigenvalue of `M (A + shift) M^*` is below it |

    n products with the operator, and O(n^3) time.

    **Raises:** `AssertionError` that lists every failed check; as [`traceax.logdet`][] for
    what isn't of the operator's size and dtype.
    """
    where = "traceax.testing.check_preconditioner"
    space = space_of(checked_operator(operator, where))
    check_own(preconditioner, space.size, space.compute_dtype, where)
    one = jnp.eye(space.size, dtype=space.compute_dtype)
    A, M, twice, adjoint = (
        np.asarray(x)
        for x in (
            apply_block(operator, one),
            preconditioner.apply(one),
            preconditioner.apply(2 * one),
            preconditioner.apply_adjoint(one),
        )
    )
    A = A + np.diag(np.broadcast_to(np.asarray(shift), len(A)))
    tolerance = 1e4 * float(jnp.finfo(space.compute_dtype).eps)
    sizes = np.linalg.svd(M, compute_uv=False)
    logdet, given = -2 * np.sum(np.log(sizes)), float(preconditioner.logdet)
    values = np.linalg.eigvalsh(M @ A @ M.conj().T)
    lower, unit = preconditioner.lower, tolerance * max(1.0, np.max(np.abs(values)))
    size_of_logdet = np.sum(1 + np.abs(np.log(sizes)))
    wrong = {
        "linear": not _near(twice, 2 * M, tolerance),
        "adjoint": not _near(adjoint, M.conj().T, tolerance),
        "invertible": not sizes[-1] > tolerance * sizes[0] / len(sizes),
        f"logdet, {given:.6g} for {logdet:.6g}": (
            not abs(logdet - given) <= tolerance * size_of_logdet
        ),
        f"lower, {lower} for {values[0]:.6g}": (
            lower is not None and values[0] < lower - unit
        ),
    }
    _raise(preconditioner, wrong)


def check_entries(operator: lx.AbstractLinearOperator) -> None:
    """Checks what is registered in [`traceax.columns`][] and [`traceax.diagonal_entries`][].

    Both must be those of the products, of an operator of small order n: a wrong diagonal is
    a wrong number of a short error bar. n products, and O(n^2) memory.

    **Raises:** `AssertionError` that lists every failed check; `NotImplementedError` for an
    operator that has not registered both.
    """
    operator = checked_operator(operator, "traceax.testing.check_entries")
    space = space_of(operator)
    A = np.asarray(
        apply_block(operator, jnp.eye(space.size, dtype=space.compute_dtype))
    )
    # Not in order, and one of them twice.
    indices = np.append(np.arange(space.size)[::-1], 0)
    columns = columns_of(operator, jnp.asarray(indices, jnp.int32))
    tolerance = 1e4 * float(jnp.finfo(space.compute_dtype).eps)
    wrong = {
        "columns": not _near(columns, A[:, indices], tolerance),
        "diagonal_entries": not _near(diagonal_of(operator), np.diag(A), tolerance),
    }
    _raise(operator, wrong)


def _near(x, y, tolerance: float) -> bool:
    return bool(np.max(np.abs(np.asarray(x) - y)) <= tolerance * np.max(np.abs(y)))


def _raise(given, wrong: dict[str, bool]) -> None:
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        kind = type(given).__name__
        raise AssertionError(f"{kind} fails traceax's checks: {'; '.join(found)}.")
