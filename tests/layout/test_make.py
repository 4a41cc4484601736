"""The Makefile and CI, looked at through make itself: what would be done, and that nothing is done twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layout.tree import PACKAGE, ROOT, RPC

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what a build is made from, with no trace of one."""
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml", "README.md", "cmake", "tools", ".ci"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    ignored = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for package in (PACKAGE, RPC):
        shutil.copytree(package, tmp_path / package.name, ignore=ignored)
    return tmp_path


def make(checkout: Path, *arguments: str) -> list[str]:
    """Return the lines that make prints."""
    ours = ("PYTHON", "VENV", "JOBS")
    environment = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("MAKE") and k != "MFLAGS"}
    command = ["make", "--no-print-directory", *arguments]
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def would_do(checkout: Path, *arguments: str) -> list[str]:
    """Return the commands that make would run, without those that only mark a step as done."""
    return [line for line in make(checkout, "-n", *arguments) if not line.startswith(("touch", "mkdir", "make: "))]


def test_fresh_clone_makes_environment_and_builds(checkout: Path) -> None:
    python = f"{checkout}/.venv/bin/python"
    assert would_do(checkout, "setup") == [
        "tools/venv.sh python3 .venv",
        f"{python} tools/environment.py build",
        f"{python} -m pip install -v --no-build-isolation --no-deps -e .",
    ]


def test_separate_compilation_has_own_folder(checkout: Path) -> None:
    build = would_do(checkout, "setup", "UNITY=OFF")[-1]
    assert "-C cmake.define.CUDAFUTURE_UNITY=OFF -C build-dir=build/{wheel_tag}-files -e ." in build


def test_environment_python_and_folder_are_chosen(checkout: Path) -> None:
    steps = would_do(checkout, "setup", "PYTHON=/opt/some/python", "VENV=/tmp/elsewhere")
    assert steps[0] == "tools/venv.sh /opt/some/python /tmp/elsewhere"
    assert all(step.startswith("/tmp/elsewhere/bin/python ") for step in steps[1:])


def test_chosen_python_is_used_without_environment(checkout: Path) -> None:
    steps = would_do(checkout, "setup", f"PYTHON={sys.executable}", "VENV=")
    assert not any("venv.sh" in step for step in steps)
    assert all(step.startswith(f"{sys.executable} ") for step in steps)


@pytest.mark.parametrize("command", ["demo", "test", "lint"])
def test_finished_setup_is_not_repeated(checkout: Path, command: str) -> None:
    state = checkout / ".venv" / ".cudafuture"
    state.mkdir(parents=True)
    for step in ("python", "has-build", "has-test", "has-demo", "has-cli", "has-lint", "built"):
        (state / step).touch()
    assert [s for s in would_do(checkout, command) if "pip install" in s or "environment.py" in s] == []


@pytest.mark.parametrize(
    ("changed", "does"),
    [
        ("cudafuture/_C/core/future.cpp", ["pip install"]),
        ("cudafuture/_c10d/work.cpp", ["pip install"]),
        ("rpc_ext/_C/seal/seal.cpp", ["pip install"]),
        ("pyproject.toml", ["environment.py build", "pip install"]),
        ("README.md", []),
        ("cudafuture/combine.py", []),  # the installation is an editable one
        ("rpc_ext/calls.py", []),
    ],
)
def test_changes_decide_repeated_steps(checkout: Path, changed: str, does: list[str]) -> None:
    state = checkout / ".venv" / ".cudafuture"
    state.mkdir(parents=True)
    for step in ("python", "has-build", "built"):
        (state / step).touch()
    late = (state / "built").stat().st_mtime + 10
    os.utime(checkout / changed, (late, late))
    steps = would_do(checkout, "setup")
    assert len(steps) == len(does)
    assert all(what in step for what, step in zip(does, steps, strict=True))


def test_tests_run_in_parallel_with_native_ones(checkout: Path) -> None:
    for command, jobs in (("test", r"\d+"), ("soak", "auto")):
        steps = would_do(checkout, command)
        assert any(re.search(f"-m pytest -n {jobs} --maxprocesses 8 ", step) for step in steps)
        assert [step.split()[-1] for step in steps if "native_tests.sh" in step] == ["thread", "address"]


def test_ci_runs_lint_and_readme_tests(checkout: Path, tmp_path: Path) -> None:
    recorder = tmp_path / "bin" / "make"
    recorder.parent.mkdir()
    recorder.write_text('#!/bin/sh\necho "$@" >> "$RECORD"\n')
    recorder.chmod(0o755)
    record = tmp_path / "record"
    environment = os.environ | {"PATH": f"{recorder.parent}:{os.environ['PATH']}", "RECORD": str(record)}
    subprocess.run(["bash", checkout / ".ci" / "run"], env=environment, check=True)
    *steps, python = record.read_text().split()
    assert steps == ["lint", "test", "test-cuda", "wheels", "TORCHES=2.13"]
    assert re.fullmatch(r"PYTHONS=3\.\d+", python)
    assert "make test " in (checkout / "README.md").read_text()


def test_only_soak_rehearses_gpu_checks(checkout: Path) -> None:
    steps = would_do(checkout, "soak", "GPU_VENV=/tmp/elsewhere")
    begin = steps.index("tools/gpu_kit.sh /tmp/elsewhere")
    assert steps[begin + 1] == "tools/gpu_rehearsal.sh /tmp/elsewhere"
    assert would_do(checkout, "gpu-kit") == ["tools/gpu_kit.sh .venv-gpu"]
    assert not any("tools/gpu" in step for step in would_do(checkout, "test"))


def test_only_soak_runs_matrix(checkout: Path) -> None:
    assert would_do(checkout, "soak")[-1] == "tools/matrix.sh"
    assert not any("matrix.sh" in step for step in would_do(checkout, "test"))
