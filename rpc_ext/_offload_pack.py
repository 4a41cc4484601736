"""What travels together, and how long each of it may take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cudafuture.errors import ChecksumError
from cudafuture.storage import digests
from rpc_ext import _minder
from rpc_ext._memory import alone, arrived
from rpc_ext._offload_calls import Answer
from rpc_ext._offload_source import Source
from rpc_ext._offload_wire import Header, Wanted, unpack

__all__ = ["Deadline", "Get", "Pack", "Put", "opened", "packed", "room_for"]

_SLACK = 0.1  # seconds by which the times of what travels together may differ without anybody minding
_SOON = 0.001  # seconds: the least that is waited, since 0 is no limit
_LINE = 64  # bytes: what small tensors of one request lie at
_GAP = torch.zeros(_LINE, dtype=torch.uint8)


class Deadline(NamedTuple):
    """When an operation has to have ended.

    What waits for room goes in the order in which it was asked for, and all have as much time; what is under way ends
    by its own deadline. So whoever waits alone has its turn, or is over, no later than at its own, without a clock.
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
class Put:
    """A small tensor on its way there."""

    header: Header
    data: torch.Tensor  # bytes
    source: Source
    expected: int | None  # the digest that the bytes must have
    deadline: Deadline
    ended: Callable[[BaseException | None], None]
    is_over: bool = False

    def fail(self, error: BaseException) -> None:
        self.ended(error)


@dataclass(eq=False)
class Get:
    """A piece on its way here: the bytes arrive with their header."""

    wanted: Wanted
    nbytes: int | None  # of it; None: not known
    deadline: Deadline
    arrived: Callable[[Header, torch.Tensor], None]
    fail: Callable[[BaseException], None]
    is_over: bool = False


class Pack:
    """Small things that travel together, of which each has its own time.

    What is written is ended by this only when it has been copied: its tensor may be overwritten then.
    """

    def __init__(self, things: Sequence[Put] | Sequence[Get], worker: str) -> None:
        self._things, self._worker = things, worker
        self._lock = threading.Lock()  # guards who is over; a leaf
        self.is_copied = not isinstance(things[0], Put)
        """whether what is written has been copied"""
        ends = [thing.deadline.at for thing in things if thing.deadline.seconds]
        self.deadline = max((thing.deadline for thing in things), key=lambda d: d.at if d.seconds else math.inf)
        self._is_minded = bool(ends) and (not self.deadline.seconds or min(ends) < self.deadline.at - _SLACK)
        if self._is_minded:
            _minder.mind(self, min(ends) - time.monotonic() + time.perf_counter())

    def expiries(self, sent: Sequence[Put]) -> tuple[float, ...]:
        """Return when the change of each key expires, on this process's clock; () where all have the same deadline."""
        if not self._is_minded:
            return ()
        return tuple(put.deadline.at if put.deadline.seconds else 0.0 for put in sent)

    def take(self, thing: Put | Get) -> bool:
        """Say whether it is this one's to end a thing: it has not been ended yet."""
        with self._lock:
            was_over, thing.is_over = thing.is_over, True
        return not was_over

    def leaving(self) -> list[Put]:
        """Return what is to be copied now: what still has time. The rest has ended."""
        late = self._end_late()
        return [thing for thing in self._things if isinstance(thing, Put) and thing not in late]

    def seconds(self) -> float:
        """Return the seconds until the first that is not over is late; 0: no limit."""
        ends = [thing.deadline.at for thing in self._things if thing.deadline.seconds and not thing.is_over]
        return max(min(ends) - time.monotonic(), _SOON) if ends else 0.0

    def end(self) -> None:
        """Mind them no more."""
        if self._is_minded:
            _minder.forget(self)

    def look(self, _: float) -> float | None:
        """End those whose time is over before that of the others."""
        if not self.is_copied:
            return time.perf_counter() + _SLACK
        self._end_late()
        left = [thing.deadline.at for thing in self._things if not thing.is_over and thing.deadline.seconds]
        return min(left) - time.monotonic() + time.perf_counter() if left else None

    def _end_late(self) -> list[Put | Get]:
        """End those whose time is over, and return them."""
        late: list[Put | Get] = []
        for thing in self._things:
            try:
                thing.deadline.left(self._worker)
            except TimeoutError as e:
                late.append(thing)
                if self.take(thing):
                    thing.fail(e)
        return late


def room_for(puts: Sequence[Put]) -> int:
    """Return the bytes of a buffer for small tensors."""
    return sum(math.ceil(put.header.nbytes / _LINE) * _LINE for put in puts)


def packed(puts: list[Put], buffer: torch.Tensor) -> tuple[torch.Tensor, list[Header]]:
    """Return the bytes of small tensors one behind the other, in a buffer, and their headers; release their sources."""
    parts, places = [], []
    end = 0
    for put in puts:
        gap = -end % _LINE
        if gap:
            parts.append(_GAP[:gap])
        places.append(end + gap)
        parts.append(put.data)
        end = places[-1] + put.header.nbytes
    data = alone(buffer, 0, end)
    torch.cat(parts, out=data)
    for put in puts:
        put.source.release()
    lengths = [put.header.nbytes for put in puts]
    sums = digests(data, list(zip(places, lengths, strict=True)))
    headers = [
        put.header._replace(at=at, length=length, checksum=checksum)
        for put, at, length, checksum in zip(puts, places, lengths, sums, strict=True)
    ]
    return data, headers


def opened(
    gets: list[Get], answer: Answer
) -> tuple[list[Get], list[tuple[Get, BaseException | tuple[Header, torch.Tensor]]]]:
    """Return what is to be asked for again, and what has come of the others.

    Raises:
        ValueError: that is no answer to what was asked for.
    """
    failures, left = dict(answer.failures), {*answer.left}
    data = arrived(answer.data)
    headers = unpack(answer.block, data.numel()) if answer.block else []
    if len(headers) != len([i for i in range(len(gets)) if i not in failures and i not in left]):
        raise ValueError(f"{len(gets)} pieces were asked for, and the answer has {len(headers)}")
    sums = digests(data, [(h.at, h.length) for h in headers])
    next_one = zip(headers, sums, strict=True)
    came: list[tuple[Get, BaseException | tuple[Header, torch.Tensor]]] = []
    for i, get in enumerate(gets):
        if i in failures:
            came.append((get, failures[i]))
        elif i not in left:
            header, found = next(next_one)
            if header.checksum == found:
                came.append((get, (header, data[header.at : header.at + header.length])))
            else:
                came.append((get, ChecksumError("the bytes that have come are not those that were sent")))
    return [gets[i] for i in range(len(gets)) if i in left], came
