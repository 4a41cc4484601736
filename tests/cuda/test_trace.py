"""A trace on CUDA: device times from events with timing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, trace
from cudafuture.trace import RankTrace
from support.harness import Cuda

pytestmark = pytest.mark.cuda


def record_chain(folder: Path, links: int) -> tuple[RankTrace, int, int]:
    """Record a chain of callbacks that nothing on the host waits for, then synchronize; return the host's bounds."""
    tensor = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    begin = time.monotonic_ns()
    with trace.record(folder):
        last: CUDAFuture[torch.Tensor] = CUDAFuture()
        first = last
        for _ in range(links):
            last = last.then(lambda f: f.value() + 1)
        first.set_result(tensor)
        value = last.wait(non_blocking=True)
        torch.cuda.synchronize()
        end = time.monotonic_ns()
    assert value.item() == links + 1
    (rank,) = trace.load(folder).ranks
    return rank, begin, end


def test_device_times_lie_within_the_hosts(cuda: Cuda, tmp_path: Path) -> None:
    rank, begin, end = record_chain(tmp_path, 5)
    (device,) = rank.device_clock_error
    assert device == "cuda:0"
    error = rank.device_clock_error[device]
    ends = [work.end for work in rank.device_work]
    assert ends == sorted(ends)
    assert begin - error <= ends[0] <= ends[-1] <= end + error
    followed = [future for future in rank.futures if future.maker == "then"]
    assert len(followed) == 5
    assert all(future.ready is not None for future in followed)


def test_events_have_timing_only_in_a_recording(cuda: Cuda, tmp_path: Path) -> None:
    record_chain(tmp_path / "first", 2)
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    future.set_result(torch.ones(1, device="cuda"))  # its event has no timing
    rank, _, _ = record_chain(tmp_path / "second", 2)
    assert future.wait().item() == 1
    assert len([one for one in rank.futures if one.ready is not None]) == 3


def test_captured_work_has_no_device_times(cuda: Cuda, tmp_path: Path) -> None:
    tensor = torch.ones(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with trace.record(tmp_path), torch.cuda.graph(graph):
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        future.set_result(tensor)
        future.then(lambda f: f.value() + 1).wait(non_blocking=True)
    (rank,) = trace.load(tmp_path).ranks
    assert rank.device_work == []
