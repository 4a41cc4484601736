"""The way between a client and an offload service: tensors become requests, and answers futures.

::

    write ──► alone, piece by piece ──► flow ───────────► put
          └─► small: packer ──────────► flow ──► buffer ──┘
    read  ──► small: packer ──► flow ──► get ──► the other pieces ──► flow ──► get

What has come is dealt with at once, in the agent's thread that has brought it: there are several of them.
"""

from __future__ import annotations

import itertools
import math
import secrets
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from cudafuture import CUDAFuture, collect_all, executors, gather
from cudafuture.errors import ChecksumError, InvalidStateError, NotFoundError, WorkerLostError
from cudafuture.storage import Digest, digest
from rpc_ext import _offload_calls
from rpc_ext._memory import SendBuffers, carried
from rpc_ext._offload_calls import Answer, Terms
from rpc_ext._offload_errors import named
from rpc_ext._offload_flow import Flow, NoRoomError, Packer
from rpc_ext._offload_order import Stamps
from rpc_ext._offload_pack import Deadline, Get, Pack, Put, opened, packed, room_for
from rpc_ext._offload_source import ExpectedDigest, Source, expect_digest
from rpc_ext._offload_tally import Tally
from rpc_ext._offload_target import Target
from rpc_ext._offload_wire import (
    MOST_HEADERS,
    PACK,
    PIECE,
    WHOLE,
    Header,
    Wanted,
    pack,
    pack_wanted,
)
from rpc_ext._turns import begun, outcome, without_frame
from rpc_ext.calls import rpc_async

__all__ = ["Transport", "ignore"]

T = TypeVar("T")
_SMALL = 1 << 20  # bytes from which on a tensor travels alone
_BUFFERED = 8 * (PACK + 64 * MOST_HEADERS)  # bytes of packs that have not been sent, and of what lies between tensors
_GUESS = PACK // 128  # bytes that a tensor of unknown size counts for, of those that are asked for together

_thread = executors.serial("offload client")  # where packs go on that had to wait for a buffer


