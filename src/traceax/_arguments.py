"""Arguments in the words of error messages."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def kind_of(x: Any) -> str:
    """What was got."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if x is None or isinstance(x, str | bool | int | float | complex):
        return f"{x!r} of type {type(x).__name__}"
    return f"an object of type {type(x).__name__}"


def check_real_scalar(x: Any, name: str, where: str, hint: str) -> None:
    """Refuses what isn't a real number, Python's, NumPy's or JAX's, which may be traced.

    Raises `TypeError` for what is no number, `ValueError` for arrays and complex ones.
    """
    message = f"{where}: {name} must be a real scalar, got {kind_of(x)}; {hint}"
    numbers = int | float | complex | np.number | np.ndarray | jax.Array
    if isinstance(x, bool) or not isinstance(x, numbers):
        raise TypeError(message)
    kind = jnp.result_type(x)
    real = jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
    if np.ndim(x) != 0 or not real:
        raise ValueError(message)


def known_number(x: Any) -> float | None:
    """The value of a real scalar, unless it is traced."""
    return None if isinstance(x, jax.core.Tracer) else float(x)
