"""Batches: small calls that share messages.

A batch has at most one message in flight. Calls made in the meantime wait for the next message. So they start in
order, and a slower callee gets larger messages (J. Nagle, RFC 896). While no message is in flight, calls wait at most a
millisecond for further calls.

The reply to a message contains the replies to all of its calls. So a call whose reply may depend on a later call has a
message of its own: a call of a function that returns a future, or a call with RRefs, which their owners must confirm.
That message is sent after the reply to the message before it; the next message does not wait for it.

A message has the caller's rank, a table of pickled functions, and a pair for each call: the index of the function in
the table and the arguments, if these are plain values; otherwise a payload and the number of its tensors. The reply
has for each call a plain value, or a payload and the number of its tensors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from cudafuture import timer
from cudafuture.errors import InvalidStateError
from rpc_ext import _C, _failure, _staging
from rpc_ext._call import CallMessage, RemoteCall
from rpc_ext._codec import ATOMS, DirectCall, Encoded, PayloadKind, decode, encode, has_rrefs, kind_of
from rpc_ext._destination import Destination
from rpc_ext._serve import is_async
from rpc_ext.session import current

__all__ = ["batch", "flush", "open_to"]

FEWEST_CALLS = 32
"""number of calls that are sent at once if no message is in flight; fewer calls wait"""
LONGEST_PAUSE = 1e-3
"""seconds that fewer calls wait for further calls"""
MOST_CALLS = 256
"""calls in one message"""
MOST_FUNCTIONS = 64
"""functions in the table"""
MOST_BYTES = 1 << 20
"""bytes of payload in one message, without its last call"""

_open: ContextVar[tuple[batch, ...]] = ContextVar("rpc_ext.batches", default=())


def open_to(destination: Destination) -> batch | None:
    """Return the open batch to a worker, if any."""
    for batch in reversed(_open.get()):
        if batch.takes_calls_to(destination):
            return batch
    return None


def flush() -> None:
    """Send the calls that wait in this thread's open batches, before the thread waits for one of them."""
    for batch in _open.get():
        batch.flush()


