"""Signatures for classes whose `__init__` comes from their fields.

This extends griffe, which reads source code and finds fields there, but no signature.
"""

import inspect

import griffe

import traceax


class Fields(griffe.Extension):
    def on_package(self, *, pkg, loader, **kwargs):
        if pkg.path != "traceax":
            return
        for value in vars(traceax).values():
            fields = ("__dataclass_fields__", "_fields")
            is_made = inspect.isclass(value) and not inspect.isabstract(value)
            if not is_made or not any(hasattr(value, name) for name in fields):
                continue
            entry = loader.modules_collection[f"{value.__module__}.{value.__name__}"]
            if "__init__" not in entry.members:
                entry.set_member("__init__", signature(value, entry, loader))


def signature(cls, entry, loader):
    """`__init__`, with the names and defaults that Python finds."""
    parameters = [
        griffe.Parameter(
            name,
            annotation=annotation(cls, name, loader),
            kind=griffe.ParameterKind(parameter.kind.description),
            default=(
                None
                if parameter.default is inspect.Parameter.empty
                else repr(parameter.default)
            ),
        )
        for name, parameter in inspect.signature(cls).parameters.items()
    ]
    self_parameter = griffe.Parameter(
        "self", kind=griffe.ParameterKind.positional_or_keyword, default=None
    )
    return griffe.Function(
        "__init__",
        parameters=griffe.Parameters(self_parameter, *parameters),
        parent=entry,
    )


def annotation(cls, name, loader):
    """The annotation in the source of the class that has the field."""
    for base in cls.__mro__:
        if base.__module__.startswith("traceax"):
            entry = loader.modules_collection[f"{base.__module__}.{base.__name__}"]
            if name in entry.members:
                return entry.members[name].annotation
    return None
