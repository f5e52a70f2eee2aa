"""What a preconditioner promises."""

import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import ArrayLike

from .._linalg.whitening import Preconditioner
from .._operators.block import apply_block, space_of


def check_preconditioner(
    preconditioner: Preconditioner,
    operator: lx.AbstractLinearOperator,
    *,
    shift: ArrayLike = 0.0,
) -> None:
    """Checks what [`traceax.Preconditioner`][] promises, of an operator of small order n.

    | check | what must hold |
    |---|---|
    | adjoint | `apply` and `apply_adjoint` are matrices that are each other's adjoint |
    | invertible | no singular value of M is 0 beside the largest |
    | logdet | is `-log det (M^* M)` |
    | lower | no eigenvalue of `M (A + shift) M^*` is below it |

    n products with the operator, and O(n^3) time.

    **Raises:** `AssertionError` that lists every failed check.
    """
    space = space_of(operator)
    one = jnp.eye(space.size, dtype=space.compute_dtype)
    M, adjoint, A = (
        np.asarray(f(one))
        for f in (
            preconditioner.apply,
            preconditioner.apply_adjoint,
            lambda block: apply_block(operator, block),
        )
    )
    A = A + np.diag(np.broadcast_to(np.asarray(shift), len(A)))
    tolerance = 1e4 * float(jnp.finfo(space.compute_dtype).eps)
    sizes = np.linalg.svd(M, compute_uv=False)
    logdet, lower = -2 * np.sum(np.log(sizes)), preconditioner.lower
    values = np.linalg.eigvalsh(M @ A @ M.conj().T)
    unit = tolerance * max(1.0, np.max(np.abs(values)))
    wrong = {
        "adjoint": np.max(np.abs(M - adjoint.conj().T)) > tolerance * np.max(sizes),
        "invertible": not sizes[-1] > tolerance * sizes[0] / len(sizes),
        "logdet": not abs(logdet - preconditioner.logdet)
        <= tolerance * np.sum(1 + np.abs(np.log(sizes))),
        "lower": lower is not None and values[0] < lower - unit,
    }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        kind = type(preconditioner).__name__
        raise AssertionError(f"{kind} fails traceax's checks: {', '.join(found)}.")
