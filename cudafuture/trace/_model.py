"""A trace as its readers see it: futures, and slices of threads, of all ranks on one clock.

::

    files ──► RankTrace: futures, with their parents          ──► Trace
              slices of threads: waits, callbacks, spans          the clocks of all ranks, with the error
"""

from __future__ import annotations

import logging
import operator
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudafuture._path import path_text
from cudafuture.trace._file import NONE, RecordedEvent, TraceFile, read_file, trace_files

__all__ = [
    "DeviceWork",
    "RankTrace",
    "Slice",
    "Trace",
    "TracedFuture",
    "collectives",
    "in_flight",
    "load",
    "stream_names",
]

_logger = logging.getLogger("cudafuture.trace")
_TOGETHER = frozenset({"all_reduce", "barrier", "all_gather", "all_gather_into_tensor", "all_to_all", "reduce_scatter"})


@dataclass(slots=True, eq=False)
class TracedFuture:
    """One future. Times are nanoseconds; None: it did not happen in the recording."""

    begin: int
    """Time of its creation, or of the first event about it."""
    name: str = ""
    maker: str = ""
    state: str = "pending"
    issued: int | None = None
    issuer: int = NONE
    """The thread that issued the operation."""
    done: int | None = None
    completer: int = NONE
    """The thread that completed it."""
    ready: int | None = None
    """The end of its device work, by the device's clock, or the time at which the host has seen it."""
    device_end: int | None = None
    """The end of its device work, by the device's clock."""
    place: dict[str, Any] | None = None
    """Of an operation: kind and name, such as "group" and "dp"."""
    number: int = NONE
    nbytes: int = NONE
    peer: int = NONE
    parents: list[TracedFuture] = field(default_factory=list)
    callback: Slice | None = None

    @property
    def is_operation(self) -> bool:
        """True if an engine completes it."""
        return self.issued is not None

    @property
    def end(self) -> int | None:
        """The time of its completion, or the end of its device work where that is known and later."""
        if self.done is None or self.device_end is None:
            return self.done
        return max(self.done, self.device_end)

    @property
    def title(self) -> str:
        """The name, with its place: ``all_reduce #3 of group 'dp'``."""
        title = self.name or self.maker or "future"
        if self.number != NONE:
            title += f" #{self.number}"
        if self.peer != NONE:
            title += f" with rank {self.peer}"
        return title if self.place is None else f"{title} of {self.place['kind']} '{self.place['name']}'"

    def __repr__(self) -> str:
        return f"<TracedFuture {self.title}, {self.state}>"


@dataclass(slots=True, eq=False)
class Slice:
    """A time in which a thread waits, runs a callback, or is in a named part of the program."""

    kind: str
    """ "wait", "callback" or "span"."""
    thread: int
    begin: int
    end: int
    text: str
    """The line that waits, the function of the callback, or the name."""
    future: TracedFuture | None
    depth: int
    """Slices of the thread around it."""
    is_cut: bool = False
    """It had not ended at the end of the recording."""

    def __repr__(self) -> str:
        return f"<Slice {self.kind} {self.text}, {(self.end - self.begin) / 1e3:.1f} µs>"


@dataclass(slots=True, eq=False)
class DeviceWork:
    """Work behind a future on one stream of a device. It may have begun later: streams wait for each other."""

    device: str
    """Type and index, such as "cuda:0"."""
    stream: int
    begin: int
    """The latest of: the call that enqueued it, the end of the work that it follows, the end of the stream's earlier
    work of a traced future. The call is the callback or the issue of an operation; for a future that the program
    completes itself, it is not known, and its creation takes its place."""
    end: int
    """The time at which the device has reached the future's event."""
    future: TracedFuture

    def __repr__(self) -> str:
        return f"<DeviceWork of {self.future.title} on {self.device}, {(self.end - self.begin) / 1e3:.1f} µs>"


