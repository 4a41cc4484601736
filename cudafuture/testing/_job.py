"""What a test and its workers say to each other."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

__all__ = ["DUMP", "END", "FORKED", "IDLE", "READY", "Job", "Outcome"]

DUMP = signal.SIGUSR2  # the worker writes the stacks of all its threads
END = b"end"  # all ranks have answered
READY = b"ready"  # the worker has started
IDLE = b"idle"  # the worker has left the world
FORKED = 86  # how a forked child ends that came back out of the function


@dataclass
class Job:
    """What a worker is told to do."""

    rank: int
    size: int
    backend: str
    store: str  # the file that the ranks meet at
    timeout: float  # seconds, of the process group
    path: list[str]  # sys.path of the test
    call: bytes  # the function and its arguments, pickled


@dataclass
class Outcome:
    """What came of it."""

    value: bytes | None = None  # pickled; None: it failed
    error: bytes | None = None  # the exception, where it can be pickled
    traceback: str = ""
    skipped: str | None = None  # the reason, if the function has skipped the test
    left: list[str] = field(default_factory=list)  # processes that the function has left behind
