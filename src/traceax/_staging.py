"""How functions are traced: once for equal arguments, and in few pieces."""

import functools as ft
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.tree_util as jtu
from jax.interpreters import batching

P = ParamSpec("P")
T = TypeVar("T")


def inlined(fn: Callable[P, T]) -> Callable[P, T]:
    """A function of arrays whose `jax.numpy` operations are traced as parts of it.

    Else each is a program of its own, traced and put in a cache for the shapes it meets:
    three times the work of a kernel that is traced once. Loops and conditions within it
    have to be `outlined`, or be unrolled. Not for functions that call what users wrote.
    """

    @ft.wraps(fn)
    def traced(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.disable_jit():
            return fn(*args, **kwargs)

    return traced


def outlined() -> AbstractContextManager[None]:
    """A context for what is a program of its own, also within what is `inlined`."""
    return jax.disable_jit(False)


class Staged:
    """A function of PyTrees of arrays and of anything hashable, jitted.

    Its Python runs under JAX's own trace cache alone, which every way to reach a
    primitive shares: eager, abstract, vmapped and lowered calls trace it once.
    """

    def __init__(self, fn: Callable[..., Any]):
        @ft.partial(jax.jit, static_argnums=1)
        def run(arrays, static):
            return fn(*_merge(arrays, static))

        self._run = run

    def __call__(self, *args):
        arrays, static = _split(args, eqx.is_array)
        with _same_context():
            return self._run(arrays, static)

    def abstract(self, *args):
        """The avals of what it returns, for those of its arguments."""
        arrays, static = _split(args, lambda x: isinstance(x, jax.core.ShapedArray))
        structs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
            for x in arrays
        ]
        with _same_context():
            out = self._run.eval_shape(structs, static)
        return jtu.tree_map(
            lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type), out
        )


def make_primitive(name: str, implement, abstract, jvp, transpose, batch=None):
    """A primitive on PyTrees, with the rules of `equinox.internal.create_vprim`.

    `batch(lanes, axis_name)` is a batching rule, if the primitive is not to be vmapped as
    it is.
    """
    primitive = eqxi.create_vprim(
        name,
        eqxi.filter_primitive_def(implement),
        eqxi.filter_primitive_def(abstract),
        eqxi.filter_primitive_jvp(jvp),
        eqxi.filter_primitive_transpose(transpose),
    )
    eqxi.register_impl_finalisation(primitive)
    if batch is not None:

        def rule(lanes, axis_name, trace_type, inputs, axes, **params):
            del trace_type
            if all(axis is None for axis in axes):
                out = primitive.bind(*inputs, **params)
                return out, [None] * len(out)
            one = eqxi.filter_primitive_batching(batch(lanes, axis_name))
            return one(inputs, axes, **params)

        batching.axis_primitive_batchers[primitive] = rule
    return primitive


def _split(args, is_array):
    leaves, treedef = jtu.tree_flatten(args)
    arrays = [x for x in leaves if is_array(x)]
    static = tuple(None if is_array(x) else (x,) for x in leaves)
    return arrays, (static, treedef)


def _merge(arrays, static):
    others, treedef = static
    remaining = iter(arrays)
    leaves = [next(remaining) if x is None else x[0] for x in others]
    return jtu.tree_unflatten(treedef, leaves)


def _same_context():
    # JAX lowers a program in a context that says there is no mesh, and traces it in one
    # that doesn't say. Its trace cache takes the two for different.
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
