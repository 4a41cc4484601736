"""The thread that asks devices how far they are: what it finds out, and what it costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cudafuture import _C, CUDAFuture
from cudafuture.config import config
from support.harness import Device


def idle() -> int:
    """Wait until nothing is watched; return how often it has polled."""
    while (statistics := _C.statistics())["watcher_pending"]:
        pass
    return statistics["watcher_polls"]


@pytest.fixture
def pauses() -> Iterator[None]:
    """Let the test set the pauses."""
    yield
    _C.set_watcher_pauses(config.watcher_first_pause, config.watcher_longest_pause)


def test_unwatched_devices_are_not_polled(accelerator: Device) -> None:
    accelerator.complete(1.0).then(lambda _: None, non_blocking=False).wait()
    polls = idle()
    wakeups = _C.statistics()["watcher_wakeups"]
    for _ in range(50):
        accelerator.complete(1.0).then(lambda done: done.value() * 2).wait(non_blocking=True)
        accelerator.complete(1.0).wait()
    assert _C.statistics()["watcher_polls"] == polls
    assert _C.statistics()["watcher_wakeups"] == wakeups


def test_finished_work_is_not_watched(device: Device) -> None:
    future = device.complete(1.0)
    future.wait()
    watched = _C.statistics()["watcher_watched"]
    future.then(lambda _: None, non_blocking=False).wait()
    assert _C.statistics()["watcher_watched"] == watched


def test_each_blocking_callback_is_watched_once(accelerator: Device) -> None:
    idle()
    before = _C.statistics()["watcher_watched"]
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(1.0, stream=side)
        children = [future.then(lambda _: None, non_blocking=False) for _ in range(3)]
        assert _C.statistics()["watcher_watched"] == before + 3
        assert _C.statistics()["watcher_pending"] == 3
    for child in children:
        child.wait()
    idle()


def test_watcher_polls_less_over_time(accelerator: Device, pauses: None) -> None:
    first, longest = 1e-4, 1e-3
    idle()
    _C.set_watcher_pauses(first, longest)
    before = _C.statistics()["watcher_polls"]
    side = accelerator.stream()
    begin = time.monotonic()
    with accelerator.hold(side):
        child = accelerator.complete(1.0, stream=side).then(lambda _: None, non_blocking=False)
        while _C.statistics()["watcher_polls"] - before < 40:
            pass
        polls = _C.statistics()["watcher_polls"] - before
        took = time.monotonic() - begin
    child.wait()
    idle()
    assert polls <= most_polls(first, longest, took) + 2  # the one at once, and the one in progress


def most_polls(first: float, longest: float, seconds: float) -> int:
    """Return the most polls of such a time: each pause is a sixteenth longer than the one before, up to the longest."""
    count, pause, total = 0, first, 0.0
    while total + pause <= seconds:
        total += pause
        pause = min(longest, pause * 17 / 16)
        count += 1
    return count


def test_watcher_handles_several_devices_and_streams(pair: Device) -> None:
    sides = [pair.stream(index=i) for i in (0, 1)]
    futures: list[CUDAFuture[object]] = [CUDAFuture() for _ in sides]
    holds = [pair.hold(side) for side in sides]
    ran: list[int] = []
    for i, side in enumerate(sides):
        with side:
            futures[i].set_result(pair.produce(1.0, i))
    children = [f.then(lambda _, i=i: ran.append(i), non_blocking=False) for i, f in enumerate(futures)]  # type: ignore[misc]
    for i in (1, 0):
        with holds[i]:
            pass
        children[i].wait()
    assert ran == [1, 0] or pair.name == "cuda"


def test_callbacks_leave_watcher_thread(accelerator: Device) -> None:
    side = accelerator.stream()
    with accelerator.hold(side):
        future = accelerator.complete(1.0, stream=side)
        child = future.then(lambda _: threading.current_thread(), non_blocking=False)
    assert child.wait() is not threading.current_thread()


def test_dropped_future_is_watched_to_end(accelerator: Device) -> None:
    side = accelerator.stream()
    ran: CUDAFuture[float] = CUDAFuture()
    with accelerator.hold(side):
        future = accelerator.complete(3.0, stream=side)
        future.then(lambda done: ran.set_result(accelerator.read(done.value())), non_blocking=False)
        del future
    assert ran.wait() == 3.0
