"""The timer thread of the process, which calls objects with work at a later time.

::

    schedule(object, due) ──► heap of times ──► timer thread ──► object.look(now) ──► the time of its next call, or None

A ``look`` must not block, because all objects share the thread, and the timer holds no lock while it calls one. Inline
callbacks of the futures that a ``look`` completes run in the thread, too.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import logging
import math
import os
import queue
import threading
import time
from typing import Any, Protocol

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.graph_breaks import break_graphs

__all__ = ["Timed", "cancel", "expire", "schedule"]

_logger = logging.getLogger("cudafuture.timer")
_AFTER_FAILURE = 1.0  # seconds from a `look` that has raised to the next one
_LONGEST_SLEEP = 3600.0  # seconds; the wait for a wake-up is limited
_LINGER = 5.0  # seconds after which a thread without objects ends


class Timed(Protocol):
    """An object with work at a later time."""

    def look(self, now: float) -> float | None:
        """Do the work that is due at `now` (time.perf_counter()); return the time of the next call, or None."""


_Entry = tuple[float, int, list[Timed]]  # the time, the number of the entry, and the object, or [] if it was removed


class _Timer:
    """The timer thread and its objects.

    Ctrl-C at any line of ``schedule`` and ``cancel`` leaves every object with its entry or without one.
    """

    def __init__(self) -> None:
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # guards what follows; a leaf; re-entrant, as a collection may run any code
        self._scheduled: dict[Timed, _Entry] = {}
        self._heap: list[_Entry] = []  # those in _scheduled, and others, which are skipped
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._wakes_at = -math.inf  # when the thread looks for due objects; -inf: it is awake
        self._ends = False

    def schedule(self, what: Timed, due: float) -> None:
        """Call ``look`` of an object at `due`, or at an earlier time for which it is scheduled."""
        with self._lock:
            before = self._scheduled.get(what)
            if before is not None and due >= before[0]:
                return
            self._start()
            entry = due, next(self._numbers), [what]
            heapq.heappush(self._heap, entry)
            self._scheduled[what] = entry  # from here on this entry counts, and the one before does not
            if before is not None:
                before[2].clear()
            self._compact()
            if due < self._wakes_at:
                self._wake_ups.put(None)
                self._wakes_at = due

    def cancel(self, what: Timed) -> None:
        """Release an object, whose ``look`` is not called any more."""
        with self._lock:
            entry = self._scheduled.pop(what, None)
            if entry is not None:
                entry[2].clear()
                self._compact()

    def _start(self) -> None:
        """Start the thread unless it runs. Called under the lock."""
        thread = self._thread
        if thread is not None and thread.ident is not None:
            return
        # Kept before its start: Ctrl-C may interrupt that. Then another thread takes its place.
        self._thread = thread = threading.Thread(target=self._run, name="cudafuture-timer", daemon=True)
        self._wakes_at = -math.inf
        thread.start()  # raises if the system has no more threads; the next call tries again

    def _compact(self) -> None:
        """Drop the entries without an object, if they are most of the heap."""
        if len(self._heap) > 2 * len(self._scheduled) + 64:
            self._heap = [entry for entry in self._heap if entry[2]]  # also one that is about to count
            heapq.heapify(self._heap)

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            while due:
                self._look(due.pop(0))  # no name here keeps the object, while the thread waits

    def _look(self, what: Timed) -> None:
        try:
            again = what.look(time.perf_counter())
        except BaseException:  # the thread continues: other objects are due, and this one may have more work
            _logger.exception("look() of %r has raised; it is called again in %g s", what, _AFTER_FAILURE)
            again = time.perf_counter() + _AFTER_FAILURE
        if again is not None:
            self.schedule(what, again)

    def _wait(self) -> list[Timed] | None:
        """Wait until objects are due; return them, or None if none was due for a while."""
        idle_until = time.perf_counter() + _LINGER
        while True:
            with self._lock:
                now = time.perf_counter()
                if self._ends or self._thread is not threading.current_thread():
                    return None
                if due := self._take(now):
                    self._wakes_at = -math.inf
                    return due
                if not self._heap and now >= idle_until:
                    self._thread = None
                    return None
                self._wakes_at = self._heap[0][0] if self._heap else idle_until
                seconds = min(max(0.0, self._wakes_at - now), _LONGEST_SLEEP)
            with contextlib.suppress(queue.Empty):
                self._wake_ups.get(timeout=seconds)

    def _take(self, now: float) -> list[Timed]:
        """Remove and return the objects that are due. Called under the lock."""
        due = []
        while self._heap and (self._heap[0][0] <= now or not self._heap[0][2]):
            entry = heapq.heappop(self._heap)
            for what in entry[2]:
                if self._scheduled.get(what) is entry:
                    del self._scheduled[what]
                    due.append(what)
        return due

    def end(self) -> None:
        """Stop the thread. An object that is scheduled later starts another, which ends with the process."""
        with self._lock:
            self._ends = True
            thread, self._thread = self._thread, None
        self._wake_ups.put(None)
        if thread is not None and thread.ident is not None:
            thread.join(_LINGER)  # a callback that runs in it may never return
        self._ends = False


_timer = _Timer()
_of_parent: list[_Timer] = []


def schedule(what: Timed, due: float) -> None:
    """Call ``look`` of an object at `due`, or at an earlier time for which it is scheduled.

    Args:
        what: the timer keeps it until then. Its ``look`` must not block; if it raises, it is called again in a second.
        due: in seconds of ``time.perf_counter()``.

    Raises:
        RuntimeError: the thread does not run, and the system has no more threads; the object is not scheduled.

    >>> class Reminder:
    ...     future = CUDAFuture()
    ...     def look(self, now):
    ...         self.future.set_result("due")
    >>> schedule(Reminder(), time.perf_counter() + 0.01)
    >>> Reminder.future.wait()
    'due'
    """
    _timer.schedule(what, due)


def cancel(what: Timed) -> None:
    """Release an object, whose ``look`` is not called any more. A call that has begun continues.

    >>> class Reminder:
    ...     def look(self, now):
    ...         print("due")
    >>> reminder = Reminder()
    >>> schedule(reminder, time.perf_counter() + 60)
    >>> cancel(reminder)
    """
    _timer.cancel(what)


def expire(future: CUDAFuture[Any], seconds: float, message: str) -> None:
    """Fail a future with TimeoutError if it is not done in time (0: no limit).

    Args:
        future: released when it is done. Its inline callbacks run in the timer thread after the timeout.
        seconds: from now.
        message: of the error.

    Raises:
        RuntimeError: as for ``schedule``.

    >>> future = CUDAFuture()
    >>> expire(future, 0.01, "no value came within 0.01 s")
    >>> future.exception()
    TimeoutError('no value came within 0.01 s')
    """
    if seconds and not future.done():
        expiry = _Expiry(future, message)
        schedule(expiry, time.perf_counter() + seconds)
        future.add_done_callback(expiry.release, executor=_C.inline_executor)


class _Expiry:
    def __init__(self, future: CUDAFuture[Any], message: str) -> None:
        self._future: CUDAFuture[Any] | None = future
        self._message = message

    def look(self, _: float) -> None:
        future = self._future
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # it has just completed
                future.set_exception(TimeoutError(self._message))

    def release(self, _: object) -> None:
        """Release the future and its value before the timeout."""
        self._future = None
        cancel(self)


def _end() -> None:
    _timer.end()


def _begin_in_child() -> None:
    """Give a forked child a timer of its own, and keep the parent's: freeing its objects may take locks held there."""
    global _timer
    _of_parent.append(_timer)
    _timer = _Timer()


atexit.register(_end)
os.register_at_fork(after_in_child=_begin_in_child)

break_graphs(Timed, cancel, expire, schedule)
