"""TensorNVMe's AsyncFileWriter: a file that is written sequentially while the program continues."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from cudafuture._arguments import shown
from cudafuture._C import CUDAFuture
from cudafuture.compat.tensornvme._completions import raise_first
from cudafuture.compat.tensornvme.backends import engine_of
from cudafuture.errors import InvalidStateError
from cudafuture.executors import default_executor
from cudafuture.io.engine import Engine
from cudafuture.io.file import File
from cudafuture.streams import pool_stream
from cudafuture.transfer import Transfer, enqueued_work, is_on_device

__all__ = ["AsyncFileWriter"]

_logger = logging.getLogger("cudafuture.compat.tensornvme")
_HOST = torch.device("cpu")


class AsyncFileWriter:
    """Writer of bytes and tensors to a file, one after the other, while the program continues: TensorNVMe's API.

    Each call starts its write and returns. The data belongs to the writer until ``synchronize`` returns: do not change
    it. Tensors on a device are first copied to pinned host memory, after the work that is enqueued for them. After
    ``sync_before_step``, tensors may be changed although the writes continue.

    ``synchronize`` and ``close`` raise the errors, with their type. Freeing a writer, and exiting the process, waits
    for pending writes. Any thread may call; after a fork, the child may not.

    Args:
        path: of the file, which is created, or emptied. Or an open file with a descriptor: writing starts at its
            current position, and the caller closes it.
        n_entries: limit of pending writes; the next write waits for the oldest. The default is 16.
        backend: ``"uring"``, ``"aio"`` or ``"pthread"``; see ``get_backends()``. The default is the engine of the
            process.
        n_tasks: has no effect, like ``register_tasks``.
        comm_stream: copies tensors of its device to the host. The default is a stream of the pool.
        engine: writes instead of the backend's engine.

    Raises:
        StorageError: the file cannot be opened.
        TypeError: `path` is no path and no file, or `n_entries` is not an int.
        ValueError: the backend does not exist, or `n_entries` is less than 1.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | io.IOBase,
        n_entries: int = 16,
        backend: str | None = None,
        n_tasks: int = 0,
        comm_stream: torch.Stream | None = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike) and not hasattr(path, "fileno"):
            raise TypeError(f"path is a str, an os.PathLike of one, or an open file, not {shown(path)}")
        serving, is_new = engine_of("uring" if backend is None else backend, n_entries, engine)
        self.fp: io.IOBase | None = None
        self.offset = 0
        self.comm_stream = comm_stream
        if isinstance(path, str | os.PathLike):
            file = File(path, "w", engine=serving)
        else:
            path.flush()
            self.fp, self.offset = path, path.tell()
            file = File(f"/proc/self/fd/{path.fileno()}", "r+", engine=serving)
        self._file = file
        self._writes = _Writes(n_entries)
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self._writes, file, serving if is_new else None)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes, and return their number; data other than ``bytes`` is copied. Python code may use it as a file.

        >>> with AsyncFileWriter("model") as writer:
        ...     torch.save({"w": torch.ones(2)}, writer)
        >>> torch.load("model")
        {'w': tensor([1., 1.])}
        """
        held = data if isinstance(data, bytes) else bytes(memoryview(data))
        address = ctypes.cast(ctypes.c_char_p(held), ctypes.c_void_p).value or 0
        view = _view(held, address, len(held))
        self._append(lambda at: (self._file.write(view, at), None), len(held))
        return len(held)

    def write_raw(self, py_ref: object, buffer: int, n_bytes: int, offset: int) -> CUDAFuture[int]:
        """Write host memory to an offset of the file; later appends go after it.

        Args:
            py_ref: the owner of the memory, which the writer keeps until the write is done.
            buffer: its address.
            n_bytes: its size.
            offset: in bytes; ``writer.offset`` is the end of the data that the writer has so far.

        Raises:
            TypeError: the owner is a device tensor.

        >>> numbers = torch.arange(4)
        >>> with AsyncFileWriter("numbers") as writer:
        ...     writer.write_raw(numbers, numbers.data_ptr(), numbers.nbytes, writer.offset).wait()
        32
        """
        if isinstance(py_ref, torch.Tensor) and is_on_device(py_ref):
            raise TypeError(f"the host cannot read memory on {py_ref.device} by its address: use write_tensor()")
        if n_bytes < 0 or offset < 0:
            raise ValueError(f"n_bytes={n_bytes} and offset={offset} may not be negative")
        view = _view(py_ref, buffer, n_bytes)
        return self._append(lambda at: self._write_host(view, at), n_bytes, offset)

    def write_tensor(self, tensor: torch.Tensor, pinned: torch.Tensor | None = None) -> CUDAFuture[int]:
        """Append the elements of a tensor, on the host or on a device, as ``contiguous()`` lays them out.

        Args:
            tensor: may be dropped at once.
            pinned: host memory for the copy of a device tensor, with its shape and dtype. It belongs to the writer
                until the future is done. The default is new memory.

        The future completes with the number of bytes written.

        Raises:
            TypeError: `tensor` is not a tensor, or has no memory of its own.
            ValueError: `pinned` does not fit.

        >>> with AsyncFileWriter("numbers") as writer:
        ...     writer.write_tensor(torch.eye(3)[:, 1]).wait()
        12
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a torch.Tensor, not {type(tensor).__qualname__}")
        nbytes = tensor.numel() * tensor.element_size()
        if not is_on_device(tensor):
            return self._append(lambda at: self._write_host(tensor, at), nbytes)
        if pinned is not None and (
            is_on_device(pinned) or (pinned.shape, pinned.dtype) != (tensor.shape, tensor.dtype)
        ):
            raise ValueError(
                f"pinned is a {pinned.dtype} of shape {tuple(pinned.shape)} on {pinned.device}; it must be a "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} on the host"
            )
        return self._append(lambda at: self._write_device(tensor, pinned, at), nbytes)

    def sync_before_step(self) -> None:
        """Wait until every tensor that was given to the writer may be changed.

        Device tensors are then copied, and host tensors are written. ``synchronize`` raises the errors.

        >>> with AsyncFileWriter("numbers") as writer:
        ...     numbers = torch.ones(4)
        ...     future = writer.write_tensor(numbers)
        ...     writer.sync_before_step()
        ...     numbers.zero_()
        tensor([0., 0., 0., 0.])
        """
        self._expect_own_process()
        self._writes.wait_for_sources()

    def synchronize(self) -> None:
        """Wait until all data is written, and raise the first error.

        >>> with AsyncFileWriter("numbers") as writer:
        ...     future = writer.write_tensor(torch.ones(4))
        ...     writer.synchronize()
        ...     future.done()
        True
        """
        self._expect_own_process()
        self._writes.wait()

    def flush(self) -> None:
        """Do nothing; files have this method. ``synchronize`` waits.

        >>> AsyncFileWriter("numbers").flush()
        """

    def register_h2d(self, num_tensors: int) -> None:
        """Do nothing: ``sync_before_step`` knows the tensors to wait for.

        >>> AsyncFileWriter("numbers").register_h2d(2)
        """

    def register_tasks(self, num_tasks: int) -> None:
        """Do nothing: ``synchronize`` knows the writes to wait for.

        >>> AsyncFileWriter("numbers").register_tasks(2)
        """

    def close(self) -> None:
        """Synchronize, then close the file.

        >>> AsyncFileWriter("numbers").close()
        """
        if self._end.alive:
            try:
                self.synchronize()
            finally:
                self._end()

    def __enter__(self) -> AsyncFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- implementation

    def _append(
        self,
        begin: Callable[[int], tuple[CUDAFuture[int], CUDAFuture[Any] | None]],
        nbytes: int,
        at: int | None = None,
    ) -> CUDAFuture[int]:
        self._expect_own_process()
        with self._writes.room():
            if not self._end.alive:
                raise InvalidStateError("the writer is closed")
            place = self.offset if at is None else at
            written, released = begin(place)
            self.offset = max(self.offset, place + nbytes)
            self._writes.add(written, released)
        return written

    def _write_host(self, tensor: torch.Tensor, at: int) -> tuple[CUDAFuture[int], CUDAFuture[Any]]:
        written = self._file.write(tensor, at)
        return written, written.released or written

    def _write_device(
        self, tensor: torch.Tensor, pinned: torch.Tensor | None, at: int
    ) -> tuple[CUDAFuture[int], CUDAFuture[None]]:
        stream = self.comm_stream
        if stream is None or stream.device != tensor.device:
            stream = pool_stream(tensor.device)
        copied = Transfer(tensor, _HOST, 0, pinned, stream).start()
        released = enqueued_work(stream)  # not `copied`, which keeps the copy

        def write(copied: CUDAFuture[torch.Tensor]) -> CUDAFuture[int]:
            return self._file.write(copied.value(), at)

        # Not on the callback thread: freeing a writer there would wait for this callback.
        return copied.then_async(write, executor=default_executor(), non_blocking=False), released

    def _expect_own_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidStateError("a writer belongs to the process that created it: create one after the fork")


