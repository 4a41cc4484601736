"""The client's window: order, batching, flow control and expiry of requests.

::

    submit ──► held until the request before it on its key was sent ──► ready ──► batch ──┐
               (and its bytes are on the host)                 └──► a large tensor's parts ─┴─► outgoing
    outgoing ──► as many bytes in flight as the service allows ──► Message.start ──► Channel.send

The service orders the operations on a key, so a request does not wait for the reply to the request before it. Small
requests are sent in batches: while a batch of their kind is in flight, ready requests wait for the next batch; a full
batch is sent at once (J. Nagle, RFC 896). All requests of a client have the same timeout, so the oldest expires first.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from rpc_ext import _timer
from rpc_ext._channel import Channel
from rpc_ext.offload import _wire as wire
from rpc_ext.offload._buffers import SendBuffers
from rpc_ext.offload._operation import Operation

__all__ = ["DONE", "Message", "Request", "Window"]

WAITING, SENT, DONE = "waiting", "sent", "done"
_SAME_MODE = contextlib.nullcontext()
_PAUSE = 0.005  # seconds until a message for which RPC had no room is sent again
_BUFFERED = 8 * (wire.PACK + wire.LINE * wire.MOST_ENTRIES)  # bytes of batches that have not been sent


class Request:
    """One key of an operation.

    Args:
        verb: PUT, GET or DELETE.
        key: key of the tensor.
        operation, index: operation, and its index of this key.
        weight: bytes that count for the window and for the size of a batch.
    """

    def __init__(self, verb: int, key: str, operation: Operation, index: int, weight: int) -> None:
        self.verb, self.key, self.index, self.weight = verb, key, index, weight
        self.operation: Operation | None = operation  # None: the request is done
        self.state = WAITING
        self.sequence = 0
        self.deadline = 0.0  # on this process's clock; 0: none
        self.previous: Request | None = None  # on the same key, unless it was done before this one was submitted
        self.followers: list[Request] = []  # requests whose `previous` is this one
        self.holds = 0  # number of reasons why it cannot be sent yet

    def messages(self, window: Window) -> list[Message] | None:
        """Return the messages of a request that is sent alone; None (default): it is sent in a batch."""
        return None

    def batch(self, window: Window, requests: list[Request]) -> Message:
        """Return the message of this request and others with the same verb."""
        raise NotImplementedError

    def drop(self) -> None:
        """Release the memory of a request that is done. The window may keep the request itself for a while."""

    def entry(self) -> wire.Operation:
        """Return the fields that the entries of all verbs begin with."""
        before = self.previous
        while before is not None and before.state is DONE:  # it was dropped without having been sent
            before = before.previous
        return wire.Operation(self.sequence, 0 if before is None else before.sequence, self.deadline, self.key)


class Message:
    """A message of requests with the same verb, until its reply.

    Args:
        window: window of the client.
        requests: requests of the message. Those that are done before it is sent are left out.
        nbytes: bytes that count for the window.
    """

    verb = 0
    is_batch = False  # True: a batch of small requests
    has_room = False  # True: its bytes count as in flight

    def __init__(self, window: Window, requests: Sequence[Any], nbytes: int) -> None:
        self.window, self.requests, self.nbytes = window, requests, nbytes

    def start(self) -> None:
        """Send the message, for which there is room."""
        raise NotImplementedError

    def take(self, answer: wire.Answer) -> None:
        """End each request with its outcome."""
        raise NotImplementedError

    def expects_answer(self) -> bool:
        """Drop the requests that are done; if none is left, release the room and return False."""
        self.requests = [request for request in self.requests if request.state is not DONE]
        if not self.requests:
            self.window.release(self)
        return bool(self.requests)

    # ---- called by the channel, once

    def answered(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        """Take the reply."""
        self.window.release(self)
        try:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _SAME_MODE:
                self.take(wire.parse_answer(self.verb, len(self.requests), body, tensors))
        except BaseException as e:
            for request in self.requests:
                self.window.end(request, None, e.with_traceback(None), answered=False)

    def failed(self, error: BaseException) -> None:
        """Take the error of a message without a reply."""
        error = error.with_traceback(None)  # its frames hold the data of the message
        self.window.release(self)
        for request in self.requests:
            self.window.end(request, None, error, answered=False)


class Window:
    """Requests of one client, and the bytes that they have in flight.

    Args:
        channel: channel to the service's worker.
        service: name of the service.
        token: token of the client's session.
        worker: name of the worker, for messages.
        size: most bytes in flight. A larger message is sent when nothing else is in flight.
        seconds: timeout of each request; 0: no limit.
    """

    def __init__(self, channel: Channel, service: str, token: bytes, worker: str, size: int, seconds: float) -> None:
        self._channel, self._service, self._token = channel, service, token
        self.worker, self.size, self._seconds = worker, size, seconds
        self.buffers = SendBuffers(_BUFFERED)
        self._lock = threading.Lock()  # guards what follows; a leaf
        self.in_flight = 0  # bytes
        self._sequence = 0
        self._last: dict[str, Request] = {}  # by key: the last request that is not done
        self._ages: collections.deque[Request] = collections.deque()  # by age; some may be done
        self._timer_runs = False
        self._ready: dict[int, collections.deque[Request]]  # by verb
        self._ready = {verb: collections.deque() for verb in (wire.PUT, wire.GET, wire.DELETE)}
        self._ready_bytes = dict.fromkeys(self._ready, 0)
        self._batches = dict.fromkeys(self._ready, 0)  # outgoing and in flight
        self._outgoing: collections.deque[Message] = collections.deque()
        self._is_held = False  # RPC has no room for the first outgoing message
        self._sending = threading.local()  # ``is_on``: this thread is in ``go_on``

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests in the order in which they take effect."""
        now = time.perf_counter()
        deadline = now + self._seconds if self._seconds else 0.0
        with self._lock:
            for request in requests:
                self._sequence += 1
                request.sequence, request.deadline = self._sequence, deadline
                previous = self._last.get(request.key)
                if previous is not None:
                    request.previous = previous
                    previous.followers.append(request)
                    request.holds += previous.state is WAITING
                self._last[request.key] = request
                self._ages.append(request)
                if not request.holds:
                    self._make_ready(request)
            starts_timer = bool(deadline) and not self._timer_runs
            self._timer_runs = self._timer_runs or starts_timer
        if starts_timer:
            try:
                _timer.schedule(self, deadline)
            except BaseException as e:  # the system has no more threads
                with self._lock:
                    self._timer_runs = False
                for request in requests:
                    self.end(request, None, e)
                raise
        if (interrupt := self.go_on()) is not None:
            raise interrupt

    def release_hold(self, request: Request) -> None:
        """Remove one reason why a request cannot be sent: its bytes are on the host."""
        with self._lock:
            self._remove_hold(request)
        self.go_on()

    def _remove_hold(self, request: Request) -> None:
        request.holds -= 1
        if not request.holds and request.state is WAITING:
            self._make_ready(request)

    def _make_ready(self, request: Request) -> None:
        messages = request.messages(self)
        if messages is not None:
            self._outgoing.extend(messages)
            return
        self._ready[request.verb].append(request)
        self._ready_bytes[request.verb] += request.weight

    def enqueue(self, messages: Sequence[Message]) -> None:
        """Send further messages of requests that are in flight."""
        with self._lock:
            self._outgoing.extend(messages)
        self.go_on()

    # ---- sending

    def go_on(self) -> BaseException | None:
        """Send the messages that fit into the window. Return the interrupt (Ctrl-C) with which a message has failed.

        A message that fails at once calls this method again; then the outer call sends the next message.
        """
        if not self._outgoing and not any(self._ready.values()):
            return None
        if getattr(self._sending, "is_on", False):
            return None
        interrupt: BaseException | None = None
        self._sending.is_on = True
        try:
            while (message := self._next()) is not None:
                try:
                    message.start()
                except BaseException as e:
                    message.failed(e)
                    interrupt = interrupt if isinstance(e, Exception) else e
        finally:
            self._sending.is_on = False
        return interrupt

    def _next(self) -> Message | None:
        """Remove the next message from the queue, and reserve its room."""
        with self._lock:
            for verb, ready in self._ready.items():
                while ready and (not self._batches[verb] or self._is_full(verb)):
                    self._outgoing.append(self._batch(verb, ready))
            if not self._outgoing or self._is_held:
                return None
            nbytes = self._outgoing[0].nbytes
            if self.in_flight and self.in_flight + nbytes > self.size:
                return None
            self.in_flight += nbytes
            message = self._outgoing.popleft()
            message.has_room = True
            return message

    def _is_full(self, verb: int) -> bool:
        return len(self._ready[verb]) >= wire.MOST_ENTRIES or self._ready_bytes[verb] >= wire.PACK

    def _batch(self, verb: int, ready: collections.deque[Request]) -> Message:
        requests: list[Request] = []
        nbytes = 0
        keys: set[str] = set()
        while ready and len(requests) < wire.MOST_ENTRIES and ready[0].key not in keys:
            if requests and nbytes + ready[0].weight > wire.PACK:
                break
            request = ready.popleft()
            requests.append(request)
            keys.add(request.key)
            nbytes += request.weight
        self._ready_bytes[verb] -= nbytes
        self._batches[verb] += 1
        return requests[0].batch(self, requests)

    def send(self, message: Message, entries: Sequence[wire.Entry], data: torch.Tensor) -> None:
        """Send a message that has room in the window. If RPC has none, send it again after a pause."""
        now = time.perf_counter()
        ends = [request.deadline for request in message.requests]
        seconds = max(max(ends) - now, 0.001) if self._seconds and ends else self._seconds
        with self._lock:
            while self._ages and self._ages[0].state is DONE:
                self._ages.popleft()
            oldest = self._ages[0].sequence if self._ages else self._sequence + 1
        body, tensors = wire.pack_request(message.verb, self._token, now, oldest, self._service, entries, data)
        try:
            self._channel.send(body, tensors, seconds, message)
        except BlockingIOError:
            _timer.schedule(self, now + _PAUSE)
            with self._lock:
                self._is_held = True
                self.in_flight -= message.nbytes
                message.has_room = False
                self._outgoing.appendleft(message)

    def mark_sent(self, requests: Sequence[Request]) -> None:
        """Mark requests as sent, and release those that wait for them."""
        with self._lock:
            for request in requests:
                if request.state is WAITING:
                    request.state = SENT
                    for follower in request.followers:
                        self._remove_hold(follower)

    def release(self, message: Message) -> None:
        """Release the room of a message that is done, and send the next messages. Further calls change nothing."""
        with self._lock:
            if message.has_room:
                message.has_room = False
                self.in_flight -= message.nbytes
                if message.is_batch:
                    self._batches[message.verb] -= 1
        self.go_on()

    def end(
        self, request: Request, value: object, error: BaseException | None = None, *, answered: bool = True
    ) -> bool:
        """End a request with its outcome; return False if it is done.

        Args:
            answered: False if the service has not replied, so that the request may still arrive there.
        """
        with self._lock:
            if request.state is DONE:
                return False
            was_sent = request.state is SENT
            request.state = DONE
            abandons = was_sent and not answered and bool(request.followers)
            self._unchain(request, was_sent)
            operation, request.operation = request.operation, None
        request.drop()
        assert operation is not None
        operation.end(request.index, value, error)
        if abandons:
            self.abandon(request)
        elif not was_sent:
            self.go_on()
        return True

    def _unchain(self, request: Request, was_sent: bool) -> None:
        """Remove a request that is done from the order of its key: link its followers to its previous request."""
        before = request.previous
        while before is not None and before.state is DONE:
            before = before.previous
        request.previous = before
        if self._last.get(request.key) is request:
            if before is None:
                del self._last[request.key]
            else:
                self._last[request.key] = before
        followers, request.followers = request.followers, []
        if before is not None:
            before.followers += followers
        if not was_sent and (before is None or before.state is not WAITING):
            for follower in followers:
                self._remove_hold(follower)

    def abandon(self, request: Request) -> None:
        """Send the service a notice that the client abandoned a request, which may never arrive as a whole."""
        self.enqueue([Abandon(self, [request], 0)])

    def look(self, now: float) -> float | None:
        """Fail the expired requests, and retry messages for which RPC had no room. Called by the timer thread."""
        late = []
        with self._lock:
            was_held, self._is_held = self._is_held, False
            while self._ages and (self._ages[0].state is DONE or 0 < self._ages[0].deadline <= now):
                request = self._ages.popleft()
                if request.state is not DONE:
                    late.append(request)
            due = self._ages[0].deadline or None if self._ages else None
            self._timer_runs = due is not None
        for request in late:
            where = "it was not sent: there was no room" if request.state is WAITING else "it has no reply"
            error = TimeoutError(f"worker {self.worker!r} took more than {self._seconds:g} s; {where}")
            self.end(request, None, error, answered=False)
        if was_held:
            self.go_on()
        return due

    def statistics(self) -> tuple[int, int, int]:
        """Return the bytes in flight, the bytes that wait, and the size of the window."""
        with self._lock:
            waiting = sum(request.weight for request in self._ages if request.holds and request.state is WAITING)
            waiting += sum(message.nbytes for message in self._outgoing) + sum(self._ready_bytes.values())
            return self.in_flight, waiting, self.size


class Abandon(Message):
    """Notice of a request that the client abandoned."""

    verb = wire.ABANDON

    def start(self) -> None:
        """Send the notice, though its request is done."""
        self.window.send(self, [request.entry() for request in self.requests], wire.NO_DATA)

    def take(self, answer: wire.Answer) -> None:
        """Do nothing: the request is done."""