@dataclass(eq=False)
class RankTrace:
    """Trace of one process."""

    file: TraceFile
    futures: list[TracedFuture]
    slices: list[Slice]
    begin: int
    end: int
    shares_rank: bool = False
    """Another process has the same rank: a child of one that has it in its environment."""
    clock_error: int | None = 0
    """Nanoseconds by which its clock may differ from that of the first rank; None: not known."""
    device_work: list[DeviceWork] = field(default_factory=list)
    """Work of devices that measure time, by its end."""
    device_clock_error: dict[str, int] = field(default_factory=dict)
    """Nanoseconds by which the clock of each device may differ from that of the host."""

    @property
    def facts(self) -> dict[str, Any]:
        """The process: its number, rank and host."""
        return self.file.trailer or self.file.header

    @property
    def rank(self) -> int | None:
        """The rank in the default group; None: not known."""
        rank: int | None = self.facts.get("rank")
        return rank

    @property
    def title(self) -> str:
        """The rank, or the process."""
        process = f"process {self.facts.get('process')}"
        if self.rank is None:
            return process
        return f"rank {self.rank}, {process}" if self.shares_rank else f"rank {self.rank}"

    @property
    def main_thread(self) -> int:
        """The number of the main thread."""
        return int(self.file.header["process"])

    def operations(self) -> Iterator[TracedFuture]:
        """Yield the operations of engines.

        >>> from cudafuture import trace
        >>> with trace.record("operations"):
        ...     pass
        >>> list(trace.load("operations").ranks[0].operations())
        []
        """
        return (future for future in self.futures if future.issued is not None)

    def __repr__(self) -> str:
        return f"<RankTrace of {self.title}: {len(self.futures)} futures, {len(self.slices)} slices>"

    def _shift(self, nanoseconds: int) -> None:
        """Move all times."""
        if not nanoseconds:
            return
        self.begin += nanoseconds
        self.end += nanoseconds
        for future in self.futures:
            future.begin += nanoseconds
            for name in ("issued", "done", "ready"):
                time = getattr(future, name)
                if time is not None:
                    setattr(future, name, time + nanoseconds)
        parts: list[Slice | DeviceWork] = [*self.slices, *self.device_work]
        for part in parts:
            part.begin += nanoseconds
            part.end += nanoseconds


@dataclass(eq=False)
class Trace:
    """A trace of one process or of all ranks of a job; see `load`."""

    ranks: list[RankTrace]

    @property
    def is_virtual(self) -> bool:
        """True if the times are those of a simulated accelerator."""
        return any(rank.file.is_virtual for rank in self.ranks)

    @property
    def lost(self) -> int:
        """Events for which the rings of threads had no room."""
        return sum(rank.file.lost for rank in self.ranks)

    @property
    def begin(self) -> int:
        """The first event, in nanoseconds."""
        return min(rank.begin for rank in self.ranks)

    @property
    def end(self) -> int:
        """The last event, in nanoseconds."""
        return max(rank.end for rank in self.ranks)

    def __repr__(self) -> str:
        return f"<Trace of {len(self.ranks)} processes, {(self.end - self.begin) / 1e6:.1f} ms>"


def load(path: str | os.PathLike[str] | Trace) -> Trace:
    """Return the trace in a file or in a folder, with all ranks on the clock of the first one.

    Processes of one machine have one clock. The clocks of other machines are found from the collectives: none ends on
    one rank before it was issued on all. Without such collectives they are compared by the time of day.

    Raises:
        FileNotFoundError: there is no such file, or no file of a trace in the folder.
        ValueError: it is not a file of a trace.

    >>> import tempfile
    >>> from cudafuture import trace
    >>> with trace.record(tempfile.gettempdir() + "/one.cftrace"):
    ...     pass
    >>> trace.load(tempfile.gettempdir() + "/one.cftrace")
    <Trace of 1 processes, ... ms>
    """
    if isinstance(path, Trace):
        return path
    ranks = [_rank(file) for file in _files(Path(path_text(path)))]
    counts = Counter(one.rank for one in ranks)
    for one in ranks:
        one.shares_rank = counts[one.rank] > 1
    ranks.sort(key=lambda one: (one.rank is None, one.rank or 0, one.facts.get("process")))
    for other in ranks[1:]:
        _align(ranks[0], other)
    return Trace(ranks)


def _files(path: Path) -> list[TraceFile]:
    """Read the files; those of a folder that cannot be read are logged, unless there is no other."""
    files: list[TraceFile] = []
    problem: ValueError | None = None
    for one in trace_files(path):
        try:
            files.append(read_file(one))
        except ValueError as e:
            problem = e
            _logger.warning("%s", e)
    if not files and problem is not None:
        raise problem
    return files


