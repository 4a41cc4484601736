"""How workers agree on the session that they begin, however often each of them has tried before.

::

    each: come/{rank}, its tries so far ──► the first: session, a new number and all tries ──► each: seen/{rank}

The first makes another one when somebody tries again. So what a start that was given up has left in the store holds
nobody up. Nothing here is secret or signed: who the others are is for the exchange that follows in the session's part
of the store. As there, one's own is put back where somebody has written over it.
"""

from __future__ import annotations

import contextlib
import re
import time
from datetime import timedelta
from typing import Any

from rpc_ext import _engine

__all__ = ["session_store"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks


def session_store(init_method: str, rank: int, world_size: int, timeout: float) -> Any:
    """Return a store for one session alone, the same for all workers, however often each has begun RPC before.

    Raises:
        TimeoutError: the store cannot be reached in time, or a worker has not come.
        ConnectionError: the store cannot be made: its port is in use, say.
    """
    # The host of a TCPStore would wait for the others right here, and could not say who is missing.
    expected = 1 if rank == 0 and init_method.startswith(("env:", "tcp:")) else world_size
    try:
        store, _, _ = next(
            _engine.rendezvous(init_method, rank=rank, world_size=expected, timeout=timedelta(seconds=timeout))
        )
        store.set_timeout(timedelta(seconds=timeout))
        store = _engine.PrefixStore(f"cudafuture_rpc/{world_size}", store)
        number = _Meeting(_engine.PrefixStore("meeting", store), rank, world_size).number(timeout)
    except _engine.StoreError as e:
        if re.search(r"timed? ?out", str(e), re.IGNORECASE):
            raise TimeoutError(f"the store at {init_method} cannot be reached within {timeout:g} s: {e}") from e
        raise ConnectionError(f"the store at {init_method} cannot be reached: {e}") from e
    return _engine.PrefixStore(str(number), store)


class _Meeting:
    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._tries = store.add(f"tries/{rank}", 1)
        self._session: list[int] = []  # its number, and which try of each worker takes part
        self._shown = {f"come/{rank}": str(self._tries)}  # what this worker has put into the store

    def number(self, timeout: float) -> int:
        """Return the number of the session in which all are."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            before = self._session
            self._session = self._made() if self._rank == 0 else self._found()
            if self._session:
                self._shown[f"seen/{self._rank}"] = str(self._session[0])
            self._put_back()
            missing = self._missing()
            if not missing:
                return self._session[0]
            if time.monotonic() > deadline:
                who = ", ".join(map(str, missing))
                raise TimeoutError(f"worker {who} of {self._world_size} has not come within {timeout:g} s")
            pause = min(2 * pause, _LONGEST_PAUSE) if self._session == before else _FIRST_PAUSE
            time.sleep(pause)

    def _made(self) -> list[int]:
        """Return the session of those who have come, by the first worker: a new one where somebody has come since."""
        tries = [next(iter(self._numbers(f"come/{rank}")), 0) for rank in range(self._world_size)]
        tries[0] = self._tries
        if tries == self._session[1:]:
            return self._session
        session = [self._store.add("number", 1), *tries]
        self._shown["session"] = " ".join(map(str, session))
        return session

    def _found(self) -> list[int]:
        """Return the session that the first worker has made with this try of this worker's, if it has."""
        session = self._numbers("session")
        is_mine = len(session) == 1 + self._world_size and session[1 + self._rank] == self._tries
        return session if is_mine else []

    def _missing(self) -> list[int]:
        if not self._session:
            return [0]
        return [rank for rank in range(self._world_size) if self._numbers(f"seen/{rank}") != self._session[:1]]

    def _numbers(self, key: str) -> list[int]:
        record: bytes = self._store.get(key) if self._store.check([key]) else b""
        with contextlib.suppress(ValueError):  # one of more digits than int() takes
            return [int(number) for number in record.split()] if re.fullmatch(rb"[0-9]+( [0-9]+)*", record) else []
        return []

    def _put_back(self) -> None:
        for key, record in self._shown.items():
            if not self._store.check([key]) or self._store.get(key) != record.encode():
                self._store.set(key, record)
