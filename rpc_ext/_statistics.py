"""Statistics of the calls of this process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DestinationStatistics", "Histogram", "Statistics"]

_STEPS = 8  # buckets in each power of two


class Histogram:
    """Durations in logarithmic buckets, each an eighth of a power of two wide. The caller locks it.

    Buckets that are as wide as their durations are long are those of Tene, "HdrHistogram".
    """

    def __init__(self) -> None:
        self._counts = [0] * (64 * _STEPS)
        self.total = 0

    def add(self, ns: int) -> None:
        """Count a duration in nanoseconds."""
        ns = max(ns, _STEPS)
        bits = ns.bit_length()
        self._counts[(bits * _STEPS) + ((ns >> (bits - 4)) & (_STEPS - 1))] += 1
        self.total += 1

    def quantile(self, q: float) -> float:
        """Return the duration, in seconds, that the share `q` of all does not exceed, or nan where there is none."""
        wanted = max(1, math.ceil(q * self.total))
        for seconds, count in self.buckets():
            wanted -= count
            if wanted <= 0:
                return seconds
        return math.nan

    def buckets(self) -> list[tuple[float, int]]:
        """Return the upper end in seconds, and the count, of each bucket that holds any, in order."""
        return [(_upper(i) * 1e-9, count) for i, count in enumerate(self._counts) if count]


def _upper(index: int) -> int:
    bits, step = divmod(index, _STEPS)
    return (_STEPS + step + 1) << (bits - 4)


@dataclass(frozen=True)
class DestinationStatistics:
    """The calls from this worker to one other since ``init_rpc``. Sizes are in bytes, durations in seconds.

    ``latencies`` is the histogram that the quantiles come from: the upper end and the count of each bucket that holds
    any, each an eighth of a power of two wide. A latency is from the call to the completion of its future.
    """

    calls: int
    """calls made, also those that are in flight"""
    failed: int
    """calls whose future failed, whatever the reason"""
    in_flight: int
    """calls that have no answer yet"""
    bytes_in_flight: int
    """bytes of those, payload and tensors"""
    waiting: int
    """threads that wait for room"""
    bytes_sent: int
    """bytes of all calls"""
    bytes_received: int
    """bytes of all answers"""
    latency_p50: float
    """the median; nan where nothing was answered yet"""
    latency_p99: float
    """what 99 of 100 calls do not exceed"""
    latencies: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Statistics:
    """The statistics of this process, from ``rpc_ext.statistics()``."""

    worker: str
    """the name of this worker"""
    destinations: Mapping[str, DestinationStatistics]
    """by the other's name"""
    served: int
    """calls that were run here"""
    serving: int
    """calls that have begun here and were not answered yet"""
    refused: Mapping[str, int]
    """messages that were not signed as they should be, by the worker that they claim to come from; ``""``: by none"""
    received_outside: int
    """bytes of tensors that this process has received into new memory so far, because its pool was exhausted"""
