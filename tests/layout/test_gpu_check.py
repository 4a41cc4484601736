"""tools/gpu_check.sh with a Python that only notes what it is asked: which phases run, what becomes of failures."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from layout.tree import ROOT

PYTHON = """#!/bin/sh
case "$*" in
  *"gpu_check.py facts") echo "$FACTS" ;;
  *"gpu_check.py options"*) echo --options ;;
  *) echo "$*" >>"$RECORD"; echo "this is said by $*" ;;
esac
case "$*" in $FAILS) exit 3 ;; esac
"""
PHASES = {  # by a word of their commands
    "build": "pip",
    "installed": "installed",
    "tests": "tests/device",
    "sanitizer": "tests/cuda/test_sanitizer.py",
    "benchmarks": "benchmarks/device.py",
}


class Check:
    """One run of the script: how it ended, what it wrote, which commands it ran."""

    def __init__(self, folder: Path, *options: str, cuda: bool = True, fails: str = "nothing") -> None:
        python = folder / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        record = folder / "record"
        record.touch()
        facts = "Python 3.12, torch 2.12, " + ("CUDA 13.0, a GPU" if cuda else "no CUDA")
        environment = os.environ | {"PYTHON": str(python), "RECORD": str(record), "FACTS": facts, "FAILS": fails}
        self.out = folder / "out"
        command: list[str | Path] = [ROOT / "tools" / "gpu_check.sh", *options, self.out]
        self.run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
        self.commands = record.read_text().splitlines()
        self.phases = [next(name for name, word in PHASES.items() if word in line) for line in self.commands]
        self.summary = (self.out / "summary.txt").read_text()


def test_every_phase_runs_where_there_is_a_gpu(tmp_path: Path) -> None:
    check = Check(tmp_path)
    assert check.run.returncode == 0, check.run.stderr
    assert check.phases == list(PHASES)
    assert "CUDA 13.0, a GPU" in check.summary
    assert "phases that failed: 0" in check.summary


def test_without_one_the_device_is_simulated_and_it_says_so(tmp_path: Path) -> None:
    check = Check(tmp_path, cuda=False)
    assert check.run.returncode == 0, check.run.stderr
    assert check.phases == [name for name in PHASES if name != "sanitizer"]
    assert "-k sim" in check.commands[check.phases.index("tests")]
    assert "no CUDA in this torch, or no GPU" in check.summary


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_that_fails_is_reported_and_the_others_run(tmp_path: Path, phase: str) -> None:
    check = Check(tmp_path, fails=f"*{PHASES[phase]}*")
    assert check.run.returncode == 1
    assert check.phases == list(PHASES)
    assert f"{phase}: FAILED with exit code 3" in check.summary
    assert f"    this is said by {check.commands[check.phases.index(phase)]}" in check.summary
    assert check.summary.endswith("phases that failed: 1\n")
    assert f"this is said by {check.commands[0]}" in (check.out / "build.log").read_text()


def test_a_dry_run_says_what_would_be_run_and_runs_nothing(tmp_path: Path) -> None:
    check = Check(tmp_path, "--dry-run")
    assert check.run.returncode == 0, check.run.stderr
    assert check.commands == []
    assert all(f"{name}, at most " in check.summary for name in PHASES)


def test_all_phases_together_take_eight_minutes_at_most(tmp_path: Path) -> None:
    lines = [line for line in Check(tmp_path, "--dry-run").summary.splitlines() if ", at most " in line]
    assert sum(int(line.split(", at most ")[1].split()[0]) for line in lines) <= 480


def test_a_python_without_torch_is_refused(tmp_path: Path) -> None:
    check = Check(tmp_path, fails="*facts")
    assert check.run.returncode == 1
    assert "cannot import torch" in check.summary
    assert check.commands == []
