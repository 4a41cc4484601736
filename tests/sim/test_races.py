"""Races that the detector finds, and programs in which it must find none."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.testing import sim

pytestmark = pytest.mark.sim(devices=2, schedule="lazy")


def reports() -> list[sim.Report]:
    """Return the reports, oldest first."""
    return sim.races()


def kinds() -> list[str]:
    return [report.kind for report in reports()]


def fill(stream: torch.Stream, value: float = 1.0) -> torch.Tensor:
    """Return a tensor that is allocated and written on a stream."""
    with stream:
        return torch.full((256,), value, device=stream.device)


def current(device: str = "sim:0") -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(device))


def test_read_without_wait_is_race() -> None:
    x = fill(torch.Stream("sim:0"))
    x.sum()
    (report,) = reports()
    assert report.kind == "race"
    assert report.earlier is not None
    assert report.later is not None
    assert "test_races.py" in report.earlier.stack[-1]
    assert "in fill" in report.earlier.stack[-1]
    assert "in test_read_without_wait_is_race" in report.later.stack[-1]
    assert "sim:0" in report.summary


def test_write_over_read_is_race() -> None:
    x = torch.zeros(256, device="sim:0")
    side = torch.Stream("sim:0")
    side.wait_stream(current())
    with side:
        x.sum()
    x.add_(1)
    (report,) = reports()
    assert report.kind == "race"
    assert report.later is not None
    assert report.later.operation == "aten::add"


def test_two_reads_are_no_race() -> None:
    x = torch.zeros(256, device="sim:0")
    side = torch.Stream("sim:0")
    side.wait_stream(current())
    with side:
        a = x.sum()
    b = x.sum()
    x.record_stream(side)
    sim.synchronize()
    assert a.item() == b.item() == 0


def test_waiting_stream_is_ordered() -> None:
    side = torch.Stream("sim:0")
    x = fill(side)
    current().wait_stream(side)
    assert x.sum().item() == 256


def test_event_orders_only_earlier_work() -> None:
    side = torch.Stream("sim:0")
    with side:
        x = torch.zeros(256, device="sim:0")
        event = torch.Event("sim:0")
        event.record()
        x.add_(1)
    event.wait(current())
    x.sum()
    (report,) = reports()
    assert report.earlier is not None
    assert report.earlier.operation == "aten::add"


def test_rerecorded_event_counts_as_waited() -> None:
    side = torch.Stream("sim:0")
    event = torch.Event("sim:0")
    x = fill(side)
    event.record(side)
    event.wait(current())
    with side:
        other = torch.full((256,), 2.0, device="sim:0")
    event.record(side)
    assert x.sum().item() == 256
    assert reports() == []
    other.sum()
    assert kinds() == ["race"]


def test_order_passes_through_third_stream() -> None:
    first, second = torch.Stream("sim:0"), torch.Stream("sim:0")
    x = fill(first)
    second.wait_stream(first)
    current().wait_stream(second)
    assert x.sum().item() == 256


def test_host_orders_streams_by_waiting() -> None:
    side = torch.Stream("sim:0")
    x = fill(side)
    side.synchronize()
    assert x.sum().item() == 256


def test_positive_query_orders() -> None:
    side = torch.Stream("sim:0")
    x = fill(side)
    event = torch.Event("sim:0")
    event.record(side)
    while not event.query():
        pass
    assert x.sum().item() == 256


def test_negative_query_orders_nothing() -> None:
    side = torch.Stream("sim:0")
    x = fill(side)
    event = torch.Event("sim:0")
    event.record(side)
    assert not event.query()
    x.sum()
    assert kinds() == ["race"]


def test_tensor_parts_are_distinguished() -> None:
    x = torch.zeros(256, device="sim:0")
    side = torch.Stream("sim:0")
    side.wait_stream(current())
    with side:
        x[:128].add_(1)
    x[128:].add_(2)
    current().wait_stream(side)
    assert x.sum().item() == 128 * 3


def test_early_memory_reuse_is_race() -> None:
    side = torch.Stream("sim:0")
    x = torch.zeros(256, device="sim:0")
    side.wait_stream(current())
    with side:
        x.sum()
    del x
    y = torch.empty(256, device="sim:0")
    (report,) = reports()
    assert report.kind == "reuse"
    assert "record_stream" in report.summary
    assert report.later is not None
    assert "test_early_memory_reuse_is_race" in report.later.stack[-1]
    del y


def test_record_stream_holds_memory_back() -> None:
    side = torch.Stream("sim:0")
    x = torch.zeros(256, device="sim:0")
    address = x.data_ptr()
    side.wait_stream(current())
    with side:
        total = x.sum()
    x.record_stream(side)
    del x
    y = torch.empty(256, device="sim:0")
    assert y.data_ptr() != address
    side.synchronize()
    z = torch.empty(256, device="sim:0")
    assert z.data_ptr() == address
    assert total.item() == 0


def test_own_stream_reuses_memory_immediately() -> None:
    x = torch.zeros(256, device="sim:0")
    address = x.data_ptr()
    total = x.sum()
    del x
    y = torch.ones(256, device="sim:0")
    assert y.data_ptr() == address
    assert total.item() == 0


def test_filling_pinned_source_is_race() -> None:
    pinned = torch.ones(256).pin_memory()
    x = pinned.to("sim:0", non_blocking=True)
    pinned.fill_(2)
    (report,) = reports()
    assert report.kind == "host_race"
    assert report.later is not None
    assert "fill_" in report.later.operation
    assert x.sum().item() == 512  # the effect of the bug


def test_reading_pinned_target_is_race() -> None:
    x = torch.ones(256, device="sim:0")
    pinned = torch.empty(256, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.sum().isnan()
    assert kinds() == ["host_race"]


def test_waiting_returns_pinned_memory_to_host() -> None:
    pinned = torch.ones(256).pin_memory()
    x = pinned.to("sim:0", non_blocking=True)
    current().synchronize()
    pinned.fill_(2)
    assert x.sum().item() == 256


def test_reading_source_of_copy_is_no_race() -> None:
    pinned = torch.ones(256).pin_memory()
    x = pinned.to("sim:0", non_blocking=True)
    assert pinned.sum().item() == 256
    assert x.sum().item() == 256


def test_devices_are_distinguished() -> None:
    x = torch.zeros(256, device="sim:0")
    y = x.to("sim:1")
    x.add_(1)
    assert y.sum().item() == 0


def test_race_is_reported_once() -> None:
    x = fill(torch.Stream("sim:0"))
    for _ in range(5):
        x.sum()
    assert kinds() == ["race"]


def test_repeated_tensor_races_once() -> None:
    x = fill(torch.Stream("sim:0"))
    x.add_(x)
    assert kinds() == ["race"]


def test_error_shows_both_places() -> None:
    with pytest.raises(sim.RaceError) as caught, sim.detect_races():
        fill(torch.Stream("sim:0")).sum()
    assert str(caught.value).count("test_races.py") >= 2
    assert "in fill" in str(caught.value)


def test_earlier_races_are_not_raised() -> None:
    fill(torch.Stream("sim:0")).sum()
    with sim.detect_races():
        pass
    assert reports() == []


@pytest.mark.parametrize("schedule", ["free", "jitter", "lazy"])
def test_every_schedule_finds_race(schedule: sim.Schedule) -> None:
    sim.enable(schedule=schedule, seed=3)
    fill(torch.Stream("sim:0")).sum()
    assert kinds() == ["race"]


def test_disabled_detection_finds_nothing() -> None:
    sim.enable(detect=False)
    fill(torch.Stream("sim:0")).sum()
    assert reports() == []
    with pytest.raises(RuntimeError, match="detect=True"), sim.detect_races():
        pass


def test_operations_on_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="sim:1"):
        torch.zeros(4, device="sim:0") + torch.zeros(4, device="sim:1")


def test_event_query_on_other_device_is_reported() -> None:
    sim.enable(devices=2, strict_devices=True)
    event = torch.Event("sim:1")
    with torch.accelerator.device_index(1):
        event.record(current("sim:1"))
    event.query()
    (report,) = reports()
    assert report.kind == "wrong_device"
    assert "sim:1" in report.summary
    with torch.accelerator.device_index(1):
        del event
    assert reports() == []


@pytest.mark.sim(devices=1, schedule="free")
def test_pool_stream_choice_hides_no_race() -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    future.set_result(torch.zeros(256, device="sim:0"))
    child = future.then(lambda done: done.value().add_(1))
    for _ in range(8):  # each looks for a stream whose work has finished
        future.then(lambda done: None)
    child.value().sum()  # without a wait
    assert kinds() == ["race"]


def race_and_fail() -> None:
    fill(torch.Stream("sim")).sum()
    raise ValueError("a wrong value")


def test_races_are_a_note_of_another_error() -> None:
    with pytest.raises(ValueError, match="a wrong value") as caught, sim.detect_races():
        race_and_fail()
    if sys.version_info >= (3, 11):
        assert "\n\nrace: aten::sum" in caught.value.__notes__[0]
    assert kinds() == ["race"]  # the program has caught the error
    assert kinds() == []


def race_disable_and_fail() -> None:
    fill(torch.Stream("sim")).sum()
    sim.disable()
    raise ValueError("a wrong value")


def test_error_survives_a_block_that_disables_the_devices() -> None:
    with pytest.raises(ValueError, match="a wrong value"), sim.detect_races():
        race_disable_and_fail()
    assert kinds() == ["race"]
    sim.enable()
    assert kinds() == []


def test_bytes_are_those_of_one_operation() -> None:
    side, buffers = torch.Stream("sim"), [torch.zeros(100, device="sim") for _ in range(2)]
    side.wait_stream(current())
    for round_ in range(6):
        with side:
            buffers[round_ % 2].fill_(1)
        buffers[round_ % 2].sum()
    assert {re.search(r"\d+ bytes", report.summary)[0] for report in reports()} == {"400 bytes"}  # type: ignore[index]
