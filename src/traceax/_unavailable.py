"""An operator of which nothing but some products is known any more."""

from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, PyTree


class UnavailableLinearOperator(lx.AbstractLinearOperator):
    """Stands for an operator whose products can't be taken: each is an error.

    Its structure and whether it is semidefinite are known. It may depend on arrays, so
    that a derivative with respect to what these were computed from is an error, too,
    rather than 0.
    """

    depends_on: list[Array]
    tags: frozenset[object] = eqx.field(static=True)
    _structure: tuple[tuple[Any, ...], Any] = eqx.field(static=True)

    def __init__(self, structure: PyTree[jax.ShapeDtypeStruct], tags: frozenset):
        # Of dictionaries, for example, which can't be hashed.
        leaves, treedef = jtu.tree_flatten(structure)
        self._structure = tuple(leaves), treedef
        self.tags, self.depends_on = tags, []

    def mv(self, vector):
        raise RuntimeError(
            "traceax: a product was asked for with a mean of operators that have gone "
            "by. Derivatives of a streamed estimate take more products: use "
            "traceax.MeanLinearOperator, or jax.lax.stop_gradient on the operators. To "
            "go on from an estimate put an operator into its state, as "
            "equinox.tree_at(lambda s: s.operator, estimate.state, operator)."
        )

    def as_matrix(self) -> Inexact[Array, "n n"]:
        return self.mv(None)

    def transpose(self):
        return self.mv(None)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        leaves, treedef = self._structure
        return jtu.tree_unflatten(treedef, leaves)

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.in_structure()


@lx.is_positive_semidefinite.register(UnavailableLinearOperator)
def _(operator):
    return lx.positive_semidefinite_tag in operator.tags


@lx.is_negative_semidefinite.register(UnavailableLinearOperator)
def _(operator):
    return lx.negative_semidefinite_tag in operator.tags


@lx.is_symmetric.register(UnavailableLinearOperator)
def _(operator):
    del operator
    return False  # not known
