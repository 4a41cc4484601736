"""Counters and histograms of everything in this process, as OpenMetrics text for a Prometheus endpoint.

::

    Engine(), DiskStore(), init_rpc() ... ──► add(source, "store", folder=...)     while the source lives
    metrics() ──► source.statistics() ──► cudafuture_store_reads_total{folder="/nvme"} 12

A field of statistics is a counter, unless it is in the class's ``GAUGES``. Sources with the same labels are added up.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from cudafuture.graph_breaks import break_graphs

__all__ = ["add", "metrics"]


class _RegisteredSource(NamedTuple):
    source: weakref.ref[Any]
    kind: str
    labels: dict[str, str]


class _Family:
    """The samples of one name, by their labels. Of a histogram: those of each bucket, by its upper end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.samples: defaultdict[tuple[tuple[str, str], ...], float] = defaultdict(float)
        self.buckets: defaultdict[tuple[tuple[str, str], ...], defaultdict[float, int]] = defaultdict(
            lambda: defaultdict(int)
        )


_entries: list[_RegisteredSource] = []
_lock = threading.Lock()  # guards _entries


def add(source: Any, kind: str, **labels: str) -> None:
    """Let `metrics` show the statistics of an object as long as it lives.

    Args:
        source: an object whose ``statistics()`` are a dataclass of numbers, and that can be referred to weakly.
        kind: a word of the metrics' names, such as "store".
        labels: of all its samples.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Uploads:
    ...     done: int = 3
    ...     def statistics(self):
    ...         return self
    >>> uploads = Uploads()
    >>> add(uploads, "uploads", bucket="checkpoints")
    >>> 'cudafuture_uploads_done_total{bucket="checkpoints"}' in metrics()
    True
    """
    with _lock:
        _entries[:] = [entry for entry in _entries if entry.source() is not None]
        _entries.append(_RegisteredSource(weakref.ref(source), kind, labels))


def metrics() -> str:
    """Return all counters and histograms of this process in OpenMetrics text, which Prometheus reads.

    Serve it with the content type ``application/openmetrics-text; version=1.0.0; charset=utf-8``. Sources that are
    closed are left out.

    >>> metrics().splitlines()[-1]
    '# EOF'
    """
    with _lock:
        entries = list(_entries)
    families: dict[str, _Family] = {}
    for entry in entries:
        source = entry.source()
        if source is None:
            continue
        try:
            statistics = source.statistics()
        except Exception:  # closed, or this is a forked child
            continue
        _collect(families, f"cudafuture_{entry.kind}", statistics, entry.labels)
    return "".join(f"{line}\n" for name in sorted(families) for line in _lines(name, families[name])) + "# EOF\n"


def _collect(families: dict[str, _Family], prefix: str, statistics: Any, labels: Mapping[str, str]) -> None:
    """Add the fields of a dataclass, and of those in it."""
    gauges: frozenset[str] = getattr(type(statistics), "GAUGES", frozenset())
    for field in fields(statistics):
        value, name = getattr(statistics, field.name), f"{prefix}_{field.name}"
        if isinstance(value, Mapping):
            for key, each in value.items():
                more = {**labels, field.name: str(key)}
                if is_dataclass(each):
                    _collect(families, prefix, each, more)
                else:
                    _add(families, name, each, more, field.name in gauges)
        elif isinstance(value, tuple):
            _add_histogram(families, name, value, labels)
        else:
            _add(families, name, value, labels, field.name in gauges)


def _add(families: dict[str, _Family], name: str, value: Any, labels: Mapping[str, str], is_gauge: bool) -> None:
    if isinstance(value, (int, float)) and not math.isnan(value):
        family = families.setdefault(name, _Family("gauge" if is_gauge else "counter"))
        family.samples[tuple(labels.items())] += value


def _add_histogram(
    families: dict[str, _Family], name: str, buckets: tuple[tuple[float, int], ...], labels: Mapping[str, str]
) -> None:
    """Add a histogram: the upper end and the count of each bucket, in seconds."""
    counts = families.setdefault(f"{name}_seconds", _Family("histogram")).buckets[tuple(labels.items())]
    for upper, count in buckets:
        counts[upper] += count


def _lines(name: str, family: _Family) -> Iterator[str]:
    yield f"# TYPE {name} {family.kind}"
    suffix = "_total" if family.kind == "counter" else ""
    for labels, value in family.samples.items():
        yield _sample(f"{name}{suffix}", labels, value)
    for labels, counts in family.buckets.items():
        below = 0
        for upper in sorted(counts):
            below += counts[upper]
            yield _sample(f"{name}_bucket", (*labels, ("le", repr(float(upper)))), below)
        yield _sample(f"{name}_bucket", (*labels, ("le", "+Inf")), below)


def _sample(name: str, labels: tuple[tuple[str, str], ...], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    number = str(int(value)) if float(value).is_integer() else repr(value)
    return f"{name}{{{shown}}} {number}" if shown else f"{name} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


break_graphs(add, metrics)
