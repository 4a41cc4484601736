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

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.storage import Snapshot, digest
from rpc_ext import _minder
from rpc_ext._C import alone
from rpc_ext.offload._errors import for_client
from rpc_ext.offload._namespace import call, error_of, no_such_key
from rpc_ext.offload._order import RequestOrder
from rpc_ext.offload._wire import LINE, PIECE, Fetch, Found, Operation, Part, Request, pack_answer, parts_of

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
            _minder.mind(self, time.perf_counter() + max(seconds, 0.0))

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
        _minder.forget(self)
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
        _send_places(self._handler, self._session, places, end, expires, self._errors, self._answer)

    def _answer(
        self, places: list[_Place], digests: list[int], errors: list[tuple[int, BaseException]], data: torch.Tensor
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

    def answer(
        places: list[_Place], digests: list[int], errors: list[tuple[int, BaseException]], data: torch.Tensor
    ) -> None:
        parts = [Part(place.at, place.length, found) for place, found in zip(places, digests, strict=True)]
        reply.send(*pack_answer(len(entries), errors, parts, data))

    _send_places(handler, session, places, end, 0.0, errors, answer)


def _send_places(
    handler: RequestHandler,
    session: ClientSession,
    places: list[_Place],
    nbytes: int,
    expires: float,
    errors: list[tuple[int, BaseException]],
    answer: Callable[[list[_Place], list[int], list[tuple[int, BaseException]], torch.Tensor], None],
) -> None:
    """Read places into one buffer, and answer with those that were read."""
    try:
        request = handler.count_in(session, nbytes)
    except BlockingIOError as e:
        answer([], [], [*errors, *((place.entry, e) for place in places)], torch.empty(0, dtype=torch.uint8))
        return

    def read(taken: CUDAFuture[torch.Tensor]) -> None:
        try:
            data = taken.value()
        except Exception as e:
            fail(e)
            return
        try:
            _read_places(handler, places, data, partial(done, data))
        except Exception as e:
            fail(e)

    def fail(error: Exception) -> None:
        found = [(place.entry, for_client(place.key, error.with_traceback(None))) for place in places]
        end([], [], found, torch.empty(0, dtype=torch.uint8))

    def done(data: torch.Tensor, digests: list[int], failed: list[BaseException | None]) -> None:
        good = [i for i, error in enumerate(failed) if error is None]
        found = [
            (p.entry, for_client(p.key, e, p.length)) for p, e in zip(places, failed, strict=True) if e is not None
        ]
        sent = [places[i] for i in good]
        if found:
            sent, data = _moved_together(sent, data)
        _clear_gaps(data, sent)
        handler.count(read=sum(place.length for place in sent))
        end(sent, [digests[i] for i in good], found, data)

    is_over = False

    def end(sent: list[_Place], digests: list[int], found: list[tuple[int, BaseException]], data: torch.Tensor) -> None:
        nonlocal is_over
        if is_over:  # it could not be answered, and cannot be answered otherwise
            return
        is_over = True
        handler.count_out(session, request)
        answer(sent, digests, [*errors, *found], data)

    seconds = session.order.left(expires)
    try:
        taken = session.buffers.take(nbytes, 0.0 if seconds == math.inf else max(seconds, 0.001))
    except Exception as e:  # the session has ended
        fail(e)
        return
    if taken.done():
        read(taken)
    else:
        taken.add_done_callback(read)


def _read_places(
    handler: RequestHandler,
    places: list[_Place],
    data: torch.Tensor,
    done: Callable[[list[int], list[BaseException | None]], None],
) -> None:
    """Read places into the data, together; where that fails each alone, to learn the error of each."""
    errors: list[BaseException | None] = [None] * len(places)
    filled = [i for i, place in enumerate(places) if place.length]
    found = torch.empty(len(filled), dtype=torch.uint64, device="cpu")
    left = len(filled)

    def end() -> None:
        digests = [digest(data[:0])] * len(places)
        for i, value in zip(filled, found.tolist(), strict=True):
            digests[i] = value
        done(digests, errors)

    def part_of(i: int) -> tuple[Snapshot, int, torch.Tensor]:
        place = places[i]
        return place.snapshot, place.begin, data[place.at : place.at + place.length]

    def together(future: CUDAFuture[None]) -> None:
        if error_of(future) is None:
            end()
            return
        for position, i in enumerate(filled):
            own = found[position : position + 1]
            call(partial(read_alone, i), handler.store.read_parts, [part_of(i)], digests=own)

    def read_alone(i: int, future: CUDAFuture[None]) -> None:
        nonlocal left
        errors[i] = error_of(future)
        left -= 1  # on the offload thread: one at a time
        if not left:
            end()

    if filled:
        call(together, handler.store.read_parts, [part_of(i) for i in filled], digests=found)
    else:
        end()


def _moved_together(places: list[_Place], data: torch.Tensor) -> tuple[list[_Place], torch.Tensor]:
    """Move the bytes of places together, after others could not be read: nothing is sent in place of those."""
    moved, end = [], 0
    for place in places:
        at = math.ceil(end / LINE) * LINE if place.length else end
        data[at : at + place.length] = data[place.at : place.at + place.length].clone()
        moved.append(place._replace(at=at))
        end = at + place.length
    return moved, alone(data, 0, end)


def _clear_gaps(data: torch.Tensor, places: list[_Place]) -> None:
    """Overwrite the bytes between those of the places: they are sent, too, and may be another client's."""
    end = 0
    for place in places:
        if place.length:
            data[end : place.at].zero_()
            end = place.at + place.length
    data[end:].zero_()
