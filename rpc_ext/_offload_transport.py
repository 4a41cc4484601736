"""The way between a client and an offload service: tensors become requests, and answers futures.

::

    write ──► alone, piece by piece ──► flow ──► put
          └─► small: packer ────────────┘
    fetch ──► small: packer ──► flow ──► get
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cudafuture import CUDAFuture, collect_all, executors
from cudafuture.errors import ChecksumError, WorkerLostError
from rpc_ext import _offload_calls
from rpc_ext._offload_calls import Answer, Terms
from rpc_ext._offload_flow import Flow, Packer
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

__all__ = ["Transport", "ignore"]

_THREAD = executors.callback_thread
_PACK = 4 << 20  # bytes of small tensors that travel together
_SMALL = 1 << 20  # bytes from which on a tensor travels alone
_LINE = 64  # bytes: what small tensors of one request lie at


@dataclass(eq=False)
class _Put:
    """A small tensor on its way there."""

    header: Header
    data: torch.Tensor  # bytes
    future: CUDAFuture[int]


@dataclass(eq=False)
class _Get:
    """A piece on its way here: the bytes arrive with their header."""

    wanted: Wanted
    nbytes: int | None  # of it; None: not known
    future: CUDAFuture[tuple[Header, torch.Tensor]] = field(default_factory=lambda: CUDAFuture(executor=_THREAD))


class Transport:
    """What a client sends goes through here.

    Args:
        worker: whose service it is; name: of that.
        terms: what the client was given when it began.
        timeout: seconds that each request has; None: as RPC says.
    """

    def __init__(self, worker: str, name: str, terms: Terms, timeout: float | None) -> None:
        self._worker, self._name, self._token, self._timeout = worker, name, terms.token, timeout
        self._flow = Flow(terms.window)
        self._puts: Packer[_Put] = Packer(MOST_HEADERS, _PACK, self._send_puts)
        self._gets: Packer[_Get] = Packer(MOST_HEADERS, _PACK, self._send_gets)

    def call(self, fn: Callable[..., Any], *args: Any) -> CUDAFuture[Any]:
        """Call a function of the service."""
        return rpc_async(self._worker, fn, (self._name, self._token, *args), timeout=self._timeout)

    # ---- there

    def write(self, header: Header, data: torch.Tensor) -> CUDAFuture[int]:
        """Write the bytes of a tensor, which stay unchanged until the future is done. Gives how many they are."""
        if header.nbytes < _SMALL:
            put = _Put(header, data, CUDAFuture(executor=_THREAD))
            self._puts.add(header.nbytes, put)
            return put.future
        if header.pieces > 1:
            header = replace(header, upload=secrets.token_bytes(len(WHOLE)))
        parts = [self._send_piece(header, data, i) for i in range(header.pieces)]
        return collect_all(parts).then(lambda done: self._written(header, done.value()), executor=_THREAD)

    def _send_piece(self, header: Header, data: torch.Tensor, i: int) -> CUDAFuture[None]:
        length = min(PIECE, header.nbytes - i * PIECE)

        def send() -> CUDAFuture[Answer]:
            piece = _alone(data, i * PIECE, length)
            block = pack([replace(header, piece=i, length=length, checksum=checksum_of(piece))])
            return self.call(_offload_calls.put, block, piece)

        return self._flow.send(length, send).then(lambda done: done.value().expect_success(), executor=_THREAD)

    def _written(self, header: Header, parts: list[CUDAFuture[None]]) -> int:
        errors = [error for part in parts if (error := part.exception()) is not None]
        if not errors:
            return header.nbytes
        if header.pieces > 1 and not isinstance(errors[0], WorkerLostError):
            ignore(self.call(_offload_calls.give_up, header.upload))
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
            return self.call(_offload_calls.put, pack(headers), data)

        def ended(done: CUDAFuture[Answer]) -> None:
            error = done.exception()
            failures = {} if error is not None else dict(done.value().failures)
            for i, put in enumerate(puts):
                failure = error or failures.get(i)
                if failure is None:
                    put.future.set_result(put.header.nbytes)
                else:
                    put.future.set_exception(failure)

        return self._flow.send(end, send).then(ended, executor=_THREAD)

    # ---- here

    def fetch(self, wanted: Wanted, nbytes: int | None) -> CUDAFuture[tuple[Header, torch.Tensor]]:
        """Fetch a piece, of so many bytes if that is known: its header and its bytes."""
        get = _Get(wanted, nbytes)
        if nbytes is not None and nbytes >= _SMALL:
            self._send_gets([get])
        else:
            self._gets.add(nbytes or 0, get)
        return get.future

    def _send_gets(self, gets: list[_Get]) -> CUDAFuture[None]:
        sizes = [min(PIECE, PIECE if get.nbytes is None else get.nbytes) for get in gets]
        call = self._flow.send(
            min(PIECE, sum(sizes)), lambda: self.call(_offload_calls.get, pack_wanted([get.wanted for get in gets]))
        )
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


def _alone(data: torch.Tensor, at: int, length: int) -> torch.Tensor:
    """Return bytes as a tensor whose storage has nothing else: torch's RPC copies what is a part of a storage."""
    if length == 0 or data.untyped_storage().nbytes() == length:
        return data[at : at + length]
    return torch.frombuffer(data.numpy().data, dtype=torch.uint8, count=length, offset=at)


def ignore(future: CUDAFuture[Any]) -> None:
    """Look at what comes of something, and say nothing."""
    future.add_done_callback(lambda done: done.exception(), executor=_THREAD)
