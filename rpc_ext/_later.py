"""Answers to calls of a batch that were not there with the others, until their callers ask again."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Generic, TypeVar

from cudafuture import CUDAFuture
from cudafuture.errors import NotFoundError

__all__ = ["Later"]

T = TypeVar("T")

_KEPT = 600.0  # seconds: a caller asks again at once, or has died


class Later(Generic[T]):
    """Futures by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._kept: dict[int, tuple[float, CUDAFuture[T]]] = {}

    def keep(self, answer: CUDAFuture[T]) -> int:
        """Return the number under which the answer is to be asked for."""
        number, now = next(self._numbers), time.monotonic()
        with self._lock:
            self._kept[number] = now, answer
            while now - next(iter(self._kept.values()))[0] > _KEPT:  # the oldest
                del self._kept[next(iter(self._kept))]
        return number

    def take(self, number: int) -> CUDAFuture[T]:
        """Return the answer, once.

        Raises:
            NotFoundError: there is none, or it was kept for too long.
        """
        with self._lock:
            kept = self._kept.pop(number, None)
        if kept is None:
            raise NotFoundError(f"no answer is kept under number {number}")
        return kept[1]
