"""Checks of operators and their arguments, and the forms that algorithms work on."""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import lineax.internal as lxi
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._arguments import check_integers, kind_of, require
from .._linalg.dense import hashed_signs, power_of_two_scale
from .._linalg.types import annotate_layout_errors, axes_of, owned, widened
from .solvers import is_inexact, solver_tags
from .space import (
    _EXPRESSIONS,
    ComplexLinearOperator,
    Dense,
    ShiftedLinearOperator,
    Space,
    apply_block,
    complex_dtype,
    forward_mode,
    linear_function,
    on_cpu,
    out_structure_of,
    parts_of,
    space_of,
    structure_of,
    tags_of,
)

P = ParamSpec("P")
T = TypeVar("T")


def accept_any_layout(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """Replaces lineax's functions in an operator, to take any vector type on a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes and not mesh.manual_axes:
        return operator

    def is_function(x):
        return isinstance(x, lx.FunctionLinearOperator | lx.JacobianLinearOperator)

    def convert(x):
        if not is_function(x):
            return x
        jacobian = isinstance(x, lx.JacobianLinearOperator)
        return linear_function(x.mv, x.x if jacobian else x.in_structure(), tags_of(x))

    return jtu.tree_map(convert, operator, is_leaf=is_function)


@annotate_layout_errors()
@forward_mode()
def checked_operator(
    operator: object, where: str, arguments: str = "(key, operator)"
) -> lx.AbstractLinearOperator:
    """Checks that an operator is square and from lineax, and returns it `as_complex`."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        raise TypeError(
            f"{where}: operator must be a lineax linear operator, got "
            f"{kind_of(operator)}; convert dense and sparse matrices and SciPy operators "
            "with traceax.as_operator(x), and linear functions with "
            f"traceax.as_operator(fn, example). The arguments start {arguments}."
        )
    for x in parts_of(operator, lx.MatrixLinearOperator):
        what = "operator, a lineax.MatrixLinearOperator, must hold a dense array"
        hint = "convert the array with traceax.as_operator(x) instead"
        require(eqx.is_array(x.matrix), where, what, x.matrix, hint, TypeError)
    operator = accept_any_layout(operator)
    in_structure = operator.in_structure()
    out_structure = out_structure_of(operator)
    in_leaves, in_treedef = jtu.tree_flatten(in_structure)
    out_leaves, out_treedef = jtu.tree_flatten(out_structure)
    pairs = zip(in_leaves, out_leaves, strict=False)
    if in_treedef != out_treedef or any(
        x.shape != y.shape or (x.dtype != y.dtype and complex_dtype(x.dtype) != y.dtype)
        for x, y in pairs
    ):
        raise ValueError(
            f"{where}: operator must map a space to itself, got one from "
            f"{_describe(in_structure)} to {_describe(out_structure)}; its input and "
            "output structures (PyTree, shapes and dtypes) must be equal."
        )
    for leaf in in_leaves:
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        what = "operator must act on floating-point or complex leaves"
        received = f"one of dtype {leaf.dtype}"
        hint = "cast it, or leave it out of the operator's structure"
        require(inexact, where, what, received, hint, TypeError)
    operator = as_complex(operator)
    in_leaves = jtu.tree_leaves(operator.in_structure())
    kinds = {jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in in_leaves}
    if len(kinds) == 2:
        raise ValueError(
            f"{where}: operator must act on leaves that are all real or all complex, got "
            f"{_describe(in_structure)}; make the real leaves complex, or estimate each "
            "block separately."
        )
    return operator


def _describe(structure: PyTree[jax.ShapeDtypeStruct]) -> str:
    if isinstance(structure, jax.ShapeDtypeStruct):
        return f"shape {structure.shape}, dtype {structure.dtype}"
    return eqx.tree_pformat(structure)


