"""Errors of batches: their tracebacks, and those that the consumer never takes."""

from __future__ import annotations

import contextlib
from typing import Any

from cudafuture._C import CUDAFuture

__all__ = ["at_batch", "retrieve_error", "second_loop", "without_frame"]


def retrieve_error(future: CUDAFuture[Any]) -> None:
    """Retrieve the error of a dropped batch, so that it is not logged."""
    with contextlib.suppress(BaseException):
        future.value()  # and not exception(), which waits for the device


def without_frame(error: BaseException) -> BaseException:
    """Return the error without the reader's own frame in its traceback, which would keep the batch alive."""
    traceback = error.__traceback__
    return error.with_traceback(None if traceback is None else traceback.tb_next)


def at_batch(error: BaseException) -> BaseException:
    """Return the error that ends the epoch; StopIteration of a transform must not look like the end of the iterable."""
    if not isinstance(error, (StopIteration, StopAsyncIteration)):
        return without_frame(error)
    raised = RuntimeError(f"a transform of prefetch() raised {type(error).__name__}")
    raised.__cause__ = without_frame(error)
    return raised


def second_loop() -> RuntimeError:
    """Return the error of an epoch that another one of the same prefetcher has ended."""
    return RuntimeError(
        "another epoch of this prefetcher has begun, and a prefetcher reads one epoch at a time: create a second "
        "prefetcher for a second loop"
    )
