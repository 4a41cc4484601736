"""Files of traces: what ``core/trace_recorder.cpp`` writes, one file for each process.

::

    "cftrace1" | kind, size, chunk | kind, size, chunk | ...     a file that was cut off is read up to there
                  header    JSON: the process, its clocks
                  thread    number, thread, name
                  place     address, JSON
                  events    number of the thread, events
                  lost      number of the thread, count
                  trailer   JSON: as the header, at the end
"""

from __future__ import annotations

import json
import logging
import operator
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["NONE", "RecordedEvent", "TraceFile", "read_file", "trace_files"]

_logger = logging.getLogger("cudafuture.trace")
SUFFIX = ".cftrace"
NONE = -1
_MAGIC = b"cftrace1"
_CHUNK = struct.Struct("=II")
_EVENT = struct.Struct("=qqQQqqiBBBB")  # as TraceRecord
_THREAD = struct.Struct("=Ii")
_PLACE = struct.Struct("=Q")
_LOST = struct.Struct("=IQ")
_HEADER, _THREAD_NAME, _PLACE_NAME, _EVENTS, _LOST_EVENTS, _TRAILER = range(6)
_KINDS = (
    "created",
    "issued",
    "follows",
    "done",
    "ready",
    "wait_begin",
    "wait_end",
    "callback_begin",
    "callback_end",
    "span_begin",
    "span_end",
    "reached",
)
_STATES = ("pending", "completed", "failed", "cancelled")
_MAKERS = ("", "submit", "then", "then_async", "gather", "collect_all", "collect_any")


class RecordedEvent(NamedTuple):
    """One event of one thread. Addresses of futures are used again after a future has died."""

    time: int  # nanoseconds; of virtual time on a simulated accelerator
    order: int  # nanoseconds of CLOCK_MONOTONIC
    future: int  # address; 0: none
    other: int  # follows: address of the parent; issued: address of the place; reached: the stream
    number: int  # reached: nanoseconds of the device since the first event on it
    nbytes: int  # reached: `order` of the event "done" of the future
    peer: int  # reached: the index of the device
    kind: str
    state: str
    maker: str
    text: str
    thread: int  # of the operating system


@dataclass
class TraceFile:
    """Contents of one file."""

    path: Path
    header: dict[str, Any]
    trailer: dict[str, Any] | None = None  # None: the process did not end the recording
    threads: dict[int, str] = field(default_factory=dict)  # names, by the number of the operating system
    places: dict[int, dict[str, Any]] = field(default_factory=dict)  # by address
    events: list[RecordedEvent] = field(default_factory=list)  # in their order
    lost: int = 0
    is_virtual: bool = False  # the times are those of a simulated accelerator


def trace_files(path: Path) -> list[Path]:
    """Return the files of a folder, or the file itself.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise FileNotFoundError(f"{path} is no file of a trace, and no folder with such files")
    return files


def read_file(path: Path) -> TraceFile:
    """Read a file, also one that was cut off.

    Raises:
        ValueError: it is not a file of a trace, or of another version.
    """
    data = path.read_bytes()
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is not a file of a trace that this version reads")
    file = TraceFile(path, {})
    numbers: dict[int, int] = {}
    try:
        for kind, chunk in _chunks(data):
            _read_chunk(file, kind, chunk, numbers)
    except (ValueError, LookupError, struct.error) as e:  # a crash of the machine leaves pages of zeros
        _logger.warning("%s is damaged, and is read up to there: %s", path, e)
    if "process" not in file.header:
        raise ValueError(f"{path} ends before the header of the trace")
    file.events.sort(key=operator.itemgetter(1))
    if file.is_virtual:  # events before and after the virtual clock have no order with the others
        count = len(file.events)
        file.events = [event for event in file.events if event.time != event.order]
        file.lost += count - len(file.events)
    return file


def _read_chunk(file: TraceFile, kind: int, chunk: memoryview, numbers: dict[int, int]) -> None:
    """Add one chunk. `numbers`: the threads of the operating system, by their numbers in the file."""
    if kind == _HEADER:
        file.header = json.loads(bytes(chunk))
    elif kind == _TRAILER:
        file.trailer = json.loads(bytes(chunk))
    elif kind == _THREAD_NAME:
        number, thread = _THREAD.unpack_from(chunk)
        numbers[number] = thread
        file.threads[thread] = bytes(chunk[_THREAD.size :]).decode(errors="replace")
    elif kind == _PLACE_NAME:
        (address,) = _PLACE.unpack_from(chunk)
        file.places[address] = json.loads(bytes(chunk[_PLACE.size :]))
    elif kind == _LOST_EVENTS:
        file.lost += _LOST.unpack_from(chunk)[1]
    elif kind == _EVENTS:
        file.is_virtual |= _read_events(chunk, numbers, file.events)


def _chunks(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the chunks; of the last one, as much as there is, if it has events."""
    view = memoryview(data)
    at = len(_MAGIC)
    while at + _CHUNK.size <= len(data):
        kind, size = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        if at + size <= len(data) or kind == _EVENTS:
            yield kind, view[at : at + size]
        at += size


def _read_events(chunk: memoryview, numbers: dict[int, int], events: list[RecordedEvent]) -> bool:
    """Add the events of a chunk; return True if they have virtual times."""
    if len(chunk) < 4:
        return False
    thread = numbers[int.from_bytes(chunk[:4], "little")]
    at, end, size = 4, len(chunk), _EVENT.size
    unpack, new = _EVENT.unpack_from, tuple.__new__
    any_virtual = 0
    while at + size <= end:
        time, order, future, other, number, nbytes, peer, kind, state, is_virtual, length = unpack(chunk, at)
        at += size
        text = bytes(chunk[at : at + length]).decode(errors="replace") if length else ""
        at += length
        if at > end:
            break
        any_virtual |= is_virtual
        row = (
            time,
            order,
            future,
            other,
            number,
            nbytes,
            peer,
            _KINDS[kind],
            _STATES[state & 15],
            _MAKERS[state >> 4],
            text,
        )
        events.append(new(RecordedEvent, (*row, thread)))
    return bool(any_virtual)
