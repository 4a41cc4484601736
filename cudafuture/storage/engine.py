"""What reads and writes files: one native thread with a queue of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from cudafuture import _C

__all__ = ["Engine", "EngineStatistics", "default_engine"]

_logger = logging.getLogger("cudafuture.storage")

PAGE = 4096
_LARGEST_BLOCK = 1 << 30
_MOST_MEMORY = 1 << 36

BACKENDS = ("auto", "io_uring", "threads")


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine has done so far; see ``Engine.statistics()``."""

    reads: int
    """reads that have ended, however they did"""
    writes: int
    bytes_read: int
    """bytes of those that have not failed"""
    bytes_written: int
    blocks: int
    """requests to the kernel"""
    again: int
    """requests for the rest of one, or for one that the kernel sent back"""
    staged: int
    """blocks that went by a buffer of the engine's: the kernel could not use the tensor's memory as it lies"""
    copied: int
    """of them blocks that a device filled or emptied"""
    pending: int
    """reads and writes that have not ended"""


class Engine:
    """Reads and writes files with io_uring, or with threads that block where that is not to be had.

    A read or write is cut into blocks. At most `queue_depth` of them are with the kernel at a time; what is submitted
    meanwhile waits its turn: first come first served, with what is at most a block and what is more taking turns. Those
    with tensors on devices have at most three quarters of the blocks. Futures complete in any order.

    Args:
        backend: ``"io_uring"``, ``"threads"`` (pread and pwrite), or ``"auto"``: io_uring, or threads where the kernel
            or a sandbox forbids that, or the library was built without it.
        queue_depth: blocks with the kernel, 1 to 4,096. The default is 32.
        block_size: bytes, a multiple of 4,096 up to 1 GiB. The default is 512 KiB. The engine's memory is at most
            ``queue_depth * block_size``, and only used for what has to be staged. It is pinned from the first time on
            that a tensor on a device is read or written.
        threads: of the backend of that name, 1 to 1,024. The default is 8.
        max_pending: reads and writes that may be pending; whoever submits more blocks until there is room. The default
            is any number: then back-pressure is what you make of the futures.

    Raises:
        StorageError: there is no io_uring, and nothing else will do.
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        backend: Literal["auto", "io_uring", "threads"] = "auto",
        *,
        queue_depth: int = 32,
        block_size: int = 1 << 19,
        threads: int = 8,
        max_pending: int | None = None,
        _faults: Mapping[str, Any] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: one of {', '.join(BACKENDS)} is wanted")
        _expect("queue_depth", queue_depth, 1, 4096)
        _expect("block_size", block_size, PAGE, _LARGEST_BLOCK)
        _expect("threads", threads, 1, 1024)
        _expect("max_pending", 1 if max_pending is None else max_pending, 1, 1 << 62)
        if block_size % PAGE:
            raise ValueError(f"block_size={block_size} is no multiple of {PAGE}")
        if queue_depth * block_size > _MOST_MEMORY:
            raise ValueError(
                f"queue_depth={queue_depth} blocks of {block_size} bytes are more than {_MOST_MEMORY} bytes"
            )
        faults = None if _faults is None else _C.StorageFaults(**_faults)
        self._native = _C.start_storage_engine(backend, queue_depth, block_size, threads, max_pending or 0, faults)
        self._queue_depth, self._block_size = queue_depth, block_size
        if backend == "auto" and self.backend != "io_uring":
            _log_once(f"files are read and written by threads; {self._native.why_not_io_uring}")

    @property
    def backend(self) -> str:
        """The backend that is used: ``"io_uring"`` or ``"threads"``."""
        return self._native.backend

    @property
    def queue_depth(self) -> int:
        """Blocks that may be with the kernel at a time."""
        return self._queue_depth

    @property
    def block_size(self) -> int:
        """Bytes of the largest block."""
        return self._block_size

    def statistics(self) -> EngineStatistics:
        """Return what has been done so far.

        >>> Engine().statistics().pending
        0
        """
        return EngineStatistics(**self._native.statistics())

    def close(self) -> None:
        """Take no more reads and writes, and wait until those that were submitted have ended.

        >>> Engine().close()
        """
        self._native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine on {self.backend}, {self.queue_depth} blocks of {self.block_size} bytes>"


def _expect(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}={value!r} is not between {least} and {most}")


_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _logger.warning(message)


_lock = threading.Lock()
_default: Engine | None = None


def default_engine() -> Engine:
    """Return the engine that files use which were given none: one for the process, with the defaults of ``Engine``.

    >>> default_engine() is default_engine()
    True
    """
    global _default
    with _lock:
        if _default is None:
            _default = Engine()
        return _default
