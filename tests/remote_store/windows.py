"""A client's window for tests, with a channel of the test's own: it keeps the messages, and the test answers them."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from cudafuture import CUDAFuture, timer
from cudafuture.io import digest
from remote_store import messages as wire
from rpc_ext import _C
from rpc_ext.store._errors import named

HOUR = 3600.0


class Message:
    """A message that a window has sent."""

    def __init__(self, body: bytes, tensors: list[torch.Tensor], listener: Any) -> None:
        self.request = wire.parse_request(body, tensors)
        self.tensors = tensors
        self.listener = listener

    @property
    def verb(self) -> int:
        return self.request.verb

    @property
    def entries(self) -> list[Any]:
        return self.request.entries

    @property
    def keys(self) -> list[str]:
        return [entry.key for entry in self.entries]

    def answer(self, errors: Mapping[int, BaseException] | None = None) -> None:
        """Answer a write or a deletion."""
        self.listener.answered(*wire.pack_answer(self.verb, len(self.entries), errors))

    def give(self, *tensors: torch.Tensor, kept: tuple[int, int] | None = None) -> None:
        """Answer a read with tensors, and their digests or the digest and seed of a store."""
        found, pieces, at = [], [], 0
        for tensor in tensors:
            n = tensor.nbytes
            sent = None if kept else digest(tensor)
            found.append(wire.Found(tensor.dtype, tuple(tensor.shape), n, at, n, sent, kept))
            step = -(-n // wire.LINE) * wire.LINE
            pieces.append(F.pad(tensor.reshape(-1).view(torch.uint8), (0, step - n)))
            at += step
        data = torch.cat(pieces)
        self.listener.answered(*wire.pack_answer(self.verb, len(tensors), {}, found, data))


class Channel:
    """A channel that keeps messages instead of sending them."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        """one entry for each message in ``sent``"""
        self.refusals = 0  # of the next messages
        self.error: Exception | None = None

    def send(self, body: bytes, tensors: list[torch.Tensor], seconds: float, listener: Any) -> None:
        if self.error is not None:
            raise self.error
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError("no room")
        self.sent.append(Message(body, tensors, listener))
        self.arrived.put(None)


class Client:
    """A window with a channel of the test's own, and the operations of its client."""

    def __init__(self, size: int = 1 << 30, seconds: float = 0.0) -> None:
        self.channel = Channel()
        self.window = _C.StoreWindow(
            self.channel, "store", bytes(wire.TOKEN), "there", size, seconds, named, timer.schedule
        )

    @property
    def messages(self) -> list[Message]:
        return self.channel.sent

    def write(
        self, key: str, tensor: torch.Tensor, digest: int | None = None, *, written: torch.Tensor | None = None
    ) -> CUDAFuture[int]:
        return self.window.write([key], [tensor], 0, [digest], written)

    def read(
        self, *keys: str, outs: list[torch.Tensor] | None = None, digests: torch.Tensor | None = None
    ) -> CUDAFuture[list[torch.Tensor]]:
        return self.window.read(list(keys), outs, None, 0, True, digests)

    def delete(self, key: str) -> CUDAFuture[None]:
        return self.window.delete([key])

    def flush(self, *, with_reads: bool) -> CUDAFuture[None]:
        return self.window.flush(with_reads)

    def statistics(self) -> tuple[int, int, int, int]:
        """Return the bytes in flight, the waiting bytes, the size of the window, and the number of repeated reads."""
        found = self.window.statistics()
        return found["in_flight"], found["waiting"], found["window"], found["repeated"]

    def end_time(self) -> None:
        """Let all requests exceed their deadlines."""
        self.window.look(time.perf_counter() + 2 * HOUR)
