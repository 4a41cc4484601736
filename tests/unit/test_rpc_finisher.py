"""The thread that looks whether devices have finished: nothing is lost, late, or held up by others."""

from __future__ import annotations

import threading

import pytest
import torch

from cudafuture import copy
from cudafuture.testing import sim
from rpc_ext._finisher import Finisher

LONG = 40.0  # seconds; much more than anything takes


@pytest.mark.sim(devices=2, schedule="lazy")
def test_each_is_told_when_its_own_device_has_finished() -> None:
    finisher, done = Finisher(), [threading.Event() for _ in range(3)]
    held = sim.hold()
    copies = [copy(torch.ones(4, device=device), "cpu") for device in ("sim:0", "sim:1", "sim:0")]
    for future, event in zip(copies, done, strict=True):
        finisher.watch(future, 0, event.set)
    assert done[1].wait(LONG)
    assert not done[0].is_set()
    assert not done[2].is_set()
    held.open()
    assert done[0].wait(LONG)
    assert done[2].wait(LONG)


@pytest.mark.sim(schedule="lazy")
def test_who_cannot_wait_longer_is_told_so_in_time() -> None:
    finisher, over, done = Finisher(), threading.Event(), threading.Event()
    with sim.hold():
        stuck = copy(torch.ones(4, device="sim"), "cpu")
        finisher.watch(stuck, 0.01, over.set)
        finisher.watch(stuck, 0, done.set)
        assert over.wait(LONG)
        assert not stuck.ready()
        assert not done.is_set()
    assert done.wait(LONG)


@pytest.mark.sim
def test_a_device_that_is_lost_ends_the_wait() -> None:
    finisher, done = Finisher(), threading.Event()
    held = sim.hold()
    copied = copy(torch.ones(4, device="sim"), "cpu")
    sim.fail("a broken bit")
    finisher.watch(copied, 0, done.set)
    held.open()
    assert done.wait(LONG)
    sim.clear_error()


@pytest.mark.sim(schedule="jitter")
def test_threads_may_ask_at_the_same_time() -> None:
    finisher = Finisher()
    told = [threading.Semaphore(0) for _ in range(4)]

    def ask(semaphore: threading.Semaphore) -> None:
        for _ in range(50):
            finisher.watch(copy(torch.ones(4, device="sim"), "cpu"), 0, semaphore.release)

    threads = [threading.Thread(target=ask, args=(semaphore,)) for semaphore in told]
    for thread in threads:
        thread.start()
    for thread, semaphore in zip(threads, told, strict=True):
        thread.join()
        for _ in range(50):
            assert semaphore.acquire(timeout=LONG)
