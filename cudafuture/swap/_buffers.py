"""Host memory for optimizer state that is in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cudafuture._C import CUDAFuture
from cudafuture.combine import wait
from cudafuture.io import Buffer, BufferPool

__all__ = ["Buffers"]

_PATIENCE = 1.0  # seconds that a request waits for memory which nothing in flight holds
_logger = logging.getLogger("cudafuture.swap")


class Buffers:
    """Pool that the first request allocates, and that is replaced if the program does not release its memory.

    Args:
        given: the size that the user has given. None: the largest unit's size, times `units`.
        units: the number of units that are read, computed or written at one time.
        least_unit: the minimum size of a unit.
    """

    def __init__(self, given: int | None, units: int, least_unit: int) -> None:
        self._given, self._units = given, units
        self.nbytes = units * least_unit if given is None else given
        self._pool: BufferPool | None = None

    def expect_room(self, nbytes: int, name: Callable[[], str]) -> None:
        """Use a larger pool from the next request on, if a unit of `nbytes` bytes needs it.

        Raises:
            ValueError: the user has given fewer bytes than the unit needs; `name` is called for the message.
        """
        if self._given is not None and nbytes > self._given:
            raise ValueError(f"buffer_bytes={self._given} is less than {name()} needs: {nbytes}")
        if self._given is None and self._units * nbytes > self.nbytes:
            self.nbytes, self._pool = self._units * nbytes, None

    def take(self, nbytes: int) -> CUDAFuture[Buffer]:
        """Request a buffer, at most as large as the pool."""
        self._pool = BufferPool(self.nbytes) if self._pool is None else self._pool
        return self._pool.take(nbytes)

    def expect(self, request: CUDAFuture[Buffer]) -> bool:
        """Wait shortly for memory that nothing in flight holds; return True if the request has completed.

        If not, it is cancelled, and the next request creates a new pool: the program keeps tensors of the old one, or
        an exception whose frames have such tensors. The old pool's memory is freed when those are freed.
        """
        wait([request], timeout=_PATIENCE)  # another thread may still release the memory of ended operations
        if request.done() or not request.cancel():
            return True
        _logger.warning("tensors or exceptions that the program keeps hold the swap buffers; new ones are allocated")
        self._pool = None
        return False
