"""The order in which operations take effect: of one client by sequence number, of all clients on one key by turn.

A client sends an operation without waiting for the one before it, and messages may overtake each other on their way. So
each entry names the operation on the same key that comes before it (`after`), and waits here until that one has its
turn. An operation that has timed out at the client may still be on its way: in a socket of a service that was stopped,
say. It is dropped when it arrives after its deadline, or after a later change of the same key.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from rpc_ext.offload._wire import Operation, Put

__all__ = ["KeyQueues", "RequestOrder"]

Ordered = Operation | Put
Begin = Callable[[list[int]], None]
"""begins the operations of a request with these indices"""
_logger = logging.getLogger("rpc_ext.offload")
_PURGE = 1024  # operations between two searches for keys that no operation can refer to any more


def _place(early: tuple[int, int, Callable[[], None]]) -> tuple[int, int]:
    return early[:2]


class _Begins:
    """Runs functions one after the other, those included that they add: a long chain of operations takes no stack."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._functions: collections.deque[Callable[[], None]] = collections.deque()
        self._runs = False

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run the functions, or leave them to the call that is at it."""
        with self._lock:
            self._functions.extend(functions)
            if self._runs:
                return
            self._runs = True
        while (function := self._next()) is not None:
            try:
                function()
            except Exception:  # the others have to begin all the same
                _logger.exception("an operation of an offload service could not begin")

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._runs = bool(self._functions)
            return self._functions.popleft() if self._runs else None


class RequestOrder:
    """The operations of one client, as they arrive.

    The clocks of client and service have different origins. The least difference between the arrival of a request and
    its sending, over all requests, is the difference of the origins plus the fastest way of a request. Deadlines are
    measured by it, so no request counts as late before its deadline.

    Args:
        sent: the client's clock when it asked for its session.
        on_late: called for each operation that is dropped.
    """

    def __init__(self, sent: float, on_late: Callable[[], None]) -> None:
        self._on_late = on_late
        self._begins = _Begins()
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._offset = time.perf_counter() - sent  # of the service's clock to the client's
        self._oldest = 0  # lowest sequence number of an operation that is not done at the client
        self._latest: dict[str, int] = {}  # by key: the last operation that has its turn
        self._changes: dict[str, tuple[int, float]] = {}  # by key: the last change, and when it expires
        # By key: a heap of the operations that wait for another one, by the number of that one.
        self._early: dict[str, list[tuple[int, int, Callable[[], None]]]] = {}
        self._numbers = itertools.count()
        self._until_purge = _PURGE

    def note_arrival(self, sent: float, oldest: int) -> None:
        """Take what a request says of its client."""
        with self._lock:
            self._offset = min(self._offset, time.perf_counter() - sent)
            self._oldest = max(self._oldest, oldest)

    def arrive(self, entries: Sequence[Ordered], begin: Begin) -> list[int]:
        """Return the indices of the operations that may begin.

        For each other one `begin` is called with its index, when the operation before it has its turn.
        """
        may_begin = []
        with self._lock:
            for i, entry in enumerate(entries):
                after = entry.after
                if not after or self._latest.get(entry.key, 0) >= after or after < self._oldest:
                    may_begin.append(i)
                else:
                    waiting = after, next(self._numbers), partial(begin, [i])
                    heapq.heappush(self._early.setdefault(entry.key, []), waiting)  # type: ignore[misc]
        return may_begin

    def note_change(self, entry: Ordered) -> TimeoutError | None:
        """Note that an operation changes its key; return the error of one that a later change has superseded.

        Operations that have no deadline are not noted: their client does not give them up, so they arrive in order.
        """
        with self._lock:
            if self._changes.get(entry.key, (0, 0.0))[0] <= entry.sequence:
                if entry.expires:
                    self._changes[entry.key] = entry.sequence, entry.expires
                return None
        self._on_late()
        return TimeoutError(
            f"the request to change key {entry.key!r} has reached the offload service after a later one"
        )

    def pass_on(self, entries: Sequence[Ordered]) -> None:
        """Begin the operations that wait for these, which have their turn."""
        begins: list[Callable[[], None]] = []
        with self._lock:
            for entry in entries:
                key = entry.key
                latest = self._latest[key] = max(self._latest.get(key, 0), entry.sequence)
                if (early := self._early.get(key)) is not None:
                    while early and early[0][0] <= latest:
                        begins.append(heapq.heappop(early)[2])
                    if not early:
                        del self._early[key]
            self._until_purge -= len(entries)
            if self._until_purge < 0:
                self._purge()
        if begins:
            self._begins.run(begins)

    def end(self) -> None:
        """Begin all operations that wait: the session has ended, so those before them do not arrive any more."""
        with self._lock:
            begins = [begin for early in self._early.values() for _, _, begin in sorted(early, key=_place)]
            self._early = {}
        self._begins.run(begins)

    def late(self, entries: Sequence[Ordered]) -> dict[int, TimeoutError]:
        """Return the errors of the operations whose deadline is over, by index."""
        now = time.perf_counter() - self._offset
        if not any(entry.expires and entry.expires < now for entry in entries):
            return {}
        late: dict[int, TimeoutError] = {}
        for i, entry in enumerate(entries):
            if entry.expires and entry.expires < now:
                self._on_late()
                seconds = now - entry.expires
                late[i] = TimeoutError(
                    f"the request has reached the offload service {seconds:.3g} s after its deadline"
                )
        return late

    def left(self, expires: float) -> float:
        """Return the seconds until a deadline of the client, which may be negative; inf: there is none."""
        return expires + self._offset - time.perf_counter() if expires else math.inf

    def _purge(self) -> None:
        """Forget the operations and changes that no later arrival can refer to, or be late for."""
        now = time.perf_counter() - self._offset
        self._latest = {key: latest for key, latest in self._latest.items() if latest >= self._oldest}
        self._changes = {key: change for key, change in self._changes.items() if change[1] >= now}
        self._until_purge = max(_PURGE, len(self._latest) + len(self._changes))


class KeyQueues:
    """One queue for each key that is being changed: changes one by one, reads when the changes before them are done."""

    def __init__(self) -> None:
        self._begins = _Begins()
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._waiting: dict[str, collections.deque[tuple[bool, Callable[[], None]]]] = {}

    def enter(self, entries: Sequence[Ordered], indices: Sequence[int], is_change: bool, begin: Begin) -> list[int]:
        """Return those of the indices whose operations have their turn now.

        For each other one `begin` is called with its index, when it has.
        """
        turns = []
        with self._lock:
            for i in indices:
                key = entries[i].key
                waiting = self._waiting.get(key)
                if waiting is not None:
                    waiting.append((is_change, partial(begin, [i])))
                    continue
                turns.append(i)
                if is_change:
                    self._waiting[key] = collections.deque()
        return turns

    def leave(self, keys: Sequence[str]) -> None:
        """End the change that had its turn on each of the keys, and begin the operations behind it."""
        begins: list[Callable[[], None]] = []
        with self._lock:
            for key in keys:
                waiting = self._waiting[key]
                is_change = False
                has_begun = False
                while waiting and not is_change:
                    is_change, begin = waiting.popleft()
                    begins.append(begin)
                    has_begun = True
                if has_begun and not is_change:
                    begins.append(partial(self.leave, [key]))  # changes wait until these reads have begun
                elif not is_change:
                    del self._waiting[key]
        if begins:
            self._begins.run(begins)
