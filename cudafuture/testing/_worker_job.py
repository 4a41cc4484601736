"""Messages between a test and its workers."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
    "ProcessLimits",
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
class ProcessLimits:
    """Limits, CPUs, niceness and mask of file modes, which a new process inherits from the one that starts it."""

    resources: dict[int, tuple[int, int]]
    cpus: frozenset[int]
    niceness: int
    umask: int

    @classmethod
    def of_this_process(cls) -> ProcessLimits:
        """Return the limits of the calling process."""
        status = Path("/proc/self/status").read_text()
        return cls(
            {number: resource.getrlimit(number) for number in _resources()},
            frozenset(os.sched_getaffinity(0)),
            os.getpriority(os.PRIO_PROCESS, 0),
            int(status.partition("Umask:")[2].split()[0], 8),
        )

    def apply(self) -> None:
        """Give the calling process these limits, as far as it may have them."""
        os.umask(self.umask)
        changes: list[Callable[[], object]] = [
            lambda: os.sched_setaffinity(0, self.cpus),
            lambda: os.setpriority(os.PRIO_PROCESS, 0, self.niceness),
            *(partial(resource.setrlimit, number, limits) for number, limits in self.resources.items()),
        ]
        for change in changes:
            with contextlib.suppress(OSError, ValueError):  # it may not raise a limit again
                change()


def _resources() -> list[int]:
    return sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


@dataclass(frozen=True)
class WorkerRequest:
    """Request to fork a worker. The descriptors of its files come with it."""

    environment: dict[str, str]
    stacks: str  # the path of the file to which the worker writes its stacks
    limits: ProcessLimits


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
