"""The handlers of this process, which receive the messages of a ``Channel``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cudafuture.errors import InvalidStateError
from rpc_ext import _C
from rpc_ext._codec import CHANNEL_HEADER

__all__ = ["Handler", "Reply", "handle", "serve"]

_ANSWER = _C.channel_header(0)


class Reply:
    """The reply to one message. Any thread may send it, once; if it is dropped, the message fails at the sender."""

    __slots__ = ("native",)

    def __init__(self, native: _C.Reply) -> None:
        self.native = native

    def send(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        """Send the reply: bytes, and dense tensors on the host."""
        self.native.send(_ANSWER + body, tensors)


Handler = Callable[[bytes, list[torch.Tensor], Reply], None]
"""A function of a message's body, its tensors and the reply. It must not block; its exception becomes the reply."""


def handle(number: int, name: str, handler: Handler) -> None:
    """Register the handler of a channel in this process.

    Args:
        number: number of the channel, 1 to 255.
        name: name of the service, for error messages.
        handler: see ``Handler``.

    Raises:
        ValueError: the number is in use, or out of range.
    """
    if not 1 <= number <= 255 or number in handlers:
        raise ValueError(f"channel {number} cannot be used for {name}: pass an unused number from 1 to 255")
    handlers[number] = handler


handlers: dict[int, Handler] = {}


def serve(payload: bytes, tensors: list[torch.Tensor], reply: _C.Reply) -> None:
    """Pass a message to its handler.

    Raises:
        InvalidStateError: this process has no handler for the channel.
        Exception: the error of the handler.
    """
    number = payload[CHANNEL_HEADER - 1]
    handler = handlers.get(number)
    if handler is None:
        raise InvalidStateError(f"this worker has no handler for channel {number}")
    handler(payload[CHANNEL_HEADER:], tensors, Reply(reply))
