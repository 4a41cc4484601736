"""The way between a client and an offload service: tensors become requests, and answers futures.

::

    write ──► alone, piece by piece ──► flow ──► put
          └─► small: packer ────────────┘
    read  ──► small: packer ──► flow ──► get ──► the other pieces ──► flow ──► get
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cudafuture import CUDAFuture, collect_all, executors
from cudafuture.errors import ChecksumError, NotFoundError, WorkerLostError
from rpc_ext import _offload_calls
from rpc_ext._offload_calls import Answer, Terms
from rpc_ext._offload_flow import Flow, Packer
from rpc_ext._offload_source import Source
from rpc_ext._offload_target import Target
from rpc_ext._offload_wire import (
    MOST_HEADERS,
    PIECE,
    WHOLE,
    Header,
    Wanted,
    checksum_of,
    pack,
    pack_wanted,
    unpack,
)
from rpc_ext.calls import rpc_async

__all__ = ["Deadline", "Transport", "ignore"]

_THREAD = executors.callback_thread
_PACK = 4 << 20  # bytes of small tensors that travel together
_SMALL = 1 << 20  # bytes from which on a tensor travels alone
_LINE = 64  # bytes: what small tensors of one request lie at


@dataclass(frozen=True)
class Deadline:
    """When an operation has to have ended.

    What waits for room goes in the order in which it was asked for, and all have as much time; what is under way ends
    by its own deadline. So whoever waits has its turn, or is over, no later than at its own: no clock is watched here.
    """

    seconds: float  # that the operation was given; 0: no limit
    at: float  # time.monotonic()

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the one that is so many seconds from now."""
        return cls(seconds, time.monotonic() + seconds)

    def left(self, worker: str) -> float:
        """Return the seconds that are left, for a request; 0: no limit.

        Raises:
            TimeoutError: there are none.
        """
        if not self.seconds:
            return 0.0
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"worker {worker!r} took more than {self.seconds:g} s; it had no room for this so far")
        return left


@dataclass(eq=False)
class _Put:
    """A small tensor on its way there."""

    header: Header
    data: torch.Tensor  # bytes
    source: Source
    deadline: Deadline
    future: CUDAFuture[int] = field(default_factory=lambda: CUDAFuture(executor=_THREAD))


@dataclass(eq=False)
class _Get:
    """A piece on its way here: the bytes arrive with their header."""

    wanted: Wanted
    nbytes: int | None  # of it; None: not known
    deadline: Deadline
    future: CUDAFuture[tuple[Header, torch.Tensor]] = field(default_factory=lambda: CUDAFuture(executor=_THREAD))


