"""Deferral of Ctrl-C while a program must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_deferred"]


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
