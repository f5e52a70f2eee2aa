"""The shape of the code: layers, abstract or final, documented names."""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil

import equinox as eqx
import pytest

import traceax as tx

SOURCE = pathlib.Path(tx.__file__).parent
# Each module knows only those above it.
LAYERS = [
    "_arguments",
    "_staging",
    "_kept",
    "_student_t",
    "_estimate",
    "_progress",
    "_sharding",
    "_reads",
    "_function_data",
    "_closures",
    "_tracers",
    "_derivative_rules",
    "_programs",
    "_leaves",
    "_spectral_function",
    "_product_cost",
    "_operator",
    "_known_diagonal",
    "_hash",
    "_small_matrices",
    "_orthogonal",
    "_basis",
    "_unavailable",
    "_failure",
    "_samplers",
    "_stream",
    "_leave_one_out",
    "_leave_one_out_nystrom",
    "_krylov",
    "_leave_one_out_krylov",
    "_frechet",
    "_standard_error",
    "_tolerance",
    "_pairing",
    "_primitive",
    "_state",
    "_deflation",
    "_base",
    "_spectral_base",
    "_estimators",
    "_function_operators",
    "_mean_operator",
    "_streamed_arguments",
    "_streamed_mean",
    "_trace",
    "_trace_function",
    "_spectral",
    "_conformance",
    "_conformance_statistics",
    "testing",
    "__init__",
]


def _layer(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.relative_to(SOURCE).parent.parts
            base = base[: len(base) - node.level + 1]
            yield (*base, *(node.module or "").split("."))[0]


def test_every_module_has_a_layer():
    assert {_layer(p) for p in SOURCE.rglob("*.py")} == set(LAYERS)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_layers(path):
    own = LAYERS.index(_layer(path))
    for name in _imports(path):
        # Siblings among the estimators don't import each other either.
        assert LAYERS.index(name) < own, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_no_late_imports_and_no_long_files(path):
    tree = ast.parse(path.read_text())
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert node in top
    assert len(path.read_text().splitlines()) <= 400


def _classes():
    for info in pkgutil.walk_packages([str(SOURCE)], "traceax."):
        module = importlib.import_module(info.name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__.startswith("traceax") and issubclass(cls, eqx.Module):
                yield cls


def test_abstract_or_final():
    for cls in set(_classes()):
        for base in cls.__mro__[1:]:
            if base.__module__.startswith("traceax"):
                assert inspect.isabstract(base), f"{cls} subclasses {base}"
                for name, value in vars(cls).items():
                    overridden = getattr(base, name, None)
                    # Dataclasses generate an `__init__` each.
                    written = name != "__init__" and inspect.isfunction(value)
                    if written and inspect.isfunction(overridden):
                        abstract = getattr(overridden, "__isabstractmethod__", False)
                        assert abstract, f"{cls}.{name} overrides {base}.{name}"


PUBLIC = [
    name
    for name, value in vars(tx).items()
    if not name.startswith("_") and not inspect.ismodule(value)
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    value = getattr(tx, name)
    assert value.__doc__
    pages = (SOURCE.parents[1] / "docs").rglob("*.md")
    assert any(f"::: traceax.{name}\n" in page.read_text() for page in pages)


def test_public_arguments_are_documented():
    for cls in set(_classes()):
        if cls.__name__.startswith("_") or not hasattr(tx, cls.__name__):
            continue
        for field in dataclasses.fields(cls):
            if not field.name.startswith("_"):
                assert f"`{field.name}`" in cls.__doc__, f"{cls.__name__}.{field}"
