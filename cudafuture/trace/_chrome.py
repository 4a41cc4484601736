"""Traces in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing show, and a check of such files.

::

    process = rank      threads: slices of waits, callbacks and named parts
                        streams of devices: slices of the work behind futures
                        operations: asynchronous begin and end, a track for each place
                        arrows: issue ──► completion ──► callback
                        counters: bytes and operations in flight, for each place
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cudafuture._path import path_text
from cudafuture.trace._model import RankTrace, Trace, TracedFuture, in_flight, load, stream_names

__all__ = ["merge", "problems"]

Row = dict[str, Any]


def merge(
    path: str | os.PathLike[str] | Trace,
    output: str | os.PathLike[str],
    profiles: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Write the trace of all ranks as one Chrome JSON file; open it in ui.perfetto.dev.

    Args:
        path: a file or a folder that `record` has written.
        output: the file to write.
        profiles: files of ``torch.profiler``'s ``export_chrome_trace()`` from the same run: their events are put on
            the clock of the trace, by the time of day.

    Raises:
        FileNotFoundError, ValueError: as `load` raises them; or a profile is not such a file, or has no
            ``baseTimeNanoseconds``.
        TypeError: `profiles` is one path.

    >>> import tempfile
    >>> from cudafuture import trace
    >>> folder = tempfile.mkdtemp()
    >>> with trace.record(folder):
    ...     pass
    >>> trace.merge(folder, folder + "/trace.json")
    >>> trace.problems(folder + "/trace.json")
    []
    """
    if isinstance(profiles, (str, os.PathLike)):
        raise TypeError(f"profiles={os.fspath(profiles)!r} is one path: pass a list of paths")
    trace = load(path)
    rows: list[Row] = []
    arrows = itertools.count(1)
    for index, rank in enumerate(trace.ranks):
        rows += _rank(rank, index, trace.begin, arrows)
    for profile in profiles:
        rows += _profile(profile, trace)
    errors = {rank.title: rank.clock_error for rank in trace.ranks}
    devices = {f"{rank.title}, {name}": e for rank in trace.ranks for name, e in rank.device_clock_error.items()}
    facts = {
        "clock_error_ns": errors,
        "device_clock_error_ns": devices,
        "lost_events": trace.lost,
        "is_virtual_time": trace.is_virtual,
    }
    Path(output).write_text(json.dumps({"displayTimeUnit": "ns", "otherData": facts, "traceEvents": rows}))


def _rank(rank: RankTrace, process: int, origin: int, arrows: Iterator[int]) -> Iterator[Row]:
    numbers = {id(future): n for n, future in enumerate(rank.futures)}

    def row(phase: str, name: str, time: int, thread: int, **more: Any) -> Row:
        return {"ph": phase, "name": name, "ts": (time - origin) / 1000, "pid": process, "tid": thread, **more}

    name = f"{rank.title} on {rank.facts.get('host')}"
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for thread, text in rank.file.threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": text}}
    for one in rank.slices:
        what = one.text or (one.future.title if one.future is not None else "")
        title = what if one.kind == "span" else f"{one.kind}: {what}"
        arguments = {} if one.future is None else {"future": one.future.title}
        if one.is_cut:
            arguments["cut"] = "it had not ended"
        yield row("X", title, one.begin, one.thread, dur=(one.end - one.begin) / 1000, cat=one.kind, args=arguments)
    yield from _streams(rank, row, process)
    for future in rank.operations():
        yield from _operation(future, row, f"{process}.{numbers[id(future)]}", rank.end)
    yield from _arrows(rank, row, arrows)
    yield from _counters(rank, row)


def _streams(rank: RankTrace, row: Any, process: int) -> Iterator[Row]:
    """Yield a track for each stream of a device, with the work behind futures."""
    streams = stream_names(rank)
    tracks = {stream: _FIRST_STREAM + index for index, stream in enumerate(streams)}
    names = {tracks[stream]: name for stream, name in streams.items()}
    for work in rank.device_work:
        track = tracks[work.device, work.stream]
        called = work.future.callback
        title = work.future.title if called is None or not called.text else called.text
        arguments = {"future": work.future.title}
        yield row("X", title, work.begin, track, dur=(work.end - work.begin) / 1000, cat="device", args=arguments)
    for track, name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}


_FIRST_STREAM = 2_000_000_000  # no thread has such a number


def _operation(future: TracedFuture, row: Any, number: str, last: int) -> Iterator[Row]:
    """Yield an operation: asynchronous, since operations of one place overlap."""
    assert future.issued is not None
    place = future.place or {"kind": "operation", "name": ""}
    common = {"cat": f"{place['kind']} {place['name']}".strip(), "id": number}
    arguments: Row = {"state": future.state}
    if future.nbytes >= 0:
        arguments["bytes"] = future.nbytes
    if future.done is None:
        arguments["cut"] = "it had not ended"
    yield row("b", future.title, future.issued, future.issuer, args=arguments, **common)
    if future.ready is not None and future.done is not None:
        yield row("n", "device work finished", max(future.ready, future.issued), future.issuer, **common)
    end = max(time for time in (future.done, future.ready, future.issued) if time is not None)
    yield row("e", future.title, last if future.done is None else end, future.issuer, **common)


def _arrows(rank: RankTrace, row: Any, numbers: Iterator[int]) -> Iterator[Row]:
    """Yield an arrow from the issue of an operation, over its completion, to each callback that follows it."""
    for future in rank.futures:
        begun = future.callback
        if begun is None:
            continue
        for parent in future.parents:
            if parent.issued is None or parent.done is None or not parent.issued <= parent.done <= begun.begin:
                continue
            common = {"cat": "follows", "id": next(numbers)}  # Perfetto reads numbers
            for time, thread in ((parent.issued, parent.issuer), (parent.done, parent.completer)):
                yield row("X", "issued" if time == parent.issued else "done", time, thread, dur=0, cat="mark")
            yield row("s", "follows", parent.issued, parent.issuer, **common)
            yield row("t", "follows", parent.done, parent.completer, **common)
            yield row("f", "follows", begun.begin, begun.thread, bp="e", **common)


