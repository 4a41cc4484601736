"""I/O engine that reads and writes files: one native thread with a queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, get_args

from cudafuture import _C, openmetrics
from cudafuture._arguments import expect_int, shown
from cudafuture.statistics import StatisticsBase

__all__ = ["Engine", "EngineStatistics", "default_engine"]

_logger = logging.getLogger("cudafuture.io")

PAGE = 4096
_LARGEST_BLOCK = 1 << 30
_MOST_MEMORY = 1 << 36

BackendName = Literal["auto", "io_uring", "threads"]


@dataclass(frozen=True, repr=False)
class EngineStatistics(StatisticsBase):
    """Counts of an engine since it started; see ``Engine.statistics()``."""

    GAUGES: ClassVar = frozenset({"pending"})
    BYTES: ClassVar = frozenset({"bytes_read", "bytes_written"})

    reads: int
    """reads that have ended, with any outcome"""
    writes: int
    bytes_read: int
    """bytes of the reads that have not failed"""
    bytes_written: int
    blocks: int
    """requests to the kernel"""
    again: int
    """requests for the rest of a partial one, or for one that the kernel returned"""
    staged: int
    """blocks that went through a staging buffer: the kernel could not use the tensor's memory directly"""
    copied: int
    """staged blocks that a device filled or emptied"""
    pending: int
    """reads and writes that have not ended"""


class Engine:
    """I/O engine that reads and writes files with io_uring, or with blocking threads if io_uring is not available.

    A read or write is split into blocks. At most `queue_depth` blocks are in flight in the kernel; later ones wait:
    first come, first served, alternating between operations of at most a block and larger ones. Operations with
    tensors on devices use at most three quarters of the blocks. Futures complete in any order.

    Args:
        backend: ``"io_uring"``, ``"threads"`` (pread and pwrite), or ``"auto"``: io_uring, or threads if the kernel or
            a sandbox forbids io_uring, or the library was built without it.
        queue_depth: blocks in flight in the kernel, 1 to 4,096. The default is 32.
        block_size: bytes, a multiple of 4,096 up to 1 GiB. The default is 512 KiB. The engine's memory is at most
            ``queue_depth * block_size``, and only used for staging. It is pinned from the first read or write of a
            tensor on a device on.
        threads: of the backend ``"threads"``, 1 to 1,024. The default is 8.
        max_pending: limit of pending reads and writes; a caller that submits more blocks until there is room. The
            default is no limit: limit them through the futures.

    Raises:
        StorageError: ``backend="io_uring"`` was given, but io_uring is not available.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        backend: BackendName = "auto",
        *,
        queue_depth: int = 32,
        block_size: int = 1 << 19,
        threads: int = 8,
        max_pending: int | None = None,
        _faults: Mapping[str, Any] | None = None,
    ) -> None:
        if backend not in get_args(BackendName):
            raise ValueError(f"backend={backend!r} does not exist; use one of {', '.join(get_args(BackendName))}")
        queue_depth = expect_int("queue_depth", queue_depth, 1, 4096)
        block_size = expect_int("block_size", block_size, PAGE, _LARGEST_BLOCK)
        threads = expect_int("threads", threads, 1, 1024)
        max_pending = None if max_pending is None else expect_int("max_pending", max_pending, 1, 1 << 62)
        if block_size % PAGE:
            raise ValueError(f"block_size={block_size} is not a multiple of {PAGE}")
        if queue_depth * block_size > _MOST_MEMORY:
            raise ValueError(
                f"queue_depth={queue_depth} blocks of {block_size} bytes are more than {_MOST_MEMORY} bytes"
            )
        faults = None if _faults is None else _C.EngineFaults(**_faults)
        self._native = _C.start_engine(backend, queue_depth, block_size, threads, max_pending or 0, faults)
        self._queue_depth, self._block_size = queue_depth, block_size
        openmetrics.add(self, "engine", backend=self.backend)
        if backend == "auto" and self.backend != "io_uring":
            _log_once(f"files are read and written by threads; {self._native.why_not_io_uring}")

    @property
    def backend(self) -> str:
        """The backend that is used: ``"io_uring"`` or ``"threads"``."""
        return self._native.backend

    @property
    def queue_depth(self) -> int:
        """Limit of blocks in flight in the kernel."""
        return self._queue_depth

    @property
    def block_size(self) -> int:
        """Size of the largest block in bytes."""
        return self._block_size

    def statistics(self) -> EngineStatistics:
        """Return the counts of this engine so far.

        >>> Engine().statistics().pending
        0
        """
        return EngineStatistics(**self._native.statistics())

    def close(self) -> None:
        """Refuse further reads and writes, and wait until the submitted ones have ended.

        >>> Engine().close()
        """
        self._native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine on {self.backend}, {self.queue_depth} blocks of {self.block_size} bytes>"


_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _logger.warning(message)


_lock = threading.Lock()
_default: Engine | None = None


def engine_or_default(engine: Engine | None) -> Engine:
    """Return an engine that was passed as an argument, or that of the process.

    Raises:
        TypeError: the argument is not an engine.
    """
    if engine is not None and not isinstance(engine, Engine):
        raise TypeError(f"engine is an Engine, such as Engine('threads'), not {shown(engine)}")
    return engine or default_engine()


def default_engine() -> Engine:
    """Return the engine of files that were given none: one per process, with the defaults of ``Engine``.

    >>> default_engine() is default_engine()
    True
    """
    global _default
    with _lock:
        if _default is None:
            _default = Engine()
        return _default