def _rank(file: TraceFile) -> RankTrace:
    """Build futures and slices from the events of one process."""
    known: dict[int, TracedFuture] = {}  # by address
    futures: list[TracedFuture] = []
    slices: list[Slice] = []
    open_slices: defaultdict[int, list[Slice]] = defaultdict(list)
    first, last = (1 << 63) - 1, 0
    reached: list[tuple[RecordedEvent, TracedFuture]] = []
    done_at: dict[tuple[int, int], TracedFuture] = {}  # by address and order, for the events that devices reach
    has_device_times = any(event.kind == "reached" for event in file.events)

    def future_at(address: int, time: int) -> TracedFuture:
        found = known.get(address)
        if found is None:  # made before the recording
            found = known[address] = TracedFuture(time)
            futures.append(found)
        return found

    for event in file.events:
        time, order, address, other, number, nbytes, peer, kind, state, maker, text, thread = event
        if kind == "reached":
            if (address, nbytes) in done_at:
                reached.append((event, done_at[address, nbytes]))
            continue
        first, last = min(first, time), max(last, time)
        if kind == "created":
            future = known[address] = TracedFuture(time)
            futures.append(future)
        elif kind == "done":
            future = future_at(address, time)
            future.done, future.completer, future.state = time, thread, state
            future.maker, future.name = maker, text or future.name
            if has_device_times:
                done_at[address, order] = future
        elif kind == "issued":
            future = future_at(address, time)
            future.issued, future.issuer, future.name = time, thread, text
            future.place = file.places.get(other)
            future.number, future.nbytes, future.peer = number, nbytes, peer
        elif kind == "follows":
            future_at(address, time).parents.append(future_at(other, time))
        elif kind == "ready":
            future_at(address, time).ready = time
        elif kind.endswith("_begin"):
            stack = open_slices[thread]
            of = future_at(address, time) if address else None
            one = Slice(kind[: -len("_begin")], thread, time, time, text, of, len(stack))
            slices.append(one)
            stack.append(one)
            if of is not None and one.kind == "callback":
                of.callback = one
        else:
            _close(open_slices[thread], kind[: -len("_end")], time)
    for stack in open_slices.values():
        for one in stack:
            one.end, one.is_cut = max(one.begin, last), True
    if not file.events:
        first = last = int(file.header.get("monotonic", 0))
    rank = RankTrace(file, futures, slices, first, last)
    _add_device_work(rank, reached)
    return rank


