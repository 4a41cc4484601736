"""The harness of the benchmarks: rows that fail or are skipped, and the report of a run that is cut."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from layout.tree import ROOT
from support.child import run_script

SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
from _rows import Row, Skipped, run

def row(name, measured):
    return lambda rounds: Row(name, "what it is", "ns", 2.0, 1.0, "peer", "x", measured, 1.5)

def fails(rounds):
    raise ValueError("the data are wrong")

def is_skipped(rounds):
    raise Skipped("there is no disk")

def cuts(rounds):
    os._exit(9)

rows = {"copy-small": row("copy-small", 1.0), "copy-large": row("copy-large", 2.0), "fails": fails}
rows |= {"skipped": is_skipped, "last": row("last", 1.0), "cut": cuts, "never": row("never", 1.0)}
takes_figures = "--rehearse" not in sys.argv
sys.argv = [word for word in sys.argv if word != "--rehearse"]
sys.exit(run("rows", "Rows", rows, rounds=3, takes_figures=takes_figures))
"""


class Run:
    """Run of a benchmark with rows of several outcomes, and its report."""

    def __init__(self, folder: Path, *options: str) -> None:
        path = folder / "report.json"
        benchmarks = str(ROOT / "benchmarks")
        self.done: subprocess.CompletedProcess[str] = run_script(SCRIPT, benchmarks, "--json", str(path), *options)
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
        self.verdicts = {row["name"]: row["verdict"] for row in self.rows}


def test_failed_row_is_reported_and_next_runs(tmp_path: Path) -> None:
    run = Run(tmp_path, "--only", "fails", "skipped", "last")
    assert run.done.returncode == 1
    assert run.verdicts == {"fails": "failed", "skipped": "skipped", "last": "ok"}
    assert run.rows[0]["why"] == "ValueError: the data are wrong"
    assert "in fails" in run.rows[0]["trace"]
    assert "skipped skipped: there is no disk" in run.done.stdout


def test_cut_run_leaves_earlier_rows(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.done.returncode == 9
    assert list(run.verdicts) == ["copy-small", "copy-large", "fails", "skipped", "last"]


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--check",), 1)])
def test_broken_limit_fails_checked_run(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    run = Run(tmp_path, "--only", "copy", *options)
    assert run.done.returncode == code
    assert run.verdicts == {"copy-small": "ok", "copy-large": "over"}


def test_rehearsal_takes_no_figures(tmp_path: Path) -> None:
    run = Run(tmp_path, "--rehearse", "--check", "--only", "copy", "skipped")
    assert run.done.returncode == 0, run.done.stderr
    assert run.verdicts == {"copy-small": "rehearsed", "copy-large": "rehearsed", "skipped": "skipped"}
    assert all("measured" not in row for row in run.rows)


def test_unknown_row_name_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "--only", "cop")
    assert run.done.returncode == 2
    assert "no row is named cop; there are copy-small, " in run.done.stderr
    assert run.rows == []
