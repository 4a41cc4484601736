"""A histogram of latencies with logarithmic buckets: each is an eighth of a power of two wide."""

from __future__ import annotations

import math

__all__ = ["Histogram"]

_STEPS = 8  # buckets in each power of two


class Histogram:
    """Counts durations. The caller sees to it that only one thread does at a time.

    The idea of buckets that grow with what they hold: Tene, "HdrHistogram".
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
