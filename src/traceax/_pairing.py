r"""The derivative `<Z, dA V>` of an estimate, of blocks however they are given.

Where the number of columns is known at run time only, they are taken a chunk at a time,
in a loop that ends with them. JAX doesn't transpose such loops. So there are two
primitives, each the transpose of the other with respect to its linear argument:

| | linear in | |
|---|---|---|
| `pair` | dA | the sum over chunks of `z_j^* (dA v_j)` |
| `gradient` | c | c times what `pair` multiplies the leaves of dA by |

Both are evaluated as derivatives of the sums of `z_j^* (A + S) v_j` over a chunk, at
`S = 0`: so a vmapped operator can have an S that is not, of which the gradient is then
the sum over lanes, never held for each. `levels` are the calls of `vmap` around, from the
inside: how many lanes, and the axes of all arrays of `(operator, S, blocks)`.

Their derivatives with respect to the operator, which an estimate's second derivatives
need, are those of the same sum over all chunks there could be, which JAX derives and
transposes by itself.
"""

from collections.abc import Hashable
from typing import NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad, batching
from jaxtyping import Array, Inexact, PyTree

from ._operator import apply_block
from ._orthogonal import column_dots
from ._staging import Staged, make_primitive
from ._stream import Blocks, GivenBlocks, ProbeStream, columns_derived_at_once


def pair(operator: PyTree, t_operator: PyTree, blocks) -> Inexact[Array, ""] | None:
    """`<Z, dA V>`: a Jacobian-vector product with respect to the operator.

    `t_operator` is as the operator, with `None` for what has no tangent. Of V and Z
    themselves nothing is differentiated.
    """
    tangents = jtu.tree_leaves(t_operator)
    if not tangents:
        return None
    if isinstance(blocks, ProbeStream):
        blocks = blocks.counted()
    elif not isinstance(blocks, Blocks):
        V, Z = blocks
        size = columns_derived_at_once(V, sum(x.size for x in tangents))
        blocks = GivenBlocks(V, Z, V.shape[1], size)
    return eqxi.filter_primitive_bind(_pair_p, operator, t_operator, blocks, ())


class _Level(NamedTuple):
    """A call of `vmap`: how many lanes, its name, and an axis or `None` of every array."""

    lanes: int
    name: Hashable
    axes: tuple[int | None, ...]


def _shifted(operator, shift, blocks, levels, over):
    """For every lane the sum of `Z^* (A + S) V`, which `over(blocks, fn)` takes of
    `fn(V, Z)`. Without lanes `shift` is A + S itself."""
    leaves, treedef = jtu.tree_flatten((operator, shift, blocks))
    varied = [i for i, x in enumerate(leaves) if eqx.is_array(x)]

    def moved(x, s):
        return x if s is None else x + s.astype(x.dtype) if levels else s

    def of_lane(arrays):
        merged = list(leaves)
        for i, x in zip(varied, arrays, strict=True):
            merged[i] = x
        operator, shift, blocks = jtu.tree_unflatten(treedef, merged)
        operator = _leafwise(moved, operator, shift)

        def fn(V, Z):
            V, Z = jax.lax.stop_gradient((V, Z))
            return jnp.sum(column_dots(Z, apply_block(operator, V)))

        return over(blocks, fn)

    for level in levels:
        of_lane = jax.vmap(
            of_lane,
            in_axes=(list(level.axes),),
            axis_size=level.lanes,
            axis_name=level.name,
        )
    return of_lane([leaves[i] for i in varied])


def _pair_of(operator, t_operator, blocks, levels, over):
    def of(shift):
        return _shifted(operator, shift, blocks, levels, over)

    return jax.jvp(of, (_origin(operator, t_operator, levels),), (t_operator,))[1]


def _gradient_of(operator, weight, blocks, like, levels, over):
    def of(shift):
        return _shifted(operator, shift, blocks, levels, over)

    out, back = jax.vjp(of, _origin(operator, like, levels))
    return back(weight.astype(out.dtype))[0]


