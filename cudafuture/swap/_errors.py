"""Errors and interrupts of a step: memory that tracebacks hold, and Ctrl-C between two lines."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cudafuture._C import CUDAFuture

__all__ = ["clear_tracebacks", "error_of", "interrupts_deferred"]


def error_of(future: CUDAFuture[Any]) -> BaseException | None:
    """Wait for a future, and return its error, cleared of references to buffers."""
    error = future.exception()
    clear_tracebacks(error)
    return error


def clear_tracebacks(error: BaseException | None) -> None:
    """Clear the local variables of the ended frames of an error, its causes and its contexts.

    A program that keeps an exception would otherwise keep the buffers that those variables refer to, and the next read
    would wait for their memory.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            pending += [error.__cause__, error.__context__]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block ends, instead of interrupting between two of its lines.

    Nothing changes in threads other than the main one, which no signal interrupts, or if the program ignores the
    signal or leaves it to the system.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
