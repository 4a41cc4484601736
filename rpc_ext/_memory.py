"""The bytes that offload requests carry: in memory of pools, and the few that a message carries itself."""

from __future__ import annotations

from functools import partial

import torch

from cudafuture import CUDAFuture, executors
from cudafuture.storage import Buffer, BufferPool
from rpc_ext._C import alone, memory
from rpc_ext._expiry import cancel_after
from rpc_ext._offload_wire import PIECE

__all__ = ["Carried", "SendBuffers", "alone", "arrived", "carried"]

Carried = bytes | torch.Tensor
_SMALL = 1 << 14  # bytes up to which a tensor is slower than a part of the message, which takes no handshake
_LEAST_BUFFER = 1 << 16  # bytes from which on a buffer of a pool is worth it


class SendBuffers:
    """Buffers that one sender fills for one receiver: a client for its service, or a session for its client.

    They come from a pool of their own, so a receiver that takes nothing holds up no other one. A buffer is in use until
    its message has been sent, also when the call has timed out before. A message takes one buffer, and nothing that it
    waits for needs another, so messages that hold buffers always make progress.

    Args:
        nbytes: of the pool.
        executor: where callbacks run when there was no buffer at once.
    """

    def __init__(self, nbytes: int, executor: executors.HostExecutor) -> None:
        self._pool, self._executor = BufferPool(nbytes, pin=False), executor

    def take(self, nbytes: int, seconds: float = 0.0) -> CUDAFuture[torch.Tensor]:
        """Return a future of a tensor of bytes, not initialized, in a storage of its own.

        The future fails with TimeoutError when it has waited for so many seconds (0: no limit), and with
        InvalidStateError when the buffers are closed.
        """
        if nbytes < _LEAST_BUFFER:
            return CUDAFuture.completed(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        taken = self._pool.take(nbytes)
        if taken.done():
            return CUDAFuture.completed(_tensor_of(taken))
        # A future of its own: children of the pool's would have the callback thread for their default executor, which
        # a callback of the program may block.
        future: CUDAFuture[torch.Tensor] = CUDAFuture(executor=self._executor)
        taken.add_done_callback(partial(_pass_on, future), executor=self._executor)
        cancel_after(taken, seconds)
        return future

    def close(self) -> None:
        """Fail the futures that wait."""
        self._pool.close()


def _pass_on(future: CUDAFuture[torch.Tensor], taken: CUDAFuture[Buffer]) -> None:
    try:
        tensor = _tensor_of(taken)
    except BaseException as e:
        future.set_exception(e)
    else:
        future.set_result(tensor)


def _tensor_of(taken: CUDAFuture[Buffer]) -> torch.Tensor:
    """Return the tensor of a buffer, which is released when the tensor is dropped."""
    if taken.cancelled():
        raise TimeoutError("no buffer was free in time")
    with taken.value() as buffer:
        return buffer.tensor


def carried(data: torch.Tensor) -> Carried:
    """Return bytes as they are sent."""
    return memory(data).tobytes() if data.numel() <= _SMALL else data


def arrived(data: object) -> torch.Tensor:
    """Return bytes that have been sent so.

    Raises:
        ValueError: they have not.
    """
    if isinstance(data, bytes):
        _expect_piece(len(data))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    if not isinstance(data, torch.Tensor) or data.layout is not torch.strided or not data.is_cpu:
        raise ValueError("what travels along is bytes, or a tensor of them on the host")
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError(f"what travels along is bytes, not {data.dtype} of shape {list(data.shape)}")
    _expect_piece(data.numel())
    data = data.detach()
    return data.clone() if data.storage_offset() or not data.is_contiguous() else data


def _expect_piece(nbytes: int) -> None:
    if nbytes > PIECE:
        raise ValueError(f"{nbytes} bytes are more than a request carries, {PIECE}")
