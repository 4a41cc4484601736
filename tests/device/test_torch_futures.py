"""Futures of torch, both ways: the order of streams goes along."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from cudafuture import _C, CUDAFuture
from support.harness import OTHER_THREAD, Device

TorchFuture = torch.futures.Future


def theirs(device: Device) -> TorchFuture[Any]:
    return TorchFuture(devices=[device.at()] if device.has_streams else [])


def test_torch_value_is_ordered_here(device: Device) -> None:
    source = theirs(device)
    future = CUDAFuture.from_torch(source)
    with device.on(device.stream()):
        source.set_result(device.produce(2.0))
    with device.on(device.stream()):
        assert device.read(future.wait(non_blocking=True)) == 2.0


def test_ready_torch_value_is_ordered_here(device: Device) -> None:
    source = theirs(device)
    with device.on(device.stream()):
        source.set_result([device.produce(2.0)])
    future = CUDAFuture.from_torch(source)
    with device.on(device.stream()):
        assert device.read(future.wait(non_blocking=True)[0]) == 2.0


def test_deviceless_work_is_ordered_by_value(device: Device) -> None:
    source = TorchFuture[Any]()  # as Gloo's: without devices
    work = _create_work_from_future(source)
    future = CUDAFuture.from_torch(work)
    with device.on(device.stream()):
        source.set_result([device.produce(2.0)])
    with device.on(device.stream()):
        assert device.read(future.wait(non_blocking=True)[0]) == 2.0


def test_deviceless_work_takes_devices_of_value(device: Device) -> None:
    source = TorchFuture[Any]()
    future = CUDAFuture.from_torch(_create_work_from_future(source))
    source.set_result([device.produce(2.0)])
    assert list(future.devices) == ([device.at()] if device.has_streams else [])


def test_torch_devices_bound_our_future(device: Device) -> None:
    assert list(CUDAFuture.from_torch(theirs(device)).devices) == ([device.at()] if device.has_streams else [])


def test_our_value_is_ordered_in_torch(device: Device) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    target = future.to_torch()
    with device.on(device.stream()):
        future.set_result(device.produce(2.0))
    with device.on(device.stream()):
        assert device.read(target.wait()) == 2.0


def test_our_ready_value_is_ordered_in_torch(device: Device) -> None:
    target = device.complete(2.0).to_torch()
    with device.on(device.stream()):
        assert device.read(target.wait()) == 2.0


def test_torch_callback_follows_our_value(device: Device) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    child = future.to_torch().then(lambda done: done.value() * 3)
    with device.on(device.stream()):
        future.set_result(device.produce(2.0))
    with device.on(device.stream()):
        assert device.read(child.wait()) == 6.0


def test_torch_knows_our_devices(accelerator: Device) -> None:
    bounded = CUDAFuture[torch.Tensor](devices=[accelerator.at()])
    target = bounded.to_torch()
    with accelerator.stream():
        bounded.set_result(accelerator.produce(2.0))
    with accelerator.stream():
        assert accelerator.read(target.wait()) == 2.0


def test_round_trip_keeps_order(device: Device) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    back = CUDAFuture.from_torch(future.to_torch())
    with device.on(device.stream()):
        future.set_result(device.produce(2.0))
    with device.on(device.stream()):
        assert device.read(back.wait(non_blocking=True)) == 2.0


@OTHER_THREAD
def test_chain_may_mix_both_kinds(device: Device) -> None:
    """As a communication hook: ours, torch's callback, ours again, and a last one of torch's."""
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    chained = future.then(lambda done: done.value() + 1).to_torch().then(lambda done: done.value() * 2)
    last = CUDAFuture.from_torch(chained).then(lambda done: [done.value() - 1]).to_torch()
    gradient = last.then(lambda done: done.value()[0])
    with device.on(device.stream()):
        future.set_result(device.produce(2.0))
    with device.on(device.stream()):
        assert device.read(gradient.wait()) == 5.0


def test_buckets_may_finish_in_any_order(device: Device) -> None:
    buckets: list[CUDAFuture[torch.Tensor]] = [CUDAFuture() for _ in range(4)]
    hooks = [bucket.then(lambda done: done.value() / 2).to_torch() for bucket in buckets]
    together = torch.futures.collect_all(hooks)
    for i in (2, 0, 3, 1):
        with device.on(device.stream()):
            buckets[i].set_result(device.produce(float(i)))
    with device.on(device.stream()):
        assert [device.read(done.wait()) for done in together.wait()] == [0.0, 0.5, 1.0, 1.5]


def test_our_memory_lives_for_torch_waiter(device: Device) -> None:
    producer, consumer = device.stream(), device.stream()
    target = device.complete(2.0, stream=producer).to_torch()
    with device.on(consumer):
        y = target.wait() * 3
    del target
    with device.on(producer):
        device.produce(-1.0)
    with device.on(consumer):
        assert device.read(y) == 6.0


def test_torch_memory_lives_for_our_waiter(device: Device) -> None:
    producer, consumer = device.stream(), device.stream()
    source = theirs(device)
    with device.on(producer):
        source.set_result(device.produce(2.0))
    future = CUDAFuture.from_torch(source)
    with device.on(consumer):
        y = future.wait(non_blocking=True) * 3
    del source, future
    with device.on(producer):
        device.produce(-1.0)
    with device.on(consumer):
        assert device.read(y) == 6.0


@OTHER_THREAD
def test_tensorless_value_passes_both_ways(device: Device) -> None:
    source = theirs(device)
    future = CUDAFuture.from_torch(CUDAFuture.from_torch(source).to_torch())
    source.set_result("text")
    assert future.wait() == "text"


def test_failure_passes_both_ways(device: Device) -> None:
    source = theirs(device)
    future = CUDAFuture.from_torch(source)
    target = future.to_torch()
    with device.on(device.stream()):
        device.produce(1.0)
        source.set_exception(KeyError("no"))
    assert isinstance(future.exception(), KeyError)
    with pytest.raises(KeyError, match="no"):
        target.wait()


def test_our_pending_failure_reaches_torch(device: Device) -> None:
    future: CUDAFuture[Any] = CUDAFuture(devices=[device.at()])
    target = future.to_torch()
    with device.on(device.stream()):
        device.produce(1.0)
        future.set_exception(KeyError("no"))
    with pytest.raises(KeyError, match="no"):
        target.wait()


@OTHER_THREAD
def test_torch_completes_ours_from_another_thread(device: Device) -> None:
    source = theirs(device)
    child = CUDAFuture.from_torch(source).then(lambda done: done.value() + 1)

    def produce() -> None:
        with device.on(device.stream()):
            source.set_result(device.produce(2.0))

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join()
    with device.on(device.stream()):
        assert device.read(child.wait(non_blocking=True)) == 3.0


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_python_work_is_ordered(device: Device) -> None:
    done = theirs(device)

    class Handle(dist.Work):
        def get_future(self) -> TorchFuture[Any]:
            return done

    handle = Handle()
    side = device.stream()
    with device.on(side):
        buffer = device.empty()
    known = _C.collective(handle, buffer, "all_reduce", _C.inline_executor, None, 60.0, None, 0)
    followed = CUDAFuture.from_torch(handle)
    with device.on(side):
        device.delay()
        done.set_result([buffer.fill_(2.0)])
    with device.on(device.stream()):
        assert device.read(known.wait(non_blocking=True)) == 2.0
    with device.on(device.stream()):
        assert device.read(followed.wait(non_blocking=True)[0]) == 2.0
