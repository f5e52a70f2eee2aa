"""Functions traced into PyTrees, and called with arrays of the traced types."""

import contextlib
import functools as ft
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._linalg.types import axes_of, check_axes, is_explicit, widened


def _arrays_of(tree: PyTree[Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays in a PyTree, and a function that puts other arrays in their places."""
    numpy = np.ndarray | np.generic
    arrays, static = eqx.partition(
        tree, lambda x: eqx.is_array(x) or isinstance(x, numpy | jax.ShapeDtypeStruct)
    )
    leaves, treedef = jtu.tree_flatten(arrays)
    return leaves, lambda leaves: eqx.combine(treedef.unflatten(leaves), static)


class Closure(eqx.Module):
    """A function traced on a device mesh, once for each type of its last argument.

    On a mesh with explicit axes, estimates make them automatic. The function doesn't.
    """

    traced: list[Callable]
    types: tuple[tuple[Any, ...], ...] = eqx.field(static=True)
    axes: tuple[frozenset[str], ...] = eqx.field(static=True)
    explicit: bool = eqx.field(static=True)

    def __call__(self, *args: PyTree[Any]) -> Any:
        axes = axes_of(args[-1])
        i = next((i for i, x in enumerate(self.axes) if axes <= x), -1)
        check_axes(args[-1], self.axes[i])
        leaves, fill = _arrays_of((self.traced[i], args))
        types = self.types[i]

        def call(leaves):
            fn, args = fill(leaves)
            return fn(*args)

        mesh, specs = jax.sharding.get_abstract_mesh(), [x.sharding.spec for x in types]
        if self.explicit and mesh.auto_axes:
            return jax.sharding.explicit_axes(call, in_sharding=(specs,))(leaves)
        if self.explicit:
            return call(jax.sharding.reshard(leaves, [x.sharding for x in types]))
        return call(
            [
                widened(x, y.manual_axis_type.varying)
                for x, y in zip(leaves, types, strict=True)
            ]
        )


def closure(fn: Callable, *args: PyTree[Any], vectors: bool = False) -> Any:
    """Traces `fn` into a PyTree, and makes the arrays that it closes over leaves.

    `vectors`: the last argument is a vector, which `jax.shard_map` may vary.
    """
    mesh, (arrays, fill) = jax.sharding.get_abstract_mesh(), _arrays_of(args)
    explicit = bool(mesh.explicit_axes) or any(map(is_explicit, arrays))
    if explicit:
        # We search the arrays for a mesh: scalars outside a program have none.
        input_mesh = (
            mesh
            if mesh.explicit_axes
            else next(
                m
                for m in (jax.typeof(x).sharding.mesh for x in arrays)
                if m.explicit_axes
            )
        )
        specs = [NamedSharding(input_mesh, jax.typeof(x).sharding.spec) for x in arrays]
        reshard = ft.partial(jax.sharding.reshard, out_shardings=specs)
        args = fill(jax.eval_shape(reshard, arrays))
    elif mesh.empty:
        return eqx.filter_closure_convert(fn, *args)
    wider, traced, types, axes = [frozenset()], [], [], []
    if vectors and mesh.manual_axes:
        wider += [axes_of(jax.eval_shape(fn, *args)), frozenset(mesh.manual_axes)]
    *others, last = args
    for more in wider:
        last = jax.eval_shape(lambda x, more=more: widened(x, more), last)
        if axes_of(last) in axes:
            continue
        # We skip this type if `fn` refuses it: collectives may take no varying vectors.
        with contextlib.suppress(*([ValueError, TypeError] if axes else [])):
            traced.append(eqx.filter_closure_convert(fn, *others, last))
            arrays, _ = _arrays_of((traced[-1], (*others, last)))
            types.append(tuple(map(jax.typeof, arrays)))
            axes.append(axes_of(last))
    return Closure(traced, tuple(types), tuple(axes), explicit)


def activations(jaxpr: Jaxpr) -> tuple[int, bool]:
    """The largest size of a matrix product or a convolution, and if one is the latter."""
    found = [(0, False)]
    for equation in jaxpr.eqns:
        is_convolution = equation.primitive.name == "conv_general_dilated"
        if is_convolution or equation.primitive.name == "dot_general":
            results = [cast(Any, x.aval) for x in equation.outvars]
            found += [(x.size, is_convolution) for x in results]
        for x in jtu.tree_leaves(list(equation.params.values())):
            inner = x.jaxpr if isinstance(x, ClosedJaxpr) else x
            if isinstance(inner, Jaxpr):
                found.append(activations(inner))
    sizes, convolutions = zip(*found, strict=True)
    return max(sizes), any(convolutions)
