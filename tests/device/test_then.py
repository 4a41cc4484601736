"""Callbacks on streams: on which ones, ordered after what, and with what behind them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, executors
from support.harness import PRIORITIES, Device

Future = CUDAFuture[torch.Tensor]


def double(done: Future) -> torch.Tensor:
    return done.value() * 2


@pytest.mark.parametrize("priority", PRIORITIES)
def test_callback_is_ordered_between_value_and_waiter(device: Device, priority: int) -> None:
    child = device.complete(3.0).then(double, priority=priority)
    with device.on(device.stream()):
        assert device.read(child.wait(non_blocking=True)) == 6.0


def test_callback_reads_value_on_own_stream(device: Device) -> None:
    read: list[float] = []
    device.complete(3.0).then(lambda done: read.append(device.read(done.value()))).wait()
    assert read == [3.0]


@pytest.mark.parametrize("stream", ["pool", "caller"])
@pytest.mark.parametrize("attached", ["before", "after"])
def test_time_of_attachment_changes_nothing(device: Device, stream: Any, attached: str) -> None:
    future = Future()
    if attached == "before":
        child = future.then(double, stream=stream)
    with device.on(device.stream()):
        future.set_result(device.produce(3.0))
    if attached == "after":
        child = future.then(double, stream=stream)
    assert device.read(child.wait(non_blocking=True)) == 6.0


@pytest.mark.parametrize("priority", PRIORITIES)
def test_stream_has_priority_of_future(accelerator: Device, priority: int) -> None:
    future = Future(priority=priority)
    streams: list[torch.Stream] = []
    child = future.then(lambda _: streams.append(accelerator.current()))
    future.set_result(accelerator.produce(1.0))
    assert child.priority == priority
    assert [accelerator.priority_of(s) for s in streams] == [priority]


@pytest.mark.parametrize("priority", PRIORITIES)
def test_then_priority_overrides_inherited_one(accelerator: Device, priority: int) -> None:
    future = Future(priority=-1 - priority)
    streams: list[torch.Stream] = []
    child = future.then(lambda _: streams.append(accelerator.current()), priority=priority)
    future.set_result(accelerator.produce(1.0))
    assert child.priority == priority
    assert [accelerator.priority_of(s) for s in streams] == [priority]


@pytest.mark.parametrize("priority", PRIORITIES)
def test_grandchildren_inherit_priority(accelerator: Device, priority: int) -> None:
    future = Future(priority=0)
    streams: list[torch.Stream] = []

    def note(done: CUDAFuture[Any]) -> torch.Tensor:
        streams.append(accelerator.current())
        return accelerator.produce(1.0)

    future.then(note, priority=priority).then(note).then_async(lambda done: done.then(note)).then(note)
    future.set_result(accelerator.produce(1.0))
    assert [accelerator.priority_of(s) for s in streams] == [priority] * 4


def test_callbacks_of_one_future_overlap(accelerator: Device) -> None:
    streams: list[int] = []
    stream = accelerator.stream()
    with accelerator.hold(stream):
        future = accelerator.complete(1.0, stream=stream)
        for _ in range(4):
            future.then(lambda _: streams.append(accelerator.current().stream_id))
    assert len(set(streams)) == 4


def test_call_decides_streams_of_caller(accelerator: Device) -> None:
    caller = accelerator.stream()
    streams: list[torch.Stream] = []
    future = Future()
    with caller:
        future.then(lambda _: streams.append(accelerator.current()), stream="caller")
    with accelerator.stream():
        future.set_result(accelerator.produce(1.0))
    assert streams == [caller]


def test_later_work_of_caller_may_use_result(device: Device) -> None:
    future = Future()
    kept: list[torch.Tensor] = []
    caller = device.stream()
    with device.on(caller):
        future.then(lambda done: kept.append(double(done)), stream="caller")
    with device.on(device.stream()):
        future.set_result(device.produce(3.0))
    with device.on(caller):
        assert device.read(kept[0]) == 6.0


@pytest.mark.parametrize("as_list", [False, True])
def test_given_stream_is_current_in_callback(accelerator: Device, as_list: bool) -> None:
    side = accelerator.stream(-1)
    kept: list[torch.Tensor] = []

    def callback(done: Future) -> None:
        assert accelerator.current() == side
        kept.append(double(done))

    accelerator.complete(3.0).then(callback, stream=[side] if as_list else side).value()
    with side:
        assert accelerator.read(kept[0]) == 6.0


def test_streams_of_several_devices_are_accepted(pair: Device) -> None:
    sides = [pair.stream(index=i) for i in (0, 1)]
    seen: list[list[torch.Stream]] = []
    pair.complete(1.0).then(lambda _: seen.append([pair.current(0), pair.current(1)]), stream=sides)
    assert seen == [sides]


def test_device_without_stream_uses_pool(pair: Device) -> None:
    future = CUDAFuture[None](devices=[pair.at(0), pair.at(1)])
    side = pair.stream(index=1)
    seen: list[list[torch.Stream]] = []
    future.then(lambda _: seen.append([pair.current(0), pair.current(1)]), stream=side, priority=-1)
    future.set_result(None)
    assert seen[0][1] == side
    assert pair.priority_of(seen[0][0]) == -1


def test_completing_thread_recovers_streams(accelerator: Device) -> None:
    x = accelerator.produce(1.0)
    before = accelerator.current()
    future = Future()
    future.then(double)
    future.set_result(accelerator.empty())
    assert accelerator.current() == before
    assert accelerator.read(x.add_(1)) == 2.0


def test_long_chain_stays_ordered(device: Device) -> None:
    future: Future = Future()
    last = future
    for _ in range(20):
        last = last.then(lambda done: done.value() + 1)
    with device.on(device.stream()):
        future.set_result(device.produce(0.0))
    assert device.read(last.wait(non_blocking=True)) == 20.0


def test_callback_may_change_value_in_place(device: Device) -> None:
    child = device.complete(1.0).then(lambda done: done.value().add_(1)).then(lambda done: done.value().mul_(3))
    assert device.read(child.wait(non_blocking=True)) == 6.0


def test_host_result_leaves_no_event(device: Device) -> None:
    child = device.complete(3.0).then(lambda done: device.read(done.value()))
    assert dict(child.events) == {}
    assert child.wait() == 3.0


def test_plain_callback_needs_no_order(device: Device) -> None:
    assert CUDAFuture.completed(3).then(lambda done: done.value() + 1).wait() == 4


def test_done_callback_is_ordered(device: Device) -> None:
    read: list[float] = []
    future = Future()
    future.add_done_callback(lambda done: read.append(device.read(done.value())))
    with device.on(device.stream()):
        future.set_result(device.produce(3.0))
    assert read == [3.0]


def test_then_async_follows_inner_future(device: Device) -> None:
    child = device.complete(1.0).then_async(lambda done: device.complete(device.read(done.value()) + 1))
    with device.on(device.stream()):
        assert device.read(child.wait(non_blocking=True)) == 2.0


def test_then_async_follows_later_inner_future(device: Device) -> None:
    inner = Future()
    child = device.complete(1.0).then_async(lambda _: inner)
    with device.on(device.stream()):
        inner.set_result(device.produce(2.0))
    assert device.read(child.wait(non_blocking=True)) == 2.0


# ---- blocking


@pytest.mark.parametrize("priority", PRIORITIES)
def test_blocking_callback_runs_after_device(accelerator: Device, priority: int) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(3.0, stream=side)
        child = future.then(lambda done: done.ready(), non_blocking=False, priority=priority)
        assert not child.done()
    assert child.wait() is True


def test_blocking_callback_may_read_on_host(device: Device) -> None:
    host = device.make_pinned()
    future: Future = Future()
    with device.on(device.stream()):
        x = device.produce(3.0)
        host.copy_(x, non_blocking=True)
        future.set_result(host, tensors=[x])
    assert future.then(lambda done: done.value().sum().item(), non_blocking=False).wait() == 3.0 * host.numel()


def test_blocking_callback_runs_on_finished_device(device: Device) -> None:
    future = device.complete(3.0)
    future.wait()
    here = threading.get_ident()
    assert future.then(lambda _: threading.get_ident(), non_blocking=False).value() == here


def test_blocking_callbacks_keep_their_order(accelerator: Device) -> None:
    side = accelerator.stream()
    ran: list[int] = []
    with accelerator.hold(side):
        future = accelerator.complete(3.0, stream=side)
        children = [future.then(lambda _, i=i: ran.append(i), non_blocking=False) for i in range(10)]  # type: ignore[misc]
    for child in children:
        child.wait()
    assert ran == list(range(10))


def test_other_callbacks_ignore_device(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(3.0, stream=side)
        blocking = future.then(double, non_blocking=False)
        assert future.then(lambda _: "ran").wait() == "ran"
        assert not blocking.done()
    assert accelerator.read(blocking.wait(non_blocking=True)) == 6.0


def test_blocking_then_async_waits_for_device(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        child = accelerator.complete(3.0, stream=side).then_async(lambda done: done.then(double), non_blocking=False)
        assert not child.done()
    assert accelerator.read(child.wait(non_blocking=True)) == 6.0


# ---- executors


@pytest.mark.parametrize("where", ["pool", "callback_thread", "inline"])
def test_callback_on_executor_is_ordered(device: Device, where: str) -> None:
    with ThreadPoolExecutor(1) if where == "pool" else contextlib.nullcontext(getattr(executors, where, None)) as it:
        child = device.complete(3.0).then(double, executor=it)
        with device.on(device.stream()):
            assert device.read(child.wait(non_blocking=True)) == 6.0


def test_executor_gets_streams_of_caller(accelerator: Device) -> None:
    caller = accelerator.stream()
    with ThreadPoolExecutor(1) as pool, caller:
        child = accelerator.complete(3.0).then(lambda _: accelerator.current(), stream="caller", executor=pool)
        assert child.wait() == caller


@pytest.mark.parametrize("priority", PRIORITIES)
def test_executor_callback_stream_has_priority(accelerator: Device, priority: int) -> None:
    future = accelerator.complete(3.0)
    with ThreadPoolExecutor(1) as pool:
        child = future.then(lambda _: accelerator.current(), priority=priority, executor=pool)
        assert accelerator.priority_of(child.wait()) == priority
