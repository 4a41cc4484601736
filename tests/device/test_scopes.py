"""The current device and stream in a callback that changes them, and after it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, current_streams, pool_stream, submit, use_streams
from support.harness import PRIORITIES, Device

Future = CUDAFuture[torch.Tensor]


def test_result_follows_final_callback_stream(accelerator: Device) -> None:
    def callback(done: Future) -> torch.Tensor:
        side = accelerator.stream()
        side.wait_stream(accelerator.current())
        torch.accelerator.set_stream(side)  # and leaves it so
        accelerator.delay()
        return done.value() * 2

    child = accelerator.complete(3.0).then(callback)
    with accelerator.stream():
        assert accelerator.read(child.wait(non_blocking=True)) == 6.0


def test_callback_stream_does_not_stay_current(accelerator: Device) -> None:
    before = accelerator.current()
    accelerator.complete(3.0).then(lambda _: torch.accelerator.set_stream(accelerator.stream()))
    assert accelerator.current() == before


def test_callback_must_join_temporary_stream(accelerator: Device) -> None:
    def callback(done: Future) -> torch.Tensor:
        side = accelerator.stream()
        side.wait_stream(accelerator.current())
        with side:
            y = done.value() * 2
        accelerator.current().wait_stream(side)
        return y

    child = accelerator.complete(3.0).then(callback)
    with accelerator.stream():
        assert accelerator.read(child.wait(non_blocking=True)) == 6.0


def test_callback_device_does_not_stay_current(pair: Device) -> None:
    event = pair.current(0).record_event()
    pair.complete(3.0).then(lambda _: torch.accelerator.set_device_index(pair.index(1)))
    event.synchronize()  # whose device must be current
    assert pair.current_index() == 0


def test_device_inside_use_streams_does_not_stay(pair: Device) -> None:
    event = pair.current(0).record_event()
    with use_streams(pair.stream()):
        torch.accelerator.set_device_index(pair.index(1))
    event.synchronize()  # whose device must be current
    assert pair.current_index() == 0


def test_callback_has_device_of_caller(pair: Device) -> None:
    future: CUDAFuture[None] = CUDAFuture()
    with pair.select(1):
        event: Any = pair.current(1).record_event()
        child = future.then(lambda _: event.synchronize() or pair.current_index())
        submitted = submit(pair.current_index)
    thread = threading.Thread(target=future.set_result, args=(None,))  # its current device is 0
    thread.start()
    thread.join()
    assert child.wait() == 1
    assert submitted.wait() == 1
    assert pair.current_index() == 0
    with pair.select(1):
        event = None  # torch's own event: its user selects the device


def test_done_callback_carries_no_device(pair: Device) -> None:
    future: CUDAFuture[None] = CUDAFuture()
    seen: list[int] = []
    with pair.select(1):
        future.add_done_callback(lambda _: seen.append(pair.current_index()))
    future.set_result(None)
    assert seen == [0]


def test_callback_may_return_value_elsewhere(pair: Device) -> None:
    def callback(done: Future) -> torch.Tensor:
        torch.accelerator.set_device_index(pair.index(1))
        return done.value().to(pair.name, non_blocking=True) + 1

    child = pair.complete(3.0).then(callback)
    assert child.devices == (pair.at(1),)
    with pair.stream(index=1):
        assert pair.read(child.wait(non_blocking=True)) == 4.0


def test_raising_callback_leaves_nothing_behind(pair: Device) -> None:
    def callback(_: Future) -> None:
        torch.accelerator.set_device_index(pair.index(1))
        torch.accelerator.set_stream(pair.stream(index=1))
        raise KeyError("no")

    before = [pair.current(i) for i in (0, 1)]
    child = pair.complete(3.0).then(callback)
    assert isinstance(child.exception(), KeyError)
    assert pair.current_index() == 0
    assert pair.current(0) == before[0]


def test_callback_may_complete_own_futures(accelerator: Device) -> None:
    inner = Future()
    grandchild = inner.then(lambda done: done.value() + 1)

    def callback(done: Future) -> None:
        inner.set_result(done.value() * 2)

    accelerator.complete(3.0).then(callback)
    with accelerator.stream():
        assert accelerator.read(grandchild.wait(non_blocking=True)) == 7.0


def test_callback_may_wait_for_future(device: Device) -> None:
    other = device.complete(10.0)
    child = device.complete(3.0).then(lambda done: done.value() + other.wait(non_blocking=True))
    with device.on(device.stream()):
        assert device.read(child.wait(non_blocking=True)) == 13.0


def test_callback_may_block_for_future(device: Device) -> None:
    other = device.complete(10.0)
    child = device.complete(3.0).then(lambda done: done.value() + other.wait())
    with device.on(device.stream()):
        assert device.read(child.wait(non_blocking=True)) == 13.0


def test_other_thread_recovers_its_streams(accelerator: Device) -> None:
    future = Future()
    future.then(lambda _: torch.accelerator.set_stream(accelerator.stream()))
    seen: list[torch.Stream] = []

    def complete() -> None:
        future.set_result(accelerator.produce(1.0))
        seen.append(accelerator.current())

    thread = threading.Thread(target=complete)
    thread.start()
    thread.join()
    assert [accelerator.priority_of(s) for s in seen] == [None]


# ---- use_streams()


def test_streams_are_current_in_scope(accelerator: Device) -> None:
    side, before = accelerator.stream(-1), accelerator.current()
    with use_streams(side):
        assert accelerator.current() == side
    assert accelerator.current() == before


def test_streams_of_two_devices_are_current(pair: Device) -> None:
    sides = [pair.stream(index=i) for i in (0, 1)]
    with use_streams(*sides):
        assert current_streams([pair.at(0), pair.at(1)]) == sides
        assert pair.current_index() == 0


def test_scopes_nest_and_repeat(accelerator: Device) -> None:
    first, second = accelerator.stream(), accelerator.stream()
    scope = use_streams(first)
    with scope:
        with use_streams(second), scope:
            assert accelerator.current() == first
        assert accelerator.current() == first


def test_exception_leaves_scope(accelerator: Device) -> None:
    before = accelerator.current()
    with pytest.raises(KeyError), use_streams(accelerator.stream()):
        raise KeyError
    assert accelerator.current() == before


def test_scope_restores_changed_streams(pair: Device) -> None:
    before = pair.current(0)
    with use_streams(pair.stream(index=0)):
        torch.accelerator.set_stream(pair.stream(index=0))
        torch.accelerator.set_device_index(pair.index(1))
    assert pair.current(0) == before
    assert pair.current_index() == 0


def test_work_after_scope_follows_earlier_work(accelerator: Device) -> None:
    x = accelerator.produce(1.0)
    with use_streams(accelerator.stream()):
        pass
    assert accelerator.read(x.add_(1)) == 2.0


def test_result_set_in_scope_is_ordered(accelerator: Device) -> None:
    future = Future()
    with use_streams(accelerator.stream()):
        future.set_result(accelerator.produce(5.0))
    assert accelerator.read(future.wait(non_blocking=True)) == 5.0


@pytest.mark.parametrize("priority", PRIORITIES)
def test_pool_streams_have_requested_priority(accelerator: Device, priority: int) -> None:
    stream = pool_stream(accelerator.at(), priority)
    assert stream.device == accelerator.at()
    assert accelerator.priority_of(stream) == priority


def test_host_has_no_streams(device: Device) -> None:
    with pytest.raises(ValueError, match="no streams on cpu"):
        pool_stream("cpu")
    assert current_streams(["cpu"]) == []


@pytest.mark.parametrize("wrong", [7, "pool", None], ids=repr)
def test_other_objects_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        use_streams(wrong, wrong)
