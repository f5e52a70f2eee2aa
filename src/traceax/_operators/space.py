"""From a lineax operator, its PyTrees, dtypes and tags, to products with tall blocks."""

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
import lineax.internal as lxi
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, PyTree

from .._linalg.dense import noise, power_of_two_scale
from .._linalg.types import automatic, axes_of, on_mesh, widened
from .closure import closure

_ITERATIVE = lx.CG, lx.BiCGStab, lx.GMRES, lx.LSMR
_DIRECT = (
    *(lx.Cholesky, lx.Diagonal, lx.LU, lx.QR, lx.SVD, lx.Triangular, lx.Tridiagonal),
    lx.AutoLinearSolver,
)


class SolverTag(eqx.Module):
    """A tag of functions, and a part of operators, whose products take inexact solves."""

    tolerance: float = eqx.field(static=True)


@lx.transpose_tags_rules.append
def _(tags):
    return next((x for x in tags if isinstance(x, SolverTag)), None)


def solver_tolerances(tree: PyTree[Any]) -> list[ArrayLike]:
    """Relative tolerances of the solvers in a PyTree that aren't known to be direct.

    Infinite for a fixed number of steps. A custom solver counts as 0: only its residuals,
    which exact answers measure, show an error.
    """
    kinds = lx.AbstractLinearSolver | lx.FunctionLinearOperator | SolverTag

    def is_found(x):  # `lineax.Normal` contains another solver
        return isinstance(x, kinds) and not isinstance(x, lx.Normal)

    found = []
    for x in jtu.tree_leaves(tree, is_leaf=is_found):
        if isinstance(x, lx.FunctionLinearOperator):
            found += [tag.tolerance for tag in x.tags if isinstance(tag, SolverTag)]
        elif isinstance(x, SolverTag):
            found.append(x.tolerance)
        elif isinstance(x, _ITERATIVE):
            # An absolute tolerance is relative to entries of size 1, as probes have.
            given = x.rtol, x.atol
            known = all(isinstance(y, int | float) for y in given)
            found.append((max(given) or math.inf) if known else jnp.maximum(*given))
        elif is_found(x) and not isinstance(x, _DIRECT):
            found.append(0.0)
    return found


def solver_tags(tree: PyTree[Any]) -> frozenset[object]:
    """The tag of a function whose products take the solvers in a PyTree, if there are any."""
    found = solver_tolerances(tree)
    known = [x if isinstance(x, int | float) else math.inf for x in found]
    return frozenset([SolverTag(max(known))] if known else [])


def solver_tolerance(tree: PyTree[Any], dtype: Any) -> Float[Array, ""] | None:
    """The largest of the `solver_tolerances` in a PyTree; `None` without solvers."""
    found = [jnp.asarray(x).astype(dtype) for x in solver_tolerances(tree)]
    return jax.lax.stop_gradient(ft.reduce(jnp.maximum, found)) if found else None


# Entries of a block that a CPU multiplies at once: 4 MiB in 32-bit precision, in its cache.
_CACHED = 2**20
# Vectors that are worth one pass over an operator, however long they are.
FEWEST = 4
_EXPRESSIONS = lx.AddLinearOperator, lx.ComposedLinearOperator, lx.DivLinearOperator
_EXPRESSIONS += lx.MulLinearOperator, lx.NegLinearOperator, lx.TaggedLinearOperator
P = ParamSpec("P")
T = TypeVar("T")


class Space(NamedTuple):
    """The space an operator maps to itself, flattened."""

    size: int
    dtype: np.dtype  # common to all leaves
    compute_dtype: np.dtype  # that of blocks and of values; at least 32-bit
    leaves: tuple[jax.ShapeDtypeStruct, ...] = ()
    treedef: Any = None

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
        """The rounding of products by that of blocks: 1, and more in 16 bits."""
        coarsest = max((jnp.finfo(leaf.dtype).eps for leaf in self.leaves), default=0)
        return max(float(coarsest) / float(jnp.finfo(self.compute_dtype).eps), 1.0)


def structure_of(tree: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    """The structure of arrays like these that are made here: types of others name a mesh."""
    structure = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    if jax.sharding.get_abstract_mesh().empty:
        return structure
    return jax.eval_shape(lambda: _zeros(structure))


def _zeros(structure: PyTree[Any]) -> PyTree[Array]:
    return jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), structure)


