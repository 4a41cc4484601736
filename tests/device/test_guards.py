"""A call on an event is made with the event's own device current: on CUDA another one would get a context by it."""

from __future__ import annotations

from typing import Any

import torch

from cudafuture import CUDAFuture, gather
from support.harness import Device

MANY = 1100  # more events than the pool keeps for a device


def test_completion_with_value_elsewhere_works(pair: Device) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    with pair.on(pair.stream(index=1)):
        x = pair.produce(1.0, 1)
    side = pair.stream(index=1)
    with pair.select(1):
        pair.finish()
    assert pair.current_index() == 0
    future.set_result(x, stream=side)
    assert future.devices == (pair.at(1),)


def test_query_of_other_device_works(pair: Device) -> None:
    future = pair.complete(1.0, 1)
    while not future.ready():
        pass
    assert future.events[pair.at(1)].query()
    assert pair.current_index() == 0


def test_synchronizing_with_other_device_works(pair: Device) -> None:
    future = pair.complete(1.0, 1)
    future.events[pair.at(1)].synchronize()
    assert future.ready()


def test_stream_waits_for_other_device(pair: Device) -> None:
    with pair.on(pair.stream(index=1)):
        future = pair.complete(1.0, 1)
        assert pair.current_index() == 1
    assert pair.current_index() == 0
    future.wait(non_blocking=True)
    assert pair.read(future.value()) == 1.0


def test_wait_for_other_device_works(pair: Device) -> None:
    x = pair.complete(1.0, 1).wait()
    assert pair.read(x) == 1.0


def test_blocking_callback_follows_work_elsewhere(pair: Device) -> None:
    side = pair.stream(index=1)
    with pair.hold(side):
        child = pair.complete(1.0, 1, stream=side).then(lambda done: done.value(), non_blocking=False)
    assert pair.read(child.wait()) == 1.0


def test_surplus_events_elsewhere_are_destroyed(pair: Device) -> None:
    x = pair.produce(1.0, 1)
    futures: list[CUDAFuture[Any]] = [CUDAFuture() for _ in range(MANY)]
    for future in futures:
        future.set_result(x)
    del futures, future
    assert pair.current_index() == 0


def test_torch_event_covers_other_device(pair: Device) -> None:
    event = pair.complete(1.0, 1).events[pair.at(1)].to_torch_event()
    assert event.device == pair.at(1)
    with pair.select(1):
        del event  # torch's own: the program that drops it selects the device


def test_gather_of_other_device_works(pair: Device) -> None:
    whole = gather(pair.complete(1.0, 1), pair.complete(2.0, 1))
    assert [pair.read(x) for x in whole.wait()] == [1.0, 2.0]
