"""Memory that tracebacks hold: the local variables of frames that have ended."""

from __future__ import annotations

import traceback
from typing import Any

from cudafuture._C import CUDAFuture

__all__ = ["clear_tracebacks", "error_of"]


def error_of(future: CUDAFuture[Any]) -> BaseException | None:
    """Wait for a future, and return its error, which holds no memory of buffers any more."""
    error = future.exception()
    clear_tracebacks(error)
    return error


def clear_tracebacks(error: BaseException | None) -> None:
    """Clear the local variables of the frames that an error, its causes and its contexts have left.

    A program that keeps an exception would otherwise keep the buffers that those variables are views of, and the next
    read would wait for their memory.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            pending += [error.__cause__, error.__context__]
