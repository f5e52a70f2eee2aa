"""A release's files agree about versions."""

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_hooks_use_the_project_versions():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    used = re.findall(r'"([a-z-]+[=>]=[0-9.]+)"', hooks)
    known = {*PROJECT["dependencies"], *PYPROJECT["dependency-groups"]["dev"]}
    assert {re.split("[=>]", name)[0] for name in used} > {"ruff", "pyright"}
    assert set(used) <= known


def test_contributing_installs_the_project_versions():
    tools = PYPROJECT["dependency-groups"]["dev"]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    installed = re.findall(r"\b(?:ruff|pyright)==[0-9.]+", text)
    assert len(installed) == 2
    assert set(installed) <= set(tools)


def test_classifiers_match_the_tested_versions():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("runs from a checkout")
    tested = re.findall(
        r"[\d.]+", re.search(r"python: \[(.*)\]", workflow.read_text())[1]
    )
    declared = [text.rpartition(" ")[2] for text in PROJECT["classifiers"]]
    assert tested == [version for version in declared if version.startswith("3.")]
