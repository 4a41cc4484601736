"""Many futures with device work: what is made of them is ordered after all that it offers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, as_completed, collect_all, collect_any, gather, wait, wait_all
from support.harness import PRIORITIES, Device


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_gather_is_ordered_after_every_part(device: Device, parts: int) -> None:
    whole = gather(*[device.complete(float(i)) for i in range(parts)])
    with device.on(device.stream()):
        assert [device.read(x) for x in whole.wait(non_blocking=True)] == list(range(parts))


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_collect_all_follows_every_part(device: Device, parts: int) -> None:
    whole = collect_all([device.complete(float(i)) for i in range(parts)])
    with device.on(device.stream()):
        assert [device.read(f.value()) for f in whole.wait(non_blocking=True)] == list(range(parts))


@pytest.mark.parametrize("first", [0, 1])
def test_collect_any_follows_first_part(device: Device, first: int) -> None:
    futures: list[CUDAFuture[torch.Tensor]] = [CUDAFuture(), CUDAFuture()]
    whole = collect_any(futures)
    with device.on(device.stream()):
        futures[first].set_result(device.produce(5.0))
    with device.on(device.stream()):
        index, x = whole.wait(non_blocking=True)
        assert (index, device.read(x)) == (first, 5.0)


def test_gather_joins_events_of_device(accelerator: Device) -> None:
    whole = gather(*[accelerator.complete(float(i)) for i in range(5)])
    assert list(whole.events) == [accelerator.at()]


def test_gather_keeps_events_of_devices(pair: Device) -> None:
    whole = gather(*[pair.complete(float(i), i % 2) for i in range(4)])
    assert sorted(whole.events, key=str) == [pair.at(0), pair.at(1)]
    with pair.stream(index=0), pair.stream(index=1):
        assert [pair.read(x) for x in whole.wait(non_blocking=True)] == [0.0, 1.0, 2.0, 3.0]


def test_gather_without_events_has_none(device: Device) -> None:
    assert dict(gather(CUDAFuture.completed(1), CUDAFuture.completed(2)).events) == {}


def test_gather_is_pending_with_part(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        whole = gather(accelerator.complete(1.0), accelerator.complete(2.0, stream=side))
        assert (whole.done(), whole.ready()) == (True, False)
    whole.wait()
    assert whole.ready()


def test_nested_gather_follows_all_parts(device: Device) -> None:
    whole = gather(gather(device.complete(1.0), device.complete(2.0)), gather(device.complete(3.0)))
    with device.on(device.stream()):
        values = whole.wait(non_blocking=True)
        assert [[device.read(x) for x in part] for part in values] == [[1.0, 2.0], [3.0]]


def test_gather_callback_follows_every_part(device: Device) -> None:
    total = gather(device.complete(1.0), device.complete(2.0)).then(lambda done: sum(done.value()))
    with device.on(device.stream()):
        assert device.read(total.wait(non_blocking=True)) == 3.0  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", PRIORITIES)
def test_gather_has_most_urgent_priority(accelerator: Device, priority: int) -> None:
    parts = [CUDAFuture[Any](priority=0), CUDAFuture[Any](priority=priority)]
    whole = gather(*parts)
    streams: list[torch.Stream] = []
    whole.then(lambda _: streams.append(accelerator.current()))
    for part in parts:
        part.set_result(accelerator.produce(1.0))
    assert whole.priority == priority
    assert [accelerator.priority_of(s) for s in streams] == [priority]


def test_host_and_device_parts_mix(device: Device) -> None:
    whole: CUDAFuture[list[Any]]
    whole = gather(CUDAFuture.completed("host"), device.complete(1.0), CUDAFuture.completed(torch.zeros(1)))
    with device.on(device.stream()):
        host, x, zeros = whole.wait(non_blocking=True)
        assert (host, device.read(x), zeros.item()) == ("host", 1.0, 0.0)


def test_wait_all_is_ordered_and_finished(device: Device) -> None:
    values = wait_all([device.complete(1.0), device.complete(2.0)])
    with device.on(device.stream()):
        assert [device.read(x) for x in values] == [1.0, 2.0]


@pytest.mark.parametrize("when", ["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"])
def test_wait_checks_completion_not_device(accelerator: Device, when: Any) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(1.0, stream=side)
        assert wait([future], return_when=when) == ({future}, set())
        assert not future.ready()


def test_as_completed_futures_order_consumers(device: Device) -> None:
    futures = [device.complete(float(i)) for i in range(4)]
    with device.on(device.stream()):
        assert sorted(device.read(f.wait(non_blocking=True)) for f in as_completed(futures)) == [0.0, 1.0, 2.0, 3.0]


def test_as_completed_ignores_devices(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(1.0, stream=side)
        assert list(as_completed([future])) == [future]
        assert not future.ready()


def test_part_may_be_gathered_twice(device: Device) -> None:
    part = device.complete(2.0)
    with device.on(device.stream()):
        first, second = gather(part, part).wait(non_blocking=True)
        assert first is second
        assert device.read(first) == 2.0


def test_whole_outlives_its_parts(device: Device) -> None:
    parts = [device.complete(1.0), device.complete(2.0)]
    whole = gather(*parts)
    del parts
    with device.on(device.stream()):
        assert [device.read(x) for x in whole.wait(non_blocking=True)] == [1.0, 2.0]


def test_gather_while_another_device_is_current(pair: Device) -> None:
    whole = gather(pair.complete(1.0, 1), pair.complete(2.0, 1))
    assert pair.current_index() == 0
    assert [pair.read(x) for x in whole.wait()] == [1.0, 2.0]
