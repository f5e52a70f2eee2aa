"""Checks of keys, budgets and numbers, in the words of error messages."""

import contextlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Key

# Of a budget that isn't given.
_FEWEST_OF_CAP, _MOST_OF_CAP, _ENTRIES_OF_CAP = 64, 1000, 2**27


def kind_of(x: Any) -> str:
    """What was got."""
    arrays = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic
    if isinstance(x, arrays):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    if isinstance(x, type):
        return f"the class {_full_name(x)}"
    if x is None or isinstance(x, str | bool | int | float | complex):
        return f"{x!r} of type {type(x).__name__}"
    return f"an object of type {_full_name(type(x))}"


def _full_name(cls: type) -> str:
    # Several libraries have a `MatrixLinearOperator`. Users don't see private modules.
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
    """Raises `error` unless the condition holds; a string that was got stands as it is."""
    if not condition:
        received = received if isinstance(received, str) else kind_of(received)
        raise error(f"{where}: {requirement}, got {received}; {hint}.")


def check_real_scalar(x: Any, name: str, where: str, hint: str) -> None:
    """Refuses what isn't a real number, which may be traced."""
    numbers = int | float | complex | np.number | np.ndarray | jax.Array
    number = isinstance(x, numbers) and not isinstance(x, bool)
    kinds = jnp.floating, jnp.integer
    real = number and any(jnp.issubdtype(jnp.result_type(x), kind) for kind in kinds)
    if not real or np.ndim(x) != 0:
        error = ValueError if number else TypeError
        requirement = f"{name} must be a real scalar"
        raise error(f"{where}: {requirement}, got {kind_of(x)}; {hint}.")


def known_number(x: Any) -> float | None:
    """The value of a real scalar, unless it is traced."""
    return None if isinstance(x, jax.core.Tracer) else float(x)


def known_minimum(x: object) -> float | None:
    """The smallest of real numbers, unless they are traced."""
    if isinstance(x, jax.core.Tracer):
        return None
    return float(np.min(np.asarray(x, float), initial=np.inf))


def check_key(key: object, where: str) -> Key[Array, ""]:
    """A single typed key from a typed or legacy key."""
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return jnp.asarray(key)
    if is_array and key.dtype == jnp.uint32 and key.shape in ((2,), (4,)):
        with contextlib.suppress(TypeError, ValueError):
            return jax.random.wrap_key_data(jnp.asarray(key))
    raise TypeError(
        f"{where}: key must be a single key, got {kind_of(key)}; make one with "
        "jax.random.key(0), split several with jax.random.split and use jax.vmap over "
        "them. It is the first argument."
    )


def inexact(x: object) -> Inexact[Array, "..."]:
    """Floating-point numbers. Without 64-bit mode `jnp.asarray(x)` cuts integers to 32 bits."""
    given = x if isinstance(x, jax.Array) else np.asarray(x)
    return jnp.asarray(x, None if jnp.issubdtype(given.dtype, jnp.inexact) else float)


def check_integers(x: object, name: str, where: str) -> None:
    """Refuses NumPy integers that JAX would cut to 32 bits."""
    if isinstance(x, np.ndarray | np.generic) and x.size and x.dtype.kind in "iu":
        least, largest = int(x.min()), int(x.max())
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        limits, requirement = (
            np.iinfo(dtype),
            f"{name} must hold integers that fit in {dtype}",
        )
        hint = "convert them by x.astype(float), or enable 64-bit mode"
        fits = limits.min <= least and largest <= limits.max
        require(fits, where, requirement, f"{least} to {largest}", hint)


def check_budget(k: Any, where: str) -> int:
    """`k` as a positive Python int."""
    if isinstance(k, jax.core.Tracer):
        raise TypeError(
            f"{where}: k must be a Python int known at trace time, got a traced value; "
            "pass it as a static argument."
        )
    integer = isinstance(k, int | np.integer) and not isinstance(k, bool)
    if integer and k >= 1:
        return int(k)
    hint = "pass the number of matrix-vector products that may be used, int(k) say"
    received = f"the boolean {k}" if isinstance(k, bool | np.bool_) else kind_of(k)
    require(integer, where, "k must be a Python int", received, hint, TypeError)
    raise ValueError(f"{where}: k must be at least 1, got {k}; {hint}.")


def resolve_budget(k: object, tolerance: object, n: int, where: str) -> int:
    """`k` as a positive Python int. Left out, with a tolerance, `most_products`, or 2 n
    where n is at most 1,000: the last n give the exact answer.
    """
    if k is not None:
        return check_budget(k, where)
    requirement = (
        "k must be a Python int unless rtol or atol is given, or the estimate has a "
        "bracket (traceax.KrylovAwareEstimator, of an operator that is tagged positive "
        "semidefinite, or lower=, and a monotone function)"
    )
    hint = "pass the number of matrix-vector products that may be used"
    require(tolerance is not None, where, requirement, k, hint, TypeError)
    return max(1, 2 * n) if n <= _MOST_OF_CAP else most_products(n)


def most_products(n: int) -> int:
    """1,000 products, and fewer where blocks of 2^27 entries are full before."""
    return min(_MOST_OF_CAP, max(_FEWEST_OF_CAP, _ENTRIES_OF_CAP // max(n, 1)))


def check_level(level: Any, where: str) -> float:
    """The level of an interval, a Python number."""
    number = isinstance(level, float | int | np.number) and level is not True
    if number and 0 < level < 1:
        return float(level)
    hint = "write 0.95 for an interval of 95 %"
    received = kind_of(level)
    require(number, where, "level must be a Python number", received, hint, TypeError)
    raise ValueError(
        f"{where}: level must lie strictly between 0 and 1, got {level}; {hint}."
    )


def without_numpy(given: object) -> Any:
    """A NumPy integer as a Python one; anything else as it is."""
    return int(given) if isinstance(given, np.integer) else given


def check_optional_integer(
    given: Any, name: str, where: str, *, least: int, meaning: str
) -> None:
    """Refuses what is neither `None` nor an integer of at least so much."""
    if given is None:
        return
    hint, received = f"it is {meaning}", kind_of(given)
    integer = isinstance(given, int) and not isinstance(given, bool)
    require(integer, where, f"{name} must be an int or None", received, hint, TypeError)
    require(given >= least, where, f"{name} must be at least {least}", f"{given}", hint)
