"""``cudafuture bench``: rows that fail or are skipped, the report of a run that is cut, the picture, the suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import bench
from cudafuture.cli import main

pytestmark = pytest.mark.usefixtures("on_the_host")

Captured = pytest.CaptureFixture[str]

SUITE = """
import contextlib, os, signal, time
from cudafuture.bench import Row, Skipped, Suite

def row(name, measured):
    return lambda rounds: Row(name, f"what {rounds} rounds show [of it]", "ns", 2.0, 1.0, "peer", "x", measured, 1.5)

def fails(rounds):
    raise ValueError("the data are wrong")

def is_skipped(rounds):
    raise Skipped("there is no disk")

def cuts(rounds):
    os._exit(9)

def keeps_interrupt(rounds):
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    return row("measured by hand", 1.0)(rounds)

rows = {"copy-small": row("copy-small", 1.0), "copy-large": row("copy-large", 2.0), "fails": fails}
rows |= {"skipped": is_skipped, "last": row("last", 1.0), "cut": cuts, "never": row("never", 1.0)}
kept = {"keeps": keeps_interrupt, "never": row("never", 1.0)}
interrupted = Suite("interrupted", "Rows", kept, rounds=3)
measured = Suite("measured", "Rows", rows, rounds=3)
rehearsed = Suite("rehearsed", "Rows", rows, rounds=3, takes_figures=False)
"""
ENTRY_POINTS = """
[cudafuture.bench]
measured = rows_of_test:measured
rehearsed = rows_of_test:rehearsed
absent = rows_of_test_with_absent:measured
interrupted = rows_of_test:interrupted
broken = rows_of_test:nothing
"""


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with suites, and return its folder."""
    (tmp_path / "rows_of_test.py").write_text(SUITE)
    (tmp_path / "rows_of_test_with_absent.py").write_text(f"import package_that_is_absent\n{SUITE}")
    information = tmp_path / "rows_of_test-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rows_of_test\nVersion: 1\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


def rows_in(report: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    return rows


def verdicts_in(report: Path) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in rows_in(report)}


def test_failed_row_is_reported_and_next_runs(suites: Path, capsys: Captured) -> None:
    report = suites / "report.json"
    assert run("measured", "--json", report, "--only", "fails", "skipped", "last") == 1
    assert verdicts_in(report) == {"fails": "failed", "skipped": "skipped", "last": "ok"}
    failed = rows_in(report)[0]
    assert failed["why"] == "ValueError: the data are wrong"
    assert "in fails" in failed["trace"]
    captured = capsys.readouterr()
    assert "skipped skipped: there is no disk\n" in captured.out
    assert "what 3 rounds show [of it]" in " ".join(captured.out.split())
    assert "the data are wrong" in captured.err


def test_cut_run_leaves_earlier_rows(suites: Path) -> None:
    report = suites / "report.json"
    code = f"import sys; sys.path.insert(0, {str(suites)!r}); from cudafuture.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "bench", "measured", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert list(verdicts_in(report)) == ["copy-small", "copy-large", "fails", "skipped", "last"]


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--check",), 1)])
def test_broken_limit_fails_checked_run(suites: Path, options: tuple[str, ...], code: int) -> None:
    report = suites / "report.json"
    assert run("measured", "--json", report, "--only", "copy", *options) == code
    assert verdicts_in(report) == {"copy-small": "ok", "copy-large": "over"}


def test_ctrl_c_ends_run_where_the_row_keeps_it(suites: Path, capsys: Captured) -> None:
    report = suites / "report.json"
    assert run("interrupted", "--json", report) == 130
    assert verdicts_in(report) == {"keeps": "ok"}  # by the name under which the suite has it
    assert "keeps" in capsys.readouterr().out
    assert [row.name for row in bench.load("interrupted").measure(["never"], 1)] == ["never"]  # the process continues


def test_report_follows_link(suites: Path) -> None:
    (suites / "link.json").symlink_to(suites / "report.json")
    assert run("measured", "--json", suites / "link.json", "--only", "last") == 0
    assert (suites / "link.json").is_symlink()
    assert verdicts_in(suites / "report.json") == {"last": "ok"}


def test_pipe_gets_report_once(suites: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as report, os.fdopen(writer, "w"):
        assert run("measured", "--json", f"/proc/self/fd/{writer}", "--only", "copy", "last") == 0
        os.write(writer, b"end\n")
        lines = iter(report.readline, "end\n")
        assert [row["name"] for row in json.loads("".join(lines))["rows"]] == ["copy-small", "copy-large", "last"]


def test_rehearsal_takes_no_figures(suites: Path) -> None:
    report = suites / "report.json"
    assert run("rehearsed", "--check", "--json", report, "--only", "copy", "skipped") == 0
    assert verdicts_in(report) == {"copy-small": "rehearsed", "copy-large": "rehearsed", "skipped": "skipped"}
    assert all("measured" not in row for row in rows_in(report))


def test_rounds_reach_rows_and_report(suites: Path, capsys: Captured) -> None:
    run("measured", "--rounds", 7, "--json", f"{suites}/new/", "--only", "last")
    (report,) = suites.glob("new/measured-*cpu-python3*-torch*.json")
    assert json.loads(report.read_text())["rounds"] == 7
    assert "what 7 rounds" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_shows_each_measured_row(suites: Path, suffix: str) -> None:
    picture = suites / f"rows{suffix}"
    assert run("measured", "--plot", picture, "--only", "copy", "skipped", "last") == 0
    if suffix == ".png":
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        drawn = picture.read_text()
        assert all(f"<!-- {name} -->" in drawn for name in ("copy-small", "copy-large", "last"))
        assert "<!-- skipped -->" not in drawn


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "there is no benchmark nothing; there are absent, broken, collectives, core, "),
        (("absent",), "absent needs the package package_that_is_absent, which is not installed"),
        (("measured", "--only", "cop"), "measured: no row is named cop; there are copy-small, "),
        (("broken",), "the benchmark broken cannot be loaded: "),
        (("--only", "last", "measured"), "name a suite before its options"),
        (("--check",), "name a suite before its options"),
        (("measured", "--json", "/proc/rows/report.json"), "/proc/rows"),
        (("measured", "--rounds", "0"), "rounds must be at least 1, not 0"),
        (("measured", "--only", "skipped", "--plot", "rows.png"), "no row has figures to draw"),
        (("measured", "--only", "last", "--plot", "rows.doc"), "rows.doc: a picture is a .png, .svg or .pdf file"),
    ],
)
def test_wrong_arguments_are_refused(
    suites: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(suites)
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(suites.glob("rows.*"))


def test_suites_are_listed(suites: Path, capsys: Captured) -> None:
    assert suites.is_dir()
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "measured     Rows: 7 rows" in lines
    assert any(line.startswith("broken       (the benchmark broken cannot be loaded: ") for line in lines)
    assert "absent       (skipped: absent needs the package package_that_is_absent, which is not installed)" in lines
    assert {"core", "collectives", "rpc", "storage", "swap", "prefetch", "pipeline", "gpu"} <= {
        line.split()[0] for line in lines
    }


@pytest.mark.parametrize("name", bench.names())
def test_suite_loads(name: str) -> None:
    suite = bench.load(name)
    assert suite.name == name
    assert suite.rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_suite_without_its_device_says_so(capsys: Captured) -> None:
    assert run("gpu") == 2
    assert "there is no GPU" in capsys.readouterr().err
