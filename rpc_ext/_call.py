"""One call and its reply.

::

    caller   rpc_async ──► encode ──► Destination.admit ──► RemoteCall.transmit ──► [to_host] ──► Agent.call ═══╗
    callee   Reply.send ◄── [to_host] ◄── Server._pack_outcome ◄── _call: fn(*args) ◄── _run ◄── serve ◄════════╝
    caller   └═══► RemoteCall.on_reply ──► [to_devices] ──► decode ──► Destination.finish ──► the future

Tensors on devices that the agent cannot carry go through the host, in the steps in brackets.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from cudafuture import CUDAFuture, debug, executors, fail
from cudafuture.errors import InvalidStateError
from rpc_ext import _C, _failure, _staging
from rpc_ext._codec import PayloadKind, decode, kind_of, targets_of
from rpc_ext._destination import Destination
from rpc_ext._options import SHORTEST_TIMEOUT

__all__ = ["CallMessage", "RemoteCall"]


class CallMessage(ABC):
    """A message with one call or several; the agent calls ``on_reply`` or ``on_error``, once."""

    __slots__ = ("agent", "destination")

    def __init__(self, agent: _C.Agent, destination: Destination) -> None:
        self.agent, self.destination = agent, destination

    def transmit(
        self, payload: bytes, tensors: list[torch.Tensor], targets: _staging.Targets | None, priority: int
    ) -> None:
        """Pass the message to the agent. Tensors that have targets are copied to the host first."""
        seconds = self.remaining()
        if seconds < 0:
            self.on_error(_failure.TIMEOUT, "")
        elif targets is None:
            self._pass_to_agent(payload, tensors, seconds)
        else:

            def copied(copies: CUDAFuture[list[torch.Tensor]]) -> None:
                error = copies.exception()
                if (seconds := self.remaining()) < 0:
                    self.on_error(_failure.TIMEOUT, "")
                elif error is not None:
                    self.fail(error)
                elif not self.is_over():
                    self._pass_to_agent(payload, copies.value(), seconds)

            _staging.to_host(tensors, targets, priority, seconds).add_done_callback(copied, executor=executors.inline)

    def _pass_to_agent(self, payload: bytes, tensors: list[torch.Tensor], seconds: float) -> None:
        try:
            self.agent.call(self.destination.rank, payload, tensors, seconds, self)
        except Exception as e:  # the engine's: a dead pipe, a tensor that it cannot carry
            self.on_error(_failure.ENGINE, str(e))

    @abstractmethod
    def remaining(self) -> float:
        """Return the seconds that are left of the timeout: 0 for no limit, negative after it."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the message need not be sent any more."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Fail the calls with an error of this worker."""

    @abstractmethod
    def on_error(self, kind: int, message: str) -> None:
        """Fail the calls with an error of the engine, of a kind in `_failure`."""

    @abstractmethod
    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        """Take the reply."""


class RemoteCall(CallMessage):
    """A call. Its errors name the function and the worker."""

    __slots__ = ("deadline", "future", "name", "priority", "settled", "size", "started", "timeout")

    def __init__(
        self, agent: _C.Agent, destination: Destination, name: str, size: int, timeout: float, priority: int
    ) -> None:
        self.agent, self.destination, self.size = agent, destination, size
        self.name, self.timeout, self.priority = name, timeout, priority
        # Callbacks run on a thread of their own: the agent's may be the only one that can deliver the next reply.
        self.future: CUDAFuture[Any] = CUDAFuture(
            name=f"{name} on {destination.name}", priority=priority, executor=executors.callback_thread
        )
        debug.register(self.future, destination.place, nbytes=size)
        self.started = time.perf_counter()
        self.deadline = self.started + timeout if timeout else math.inf
        self.settled = False  # True once its end was counted; Destination.finish sets it

    def remaining(self) -> float:
        if not self.timeout:
            return 0
        left = self.deadline - time.perf_counter()
        return max(left, SHORTEST_TIMEOUT) if left > 0 else -1

    def is_over(self) -> bool:
        """Return whether the call has failed or its future was cancelled."""
        if self.future.done():
            self.destination.finish(self, 0, False)
        return self.settled

    def abandon(self) -> None:
        """Release the room of a call that could not be sent."""
        self.destination.finish(self, 0, True)
        self.future.cancel()

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        received = len(payload)
        for tensor in tensors:
            received += tensor.nbytes
        try:
            targets = targets_of(payload)
            if targets is None:
                self._complete(*_read(payload, tensors), received)
            else:
                with _staging.streams_for(targets, self.priority):
                    tensors = _staging.to_devices(tensors, targets, self.priority)
                    self._complete(*_read(payload, tensors), received)
        except BaseException as e:
            self._complete(None, _failure.of_answer(e, self.name, self.destination.name), received)

    def on_value(self, value: Any) -> None:
        """Take a plain value from the reply to a batch."""
        self._complete(value, None, 8)

    def on_error(self, kind: int, message: str) -> None:
        worker = self.destination.name
        if self.destination.is_closed:
            self.fail(InvalidStateError(f"RPC was shut down before worker '{worker}' had answered {self.name}"))
        else:
            self.fail(_failure.of_engine(kind, message, self.name, worker, self.timeout))

    def fail(self, error: BaseException) -> None:
        self._complete(None, error, 0)

    def _complete(self, value: Any, error: BaseException | None, received: int) -> None:
        if not self.destination.finish(self, received, error is not None):
            return  # the call is done
        if error is None:
            try:
                self.future.set_result(value)
                return
            except BaseException as e:
                error = e
        fail(self.future, error)  # unless it was cancelled: the reply is dropped


def _read(payload: bytes, tensors: list[torch.Tensor]) -> tuple[Any, BaseException | None]:
    """Return the value and the error in a reply; one of them is None."""
    value = decode(payload, tensors)
    if kind_of(payload) == PayloadKind.FAILURE:
        return None, _failure.rebuild(_failure.RemoteFailure(*value))
    return value, None
