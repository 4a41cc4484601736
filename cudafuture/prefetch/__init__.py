"""Prefetch of batches: it reads them ahead of the program that uses them, and copies them to its device."""

from cudafuture.prefetch.prefetcher import Prefetcher, prefetch
from cudafuture.prefetch.statistics import PrefetchStatistics

__all__ = ["PrefetchStatistics", "Prefetcher", "prefetch"]
