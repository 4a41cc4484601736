"""Tests of the race detector over torch's CUDA code: its reports, what orders two operations, and what is no race."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from cudafuture.testing import fakecuda

SIZE = 256
Stream = torch.cuda.Stream

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("race_detection")]


@pytest.fixture(autouse=True)
def _idle_device(race_detection: None) -> Iterator[None]:
    """Select device 0, which the host has seen idle, with fresh memory."""
    with torch.cuda.device(0):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        fakecuda.races()
        yield


def races() -> list[fakecuda.Report]:
    return fakecuda.races()


def on(stream: Stream) -> torch.cuda.StreamContext:
    return torch.cuda.stream(stream)


def fill(stream: Stream, value: float = 1.0, device: str = "cuda:0") -> torch.Tensor:
    """Return a tensor that a stream allocates and writes."""
    with on(stream):
        return torch.full((SIZE,), value, device=device)


# ---- reports


def test_missing_wait_reports_both_operations() -> None:
    x = fill(Stream())
    x.sum()
    (report,) = races()
    assert report.kind == "race"
    assert report.earlier is not None
    assert report.later is not None
    assert (report.earlier.operation, report.later.operation) == ("aten::fill_", "aten::sum")
    assert "test_races.py" in report.earlier.stack[-1]
    assert report.earlier.stack[-1].endswith("in fill")
    assert report.later.stack[-1].endswith("in test_missing_wait_reports_both_operations")
    assert f"{SIZE * 4} bytes" in report.summary
    assert "the default stream of cuda:0" in report.summary


def test_write_over_read_is_reported() -> None:
    x = torch.ones(SIZE, device="cuda")
    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        total = x.sum()
    x.add_(1)
    (report,) = races()
    assert report.earlier is not None
    assert report.later is not None
    assert (report.earlier.operation, report.later.operation) == ("aten::sum", "aten::add_")
    del total


def test_two_reads_are_no_race() -> None:
    x, side = torch.ones(SIZE, device="cuda"), Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        there = x.sum()
    here = x.sum()
    assert races() == []
    del here, there


def test_tensor_halves_are_distinguished() -> None:
    x, side = torch.ones(SIZE, device="cuda"), Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        x[: SIZE // 2].add_(1)
    x[SIZE // 2 :].add_(1)
    assert races() == []
    x[SIZE // 2 - 1 :].add_(1)  # an element too far
    (report,) = races()
    assert "writes 4 bytes that aten::add_ on" in report.summary


def test_repeated_race_is_reported_once() -> None:
    x = fill(Stream())
    for _ in range(5):
        x.sum()
    assert len(races()) == 1
    assert races() == []


def test_loop_and_other_line_are_two_races() -> None:
    x = fill(Stream())
    for _ in range(3):
        x.sum()
    x.sum()
    assert len(races()) == 2


def test_long_loop_hides_no_later_race() -> None:
    x = fill(Stream())
    for _ in range(2000):
        x.sum()
    fill(Stream()).mul_(2)
    assert [report.later.operation for report in races() if report.later] == ["aten::sum", "aten::mul_"]


def test_detect_races_drops_earlier_ones() -> None:
    fill(Stream()).sum()
    with fakecuda.detect_races():
        torch.ones(SIZE, device="cuda").sum()
    message = "aten::sum on the default stream of cuda:0 reads"
    with pytest.raises(fakecuda.RaceError, match=message) as caught, fakecuda.detect_races():
        fill(Stream()).sum()
    assert len(caught.value.reports) == 1


# ---- what orders


def wait_for_stream(side: Stream) -> None:
    torch.cuda.current_stream().wait_stream(side)


def wait_for_event(side: Stream) -> None:
    torch.cuda.current_stream().wait_event(side.record_event())


def wait_through_a_third_stream(side: Stream) -> None:
    third = Stream()
    third.wait_stream(side)
    torch.cuda.current_stream().wait_stream(third)


def synchronize_stream(side: Stream) -> None:
    side.synchronize()


def synchronize_device(side: Stream) -> None:
    torch.cuda.synchronize()


def synchronize_event(side: Stream) -> None:
    side.record_event().synchronize()


def query_event(side: Stream) -> None:
    event = side.record_event()
    while not event.query():
        pass


def query_stream(side: Stream) -> None:
    while not side.query():
        pass


def synchronize_in_another_thread(side: Stream) -> None:
    thread = threading.Thread(target=side.synchronize)
    thread.start()
    thread.join()


ORDERS = [
    wait_for_stream,
    wait_for_event,
    wait_through_a_third_stream,
    synchronize_stream,
    synchronize_device,
    synchronize_event,
    query_event,
    query_stream,
    synchronize_in_another_thread,
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_this_orders_two_streams(order: Callable[[Stream], None]) -> None:
    side = Stream()
    x = fill(side)
    order(side)
    assert x.sum().item() == SIZE
    assert races() == []


def test_event_orders_only_earlier_work() -> None:
    side = Stream()
    x = fill(side)
    event = side.record_event()
    with on(side):
        x.add_(1)
    torch.cuda.current_stream().wait_event(event)
    x.sum()
    (report,) = races()
    assert report.earlier is not None
    assert report.earlier.operation == "aten::add_"


def test_negative_query_orders_nothing() -> None:
    side = Stream()
    with fakecuda.hold(side):
        x = fill(side)
        assert not side.record_event().query()
        x.sum()
        assert len(races()) == 1


def test_rerecorded_event_counts_as_waited() -> None:
    side, event = Stream(), torch.cuda.Event()
    x = fill(side)
    event.record(side)
    event.wait()
    y = fill(side)
    event.record(side)
    x.sum()
    assert races() == []
    y.sum()
    assert len(races()) == 1


@pytest.fixture
def blocking_stream() -> Iterator[Stream]:
    """Yield a stream that the legacy default stream waits for; torch makes none."""
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(handle), 0) == 0
    yield torch.cuda.ExternalStream(handle.value)
    torch.cuda.synchronize()
    assert driver.cuStreamDestroy_v2(handle) == 0


def test_legacy_stream_orders_blocking_streams(blocking_stream: Stream) -> None:
    x = fill(blocking_stream)
    for _ in range(3):
        x.add_(1)
        with on(blocking_stream):
            x.mul_(2)
    assert x.sum().item() == SIZE * 22
    assert races() == []


# ---- pinned memory and other devices


def test_copy_to_pinned_memory_is_seen() -> None:
    host, side = torch.zeros(SIZE, pin_memory=True), Stream()
    x = fill(side)
    with on(side):
        host.copy_(x, non_blocking=True)
    y = torch.empty(SIZE, device="cuda").copy_(host, non_blocking=True)
    (report,) = races()
    assert report.earlier is not None
    assert report.later is not None
    assert (report.earlier.operation, report.later.operation) == ("cudaMemcpyAsync", "cudaMemcpyAsync")
    torch.cuda.synchronize()
    del y


def test_copy_from_pinned_memory_is_seen() -> None:
    host, side, x = torch.zeros(SIZE, pin_memory=True), Stream(), torch.ones(SIZE, device="cuda")
    with on(side):
        y = torch.empty(SIZE, device="cuda").copy_(host, non_blocking=True)
    host.copy_(x, non_blocking=True)
    (report,) = races()
    assert "that cudaMemcpyAsync" in report.summary
    torch.cuda.synchronize()
    del y


def test_reused_pinned_memory_is_no_race() -> None:
    x = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    for _ in range(4):
        host = torch.empty(SIZE, pin_memory=True)
        with on(Stream()):
            host.copy_(x, non_blocking=True)
        del host  # torch waits for an event before it hands the memory out again
    torch.cuda.synchronize()
    assert races() == []


@pytest.mark.parametrize("waits", [True, False])
def test_device_copy_is_ordered_on_source_stream(waits: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    there = Stream("cuda:1")
    x = fill(there, device="cuda:1")
    target = torch.empty(SIZE, device="cuda:0")
    if waits:
        torch.cuda.current_stream("cuda:1").wait_stream(there)
    target.copy_(x, non_blocking=True)  # torch orders the two devices' current streams
    target.sum()
    assert len(races()) == (0 if waits else 1)


# ---- memory that is used again


@pytest.mark.parametrize("recorded", [True, False])
def test_reuse_without_record_stream_is_race(recorded: bool) -> None:
    producer, consumer = Stream(), Stream()
    x = fill(producer)
    address = x.data_ptr()
    consumer.wait_stream(producer)
    with fakecuda.hold(consumer), on(consumer):
        total = x.sum()
        if recorded:
            x.record_stream(consumer)
        del x
        other = fill(producer, 2.0)
    assert (other.data_ptr() == address) is not recorded
    found = races()
    if recorded:
        assert found == []
        return
    (report,) = found
    assert report.kind == "race"  # the runtime does not know that torch's allocator handed the memory out again
    assert report.earlier is not None
    assert report.later is not None
    assert (report.earlier.operation, report.later.operation) == ("aten::sum", "aten::fill_")
    del total


def test_memory_reused_by_driver_is_no_race() -> None:
    for _ in range(3):
        x = fill(Stream())
        del x
        torch.cuda.empty_cache()
    assert races() == []


# ---- graphs


def test_graph_operations_race_at_replay() -> None:
    x = torch.zeros(SIZE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    assert races() == []  # nothing has run
    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        graph.replay()
    x.sum()
    (report,) = races()
    assert report.earlier is not None
    assert report.earlier.operation == "aten::add_"
    assert report.earlier.stack[-1].endswith("in test_graph_operations_race_at_replay")
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    assert x.sum().item() == 2 * SIZE
    assert races() == []


def test_joined_capture_streams_order_replay() -> None:
    x, graph = torch.zeros(SIZE, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side = Stream()
        side.wait_stream(torch.cuda.current_stream())
        with on(side):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        y = x * 2
    graph.replay()
    assert y.sum().item() == 2 * SIZE
    assert races() == []


# ---- without race detection


def test_races_needs_race_detection() -> None:
    program = """
        import torch
        from cudafuture.testing import fakecuda
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(4, device="cuda")
        x.sum()
        try:
            fakecuda.races()
        except RuntimeError as e:
            print(e)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    variables = fakecuda.environment(devices=1, races=False)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=100)
    assert done.stderr == ""
    assert "does not detect races; run: python -m cudafuture.testing.fakecuda --races" in done.stdout
