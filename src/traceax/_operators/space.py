"""Spaces of lineax operators (PyTrees, dtypes and tags), and products with blocks."""

import contextlib
import functools as ft
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PyTree

from .._linalg.types import automatic, axes_of, on_mesh, widened
from .closure import activations, closure
from .solvers import SolverTag, solver_tags

# We multiply blocks of 4 MiB (in 32 bits) at once on a CPU, to stay in its cache.
_CACHED = 2**20
# We multiply at least this many vectors in one pass, however long they are.
FEWEST = 4
# If a network's activations are longer than this, we take fewer columns. But loops make
# convolutions several times slower, so we multiply all columns at once, in up to 512 MiB:
# `benchmarks/columns.py`.
_ACTIVATIONS, _MOST_ACTIVATIONS = 2**15, 2**27
_EXPRESSIONS = lx.AddLinearOperator, lx.ComposedLinearOperator, lx.DivLinearOperator
_EXPRESSIONS += lx.MulLinearOperator, lx.NegLinearOperator, lx.TaggedLinearOperator
P = ParamSpec("P")
T = TypeVar("T")


class Space(NamedTuple):
    """The space that an operator maps to itself, flattened."""

    size: int
    dtype: np.dtype  # common to all leaves
    compute_dtype: np.dtype  # for blocks and values; at least 32-bit
    leaves: tuple[jax.ShapeDtypeStruct, ...] = ()
    treedef: Any = None
    # We fill in these properties in `state_space` only.
    is_positive: bool = False
    is_negative: bool = False
    is_symmetric: bool = False

    @property
    def is_semidefinite(self) -> bool:
        return self.is_positive or self.is_negative

    @property
    def is_hermitian(self) -> bool:
        # We rule out complex operators: in lineax, symmetry means the transpose.
        return self.is_semidefinite or (self.is_symmetric and not self.is_complex)

    @property
    def has_real_trace(self) -> bool:
        return not self.is_complex or self.is_semidefinite

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.treedef.unflatten(self.leaves)

    @property
    def is_complex(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def real_dtype(self) -> np.dtype:
        return jnp.finfo(self.compute_dtype).dtype

    @property
    def rounding(self) -> float:
        """Rounding error in products relative to blocks: 1, or more in 16 bits."""
        coarsest = max((jnp.finfo(leaf.dtype).eps for leaf in self.leaves), default=0)
        return max(float(coarsest) / float(jnp.finfo(self.compute_dtype).eps), 1.0)


def structure_of(tree: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    """The structure that such arrays have if we make them on the current mesh."""
    structure = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    if jax.sharding.get_abstract_mesh().empty:
        return structure
    return jax.eval_shape(lambda: _zeros(structure))


def _zeros(structure: PyTree[Any]) -> PyTree[Array]:
    return jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), structure)


def made_here(tree: PyTree[Array]) -> PyTree[Array]:
    """The same arrays, with the types that `structure_of` returns."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jtu.tree_map(lambda x: x[None][0], tree)


def out_structure_of(operator: lx.AbstractLinearOperator) -> PyTree[Any]:
    """The products' structure, which lineax may not report inside `jax.shard_map`."""
    if jax.sharding.get_abstract_mesh().empty:
        return operator.out_structure()
    structure = structure_of(operator.in_structure())
    # lineax's classes may not multiply arrays that have a layout.
    product = automatic(lambda operator, vector: operator.mv(vector))
    return eqx.filter_eval_shape(product, operator, structure)


def space_of(operator: lx.AbstractLinearOperator) -> Space:
    """The space for an operator that passed `checked_operator`."""
    leaves, treedef = jtu.tree_flatten(operator.in_structure())
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*[leaf.dtype for leaf in leaves] or [float])
        compute_dtype = jnp.promote_types(dtype, jnp.float32)
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    return Space(size, dtype, compute_dtype, tuple(leaves), treedef)