def _view(owner: object, address: int, nbytes: int) -> torch.Tensor:
    """Return a tensor over host memory that keeps the memory's owner alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=_HOST)
    memory = (ctypes.c_char * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Writes:
    """Pending writes, up to a limit, and the errors of finished ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards the fields below; no thread waits under it
        self._pending: deque[CUDAFuture[int]] = deque()
        self._sources: deque[CUDAFuture[Any]] = deque()  # done and ready when their tensors may be changed
        self._errors: list[Exception] = []

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Wait until there is room for one more write, and hold the lock."""
        while True:
            with self._lock:
                oldest = self._oldest() if len(self._pending) >= self._most else None
                if oldest is None:
                    yield
                    return
            _await(oldest)

    def add(self, written: CUDAFuture[int], released: CUDAFuture[Any] | None) -> None:
        """Add a write; the caller holds the lock."""
        self._oldest()
        self._pending.append(written)
        while self._sources and _is_over(self._sources[0]):
            self._sources.popleft()
        if released is not None:
            self._sources.append(released)

    def _oldest(self) -> CUDAFuture[int] | None:
        """Return the oldest write that is not done, and remove the writes that are."""
        while self._pending and self._pending[0].done():
            done = self._pending.popleft()
            try:
                done.value()
            except Exception as e:
                self._errors.append(e)
        return self._pending[0] if self._pending else None

    def wait(self) -> None:
        """Wait until no write is pending, and raise the first error."""
        while True:
            with self._lock:
                oldest = self._oldest()
                if oldest is None:
                    errors, self._errors = self._errors, []
                    break
            _await(oldest)
        raise_first(errors)

    def wait_for_sources(self) -> None:
        """Wait until all tensors may be changed."""
        while True:
            with self._lock:
                if not self._sources:
                    return
                source = self._sources[0]
            _await(source)
            with self._lock:
                if self._sources and self._sources[0] is source:
                    self._sources.popleft()


def _await(future: CUDAFuture[Any]) -> None:
    with contextlib.suppress(Exception):
        future.wait()


def _is_over(future: CUDAFuture[Any]) -> bool:
    try:
        return future.ready()
    except Exception:
        return True


def _end(process: int, writes: _Writes, file: File, engine: Engine | None) -> None:
    """End a writer that is closed or freed, or whose process exits."""
    if os.getpid() != process:
        return
    try:
        writes.wait()
    except Exception as e:
        _logger.error("%s: a writer was freed before a call raised its error: %s", file.path, e, exc_info=e)
    file.close()
    if engine is not None:
        engine.close()
