"""Virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cudafuture.testing import _sim as _native

__all__ = ["Speeds", "clock", "set_speeds", "spend"]


@dataclass(frozen=True)
class Speeds:
    """How fast virtual time makes a device. Bytes per second, and seconds."""

    compute: float = 1e12
    """Bytes that kernels read and write, per second; streams compute side by side, each at this speed."""
    copy: float = 25e9
    """Bytes per second between host and device, each way, and between devices. Copies in one direction share it."""
    launch: float = 5e-6
    """Seconds that each piece of work takes beside its bytes."""

    def __post_init__(self) -> None:
        """Refuse what would stop the clock."""
        if not (0 < self.compute < math.inf and 0 < self.copy < math.inf and 0 <= self.launch < math.inf):
            raise ValueError(f"{self}: bytes per second are above 0, and seconds 0 or more")

    def _native(self) -> Any:
        return _native.Speeds(self.compute, self.copy, self.launch)


def clock() -> float:
    """Return the calling thread's virtual time in seconds since ``enable``.

    It goes on when the thread waits for a device, by ``spend``, and where another thread hands work to this one.

    >>> sim.enable()
    >>> sim.clock()
    0.0
    """
    return float(_native.now())


def spend(ms: float) -> None:
    """Let the calling thread compute for so many virtual milliseconds. Other threads' clocks stay where they are.

    >>> sim.enable()
    >>> sim.spend(ms=2)
    >>> sim.clock()
    0.002
    """
    _native.spend(seconds(ms))


def set_speeds(speeds: Speeds, stream: torch.Stream | None = None) -> None:
    """Set the speeds of one stream, or (None) of all that have none of their own.

    >>> sim.enable()
    >>> sim.set_speeds(sim.Speeds(copy=1e9, launch=0))
    >>> x = torch.zeros(250_000).pin_memory().to("sim", non_blocking=True)
    >>> sim.synchronize()
    >>> sim.clock()
    0.001
    """
    _native.set_speeds(speeds._native(), None if stream is None else name_of(stream))


def seconds(ms: float) -> float:
    """Return so many milliseconds in seconds; ValueError for what is no time."""
    if not 0 <= ms < math.inf:
        raise ValueError(f"ms={ms}: 0 or more is wanted")
    return ms * 1e-3


def name_of(stream: torch.Stream | None) -> tuple[int, int]:
    """Return device and id of a stream; None is the current one."""
    if _native.device_count() == 0:
        raise RuntimeError("the simulated accelerator is off: call sim.enable()")
    if stream is None:
        return _native.current_stream(-1)
    if stream.device.type != "sim":
        raise ValueError(f"a stream of a simulated device is wanted, not {stream}")
    return (stream.device.index, stream.stream_id)
