"""What a release says of itself agrees with itself."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_hooks_take_the_versions_of_the_project():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    used = re.findall(r'"([a-z-]+[=>]=[0-9.]+)"', hooks)
    known = {*PROJECT["dependencies"], *PYPROJECT["dependency-groups"]["dev"]}
    assert {re.split("[=>]", name)[0] for name in used} > {"ruff", "pyright"}
    assert set(used) <= known


def test_contributing_installs_the_versions_of_the_project():
    tools = PYPROJECT["dependency-groups"]["dev"]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r"\b(?:ruff|pyright)==[0-9.]+", text)
    assert len(found) == 2
    assert set(found) <= set(tools)


def test_addresses_are_of_one_repository():
    urls = PROJECT["urls"]
    assert set(urls) == {"Documentation", "Source", "Changelog", "Issues"}
    source = urls["Source"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"repository-code: {source}\n" in citation
    for url in urls.values():
        assert url.startswith(source)
        _, _, path = url.partition("/blob/main/")
        assert (ROOT / path).exists()


def test_newer_pythons_may_install():
    assert PROJECT["requires-python"] == ">=3.11"
