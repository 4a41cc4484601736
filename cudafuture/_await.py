"""Event loops: tasks that await a future, callbacks that a loop runs, and waits that would block a loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, TypeVar

from cudafuture import _C, _frames
from cudafuture.errors import CancelledError

__all__ = ["LoopExecutor", "await_within", "through_loop", "warn_if_in_loop"]

T = TypeVar("T")


def through_loop(future: _C.CUDAFuture[T]) -> Generator[Any, None, T]:
    """Suspend the running task until `future` is done and its device work has finished; then end like ``wait()``.

    Cancelling the task detaches it and leaves the future running. In a task of asyncio, the future's cancellation
    raises asyncio's error.
    """
    trio = _trio_of_task()
    if not future.ready():
        yield from _until_ready(future) if trio is None else _until_ready_in_trio(future, trio)
    if trio is not None or not future.cancelled():
        return future.wait()
    try:
        return future.value()
    except CancelledError as error:
        raise asyncio.CancelledError(*error.args) from None


async def await_within(future: _C.CUDAFuture[T], timeout: float | None) -> T:
    """Await `future` for at most `timeout` seconds (None: no limit).

    Raises:
        TimeoutError: the future was not ready in time.
    """
    trio = _trio_of_task()
    if trio is None:
        try:
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:  # the builtin one since Python 3.11
            raise TimeoutError from None
    with trio.move_on_after(float("inf") if timeout is None else timeout):
        return await future
    raise TimeoutError


def warn_if_in_loop() -> None:
    """Issue a RuntimeWarning about a blocking wait if the caller runs in an event loop."""
    if asyncio._get_running_loop() is not None or _trio_of_task() is not None:
        _frames.warn(
            "a blocking wait for a CUDAFuture stops the event loop that runs in this thread, and all its tasks: use "
            "`await future`, or wait in another thread"
        )


class LoopExecutor:
    """Executor of callbacks that an event loop of asyncio calls, in the context of the code that makes the executor."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context = contextvars.copy_context()

    def submit(self, job: Callable[[], object]) -> None:
        """Let the loop call `job`. Any thread may call this."""
        self._loop.call_soon_threadsafe(job, context=self._context)


def _trio_of_task() -> Any:
    """Return the module trio if the caller runs in a task of trio, otherwise None."""
    trio: Any = sys.modules.get("trio")
    with contextlib.suppress(AttributeError, RuntimeError):  # not imported, or no task of trio runs
        return trio if _is_innermost(trio.lowlevel.current_task().coro) else None
    return None


def _is_innermost(coroutine: Any) -> bool:
    """Return False if a task of asyncio runs inside of a running coroutine of trio, not the coroutine inside of it."""
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    if task is None:
        return True
    outermost = getattr(task.get_coro(), "cr_frame", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outermost and frame is not coroutine.cr_frame:
        frame = frame.f_back
    return frame is not outermost


def _until_ready(future: _C.CUDAFuture[Any]) -> Generator[Any, None, None]:
    loop = asyncio._get_running_loop()
    if loop is None:
        raise RuntimeError(
            "no running event loop: await a pending CUDAFuture in a task of asyncio or trio, and call wait() elsewhere"
        )
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
        future.remove_done_callback(wake)


def _until_ready_in_trio(future: _C.CUDAFuture[Any], trio: Any) -> Generator[Any, None, None]:
    token = trio.lowlevel.current_trio_token()
    task = trio.lowlevel.current_task()
    is_suspended = True

    def release() -> None:
        nonlocal is_suspended
        if is_suspended:
            is_suspended = False
            trio.lowlevel.reschedule(task)

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the run is over, so no task waits
            token.run_sync_soon(release)

    def abort(_: object) -> Any:
        nonlocal is_suspended
        is_suspended = False
        return trio.lowlevel.Abort.SUCCEEDED

    _C.add_ready_callback(future, wake)
    try:
        yield from trio.lowlevel.wait_task_rescheduled(abort).__await__()
    finally:
        future.remove_done_callback(wake)
