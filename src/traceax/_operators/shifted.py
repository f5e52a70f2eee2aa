"""A multiple of the identity added to an operator."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from .block import as_function, is_known, register


class ShiftedLinearOperator(lx.AbstractLinearOperator):
    """`A + shift I`.

    A sum with lineax's identity compares types of arrays, which differ inside of
    `jax.shard_map`.
    """

    operator: lx.AbstractLinearOperator
    shift: Inexact[Array, ""]

    def mv(self, vector):
        def shifted(product, x):
            return product + self.shift.astype(product.dtype) * x.astype(product.dtype)

        return jtu.tree_map(shifted, self.operator.mv(vector), vector)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        return as_function(self).as_matrix()

    def transpose(self):
        return ShiftedLinearOperator(self.operator.transpose(), self.shift)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.out_structure()


_LOST = (
    lx.has_unit_diagonal,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
)

register(
    ShiftedLinearOperator,
    lambda check, x: check not in _LOST and is_known(check, x.operator),
    lambda x: ShiftedLinearOperator(lx.conj(x.operator), jnp.conj(x.shift)),
)
