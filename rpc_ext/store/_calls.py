"""The services of this process, and the functions that their clients call.

A client calls these functions to begin and end its session and to query keys. Its reads and writes arrive as messages
of a channel: at the native service, or at ``RequestHandler.handle`` if the native service cannot take them.
"""

from __future__ import annotations

import threading

import torch

from cudafuture.errors import InvalidStateError
from cudafuture.store import Entry
from rpc_ext import _C, session
from rpc_ext import _channel as channel
from rpc_ext._channel import Reply
from rpc_ext.store._handler import RequestHandler

__all__ = [
    "CHANNEL",
    "add_service",
    "begin",
    "end",
    "find",
    "find_service",
    "has_service",
    "keys",
    "remove_service",
    "stat",
    "trim",
]

CHANNEL = 1
"""number of the channel that carries the requests"""

_services: dict[str, RequestHandler] = {}
_lock = threading.Lock()  # guards _services; a leaf


def has_service(name: str) -> bool:
    """Return whether a service has this name."""
    return name in _services


def add_service(handler: RequestHandler) -> bool:
    """Register a service under its name; return False if the name is in use."""
    with _lock:
        if _services.setdefault(handler.name, handler) is not handler:
            return False
        _C.route_messages(handler.name, handler.native)
        return True


def remove_service(handler: RequestHandler) -> None:
    """Remove a service, if it is registered."""
    with _lock:
        if _services.get(handler.name) is handler:
            del _services[handler.name]
            _C.route_messages(handler.name, None)


def find_service(name: object) -> RequestHandler:
    """Return the service with this name.

    Raises:
        InvalidStateError: this process has no such service.
    """
    with _lock:
        found = _services.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidStateError(f"this worker serves no store called {name!r}: call rpc_ext.serve_store() there first")
    return found


def begin(name: str, token: bytes, namespace: str | None, client: str, sent: float) -> tuple[int, bool]:
    """Begin a session; see ``RequestHandler.begin``."""
    return find_service(name).begin(token, namespace, client, sent)


def end(name: str, token: bytes) -> None:
    """End a session."""
    find_service(name).end(token)


def keys(name: str, token: bytes) -> list[str]:
    """Return the keys of a namespace."""
    return find_service(name).keys(token)


def stat(name: str, token: bytes, key: str) -> Entry:
    """Return dtype, shape and size of a key."""
    return find_service(name).stat(token, key)


def find(name: str, token: bytes, keys: list[str]) -> list[Entry | None]:
    """Return dtype, shape and size of many keys."""
    return find_service(name).find(token, keys)


def trim(name: str, token: bytes) -> int:
    """Remove the empty files of the store."""
    return find_service(name).trim(token)


def _handle(body: bytes, tensors: list[torch.Tensor], reply: Reply) -> None:
    find_service(_C.service_of(body)).handle(body, tensors, reply)


def _close_all() -> None:
    """Close all services. Called when RPC of this process has ended."""
    with _lock:
        ended = list(_services.values())
        _services.clear()
        for service in ended:
            _C.route_messages(service.name, None)
    for service in ended:
        service.close()


channel.handle(CHANNEL, "remote stores", _handle)
_C.use_native_handler(CHANNEL, True)
session.call_at_end(_close_all)
