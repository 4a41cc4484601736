"""Base of the dataclasses that ``statistics()`` methods return, which are read in a shell and as metrics.

:func:`cudafuture.openmetrics.metrics` gives the same numbers as text for Prometheus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar

from cudafuture.graph_breaks import break_graphs

__all__ = ["StatisticsBase", "text_of_bytes", "text_of_seconds"]


class StatisticsBase:
    """Base of a dataclass of counters, whose repr has a line for each field.

    A field is a count, unless its name is in ``BYTES`` or ``SECONDS``. A tuple is a histogram: the upper end in seconds
    and the count of each bucket. A mapping has a value, or statistics, for each key. ``GAUGES`` are the fields that can
    become less.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, repr=False)
    ... class Uploads(StatisticsBase):
    ...     BYTES = frozenset({"sent"})
    ...     done: int
    ...     sent: int
    >>> Uploads(done=12, sent=3 << 20)
    Uploads:
      done  12
      sent  3 MiB
    """

    GAUGES: ClassVar[frozenset[str]] = frozenset()
    BYTES: ClassVar[frozenset[str]] = frozenset()
    SECONDS: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        return "\n".join([f"{type(self).__name__}:", *self._lines("  ")])

    def _lines(self, indent: str) -> Iterator[str]:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        width = max(map(len, names), default=0)
        for name in names:
            value = getattr(self, name)
            if isinstance(value, Mapping) and any(isinstance(one, StatisticsBase) for one in value.values()):
                yield f"{indent}{name}"
                for key, one in value.items():
                    yield f"{indent}  {key!s}"
                    yield from one._lines(f"{indent}    ")
            else:
                yield f"{indent}{name:<{width}}  {self._text(name, value)}"

    def _text(self, name: str, value: Any) -> str:
        if value is None or value == () or value == {}:
            return "-"
        if isinstance(value, Mapping):
            return ", ".join(f"{key!s} {self._text(name, one)}" for key, one in value.items())
        if isinstance(value, tuple) and isinstance(value[0], tuple):
            return f"{sum(count for _, count in value):,} in {len(value)} buckets"
        if name in self.BYTES:
            return text_of_bytes(value)
        if name in self.SECONDS:
            return text_of_seconds(value)
        return f"{value:,}" if isinstance(value, int) else f"{value!s}"


def text_of_bytes(nbytes: float) -> str:
    """Return a size as a person reads it, with three digits.

    >>> text_of_bytes(1536), text_of_bytes(4 << 30)
    ('1.5 KiB', '4 GiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while round(nbytes) >= 1000 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.3g} {units[0]}"


def text_of_seconds(seconds: float) -> str:
    """Return a duration as a person reads it, with three digits.

    >>> text_of_seconds(0.00152), text_of_seconds(0.0), text_of_seconds(12.5), text_of_seconds(float("nan"))
    ('1.52 ms', '0 s', '12.5 s', '-')
    """
    if math.isnan(seconds):
        return "-"
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    units = ["s", "ms", "µs", "ns"]
    while 0 < abs(seconds) < 1 and len(units) > 1:
        seconds *= 1000
        units.pop(0)
    return f"{seconds:.3g} {units[0]}"


break_graphs(text_of_bytes, text_of_seconds)