def made_here(tree: PyTree[Array]) -> PyTree[Array]:
    """The same arrays, with the types that `structure_of` says."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jtu.tree_map(lambda x: x[None][0], tree)


def out_structure_of(operator: lx.AbstractLinearOperator) -> PyTree[Any]:
    """What products are, which lineax doesn't always tell inside `jax.shard_map`."""
    if jax.sharding.get_abstract_mesh().empty:
        return operator.out_structure()
    return jax.eval_shape(operator.mv, structure_of(operator.in_structure()))


def space_of(operator: lx.AbstractLinearOperator) -> Space:
    """The space of an operator that passed `checked_operator`."""
    leaves, treedef = jtu.tree_flatten(operator.in_structure())
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*[leaf.dtype for leaf in leaves] or [float])
        compute_dtype = jnp.promote_types(dtype, jnp.float32)
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    return Space(size, dtype, compute_dtype, tuple(leaves), treedef)


def complex_dtype(dtype: Any) -> np.dtype:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.complex64)


@contextlib.contextmanager
def forward_mode():
    """Explains that a function can't be differentiated in forward mode."""
    try:
        yield
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise TypeError(
            "traceax: products are derivatives in forward mode, which a function with a "
            "jax.custom_vjp has none of, got one. Of an ODE solver take an adjoint in "
            "forward mode: diffrax.DirectAdjoint() or diffrax.ForwardMode(). Or take "
            "products with the transpose, whose trace is the same: _, pullback = "
            "jax.vjp(fn, x), and traceax.trace(key, traceax.as_operator(lambda v: "
            "pullback(v)[0], x), k), with jax.grad(fn) for fn where a Hessian is wanted."
        ) from error


def as_data(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """An operator whose arrays are its leaves, also those that its functions close over.

    A program that is kept sees array leaves alone, and what a Python function, or any other
    object, reads may have changed since: an operator with such leaves is traced anew. Jitted
    functions are JAX's to keep, unless they close over tracers.
    """
    leaves = jtu.tree_leaves(operator)
    data = all(is_data(x) for x in leaves)
    if data and not any(isinstance(x, jax.stages.Wrapped) for x in leaves):
        return operator
    if isinstance(operator, _EXPRESSIONS):
        # Part by part: an inverse next to a function stays an inverse.
        return with_data(operator)
    tags = tags_of(operator) | solver_tags(operator)
    made = linear_function(operator.mv, structure_of(operator.in_structure()), tags)
    traced = any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(made))
    return operator if data and not traced else made


def with_data(tree: T) -> T:
    """The PyTree with `as_data` of the operators in it, of an operator of its parts."""

    def inside(x):
        return x is not tree and isinstance(x, lx.AbstractLinearOperator)

    return jtu.tree_map(lambda x: as_data(x) if inside(x) else x, tree, is_leaf=inside)


def as_function(operator: lx.AbstractLinearOperator) -> lx.FunctionLinearOperator:
    """The operator as lineax traces its products, with all its tags and its solvers'."""
    structure = structure_of(operator.in_structure())
    fn = ft.partial(automatic(lambda x, vector: x.mv(vector)), operator)
    tags = tags_of(operator) | solver_tags(operator)
    return lx.FunctionLinearOperator(fn, structure, tags)


def is_data(leaf: Any) -> bool:
    """Whether a leaf is what it is for good, as arrays and constants are."""
    constant = str | jax.extend.core.Jaxpr | jax.stages.Wrapped
    norms = lxi.max_norm, lxi.rms_norm, lxi.two_norm  # of lineax's solvers
    is_norm = any(leaf is norm for norm in norms)
    return is_norm or eqx.is_array_like(leaf) or isinstance(leaf, constant)


def on_cpu() -> bool:
    """Whether the default device, for which programs are traced, is a CPU."""
    device = jax.config.jax_default_device  # pyright: ignore
    if device is None:
        return jax.default_backend() == "cpu"
    return (device if isinstance(device, str) else device.platform) == "cpu"


def jitted(fn: Callable[P, T]) -> Callable[P, T]:
    """`eqx.filter_jit`, with the device of data that isn't traced for the default one."""
    compiled = eqx.filter_jit(fn)

    @ft.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        arrays = [x for x in jtu.tree_leaves(args) if isinstance(x, jax.Array)]
        known = [x for x in arrays if not isinstance(x, jax.core.Tracer)]
        devices = [device for x in known if x.committed for device in x.devices()]
        if not devices or (devices[0].platform == "cpu") == on_cpu():
            return compiled(*args, **kwargs)
        with jax.default_device(devices[0]):
            return compiled(*args, **kwargs)

    return call


