"""Buffers for the data of messages; each sender has a pool."""

from __future__ import annotations

from functools import partial

import torch

from cudafuture import CUDAFuture, executors, fail
from cudafuture.io import Buffer, BufferPool

__all__ = ["SendBuffers", "store_thread"]

_LEAST = 1 << 16  # bytes from which on a buffer of a pool costs less than new memory

store_thread = executors.serial("store")
"""The thread that continues operations when a buffer is freed or the store completes. It is not the library's callback
thread: a callback of the program that blocks that thread stalls no client and no service."""


class SendBuffers:
    """Buffers that a client fills for its service.

    A slow receiver does not block the others. A buffer is in use until its message has been sent, even if the request
    times out before. A message takes one buffer and waits for nothing that needs another, so messages that hold
    buffers always make progress.

    Args:
        nbytes: size of the pool.
    """

    def __init__(self, nbytes: int) -> None:
        self._pool = BufferPool(nbytes, pin=False)

    def take(self, nbytes: int) -> CUDAFuture[torch.Tensor]:
        """Return a future of `nbytes` uninitialized bytes in a storage of their own."""
        if nbytes < _LEAST:
            return CUDAFuture.completed(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        taken = self._pool.take(nbytes)
        if taken.done():
            return CUDAFuture.completed(_tensor_of(taken))
        # A future of its own: children of the pool's would have the callback thread for their default executor.
        future: CUDAFuture[torch.Tensor] = CUDAFuture(executor=store_thread)
        taken.add_done_callback(partial(_pass_on, future), executor=store_thread)
        return future


def _pass_on(future: CUDAFuture[torch.Tensor], taken: CUDAFuture[Buffer]) -> None:
    try:
        tensor = _tensor_of(taken)
    except BaseException as e:
        fail(future, e)
    else:
        future.set_result(tensor)


def _tensor_of(taken: CUDAFuture[Buffer]) -> torch.Tensor:
    """Return the tensor of a buffer. The buffer is released when the tensor is dropped."""
    with taken.value() as buffer:
        return buffer.tensor
