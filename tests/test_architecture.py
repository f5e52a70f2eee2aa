"""The shape of the code: layers, abstract or final, documented names."""

import ast
import dataclasses
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import re
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import prose
import pytest

import traceax as tx

SOURCE = pathlib.Path(tx.__file__).parent
DOCS = pathlib.Path(__file__).parents[1] / "docs"  # the source may be installed
FILES = sorted(SOURCE.rglob("*.py"))
each_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(SOURCE))
)
# Modules and folders. Each knows only those above it.
LAYERS = [
    "_arguments",
    "_results",
    "_estimate",
    "_functional",
    "_linalg",
    "_operators",
    "_samplers",
    "_colours",
    "_error_bar",
    "_outcome",
    "_tolerance",
    "_rule",
    "_state",
    "_plan",
    "_estimator",
    "_trace_estimator",
    "_slope",
    "_preconditioner",
    "_estimators",
    "_spectral",
    "_exact",
    "_coloured_default",
    "_spectral_estimate",
    "_trace",
    "_diagonal",
    "_divergence",
    "_elimination",
    "_problem",
    "_likelihood",
    "_spectral_density",
    "_spectral_sums",
    "testing",
    "__init__",
]


def _name(path):
    """`("_linalg", "tall")`, say."""
    return path.relative_to(SOURCE).with_suffix("").parts


def _imports(path):
    """The modules of ours that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = _name(path)[: -node.level]
            yield (*folder, *(node.module or "").split("."))


def test_every_module_has_a_layer():
    assert {_name(path)[0] for path in FILES} == set(LAYERS)


def test_the_table_of_files_is_right():
    text = (DOCS.parent / "CONTRIBUTING.md").read_text()
    table = text.partition("| module | contents |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \| (.*) \|$", table, re.MULTILINE)
    assert [name for name, _ in rows] == LAYERS
    for name, cell in rows:
        for file in re.findall(r"`(\w+\.py)`", cell):
            assert SOURCE / name / file in FILES


@each_file
def test_layers(path):
    own, *inside = _name(path)
    for name, *_ in _imports(path):
        above = LAYERS.index(name) < LAYERS.index(own)
        sibling = name == own and inside and own != "_estimators"
        assert above or sibling, f"{path.name} imports {name}"


def test_no_cycles_inside_folders():
    imported = {_name(path): set(_imports(path)) for path in FILES}
    graphlib.TopologicalSorter(imported).prepare()


@each_file
def test_no_late_imports_and_no_long_files(path):
    tree = ast.parse(path.read_text())
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert node in top
    assert len(path.read_text().splitlines()) <= 450


@each_file
def test_no_function_is_taken_apart(path):
    # Optional abilities are methods with a default; functions are only called.
    refused = ("hasattr(", "__code__", "FunctionType", "disable_jit", "getsource")
    for word in refused:
        assert word not in path.read_text(), word


@pytest.mark.parametrize(
    "path", [p for p in FILES if _name(p)[0] == "_estimators"], ids=lambda p: p.stem
)
def test_an_estimator_knows_few_modules(path):
    assert len(set(_imports(path))) <= 11


class Recording(lx.AbstractLinearOperator):
    """Twice the identity, which calls `record` with every product."""

    n: int = eqx.field(static=True)
    record: Callable[[], None] = eqx.field(static=True)

    def mv(self, vector):
        self.record()
        return 2 * vector

    def in_structure(self):
        return jax.ShapeDtypeStruct((self.n,), jnp.float32)

    def out_structure(self):
        return self.in_structure()

    def as_matrix(self):
        return 2 * jnp.eye(self.n, dtype=jnp.float32)

    def transpose(self):
        return self


for check in (
    *(lx.is_symmetric, lx.is_diagonal, lx.is_positive_semidefinite),
    *(lx.is_negative_semidefinite, lx.has_unit_diagonal),
):
    check.register(Recording, lambda operator: False)


def test_few_modules_lie_before_the_first_product():
    entered, before = set(), []

    def record():
        # The first product gives the door the dtype of products. It is no estimator's.
        if any(name.startswith("_estimators") for name in entered):
            before.append(set(entered))

    def profile(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCE)):
            entered.add(str(pathlib.Path(file).relative_to(SOURCE)))

    jax.clear_caches()
    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        tx.trace(jax.random.key(0), Recording(50, record), 20)
    finally:
        sys.setprofile(previous)
    assert 5 < len(before[0]) <= 15, sorted(before[0])


def _classes():
    for info in pkgutil.walk_packages([str(SOURCE)], "traceax."):
        module = importlib.import_module(info.name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__.startswith("traceax") and issubclass(cls, eqx.Module):
                yield cls


def _may_be_overridden(method):
    # An ability that not every subclass has: the docstring says so.
    abstract = getattr(method, "__isabstractmethod__", False)
    return abstract or "Optional" in (method.__doc__ or "")


def test_abstract_or_final():
    # Dataclasses generate these.
    generated = {"__init__", "__replace__"}
    for cls in set(_classes()):
        for base in cls.__mro__[1:]:
            if not base.__module__.startswith("traceax"):
                continue
            abstract = inspect.isabstract(base) or base.__abstractvars__
            assert abstract, f"{cls} subclasses {base}"
            for name, value in vars(cls).items():
                if name in generated or not inspect.isfunction(value):
                    continue
                overridden = vars(base).get(name)
                if inspect.isfunction(overridden):
                    allowed = _may_be_overridden(overridden)
                    assert allowed, f"{cls}.{name} overrides {base}.{name}"


PUBLIC = [
    name
    for name, value in vars(tx).items()
    if not name.startswith("_") and not inspect.ismodule(value)
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    value = getattr(tx, name)
    assert value.__doc__
    pages = DOCS.rglob("*.md")
    assert any(f"::: traceax.{name}\n" in page.read_text() for page in pages)
    index = DOCS / "api/index.md"
    assert f"[`{name}`][traceax.{name}]" in index.read_text()


def test_public_arguments_are_documented():
    for cls in set(_classes()):
        if cls.__name__.startswith("_") or not hasattr(tx, cls.__name__):
            continue
        for field in dataclasses.fields(cls):
            if not field.name.startswith("_"):
                assert f"`{field.name}`" in cls.__doc__, f"{cls.__name__}.{field}"


# Ceilings for occurrences in 1,000 words, by kind of text, and a floor. We only tighten
# them.
CEILINGS = {"docstrings": 28, "comments": 20, "messages": 34, "pages": 24}


@pytest.mark.skipif(
    not (DOCS.parent / "benchmarks").exists(), reason="needs a whole checkout"
)
def test_prose_stays_plain():
    for (place, kind), total in prose.totals().items():
        text = f"python tests/prose.py: {place}, {kind}"
        assert total["of"] <= CEILINGS[kind], text
        assert total["what"] <= 1, text
        assert total["you or we"] >= 5 or kind in ("docstrings", "messages"), text
        assert all(total[habit] == 0 for habit in prose.HABITS), text
