"""Counters of a prefetcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudafuture.statistics import StatisticsBase

__all__ = ["PrefetchStatistics"]


@dataclass(frozen=True, repr=False)
class PrefetchStatistics(StatisticsBase):
    """Counters of a prefetcher since it was created. Times are seconds of the consumer's thread."""

    BYTES: ClassVar = frozenset({"bytes"})
    SECONDS: ClassVar = frozenset({"waited_for_loader", "waited_for_packing", "waited_for_device"})

    batches: int = 0
    """Batches that the consumer has taken."""
    bytes: int = 0
    """Bytes of tensors that were copied to the device, also for batches that were read ahead and dropped."""
    waited_for_loader: float = 0.0
    """Seconds that the consumer waited because the iterable had not returned the batch yet."""
    waited_for_packing: float = 0.0
    """Seconds that it waited for the copy to the staging buffer, for the transform, and for copies to be enqueued."""
    waited_for_device: float = 0.0
    """Seconds that it waited because too many earlier copies were still in flight."""

    @property
    def waited(self) -> float:
        """Seconds that the consumer waited in total."""
        return self.waited_for_loader + self.waited_for_packing + self.waited_for_device
