"""Counts and times of an offloaded optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar

from cudafuture.statistics import StatisticsBase

__all__ = ["SwapStatistics"]


@dataclass(frozen=True, repr=False)
class SwapStatistics(StatisticsBase):
    """Counts and times of an offloaded optimizer, by stage as DeepSpeed names them.

    The seconds of I/O count only time that the program waited. See ``OffloadedOptimizer.statistics()``.
    """

    GAUGES: ClassVar = frozenset({"stored_bytes", "resident_bytes"})
    BYTES: ClassVar = frozenset(
        {
            "swap_in_state_bytes",
            "swap_out_state_bytes",
            "swap_in_gradient_bytes",
            "swap_out_gradient_bytes",
            "stored_bytes",
            "resident_bytes",
        }
    )
    SECONDS: ClassVar = frozenset(
        {"compute_seconds", "swap_in_state_seconds", "swap_out_state_seconds", "swap_out_gradient_seconds"}
    )

    steps: int
    swap_in_state_bytes: int
    """read from the store"""
    swap_out_state_bytes: int
    """written to the store"""
    swap_in_gradient_bytes: int
    """read from the store"""
    swap_out_gradient_bytes: int
    """written to the store"""
    compute_seconds: float
    swap_in_state_seconds: float
    """spent waiting for reads of state, and of the gradients read with it"""
    swap_out_state_seconds: float
    """spent waiting for writes of state"""
    swap_out_gradient_seconds: float
    """spent by backward, or the step, waiting for writes of gradients"""
    stored_bytes: int
    """of state that is in the store now"""
    resident_bytes: int
    """of state that is in memory now, without the buffers"""

    @property
    def exposed_io_seconds(self) -> float:
        """The seconds that the program waited for I/O."""
        return self.swap_in_state_seconds + self.swap_out_state_seconds + self.swap_out_gradient_seconds


@dataclass
class SwapCounters:
    """Sums since the optimizer was created."""

    steps: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    gradient_bytes_read: int = 0
    gradient_bytes_written: int = 0
    compute_seconds: float = 0.0
    read_wait_seconds: float = 0.0
    write_wait_seconds: float = 0.0
    gradient_wait_seconds: float = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a count."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - begin)

    def since(self, earlier: SwapCounters) -> SwapCounters:
        """Return what was added since an earlier copy."""
        return SwapCounters(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def statistics(self, stored_bytes: int, resident_bytes: int) -> SwapStatistics:
        """Return the public statistics, with the bytes that are now in the store and in memory."""
        return SwapStatistics(
            steps=self.steps,
            swap_in_state_bytes=self.bytes_read,
            swap_out_state_bytes=self.bytes_written,
            swap_in_gradient_bytes=self.gradient_bytes_read,
            swap_out_gradient_bytes=self.gradient_bytes_written,
            compute_seconds=self.compute_seconds,
            swap_in_state_seconds=self.read_wait_seconds,
            swap_out_state_seconds=self.write_wait_seconds,
            swap_out_gradient_seconds=self.gradient_wait_seconds,
            stored_bytes=stored_bytes,
            resident_bytes=resident_bytes,
        )
