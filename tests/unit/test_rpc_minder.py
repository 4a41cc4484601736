"""Who looks after what is due: in time, in order, and without keeping what is not to be looked after any more."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from cudafuture import CUDAFuture, InvalidStateError
from rpc_ext import _minder
from rpc_ext._awaited import Awaited
from rpc_ext._expiry import expire
from rpc_ext._minder import _Minder

PATIENCE = 60.0


@pytest.fixture
def minder() -> Iterator[_Minder]:
    minder = _Minder()
    yield minder
    minder.end()


def test_a_time_beyond_all_locks_ends_no_thread(minder: _Minder) -> None:
    now = time.perf_counter()
    minder.mind(Thing(), now + 1e300)
    thing = Thing()
    minder.mind(thing, now + 0.05)
    thing.done.wait(timeout=PATIENCE)


class Thing:
    """Something that is looked after, and wants that again as often as it is told."""

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


def test_what_is_due_is_looked_at_then_and_not_before(minder: _Minder) -> None:
    late, soon = Thing(), Thing()
    due = time.perf_counter() + 0.05
    minder.mind(late, due + 1000)
    minder.mind(soon, due)
    soon.done.wait(timeout=PATIENCE)
    assert soon.looked[0] >= due
    assert not late.done.done()
    minder.mind(late, due)  # sooner, after all
    late.done.wait(timeout=PATIENCE)


def test_what_wants_it_is_looked_at_again(minder: _Minder) -> None:
    thing = Thing(again=5)
    minder.mind(thing, 0)
    thing.done.wait(timeout=PATIENCE)
    assert len(thing.looked) == 6


@pytest.mark.parametrize("error", [LookupError("of a look"), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_a_look_that_raises_ends_neither_its_own_nor_those_of_others(
    minder: _Minder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    class Failing(Thing):
        def look(self, now: float) -> float | None:
            if not self.looked:
                self.looked.append(now)
                raise error
            return super().look(now)

    monkeypatch.setattr(_minder, "_AFTER_FAILURE", 0.0)
    failing, other = Failing(again=2), Thing()
    minder.mind(failing, 0)
    failing.done.wait(timeout=PATIENCE)
    minder.mind(other, 0)
    other.done.wait(timeout=PATIENCE)
    assert "was due, and raised" in caplog.text


def test_what_is_forgotten_is_let_go_of_and_costs_nothing(minder: _Minder) -> None:
    later = time.perf_counter() + 1000
    things = [Thing() for _ in range(1000)]
    for thing in things:
        minder.mind(thing, later)
    for thing in things:
        minder.forget(thing)
        minder.forget(thing)
    assert len(minder._line) < 100
    last = weakref.ref(things[0])
    del things, thing
    gc.collect()
    assert last() is None


def test_one_thing_that_is_due_ever_sooner_takes_little_room(minder: _Minder) -> None:
    thing = Thing()
    later = time.perf_counter() + 10_000
    for i in range(5000):
        minder.mind(thing, later - i)
    assert len(minder._line) < 100
    minder.mind(thing, 0)
    thing.done.wait(timeout=PATIENCE)


def test_futures_expire_unless_they_are_done() -> None:
    late: CUDAFuture[int] = CUDAFuture()
    done: CUDAFuture[int] = CUDAFuture()
    expire(done, 0.01, "too late")
    done.set_result(1)
    expire(late, 0.01, "too late")
    with pytest.raises(TimeoutError, match="too late"):
        late.wait(timeout=PATIENCE)
    assert done.value() == 1


def test_what_a_session_waits_for_fails_when_it_ends_and_afterwards() -> None:
    awaited = Awaited()
    before: CUDAFuture[int] = CUDAFuture()
    done: CUDAFuture[int] = CUDAFuture()
    after: CUDAFuture[int] = CUDAFuture()
    awaited.add(before)
    awaited.add(done)
    done.set_result(1)
    assert len(awaited) == 1
    awaited.close()
    awaited.add(after)
    for future in (before, after):
        assert isinstance(future.exception(timeout=0), InvalidStateError)
    assert done.value() == 1
    assert len(awaited) == 0
