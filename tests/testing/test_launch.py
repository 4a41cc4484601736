"""torchrun, as a function."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cudafuture.testing import torchrun

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

SCRIPT = """
import os, sys, time
words = ["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], os.environ.get("OWN", "")]
os.write(1, (" ".join(words) + "\\n").encode())  # at once: the ranks write to one file
"""


def script(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT + code)
    return path


def test_script_runs_on_every_rank(tmp_path: Path) -> None:
    finished = torchrun(script(tmp_path, ""), 2, "--flag", "x", env={"OWN": "set"})
    assert sorted(finished.stdout.split("\n"))[1:] == ["rank 0 of 2 --flag x set", "rank 1 of 2 --flag x set"]
    assert finished.returncode == 0


def test_failing_script_shows_output(tmp_path: Path) -> None:
    path = script(tmp_path, "raise ValueError('of the script')")
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 1.*rank 0 of 1.*ValueError: of the script"):
        torchrun(path, 1)
    assert torchrun(path, 1, check=False).returncode == 1


def test_hanging_script_shows_stack_and_ends(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ndef hang_here(): time.sleep(1000)\nhang_here()"
    with pytest.raises(TimeoutError, match=r"(?s)did not end within 20 seconds.*in hang_here"):
        torchrun(script(tmp_path, code), 1, timeout=20)  # time for torchrun to start it beside other tests
    assert not psutil.pid_exists(int(pid.read_text()))
