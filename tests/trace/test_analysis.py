"""Analysis of traces whose times are known, pictures of them, and Chrome files."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from cudafuture import debug, submit, trace
from cudafuture.testing import sim
from cudafuture.trace import RankTrace, Slice, Trace, TracedFuture
from cudafuture.trace._file import TraceFile
from support.patience import PATIENCE

MS = 1_000_000
MAIN, OTHER = 100, 101


def rank_of(
    futures: list[TracedFuture], slices: list[Slice], rank: int = 0, end: int = 100, boot: str = "one"
) -> RankTrace:
    facts = {"process": MAIN, "rank": rank, "host": "here", "boot": boot, "monotonic": 0, "realtime": 0}
    file = TraceFile(Path(), facts, None, {MAIN: "main", OTHER: "io"})
    return RankTrace(file, futures, slices, 0, end * MS)


def operation(
    kind: str, begin: float, end: float, number: int = -1, name: str = "op", nbytes: int = -1
) -> TracedFuture:
    place = {"kind": kind, "name": "p"} | ({"group": "g"} if kind == "group" else {})
    return TracedFuture(
        begin=int(begin * MS),
        name=name,
        state="completed",
        issued=int(begin * MS),
        issuer=MAIN,
        done=int(end * MS),
        completer=OTHER,
        place=place,
        number=number,
        nbytes=nbytes,
    )


def wait(begin: float, end: float, future: TracedFuture | None, text: str = "train.py:3") -> Slice:
    return Slice("wait", MAIN, int(begin * MS), int(end * MS), text, future, 1)


def step(begin: float, end: float, number: int = 0) -> Slice:
    return Slice("span", MAIN, int(begin * MS), int(end * MS), f"step {number}", None, 0)


def test_wait_belongs_to_the_operation_that_ended_last() -> None:
    read, reduce = operation("store", 0, 30), operation("group", 5, 50)
    both = TracedFuture(begin=5 * MS, maker="gather", done=50 * MS, parents=[read, reduce])
    (found,) = trace.analyse(Trace([rank_of([read, reduce, both], [step(0, 100), wait(20, 50, both)])])).steps
    assert found.time == pytest.approx(0.1)
    assert found.computing == pytest.approx(0.07)
    assert found.waits["communication"] == pytest.approx(0.03)
    assert sum(found.waits.values()) == pytest.approx(0.03)


def test_overlap_is_measured_against_what_is_possible() -> None:
    reads = [operation("store", 0, 40, nbytes=10), operation("store", 20, 60, nbytes=20)]
    (found,) = trace.analyse(Trace([rank_of(reads, [step(0, 100), wait(50, 60, reads[1])])])).steps
    flight = found.flights["io"]
    assert (flight.operations, flight.nbytes) == (2, 30)
    assert flight.time == pytest.approx(0.06)
    assert flight.overlapped == pytest.approx(0.05)
    assert flight.ideal == pytest.approx(0.06)
    assert flight.overlap == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("kind", "category"),
    [
        ("group", "communication"),
        ("worker", "communication"),
        ("store", "io"),
        ("loader", "data"),
        ("stage", "pipeline"),
    ],
)
def test_places_have_their_kinds(kind: str, category: str) -> None:
    one = operation(kind, 0, 40)
    (found,) = trace.analyse(Trace([rank_of([one], [step(0, 50), wait(10, 40, one)])])).steps
    assert found.waits[category] == pytest.approx(0.03)


def test_wait_for_a_device_is_no_wait_for_its_operation() -> None:
    one = operation("group", 0, 10)
    (found,) = trace.analyse(Trace([rank_of([one], [step(0, 50), wait(20, 30, one)])])).steps
    assert found.waits["device"] == pytest.approx(0.01)
    assert [part.kind for part in found.critical_path] == ["computing", "device", "computing"]


def test_waits_outside_of_steps_and_of_other_threads_do_not_count() -> None:
    one = operation("store", 0, 90)
    elsewhere = Slice("wait", OTHER, 10 * MS, 90 * MS, "", one, 0)
    (found,) = trace.analyse(Trace([rank_of([one], [step(0, 50), elsewhere, wait(60, 90, one)])])).steps
    assert found.computing == pytest.approx(0.05)


def test_wait_in_a_wait_counts_once() -> None:
    one, two = operation("store", 0, 40), operation("group", 0, 30)
    (found,) = trace.analyse(Trace([rank_of([one, two], [step(0, 50), wait(10, 40, one), wait(15, 30, two)])])).steps
    assert found.computing == pytest.approx(0.02)


def test_critical_path_leads_through_callbacks_to_operations() -> None:
    read = operation("store", 10, 40, name="read")
    child = TracedFuture(begin=10 * MS, maker="then", done=55 * MS, parents=[read])
    child.callback = Slice("callback", OTHER, 42 * MS, 55 * MS, "f", child, 0)
    slices = [step(0, 80), wait(20, 60, child), child.callback]
    (found,) = trace.analyse(Trace([rank_of([read, child], slices)])).steps
    assert [(part.what, round(part.begin * 1e3), round(part.end * 1e3)) for part in found.critical_path] == [
        ("computing", 0, 20),
        ("read of store 'p'", 20, 40),
        ("queued", 40, 42),
        ("callback: f", 42, 55),
        ("queued", 55, 60),
        ("computing", 60, 80),
    ]


def test_critical_path_leads_to_what_a_callback_returned() -> None:
    read, reduce = operation("store", 10, 30, name="read"), operation("group", 32, 58, name="reduce")
    child = TracedFuture(begin=10 * MS, maker="then_async", done=59 * MS, parents=[read, reduce])
    child.callback = Slice("callback", OTHER, 31 * MS, 33 * MS, "f", child, 0)
    slices = [step(0, 80), wait(20, 60, child), child.callback]
    (found,) = trace.analyse(Trace([rank_of([read, reduce, child], slices)])).steps
    assert [(part.what, round(part.begin * 1e3), round(part.end * 1e3)) for part in found.critical_path] == [
        ("computing", 0, 20),
        ("read of store 'p'", 20, 30),
        ("queued", 30, 31),
        ("callback: f", 31, 32),
        ("reduce of group 'p'", 32, 58),
        ("queued", 58, 60),
        ("computing", 60, 80),
    ]


def test_part_that_collect_any_did_not_wait_for_is_no_cause() -> None:
    read, reduce = operation("store", 0, 30), operation("group", 0, 90)
    either = TracedFuture(begin=0, maker="collect_any", done=31 * MS, parents=[read, reduce])
    (found,) = trace.analyse(Trace([rank_of([read, reduce, either], [step(0, 50), wait(10, 31, either)])])).steps
    assert found.waits["io"] == pytest.approx(0.021)


def test_process_without_steps_beside_one_with_steps_has_none() -> None:
    found = trace.analyse(Trace([rank_of([], [step(0, 50)]), rank_of([], [], rank=1)])).steps
    assert [one.rank for one in found] == ["rank 0"]


def test_span_whose_name_begins_with_step_is_no_step() -> None:
    spans = [Slice("span", MAIN, 0, MS, text, None, 0) for text in ("step 0", "step into the function")]
    assert [one.name for one in trace.analyse(Trace([rank_of([], spans)])).steps] == ["step 0"]


def test_rank_that_issues_late_is_named() -> None:
    ranks = [
        rank_of([operation("group", 10 * i + late, 10 * i + 9, i, "all_reduce") for i in range(3)], [], rank)
        for rank, late in enumerate((0.0, 5.0, 1.0))
    ]
    late, *others = trace.analyse(Trace(ranks)).stragglers
    assert (late.rank, late.last, late.of) == ("rank 1", 3, 3)
    assert late.late == pytest.approx(0.012)
    assert all(other.last == 0 for other in others)


def test_depth_counts_operations_and_bytes() -> None:
    reads = [operation("store", 0, 50, nbytes=10), operation("store", 25, 75, nbytes=20)]
    depth = trace.analyse(Trace([rank_of(reads, [])])).depths["rank 0"]["store"]
    assert (depth.most, depth.most_bytes) == (2, 30)
    assert depth.mean == pytest.approx(1.0)


def test_longest_wait_has_its_line() -> None:
    one = operation("store", 0, 90, name="read")
    found = trace.analyse(Trace([rank_of([one], [wait(10, 20, one, "a.py:1"), wait(30, 90, one, "b.py:2")])]))
    assert [(w.line, round(w.seconds * 1e3)) for w in found.waits] == [("b.py:2", 60), ("a.py:1", 10)]
    assert "60 ms on rank 0 for read of store 'p' at b.py:2" in str(found)


def test_comparison_has_ratios() -> None:
    before = Trace([rank_of([], [step(0, 50)])])
    after = Trace([rank_of([], [step(0, 25)])])
    assert trace.compare(before, after).ratio("time") == pytest.approx(0.5)
    assert "0.50" in str(trace.compare(before, after))


@pytest.mark.sim
def test_program_in_virtual_time_has_exact_times(tmp_path: Path) -> None:
    place = debug.OperationPlace.find("store", "/virtual")
    registered = threading.Event()

    def read_slowly() -> None:
        registered.wait()  # an operation that has ended is not registered
        sim.spend(ms=5)

    with trace.record(tmp_path), trace.step(0):
        sim.spend(ms=1)
        read = submit(read_slowly)
        debug.register(read, place)
        registered.set()
        sim.spend(ms=2)
        read.wait()
        sim.spend(ms=4)
    loaded = trace.load(tmp_path)
    assert loaded.is_virtual
    (found,) = trace.analyse(loaded).steps
    assert found.time == pytest.approx(0.010, abs=1e-8)
    assert found.computing == pytest.approx(0.007, abs=1e-8)
    assert found.waits["io"] == pytest.approx(0.003, abs=1e-8)
    assert found.flights["io"].overlapped == pytest.approx(0.002, abs=1e-8)


def test_clocks_of_machines_are_found_from_collectives(tmp_path: Path) -> None:
    def write(rank: int, ahead: int) -> None:
        events = [("all_reduce", i, 10 * i + rank, 10 * i + 3) for i in range(1, 4)]
        futures = [operation("group", begin, end, number, name) for name, number, begin, end in events]
        ranks.append(rank_of(futures, [], rank, boot=str(rank)))
        ranks[-1]._shift(ahead * MS)

    from cudafuture.trace import _model

    ranks: list[RankTrace] = []
    write(0, 0)
    write(1, 500)
    _model._align(ranks[0], ranks[1])
    error = ranks[1].clock_error
    assert error is not None
    assert error <= 3 * MS
    assert ranks[1].begin == pytest.approx(0, abs=error)


# ---- Chrome files


def chrome(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": rows}))
    return path


def row(phase: str, ts: float, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "ts": ts, "name": "x", "pid": 0, "tid": 0, **more}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([row("X", 0, dur=10), row("X", 5, dur=10)], "overlaps another one partly"),
        ([row("b", 0, id=1, cat="io")], "has a begin, and no end"),
        ([row("e", 0, id=1, cat="io")], "has an end, and no begin"),
        ([row("b", 5, id=1, cat="io"), row("e", 1, id=1, cat="io")], "ends before it begins"),
        ([row("s", 5, id=1), row("f", 1, id=1)], "forward in time"),
        ([row("s", 5, id=1)], "forward in time"),
        ([row("s", 1, id="0.1"), row("f", 5, id="0.1")], "has no number"),
        ([row("X", 0, dur=-1)], "duration -1"),
        ([row("C", 5), row("C", 1)], "goes back in time"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, rows: list[dict[str, Any]], problem: str) -> None:
    (found,) = trace.problems(chrome(tmp_path / "x.json", rows))
    assert problem in found


def test_nested_slices_and_overlapping_operations_are_right(tmp_path: Path) -> None:
    rows = [row("X", 0, dur=10), row("X", 0, dur=5), row("X", 5, dur=5)]
    rows += [
        row("b", 0, id=1, cat="io"),
        row("b", 1, id=2, cat="io"),
        row("e", 2, id=1, cat="io"),
        row("e", 3, id=2, cat="io"),
    ]
    assert trace.problems(chrome(tmp_path / "x.json", rows)) == []


def test_chrome_file_has_operations_waits_and_arrows(tmp_path: Path) -> None:
    read = operation("store", 10, 40, name="read", nbytes=8)
    child = TracedFuture(begin=10 * MS, maker="then", done=55 * MS, parents=[read])
    child.callback = Slice("callback", OTHER, 42 * MS, 55 * MS, "f", child, 0)
    slices = [step(0, 80), wait(20, 60, child), child.callback]
    trace.merge(Trace([rank_of([read, child], slices)]), tmp_path / "x.json")
    assert trace.problems(tmp_path / "x.json") == []
    rows = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    phases = {r["ph"]: r for r in rows}
    assert phases["b"]["name"] == "read of store 'p'"
    assert phases["e"]["ts"] == 40_000
    assert (phases["s"]["ts"], phases["t"]["ts"], phases["f"]["ts"]) == (10_000, 40_000, 42_000)
    assert {r["name"] for r in rows if r["ph"] == "X"} >= {"step 0", "wait: train.py:3", "callback: f"}
    assert [r["args"] for r in rows if r["ph"] == "C" and "bytes" in r["args"]] == [{"bytes": 8}, {"bytes": 0}]


def test_profile_of_torch_is_put_on_the_same_clock(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            {"baseTimeNanoseconds": 2 * MS, "traceEvents": [row("X", 1000, dur=1)], "distributedInfo": {"rank": 0}}
        )
    )
    trace.merge(Trace([rank_of([], [step(0, 80)])]), tmp_path / "x.json", [profile])
    rows = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    (own,) = [r for r in rows if str(r["pid"]).startswith("torch.profiler")]
    assert own["ts"] == 3000


# ---- pictures


@pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
def test_picture_is_written(tmp_path: Path, ending: str) -> None:
    reads = [operation("store", 0, 40), operation("group", 20, 60)]
    slices = [step(0, 50), wait(30, 40, reads[0]), step(50, 100, 1), wait(50, 60, reads[1])]
    output = tmp_path / f"x{ending}"
    trace.plot(Trace([rank_of(reads, slices)]), output)
    data = output.read_bytes()
    if ending == ".png":
        assert data.startswith(b"\x89PNG")
    else:
        assert "exposed communication" in data.decode()
    if ending == ".html":
        assert b"http://" not in data.replace(b"http://www.w3.org", b"").replace(b"http://purl.org", b"").replace(
            b"http://creativecommons.org", b""
        )
        assert b"exposed io: 5 ms" in data


def test_each_of_several_traces_has_bars(tmp_path: Path) -> None:
    steps = [step(10 * number, 10 * number + 5, number) for number in range(50)]
    one = Trace([rank_of([], steps)])
    trace.plot({"before": one, "after": one}, tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert "the first 20 of 50" in drawn
    assert (drawn.count("<!-- before -->"), drawn.count("<!-- after -->")) == (21, 21)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_page_shows_colours_in_a_browser(tmp_path: Path) -> None:
    reads = [operation("store", 0, 40), operation("group", 20, 60)]
    slices = [step(0, 50), wait(30, 40, reads[0]), step(50, 100, 1), wait(50, 60, reads[1])]
    trace.plot(Trace([rank_of(reads, slices)]), tmp_path / "x.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    folder, shot = f"--user-data-dir={tmp_path / 'user'}", tmp_path / "shot.png"
    size, address = "--window-size=1300,1200", (tmp_path / "x.html").as_uri()
    command = [str(CHROMIUM), *options, folder, size, f"--screenshot={shot}", address]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).round().astype(int)
    for colour in ("#b8c4d0", "#d1495b", "#2e86ab"):  # computing, communication, I/O
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert (abs(pixels - wanted).max(-1) <= 1).sum() > 1000, colour


def test_other_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png"):
        trace.plot(Trace([rank_of([], [])]), tmp_path / "x.pdf")
