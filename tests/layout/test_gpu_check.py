"""tools/gpu_check.sh with a Python that only records its commands: phases, failures, time limits, and cuts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from layout.tree import ROOT

# It answers the questions of the script, writes a benchmark's JSON, and never ends in the phase that HANGS.
PYTHON = """#!/bin/sh
case "$*" in
  *"gpu_check.py facts") echo "$FACTS" ;;
  *"gpu_check.py options"*) echo --options ;;
  *) echo "$*" >>"$RECORD"; echo "output of $*" ;;
esac
for word; do
  case $word in *.json) echo "{}" >"$word" ;; esac
done
case "$*" in $FAILS) exit 3 ;; esac
case "$*" in $HANGS) echo $$ >"$HUNG.new" && mv "$HUNG.new" "$HUNG" && exec sleep 600 ;; esac
"""
PARTS = {  # the phases of each, by a word of their commands
    "tests": {
        "machine": "gpu_check.py machine",
        "packages": "more-1.whl",
        "wheel": "cudafuture-1.whl",
        "installed": "gpu_check.py installed",
        "tests": "--phase tests",
        "sanitizer": "--phase sanitizer",
        "device": "cudafuture bench device",
    },
    "figures": {
        "machine": "gpu_check.py machine",
        "packages": "more-1.whl",
        "wheel": "cudafuture-1.whl",
        "installed": "gpu_check.py installed",
        "edges": "tests/cuda/test_edges.py",
        "stress": "tests/cuda/test_stress.py",
        "gpu": "cudafuture bench gpu",
    },
}
WORDS = {"build": "--no-build-isolation", **PARTS["tests"], **PARTS["figures"]}
EVERY = [(part, phase) for part, phases in PARTS.items() for phase in phases]
BEGINS = re.compile(r"(\w+): begins, at most \d+ s")
ENDS = re.compile(r"(\w+): (ok|FAILED with exit code \d+|FAILED: stopped after its \d+ s \(exit code \d+\)), \d+ s")
OTHERS = re.compile(r"gpu_check\.sh (tests|figures)|Python 3.*|    .*|phases that failed: \d+|STOPPED by a signal .*")


# Stops the phase that HANGS a moment after its begin, whatever its limit is.
TIMEOUT = """#!/bin/sh
case "$*" in $HANGS) exec "$REAL_TIMEOUT" 0.1 sleep 600 ;; esac
exec "$REAL_TIMEOUT" "$@"
"""


class Check:
    """A run of the script with wheels, in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        device: str = "CUDA 13.0, a GPU",
        fails: str = "nothing",
        hangs: str = "nothing",
        wheels: tuple[str, ...] = ("cudafuture-1.whl", "more-1.whl"),
        **environment: str,
    ) -> None:
        python = folder / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        self.record = folder / "record"
        self.record.touch()
        self.hung = folder / "hung"
        kit = folder / "kit"
        kit.mkdir()
        for wheel in wheels:
            (kit / wheel).touch()
        environment |= {"PYTHON": str(python), "WHEELS": str(kit), "RECORD": str(self.record), "HUNG": str(self.hung)}
        environment |= {"FACTS": f"Python 3.12, torch 2.11, {device}", "FAILS": fails, "HANGS": hangs}
        self.out = folder / "out"
        given = [str(self.out) if argument == "OUT" else argument for argument in arguments]
        self.run = subprocess.Popen(
            [ROOT / "tools" / "gpu_check.sh", *given],
            env=os.environ | {"LIMIT": "240"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
        )

    def finish(self) -> Check:
        """Wait for the end of the script."""
        self.output, self.errors = self.run.communicate(timeout=240)
        return self

    def cut(self, sent: signal.Signals, *, in_phase: bool = True) -> None:
        """Send a signal to the script, in the phase that hangs; end what it leaves behind."""
        while in_phase and not self.hung.exists():
            assert self.run.poll() is None, "the script has ended before the phase that hangs"
            time.sleep(0.005)
        self.run.send_signal(sent)
        if sent == signal.SIGKILL and self.hung.exists():  # timeout has a process group of its own
            os.kill(int(self.hung.read_text()), signal.SIGKILL)
        self.finish()

    @property
    def commands(self) -> list[str]:
        return self.record.read_text().splitlines()

    @property
    def phases(self) -> list[str]:
        return [next(name for name, word in WORDS.items() if word in line) for line in self.commands]

    @property
    def summary(self) -> str:
        return (self.out / "summary.txt").read_text()


def read(summary: str) -> tuple[list[str], list[str]]:
    """Return the phases that began and those that ended; each line must be a whole one."""
    lines = summary.splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines)
    begun, ended = [], []
    for line in map(str.rstrip, lines):
        if found := BEGINS.fullmatch(line):
            begun.append(found[1])
        elif found := ENDS.fullmatch(line):
            ended.append(found[1])
        else:
            assert OTHERS.fullmatch(line), line
    assert begun[: len(ended)] == ended
    assert len(begun) - len(ended) in (0, 1)
    return begun, ended


