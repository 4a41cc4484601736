"""Reading batches ahead of the program that uses them, and copying them to its device."""

from cudafuture.prefetch.prefetcher import Prefetcher, prefetch
from cudafuture.prefetch.statistics import PrefetchStatistics

__all__ = ["PrefetchStatistics", "Prefetcher", "prefetch"]
