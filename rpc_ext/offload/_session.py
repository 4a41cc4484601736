"""The sessions of an offload service: one for each client, until the client ends it or is lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from cudafuture import CUDAFuture
from cudafuture.errors import AuthenticationError, InvalidStateError, WorkerLostError
from cudafuture.storage import Offloader
from rpc_ext.offload._buffers import SendBuffers, offload_thread
from rpc_ext.offload._namespace import Namespace, names_by_prefix, prefix_of
from rpc_ext.offload._order import RequestOrder
from rpc_ext.offload._reading import KeptReads
from rpc_ext.offload._upload import Uploads
from rpc_ext.offload._wire import PIECE
from rpc_ext.watch import watch

__all__ = ["ClientSession", "Sessions"]

_REMEMBERED = 1024  # sessions that have ended
_MOST_BUFFERED = 16 * PIECE  # bytes of the answers to one client that have not been sent
_SPARE = 64  # namespaces without a session or a tensor that may be kept


class ClientSession:
    """The session of one client."""

    def __init__(self, store: Offloader, namespace: Namespace, client: str, order: RequestOrder, window: int) -> None:
        self.namespace, self.client, self.order = namespace, client, order
        self.uploads = Uploads(store, namespace, order)
        self.kept_reads = KeptReads(order)
        self.buffers = SendBuffers(min(2 * window, _MOST_BUFFERED))
        self.in_flight = 0  # bytes of its requests that have not been answered
        self.heard = time.monotonic()  # when its last request came


class Sessions:
    """The sessions of one service, by token.

    A worker is lost when its connection breaks, or when it has neither answered nor asked for `patience` seconds. The
    sessions of its clients end. A client with a named namespace that was only silent gets its session back with its
    next request.

    Args:
        service: the name of the service, for messages.
        store: of the service.
        most: sessions that there may be.
        window: bytes that each client may have under way.
        namespace_capacity: bytes of each namespace, or None.
        patience: seconds.
        on_late: see ``RequestOrder``.
    """

    def __init__(
        self,
        service: str,
        store: Offloader,
        most: int,
        window: int,
        namespace_capacity: int | None,
        patience: float,
        on_late: Callable[[], None],
    ) -> None:
        self._service, self._store, self._most, self._window = service, store, most, window
        self._namespace_capacity, self._patience, self._on_late = namespace_capacity, patience, on_late
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._sessions: dict[bytes, ClientSession] = {}
        self._namespaces = {
            prefix: Namespace(store, prefix, namespace_capacity, names)
            for prefix, names in names_by_prefix(store.keys()).items()
        }
        self._until_forgetting = len(self._namespaces) + _SPARE
        self._over: dict[bytes, str] = {}  # why the last sessions ended
        self._silent: dict[bytes, ClientSession] = {}  # named ones whose clients were silent for too long
        self._watches: dict[str, CUDAFuture[None]] = {}  # by worker

    @property
    def namespaces(self) -> int:
        """The number of namespaces that have a session or tensors, and of the last ones that had a session."""
        return len(self._namespaces)

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, token: bytes, namespace: str | None, client: str, sent: float) -> None:
        """Begin the session of a client, which has chosen its token. To ask twice begins one session.

        Raises:
            BlockingIOError: there are as many sessions as there may be.
            InvalidStateError: the client has ended this session before.
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
                    found = self._namespaces[prefix] = Namespace(self._store, prefix, self._namespace_capacity)
                self._sessions[token] = ClientSession(
                    self._store, found, client, RequestOrder(sent, self._on_late), self._window
                )
        self._watch(client)

    def _forget_unused(self) -> None:
        """Forget namespaces that have no session and no tensor, where there are many more than before.

        The last ones that had a session stay: a request of it may still be about to begin.
        """
        if len(self._namespaces) < self._until_forgetting:
            return
        in_use = {session.namespace for session in (*self._sessions.values(), *self._silent.values())}
        for prefix, namespace in list(self._namespaces.items())[:-_SPARE]:
            if namespace not in in_use and namespace.is_empty:
                del self._namespaces[prefix]
        self._until_forgetting = 2 * len(self._namespaces) + _SPARE

    def find(self, token: object) -> ClientSession:
        """Return the session that a token belongs to, for a request of its client.

        Raises:
            AuthenticationError: there is none; the message says what became of it.
            BlockingIOError: the client was silent, and others have taken its place since.
        """
        if not isinstance(token, bytes):
            raise AuthenticationError(f"offload service {self._service!r} knows no session {token!r}")
        with self._lock:
            session = self._sessions.get(token)
            if session is None and token in self._silent:
                self._expect_room()
                silent = self._silent.pop(token)
                session = ClientSession(self._store, silent.namespace, silent.client, silent.order, self._window)
                self._sessions[token] = session
            if session is None:
                why = self._over.get(token, "it has ended, or never was")
                raise AuthenticationError(f"offload service {self._service!r} knows no such session: {why}")
            session.heard = time.monotonic()
            is_watched = session.client in self._watches
        if not is_watched:
            self._watch(session.client)
        return session

    def end(self, token: bytes, why: str = "the client has ended it", *, may_resume: bool = False) -> None:
        """End a session: abort its unfinished writes, and delete its private keys."""
        with self._lock:
            session = self._sessions.pop(token, None)
            silent = self._silent.pop(token, None)
            if session is not None and may_resume:
                self._silent[token] = session
            else:
                self._over[token] = why  # a request to begin it may still be on its way
            for remembered in (self._silent, self._over):
                while len(remembered) > _REMEMBERED:
                    remembered.pop(next(iter(remembered)))
            if session is not None:
                self._namespaces.pop(session.namespace.prefix, None)
                if not session.namespace.is_private:
                    self._namespaces[session.namespace.prefix] = session.namespace  # the last one
            is_last = session is not None and not self._has(session.client)
            watched = self._watches.pop(session.client, None) if session is not None and is_last else None
        if watched is not None:
            watched.cancel()
        if session is not None:
            session.buffers.close()
            session.uploads.end()
        if not may_resume and (ended := session or silent) is not None:
            ended.order.end()
        if session is None:
            return
        session.kept_reads.clear()
        if session.namespace.is_private:
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
            raise BlockingIOError(f"offload service {self._service!r} has {self._most} clients, and takes no more")

    def _has(self, client: str) -> bool:
        return any(session.client == client for session in self._sessions.values())

    def _watch(self, client: str) -> None:
        with self._lock:
            if client in self._watches:
                return
        watched = watch(client, patience=self._patience)
        with self._lock:
            if client in self._watches or not self._has(client):
                return
            self._watches[client] = watched
        itself = weakref.ref(self)  # a service that is dropped is not kept by its watches

        def ended(done: CUDAFuture[None]) -> None:
            sessions = itself()
            if sessions is not None and not done.cancelled():
                sessions._watch_has_ended(client, done.exception())

        watched.add_done_callback(ended, executor=offload_thread)

    def _watch_has_ended(self, client: str, error: BaseException | None) -> None:
        with self._lock:
            self._watches.pop(client, None)
            theirs = {token: session for token, session in self._sessions.items() if session.client == client}
        if not isinstance(error, WorkerLostError):  # RPC has ended here
            return
        was_silent = isinstance(error.__cause__, TimeoutError)
        heard = max((session.heard for session in theirs.values()), default=0.0)
        if was_silent and time.monotonic() - heard < self._patience:
            self._watch(client)  # its requests came, and its answers did not
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
            "new RemoteOffloader; give it namespace= to keep keys, or serve_offload a longer patience=",
            may_resume=not session.namespace.is_private,
        )
