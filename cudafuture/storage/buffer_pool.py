"""Memory that disks and devices take as it is: single tensors, and pools that buffers are taken from."""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import torch

from cudafuture import _C, executors
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.storage.engine import PAGE

__all__ = ["Buffer", "BufferPool", "empty"]


def empty(size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor on the host that a disk takes as it is, not initialized.

    A write past the page cache copies other tensors first: direct I/O wants memory that begins at a multiple of the
    disk's block, and torch's begins at 64 bytes. This one begins at a page (4 KiB), from 2 MiB on at a huge page, which
    the kernel is asked to use: a disk reads few large pages faster than many small ones.

    Args:
        size: as for ``torch.empty``.
        dtype: default: torch's.

    >>> states = empty((2, 3), torch.bfloat16)
    >>> states.shape, states.dtype, states.data_ptr() % 4096
    (torch.Size([2, 3]), torch.bfloat16, 0)
    """
    shape = _shape(size)
    dtype = dtype or torch.get_default_dtype()
    return _C.aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class Buffer:
    """A part of a ``BufferPool``; see there.

    It is the pool's again when it is released, or dropped, and nobody has a tensor of its memory any more: neither a
    program, nor a read or write that is under way.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes: a tensor of torch.uint8, of as many as were asked for.

        Raises:
            InvalidStateError: it was released.
        """
        if self._tensor is None:
            raise InvalidStateError("the buffer was released")
        return self._tensor

    def view(self, size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return its first bytes as a tensor of that shape and dtype (default: torch's).

        Raises:
            InvalidStateError: it was released.
            ValueError: the tensor has more bytes than the buffer.

        >>> BufferPool(1 << 20).take(100).wait().view((5, 5)).shape
        torch.Size([5, 5])
        """
        shape = _shape(size)
        dtype = dtype or torch.get_default_dtype()
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.tensor.numel():
            raise ValueError(f"a tensor of {nbytes} bytes is more than the buffer has, {self.tensor.numel()}")
        return self.tensor[:nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Let go of the memory. Further calls do nothing.

        >>> pool = BufferPool(1 << 20)
        >>> pool.take(1 << 20).wait().release()
        >>> pool.free
        1048576
        """
        self._tensor = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return "<Buffer, released>" if self._tensor is None else f"<Buffer of {self._tensor.numel()} bytes>"


class BufferPool:
    """Memory of a fixed size, of which ``take`` gives parts: aligned buffers that disks and devices take as they are.

    When too little of it is free, the future of ``take`` completes later: what is exhausted slows a program down, and
    does not end it. Requests are served in their order, so a large one is not passed by smaller ones for ever. A task
    that needs two buffers takes them in one request: with one each, two tasks could wait for each other.

    A copy between a device and pinned memory that a program starts by itself (``to(device, non_blocking=True)``) goes
    on after the call. The program keeps the buffer until the copy has finished: the pool does not know of it. Reads
    and writes of the library hold the memory until they have finished.

    The memory is allocated when the pool is made, and freed when the pool was closed or dropped and its last buffer is
    gone.

    Args:
        nbytes: of the memory; rounded up to pages (4 KiB).
        pin: whether it is page-locked, so that devices copy from and to it asynchronously. "auto" (default): where
            there is an accelerator.

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
        nbytes = operator.index(nbytes)
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes!r} is not positive")
        if pin not in ("auto", True, False):
            raise ValueError(f"pin={pin!r}: 'auto', True or False is wanted")
        self._nbytes = _pages(nbytes)
        self._is_pinned = torch.accelerator.is_available() if pin == "auto" else pin
        self._arena = _arena(self._nbytes, self._is_pinned)
        self._memory = memoryview((ctypes.c_ubyte * self._nbytes).from_address(self._arena.data_ptr())).cast("B")
        self._lock = threading.Lock()  # guards what follows; no future is completed under it
        self._free = {0: self._nbytes}  # runs of pages by place: their sizes
        self._waiting: deque[tuple[int, CUDAFuture[Buffer]]] = deque()
        self._is_closed = False
        # What has happened since somebody looked; appended to without the lock, by whatever thread.
        self._news: deque[tuple[int, int]] = deque()  # runs that were given back; of no bytes: there is a request

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        return self._nbytes

    @property
    def free(self) -> int:
        """The bytes that no buffer has; they need not lie together."""
        self._go_on()
        with self._lock:
            free = sum(self._free.values())
        self._go_on()  # somebody may have come while the lock was held
        return free

    @property
    def is_pinned(self) -> bool:
        """Whether its memory is page-locked."""
        return self._is_pinned

    def take(self, nbytes: int) -> CUDAFuture[Buffer]:
        """Return a future of a buffer, which begins at a page and has `nbytes` of its own.

        A request that waits can be cancelled. Callbacks run on the library's callback thread, unless they are given
        an executor.

        Raises:
            ValueError: `nbytes` is negative, or more than the pool has.
            InvalidStateError: the pool is closed. So fail the futures that wait when it is closed.

        >>> BufferPool(1 << 20).take(100).wait().tensor.shape
        torch.Size([100])
        """
        nbytes = operator.index(nbytes)
        if not 0 <= nbytes <= self._nbytes:
            raise ValueError(f"{nbytes} bytes of a pool of {self._nbytes}")
        future: CUDAFuture[Buffer] = CUDAFuture(name=f"take {nbytes} bytes", executor=executors.callback_thread)
        with self._lock:
            if self._is_closed:
                raise InvalidStateError("the pool is closed")
            self._waiting.append((nbytes, future))
        self._hear(0, 0)
        if not future.done():  # when it is cancelled, those behind it may be served
            reference = weakref.ref(self)

            def ended(done: CUDAFuture[Buffer]) -> None:
                pool = reference()
                if pool is not None and done.cancelled():
                    pool._hear(0, 0)

            future.add_done_callback(ended, executor=executors.inline)
        return future

    def close(self) -> None:
        """Give nothing more; futures that wait fail. Buffers stay until they are released.

        >>> BufferPool(1 << 20).close()
        """
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for _, future in waiting:
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                future.set_exception(InvalidStateError("the pool was closed"))

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BufferPool of {self._nbytes} bytes, {self.free} free>"

    def _hear(self, place: int, size: int) -> None:
        self._news.append((place, size))
        self._go_on()

    def _go_on(self) -> None:
        """Serve those who wait, in their order, with what was given back.

        The garbage collector may call this in any thread, also in one that has the lock. So nobody waits for the lock:
        who has it looks for news again when it has let go.
        """
        while self._news and self._lock.acquire(blocking=False):
            try:
                served = self._serve()
            finally:
                self._lock.release()
            for future, buffer in served:
                with contextlib.suppress(InvalidStateError):  # it was cancelled, and the buffer comes back
                    future.set_result(buffer)

    def _serve(self) -> list[tuple[CUDAFuture[Buffer], Buffer]]:
        while self._news:
            begin, size = self._news.popleft()
            if size:
                self._join(begin, size)
        served = []
        while self._waiting:
            nbytes, future = self._waiting[0]
            if not future.done():  # else it was cancelled
                place = self._find(_pages(nbytes))
                if place is None:
                    break
                served.append((future, Buffer(self._cut(place, nbytes))))
            self._waiting.popleft()
        return served

    def _find(self, size: int) -> int | None:
        """Take that many bytes from the smallest run that has them; return their place."""
        if size == 0:
            return 0
        place = min((run for run in self._free if self._free[run] >= size), key=self._free.__getitem__, default=None)
        if place is not None:
            left = self._free.pop(place) - size
            if left:
                self._free[place + size] = left
        return place

    def _join(self, place: int, size: int) -> None:
        """Let a run be free again, in one with those that it touches."""
        if place + size in self._free:
            size += self._free.pop(place + size)
        for before, length in self._free.items():
            if before + length == place:
                self._free[before] += size
                return
        self._free[place] = size

    def _cut(self, place: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        part = self._memory[place : place + nbytes]
        # Until nobody has a tensor of that memory any more the pool lives, too.
        weakref.finalize(part, self._hear, place, _pages(nbytes)).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)


def _shape(size: int | Sequence[int]) -> tuple[int, ...]:
    shape = (size,) if isinstance(size, int) else tuple(size)
    if any(each < 0 for each in shape):
        raise ValueError(f"no tensor is of shape {list(shape)}")
    return shape


def _pages(nbytes: int) -> int:
    return math.ceil(nbytes / PAGE) * PAGE


def _arena(nbytes: int, pinned: bool) -> torch.Tensor:
    if not pinned:
        return empty(nbytes, torch.uint8)
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + nbytes]
