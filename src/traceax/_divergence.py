"""Entry points for divergences and Laplacians: traces of Jacobians and Hessians."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, Int, Key, PyTree

from ._arguments import check_budget, require
from ._colours import ColouredSampler, Colours
from ._estimate import Estimate
from ._estimators.hutchinson import HutchinsonEstimator
from ._operators.check import is_real
from ._operators.space import forward_mode, linear_function, structure_of
from ._state import init_state
from ._trace import CHOICES, estimate_whole, set_choice
from ._trace_estimator import TraceEstimator


def divergence(
    key: Key[Array, ""],
    fn: Callable[[PyTree[Array]], PyTree[Array]],
    x: PyTree[ArrayLike],
    k: int | None = None,
    estimator: TraceEstimator | None = None,
    *,
    colours: ColouredSampler | Colours | Int[ArrayLike, " n"] | None = None,
    throw: bool = False,
) -> tuple[PyTree[Array], Estimate]:
    r"""Evaluates a vector field, and estimates its divergence `tr df/dx`, in one pass.

    ```python
    velocity, divergence = traceax.divergence(key, field, x)
    return velocity, divergence.value
    ```

    *Use for* the right-hand side of a continuous normalising flow, or for sliced score
    matching. `fn` is linearised once, and a product evaluates its derivative once. The
    divergence is exact if k is at least n, the number of entries in `x`.

    The value has unbiased derivatives with respect to `x` and the arrays that `fn`
    closes over. Outside of `jax.jit`, an `fn` with such arrays compiles at every call.

    **Arguments:**

    - `key`: a single key. Keep it fixed within an ODE solve, which needs one sample
        path. Change it at every training step, or a network learns the probes.
    - `fn`: maps `x` to the same structure, shapes and dtypes. It must be holomorphic if
        `x` is complex.
    - `x`: a PyTree with floating-point arrays.
    - `k`: the budget of products. The default is 1, or one round with `colours`.
    - `estimator`: by default [`traceax.HutchinsonEstimator`][] with random signs, which
        has the smallest error for its time over a batch.
    - `colours`: replaces the estimator for sparse or block-hollow Jacobians, for
        example `colours=traceax.colour(pattern)`. It is a [`traceax.ColouredSampler`][]
        for Hutchinson's estimator, or an argument for one. If the colours are exact, so
        are value and derivatives, from p products for p colours.
    - `throw`: as for [`traceax.trace`][]. `False` avoids a host callback.

    **Returns:** `fn(x)`, and a [`traceax.Estimate`][] for the divergence.

    **Raises:** as [`traceax.trace`][]; `TypeError` for other entries in `x`,
    `ValueError` if `fn` returns another structure.

    **Reference:** Grathwohl, Chen, Bettencourt, Sutskever and Duvenaud, "FFJORD", ICLR
    (2019), arXiv:1810.01367; Song, Garg, Shi and Ermon, "Sliced Score Matching", UAI
    (2019), arXiv:1905.07088; Gloy and Olsson (2025), arXiv:2510.21542, for block-hollow
    networks.
    """
    where = "traceax.divergence"
    x = _arrays(x, where)
    with forward_mode():
        value, linear = jax.linearize(fn, x)
    received, expected = structure_of(value), structure_of(x)
    if received != expected:
        raise ValueError(
            f"{where}: fn must return the structure, shapes and dtypes of x, "
            f"{expected}, got {received}; return one component for each entry in x."
        )
    operator = linear_function(linear, x)
    return value, _trace(where, key, operator, k, estimator, colours, throw)


def laplacian(
    key: Key[Array, ""],
    fn: Callable[[PyTree[Array]], Inexact[Array, ""]],
    x: PyTree[ArrayLike],
    k: int | None = None,
    estimator: TraceEstimator | None = None,
    *,
    colours: ColouredSampler | Colours | Int[ArrayLike, " n"] | None = None,
    throw: bool = False,
) -> tuple[Inexact[Array, ""], PyTree[Array], Estimate]:
    r"""Evaluates a scalar function and its gradient, and estimates its Laplacian.

    ```python
    value, gradient, laplacian = traceax.laplacian(key, network, x, 10)
    ```

    *Use for* physics-informed networks, or local energies in variational Monte Carlo.
    The gradient is linearised once, and a product evaluates its derivative once,
    forward over reverse.

    **Arguments:** as for [`traceax.divergence`][], but `fn` maps a real `x` to a real
    scalar, and `colours` are for its Hessian.

    **Returns:** `fn(x)`, its gradient, and a [`traceax.Estimate`][] for the Laplacian.
    """
    where = "traceax.laplacian"
    x = _arrays(x, where)
    real = not any(jnp.iscomplexobj(leaf) for leaf in jtu.tree_leaves(x))
    rule, hint = "x must be real", "pass real and imaginary parts"
    require(real, where, rule, "complex entries", hint, TypeError)
    out = jax.eval_shape(fn, x)
    rule, hint = "fn must return a real scalar", "index or sum its result"
    require(is_real(out) and out.shape == (), where, rule, out, hint, TypeError)

    def gradient_and_value(x):
        value, gradient = jax.value_and_grad(fn)(x)
        return gradient, value

    with forward_mode():
        gradient, hessian, value = jax.linearize(gradient_and_value, x, has_aux=True)
    operator = linear_function(hessian, x, [lx.symmetric_tag])
    return value, gradient, _trace(where, key, operator, k, estimator, colours, throw)


def _trace(where: str, key, operator, k, estimator, colours, throw: bool) -> Estimate:
    if colours is not None:
        rule, hint = "estimator must be left out with colours", "pass one of the two"
        require(estimator is None, where, rule, repr(estimator), hint)
        is_sampler = isinstance(colours, ColouredSampler)
        sampler = colours if is_sampler else ColouredSampler(colours)
        estimator = HutchinsonEstimator(sampler)
        k = sampler.num_colours if k is None else k
    k = 1 if k is None else k
    state = init_state(key, operator, where)
    k = check_budget(k, where)
    # Over a batch the other estimators take longer for the same error, so we use signs.
    default = HutchinsonEstimator() if estimator is None else estimator
    estimate = estimate_whole(where, state, k, default, throw=throw)
    if estimator is not None:
        return estimate
    exact = k >= state.space.size
    return set_choice(estimate, CHOICES.budget if exact else CHOICES.signs)


def _arrays(x: PyTree[Any], where: str) -> PyTree[Array]:
    def as_array(leaf):
        inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        rule = "x must hold floating-point arrays"
        hint = "let fn close over entries without derivatives"
        require(inexact, where, rule, leaf, hint, TypeError)
        return jnp.asarray(leaf)

    return jtu.tree_map(as_array, x)
