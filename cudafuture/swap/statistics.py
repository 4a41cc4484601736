"""Counts and times of an offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SwapStatistics"]


@dataclass(frozen=True)
class SwapStatistics:
    """Sums of an offloaded optimizer since it was made; see ``OffloadedOptimizer.statistics()``."""

    steps: int
    swap_in_state_bytes: int
    """read from the store"""
    swap_out_state_bytes: int
    """written to the store"""
    compute_seconds: float
    swap_in_state_seconds: float
    """in which the step waited for a read"""
    swap_out_state_seconds: float
    """in which the step waited for a write"""
    stored_bytes: int
    """of state that is in the store now"""
    resident_bytes: int
    """of state that is in memory now, without the buffers"""
