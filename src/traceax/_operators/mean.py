"""Means over minibatches as linear operators."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Real, Shaped

from .._arguments import require
from .._linalg.types import automatic, fold
from .check import as_complex, first_of, length_of, with_leading_axis
from .closure import closure
from .solvers import solver_tags
from .space import TAGS, ByProducts, space_of, structure_of

_WHERE = "traceax.MeanLinearOperator"
_SEMIDEFINITE = {lx.positive_semidefinite_tag, lx.negative_semidefinite_tag}


class MeanLinearOperator(ByProducts):
    r"""The mean `sum_b w_b A_b / sum_b w_b` over B minibatches.

    ```python
    def hessian(batch):
        return traceax.HessianLinearOperator(loss, parameters, batch)

    operator = traceax.MeanLinearOperator(hessian, batches, tags=lineax.symmetric_tag)
    ```

    *Use for* data sets that are too large for one product.

    | | |
    |---|---|
    | time | a product with a vector or a block is one pass over the data: one product with each `A_b` |
    | memory | one minibatch times the number of vectors, for any B; reverse mode computes each product again |
    | accumulated in | the result's dtype, with at least 32 bits |
    | differentiable | with respect to `batches`, `weights` and arrays that `make_operator` closes over, to any order |

    **Arguments:**

    - `make_operator`: a function that returns a lineax operator for one minibatch. It
        is called when you make the mean: later changes to data it reads have no effect.
    - `batches`: a PyTree of arrays with leading axis B. Minibatch b is the PyTree of
        their b-th entries.
    - `weights`: a real array with shape `(B,)`, such as the number of examples in each
        minibatch; equal by default. They must not sum to zero.
    - `tags`: known properties of the mean, such as `lineax.positive_semidefinite_tag`.
        The operators' own tags aren't used.

    **Raises:** `TypeError` if `make_operator` doesn't return a lineax operator, or
    `weights` are complex; `ValueError` if `batches` or `weights` have other shapes.
    """

    _product: Callable  # takes a minibatch and a vector
    batches: PyTree[Shaped[Array, "batches ..."]]
    weights: Float[Array, " batches"] | None
    tags: frozenset[object] = eqx.field(static=True)
    _structures: tuple[Any, tuple[Any, ...]] = eqx.field(static=True)
    _solvers: list[Any]  # the operators' `solver_tags`

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
        name, items = "batches", "minibatches"
        self.batches = with_leading_axis(batches, _WHERE, name, items, "make_operator")
        if weights is not None:
            shape = (length_of(self.batches),)
            what, hint = (
                f"weights must be of shape {shape}",
                "give one for each minibatch",
            )
            require(jnp.shape(weights) == shape, _WHERE, what, weights, hint)
            hint = "scale the operators in make_operator instead"
            is_real = not jnp.iscomplexobj(weights)
            require(is_real, _WHERE, "weights must be real", weights, hint, TypeError)
            weights = jnp.asarray(weights, float)
        self.weights = weights
        first = first_of(self.batches)
        structures = eqx.filter_eval_shape(_structures, make_operator, first)
        leaves, treedef = jtu.tree_flatten(structures[:2])
        self._solvers = [*structures[2]]
        self._structures = treedef, tuple(leaves)  # dictionaries can't be hashed
        tags = tags if isinstance(tags, set | frozenset | tuple | list) else (tags,)
        self.tags = frozenset(tags)
        if self.tags & _SEMIDEFINITE and not space_of(self).is_complex:
            self.tags |= {lx.symmetric_tag}

        def product(batch, vector):
            return as_complex(make_operator(batch)).mv(vector)

        vector = structure_of(self.in_structure())
        self._product = closure(product, first_of(self.batches), vector, vectors=True)

    @automatic
    def mv(self, vector):
        structure, weights = self.out_structure(), self.weights
        weights = jnp.ones(length_of(self.batches)) if weights is None else weights
        weights = weights / jnp.sum(weights)

        # We checkpoint each term, so that a derivative keeps only the minibatch. We add
        # outside the term, so that it doesn't keep the sum either.
        def term(batch, weight):
            def scaled(x):
                x = x.astype(_dtype_of_sums(x))
                return x * weight.astype(x.dtype)

            return jtu.tree_map(scaled, self._product(batch, vector))

        term = jax.checkpoint(term, prevent_cse=False)

        def add(total, batch_and_weight):
            return jtu.tree_map(jnp.add, total, term(*batch_and_weight))

        start = jtu.tree_map(
            lambda leaf: jnp.zeros(leaf.shape, _dtype_of_sums(leaf)), structure
        )
        total = fold(add, start, (self.batches, weights))
        return jtu.tree_map(lambda x, leaf: x.astype(leaf.dtype), total, structure)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return jtu.tree_unflatten(*self._structures)[0]

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return jtu.tree_unflatten(*self._structures)[1]

    def satisfies(self, check):
        return not self.tags.isdisjoint(TAGS[check])


def _dtype_of_sums(x: Any) -> np.dtype:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(x.dtype, jnp.float32)


def _structures(make: Callable, batch: PyTree[Array]) -> tuple[Any, Any, Any]:
    """Every operator's input and output structures, and its `solver_tags`."""
    operator = make(batch)
    is_operator = isinstance(operator, lx.AbstractLinearOperator)
    what = "make_operator must return a lineax linear operator"
    hint = "wrap a matrix in lineax.MatrixLinearOperator"
    require(is_operator, _WHERE, what, operator, hint, TypeError)
    operator = as_complex(operator)
    return operator.in_structure(), operator.out_structure(), solver_tags(operator)
