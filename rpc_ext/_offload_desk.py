"""Where other workers' reads and writes of this one's NVMe come in.

::

    begin ──► session: a namespace and a window of bytes
    put   ──► headers ──► quota ──► in the key's turn ──► store ──► answer
    get   ──► what is wanted ──► store ──► headers and bytes ──► answer

A request names its service and its session; all else that it says is a block of headers (see ``_offload_wire``).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from cudafuture import CUDAFuture, collect_all, executors
from cudafuture.errors import AuthenticationError, ChecksumError, NotFoundError
from cudafuture.storage import Offloader, empty
from rpc_ext._histogram import Histogram
from rpc_ext._memory import arrived, carried
from rpc_ext._offload_calls import Answer, Found, Terms
from rpc_ext._offload_errors import for_client
from rpc_ext._offload_order import Late
from rpc_ext._offload_requests import expect_good_company, expect_worker, expiries_of, stamp_of, time_of, token_of
from rpc_ext._offload_sessions import ClientSession, Sessions
from rpc_ext._offload_statistics import OffloadServiceStatistics
from rpc_ext._offload_thread import service_thread
from rpc_ext._offload_wire import PIECE, WHOLE, Header, expect_key, pack, piece_of, unpack, unpack_wanted, view_of
from rpc_ext._turns import begun

__all__ = ["Desk"]

T = TypeVar("T")
_LINE = 64  # bytes: what small tensors of one answer lie at


class Desk:
    """Where the requests of an offload service are answered."""

    def __init__(
        self,
        name: str,
        store: Offloader,
        memory: int,
        clients: int,
        namespace_capacity: int | None,
        patience: float = 60.0,
    ) -> None:
        self.name = name
        self.store = store
        self._window = memory // clients
        self._sessions = Sessions(name, store, clients, self._window, namespace_capacity, patience, self._count_late)
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._under_way = self._most_under_way = 0
        self._written = self._read = self._refused = self._late = 0
        self._latencies = Histogram()

    # ---- sessions

    def begin(self, token: object, namespace: str | None, client: str, sent: object) -> Terms:
        """Begin the session of a client; see ``Sessions.begin``.

        Raises:
            AuthenticationError: the client names a worker that there is not.
            ValueError: the token has another length, or `sent` is not a time.
        """
        self._checked(expect_worker, client)
        self._sessions.begin(self._checked(token_of, token), namespace, client, self._checked(time_of, sent))
        return Terms(self._window, self.store.durable)

    def end(self, token: bytes) -> None:
        """End the session of a client."""
        self._sessions.end(token)

    def session(self, token: object) -> ClientSession:
        """Return the session that a token belongs to; see ``Sessions.find``."""
        return self._checked(self._sessions.find, token)

    # ---- put

    def put(
        self, token: object, stamp: object, block: object, data: object, expiries: object = ()
    ) -> CUDAFuture[Answer]:
        """Write tensors. `expiries` are those of the single changes, where they differ from the request's."""
        session = self.session(token)
        when = self._checked(stamp_of, stamp)
        data = self._checked(arrived, data)
        headers = self._checked(lambda: unpack(block, data.numel()))
        self._checked(expect_good_company, headers)
        until = self._checked(expiries_of, expiries, when, headers)
        try:
            session.order.expect_in_time(when)
        except TimeoutError:
            if headers[0].pieces > 1:
                session.uploads.give_up(headers[0].upload)
            raise
        session.order.change(when, until)
        late = partial(session.order.late, when, until)
        if headers[0].pieces == 1:
            return self._answered(session, data.numel(), lambda: self._put_wholes(session, headers, data, late))
        left = session.order.left(until[headers[0].key])
        return self._answered(session, data.numel(), lambda: self._put_piece(session, headers[0], data, late, left))

    def _put_wholes(
        self, session: ClientSession, headers: list[Header], data: torch.Tensor, late: Late
    ) -> CUDAFuture[Answer]:
        failures: list[tuple[int, BaseException]] = []
        taken: list[int] = []
        for i, header in enumerate(headers):
            try:
                session.space.index.take(header.nbytes)
                taken.append(i)
            except Exception as e:
                failures.append((i, for_client(header.key, e)))
        if not taken:
            return CUDAFuture.completed(Answer(failures))

        def answer(done: CUDAFuture[list[BaseException | None]]) -> Answer:
            ended = zip(taken, done.value(), strict=True)
            failed = [(i, self._refusal(headers[i], e)) for i, e in ended if e is not None]
            self._count(written=sum(headers[i].nbytes for i in taken) - sum(headers[i].nbytes for i, _ in failed))
            return Answer([*failures, *failed])

        try:
            return session.space.write([headers[i] for i in taken], data, late).then(answer, executor=service_thread)
        except BaseException:
            for i in taken:
                session.space.index.give_back(headers[i].nbytes)
            raise

    def _put_piece(
        self, session: ClientSession, header: Header, data: torch.Tensor, late: Late, left: float
    ) -> CUDAFuture[Answer]:
        if (error := late(header.key)) is not None:
            session.uploads.give_up(header.upload)
            return CUDAFuture.completed(Answer([(0, error)]))

        def answer(done: CUDAFuture[None]) -> Answer:
            error = done.exception()
            if error is not None:
                return Answer([(0, self._refusal(header, error))])
            self._count(written=header.length)
            return Answer([])

        return self._checked(session.uploads.put, header, data, late, left).then(answer, executor=service_thread)

    def _refusal(self, header: Header, error: BaseException) -> BaseException:
        """Return the error of a failed write for the client."""
        if isinstance(error, ChecksumError):
            self._count(refused=1)
            return ChecksumError(
                f"key {header.key!r}: the {header.length} bytes that have come are not those that were sent"
            )
        return for_client(header.key, error, header.nbytes)

    def give_up(self, token: object, upload: object) -> None:
        """Give up what the client cannot finish."""
        session = self.session(token)
        if isinstance(upload, bytes):
            session.uploads.give_up(upload)

    # ---- get

    def get(self, token: object, stamp: object, block: object) -> CUDAFuture[Answer]:
        """Read keys, as many as one answer can hold."""
        session = self.session(token)
        session.order.expect_in_time(self._checked(stamp_of, stamp))
        failures: list[tuple[int, BaseException]] = []
        found: list[tuple[int, str, Header]] = []
        left: list[int] = []
        end = 0
        all_wanted = self._checked(unpack_wanted, block)
        for i, wanted in enumerate(all_wanted):
            try:
                name, header = session.space.place_of(wanted)
            except Exception as e:
                failures.append((i, for_client(wanted.key, e)))
                continue
            at = math.ceil(end / _LINE) * _LINE
            if found and at + header.length > PIECE:
                left.append(i)
            else:
                found.append((i, name, header._replace(at=at)))
                end = at + header.length
        if not found:
            return CUDAFuture.completed(Answer(failures))

        names = [name for _, name, _ in found]
        digests = torch.empty(len(found), dtype=torch.uint64, device="cpu")

        def answer(data: torch.Tensor, errors: list[BaseException | None]) -> Answer:
            headers = []
            for (i, name, header), error, digest in zip(found, errors, digests.tolist(), strict=True):
                if error is None:
                    headers.append(header._replace(checksum=digest))
                    continue
                may_be_late = isinstance(error, (NotFoundError, ValueError))
                if may_be_late and session.space.has_changed(all_wanted[i], name, header):
                    left.append(i)  # it was replaced or deleted just now: to be asked for again
                elif isinstance(error, NotFoundError):  # it was not there; the store has another name for it
                    failures.append((i, NotFoundError(f"there is no key {header.key!r}")))
                else:
                    failures.append((i, for_client(header.key, error, header.nbytes)))
            self._count(read=sum(h.length for h in headers))
            if not headers:
                return Answer(failures, left=left)
            headers, sent = (headers, data) if len(headers) == len(found) else _moved_together(headers, data)
            for header in headers:
                behind = header.at + header.length
                sent[behind : behind + -behind % _LINE].zero_()  # it is sent, too, and was others' bytes before
            return Answer(failures, pack(headers), carried(sent), left)

        def whose_fault(
            data: torch.Tensor, outs: list[torch.Tensor], done: CUDAFuture[list[torch.Tensor]]
        ) -> CUDAFuture[Answer]:
            error = done.exception()
            if error is None or len(found) == 1:
                return CUDAFuture.completed(answer(data, [error] * len(found)))
            each = zip(names, outs, digests.tensor_split(len(found)), strict=True)
            parts = [self._read_store([name], [out], own) for name, out, own in each]
            return collect_all(parts).then(
                lambda ended: answer(data, [part.exception() for part in ended.value()]), executor=service_thread
            )

        def read(taken: CUDAFuture[torch.Tensor]) -> CUDAFuture[Answer]:
            data = taken.value()
            outs = [view_of(data, h) if h.upload == WHOLE else piece_of(data, h) for _, _, h in found]
            return self._read_store(names, outs, digests).then_async(
                partial(whose_fault, data, outs), executor=service_thread
            )

        def begin() -> CUDAFuture[Answer]:
            return session.buffers.take(end).then_async(read, executor=executors.inline)

        return self._answered(session, end, begin)

    def _read_store(
        self, names: list[str], outs: list[torch.Tensor], digests: torch.Tensor
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Call `readv` and return its future; if `readv` raises, return a failed future.

        The error has no traceback: see ``for_client``.
        """
        try:
            return self.store.readv(names, outs, digests=digests)
        except BaseException as e:
            return CUDAFuture.failed(e.with_traceback(None))

    # ---- the rest

    def delete(self, token: object, stamp: object, block: object) -> CUDAFuture[Answer]:
        """Delete keys."""
        session = self.session(token)
        when = self._checked(stamp_of, stamp)
        session.order.expect_in_time(when)
        keys = [wanted.key for wanted in self._checked(unpack_wanted, block)]
        until = dict.fromkeys(keys, when.expires)
        session.order.change(when, until)
        parts = [session.space.delete(key, partial(session.order.late, when, until)) for key in keys]
        return collect_all(parts).then(
            lambda done: Answer(
                [
                    (i, for_client(keys[i], e))
                    for i, part in enumerate(done.value())
                    if (e := part.exception()) is not None
                ]
            ),
            executor=service_thread,
        )

    def keys(self, token: object) -> list[str]:
        """Return the keys of a client's namespace."""
        return self.session(token).space.keys()

    def stat(self, token: object, key: object) -> Found:
        """Return dtype, shape and bytes."""
        space = self.session(token).space
        self._checked(expect_key, key)
        header = space.stat(str(key))
        return header.dtype, header.shape, header.nbytes

    def find(self, token: object, block: object) -> list[Found | None]:
        """Return dtype, shape and bytes of many keys; None where there is no such key."""
        found: list[Found | None] = []
        for wanted in self._checked(unpack_wanted, block):
            try:
                found.append(self.stat(token, wanted.key))
            except NotFoundError:
                found.append(None)
        return found

    def trim(self, token: object) -> int:
        """Remove the files in which nothing is; return their bytes."""
        self.session(token)
        return self.store.trim()

    def statistics(self) -> OffloadServiceStatistics:
        """Return what there is, and what has been done so far."""
        with self._lock:
            return OffloadServiceStatistics(
                clients=len(self._sessions),
                namespaces=self._sessions.namespaces,
                under_way=self._under_way,
                most_under_way=self._most_under_way,
                bytes_written=self._written,
                bytes_read=self._read,
                requests=self._latencies.total,
                refused=self._refused,
                late=self._late,
                latency_p50=self._latencies.quantile(0.5),
                latency_p99=self._latencies.quantile(0.99),
            )

    def close(self) -> None:
        """End all sessions, and close the store."""
        self._sessions.close()
        self.store.close()

    # ---- counting

    def _checked(self, check: Callable[..., T], *args: Any) -> T:
        """Return what a check returns; count what it refuses."""
        try:
            return check(*args)
        except (ValueError, TypeError, ChecksumError, AuthenticationError):
            with self._lock:
                self._refused += 1
            raise

    def _count(self, written: int = 0, read: int = 0, refused: int = 0) -> None:
        with self._lock:
            self._refused += refused
            self._written += written
            self._read += read

    def _count_late(self) -> None:
        with self._lock:
            self._late += 1

    def _answered(
        self, session: ClientSession, nbytes: int, begin: Callable[[], CUDAFuture[Answer]]
    ) -> CUDAFuture[Answer]:
        """Begin a request of so many bytes, which are under way until it is answered.

        Raises:
            BlockingIOError: the client has more under way than its window, twice: it did not count what it asked for.
        """
        since = time.perf_counter_ns()
        with self._lock:
            if session.under_way + nbytes > 2 * self._window:
                self._refused += 1
                raise BlockingIOError(
                    f"{session.under_way} bytes are under way for this client, whose window has {self._window}"
                )
            session.under_way += nbytes
            self._under_way += nbytes
            self._most_under_way = max(self._most_under_way, self._under_way)

        def ended(_: object) -> None:
            with self._lock:
                session.under_way -= nbytes
                self._under_way -= nbytes
                self._latencies.add(time.perf_counter_ns() - since)

        answer = begun(begin)
        answer.add_done_callback(ended, executor=executors.inline)
        return answer


def _moved_together(headers: list[Header], data: torch.Tensor) -> tuple[list[Header], torch.Tensor]:
    """Return the bytes that headers describe without those between them, and headers of that."""
    moved: list[Header] = []
    end = 0
    for header in headers:
        moved.append(header._replace(at=math.ceil(end / _LINE) * _LINE))
        end = moved[-1].at + header.length
    together = empty(end, torch.uint8)
    for header, new in zip(headers, moved, strict=True):
        piece_of(together, new).copy_(piece_of(data, header))
    return moved, together
