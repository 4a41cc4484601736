"""Virtual time: what overlaps and what does not, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cudafuture.testing import sim

pytestmark = pytest.mark.sim(devices=2)

SPEEDS = sim.Speeds(compute=1e9, copy=1e9, launch=0)
MB = 250_000  # floats


@pytest.fixture(autouse=True)
def _speeds() -> None:
    sim.set_speeds(SPEEDS)


def measure(work: Callable[[], object]) -> float:
    """Return how many virtual milliseconds pass until the work is done."""
    begin = sim.clock()
    work()
    sim.synchronize()
    return (sim.clock() - begin) * 1e3


def test_delay_takes_its_duration() -> None:
    assert measure(lambda: sim.sleep(ms=2.5)) == pytest.approx(2.5)


def test_work_on_one_stream_adds_up() -> None:
    def work() -> None:
        sim.sleep(ms=1)
        sim.sleep(ms=2)

    assert measure(work) == pytest.approx(3)


def test_work_on_two_streams_overlaps() -> None:
    def work() -> None:
        sim.sleep(ms=1)
        sim.sleep(ms=2, stream=torch.Stream("sim:0"))

    assert measure(work) == pytest.approx(2)


def test_waiting_stream_begins_later() -> None:
    def work() -> None:
        side = torch.Stream("sim:0")
        sim.sleep(ms=1)
        side.wait_stream(torch.accelerator.current_stream())
        sim.sleep(ms=2, stream=side)

    assert measure(work) == pytest.approx(3)


def test_copy_time_depends_on_bytes() -> None:
    pinned = torch.zeros(MB).pin_memory()
    assert measure(lambda: pinned.to("sim:0", non_blocking=True)) == pytest.approx(1)


def test_copies_in_one_direction_share_engine() -> None:
    pinned = torch.zeros(MB).pin_memory()

    def work() -> None:
        for stream in (torch.Stream("sim:0"), torch.Stream("sim:0")):
            with stream:
                pinned.to("sim:0", non_blocking=True)

    assert measure(work) == pytest.approx(2)


def test_copies_in_both_directions_overlap() -> None:
    upload, download = torch.zeros(MB).pin_memory(), torch.zeros(MB).pin_memory()
    on_device = torch.zeros(MB, device="sim:0")
    sim.synchronize()

    def work() -> None:
        with torch.Stream("sim:0"):
            upload.to("sim:0", non_blocking=True)
        with torch.Stream("sim:0"):
            download.copy_(on_device, non_blocking=True)

    assert measure(work) == pytest.approx(1)


def test_copy_and_kernel_overlap() -> None:
    pinned = torch.zeros(MB).pin_memory()

    def work() -> None:
        sim.sleep(ms=3)
        with torch.Stream("sim:0"):
            pinned.to("sim:0", non_blocking=True)

    assert measure(work) == pytest.approx(3)


def test_host_continues_during_device_work() -> None:
    begin = sim.clock()
    sim.sleep(ms=2)
    assert sim.clock() == begin
    sim.spend(ms=1.5)
    assert sim.clock() == pytest.approx(begin + 1.5e-3)
    sim.synchronize()
    assert sim.clock() == pytest.approx(begin + 2e-3)


def test_work_begins_at_enqueue() -> None:
    def work() -> None:
        sim.spend(ms=1)
        sim.sleep(ms=1)

    assert measure(work) == pytest.approx(2)


def test_one_stream_can_be_slower() -> None:
    slow = torch.Stream("sim:0")
    sim.set_speeds(sim.Speeds(compute=1e9, copy=5e8, launch=0), slow)
    pinned = torch.zeros(MB).pin_memory()

    def work() -> None:
        with slow:
            pinned.to("sim:0", non_blocking=True)

    assert measure(work) == pytest.approx(2)


def test_events_measure_time() -> None:
    begin, end = torch.Event("sim:0", enable_timing=True), torch.Event("sim:0", enable_timing=True)
    begin.record()
    sim.sleep(ms=4)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(4)


@pytest.mark.parametrize("schedule", ["free", "jitter", "lazy"])
def test_time_ignores_schedule(schedule: sim.Schedule) -> None:
    sim.enable(devices=2, schedule=schedule, seed=5, speeds=SPEEDS)

    def work() -> None:
        pinned = torch.zeros(MB).pin_memory()
        side = torch.Stream("sim:0")
        with side:
            x = pinned.to("sim:0", non_blocking=True)
        torch.accelerator.current_stream().wait_stream(side)
        x.add_(1)
        x.record_stream(torch.accelerator.current_stream())

    assert measure(work) == pytest.approx(1 + 2)  # add_ reads and writes 1 MB
