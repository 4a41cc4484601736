"""Counts and times of an offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SwapStatistics"]


@dataclass(frozen=True)
class SwapStatistics:
    """Counts and times of an offloaded optimizer, by stage as DeepSpeed names them.

    The seconds of I/O count only time that the program waited. See ``OffloadedOptimizer.statistics()``.
    """

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
