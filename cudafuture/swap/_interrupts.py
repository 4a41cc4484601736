"""Signals while a program must not be stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

__all__ = ["interrupts_deferred"]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C and other signals take effect when the block ends, rather than between two of its lines.

    Nothing changes in threads other than the main one, which no signal interrupts, and for signals that the program
    ignores or leaves to the system.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    deferred = {int(number): handler for number, handler in handlers.items() if callable(handler)}
    received: list[tuple[int, FrameType | None]] = []
    try:
        for number in deferred:
            signal.signal(number, lambda *arguments: received.append(arguments))
        yield
    finally:
        _call_all([partial(signal.signal, number, handler) for number, handler in deferred.items()])
        _call_all([partial(deferred[number], number, frame) for number, frame in received])


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call all, also where one of them raises."""
    if calls:
        try:
            calls[0]()
        finally:
            _call_all(calls[1:])
