"""tools/gpu_results.py: the result of each test is in the files before the next test, also when the run is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layout.tree import ROOT

TESTS = """
import os, signal
import pytest

def test_passes(): pass

def test_fails():
    there = 1
    assert there == 2, "the message"

@pytest.mark.parametrize("words", ["needs two devices", "needs 4 GPUs, one for each rank", "needs two hands"])
def test_is_skipped(words): pytest.skip(words)

@pytest.fixture
def broken(): raise RuntimeError("a fixture")

def test_has_a_fixture_that_fails(broken): pass

@pytest.mark.xfail
def test_is_expected_to_fail(): assert False

def test_is_cut():
    if "CUT" in os.environ: os.kill(os.getpid(), signal.SIGKILL)

def test_comes_later(): pass
"""


def run(folder: Path, *options: str, **environment: str) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Run the tests with the plugin; return the exit status, the results and the lines of the summary."""
    (folder / "test_file.py").write_text(TESTS)
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", folder, *options]
    command += ["-p", "no:cacheprovider", "-p", "gpu_results", "--results", folder, "--phase", "a-phase", folder]
    known = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), *sys.path])} | environment
    known.pop("PYTEST_ADDOPTS", None)
    code = subprocess.run(command, env=known, capture_output=True, check=False, cwd=folder).returncode
    lines = (folder / "results.jsonl").read_text().splitlines()
    return code, [json.loads(line) for line in lines], (folder / "summary.txt").read_text().splitlines()


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "several"])
def test_each_result_is_written_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, results, summary = run(tmp_path, *options)
    assert code == 1
    assert len(results) == len({result["test"] for result in results}) == 9
    assert {result["phase"] for result in results} == {"a-phase"}
    assert [r["test"] for r in results if r["outcome"] == "error"] == ["test_file.py::test_has_a_fixture_that_fails"]
    failure = next(result for result in results if result["outcome"] == "failed")
    assert "there = 1" in failure["text"]
    assert any("FAILED test_file.py::test_fails" in line and "the message" in line for line in summary)
    counts = "3 passed, 1 failed, 1 error, 1 xfailed, 3 skipped, 2 of them need a second device"
    assert summary[-1] == f"    in all: {counts}"


def test_cut_leaves_results_so_far(tmp_path: Path) -> None:
    code, results, summary = run(tmp_path, CUT="1")
    assert code == -signal.SIGKILL
    assert [result["outcome"] for result in results] == [
        *("passed", "failed", "skipped", "skipped", "skipped", "error", "xfailed"),
    ]
    assert "the message" in summary[0]
    assert "a fixture" in summary[1]


def test_unimportable_file_is_error(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import missing_module")
    code, results, summary = run(tmp_path)
    assert code == 2
    assert [(r["test"], r["outcome"]) for r in results] == [("test_broken.py", "error")]
    assert "missing_module" in summary[0]
