"""Equal traced programs as one object.

An operator made of a function that closes over arrays holds a jaxpr, traced anew for each
such operator. Jaxprs compare by identity, so what was compiled for one is of no use to the
next, unless that holds the same object.
"""

import collections
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ._derivative_rules import RULES, derivative_rules

# The last programs seen, by a summary that equal ones share.
_MOST = 512
_seen: collections.OrderedDict[Any, list["_Program"]] = collections.OrderedDict()


class _Program(NamedTuple):
    jaxpr: Jaxpr
    rules: list[ClosedJaxpr] | None


def interned(x: Any) -> Any:
    """The first program equal to `x` that was seen; `x` itself if it isn't a program."""
    if not isinstance(x, Jaxpr):
        return x
    summary = (
        tuple(var.aval for var in (*x.constvars, *x.invars)),
        tuple(eqn.primitive for eqn in x.eqns),
    )
    candidates = _seen.setdefault(summary, [])
    _seen.move_to_end(summary)
    if any(known.jaxpr is x for known in candidates):
        return x
    # As the rules are now: what they read may change.
    rules = derivative_rules(x)
    for known in candidates:
        if _equal(known.jaxpr, x) and _equal_rules(known.rules, rules):
            return known.jaxpr
    # Programs that can't be compared would pile up.
    del candidates[:-7]
    candidates.append(_Program(x, rules))
    if len(_seen) > _MOST:
        _seen.popitem(last=False)
    return x


def _equal_rules(a: list[ClosedJaxpr] | None, b: list[ClosedJaxpr] | None) -> bool:
    return a is not None and b is not None and _equal_params(a, b)


def _equal(a: Jaxpr, b: Jaxpr) -> bool:
    """Whether two programs are the same but for the names of their variables, and for
    custom derivative rules."""
    same: dict[Any, Any] = {}

    def define(xs, ys):
        if len(xs) != len(ys):
            return False
        same.update(zip(xs, ys, strict=True))
        return all(x.aval == y.aval for x, y in zip(xs, ys, strict=True))

    def use(xs, ys):
        return len(xs) == len(ys) and all(
            _equal_literals(x, y) if isinstance(x, Literal) else same.get(x) is y
            for x, y in zip(xs, ys, strict=True)
        )

    if not define(a.constvars, b.constvars) or not define(a.invars, b.invars):
        return False
    if len(a.eqns) != len(b.eqns):
        return False
    for e, f in zip(a.eqns, b.eqns, strict=True):
        if (
            e.primitive is not f.primitive
            or e.params.keys() != f.params.keys()
            or e.effects != f.effects
            or not use(e.invars, f.invars)
            or not all(
                _equal_params(e.params[name], f.params[name])
                for name in e.params.keys() - RULES.get(e.primitive.name, set())
            )
            or not define(e.outvars, f.outvars)
        ):
            return False
    return use(a.outvars, b.outvars)


def _equal_literals(x: Literal, y: Any) -> bool:
    return (
        isinstance(y, Literal)
        and x.aval == y.aval
        and type(x.val) is type(y.val)
        and repr(x.val) == repr(y.val)  # tells -0.0 from 0.0, and NaN equals NaN
    )


def _equal_params(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, Jaxpr):
        return _equal(x, y)
    if isinstance(x, ClosedJaxpr):
        return (
            _equal(x.jaxpr, y.jaxpr)
            and len(x.consts) == len(y.consts)
            and all(p is q for p, q in zip(x.consts, y.consts, strict=True))
        )
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(_equal_params, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(
            _equal_params(x[name], y[name]) for name in x
        )
    try:
        return bool(x == y)
    except (TypeError, ValueError):
        return False
