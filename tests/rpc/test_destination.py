"""Admission of calls to a worker, without any RPC."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from rpc_ext import _destination
from rpc_ext._codec import NO_DEVICES
from rpc_ext._destination import Destination
from support.patience import PATIENCE


def destination(calls: int = 2, size: int = 100) -> Destination:
    return Destination("other", 1, NO_DEVICES, calls, size)


class Ended:
    """A call that has been answered."""

    def __init__(self, size: int) -> None:
        self.size, self.started, self.settled = size, time.perf_counter(), False


def finish(of: Destination, size: int) -> None:
    assert of.finish(Ended(size), 0, False)


class Waiter(threading.Thread):
    """A thread that waits for room."""

    def __init__(self, of: Destination, size: int, timeout: float = 0) -> None:
        super().__init__()
        self.admitted = threading.Event()
        self.error: BaseException | None = None
        self._of, self._size, self._timeout = of, size, timeout
        before = of.statistics().waiting
        self.start()
        while of.statistics().waiting == before and self.is_alive():
            time.sleep(0.001)

    def run(self) -> None:
        try:
            self._of.admit(self._size, self._timeout)
            self.admitted.set()
        except BaseException as e:
            self.error = e


def test_calls_and_bytes_have_separate_limits() -> None:
    of = destination(2, 100)
    assert of.try_admit(60)
    assert not of.try_admit(41)
    assert of.try_admit(40)
    assert not of.try_admit(0)
    finish(of, 60)
    assert of.try_admit(60)


def test_oversized_call_is_admitted_alone() -> None:
    of = destination(2, 100)
    assert of.try_admit(1000)
    assert not of.try_admit(1)
    finish(of, 1000)
    assert of.try_admit(1)
    assert not of.try_admit(1000)


def test_waiting_calls_are_admitted_in_order() -> None:
    of = destination(10, 100)
    assert of.try_admit(60)
    large, small = Waiter(of, 80), Waiter(of, 10)
    assert not of.try_admit(10)  # there would be room, and others were first
    assert of.statistics().waiting == 2
    finish(of, 60)
    for waiter in (large, small):
        waiter.join(PATIENCE)
        assert waiter.admitted.is_set()
    assert (of.statistics().in_flight, of.statistics().bytes_in_flight, of.statistics().calls) == (2, 90, 3)


def test_abandoned_wait_admits_next() -> None:
    of = destination(10, 100)
    assert of.try_admit(60)
    large, small = Waiter(of, 80, timeout=0.1), Waiter(of, 10, timeout=PATIENCE)
    for waiter in (large, small):
        waiter.join(PATIENCE)
    assert isinstance(large.error, TimeoutError)
    assert "'other' within 0.1 s: " in str(large.error)
    assert small.admitted.is_set()
    assert of.statistics().bytes_in_flight == 70


def test_interrupted_wait_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    of = destination(1, 100)
    assert of.try_admit(1)

    class InterruptedWhenAdmitted:
        def __init__(self, name: str) -> None:
            self._future: CUDAFuture[None] = CUDAFuture(name=name)
            self.done, self.set_result = self._future.done, self._future.set_result
            self.exception = self._future.exception

        def wait(self, *, timeout: float | None) -> None:
            finish(of, 1)  # admits the call that waits
            assert self.done()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_destination, "CUDAFuture", InterruptedWhenAdmitted)
        patch.setattr("rpc_ext._destination.debug.register", lambda *_, **__: None)  # which takes futures only
        with pytest.raises(KeyboardInterrupt):
            of.admit(50, 0)
    assert (of.statistics().in_flight, of.statistics().bytes_in_flight, of.statistics().calls) == (0, 0, 1)
    assert of.try_admit(1)


def test_call_that_ends_before_another_waits_admits_it() -> None:
    class EndsBefore(Destination):
        def try_admit(self, size: int) -> bool:
            fits = super().try_admit(size)
            if not fits:
                finish(self, 1)  # finds no call that waits
            return fits

    of = EndsBefore("other", 1, NO_DEVICES, 1, 100)
    of.take_room(1)
    of.admit(50, PATIENCE)
    assert (of.statistics().bytes_in_flight, of.statistics().waiting) == (50, 0)


def test_call_that_ends_while_another_begins_to_wait_admits_it() -> None:
    class EndsMeanwhile(Destination):
        def take_room(self, size: int) -> bool:
            fits = super().take_room(size)
            if not fits:
                ender.start()
                assert counted.wait(PATIENCE)
            return fits

        def note_room(self) -> None:
            counted.set()  # the thread that admits still has the lock
            super().note_room()

    of = EndsMeanwhile("other", 1, NO_DEVICES, 1, 100)
    counted = threading.Event()
    ender = threading.Thread(target=finish, args=(of, 1))
    assert of.try_admit(1)
    of.admit(50, PATIENCE)
    ender.join(PATIENCE)
    assert (of.statistics().bytes_in_flight, of.statistics().waiting) == (50, 0)


@pytest.mark.parametrize("is_awaited", [False, True], ids=["before", "after"])
def test_call_that_ends_while_a_thread_begins_to_wait_until_idle(is_awaited: bool) -> None:
    class EndsMeanwhile(Destination):
        def __setattr__(self, name: str, value: object) -> None:
            if (name, value) != ("is_awaited", True):
                super().__setattr__(name, value)
            elif is_awaited:
                super().__setattr__(name, value)
                ender.start()
                assert counted.wait(PATIENCE)
            else:
                finish(self, 1)  # finds no thread that waits
                super().__setattr__(name, value)

        def note_room(self) -> None:
            counted.set()  # the thread that waits still has the lock
            super().note_room()

    of = EndsMeanwhile("other", 1, NO_DEVICES, 1, 100)
    counted = threading.Event()
    ender = threading.Thread(target=finish, args=(of, 1))
    assert of.try_admit(1)
    of.wait_until_idle(PATIENCE)
    if is_awaited:
        ender.join(PATIENCE)
    assert of.in_flight == 0


def test_close_releases_waiting_callers() -> None:
    of = destination(1, 100)
    assert of.try_admit(1)
    waiters = [Waiter(of, 1) for _ in range(3)]
    of.close()
    for waiter in waiters:
        waiter.join(PATIENCE)
        assert isinstance(waiter.error, InvalidStateError)


def test_refusal_reports_amount_in_flight() -> None:
    of = destination(1, 100)
    assert of.try_admit(7)
    assert "1 calls and 7 bytes are in flight to worker 'other' (at most 1 and 100)" in str(of.would_block())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 150), st.booleans()), max_size=60), st.integers(1, 5), st.integers(1, 120))
def test_limits_hold_for_any_sequence(steps: list[tuple[int, bool]], calls: int, size: int) -> None:
    of = destination(calls, size)
    in_flight: list[int] = []
    made = 0
    for wanted, ends in steps:
        fits = not in_flight or (len(in_flight) < calls and sum(in_flight) + wanted <= size)
        assert of.try_admit(wanted) is fits
        if fits:
            in_flight.append(wanted)
            made += 1
        if ends and in_flight:
            finish(of, in_flight.pop(0))
        statistics = of.statistics()
        assert (statistics.in_flight, statistics.bytes_in_flight) == (len(in_flight), sum(in_flight))
        assert statistics.calls == made


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=12))
def test_all_waiting_calls_are_admitted_eventually(sizes: list[int]) -> None:
    of = destination(2, 100)
    assert of.try_admit(100)
    waiters = [Waiter(of, size, timeout=PATIENCE) for size in sizes]
    finish(of, 100)
    for waiter, size in zip(waiters, sizes, strict=True):
        waiter.join(PATIENCE)
        assert waiter.admitted.is_set()
        finish(of, size)
    assert of.statistics().in_flight == of.statistics().waiting == 0


def test_call_ends_once() -> None:
    of = destination(calls=2)
    assert of.try_admit(10)
    call = Ended(10)
    assert of.finish(call, 5, True)
    assert not of.finish(call, 5, False)
    counted = of.statistics()
    assert (counted.in_flight, counted.bytes_in_flight, counted.failed, counted.bytes_received) == (0, 0, 1, 5)
