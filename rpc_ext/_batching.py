"""Small calls that travel together.

A batch has one message in flight at most. Calls that are made meanwhile wait, and go in the next one: so they start in
order, and the slower the other side is, the larger are its messages. (The idea is Nagle's, RFC 896.) While no message
is in flight, calls wait for others, but not for long.

The answer to a message contains the answers to all of its calls. A call whose answer may depend on a later call of the
batch must therefore travel alone: one of a function that returns a future, or one with RRefs, which their owners have
to confirm. It goes in a message of its own when the message before is answered, and the next message does not wait for
it.

A message has the caller's rank, a table of pickled functions, and for each call a pair: the place of the function in
the table, and the arguments, where these are plain values; else a payload of its own, and the number of its tensors. In
the answer there is for each call the value alone, where it is a plain one, or a payload and the number of its tensors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from cudafuture.errors import InvalidStateError
from rpc_ext import _staging, _timer
from rpc_ext._call import Call
from rpc_ext._codec import ATOMS, Direct, Encoded, Kind, decode, encode, has_rrefs, kind_of
from rpc_ext._destination import Destination
from rpc_ext._functions import is_async
from rpc_ext.session import current

__all__ = ["batch", "flush", "open_to"]

FEWEST_CALLS = 32
"""calls that are worth a message, where none is under way: others may follow"""
LONGEST_PAUSE = 1e-3
"""seconds that fewer calls wait for others"""
MOST_CALLS = 256
"""calls in one message"""
MOST_FUNCTIONS = 64
"""places in the table"""
MOST_BYTES = 1 << 20
"""bytes of payload in one message, beside the call that exceeds them"""

_open: ContextVar[tuple[batch, ...]] = ContextVar("rpc_ext.batches", default=())


def open_to(destination: Destination) -> batch | None:
    """Return the batch to a worker in whose context this is, if any."""
    for batch in reversed(_open.get()):
        if batch.takes_calls_to(destination):
            return batch
    return None


def flush() -> None:
    """Send what waits in the batches in whose context this is: somebody is going to wait for some of it."""
    for batch in _open.get():
        batch.flush()


class batch:  # a context manager
    """A context in which this thread's calls to one worker travel together, in few messages.

    Each ``rpc_async`` still has its own future, timeout and error. The other worker runs the calls one after the other,
    in the order in which they were made. They are sent within a millisecond, or as soon as the message before them is
    answered. A message is answered when all of its calls have returned and the tensors of their results have been
    copied to the host, if they have to be. Leaving the context waits for no call: wait for the futures.

    Two kinds of calls go in messages of their own: those of a function that is decorated with ``async_execution``, ours
    or torch's, and those with RRefs among their arguments, such as methods of an RRef. Such a call is sent when the
    calls before it have been answered. The calls behind it do not wait for it, and may begin before it does.

    Args:
        to: the worker: name, rank or WorkerInfo.

    Raises:
        InvalidStateError: RPC has not begun; or the context is entered while it is in use.
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
        self._thread: int | None = None  # whose calls it takes
        self._functions: list[bytes] = []  # the table, pickled
        self._places: dict[Any, int] = {}  # in the table
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._calls: list[_Waiting] = []
        self._bytes = 0
        self._in_flight: _Message | None = None
        self._wanted = False  # True: send the waiting calls as soon as no message is in flight
        self._sends = False  # whether some thread is at it
        self._due = math.inf  # when the timer thread looks next

    def __enter__(self) -> batch:
        if self._thread is not None:
            raise InvalidStateError("the batch is in use: make another one")
        self._thread = threading.get_ident()
        _open.set((*_open.get(), self))
        self._destination.batches.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread = None
        _open.set(tuple(other for other in _open.get() if other is not self))
        self._destination.batches.discard(self)
        self.flush()

    def takes_calls_to(self, destination: Destination) -> bool:
        """Return whether this thread's calls to a worker belong in here. Callbacks carry the context along."""
        return destination is self._destination and self._thread == threading.get_ident()

    # ---- calls come in

    def direct(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Direct | None:
        """Return how a call can travel without a payload of its own, if it can."""
        if kwargs or is_async(fn):
            return None
        for arg in args:
            if type(arg) not in ATOMS:
                return None
        place = self._places.get(fn) if type(fn) is FunctionType else None
        if place is None:
            if not _is_plain_function(fn) or len(self._functions) == MOST_FUNCTIONS:
                return None
            place = self._places.get(fn)
        if place is None:
            pickled = encode(Kind.VALUE, fn).payload
            place = self._places[fn] = len(self._functions)
            self._functions.append(pickled)
        return Direct(place, tuple(args))

    def add(self, call: Call, fn: Any, how: Encoded | Direct) -> None:
        """Let a call travel with the others, or alone in its turn, sent by any thread."""
        goes_alone = False
        if isinstance(how, Encoded):
            goes_alone = is_async(fn) or has_rrefs(how.payload)
            if how.tensors:
                how.earlier = _staging.on_streams(how.tensors)
        with self._lock:
            first = not self._calls
            self._calls.append(_Waiting(call, how, goes_alone))
            self._bytes += how.size
            self._wanted = self._wanted or goes_alone
            worth = self._wanted or self._are_worth_a_message()
            due = call.started + LONGEST_PAUSE if first and not worth else call.deadline
            sooner = due < self._due
            if sooner:
                self._due = due
        if worth:
            self._go_on()
        if sooner:
            _timer.schedule(self, due)

    def flush(self) -> None:
        """Send the calls that wait, at once or as soon as the message in flight is answered.

        >>> from rpc_ext import rpc_async
        >>> with batch("me") as calls:
        ...     power = rpc_async("me", pow, (2, 10))
        ...     calls.flush()
        ...     power.wait()
        1024
        """
        with self._lock:
            self._wanted = True
        self._go_on()

    def look(self, now: float) -> float | None:
        """Send what has waited long enough, and fail what is overdue. called by the timer thread."""
        with self._lock:
            self._due = math.inf
            self._wanted = self._wanted or bool(self._calls)
            calls = self._pending_calls()
        for call in calls:
            if call.deadline <= now:
                call.expire()
        self._go_on()
        with self._lock:
            self._due = min([self._due, *(call.deadline for call in self._pending_calls() if not call.settled)])
            return self._due if self._due < math.inf else None

    def _pending_calls(self) -> list[Call]:
        """Return the calls that wait, and those of the message in flight. Called under the lock."""
        in_flight = self._in_flight.calls if self._in_flight is not None else []
        return [*in_flight, *(waiting.call for waiting in self._calls)]

    # ---- messages are sent, one at a time

    def answered(self) -> None:
        """Send the next message: the one in flight was answered, or has failed."""
        with self._lock:
            self._in_flight = None
        self._go_on()

    def _go_on(self) -> None:
        """Send messages, until one is in flight. A message that fails at once calls this again: hence a loop."""
        with self._lock:
            if self._sends:
                return  # the thread that does looks again before it stops
            self._sends = True
        while True:
            with self._lock:
                message = self._next() if self._wanted or self._are_worth_a_message() else None
                if message is None:
                    self._sends = False
                    return
            message.send(self._session.agent, self._session.rank, self._destination)

    def _are_worth_a_message(self) -> bool:
        return len(self._calls) >= FEWEST_CALLS or self._bytes >= MOST_BYTES

    def _next(self) -> _Message | _Alone | None:
        """Take the calls of the next message. Called under the lock."""
        if self._in_flight is not None or not self._calls:
            return None
        taken = self._calls[: self._length_of_next()]
        del self._calls[: len(taken)]
        self._bytes -= sum(waiting.how.size for waiting in taken)
        self._wanted = self._wanted and bool(self._calls)
        if taken[0].goes_alone:
            return _Alone(taken[0])
        self._in_flight = _Message(self, taken, self._functions)
        return self._in_flight

    def _length_of_next(self) -> int:
        """Return how many of the calls that wait go in the next message."""
        if self._calls[0].goes_alone:
            return 1
        count = size = 0
        for waiting in self._calls[:MOST_CALLS]:
            if size >= MOST_BYTES or waiting.goes_alone:
                break
            count += 1
            size += waiting.how.size
        return count


def _is_plain_function(fn: Any) -> bool:
    """Return whether a function is found by its name: a method of an object brings that along."""
    if type(fn) is BuiltinFunctionType:
        return fn.__self__ is None or isinstance(fn.__self__, ModuleType)
    return type(fn) is FunctionType


class _Waiting(NamedTuple):
    """A call that waits to be sent."""

    call: Call
    how: Encoded | Direct
    goes_alone: bool


class _Alone:
    """A message with one call, which the agent tells of the answer."""

    def __init__(self, waiting: _Waiting) -> None:
        assert isinstance(waiting.how, Encoded)
        self._call, self._encoded = waiting.call, waiting.how

    def send(self, agent: Any, rank: int, destination: Destination) -> None:
        """Send the call, or fail it."""
        if self._call.is_over():
            return
        earlier = self._encoded.earlier
        try:
            with _staging.streams_after([] if earlier is None else [earlier]):
                self._call.send(self._encoded)
        except BaseException as e:
            self._call.fail(e)


class _Message:
    """Calls that travel together; the agent tells it of the answer."""

    def __init__(self, of: batch, waiting: list[_Waiting], functions: list[bytes]) -> None:
        self._of = of
        self._functions = functions
        self.calls = [each.call for each in waiting]
        self._how = [each.how for each in waiting]

    def send(self, agent: Any, rank: int, destination: Destination) -> None:
        """Send the calls, or fail them."""
        going = [(call, how) for call, how in zip(self.calls, self._how, strict=True) if not call.is_over()]
        self.calls = [call for call, _ in going]
        self._how = [how for _, how in going]
        if not self.calls:
            self._of.answered()
            return
        try:
            self._send(agent, rank, destination)
        except BaseException as e:
            self._fail(e)

    def _send(self, agent: Any, rank: int, destination: Destination) -> None:
        parts = [(h.index, h.args) if isinstance(h, Direct) else (h.payload, len(h.tensors)) for h in self._how]
        table = {how.index: self._functions[how.index] for how in self._how if isinstance(how, Direct)}
        payload = encode(Kind.BATCH, (rank, table, parts)).payload
        encoded = [how for how in self._how if isinstance(how, Encoded)]
        tensors = [tensor for e in encoded for tensor in e.tensors]
        targets = [t for e in encoded for t in e.targets or [None] * len(e.tensors)]

        def staged(tensors: list[torch.Tensor] | None, error: BaseException | None) -> None:
            if (remaining := self._remaining()) < 0:
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
        with _staging.streams_after(earlier):
            if any(targets):
                _staging.to_host(tensors, targets, self.calls[-1].priority, self._remaining(), staged)
            else:
                staged(tensors, None)

    def _remaining(self) -> float:
        """Return the seconds that the engine is given for all of them. A call with fewer of its own fails by itself."""
        remaining = [call.remaining() for call in self.calls]
        return 0.0 if 0 in remaining else max(remaining)

    def _fail(self, error: BaseException) -> None:
        for call in self.calls:
            call.fail(error)
        self._of.answered()

    # ---- called by the agent, once

    def on_error(self, kind: int, message: str) -> None:
        """Take what the engine says."""
        for call in self.calls:
            call.on_error(kind, message)
        self._of.answered()

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        """Take the answers."""
        self._of.answered()  # first: the other side has something to do while this one looks at what it has done
        try:
            self._distribute(payload, tensors)
        except BaseException as e:
            for call in self.calls:
                call.fail(e)  # unless it has its answer

    def _distribute(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        if kind_of(payload) != Kind.BATCH:  # the callee could not even take the message apart
            for call in self.calls:
                call.on_reply(payload, tensors)
            return
        at = 0
        for call, part in zip(self.calls, decode(payload, []), strict=True):
            if type(part) is not tuple:
                call.on_value(part)
                continue
            payload, count = part
            call.on_reply(payload, tensors[at : at + count] if count else [])
            at += count
