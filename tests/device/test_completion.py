"""Completion of futures, from any thread, with work on any stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, executors, submit
from support.harness import OTHER_THREAD, PRIORITIES, Device

Future = CUDAFuture[torch.Tensor]


def in_a_thread(body: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run_guarded() -> None:
        try:
            body()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run_guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@OTHER_THREAD
def test_other_thread_current_stream_has_work(device: Device) -> None:
    future = Future()

    def produce() -> None:
        with device.on(device.stream()):
            future.set_result(device.produce(2.0))

    in_a_thread(produce)
    assert device.read(future.wait(non_blocking=True)) == 2.0


@pytest.mark.parametrize("priority", PRIORITIES)
def test_named_stream_has_work(accelerator: Device, priority: int) -> None:
    future = Future()
    side = accelerator.stream(priority)
    with side:
        x = accelerator.produce(2.0)
    future.set_result(x, stream=side)
    with accelerator.stream():
        assert accelerator.read(future.wait(non_blocking=True)) == 2.0


def test_other_thread_names_our_stream(accelerator: Device) -> None:
    future = Future()
    side = accelerator.stream()
    with side:
        x = accelerator.produce(2.0)
    in_a_thread(lambda: future.set_result(x, stream=side))
    with accelerator.stream():
        assert accelerator.read(future.wait(non_blocking=True)) == 2.0


def test_streams_of_two_devices_are_named(pair: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    sides = [pair.stream(index=i) for i in (0, 1)]
    values = []
    for i, side in enumerate(sides):
        with side:
            values.append(pair.produce(float(i), i))
    in_a_thread(lambda: future.set_result(values, stream=sides))
    with pair.stream(index=0), pair.stream(index=1):
        assert [pair.read(x) for x in future.wait(non_blocking=True)] == [0.0, 1.0]


def test_unnamed_device_uses_current_stream(pair: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    side = pair.stream(index=0)
    with side:
        x = pair.produce(0.0, 0)
    future.set_result([x, pair.produce(1.0, 1)], stream=side)
    with pair.stream(index=0), pair.stream(index=1):
        assert [pair.read(x) for x in future.wait(non_blocking=True)] == [0.0, 1.0]


@OTHER_THREAD
def test_callbacks_get_own_streams(device: Device) -> None:
    future = Future()
    seen: list[Any] = []

    def callback(done: Future) -> torch.Tensor:
        seen.append((threading.get_ident(), device.current()))
        return done.value() + 1

    child = future.then(callback)
    producer: list[Any] = []

    def produce() -> None:
        with device.on(device.stream()):
            producer.append((threading.get_ident(), device.current()))
            future.set_result(device.produce(2.0))

    in_a_thread(produce)
    assert seen[0][0] == producer[0][0]
    assert (seen[0][1] != producer[0][1]) == device.has_streams
    assert device.read(child.wait(non_blocking=True)) == 3.0


@OTHER_THREAD
def test_waiting_thread_is_woken_and_ordered(device: Device) -> None:
    future = Future()
    read: list[float] = []
    waiting = threading.Event()

    def consume() -> None:
        waiting.set()
        with device.on(device.stream()):
            read.append(device.read(future.wait(non_blocking=True)))

    consumer = threading.Thread(target=consume)
    consumer.start()
    waiting.wait()
    with device.on(device.stream()):
        future.set_result(device.produce(2.0))
    consumer.join()
    assert read == [2.0]


@pytest.mark.parametrize("where", ["default", "callback_thread", "inline"])
def test_submit_result_is_ordered(device: Device, where: str) -> None:
    executor = None if where == "default" else getattr(executors, where)
    future = submit(device.produce, 2.0, executor=executor)
    with device.on(device.stream()):
        assert device.read(future.wait(non_blocking=True)) == 2.0


@OTHER_THREAD
def test_many_threads_complete_many_futures(device: Device) -> None:
    futures = [Future() for _ in range(16)]

    def produce(i: int) -> None:
        with device.on(device.stream()):
            futures[i].set_result(device.produce(float(i)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(produce, range(16)))
        with device.on(device.stream()):
            assert [device.read(f.wait(non_blocking=True)) for f in futures] == list(range(16))


def test_losing_producer_orders_nothing(device: Device) -> None:
    future = device.complete(1.0)
    with pytest.raises(RuntimeError, match="already"):
        future.set_result(device.produce(2.0))
    assert device.read(future.wait()) == 1.0


def test_producer_may_complete_before_work_runs(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(2.0, stream=side)
        child = future.then(lambda done: done.value() + 1).then(lambda done: done.value() * 2)
        assert child.done()
        assert not child.ready()
    assert accelerator.read(child.wait()) == 6.0


def test_thread_with_other_device_is_ordered(pair: Device) -> None:
    future = Future()

    def produce() -> None:
        torch.accelerator.set_device_index(pair.index(1))
        future.set_result(pair.produce(2.0, 0))

    in_a_thread(produce)
    assert future.devices == (pair.at(0),)
    with pair.stream():
        assert pair.read(future.wait(non_blocking=True)) == 2.0
