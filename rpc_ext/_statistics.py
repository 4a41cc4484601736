"""Statistics of the calls of this process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DestinationStatistics", "Histogram", "Statistics"]

_STEPS = 8  # buckets in each power of two


class Histogram:
    """Durations in logarithmic buckets, each an eighth of a power of two wide (G. Tene, "HdrHistogram").

    The caller locks it.
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
        """Return the quantile `q` of the durations in seconds, or nan if there are none."""
        wanted = max(1, math.ceil(q * self.total))
        for seconds, count in self.buckets():
            wanted -= count
            if wanted <= 0:
                return seconds
        return math.nan

    def buckets(self) -> list[tuple[float, int]]:
        """Return the upper end in seconds and the count of each bucket that is not empty, in order."""
        return [(_upper(i) * 1e-9, count) for i, count in enumerate(self._counts) if count]


def _upper(index: int) -> int:
    bits, step = divmod(index, _STEPS)
    return (_STEPS + step + 1) << (bits - 4)


@dataclass(frozen=True)
class DestinationStatistics:
    """The calls from this worker to one worker since ``init_rpc``. Sizes are in bytes, durations in seconds.

    ``latencies`` is the histogram of the quantiles: the upper end and the count of each bucket that is not empty, each
    an eighth of a power of two wide. A latency is the time from the call to the completion of its future.
    """

    calls: int
    """calls made, including those in flight"""
    failed: int
    """calls whose future failed for any reason"""
    in_flight: int
    """calls without a reply"""
    bytes_in_flight: int
    """bytes of their payloads and tensors"""
    waiting: int
    """threads that wait for room"""
    bytes_sent: int
    """bytes of all calls"""
    bytes_received: int
    """bytes of all replies"""
    latency_p50: float
    """the median; nan before the first reply"""
    latency_p99: float
    """the quantile 0.99"""
    latencies: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Statistics:
    """The statistics of this process, from ``rpc_ext.statistics()``."""

    worker: str
    """the name of this worker"""
    destinations: Mapping[str, DestinationStatistics]
    """statistics by the name of the callee"""
    served: int
    """calls that this worker has begun to run"""
    serving: int
    """those of them without a reply"""
    refused: Mapping[str, int]
    """messages without a valid signature, by the worker that they claim to come from; ``""``: no worker"""
    received_outside: int
    """bytes of tensors that this process has received into new memory because its pool was exhausted"""
