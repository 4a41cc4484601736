"""The rendezvous: the workers agree on a session, even if some of them have tried several times.

::

    each       tries/{rank} + 1 = its try ──► come/{rank} = try
    the first  sees a try of every worker ──► number + 1 = the session ──► session/{rank}/{try} = session, for each
    each       finds the session of its try ──► seen/{session}/{rank} ──► returns when all of these are there

The first worker makes another session when a worker has tried again, so the records of an abandoned start delay no
worker. One request shows for any number of workers if all have arrived, or have seen the session: their keys exist
only if the workers have written them for this start.

Nothing here is secret or signed. The handshake, which follows in the session's part of the store, authenticates the
workers.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import threading
import time
from datetime import timedelta
from typing import Any

from rpc_ext import _engine

__all__ = ["Records", "agree", "session_store"]

_logger = logging.getLogger("rpc_ext.session")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5  # seconds between two polls, most of one request
_NOTICE = 5.0  # seconds after which a worker that waits logs a warning
_WAITS = "init_rpc() waits: %s. Its timeout is %g s. Check MASTER_ADDR, MASTER_PORT, rank and world size of all workers"
_THOROUGH = 4  # polls after which a worker also checks for records that other processes have changed


def session_store(init_method: str, rank: int, world_size: int, timeout: float) -> Any:
    """Return the part of the store for one new session, the same for all workers.

    Raises:
        TimeoutError: the store cannot be reached in time, or a worker is missing.
        ConnectionError: the store cannot be created, for example because its port is in use.
    """
    # With the true world size the host of a TCPStore would wait here, and could not name the missing workers.
    expected = 1 if rank == 0 and init_method.startswith(("env:", "tcp:")) else world_size
    limit = timedelta(seconds=timeout)
    where = init_method
    if init_method == "env://":
        where += f" (MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')})"
    notice = threading.Timer(_NOTICE, _logger.warning, (_WAITS, f"the store at {where} cannot be reached", timeout))
    notice.daemon = True
    notice.start()
    try:
        store, _, _ = next(_engine.rendezvous(init_method, rank=rank, world_size=expected, timeout=limit))
        notice.cancel()
        store.set_timeout(limit)
        store = _engine.PrefixStore(f"cudafuture_rpc/{world_size}", store)
        number = agree(_engine.PrefixStore("rendezvous", store), rank, world_size, timeout)
    except _engine.StoreError as e:
        if re.search(r"timed? ?out", str(e), re.IGNORECASE):
            raise TimeoutError(f"the store at {where} cannot be reached within {timeout:g} s: {e}") from e
        raise ConnectionError(f"the store at {where} cannot be reached: {e}") from e
    finally:
        notice.cancel()
    return _engine.PrefixStore(str(number), store)


def agree(store: Any, rank: int, world_size: int, timeout: float) -> int:
    """Return the number of a session that all workers have begun, from 1 on, the same for all.

    Raises:
        TimeoutError: a worker has not arrived within `timeout` seconds.
    """
    return _Rendezvous(store, rank, world_size).number(timeout)


class Records:
    """The records of one worker in a store where other processes may overwrite them.

    Args:
        store: store of the job.
        most: number of the newest records that are restored; default: all.
    """

    def __init__(self, store: Any, most: float = math.inf) -> None:
        self._store, self._most = store, most
        self._written: dict[str, str] = {}  # oldest first
        self.is_closed = False
        """True, set by another thread: the store is not used any more"""

    def write(self, key: str, record: str) -> None:
        """Write a record."""
        self._written[key] = record
        if len(self._written) > self._most:
            del self._written[next(iter(self._written))]
        if not self.is_closed:
            self._store.set(key, record)

    def put_back(self) -> bool:
        """Restore the records that another process has overwritten; return whether there were any."""
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
        self._number = 0  # number of the session; 0: none yet
        self._taking_part: list[int] = []  # for the first worker: the try of each worker in the session
        self._records.write(f"come/{rank}", str(self._try))

    def number(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        notice = time.monotonic() + _NOTICE
        pause = _FIRST_PAUSE
        for turn in itertools.count(1):
            before = self._number
            is_overwritten = turn % _THOROUGH == 0 and self._records.put_back()
            # A session may be of earlier tries: look for a newer one in every other poll.
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
            if is_last or time.monotonic() > notice:
                absent = f"worker {', '.join(map(str, self._missing()))} of {self._world_size} has not arrived"
                if is_last:
                    raise TimeoutError(f"{absent} within {timeout:g} s")
                notice = math.inf
                _logger.warning(_WAITS, absent, timeout)
            has_changed = is_overwritten or is_new  # then something follows soon
            pause = _FIRST_PAUSE if has_changed else min(2 * pause, _LONGEST_PAUSE)
            time.sleep(pause)
        return self._number

    def _make(self) -> None:
        """Make a session if all workers have arrived, and a new one if a worker has tried again since."""
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
        """Find the session that the first worker has made for this try of this worker."""
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
    """Return the positive number in a record, or 0 if it has none."""
    return int(record) if re.fullmatch(rb"[1-9][0-9]{0,17}", record) else 0
