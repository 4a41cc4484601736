"""The timer thread: it is in time and in order, and keeps no object that has nothing more to do."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from cudafuture import CUDAFuture, InvalidStateError
from rpc_ext import _timer
from rpc_ext._serve import Server
from rpc_ext._timer import _Timer, expire
from support.patience import PATIENCE


@pytest.fixture
def timer() -> Iterator[_Timer]:
    timer = _Timer()
    yield timer
    timer.end()


def test_unlockable_duration_spares_thread(timer: _Timer) -> None:
    now = time.perf_counter()
    timer.schedule(Thing(), now + 1e300)
    thing = Thing()
    timer.schedule(thing, now + 0.05)
    thing.done.wait(timeout=PATIENCE)


class Thing:
    """An object that asks for `again` more looks."""

    def __init__(self, again: int = 0) -> None:
        self.looked: list[float] = []
        self.done: CUDAFuture[None] = CUDAFuture()
        self._again = again

    def look(self, now: float) -> float | None:
        self.looked.append(now)
        if len(self.looked) <= self._again:
            return now
        self.done.set_result(None)
        return None


def test_entry_is_visited_when_due(timer: _Timer) -> None:
    late, soon = Thing(), Thing()
    due = time.perf_counter() + 0.05
    timer.schedule(late, due + 1000)
    timer.schedule(soon, due)
    soon.done.wait(timeout=PATIENCE)
    assert soon.looked[0] >= due
    assert not late.done.done()
    timer.schedule(late, due)  # sooner, after all
    late.done.wait(timeout=PATIENCE)


def test_entry_may_ask_for_another_visit(timer: _Timer) -> None:
    thing = Thing(again=5)
    timer.schedule(thing, 0)
    thing.done.wait(timeout=PATIENCE)
    assert len(thing.looked) == 6


@pytest.mark.parametrize("error", [LookupError("of a look"), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_raising_visit_is_repeated(
    timer: _Timer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    class Failing(Thing):
        def look(self, now: float) -> float | None:
            if not self.looked:
                self.looked.append(now)
                raise error
            return super().look(now)

    monkeypatch.setattr(_timer, "_AFTER_FAILURE", 0.0)
    failing, other = Failing(again=2), Thing()
    timer.schedule(failing, 0)
    failing.done.wait(timeout=PATIENCE)
    timer.schedule(other, 0)
    other.done.wait(timeout=PATIENCE)
    assert "has raised; it is called again" in caplog.text


def test_cancelled_entries_are_released(timer: _Timer) -> None:
    later = time.perf_counter() + 1000
    things = [Thing() for _ in range(1000)]
    for thing in things:
        timer.schedule(thing, later)
    for thing in things:
        timer.cancel(thing)
        timer.cancel(thing)
    assert len(timer._heap) < 100
    last = weakref.ref(things[0])
    del things, thing
    gc.collect()
    assert last() is None


def test_cancelled_entry_is_released_at_once(timer: _Timer) -> None:
    thing, other = Thing(), Thing()
    last = weakref.ref(thing)
    for each in (thing, other):
        timer.schedule(each, time.perf_counter() + 1000)
    timer.cancel(thing)
    del thing, each
    gc.collect()
    assert last() is None
    timer.schedule(other, 0)
    other.done.wait(timeout=PATIENCE)


def test_rescheduling_one_object_takes_little_room(timer: _Timer) -> None:
    thing = Thing()
    later = time.perf_counter() + 10_000
    for i in range(5000):
        timer.schedule(thing, later - i)
    assert len(timer._heap) < 100
    timer.schedule(thing, 0)
    thing.done.wait(timeout=PATIENCE)


def test_pending_futures_expire() -> None:
    late: CUDAFuture[int] = CUDAFuture()
    done: CUDAFuture[int] = CUDAFuture()
    expire(done, 0.01, "too late")
    done.set_result(1)
    expire(late, 0.01, "too late")
    with pytest.raises(TimeoutError, match="too late"):
        late.wait(timeout=PATIENCE)
    assert done.value() == 1


def test_ended_session_fails_reference_futures() -> None:
    server = Server("me", 1)
    before: CUDAFuture[int] = CUDAFuture()
    done: CUDAFuture[int] = CUDAFuture()
    after: CUDAFuture[int] = CUDAFuture()
    server.fail_at_end(before)
    server.fail_at_end(done)
    done.set_result(1)
    assert len(server._awaited) == 1
    server.close()
    server.fail_at_end(after)
    for future in (before, after):
        assert isinstance(future.exception(timeout=0), InvalidStateError)
    assert done.value() == 1
    assert not server._awaited
