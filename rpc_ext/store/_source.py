"""Sources of writes: tensors whose bytes are sent part by part from the host."""

from __future__ import annotations

import contextlib
import threading

import torch

from cudafuture import CUDAFuture, copy, executors, pool_stream
from cudafuture.errors import ChecksumError, InvalidStateError
from cudafuture.io import Digest
from rpc_ext._C import alone, expect_memory
from rpc_ext.store._wire import PIECE, expect_sendable

__all__ = ["ExpectedDigest", "Source", "expect_digest", "source_of"]


class Source:
    """A tensor on the host.

    Attributes:
        dtype, shape, nbytes: attributes of the tensor.
        data: all of its bytes, or None while they are on a device.
        released: done when the caller may overwrite the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.nbytes = tensor.dtype, tuple(tensor.shape), tensor.nbytes
        self.data: torch.Tensor | None = bytes_of(tensor) if tensor.is_cpu else None
        self.released: CUDAFuture[None] = CUDAFuture(name="released", executor=executors.callback_thread)

    def part(self, at: int, length: int) -> torch.Tensor | CUDAFuture[torch.Tensor]:
        """Return bytes on the host in a storage of their own, or a future of them."""
        assert self.data is not None
        is_whole = self.data.numel() == self.data.untyped_storage().nbytes() == length
        return self.data if is_whole else alone(self.data, at, length)

    def release(self) -> None:
        """Complete `released`, if it is not done."""
        self.data = None
        with contextlib.suppress(InvalidStateError):
            self.released.set_result(None)


class _DeviceSource(Source):
    """A tensor on a device. ``part`` copies bytes to pinned memory on a pool stream."""

    def __init__(self, tensor: torch.Tensor, priority: int) -> None:
        super().__init__(tensor)
        self._priority = priority
        self._left = {*range(0, tensor.nbytes, PIECE)} or {0}  # offsets of the parts that have not been copied
        written: CUDAFuture[torch.Tensor] = CUDAFuture.completed(tensor)  # ordered after the caller's streams
        self._bytes = written.then(lambda done: bytes_of(done.value()), priority=priority)

    def part(self, at: int, length: int) -> CUDAFuture[torch.Tensor]:
        def begin(done: CUDAFuture[torch.Tensor]) -> CUDAFuture[torch.Tensor]:
            return copy(done.value()[at : at + length], "cpu", priority=self._priority)

        def copied(done: CUDAFuture[torch.Tensor]) -> torch.Tensor:
            data = done.value()
            self._left.discard(at)  # on the callback thread: one at a time
            if not self._left:
                self.release()
            return data

        copying = self._bytes.then_async(begin, priority=self._priority, executor=executors.inline)
        return copying.then(copied, executor=executors.callback_thread, non_blocking=False)


def source_of(tensor: torch.Tensor, priority: int) -> Source:
    """Return the source of a tensor's bytes.

    Raises:
        TypeError: `tensor` is no tensor, or has a dtype that cannot be sent.
        TensorError: it has no memory of its own, or its storage was freed or shrunk.
        ValueError: the device has no streams, or there are too many dimensions.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"only a torch.Tensor can be written, not {type(tensor).__qualname__}")
    expect_memory(tensor)
    expect_sendable(tensor.dtype, tensor.dim())
    if tensor.is_cpu:
        return Source(tensor)
    pool_stream(tensor.device, priority)  # raises ValueError for a device without streams
    return _DeviceSource(tensor, priority)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in the order of its elements."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


class ExpectedDigest:
    """The digest that a tensor's bytes must have, which is compared with the digests of the parts that are sent.

    The service refuses a part whose bytes do not have the digest in its entry. So stored tensors have the expected
    digest, even if the caller changes a tensor while it is sent.
    """

    def __init__(self, key: str, nbytes: int, expected: int) -> None:
        self._key, self._expected, self._left = key, expected, nbytes
        self._lock = threading.Lock()  # guards what follows
        self._digest = Digest(nbytes)

    def add(self, at: int, part: torch.Tensor) -> int:
        """Add a part that is about to be sent, once; return its digest.

        Raises:
            ChecksumError: all parts were added, and the tensor has another digest.
        """
        with self._lock:
            found = self._digest.add(at, part)
            self._left -= part.nbytes
            if not self._left:
                expect_digest(self._key, self._digest.value(), self._expected)
        return found


def expect_digest(key: str, found: int, expected: int) -> None:
    """Raise ChecksumError unless the bytes to be written have the digest that the caller passed."""
    if found != expected:
        raise ChecksumError(f"key {key!r}: the bytes to be written do not have the digest that was given for them")
