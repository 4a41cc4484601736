"""The request handler of an offload service.

One small write, continued from the client::

     5  RequestHandler.handle     unpacks the request, finds the session               wire, session
     6  Writing.begin             takes room in the client's window                    writing
     7  RequestOrder.arrive       after the client's earlier operations on the key     order
     8  KeyQueues.enter           after all earlier changes of the key                 order
     9  Namespace.write           quota, Offloader.writev, the answer                  namespace

A read goes the same way with ``Reading`` in place of ``Writing``: it takes its snapshot when its turn has come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from cudafuture.errors import AuthenticationError, ChecksumError
from cudafuture.storage import Entry, Offloader
from rpc_ext._channel import Reply
from rpc_ext._statistics import Histogram
from rpc_ext.offload import _parser as parser
from rpc_ext.offload import _wire as wire
from rpc_ext.offload._reading import Reading, fetch
from rpc_ext.offload._session import ClientSession, Sessions
from rpc_ext.offload._statistics import OffloadServiceStatistics
from rpc_ext.offload._writing import Deleting, Writing, write_part
from rpc_ext.session import current

__all__ = ["RequestHandler"]

T = TypeVar("T")


class RequestHandler:
    """Handles the requests of one service.

    Args:
        name: of the service.
        store: of the service.
        memory: bytes of requests that may be in flight.
        clients: that may have a session.
        namespace_capacity: bytes of each namespace; None: no limit.
        patience: seconds of silence after which a client is lost.
    """

    def __init__(
        self, name: str, store: Offloader, memory: int, clients: int, namespace_capacity: int | None, patience: float
    ) -> None:
        self.name, self.store = name, store
        self.window = memory // clients
        self._sessions = Sessions(name, store, clients, self.window, namespace_capacity, patience, self._count_late)
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._in_flight = self._most_in_flight = 0
        self._written = self._read = self._refused = self._late = 0
        self._latencies = Histogram()

    # ---- messages

    def handle(self, body: bytes, tensors: list[torch.Tensor], reply: Reply) -> None:
        """Handle a message of a client.

        Raises:
            ValueError: it is not a request.
            AuthenticationError: there is no such session.
            BlockingIOError: the client has more bytes in flight than twice its window.
        """
        request = self._checked(lambda: parser.unpack_request(body, tensors))
        session = self.session(request.token)
        session.order.note_arrival(request.sent, request.oldest)
        if request.verb == wire.GET:
            Reading(self, session, request, reply).begin()
        elif request.verb == wire.FETCH:
            fetch(self, session, request, reply)
        elif request.verb == wire.DELETE:
            Deleting(self, session, request, reply).begin()
        elif request.verb == wire.ABANDON:
            self._abandon(session, request, reply)
        elif _is_part(request.entries[0]):
            write_part(self, session, request, reply)
        else:
            Writing(self, session, request, reply).begin()

    def _abandon(self, session: ClientSession, request: wire.Request, reply: Reply) -> None:
        """Give up operations that the client gave up, so that nothing waits for them."""
        for entry in request.entries:
            assert isinstance(entry, wire.Operation)
            session.kept_reads.drop(entry.sequence)
            session.uploads.fail(entry.sequence, TimeoutError(f"the client gave up the write of key {entry.key!r}"))
            session.order.pass_on([entry])
        reply.send(*wire.pack_answer(len(request.entries), [], [], None))

    # ---- calls

    def begin(self, token: object, namespace: str | None, client: str, sent: object) -> tuple[int, bool]:
        """Begin the session of a client; see ``Sessions.begin``. Return its window in bytes, and ``durable``.

        Raises:
            AuthenticationError: there is no worker of the client's name.
            ValueError: the token has another length, or `sent` is not a time.
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
        """Return dtype, shape and bytes of a key."""
        namespace = self.session(token).namespace
        self._checked(lambda: wire.expect_key(key))
        return namespace.stat(str(key))

    def find(self, token: object, keys: object) -> list[Entry | None]:
        """Return dtype, shape and bytes of many keys; None where there is no such key."""
        namespace = self.session(token).namespace
        names = self._checked(lambda: _expect_keys(keys))
        found = self.store.snapshots([namespace.name_of(key) for key in names])
        return [
            None if snapshot is None else Entry(key, snapshot.dtype, snapshot.shape, snapshot.nbytes)
            for key, snapshot in zip(names, found, strict=True)
        ]

    def trim(self, token: object) -> int:
        """Remove the files that hold nothing; return their bytes."""
        self.session(token)
        return self.store.trim()

    def close(self) -> None:
        """End all sessions, and close the store."""
        self._sessions.close()
        self.store.close()

    # ---- counts

    def statistics(self) -> OffloadServiceStatistics:
        """Return the counts so far."""
        with self._lock:
            return OffloadServiceStatistics(
                clients=len(self._sessions),
                namespaces=self._sessions.namespaces,
                under_way=self._in_flight,
                most_under_way=self._most_in_flight,
                bytes_written=self._written,
                bytes_read=self._read,
                requests=self._latencies.total,
                refused=self._refused,
                late=self._late,
                latency_p50=self._latencies.quantile(0.5),
                latency_p99=self._latencies.quantile(0.99),
            )

    def _checked(self, check: Callable[[], T]) -> T:
        """Return what a check returns; count what it refuses."""
        try:
            return check()
        except (ValueError, TypeError, ChecksumError, AuthenticationError):
            self.count(refused=1)
            raise

    def count(self, *, written: int = 0, read: int = 0, refused: int = 0) -> None:
        """Count bytes that were written or read, and requests that were refused."""
        with self._lock:
            self._refused += refused
            self._written += written
            self._read += read

    def _count_late(self) -> None:
        with self._lock:
            self._late += 1

    def count_in(self, session: ClientSession, nbytes: int) -> tuple[int, int]:
        """Count a request as in flight; return what ``count_out`` takes.

        Raises:
            BlockingIOError: the client has more in flight than twice its window: it does not count what it asks for.
        """
        with self._lock:
            if session.in_flight + nbytes > 2 * self.window:
                self._refused += 1
                raise BlockingIOError(
                    f"{session.in_flight} bytes are in flight for this client, whose window has {self.window}"
                )
            session.in_flight += nbytes
            self._in_flight += nbytes
            self._most_in_flight = max(self._most_in_flight, self._in_flight)
        return nbytes, time.perf_counter_ns()

    def count_out(self, session: ClientSession, counted: tuple[int, int]) -> None:
        """Count a request as answered."""
        nbytes, since = counted
        with self._lock:
            session.in_flight -= nbytes
            self._in_flight -= nbytes
            self._latencies.add(time.perf_counter_ns() - since)


def _is_part(entry: object) -> bool:
    return isinstance(entry, wire.Put) and entry.nbytes > wire.PIECE


def _expect_client(token: object, client: str, sent: object) -> None:
    if client not in current().workers:  # nobody would notice when it is gone
        raise AuthenticationError(f"there is no worker {client!r}")
    if not isinstance(token, bytes) or len(token) != wire.TOKEN:
        raise ValueError(f"a client names its session by {wire.TOKEN} bytes")
    if type(sent) is not float or sent != sent or abs(sent) == float("inf"):
        raise ValueError(f"{sent!r} is not a time")


def _expect_keys(keys: object) -> list[str]:
    if not isinstance(keys, list):
        raise TypeError(f"keys are a list of str, not {type(keys).__qualname__}")
    for key in keys:
        wire.expect_key(key)
    return keys