def _origin(operator, like, levels):
    """The shift that is none. A itself says how its gradient is laid out over devices."""
    if levels:
        return jtu.tree_map(_zeros, like)
    return _leafwise(lambda x, y: None if y is None else x, operator, like)


def _sum_of_all(blocks, fn):
    return blocks.sum(fn)


def _loop(blocks, levels, of_chunk, zeros):
    """The sum of `of_chunk(over)` over the chunks that are needed by any lane."""
    # Those of lanes are not to be had outside of the loop.
    columns = None if levels else blocks.chunks()

    def of(i):
        def over(blocks, fn):
            return fn(*(columns or blocks.chunks())(i * blocks.size))

        return of_chunk(over)

    start = jnp.zeros((), jnp.int32)
    if blocks.number == 1:
        return of(start)
    first, total = 0, zeros
    if columns is not None:
        # What is added up can be larger than blocks, as the gradient of a matrix is. It
        # is worth another copy of a chunk then not to write zeros, and to read them.
        block = jax.eval_shape(columns, start)[0]
        if sum(x.size for x in jtu.tree_leaves(zeros)) > 4 * block.size:
            first, total = 1, of(start)

    def add(i, total):
        return jtu.tree_map(jnp.add, total, of(i))

    return jax.lax.fori_loop(first, blocks.needed(), add, total)


@Staged
def _pair(operator, t_operator, blocks, levels):
    def of_chunk(over):
        return _pair_of(operator, t_operator, blocks, levels, over)

    zeros = jnp.zeros(_lanes(levels), blocks.dtype)
    return _loop(blocks, levels, of_chunk, zeros)


def _pair_abstract(operator, t_operator, blocks, levels):
    del operator, t_operator
    return jax.core.ShapedArray(_lanes(levels), blocks.dtype)


@Staged
def _pair_tangent(operator, dot_operator, t_operator, blocks, levels):
    def of_all(operator):
        return _pair_of(operator, t_operator, blocks, levels, _sum_of_all)

    return eqx.filter_jvp(of_all, (operator,), (dot_operator,))[1]


def _pair_jvp(primals, tangents):
    operator, t_operator, blocks, levels = primals
    dot_operator, dot_t_operator, *_ = tangents
    parts = []
    if jtu.tree_leaves(dot_operator):
        parts.append(_pair_tangent(operator, dot_operator, t_operator, blocks, levels))
    if jtu.tree_leaves(dot_t_operator):
        linear = operator, _filled(t_operator, dot_t_operator), blocks, levels
        parts.append(eqxi.filter_primitive_bind(_pair_p, *linear))
    return eqxi.filter_primitive_bind(_pair_p, *primals), _total(parts)


def _pair_transpose(inputs, weight):
    operator, t_operator, blocks, levels = inputs
    found = _nothing(operator)
    if weight is not None:
        like = _leafwise(_like, operator, t_operator)
        found = eqxi.filter_primitive_bind(
            _gradient_p, operator, jnp.asarray(weight), blocks, like, levels
        )
    return _nothing(operator), found, _nothing(blocks), _nothing(levels)


def _pair_batch(lanes, name):
    def rule(inputs, axes):
        *arguments, levels = inputs
        level = _Level(lanes, name, _axes_of_arrays(arguments, list(axes[:3])))
        return eqxi.filter_primitive_bind(_pair_p, *arguments, (*levels, level)), 0

    return rule


@Staged
def _gradient(operator, weight, blocks, like, levels):
    def of_chunk(over):
        return _gradient_of(operator, weight, blocks, like, levels, over)

    def zeros(x, y):
        # Laid out as the operator is, where it is of the same shape.
        return None if y is None else _zeros(y) if levels else jnp.zeros_like(x)

    return _loop(blocks, levels, of_chunk, _leafwise(zeros, operator, like))


