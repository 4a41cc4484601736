"""Memory that a stream still uses is not handed out again, with three streams and with either lifetime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, collect_all, collect_any, gather
from support.harness import Device, Simulated

Future = CUDAFuture[Any]


def overwrite(device: Device, stream: torch.Stream | None) -> torch.Tensor:
    """Take memory of the same size again on the stream that had it, and fill it with something else."""
    with device.on(stream):
        return device.produce(-1.0)


def test_waiter_tells_allocator(device: Device) -> None:
    producer, consumer = device.stream(), device.stream()
    future = device.complete(2.0, stream=producer)
    with device.hold(consumer):
        with device.on(consumer):
            y = future.wait(non_blocking=True) * 3
        del future
        other = overwrite(device, producer)
    with device.on(consumer):
        assert device.read(y) == 6.0
    with device.on(producer):
        assert device.read(other) == -1.0


def test_callback_tells_allocator(device: Device) -> None:
    producer = device.stream()
    future = device.complete(2.0, stream=producer)
    child = future.then(lambda done: done.value() * 3)
    del future
    other = overwrite(device, producer)
    with device.on(device.stream()):
        assert device.read(child.wait(non_blocking=True)) == 6.0
    with device.on(producer):
        assert device.read(other) == -1.0


def test_done_callback_tells_allocator(device: Device) -> None:
    producer, consumer = device.stream(), device.stream()
    kept: list[torch.Tensor] = []
    with device.on(consumer):
        future = Future()
        future.then(lambda done: kept.append(done.value() * 3), stream="caller")
    with device.on(producer):
        future.set_result(device.produce(2.0))
    del future
    overwrite(device, producer)
    with device.on(consumer):
        assert device.read(kept[0]) == 6.0


@pytest.mark.parametrize("blocking", [False, True])
def test_three_streams_use_one_value(device: Device, blocking: bool) -> None:
    producer, second, third = device.stream(), device.stream(), device.stream(-1)
    future = device.complete(2.0, stream=producer)
    results = []
    for consumer in (second, third):
        with device.on(consumer):
            results.append(future.wait(non_blocking=not blocking) * 3)
    del future
    overwrite(device, producer)
    for consumer, y in zip((second, third), results, strict=True):
        with device.on(consumer):
            assert device.read(y) == 6.0


def test_hold_keeps_memory_until_join(device: Device) -> None:
    producer, second, third = device.stream(), device.stream(), device.stream()
    future = Future(lifetime="hold")
    with device.on(producer):
        future.set_result(device.produce(2.0))
    results = []
    for consumer in (second, third):
        with device.on(consumer):
            results.append(future.wait(non_blocking=True) * 3)
    overwrite(device, producer)  # the future is there, so this is other memory
    if producer is not None:
        producer.wait_stream(second)
        producer.wait_stream(third)
    del future
    overwrite(device, producer)
    for consumer, y in zip((second, third), results, strict=True):
        with device.on(consumer):
            assert device.read(y) == 6.0


@pytest.mark.parametrize(("lifetime", "deferred"), [("record", 1), ("hold", 0)])
def test_hold_bypasses_allocator(accelerator: Device, lifetime: Any, deferred: int) -> None:
    if not isinstance(accelerator, Simulated):
        pytest.skip("the allocator does not say what it holds back")
    future = Future(lifetime=lifetime)
    with accelerator.stream():
        future.set_result(accelerator.produce(2.0))
    with accelerator.stream() as consumer, accelerator.hold(consumer):
        future.wait(non_blocking=True)
        del future
        assert accelerator.sim.statistics().deferred_blocks == deferred


def test_child_does_not_inherit_hold(accelerator: Device) -> None:
    if not isinstance(accelerator, Simulated):
        pytest.skip("the allocator does not say what it holds back")
    future = Future(lifetime="hold")
    child = future.then(lambda done: done.value() * 3)  # memory of a pool stream that no stream joins
    with accelerator.stream():
        future.set_result(accelerator.produce(2.0))
    with accelerator.stream() as consumer, accelerator.hold(consumer):
        child.wait(non_blocking=True)
        del child
        assert accelerator.sim.statistics().deferred_blocks == 1


def test_unfindable_tensors_are_named(device: Device) -> None:
    producer, consumer = device.stream(), device.stream()
    future: CUDAFuture[Callable[[], torch.Tensor]] = CUDAFuture()
    with device.on(producer):
        x = device.produce(2.0)
        future.set_result(lambda x=x: x * 3, tensors=[x])  # type: ignore[misc]
        del x
    with device.on(consumer):
        y = future.wait(non_blocking=True)()
    del future
    overwrite(device, producer)
    with device.on(consumer):
        assert device.read(y) == 6.0


COMBINED: dict[str, Callable[[Future], Future]] = {
    "gather": lambda part: gather(part),
    "collect_any": lambda part: collect_any([part]),
    "then_async": lambda part: CUDAFuture.completed(None).then_async(lambda _: gather(part)),
}


@pytest.mark.parametrize("combined", COMBINED)
def test_named_tensors_go_along(device: Device, combined: str) -> None:
    producer, consumer = device.stream(), device.stream()
    part: CUDAFuture[Callable[[], torch.Tensor]] = CUDAFuture()
    with device.on(producer):
        x = device.produce(2.0)
        part.set_result(lambda x=x: x * 3, tensors=[x])  # type: ignore[misc]
        del x
    whole = COMBINED[combined](part)
    with device.on(consumer):
        value = whole.wait(non_blocking=True)
        y = value[-1]()
    del whole, part, value
    overwrite(device, producer)
    with device.on(consumer):
        assert device.read(y) == 6.0


def test_wait_all_records_every_tensor(device: Device) -> None:
    producer, consumer = device.stream(), device.stream()
    whole = collect_all([device.complete(2.0, stream=producer)])
    with device.on(consumer):
        y = whole.wait(non_blocking=True)[0].value() * 3
    del whole
    overwrite(device, producer)
    with device.on(consumer):
        assert device.read(y) == 6.0


@pytest.mark.parametrize("priority", [0, -1])
def test_gather_wait_records_every_tensor(device: Device, priority: int) -> None:
    producer, consumer = device.stream(), device.stream(priority)
    whole = gather(device.complete(2.0, stream=producer), device.complete(3.0, stream=producer))
    with device.on(consumer):
        x, y = whole.wait(non_blocking=True)
        z = x * y
    del whole, x, y
    overwrite(device, producer)
    overwrite(device, producer)
    with device.on(consumer):
        assert device.read(z) == 6.0


def test_replaced_tensor_is_followed(device: Device) -> None:
    producer, consumer = device.stream(), device.stream()
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    with device.on(producer):
        future.set_result([device.produce(1.0)])
        future.value()[0] = device.produce(2.0)
        future.value().append(device.produce(5.0))
        again: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
        again.set_result(future.value())
    with device.on(consumer):
        x, y = again.wait(non_blocking=True)
        z = x * y
    del future, again, x, y
    overwrite(device, producer)
    with device.on(consumer):
        assert device.read(z) == 10.0


def test_memory_returns_after_last_use(accelerator: Device) -> None:
    if not isinstance(accelerator, Simulated):
        pytest.skip("the allocator may take another block of that size")
    producer, consumer = accelerator.stream(), accelerator.stream()
    future = accelerator.complete(2.0, stream=producer)
    address = future.value().data_ptr()
    with consumer:
        y = future.wait(non_blocking=True) * 3
        assert accelerator.read(y) == 6.0
    del future
    torch.accelerator.synchronize()
    with producer:
        assert accelerator.empty().data_ptr() == address
