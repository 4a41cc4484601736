"""Streams, events and devices, as torch's own classes show them; holding streams back, and work that fails."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from cudafuture import own_stream
from cudafuture.testing import sim

pytestmark = pytest.mark.sim(devices=2, schedule="lazy")


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def test_torch_knows_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_device_index() == 0
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="sim").device == torch.device("sim:1")
    with pytest.raises(IndexError, match="sim:2"):
        torch.accelerator.set_device_index(2)


def test_pool_has_32_streams_per_priority() -> None:
    for priority in (0, -1, -2):
        streams = {torch.Stream("sim", priority=priority).stream_id for _ in range(100)}
        assert len(streams) == 32
        assert 0 not in streams


def test_block_restores_current_stream() -> None:
    before = current()
    side = torch.Stream("sim:0")
    with side:
        assert current() == side
    assert current() == before
    assert before.stream_id == 0


def test_current_streams_belong_to_their_thread() -> None:
    seen = []
    with torch.Stream("sim:0"):
        thread = threading.Thread(target=lambda: seen.append(current().stream_id))
        thread.start()
        thread.join()
    assert seen == [0]


def test_unrecorded_event_is_reached() -> None:
    event = torch.Event("sim")
    assert event.query()
    event.synchronize()
    event.wait()


def test_held_stream_waits_alone() -> None:
    side = torch.Stream("sim:0")
    with sim.hold(side):
        sim.sleep(1, side)
        assert not side.query()
        assert not side.query()
        sim.sleep(1)
        current().synchronize()
        assert current().query()
        assert not side.query()
    side.synchronize()
    assert side.query()


def test_other_thread_wakes_held_host() -> None:
    held = sim.hold()
    x = torch.ones(4, device="sim")
    about_to_wait = threading.Event()
    got: list[float] = []

    def wait() -> None:
        about_to_wait.set()
        got.append(x.sum().item())

    thread = threading.Thread(target=wait)
    thread.start()
    about_to_wait.wait()
    held.open()
    thread.join()
    assert got == [4]


def test_dropped_hold_opens() -> None:
    held = sim.hold()
    sim.sleep(1)
    del held
    sim.synchronize()
    assert current().query()


def test_hold_may_be_opened_twice() -> None:
    held = sim.hold()
    held.open()
    held.open()
    sim.synchronize()
    assert current().query()


def test_failing_work_breaks_its_device() -> None:
    sim.fail("the memory has a broken bit")
    for _ in range(2):
        with pytest.raises(sim.DeviceError, match="broken bit"):
            sim.synchronize("sim:0")
    with pytest.raises(RuntimeError, match="broken bit"):
        current().query()
    sim.synchronize("sim:1")
    sim.clear_error("sim:0")
    sim.synchronize()
    assert torch.ones(4, device="sim:0").sum().item() == 4


def test_waiters_see_broken_device() -> None:
    event = torch.Event("sim:0")
    sim.fail("gone")
    event.record()
    with pytest.raises(RuntimeError, match="gone"):
        event.synchronize()
    sim.clear_error("sim:0")


def test_operation_kernel_can_fail() -> None:
    index = torch.tensor([5], device="sim")
    torch.zeros(3, device="sim").index_select(0, index)
    with pytest.raises(sim.DeviceError, match="index out of range"):
        sim.synchronize()
    sim.clear_error()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="devices=9"):
        sim.enable(devices=9)
    with pytest.raises(ValueError, match="schedule='slow'"):
        sim.enable(schedule="slow")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cpu"):
        sim.synchronize("cpu")
    with pytest.raises(ValueError, match="sim:5"):
        sim.clear_error(5)
    with pytest.raises(ValueError, match="ms=-1"):
        sim.sleep(-1)
    with pytest.raises(ValueError, match="ms=nan"):
        sim.spend(float("nan"))
    with pytest.raises(ValueError, match="bytes per second"):
        sim.Speeds(copy=0)
    with pytest.raises(TypeError):
        sim.enable(seed="x")  # type: ignore[arg-type]
    sim.disable()
    for use in (sim.synchronize, sim.hold, lambda: sim.sleep(1), lambda: sim.fail("")):
        with pytest.raises(RuntimeError, match=r"sim\.enable"):
            use()
    assert not sim.is_enabled()
    assert torch.accelerator.device_count() == 0
    sim.enable()


def test_restart_drops_queued_work() -> None:
    held = sim.hold()
    x = torch.ones(4, device="sim")
    x.add_(1)
    sim.enable(schedule="lazy")
    assert sim.statistics().executed == 0
    assert torch.ones(2, device="sim").tolist() == [1, 1]
    assert current().query()
    held.open()
    del x


def test_streams_of_garbage_are_used_again() -> None:
    kept: list[torch.Stream] = []
    with pytest.raises(RuntimeError, match="cannot make more"):
        kept.extend(own_stream("sim") for _ in range(100))
    for stream in kept:
        cycle: list[object] = [stream]
        cycle.append(cycle)
    gc.disable()
    try:
        count = len(kept)
        kept.clear()
        del stream, cycle
        assert len([own_stream("sim") for _ in range(count)]) == count
    finally:
        gc.enable()
