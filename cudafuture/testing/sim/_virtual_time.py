"""Virtual time of the simulated accelerator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cudafuture.testing.sim import _C as _native

__all__ = ["Speeds", "clock", "set_speeds", "spend"]


@dataclass(frozen=True)
class Speeds:
    """Speeds of a device in virtual time: bytes per second, and seconds."""

    compute: float = 1e12
    """Bytes that kernels read and write, per second; streams compute concurrently, each at this speed."""
    copy: float = 25e9
    """Bytes per second between host and device, each way, and between devices. Copies in one direction share it."""
    launch: float = 5e-6
    """Seconds that each piece of work takes in addition to its bytes."""

    def __post_init__(self) -> None:
        """Raise ValueError for speeds that would stop the clock."""
        if not (0 < self.compute < math.inf and 0 < self.copy < math.inf and 0 <= self.launch < math.inf):
            raise ValueError(f"{self}: bytes per second must be above 0, and seconds 0 or more")

    def _native(self) -> Any:
        return _native.Speeds(self.compute, self.copy, self.launch)


def clock() -> float:
    """Return the calling thread's virtual time in seconds since ``enable``.

    It advances when the thread waits for a device, by ``spend``, and when another thread passes work to this one.

    >>> sim.enable()
    >>> sim.clock()
    0.0
    """
    return float(_native.now())


def spend(ms: float) -> None:
    """Spend `ms` virtual milliseconds of computation in the calling thread. Other threads' clocks do not change.

    >>> sim.enable()
    >>> sim.spend(ms=2)
    >>> sim.clock()
    0.002
    """
    _native.spend(seconds(ms))


def set_speeds(speeds: Speeds, stream: torch.Stream | None = None) -> None:
    """Set the speeds of one stream, or (None) of all streams without their own.

    >>> sim.enable()
    >>> sim.set_speeds(sim.Speeds(copy=1e9, launch=0))
    >>> x = torch.zeros(250_000).pin_memory().to("sim", non_blocking=True)
    >>> sim.synchronize()
    >>> sim.clock()
    0.001
    """
    _native.set_speeds(speeds._native(), None if stream is None else name_of(stream))


def seconds(ms: float) -> float:
    """Return milliseconds in seconds; raise ValueError for a negative or infinite number."""
    if not 0 <= ms < math.inf:
        raise ValueError(f"ms={ms} is not a time; pass 0 or more")
    return ms * 1e-3


def name_of(stream: torch.Stream | None) -> tuple[int, int]:
    """Return device and id of a stream; None is the current one."""
    if _native.device_count() == 0:
        raise RuntimeError("the simulated accelerator is off: call sim.enable()")
    if stream is None:
        return _native.current_stream(-1)
    if stream.device.type != "sim":
        raise ValueError(f"{stream} is not a stream of a simulated device")
    return (stream.device.index, stream.stream_id)
