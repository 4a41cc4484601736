"""Small calls that travel together.

A batch has one message under way at most. Calls that are made meanwhile wait, and go in the next one: so they start in
order, and the slower the other side is, the larger are its messages. (The idea is Nagle's, RFC 896.)

A message has the caller's rank, a table of functions, and for each call a pair: the place of the function in the table,
and the arguments, where these are plain values; else a payload of its own, and the number of its tensors. In the answer
there is for each call the value alone, where it is a plain one, or a payload and the number of its tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, TracebackType
from typing import Any

import torch

from rpc_ext import _staging
from rpc_ext._call import Call
from rpc_ext._codec import ATOMS, Direct, Encoded, Kind, decode, encode, kind_of
from rpc_ext._destination import Destination
from rpc_ext.session import current

__all__ = ["batch", "flush", "open_to"]

FEWEST_CALLS = 32
"""calls that are worth a message, where none is under way: others may follow"""
MOST_CALLS = 256
"""calls in one message"""
MOST_FUNCTIONS = 64
"""places in the table"""
MOST_BYTES = 1 << 20
"""bytes of payload in one message, beside the call that exceeds them"""


class _Open(threading.local):
    def __init__(self) -> None:
        self.batches: dict[Destination, batch] = {}


_open = _Open()


def open_to(destination: Destination) -> batch | None:
    """Return the batch that this thread has opened to a worker, if any."""
    batches = _open.batches
    return batches.get(destination) if batches else None


def flush() -> None:
    """Send what waits in the batches that this thread has opened: it is going to wait for some of it."""
    for batch in _open.batches.values():
        batch.flush()


class batch:  # a context manager
    """A context in which this thread's calls to one worker travel together, in few messages.

    Each ``rpc_async`` still has its own future, timeout and error. The calls are begun on the other side one after the
    other, in the order in which they were made; one that returns a future there does not hold up the next. They are on
    their way at the latest when the context is left, which waits for none of them: wait for the futures.

    Args:
        to: the worker: name, rank or WorkerInfo.

    Raises:
        InvalidStateError: RPC has not begun.
        ValueError: no such worker.

    >>> from rpc_ext import rpc_async
    >>> with batch("me"):
    ...     squares = [rpc_async("me", pow, (i, 2)) for i in range(4)]
    >>> [square.wait() for square in squares]
    [0, 1, 4, 9]
    """

    def __init__(self, to: Any) -> None:
        self._session = current()
        self._destination = self._session.destination(to)
        self._outer: batch | None = None
        self.functions: list[Any] = []  # the table
        self._places: dict[Any, int] = {}  # in the table
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._calls: list[tuple[Call, Encoded | Direct]] = []
        self._bytes = 0
        self._under_way = False
        self._wanted = False  # whether what waits is to be sent as soon as it may

    def __enter__(self) -> batch:
        self._outer = _open.batches.get(self._destination)
        _open.batches[self._destination] = self
        self._destination.batches.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._outer is None:
            del _open.batches[self._destination]
        else:
            _open.batches[self._destination] = self._outer
        self._destination.batches.discard(self)
        self.flush()

    def direct(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Direct | None:
        """Return how a call can travel without a payload of its own, if it can."""
        if kwargs:
            return None
        for arg in args:
            if type(arg) not in ATOMS:
                return None
        if type(fn) is not FunctionType and type(fn) is not BuiltinFunctionType:
            return None
        place = self._places.get(fn)
        if place is None:
            if len(self.functions) == MOST_FUNCTIONS:
                return None
            encode(Kind.VALUE, fn)  # raises here what it would raise later
            place = self._places[fn] = len(self.functions)
            self.functions.append(fn)
        return Direct(place, tuple(args))

    def add(self, call: Call, how: Encoded | Direct) -> None:
        """Let a call travel with the others, by whatever thread that sends them."""
        if isinstance(how, Encoded) and how.tensors:
            how.earlier = _staging.on_streams(how.tensors)
        with self._lock:
            self._calls.append((call, how))
            self._bytes += how.size
            message = self._next() if self._are_worth_a_message() else None
        self._send(message)

    def flush(self) -> None:
        """Send what waits, or see to it that it is sent as soon as the message under way is answered.

        >>> from rpc_ext import rpc_async
        >>> with batch("me") as calls:
        ...     power = rpc_async("me", pow, (2, 10))
        ...     calls.flush()
        ...     power.wait()
        1024
        """
        with self._lock:
            self._wanted = True
            message = self._next()
        self._send(message)

    def _answered(self) -> None:
        with self._lock:
            self._under_way = False
            message = self._next() if self._wanted or self._are_worth_a_message() else None
        self._send(message)

    def _are_worth_a_message(self) -> bool:
        return len(self._calls) >= FEWEST_CALLS or self._bytes >= MOST_BYTES

    def _next(self) -> _Message | None:
        """Take the calls of the next message, which share a timeout. Called under the lock."""
        if self._under_way or not self._calls:
            return None
        timeout = self._calls[0][0].timeout
        count = size = 0
        for call, how in self._calls[:MOST_CALLS]:
            if call.timeout != timeout or size >= MOST_BYTES:
                break
            count += 1
            size += how.size
        taken, self._calls = self._calls[:count], self._calls[count:]
        self._bytes -= size
        self._wanted = self._wanted and bool(self._calls)
        self._under_way = True
        return _Message(self, taken)

    def _send(self, message: _Message | None) -> None:
        if message is not None:
            message.send(self._session.agent, self._session.rank, self._destination)


class _Message:
    """Calls that travel together; the agent tells it of the answer."""

    def __init__(self, of: batch, calls: list[tuple[Call, Encoded | Direct]]) -> None:
        self._of = of
        self._calls = [call for call, _ in calls]
        self._how = [how for _, how in calls]

    def send(self, agent: Any, rank: int, destination: Destination) -> None:
        parts = [(h.index, h.args) if isinstance(h, Direct) else (h.payload, len(h.tensors)) for h in self._how]
        payload = encode(Kind.BATCH, (rank, self._of.functions, parts)).payload
        encoded = [how for how in self._how if isinstance(how, Encoded)]
        tensors = [tensor for e in encoded for tensor in e.tensors]
        targets = [t for e in encoded for t in e.targets or [None] * len(e.tensors)]

        def staged(tensors: list[torch.Tensor] | None, error: BaseException | None) -> None:
            remaining = self._calls[-1].remaining()  # made last: none fails before its time
            if remaining < 0:
                self.on_error(1, "")
            elif tensors is None:
                assert error is not None
                self._fail(error)
            else:
                try:
                    agent.call(destination.rank, payload, tensors, remaining, self)
                except Exception as e:
                    self.on_error(0, str(e))

        earlier = [e.earlier for e in encoded if e.earlier is not None]
        if not earlier:
            staged(tensors, None)
            return
        try:
            with _staging.streams_after(earlier):
                if any(targets):
                    last = self._calls[-1]
                    _staging.to_host(tensors, targets, last.priority, last.remaining(), staged)
                else:
                    staged(tensors, None)
        except Exception as e:  # of a device that is lost, say
            self._fail(e)

    def _fail(self, error: BaseException) -> None:
        for call in self._calls:
            call.fail(error)
        self._of._answered()

    def on_error(self, kind: int, message: str) -> None:
        for call in self._calls:
            call.on_error(kind, message)
        self._of._answered()

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        self._of._answered()  # first: the other side has something to do while this one looks at what it has done
        if kind_of(payload) != Kind.BATCH:  # the callee could not even take the message apart
            for call in self._calls:
                call.on_reply(payload, tensors)
            return
        at = 0
        for call, part in zip(self._calls, decode(payload, []), strict=True):
            if type(part) is not tuple:
                call.on_value(part)
                continue
            payload, count = part
            call.on_reply(payload, tensors[at : at + count] if count else [])
            at += count
