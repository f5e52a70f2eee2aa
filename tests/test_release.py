"""What a release says of itself agrees with itself."""

import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest

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


def test_classifiers_are_what_is_tested():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("runs from a checkout")
    tested = re.findall(
        r"[\d.]+", re.search(r"python: \[(.*)\]", workflow.read_text())[1]
    )
    told = [text.rpartition(" ")[2] for text in PROJECT["classifiers"]]
    assert tested == [version for version in told if version.startswith("3.")]


# Stands for python, pip, twine and pytest.
TOOL = """#!/usr/bin/env bash
case "$(basename "$0") $*" in
    python\\ -m\\ venv*)
        mkdir -p "$3/bin"
        for tool in python pip twine pytest; do cp "$0" "$3/bin/$tool"; done ;;
    python\\ -m\\ build*)
        mkdir -p "$4" p-1/src
        touch "$4/p-1-py3-none-any.whl"
        tar --create --gzip --file "$4/p-1.tar.gz" p-1 ;;
    pip*.whl*) wheel=${!#}; test -e "${wheel%\\[tests\\]}" ;;
esac
"""


def test_package_takes_a_relative_directory(tmp_path):
    script = ROOT / ".ci" / "package"
    if not script.exists():
        pytest.skip("runs from a checkout")
    (tmp_path / ".ci").mkdir()
    shutil.copy(script, tmp_path / ".ci")
    tool = tmp_path / "python"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    subprocess.run([tmp_path / ".ci" / "package", tool, "dist"], check=True)
    assert len(list((tmp_path / "dist").iterdir())) == 2
