"""What the code of a Python function says that it reads and writes."""

import dis
import functools
import types

# What reads by a name that is given as a string.
_READ_BY_NAME = {"getattr", "globals", "vars", "__dict__"}


def names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes that a function reads or writes."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    found = set(code.co_names)
    if not found.isdisjoint(_READ_BY_NAME):
        found.update(x for x in code.co_consts if isinstance(x, str))
    return found.union(*(names(x) for x in inner))


@functools.lru_cache(maxsize=4096)
def assigns_outside(code: types.CodeType) -> bool:
    """Whether a function rebinds a variable that isn't its own."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    own = any(
        step.opname == "STORE_GLOBAL"
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )
    return own or any(map(assigns_outside, inner))
