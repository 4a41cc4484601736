"""Prefetch of batches: it reads them ahead of the program that uses them, and copies them to its device."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.prefetch.prefetcher import Epoch, Prefetcher, prefetch
from cudafuture.prefetch.statistics import PrefetchStatistics

__all__ = ["PrefetchStatistics", "Prefetcher", "prefetch"]

break_graphs(Epoch, *map(globals().get, __all__))
