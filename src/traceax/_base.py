"""The abstract class of estimators, and the contract for writing a new one."""

import abc
import operator as op
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Inexact, Key, PyTree

from ._estimate import Estimate, raise_failure
from ._operator import apply_block, check_operator, has_real_trace, space_of
from ._orthogonal import largest_entry
from ._primitive import estimate_trace
from ._stream import ProbeStream


class TraceState(eqx.Module):
    """The state of an estimator that needs no set-up.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: the operator whose trace is estimated.
    """

    key: Key[Array, ""]
    operator: lx.AbstractLinearOperator


class TraceEstimator(eqx.Module):
    r"""Abstract base class of trace estimators.

    A concrete estimator is a frozen module whose fields are configuration, so that
    equal estimators compile once. It writes `init` and `compute` in plain JAX; it gets
    `estimate` from here, and with it exact answers for `k >= n`, failure reporting, and
    the derivative rule: the value's derivative is `<Z, dA V>`, whatever `compute` does
    inside. `compute` itself is never differentiated.
    """

    @abc.abstractmethod
    def init(self, key: Key[Array, ""], operator: lx.AbstractLinearOperator) -> Any:
        """Checks, and set-up that doesn't depend on the budget.

        **Arguments:**

        - `key`: as for `jax.random`; a typed key or a legacy `uint32` key.
        - `operator`: a square lineax operator.

        **Returns:**

        A state: a PyTree with at least the attributes `.key` and `.operator`, of which
        only `.operator` is differentiable. Begin with
        `traceax.init_state(key, operator)`, which checks both and is enough for most.
        """

    @abc.abstractmethod
    def compute(
        self, state: Any, k: int
    ) -> tuple[
        Inexact[Array, ""],
        Float[Array, ""],
        dict[str, PyTree],
        tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]] | ProbeStream,
    ]:
        r"""The algorithm. Called with `1 <= k < n`.

        **Arguments:**

        - `state`: as `init` returned it.
        - `k`: a Python int, the most products that may be used. Use all but at most
            two.

        **Returns:**

        A tuple `(value, standard_error, stats, (V, Z))`:

        - the estimate and its standard error (NaN where it cannot be known);
        - a dictionary with at least `"num_matvecs"`. `"degrees_of_freedom"` of the
            standard error makes the interval a Student t interval; a
            [`traceax.RESULTS`][] item under `"result"` reports a failure;
        - blocks of shape `(n, p)`, in the order of the operator's flattened structure,
            with `E[V Z^*] = I`; or a [`traceax.ProbeStream`][], which draws them when
            they are needed.
        """

    def estimate(self, state: PyTree, k: int, *, throw: bool = True) -> Estimate:
        """Estimates the trace of the state's operator with at most `k` products.

        **Arguments:**

        - `state`: as `init` returned it, or the `state` of an earlier estimate. The
            same state and `k` give the same number; a larger `k` extends the same
            sequence of probes.
        - `k`: the budget, a positive Python or NumPy integer. For `k >= n` the answer
            is exact and takes n products.
        - `throw`: whether a failure raises an error, at run time. If `False` it is
            only reported in `result`, and there is no host callback in the program.

        **Returns:**

        A [`traceax.Estimate`][].

        **Raises:**

        - `TypeError` if `k` is traced or not an integer, `ValueError` if it is below 1.
        - A run-time error for what only values can tell, such as NaN in the operator
            (see [`traceax.RESULTS`][]), unless `throw=False`.
        """
        k = check_budget(k, f"{type(self).__name__}.estimate")
        real = has_real_trace(state.operator)
        outcome = estimate_trace(self, state, k, real=real)
        estimate = Estimate(*outcome, state)
        return raise_failure(estimate) if throw else estimate

    def evaluate(self, state: Any, k: int):
        """`compute`, or the exact answer where the budget allows it."""
        if k < space_of(state.operator).size:
            return self.compute(state, k)
        return _exact(state.operator)


def _exact(operator: lx.AbstractLinearOperator):
    # n products with the coordinate vectors.
    space = space_of(operator)
    identity = jnp.eye(space.size, dtype=space.compute_dtype)
    products = apply_block(operator, identity)
    value = jnp.trace(products)
    stats = {"num_matvecs": space.size, "largest_product": largest_entry(products)}
    return value, jnp.zeros((), space.real_dtype), stats, (identity, identity)


def init_state(
    key: Key[Array, ""], operator: lx.AbstractLinearOperator, where: str = "init"
) -> TraceState:
    """Checks a key and an operator, and puts them into a state.

    **Arguments:**

    - `key`: a typed key or a legacy `uint32` key; the state holds a typed one.
    - `operator`: a lineax operator.
    - `where`: the name that error messages start with.

    **Raises:**

    - `TypeError` for anything but a single key, or for an operator that isn't a lineax
        operator or that acts on integers.
    - `ValueError` for an operator that isn't square (equal input and output
        structures), or that mixes real and complex leaves.
    """
    check_operator(operator, where)
    return TraceState(check_key(key, where), operator)


def check_key(key: Any, where: str) -> Key[Array, ""]:
    """A single typed key from a typed or legacy key."""
    if isinstance(key, jax.Array | np.ndarray):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            if key.shape == ():
                return jnp.asarray(key)
            got = f"an array of keys of shape {key.shape}"
        elif key.dtype == jnp.uint32 and key.ndim == 1 and key.shape[0] in (2, 4):
            try:
                return jax.random.wrap_key_data(jnp.asarray(key))
            except (TypeError, ValueError):
                got = f"uint32 key data of shape {key.shape}"
        else:
            got = f"an array of shape {key.shape} and dtype {key.dtype}"
    else:
        got = f"an object of type {type(key).__name__}"
    raise TypeError(
        f"{where}: key must be a single key, got {got}; make one with "
        "jax.random.key(0), split several with jax.random.split and use jax.vmap over "
        "them. The arguments start (key, operator)."
    )


def check_budget(k: Any, where: str) -> int:
    """`k` as a positive Python int."""
    if isinstance(k, jax.core.Tracer):
        raise TypeError(
            f"{where}: k must be a Python int known at trace time, got a traced value; "
            "pass it as a static argument."
        )
    if isinstance(k, bool | np.bool_):
        raise TypeError(
            f"{where}: k must be an integer, got the boolean {k}; pass the number of "
            "matrix-vector products that may be used."
        )
    try:
        if isinstance(k, jax.Array):
            raise TypeError
        budget = op.index(k)
    except TypeError:
        raise TypeError(
            f"{where}: k must be a Python int, got {k!r} of type {type(k).__name__}; "
            "pass the number of matrix-vector products that may be used, for example "
            "int(k)."
        ) from None
    if budget < 1:
        raise ValueError(
            f"{where}: k must be at least 1, got {budget}; it is the number of "
            "matrix-vector products that may be used."
        )
    return budget
