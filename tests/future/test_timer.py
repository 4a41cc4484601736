"""The timer thread: it is in time and in order, and keeps no object that has nothing more to do."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Iterator

import pytest

from cudafuture import CUDAFuture
from cudafuture import timer as timer_module
from cudafuture.timer import _Timer, expire
from support.child import run_script
from support.interrupts import interrupt_at
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

    monkeypatch.setattr(timer_module, "_AFTER_FAILURE", 0.0)
    failing, other = Failing(again=2), Thing()
    timer.schedule(failing, 0)
    failing.done.wait(timeout=PATIENCE)
    timer.schedule(other, 0)
    other.done.wait(timeout=PATIENCE)
    assert "has raised; it is called again" in caplog.text


def test_raising_entry_spares_timer_thread(timer: _Timer, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Thing):
        def look(self, now: float) -> float | None:
            raise OSError("while it was looked at")

    good = Thing()
    with timer._lock:  # both are due in one round, the one that raises first
        timer.schedule(Failing(), 0.0)
        timer.schedule(good, 0.0)
    good.done.wait(timeout=PATIENCE)
    assert "while it was looked at" in caplog.text


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


def test_timer_works_after_end(timer: _Timer) -> None:
    timer.schedule(Thing(), time.perf_counter() + 1000)
    timer.end()
    thing = Thing()
    timer.schedule(thing, 0)
    thing.done.wait(timeout=PATIENCE)


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


@pytest.mark.parametrize("call", ["schedule", "schedule sooner", "cancel"])
def test_ctrl_c_anywhere_leaves_timer_usable(call: str) -> None:
    later = time.perf_counter() + 1000
    for line in itertools.count(1):
        timer, known, thing = _Timer(), Thing(), Thing()
        if call != "schedule":
            timer.schedule(known, later)
        bodies = {
            "schedule": lambda: timer.schedule(thing, later),  # noqa: B023
            "schedule sooner": lambda: timer.schedule(known, later - 1),  # noqa: B023
            "cancel": lambda: timer.cancel(known),  # noqa: B023
        }
        was_interrupted = interrupt_at(line, timer_module.__file__, bodies[call])
        with timer._lock:
            assert all(entry[2] == [what] and entry in timer._heap for what, entry in timer._scheduled.items()), line
        timer.cancel(thing)
        other = Thing()
        for each in (known, other):
            timer.schedule(each, 0)
            each.done.wait(timeout=PATIENCE)
        assert not timer._scheduled, line
        timer.end()
        if not was_interrupted:
            break
    assert line > 3


def test_forked_child_has_timer_of_its_own() -> None:
    result = run_script("""
import os, threading, time
from cudafuture import timer

class Due:
    def __init__(self):
        self.looked = threading.Event()
    def look(self, now):
        self.looked.set()

due = Due()
timer.schedule(due, 0)
assert due.looked.wait(60)
timer.schedule(Due(), time.perf_counter() + 1000)
locked, forked = threading.Event(), threading.Event()
def hold():
    with timer._timer._lock:
        locked.set()
        forked.wait()
holder = threading.Thread(target=hold)
holder.start()
locked.wait()
child = os.fork()
forked.set()
if child == 0:
    due = Due()
    timer.schedule(due, 0)
    assert due.looked.wait(60)
else:
    holder.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
print("ended")
""")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ended\nended\n", "")
