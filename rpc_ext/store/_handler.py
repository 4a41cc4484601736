"""The request handler of a store service. Its native half handles requests; this half handles sessions and calls.

The native half passes a request to ``RequestHandler.handle`` if the request is malformed, or its session is unknown or
not watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from cudafuture.errors import AuthenticationError, NotFoundError
from cudafuture.store import DiskStore, Entry
from rpc_ext import _C
from rpc_ext._channel import Reply
from rpc_ext.session import current
from rpc_ext.store import _wire as wire
from rpc_ext.store._session import ClientSession, Sessions
from rpc_ext.store._statistics import StoreServiceStatistics

__all__ = ["RequestHandler"]

T = TypeVar("T")


class RequestHandler:
    """The request handler of one service.

    Args:
        name: name of the service.
        store: store of the service.
        memory: most bytes of requests in flight.
        clients: most clients with a session.
        namespace_capacity: bytes of each namespace; None: no limit.
        patience: seconds of silence after which a client is lost.
    """

    def __init__(
        self, name: str, store: DiskStore, memory: int, clients: int, namespace_capacity: int | None, patience: float
    ) -> None:
        self.name, self.store = name, store
        self.window = memory // clients
        self.native = _C.StoreService(store, self.window)
        self._sessions = Sessions(name, store, self.native, clients, self.window, namespace_capacity, patience)

    # ---- messages

    def handle(self, body: bytes, tensors: list[torch.Tensor], reply: Reply) -> None:
        """Handle a message of a client.

        Raises:
            ValueError: it is not a request.
            AuthenticationError: there is no such session.
        """
        token = self._checked(lambda: _C.token_of(body, tensors))
        self.native.handle(body, tensors, self.session(token).native, reply.native)

    # ---- calls

    def begin(self, token: object, namespace: str | None, client: str, sent: object) -> tuple[int, bool]:
        """Begin the session of a client; return its window in bytes, and ``durable``. See ``Sessions.begin``.

        Raises:
            AuthenticationError: no worker has the client's name.
            ValueError: the token has a wrong length, or `sent` is not a time.
        """
        self._checked(lambda: _expect_client(token, client, sent))
        assert isinstance(token, bytes)
        assert isinstance(sent, float)
        self._sessions.begin(token, namespace, client, sent)
        return self.window, self.store.durable

    def end(self, token: bytes) -> None:
        """End the session of a client."""
        self._sessions.end(token)

    def session(self, token: object) -> ClientSession:
        """Return the session that a token belongs to; see ``Sessions.find``."""
        return self._checked(lambda: self._sessions.find(token))

    def keys(self, token: object) -> list[str]:
        """Return the keys of a client's namespace."""
        return self.session(token).namespace.keys()

    def stat(self, token: object, key: object) -> Entry:
        """Return dtype, shape and size of a key."""
        session = self.session(token)
        self._checked(lambda: _C.expect_key(key))
        try:
            found = self.store.stat(f"{session.namespace.prefix}{key}")
        except NotFoundError:
            raise NotFoundError(f"there is no key '{key}'") from None
        return Entry(str(key), found.dtype, found.shape, found.nbytes)

    def find(self, token: object, keys: object) -> list[Entry | None]:
        """Return dtype, shape and size of many keys; None for a missing key."""
        session = self.session(token)
        names = self._checked(lambda: _expect_keys(keys))
        found = self.store.snapshots([session.namespace.prefix + key for key in names])
        return [
            None if snapshot is None else Entry(key, snapshot.dtype, snapshot.shape, snapshot.nbytes)
            for key, snapshot in zip(names, found, strict=True)
        ]

    def trim(self, token: object) -> int:
        """Remove the empty files of the store; return their size."""
        self.session(token)
        return self.store.trim()

    def close(self) -> None:
        """End all sessions, and close the store."""
        self._sessions.close()
        self.store.close()

    # ---- counts

    def statistics(self) -> StoreServiceStatistics:
        """Return the statistics so far."""
        return StoreServiceStatistics(
            clients=len(self._sessions), namespaces=self._sessions.namespaces, **self.native.statistics()
        )

    def _checked(self, check: Callable[[], T]) -> T:
        """Return the result of a check; count a failed check as a refused request."""
        try:
            return check()
        except (ValueError, TypeError, AuthenticationError):
            self.native.count_refused()
            raise


def _expect_client(token: object, client: str, sent: object) -> None:
    if client not in current().workers:  # its loss could not be detected
        raise AuthenticationError(f"there is no worker {client!r}")
    if not isinstance(token, bytes) or len(token) != wire.TOKEN:
        raise ValueError(f"the token of a session has {wire.TOKEN} bytes")
    if type(sent) is not float or sent != sent or abs(sent) == float("inf"):
        raise ValueError(f"{sent!r} is not a time")


def _expect_keys(keys: object) -> list[str]:
    if not isinstance(keys, list):
        raise TypeError(f"keys are a list of str, not {type(keys).__qualname__}")
    for key in keys:
        _C.expect_key(key)
    return keys
