"""What custom derivative rules within a program do, as programs.

The rules are Python functions, made anew whenever the program is traced. What they do can
be compared.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

# Parameters that hold rules, by primitive. Other programs in them are not rules.
RULES = {
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
}
# Rules of rules, such as that of an exponential, may go on without end. Derivatives of a
# higher order are not compared.
_MOST_ORDERS = 3


def derivative_rules(program: Jaxpr) -> list[ClosedJaxpr] | None:
    """The rules within a program, with the rules within those, in the order of use.

    None for rules that can't be traced, or that hold traced values.
    """
    try:
        rules = list(_rules(program, 0))
    except Exception:  # A user's rule may raise anything; it does so again when used.
        return None
    consts = (x for rule in rules for x in rule.consts)
    return None if any(isinstance(x, jax.core.Tracer) for x in consts) else rules


def _rules(program: Jaxpr, order: int) -> Iterator[ClosedJaxpr]:
    if order == _MOST_ORDERS:
        return
    for eqn in program.eqns:
        if eqn.primitive.name in RULES:
            rule = _rule(program, eqn)
            yield rule
            yield from _rules(rule.jaxpr, order + 1)
        for x in jax.tree.leaves(eqn.params, is_leaf=_is_program):
            if _is_program(x):
                yield from _rules(x.jaxpr if isinstance(x, ClosedJaxpr) else x, order)


def _is_program(x) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)


def _rule(program: Jaxpr, eqn: JaxprEqn) -> ClosedJaxpr:
    inputs = list(dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal)))
    alone = program.replace(
        constvars=[],
        invars=inputs,
        outvars=eqn.outvars,
        eqns=[eqn],
        effects=eqn.effects,
    )
    call = jaxpr_as_fun(ClosedJaxpr(alone, []))
    like = [_structure(x.aval) for x in inputs]
    varying = [i for i, x in enumerate(like) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def derivative(values, directions):
        def of_varying(*differentiated):
            given = list(values)
            for i, x in zip(varying, differentiated, strict=True):
                given[i] = x
            return call(*given)

        at = [values[i] for i in varying]
        if forward:
            return jax.jvp(of_varying, at, directions)[1]
        return jax.vjp(of_varying, *at)[1](directions)

    forward = eqn.primitive.name == "custom_jvp_call"
    outputs = [_structure(x.aval) for x in eqn.outvars]
    directions = [like[i] for i in varying] if forward else outputs
    traced = jax.make_jaxpr(derivative)(like, directions)
    return ClosedJaxpr(_without_unused(traced.jaxpr), traced.consts)


def _structure(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _without_unused(program: Jaxpr) -> Jaxpr:
    # A rule computes the value, too, by the function that it is the rule of.
    used, kept = set(map(id, program.outvars)), []
    for eqn in reversed(program.eqns):
        if eqn.effects or any(id(x) in used for x in eqn.outvars):
            used.update(map(id, eqn.invars))
            kept.append(eqn)
    return program.replace(eqns=kept[::-1])
