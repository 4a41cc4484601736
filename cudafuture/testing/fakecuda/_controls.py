"""Controls for tests: hold streams, fail calls, and count the program's uses of the devices."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch

from cudafuture.statistics import StatisticsBase
from cudafuture.testing.fakecuda import _library
from cudafuture.testing.fakecuda._library import library, stream_of
from cudafuture.testing.machine._hold import StreamHold, open_all

__all__ = [
    "CudaHold",
    "CudaStatistics",
    "contexts",
    "fail",
    "fail_allocations",
    "hold",
    "release",
    "reset_context",
    "skipped_kernels",
    "statistics",
]

ERRORS = {"illegal address": 700, "assert": 710, "launch failure": 719}  # cudaError_t


class CudaHold(StreamHold):
    """Hold of a stream: work enqueued after it stays pending until ``open()``, or until its ``with`` block ends."""

    def __init__(self, handle: int) -> None:
        super().__init__()
        self._handle: int | None = handle

    def open(self) -> None:
        """Let the stream continue. Further calls do nothing.

        >>> held = fakecuda.hold()
        >>> held.open()
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            library().fakecuda_open(handle)


def hold(stream: torch.Stream | None = None) -> CudaHold:
    """Hold a stream (default: the current one) here, so that work enqueued later stays pending.

    A host thread that synchronises with a held stream blocks until another thread opens the hold.

    >>> with fakecuda.hold():
    ...     x = torch.ones(4, device="cuda")
    ...     torch.cuda.current_stream().query()
    False
    """
    fake = library()
    return CudaHold(fake.fakecuda_hold(*stream_of(stream)))


def release() -> None:
    """Open every hold of the process.

    >>> held = fakecuda.hold()
    >>> fakecuda.release()
    >>> torch.cuda.synchronize()
    """
    open_all(CudaHold)


def fail(error: str = "illegal address", stream: torch.Stream | None = None) -> None:
    """Enqueue a kernel that breaks the devices, so that every later CUDA call of the process fails.

    CUDA calls such an error sticky: only a new process can use the devices again (CUDA runtime API, ``cudaError_t``).

    Args:
        error: ``illegal address``, ``assert`` or ``launch failure``
        stream: default: the current stream

    >>> fakecuda.fail("assert")
    >>> torch.cuda.synchronize()
    Traceback (most recent call last):
        ...
    torch.AcceleratorError: CUDA error: device-side assert triggered ...
    """
    if error not in ERRORS:
        raise ValueError(f"{error!r} is not an error that a kernel can fail with; use one of {', '.join(ERRORS)}")
    library().fakecuda_fail(*stream_of(stream), ERRORS[error])


def fail_allocations(count: int = 1) -> None:
    """Fail the next ``count`` allocations of device or pinned memory by the runtime; 0 ends that.

    torch's caching allocators ask the runtime only for memory that they do not have, and free cached memory before
    they retry. To fail one request of the program, fail two allocations.

    >>> fakecuda.fail_allocations(2)
    >>> torch.empty(1 << 28, device="cuda")
    Traceback (most recent call last):
        ...
    torch.OutOfMemoryError: CUDA out of memory. ...
    """
    if count < 0:
        raise ValueError(f"the number of allocations that fail is 0 or more, not {count}")
    library().fakecuda_fail_allocations(count)


@dataclass(frozen=True, repr=False)
class CudaStatistics(StatisticsBase):
    """Counters of the process since it started.

    ``kernels_run`` counts operators that computed on the host, and ``kernels_skipped`` kernels whose code is for a GPU,
    which did nothing. ``contexts`` lists the devices that have a primary context.
    """

    GAUGES: ClassVar = frozenset({"events_alive", "pinned_bytes"})
    BYTES: ClassVar = frozenset({"pinned_bytes"})

    kernels_run: int
    kernels_skipped: int
    copies: int
    events_created: int
    events_alive: int
    streams_created: int
    pinned_bytes: int
    contexts: tuple[int, ...]


def statistics() -> CudaStatistics:
    """Return the counters of the process.

    >>> before = fakecuda.statistics().kernels_run
    >>> x = torch.ones(4, device="cuda") + 1
    >>> fakecuda.statistics().kernels_run - before
    2
    """
    found = _library.CudaCounters()
    library().fakecuda_statistics(ctypes.byref(found))
    counts = {field[0]: int(getattr(found, field[0])) for field in found._fields_[:-1]}
    return CudaStatistics(**counts, contexts=tuple(d for d in range(64) if found.contexts >> d & 1))


def contexts() -> tuple[int, ...]:
    """Return the devices that have a primary context. A program should have none on a device that it does not use.

    >>> x = torch.ones(4, device="cuda:0")
    >>> fakecuda.contexts()
    (0,)
    """
    return statistics().contexts


def reset_context(device: int) -> None:
    """Remove a device's primary context, so that ``contexts()`` lists it again only if a later call needs one there.

    A test suite that must not use a device resets its context before each test, and thereby finds the test in which a
    call without a device guard creates one. Objects of the program on the device stay valid.

    >>> fakecuda.reset_context(1)
    >>> x = torch.ones(4, device="cuda:0")
    >>> 1 in fakecuda.contexts()
    False
    """
    library().fakecuda_reset_context(device)


def skipped_kernels() -> dict[str, int]:
    """Return the names of kernels that were launched but not run, with their counts.

    Their results are the previous contents of the memory: a test that launches such a kernel proves nothing about
    values.

    >>> fakecuda.skipped_kernels()
    {}
    """
    lines = [line.partition(" ") for line in _library.text("fakecuda_skipped_kernels").splitlines()]
    return {name: int(count) for count, _, name in lines}
