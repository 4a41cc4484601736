"""tools/matrix.sh with Pythons that only record their commands: combinations, the table, what a failure leads to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from layout.tree import ROOT
from support.programs import make_programs

SCRIPT = ROOT / "tools" / "matrix.sh"
# It answers the script's question for an interpreter, and makes an environment by copying itself.
PYTHON = """#!/bin/sh
case "$*" in
  "-c import ensurepip"*) echo "$0" && exit 0 ;;
  "-c import torch"*) exit 1 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
echo "$*" >>"$RECORD"
case "$*" in $FAILS) echo "this went wrong" && exit 3 ;; esac
echo "7 passed in 1.00s"
"""
ALL = [
    ("2.11", "3.12"),
    *[(torch, "3.11") for torch in ("2.12", "2.13", "2.14", "2.15")],
    *[("2.13", python) for python in ("3.10", "3.12", "3.13")],
]


class Matrix:
    """One run of the script: how it ended, what it printed, which commands the Pythons were given."""

    def __init__(
        self, folder: Path, *options: str, pythons: str = "3.10 3.11 3.12 3.13", fails: str = "nothing"
    ) -> None:
        names = ("awk", "cp", "dirname", "env", "grep", "mkdir", "nproc", "rm", "sed", "sh", "tail", "timeout")
        programs = make_programs(folder, names, pythons, PYTHON)
        record = folder / "record"
        record.touch()
        environment = {"PATH": str(programs), "HOME": str(folder), "RECORD": str(record), "FAILS": fails}
        self.folder = folder / "matrix"
        command: list[str | Path] = [SCRIPT, *options, self.folder]
        self.run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        self.commands = record.read_text().splitlines()
        rows = re.findall(r"^(2\.\d+)\.\d+ +(3\.\d+) +(\w+) +(.*)$", self.run.stdout, re.MULTILINE)
        self.results = {(torch, python): (result, reason) for torch, python, result, reason in rows}


def test_every_torch_and_python_runs_once(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path)
    assert matrix.run.returncode == 0, matrix.run.stderr
    assert list(matrix.results) == ALL
    assert {result for result, _ in matrix.results.values()} == {"passed"}
    assert "library: 7 passed" in matrix.results["2.15", "3.11"][1]
    installed = [command for command in matrix.commands if "pip install --quiet torch==" in command]
    assert len(installed) == len(ALL)
    assert all(re.search(r"torch==2\.\d+\.\d+ numpy$", command) for command in installed)


def test_environments_are_deleted_and_logs_stay(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, "--torch", "2.14")
    assert list(matrix.results) == [("2.14", "3.11")]
    assert [path.suffix for path in matrix.folder.iterdir()] == [".log"]


def test_chosen_torch_runs_on_chosen_python(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, "--torch", "2.12 2.15", "--python", "3.13")
    assert list(matrix.results) == [("2.12", "3.13"), ("2.15", "3.13")]


def test_gpu_kit_torch_runs_on_its_python(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, "--torch", "2.11 2.12")
    assert list(matrix.results) == [("2.11", "3.12"), ("2.12", "3.11")]


def test_missing_python_is_skipped_with_reason(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, pythons="3.11 3.12")
    assert matrix.run.returncode == 0, matrix.run.stderr
    assert list(matrix.results) == ALL
    skipped = {pair for pair, (result, _) in matrix.results.items() if result == "skipped"}
    assert skipped == {("2.13", "3.10"), ("2.13", "3.13")}
    assert "there is no python3.10" in matrix.results["2.13", "3.10"][1]


@pytest.mark.parametrize(
    ("fails", "step", "afterwards"),
    [
        ("*pip*torch==2.14*", "torch", False),
        ("*environment.py*", "requirements", False),
        ("*--no-build-isolation*", "build", False),
        ("*installed*", "import", False),
        ("*tests/future*", "library", True),
        ("*test_collectives.py*", "collectives", True),
        ("*fakecuda*-k?cuda*", "cuda", True),
    ],
)
def test_failed_step_is_reason_and_status(tmp_path: Path, fails: str, step: str, afterwards: bool) -> None:
    matrix = Matrix(tmp_path, "--torch", "2.14", fails=fails)
    assert matrix.run.returncode == 1
    result, reason = matrix.results["2.14", "3.11"]
    assert result == "failed"
    assert f"{step}: this went wrong" in reason
    assert any("tests/device" in command for command in matrix.commands) == afterwards


def test_failure_spares_other_combinations(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, fails="*torch==2.12*")
    assert matrix.run.returncode == 1
    results = [result for result, _ in matrix.results.values()]
    assert results == ["failed" if pair == ("2.12", "3.11") else "passed" for pair in ALL]


def test_dry_run_prints_without_running(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, "--dry-run")
    assert matrix.run.returncode == 0, matrix.run.stderr
    named = re.findall(r"^torch (2\.\d+)\.\d+, Python (3\.\d+)$", matrix.run.stdout, re.MULTILINE)
    assert named == ALL
    assert matrix.run.stdout.count("tests/future") == len(ALL)
    assert matrix.commands == []
    assert not matrix.folder.exists()


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("LIBRARY", "tests"), ("COLLECTIVES", "tests/collectives"), ("RPC", "tests/rpc"), ("CUDA", "tests/device")],
)
def test_each_chosen_test_exists(variable: str, folder: str) -> None:
    names = re.findall(rf'^{variable}="([^"]+)"', SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    assert [name for name in names if not (ROOT / folder / name).exists()] == []


def test_help_names_every_option(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, "--help")
    assert matrix.run.returncode == 0
    assert all(word in matrix.run.stdout for word in ("--torch", "--python", "--dry-run", "KEEP=1", "FOLDER"))


@pytest.mark.parametrize("wrong", [["--torch", "2.10"], ["--python", "3.9"], ["--torch", ""], ["--fast"], ["a-folder"]])
def test_wrong_argument_is_refused(tmp_path: Path, wrong: list[str]) -> None:
    matrix = Matrix(tmp_path, *wrong)
    assert matrix.run.returncode == 2
    assert matrix.run.stderr.startswith("matrix.sh: ")
    assert matrix.commands == []
