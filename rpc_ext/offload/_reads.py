"""Reads of the client: requests and their messages."""

from __future__ import annotations

import threading

import torch

from cudafuture.errors import ChecksumError
from cudafuture.storage import Digest, digest, digests
from rpc_ext.offload import _wire as wire
from rpc_ext.offload._operation import Operation
from rpc_ext.offload._target import Target
from rpc_ext.offload._window import DONE, Message, Request, Window

__all__ = ["ReadRequest"]

_GUESS = wire.PACK // 128  # bytes that a tensor of unknown size counts for in a batch


class ReadRequest(Request):
    """Read of one tensor. The service replies with its first part, and keeps the tensor until the rest is fetched.

    Args:
        target: target of its bytes.
        wants_digest: True to compute the digest of the tensor for the caller.
    """

    def __init__(self, key: str, target: Target, wants_digest: bool, operation: Operation, index: int) -> None:
        super().__init__(wire.GET, key, operation, index, _GUESS if target.nbytes is None else target.nbytes)
        self.nbytes = target.nbytes
        self._wants_digest = wants_digest
        self._lock = threading.Lock()  # guards what follows, and the filling of the target
        self._target: Target | None = target  # None: the request is done

    def messages(self, window: Window) -> list[Message] | None:
        """Return a message with this request alone if the tensor is known to be large."""
        if self.nbytes is None or self.nbytes < wire.LARGE:
            return None
        return [ReadBatch(window, [self], min(wire.PIECE, self.nbytes))]

    def batch(self, window: Window, requests: list[Request]) -> Message:
        """Return a message for tensors that are small or of unknown size."""
        message = ReadBatch(window, requests, 0)
        message.is_batch = True
        sizes = (request.nbytes for request in message.requests)
        message.nbytes = min(wire.PIECE, sum(wire.PIECE if size is None else size for size in sizes))
        return message

    def found(self, window: Window, found: wire.Found, data: torch.Tensor) -> list[int]:
        """Take the first part of the tensor; return the parts to fetch."""
        with self._lock:
            target = self._target
            if target is None:
                return []
            target.expect(self.key, found)
            self._found, self._left = found, {*range(wire.parts_of(found.nbytes))}
            is_whole = found.length == found.nbytes
            if is_whole:
                target.digest = found.digest
                value = target.whole(found, data)
            else:
                target.begin(found)
                self._digest = Digest(found.nbytes) if self._wants_digest or found.kept is not None else None
        if is_whole:
            window.end(self, value)
            return []
        if found.length:
            self.take_part(window, 0, data, found.digest)
        return sorted(self._left)

    def take_part(self, window: Window, part: int, data: torch.Tensor, expected: int) -> None:
        """Take a part; end the request with the last one."""
        at = part * wire.PIECE
        with self._lock:
            target = self._target
            if target is None:
                return
            expect_received(self.key, digest(data) if self._digest is None else self._digest.add(at, data), expected)
            target.fill(at, data)
            self._left.discard(part)
            if self._left:
                return
            self._expect_whole(target)
            value = target.finish()
        window.end(self, value)

    def _expect_whole(self, target: Target) -> None:
        """Raise ChecksumError unless the parts together have the digest in the store."""
        if self._digest is None:
            return
        target.digest = self._digest.value()
        kept, nbytes = self._found.kept, self._found.nbytes
        if kept is not None and self._digest.value(kept[1]) != kept[0]:
            raise ChecksumError(f"key {self.key!r}: its {nbytes} bytes on the disk are not those that were written")

    def drop(self) -> None:
        """Release the target. No thread fills it after this returns."""
        with self._lock:
            self._target = None

    def length(self, part: int) -> int:
        """Return the size of a part in bytes."""
        return min(wire.PIECE, self._found.nbytes - part * wire.PIECE)


def expect_received(key: str, found: int, expected: int) -> None:
    """Raise ChecksumError unless received bytes have the digest under which they were sent."""
    if found != expected:
        raise ChecksumError(f"key {key!r}: the bytes received are not those that were sent")


class ReadBatch(Message):
    """Message that reads tensors."""

    verb = wire.GET

    def start(self) -> None:
        if self.expects_answer():
            self.window.mark_sent(self.requests)
            self.window.send(self, [request.entry() for request in self.requests], wire.NO_DATA)

    def take(self, answer: wire.Answer) -> None:
        sums = iter(digests(answer.data, [(found.at, found.length) for found in answer.entries]))
        entries = iter(answer.entries)
        rest: list[tuple[ReadRequest, int]] = []
        for i, request in enumerate(self.requests):
            if i in answer.errors:
                self.window.end(request, None, answer.errors[i])
                continue
            found, checksum = next(entries), next(sums)
            try:
                assert isinstance(found, wire.Found)
                expect_received(request.key, checksum, found.digest)
                parts = request.found(self.window, found, wire.data_of(answer.data, found))
                rest += [(request, part) for part in parts if request.state is not DONE]
            except Exception as e:  # this fails one request; the others have their data
                self.window.end(request, None, e.with_traceback(None))
                self.window.abandon(request)
        if rest:
            self.window.enqueue(_fetches(self.window, rest))


def _fetches(window: Window, parts: list[tuple[ReadRequest, int]]) -> list[Message]:
    """Return the messages that fetch parts: large parts alone, small parts together."""
    messages: list[Message] = []
    together: list[tuple[ReadRequest, int]] = []
    nbytes = 0
    for request, part in parts:
        length = request.length(part)
        if together and (nbytes + length > wire.PACK or len(together) == wire.MOST_ENTRIES):
            messages.append(FetchParts(window, together, nbytes))
            together, nbytes = [], 0
        together.append((request, part))
        nbytes += length
    messages.append(FetchParts(window, together, nbytes))
    return messages


class FetchParts(Message):
    """Message that fetches parts of tensors that earlier requests have found."""

    verb = wire.FETCH

    def __init__(self, window: Window, parts: list[tuple[ReadRequest, int]], nbytes: int) -> None:
        super().__init__(window, [request for request, _ in parts], nbytes)
        self._parts = parts

    def start(self) -> None:
        self._parts = [(request, part) for request, part in self._parts if request.state is not DONE]
        self.requests = [request for request, _ in self._parts]
        if self.expects_answer():
            entries = [wire.Fetch(request.sequence, part) for request, part in self._parts]
            self.window.send(self, entries, wire.NO_DATA)

    def take(self, answer: wire.Answer) -> None:
        entries = iter(answer.entries)
        for i, (request, part) in enumerate(self._parts):
            try:
                if i in answer.errors:
                    raise answer.errors[i]
                found = next(entries)
                request.take_part(self.window, part, wire.data_of(answer.data, found), found.digest)
            except Exception as e:
                if self.window.end(request, None, e.with_traceback(None)):
                    self.window.abandon(request)
