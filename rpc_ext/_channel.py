"""Channels: messages of bytes and tensors, without pickling, to a handler on another worker; see ``_C/channel.h``."""

from __future__ import annotations

from cudafuture.errors import InvalidStateError
from rpc_ext import _C, _failure
from rpc_ext._codec import decode
from rpc_ext._destination import Destination
from rpc_ext._handlers import Handler, Reply, handle
from rpc_ext.session import Session, current

__all__ = ["Handler", "Reply", "channel", "handle"]


def channel(session: Session, to: Destination, number: int, name: str) -> _C.Channel:
    """Return a channel to a handler of one worker.

    Native code sends messages through it. Only tests call its ``send``, which raises BlockingIOError if the calls or
    bytes in flight to that worker have reached the limit of ``init_rpc``, and InvalidStateError after the end of the
    session.

    Args:
        session: session of the channel.
        to: the worker.
        number: number of the handler there.
        name: name of the handler, for error messages.
    """
    return _C.Channel(
        session.agent,
        to,
        number,
        name,
        error_of_end=_error_of_end,
        error_of_reply=_error_of_reply,
        error_of_engine=_error_of_engine,
    )


def _error_of_end() -> InvalidStateError:
    try:
        current()  # has a message of its own for a forked process, or after torch's shutdown
    except InvalidStateError as e:
        return e
    return InvalidStateError("the RPC session of this channel has ended")


def _error_of_reply(payload: bytes, name: str, worker: str) -> BaseException:
    try:
        return _failure.rebuild(_failure.RemoteFailure(*decode(payload, [])))
    except BaseException as e:
        return _failure.of_answer(e, name, worker)


def _error_of_engine(kind: int, message: str, name: str, to: Destination, seconds: float) -> Exception:
    if to.is_closed:
        return InvalidStateError(f"RPC was shut down before worker '{to.name}' had answered {name}")
    return _failure.of_engine(kind, message, name, to.name, seconds)
