"""File whose reads and writes are futures."""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from cudafuture import _C
from cudafuture._arguments import expect_int, expect_tensor, listed
from cudafuture._C import CUDAFuture
from cudafuture._path import path_text
from cudafuture.errors import StorageError
from cudafuture.future import submit
from cudafuture.io.engine import Engine, engine_or_default
from cudafuture.ownership import ENABLED, checked

__all__ = ["File"]

_logger = logging.getLogger("cudafuture.io")
_without_direct: set[int] = set()  # devices for which the missing direct I/O was logged

MODES = ("r", "r+", "w", "w+")
_LARGEST = (1 << 63) - 1  # bytes of a file


class File:
    """File for reading and writing tensors, at any offset and of any length.

    Tensors are on the host or on devices, of any dtype and with any strides; the file stores their elements as
    ``tensor.contiguous()`` orders them. A tensor belongs to the read or write until its future is done: do not change
    a tensor that is being written, and do not read one that is being filled. A write's ``future.released`` may complete
    before the write: after that, the tensor may be changed. Overlapping reads and writes of one file have no order,
    except through futures that you wait for.

    On devices, a write takes the tensor as the caller's current stream leaves it, and a read fills it after the work
    that is enqueued on that stream. They are copied on pool streams, through pinned staging buffers of the engine. The
    future of a read completes when the last copy is enqueued; its events order the consumers.

    Files bypass the page cache if possible (O_DIRECT): whole pages go directly from the tensor's memory if it is
    aligned, and through a staging buffer if not. Pages that a write covers partially go through the cache.

    Args:
        path: of the file.
        mode: ``"r"`` and ``"r+"`` open an existing file, to read, or to read and write; ``"w"`` and ``"w+"`` create an
            empty file, to write, or to read and write.
        engine: reads and writes; by default the engine of the process.
        direct: bypass the page cache: ``"auto"``, the default: if the file system can; True: fail with StorageError if
            it cannot; False: never.

    Raises:
        StorageError: the file cannot be opened; ``errno`` has the reason.
        ValueError: the mode or `direct` is not valid; the path is not UTF-8, or has a NUL.
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
            raise ValueError(f"mode={mode!r} is not valid; use one of {', '.join(MODES)}")
        if direct not in ("auto", True, False):
            raise ValueError(f"direct={direct!r} is not valid; use 'auto', True or False")
        self._path = path_text(path)
        self._mode = mode
        self._engine = engine_or_default(engine)
        if mode == "r" and Path(self._path).is_dir():  # the kernel opens a folder to read, and refuses the first read
            raise StorageError(f"cannot open {self._path}: it is a folder", errno=errno.EISDIR, path=self._path)
        self._native = _C.open_file(self._path, mode, None if direct == "auto" else direct)
        if direct == "auto" and not self.is_direct:
            self._log_no_direct()

    @property
    def path(self) -> str:
        """The path that the file was opened with."""
        return self._path

    @property
    def is_direct(self) -> bool:
        """True if the file bypasses the page cache."""
        return self._native.is_direct

    @property
    def size(self) -> int:
        """The size of the file in bytes, after the writes that have completed.

        Raises:
            StorageError: the system call failed.
            InvalidStateError: the file is closed.
        """
        return self._native.size

    def read(self, tensor: torch.Tensor, offset: int = 0, *, priority: int = 0) -> CUDAFuture[int]:
        """Fill a tensor with the bytes of the file from `offset` on.

        The future completes with the number of bytes read, which is the tensor's size. If the file ends before, or on
        any other error, it fails with StorageError, which has ``errno``, ``wanted`` and ``got``.

        `priority` applies to the future, the streams that copy, and the I/O: 0 is the default, and a negative one
        precedes all others that the engine has not begun. One block of eight is reserved for the others, so none
        starves.

        Raises:
            TypeError: `tensor` is not a tensor, or has no memory on the host or on a device with streams.
            ValueError: the offset is negative, or the tensor cannot be filled: its elements share memory (as with
                ``expand``), or are not all in its memory.
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
        """Write a tensor to the file, from `offset` on; the file grows if necessary.

        The future completes with the number of bytes written, which is the tensor's size, when the kernel has them:
        ``sync()`` makes them survive a crash of the machine. For errors see ``read``.

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
            raise io.UnsupportedOperation(f"{self._path} is open for writing only; open it with mode 'w+' or 'r+'")
        return self._transfer(True, tensors, offset, priority)

    def writev(self, tensors: Iterable[torch.Tensor], offset: int = 0, *, priority: int = 0) -> CUDAFuture[int]:
        """Write tensors, one after the other, from `offset` on. See ``write``.

        >>> File("numbers", "w").writev([torch.ones(2), torch.zeros(3, dtype=torch.int8)]).wait()
        11
        """
        if self._mode == "r":
            raise io.UnsupportedOperation(f"{self._path} is open for reading only; open it with mode 'r+'")
        return self._transfer(False, tensors, offset, priority)

    def _transfer(self, reads: bool, tensors: Iterable[torch.Tensor], offset: int, priority: int) -> CUDAFuture[int]:
        given = listed("tensors", tensors, "tensors")
        name = f"{'read' if reads else 'write'} {self._path}"
        if type(offset) is not int or offset < 0:
            offset = expect_int("offset", offset, 0)
        transfer = self._engine._native.transfer
        try:
            if ENABLED and not reads:
                owned = {f"tensor {i}": tensor for i, tensor in enumerate(given)}
                return checked(transfer, name, owned, self._native, reads, given, offset, name, priority)
            return transfer(self._native, reads, given, offset, name, priority)
        except TypeError:
            for i, tensor in enumerate(given):
                expect_tensor(f"tensors[{i}]" if len(given) > 1 else "tensor", tensor)
            expect_int("priority", priority)
            raise

    def allocate(self, size: int) -> None:
        """Allocate disk blocks for `size` bytes, so that writes there cannot run out of room, and are faster.

        Raises:
            StorageError: the disk has too little room.
            ValueError: the size is negative.

        >>> file = File("numbers", "w")
        >>> file.allocate(1 << 20)
        >>> file.size
        1048576
        """
        self._native.allocate(expect_int("size", size, 0, _LARGEST))

    def truncate(self, size: int) -> None:
        """Truncate the file, or extend it with zeros, to `size` bytes.

        Raises:
            StorageError: the system call failed.
            ValueError: the size is negative.

        >>> file = File("numbers", "w+")
        >>> file.truncate(100)
        >>> file.size
        100
        """
        self._native.truncate(expect_int("size", size, 0, _LARGEST))

    def sync(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes that completed before this call survive a crash.

        If it fails, with StorageError, the data written since the last sync is in doubt, and a retry does not help.
        The name of a new file belongs to its folder, which must be synced separately (``os.fsync``).

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
            _logger.warning("%s: direct I/O is not available there, so files go through the page cache", self._path)
