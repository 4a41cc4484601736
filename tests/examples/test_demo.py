"""The demo: each part shows what it says and leaves its pictures, and fails where it does not."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cudafuture.testing import sim, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
LITTLE = ["--rounds", "2", "--round-steps", "1", "--layers", "1", "--width", "64", "--positions", "8"]

ONE_WRONG_BIT = """
import os, sys, torch, train_gpt_remote

make = train_gpt_remote.make_loops

def make_other(args, disk):
    loops = make(args, disk)
    if os.environ["RANK"] == "1":
        with torch.no_grad():
            next(loops["blocking"].model.parameters()).view(-1)[0] += 1e-6
    return loops

train_gpt_remote.make_loops = make_other
sys.exit(train_gpt_remote.main())
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("demo")
    sim.disable()


def run(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["demo.py", *options])
    failed: int = demo.main()
    return failed


Captured = pytest.CaptureFixture[str]


def test_parts_without_processes_show_what_they_say(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    assert run(demo, monkeypatch, "--folder", str(tmp_path), "--only", "race", "overlap") == 0
    printed = capsys.readouterr().out
    assert "reuse: allocation on stream 1 of sim:0 hands out" in printed
    assert "a step of 200.1 ms takes 105.1 ms with futures, at least 105.0 ms" in printed
    assert "waits 5.0 ms for communication in place of 100.0 ms" in printed
    for part in ("race", "overlap"):
        assert (tmp_path / f"{part}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{tmp_path}/{part}.png and .html" in printed
    page = (tmp_path / "race.html").read_text()
    assert page.count("<mark>") == 2
    assert "self.ahead.to(self.device, non_blocking=True)</mark>" in page
    assert "<svg" in (tmp_path / "overlap.html").read_text()


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("race", "Prefetcher", lambda loader, device: (b.to(device) for b in loader), "found no race"),
        ("race", "prefetch", lambda loader, device: (2 * b.to(device) for b in loader), "a wrong sum"),
        ("overlap", "REDUCE", 4.0, "the steps take"),
        ("overlap", "LAYERS", "20", "TypeError: "),
        ("disk", "HERE", Path("/missing"), "/missing/train_gpt_remote.py"),
    ],
)
def test_part_that_does_not_show_it_fails(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Captured,
    part: str,
    name: str,
    value: Any,
    words: str,
) -> None:
    monkeypatch.setattr(demo, name, value)
    if name == "REDUCE":
        monkeypatch.setattr(demo.Step, "overlapped", demo.Step.blocking)
    assert run(demo, monkeypatch, "--folder", str(tmp_path), "--only", part) == 1
    printed = capsys.readouterr().out
    assert "FAILED: " in printed
    assert words in printed


# ---- real processes, a real disk


def train(tmp_path: Path, *options: str, script: Path | None = None) -> tuple[int, str, Any]:
    report = tmp_path / "results.json"
    given = [*LITTLE, "--folder", str(tmp_path / "states"), "--json", str(report), *options]
    (tmp_path / "states").mkdir()
    environment = {"PYTHONPATH": str(EXAMPLES)}
    done = torchrun(script or EXAMPLES / "train_gpt_remote.py", 2, *given, timeout=100, env=environment, check=False)
    assert report.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(report.read_text())


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.xdist_group("world")
def test_both_loops_train_the_same(tmp_path: Path) -> None:
    code, printed, results = train(tmp_path, "--trace", str(tmp_path / "traces"))
    assert code == 0, printed
    assert set(results["checks"].values()) == {True}
    assert 1 <= results["batch"] <= 32
    assert all(seconds >= 0 for seconds in results["parts"])
    assert [len(results["seconds"][loop]) for loop in ("blocking", "overlapped")] == [2, 2]
    assert 0 < results["most_bytes"] < results["state_bytes"] == 8 * results["parameters"]
    assert results["disk"]["mib_written"] > 0
    assert printed.count(results["conclusion"]) == 1, "one summary, of rank 0"
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["blocking", "overlapped"]


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.xdist_group("world")
def test_one_wrong_number_on_another_rank_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(ONE_WRONG_BIT)
    code, printed, results = train(tmp_path, "--rounds", "1", "--batch-size", "1", script=script)
    assert code != 0
    assert results["checks"]["same parameters as with blocking calls"] is False
    assert "FAILED  same parameters as with blocking calls" in printed


def results(ratio: float, parts: list[float] | None = None) -> dict[str, Any]:
    seconds = {"blocking": [1.0, 1.0, 1.0], "overlapped": [ratio - 0.1, ratio, ratio + 0.2]}
    memory = {"state_bytes": 100 << 20, "most_bytes": 25 << 20}
    return {"seconds": seconds, "busy": 0.3, "ranks": 2, "parts": parts, **memory}


@pytest.mark.usefixtures("demo")
def test_conclusion_has_the_gain_with_its_spread_and_the_share_of_memory() -> None:
    told = importlib.import_module("train_gpt_remote").conclusion(results(0.7))
    assert "0.70 of the time (0.60 to 0.90 in 3 rounds)" in told
    assert "at most 25 of the 100 MiB of its state ahead, and 75%" in told
    assert "no gain" not in told


@pytest.mark.usefixtures("demo")
def test_machine_without_gain_is_told_with_what_was_measured() -> None:
    told = importlib.import_module("train_gpt_remote").conclusion(results(1.1, [0.5, 0.25]))
    assert "no gain on this machine: its cores were 60% busy" in told
    assert "computing took 500 ms of a step, and the state 250 ms" in told


@pytest.mark.usefixtures("demo")
def test_folder_in_memory_is_recognised(tmp_path: Path) -> None:
    is_in_memory = importlib.import_module("train_gpt_remote").is_in_memory
    assert is_in_memory(Path("/dev/shm"))
    assert not is_in_memory(Path("/proc"))
