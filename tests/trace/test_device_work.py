"""Work of devices in a trace: its streams and its times, virtual and real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, gather, trace
from cudafuture.testing import sim
from cudafuture.trace import DeviceWork, RankTrace

US = 1_000  # nanoseconds


def load_rank(folder: Path) -> RankTrace:
    (rank,) = trace.load(folder).ranks
    return rank


def microseconds(work: list[DeviceWork]) -> list[float]:
    """Return the begin and the end of each, from the first begin on."""
    return [(time - work[0].begin) / US for one in work for time in (one.begin, one.end)]


@pytest.fixture
def speeds() -> None:
    sim.set_speeds(sim.Speeds(compute=1e12, copy=1e12, launch=0))


@pytest.mark.sim
@pytest.mark.usefixtures("speeds")
def test_streams_have_exact_virtual_times(tmp_path: Path) -> None:
    def follow(future: CUDAFuture[torch.Tensor]) -> torch.Tensor:
        sim.sleep(ms=3)
        return future.value()

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
    def follow(future: CUDAFuture[torch.Tensor]) -> torch.Tensor:
        sim.sleep(ms=4)
        return future.value()

    tensor = torch.ones(1, device="sim:0")
    sim.synchronize()
    with trace.record(tmp_path):
        parent: CUDAFuture[torch.Tensor] = CUDAFuture()
        parent.set_result(tensor)
        children = [parent.then(follow) for _ in range(2)]
        both = gather(*children)
        both.wait(non_blocking=True)
    work = [one for one in load_rank(tmp_path).device_work if one.end - one.begin > US]
    assert microseconds(work) == pytest.approx([0, 4_000, 0, 4_000])


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


def test_trace_of_the_host_has_no_device_work(tmp_path: Path) -> None:
    with trace.record(tmp_path):
        CUDAFuture.completed(1).then(lambda f: f.value()).wait()
    rank = load_rank(tmp_path)
    assert rank.device_work == []
    assert rank.device_clock_error == {}
