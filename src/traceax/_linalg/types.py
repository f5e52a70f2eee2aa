"""Array types on device meshes: layouts, and axes along which devices differ.

Inside `jax.shard_map`, an array's type holds the mesh axes along which it varies. On a
mesh with explicit axes, the type also holds a layout.
"""

import contextlib
import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

Carry = TypeVar("Carry")
T = TypeVar("T")


def without_derivatives(tree: T) -> T:
    """The same tree, with arrays that have no derivative."""
    arrays, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), static)


def is_explicit(x: PyTree[Any]) -> bool:
    """Whether an array's type has a layout, on a mesh with explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def on_mesh(tree: PyTree[Any]) -> bool:
    """Whether array types here hold more than a shape and a dtype."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty or any(map(is_explicit, jtu.tree_leaves(tree)))


def axes_of(tree: PyTree[Any]) -> frozenset[str]:
    """The `jax.shard_map` axes along which any array varies."""
    types = [jax.typeof(x).manual_axis_type for x in jtu.tree_leaves(tree)]
    return frozenset().union(*[x.varying for x in types])


def widened(tree: PyTree[Any], axes: frozenset[str]) -> Any:
    """The same arrays, allowed to vary along more axes."""

    def widen(x):
        missing = tuple(sorted(axes - axes_of(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jtu.tree_map(widen, tree)


def check_axes(tree: PyTree[Any], axes: frozenset[str]) -> None:
    """Raises an error if vectors vary along more axes than the operator allows."""
    extra_axes = axes_of(tree) - axes
    if extra_axes:
        raise ValueError(
            "traceax: the operator's input must not vary between jax.shard_map devices, "
            f"got vectors that vary along {sorted(extra_axes)}; pass the same key on every "
            "device, or let the operator's x vary with "
            "jax.lax.pcast(x, axes, to='varying')."
        )


def cast(tree: PyTree[Any], like: PyTree[Any]) -> Any:
    """Vectors with the array types of `like`, which has the same shapes."""

    def convert(x, y):
        check_axes(x, axes_of(y))
        if is_explicit(y):
            return jax.sharding.reshard(x, jax.typeof(y).sharding)
        return widened(x, axes_of(y))

    return jtu.tree_map(convert, tree, like)


@contextlib.contextmanager
def annotate_layout_errors():
    """Adds a note to errors on a mesh with explicit axes."""
    try:
        yield
    except Exception as error:
        if jax.sharding.get_abstract_mesh().explicit_axes:
            error.add_note(
                "traceax: the mesh has explicit axes; if layouts are the cause, make the "
                "operator and the estimate inside jax.sharding.auto_axes."
            )
        raise


def owned(tree: T) -> T:
    """A PyTree with JAX copies of NumPy arrays, which somebody may change in place."""
    numpy = np.ndarray | np.generic
    return jtu.tree_map(lambda x: jnp.array(x) if isinstance(x, numpy) else x, tree)


def automatic(fn: Callable[..., T]) -> Callable[..., T]:
    """`fn`, with layouts from the compiler if the mesh has explicit axes.

    Its results are then on every device.
    """

    @ft.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        arrays, static = eqx.partition((args, kwargs), eqx.is_array)
        meshes = [jax.typeof(x).sharding.mesh for x in jtu.tree_leaves(arrays)]
        meshes.append(jax.sharding.get_abstract_mesh())
        meshes = [x for x in meshes if AxisType.Explicit in x.axis_types]
        if not meshes:
            return fn(*args, **kwargs)
        constants = []

        def arrays_of(arrays):
            args, kwargs = eqx.combine(arrays, static)
            results, others = eqx.partition(fn(*args, **kwargs), eqx.is_array)
            constants.append(others)
            return results

        replicated = NamedSharding(meshes[0], PartitionSpec())
        with annotate_layout_errors():
            spread = jax.sharding.auto_axes(arrays_of, out_sharding=replicated)
            results = spread(arrays)
        return eqx.combine(results, constants[0])

    return call


def same_layouts(*branches: Callable) -> list[Callable]:
    """Branches for a condition, with results that vary along the same axes."""

    def wide(branch, *args):
        results = [jax.eval_shape(fn, *args) for fn in branches]
        return jtu.tree_map(
            lambda x, *y: widened(x, axes_of(y)), branch(*args), *results
        )

    manual = jax.sharding.get_abstract_mesh().manual_axes
    return [ft.partial(wide, x) if manual else x for x in branches]


def if_any(
    needed: Any, fn: Callable[..., T], shapes: PyTree[jax.ShapeDtypeStruct], *args: Any
) -> T:
    """`fn(*args)`, or zeros of these shapes if no batch element under `vmap` needs it.

    JAX would evaluate both branches if the condition differed between batch elements.
    """
    zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(
        eqxi.unvmap_any(needed), *same_layouts(fn, lambda *_: zeros), *args
    )


def in_loop(
    body: Callable[..., Carry], carry: Carry, *first: PyTree[Any]
) -> tuple[Callable[..., Carry], Carry]:
    """A loop body `body(*first, carry)` and its carry, varying along the same axes."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return body, carry

    def widen(carry, like):
        return jtu.tree_map(lambda x, y: widened(x, axes_of(y)), carry, like)

    before = None
    while before != (before := [axes_of(x) for x in jtu.tree_leaves(carry)]):
        carry = widen(carry, jax.eval_shape(body, *first, carry))
    return lambda *x: widen(body(*x), x[-1]), carry


def while_loop(
    proceed: Callable[[Carry], Any], body: Callable[[Carry], Carry], carry: Carry
) -> Carry:
    """`jax.lax.while_loop`, whose body may make the carry vary between devices."""
    return jax.lax.while_loop(proceed, *in_loop(body, carry))


def fori_loop(
    steps: Any, body: Callable[[Any, Carry], Carry], carry: Carry, start: int = 0
) -> Carry:
    """`jax.lax.fori_loop`, with the same freedom."""
    return jax.lax.fori_loop(start, steps, *in_loop(body, carry, jnp.int32(0)))


def scan(
    step: Callable[[Carry, Any], tuple[Carry, T]], carry: Carry, xs: PyTree[Any]
) -> Any:
    """`jax.lax.scan`, with the same freedom."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jax.lax.scan(step, carry, xs)
    first = jtu.tree_map(lambda x: x[0], xs)
    _, carry = in_loop(lambda x, carry: step(carry, x)[0], carry, first)

    def wide(carry, x):
        new, out = step(carry, x)
        return jtu.tree_map(lambda x, y: widened(x, axes_of(y)), new, carry), out

    return jax.lax.scan(wide, carry, xs)


def fold(step: Callable[[Carry, Any], Carry], carry: Carry, xs: PyTree[Any]) -> Carry:
    """The final carry from `scan`."""
    return scan(lambda carry, x: (step(carry, x), None), carry, xs)[0]
