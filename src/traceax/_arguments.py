"""Checks for keys, budgets and numbers, with their error messages."""

import contextlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Key

# We limit a default budget by products, and by entries in a block.
_LEAST_CAP, _LARGEST_CAP, _BLOCK_ENTRIES = 64, 1000, 2**27


def kind_of(x: Any) -> str:
    """Describes an object in an error message."""
    arrays = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic
    if isinstance(x, arrays):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    if isinstance(x, type):
        return f"the class {_full_name(x)}"
    if x is None or isinstance(x, str | bool | int | float | complex):
        return f"{x!r} of type {type(x).__name__}"
    return f"an object of type {_full_name(type(x))}"


def _full_name(cls: type) -> str:
    # Several libraries have a `MatrixLinearOperator`. We omit private modules.
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    parts = [x for x in cls.__module__.split(".") if not x.startswith("_")]
    return ".".join([*parts, cls.__qualname__])


def require(
    condition: object,
    where: str,
    requirement: str,
    received: object,
    hint: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raises `error` unless the condition holds. A `received` string stands unchanged."""
    if not condition:
        received = received if isinstance(received, str) else kind_of(received)
        raise error(f"{where}: {requirement}, got {received}; {hint}.")


def check_real_scalar(x: Any, name: str, where: str, hint: str) -> None:
    """Raises unless `x` is a real scalar, which may be traced."""
    numbers = int | float | complex | np.number | np.ndarray | jax.Array
    is_number = isinstance(x, numbers) and not isinstance(x, bool)
    kinds = jnp.floating, jnp.integer
    is_real = is_number and any(
        jnp.issubdtype(jnp.result_type(x), kind) for kind in kinds
    )
    if not is_real or np.ndim(x) != 0:
        error = ValueError if is_number else TypeError
        requirement = f"{name} must be a real scalar"
        raise error(f"{where}: {requirement}, got {kind_of(x)}; {hint}.")


def known_number(x: Any) -> float | None:
    """A real scalar as a Python float; `None` if it is traced."""
    return None if isinstance(x, jax.core.Tracer) else float(x)


def known_minimum(x: object) -> float | None:
    """The smallest number in a real array; `None` if it is traced."""
    if isinstance(x, jax.core.Tracer):
        return None
    return float(np.min(np.asarray(x, float), initial=np.inf))


def check_key(key: object, where: str) -> Key[Array, ""]:
    """Converts a single key, typed or legacy, to a typed key."""
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return jnp.asarray(key)
    if is_array and key.dtype == jnp.uint32 and key.shape in ((2,), (4,)):
        with contextlib.suppress(TypeError, ValueError):
            return jax.random.wrap_key_data(jnp.asarray(key))
    raise TypeError(
        f"{where}: key must be a single key, got {kind_of(key)}; pass one as "
        "the first argument, such as jax.random.key(0); for several, split it with "
        "jax.random.split and use jax.vmap over them."
    )


def inexact(x: object) -> Inexact[Array, "..."]:
    """Converts numbers to floating point, without cutting integers to 32 bits before."""
    numbers = x if isinstance(x, jax.Array) else np.asarray(x)
    return jnp.asarray(x, None if jnp.issubdtype(numbers.dtype, jnp.inexact) else float)


def check_integers(x: object, name: str, where: str) -> None:
    """Raises for NumPy integers that JAX would cut to 32 bits."""
    if isinstance(x, np.ndarray | np.generic) and x.size and x.dtype.kind in "iu":
        least, largest = int(x.min()), int(x.max())
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        limits, rule = np.iinfo(dtype), f"{name} must hold integers that fit in {dtype}"
        hint = "convert them with x.astype(float), or enable 64-bit mode"
        fits = limits.min <= least and largest <= limits.max
        require(fits, where, rule, f"{least} to {largest}", hint)


def check_budget(k: Any, where: str) -> int:
    """Converts the budget `k` to a positive Python int."""
    if isinstance(k, jax.core.Tracer):
        raise TypeError(
            f"{where}: k must be a Python int known at trace time, got a traced value; "
            "pass it as a static argument."
        )
    integer = isinstance(k, int | np.integer) and not isinstance(k, bool)
    if integer and k >= 1:
        return int(k)
    hint = "pass the number of allowed matrix-vector products, such as int(k)"
    received = f"the boolean {k}" if isinstance(k, bool | np.bool_) else kind_of(k)
    require(integer, where, "k must be a Python int", received, hint, TypeError)
    raise ValueError(f"{where}: k must be at least 1, got {k}; {hint}.")


def resolve_budget(
    k: object, tolerance: object, n: int, where: str, *, monotone: bool = False
) -> int:
    """Converts the budget `k`. A tolerance alone allows `most_products`, or 2 n if n is at
    most 1,000, since the last n products give the exact answer. `monotone` says that
    some functions need neither.
    """
    if k is not None:
        return check_budget(k, where)
    requirement = "k must be a Python int unless rtol or atol is given"
    hint = (
        "pass the number of allowed matrix-vector products, or a tolerance such as "
        "rtol=0.01"
    )
    if monotone:
        requirement += (
            ", or KrylovAware estimates a monotone function, such as a log-determinant, "
            "for an operator that is tagged positive semidefinite or has lower="
        )
        hint += ", or add the tag"
    require(tolerance is not None, where, requirement, k, hint, TypeError)
    return max(1, 2 * n) if n <= _LARGEST_CAP else most_products(n)


def most_products(n: int) -> int:
    """1,000 products, or fewer (at least 64) to keep blocks within 2^27 entries."""
    return min(_LARGEST_CAP, max(_LEAST_CAP, _BLOCK_ENTRIES // max(n, 1)))


def check_level(level: Any, where: str) -> float:
    """Converts an interval's level to a Python float."""
    number = isinstance(level, float | int | np.number) and level is not True
    if number and 0 < level < 1:
        return float(level)
    hint = "write 0.95 for a 95 % interval"
    received = kind_of(level)
    require(number, where, "level must be a Python number", received, hint, TypeError)
    raise ValueError(
        f"{where}: level must lie strictly between 0 and 1, got {level}; {hint}."
    )


def without_numpy(x: object) -> Any:
    """Converts a NumPy integer to a Python integer; returns anything else unchanged."""
    return int(x) if isinstance(x, np.integer) else x


def check_optional_integer(
    value: Any, name: str, where: str, *, least: int, meaning: str
) -> None:
    """Raises unless `value` is `None` or an integer that is at least `least`."""
    if value is None:
        return
    hint, received = f"it is {meaning}", kind_of(value)
    integer = isinstance(value, int) and not isinstance(value, bool)
    require(integer, where, f"{name} must be an int or None", received, hint, TypeError)
    require(value >= least, where, f"{name} must be at least {least}", f"{value}", hint)
