"""The library's pool of streams: few of them, the same ones again, and none that the program uses or captures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, copy, own_stream, pool_stream, use_streams
from cudafuture.testing import sim
from support.harness import PRIORITIES, Device

Future = CUDAFuture[torch.Tensor]
MOST = 4  # streams of a device and priority
PROGRAMS = 32  # streams that torch has of a priority


def stream_ids(accelerator: Device, parent: Future, callbacks: int, priority: int = 0) -> list[int]:
    """Return the stream of each callback; none is waited for."""
    ids: list[int] = []
    for _ in range(callbacks):
        parent.then(noting(accelerator, ids), priority=priority)
    return ids


def noting(accelerator: Device, ids: list[int]) -> Callable[[Future], torch.Tensor]:
    """Return a callback that adds its stream to the list, and enqueues work there."""

    def add_one(future: Future) -> torch.Tensor:
        ids.append(accelerator.current().stream_id)
        return future.value() + 1

    return add_one


def in_a_thread(accelerator: Device, function: Callable[[], Any]) -> Any:
    """Call a function in another thread, on the device of the test; return its result, or raise its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            with accelerator.select(0):
                results.append(function())
        except BaseException as e:
            results.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("priority", PRIORITIES)
def test_busy_callbacks_share_four_streams(accelerator: Device, priority: int) -> None:
    accelerator.finish()
    stream = accelerator.stream()
    with accelerator.hold(stream):
        ids = stream_ids(accelerator, accelerator.complete(1.0, stream=stream), 64, priority)
    assert len(ids) == 64
    assert len(set(ids)) == MOST
    assert max(map(ids.count, set(ids))) < 64 / 2  # none of them takes it all


def test_priorities_have_different_streams(accelerator: Device) -> None:
    stream = accelerator.stream()
    with accelerator.hold(stream):
        parent = accelerator.complete(1.0, stream=stream)
        ids = [set(stream_ids(accelerator, parent, 16, priority)) for priority in PRIORITIES]
    assert not ids[0] & ids[1]


def test_busy_stream_is_passed_over(accelerator: Device) -> None:
    accelerator.finish()
    stream = accelerator.stream()
    done = accelerator.complete(1.0)
    done.wait()
    with accelerator.hold(stream):
        (blocked,) = stream_ids(accelerator, accelerator.complete(1.0, stream=stream), 1)
        for _ in range(16):
            ids: list[int] = []
            done.then(noting(accelerator, ids)).wait()  # beside what is held
            assert ids != [blocked]


def test_concurrent_callbacks_have_different_streams(accelerator: Device) -> None:
    parent = accelerator.complete(1.0)
    ids: list[int] = []

    def enter(depth: int) -> None:
        ids.append(accelerator.current().stream_id)
        if depth < MOST:
            parent.then(lambda f: enter(depth + 1))

    parent.then(lambda f: enter(1)).wait()
    assert len(set(ids[-MOST:])) == MOST


def test_copies_callbacks_gathers_share_streams(accelerator: Device) -> None:
    accelerator.finish()
    stream = accelerator.stream()
    with accelerator.hold(stream):
        parent = accelerator.complete(1.0, stream=stream)
        ids = set(stream_ids(accelerator, parent, 16))
        for _ in range(16):
            copied = copy(parent.value(), "cpu")
            assert not copied.ready()
            ids.add(pool_stream(accelerator.at()).stream_id)
            parent.then(lambda f: f.value()).to_torch()
        ids.update(stream_ids(accelerator, parent, 16))
    assert len(ids) == MOST


def test_program_streams_are_never_used(accelerator: Device) -> None:
    parent = accelerator.complete(1.0)
    programs = [accelerator.stream() for _ in range(PROGRAMS)]
    accelerator.finish()
    gates = [accelerator.hold(stream) for stream in programs]
    for gate in gates:
        gate.__enter__()
    try:
        ids = stream_ids(accelerator, parent, 64)
        parent.then(lambda f: f.value() + 1).wait()  # beside what is held
    finally:
        for gate in gates:
            gate.__exit__(None, None, None)
    assert not {stream.stream_id for stream in programs} & set(ids)


def test_capture_and_other_callbacks_stay_separate(accelerator: Device) -> None:
    parent = accelerator.complete(1.0)
    accelerator.finish()

    def use() -> Future:
        with own_stream(accelerator.at()), accelerator.hold():  # so that every stream of the pool is used
            for _ in range(2 * PROGRAMS):
                child = CUDAFuture.completed(parent.wait(non_blocking=True) + 1).then(lambda f: f.value() + 1)
                child.wait(non_blocking=True)
        return child

    with accelerator.capture("thread_local"):  # in the default mode torch's allocations of other threads end it
        accelerator.empty().fill_(1.0)
        child = in_a_thread(accelerator, use)
        accelerator.empty().fill_(2.0)
    assert child.wait()[0].item() == 3.0


def test_only_captured_callbacks_join_capture(accelerator: Device) -> None:
    outside = accelerator.complete(1.0)
    accelerator.finish()
    with accelerator.capture("thread_local"):  # in the default mode torch's allocations of other threads end it
        inside = CUDAFuture.completed(accelerator.empty().fill_(1.0))
        child = inside
        captured: list[int] = []
        for _ in range(16):
            child = child.then(noting(accelerator, captured))
        copies = copy(child.value(), accelerator.at())
        free = in_a_thread(accelerator, lambda: stream_ids(accelerator, outside, 16))
        child.wait(non_blocking=True)
        copies.wait(non_blocking=True)
    assert len(captured) == len(free) == 16
    assert not set(captured) & set(free)
    assert in_a_thread(accelerator, lambda: outside.then(lambda f: f.value() + 1).wait()[0].item()) == 2.0


def test_concurrent_captures_have_different_streams(accelerator: Device) -> None:
    if accelerator.name != "sim":
        pytest.skip("torch.cuda.graph() synchronizes the device, which ends other captures")
    used: list[set[int]] = []

    def record(depth: int) -> None:
        if depth == MOST:
            return
        with accelerator.stream(), sim.capture():
            ids: list[int] = []
            child = CUDAFuture.completed(accelerator.empty().fill_(1.0))
            for _ in range(3):
                child = child.then(noting(accelerator, ids))
            used.append(set(ids))
            record(depth + 1)
            child.wait(non_blocking=True)

    record(0)
    assert [len(ids) for ids in used] == [1] * MOST
    assert len(set.union(*used)) == MOST


def test_pool_stream_joins_its_capture(accelerator: Device) -> None:
    x = accelerator.empty()
    accelerator.finish()
    with accelerator.capture():
        here = CUDAFuture.completed(x.fill_(1.0)).events[accelerator.at()].capture
        with use_streams(pool_stream(accelerator.at())):
            there = CUDAFuture.completed(x.fill_(2.0))
        assert there.events[accelerator.at()].capture == here != 0
        there.wait(non_blocking=True)


def test_own_stream_recording_is_ordered(accelerator: Device) -> None:
    x = accelerator.complete(3.0)
    with use_streams(pool_stream(accelerator.at(), -1)):
        y = x.wait(non_blocking=True) * 2
        doubled = CUDAFuture.completed(y)
    assert accelerator.read(doubled.wait(non_blocking=True)) == 6.0
