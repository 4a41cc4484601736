"""Looks now and then whether the clients of an offload service are alive: what is theirs goes when they are not."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, Protocol

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError, WorkerLostError
from rpc_ext import _minder
from rpc_ext.calls import rpc_async

__all__ = ["Watch", "Watched"]

_INTERVAL = 1.0  # seconds from one look to the next
_PATIENCE = 60.0  # seconds of silence that count as death where no connection has broken


class Watched(Protocol):
    """Who has clients."""

    def clients(self) -> set[str]:
        """Return the workers that they are on."""
        ...

    def lost(self, client: str) -> None:
        """Give up what those of a worker have."""
        ...


class Watch:
    """Asks each client as long as there are some, one question at a time. Holds the service weakly."""

    def __init__(self, watched: Watched) -> None:
        self._watched = weakref.ref(watched)
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._asked: set[str] = set()

    def begin(self) -> None:
        """Look from now on."""
        _minder.mind(self, time.perf_counter() + _INTERVAL)

    def look(self, now: float) -> float | None:
        """Ask those that have answered the last question."""
        watched = self._watched()
        clients = set() if watched is None else watched.clients()
        for client in clients:
            with self._lock:
                if client in self._asked:
                    continue
                self._asked.add(client)
            self._ask(client)
        return now + _INTERVAL if clients else None

    def _ask(self, client: str) -> None:
        try:
            answer = rpc_async(client, _alive, timeout=_PATIENCE, non_blocking=True)
        except (BlockingIOError, InvalidStateError):  # too much is under way, so it lives; or RPC has ended
            answer = CUDAFuture.completed(None)
        except Exception as e:
            answer = CUDAFuture.failed(e)
        answer.add_done_callback(lambda done: self._answered(client, done), executor=executors.callback_thread)

    def _answered(self, client: str, done: CUDAFuture[Any]) -> None:
        with self._lock:
            self._asked.discard(client)
        watched = self._watched()
        if watched is not None and isinstance(done.exception(), (WorkerLostError, TimeoutError)):
            watched.lost(client)


def _alive() -> None:
    """Answer: that is all."""