class Transport:
    """What a client sends goes through here.

    Args:
        worker: whose service it is; name: of that.
        terms: what the client was given when it began.
    """

    def __init__(self, worker: str, name: str, terms: Terms) -> None:
        self._worker, self._name, self._token = worker, name, terms.token
        self.flow = Flow(terms.window)
        self._puts: Packer[_Put] = Packer(MOST_HEADERS, _PACK, self._send_puts)
        self._gets: Packer[_Get] = Packer(MOST_HEADERS, _PACK, self._send_gets)

    def call(self, deadline: Deadline, fn: Callable[..., Any], *args: Any) -> CUDAFuture[Any]:
        """Call a function of the service."""
        return rpc_async(self._worker, fn, (self._name, self._token, *args), timeout=deadline.left(self._worker))

    # ---- there

    def write(self, header: Header, source: Source, deadline: Deadline) -> CUDAFuture[int]:
        """Write a tensor, which stays unchanged until the source is released. Gives how many bytes it has."""
        if header.nbytes < _SMALL:
            return source.piece(0, header.nbytes).then_async(
                lambda done: self._write_small(_Put(header, done.value(), source, deadline)), executor=executors.inline
            )
        if header.pieces > 1:
            header = replace(header, upload=secrets.token_bytes(len(WHOLE)))
        parts = [self._send_piece(header, source, i, deadline) for i in range(header.pieces)]
        return collect_all(parts).then(lambda done: self._written(header, done.value(), deadline), executor=_THREAD)

    def _write_small(self, put: _Put) -> CUDAFuture[int]:
        self._puts.add(put.header.nbytes, put)
        return put.future

    def _send_piece(self, header: Header, source: Source, i: int, deadline: Deadline) -> CUDAFuture[None]:
        at = i * PIECE
        length = min(PIECE, header.nbytes - at)

        def send(done: CUDAFuture[torch.Tensor]) -> CUDAFuture[Answer]:
            data = done.value()
            block = pack([replace(header, piece=i, length=length, checksum=checksum_of(data))])
            return self.call(deadline, _offload_calls.put, block, data)

        sent = self.flow.send(length, lambda: source.piece(at, length).then_async(send, executor=executors.inline))
        return sent.then(lambda done: done.value().expect_success(), executor=_THREAD)

    def _written(self, header: Header, parts: list[CUDAFuture[None]], deadline: Deadline) -> int:
        errors = [error for part in parts if (error := part.exception()) is not None]
        if not errors:
            return header.nbytes
        if header.pieces > 1 and not isinstance(errors[0], WorkerLostError):
            ignore(self.call(Deadline.after(deadline.seconds), _offload_calls.give_up, header.upload))
        raise errors[0]

    def _send_puts(self, puts: list[_Put]) -> CUDAFuture[None]:
        """Send small tensors together."""
        places: list[int] = []
        end = 0
        for put in puts:
            places.append(-(-end // _LINE) * _LINE)
            end = places[-1] + put.header.nbytes

        def send() -> CUDAFuture[Answer]:
            data = torch.empty(end, dtype=torch.uint8)
            headers = []
            for put, at in zip(puts, places, strict=True):
                into = data[at : at + put.header.nbytes]
                into.copy_(put.data)
                headers.append(replace(put.header, at=at, length=put.header.nbytes, checksum=checksum_of(into)))
                put.source.release()
            return self.call(puts[-1].deadline, _offload_calls.put, pack(headers), data)

        def ended(done: CUDAFuture[Answer]) -> None:
            error = done.exception()
            failures = {} if error is not None else dict(done.value().failures)
            for i, put in enumerate(puts):
                failure = error or failures.get(i)
                if failure is None:
                    put.future.set_result(put.header.nbytes)
                else:
                    put.future.set_exception(failure)

        return self.flow.send(end, send).then(ended, executor=_THREAD)

    # ---- here

    def read(self, key: str, target: Target, deadline: Deadline, gone: bytes | None = None) -> CUDAFuture[torch.Tensor]:
        """Read a tensor; once more where it was replaced meanwhile. `gone`: the upload whose pieces are not there."""

        def first(done: CUDAFuture[tuple[Header, torch.Tensor]]) -> CUDAFuture[torch.Tensor]:
            header, data = done.value()
            if header.upload == gone:
                raise NotFoundError(f"key {key!r}: one of its pieces is not there")
            target.expect(header)
            if header.pieces == 1:
                return target.whole(header, data)
            return self._read_on(header, data, target, deadline)

        return self._fetch(_Get(Wanted(key), target.nbytes, deadline)).then_async(first, executor=_THREAD)

    def _read_on(
        self, header: Header, data: torch.Tensor, target: Target, deadline: Deadline
    ) -> CUDAFuture[torch.Tensor]:
        """Fetch the other pieces; from the first one on again where the key was written again meanwhile."""
        assembly = target.assemble(header)

        def fill(done: CUDAFuture[tuple[Header, torch.Tensor]]) -> CUDAFuture[object]:
            piece, data = done.value()
            return assembly.fill(piece.piece * PIECE, data)

        def ended(done: CUDAFuture[list[CUDAFuture[object]]]) -> CUDAFuture[torch.Tensor]:
            errors = [error for part in done.value() if (error := part.exception()) is not None]
            if any(isinstance(error, NotFoundError) for error in errors):
                return self.read(header.key, target, deadline, header.upload)
            if errors:
                raise errors[0]
            return assembly.finish()

        parts = [assembly.fill(0, data)]
        for i in range(1, header.pieces):
            get = _Get(Wanted(header.key, header.upload, i), min(PIECE, header.nbytes - i * PIECE), deadline)
            parts.append(self._fetch(get).then_async(fill, executor=_THREAD))
        return collect_all(parts).then_async(ended, executor=_THREAD)

    def _fetch(self, get: _Get) -> CUDAFuture[tuple[Header, torch.Tensor]]:
        """Fetch a piece: its header and its bytes."""
        if get.nbytes is not None and get.nbytes >= _SMALL:
            self._send_gets([get])
        else:
            self._gets.add(get.nbytes or 0, get)
        return get.future

    def _send_gets(self, gets: list[_Get]) -> CUDAFuture[None]:
        sizes = [min(PIECE, PIECE if get.nbytes is None else get.nbytes) for get in gets]
        block = pack_wanted([get.wanted for get in gets])
        call = self.flow.send(min(PIECE, sum(sizes)), lambda: self.call(gets[-1].deadline, _offload_calls.get, block))
        return call.then(lambda done: self._arrived(gets, done), executor=_THREAD)

    def _arrived(self, gets: list[_Get], done: CUDAFuture[Answer]) -> None:
        try:
            answer = done.value()
            failures = dict(answer.failures)
            left = set(answer.left)
            headers = iter([] if answer.data is None or not answer.block else unpack(answer.block, answer.data.numel()))
        except Exception as e:
            for get in gets:
                get.future.set_exception(e)
            return
        for i, get in enumerate(gets):
            if i in left:
                self._gets.add(0, get)
            elif i in failures:
                get.future.set_exception(failures[i])
            else:
                header = next(headers)
                assert answer.data is not None
                data = answer.data[header.at : header.at + header.length]
                if header.checksum != checksum_of(data):
                    get.future.set_exception(ChecksumError("the bytes that have come are not those that were sent"))
                else:
                    get.future.set_result((header, data))


def ignore(future: CUDAFuture[Any]) -> None:
    """Look at what comes of something, and say nothing."""
    future.add_done_callback(lambda done: done.exception(), executor=_THREAD)