def as_complex(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator, on complex vectors if its products with real ones are complex."""
    structure = structure_of(operator.in_structure())
    leaves = jtu.tree_leaves(structure)
    if all(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves):
        return operator
    data = all(is_data(x) for x in jtu.tree_leaves(operator))
    if data and jax.sharding.get_abstract_mesh().empty:
        products = eqxi.cached_filter_eval_shape(operator.mv, structure)
    else:
        # We don't cache: with other leaves, the products may have changed since.
        products = out_structure_of(operator)
    pairs = zip(*map(jtu.tree_leaves, (structure, products)), strict=False)
    if any(x.dtype != y.dtype and complex_dtype(x.dtype) == y.dtype for x, y in pairs):
        return ComplexLinearOperator(operator)
    return operator


def shift_of(shift: Any, space: Space, where: str, hint: str) -> Float[Array, "*n"]:
    """A scalar or a vector `(n,)` from a scalar, a vector, or a PyTree with the operator's
    structure, whose leaves may be scalars or have the operator leaves' shapes.
    """
    leaves, treedef = jtu.tree_flatten(shift)
    numbers = int | float | complex | np.number | np.ndarray | jax.Array
    what = "shift must be a real number or array"
    for x in leaves or [shift]:
        is_number = isinstance(x, numbers) and not isinstance(x, bool)
        require(is_number, where, what, x, hint, TypeError)
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for x in leaves]
    single = treedef == jtu.tree_structure(0)
    flat = single and arrays[0].shape in ((), (space.size,))
    fits = flat or (
        treedef == space.treedef
        and all(
            x.shape in ((), y.shape) for x, y in zip(arrays, space.leaves, strict=True)
        )
    )
    kinds = jnp.floating, jnp.integer
    real = all(any(jnp.issubdtype(x.dtype, kind) for kind in kinds) for x in arrays)
    what = f"shift must be real and of shape () or ({space.size},)"
    if space.treedef != jtu.tree_structure(0):
        what += ", or a PyTree with the operator's structure"
    require(fits and real, where, what, shift, hint)
    # We convert NumPy arrays in NumPy, because JAX would compile a program.
    dtype = space.real_dtype
    arrays = [
        jnp.asarray(x if isinstance(x, jax.Array) else x.astype(dtype), dtype)
        for x in arrays
    ]
    if flat:
        return arrays[0]
    pairs = zip(arrays, space.leaves, strict=True)
    return jnp.concatenate([jnp.broadcast_to(x, y.shape).reshape(-1) for x, y in pairs])


def with_leading_axis(
    tree: PyTree[Any], where: str, name: str, items: str, fn: str
) -> Any:
    """Checks that the leaves of argument `name` are arrays over `items`, for `fn`."""

    def as_array(x):
        check_integers(x, name, where)
        x = jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
        what = f"the leaves of {name} must be arrays with a leading axis of {items}"
        hint = f"let {fn} close over shared values"
        require(eqx.is_array(x) and x.ndim > 0, where, what, x, hint)
        return x

    tree = jtu.tree_map(as_array, tree)
    numbers = sorted({leaf.shape[0] for leaf in jtu.tree_leaves(tree)})
    what = f"the leaves of {name} must have leading axes with one length, at least 1"
    is_valid, hint = len(numbers) == 1 and numbers[0] > 0, f"stack {items} along it"
    require(is_valid, where, what, f"lengths {numbers}", hint)
    return tree


def first_of(tree: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    """The structure of one entry along the leading axis."""

    def first(x):
        return widened(jnp.zeros(x.shape[1:], x.dtype), axes_of(x))

    return jax.eval_shape(lambda: jtu.tree_map(first, tree))


def length_of(tree: PyTree[Array]) -> int:
    return jtu.tree_leaves(tree)[0].shape[0]


def is_real(x: Any) -> bool:
    """Whether `x` is a real floating-point array, or stands for one."""
    array = eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    return array and jnp.issubdtype(x.dtype, jnp.floating)


def check_scalar(fn: Any, args: tuple, name: str, where: str, hint: str) -> Any:
    """Checks that the function `name` returns a real scalar. Returns its structure."""
    out = eqx.filter_eval_shape(fn, *args)
    what = f"{name} must return a real floating-point array of shape ()"
    require(is_real(out) and out.shape == (), where, what, out, hint, TypeError)
    return out


def as_data(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """An operator whose leaves include the arrays that its functions close over.

    A compiled program depends on array leaves only. The data behind a Python function,
    or any other object, may have changed since, so we trace an operator with such
    leaves again. JAX caches jitted functions itself, unless they close over tracers.
    """
    leaves = jtu.tree_leaves(operator)
    data = all(is_data(x) for x in leaves)
    if data and not any(isinstance(x, jax.stages.Wrapped) for x in leaves):
        return operator
    wrappers = Dense | ComplexLinearOperator | ShiftedLinearOperator
    if isinstance(operator, _EXPRESSIONS) or (data and isinstance(operator, wrappers)):
        # We convert part by part: an inverse next to a function stays an inverse.
        return with_data(operator)
    tags = tags_of(operator) | solver_tags(operator)
    new = linear_function(operator.mv, structure_of(operator.in_structure()), tags)
    traced = any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(new))
    return operator if data and not traced else new


def with_data(tree: T) -> T:
    """Applies `as_data` to the operators in a PyTree, or to an operator's parts."""

    def inside(x):
        return x is not tree and isinstance(x, lx.AbstractLinearOperator)

    return jtu.tree_map(lambda x: as_data(x) if inside(x) else x, tree, is_leaf=inside)


def is_data(leaf: object) -> bool:
    """Whether a leaf can't change later, such as an array or a constant."""
    constant = str | jax.extend.core.Jaxpr | jax.stages.Wrapped
    norms = lxi.max_norm, lxi.rms_norm, lxi.two_norm  # in lineax's solvers
    is_norm = any(leaf is norm for norm in norms)
    return is_norm or eqx.is_array_like(leaf) or isinstance(leaf, constant)


def jitted(fn: Callable[P, T]) -> Callable[P, T]:
    """`eqx.filter_jit`, with the concrete arrays' device as the default device.

    JAX copies an argument that is a result as well, such as the operator in an
    estimate's state. We return the argument itself, unless it is a NumPy array.
    """

    @eqx.filter_jit
    def compiled(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        leaves = jtu.tree_leaves((args, kwargs))
        places = {id(x): _Argument(i) for i, x in enumerate(leaves) if eqx.is_array(x)}
        return jtu.tree_map(lambda x: places.get(id(x), x), fn(*args, **kwargs))

    @ft.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        leaves = jtu.tree_leaves((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        known = [x for x in arrays if not isinstance(x, jax.core.Tracer)]
        devices = [device for x in known if x.committed for device in x.devices()]
        default = contextlib.nullcontext()
        if devices and (devices[0].platform == "cpu") != on_cpu():
            default = jax.default_device(devices[0])
        with default:
            results = compiled(*args, **kwargs)
        return jtu.tree_map(
            lambda x: owned(leaves[x.index]) if isinstance(x, _Argument) else x, results
        )

    return call


@dataclasses.dataclass(frozen=True)
class _Argument:
    index: int


def is_nonlinear(operator: lx.AbstractLinearOperator) -> Bool[Array, ""]:
    """Whether the product with 1j v isn't 1j times the product with v, for signs v."""
    space = space_of(operator)
    v = hashed_signs(1, space.size, space.compute_dtype, 0).T
    once, turned = apply_block(operator, jnp.concatenate([v, 1j * v], axis=1)).T
    # Products with iterations inside agree less closely.
    eps = float(jnp.finfo(space.real_dtype).eps)
    limit = 10 * eps**0.5 if is_inexact(operator) else 2 * eps ** (2 / 3)
    return jnp.linalg.norm(turned - 1j * once) > limit * jnp.linalg.norm(once)


@jitted
def product_size(operator: lx.AbstractLinearOperator) -> Float[Array, ""]:
    """A power of two near the size of a product with a sign vector; 1 if that is 0."""
    space = space_of(operator)
    signs = hashed_signs(1, space.size, space.compute_dtype, 0).T
    return jax.lax.stop_gradient(power_of_two_scale(apply_block(operator, signs)))
