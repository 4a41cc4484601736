"""The timer thread, which sends the calls that wait in batches and ends futures that are not done in time."""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import logging
import threading
import time
from typing import Any, Protocol

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError

__all__ = ["Timed", "cancel", "expire", "schedule"]

_logger = logging.getLogger("rpc_ext.timer")
_AFTER_FAILURE = 1.0  # seconds from a `look` that has raised to the next one
_LONGEST_SLEEP = 3600.0  # seconds; the wait of a condition is limited
_LINGER = 5.0  # seconds after which a thread without objects ends


class Timed(Protocol):
    """An object with work at a later time."""

    def look(self, now: float) -> float | None:
        """Do the work that is due at `now` (time.perf_counter()); return the time of the next call, or None."""


class _Timer:
    """The timer thread and its objects."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows; a leaf
        self._due: dict[Timed, tuple[float, int]] = {}
        self._numbered: dict[int, Timed] = {}  # the objects in _due, by the number of their entry in the heap
        self._heap: list[tuple[float, int]] = []  # also has entries that were removed: they keep no object alive
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._ends = False

    def schedule(self, what: Timed, due: float) -> None:
        """Call ``look`` of an object at `due`, or at an earlier time for which it is scheduled."""
        with self._changed:
            if what in self._due and due >= self._due[what][0]:
                return
            self._remove(what)
            entry = due, next(self._numbers)
            self._due[what], self._numbered[entry[1]] = entry, what
            heapq.heappush(self._heap, entry)
            self._compact()
            if self._thread is None and not self._ends:
                thread = threading.Thread(target=self._run, name="rpc_ext-timer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads; the next call tries again
                    self._remove(what)
                    raise
                self._thread = thread
            if self._heap[0] == entry:
                self._changed.notify()

    def cancel(self, what: Timed) -> None:
        """Release an object, whose ``look`` is not called any more."""
        with self._changed:
            self._remove(what)
            self._compact()

    def _remove(self, what: Timed) -> None:
        if (entry := self._due.pop(what, None)) is not None:
            del self._numbered[entry[1]]

    def _compact(self) -> None:
        """Drop the entries without an object, if they are most of the heap."""
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._numbered]
            heapq.heapify(self._heap)

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for what in due:
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
        with self._changed:
            while not self._ends:
                now = time.perf_counter()
                if due := self._take(now):
                    return due
                if not self._heap and now >= idle_until:
                    break
                due_at = self._heap[0][0] if self._heap else idle_until
                self._changed.wait(min(due_at - now, _LONGEST_SLEEP))
            self._thread = None
            return None

    def _take(self, now: float) -> list[Timed]:
        """Remove and return the objects that are due. Called under the lock."""
        due = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][1] not in self._numbered):
            _, number = heapq.heappop(self._heap)
            if (what := self._numbered.get(number)) is not None:
                self._remove(what)
                due.append(what)
        return due

    def end(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._ends = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join()


_timer = _Timer()
schedule, cancel = _timer.schedule, _timer.cancel
atexit.register(_timer.end)


def expire(future: CUDAFuture[Any], seconds: float, message: str) -> None:
    """Fail a future with TimeoutError if it is not done in time (0: no limit)."""
    if seconds and not future.done():
        expiry = _Expiry(future, message)
        schedule(expiry, time.perf_counter() + seconds)
        future.add_done_callback(expiry.release, executor=executors.inline)


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
