"""Work of devices in a trace: its streams and its times, virtual and real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, debug, gather, trace
from cudafuture.cli import main
from cudafuture.testing import sim
from cudafuture.trace import DeviceWork, RankTrace, TracedFuture, _model
from cudafuture.trace._file import RecordedEvent, TraceFile

US = 1_000  # nanoseconds


def load_rank(folder: Path) -> RankTrace:
    (rank,) = trace.load(folder).ranks
    return rank


def microseconds(work: list[DeviceWork]) -> list[float]:
    """Return the begin and the end of each, from the first begin on."""
    return [(time - work[0].begin) / US for one in work for time in (one.begin, one.end)]


def follow(future: CUDAFuture[torch.Tensor]) -> torch.Tensor:
    """Enqueue work of 3 ms, as a callback."""
    sim.sleep(ms=3)
    return future.value()


def all_reduce(tensor: torch.Tensor) -> CUDAFuture[torch.Tensor]:
    """Enqueue a collective of 5 ms, whose future is then done, as that of NCCL is."""
    reduced: CUDAFuture[torch.Tensor] = CUDAFuture(name="all_reduce")
    debug.register(reduced, debug.OperationPlace.find("group", "dp"), number=0, nbytes=4)
    sim.sleep(ms=5)
    reduced.set_result(tensor)
    return reduced


@pytest.fixture
def speeds() -> None:
    sim.set_speeds(sim.Speeds(compute=1e12, copy=1e12, launch=0))


@pytest.mark.sim
@pytest.mark.usefixtures("speeds")
def test_streams_have_exact_virtual_times(tmp_path: Path) -> None:
    tensor = torch.ones(1, device="sim:0")
    sim.synchronize()
    with trace.record(tmp_path):
        parent: CUDAFuture[torch.Tensor] = CUDAFuture()
        sim.sleep(ms=2)
        parent.set_result(tensor)
        child = parent.then(follow)
        child.wait(non_blocking=True)
        sim.spend(ms=1)  # the host is not what the device waits for
    work = load_rank(tmp_path).device_work
    assert microseconds(work) == pytest.approx([0, 2_000, 2_000, 5_000])
    assert {one.device for one in work} == {"sim:0"}
    assert work[0].stream != work[1].stream
    assert "follow" in str(work[1].future.callback)
    assert work[1].future.ready == work[1].end


@pytest.mark.sim
@pytest.mark.usefixtures("speeds")
def test_work_that_waits_for_nothing_overlaps(tmp_path: Path) -> None:
    tensor = torch.ones(1, device="sim:0")
    sim.synchronize()
    with trace.record(tmp_path):
        parent: CUDAFuture[torch.Tensor] = CUDAFuture()
        parent.set_result(tensor)
        children = [parent.then(follow) for _ in range(2)]
        both = gather(*children)
        both.wait(non_blocking=True)
    work = [one for one in load_rank(tmp_path).device_work if one.end - one.begin > US]
    assert microseconds(work) == pytest.approx([0, 3_000, 0, 3_000])


@pytest.mark.sim
@pytest.mark.usefixtures("speeds")
def test_each_stream_is_a_track(tmp_path: Path) -> None:
    tensor = torch.ones(1, device="sim:0")
    with trace.record(tmp_path):
        for _ in range(3):
            parent: CUDAFuture[torch.Tensor] = CUDAFuture()
            sim.sleep(ms=1)
            parent.set_result(tensor)
            parent.then(lambda f: f.value() + 1).then(lambda f: f.value() + 1).wait(non_blocking=True)
    trace.merge(tmp_path, tmp_path / "all.json")
    assert trace.problems(tmp_path / "all.json") == []
    rows = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    tracks = {names[row["tid"]] for row in rows if row.get("cat") == "device"}
    assert "sim:0, default stream" in tracks
    assert len(tracks) >= 2


@pytest.mark.sim
@pytest.mark.usefixtures("speeds")
def test_operation_lasts_until_the_device_has_ended_it(tmp_path: Path) -> None:
    """Of 5 ms on the device, the host computes 2 ms beside it, and the wait for the other 3 ms is exposed."""
    tensor = torch.ones(1, device="sim:0")
    sim.synchronize()
    with trace.record(tmp_path), trace.step(0):
        child = all_reduce(tensor).then(lambda f: f.value())
        sim.spend(ms=2)
        child.wait()
        child.then(follow).wait()
    (step,) = trace.analyse(tmp_path).steps
    assert step.waits["communication"] == pytest.approx(3e-3)
    assert step.waits["device"] == pytest.approx(3e-3)
    assert step.computing == pytest.approx(2e-3)
    flight = step.flights["communication"]
    assert [flight.time, flight.overlapped] == pytest.approx([5e-3, 2e-3])
    path = [(part.kind, round(part.end - part.begin, 6)) for part in step.critical_path]
    assert [part for part in path if part[1]] == [("computing", 2e-3), ("communication", 3e-3), ("device", 3e-3)]


@pytest.mark.sim
@pytest.mark.usefixtures("speeds")
def test_pictures_of_several_traces_have_their_titles_and_streams(tmp_path: Path) -> None:
    tensor = torch.ones(1, device="sim:0")
    sim.synchronize()
    for name, ms in (("before", 4), ("after", 2)):
        with trace.record(tmp_path / name), trace.step(0):
            parent: CUDAFuture[torch.Tensor] = CUDAFuture()
            sim.sleep(ms=ms)
            parent.set_result(tensor)
            parent.wait()
    folders = [str(tmp_path / name) for name in ("before", "after")]
    assert main(["trace", "plot", *folders, str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    for folder, time in zip(folders, ("4 ms", "2 ms"), strict=True):
        assert f"<!-- {folder} -->" in page
        assert f"{folder}: 1 step, {time}" in page
    assert page.count("<!-- sim:0, default stream -->") == 2


@pytest.mark.sim
@pytest.mark.usefixtures("speeds")
def test_device_work_of_a_callback_is_no_communication(tmp_path: Path) -> None:
    """Of the wait for an all_reduce of 5 ms and a callback of 3 ms, 5 ms are exposed communication."""
    tensor = torch.ones(1, device="sim:0")
    sim.synchronize()
    with trace.record(tmp_path), trace.step(0):
        all_reduce(tensor).then(follow).wait()
    (step,) = trace.analyse(tmp_path).steps
    assert step.waits["communication"] == pytest.approx(5e-3)
    assert step.waits["device"] == pytest.approx(3e-3)
    path = [(part.kind, round(part.end - part.begin, 6)) for part in step.critical_path]
    assert [part for part in path if part[1]] == [("communication", 5e-3), ("device", 3e-3)]


def test_no_trace_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trace"):
        trace.plot({}, tmp_path / "x.png")


def test_trace_of_the_host_has_no_device_work(tmp_path: Path) -> None:
    with trace.record(tmp_path):
        CUDAFuture.completed(1).then(lambda f: f.value()).wait()
    rank = load_rank(tmp_path)
    assert rank.device_work == []
    assert rank.device_clock_error == {}


# ---- the clock of a device


def reached(recorded: int, seen: int, device_time: int, done: int) -> RecordedEvent:
    return RecordedEvent(recorded, seen, done, 7, device_time, done, 0, "reached", "pending", "", "cuda", 1)


def work_of(events: list[tuple[RecordedEvent, TracedFuture]]) -> RankTrace:
    rank = RankTrace(TraceFile(Path("synthetic"), {"process": 1}), [future for _, future in events], [], 0, 0)
    _model._add_device_work(rank, events)
    return rank


def test_what_the_host_has_seen_bounds_the_clock() -> None:
    future = TracedFuture(0, done=1_000, ready=50_000)
    rank = work_of([(reached(recorded=0, seen=90_000_000, device_time=0, done=1_000), future)])
    assert rank.device_clock_error["cuda:0"] <= 25_000 + 20_000
    assert future.ready is not None
    assert 0 <= future.ready <= 50_000


def test_drift_of_a_device_stays_within_the_stated_error() -> None:
    second = 1_000_000_000
    true_ends = range(0, 600 * second, second // 20)
    events = []
    for end in true_ends:
        device_time = round(end * (1 - 20e-6))  # 20 parts in a million slow
        future = TracedFuture(end - 3_000, done=end - 2_000)
        events.append((reached(end - 5_000, end + 900_000, device_time, end - 2_000), future))
    rank = work_of(events)
    error = rank.device_clock_error["cuda:0"]
    assert error <= 500_000
    found = sorted(work.end for work in rank.device_work)
    assert max(abs(end - true) for end, true in zip(found, true_ends, strict=True)) <= error + 1


def test_work_that_ends_with_its_parent_has_no_duration() -> None:
    parent, child = TracedFuture(0, done=10), TracedFuture(0, done=20)
    child.parents.append(parent)
    rank = work_of([(reached(5, 900, 500, 20), child), (reached(4, 900, 500, 10), parent)])
    assert [work.future for work in rank.device_work] == [parent]
