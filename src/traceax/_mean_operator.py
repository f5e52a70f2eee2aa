"""The mean of operators over minibatches as a linear operator."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.flatten_util as jfu
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, PyTree, Real, Shaped

from ._arguments import kind_of
from ._closures import portable
from ._operator import is_known
from ._tracers import hides_arrays

_WHERE = "traceax.MeanLinearOperator"


class MeanLinearOperator(lx.AbstractLinearOperator):
    r"""The mean `sum_b w_b A_b / sum_b w_b` of the operators of B minibatches.

    ```python
    def hessian(batch):
        def gradient(parameters, _):
            return jax.grad(loss)(parameters, batch)

        return lineax.JacobianLinearOperator(
            gradient, parameters, tags=lineax.symmetric_tag
        )

    operator = traceax.MeanLinearOperator(hessian, batches)
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

    The mean is known to be symmetric, diagonal, tridiagonal, triangular, or to have a
    unit diagonal where the operators are, and without weights also to be semidefinite.
    For all else there are tags.

    **Arguments:**

    - `make_operator`: a function of one minibatch that returns a lineax operator. It
        may close over arrays, traced ones included.
    - `batches`: a PyTree of arrays, all with a leading axis of length B. Minibatch b is
        the PyTree of their b-th entries.
    - `weights`: of shape `(B,)`, real, such as the number of examples in each minibatch;
        equal if not given. They must not sum to zero.
    - `tags`: what is known of the mean, such as `lineax.positive_semidefinite_tag`.

    **Raises:**

    - `TypeError` if `make_operator` isn't a function or doesn't return a lineax
        operator, or for weights that aren't a real array.
    - `ValueError` if `batches` has no leaves, scalar ones, ones of different leading
        axes, or no minibatches, or for weights of another shape than `(B,)`.
    """

    make_operator: Callable[[Any], lx.AbstractLinearOperator]
    batches: PyTree[Shaped[Array, "batches ..."]]
    weights: Real[Array, " batches"] | None
    tags: frozenset[object] = eqx.field(static=True)
    _structures: tuple[tuple[Any, ...], Any] = eqx.field(static=True)

    def __init__(
        self,
        make_operator: Callable[[Any], lx.AbstractLinearOperator],
        batches: PyTree[Shaped[Array, "batches ..."]],
        *,
        weights: Real[Array, " batches"] | None = None,
        tags: object = (),
    ):
        if not callable(make_operator):
            raise TypeError(
                f"{_WHERE}: make_operator must be a function of a minibatch, got "
                f"{kind_of(make_operator)}; pass (make_operator, batches)."
            )
        self.batches = jtu.tree_map(_as_array, batches)
        number = _number_of_batches(self.batches)
        self.weights = _check_weights(weights, number)
        batch = jax.eval_shape(lambda: _first(self.batches))
        make = jtu.tree_map(portable, make_operator)
        hidden = hides_arrays(make)
        found = _look(make, batch, signs=weights is None)
        if hidden:
            make = _Converted(make, batch, found.in_structure)
        self.make_operator = make
        tags = tags if isinstance(tags, set | frozenset | tuple | list) else (tags,)
        self.tags = frozenset(tags) | found.tags
        self._structures = _flat((found.in_structure, found.out_structure))
        if self.tags & _SEMIDEFINITE and not _is_complex(self):
            self.tags |= {lx.symmetric_tag}

    def mv(self, vector):
        structure = self.out_structure()
        return _mean(self, lambda operator: operator.mv(vector), structure, vector)

    def as_matrix(self) -> Inexact[Array, "m n"]:
        return _mean(self, lambda operator: operator.as_matrix())

    def transpose(self):
        if lx.is_symmetric(self):
            return self
        return _changed(self, _transpose, lx.transpose_tags(self.tags))

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        leaves, treedef = self._structures
        return jtu.tree_unflatten(treedef, leaves)[0]

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        leaves, treedef = self._structures
        return jtu.tree_unflatten(treedef, leaves)[1]


#
# The mean
#


def _mean(
    mean: MeanLinearOperator,
    of: Callable[[lx.AbstractLinearOperator], PyTree[Array]],
    structure: PyTree[jax.ShapeDtypeStruct] | None = None,
    given: PyTree[Array] = None,
) -> PyTree[Array]:
    """The mean of what is asked of each operator, one at a time.

    `structure` is that of the result, if known, and `given` what `of` closes over.
    """
    weights = None if mean.weights is None else _normalised(mean.weights)
    if structure is None:
        structure = jax.eval_shape(lambda: of(mean.make_operator(_first(mean.batches))))

    # What a derivative needs of each minibatch is the minibatch. The sum is outside, so
    # that it isn't kept either.
    def term(batch, weight):
        def scaled(x, leaf):
            x = x.astype(_dtype_of_sums(leaf))
            return x if weight is None else x * weight.astype(x.dtype)

        return jtu.tree_map(scaled, of(mean.make_operator(batch)), structure)

    term = jax.checkpoint(term, prevent_cse=False)

    def add(total, batch_and_weight):
        return jtu.tree_map(jnp.add, total, term(*batch_and_weight)), None

    # A zero that differs between the devices of `jax.shard_map` as the sum will.
    arrays = jtu.tree_leaves(eqx.filter((mean, given), eqx.is_array))
    zero = sum(jnp.zeros_like(x, jnp.float32, ()) for x in arrays)
    start = jtu.tree_map(
        lambda leaf: jnp.full(leaf.shape, zero, _dtype_of_sums(leaf)), structure
    )
    total, _ = jax.lax.scan(add, start, (mean.batches, weights))
    number = 1 if weights is not None else _number_of_batches(mean.batches)
    return jtu.tree_map(lambda x, s: (x / number).astype(s.dtype), total, structure)


def _dtype_of_sums(leaf: jax.ShapeDtypeStruct) -> np.dtype:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(leaf.dtype, jnp.float32)


def _first(batches: PyTree[Array]) -> PyTree[Array]:
    return jtu.tree_map(lambda x: x[0], batches)


def _normalised(weights: Real[Array, " batches"]) -> Inexact[Array, " batches"]:
    with jax.numpy_dtype_promotion("standard"):
        # Integers take the default floating-point dtype.
        dtype = jnp.promote_types(jnp.result_type(weights.dtype, float), jnp.float32)
    weights = weights.astype(dtype)
    return weights / jnp.sum(weights)


#
# Arguments
#


def _as_array(x: Any) -> Array:
    x = jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
    if eqx.is_array(x) and x.ndim > 0:
        return x
    raise ValueError(
        f"{_WHERE}: the leaves of batches must be arrays with a leading axis of "
        f"minibatches, got {kind_of(x)}; let make_operator close over what they share."
    )


def _number_of_batches(batches: PyTree[Array]) -> int:
    numbers = sorted({leaf.shape[0] for leaf in jtu.tree_leaves(batches)})
    if len(numbers) != 1 or numbers[0] == 0:
        raise ValueError(
            f"{_WHERE}: the leaves of batches must have a leading axis of one length, at "
            f"least 1, got lengths {numbers}; stack minibatches along a new axis."
        )
    return numbers[0]


def _check_weights(weights: Any, number: int) -> Real[Array, " batches"] | None:
    if weights is None:
        return None
    if not eqx.is_array(weights) and not isinstance(weights, np.ndarray):
        raise TypeError(
            f"{_WHERE}: weights must be an array of shape ({number},), got "
            f"{kind_of(weights)}; pass jax.numpy.asarray(weights)."
        )
    kinds = (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(weights.dtype, kind) for kind in kinds):
        raise TypeError(
            f"{_WHERE}: weights must be real, got dtype {weights.dtype}; scale the "
            "operators in make_operator instead."
        )
    if weights.shape != (number,):
        raise ValueError(
            f"{_WHERE}: weights must have shape ({number},), got {weights.shape}; give "
            "one for each minibatch."
        )
    return jnp.asarray(weights)


#
# What the operators are, without values
#

# Each check, its own tag, and what else implies it.
_TAGS = {
    lx.is_symmetric: (lx.symmetric_tag, lx.diagonal_tag),
    lx.is_diagonal: (lx.diagonal_tag,),
    lx.is_tridiagonal: (lx.tridiagonal_tag, lx.diagonal_tag),
    lx.is_lower_triangular: (lx.lower_triangular_tag, lx.diagonal_tag),
    lx.is_upper_triangular: (lx.upper_triangular_tag, lx.diagonal_tag),
    lx.has_unit_diagonal: (lx.unit_diagonal_tag,),
}
# A mean inherits these where no weight is negative.
_SIGNS = {
    lx.is_positive_semidefinite: (lx.positive_semidefinite_tag,),
    lx.is_negative_semidefinite: (lx.negative_semidefinite_tag,),
}
_SEMIDEFINITE = {own for (own,) in _SIGNS.values()}


class _Found(NamedTuple):
    in_structure: PyTree[jax.ShapeDtypeStruct]
    out_structure: PyTree[jax.ShapeDtypeStruct]
    tags: frozenset[object]


def _look(make: Callable, batch: PyTree, *, signs: bool) -> _Found:
    """What holds of the operator of every minibatch."""
    found = []

    def look(make, batch):
        operator = make(batch)
        if not isinstance(operator, lx.AbstractLinearOperator):
            raise TypeError(
                f"{_WHERE}: make_operator must return a lineax linear operator, got "
                f"{kind_of(operator)}; wrap it, as lineax.MatrixLinearOperator does."
            )
        checks = _TAGS | _SIGNS if signs else _TAGS
        tags = [own for check, (own, *_) in checks.items() if is_known(check, operator)]
        structures = operator.in_structure(), operator.out_structure()
        found.append(_Found(*structures, frozenset(tags)))

    eqx.filter_eval_shape(look, make, batch)
    return found[-1]


#
# Functions that make operators
#


def _flat(structure: PyTree) -> tuple[tuple[Any, ...], Any]:
    # Of dictionaries, for example, which can't be hashed.
    leaves, treedef = jtu.tree_flatten(structure)
    return tuple(leaves), treedef


class _Converted(eqx.Module):
    """Operators known by their products alone, whose arrays are leaves."""

    product: Callable
    structure: tuple[tuple[Any, ...], Any] = eqx.field(static=True)

    def __init__(self, make: Callable, batch, structure: PyTree[jax.ShapeDtypeStruct]):
        def product(batch, vector):
            return make(batch).mv(vector)

        self.product = eqx.filter_closure_convert(product, batch, structure)
        self.structure = _flat(structure)

    def __call__(self, batch) -> lx.AbstractLinearOperator:
        leaves, treedef = self.structure
        return lx.FunctionLinearOperator(
            lambda vector: self.product(batch, vector),
            jtu.tree_unflatten(treedef, leaves),
            closure_convert=False,
        )


class _Changed(eqx.Module):
    make_operator: Callable
    change: Callable = eqx.field(static=True)

    def __call__(self, batch) -> lx.AbstractLinearOperator:
        return self.change(self.make_operator(batch))


def _changed(mean: MeanLinearOperator, change: Callable, tags) -> MeanLinearOperator:
    make = _Changed(mean.make_operator, change)
    return MeanLinearOperator(make, mean.batches, weights=mean.weights, tags=tags)


def _transpose(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    return operator.transpose()


#
# What lineax asks of an operator
#


def _is_complex(operator: MeanLinearOperator) -> bool:
    leaves, _ = operator._structures
    return any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves)


def _register():
    cls = MeanLinearOperator
    lx.linearise.register(cls, lambda operator: operator)

    @lx.materialise.register(cls)
    def _(operator):
        structure, tags = operator.in_structure(), operator.tags
        return lx.materialise(lx.FunctionLinearOperator(operator.mv, structure, tags))

    @lx.diagonal.register(cls)
    def _(operator):
        if lx.is_diagonal(operator):
            structure = operator.in_structure()
            ones = jtu.tree_map(
                lambda leaf: jnp.ones(leaf.shape, leaf.dtype), structure
            )
            return jfu.ravel_pytree(operator.mv(ones))[0]
        return _mean(operator, lx.diagonal)

    @lx.tridiagonal.register(cls)
    def _(operator):
        matrix = operator.as_matrix()
        return tuple(jnp.diagonal(matrix, offset) for offset in (0, -1, 1))

    @lx.conj.register(cls)
    def _(operator):
        if not _is_complex(operator):
            return operator
        return _changed(operator, lx.conj, operator.tags)

    for check, tags in (_TAGS | _SIGNS).items():

        def is_tagged(operator, tags=frozenset(tags)):
            return not tags.isdisjoint(operator.tags)

        check.register(cls, is_tagged)


_register()
