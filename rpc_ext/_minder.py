"""Who looks after what is due at some time: batches whose calls wait to be sent, futures that expire."""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import math
import threading
import time
from typing import Protocol

__all__ = ["Minded", "forget", "mind"]

_logger = logging.getLogger("rpc_ext.minder")
_AFTER_FAILURE = 1.0  # seconds from a look that has raised to the next one
_LONGEST_SLEEP = 3600.0  # seconds; a lock cannot wait for any number of them
_LINGER = 5.0  # seconds that the thread stays without anything to do


class Minded(Protocol):
    """What is looked after."""

    def look(self, now: float) -> float | None:
        """Do what is due at `now` (time.perf_counter()); return when to look again, or None."""


class _Minder:
    """One thread, which sleeps until something is due."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows; a leaf
        self._due: dict[Minded, float] = {}
        self._line: list[tuple[float, int, Minded]] = []  # a heap of what is due, and of what was
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._ends = False

    def mind(self, what: Minded, due: float) -> None:
        """Look after something from `due` on, or from an earlier moment that was given before."""
        with self._changed:
            if due >= self._due.get(what, math.inf):
                return
            self._due[what] = due
            heapq.heappush(self._line, (due, next(self._numbers), what))
            self._shorten()
            if self._thread is None and not self._ends:
                thread = threading.Thread(target=self._run, name="rpc_ext-minder", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads: this call fails, and the next one tries again
                    del self._due[what]
                    raise
                self._thread = thread
            if self._line[0][2] is what:
                self._changed.notify()

    def forget(self, what: Minded) -> None:
        """Look after it no more."""
        with self._changed:
            self._due.pop(what, None)
            self._shorten()

    def _shorten(self) -> None:
        """Drop what is not due any more, where that is most of the line."""
        if len(self._line) > 2 * len(self._due) + 64:
            self._line = [entry for entry in self._line if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._line)

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for what in due:
                try:
                    again = what.look(time.perf_counter())
                except BaseException:  # the thread goes on: others are due, and this one has more to do
                    _logger.exception("%r was due, and raised; it is looked at again in %g s", what, _AFTER_FAILURE)
                    again = time.perf_counter() + _AFTER_FAILURE
                if again is not None:
                    self.mind(what, again)

    def _wait(self) -> list[Minded] | None:
        """Sleep until something is due, and take it; None where nothing has been for a while."""
        idle_until = time.perf_counter() + _LINGER
        with self._changed:
            while not self._ends:
                now = time.perf_counter()
                if due := self._take(now):
                    return due
                if not self._line and now >= idle_until:
                    break
                due_at = self._line[0][0] if self._line else idle_until
                self._changed.wait(min(due_at - now, _LONGEST_SLEEP))
            self._thread = None
            return None

    def _take(self, now: float) -> list[Minded]:
        """Take what is due out of the line."""
        due = []
        while self._line and (self._line[0][0] <= now or self._line[0][0] != self._due.get(self._line[0][2])):
            when, _, what = heapq.heappop(self._line)
            if self._due.get(what) == when:
                del self._due[what]
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


_minder = _Minder()
mind, forget = _minder.mind, _minder.forget
atexit.register(_minder.end)
