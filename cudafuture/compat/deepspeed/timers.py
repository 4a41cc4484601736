"""Timers by name, which a swapper starts and stops for each of its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

__all__ = ["Timers"]


class Timers(Protocol):
    """Interface of DeepSpeed's ``SynchronizedWallClockTimer``.

    >>> class Stopwatch:
    ...     def __call__(self, name): return self
    ...     def start(self): pass
    ...     def stop(self): pass
    ...     def log(self, names): print(names)
    >>> timers: Timers = Stopwatch()
    """

    def __call__(self, name: str) -> Any:
        """Return the timer of a name, which has start() and stop()."""
        ...

    def log(self, names: list[str]) -> None:
        """Log the times of some timers."""
        ...


class StageTimers:
    """Optional timers, and the names of those that were used."""

    def __init__(self, timers: Timers | None) -> None:
        self._timers = timers
        self._used: set[str] = set()

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Start the timer of a stage, and stop it."""
        if self._timers is None:
            yield
            return
        self._used.add(stage)
        self._timers(stage).start()
        try:
            yield
        finally:
            self._timers(stage).stop()

    def clear(self) -> None:
        """Clear the names of the timers that were used."""
        self._used.clear()

    def log(self) -> None:
        """Log the timers that were used."""
        if self._timers is not None and self._used:
            self._timers.log(sorted(self._used))
