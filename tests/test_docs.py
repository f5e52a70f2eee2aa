"""Code in the documentation runs, and its links have targets."""

import hashlib
import importlib.util
import math
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib

import jax
import pytest
from problems import is_x64

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
CONFIG = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")

FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
OTHERS = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # isn't run
SNIPPET = re.compile(r'^ *--8<-- "([^":]+)(?::([^"]+))?"$', re.MULTILINE)
OPTIONAL = re.compile(
    r"^(?:import|from) (asdex|celerite2|cuthbert|dynamax|dynamiqs|flax|flowjax|folx|furax|gaussx"
    r"|gpjax|jax_healpy|jax_md|matfree|netket|nifty|numpyro|openfermion|optax|optimistix|ott"
    r"|paramax|phonopy|pyamg|pyscf|quimb|quspin|qutip|s2fft|skfem|statsmodels|tinygp)\b",
    re.MULTILINE,
)
# All others mix dtypes and ranks.
STRICT = {"asdex", "flax", "matfree", "optax"}
SHOWN = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")  # relative ones


@pytest.fixture(autouse=True)
def _keep_config():
    before = {name: getattr(jax.config, name) for name in CONFIG}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def _blocks(page):
    """A page's code blocks, padded to keep their line numbers.

    We skip fences that begin with `{.python}`: they include passages from examples.
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
        if set(needed) - STRICT:
            jax.config.update("jax_numpy_dtype_promotion", "standard")
            jax.config.update("jax_numpy_rank_promotion", "allow")
        exec(compile(code, str(page), "exec"), namespace)


@ALL
def test_code_of_other_libraries_parses(page):
    for code in OTHERS.findall(page.read_text()):
        compile(code, str(page), "exec")


def _is_same(printed, shown, tolerance):
    """Whether words are equal, or numbers within the tolerance or one last decimal."""
    decimals = len(shown.partition(".")[2])
    unit = max(0.02, 1.01 * 10.0**-decimals if decimals else 0)
    try:
        numbers = float(printed), float(shown)
        return math.isclose(*numbers, rel_tol=tolerance, abs_tol=unit)
    except ValueError:
        return printed == shown


@pytest.mark.skipif(is_x64(), reason="in the mode that readers have")
def test_readme_shows_the_printed_output(capsys):
    page = ROOT / "README.md"
    namespace, pairs = {"__name__": "__main__"}, SHOWN.findall(page.read_text())
    assert len(pairs) == 3
    for code, shown in pairs:
        exec(compile(code, page, "exec"), namespace)
        printed = re.split(r"[\s(),]+", capsys.readouterr().out)
        expected = re.split(r"[\s(),]+", shown)
        assert len(printed) == len(expected)
        # Machines round differently, and so choose other pivots with another error bar.
        tolerances = [0.2 if word == "+-" else 0.02 for word in ["", *expected[:-1]]]
        assert all(map(_is_same, printed, expected, tolerances)), printed


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/figures").glob("*.svg")), ids=lambda p: p.stem
)
def test_figures_are_up_to_date(path):
    script = (ROOT / "docs/figures.py").read_text()
    digest = hashlib.sha256(script.encode()).hexdigest()[:16]
    drawn = f"docs/figures.py {digest}" in path.read_text()
    assert drawn, "run python docs/figures.py"


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r"^version: (.*)$", citation, re.M)[1]
    date = re.search(r"^date-released: (.*)$", citation, re.M)[1]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    changes = re.findall(r"^## \[([0-9.]+)\] - (.*)$", changelog, re.M)
    assert project["version"] == version
    assert changes[0] == (version, date)


def test_blocks_are_found():
    counts = {page.name: len(list(_blocks(page))) for page in PAGES}
    for name in ("README.md", "getting-started.md", "writing-an-estimator.md"):
        assert counts[name] > 0
    fences = sum(page.read_text().count("```python") for page in PAGES)
    assert sum(counts.values()) == fences


def test_code_from_examples_is_up_to_date():
    command = [sys.executable, str(ROOT / "docs/snippets.py"), "--check"]
    subprocess.run(command, check=True)


@ALL
def test_links_and_snippets_exist(page):
    text = page.read_text()
    snippets = len(SNIPPET.findall(text)) + text.count("<!-- code: ")
    assert snippets == text.count("{.python}\n")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    for path, section in SNIPPET.findall(text):
        source = (ROOT / path).read_text()
        if section:
            assert f"--8<-- [start:{section}]" in source, section
            assert f"--8<-- [end:{section}]" in source, section
