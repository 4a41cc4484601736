"""Spans of time that several threads record: how much of one kind lies within another, and a picture of one step."""

from __future__ import annotations

import statistics
import threading
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
SHORTEST_WAIT = 20  # µs; the picture of a step leaves shorter ones out
PICTURE = 24  # columns
COLORS = {
    "forward": "bold",
    "wait": "red",
    "backward": "bold",
    "all_reduce": "cyan",
    "read": "green",
    "update": "yellow",
    "write": "magenta",
}


@dataclass
class Span:
    """One activity of a training step, for one bucket or for none, between two times in nanoseconds."""

    step: int
    what: str
    bucket: int
    start: int
    end: int  # if a future ends it, the time at which that was last seen pending
    where: str = ""
    heard: int = 0  # if a future ends it, the time at which its callback ran

    @property
    def until(self) -> int:
        """The time at which the consumer could continue."""
        return max(self.end, self.heard)


class Timeline:
    """Record of the spans of training steps. Any thread may record; ask for results when the spans have ended.

    A thread can note the completion of a future only late, because it has to wake up first. So a span that a future
    ends has two ends. It lasts until the future was last seen pending, and every overlap computed from that is a lower
    bound. In the picture of a step it lasts until a callback ran.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.step = 0
        self._watched: dict[int, tuple[CUDAFuture[Any], Span]] = {}

    @contextmanager
    def span(self, what: str, bucket: int = NO_BUCKET, step: int | None = None) -> Iterator[None]:
        """Record how long the block takes."""
        self.look()
        start = time.perf_counter_ns()
        yield
        end = time.perf_counter_ns()
        self.spans.append(Span(self.step if step is None else step, what, bucket, start, end, _thread()))
        self.look()

    def watch(
        self,
        what: str,
        bucket: int,
        future: CUDAFuture[Any],
        *,
        where: str = "",
        step: int | None = None,
        start: int | None = None,
    ) -> CUDAFuture[Any]:
        """Record how long the future stays pending, from `start` or now on, as far as `look` sees it.

        Returns the future to go on with: it has the same outcome, and is done when the end has been noted.
        """
        start = time.perf_counter_ns() if start is None else start
        span = Span(self.step if step is None else step, what, bucket, start, start, where)
        self.spans.append(span)
        self._watched[id(span)] = future, span

        def note(done: CUDAFuture[Any]) -> Any:
            span.heard = time.perf_counter_ns()
            self._watched.pop(id(span), None)
            return done.value()

        return future.then(note)

    def look(self) -> None:
        """Check which of the watched futures are pending. It is cheap: call it often, from any thread."""
        for future, span in list(self._watched.values()):
            now = time.perf_counter_ns()
            if not future.done():
                span.end = now

    def overlap(self, bucket: int) -> dict[str, float]:
        """Return the medians over all steps of `overlap_in_step`."""
        steps: defaultdict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            steps[span.step].append(span)
        measured = [overlap_in_step(spans, bucket) for spans in steps.values()]
        return {key: statistics.median(m[key] for m in measured) for key in measured[0]}


def _thread() -> str:
    return "main" if threading.current_thread() is threading.main_thread() else "callback"


def common(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Return the microseconds in which spans of both kinds ran."""
    return sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in some for b in others) / 1000


def overlap_in_step(spans: Sequence[Span], bucket: int) -> dict[str, float]:
    """Return the microseconds of one bucket's spans in one step, and the part shared with others."""
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
    """Return a table with a line for each bucket."""
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


def typical_step(spans: Sequence[Span], names: Sequence[str], warm_up: int) -> dict[str, Any]:
    """Return the step of median length, from the begin of a forward to that of the next, without the first `warm_up`.

    Returns:
        Its number "step", its length "us", and "spans": all that went on meanwhile, in order of time, also what had
        begun before or ended after it. Times are in microseconds since the step's begin; `names` are the buckets'.
    """
    forwards = sorted((s for s in spans if s.what == "forward"), key=lambda s: s.start)
    ends = [s.start for s in forwards[1:]] + [max(s.until for s in spans)]
    steps = list(zip(forwards, ends, strict=True))[min(warm_up, len(forwards) - 1) :]
    steps.sort(key=lambda step: step[1] - step[0].start)
    forward, end = steps[len(steps) // 2]
    begin = forward.start
    rows: list[dict[str, Any]] = [
        {
            "what": s.what,
            "bucket": names[s.bucket] if s.bucket != NO_BUCKET else "",
            "step": s.step,
            "begin_us": (s.start - begin) / 1000,
            "us": (s.until - s.start) / 1000,
            "where": s.where,
        }
        for s in sorted(spans, key=lambda s: s.start)
        if s.start < end and s.until > begin
    ]
    rows = [row for row in rows if row["what"] != "wait" or row["us"] >= SHORTEST_WAIT]
    return {"step": forward.step, "us": (end - begin) / 1000, "spans": rows}


def step_table(step: Mapping[str, Any]) -> Table:
    """Return a table with a line for each span of a step, and its place in the step."""
    title = f"One step from forward to forward: number {step['step']}, {step['us']:.0f} µs"
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, collapse_padding=True, show_edge=False, pad_edge=False)
    for heading in ("of", "what", "begin", "µs", "when", "where"):
        table.add_column(heading, justify="right" if heading in ("of", "begin", "µs") else "left", no_wrap=True)
    for row in step["spans"]:
        what, begin, us = f"{row['what']} {row['bucket']}", row["begin_us"], row["us"]
        picture = f"[{COLORS[row['what']]}]{_bar(begin, us, step['us'])}[/]"
        table.add_row(str(row["step"]), what, f"{begin:.0f}", f"{us:.0f}", picture, row["where"])
    return table


def _bar(begin: float, us: float, whole: float) -> str:
    """Return a line at the place of the span, with an arrow if it continues outside the step."""
    first = min(max(0, int(begin / whole * PICTURE)), PICTURE - 1)
    last = min(max(first, round((begin + us) / whole * PICTURE) - 1), PICTURE - 1)
    line = ["━"] * (last - first + 1)
    if begin < 0:
        line[0] = "◄"
    if begin + us > whole:
        line[-1] = "►"
    return (" " * first + "".join(line)).ljust(PICTURE)
