"""The rendezvous: workers agree on the session that they begin, however often each of them has tried before.

::

    each       tries/{rank} + 1 = its try ──► come/{rank} = try
    the first  sees a try of every worker ──► number + 1 = the session ──► session/{rank}/{try} = session, for each
    each       finds the session of its try ──► seen/{session}/{rank} ──► returns when all of these are there

The first worker makes another session when a worker has tried again, so the records of a start that was given up delay
no worker. One request finds out whether all have come, or have seen the session, whatever the world: those keys exist
only if the workers have written them for this start.

Nothing here is secret or signed: the handshake, which follows in the session's part of the store, shows who the other
workers are.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from datetime import timedelta
from typing import Any

from rpc_ext import _engine

__all__ = ["Records", "agree", "session_store"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5  # seconds between two looks, of most of which each is one request
_THOROUGH = 4  # every so many looks a worker also looks for records that other processes have changed


def session_store(init_method: str, rank: int, world_size: int, timeout: float) -> Any:
    """Return a store for one session alone, the same for all workers, however often each has begun RPC before.

    Raises:
        TimeoutError: the store cannot be reached in time, or a worker has not come.
        ConnectionError: the store cannot be made: its port is in use, say.
    """
    # The host of a TCPStore would wait for the others right here, and could not say who is missing.
    expected = 1 if rank == 0 and init_method.startswith(("env:", "tcp:")) else world_size
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(_engine.rendezvous(init_method, rank=rank, world_size=expected, timeout=limit))
        store.set_timeout(limit)
        store = _engine.PrefixStore(f"cudafuture_rpc/{world_size}", store)
        number = agree(_engine.PrefixStore("rendezvous", store), rank, world_size, timeout)
    except _engine.StoreError as e:
        if re.search(r"timed? ?out", str(e), re.IGNORECASE):
            raise TimeoutError(f"the store at {init_method} cannot be reached within {timeout:g} s: {e}") from e
        raise ConnectionError(f"the store at {init_method} cannot be reached: {e}") from e
    return _engine.PrefixStore(str(number), store)


def agree(store: Any, rank: int, world_size: int, timeout: float) -> int:
    """Return the number of a session that all workers have begun, the same for all; the least is 1.

    Raises:
        TimeoutError: some worker has not come within `timeout` seconds.
    """
    return _Rendezvous(store, rank, world_size).number(timeout)


class Records:
    """The records of one worker in a store, in which other processes may overwrite them.

    Args:
        store: of the job.
        most: how many of the newest records are put back; default: all.
    """

    def __init__(self, store: Any, most: float = math.inf) -> None:
        self._store, self._most = store, most
        self._written: dict[str, str] = {}  # oldest first
        self.is_closed = False
        """set by another thread: the store is left alone from then on"""

    def write(self, key: str, record: str) -> None:
        """Write a record."""
        self._written[key] = record
        if len(self._written) > self._most:
            del self._written[next(iter(self._written))]
        if not self.is_closed:
            self._store.set(key, record)

    def put_back(self) -> bool:
        """Write the records again that another process has overwritten; return whether there were any."""
        keys = list(self._written)
        if self._store.check(keys):
            if self.is_closed:
                return False
            there = self._store.multi_get(keys)
            keys = [key for key, record in zip(keys, there, strict=True) if record != self._written[key].encode()]
        for key in keys:
            self.write(key, self._written[key])
        return bool(keys)


class _Rendezvous:
    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._records = Records(store)
        self._try: int = store.add(f"tries/{rank}", 1)
        self._number = 0  # of the session; 0: none yet
        self._taking_part: list[int] = []  # for the first worker: which try of each worker takes part in it
        self._records.write(f"come/{rank}", str(self._try))

    def number(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        for turn in itertools.count(1):
            before = self._number
            is_overwritten = turn % _THOROUGH == 0 and self._records.put_back()
            # A session may be of earlier tries: look for a newer one in every other look.
            looks_again = turn % 2 == 0 or not self._number
            if looks_again:
                if self._rank == 0:
                    self._make()
                else:
                    self._find()
            is_new, is_last = self._number != before, time.monotonic() > deadline
            asks_who_has_seen = is_new or is_last or not looks_again
            if self._number and asks_who_has_seen and self._store.check(self._keys(f"seen/{self._number}")):
                break
            if is_last:
                who = ", ".join(map(str, self._missing()))
                raise TimeoutError(f"worker {who} of {self._world_size} has not come within {timeout:g} s")
            has_changed = is_overwritten or is_new  # then something follows soon
            pause = _FIRST_PAUSE if has_changed else min(2 * pause, _LONGEST_PAUSE)
            time.sleep(pause)
        return self._number

    def _make(self) -> None:
        """Make a session if all workers have come: a new one where a worker has tried again since."""
        come = self._keys("come")
        if not self._store.check(come):
            return
        tries = [_number(record) for record in self._store.multi_get(come)]
        tries[0] = self._try
        if 0 in tries or tries == self._taking_part:
            return
        number = self._store.add("number", 1)
        for rank, its_try in enumerate(tries):
            self._records.write(f"session/{rank}/{its_try}", str(number))
        self._taking_part = tries
        self._see(number)

    def _find(self) -> None:
        """Find the session that the first worker has made with this try of this worker."""
        key = f"session/{self._rank}/{self._try}"
        if self._store.check([key]) and (number := _number(self._store.get(key))) not in (0, self._number):
            self._see(number)

    def _see(self, number: int) -> None:
        self._number = number
        self._records.write(f"seen/{number}/{self._rank}", "1")

    def _missing(self) -> list[int]:
        keys = self._keys(f"seen/{self._number}" if self._number else "come")
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])] or [0]

    def _keys(self, step: str) -> list[str]:
        return [f"{step}/{rank}" for rank in range(self._world_size)]


def _number(record: bytes) -> int:
    """Return the positive number that a record says, or 0 where it says none."""
    return int(record) if re.fullmatch(rb"[1-9][0-9]{0,17}", record) else 0
