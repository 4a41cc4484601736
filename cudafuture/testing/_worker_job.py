"""Messages between a test and its workers."""

from __future__ import annotations

import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

__all__ = [
    "DUMP",
    "END",
    "EXIT_CODE",
    "FORKED",
    "IDLE",
    "READY",
    "Outcome",
    "WorkerJob",
    "WorkerRequest",
    "code_of_file",
]

DUMP = signal.SIGUSR2  # the worker writes the stacks of all its threads
END = b"end"  # all ranks have answered
READY = b"ready"  # the worker has started
IDLE = b"idle"  # the worker has left the world
FORKED = 86  # the exit code of a forked child that returned from the function
EXIT_CODE = struct.Struct("i")  # of a forked worker, from its server; negative for a signal


@dataclass(frozen=True)
class WorkerRequest:
    """Request to fork a worker. The descriptors of its files come with it."""

    environment: dict[str, str]
    stacks: str  # the path of the file to which the worker writes its stacks


@dataclass
class WorkerJob:
    """Job of a worker."""

    rank: int
    size: int
    backend: str
    store: str  # the file through which the ranks meet
    timeout: float  # seconds, of the process group
    path: list[str]  # sys.path of the test
    call: bytes  # the function and its arguments, pickled


@dataclass
class Outcome:
    """Outcome of a job."""

    value: bytes | None = None  # pickled; None: it failed
    error: bytes | None = None  # the exception, if it can be pickled
    traceback: str = ""
    skipped: str | None = None  # the reason, if the function has skipped the test
    left: list[str] = field(default_factory=list)  # processes that the function left running


def code_of_file(file: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    """Create a function's code in the worker, as code of `file`."""
    return make(*parts).replace(co_filename=file)
