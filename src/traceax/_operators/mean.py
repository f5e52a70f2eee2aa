"""The mean of operators over minibatches as a linear operator."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, PyTree, Real, Shaped

from .._arguments import require
from .block import TAGS, as_function, register, space_of
from .check import as_complex

_WHERE = "traceax.MeanLinearOperator"
_SEMIDEFINITE = {lx.positive_semidefinite_tag, lx.negative_semidefinite_tag}


class MeanLinearOperator(lx.AbstractLinearOperator):
    r"""The mean `sum_b w_b A_b / sum_b w_b` of the operators of B minibatches.

    ```python
    def hessian(batch):
        return traceax.HessianLinearOperator(loss, parameters, batch)

    tags = lineax.symmetric_tag
    operator = traceax.MeanLinearOperator(hessian, batches, tags=tags)
    traceax.trace(key, operator, 40)
    ```

    Use it for the Hessian of a loss over a data set that is too large for one product.

    | | |
    |---|---|
    | time | a product is one pass over the data: one product with each of the B operators |
    | memory | that of one minibatch, whatever B is, for products and for derivatives |
    | accumulated in | the dtype of the result, and at least 32 bits |
    | differentiable | to any order that the operators are, forward and reverse |

    Under `jax.vmap` over vectors there is still one pass over the data, and k vectors
    times one minibatch in memory. A reverse-mode derivative computes each product again
    rather than store what it needs of every minibatch. It is with respect to `batches`,
    `weights`, and arrays that `make_operator` closes over.

    `lineax.linearise` does nothing: it would have to store that of every minibatch.

    Of the mean is known what its tags say, and nothing that the operators' tags do.

    **Arguments:**

    - `make_operator`: a function of one minibatch that returns a lineax operator. It
        may close over arrays, traced ones included. It is called when the mean is made:
        what it reads then is what counts.
    - `batches`: a PyTree of arrays, all with a leading axis of length B. Minibatch b is
        the PyTree of their b-th entries.
    - `weights`: of shape `(B,)`, real, such as the number of examples in each minibatch;
        equal if not given. They must not sum to zero. They are taken in the default
        floating-point dtype.
    - `tags`: what is known of the mean, such as `lineax.positive_semidefinite_tag`.

    **Raises:**

    - `TypeError` if `make_operator` isn't a function or doesn't return a lineax
        operator, or for complex weights.
    - `ValueError` if `batches` has no leaves, scalar ones, ones of different leading
        axes, or no minibatches, or for weights of another shape than `(B,)`.
    """

    _product: Callable  # of a minibatch and a vector
    batches: PyTree[Shaped[Array, "batches ..."]]
    weights: Float[Array, " batches"] | None
    tags: frozenset[object] = eqx.field(static=True)
    _structures: tuple[tuple[Any, ...], Any] = eqx.field(static=True)

    def __init__(
        self,
        make_operator: Callable[[Any], lx.AbstractLinearOperator],
        batches: PyTree[Shaped[ArrayLike, "batches ..."]],
        *,
        weights: Real[ArrayLike, " batches"] | None = None,
        tags: object = (),
    ):
        what = "make_operator must be a function of a minibatch"
        hint = "pass (make_operator, batches)"
        require(callable(make_operator), _WHERE, what, make_operator, hint, TypeError)
        self.batches = jtu.tree_map(_as_array, batches)
        self.weights = _check_weights(weights, _number_of_batches(self.batches))
        structures = eqx.filter_eval_shape(_structures, make_operator, self.batches)
        # Of dictionaries, for example, which can't be hashed.
        leaves, treedef = jtu.tree_flatten(structures)
        self._structures = tuple(leaves), treedef
        tags = tags if isinstance(tags, set | frozenset | tuple | list) else (tags,)
        self.tags = frozenset(tags)
        if self.tags & _SEMIDEFINITE and not space_of(self).is_complex:
            self.tags |= {lx.symmetric_tag}

        def product(batch, vector):
            return as_complex(make_operator(batch)).mv(vector)

        def example():
            zeros = jtu.tree_map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.in_structure()
            )
            return _first(self.batches), zeros

        self._product = eqx.filter_closure_convert(product, *jax.eval_shape(example))

    def mv(self, vector):
        structure = self.out_structure()
        number, weights = _number_of_batches(self.batches), self.weights
        weights = jnp.ones(number) if weights is None else weights
        weights = weights / jnp.sum(weights)

        # What a derivative needs of each minibatch is the minibatch. The sum is outside,
        # so that it isn't kept either.
        def term(batch, weight):
            def scaled(x):
                x = x.astype(_dtype_of_sums(x))
                return x * weight.astype(x.dtype)

            return jtu.tree_map(scaled, self._product(batch, vector))

        term = jax.checkpoint(term, prevent_cse=False)

        def add(total, batch_and_weight):
            return jtu.tree_map(jnp.add, total, term(*batch_and_weight)), None

        # A zero that differs between the devices of `jax.shard_map` as the sum will.
        arrays = jtu.tree_leaves(eqx.filter((self, vector), eqx.is_array))
        zero = sum(jnp.zeros_like(x, jnp.float32, ()) for x in arrays)
        start = jtu.tree_map(
            lambda leaf: jnp.full(leaf.shape, zero, _dtype_of_sums(leaf)), structure
        )
        total, _ = jax.lax.scan(add, start, (self.batches, weights))
        return jtu.tree_map(lambda x, leaf: x.astype(leaf.dtype), total, structure)

    def as_matrix(self) -> Inexact[Array, "m n"]:
        return as_function(self).as_matrix()

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        tags = lx.transpose_tags(self.tags)
        return _changed(self, lambda operator: operator.transpose(), tags)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        leaves, treedef = self._structures
        return jtu.tree_unflatten(treedef, leaves)[0]

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        leaves, treedef = self._structures
        return jtu.tree_unflatten(treedef, leaves)[1]


def _changed(mean: MeanLinearOperator, change: Callable, tags) -> MeanLinearOperator:
    """The mean of what `change` makes of each operator."""

    def make(batch):
        def product(vector):
            return mean._product(batch, vector)

        return change(lx.FunctionLinearOperator(product, mean.in_structure()))

    return MeanLinearOperator(make, mean.batches, weights=mean.weights, tags=tags)


def _first(batches: PyTree[Array]) -> PyTree[Array]:
    return jtu.tree_map(lambda x: x[0], batches)


def _dtype_of_sums(x: Any) -> np.dtype:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(x.dtype, jnp.float32)


def _structures(make: Callable, batches: PyTree[Array]) -> tuple[Any, Any]:
    """Of the input and the output of every operator."""
    operator = make(_first(batches))
    right = isinstance(operator, lx.AbstractLinearOperator)
    what = "make_operator must return a lineax linear operator"
    hint = "wrap it, as lineax.MatrixLinearOperator does"
    require(right, _WHERE, what, operator, hint, TypeError)
    operator = as_complex(operator)
    return operator.in_structure(), operator.out_structure()


#
# Arguments
#


def _as_array(x: Any) -> Array:
    x = jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
    what = "the leaves of batches must be arrays with a leading axis of minibatches"
    hint = "let make_operator close over what they share"
    require(eqx.is_array(x) and x.ndim > 0, _WHERE, what, x, hint)
    return x


def _number_of_batches(batches: PyTree[Array]) -> int:
    numbers = sorted({leaf.shape[0] for leaf in jtu.tree_leaves(batches)})
    what = "the leaves of batches must have a leading axis of one length, at least 1"
    right, hint = (
        len(numbers) == 1 and numbers[0] > 0,
        "stack minibatches along a new axis",
    )
    require(right, _WHERE, what, f"lengths {numbers}", hint)
    return numbers[0]


def _check_weights(weights: Any, number: int) -> Float[Array, " batches"] | None:
    if weights is None:
        return None
    shape = f"weights must be of shape ({number},)"
    hint = "give one for each minibatch"
    require(jnp.shape(weights) == (number,), _WHERE, shape, weights, hint)
    hint = "scale the operators in make_operator instead"
    real = not jnp.iscomplexobj(weights)
    require(real, _WHERE, "weights must be real", weights, hint, TypeError)
    return jnp.asarray(weights, float)


register(
    MeanLinearOperator,
    lambda check, operator: not operator.tags.isdisjoint(TAGS[check]),
    lambda operator: _changed(operator, lx.conj, operator.tags),
)
