"""Files that help contributors: workflows and forms of GitHub, hooks before a commit, news fragments."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from layout.tree import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is of the extra lint")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())
HOOKS = ROOT / ".pre-commit-config.yaml"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def parsed(file: Path) -> dict[Any, Any]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def only(pattern: str, source: str) -> str:
    """Return the group of the only match of a pattern."""
    (match,) = re.findall(pattern, source, re.MULTILINE)
    return str(match)


TARGETS = set(only(r"^\.PHONY: (.*)$", text("Makefile")).split())


def jobs(file: Path) -> list[dict[str, Any]]:
    return list(parsed(file)["jobs"].values())


def commands(job: dict[str, Any]) -> list[str]:
    """Return the commands of a job, those with a word of its matrix once for each value of that word."""
    found = [step["run"] for step in job["steps"] if "run" in step]
    words = job.get("strategy", {}).get("matrix", {}).get("target", [])
    return [command.replace("${{ matrix.target }}", word) for command in found for word in words or [""]]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_run_targets_of_the_makefile(file: Path) -> None:
    assert parsed(file)[True]  # the key "on", in YAML 1.1
    for job in jobs(file):
        made = [command for command in commands(job) if command.startswith("make ")]
        assert made
        for command in made:
            assert command.split()[1] in TARGETS
            assert all(f"$({variable})" in text("Makefile") for variable in re.findall(r" (\w+)=", command))


def test_workflows_lint_test_and_make_the_docs() -> None:
    made = {command.split()[1] for file in WORKFLOWS for job in jobs(file) for command in commands(job)}
    assert made >= {"lint", "test", "test-cuda", "setup", "matrix", "docs"}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_their_major_version(file: Path) -> None:
    used = [step["uses"] for job in jobs(file) for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used), used


def test_the_workflow_tests_the_combinations_of_the_matrix() -> None:
    (job,) = [job for file in WORKFLOWS for job in jobs(file) if "include" in job.get("strategy", {}).get("matrix", {})]
    ours = [(each["torch"], each["python"]) for each in job["strategy"]["matrix"]["include"]]
    plan = subprocess.run([ROOT / "tools" / "matrix.sh", "--dry-run"], capture_output=True, text=True, check=True)
    combinations = re.findall(r"^torch (\S+), Python (\S+)$", plan.stdout, re.MULTILINE)
    assert len(combinations) > 5
    assert sorted(ours) == sorted(combinations)


def test_workflows_use_the_reference_python() -> None:
    reference = only(r"^REFERENCE_PYTHON=(\S+)$", text("tools/matrix.sh"))
    used = [step["with"]["python-version"] for file in WORKFLOWS for job in jobs(file) for step in job["steps"][1:2]]
    assert set(used) == {reference, "${{ matrix.python }}"}


def test_bug_reports_ask_for_what_a_maintainer_needs() -> None:
    forms = {file.stem: parsed(file)["body"] for file in FORMS}
    assert forms.keys() == {"bug_report", "feature_request"}
    required = {field["id"] for field in forms["bug_report"] if field["validations"]["required"]}
    assert required >= {"program", "version", "torch", "device"}


def test_hooks_have_the_versions_of_the_linters() -> None:
    extra = re.findall(r'"([^"]+)"', only(r"^lint = \[(.*)\]$", text("pyproject.toml")))
    hooks = [hook for repository in parsed(HOOKS)["repos"] for hook in repository["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "clang-format", "mypy"}
    assert all(repository["repo"] == "local" for repository in parsed(HOOKS)["repos"])
    for hook in hooks:
        if hook["language"] == "python":
            (requirement,) = hook["additional_dependencies"]
            assert requirement in extra
            assert hook["entry"].split()[0] == requirement.partition("==")[0]
        else:
            assert hook["entry"] == ".venv/bin/python -m mypy"


def test_news_fragments_have_a_type() -> None:
    types = re.findall(r'^  \{ directory = "(\w+)"', text("pyproject.toml"), re.MULTILINE)
    assert types == re.findall(r"^\| `(\w+)` \|", text("newsfragments/README.md"), re.MULTILINE)
    for file in (ROOT / "newsfragments").iterdir():
        assert file.name == "README.md" or re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(types)})\.md", file.name)


def test_the_changelog_has_one_place_for_news() -> None:
    marker = only(r'^start_string = "(.*)\\n"$', text("pyproject.toml"))
    assert text("CHANGELOG.md").count(marker + "\n") == 1


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "newsfragments/README.md"])
def test_pages_name_targets_of_the_makefile(page: str) -> None:
    named = set(re.findall(r"`make ([a-z][\w-]*)", text(page)))
    assert named
    assert named <= TARGETS


def test_contributing_describes_every_target() -> None:
    rows = set(re.findall(r"^\| `make ([a-z][\w-]*)", text("CONTRIBUTING.md"), re.MULTILINE))
    assert TARGETS - rows == {"setup-test"}  # a part of the others
