"""Counts and times of an offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SwapStatistics"]


@dataclass(frozen=True)
class SwapStatistics:
    """Counts and times of an offloaded optimizer, by stage as DeepSpeed names them.

    Seconds of I/O are those in which the program waited for it. See ``OffloadedOptimizer.statistics()``.
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
    """in which the step waited for a read of state, and of the gradients beside it"""
    swap_out_state_seconds: float
    """in which the step waited for a write of state"""
    swap_out_gradient_seconds: float
    """in which backward, or the step, waited for a write of a gradient"""
    stored_bytes: int
    """of state that is in the store now"""
    resident_bytes: int
    """of state that is in memory now, without the buffers"""

    @property
    def exposed_io_seconds(self) -> float:
        """The seconds in which the program waited for I/O."""
        return self.swap_in_state_seconds + self.swap_out_state_seconds + self.swap_out_gradient_seconds
