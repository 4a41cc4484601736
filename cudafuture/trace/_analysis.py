"""Analysis of the steps in a trace.

::

    the thread of a step: ████ computing ██░░ waits for a collective ░░███▒▒ waits for a read ▒▒██
                               each wait belongs to the operation that ended last below the future it waits for

A wait that no operation leads to counts as "other". The words are those of HolisticTraceAnalysis: time in which an
operation runs and the thread does not wait for its kind is overlapped, time in which it waits for it is exposed.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from cudafuture.statistics import text_of_seconds
from cudafuture.trace._model import RankTrace, Slice, Trace, TracedFuture, collectives, in_flight, load
from cudafuture.trace._recording import STEP

__all__ = [
    "KINDS",
    "Depth",
    "Flight",
    "LongWait",
    "PathPart",
    "StepReport",
    "Straggler",
    "TraceAnalysis",
    "TraceComparison",
    "analyse",
    "compare",
]

KINDS = ("communication", "io", "data", "pipeline", "device", "other")
"""Kinds of what a thread waits for."""
_KIND_OF_PLACE = {
    "group": "communication",
    "worker": "communication",
    "engine": "io",
    "store": "io",
    "file": "io",
    "loader": "data",
    "stage": "pipeline",
    "worker thread": "pipeline",
}
_MOST_WAITS = 20
T = TypeVar("T")


@dataclass(frozen=True)
class Flight:
    """Operations of one kind in one step. Times are seconds."""

    operations: int
    nbytes: int
    time: float
    """In which at least one was in flight."""
    overlapped: float
    """Part of `time` in which the thread of the step did not wait for one of them."""
    ideal: float
    """The most that could be overlapped: not more than the thread computes."""

    @property
    def overlap(self) -> float:
        """Overlap achieved, as a part of the ideal one; 1 if there was nothing to overlap."""
        return min(1.0, self.overlapped / self.ideal) if self.ideal > 0 else 1.0


class PathPart(NamedTuple):
    """A part of the critical path."""

    what: str
    kind: str
    begin: float
    """Seconds since the begin of the step."""
    end: float


@dataclass(frozen=True)
class StepReport:
    """One step of one rank. Times are seconds."""

    rank: str
    name: str
    begin: float
    """Since the begin of the trace."""
    time: float
    computing: float
    waits: dict[str, float]
    """Exposed time, for each of `KINDS`."""
    flights: dict[str, Flight]
    """Operations in flight, for each kind that has some."""
    critical_path: tuple[PathPart, ...]

    @property
    def bubble(self) -> float:
        """Part of the step in which the thread waits for other stages of a pipeline."""
        return self.waits["pipeline"] / self.time if self.time else 0.0

    @property
    def starvation(self) -> float:
        """Part of the step in which the thread waits for data."""
        return self.waits["data"] / self.time if self.time else 0.0


class LongWait(NamedTuple):
    """One wait of a thread."""

    rank: str
    seconds: float
    line: str
    what: str
    kind: str


@dataclass(frozen=True)
class Straggler:
    """A rank that issues collectives later than the others."""

    rank: str
    last: int
    """Collectives that it was the last one to issue."""
    of: int
    """Collectives that it issued with others."""
    late: float
    """Seconds by which it was later than the last but one, added up."""


@dataclass(frozen=True)
class Depth:
    """Operations of one kind in flight on one rank over the whole trace."""

    most: int
    mean: float
    most_bytes: int


@dataclass(frozen=True, repr=False)
class TraceAnalysis:
    """Result of `analyse`; ``print()`` shows it."""

    steps: tuple[StepReport, ...]
    waits: tuple[LongWait, ...]
    """The longest ones, of all ranks."""
    stragglers: tuple[Straggler, ...]
    depths: dict[str, dict[str, Depth]]
    """For each rank, and each kind of place."""
    lost: int = 0
    clock_errors: dict[str, int | None] = field(default_factory=dict)
    """Nanoseconds, for each rank; None: not known."""

    def median(self, name: str) -> float:
        """Return the median over all steps of "time", "computing", or one of `KINDS`.

        >>> TraceAnalysis((), (), (), {}).median("time")
        0.0
        """
        values = [getattr(step, name) if name in ("time", "computing") else step.waits[name] for step in self.steps]
        return statistics.median(values) if values else 0.0

    def __repr__(self) -> str:
        return f"<TraceAnalysis of {len(self.steps)} steps, median {text_of_seconds(self.median('time'))}>"

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def analyse(path: str | os.PathLike[str] | Trace) -> TraceAnalysis:
    """Find out where the time of each step went, from the trace in a file or in a folder of all ranks.

    A step is a part of the program named by :func:`step`; without such parts the whole trace of a rank's main thread is
    one step.

    Raises:
        FileNotFoundError, ValueError: as `load` raises them.

    >>> import tempfile
    >>> from cudafuture import trace
    >>> folder = tempfile.mkdtemp()
    >>> with trace.record(folder), trace.step(0):
    ...     pass
    >>> [one.name for one in trace.analyse(folder).steps]
    ['step 0']
    """
    trace = load(path)
    waits = sorted(
        (wait for rank in trace.ranks for wait in _waits_of(rank)), key=lambda wait: wait.seconds, reverse=True
    )
    return TraceAnalysis(
        steps=tuple(step for rank in trace.ranks for step in _steps(rank, trace)),
        waits=tuple(waits[:_MOST_WAITS]),
        stragglers=tuple(_stragglers(trace.ranks)),
        depths={rank.title: _depths(rank) for rank in trace.ranks},
        lost=trace.lost,
        clock_errors={rank.title: rank.clock_error for rank in trace.ranks},
    )


def kind_of(future: TracedFuture | None) -> str:
    """Return the kind of what a future stands for, one of `KINDS`."""
    if future is None or future.place is None:
        return "other"
    return _KIND_OF_PLACE.get(future.place["kind"], "other")


class WaitPart(NamedTuple):
    """Part of a wait, and what held it up; None: no operation is known."""

    begin: int
    end: int
    cause: TracedFuture | None
    kind: str


def parts_of(wait: Slice) -> list[WaitPart]:
    """Return the parts of a wait: a wait for a device is one for an operation up to the end of its device work."""
    future = wait.future
    if future is None:
        return [WaitPart(wait.begin, wait.end, None, "other")]
    last = last_operation(future)
    if future.done is None or future.done > wait.begin:
        return [WaitPart(wait.begin, wait.end, last, kind_of(last))]
    at = wait.begin  # only device work is left
    parts = []
    if last is not None and last.device_end is not None and last.device_end > at:
        at = min(last.device_end, wait.end)
        parts.append(WaitPart(wait.begin, at, last, kind_of(last)))
    if at < wait.end or not parts:
        parts.append(WaitPart(at, wait.end, future, "device"))
    return parts


def cause_of(wait: Slice) -> tuple[TracedFuture | None, str]:
    """Return what held up the longest part of a wait, and its kind; None: no operation is known."""
    longest = max(parts_of(wait), key=lambda part: part.end - part.begin)
    return longest.cause, longest.kind


def last_operation(future: TracedFuture) -> TracedFuture | None:
    """Return the operation that ended last among a future and all that it follows; one that did not end is later."""
    best: TracedFuture | None = None
    latest = -1
    seen: set[int] = set()
    stack = [future]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        end = _end_of(one)
        if one.issued is not None and end > latest:
            best, latest = one, end
        stack += _followed(one)
    return best


def _waits_of(rank: RankTrace) -> Iterator[LongWait]:
    for one in rank.slices:
        if one.kind == "wait":
            cause, kind = cause_of(one)
            future = cause or one.future
            what = "" if future is None else future.title
            yield LongWait(rank.title, (one.end - one.begin) / 1e9, one.text, what, kind)


def steps_of(rank: RankTrace, trace: Trace) -> list[Slice]:
    """Return the steps of a rank that have ended; the whole trace of its main thread if no rank has named steps."""
    if any(_is_step(one) for each in trace.ranks for one in each.slices):
        return [one for one in rank.slices if _is_step(one) and not one.is_cut]
    return [Slice("span", rank.main_thread, rank.begin, rank.end, "whole trace", None, 0)]


def _is_step(one: Slice) -> bool:
    return one.kind == "span" and re.fullmatch(rf"{STEP} -?\d+", one.text) is not None


def _steps(rank: RankTrace, trace: Trace) -> Iterator[StepReport]:
    operations = sorted(rank.operations(), key=_issue_of)
    latest_end = list(itertools.accumulate((_end_of(one) for one in operations), max))
    by_thread: defaultdict[int, list[Slice]] = defaultdict(list)  # waits that do not overlap, in the order of time
    for wait in outer_waits(rank):
        by_thread[wait.thread].append(wait)
    for step in steps_of(rank, trace):
        waits = by_thread[step.thread]
        first, last = bisect_right(waits, step.begin, key=lambda one: one.end), _before(waits, step.end, _begin_of)
        flown = operations[bisect_right(latest_end, step.begin) : _before(operations, step.end, _issue_of)]
        yield _step(rank, step, waits[first:last], flown, trace.begin)


def _before(some: list[T], time: int, time_of: Callable[[T], int]) -> int:
    return bisect_left(some, time, key=time_of)


def _begin_of(wait: Slice) -> int:
    return wait.begin


def _issue_of(operation: TracedFuture) -> int:
    return operation.issued or 0


_NEVER = 1 << 62


def _done_of(future: TracedFuture) -> int:
    return _NEVER if future.done is None else future.done


def _end_of(future: TracedFuture) -> int:
    return _NEVER if (end := future.end) is None else end


def _followed(future: TracedFuture) -> list[TracedFuture]:
    """Return the parents that were done before a future: collect_any does not wait for the others."""
    return [parent for parent in future.parents if _done_of(parent) <= _done_of(future)]


def outer_waits(rank: RankTrace) -> list[Slice]:
    """Return the waits of all threads that lie in no other wait of their thread, in the order of time."""
    last_end: dict[int, int] = {}
    found = []
    for one in sorted((one for one in rank.slices if one.kind == "wait"), key=lambda one: (one.begin, -one.end)):
        if one.begin >= last_end.get(one.thread, -1):
            found.append(one)
            last_end[one.thread] = one.end
    return found


def _step(rank: RankTrace, step: Slice, waits: list[Slice], operations: list[TracedFuture], origin: int) -> StepReport:
    exposed = dict.fromkeys(KINDS, 0)
    waited: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for part in (part for wait in waits for part in parts_of(wait)):
        begin, end = max(part.begin, step.begin), min(part.end, step.end)
        if begin < end:
            exposed[part.kind] += end - begin
            waited[part.kind].append((begin, end))
    time = step.end - step.begin
    computing = time - sum(exposed.values())
    return StepReport(
        rank=rank.title,
        name=step.text,
        begin=(step.begin - origin) / 1e9,
        time=time / 1e9,
        computing=computing / 1e9,
        waits={kind: nanoseconds / 1e9 for kind, nanoseconds in exposed.items()},
        flights=_flights(step, operations, waited, computing),
        critical_path=tuple(_critical_path(step, waits)),
    )


def _flights(
    step: Slice, operations: list[TracedFuture], waited: dict[str, list[tuple[int, int]]], computing: int
) -> dict[str, Flight]:
    of_kind: defaultdict[str, list[TracedFuture]] = defaultdict(list)
    for one in operations:
        if _end_of(one) > step.begin:
            of_kind[kind_of(one)].append(one)
    found = {}
    for kind, some in of_kind.items():
        flown = union((max(_issue_of(one), step.begin), min(_end_of(one), step.end)) for one in some)
        time = length(flown)
        exposed = length(intersection(flown, union(waited.get(kind, ()))))
        nbytes = sum(max(one.nbytes, 0) for one in some)
        found[kind] = Flight(len(some), nbytes, time / 1e9, (time - exposed) / 1e9, min(time, computing) / 1e9)
    return found


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the times that at least one of the intervals covers, as intervals that do not touch."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersection(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the times that both cover. Each is the result of `union`."""
    found = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            found.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: list[tuple[int, int]]) -> int:
    """Return the time that intervals cover."""
    return sum(end - begin for begin, end in intervals)


