"""Memory that disks and devices use without a copy: single tensors, and pools of buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import torch

from cudafuture import _C
from cudafuture._arguments import expect_dtype, expect_int
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.io.engine import PAGE
from cudafuture.transfer import empty_on

__all__ = ["Buffer", "BufferPool", "empty"]


def empty(size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized host tensor that a disk reads and writes without a copy.

    Direct I/O needs memory that begins at a multiple of the disk's block, but torch's memory begins at a multiple of 64
    bytes, so direct writes first copy such tensors. This tensor begins at a page (4 KiB), from 2 MiB on at a huge page,
    which the kernel is asked to use: a disk reads few large pages faster than many small ones.

    Args:
        size: as for ``torch.empty``.
        dtype: default: torch's.

    >>> states = empty((2, 3), torch.bfloat16)
    >>> states.shape, states.dtype, states.data_ptr() % 4096
    (torch.Size([2, 3]), torch.bfloat16, 0)
    """
    shape = _shape(size)
    dtype = _dtype(dtype)
    return _C.aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class Buffer:
    """Part of a ``BufferPool``; see there.

    Its memory returns to the pool when it is released or freed, and no tensor uses the memory any more, neither in the
    program nor in a read or write in flight.
    """

    def __init__(self, loan: _C.BufferLoan) -> None:
        self._loan = loan

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes: a tensor of torch.uint8, of the requested size.

        Raises:
            InvalidStateError: the buffer was released.
        """
        tensor = self._loan.tensor
        if tensor is None:
            raise InvalidStateError("the buffer was released")
        return tensor

    def view(self, size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return its first bytes as a tensor of the given shape and dtype (default: torch's).

        Raises:
            InvalidStateError: the buffer was released.
            ValueError: the tensor has more bytes than the buffer.

        >>> BufferPool(1 << 20).take(100).wait().view((5, 5)).shape
        torch.Size([5, 5])
        """
        shape = _shape(size)
        dtype = _dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.tensor.numel():
            raise ValueError(f"a tensor of {nbytes} bytes is larger than the buffer of {self.tensor.numel()} bytes")
        return self.tensor[:nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Release the memory. Further calls do nothing.

        >>> pool = BufferPool(1 << 20)
        >>> pool.take(1 << 20).wait().release()
        >>> pool.free
        1048576
        """
        self._loan.release()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        tensor = self._loan.tensor
        return "<Buffer, released>" if tensor is None else f"<Buffer of {tensor.numel()} bytes>"


class BufferPool:
    """Pool of a fixed size; ``take`` returns aligned buffers that disks and devices use without a copy.

    When too little memory is free, the future of ``take`` completes later, so exhaustion slows a program down and does
    not end it. Requests are served in order, so smaller ones do not starve a large one. A task that needs two buffers
    takes them in one request: with one request each, two tasks could wait for each other.

    A copy between a device and pinned memory that a program starts itself (``to(device, non_blocking=True)``) continues
    after the call. The program may release the buffer meanwhile, in the thread and under the stream of the copy: a
    pinned pool records an event on the releasing thread's current stream of each device that the process uses, and
    reuses the memory when the devices have reached these events. A copy on another stream must keep its buffer until
    the copy has finished. Reads and writes of the library hold the memory until they have finished.

    The pool allocates its memory on creation. The memory is freed when the pool is closed or freed and its last buffer
    is released.

    Args:
        nbytes: of the memory; rounded up to pages (4 KiB).
        pin: page-lock the memory, so that devices copy from and to it asynchronously. "auto" (default): if there is an
            accelerator.

    Raises:
        ValueError: `nbytes` is not positive.
        RuntimeError: the memory cannot be pinned.

    >>> pool = BufferPool(1 << 20)
    >>> with pool.take(600_000).wait() as buffer:
    ...     later = pool.take(600_000)
    ...     later.done()
    False
    >>> later.wait()
    <Buffer of 600000 bytes>
    """

    def __init__(self, nbytes: int, pin: Literal["auto"] | bool = "auto") -> None:
        nbytes = expect_int("nbytes", nbytes, 1)
        if pin not in ("auto", True, False):
            raise ValueError(f"pin={pin!r} is not valid; use 'auto', True or False")
        self._nbytes = math.ceil(nbytes / PAGE) * PAGE
        self._is_pinned = torch.accelerator.is_available() if pin == "auto" else pin
        self._native = _C.make_buffer_pool(_arena(self._nbytes, self._is_pinned), self._is_pinned)

    @property
    def nbytes(self) -> int:
        """The size of its memory in bytes."""
        return self._nbytes

    @property
    def free(self) -> int:
        """The free bytes: no buffer has them, and no device uses them. They need not be adjacent."""
        return self._native.free

    @property
    def is_pinned(self) -> bool:
        """True if its memory is page-locked."""
        return self._is_pinned

    def take(self, nbytes: int) -> CUDAFuture[Buffer]:
        """Return a future of a buffer of `nbytes` bytes, which begins at a page.

        A waiting request can be cancelled. Callbacks run on the library's callback thread, unless you give an executor.

        Raises:
            ValueError: `nbytes` is negative, or more than the pool has.
            InvalidStateError: the pool is closed. Closing also fails the futures of waiting requests with it.

        >>> BufferPool(1 << 20).take(100).wait().tensor.shape
        torch.Size([100])
        """
        nbytes = expect_int("nbytes", nbytes)
        if not 0 <= nbytes <= self._nbytes:
            raise ValueError(f"{nbytes} bytes were requested of a pool of {self._nbytes}")
        loan = _C.make_buffer_loan()
        return self._native.take(nbytes, Buffer(loan), loan, f"take {nbytes} bytes")

    @property
    def outside(self) -> int:
        """The bytes that its ``allocator`` has allocated outside of the pool so far."""
        return self._native.outside

    def allocator(self) -> object:
        """Return a capsule of a ``c10::Allocator``, for C++ code whose threads must not wait for a future.

        It allocates from the pool without waiting. When too little is free, or requests of ``take`` wait, it allocates
        memory outside of the pool, which also begins at a page, and counts it in ``outside``. The capsule has the name
        "c10::Allocator". It keeps the pool alive, and C++ code keeps the capsule while it uses the allocator.

        >>> BufferPool(1 << 20).allocator()  # doctest: +ELLIPSIS
        <capsule object "c10::Allocator" at 0x...>
        """
        return self._native.allocator()

    def close(self) -> None:
        """Refuse further requests; waiting futures fail. Buffers stay usable until they are released.

        >>> BufferPool(1 << 20).close()
        """
        self._native.close()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BufferPool of {self._nbytes} bytes, {self.free} free>"


def _shape(size: int | Sequence[int]) -> tuple[int, ...]:
    sizes = size if isinstance(size, Sequence) and not isinstance(size, str) else (size,)
    shape = tuple(expect_int("size", each) for each in sizes)
    if any(each < 0 for each in shape):
        raise ValueError(f"shape {list(shape)} has a negative size")
    return shape


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    expect_dtype("dtype", dtype)
    return dtype


def _arena(nbytes: int, pinned: bool) -> torch.Tensor:
    if not pinned:
        return empty(nbytes, torch.uint8)
    memory = empty_on(torch.empty(nbytes + PAGE, dtype=torch.uint8, device="meta"), torch.device("cpu"))
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + nbytes]
