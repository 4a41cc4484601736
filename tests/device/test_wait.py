"""wait(), ready() and their like, while the device is at work."""

from __future__ import annotations

import threading

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, wait_all
from support.harness import OTHER_THREAD, PRIORITIES, Device


@pytest.mark.parametrize("consumer", ["default", *PRIORITIES], ids=str)
def test_current_stream_follows_value(device: Device, consumer: str | int) -> None:
    future = device.complete(2.0)
    with device.on(None if isinstance(consumer, str) else device.stream(consumer)):
        assert device.read(future.wait(non_blocking=True)) == 2.0


@pytest.mark.parametrize("consumer", ["default", *PRIORITIES], ids=str)
def test_any_stream_may_read_after_blocking(device: Device, consumer: str | int) -> None:
    x = device.complete(2.0).wait()
    with device.on(None if isinstance(consumer, str) else device.stream(consumer)):
        assert device.read(x) == 2.0


def test_non_blocking_wait_ignores_device(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        x = future.wait(non_blocking=True)
        assert not future.ready()
    assert accelerator.read(x) == 2.0


def test_blocking_wait_waits_for_device(accelerator: Device) -> None:
    future = accelerator.complete(2.0)
    future.wait()
    assert future.events[accelerator.at()].query()


def test_host_may_read_after_blocking_wait(device: Device) -> None:
    host = device.make_pinned()
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    side = device.stream()
    with device.on(side):
        x = device.produce(3.0)
        host.copy_(x, non_blocking=True)
        future.set_result(host, tensors=[x])
    assert future.wait().sum().item() == 3.0 * host.numel()


def test_host_may_read_ready_future(device: Device) -> None:
    host = device.make_pinned()
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    with device.on(device.stream()):
        x = device.produce(3.0)
        host.copy_(x, non_blocking=True)
        future.set_result(host, tensors=[x])
    while not future.ready():
        pass
    assert future.value().sum().item() == 3.0 * host.numel()


def test_result_and_exception_wait_for_device(accelerator: Device) -> None:
    for look in (CUDAFuture.result, CUDAFuture.exception):
        future = accelerator.complete(2.0)
        look(future)
        assert future.events[accelerator.at()].query()


def test_done_precedes_ready(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        assert (future.done(), future.ready()) == (True, False)
    future.wait()
    assert (future.done(), future.ready()) == (True, True)


def test_timeout_counts_device_too(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        with pytest.raises(TimeoutError, match="device work has not finished"):
            future.wait(timeout=0.001)
        with pytest.raises(TimeoutError, match="device work has not finished"):
            future.exception(timeout=0)
    assert accelerator.read(future.wait(timeout=60)) == 2.0


def test_non_blocking_wait_has_no_device_timeout(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        x = accelerator.complete(2.0, stream=side).wait(non_blocking=True, timeout=0)
    assert accelerator.read(x) == 2.0


def test_value_orders_nothing(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        assert future.value().device == accelerator.at()
    side.synchronize()
    assert accelerator.read(future.value()) == 2.0


def test_value_of_pending_future_is_refused(device: Device) -> None:
    with pytest.raises(InvalidStateError):
        CUDAFuture[torch.Tensor](devices=[device.at()]).value()


def test_each_reading_stream_waits_itself(device: Device) -> None:
    future = device.complete(2.0)
    for priority in PRIORITIES * 2:
        with device.on(device.stream(priority)):
            assert device.read(future.wait(non_blocking=True)) == 2.0


def test_waiting_twice_changes_nothing(device: Device) -> None:
    future = device.complete(2.0)
    assert future.wait() is future.wait(non_blocking=True) is future.wait() is future.value()


def test_wait_covers_values_on_two_devices(pair: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    with pair.stream(index=0), pair.stream(index=1):
        future.set_result([pair.produce(float(i), i) for i in (0, 1)])
    assert [pair.read(x) for x in future.wait(non_blocking=True)] == [0.0, 1.0]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_value_on_other_device_is_ordered(pair: Device, non_blocking: bool) -> None:
    future = pair.complete(2.0, 1)
    assert pair.current_index() == 0
    x = future.wait(non_blocking=non_blocking)
    assert pair.current_index() == 0
    assert pair.read(x) == 2.0


@OTHER_THREAD
def test_only_waiting_thread_is_ordered(device: Device) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    read: list[float] = []

    def consume() -> None:
        with device.on(device.stream()):
            read.append(device.read(future.wait(non_blocking=True)))

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    for thread in consumers:
        thread.start()
    with device.on(device.stream()):
        future.set_result(device.produce(2.0))
    for thread in consumers:
        thread.join()
    assert read == [2.0] * 3


def test_wait_all_waits_for_every_device(device: Device) -> None:
    futures = [device.complete(float(i)) for i in range(4)]
    values = wait_all(futures)
    assert all(f.ready() for f in futures)
    assert [device.read(x) for x in values] == [0.0, 1.0, 2.0, 3.0]


def test_work_after_wait_may_change_value(device: Device) -> None:
    future = device.complete(2.0)
    with device.on(device.stream()):
        x = future.wait(non_blocking=True)
        x.add_(1)
        assert device.read(x) == 3.0


def test_capture_refuses_blocking_wait(accelerator: Device) -> None:
    future, x = accelerator.complete(2.0), accelerator.empty()
    future.wait()
    with accelerator.capture():
        x.fill_(1)
        with pytest.raises(InvalidStateError, match="capture"):
            future.wait()


def test_earlier_work_elsewhere_is_not_covered(accelerator: Device) -> None:
    """The producer says where its work is; the library does not guess."""
    side = accelerator.stream()
    with accelerator.hold(side):
        with side:
            accelerator.produce(1.0)
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        future.set_result(accelerator.produce(2.0))
        assert accelerator.read(future.wait(non_blocking=True)) == 2.0