def _critical_path(step: Slice, waits: list[Slice]) -> list[PathPart]:
    """Return the parts back from the end of a step: the thread's own work, and below each wait what held it up last."""
    path = _Path(step)
    for wait in reversed(waits):
        if wait.begin >= path.at or path.at <= step.begin:
            continue
        path.add("computing", "computing", min(wait.end, path.at))
        if wait.future is not None and wait.future.done is not None and wait.future.done <= wait.begin:
            for part in reversed(parts_of(wait)):
                path.add(part.cause.title if part.cause else "wait", part.kind, part.begin)
        elif wait.future is not None:
            path.descend(wait.future, wait.begin)
        path.add(wait.future.title if wait.future else "wait", "other", wait.begin)
    path.add("computing", "computing", step.begin)
    return path.parts[::-1]


class _Path:
    """The critical path of a step, from its end on."""

    def __init__(self, step: Slice) -> None:
        self.step, self.at = step, step.end
        self.parts: list[PathPart] = []

    def add(self, what: str, kind: str, begin: int) -> None:
        """Add what happened from `begin` to the point that the path reaches."""
        begin = max(begin, self.step.begin)
        if begin < self.at:
            origin = self.step.begin
            self.parts.append(PathPart(what, kind, (begin - origin) / 1e9, (self.at - origin) / 1e9))
            self.at = begin

    def descend(self, root: TracedFuture, begin: int) -> None:
        """Add what completed a future last, back to `begin`.

        A future with a callback was completed by what the callback returned, if that ended later; before that by the
        callback; before that by what it follows.
        """
        stack: list[TracedFuture | Slice] = [root]
        seen: set[int] = set()
        while stack and self.at > begin:
            one = stack.pop()
            if isinstance(one, Slice):
                self.add("queued", "other", max(min(one.end, self.at), begin))
                self.add(f"callback: {one.text}", "computing", max(one.begin, begin))
                continue
            if id(one) in seen:
                continue
            seen.add(id(one))
            parents = _followed(one)
            if one.issued is not None:
                if (end := one.end) is not None:
                    self.add("queued", "other", max(min(end, self.at), begin))
                self.add(one.title, kind_of(one), max(one.issued, begin))
            called = one.callback
            returned = [parent for parent in parents if called is not None and _done_of(parent) > called.end]
            followed = [parent for parent in parents if parent not in returned]
            if followed:
                stack.append(max(followed, key=_end_of))
            if called is not None:
                stack.append(called)
            if returned:
                stack.append(max(returned, key=_end_of))