def _add_device_work(rank: RankTrace, reached: list[tuple[RecordedEvent, TracedFuture]]) -> None:
    """Add the work of devices, on the clock of the host."""
    by_device: defaultdict[str, list[tuple[RecordedEvent, TracedFuture]]] = defaultdict(list)
    for event, future in reached:
        by_device[f"{event.text}:{event.peer}"].append((event, future))
    ends: list[tuple[int, int, str, int, TracedFuture]] = []
    for device, events in by_device.items():
        rank.device_clock_error[device] = 0
        if rank.file.is_virtual:
            ends += [(event.time, event.nbytes, device, event.other, future) for event, future in events]
            continue
        windows: defaultdict[int, list[tuple[RecordedEvent, TracedFuture]]] = defaultdict(list)
        for event, future in events:
            windows[event.number // _CLOCK_WINDOW].append((event, future))
        for window in windows.values():
            shift, error = _device_clock(window)
            rank.device_clock_error[device] = max(rank.device_clock_error[device], error)
            ends += [(event.number + shift, event.nbytes, device, event.other, future) for event, future in window]
    last: dict[tuple[str, int], int] = {}  # the end of the earlier work of each stream
    ready: dict[int, int] = {}
    for end, _, device, stream, future in sorted(ends, key=operator.itemgetter(0, 1)):
        enqueued = future.begin if future.issued is None else future.issued
        if future.callback is not None:
            enqueued = future.callback.begin
        follows = [ready[id(parent)] for parent in future.parents if id(parent) in ready]
        begin = min(max(enqueued, last.get((device, stream), enqueued), *follows), end)
        if last.get((device, stream)) != end:  # else it has no work of its own: it shares the event
            rank.device_work.append(DeviceWork(device, stream, begin, end, future))
        last[device, stream] = ready[id(future)] = end
    for _, future in reached:
        end = future.device_end = ready[id(future)]
        future.ready = end if future.ready is None else min(end, future.ready)


_CLOCK_WINDOW = 200_000_000  # nanoseconds
_DRIFT = _CLOCK_WINDOW // 10_000  # nanoseconds in a window: clocks differ by less than 100 parts in a million


def _device_clock(events: list[tuple[RecordedEvent, TracedFuture]]) -> tuple[int, int]:
    """Return the host's time at a device's zero, and its error, from events with both times.

    A device reaches an event after it was recorded, and before the host has seen that. Where no zero fits all events,
    the clocks have drifted apart by that much.
    """
    lowest = max(event.time - event.number for event, _ in events)
    seen = [event.order if future.ready is None else min(event.order, future.ready) for event, future in events]
    highest = min(time - event.number for time, (event, _) in zip(seen, events, strict=True))
    width = highest - lowest
    return (lowest + highest) // 2, ((width + 1) // 2 if width >= 0 else -width) + _DRIFT


def _close(stack: list[Slice], kind: str, time: int) -> None:
    """End the innermost slice of a kind; those within it whose end was lost end with it."""
    if not any(one.kind == kind for one in stack):
        return  # it began before the recording
    while stack:
        one = stack.pop()
        one.end = max(one.begin, time)
        if one.kind == kind:
            return


def _align(first: RankTrace, other: RankTrace) -> None:
    """Put a rank on the clock of the first one, and state the error."""
    if first.file.is_virtual or first.file.header.get("boot") == other.file.header.get("boot"):
        return
    lowest, highest = _bounds(first, other)
    if lowest is not None and highest is not None and lowest <= highest:
        other._shift((lowest + highest) // 2)
        other.clock_error = (highest - lowest + 1) // 2
        return
    ours, theirs = first.file.header, other.file.header
    other._shift((ours["monotonic"] - ours["realtime"]) - (theirs["monotonic"] - theirs["realtime"]))
    other.clock_error = None


def _bounds(first: RankTrace, other: RankTrace) -> tuple[int | None, int | None]:
    """Return the least and the largest number of nanoseconds by which the clock of the first rank may be ahead.

    An operation that combines data of all ranks ends on no rank before the last one has issued it.
    """
    ours = collectives([first])
    lowest: int | None = None
    highest: int | None = None
    for key, found in collectives([other]).items():
        if key not in ours or key[0] not in _TOGETHER:
            continue
        own, theirs = ours[key][-1], found[-1]
        assert own.issued is not None
        assert theirs.issued is not None
        if theirs.done is not None:  # theirs.done + shift >= own.issued
            bound = own.issued - theirs.done
            lowest = bound if lowest is None else max(lowest, bound)
        if own.done is not None:  # own.done >= theirs.issued + shift
            bound = own.done - theirs.issued
            highest = bound if highest is None else min(highest, bound)
    return lowest, highest


def in_flight(rank: RankTrace) -> dict[str, list[tuple[int, int, int]]]:
    """Return, for each kind of place, the times at which operations began or ended: time, operations, bytes."""
    changes: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for future in rank.operations():
        assert future.issued is not None
        kind = (future.place or {"kind": "operation"})["kind"]
        nbytes = max(future.nbytes, 0)
        changes[kind].append((future.issued, 1, nbytes))
        if (end := future.end) is not None:
            changes[kind].append((max(end, future.issued), -1, -nbytes))
    found: dict[str, list[tuple[int, int, int]]] = {}
    for kind, all_changes in changes.items():
        operations = nbytes = 0
        steps = found[kind] = []
        for time, count, size in sorted(all_changes):
            operations, nbytes = operations + count, nbytes + size
            if steps and steps[-1][0] == time:
                steps[-1] = (time, operations, nbytes)
            else:
                steps.append((time, operations, nbytes))
    return found


def stream_names(rank: RankTrace) -> dict[tuple[str, int], str]:
    """Return the names of the streams that have device work, by device and id, in the order of their first work."""
    names: dict[tuple[str, int], str] = {}
    streams: Counter[str] = Counter()  # of each device, without the default stream
    for work in rank.device_work:
        if (work.device, work.stream) not in names:
            streams[work.device] += work.stream != 0
            stream = f"stream {streams[work.device]}" if work.stream else "default stream"
            names[work.device, work.stream] = f"{work.device}, {stream}"
    return names


def collectives(ranks: Iterable[RankTrace]) -> dict[tuple[str, str, int], list[TracedFuture]]:
    """Return the operations that ranks issue together, by name, identity of the group, and number."""
    found: defaultdict[tuple[str, str, int], list[TracedFuture]] = defaultdict(list)
    for rank in ranks:
        for future in rank.operations():
            place = future.place or {}
            if place.get("group") and future.number != NONE and future.peer == NONE:
                found[future.name, place["group"], future.number].append(future)
    return dict(found)