def _counters(rank: RankTrace, row: Any) -> Iterator[Row]:
    """Yield the bytes and the operations in flight at each change, for each kind of place."""
    for kind, steps in in_flight(rank).items():
        for time, operations, nbytes in steps:
            yield row("C", f"{kind}: in flight", time, 0, args={"operations": operations})
            yield row("C", f"{kind}: bytes in flight", time, 0, args={"bytes": nbytes})


def _profile(path: str | os.PathLike[str], trace: Trace) -> list[Row]:
    """Return the rows of a file of torch.profiler, on the clock of the trace."""
    data = _read(path)
    base = data.get("baseTimeNanoseconds")
    if base is None:
        raise ValueError(
            f"{os.fspath(path)} has no baseTimeNanoseconds: export it with torch.profiler's export_chrome_trace()"
        )
    process = data.get("distributedInfo", {}).get("rank")
    rank = next((one for one in trace.ranks if process is not None and one.rank == process), trace.ranks[0])
    header = rank.file.header
    shift = (base + header["monotonic"] - header["realtime"] - trace.begin) / 1000
    rows = []
    for row in data["traceEvents"]:
        if "ts" in row:
            row["ts"] = float(row["ts"]) + shift
        row["pid"] = f"torch.profiler {row.get('pid', '')}"
        rows.append(row)
    return rows


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a Chrome JSON file has."""
    file = Path(path_text(path))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{file} is not a Chrome JSON file: {e}") from e
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ValueError(f"{file} is not a Chrome JSON file: that is an object with a list 'traceEvents'")
    return content


def problems(path: str | os.PathLike[str]) -> list[str]:
    """Check a Chrome JSON file, and return what is wrong with it; an empty list: nothing.

    Two slices of a thread lie within one another or apart; each asynchronous begin has an end that is not before it;
    each arrow has a begin and an end, in the order of time; times are finite, durations not negative, and each
    counter's times do not go back.

    Raises:
        ValueError: it is not a Chrome JSON file.

    >>> import tempfile
    >>> from cudafuture import trace
    >>> folder = tempfile.mkdtemp()
    >>> with open(folder + "/x.json", "w") as file:
    ...     _ = file.write('{"traceEvents": [{"ph": "e", "cat": "io", "id": 1, "name": "read", "ts": 2, "pid": 0}]}')
    >>> trace.problems(folder + "/x.json")
    ["asynchronous slice 1 of 'io' has an end, and no begin"]
    """
    rows = _read(path)["traceEvents"]
    found: list[str] = []
    slices: defaultdict[tuple[Any, Any], list[Row]] = defaultdict(list)
    pairs: defaultdict[tuple[Any, Any, Any], list[Row]] = defaultdict(list)
    arrows: defaultdict[tuple[Any, Any], list[Row]] = defaultdict(list)
    counters: dict[tuple[Any, Any], float] = {}
    for row in rows:
        phase = row["ph"]
        if phase == "M":
            continue
        if not math.isfinite(row["ts"]) or row.get("dur", 0) < 0:
            found.append(f"{row['name']!r} has the time {row['ts']} and the duration {row.get('dur', 0)}")
        elif phase == "X":
            slices[row["pid"], row.get("tid")].append(row)
        elif phase in "be":
            pairs[row["pid"], row.get("cat"), row["id"]].append(row)
        elif phase in "stf":
            arrows[row.get("cat"), row["id"]].append(row)
        elif phase == "C":
            track = row["pid"], row["name"]
            if row["ts"] < counters.get(track, -math.inf):
                found.append(f"counter {row['name']!r} goes back in time")
            counters[track] = row["ts"]
    for (_, thread), track_slices in slices.items():
        found += _overlaps(thread, track_slices)
    for (_, category, number), both in pairs.items():
        found += _pairs(category, number, both)
    for (_, number), parts in arrows.items():
        phases, times = [part["ph"] for part in parts], [part["ts"] for part in parts]
        if not isinstance(number, int):
            found.append(f"arrow {number!r} has no number, which Perfetto needs")
        elif phases[0] != "s" or phases[-1] != "f" or times != sorted(times):
            found.append(f"arrow {number} does not lead from a begin to an end, forward in time")
    return found


def _overlaps(thread: Any, slices: list[Row]) -> Iterator[str]:
    """Yield the slices of a thread that overlap partly."""
    open_ends: list[float] = []
    for row in sorted(slices, key=lambda row: (row["ts"], -row["dur"])):
        begin, end = row["ts"], row["ts"] + row["dur"]
        while open_ends and open_ends[-1] <= begin + _ROUNDING:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + _ROUNDING:
            yield f"slice {row['name']!r} of thread {thread} overlaps another one partly"
        open_ends.append(end)


_ROUNDING = 1e-3  # microseconds: a nanosecond


def _pairs(category: Any, number: Any, both: list[Row]) -> Iterator[str]:
    name = f"asynchronous slice {number} of {category!r}"
    begins = [row["ts"] for row in both if row["ph"] == "b"]
    ends = [row["ts"] for row in both if row["ph"] == "e"]
    if len(begins) != len(ends):
        yield f"{name} has {'an end, and no begin' if ends else 'a begin, and no end'}"
    elif any(end < begin for begin, end in zip(sorted(begins), sorted(ends), strict=True)):
        yield f"{name} ends before it begins"
