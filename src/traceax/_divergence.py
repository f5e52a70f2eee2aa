"""Divergences and Laplacians: traces of Jacobians and Hessians, with what they are of."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, Int, Key, PyTree

from ._accuracy.error_bar import exact_bar
from ._arguments import check_budget, check_key, kind_of, native_arrays, require
from ._base import TraceEstimator
from ._coloured_sampler import ColouredSampler
from ._colours import Colours
from ._estimate import Estimate, raise_failure
from ._estimators.hutchinson import HutchinsonEstimator
from ._forward_laplacian import forward_laplacian
from ._operators.block import apply_block, forward_mode, space_of, structure_of
from ._operators.check import checked_operator
from ._operators.curvature import HessianLinearOperator
from ._primitive import make_outcome
from ._samplers import NormalSampler
from ._state import TraceState
from ._trace import CHOICES, estimate_whole, set_choice


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

    Differentiable with respect to what `fn` closes over and to `x`, and unbiased in its
    derivatives. Works under `vmap`, in the loops of diffrax, in `scan` and `checkpoint`.
    Call it inside of `jax.jit`: outside, what `fn` closes over compiles anew each time.

    **Arguments:**

    - `key`: a single key, typed or legacy. The same key in each step of a solver gives one
        sample path, as an ODE solver needs.
    - `fn`: maps `x` to a PyTree of the same structure, shapes and dtypes. Of complex `x`
        it is taken for holomorphic.
    - `x`: a PyTree of floating-point arrays.
    - `k`: a positive Python int, the budget of products. By default one, which is common
        in training; with colours a round of them.
    - `estimator`: as of [`traceax.trace`][]; by default [`traceax.HutchinsonEstimator`][]
        with signs, whose error is the least for the time that it takes over a batch.
    - `colours`: in place of an estimator, for a Jacobian that is sparse, or block-hollow:
        Hutchinson's estimator with a [`traceax.ColouredSampler`][], or one of what that
        takes. Exact, and its derivatives too, in p products if it is:
        `colours=traceax.colour(pattern)`, or
        `colours=traceax.ColouredSampler(colours, exact=True)`.
    - `throw`: as of [`traceax.trace`][], but `False` by default, with no host callback in
        the program.

    **Returns:**

    A tuple of `fn(x)` and a [`traceax.Estimate`][] of the divergence.

    **Raises:**

    - `TypeError` for entries of `x` that are no floating-point arrays, `ValueError` if
        `fn(x)` has another structure than `x`, and for colours beside an estimator; else as
        [`traceax.trace`][].

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
    operator = lx.FunctionLinearOperator(linear, asked)
    if colours is not None:
        what, hint = "estimator must be left out with colours", "pass one of the two"
        require(estimator is None, where, what, repr(estimator), hint)
        given = isinstance(colours, ColouredSampler)
        sampler = colours if given else ColouredSampler(colours)
        estimator = HutchinsonEstimator(sampler)
        k = sampler.num_colours if k is None else k
    k = 1 if k is None else k
    return value, _trace(where, key, operator, k, estimator, throw)


def laplacian(
    key: Key[Array, ""],
    fn: Callable[[PyTree[Array]], Inexact[Array, ""]],
    x: PyTree[ArrayLike],
    k: int,
    estimator: TraceEstimator | None = None,
    *,
    forward: Literal["folx"] | None = None,
    throw: bool = False,
) -> tuple[Inexact[Array, ""], PyTree[Array], Estimate]:
    r"""A scalar function, its gradient and its Laplacian, from one pass through it.

    ```python
    value, gradient, laplacian = traceax.laplacian(key, network, x, 10)
    ```

    as in the loss of a physics-informed network, or in the local energy of variational
    Monte Carlo. The gradient is linearised once; a product is one evaluation of its
    derivative, forward over reverse. With `k >= n`, the number of entries of `x`, the
    Laplacian is exact.

    Differentiable and usable as [`traceax.divergence`][].

    **Arguments:**

    - `fn`: maps `x` to a real scalar.
    - `forward`: `"folx"` for exact Laplacians, `k >= n`: value, gradient and Laplacian
        are propagated together through `fn` by [folx](https://github.com/microsoft/folx),
        an extra, in less time and memory than n products take; what it can't take is on the
        page of recipes. No product is taken but one, of which the standard error is made.
    - others: those of [`traceax.divergence`][].

    **Returns:**

    A tuple of `fn(x)`, its gradient, and a [`traceax.Estimate`][] of the Laplacian.

    **Raises:**

    - `TypeError` for entries of `x` that are no real floating-point arrays, and for an
        `fn` that doesn't return a real scalar; else as [`traceax.trace`][].
    - with `forward`, `ImportError` where folx isn't installed, `ValueError` for `k < n`,
        for an estimator, and for what folx would misread, `NotImplementedError` where it
        fails.

    **Reference:** of `forward`, Li et al., "Forward Laplacian: A New Computational
    Framework for Neural Network-based Variational Monte Carlo" (2023), arXiv:2307.08214;
    Dangel, Siebert, Zeinhofer and Walther, "Collapsing Taylor Mode Automatic
    Differentiation" (2025), arXiv:2505.13644.
    """
    where = "traceax.laplacian"
    x = _arrays(x, where)
    if any(jnp.iscomplexobj(leaf) for leaf in jtu.tree_leaves(x)):
        raise TypeError(
            f"{where}: x must be real, got complex entries; pass real and imaginary parts."
        )

    out = jax.eval_shape(fn, x)
    is_array = isinstance(out, jax.ShapeDtypeStruct)
    if not is_array or out.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"{where}: fn must return a real scalar of shape (), got {out}; a Laplacian is "
            "of a scalar function."
        )
    if forward is not None:
        return _laplacian_forward(where, key, fn, x, k, estimator, forward, throw)

    def gradient_and_value(x):
        value, gradient = jax.value_and_grad(fn)(x)
        return gradient, value

    with forward_mode():
        gradient, hessian, value = jax.linearize(gradient_and_value, x, has_aux=True)
    operator = lx.FunctionLinearOperator(hessian, structure_of(x), lx.symmetric_tag)
    return value, gradient, _trace(where, key, operator, k, estimator, throw)


def _laplacian_forward(where: str, key, fn, x, k, estimator, forward, throw: bool):
    operator = checked_operator(HessianLinearOperator(fn, x), where)
    state = TraceState(check_key(key, where), operator)
    n, dtype = state.space.size, state.space.compute_dtype
    require(
        forward == "folx", where, 'forward must be "folx" or None', forward, "use one"
    )
    hint = "leave out forward= for estimates"
    exact = f"forward= is exact, for k >= n = {n} without an estimator"
    require(check_budget(k, where) >= n, where, exact, f"k = {k}", hint)
    require(estimator is None, where, exact, estimator, hint)
    value, gradient, laplacian = forward_laplacian(fn, x, where)
    # On average the square of `norm(H z)` is that of H, and its diagonal is within it.
    # Signs can be orthogonal to all rows of H, as of `(x[0] - x[1])**2`, normals can't.
    arrays, others = eqx.partition(operator, eqx.is_array)
    operator = eqx.combine(jax.lax.stop_gradient(arrays), others)
    z = NormalSampler().sample(state.key, n, 1, dtype)
    magnitude = n**0.5 * jnp.linalg.norm(apply_block(operator, z))
    laplacian = laplacian.astype(dtype)
    magnitude = jnp.maximum(magnitude, jnp.abs(laplacian))
    laplacian, error, _ = exact_bar(laplacian, state.space.rounding * magnitude)
    stats = {"num_matvecs": 1, "choice": CHOICES.forward}
    outcome = make_outcome(laplacian, error, stats, dtype, real=True)
    estimate = Estimate(*outcome[:4], state)
    return value, gradient, raise_failure(estimate) if throw else estimate


def _trace(where: str, key, operator, k, estimator, throw: bool) -> Estimate:
    operator = checked_operator(operator, where)
    k = check_budget(k, where)
    # Batched over points the others take longer than signs for the same error.
    default = HutchinsonEstimator() if estimator is None else estimator
    estimate = estimate_whole(where, key, operator, k, default, throw=throw)
    if estimator is not None:
        return estimate
    exact = k >= space_of(operator).size
    return set_choice(estimate, CHOICES.budget if exact else CHOICES.signs)


def _arrays(x: PyTree[Any], where: str) -> PyTree[Array]:
    def check(leaf):
        array = jnp.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise TypeError(
                f"{where}: x must hold floating-point arrays, got {kind_of(leaf)}; close "
                "over what is not differentiated."
            )
        return array

    return jtu.tree_map(check, native_arrays(x, where))
