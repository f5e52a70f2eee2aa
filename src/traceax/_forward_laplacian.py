"""Value, gradient and Laplacian of a function from one forward pass, by folx."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Literal, jaxpr_as_fun
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ._arguments import check_installed, require

# For jitted functions of these names folx takes rules of its own, whatever they compute.
_RULES: tuple[Any, ...] = (
    *(jnp.sign, jnp.logaddexp, jax.nn.sigmoid, jax.nn.softplus, jax.nn.silu),
    *(jnp.linalg.slogdet, jnp.linalg.inv, jnp.linalg.solve),
)
_BY_NAME = {fn.__name__: fn for fn in _RULES}
_HINT = "leave out forward= for n products with the Hessian"


def forward_laplacian(
    fn: Callable[[PyTree[Array]], Float[Array, ""]], x: PyTree[Array], where: str
) -> tuple[Float[Array, ""], PyTree[Array], Float[Array, ""]]:
    """The value, the gradient and the Laplacian of a real scalar function."""
    check_installed("folx", where)
    jaxpr = jax.make_jaxpr(fn)(x)
    _refuse_misread(jaxpr.jaxpr, where)
    propagate = importlib.import_module("folx").forward_laplacian
    call = jaxpr_as_fun(jaxpr)
    # `fn` is traced already. The rules of folx mix dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        flat, unravel = ravel_pytree(x)
        try:
            out = propagate(lambda *leaves: call(*leaves)[0])(*jtu.tree_leaves(x))
        except Exception as error:
            raise NotImplementedError(f"{where}: folx fails on fn; {_HINT}.") from error
        jacobian = getattr(out, "jacobian", None)
        if jacobian is None:  # `fn` is constant
            value = jnp.asarray(out)
            return value, unravel(jnp.zeros_like(flat)), jnp.zeros_like(value)
        gradient = jacobian.dense_array.astype(flat.dtype)
        return out.x, unravel(gradient), out.laplacian


def _refuse_misread(jaxpr: Any, where: str) -> None:
    """Refuses programs for which folx 0.2.30 returns wrong numbers without a word."""
    depends = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if depends.isdisjoint(v for v in eqn.invars if not isinstance(v, Literal)):
            continue
        depends.update(eqn.outvars)
        if eqn.primitive.name == "scan":
            what = "folx misreads loops that stack what depends on x"
            each = eqn.params["jaxpr"].jaxpr.outvars
            ranks = [[v.aval.ndim for v in outputs] for outputs in (eqn.outvars, each)]
            require(ranks[0] == ranks[1], where, what, "a jax.lax.scan", _HINT)
        elif eqn.primitive.name == "jit":
            name = eqn.params["name"]
            what = "folx loses the digits of determinants next to singular"
            require(name != "det", where, what, "jnp.linalg.det", _HINT)
            what = "folx takes a jitted function for that of JAX of the same name"
            known = name not in _BY_NAME or _is_from_jax(eqn, _BY_NAME[name])
            got, hint = (
                f"{name!r}, which isn't JAX's as folx calls it",
                f"rename it, or {_HINT}",
            )
            require(known, where, what, got, hint)
        else:
            continue
        _refuse_misread(eqn.params["jaxpr"].jaxpr, where)


def _is_from_jax(eqn: Any, fn: Callable) -> bool:
    """Whether a jitted function is JAX's, on these shapes (`vmap` may have moved axes)."""
    try:
        last = jax.make_jaxpr(fn)(*[v.aval for v in eqn.invars]).eqns[-1]
    except (TypeError, ValueError):
        return False
    return str(last.params.get("jaxpr")) == str(eqn.params["jaxpr"])