@pytest.mark.parametrize("part", PARTS)
def test_every_phase_runs_on_gpu(tmp_path: Path, part: str) -> None:
    check = Check(tmp_path, part, "OUT").finish()
    assert check.run.returncode == 0, check.errors
    assert check.phases == list(PARTS[part])
    assert read(check.summary) == (check.phases, check.phases)
    assert "CUDA 13.0, a GPU" in check.summary
    assert check.summary.count("    output of") == 1  # the table of the benchmark
    assert check.summary.endswith("phases that failed: 0\n")
    assert f"output of {check.commands[0]}" in (check.out / "machine.txt").read_text()


def test_tests_without_gpu_use_simulator(tmp_path: Path) -> None:
    check = Check(tmp_path, "tests", "OUT", device="no CUDA").finish()
    assert check.run.returncode == 0, check.errors
    assert check.phases == [name for name in PARTS["tests"] if name != "sanitizer"]
    assert "-k sim" in check.commands[check.phases.index("tests")]
    assert "no CUDA in this torch, or no GPU" in check.summary


def test_figures_need_cuda(tmp_path: Path) -> None:
    check = Check(tmp_path, "figures", "OUT", device="no CUDA").finish()
    assert check.run.returncode == 1
    assert "FAILED: figures need CUDA" in check.summary
    assert check.commands == []


def test_limits_are_checked_only_on_gpu(tmp_path: Path) -> None:
    for folder, device, checked in (("gpu", "CUDA 13.0, a GPU", True), ("fake", "CUDA 13.0, fakecuda", False)):
        (tmp_path / folder).mkdir()
        check = Check(tmp_path / folder, "tests", "OUT", device=device).finish()
        assert ("--check" in check.commands[check.phases.index("device")]) == checked


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wheels", [(), ("more-1.whl",)])
def test_missing_wheel_builds_package(tmp_path: Path, part: str, wheels: tuple[str, ...]) -> None:
    check = Check(tmp_path, part, "OUT", wheels=wheels).finish()
    assert check.run.returncode == 0, check.errors
    expected = ["build" if name == "wheel" else name for name in PARTS[part]]
    assert check.phases == [name for name in expected if wheels or name != "packages"]


@pytest.mark.parametrize("phase", ["wheel", "installed"])
def test_unusable_wheel_is_replaced_by_build(tmp_path: Path, phase: str) -> None:
    check = Check(tmp_path, "tests", "OUT", fails=f"*{WORDS[phase]}*").finish()
    assert check.run.returncode == 1
    begin = check.phases.index("wheel")
    assert check.phases[begin : check.phases.index("tests")][-2:] == ["build", "installed"]
    assert "device: ok" in check.summary


@pytest.mark.parametrize(("part", "phase"), EVERY)
def test_failed_phase_is_reported_and_others_run(tmp_path: Path, part: str, phase: str) -> None:
    check = Check(tmp_path, part, "OUT", fails=f"*{WORDS[phase]}*").finish()
    assert check.run.returncode == 1
    assert set(check.phases) >= set(PARTS[part])
    assert f"{phase}: FAILED with exit code 3" in check.summary
    assert f"    output of {check.commands[check.phases.index(phase)]}" in check.summary
    assert re.search(r"\nphases that failed: [1-3]\n$", check.summary)
    assert len(list(check.out.iterdir())) <= 8


