"""Ends of the clients' sessions at store services, sent at once or later by the timer thread.

A service cannot detect that a client was dropped while the client's process lives. So this module records the ends of
dropped clients, and ends that did not reach the service. The timer thread sends them until they arrive, or until the
RPC session in which the client began has ended.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref

from cudafuture import CUDAFuture, executors, timer
from cudafuture.errors import InvalidStateError, WorkerLostError
from rpc_ext._serve import expect_free_thread
from rpc_ext.calls import rpc_async, rpc_sync
from rpc_ext.session import Session, current
from rpc_ext.store import _calls as calls

__all__ = ["begin", "end", "note"]

_INTERVAL = 0.5  # seconds between two calls of ``look``
_PATIENCE = 10.0  # seconds to wait for the reply of the service

_Begun = weakref.ref[Session]  # the RPC session in which a client began: a later one may have a worker of the same name
_End = tuple[_Begun, str, str, bytes]  # session, worker, service, token


class _Ends:
    def __init__(self) -> None:
        self._noted: queue.SimpleQueue[_End] = queue.SimpleQueue()  # finalizers put ends here
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._open = 0

    def begin(self) -> None:
        """Count a client whose end has to be sent."""
        with self._lock:
            self._open += 1
        timer.schedule(self, time.perf_counter() + _INTERVAL)

    def end(self, begun: _Begun, worker: str, name: str, token: bytes, timeout: float) -> None:
        """Send the end of a client and wait for the reply, or send it later if this thread must not block."""
        if not _is_current(begun):
            self._forget()
            return
        try:
            with expect_free_thread("RemoteStore.close()"):
                pass
        except InvalidStateError:  # no other thread of this worker is free to deliver the reply
            self.note(begun, worker, name, token)
            return
        try:
            rpc_sync(worker, calls.end, (name, token), timeout=min(timeout or _PATIENCE, _PATIENCE))
        except (InvalidStateError, WorkerLostError):  # RPC has ended, or the service; or the worker is gone
            self._forget()
        except Exception:
            self.note(begun, worker, name, token)
        except BaseException:
            self.note(begun, worker, name, token)
            raise
        else:
            self._forget()

    def note(self, begun: _Begun, worker: str, name: str, token: bytes) -> None:
        """Send the end of a client later. Takes no lock, because finalizers call it."""
        self._noted.put((begun, worker, name, token))

    def look(self, now: float) -> float | None:
        """Send the recorded ends. Called by the timer thread."""
        noted = []
        with contextlib.suppress(queue.Empty):
            while True:
                noted.append(self._noted.get_nowait())
        for end in noted:
            self._tell(end)
        with self._lock:
            return now + _INTERVAL if self._open else None

    def _tell(self, end: _End) -> None:
        begun, worker, name, token = end
        if not _is_current(begun):
            self._forget()
            return

        def told(done: CUDAFuture[None]) -> None:
            error = done.exception()
            if isinstance(error, TimeoutError):
                self._noted.put(end)
            else:
                self._forget()

        try:
            future = rpc_async(worker, calls.end, (name, token), timeout=_PATIENCE, non_blocking=True)
        except BlockingIOError:
            self._noted.put(end)
        except Exception:  # RPC has ended
            self._forget()
        else:
            future.add_done_callback(told, executor=executors.inline)

    def _forget(self) -> None:
        with self._lock:
            self._open -= 1


def _is_current(begun: _Begun) -> bool:
    """Return whether a session is the current session of this process."""
    try:
        return current() is begun()
    except InvalidStateError:
        return False


_ends = _Ends()
begin, end, note = _ends.begin, _ends.end, _ends.note