def state_space(operator: lx.AbstractLinearOperator) -> Space:
    """The space, with the properties that the operator's tags and class declare."""
    return space_of(operator)._replace(
        is_positive=is_positive_semidefinite(operator),
        is_negative=is_known(operator, lx.is_negative_semidefinite),
        is_symmetric=is_known(operator, lx.is_symmetric),
    )


def complex_dtype(dtype: DTypeLike) -> np.dtype:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.complex64)


_FORWARD_MODE = (
    "traceax: to compute products, we differentiate the function in forward mode, which a "
    "jax.custom_vjp refuses. Give an ODE solver a forward-mode adjoint, "
    "diffrax.DirectAdjoint() or diffrax.ForwardMode(), or take products with the "
    "transpose, which has the same trace: _, pullback = jax.vjp(fn, x), "
    "traceax.trace(key, traceax.as_operator(lambda v: pullback(v)[0], x), k), with "
    "jax.grad(fn) as fn for a Hessian."
)


@contextlib.contextmanager
def forward_mode():
    """Adds advice to type errors, which JAX raises without a rule for forward mode."""
    try:
        yield
    except TypeError as error:
        if _FORWARD_MODE not in vars(error).get("__notes__", ()):
            error.add_note(_FORWARD_MODE)
        raise


def as_function(operator: lx.AbstractLinearOperator) -> lx.FunctionLinearOperator:
    """The operator as a function that lineax traces, with its tags and solver tags."""
    structure = structure_of(operator.in_structure())
    fn = ft.partial(automatic(lambda x, vector: x.mv(vector)), operator)
    tags = tags_of(operator) | solver_tags(operator)
    return lx.FunctionLinearOperator(fn, structure, tags)


def on_cpu() -> bool:
    """Whether the default device, for which programs are traced, is a CPU."""
    device = jax.config.jax_default_device  # pyright: ignore
    if device is None:
        return jax.default_backend() == "cpu"
    return (device if isinstance(device, str) else device.platform) == "cpu"


