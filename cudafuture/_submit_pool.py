"""The thread pool of ``submit``, whose functions may block without keeping the process from its end."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeAlias, TypeVar

from cudafuture import _C, _log

__all__ = ["SubmitPool"]

P = ParamSpec("P")
T = TypeVar("T")

_Job: TypeAlias = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class SubmitPool(Executor):
    """Pool of daemon threads, which are started on demand.

    At exit it runs the functions that it has and takes no more, like a ThreadPoolExecutor: before handlers of atexit,
    which close what the functions use. But if no function ends for `exit_seconds`, the process ends without the rest.
    """

    def __init__(self, threads: int, exit_seconds: float) -> None:
        self._most = threads
        self._exit_seconds = exit_seconds
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended = threading.Condition()  # notified when a function ends; its lock guards the fields below
        self._threads: list[threading.Thread] = []
        self._left = 0  # functions that have not ended
        self._is_closed = False
        try:
            threading._register_atexit(self._end)  # type: ignore[attr-defined]
        except RuntimeError:  # the main thread has ended, and another thread makes the pool
            atexit.register(self._end)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn(*args, **kwargs)`` on a thread of the pool.

        Raises:
            RuntimeError: the pool was shut down, or it has no thread and none could be started.
        """
        future: Future[T] = Future()
        with self._ended:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._left >= len(self._threads) < self._most:
                self._start_thread()
            self._left += 1
            self._jobs.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more functions; `wait` until all have ended, or cancel those that have not begun."""
        with self._ended:
            self._is_closed = True
            with contextlib.suppress(queue.Empty):
                while cancel_futures:
                    job = self._jobs.get_nowait()
                    if job is not None:
                        job[0].cancel()
                        self._left -= 1
            for _ in self._threads:
                self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"cudafuture-submit_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: those of the pool will come to the function
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        _C.begin_submit_thread()
        while (job := self._jobs.get()) is not None:
            _run(*job)
            del job
            with self._ended:
                self._left -= 1
                self._ended.notify_all()

    def _end(self) -> None:
        if os.getpid() != self._pid:  # the threads exist in the parent only
            return
        self.shutdown(wait=False)
        try:
            with self._ended:
                while left := self._left:
                    if not self._ended.wait_for(lambda left=left: self._left < left, self._exit_seconds):  # type: ignore[misc]
                        return
        finally:  # also after Ctrl-C
            if self._left:
                self._log_blocked()

    def _log_blocked(self) -> None:
        frames = sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames.get(thread.ident or 0))) for thread in self._threads]
        _log.warning(
            "the process ends while functions of submit block; end them before, or raise "
            "CUDAFUTURE_SUBMIT_EXIT_SECONDS:\n%s",
            "\n".join(filter(None, stacks)),
        )


def _run(future: Future[T], fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(fn(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)
        del future  # it would be in a cycle: its exception has a traceback, which has this frame
