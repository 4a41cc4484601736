"""Watches: futures that fail when a worker dies."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError, WorkerLostError
from rpc_ext import _timer
from rpc_ext.calls import Worker, rpc_async
from rpc_ext.session import Session, current

__all__ = ["watch"]

_INTERVAL = 1.0  # seconds from an answer to the next question
_answers = executors.serial("rpc_ext watch")  # a callback of the program that blocks delays no watch


def watch(worker: Worker, *, patience: float = 60.0) -> CUDAFuture[None]:
    """Return a future that fails with WorkerLostError when a worker dies, as long as the future is kept.

    The worker is asked again a second after each answer. It counts as dead when the connection to it breaks, or when
    it has not answered for `patience` seconds: its process is stopped, its machine is unreachable, or all threads of
    its agent are busy for that long. The error of a silent worker has a TimeoutError as its ``__cause__``.

    Callbacks run on the library's callback thread, unless they are given an executor. An inline one must not block: all
    watches of the process share its thread.

    The future completes with None when RPC ends in this process. ``cancel()`` ends the watch.

    Args:
        worker: by name, rank or WorkerInfo.
        patience: seconds of silence; default: 60.

    Raises:
        InvalidStateError: RPC has not begun.
        ValueError: there is no such worker; or `patience` is not positive.

    >>> alive = watch("me")
    >>> alive.done()
    False
    >>> alive.cancel()
    True
    """
    if not patience > 0:
        raise ValueError(f"patience is a positive number of seconds, not {patience!r}")
    session = current()
    name = session.destination(worker).name
    future: CUDAFuture[None] = CUDAFuture(name=f"watch {name}", executor=executors.callback_thread)
    _timer.schedule(_Watch(session, name, patience, future), time.perf_counter())
    return future


class _Watch:
    """The watch of one worker, which asks one question at a time."""

    def __init__(self, session: Session, worker: str, patience: float, future: CUDAFuture[None]) -> None:
        self._session = weakref.ref(session)  # a later one may have a worker of the same name
        self._worker, self._patience = worker, patience
        self._future = weakref.ref(future)

    def look(self, now: float) -> None:
        """Ask the worker, unless the watch has ended."""
        future = self._future()
        if future is None or future.done():
            return
        try:
            if current() is not self._session():
                raise InvalidStateError("the session of this watch has ended")
            answer = rpc_async(self._worker, _alive, timeout=self._patience, non_blocking=True)
        except BlockingIOError:  # as many calls to it are in flight as may be, and each has its own timeout
            answer = CUDAFuture.completed(None)
        except Exception as e:
            answer = CUDAFuture.failed(e)
        answer.add_done_callback(self._answered, executor=_answers)

    def _answered(self, done: CUDAFuture[Any]) -> None:
        """End the watch if the worker is lost or RPC has ended here; else ask again in a second."""
        future, error = self._future(), done.exception()
        if future is None:
            return
        if isinstance(error, TimeoutError):
            lost = WorkerLostError(
                f"worker '{self._worker}' has not answered for {self._patience:g} s", worker=self._worker
            )
            lost.__cause__ = error
            error = lost
        with contextlib.suppress(InvalidStateError):  # the caller has cancelled the future meanwhile
            if isinstance(error, InvalidStateError):  # RPC has ended here
                future.set_result(None)
            elif isinstance(error, WorkerLostError):
                future.set_exception(error)
        if not future.done():
            _timer.schedule(self, time.perf_counter() + _INTERVAL)


def _alive() -> None:
    """Return at once: the answer shows that the worker is alive."""