@jitted
def size_of_product(operator: lx.AbstractLinearOperator) -> Float[Array, ""]:
    """A power of two of the size of the product with a vector of signs, or 1."""
    space = space_of(operator)
    signs = noise(1, space.size, space.compute_dtype, 0).T
    return jax.lax.stop_gradient(power_of_two_scale(apply_block(operator, signs)))


def columns_at_once(n: int) -> int:
    return max(FEWEST, _CACHED // max(n, 1)) if on_cpu() else 2**31 - 1


class ByProducts(lx.AbstractLinearOperator):
    """Abstract base class of what is known by its products; square unless it says so."""

    def _knows(self, check: Callable) -> bool:
        """Whether one of lineax's checks holds. Optional."""
        return False

    def _conj(self) -> lx.AbstractLinearOperator:
        """The conjugate of a complex one. Optional."""
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
        # A product for vectors that vary: one for others sums over devices, transposed.
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
    """A linear function on a mesh of devices: lineax compares types of vectors whole."""

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

    def _knows(self, check):
        return not self.tags.isdisjoint(TAGS[check])


def linear_function(
    fn: Callable, like: PyTree[Any], tags: Iterable[object] = ()
) -> lx.AbstractLinearOperator:
    """The operator of a linear function of vectors with the types of `like`."""
    if not on_mesh(like):
        return lx.FunctionLinearOperator(fn, structure_of(like), tags)
    like = jax.eval_shape(lambda x: x, like)
    leaves, treedef = jtu.tree_flatten(like)
    made = closure(fn, like, vectors=True)
    solvers = [x for x in tags if isinstance(x, SolverTag)]
    return OnMesh(made, (treedef, tuple(leaves)), frozenset(tags), solvers)


class OnePass(ByProducts):
    """Abstract base class of operators of which many products cost little more than one."""


class Dense(ByProducts):
    """Abstract base class of functions of an operator, whose sparsity they don't have."""


def parts_of(operator: lx.AbstractLinearOperator, kind: type[T]) -> list[T]:
    """The operator if it is of that class, else its outermost parts that are."""
    leaves = jtu.tree_leaves(operator, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def has_one_pass(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a `OnePass` operator is, or is a part of, this one."""
    return bool(parts_of(operator, OnePass))


def unflatten(vector: Inexact[Array, " n"], structure: PyTree[Any]) -> PyTree[Array]:
    leaves, treedef = jtu.tree_flatten(structure)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])[:-1]
    parts = jnp.split(vector, ends) if len(leaves) > 1 else [vector]
    pairs = zip(parts, leaves, strict=True)
    return treedef.unflatten([part.reshape(leaf.shape) for part, leaf in pairs])


def apply_block(
    operator: lx.AbstractLinearOperator, block: Inexact[Array, "n k"]
) -> Inexact[Array, "m k"]:
    """The product of the operator with every column of a block.

    A `vmap` over the leading axis, as networks are batched; on a CPU a few columns at a time.
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
            # Of many lanes, as in the training step of a flow, half of the time of a `vmap`.
            return product(block.T[0])[None].T
        if k > (few := columns_at_once(n)) and not has_one_pass(operator):
            return jax.lax.map(product, block.T, batch_size=few).T
        return jax.vmap(product)(block.T).T


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


def derived(
    operator: lx.AbstractLinearOperator, tangent: PyTree
) -> lx.AbstractLinearOperator:
    """`dA` as an operator."""
    structure = operator.in_structure()

    def mv(vector):
        out, t = eqx.filter_jvp(lambda op: op.mv(vector), (operator,), (tangent,))
        return jtu.tree_map(lambda x, t: jnp.zeros_like(x) if t is None else t, out, t)

    return lx.FunctionLinearOperator(mv, structure)


def is_known(operator: lx.AbstractLinearOperator, *checks: Callable) -> bool:
    """Whether one of lineax's checks holds, which other operators need not register."""
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
    # lineax means the transpose by symmetry.
    real = not space_of(operator).is_complex
    return is_semidefinite(operator) or (real and is_known(operator, lx.is_symmetric))


def has_real_trace(operator: lx.AbstractLinearOperator) -> bool:
    return not space_of(operator).is_complex or is_semidefinite(operator)


# Each check, its own tag, and what else implies it.
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
lx.conj.register(ByProducts, lambda x: x._conj() if space_of(x).is_complex else x)
_OPERATIONS: list[Any] = [lx.materialise, lx.diagonal, lx.tridiagonal]
for _operation in _OPERATIONS:
    _operation.register(ByProducts, lambda x, of=_operation: of(as_function(x)))
for _check in TAGS:
    _check.register(ByProducts, lambda x, check=_check: x._knows(check))
