"""Hessians and Gauss-Newton matrices with respect to PyTrees."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, PyTree

from .._arguments import check_integers, require
from .._linalg.types import cast
from .check import check_scalar, is_real
from .closure import closure
from .space import ByProducts, linear_function, structure_of, tags_of

_HINT = "return a mean or a sum, and nothing else"


class Curvature(ByProducts):
    """Abstract base class for symmetric operators on floating-point arrays in `x`."""

    x: eqx.AbstractVar[PyTree[Float[Array, "..."]]]

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return structure_of(self.x)

    def satisfies(self, check):
        convex = isinstance(self, GaussNewtonLinearOperator)
        semidefinite = convex and check is lx.is_positive_semidefinite
        return semidefinite or check is lx.is_symmetric


class HessianLinearOperator(Curvature):
    r"""The Hessian of a scalar function `fn(x)`, or `fn(x, args)`, at `x`.

    ```python
    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

    hessian = traceax.HessianLinearOperator(loss, model, batch)
    ```

    The Hessian acts on the floating-point arrays in `x`, from JAX or NumPy. Vectors
    have the structure of `x`, with `None` for every other leaf, which is held fixed.

    | | |
    |---|---|
    | product | forward over reverse, which costs two to four gradients |
    | memory | twice a gradient's memory, for each vector in a block |
    | known to be | symmetric; if `fn` is convex, or `x` a minimum, tag it positive semidefinite |
    | differentiable | with respect to `x`, `args` and arrays that `fn` closes over, to any order |

    If `fn` solves an inner problem with lineax or optimistix, this is the implicit
    Hessian. `lineax.linearise` evaluates the part that all products share, and keeps it
    in memory. [`traceax.MeanLinearOperator`][] takes the mean over minibatches. `fn` is
    traced when you make the operator: outside `jax.jit`, each new one compiles again.

    **Arguments:**

    - `fn`: a twice differentiable function that returns a real scalar.
    - `x`: a PyTree, such as network parameters, or an `equinox.Module`.
    - `args`: a PyTree with other inputs to `fn`, such as a minibatch; `None` if none.

    **Raises:** `TypeError` if `fn` doesn't return a real floating-point array of shape
    `()`, or `x` has complex leaves; `ValueError` if `x` has no floating-point arrays.
    """

    fn: Callable
    x: PyTree[Float[Array, "..."]]
    args: PyTree[Any]

    def __init__(self, fn: Callable, x: PyTree[Any], args: object = None, *more: Any):
        where = "traceax.HessianLinearOperator"
        _check_functions(where, more, fn=fn)
        self.x, fixed = _arrays_of(x, where)
        self.args = args
        self.fn = _converted(fn, self.x, fixed, args, where)
        check_scalar(self.fn, (self.x, args), "fn", where, _HINT)

    def mv(self, vector):
        gradient = jax.grad(lambda x: self.fn(x, self.args))
        return jax.jvp(gradient, (self.x,), (cast(vector, self.x),))[1]


class GaussNewtonLinearOperator(Curvature):
    r"""The Gauss-Newton matrix `J^T H J` of `loss(model(x))` at `x`.

    J is the Jacobian of `model`, and H the Hessian of `loss` at the model's outputs. If
    `loss` is the negative log-likelihood of an exponential family in its natural
    parameters, such as cross-entropy in logits, this is the Fisher matrix.

    ```python
    matrix = traceax.GaussNewtonLinearOperator(model, loss, network, batch)
    ```

    The operator is known to be symmetric and positive semidefinite. A product
    multiplies by J, H and `J^T`, which costs two to four gradients. Vectors,
    minibatches, memory, derivatives, `lineax.linearise` and errors are as in
    [`traceax.HessianLinearOperator`][].

    **Arguments:**

    - `model`: a function `model(x)`, or `model(x, args)`, that returns a PyTree of real
        floating-point arrays. It must be differentiable in forward mode too.
    - `loss`: a twice differentiable function `loss(outputs)`, or `loss(outputs, args)`,
        that returns a real scalar. It must be convex in the outputs, which isn't
        checked: otherwise estimates may be wrong.
    - `x`, `args`: the input to `model`, and other inputs to both functions.
    """

    model: Callable
    loss: Callable
    x: PyTree[Float[Array, "..."]]
    args: PyTree[Any]

    def __init__(
        self, model: Callable, loss: Callable, x: Any, args: object = None, *more: Any
    ):
        where = "traceax.GaussNewtonLinearOperator"
        _check_functions(where, more, model=model, loss=loss)
        self.x, fixed = _arrays_of(x, where)
        self.args = args

        self.model = _converted(model, self.x, fixed, args, where)
        outputs = eqx.filter_eval_shape(self.model, self.x, args)
        _check_real(outputs, "the outputs of model", where)
        none_fixed = jtu.tree_map(lambda _: None, outputs)
        self.loss = _converted(loss, outputs, none_fixed, args, where)
        check_scalar(self.loss, (outputs, args), "loss", where, _HINT)

    def mv(self, vector):
        outputs, push = jax.linearize(lambda x: self.model(x, self.args), self.x)
        gradient = jax.grad(lambda outputs: self.loss(outputs, self.args))
        product = jax.jvp(gradient, (outputs,), (push(cast(vector, self.x)),))[1]
        return jax.linear_transpose(push, self.x)(product)[0]


def _arrays_of(x: PyTree[Any], where: str) -> tuple[PyTree[Array], PyTree[Any]]:
    """The floating-point arrays in `x`, and everything else."""

    def is_inexact(leaf):
        return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)

    arrays, fixed = eqx.partition(x, is_inexact)
    what = "x must have floating-point arrays among its leaves"
    hint = "turn Python numbers into arrays with jax.numpy.asarray"
    require(jtu.tree_leaves(arrays), where, what, "none", hint)
    _check_real(arrays, "the floating-point arrays of x", where)
    return jtu.tree_map(jnp.asarray, arrays), fixed


def _converted(fn: Any, x: PyTree, fixed: PyTree, args: PyTree, where: str) -> Any:
    """Traces `fn(arrays, args)`. Fixed values and closed-over arrays become leaves."""
    for leaf in jtu.tree_leaves(args):
        check_integers(leaf, "args", where)

    def call_with_arrays(x, args):
        x = eqx.combine(x, fixed)
        return fn(x) if args is None else fn(x, args)

    return closure(call_with_arrays, x, args)


def _check_functions(where: str, more: tuple, **functions: object) -> None:
    what, received = "args must be a single argument", f"{1 + len(more)} of them"
    hint = "pass a tuple, such as (X, Y), which fn(x, args) unpacks"
    require(not more, where, what, received, hint, TypeError)
    hint = f"pass ({', '.join(functions)}, x, args)"
    for name, fn in functions.items():
        require(callable(fn), where, f"{name} must be a function", fn, hint, TypeError)


def _check_real(x: PyTree[Any], what: str, where: str) -> None:
    what = f"{what} must be real floating-point arrays"
    hint = "give complex numbers as real and imaginary parts"
    for leaf in jtu.tree_leaves(x):
        require(is_real(leaf), where, what, leaf, hint, TypeError)


@lx.linearise.register(Curvature)
def _(operator: Curvature) -> lx.AbstractLinearOperator:
    zeros = jtu.tree_map(jnp.zeros_like, operator.x)
    _, product = jax.linearize(operator.mv, zeros)
    return linear_function(product, zeros, tags_of(operator))
