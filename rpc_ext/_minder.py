"""Who looks after batches: nobody else would, while their calls wait to be sent."""

from __future__ import annotations

import atexit
import math
import threading
import time
from typing import Protocol

__all__ = ["Minded", "mind"]

_LINGER = 5.0  # seconds that the thread stays without anything to do


class Minded(Protocol):
    """What is looked after."""

    def look(self, now: float) -> float | None:
        """Do what is due at `now` (time.perf_counter()); return when to look again, or None. Raises nothing."""


class _Minder:
    """One thread, which sleeps until something is due."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows; a leaf
        self._due: dict[Minded, float] = {}
        self._thread: threading.Thread | None = None
        self._ends = False

    def mind(self, what: Minded, due: float) -> None:
        """Look after something from `due` on, or from an earlier moment that was given before."""
        with self._changed:
            self._due[what] = min(due, self._due.get(what, math.inf))
            if self._thread is None and not self._ends:
                self._thread = threading.Thread(target=self._run, name="rpc_ext-minder", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for what in due:
                again = what.look(time.perf_counter())
                if again is not None:
                    self.mind(what, again)

    def _wait(self) -> list[Minded] | None:
        """Sleep until something is due, and take it; None where nothing has been for a while."""
        idle_until = time.perf_counter() + _LINGER
        with self._changed:
            while not self._ends:
                now = time.perf_counter()
                due = [what for what, when in self._due.items() if when <= now]
                if due:
                    for what in due:
                        del self._due[what]
                    return due
                if not self._due and now >= idle_until:
                    break
                self._changed.wait(min([*self._due.values(), idle_until if not self._due else math.inf]) - now)
            self._thread = None
            return None

    def end(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._ends = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join()

    def renew(self) -> None:
        """Be as new, in a child that was forked."""
        self.__init__()  # type: ignore[misc]


_minder = _Minder()
mind = _minder.mind
atexit.register(_minder.end)
