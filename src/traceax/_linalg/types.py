"""Types of arrays on meshes of devices: layouts, and what differs between devices.

Inside `jax.shard_map` the type of an array has the axes of the mesh along which it varies,
and on a mesh of explicit axes its layout.
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

Carry = TypeVar("Carry")
T = TypeVar("T")


def is_explicit(x: PyTree[Any]) -> bool:
    """Whether the type of an array has a layout on a mesh of explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def on_mesh(tree: PyTree[Any]) -> bool:
    """Whether types of arrays here have more than a shape and a dtype."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty or any(map(is_explicit, jtu.tree_leaves(tree)))


def axes_of(tree: PyTree[Any]) -> frozenset[str]:
    """The axes of `jax.shard_map` along which any of the arrays varies."""
    types = [jax.typeof(x).manual_axis_type for x in jtu.tree_leaves(tree)]
    return frozenset().union(*[x.varying for x in types])


def widened(tree: PyTree[Any], axes: frozenset[str]) -> Any:
    """The same arrays, which may vary along more axes."""

    def widen(x):
        missing = tuple(sorted(axes - axes_of(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jtu.tree_map(widen, tree)


def check_axes(tree: PyTree[Any], axes: frozenset[str]) -> None:
    """Refuses vectors that vary along more axes than a function of them is traced for."""
    beyond = axes_of(tree) - axes
    if beyond:
        raise ValueError(
            "traceax: vectors vary between the devices of jax.shard_map, along "
            f"{sorted(beyond)}, and the operator takes vectors that do not; pass the same "
            "key on every device, or let the operator's x vary, by "
            "jax.lax.pcast(x, axes, to='varying')."
        )


def cast(tree: PyTree[Any], like: PyTree[Any]) -> Any:
    """Vectors with the types of arrays of the same shapes."""

    def convert(x, y):
        check_axes(x, axes_of(y))
        if is_explicit(y):
            return jax.sharding.reshard(x, jax.typeof(y).sharding)
        return widened(x, axes_of(y))

    return jtu.tree_map(convert, tree, like)


@contextlib.contextmanager
def annotate_layout_errors():
    """Adds a note to errors on a mesh of explicit axes."""
    try:
        yield
    except Exception as error:
        if jax.sharding.get_abstract_mesh().explicit_axes:
            error.add_note(
                "traceax: the mesh has explicit axes; if layouts are the cause, make the "
                "operator and the estimate inside of jax.sharding.auto_axes."
            )
        raise


def automatic(fn: Callable[..., T]) -> Callable[..., T]:
    """`fn`, for which the compiler finds layouts where the mesh has explicit axes.

    What it returns is on every device then.
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

        everywhere = NamedSharding(meshes[0], PartitionSpec())
        with annotate_layout_errors():
            spread = jax.sharding.auto_axes(arrays_of, out_sharding=everywhere)
            results = spread(arrays)
        return eqx.combine(results, constants[0])

    return call


def same_layouts(*branches: Callable) -> list[Callable]:
    """Branches of a condition whose results vary along the same axes."""

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
    """`fn(*args)`, of these shapes, or zeros where no lane of a `vmap` needs it.

    A condition that differs between lanes would be no condition.
    """
    zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(
        eqxi.unvmap_any(needed), *same_layouts(fn, lambda *_: zeros), *args
    )


def in_loop(
    body: Callable[..., Carry], carry: Carry, *first: PyTree[Any]
) -> tuple[Callable[..., Carry], Carry]:
    """A body `body(*first, carry)` of a loop and its carry, made to vary along the same axes."""
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
    """`jax.lax.while_loop`; what it makes of the carry may vary between devices."""
    return jax.lax.while_loop(proceed, *in_loop(body, carry))


def fori_loop(
    steps: Any, body: Callable[[Any, Carry], Carry], carry: Carry, start: int = 0
) -> Carry:
    """`jax.lax.fori_loop`, in the same way."""
    return jax.lax.fori_loop(start, steps, *in_loop(body, carry, jnp.int32(0)))


def scan(
    step: Callable[[Carry, Any], tuple[Carry, T]], carry: Carry, xs: PyTree[Any]
) -> Any:
    """`jax.lax.scan`, in the same way."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jax.lax.scan(step, carry, xs)
    first = jtu.tree_map(lambda x: x[0], xs)
    _, carry = in_loop(lambda x, carry: step(carry, x)[0], carry, first)

    def wide(carry, x):
        new, out = step(carry, x)
        return jtu.tree_map(lambda x, y: widened(x, axes_of(y)), new, carry), out

    return jax.lax.scan(wide, carry, xs)


def fold(step: Callable[[Carry, Any], Carry], carry: Carry, xs: PyTree[Any]) -> Carry:
    """The carry of a `jax.lax.scan`, in the same way."""
    return scan(lambda carry, x: (step(carry, x), None), carry, xs)[0]
