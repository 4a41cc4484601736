"""One event for each device of a value, and what can be done with it."""

from __future__ import annotations

import gc

import pytest
import torch

from cudafuture import CUDAFuture
from support.harness import Device


def test_value_on_one_device_has_one_event(device: Device) -> None:
    future = device.complete(1.0)
    expected = [device.at()] if device.has_streams else []
    assert (list(future.events), list(future.devices)) == (expected, expected)


def test_tensors_share_event_of_device(device: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    future.set_result([device.produce(float(i)) for i in range(5)])
    assert len(future.events) == int(device.has_streams)


def test_value_on_two_devices_has_two_events(pair: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    future.set_result([pair.produce(1.0, 1), pair.produce(2.0, 0)])
    assert sorted(future.events, key=str) == [pair.at(0), pair.at(1)]
    assert all(future.events[d].device == d for d in future.events)


@pytest.mark.parametrize("value", [None, 3, "text", [1.0, {"a": 2}]], ids=repr)
def test_value_without_tensors_has_no_event(device: Device, value: object) -> None:
    assert dict(CUDAFuture.completed(value).events) == {}


def test_host_tensor_needs_no_event(accelerator: Device) -> None:
    assert dict(CUDAFuture.completed(torch.ones(3)).events) == {}


def test_empty_tensor_has_event(accelerator: Device) -> None:
    assert list(CUDAFuture.completed(torch.empty(0, device=accelerator.at())).events) == [accelerator.at()]


def test_event_is_pending_until_reached(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        event = accelerator.complete(1.0, stream=side).events[accelerator.at()]
        assert not event.query()
        assert repr(event) == f"<EventView of {accelerator.at()}: pending>"
    event.synchronize()
    assert event.query()
    assert repr(event) == f"<EventView of {accelerator.at()}: reached>"


def test_polling_event_ends(accelerator: Device) -> None:
    future = accelerator.complete(1.0)
    event = future.events[accelerator.at()]
    while not event.query():
        pass
    assert future.ready()


def test_synchronized_host_may_read(accelerator: Device) -> None:
    host = accelerator.make_pinned()
    future: CUDAFuture[None] = CUDAFuture()
    side = accelerator.stream()
    with side:
        host.copy_(accelerator.produce(3.0), non_blocking=True)
        future.set_result(None, stream=side)
    future.events[accelerator.at()].synchronize()
    assert host.sum().item() == 3.0 * host.numel()


def test_waiting_stream_may_read(accelerator: Device) -> None:
    future = accelerator.complete(4.0)
    consumer = accelerator.stream()
    future.events[accelerator.at()].wait(consumer)
    with consumer:
        assert accelerator.read(future.value()) == 4.0


def test_current_stream_waits_by_default(accelerator: Device) -> None:
    future = accelerator.complete(4.0)
    with accelerator.stream():
        future.events[accelerator.at()].wait()
        assert accelerator.read(future.value()) == 4.0


def test_several_streams_wait_for_one_event(accelerator: Device) -> None:
    future = accelerator.complete(4.0)
    consumers = [accelerator.stream() for _ in range(3)]
    future.events[accelerator.at()].wait(consumers)
    for consumer in consumers:
        with consumer:
            assert accelerator.read(future.value()) == 4.0


def test_stream_of_other_device_can_wait(pair: Device) -> None:
    future = pair.complete(4.0, 1)
    future.events[pair.at(1)].wait(pair.current(0))
    copied = future.value().to(pair.at(0), non_blocking=True)
    assert pair.read(copied) == 4.0


def test_torch_event_is_reached_with_ours(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(4.0, stream=side)
        event = future.events[accelerator.at()].to_torch_event()
        assert event.device == accelerator.at()
        assert not event.query()
    event.synchronize()
    assert future.ready()


def test_stream_waiting_for_torch_event_may_read(accelerator: Device) -> None:
    future = accelerator.complete(4.0)
    event = future.events[accelerator.at()].to_torch_event()
    consumer = accelerator.stream()
    consumer.wait_event(event)
    with consumer:
        assert accelerator.read(future.value()) == 4.0


def test_torch_event_ignores_current_device(pair: Device) -> None:
    future = pair.complete(4.0, 1)
    event = future.events[pair.at(1)].to_torch_event()
    with pair.select(1):  # torch's own event: its user selects the device
        pair.current(1).wait_event(event)
    assert pair.read(future.value()) == 4.0
    with pair.select(1):
        del event  # torch's own: the program that drops it selects the device


def test_events_cannot_be_changed(accelerator: Device) -> None:
    events = accelerator.complete(1.0).events
    with pytest.raises(TypeError):
        events[accelerator.at()] = None  # type: ignore[index]


def test_event_outlives_its_future(accelerator: Device) -> None:
    future = accelerator.complete(4.0)
    event, x = future.events[accelerator.at()], future.value()
    del future
    gc.collect()
    event.wait()
    assert accelerator.read(x) == 4.0


def test_events_are_used_again(accelerator: Device) -> None:
    from cudafuture import _C

    for _ in range(3):
        accelerator.complete(1.0).wait()
    before = _C.statistics()["events_made"]
    for _ in range(10):
        assert accelerator.complete(2.0).wait() is not None
    assert _C.statistics()["events_made"] == before


def test_reused_event_forgets_earlier_use(accelerator: Device) -> None:
    accelerator.complete(1.0).wait()
    side = accelerator.stream()
    with accelerator.hold(side):
        assert not accelerator.complete(2.0, stream=side).ready()


def test_waiting_stream_ignores_later_work(accelerator: Device) -> None:
    side = accelerator.stream()
    future = accelerator.complete(4.0, stream=side)
    with accelerator.hold(side), accelerator.stream():
        assert accelerator.read(future.wait(non_blocking=True)) == 4.0
