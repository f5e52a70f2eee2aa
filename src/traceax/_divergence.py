"""Divergences and Laplacians: traces of Jacobians and Hessians, with what they are of."""

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
    r"""A vector field and its divergence, `tr df/dx`, from one pass through it.

    ```python
    velocity, divergence = traceax.divergence(key, field, x)
    return velocity, divergence.value
    ```

    as the right-hand side of a continuous normalising flow, or in a loss of sliced score
    matching. `fn` is linearised once; a product is one evaluation of its derivative.
    With `k >= n`, the number of entries of `x`, the divergence is exact.

    Differentiable with respect to `x` and what `fn` closes over, and unbiased in its
    derivatives. Outside of `jax.jit` what `fn` closes over compiles anew each time.

    **Arguments:**

    - `key`: the same in each step of a solver gives one sample path, as it needs. Each step of
        training takes a new one, or a network learns the probes.
    - `fn`: maps `x` to a PyTree of the same structure, shapes and dtypes. Of complex `x`
        it is taken for holomorphic.
    - `x`: a PyTree of floating-point arrays.
    - `k`: the budget of products: one by default, with colours a round of them.
    - `estimator`: by default [`traceax.HutchinsonEstimator`][] with signs, whose error is
        the least for the time that it takes over a batch.
    - `colours`: in place of an estimator, for a Jacobian that is sparse, or block-hollow:
        Hutchinson's estimator with a [`traceax.ColouredSampler`][], or one of what that
        takes. Exact, and its derivatives too, in p products if it is:
        `colours=traceax.colour(pattern)`.
    - `throw`: as of [`traceax.trace`][]; `False` puts no host callback in the program.

    **Returns:** a tuple of `fn(x)` and a [`traceax.Estimate`][] of the divergence.

    **Raises:** as [`traceax.trace`][]; `TypeError` for other entries of `x`, `ValueError`
    for an `fn` of another structure.

    **Reference:** Grathwohl, Chen, Bettencourt, Sutskever and Duvenaud, "FFJORD", ICLR
    (2019), arXiv:1810.01367; Song, Garg, Shi and Ermon, "Sliced Score Matching", UAI
    (2019), arXiv:1905.07088; of block-hollow networks Gloy and Olsson (2025),
    arXiv:2510.21542.
    """
    where = "traceax.divergence"
    x = _arrays(x, where)
    with forward_mode():
        value, linear = jax.linearize(fn, x)
    got, asked = structure_of(value), structure_of(x)
    if got != asked:
        raise ValueError(
            f"{where}: fn must return the structure, shapes and dtypes of x, {asked}, got "
            f"{got}; a divergence is of a field that has as many components as x."
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
    r"""A scalar function, its gradient and its Laplacian, from one pass through it.

    ```python
    value, gradient, laplacian = traceax.laplacian(key, network, x, 10)
    ```

    as in the loss of a physics-informed network, or in the local energy of variational
    Monte Carlo. The gradient is linearised once; a product is one evaluation of its
    derivative, forward over reverse.

    **Arguments:** those of [`traceax.divergence`][], where `fn` maps a real `x` to a real
    scalar, and `colours` are for its Hessian.

    **Returns:** a tuple of `fn(x)`, its gradient, and a [`traceax.Estimate`][] of the
    Laplacian.
    """
    where = "traceax.laplacian"
    x = _arrays(x, where)
    real = not any(jnp.iscomplexobj(leaf) for leaf in jtu.tree_leaves(x))
    what, hint = "x must be real", "pass real and imaginary parts"
    require(real, where, what, "complex entries", hint, TypeError)
    out = jax.eval_shape(fn, x)
    what, hint = "fn must return a real scalar", "a Laplacian is of a scalar function"
    require(is_real(out) and out.shape == (), where, what, out, hint, TypeError)

    def gradient_and_value(x):
        value, gradient = jax.value_and_grad(fn)(x)
        return gradient, value

    with forward_mode():
        gradient, hessian, value = jax.linearize(gradient_and_value, x, has_aux=True)
    operator = linear_function(hessian, x, [lx.symmetric_tag])
    return value, gradient, _trace(where, key, operator, k, estimator, colours, throw)


def _trace(where: str, key, operator, k, estimator, colours, throw: bool) -> Estimate:
    if colours is not None:
        what, hint = "estimator must be left out with colours", "pass one of the two"
        require(estimator is None, where, what, repr(estimator), hint)
        given = isinstance(colours, ColouredSampler)
        sampler = colours if given else ColouredSampler(colours)
        estimator = HutchinsonEstimator(sampler)
        k = sampler.num_colours if k is None else k
    k = 1 if k is None else k
    state = init_state(key, operator, where)
    k = check_budget(k, where)
    # Batched over points the others take longer than signs for the same error.
    default = HutchinsonEstimator() if estimator is None else estimator
    estimate = estimate_whole(where, state, k, default, throw=throw)
    if estimator is not None:
        return estimate
    exact = k >= state.space.size
    return set_choice(estimate, CHOICES.budget if exact else CHOICES.signs)


def _arrays(x: PyTree[Any], where: str) -> PyTree[Array]:
    def as_array(leaf):
        inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        what = "x must hold floating-point arrays"
        hint = "close over what is not differentiated"
        require(inexact, where, what, leaf, hint, TypeError)
        return jnp.asarray(leaf)

    return jtu.tree_map(as_array, x)
