"""Hold of a stream of a simulated accelerator or a fake CUDA device, as a context manager."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

__all__ = ["StreamHold", "open_all"]

Self = TypeVar("Self", bound="StreamHold")


class StreamHold(ABC):
    """Hold that ends with ``open()``, with its ``with`` block, or with its last reference."""

    def __init__(self) -> None:
        _holds.add(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit all queued work is dropped
            self.open()

    @abstractmethod
    def open(self) -> None:
        """Let the stream continue. Further calls do nothing."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()


_holds: weakref.WeakSet[StreamHold] = weakref.WeakSet()


def open_all(kind: type[StreamHold]) -> None:
    """Open every hold of a class."""
    for held in list(_holds):
        if isinstance(held, kind):
            held.open()
