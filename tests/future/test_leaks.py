"""Leaks of futures: no life of a future leaves an object, a reference or memory behind."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture
from support.lives import BATCHES, KINDS, Probe, probe
from support.soak import soak_count

COUNT = soak_count(100_000, part=25)  # of each kind in a round
WARM_UP = 2
ROUNDS = 4

ATTEMPTS = 4
Kind = Callable[[], object]


def count_leftovers() -> dict[str, int]:
    """Count objects, references and memory, after collecting unreachable objects."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "references": sys.getrefcount(probe),
        # Without pages of files, which the kernel drops and reads again.
        "bytes": sum(1024 * int(status[kind].split()[0]) for kind in ("RssAnon", "RssShmem")),
    }


@pytest.fixture
def quiet_heap(small_heap: None) -> Iterator[None]:
    """Keep the log of unseen failures off the terminal."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def expect_nothing_left(kind: Kind, count: int) -> None:
    for _ in range(WARM_UP):
        for _ in range(count):
            kind()
        before = count_leftovers()
    # A leak grows every time; an allocator that takes another arena, or a thread of another test, does so now and then.
    for _ in range(ATTEMPTS):
        for _ in range(ROUNDS):
            for _ in range(count):
                kind()
        after = count_leftovers()
        growth = {what: after[what] - before[what] for what in before}
        if is_flat(growth):
            return
        before = after
    raise AssertionError(f"after each of {ATTEMPTS} attempts there was more, last: {growth}")


def is_flat(growth: dict[str, int]) -> bool:
    """Return True if nothing grew: one object left by each is ROUNDS x COUNT blocks, of 16 bytes at least."""
    few = all(growth[what] < COUNT / 10 for what in ("objects", "blocks", "references"))
    return few and growth["bytes"] < ROUNDS * COUNT * 12


pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.usefixtures("quiet_heap")]


@pytest.mark.parametrize("kind", KINDS)
def test_life_leaves_nothing(kind: Kind) -> None:
    expect_nothing_left(kind, COUNT)


@pytest.mark.parametrize("kind", BATCHES)
def test_many_lives_leave_nothing(kind: Kind) -> None:
    expect_nothing_left(kind, COUNT // 100)


@pytest.mark.parametrize("leaked", [object, Probe, lambda: CUDAFuture(), lambda: [probe], lambda: bytearray(1)])
def test_leak_of_one_object_is_noticed(leaked: Callable[[], object]) -> None:
    kept: list[object] = []
    with pytest.raises(AssertionError, match="'blocks'"):
        expect_nothing_left(lambda: kept.append(leaked()), COUNT)


def test_cycle_through_pending_future_is_collected() -> None:
    def cycle() -> tuple[weakref.ref[CUDAFuture[Probe]], weakref.ref[Probe]]:
        future: CUDAFuture[Probe] = CUDAFuture()
        held = Probe()
        future.add_done_callback(lambda f: (future, held))
        return weakref.ref(future), weakref.ref(held)

    gone = cycle()
    assert gone[0]() is not None
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


def test_future_with_outside_producer_survives_collection() -> None:
    called = []
    source = torch.futures.Future[int]()
    future = CUDAFuture.from_torch(source)
    future.add_done_callback(lambda f, future=future: called.append(future.value()))  # type: ignore[misc]
    del future
    gc.collect()
    arrived = threading.Event()
    CUDAFuture.from_torch(source).add_done_callback(lambda f: arrived.set())
    source.set_result(7)
    assert arrived.wait(60)
    assert called == [7]
