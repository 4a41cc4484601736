"""A tensor that is written to another worker: its bytes, on the host, piece by piece as they are wanted."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

import torch

from cudafuture import CUDAFuture, copy, executors, pool_stream
from cudafuture.errors import ChecksumError, InvalidStateError
from cudafuture.storage import Digest
from rpc_ext._C import alone
from rpc_ext._offload_wire import PIECE, Header, code_of, pieces_of

__all__ = ["ExpectedDigest", "Source", "expect_digest", "expect_memory", "header_of", "source_of"]

_THREAD = executors.callback_thread


class Source(Protocol):
    """Where the bytes come from."""

    @property
    def bytes(self) -> torch.Tensor | None:
        """All of them, where they are on the host."""
        ...

    def piece(self, at: int, length: int) -> CUDAFuture[torch.Tensor]:
        """Return bytes when the host may read them, in a storage that has nothing else."""
        ...

    def release(self) -> None:
        """Say that the tensor is wanted no more, if that was not said before."""
        ...


def header_of(key: str, tensor: torch.Tensor) -> Header:
    """Return what is said of a tensor.

    Raises:
        TypeError: it is none, or one that cannot be sent.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a torch.Tensor is wanted, not {type(tensor).__qualname__}")
    expect_memory(tensor)
    code_of(tensor.dtype)
    return Header(key, tensor.dtype, tuple(tensor.shape), tensor.nbytes, pieces=pieces_of(tensor.nbytes))


def expect_memory(tensor: torch.Tensor) -> None:
    """See whether a tensor has the memory of its elements.

    Raises:
        TypeError: it has none of its own.
        ValueError: its storage is smaller.
    """
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or tensor.untyped_storage().device.type == "meta":
        raise TypeError(
            f"a tensor without memory of its own cannot be sent, nor filled: {tensor.layout} on {tensor.device}"
        )
    if tensor.numel():
        last = tensor.numel() - 1
        if not tensor.is_contiguous():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        there, wanted = tensor.untyped_storage().nbytes(), (tensor.storage_offset() + last + 1) * tensor.itemsize
        if there < wanted:
            raise ValueError(f"the memory of the tensor has {there} bytes, and its elements lie in {wanted}")


class ExpectedDigest:
    """The digest that the bytes of a tensor must have, compared with the checksums under which its pieces are sent.

    The service refuses a piece whose bytes do not have the checksum in its header. So what is stored has the digest,
    also when the caller changes the tensor while it is sent.
    """

    def __init__(self, nbytes: int, expected: int) -> None:
        self._expected, self._left = expected, nbytes
        self._lock = threading.Lock()  # guards what follows
        self._digest = Digest(nbytes)

    def add(self, at: int, piece: torch.Tensor) -> int:
        """Return the checksum of a piece that is about to be sent. Add each piece once.

        Raises:
            ChecksumError: all pieces were added, and the tensor has another digest.
        """
        with self._lock:
            checksum = self._digest.add(at, piece)
            self._left -= piece.nbytes
            if not self._left:
                expect_digest(self._digest.value(), self._expected)
        return checksum


def expect_digest(found: int, expected: int) -> None:
    """Raise ChecksumError unless two digests are equal."""
    if found != expected:
        raise ChecksumError("the bytes that were to be written do not have the digest that they must have")


def source_of(tensor: torch.Tensor, priority: int) -> tuple[Source, CUDAFuture[None]]:
    """Return the source that a tensor is, and the future of when it may be overwritten.

    Raises:
        ValueError: it is on a device that has no streams.
    """
    released: CUDAFuture[None] = CUDAFuture(name="released", executor=_THREAD)
    if tensor.is_cpu:
        return _HostSource(tensor, released), released
    pool_stream(tensor.device, priority)  # refuses what has none
    return _DeviceSource(tensor, released, priority), released


class _HostSource:
    """Memory on the host, which is sent as it lies."""

    def __init__(self, tensor: torch.Tensor, released: CUDAFuture[None]) -> None:
        self.bytes, self._released = _bytes_of(tensor), released

    def piece(self, at: int, length: int) -> CUDAFuture[torch.Tensor]:
        whole = self.bytes.numel() == self.bytes.untyped_storage().nbytes() == length
        return CUDAFuture.completed(self.bytes if whole else alone(self.bytes, at, length))

    def release(self) -> None:
        _complete(self._released)


class _DeviceSource:
    """Memory on a device: each piece is copied to pinned memory on a pool stream, when there is room for it to go."""

    bytes = None

    def __init__(self, tensor: torch.Tensor, released: CUDAFuture[None], priority: int) -> None:
        self._released, self._priority = released, priority
        self._left = {*range(0, tensor.nbytes, PIECE)} or {0}  # where the pieces begin that are still to be copied
        written: CUDAFuture[torch.Tensor] = CUDAFuture.completed(tensor)  # by the caller's streams
        self._bytes = written.then(lambda done: _bytes_of(done.value()), priority=priority)

    def piece(self, at: int, length: int) -> CUDAFuture[torch.Tensor]:
        def begin(done: CUDAFuture[torch.Tensor]) -> CUDAFuture[torch.Tensor]:
            return copy(done.value()[at : at + length], "cpu", priority=self._priority)

        def copied(done: CUDAFuture[torch.Tensor]) -> torch.Tensor:
            piece = done.value()
            self._left.discard(at)  # on the callback thread: one at a time
            if not self._left:
                self.release()
            return piece

        copying = self._bytes.then_async(begin, priority=self._priority, executor=executors.inline)
        return copying.then(copied, executor=_THREAD, non_blocking=False)

    def release(self) -> None:
        _complete(self._released)


def _complete(released: CUDAFuture[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # it was released before
        released.set_result(None)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as they lie in order."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)
