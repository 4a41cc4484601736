"""Suspension of asyncio tasks for ``await future``; the native ``__await__`` calls it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any, TypeVar

from cudafuture import _C

__all__ = ["through_loop"]

T = TypeVar("T")


def through_loop(future: _C.CUDAFuture[T]) -> Generator[Any, None, T]:
    """Suspend the running task until `future` is done and its device work has finished; then end like ``wait()``.

    Cancelling the task detaches it and leaves the future running. The future's cancellation raises asyncio's error.
    """
    if not future.ready():
        yield from _until_ready(future)
    if future.cancelled():
        name = f"'{future.name}' was cancelled" if future.name else "the future was cancelled"
        raise asyncio.CancelledError(name)
    return future.wait()


def _until_ready(future: _C.CUDAFuture[Any]) -> Generator[Any, None, None]:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def release() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake(_: object) -> None:
        # Also in the loop's own thread: a signal handler may complete the future while the loop sleeps.
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            loop.call_soon_threadsafe(release)

    _C.add_ready_callback(future, wake)
    try:
        yield from waiter
    finally:
        _C.remove_done_callback(future, wake)