def _stragglers(ranks: list[RankTrace]) -> Iterator[Straggler]:
    """Yield the ranks by the time by which they were last, the latest first."""
    last: defaultdict[str, int] = defaultdict(int)
    late: defaultdict[str, int] = defaultdict(int)
    of: defaultdict[str, int] = defaultdict(int)
    issues: defaultdict[tuple[str, str, int], list[tuple[int, str]]] = defaultdict(list)
    for rank in ranks:
        for key, found in collectives([rank]).items():
            assert found[-1].issued is not None
            issues[key].append((found[-1].issued, rank.title))
    for same in issues.values():
        if len(same) < 2:
            continue
        same.sort()
        (before, _), (time, title) = same[-2:]
        for _, each in same:
            of[each] += 1
        last[title] += time > before
        late[title] += time - before
    for title in sorted(of, key=lambda title: late[title], reverse=True):
        yield Straggler(title, last[title], of[title], late[title] / 1e9)


def _depths(rank: RankTrace) -> dict[str, Depth]:
    found = {}
    for kind, steps in in_flight(rank).items():
        area = sum(one[1] * (following[0] - one[0]) for one, following in itertools.pairwise(steps))
        area += steps[-1][1] * (rank.end - steps[-1][0])
        time = rank.end - steps[0][0]
        found[kind] = Depth(max(s[1] for s in steps), area / time if time else 0.0, max(s[2] for s in steps))
    return found


