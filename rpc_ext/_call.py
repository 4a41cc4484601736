"""One call on its way, and the way back of its answer.

::

    encode ──► [tensors to the host] ──► Agent.call ──► ... the callee ... ──► on_reply ──► [tensors to devices]
       │                                                                          │                 │
       └── Destination.admit                               Destination.finish ◄───┘    the future ◄─┘
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError
from rpc_ext import _C, _failure, _staging
from rpc_ext._arguments import SHORTEST_TIMEOUT
from rpc_ext._codec import Encoded, Kind, decode, kind_of, targets_of
from rpc_ext._destination import Destination

__all__ = ["Call"]


class Call:
    """A call, from the moment that it was made. What it fails with names the function and the worker."""

    __slots__ = (
        "_agent",
        "_destination",
        "deadline",
        "future",
        "name",
        "priority",
        "settled",
        "size",
        "started",
        "timeout",
    )

    def __init__(
        self, agent: _C.Agent, destination: Destination, name: str, size: int, timeout: float, priority: int
    ) -> None:
        self._agent, self._destination, self.size = agent, destination, size
        self.name, self.timeout, self.priority = name, timeout, priority
        # Its callbacks have a thread of their own: the agent's may be the only one that can bring the next answer.
        self.future: CUDAFuture[Any] = CUDAFuture(
            name=f"{name} on {destination.name}", priority=priority, executor=executors.callback_thread
        )
        self.started = time.perf_counter()
        self.deadline = self.started + timeout if timeout else math.inf
        self.settled = False  # whether its end was counted; its destination's lock guards that

    def send(self, encoded: Encoded) -> None:
        """Send the call; its tensors on devices that the agent cannot carry are copied to the host first."""
        timeout = self.remaining()
        if timeout < 0:
            self.expire()
        elif encoded.targets is None:
            self._send(encoded.payload, encoded.tensors, timeout)
        else:
            _staging.to_host(encoded.tensors, encoded.targets, self.priority, timeout, self._staged(encoded))

    def _staged(self, encoded: Encoded) -> _staging.Staged:
        def staged(tensors: list[torch.Tensor] | None, error: BaseException | None) -> None:
            if (remaining := self.remaining()) < 0:
                self.expire()
            elif tensors is None:
                assert error is not None
                self.fail(error)
            elif not self.is_over():
                self._send(encoded.payload, tensors, remaining)

        return staged

    def _send(self, payload: bytes, tensors: list[torch.Tensor], timeout: float) -> None:
        try:
            self._agent.call(self._destination.rank, payload, tensors, timeout, self)
        except Exception as e:  # what the engine itself refuses: a dead pipe, a tensor that it cannot carry
            self.on_error(0, str(e))

    # ---- called by the agent, once

    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        """Take the answer."""
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
            self._complete(None, _failure.of_answer(e, self.name, self._destination.name), received)

    def on_value(self, value: Any) -> None:
        """Take an answer that came among others: a plain value."""
        self._complete(value, None, 8)

    def on_error(self, kind: int, message: str) -> None:
        """Take what the engine says."""
        worker = self._destination.name
        if self._destination.is_closed:
            self.fail(InvalidStateError(f"RPC was shut down before worker '{worker}' had answered {self.name}"))
        else:
            self.fail(_failure.of_engine(kind, message, self.name, worker, self.timeout))

    def remaining(self) -> float:
        """Return the seconds that are left of the timeout: 0 where there is none, less where they are over."""
        if not self.timeout:
            return 0
        left = self.deadline - time.perf_counter()
        return max(left, SHORTEST_TIMEOUT) if left > 0 else -1

    # ---- the future

    def is_over(self) -> bool:
        """Return whether there is no use in sending it any more: it has failed, or was cancelled."""
        if self.future.done():
            self._destination.finish(self, 0, False)
        return self.settled

    def abandon(self) -> None:
        """Give its room back: it is not made after all."""
        self._destination.finish(self, 0, True)
        self.future.cancel()

    def expire(self) -> None:
        """Fail: the time is over."""
        self.on_error(1, "")

    def _complete(self, value: Any, error: BaseException | None, received: int) -> None:
        if not self._destination.finish(self, received, error is not None):
            return  # it came too late
        if error is None:
            try:
                self.future.set_result(value)
            except BaseException as e:
                error = e
        if error is not None:
            self._set_exception(error)

    def fail(self, error: BaseException) -> None:
        """Fail with what kept the call from being sent, unless it has ended before."""
        if self._destination.finish(self, 0, True):
            self._set_exception(error)

    def _set_exception(self, error: BaseException) -> None:
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            if not self.future.done():
                raise
            # it was cancelled: its answer is dropped


def _read(payload: bytes, tensors: list[torch.Tensor]) -> tuple[Any, BaseException | None]:
    """Return what has come: a value, or an error."""
    value = decode(payload, tensors)
    if kind_of(payload) == Kind.FAILURE:
        return None, _failure.rebuild(_failure.Failure(*value))
    return value, None