class Transport:
    """What a client sends goes through here.

    Args:
        worker: whose service it is; name: of that.
        terms: what the client was given when it began.
    """

    def __init__(self, worker: str, name: str, token: bytes, terms: Terms) -> None:
        self._worker, self._name, self._token = worker, name, token
        self._stamps = Stamps()
        self.flow = Flow(terms.window)
        self._buffers = SendBuffers(_BUFFERED, _thread)
        self._puts: Packer[Put] = Packer(MOST_HEADERS, PACK, self._send_puts)
        self._gets: Packer[Get] = Packer(MOST_HEADERS, PACK, self._send_gets)

    def call(
        self, deadline: Deadline, fn: Callable[..., Any], *args: Any, sequence: int | None = None
    ) -> CUDAFuture[Any]:
        """Call a function of the service, with a sequence number and a deadline."""
        number = self._stamps.next() if sequence is None else sequence
        stamp = self._stamps.stamp(number, deadline.at if deadline.seconds else 0.0)
        return self._call(deadline, fn, stamp, *args)

    def give_up(self, deadline: Deadline, upload: bytes) -> CUDAFuture[Any]:
        """Have the pieces of a tensor deleted that cannot be written as a whole."""
        return self._call(deadline, _offload_calls.give_up, upload)

    def _call(self, deadline: Deadline, fn: Callable[..., Any], *args: Any) -> CUDAFuture[Any]:
        left = deadline.left(self._worker) or math.inf
        try:
            return rpc_async(self._worker, fn, (self._name, self._token, *args), timeout=left, non_blocking=True)
        except BlockingIOError as e:
            raise NoRoomError(*e.args) from e

    # ---- there

    def writev(
        self,
        headers: Sequence[Header],
        sources: Sequence[Source],
        expected: Sequence[int | None],
        deadline: Deadline,
        succeeded: Callable[[int], None],
    ) -> CUDAFuture[int]:
        """Write tensors. When all have ended it gives how many bytes they have, or the first that failed its error.

        `expected`: the digests that their bytes must have; None: any.
        """
        tally = Tally(len(headers), lambda i, e: named(e, f"write {headers[i].key}", self._worker), succeeded)
        small = []
        for i, (header, source, due) in enumerate(zip(headers, sources, expected, strict=True)):
            if header.nbytes >= _SMALL:
                tally.count(i, self._write_large(header, source, due, deadline))
            elif source.bytes is not None:
                small.append(Put(header, source.bytes, source, due, deadline, partial(tally.ended, i, header.nbytes)))
            else:
                tally.count(i, self._write_small(header, source, due, deadline))
        self._puts.add([(put.header.nbytes, put) for put in small])
        return tally.future.then(lambda done: sum(done.value()), executor=executors.inline)

    def _write_small(self, header: Header, source: Source, expected: int | None, deadline: Deadline) -> CUDAFuture[int]:
        """Write what has to come to the host first."""
        future: CUDAFuture[int] = CUDAFuture(executor=executors.inline)

        def ended(error: BaseException | None) -> None:
            if error is None:
                future.set_result(header.nbytes)
            else:
                future.set_exception(error)

        def add(done: CUDAFuture[torch.Tensor]) -> CUDAFuture[int]:
            self._puts.add([(header.nbytes, Put(header, done.value(), source, expected, deadline, ended))])
            return future

        return source.piece(0, header.nbytes).then_async(add, executor=executors.inline)

    def _write_large(self, header: Header, source: Source, expected: int | None, deadline: Deadline) -> CUDAFuture[int]:
        """Write what does not travel with others."""
        if header.pieces > 1:
            header = header._replace(upload=secrets.token_bytes(len(WHOLE)))
        sequence = self._stamps.next()
        due = None if expected is None else ExpectedDigest(header.nbytes, expected)
        parts = [self._send_piece(header, source, due, i, deadline, sequence) for i in range(header.pieces)]
        return collect_all(parts).then(
            lambda done: self._written(header, done.value(), deadline), executor=executors.inline
        )

    def _send_piece(
        self, header: Header, source: Source, due: ExpectedDigest | None, i: int, deadline: Deadline, sequence: int
    ) -> CUDAFuture[None]:
        at = i * PIECE
        length = min(PIECE, header.nbytes - at)

        def send(done: CUDAFuture[torch.Tensor]) -> CUDAFuture[Answer]:
            data = done.value()
            if not checksums:
                checksums.append(digest(data) if due is None else due.add(at, data))
            block = pack([header._replace(piece=i, length=length, checksum=checksums[0])])
            return self.call(deadline, _offload_calls.put, block, data, sequence=sequence)

        pieces: list[CUDAFuture[torch.Tensor]] = []  # one: what it is a copy of may be overwritten once it was made
        checksums: list[int] = []  # one: a request that is made again has the checksum that was compared

        def begin() -> CUDAFuture[Answer]:
            if not pieces:
                pieces.append(source.piece(at, length))
            return pieces[0].then_async(send, executor=executors.inline)

        sent = self.flow.send(length, begin)
        return sent.then(lambda done: done.value().expect_success(), executor=executors.inline)

    def _written(self, header: Header, parts: list[CUDAFuture[None]], deadline: Deadline) -> int:
        errors = [error for part in parts if (error := part.exception()) is not None]
        if not errors:
            return header.nbytes
        if header.pieces > 1 and not isinstance(errors[0], WorkerLostError):
            again = Deadline.after(deadline.seconds)
            ignore(self.flow.send(0, lambda: self.give_up(again, header.upload)))
        # Pieces that come after one has failed are told that all was given up: that is not why.
        raise next((error for error in errors if not isinstance(error, InvalidStateError)), errors[0])

    def _send_puts(self, puts: list[Put]) -> CUDAFuture[None]:
        """Send small tensors together."""
        nbytes = sum(put.header.nbytes for put in puts)  # what lies between them is not worth counting
        together = Pack(puts, self._worker)
        request = _PutRequest(puts)

        def ended(done: CUDAFuture[Answer]) -> None:
            answer, error = outcome(done)
            failures: dict[int, BaseException] = {}
            if error is None and not isinstance(answer, Answer):
                error = TypeError(f"{answer!r} is no answer to a write")
            elif error is None:
                failures = dict(answer.failures)
            else:  # a program that keeps the error must not keep the buffer, which the error's frames have
                traceback.clear_frames(error.__traceback__)
            request.data = None
            together.end()
            for i, put in enumerate(request.sent if error is None else puts):
                if together.take(put):
                    put.ended(error or failures.get(i))

        return begun(self.flow.send, nbytes, partial(self._put, together, request)).then(
            ended, executor=executors.inline
        )

    def _put(self, together: Pack, request: _PutRequest) -> CUDAFuture[Answer]:
        """Send small tensors when there is a buffer for them. They are copied once, and sent again from the buffer."""
        if request.data is not None:
            data = carried(request.data)
            return self.call(
                together.deadline, _offload_calls.put, request.block, data, together.expiries(request.sent)
            )
        fill = partial(self._fill_and_put, together, request)
        # Not a local variable: this frame calls `fill`, whose error keeps it.
        return self._buffers.take(room_for(request.sent), together.seconds()).then_async(
            fill, executor=executors.inline
        )

    def _fill_and_put(
        self, together: Pack, request: _PutRequest, taken: CUDAFuture[torch.Tensor]
    ) -> CUDAFuture[Answer]:
        request.sent = together.leaving()
        if not request.sent:
            return CUDAFuture.completed(Answer([]))
        if isinstance(outcome(taken)[1], TimeoutError):
            return self._put(together, request)  # the others, which have more time
        data, headers = packed(request.sent, taken.value())
        together.is_copied = True
        fit = [self._has_digest(together, put, h) for put, h in zip(request.sent, headers, strict=True)]
        request.sent = list(itertools.compress(request.sent, fit))
        if not request.sent:
            return CUDAFuture.completed(Answer([]))
        request.data, request.block = data, pack(list(itertools.compress(headers, fit)))
        return self._put(together, request)

    @staticmethod
    def _has_digest(together: Pack, put: Put, header: Header) -> bool:
        """Return whether a copied tensor has the digest that it must have; end it if not."""
        try:
            if put.expected is not None:
                expect_digest(header.checksum, put.expected)
        except ChecksumError as e:
            if together.take(put):
                put.fail(e)
            return False
        return True

    # ---- here

    def read(self, key: str, target: Target, deadline: Deadline, gone: bytes | None = None) -> CUDAFuture[torch.Tensor]:
        """Read a tensor; once more where it was replaced meanwhile. `gone`: the upload whose pieces are not there."""

        def first(done: CUDAFuture[tuple[Header, torch.Tensor]]) -> CUDAFuture[torch.Tensor]:
            header, data = done.value()
            if header.upload == gone:
                raise NotFoundError(f"key {key!r}: one of its pieces is not there")
            target.expect(header)
            if header.pieces == 1:
                target.digest = header.checksum
                return target.whole(header, data)
            return self._read_on(header, data, target, deadline)

        return self._fetch(Wanted(key), target.nbytes, deadline).then_async(first, executor=executors.inline)

    def readv(
        self, keys: Sequence[str], targets: Sequence[Target], deadline: Deadline
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Read tensors. When all have ended it gives them, or the first that failed its error."""
        tally = Tally(len(keys), lambda i, error: named(error, f"read {keys[i]}", self._worker))
        small: list[tuple[int, Get]] = []
        on_devices: list[CUDAFuture[torch.Tensor]] = []  # whose events the tally does not keep
        for i, (key, target) in enumerate(zip(keys, targets, strict=True)):
            if target.is_on_device or (target.nbytes or 0) >= _SMALL:
                read = self.read(key, target, deadline)
                tally.count(i, read)
                if target.is_on_device:
                    on_devices.append(read)
            else:
                came = partial(self._arrived_of_many, tally, i, target, deadline)
                failed = partial(tally.ended, i, None)
                small.append((target.nbytes or _GUESS, Get(Wanted(key), target.nbytes, deadline, came, failed)))
        self._gets.add(small)
        if not on_devices:
            return tally.future
        return tally.future.then_async(lambda done: _ordered(done.value(), on_devices), executor=executors.inline)

    def _arrived_of_many(
        self, tally: Tally, i: int, target: Target, deadline: Deadline, header: Header, data: torch.Tensor
    ) -> None:
        try:
            target.expect(header)
            target.digest = header.checksum
            whole = target.whole(header, data) if header.pieces == 1 else self._read_on(header, data, target, deadline)
        except Exception as e:
            tally.ended(i, None, e)
        else:
            tally.count(i, whole)

    def _read_on(
        self, header: Header, data: torch.Tensor, target: Target, deadline: Deadline
    ) -> CUDAFuture[torch.Tensor]:
        """Fetch the other pieces; from the first one on again where the key was written again meanwhile."""
        assembly = target.assemble(header)
        total = Digest(header.nbytes) if target.wants_digest else None
        if total is not None:
            total.add(0, data)

        def fill(done: CUDAFuture[tuple[Header, torch.Tensor]]) -> CUDAFuture[object]:
            piece, data = done.value()
            if total is not None:
                total.add(piece.piece * PIECE, data)
            return assembly.fill(piece.piece * PIECE, data)

        def ended(done: CUDAFuture[list[CUDAFuture[object]]]) -> CUDAFuture[torch.Tensor]:
            errors = [error for part in done.value() if (error := outcome(part)[1]) is not None]
            if any(isinstance(error, NotFoundError) for error in errors):
                return self.read(header.key, target, deadline, header.upload)
            if errors:
                raise errors[0]
            if total is not None:
                target.digest = total.value()
            return assembly.finish()

        parts = [assembly.fill(0, data)]
        for i in range(1, header.pieces):
            wanted, nbytes = Wanted(header.key, header.upload, i), min(PIECE, header.nbytes - i * PIECE)
            parts.append(self._fetch(wanted, nbytes, deadline).then_async(fill, executor=executors.inline))
        return collect_all(parts).then_async(ended, executor=executors.inline)

    def _fetch(self, wanted: Wanted, nbytes: int | None, deadline: Deadline) -> CUDAFuture[tuple[Header, torch.Tensor]]:
        """Fetch a piece: its header and its bytes."""
        future: CUDAFuture[tuple[Header, torch.Tensor]] = CUDAFuture(executor=executors.inline)

        def came(header: Header, data: torch.Tensor) -> None:
            future.set_result((header, data))

        get = Get(wanted, nbytes, deadline, came, future.set_exception)
        if nbytes is not None and nbytes >= _SMALL:
            self._send_gets([get])
        else:
            self._gets.add([(nbytes or _GUESS, get)])
        return future

    def _send_gets(self, gets: list[Get]) -> CUDAFuture[None]:
        nbytes = sum(PIECE if get.nbytes is None else get.nbytes for get in gets)
        together = Pack(gets, self._worker)

        def send() -> CUDAFuture[Answer]:
            block = pack_wanted([get.wanted for get in gets])
            return self.call(together.deadline, _offload_calls.get, block)

        return begun(self.flow.send, min(PIECE, nbytes), send).then(
            lambda done: self._arrived(gets, together, done), executor=executors.inline
        )

    def _arrived(self, gets: list[Get], together: Pack, done: CUDAFuture[Answer]) -> None:
        try:
            again, came = opened(gets, done.value())
        except BaseException as e:
            without_frame(e)
            again, came = [], [(get, e) for get in gets]
        together.end()
        taken = [(get, what) for get, what in came if together.take(get)]
        self._gets.add([(_GUESS, replace(get, is_over=False)) for get in again if together.take(get)])
        with torch.inference_mode(False):  # whatever the thread is in that has asked
            for get, what in taken:
                if isinstance(what, BaseException):
                    get.fail(what)
                    continue
                try:
                    get.arrived(*what)
                except Exception as e:  # the others have arrived all the same
                    get.fail(e)


class _PutRequest:
    """A request of small tensors.

    Its functions are methods of the transport: functions that refer to each other would keep the tensors until the next
    garbage collection.
    """

    def __init__(self, puts: list[Put]) -> None:
        self.sent = puts  # those of them that are sent
        self.data: torch.Tensor | None = None  # the buffer, once they have been copied
        self.block = b""  # their headers


def _ordered(value: T, after: Sequence[CUDAFuture[Any]]) -> CUDAFuture[T]:
    """Return a value that comes after the device work of some futures, which are complete."""
    return gather(*after).then(lambda done: (done.value(), value)[1], executor=executors.inline)


def ignore(future: CUDAFuture[Any]) -> None:
    """Look at what comes of something, and say nothing."""
    future.add_done_callback(lambda done: done.exception(), executor=executors.inline)
