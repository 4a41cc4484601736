"""The memory of the host for state that is in flight."""

from __future__ import annotations

import logging

from cudafuture._C import CUDAFuture
from cudafuture.combine import wait
from cudafuture.storage import Buffer, BufferPool

__all__ = ["Buffers"]

_PATIENCE = 1.0  # seconds that a request waits for memory which nothing in flight holds
_logger = logging.getLogger("cudafuture.swap")


class Buffers:
    """A pool that is allocated with the first request, and replaced where a program does not give its memory back."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._pool: BufferPool | None = None

    def resize(self, nbytes: int) -> None:
        """Use a pool of another size from the next request on."""
        self._nbytes = nbytes
        self._pool = None

    def take(self, nbytes: int) -> CUDAFuture[Buffer]:
        """Request a buffer of at most the size of the pool."""
        self._pool = BufferPool(self._nbytes) if self._pool is None else self._pool
        return self._pool.take(nbytes)

    def expect(self, request: CUDAFuture[Buffer]) -> bool:
        """Wait a little for memory that nothing in flight holds; return whether the request has come through.

        If not, it is cancelled, and the next request gets a new pool: a program keeps tensors of the old one, or an
        exception whose frames have such tensors. The old pool's memory is freed when those are dropped.
        """
        wait([request], timeout=_PATIENCE)  # another thread may still release what has ended
        if request.done() or not request.cancel():
            return True
        _logger.warning("tensors or exceptions that the program keeps hold the swap buffers; new ones are allocated")
        self._pool = None
        return False