# ---- comparison and text


@dataclass(frozen=True, repr=False)
class TraceComparison:
    """Medians of the steps of two traces, in seconds; see `compare`."""

    before: dict[str, float]
    after: dict[str, float]

    def ratio(self, name: str) -> float | None:
        """Return after / before of "time", "computing", or one of `KINDS`; None: it was zero.

        >>> TraceComparison({"time": 2.0}, {"time": 1.0}).ratio("time")
        0.5
        """
        return self.after[name] / self.before[name] if self.before[name] else None

    def __repr__(self) -> str:
        ratio = self.ratio("time")
        return f"<TraceComparison of two traces, time {'none before' if ratio is None else f'{ratio:.3f} x'}>"

    def __str__(self) -> str:
        lines = [f"{'median of a step':<16} {'before':>10} {'after':>10} {'ratio':>7}"]
        for name in self.before:
            ratio = self.ratio(name)
            shown = "" if ratio is None else f"{ratio:.2f}"
            before, after = text_of_seconds(self.before[name]), text_of_seconds(self.after[name])
            lines.append(f"{name:<16} {before:>10} {after:>10} {shown:>7}")
        return "\n".join(lines)


def compare(before: str | os.PathLike[str] | Trace, after: str | os.PathLike[str] | Trace) -> TraceComparison:
    """Compare the medians of the steps of two traces.

    Raises:
        FileNotFoundError, ValueError: as `load` raises them.

    >>> import tempfile
    >>> from cudafuture import trace
    >>> folder = tempfile.mkdtemp()
    >>> with trace.record(folder), trace.step(0):
    ...     pass
    >>> trace.compare(folder, folder).ratio("time")
    1.0
    """
    first, second = analyse(before), analyse(after)
    names = ("time", "computing", *KINDS)
    return TraceComparison({name: first.median(name) for name in names}, {name: second.median(name) for name in names})


