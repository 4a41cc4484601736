"""A file whose reads and writes are futures."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.future import submit
from cudafuture.storage._path import path_text
from cudafuture.storage.engine import Engine, default_engine

__all__ = ["File"]

_logger = logging.getLogger("cudafuture.storage")
_without_direct: set[int] = set()  # devices of which that was logged

MODES = ("r", "r+", "w", "w+")


class File:
    """A file that tensors are read from and written to, at any offset and of any length.

    Tensors are on the host or on devices, of any dtype and with any strides; what is stored are their elements, as
    ``tensor.contiguous()`` lays them out. A tensor belongs to the read or write until its future is done: do not change
    one that is written, nor look at one that is read. A write's ``future.released`` may complete sooner than the write:
    from then on the tensor may be changed. Reads and writes of one file that overlap have no order among them, other
    than that of futures that you wait for.

    On devices, a write takes the tensor as the caller's current stream leaves it, and a read fills it after what that
    stream has had to do so far. They are copied on streams of the pool, by way of pinned buffers of the engine. The
    future of a read completes when the last copy is enqueued; its events order whoever waits for it.

    Files bypass the page cache where they can (O_DIRECT): whole pages go from the tensor's memory, if that is aligned,
    else by way of a buffer. Pages of which a write covers a part only go through the cache.

    Args:
        path: of the file.
        mode: ``"r"`` and ``"r+"`` want a file that exists, to read, or to read and write; ``"w"`` and ``"w+"`` make an
            empty one, to write, or to read and write.
        engine: what reads and writes; by default the process's own.
        direct: whether to bypass the page cache: ``"auto"``, the default, where the file system can; True: StorageError
            where it cannot; False: never.

    Raises:
        StorageError: the file cannot be opened; ``errno`` says why.
        ValueError: a mode or `direct` that does not exist; a path that is not UTF-8, or has a NUL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["r", "r+", "w", "w+"] = "r",
        *,
        engine: Engine | None = None,
        direct: Literal["auto"] | bool = "auto",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: one of {', '.join(MODES)} is wanted")
        if direct not in ("auto", True, False):
            raise ValueError(f"direct={direct!r}: 'auto', True or False is wanted")
        self._path = path_text(path)
        self._mode = mode
        self._engine = engine or default_engine()
        self._native = _C.open_storage_file(self._path, mode, None if direct == "auto" else direct)
        if direct == "auto" and not self.is_direct:
            self._log_no_direct()

    @property
    def path(self) -> str:
        """The path that it was opened with."""
        return self._path

    @property
    def is_direct(self) -> bool:
        """Whether it bypasses the page cache."""
        return self._native.is_direct

    @property
    def size(self) -> int:
        """Bytes in the file, of writes that have completed.

        Raises:
            StorageError: the system does not say.
            InvalidStateError: the file is closed.
        """
        return self._native.size

    def read(self, tensor: torch.Tensor, offset: int = 0, *, priority: int = 0) -> CUDAFuture[int]:
        """Fill a tensor with the bytes of the file from `offset` on.

        The future completes with the bytes that were read, which are those of the tensor; it fails with StorageError
        where the file ends before, and on any other error: its ``errno``, ``wanted`` and ``got`` say more.

        `priority` is that of the future, of the streams that copy, and of the I/O: 0 is the default, and a negative one
        goes before all others that the engine has not begun. One block of eight is theirs, so nothing starves.

        Raises:
            TypeError: no tensor, or one without memory on the host or on a device with streams.
            ValueError: a negative offset, or a tensor that cannot be filled: its elements share memory (as those of
                ``expand`` do); or whose elements are not all in its memory.
            InvalidStateError: the engine is closed.

        >>> file = File("numbers", "w+")
        >>> file.write(torch.arange(8)).wait()
        64
        >>> numbers = torch.zeros(3, dtype=torch.int64)
        >>> file.read(numbers, 16).then(lambda read: (read.value(), numbers.tolist())).wait()
        (24, [2, 3, 4])
        """
        return self.readv((tensor,), offset, priority=priority)

    def write(self, tensor: torch.Tensor, offset: int = 0, *, priority: int = 0) -> CUDAFuture[int]:
        """Write a tensor to the file, from `offset` on; the file grows where it has to.

        The future completes with the bytes that were written, which are those of the tensor, when the kernel has them:
        ``sync()`` is what makes them survive a crash of the machine. For errors see ``read``.

        >>> File("numbers", "w").write(torch.eye(3)[:, 1]).wait()
        12
        """
        return self.writev((tensor,), offset, priority=priority)

    def readv(self, tensors: Iterable[torch.Tensor], offset: int = 0, *, priority: int = 0) -> CUDAFuture[int]:
        """Fill tensors, one after the other, with the bytes of the file from `offset` on. See ``read``.

        >>> file = File("numbers", "w+")
        >>> file.write(torch.arange(4)).wait()
        32
        >>> one, three = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        >>> file.readv([one, three]).wait(), one.item(), three.tolist()
        (32, 0, [1, 2, 3])
        """
        if self._mode == "w":
            raise io.UnsupportedOperation(f"{self._path} is open to be written only")
        return self._transfer(True, tensors, offset, priority)

    def writev(self, tensors: Iterable[torch.Tensor], offset: int = 0, *, priority: int = 0) -> CUDAFuture[int]:
        """Write tensors, one after the other, from `offset` on. See ``write``.

        >>> File("numbers", "w").writev([torch.ones(2), torch.zeros(3, dtype=torch.int8)]).wait()
        11
        """
        if self._mode == "r":
            raise io.UnsupportedOperation(f"{self._path} is open to be read only")
        return self._transfer(False, tensors, offset, priority)

    def _transfer(self, reads: bool, tensors: Iterable[torch.Tensor], offset: int, priority: int) -> CUDAFuture[int]:
        if offset < 0:
            raise ValueError(f"offset={offset} is negative")
        name = f"{'read' if reads else 'write'} {self._path}"
        return self._engine._native.transfer(self._native, reads, list(tensors), offset, name, priority)

    def allocate(self, size: int) -> None:
        """Have blocks of the disk for `size` bytes, so that writes there cannot run out of room, and are faster.

        Raises:
            StorageError: there is not so much room.

        >>> file = File("numbers", "w")
        >>> file.allocate(1 << 20)
        >>> file.size
        1048576
        """
        self._native.allocate(size)

    def truncate(self, size: int) -> None:
        """Cut the file off, or fill it with zeros, so that it has `size` bytes.

        Raises:
            StorageError: the system refuses.

        >>> file = File("numbers", "w+")
        >>> file.truncate(100)
        >>> file.size
        100
        """
        self._native.truncate(size)

    def sync(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes that have completed before this call survive a crash.

        When it fails, with StorageError, what was written since the last one is in doubt; trying again does not help.
        The name of a file that is new is its folder's, which is to be synced by itself (``os.fsync``).

        >>> file = File("numbers", "w")
        >>> file.write(torch.ones(3)).then_async(lambda written: file.sync()).wait()
        """
        return submit(self._native.sync)

    def close(self) -> None:
        """Close the file. Operations in flight complete; later ones fail with InvalidStateError.

        The descriptors are closed after the last operation, so the system then frees the space of an unlinked file.

        >>> file = File("numbers", "w")
        >>> file.close()
        """
        self._native.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<File {self._path!r}, mode {self._mode!r}, {'direct' if self.is_direct else 'cached'}>"

    def _log_no_direct(self) -> None:
        device = Path(self._path).stat().st_dev
        if device not in _without_direct:
            _without_direct.add(device)
            _logger.warning("%s: no direct I/O there, so files go through the page cache", self._path)