@pytest.mark.parametrize(("part", "phase"), EVERY)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_cut_leaves_phases_so_far(tmp_path: Path, part: str, phase: str, sent: signal.Signals) -> None:
    check = Check(tmp_path, part, "OUT", hangs=f"*{WORDS[phase]}*")
    check.cut(sent)
    phases = list(PARTS[part])
    begun, ended = read(check.summary)
    assert begun == phases[: phases.index(phase) + 1]
    assert ended == phases[: phases.index(phase)]
    assert ("STOPPED by a signal" in check.summary) == (sent == signal.SIGTERM)
    assert "phases that failed" not in check.summary
    assert len(list(check.out.iterdir())) <= 8


def test_signal_ends_processes_of_phase(tmp_path: Path) -> None:
    check = Check(tmp_path, "tests", "OUT", hangs="*--phase tests*")
    check.cut(signal.SIGTERM)
    assert check.run.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(check.hung.read_text()), 0)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_cut_always_leaves_readable_summary(tmp_path: Path, sent: signal.Signals) -> None:
    for moment in range(20):
        folder = tmp_path / str(moment)
        folder.mkdir()
        check = Check(folder, "tests", "OUT")
        with contextlib.suppress(subprocess.TimeoutExpired):
            check.run.wait(timeout=0.015 * moment)
        check.cut(sent, in_phase=False)
        if (check.out / "summary.txt").exists():
            read(check.summary)


def test_phase_stops_at_its_limit(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "timeout"
    script.parent.mkdir()
    script.write_text(TIMEOUT)
    script.chmod(0o755)
    stopping: Any = {"PATH": f"{script.parent}:{os.environ['PATH']}", "REAL_TIMEOUT": shutil.which("timeout") or ""}
    check = Check(tmp_path, "figures", "OUT", hangs="*test_edges.py*", **stopping).finish()
    assert check.run.returncode == 1
    assert "edges: FAILED: stopped after its 50 s (exit code 124)" in check.summary
    assert "gpu: ok" in check.summary


def test_no_phase_begins_after_deadline(tmp_path: Path) -> None:
    check = Check(tmp_path, "tests", "OUT", LIMIT="6").finish()
    assert check.run.returncode == 1
    assert check.commands == []
    assert "device: NOT RUN, the 6 s of this part are over" in check.summary


@pytest.mark.parametrize("part", PARTS)
def test_dry_run_prints_without_running(tmp_path: Path, part: str) -> None:
    check = Check(tmp_path, "--dry-run", part, "OUT").finish()
    assert check.run.returncode == 0, check.errors
    assert check.commands == []
    assert all(f"{name}, at most " in check.summary for name in PARTS[part])


def test_chosen_tests_and_sections_run_alone(tmp_path: Path) -> None:
    cases = {"tests": ("tests/device/test_then.py", "tests"), "figures": ("copies", "gpu")}
    for part, (chosen, phase) in cases.items():
        (tmp_path / part).mkdir()
        check = Check(tmp_path / part, part, "OUT", chosen).finish()
        assert check.run.returncode == 0, check.errors
        assert check.phases[4:] == [phase]
        assert check.commands[-1].endswith(f"{ROOT / chosen}" if part == "tests" else f"--only {chosen}")


def test_python_without_torch_is_refused(tmp_path: Path) -> None:
    check = Check(tmp_path, "tests", "OUT", fails="*facts").finish()
    assert check.run.returncode == 1
    assert "cannot import torch" in check.summary
    assert check.commands == []


@pytest.mark.parametrize("wrong", [[], ["OUT"], ["tests"], ["both", "OUT"], ["tests", "--fast"]])
def test_wrong_argument_is_refused(tmp_path: Path, wrong: list[str]) -> None:
    check = Check(tmp_path, *wrong).finish()
    assert check.run.returncode == 2
    assert check.errors.startswith("usage: gpu_check.sh")
    assert check.commands == []
