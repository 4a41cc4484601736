"""GPUDirect Storage, through KvikIO: transfers between the disk and GPU memory without host memory in between.

It is optional and needs KvikIO: ``pip install kvikio-cu13``. Without GPUDirect Storage on the machine, KvikIO uses host
memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch

from cudafuture import _C
from cudafuture._arguments import expect_int, listed
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError, StorageError
from cudafuture.io.engine import Engine
from cudafuture.io.file import File
from cudafuture.transfer import devices_of, earlier_work

__all__ = ["GDSFile"]

_DEVICES = {"cuda"}
_NO_KVIKIO = "GPUDirect Storage needs KvikIO, which is not installed: run `pip install kvikio-cu13` (for CUDA 13)"
_AT_A_TIME = 8  # reads and writes; KvikIO splits each and has its own threads


class GDSFile(File):
    """File whose tensors on CUDA devices use GPUDirect Storage; all others are handled as by ``File``.

    A tensor is transferred directly if it is on a CUDA device and contiguous, and so are all others of its ``readv`` or
    ``writev``. Direct reads and writes begin when the work on the caller's current stream has finished: the disk knows
    no streams. A future that has begun cannot be cancelled.

    Args:
        path, mode, engine, direct: as for ``File``.

    Raises:
        ImportError: KvikIO is not installed.
        StorageError, ValueError: as for ``File``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["r", "r+", "w", "w+"] = "r",
        *,
        engine: Engine | None = None,
        direct: Literal["auto"] | bool = "auto",
    ) -> None:
        try:
            import kvikio
        except ImportError as e:
            raise ImportError(_NO_KVIKIO) from e
        super().__init__(path, mode, engine=engine, direct=direct)
        self._handle: Any = kvikio.CuFile(self._path, "r" if mode == "r" else "r+")  # closed with its last user
        self._threads = ThreadPoolExecutor(
            _AT_A_TIME, thread_name_prefix="cudafuture-gds", initializer=_C.mark_library_thread
        )
        self._closed = False

    def _transfer(self, reads: bool, tensors: Iterable[torch.Tensor], offset: int, priority: int) -> CUDAFuture[int]:
        given = listed("tensors", tensors, "tensors")
        if not given or not all(_goes_directly(t) for t in given):
            return super()._transfer(reads, given, offset, priority)
        offset = expect_int("offset", offset, 0)
        if self._closed:
            return CUDAFuture.failed(InvalidStateError(f"the file was closed before the operation began: {self._path}"))
        earlier = earlier_work(devices_of(given))
        future = earlier.then(
            lambda _: self._move(reads, given, offset), priority=priority, executor=self._threads, non_blocking=False
        )
        if not reads:
            future.released = future.then(lambda _: None)
        return future

    def _move(self, reads: bool, tensors: list[torch.Tensor], offset: int) -> int:
        """Transfer the bytes, and return their number."""
        move = self._handle.pread if reads else self._handle.pwrite
        moves, place = [], offset
        for tensor in tensors:
            part = tensor.detach().view(-1).view(torch.uint8)
            if part.nbytes:
                moves.append((move(part, part.nbytes, place), part.nbytes, place))
            place += part.nbytes
        errors = [e for e in (self._error_of(*one, reads) for one in moves) if e is not None]
        if errors:
            raise errors[0]
        return place - offset

    def _error_of(self, move: Any, wanted: int, offset: int, reads: bool) -> StorageError | None:
        """Wait for one transfer; return its error, or None."""
        got, code, reason = 0, None, "there the file ends"
        try:
            got = move.get()
        except Exception as e:
            code, reason = getattr(e, "errno", None), str(e)
        if got == wanted:
            return None
        verb = "reading" if reads else "writing"
        message = f"{verb} {wanted} bytes at offset {offset} of {self._path} ended after {got}: {reason}"
        return StorageError(message, errno=code, path=self._path, offset=offset, wanted=wanted, got=got)

    def close(self) -> None:
        """Refuse further reads and writes. Operations in flight complete.

        >>> GDSFile("numbers", "w").close()  # doctest: +SKIP
        """
        self._closed = True
        self._threads.shutdown(wait=False)
        super().close()


def why_no_gds() -> str | None:
    """Return the reason why no ``GDSFile`` can be opened here, or None."""
    try:
        import kvikio  # noqa: F401
    except ImportError:
        return _NO_KVIKIO
    except Exception as e:  # a library of the driver is missing
        return f"KvikIO cannot be imported: {e}"
    return None


def _goes_directly(tensor: torch.Tensor) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type in _DEVICES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )
