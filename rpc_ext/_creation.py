"""The message of ``remote``, whose failure its sender reports to the owner: requests for the value wait there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cudafuture.timer import schedule
from rpc_ext import _failure

__all__ = ["Creation"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two polls


class Creation:
    """The message of one call of ``remote``, which is polled while requests for the value wait.

    torch calls no callback of a failed message after its own, which raises the error.

    Args:
        rref: torch's reference.
        owner: name of the worker that makes the value.
        call: name of the function.
        tell: takes the reference and the error of a failed message; raises nothing.
    """

    __slots__ = ("_call", "_is_watched", "_owner", "_pause", "_rref", "_tell")

    def __init__(self, rref: Any, owner: str, call: str, tell: Callable[[Any, Exception], None]) -> None:
        self._rref, self._owner, self._call, self._tell = rref, owner, call, tell
        self._is_watched, self._pause = False, _FIRST_PAUSE

    def watch(self) -> None:
        """Start the polls, which end when the owner has replied to the message."""
        if not self._is_watched:
            self._is_watched = True
            schedule(self, time.perf_counter() + self._pause)

    def look(self, now: float) -> float | None:
        """Call `tell` if the message has failed. Called by the timer thread."""
        created = self._rref._get_future()
        if not created.done():
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return now + self._pause
        rref, self._rref = self._rref, None  # the timer may keep this object for a while
        try:
            created.value()
        except RuntimeError as e:
            self._tell(rref, _failure.of_torch(e, self._call, self._owner))
        return None