def _gradient_abstract(operator, weight, blocks, like, levels):
    del weight, blocks
    if levels:
        return jtu.tree_map(lambda x: jax.core.ShapedArray(x.shape, x.dtype), like)
    return _leafwise(
        lambda x, y: None if y is None else x.to_tangent_aval(), operator, like
    )


@Staged
def _gradient_tangent(operator, dot_operator, weight, blocks, like, levels):
    def of_all(operator):
        return _gradient_of(operator, weight, blocks, like, levels, _sum_of_all)

    return eqx.filter_jvp(of_all, (operator,), (dot_operator,))[1]


def _gradient_jvp(primals, tangents):
    operator, weight, *rest = primals
    dot_operator, dot_weight, *_ = tangents
    parts = []
    if jtu.tree_leaves(dot_operator):
        parts.append(_gradient_tangent(operator, dot_operator, weight, *rest))
    if dot_weight is not None:
        parts.append(
            eqxi.filter_primitive_bind(_gradient_p, operator, dot_weight, *rest)
        )
    return eqxi.filter_primitive_bind(_gradient_p, *primals), _total(parts)


def _gradient_transpose(inputs, t_operator):
    operator, _, blocks, like, levels = inputs
    found = None
    if jtu.tree_leaves(t_operator):
        t_operator = _filled(like, t_operator)
        found = eqxi.filter_primitive_bind(
            _pair_p, operator, t_operator, blocks, levels
        )
    nothing = _nothing(blocks), _nothing(like), _nothing(levels)
    return _nothing(operator), found, *nothing


def _gradient_batch(lanes, name):
    def rule(inputs, axes):
        operator, weight, blocks, like, levels = inputs
        # A gradient for each lane, and a weight.
        weight = batching.bdim_at_front(weight, axes[1], lanes)
        first = jtu.tree_map(lambda _: 0, like)
        of = _axes_of_arrays((operator, like, blocks), (axes[0], first, axes[2]))
        like = jtu.tree_map(
            lambda x: jax.ShapeDtypeStruct((lanes, *x.shape), x.dtype), like
        )
        inputs = operator, weight, blocks, like, (*levels, _Level(lanes, name, of))
        return eqxi.filter_primitive_bind(_gradient_p, *inputs), first

    return rule


def _axes_of_arrays(arguments, axes) -> tuple[int | None, ...]:
    found = []

    def add(x, axis):
        if eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
            found.append(axis)

    jtu.tree_map(add, arguments, axes)
    return tuple(found)


def _lanes(levels) -> tuple[int, ...]:
    return tuple(level.lanes for level in reversed(levels))


def _zeros(like):
    return jnp.zeros(like.shape, like.dtype)


def _like(_, tangent):
    if tangent is None:
        return None
    aval = tangent.aval if ad.is_undefined_primal(tangent) else jax.typeof(tangent)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _filled(like, tree):
    """The tree, with zeros for what it lacks."""

    def fill(x, y):
        return _zeros(x) if y is None else y

    return jtu.tree_map(fill, like, tree)


def _total(parts):
    def add(*terms):
        terms = [x for x in terms if x is not None]
        return sum(terms) if terms else None

    return jtu.tree_map(add, *parts, is_leaf=lambda x: x is None)


def _nothing(tree):
    return jtu.tree_map(lambda _: None, tree)


def _leafwise(fn, operator, other):
    """Of an operator's leaves, and of `None` where the other has nothing."""
    return jtu.tree_map(fn, operator, other, is_leaf=lambda x: x is None)


_pair_p = make_primitive(
    "pair", _pair, _pair_abstract, _pair_jvp, _pair_transpose, _pair_batch
)
_gradient_p = make_primitive(
    "gradient",
    _gradient,
    _gradient_abstract,
    _gradient_jvp,
    _gradient_transpose,
    _gradient_batch,
)
