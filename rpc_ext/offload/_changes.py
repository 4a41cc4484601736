"""Writes and deletions of the client: requests and their messages."""

from __future__ import annotations

import math

import torch

from cudafuture import CUDAFuture
from cudafuture.errors import ChecksumError
from cudafuture.storage import digest, digests
from rpc_ext._C import alone
from rpc_ext.offload import _wire as wire
from rpc_ext.offload._buffers import offload_thread
from rpc_ext.offload._operation import Operation
from rpc_ext.offload._source import ExpectedDigest, Source, expect_digest
from rpc_ext.offload._window import Message, Request, Window

__all__ = ["DeleteRequest", "WriteRequest"]

_GAP = torch.zeros(wire.LINE, dtype=torch.uint8)


class WriteRequest(Request):
    """Write of one tensor.

    Args:
        source: source of its bytes.
        expected: digest that the bytes must have; None: any.
    """

    def __init__(self, key: str, source: Source, expected: int | None, operation: Operation, index: int) -> None:
        super().__init__(wire.PUT, key, operation, index, source.nbytes)
        self.source, self.expected = source, expected
        self.shape, self.dtype, self.nbytes = source.shape, source.dtype, source.nbytes
        self.left = {*range(wire.parts_of(source.nbytes))}  # parts that the service has not acknowledged
        self._is_on_device = source.data is None and source.nbytes < wire.LARGE
        self.holds = int(self._is_on_device)

    def copy_to_host(self, window: Window) -> None:
        """Copy a small tensor from its device; the request waits for the copy. Called after ``Window.submit``."""
        if self._is_on_device:
            part = self.source.part(0, self.nbytes)
            assert isinstance(part, CUDAFuture)
            part.add_done_callback(lambda done: self._on_host(done, window), executor=offload_thread)

    def _on_host(self, done: CUDAFuture[torch.Tensor], window: Window) -> None:
        try:
            self.source.data = done.value()
        except BaseException as e:
            window.end(self, None, e)
        else:
            window.release_hold(self)

    def messages(self, window: Window) -> list[Message] | None:
        """Return a message for each part of a large tensor."""
        if self.nbytes < wire.LARGE:
            return None
        due = None if self.expected is None else ExpectedDigest(self.key, self.nbytes, self.expected)
        return [WritePart(window, self, part, due) for part in range(len(self.left))]

    def batch(self, window: Window, requests: list[Request]) -> Message:
        """Return a message of small tensors."""
        return WriteBatch(window, requests, sum(request.weight for request in requests))

    def drop(self) -> None:
        """Release the tensor."""
        self.source.release()

    def put(self, part: int, at: int, length: int, found: int) -> wire.Put:
        """Return the entry of a part whose bytes begin at `at` in the message's data."""
        return wire.Put(*super().entry(), self.dtype, self.shape, self.nbytes, part, at, length, found)


class WriteBatch(Message):
    """Message with small tensors, which are copied side by side into one buffer."""

    verb = wire.PUT
    is_batch = True
    _data: torch.Tensor | None = None

    def start(self) -> None:
        if self._data is not None:
            return self._send()
        if not self.expects_answer():
            return None
        room = sum(math.ceil(request.nbytes / wire.LINE) * wire.LINE for request in self.requests)
        taken = self.window.buffers.take(room)
        if taken.done():
            return self._fill(taken)
        taken.add_done_callback(self._fill, executor=offload_thread)
        return None

    def _fill(self, taken: CUDAFuture[torch.Tensor]) -> None:
        try:
            if self.expects_answer():
                self._copy(taken.value())
                if self.expects_answer():
                    self._send()
        except BaseException as e:
            self.failed(e)
            if not isinstance(e, Exception):
                raise

    def _copy(self, buffer: torch.Tensor) -> None:
        """Copy the tensors into the buffer, and release them."""
        parts, places, end = [], [], 0
        for request in self.requests:
            if gap := -end % wire.LINE:
                parts.append(_GAP[:gap])
            data = request.source.data
            parts.append(wire.NO_DATA if data is None else data)  # None: it has just expired
            places.append((end + gap, parts[-1].numel()))
            end += gap + parts[-1].numel()
        self._data = alone(buffer, 0, end)
        torch.cat(parts, out=self._data)
        self._places = {}
        for request, place, found in zip(self.requests, places, digests(self._data, places), strict=True):
            request.source.release()
            self._places[request] = (*place, found)
            try:
                if request.expected is not None:
                    expect_digest(request.key, found, request.expected)
            except ChecksumError as e:
                self.window.end(request, None, e.with_traceback(None))  # its frames have the buffer

    def _send(self) -> None:
        assert self._data is not None
        self.window.mark_sent(self.requests)
        entries = [request.put(0, *self._places[request]) for request in self.requests]
        self.window.send(self, entries, self._data)

    def answered(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        self._data = None
        super().answered(body, tensors)

    def failed(self, error: BaseException) -> None:
        self._data = None
        super().failed(error)

    def take(self, answer: wire.Answer) -> None:
        for i, request in enumerate(self.requests):
            self.window.end(request, None, answer.errors.get(i))


class WritePart(Message):
    """Message with one tensor, or one part of it."""

    verb = wire.PUT
    _data: torch.Tensor | None = None

    def __init__(self, window: Window, request: WriteRequest, part: int, due: ExpectedDigest | None) -> None:
        self._at = part * wire.PIECE
        super().__init__(window, [request], min(wire.PIECE, request.nbytes - self._at))
        self._request, self._part, self._due = request, part, due

    def start(self) -> None:
        if not self.expects_answer():
            return
        if self._data is not None:
            self._send()
            return
        part = self._request.source.part(self._at, self.nbytes)
        if isinstance(part, CUDAFuture):
            part.add_done_callback(self._on_host, executor=offload_thread)
        else:
            self._take_data(part)

    def _on_host(self, done: CUDAFuture[torch.Tensor]) -> None:
        try:
            self._take_data(done.value())
        except BaseException as e:
            self.failed(e)

    def _take_data(self, data: torch.Tensor) -> None:
        self._data = data
        self._digest = digest(data) if self._due is None else self._due.add(self._at, data)
        self._send()

    def _send(self) -> None:
        assert self._data is not None
        self.window.mark_sent([self._request])
        entry = self._request.put(self._part, 0, self.nbytes, self._digest)
        self.window.send(self, [entry], self._data)

    def take(self, answer: wire.Answer) -> None:
        error = answer.errors.get(0)
        self._request.left.discard(self._part)
        if error is not None or not self._request.left:
            self.window.end(self._request, None, error)
        if error is not None and self._request.nbytes > wire.PIECE:
            self.window.abandon(self._request)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        if self._request.nbytes > wire.PIECE:
            self.window.abandon(self._request)


class DeleteRequest(Request):
    """Deletion of one key."""

    def __init__(self, key: str, operation: Operation, index: int) -> None:
        super().__init__(wire.DELETE, key, operation, index, 0)

    def batch(self, window: Window, requests: list[Request]) -> Message:
        """Return a message that deletes keys."""
        return DeleteBatch(window, requests, 0)


class DeleteBatch(Message):
    """Message that deletes keys."""

    verb = wire.DELETE
    is_batch = True

    def start(self) -> None:
        if self.expects_answer():
            self.window.mark_sent(self.requests)
            self.window.send(self, [request.entry() for request in self.requests], wire.NO_DATA)

    def take(self, answer: wire.Answer) -> None:
        for i, request in enumerate(self.requests):
            self.window.end(request, None, answer.errors.get(i))
