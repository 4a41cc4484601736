"""Who looks whether devices have finished what messages wait for."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from cudafuture import CUDAFuture

__all__ = ["Finisher"]

_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds between two looks
_LINGER = 5.0  # seconds that the thread stays without anything to do


class _Watched(NamedTuple):
    future: CUDAFuture[Any]
    deadline: float
    done: Callable[[], None]

    def is_due(self) -> bool:
        try:
            return self.future.ready() or time.monotonic() > self.deadline
        except Exception:  # of a device that is lost: whoever asks for the value hears of it
            return True


class Finisher:
    """One thread for all that is watched.

    Callbacks of futures would do but for two things: a callback of somebody's that waits for this very call would hold
    them up; and they have no timeout.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows; a leaf
        self._new: list[_Watched] = []
        self._thread: threading.Thread | None = None
        self._ends = False
        atexit.register(self._end)

    def watch(self, future: CUDAFuture[Any], seconds: float, done: Callable[[], None]) -> None:
        """Call ``done()`` when the devices have finished, or the seconds are over (0: no limit). It raises nothing."""
        deadline = time.monotonic() + seconds if seconds else float("inf")
        with self._changed:
            self._new.append(_Watched(future, deadline, done))
            if self._thread is None and not self._ends:
                self._thread = threading.Thread(target=self._run, name="rpc_ext-finisher", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        watched: list[_Watched] = []
        pause = _FIRST_PAUSE
        while self._goes_on(watched, pause):
            before, watched = watched, []
            due: list[_Watched] = []
            for one in before:
                (due if one.is_due() else watched).append(one)
            pause = _FIRST_PAUSE if due else min(2 * pause, _LONGEST_PAUSE)
            del before
            while due:
                due.pop(0).done()

    def _goes_on(self, watched: list[_Watched], pause: float) -> bool:
        """Pause, and take what is new; false where there is nothing more to do."""
        with self._changed:
            if not self._new and not self._ends:
                self._changed.wait(pause if watched else _LINGER)
            watched += self._new
            self._new = []
            if self._ends or not watched:
                self._thread = None
                return False
            return True

    def _end(self) -> None:
        with self._changed:
            self._ends = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join()
