"""What operators are accepted, and how algorithms see them."""

from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from .._arguments import kind_of
from .block import (
    as_function,
    complex_dtype,
    forward_mode,
    is_data,
    is_known,
    out_structure_of,
    register,
    structure_of,
)


def checked_operator(
    operator: Any, where: str, arguments: str = "(key, operator)"
) -> lx.AbstractLinearOperator:
    """A square lineax operator as algorithms see it; a clear error for anything else.

    Where its products with real vectors are complex, it acts on complex vectors.
    """
    if not isinstance(operator, lx.AbstractLinearOperator):
        raise TypeError(
            f"{where}: operator must be a lineax linear operator, got "
            f"{kind_of(operator)}; traceax.as_operator(x) makes one of a matrix, dense "
            "or sparse, and of SciPy's operators, traceax.as_operator(fn, example) of a "
            f"linear function. The arguments start {arguments}."
        )
    for x in jtu.tree_leaves(operator, is_leaf=_is_matrix_operator):
        if _is_matrix_operator(x) and not eqx.is_array(x.matrix):
            raise TypeError(
                f"{where}: lineax.MatrixLinearOperator must hold a dense array, got "
                f"{kind_of(x.matrix)}; make an operator of it by "
                "traceax.as_operator(x) instead."
            )
    with forward_mode():
        in_structure, out_structure = (
            operator.in_structure(),
            out_structure_of(operator),
        )
    in_leaves, in_treedef = jtu.tree_flatten(in_structure)
    out_leaves, out_treedef = jtu.tree_flatten(out_structure)
    if in_treedef != out_treedef or any(
        x.shape != y.shape or (x.dtype != y.dtype and complex_dtype(x.dtype) != y.dtype)
        for x, y in zip(in_leaves, out_leaves, strict=True)
    ):
        raise ValueError(
            f"{where}: operator must map a space to itself, got one from "
            f"{_describe(in_structure)} to {_describe(out_structure)}; its input and "
            "output structures (PyTree, shapes and dtypes) must be equal."
        )
    for leaf in in_leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"{where}: operator must act on floating-point or complex leaves, got "
                f"one of dtype {leaf.dtype}; cast it, or leave it out of the "
                "operator's structure."
            )
    with forward_mode():
        operator = as_complex(operator)
    in_leaves = jtu.tree_leaves(operator.in_structure())
    kinds = {jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in in_leaves}
    if len(kinds) == 2:
        raise ValueError(
            f"{where}: operator must act on leaves that are all real or all complex, "
            f"got {_describe(in_structure)}; make the real leaves complex, or estimate "
            "the blocks one by one."
        )
    return operator


def _is_matrix_operator(x: Any) -> bool:
    return isinstance(x, lx.MatrixLinearOperator)


def _describe(structure: PyTree[jax.ShapeDtypeStruct]) -> str:
    if isinstance(structure, jax.ShapeDtypeStruct):
        return f"shape {structure.shape}, dtype {structure.dtype}"
    return eqx.tree_pformat(structure)


def as_complex(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator, on complex vectors if its products with real ones are complex.

    Such are complex multiples of real operators, and sums with these.
    """
    structure = operator.in_structure()
    if all(
        jnp.issubdtype(x.dtype, jnp.complexfloating) for x in jtu.tree_leaves(structure)
    ):
        return operator
    structure = structure_of(structure)
    data = all(is_data(x) for x in jtu.tree_leaves(operator))
    if data and jax.sharding.get_abstract_mesh().empty:
        products = eqxi.cached_filter_eval_shape(_product, operator, structure)
    else:
        # Of other leaves the products may have changed since.
        products = jax.eval_shape(operator.mv, structure)
    pairs = zip(*map(jtu.tree_leaves, (structure, products)), strict=True)
    if any(x.dtype != y.dtype and complex_dtype(x.dtype) == y.dtype for x, y in pairs):
        return ComplexLinearOperator(operator)
    return operator


def _product(operator: lx.AbstractLinearOperator, vector: PyTree[Array]):
    return operator.mv(vector)


class ComplexLinearOperator(lx.AbstractLinearOperator):
    """An operator on real vectors as one on complex vectors, a product being two of its."""

    operator: lx.AbstractLinearOperator

    def mv(self, vector):
        real, imaginary = (
            self.operator.mv(jtu.tree_map(part, vector))
            for part in (jnp.real, jnp.imag)
        )
        with jax.numpy_dtype_promotion("standard"):
            return jtu.tree_map(lambda x, y: x + 1j * y, real, imaginary)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        return as_function(self).as_matrix()

    def transpose(self):
        # That of the operator itself would take real vectors to real ones.
        return as_function(self).transpose()

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return _complex_structure(self.operator.in_structure())

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return _complex_structure(self.operator.out_structure())


def _complex_structure(structure: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    return jtu.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, complex_dtype(leaf.dtype)),
        structure,
    )


_SEMIDEFINITE = (lx.is_positive_semidefinite, lx.is_negative_semidefinite)

register(
    ComplexLinearOperator,
    # lineax takes a complex multiple for one by its real part.
    lambda check, x: check not in _SEMIDEFINITE and is_known(check, x.operator),
    lambda x: lx.conj(as_function(x)),
)
