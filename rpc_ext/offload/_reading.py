"""Reads of an offload service: snapshots in the order of the operations, then bytes in one answer.

A tensor that does not fit into the answer is kept for its client, which fetches it in parts. So a read returns one
tensor as a whole, whatever others write meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.storage import Snapshot, digest
from rpc_ext import _timer
from rpc_ext._C import alone
from rpc_ext.offload._errors import for_client
from rpc_ext.offload._namespace import call, error_of, no_such_key
from rpc_ext.offload._order import RequestOrder
from rpc_ext.offload._wire import LINE, NO_DATA, PIECE, Fetch, Found, Operation, Part, Request, pack_answer, parts_of

if TYPE_CHECKING:
    from rpc_ext._channel import Reply
    from rpc_ext.offload._handler import RequestHandler
    from rpc_ext.offload._session import ClientSession

__all__ = ["KeptReads", "Reading", "fetch"]


class _Kept:
    """A tensor that a client fetches: its snapshot, and the parts that it has not fetched."""

    def __init__(self, snapshot: Snapshot, key: str, parts: set[int], expires: float) -> None:
        self.snapshot, self.key, self.parts, self.expires = snapshot, key, parts, expires


class KeptReads:
    """The tensors that one client fetches, by the sequence number of the read."""

    def __init__(self, order: RequestOrder) -> None:
        self._order = order
        self._lock = threading.Lock()  # guards what follows
        self._kept: dict[int, _Kept] = {}

    def keep(self, entry: Operation, snapshot: Snapshot, has_first: bool) -> None:
        """Keep a snapshot until its parts are fetched, or its deadline is over."""
        parts = {*range(int(has_first), parts_of(snapshot.nbytes))}
        with self._lock:
            self._kept[entry.sequence] = _Kept(snapshot, entry.key, parts, entry.expires)
        seconds = self._order.left(entry.expires)
        if seconds < math.inf:
            _timer.schedule(self, time.perf_counter() + max(seconds, 0.0))

    def look(self, now: float) -> float | None:
        """Drop the reads whose time is over. Called by the timer thread."""
        with self._lock:
            left = {i: self._order.left(kept.expires) for i, kept in self._kept.items()}
            self._kept = {i: kept for i, kept in self._kept.items() if left[i] > 0}
            due = min((seconds for seconds in left.values() if seconds > 0), default=math.inf)
        return now + due if due < math.inf else None

    def take(self, entry: Fetch) -> tuple[Snapshot, str]:
        """Return the snapshot and the key of a part. Each part can be taken once.

        Raises:
            InvalidStateError: the read is not kept, or the part was fetched before.
        """
        with self._lock:
            kept = self._kept.get(entry.sequence)
            if kept is None or entry.part not in kept.parts:
                raise InvalidStateError("the offload service does not keep this read: its session or its time is over")
            kept.parts.discard(entry.part)
            if not kept.parts:
                del self._kept[entry.sequence]
            return kept.snapshot, kept.key

    def drop(self, sequence: int) -> None:
        """Drop a read that the client gave up."""
        with self._lock:
            self._kept.pop(sequence, None)

    def clear(self) -> None:
        """Drop all: the session has ended."""
        _timer.cancel(self)
        with self._lock:
            self._kept.clear()


class _Place(NamedTuple):
    """A part of a snapshot, and where its bytes go in the data of the answer."""

    entry: int  # its index
    key: str
    snapshot: Snapshot
    begin: int  # in the tensor
    at: int
    length: int


class Reading:
    """One GET, from its arrival to the answer."""

    def __init__(self, handler: RequestHandler, session: ClientSession, request: Request, reply: Reply) -> None:
        self._handler, self._session, self._reply = handler, session, reply
        self._entries: Sequence[Operation] = request.entries  # type: ignore[assignment]
        self._lock = threading.Lock()  # guards what follows
        self._found: list[Snapshot | None] = [None] * len(self._entries)
        self._errors: list[tuple[int, BaseException]] = []
        self._left = len(self._entries)

    def begin(self) -> None:
        """Take the entries whose turn is now; the others come later."""
        self._enter(self._session.order.arrive(self._entries, self._enter))

    def _enter(self, indices: list[int]) -> None:
        queues = self._session.namespace.queues
        try:
            self._look_up(queues.enter(self._entries, indices, False, self._look_up))
        finally:
            self._session.order.pass_on([self._entries[i] for i in indices])

    def _look_up(self, indices: list[int]) -> None:
        """Take the snapshots of keys that have their turn. With the last one the bytes are read."""
        if not indices:
            return
        order, namespace = self._session.order, self._session.namespace
        errors: list[tuple[int, BaseException]] = []
        try:
            found = self._handler.store.snapshots([namespace.name_of(self._entries[i].key) for i in indices])
        except Exception as e:  # the store was closed
            found, errors = [], [(i, for_client(self._entries[i].key, e)) for i in indices]
        late = order.late([self._entries[i] for i in indices])
        for at, (i, snapshot) in enumerate(zip(indices, found, strict=False)):
            if at in late:
                errors.append((i, late[at]))
            elif snapshot is None:
                errors.append((i, no_such_key(self._entries[i].key)))
            else:
                self._found[i] = snapshot
        with self._lock:
            self._errors += errors
            self._left -= len(indices)
            is_last = not self._left
        if is_last:
            self._read()

    def _read(self) -> None:
        """Read as many tensors as fit into the answer; keep the others for the client to fetch."""
        failed = {i for i, _ in self._errors}
        places: list[_Place] = []
        end = 0
        for i, (entry, snapshot) in enumerate(zip(self._entries, self._found, strict=True)):
            if i in failed or snapshot is None:
                continue
            at, length = math.ceil(end / LINE) * LINE, min(PIECE, snapshot.nbytes)
            fits = at + length <= PIECE
            if not fits or length < snapshot.nbytes:
                self._session.kept_reads.keep(entry, snapshot, has_first=fits)
            places.append(_Place(i, entry.key, snapshot, 0, at if fits else 0, length if fits else 0))
            end = at + length if fits else end
        expires = max(entry.expires for entry in self._entries) if all(e.expires for e in self._entries) else 0.0
        _ReadingPlaces(self._handler, self._session, places, end, self._errors, self._answer).begin(expires)

    def _answer(
        self, places: list[_Place], digests: list[int], errors: list[tuple[int, BaseException]], data: Tensor
    ) -> None:
        entries = [_found_of(place, found) for place, found in zip(places, digests, strict=True)]
        self._reply.send(*pack_answer(len(self._entries), errors, entries, data))


def _found_of(place: _Place, found: int) -> Found:
    snapshot = place.snapshot
    kept = None if snapshot.digest is None else (snapshot.digest, snapshot.seed)
    return Found(snapshot.dtype, tuple(snapshot.shape), snapshot.nbytes, place.at, place.length, found, kept)


def fetch(handler: RequestHandler, session: ClientSession, request: Request, reply: Reply) -> None:
    """Answer FETCH: read parts of kept tensors."""
    entries: Sequence[Fetch] = request.entries  # type: ignore[assignment]
    places: list[_Place] = []
    errors: list[tuple[int, BaseException]] = []
    end = 0
    for i, entry in enumerate(entries):
        try:
            snapshot, key = session.kept_reads.take(entry)
        except InvalidStateError as e:
            errors.append((i, e.with_traceback(None)))
            continue
        begin = entry.part * PIECE
        at, length = math.ceil(end / LINE) * LINE, min(PIECE, snapshot.nbytes - begin)
        if at + length > PIECE:
            errors.append((i, ValueError(f"{len(entries)} parts have more bytes than an answer")))
            continue
        places.append(_Place(i, key, snapshot, begin, at, length))
        end = at + length

    def answer(places: list[_Place], digests: list[int], errors: list[tuple[int, BaseException]], data: Tensor) -> None:
        parts = [Part(place.at, place.length, found) for place, found in zip(places, digests, strict=True)]
        reply.send(*pack_answer(len(entries), errors, parts, data))

    _ReadingPlaces(handler, session, places, end, errors, answer).begin(0.0)


Answer = Callable[[list[_Place], list[int], list[tuple[int, BaseException]], Tensor], None]
"""Sends an answer: the places that were read, their digests, the errors of the other entries, the data."""


class _ReadingPlaces:
    """Places on their way from the store into one buffer, and into an answer.

    Args:
        handler, session: of the request.
        places: to be read.
        nbytes: of the buffer.
        errors: of entries that are not among the places.
        answer: called once.
    """

    def __init__(
        self,
        handler: RequestHandler,
        session: ClientSession,
        places: list[_Place],
        nbytes: int,
        errors: list[tuple[int, BaseException]],
        answer: Answer,
    ) -> None:
        self._handler, self._session, self._places, self._nbytes = handler, session, places, nbytes
        self._errors, self._answer = errors, answer
        self._filled = [i for i, place in enumerate(places) if place.length]  # these have bytes to be read
        self._failures: list[BaseException | None] = [None] * len(places)
        self._left = len(self._filled)
        self._is_over = False

    def begin(self, expires: float) -> None:
        """Take room in the client's window and a buffer, within a deadline of the client; 0: none."""
        try:
            self._room = self._handler.count_in(self._session, self._nbytes)
        except BlockingIOError as e:
            self._answer([], [], [*self._errors, *((place.entry, e) for place in self._places)], NO_DATA)
            return
        seconds = self._session.order.left(expires)
        try:
            taken = self._session.buffers.take(self._nbytes, 0.0 if seconds == math.inf else max(seconds, 0.001))
        except Exception as e:  # the session has ended
            self._fail(e)
            return
        if taken.done():
            self._read(taken)
        else:
            taken.add_done_callback(self._read)

    def _read(self, taken: CUDAFuture[Tensor]) -> None:
        try:
            self._data = taken.value()
            self._digests = torch.empty(self._left, dtype=torch.uint64, device="cpu")
            if self._filled:
                parts = [self._part(i) for i in self._filled]
                call(self._read_together, self._handler.store.read_parts, parts, digests=self._digests)
            else:
                self._end()
        except Exception as e:
            self._fail(e)

    def _part(self, i: int) -> tuple[Snapshot, int, Tensor]:
        place = self._places[i]
        return place.snapshot, place.begin, self._data[place.at : place.at + place.length]

    def _read_together(self, done: CUDAFuture[None]) -> None:
        if error_of(done) is None:
            self._end()
            return
        for position, i in enumerate(self._filled):  # each alone, to learn the error of each
            own = self._digests[position : position + 1]
            call(partial(self._read_alone, i), self._handler.store.read_parts, [self._part(i)], digests=own)

    def _read_alone(self, i: int, done: CUDAFuture[None]) -> None:
        self._failures[i] = error_of(done)
        self._left -= 1  # on the offload thread: one at a time
        if not self._left:
            self._end()

    def _end(self) -> None:
        """Answer with the places that were read."""
        digests = [digest(self._data[:0])] * len(self._places)
        for i, found in zip(self._filled, self._digests.tolist(), strict=True):
            digests[i] = found
        good = [i for i, error in enumerate(self._failures) if error is None]
        read, data = [self._places[i] for i in good], self._data
        failed = [
            (place.entry, for_client(place.key, error, place.length))
            for place, error in zip(self._places, self._failures, strict=True)
            if error is not None
        ]
        if failed:
            read, data = _moved_together(read, data)
        _clear_gaps(data, read)
        self._handler.count(read=sum(place.length for place in read))
        self._send(read, [digests[i] for i in good], failed, data)

    def _fail(self, error: Exception) -> None:
        """Answer with the same error for all places."""
        failed = [(place.entry, for_client(place.key, error.with_traceback(None))) for place in self._places]
        self._send([], [], failed, NO_DATA)

    def _send(
        self, places: list[_Place], digests: list[int], failed: list[tuple[int, BaseException]], data: Tensor
    ) -> None:
        if self._is_over:  # an answer that could not be sent has failed
            return
        self._is_over = True
        self._handler.count_out(self._session, self._room)
        self._answer(places, digests, [*self._errors, *failed], data)


def _moved_together(places: list[_Place], data: Tensor) -> tuple[list[_Place], Tensor]:
    """Move the bytes of places together, after others could not be read: nothing is sent in place of those."""
    moved, end = [], 0
    for place in places:
        at = math.ceil(end / LINE) * LINE if place.length else end
        data[at : at + place.length] = data[place.at : place.at + place.length].clone()
        moved.append(place._replace(at=at))
        end = at + place.length
    return moved, alone(data, 0, end)


def _clear_gaps(data: Tensor, places: list[_Place]) -> None:
    """Overwrite the bytes between those of the places: they are sent, too, and may be another client's."""
    end = 0
    for place in places:
        if place.length:
            data[end : place.at].zero_()
            end = place.at + place.length
    data[end:].zero_()
