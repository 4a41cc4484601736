"""The recording of a trace: one for each process at a time."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch.distributed as dist

from cudafuture import _C
from cudafuture._arguments import expect_str
from cudafuture._path import path_text
from cudafuture.config import config
from cudafuture.errors import InvalidStateError
from cudafuture.trace._file import SUFFIX

__all__ = ["discard", "record", "record_process", "span", "step"]

_logger = logging.getLogger("cudafuture.trace")
STEP = "step"


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what the futures and the threads of this process do, in a file.

    An event costs less than 0.1 microseconds, and no thread waits for the file. If a thread has more than 8,192 events
    in a moment, some are lost, and counted. If the disk is full, the recording ends with one line in the log of
    ``cudafuture.trace``; the program goes on. What was recorded up to 0.1 s before a SIGKILL is in the file.

    Args:
        path: of a file, which ends with ``.cftrace``; or of a folder, which is made if it does not exist, and in which
            the file has the names of the machine and the process: one empty folder for all ranks of a run.

    Raises:
        InvalidStateError: a trace is being recorded, or this is a forked child.
        OSError: the file cannot be made.
        TypeError, ValueError: `path` is not a path; it is empty, or not UTF-8.

    >>> import tempfile
    >>> from cudafuture import submit, trace
    >>> folder = tempfile.mkdtemp()
    >>> with trace.record(folder):
    ...     submit(sum, [1, 2]).wait()
    3
    >>> [future.maker for future in trace.load(folder).ranks[0].futures if future.maker]
    ['submit']
    """
    where = Path(path_text(path))
    _start(where)
    try:
        yield
    finally:
        _stop(where)


def _start(path: Path) -> None:
    text = path_text(path)
    if path.suffix != SUFFIX:
        path.mkdir(parents=True, exist_ok=True)
        text = path_text(path / file_name())
    failure = _C.start_trace(text, json.dumps(_facts()))
    if failure:
        _logger.warning("the trace before the one in %s is not complete: %s", path, failure)


def file_name() -> str:
    """Return the name of the file of this process: processes of several machines may share a folder."""
    return f"{socket.gethostname()}-{os.getpid()}{SUFFIX}"


def _stop(where: Path) -> None:
    lost, failure = _C.stop_trace(json.dumps(_facts()))
    if failure:
        _logger.warning("the trace in %s is not complete: %s", where, failure)
    elif lost:
        _logger.warning("the trace in %s lacks %d events: threads had more than a ring holds", where, lost)


def record_process(folder: str) -> None:
    """Record this process from now until its end, in a folder, as CUDAFUTURE_TRACE asks. Errors are logged."""
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        _start(path / file_name())
    except (OSError, ValueError, InvalidStateError) as e:
        _logger.warning("CUDAFUTURE_TRACE=%s: no trace is recorded: %s", folder, e)
        return
    process = os.getpid()
    atexit.register(lambda: _stop(path) if os.getpid() == process and _C.is_tracing() else None)


def discard() -> None:
    """End the recording that CUDAFUTURE_TRACE has begun, and remove its file, if there is one.

    A command that reads traces calls it first: with that variable set, it would record itself among them.

    >>> from cudafuture import trace
    >>> trace.discard()
    """
    if config.trace_dir and _C.is_tracing():
        _C.stop_trace("{}")
        (Path(config.trace_dir) / file_name()).unlink(missing_ok=True)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a part of the program in the trace, on this thread; parts may lie within one another.

    `name`: at most 80 bytes are kept. Without a recording it costs about a microsecond, and does nothing.

    >>> from cudafuture import trace
    >>> with trace.span("forward"):
    ...     pass
    """
    expect_str("name", name)
    name = name.encode(errors="replace").decode()  # of lone surrogates
    _C.trace_span(True, name)
    try:
        yield
    finally:
        _C.trace_span(False, name)


def step(number: int) -> AbstractContextManager[None]:
    """Name one step of a training loop: `analyse` and `plot` look at each step. A context manager.

    >>> from cudafuture import trace
    >>> with trace.step(0):
    ...     pass
    """
    return span(f"{STEP} {number}")


def _facts() -> dict[str, object]:
    """Return what the readers of a file have to know about the process, and its clocks now."""
    has_group = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if has_group else _number("RANK")
    size = dist.get_world_size() if has_group else _number("WORLD_SIZE")
    before = time.monotonic_ns()
    realtime = time.time_ns()
    after = time.monotonic_ns()
    return {
        "process": os.getpid(),
        "rank": rank,
        "world_size": size,
        "host": socket.gethostname(),
        "boot": _boot(),
        "monotonic": (before + after) // 2,
        "realtime": realtime,
        "clock_error": (after - before + 1) // 2,
        "program": sys.argv[0] if sys.argv else "",
    }


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _boot() -> str:
    """Return the identity of the machine's clock: processes with the same one read the same CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
