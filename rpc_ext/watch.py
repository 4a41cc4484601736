"""Watches: futures that fail when a worker dies."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

from cudafuture import CUDAFuture, executors, timer
from cudafuture.errors import InvalidStateError, WorkerLostError
from rpc_ext._options import limit
from rpc_ext.calls import Worker, rpc_async
from rpc_ext.session import Session, current

__all__ = ["watch"]

_INTERVAL = 1.0  # seconds from a reply to the next call
_answers = executors.serial("rpc_ext watch")  # a blocking callback of the program delays no watch


def watch(worker: Worker, *, patience: float = 60.0) -> CUDAFuture[None]:
    """Return a future that fails with WorkerLostError when a worker dies, as long as the caller keeps the future.

    The watch calls the worker again a second after each reply. The worker is lost if the connection to it breaks, or
    if it has not replied for `patience` seconds: its process is stopped, its machine is unreachable, or all threads of
    its agent are busy for that long. The error of a silent worker has a TimeoutError as its ``__cause__``.

    Callbacks run on the library's callback thread by default. An inline callback must not block: all watches of the
    process share its thread.

    The future completes with None when RPC ends in this process. ``cancel()`` ends the watch.

    Args:
        worker: the worker by name, rank or WorkerInfo.
        patience: seconds of silence; default: 60.

    Raises:
        InvalidStateError: RPC has not begun.
        ValueError: there is no such worker, or `patience` is not positive.

    >>> alive = watch("me")
    >>> alive.done()
    False
    >>> alive.cancel()
    True
    """
    limit(patience, "patience")
    session = current()
    name = session.destination(worker).name
    future: CUDAFuture[None] = CUDAFuture(name=f"watch {name}", executor=executors.callback_thread)
    timer.schedule(_WorkerWatch(session, name, patience, future), time.perf_counter())
    return future


class _WorkerWatch:
    """The watch of one worker, with at most one call in flight."""

    def __init__(self, session: Session, worker: str, patience: float, future: CUDAFuture[None]) -> None:
        self._session = weakref.ref(session)  # a later one may have a worker of the same name
        self._worker, self._patience = worker, patience
        self._future = weakref.ref(future)

    def look(self, now: float) -> None:
        """Call the worker, unless the watch has ended. Called by the timer thread."""
        future = self._future()
        if future is None or future.done():
            return
        try:
            if current() is not self._session():
                raise InvalidStateError("the session of this watch has ended")
            answer = rpc_async(self._worker, _alive, timeout=self._patience, non_blocking=True)
        except BlockingIOError:  # other calls to the worker are in flight, and each has its own timeout
            answer = CUDAFuture.completed(None)
        except Exception as e:
            answer = CUDAFuture.failed(e)
        answer.add_done_callback(self._answered, executor=_answers)

    def _answered(self, done: CUDAFuture[Any]) -> None:
        """End the watch if the worker is lost or RPC has ended here; otherwise schedule the next call."""
        future, error = self._future(), done.exception()
        if future is None:
            return
        if isinstance(error, TimeoutError):
            lost = WorkerLostError(
                f"worker '{self._worker}' has not answered for {self._patience:g} s", worker=self._worker
            )
            lost.__cause__ = error
            error = lost
        with contextlib.suppress(InvalidStateError):  # the caller has just cancelled the future
            if isinstance(error, InvalidStateError):  # RPC has ended here
                future.set_result(None)
            elif isinstance(error, WorkerLostError):
                future.set_exception(error)
        if not future.done():
            timer.schedule(self, time.perf_counter() + _INTERVAL)


def _alive() -> None:
    """Return at once. The reply proves that the worker is alive."""
