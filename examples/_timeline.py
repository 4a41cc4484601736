"""Spans of time that several threads record, and how much of one kind lies within another."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import rich.box
from rich.table import Table

from cudafuture import CUDAFuture

NO_BUCKET = -1


@dataclass
class Span:
    """Something that went on in one training step, for one bucket or for none, between two nanoseconds."""

    step: int
    what: str
    bucket: int
    start: int
    end: int


class Timeline:
    """What went on when. Any thread may record; ask for results when they are done.

    Nobody can note the moment at which a future completes without being late: whoever is told of it has to be woken
    first. So a span that a future ends lasts only until the future was last seen pending, and every overlap that
    comes out of this is a lower bound.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.step = 0
        self._watched: dict[int, tuple[CUDAFuture[Any], Span]] = {}

    @contextmanager
    def span(self, what: str, bucket: int = NO_BUCKET) -> Iterator[None]:
        """Record how long the block takes."""
        self.look()
        start = time.perf_counter_ns()
        yield
        self.spans.append(Span(self.step, what, bucket, start, time.perf_counter_ns()))
        self.look()

    def watch(self, what: str, bucket: int, future: CUDAFuture[Any]) -> None:
        """Record how long the future stays pending, as far as `look` sees it; the bucket's last one has to be done."""
        now = time.perf_counter_ns()
        span = Span(self.step, what, bucket, now, now)
        self.spans.append(span)
        self._watched[bucket] = future, span

    def look(self) -> None:
        """See which of the watched futures are pending. It is cheap: call it often, from any thread."""
        for future, span in list(self._watched.values()):
            now = time.perf_counter_ns()
            if not future.done():
                span.end = now

    def overlap(self, bucket: int) -> dict[str, float]:
        """The medians over all steps of `overlap_in_step`."""
        steps: defaultdict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            steps[span.step].append(span)
        measured = [overlap_in_step(spans, bucket) for spans in steps.values()]
        return {key: statistics.median(m[key] for m in measured) for key in measured[0]}


def common(some: Sequence[Span], others: Sequence[Span]) -> float:
    """How long, in microseconds, spans of the one kind ran while spans of the other did."""
    return sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in some for b in others) / 1000


def overlap_in_step(spans: Sequence[Span], bucket: int) -> dict[str, float]:
    """One bucket in one step, in microseconds: how long its own spans took, and how much of that others shared."""
    own = [s for s in spans if s.bucket == bucket]
    flight, update, wait = ([s for s in own if s.what == what] for what in ("all_reduce", "update", "wait"))
    backward = [s for s in spans if s.what == "backward"]
    other_updates = [s for s in spans if s.what == "update" and s.bucket != bucket]
    return {
        "all_reduce_us": common(flight, flight),
        "all_reduce_during_backward_us": common(flight, backward),
        "all_reduce_during_other_updates_us": common(flight, other_updates),
        "update_us": common(update, update),
        "update_during_backward_us": common(update, backward),
        "forward_waited_us": common(wait, wait),
    }


def overlap_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table with a line for each bucket."""
    headings = {
        "all_reduce_us": "in flight",
        "all_reduce_during_backward_us": "flight during backward",
        "all_reduce_during_other_updates_us": "flight during other updates",
        "update_us": "update",
        "update_during_backward_us": "update during backward",
        "forward_waited_us": "forward waited",
    }
    title = "What overlapped with what: at least so many µs in a step (medians)"
    table = Table("bucket", "KiB", title=title, box=rich.box.SIMPLE_HEAD, collapse_padding=True)
    for heading in headings.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(" ".join(row["layers"]), f"{row['kib']:.0f}", *(f"{row[key]:.0f}" for key in headings))
    return table