def columns_at_once(n: int) -> int:
    return max(FEWEST, _CACHED // max(n, 1)) if on_cpu() else 2**31 - 1


class ByProducts(lx.AbstractLinearOperator):
    """Abstract base class for operators that define products; square by default."""

    def satisfies(self, check: Callable) -> bool:
        """Whether one of lineax's checks holds. Optional."""
        return False

    def conj(self) -> lx.AbstractLinearOperator:
        """The conjugate of a complex operator. Optional."""
        return lx.conj(as_function(self))

    def as_matrix(self) -> Inexact[Array, "m n"]:
        """Optional."""
        return automatic(lambda x: as_function(x).as_matrix())(self)

    def transpose(self) -> lx.AbstractLinearOperator:
        """Optional."""
        if lx.is_symmetric(self):
            return self
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return as_function(self).transpose()
        # We let vectors vary: otherwise the transpose would sum over devices.
        axes = axes_of(out_structure_of(self))
        like = jax.eval_shape(lambda: widened(_zeros(self.in_structure()), axes))
        transposed = jax.linear_transpose(self.mv, like)
        return linear_function(
            lambda v: transposed(widened(v, axes))[0], jax.eval_shape(self.mv, like)
        )

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Optional."""
        return self.in_structure()


class OnMesh(ByProducts):
    """A linear function on a device mesh; lineax's own would also compare layouts."""

    fn: Callable
    like: tuple[Any, Any] = eqx.field(static=True)
    tags: frozenset[object] = eqx.field(static=True)
    solvers: list[SolverTag]

    def mv(self, vector):
        return self.fn(vector)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return structure_of(jtu.tree_unflatten(*self.like))

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return structure_of(jax.eval_shape(self.fn, self.in_structure()))

    def satisfies(self, check):
        return not self.tags.isdisjoint(TAGS[check])


FUNCTIONS = lx.FunctionLinearOperator | OnMesh


def linear_function(
    fn: Callable, like: PyTree[Any], tags: Iterable[object] = ()
) -> lx.AbstractLinearOperator:
    """The operator for a linear function, whose vectors have the types of `like`."""
    if not on_mesh(like):
        return lx.FunctionLinearOperator(fn, structure_of(like), tags)
    like = jax.eval_shape(lambda x: x, like)
    leaves, treedef = jtu.tree_flatten(like)
    traced = closure(fn, like, vectors=True)
    solvers = [x for x in tags if isinstance(x, SolverTag)]
    return OnMesh(traced, (treedef, tuple(leaves)), frozenset(tags), solvers)


class OnePass(ByProducts):
    """Abstract base class for operators whose products cost one pass, however many."""


class Dense(ByProducts):
    """Abstract base class for functions of an operator, which lose its sparsity."""


def parts_of(operator: lx.AbstractLinearOperator, kind: Any) -> list[Any]:
    """The operator if it is a `kind`, else its outermost parts that are."""
    leaves = jtu.tree_leaves(operator, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def has_one_pass(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is, or contains, a `OnePass` operator."""
    return bool(parts_of(operator, OnePass))


def unflatten(vector: Inexact[Array, " n"], structure: PyTree[Any]) -> PyTree[Array]:
    leaves, treedef = jtu.tree_flatten(structure)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])[:-1]
    parts = jnp.split(vector, ends) if len(leaves) > 1 else [vector][: len(leaves)]
    pairs = zip(parts, leaves, strict=True)
    return treedef.unflatten([part.reshape(leaf.shape) for part, leaf in pairs])


def apply_block(
    operator: lx.AbstractLinearOperator, block: Inexact[Array, "n k"]
) -> Inexact[Array, "m k"]:
    """Multiplies the operator with every column of a block.

    We `vmap` over the leading axis, as networks do; on a CPU, in chunks of columns.
    """
    n, k = block.shape
    structure = operator.in_structure()

    def product(vector):
        parts = unflatten(vector, structure)
        x = jtu.tree_map(lambda part, like: part.astype(like.dtype), parts, structure)
        out = operator.mv(x)
        flat = [x.reshape(-1).astype(block.dtype) for x in jtu.tree_leaves(out)]
        return flat[0] if len(flat) == 1 else jnp.concatenate(flat)

    if n == 0 or k == 0:
        return block
    with forward_mode():
        if k == 1:
            # We skip the `vmap`. In a flow's training step, this halves the time.
            return product(block.T[0])[None].T
        if has_one_pass(operator) or k <= (width := _width_of(product, block)):
            return jax.vmap(product)(block.T).T
        return jax.lax.map(product, block.T, batch_size=None if width == 1 else width).T


def _width_of(product: Callable[[Array], Array], block: Inexact[Array, "n k"]) -> int:
    """How many columns to multiply at once."""
    n, width = len(block), columns_at_once(len(block))
    if not on_cpu():
        return width
    # In `jax.shard_map` the type of a column varies, so we trace with one.
    traced = jax.make_jaxpr(product)(block.T[0])
    longest, has_convolution = activations(traced.jaxpr)
    if has_convolution:
        return max(1, _MOST_ACTIVATIONS // longest)
    return min(width, max(1, _ACTIVATIONS // longest)) if longest > n else width


def product_tangent(
    operator: lx.AbstractLinearOperator,
    tangent: PyTree,
    V: Inexact[Array, "n p"],
    product: Callable = apply_block,
) -> Inexact[Array, "n p"] | None:
    """`dA V` for a fixed V. `None` stands for 0."""
    if not jtu.tree_leaves(tangent):
        return None
    V = jax.lax.stop_gradient(V)
    return eqx.filter_jvp(lambda op: product(op, V), (operator,), (tangent,))[1]


def is_known(operator: lx.AbstractLinearOperator, *checks: Callable) -> bool:
    """Whether one of lineax's checks holds; an unregistered check counts as no."""
    for check in checks:
        with contextlib.suppress(NotImplementedError):
            if check(operator):
                return True
    return False


def is_positive_semidefinite(operator: lx.AbstractLinearOperator) -> bool:
    return is_known(operator, lx.is_positive_semidefinite)


def is_semidefinite(operator: lx.AbstractLinearOperator) -> bool:
    return is_known(operator, lx.is_positive_semidefinite, lx.is_negative_semidefinite)


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    return state_space(operator).is_hermitian


SEMIDEFINITE = lx.is_positive_semidefinite, lx.is_negative_semidefinite


class ComplexLinearOperator(ByProducts):
    """An operator on real vectors, extended to complex vectors by two products."""

    operator: lx.AbstractLinearOperator

    def mv(self, vector):
        parts = [jtu.tree_map(part, vector) for part in (jnp.real, jnp.imag)]
        real, imaginary = map(self.operator.mv, parts)
        with jax.numpy_dtype_promotion("standard"):
            return jtu.tree_map(lambda x, y: x + 1j * y, real, imaginary)

    def satisfies(self, check):
        # We drop definiteness: lineax reads only the real part of a complex multiple.
        return check not in SEMIDEFINITE and is_known(self.operator, check)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return _complex(self.operator.in_structure())

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return _complex(self.operator.out_structure())


def _complex(structure: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    return jtu.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, complex_dtype(leaf.dtype)),
        structure,
    )


class ShiftedLinearOperator(ByProducts):
    """`A + shift I`, or A plus a diagonal. A lineax sum would compare the array types,
    which differ in `jax.shard_map`."""

    operator: lx.AbstractLinearOperator
    shift: Inexact[Array, "*n"]

    @property
    def added(self) -> lx.AbstractLinearOperator:
        """The identity without its factor, or the diagonal."""
        structure = self.in_structure()
        if self.shift.ndim == 0:
            return lx.IdentityLinearOperator(structure)
        return lx.DiagonalLinearOperator(unflatten(self.shift, structure))

    def mv(self, vector):
        def shifted(product, x, shift):
            return product + shift.astype(product.dtype) * x.astype(product.dtype)

        shift = jtu.tree_map(lambda _: self.shift, vector)
        if self.shift.ndim:
            shift = unflatten(self.shift, self.in_structure())
        return jtu.tree_map(shifted, self.operator.mv(vector), vector, shift)

    def satisfies(self, check):
        lost = *SEMIDEFINITE, lx.has_unit_diagonal
        return check not in lost and is_known(self.operator, check)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()


# Each check maps to its own tag, then other tags that imply it.
TAGS: dict[Any, tuple[object, ...]] = {
    lx.is_symmetric: (lx.symmetric_tag, lx.diagonal_tag),
    lx.is_diagonal: (lx.diagonal_tag,),
    lx.is_tridiagonal: (lx.tridiagonal_tag, lx.diagonal_tag),
    lx.is_lower_triangular: (lx.lower_triangular_tag, lx.diagonal_tag),
    lx.is_upper_triangular: (lx.upper_triangular_tag, lx.diagonal_tag),
    lx.has_unit_diagonal: (lx.unit_diagonal_tag,),
    lx.is_positive_semidefinite: (lx.positive_semidefinite_tag,),
    lx.is_negative_semidefinite: (lx.negative_semidefinite_tag,),
}


def tags_of(operator: lx.AbstractLinearOperator) -> frozenset[object]:
    return frozenset(own for x, (own, *_) in TAGS.items() if is_known(operator, x))


lx.linearise.register(ByProducts, lambda x: x)
lx.conj.register(ByProducts, lambda x: x.conj() if space_of(x).is_complex else x)
_OPERATIONS: list[Any] = [lx.materialise, lx.diagonal, lx.tridiagonal]
for _operation in _OPERATIONS:
    _operation.register(ByProducts, lambda x, fn=_operation: fn(as_function(x)))
for _check in TAGS:
    _check.register(ByProducts, lambda x, check=_check: x.satisfies(check))
