"""wait(), ready() and their like, while the device is at work."""

from __future__ import annotations

import threading

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, wait_all
from support.harness import OTHER_THREAD, PRIORITIES, Device


@pytest.mark.parametrize("consumer", ["default", *PRIORITIES], ids=str)
def test_the_current_stream_is_ordered_after_the_value(device: Device, consumer: str | int) -> None:
    future = device.complete(2.0)
    with device.on(None if isinstance(consumer, str) else device.stream(consumer)):
        assert device.read(future.wait(non_blocking=True)) == 2.0


@pytest.mark.parametrize("consumer", ["default", *PRIORITIES], ids=str)
def test_after_a_blocking_wait_any_stream_may_read(device: Device, consumer: str | int) -> None:
    x = device.complete(2.0).wait()
    with device.on(None if isinstance(consumer, str) else device.stream(consumer)):
        assert device.read(x) == 2.0


def test_a_non_blocking_wait_does_not_wait_for_the_device(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        x = future.wait(non_blocking=True)
        assert not future.ready()
    assert accelerator.read(x) == 2.0


def test_a_blocking_wait_waits_for_the_device(accelerator: Device) -> None:
    future = accelerator.complete(2.0)
    future.wait()
    assert future.events[accelerator.at()].query()


def test_after_a_blocking_wait_the_host_may_read(device: Device) -> None:
    host = device.make_pinned()
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    side = device.stream()
    with device.on(side):
        x = device.produce(3.0)
        host.copy_(x, non_blocking=True)
        future.set_result(host, tensors=[x])
    assert future.wait().sum().item() == 3.0 * host.numel()


def test_once_it_is_ready_the_host_may_read(device: Device) -> None:
    host = device.make_pinned()
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    with device.on(device.stream()):
        x = device.produce(3.0)
        host.copy_(x, non_blocking=True)
        future.set_result(host, tensors=[x])
    while not future.ready():
        pass
    assert future.value().sum().item() == 3.0 * host.numel()


def test_result_and_exception_wait_for_the_device_too(accelerator: Device) -> None:
    for look in (CUDAFuture.result, CUDAFuture.exception):
        future = accelerator.complete(2.0)
        look(future)
        assert future.events[accelerator.at()].query()


def test_it_is_done_before_it_is_ready(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        assert (future.done(), future.ready()) == (True, False)
    future.wait()
    assert (future.done(), future.ready()) == (True, True)


def test_a_timeout_counts_the_device_too(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        with pytest.raises(TimeoutError, match="device work has not finished"):
            future.wait(timeout=0.001)
        with pytest.raises(TimeoutError, match="device work has not finished"):
            future.exception(timeout=0)
    assert accelerator.read(future.wait(timeout=60)) == 2.0


def test_a_non_blocking_wait_has_no_timeout_for_the_device(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        x = accelerator.complete(2.0, stream=side).wait(non_blocking=True, timeout=0)
    assert accelerator.read(x) == 2.0


def test_value_orders_nothing_and_needs_no_device(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        assert future.value().device == accelerator.at()
    side.synchronize()
    assert accelerator.read(future.value()) == 2.0


def test_value_of_a_pending_future_is_refused(device: Device) -> None:
    with pytest.raises(InvalidStateError):
        CUDAFuture[torch.Tensor](devices=[device.at()]).value()


def test_each_stream_that_reads_waits_for_itself(device: Device) -> None:
    future = device.complete(2.0)
    for priority in PRIORITIES * 2:
        with device.on(device.stream(priority)):
            assert device.read(future.wait(non_blocking=True)) == 2.0


def test_waiting_twice_changes_nothing(device: Device) -> None:
    future = device.complete(2.0)
    assert future.wait() is future.wait(non_blocking=True) is future.wait() is future.value()


def test_the_value_of_two_devices_is_waited_for_on_both(pair: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    with pair.stream(index=0), pair.stream(index=1):
        future.set_result([pair.produce(float(i), i) for i in (0, 1)])
    assert [pair.read(x) for x in future.wait(non_blocking=True)] == [0.0, 1.0]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_value_on_a_device_that_is_not_current(pair: Device, non_blocking: bool) -> None:
    future = pair.complete(2.0, 1)
    assert pair.current_index() == 0
    x = future.wait(non_blocking=non_blocking)
    assert pair.current_index() == 0
    assert pair.read(x) == 2.0


@OTHER_THREAD
def test_the_thread_that_waits_is_ordered_and_no_other(device: Device) -> None:
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


def test_work_that_follows_the_wait_may_change_the_value(device: Device) -> None:
    future = device.complete(2.0)
    with device.on(device.stream()):
        x = future.wait(non_blocking=True)
        x.add_(1)
        assert device.read(x) == 3.0


def test_a_blocking_wait_inside_a_capture_is_refused(accelerator: Device) -> None:
    future, x = accelerator.complete(2.0), accelerator.empty()
    future.wait()
    with accelerator.capture():
        x.fill_(1)
        with pytest.raises(InvalidStateError, match="capture"):
            future.wait()


def test_what_was_enqueued_before_completion_on_another_stream_is_not_covered(accelerator: Device) -> None:
    """The producer says where its work is; the library does not guess."""
    side = accelerator.stream()
    with accelerator.hold(side):
        with side:
            accelerator.produce(1.0)
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        future.set_result(accelerator.produce(2.0))
        assert accelerator.read(future.wait(non_blocking=True)) == 2.0
