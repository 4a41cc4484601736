"""The order of one client's requests to an offload service.

A request that has timed out at the client may still be on its way: in a socket of a service that was stopped, say. Each
request carries a stamp, so that the service drops it when it arrives after its deadline, or after a later change of the
same key.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Late", "RequestOrder", "Stamp", "Stamps", "never"]

Late = Callable[[str], "TimeoutError | None"]
"""returns why a key must not be changed any more, or None"""

_PURGE = 1024  # keys between two searches for those that no request can be late for


class Stamp(NamedTuple):
    """When a request was sent, and how long it holds."""

    sequence: int
    """of the client's requests, from 1; the pieces of one tensor have the same"""
    sent: float
    """seconds on the client's monotonic clock"""
    expires: float
    """seconds on the same clock; 0: never"""


class Stamps:
    """The stamps of one client."""

    def __init__(self) -> None:
        self._sequence = itertools.count(1)

    def next(self) -> int:
        """Return the next sequence number. The requests of one large tensor share a number."""
        return next(self._sequence)

    def stamp(self, sequence: int, expires: float) -> Stamp:
        """Return the stamp of a request sent now. `expires` is a time of time.monotonic(); 0: no limit."""
        return Stamp(sequence, time.monotonic(), expires)


class RequestOrder:
    """Decides which requests of one client are late.

    The clocks of client and service have different origins. The least difference between the arrival of a request and
    its sending, over all requests, is the difference of the origins plus the fastest way of a request. A deadline is
    measured by that, so a request is never taken for late before its deadline.

    Args:
        sent: the client's clock when it asked for its session.
        on_late: called for each request, or change of a key, that is late.
    """

    def __init__(self, sent: float, on_late: Callable[[], None]) -> None:
        self._on_late = on_late
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._offset = time.monotonic() - sent  # of the service's clock to the client's
        self._changes: dict[str, tuple[int, float]] = {}  # the last change of each key, and when it expires there
        self._until_purge = _PURGE

    def expect_in_time(self, stamp: Stamp) -> None:
        """Raise TimeoutError if the deadline of a request that arrives is over."""
        with self._lock:
            self._offset = min(self._offset, time.monotonic() - stamp.sent)
        if (error := self._expired(stamp.expires)) is not None:
            raise error

    def change(self, stamp: Stamp, expiries: Mapping[str, float]) -> None:
        """Note that a request that has arrived changes keys, each until its own expiry.

        A change without an expiry is not noted: the client waits for its answer before it changes the key again.
        """
        with self._lock:
            for key, expires in expiries.items():
                if expires and self._changes.get(key, (0, 0.0))[0] < stamp.sequence:
                    self._changes[key] = stamp.sequence, expires
                    self._until_purge -= 1
            if self._until_purge < 0:
                self._purge()

    def late(self, stamp: Stamp, expiries: Mapping[str, float], key: str) -> TimeoutError | None:
        """Return why a request must not change a key any more, or None."""
        with self._lock:
            is_superseded = self._changes.get(key, (0, 0.0))[0] > stamp.sequence
        if is_superseded:
            self._on_late()
            return TimeoutError(f"the request to change key {key!r} has reached the offload service after a later one")
        return self._expired(expiries[key])

    def left(self, expires: float) -> float:
        """Return the seconds that are left of a deadline of the client's; 0 has none."""
        with self._lock:
            return expires + self._offset - time.monotonic() if expires else math.inf

    def _expired(self, expires: float) -> TimeoutError | None:
        with self._lock:
            late = time.monotonic() - self._offset - expires if expires else 0.0
        if late <= 0:
            return None
        self._on_late()
        return TimeoutError(f"the request has reached the offload service {late:.3g} s after its deadline")

    def _purge(self) -> None:
        """Forget changes that have expired: an earlier request to change the same key has expired before."""
        now = time.monotonic() - self._offset
        self._changes = {key: change for key, change in self._changes.items() if change[1] >= now}
        self._until_purge = max(_PURGE, len(self._changes))


def never(_: str) -> None:
    """Return None: a change that is no client's request is never late."""
