"""Functions that are called when a session has ended."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from cudafuture.errors import InvalidStateError

__all__ = ["EndFunctions"]

_logger = logging.getLogger("rpc_ext.session")


class EndFunctions:
    """The functions of one session, which are called once, in the order of their registration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _functions; a leaf
        self._functions: list[Callable[[], object]] | None = []  # None: they have been called

    def add(self, fn: Callable[[], object]) -> None:
        """Register a function.

        Raises:
            InvalidStateError: the functions have been called.
        """
        with self._lock:
            if self._functions is None:
                raise InvalidStateError("the session has ended, so nothing can be registered for its end")
            self._functions.append(fn)

    def call(self, earlier: Sequence[Callable[[], object]]) -> None:
        """Call all functions, after the `earlier` ones of every session, and log the exceptions that they raise."""
        with self._lock:
            functions, self._functions = self._functions or [], None
        with contextlib.ExitStack() as stack:  # calls all of them even if Ctrl-C interrupts one
            for fn in reversed([*earlier, *functions]):
                stack.callback(_call_and_log, fn)


def _call_and_log(fn: Callable[[], object]) -> None:
    try:
        fn()
    except Exception:
        _logger.exception("%r, which was registered for the end of RPC, has raised", fn)
