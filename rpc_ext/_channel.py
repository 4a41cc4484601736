"""Channels: messages of bytes and tensors, without pickling, to a handler on another worker.

::

    Channel.send ──► Destination.try_admit ──► Agent.call ════► Server.serve ──► handler(body, tensors, reply)
    listener     ◄── Destination.finish    ◄── on_reply   ◄═══════════════════── reply.send(body, tensors)

Messages count as calls: they take room at their destination and are sealed, and a graceful shutdown waits for them.
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol

import torch

from cudafuture.errors import InvalidStateError
from rpc_ext import _failure
from rpc_ext._codec import CHANNEL_HEADER, Kind, channel_header, decode, kind_of
from rpc_ext._destination import Destination
from rpc_ext._handlers import Handler, Reply, handle
from rpc_ext.session import Session, current

__all__ = ["Channel", "Handler", "Listener", "Reply", "handle"]


class Listener(Protocol):
    """The receiver of a reply. A thread of the agent calls one of its methods, once, and must not block."""

    def answered(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        """Take the reply."""

    def failed(self, error: BaseException) -> None:
        """Take the error of the handler, or of the connection: TimeoutError, WorkerLostError, AuthenticationError."""


class Channel:
    """A channel to a handler of one worker.

    Args:
        session: session of the channel. After its end, ``send`` raises InvalidStateError.
        to: the worker.
        number: number of the handler there.
        name: name of the handler, for error messages.
    """

    def __init__(self, session: Session, to: Destination, number: int, name: str) -> None:
        self._session, self._agent = weakref.ref(session), weakref.ref(session.agent)
        self._to, self._header, self._name = to, channel_header(number), name

    def send(self, body: bytes, tensors: list[torch.Tensor], seconds: float, listener: Listener) -> None:
        """Send a message; return at once. Its tensors are dense, on the host, and do not change until the reply.

        Args:
            seconds: timeout of the reply; 0: no limit.

        Raises:
            BlockingIOError: the calls or bytes in flight to that worker have reached the limit of ``init_rpc``.
            InvalidStateError: RPC has ended.
        """
        session = current()
        if session is not self._session():
            raise InvalidStateError("the RPC session of this channel has ended")
        size = len(body) + sum(tensor.nbytes for tensor in tensors)
        if not self._to.try_admit(size):
            self._to.flush()
            raise self._to.would_block()
        message = _Message(self._to, self._name, size, seconds, listener)
        try:
            session.agent.call(self._to.rank, self._header + body, tensors, seconds, message)
        except Exception as e:  # the engine's: a dead pipe
            message.on_error(0, str(e))


class _Message:
    """A message in flight: its listener, and its size and start for the destination."""

    __slots__ = ("_listener", "_name", "_seconds", "_to", "settled", "size", "started")

    def __init__(self, to: Destination, name: str, size: int, seconds: float, listener: Listener) -> None:
        self._to, self._name, self._seconds, self._listener = to, name, seconds, listener
        self.size, self.started, self.settled = size, time.perf_counter(), False

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        """Take the reply. Called by the agent."""
        received = len(payload)
        for tensor in tensors:
            received += tensor.nbytes
        is_answer = kind_of(payload) == Kind.CHANNEL
        if not self._to.finish(self, received, not is_answer):
            return
        if is_answer:
            self._listener.answered(payload[CHANNEL_HEADER:], tensors)
        else:
            self._listener.failed(self._error_of(payload))

    def _error_of(self, payload: bytes) -> BaseException:
        try:
            return _failure.rebuild(_failure.Failure(*decode(payload, [])))
        except BaseException as e:
            return _failure.of_answer(e, self._name, self._to.name)

    def on_error(self, kind: int, message: str) -> None:
        """Take the error of the engine. Called by the agent."""
        if not self._to.finish(self, 0, True):
            return
        if self._to.is_closed:
            error: Exception = InvalidStateError(
                f"RPC was shut down before worker '{self._to.name}' had answered {self._name}"
            )
        else:
            error = _failure.of_engine(kind, message, self._name, self._to.name, self._seconds)
        self._listener.failed(error)
