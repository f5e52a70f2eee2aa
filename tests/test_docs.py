"""The code in the documentation runs, and what its pages point at exists."""

import importlib.util
import pathlib
import re
import textwrap

import jax
import pytest
from helpers import is_x64

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
CONFIG = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")

FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r'^ *--8<-- "([^":]+)(?::([^"]+))?"$', re.MULTILINE)
OPTIONAL = re.compile(r"^(?:import|from) (flax)\b", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")  # relative ones


@pytest.fixture(autouse=True)
def _keep_config():
    before = {name: getattr(jax.config, name) for name in CONFIG}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def _blocks(page):
    """Code of a page, with the line numbers that it has there.

    Passages of examples are included in fences that begin with `{.python}`.
    """
    text = page.read_text()
    for match in FENCE.finditer(text):
        above = text.count("\n", 0, match.start(2))
        yield "\n" * above + textwrap.dedent(match[2])


@pytest.mark.skipif(is_x64(), reason="in the mode that readers have")
@ALL
def test_code_runs(page):
    namespace = {"__name__": "__main__"}
    for code in _blocks(page):
        needed = OPTIONAL.findall(code)
        if not all(importlib.util.find_spec(name) for name in needed):
            continue
        exec(compile(code, str(page), "exec"), namespace)


def test_blocks_are_found():
    counts = {page.name: len(list(_blocks(page))) for page in PAGES}
    for name in ("README.md", "getting-started.md", "writing-an-estimator.md"):
        assert counts[name] > 0
    fences = sum(page.read_text().count("```python") for page in PAGES)
    assert sum(counts.values()) == fences


@ALL
def test_links_and_snippets_exist(page):
    text = page.read_text()
    assert len(SNIPPET.findall(text)) == text.count("{.python}\n")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    for path, section in SNIPPET.findall(text):
        source = (ROOT / path).read_text()
        if section:
            assert f"--8<-- [start:{section}]" in source, section
            assert f"--8<-- [end:{section}]" in source, section