class batch:  # a context manager
    """A context in which this thread's calls to one worker share few messages.

    Each ``rpc_async`` has its own future, timeout and error. The callee runs the calls one after the other, in the
    order of the calls. A call is sent within a millisecond, or after the reply to the message before it. The callee
    replies to a message when all of its calls have returned, and after any copies of result tensors to the host. The
    end of the context waits for no call: wait for the futures.

    Two kinds of calls have messages of their own: calls of a function with ``async_execution``, ours or torch's, and
    calls with RRefs among their arguments, such as methods of an RRef. Such a call is sent after the replies to the
    calls before it. Later calls do not wait for it, and may begin first.

    Args:
        to: the worker: name, rank or WorkerInfo.

    Raises:
        InvalidStateError: RPC has not begun, or the context is in use.
        ValueError: there is no such worker.

    >>> from rpc_ext import rpc_async
    >>> with batch("me"):
    ...     squares = [rpc_async("me", pow, (i, 2)) for i in range(4)]
    >>> [square.wait() for square in squares]
    [0, 1, 4, 9]
    """

    def __init__(self, to: Any) -> None:
        self._session = current()
        self._destination = self._session.destination(to)
        self._thread: int | None = None  # the thread whose calls it takes
        self.functions: list[bytes] = []  # the table, pickled
        self._places: dict[Any, int] = {}  # indexes in the table
        self._lock = threading.Lock()  # guards what follows; only the timer's lock is taken under it
        self._calls: list[_Waiting] = []
        self._bytes = 0
        self._in_flight: _BatchMessage | None = None
        self._wanted = False  # True: send the waiting calls as soon as no message is in flight
        self._is_sending = False  # True while a thread is in _send_messages
        self._due = math.inf  # time of the next call of `look`

    def __enter__(self) -> batch:
        if self._thread is not None:
            raise InvalidStateError("the batch is in use: create another one")
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
        """Return whether this batch takes this thread's calls to a worker. Callbacks inherit the context."""
        return destination is self._destination and self._thread == threading.get_ident()

    # ---- incoming calls

    def direct(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> DirectCall | None:
        """Return the form of a call without a payload of its own; None if it needs a payload."""
        if kwargs or is_async(fn):
            return None
        for arg in args:
            if type(arg) not in ATOMS:
                return None
        if type(fn) is not FunctionType and not _is_plain_builtin(fn):
            return None
        place = self._places.get(fn)
        if place is None:
            if len(self.functions) == MOST_FUNCTIONS:
                return None
            pickled = encode(PayloadKind.VALUE, fn).payload
            place = self._places[fn] = len(self.functions)
            self.functions.append(pickled)
        return DirectCall(place, tuple(args))

    def add(self, call: RemoteCall, fn: Any, how: Encoded | DirectCall) -> None:
        """Add a call, which any thread sends with the others, or alone after those before it."""
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
            self._send_messages()
        if sooner:
            timer.schedule(self, due)

    def flush(self) -> None:
        """Send the waiting calls, at once or after the reply to the message in flight.

        >>> from rpc_ext import rpc_async
        >>> with batch("me") as calls:
        ...     power = rpc_async("me", pow, (2, 10))
        ...     calls.flush()
        ...     power.wait()
        1024
        """
        with self._lock:
            self._wanted = True
        self._send_messages()
        self._end_if_over()

    def look(self, now: float) -> float | None:
        """Send the calls that have waited long enough, and fail the expired calls. Called by the timer thread."""
        with self._lock:
            self._due = math.inf
            self._wanted = self._wanted or bool(self._calls)
            calls = self._pending_calls()
        for call in calls:
            if call.deadline <= now:
                call.on_error(_failure.TIMEOUT, "")
        self._send_messages()
        with self._lock:
            self._due = min([self._due, *(call.deadline for call in self._pending_calls() if not call.settled)])
            return self._due if self._due < math.inf else None

    def _pending_calls(self) -> list[RemoteCall]:
        """Return the waiting calls, and those of the message in flight. Called under the lock."""
        in_flight = self._in_flight.calls if self._in_flight is not None else []
        return [*in_flight, *(waiting.call for waiting in self._calls)]

    # ---- outgoing messages, one at a time

    def answered(self) -> None:
        """Send the next message, after the reply to the one in flight or its failure."""
        with self._lock:
            self._in_flight = None
        self._send_messages()
        self._end_if_over()

    def _end_if_over(self) -> None:
        """Leave the timer after the last reply, which would keep the session's agent until the calls' timeout."""
        with self._lock:
            if self._thread is None and self._due < math.inf and not self._pending_calls():
                self._due = math.inf
                timer.cancel(self)

    def _send_messages(self) -> None:
        """Send messages until one is in flight. A message that fails at once calls this again, hence the loop."""
        with self._lock:
            if self._is_sending:
                return  # the sending thread checks again before it stops
            self._is_sending = True
        while True:
            with self._lock:
                message = self._next() if self._wanted or self._are_worth_a_message() else None
                if message is None:
                    self._is_sending = False
                    return
            message.send()

    def _are_worth_a_message(self) -> bool:
        return len(self._calls) >= FEWEST_CALLS or self._bytes >= MOST_BYTES

    def _next(self) -> _BatchMessage | _Waiting | None:
        """Remove and return the calls of the next message. Called under the lock."""
        if self._in_flight is not None or not self._calls:
            return None
        count = size = 0
        for waiting in self._calls[:MOST_CALLS]:
            if waiting.goes_alone or size >= MOST_BYTES:
                break
            count += 1
            size += waiting.how.size
        taken = self._calls[: count or 1]  # the first call may be one that goes alone
        del self._calls[: len(taken)]
        self._bytes -= size if count else taken[0].how.size
        self._wanted = self._wanted and bool(self._calls)
        if not count:
            return taken[0]
        self._in_flight = _BatchMessage(self, self._session.agent, self._destination, self._session.rank, taken)
        return self._in_flight


def _is_plain_builtin(fn: Any) -> bool:
    """Return whether a builtin pickles by its name; a method of an object pickles the object."""
    return type(fn) is BuiltinFunctionType and (fn.__self__ is None or isinstance(fn.__self__, ModuleType))


class _Waiting(NamedTuple):
    """A call that waits to be sent."""

    call: RemoteCall
    how: Encoded | DirectCall
    goes_alone: bool

    def send(self) -> None:
        """Send a call that goes alone, or fail it."""
        assert isinstance(self.how, Encoded)
        if self.call.is_over():
            return
        try:
            with _staging.streams_after(self.how.earlier):
                self.call.transmit(self.how.payload, self.how.tensors, self.how.targets, self.call.priority)
        except BaseException as e:
            self.call.fail(e)


class _BatchMessage(CallMessage):
    """A message with several calls."""

    def __init__(
        self, of: batch, agent: _C.Agent, destination: Destination, rank: int, waiting: list[_Waiting]
    ) -> None:
        super().__init__(agent, destination)
        self._of, self._rank, self._waiting = of, rank, waiting
        self.calls = [each.call for each in waiting]

    def send(self) -> None:
        """Send the calls, or fail them."""
        self._waiting = [each for each in self._waiting if not each.call.is_over()]
        self.calls = [each.call for each in self._waiting]
        if not self.calls:
            self._of.answered()
            return
        try:
            self._send([each.how for each in self._waiting])
        except BaseException as e:
            self.fail(e)

    def _send(self, calls: list[Encoded | DirectCall]) -> None:
        parts = [(h.index, h.args) if isinstance(h, DirectCall) else (h.payload, len(h.tensors)) for h in calls]
        table = {how.index: self._of.functions[how.index] for how in calls if isinstance(how, DirectCall)}
        payload = encode(PayloadKind.BATCH, (self._rank, table, parts)).payload
        encoded = [how for how in calls if isinstance(how, Encoded)]
        tensors = [tensor for e in encoded for tensor in e.tensors]
        targets = [target for e in encoded for target in e.targets or [None] * len(e.tensors)]
        with _staging.streams_after([earlier for e in encoded for earlier in e.earlier]):
            self.transmit(payload, tensors, targets if any(targets) else None, self.calls[-1].priority)

    def remaining(self) -> float:
        """Return the longest remaining time of the calls. A call with less time expires by itself."""
        remaining = [call.remaining() for call in self.calls]
        return 0.0 if 0 in remaining else max(remaining)

    def is_over(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        for call in self.calls:
            call.fail(error)
        self._of.answered()

    def on_error(self, kind: int, message: str) -> None:
        for call in self.calls:
            call.on_error(kind, message)
        self._of.answered()

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        self._of.answered()  # first: the callee runs the next message while this worker completes the calls
        try:
            self._distribute(payload, tensors)
        except BaseException as e:
            for call in self.calls:
                call.fail(e)  # has no effect on a call that is done

    def _distribute(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        if kind_of(payload) != PayloadKind.BATCH:  # the callee could not decode the message
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