def _lines(found: TraceAnalysis) -> Iterator[str]:
    time, computing = found.median("time"), found.median("computing")
    steps = "1 step," if len(found.steps) == 1 else f"{len(found.steps)} steps, median"
    yield f"{steps} {text_of_seconds(time)}: computing {text_of_seconds(computing)}"
    for kind in KINDS:
        median = found.median(kind)
        if median:
            yield f"  exposed {kind}: {text_of_seconds(median)}"
    for kind in KINDS:
        flights = [step.flights[kind] for step in found.steps if kind in step.flights]
        if flights:
            share = statistics.median(flight.overlap for flight in flights)
            flown = statistics.median(flight.time for flight in flights)
            yield f"  {kind} in flight: {text_of_seconds(flown)} of a step, overlap {share:.0%} of what is possible"
    if found.waits:
        yield "longest waits:"
    for wait in found.waits[:5]:
        what, line = wait.what or "a future", wait.line or "native code"
        yield f"  {text_of_seconds(wait.seconds)} on {wait.rank} for {what} at {line}"
    for late in found.stragglers[:1]:
        if late.late:
            yield f"{late.rank} was last {late.last} times of {late.of}, by {text_of_seconds(late.late)} in all"
    if found.lost:
        yield f"{found.lost} events were lost: threads had more than a ring holds"
    for rank, error in found.clock_errors.items():
        if error is None or error > 0:
            known = "the time of day" if error is None else text_of_seconds(error / 1e9)
            yield f"the clock of {rank} is known to {known}"
