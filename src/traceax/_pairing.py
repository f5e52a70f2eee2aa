r"""The derivative `<Z, dA V>` of an estimate, of blocks however they are given.

Where the number of columns is known at run time only, they are taken a chunk at a time,
in a loop that ends with them. JAX doesn't transpose such loops. So there are two
primitives, each the transpose of the other with respect to its linear argument:

| | linear in | |
|---|---|---|
| `pair` | dA | the sum over chunks of `z_j^* (dA v_j)` |
| `gradient` | c | c times what `pair` multiplies the leaves of dA by |

Their derivatives with respect to the operator, which an estimate's second derivatives
need, are those of the same sum over all chunks there could be, which JAX derives and
transposes by itself.
"""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad
from jaxtyping import Array, Inexact, PyTree

from ._operator import apply_block, space_of
from ._orthogonal import column_dots
from ._staging import Staged, make_primitive
from ._stream import CountedBlocks, ProbeStream


def pair(operator: PyTree, t_operator: PyTree, blocks) -> Inexact[Array, ""] | None:
    """`<Z, dA V>`: a Jacobian-vector product with respect to the operator.

    `t_operator` is as the operator, with `None` for what has no tangent. Of V and Z
    themselves nothing is differentiated.
    """
    if not jtu.tree_leaves(t_operator):
        return None
    if isinstance(blocks, ProbeStream):

        def of_probes(Omega):
            return _of(operator, t_operator, Omega, Omega / blocks.k)

        return blocks.sum(of_probes)
    if isinstance(blocks, CountedBlocks):
        return eqxi.filter_primitive_bind(_pair_p, operator, t_operator, blocks)
    return _of(operator, t_operator, *blocks)


def _of(operator, t_operator, V, Z):
    V, Z = jax.lax.stop_gradient((V, Z))
    _, dAV = eqx.filter_jvp(lambda op: apply_block(op, V), (operator,), (t_operator,))
    return jnp.zeros((), V.dtype) if dAV is None else jnp.sum(column_dots(Z, dAV))


@Staged
def _pair(operator, t_operator, blocks):
    zero = jnp.zeros((), space_of(operator).compute_dtype)
    return blocks.loop(lambda V, Z: _of(operator, t_operator, V, Z), zero)


def _pair_jvp(primals, tangents):
    operator, t_operator, blocks = primals
    with_respect_to_operator, t_linear, _ = tangents

    def of_all(operator):
        return blocks.sum(lambda V, Z: _of(operator, t_operator, V, Z))

    parts = _tangent(of_all, operator, with_respect_to_operator)
    if jtu.tree_leaves(t_linear):
        parts.append(eqxi.filter_primitive_bind(_pair_p, operator, t_linear, blocks))
    return eqxi.filter_primitive_bind(_pair_p, *primals), _total(parts)


def _pair_transpose(inputs, weight):
    operator, t_operator, blocks = inputs
    wanted = _leafwise(lambda _, t: ad.is_undefined_primal(t), operator, t_operator)
    found = _nothing(operator)
    if weight is not None:
        found = eqxi.filter_primitive_bind(
            _gradient_p, operator, weight, blocks, wanted
        )
    return _nothing(operator), found, _nothing(blocks)


@Staged
def _gradient(operator, weight, blocks, wanted):
    def of_chunk(V, Z):
        return _gradient_of(operator, weight, wanted, lambda fn: fn(V, Z))

    zeros = jtu.tree_map(jnp.zeros_like, eqx.filter(operator, wanted))
    return blocks.loop(of_chunk, zeros)


def _gradient_of(operator, weight, wanted, over):
    """`weight` times the gradient with respect to the leaves that are wanted of the sum
    of `Z^* A V`, which `over(fn)` takes of `fn(V, Z)`."""
    varied, fixed = eqx.partition(operator, wanted)

    def value(varied):
        def fn(V, Z):
            AV = apply_block(eqx.combine(varied, fixed), V)
            return jnp.sum(column_dots(Z, AV))

        return over(fn)

    out, back = jax.vjp(value, varied)
    (found,) = back(weight.astype(out.dtype))
    return found


def _gradient_abstract(operator, weight, blocks, wanted):
    del weight, blocks
    return jtu.tree_map(lambda x: x.to_tangent_aval(), eqx.filter(operator, wanted))


def _gradient_jvp(primals, tangents):
    operator, weight, blocks, wanted = primals
    t_operator, t_weight, *_ = tangents

    def of_all(operator):
        return _gradient_of(operator, weight, wanted, blocks.sum)

    parts = _tangent(of_all, operator, t_operator)
    if t_weight is not None:
        linear = operator, t_weight, blocks, wanted
        parts.append(eqxi.filter_primitive_bind(_gradient_p, *linear))
    return eqxi.filter_primitive_bind(_gradient_p, *primals), _total(parts)


def _gradient_transpose(inputs, t_operator):
    operator, _, blocks, wanted = inputs
    found = None
    if jtu.tree_leaves(t_operator):
        found = eqxi.filter_primitive_bind(_pair_p, operator, t_operator, blocks)
    return _nothing(operator), found, _nothing(blocks), _nothing(wanted)


def _tangent(of, operator, t_operator):
    if not jtu.tree_leaves(t_operator):
        return []
    return [eqx.filter_jvp(of, (operator,), (t_operator,))[1]]


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


_pair_p = make_primitive("pair", _pair, _pair.abstract, _pair_jvp, _pair_transpose)
_gradient_p = make_primitive(
    "gradient", _gradient, _gradient_abstract, _gradient_jvp, _gradient_transpose
)
