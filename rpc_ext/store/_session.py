"""The sessions of a store service: one for each client, until the client ends it or is lost.

The store's name of a key is ``k<namespace>/<key>``, or ``k<namespace>~<key>`` if the namespace is private to one
client. ``<namespace>`` is a hash of fixed length, so names of different namespaces never collide.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
import weakref
from collections.abc import Iterable

from cudafuture import CUDAFuture, executors, timer
from cudafuture.errors import AuthenticationError, InvalidStateError, StorageError, WorkerLostError
from cudafuture.store import DiskStore
from rpc_ext import _C
from rpc_ext.store._wire import PART
from rpc_ext.watch import watch

__all__ = ["ClientSession", "Sessions", "names_by_prefix", "prefix_of"]

_HASH = 16  # characters
_NAME = re.compile(rf"k[0-9a-f]{{{_HASH}}}[/~]")

_REMEMBERED = 1024  # sessions that have ended
_MOST_BUFFERED = 16 * PART  # bytes of the replies to one client that have not been sent
_SPARE = 64  # namespaces without a session or a tensor that are kept

_store_thread = executors.serial("store")  # a callback of the program that blocks its own thread ends no session late


def prefix_of(namespace: str, is_private: bool) -> str:
    """Return the prefix of a namespace's names in the store."""
    hashed = hashlib.blake2b(namespace.encode(), digest_size=_HASH // 2).hexdigest()
    return f"k{hashed}{'~' if is_private else '/'}"


def names_by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names in a store by prefix of the namespace, each in the order of the store.

    Raises:
        StorageError: a name was not written by a service.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if not _NAME.match(name):
            raise StorageError(f"the folder is a store with keys of another program, such as {name!r}: use another one")
        found.setdefault(name[: _HASH + 2], []).append(name)
    return found


class ClientSession:
    """The session of one client. Its native half has the unfinished operations and the buffers for replies."""

    def __init__(self, namespace: _C.Namespace, client: str, order: _C.RequestOrder, window: int) -> None:
        self.namespace, self.client, self.order = namespace, client, order
        self.is_private = namespace.prefix.endswith("~")
        itself = weakref.ref(self)  # the native half must not keep this object alive

        def set_timer(seconds: float) -> None:
            if (session := itself()) is not None:
                timer.schedule(session, time.perf_counter() + seconds)

        self.native = _C.StoreSession(namespace, order, min(2 * window, _MOST_BUFFERED), set_timer)

    def look(self, now: float) -> float | None:
        """End expired uploads, reads and waits for buffers. Called by the timer thread."""
        due = self.native.look()
        return None if due is None else now + due

    def end(self) -> None:
        """Abort the unfinished operations."""
        self.native.end()
        timer.cancel(self)


class Sessions:
    """The sessions of one service, by token.

    A worker is lost when its connection breaks, or when it has sent neither a reply nor a request for `patience`
    seconds. The sessions of its clients end. If a client with a named namespace was only silent, its next request
    resumes its session.

    Args:
        service: name of the service, for messages.
        store: store of the service.
        native: native half of the service, which also has the sessions by token.
        most: most sessions at a time.
        window: bytes that each client may have in flight.
        namespace_capacity: bytes of each namespace, or None.
        patience: seconds of silence after which a worker is lost.
    """

    def __init__(
        self,
        service: str,
        store: DiskStore,
        native: _C.StoreService,
        most: int,
        window: int,
        namespace_capacity: int | None,
        patience: float,
    ) -> None:
        self._service, self._store, self._native = service, store, native
        self._most, self._window, self._patience = most, window, patience
        self._namespace_capacity = namespace_capacity
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._sessions: dict[bytes, ClientSession] = {}
        self._namespaces = {
            prefix: self._namespace(prefix, names) for prefix, names in names_by_prefix(store.keys()).items()
        }
        self._until_forgetting = len(self._namespaces) + _SPARE
        self._over: dict[bytes, str] = {}  # why the last sessions ended
        self._silent: dict[bytes, ClientSession] = {}  # sessions with a named namespace whose clients were silent
        self._watches: dict[str, CUDAFuture[None]] = {}  # by worker

    @property
    def namespaces(self) -> int:
        """The number of namespaces with a session or tensors, and of the last ones that had a session."""
        return len(self._namespaces)

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, token: bytes, namespace: str | None, client: str, sent: float) -> None:
        """Begin the session of a client, which has chosen its token. A second call with that token changes nothing.

        Raises:
            BlockingIOError: the service has its most sessions.
            InvalidStateError: the client has ended this session.
        """
        with self._lock:
            if token in self._over:
                raise InvalidStateError(f"the session of worker '{client}' has ended before: {self._over[token]}")
            if token not in self._sessions:
                self._expect_room()
                prefix = prefix_of(token.hex() if namespace is None else namespace, is_private=namespace is None)
                found = self._namespaces.get(prefix)
                if found is None:
                    self._forget_unused()
                    found = self._namespaces[prefix] = self._namespace(prefix)
                self._add(token, ClientSession(found, client, self._order(sent), self._window))
        self._watch(client)

    def _namespace(self, prefix: str, names: Iterable[str] = ()) -> _C.Namespace:
        """Return a namespace with its names in the store. Names of a private namespace are leftovers: delete them."""
        sizes = []
        if not prefix.endswith("~"):
            sizes = [(name[len(prefix) :], self._store.stat(name).nbytes) for name in names]
        elif names:
            deleted = self._store.deletev(names)
            deleted.add_done_callback(CUDAFuture.exception, executor=executors.inline)  # the next start tries again
        return _C.Namespace(self._store, prefix, self._namespace_capacity, sizes)

    def _order(self, sent: float) -> _C.RequestOrder:
        return _C.RequestOrder(sent, self._native)

    def _add(self, token: bytes, session: ClientSession) -> None:
        session.native.is_watched = session.client in self._watches
        self._sessions[token] = session
        self._native.add(token, session.native)

    def _forget_unused(self) -> None:
        """Remove namespaces without sessions and tensors, once there are many more of them than before.

        The namespaces that had a session last are kept: a request of that session may be about to begin.
        """
        if len(self._namespaces) < self._until_forgetting:
            return
        in_use = {session.namespace for session in (*self._sessions.values(), *self._silent.values())}
        for prefix, namespace in list(self._namespaces.items())[:-_SPARE]:
            if namespace not in in_use and namespace.is_empty:
                del self._namespaces[prefix]
        self._until_forgetting = 2 * len(self._namespaces) + _SPARE

    def find(self, token: object) -> ClientSession:
        """Return the session of a token, for a request of its client.

        Raises:
            AuthenticationError: the session has ended, or never began.
            BlockingIOError: the client was silent, and other clients have taken its place.
        """
        if not isinstance(token, bytes):
            raise AuthenticationError(f"store service {self._service!r} knows no session {token!r}")
        with self._lock:
            session = self._sessions.get(token)
            if session is None and token in self._silent:
                self._expect_room()
                silent = self._silent.pop(token)
                session = ClientSession(silent.namespace, silent.client, silent.order, self._window)
                self._add(token, session)
            if session is None:
                why = self._over.get(token, "it has ended, or never was")
                raise AuthenticationError(f"store service {self._service!r} knows no such session: {why}")
            session.native.heard = time.perf_counter()
            is_watched = session.client in self._watches
        if not is_watched:
            self._watch(session.client)
        return session

    def end(self, token: bytes, why: str = "the client has ended it", *, may_resume: bool = False) -> None:
        """End a session: abort its unfinished writes, and delete its private keys."""
        with self._lock:
            session = self._sessions.pop(token, None)
            self._native.remove(token)
            silent = self._silent.pop(token, None)
            if session is not None and may_resume:
                self._silent[token] = session
            else:
                self._over[token] = why  # a request to begin it may still be in flight
            for remembered in (self._silent, self._over):
                while len(remembered) > _REMEMBERED:
                    remembered.pop(next(iter(remembered)))
            if session is not None:
                self._namespaces.pop(session.namespace.prefix, None)
                if not session.is_private:
                    self._namespaces[session.namespace.prefix] = session.namespace  # the last one
            is_last = session is not None and not self._has(session.client)
            watched = self._watches.pop(session.client, None) if session is not None and is_last else None
        if watched is not None:
            watched.cancel()
        if session is not None:
            session.end()
        if not may_resume and (ended := session or silent) is not None:
            ended.order.end()
        if session is None:
            return
        if session.is_private:
            session.namespace.clear()

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            tokens = [*self._sessions, *self._silent]
        for token in tokens:
            self.end(token, "the service was closed")

    # ---- lost clients

    def _expect_room(self) -> None:
        if len(self._sessions) >= self._most:
            raise BlockingIOError(f"store service {self._service!r} has {self._most} clients, its maximum")

    def _has(self, client: str) -> bool:
        return any(session.client == client for session in self._sessions.values())

    def _note_watched(self, client: str, is_watched: bool) -> None:
        for session in self._sessions.values():
            if session.client == client:
                session.native.is_watched = is_watched

    def _watch(self, client: str) -> None:
        with self._lock:
            if client in self._watches:
                return
        watched = watch(client, patience=self._patience)
        with self._lock:
            if client in self._watches or not self._has(client):
                return
            self._watches[client] = watched
            self._note_watched(client, True)
        itself = weakref.ref(self)  # the watches must not keep a dropped service alive

        def ended(done: CUDAFuture[None]) -> None:
            sessions = itself()
            if sessions is not None and not done.cancelled():
                sessions._watch_has_ended(client, done.exception())

        watched.add_done_callback(ended, executor=_store_thread)

    def _watch_has_ended(self, client: str, error: BaseException | None) -> None:
        with self._lock:
            self._watches.pop(client, None)
            self._note_watched(client, False)
            theirs = {token: session for token, session in self._sessions.items() if session.client == client}
        if not isinstance(error, WorkerLostError):  # RPC has ended here
            return
        was_silent = isinstance(error.__cause__, TimeoutError)
        heard = max((session.native.heard for session in theirs.values()), default=0.0)
        if was_silent and time.perf_counter() - heard < self._patience:
            self._watch(client)  # its requests arrived, only its replies did not
            return
        for token, session in theirs.items():
            self._lose(token, session, was_silent)

    def _lose(self, token: bytes, session: ClientSession, was_silent: bool) -> None:
        if not was_silent:
            self.end(token, f"worker '{session.client}' was lost")
            return
        self.end(
            token,
            f"worker '{session.client}' was silent for {self._patience:g} s, and its private keys were deleted. Make a "
            "new RemoteStore; give it namespace= to keep keys, or serve_store a longer patience=",
            may_resume=not session.is_private,
        )
