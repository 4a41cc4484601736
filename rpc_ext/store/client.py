"""A store of tensors by key on the disk of another worker.

One small write, both sides together::

     1  RemoteStore.write             checks the arguments                                client
     2  write                         a StoreOperation with the user's future, a request  client/bind, operation
     3  Window::submit                in order on its key, with a deadline                client/window
     4  WriteBatch::start             copies the bytes into a buffer, takes their digests client/writes
     5  Window::send, Channel::send   packs the request, sends it                         wire/message, channel
     6  MessageRoute::handle          unpacks it, finds the session                       service/service
     ...                              order, quota, store, reply; see there
    11  StoreMessage::answered        unpacks the reply                                   client/request, wire/parser
    12  Window::end, StoreOperation   completes the user's future                         client/window, operation

The folders are those of ``rpc_ext/_C/store``. From 2 on, all of it is native code that takes no GIL. Tensors of more
than 16 MiB are sent in parts, several at a time. Reads take the same path, with ``client/reads`` in place of
``writes``.
"""

from __future__ import annotations

import math
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from cudafuture import CUDAFuture, executors, gather, openmetrics, timer
from cudafuture.errors import InvalidStateError, NotFoundError
from cudafuture.ownership import owns, tensors_by_key
from cudafuture.store import Entry
from cudafuture.store.arguments import (
    device_to_read_into,
    expect_one_for_each,
    expect_readable,
    expect_tensors,
    expect_writable,
    expected_digests,
    listed_keys,
    tensors_to_fill,
)
from rpc_ext import _C
from rpc_ext._channel import channel
from rpc_ext.calls import Worker, rpc_async, rpc_sync
from rpc_ext.session import current
from rpc_ext.store import _calls as calls
from rpc_ext.store import _closing as closing
from rpc_ext.store._errors import named
from rpc_ext.store._statistics import RemoteStoreStatistics
from rpc_ext.store._wire import TOKEN

__all__ = ["RemoteStore"]

T = TypeVar("T")

_MOST_KEYS = 16384  # in one call


class RemoteStore:
    """A store of tensors by key that another worker serves (``serve_store``).

    It has the methods of the ``Store`` protocol; docs/remote-stores.md lists its differences from ``DiskStore``.

    Tensors are sent in parts of 16 MiB, several at a time, and small tensors in batches. The service limits the bytes
    that a client has in flight; further requests wait in the client, without a thread.

    Args:
        to: the worker, by name, rank or WorkerInfo. It may be this worker.
        namespace: namespace of the keys. Clients that pass the same name share its keys, which survive the clients. By
            default the keys are private to this client, and the service deletes them when the client is closed.
        name: name of the service.
        timeout: seconds from the start of an operation to its outcome, including waits in the client; default:
            ``rpc_timeout`` of ``init_rpc``. inf: no limit.

    Raises:
        InvalidStateError: RPC has not begun, or the worker has no such service.
        BlockingIOError: the service has its most clients.
        TypeError: `namespace` or `name` is not a str.
        WorkerLostError, TimeoutError, AuthenticationError: as for any call.
    """

    def __init__(
        self, to: Worker, *, namespace: str | None = None, name: str = "store", timeout: float | None = None
    ) -> None:
        for what, text in (("namespace", namespace), ("name", name)):
            if not isinstance(text, str) and (what == "name" or text is not None):
                raise TypeError(f"{what} is a str, not {text!r}")
        session = current()
        destination = session.destination(to)
        self._worker, self._session = destination.name, weakref.ref(session)
        self._name, self._timeout = name, session.timeout(timeout)
        self._token = secrets.token_bytes(TOKEN)
        closing.begin()
        try:
            arguments = name, self._token, namespace, session.name, time.perf_counter()
            size, self._durable = rpc_sync(self._worker, calls.begin, arguments, timeout=timeout)
        except BaseException:  # the service may nevertheless have begun a session
            closing.note(self._session, self._worker, name, self._token)
            raise
        sender = channel(session, destination, calls.CHANNEL, f"store service {name!r}")
        self._window = _C.StoreWindow(
            sender, name, self._token, self._worker, size, self._timeout, named, timer.schedule
        )
        openmetrics.add(self, "remote_store", worker=self._worker, service=name)
        self._closed = False
        self._asked: set[CUDAFuture[Any]] = set()  # queries in flight, which close() waits for
        self._end = weakref.finalize(self, closing.note, self._session, self._worker, name, self._token)
        self._end.atexit = False

    @property
    def worker(self) -> str:
        """The name of the worker that serves the store."""
        return self._worker

    @property
    def durable(self) -> bool:
        """True if the keys survive the end of the service."""
        return self._durable

    # ---- writing

    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        """Write a tensor as ``DiskStore.write`` does.

        The future may also fail with WorkerLostError or TimeoutError; in that case the key may have been written or
        not. ``future.released`` is done when a tensor on a device was copied to the host, a small tensor was copied
        into a message, or any other tensor was written. A key has at most 1,000 bytes.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.write("weight", torch.eye(3)).wait()
        36
        """
        return self.writev({key: tensor}, priority=priority)

    @owns("writev", lambda _, tensors, **__: tensors_by_key(tensors))
    def writev(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        digests: Mapping[str, int] | None = None,
        written: torch.Tensor | None = None,
    ) -> CUDAFuture[int]:
        """Write many tensors, each as by ``write``; see ``DiskStore.writev``.

        The service verifies the bytes of tensors with a digest: a tensor that changes while it is sent is not written.
        This takes no further pass over the bytes. `written` is also False for a key that may have been written.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.writev({"weight": torch.eye(3), "bias": torch.zeros(3)}).wait()
        48
        """
        expect_tensors(tensors)
        expected = [None] * len(tensors) if digests is None else expected_digests(tensors, digests)
        if written is not None:
            expect_one_for_each(written, torch.bool, len(tensors), "written")
        self._expect_open()
        if not tensors:
            return CUDAFuture.completed(0)
        names, values = map(list, zip(*tensors.items(), strict=True))
        try:
            return self._window.write(names, values, priority, expected, written)
        except TypeError:
            expect_writable(tensors, priority)
            raise

    # ---- reading

    def read(
        self,
        key: str,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[torch.Tensor]:
        """Read a tensor as ``DiskStore.read`` does, but fail the future if `out` has a wrong dtype or shape.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.write("weight", torch.arange(3)).wait()
        ...     remote.read("weight").wait()
        tensor([0, 1, 2])
        """
        if device is not None:
            device = device_to_read_into(out, device)
        self._expect_open()
        outs = None if out is None else [out]
        try:
            return self._window.read([key], outs, device, priority, False, None)
        except TypeError:
            expect_readable([key], outs, priority)
            raise

    def readv(
        self,
        keys: Iterable[str],
        outs: Sequence[torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
        digests: torch.Tensor | None = None,
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Read many tensors, each as by ``read``; see ``DiskStore.readv``.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.writev({"a": torch.ones(2), "b": torch.zeros(1)}).wait()
        ...     remote.readv(["b", "a"]).wait()
        [tensor([0.]), tensor([1., 1.])]
        """
        names = listed_keys(keys)
        if device is not None:
            device = device_to_read_into(outs, device)
        into = None if outs is None else tensors_to_fill(outs, len(names))
        expect_one_for_each(digests, torch.uint64, len(names), "digests")
        self._expect_open()
        if not names:
            return CUDAFuture.completed([])
        try:
            return self._window.read(names, into, device, priority, True, digests)
        except TypeError:
            expect_readable(names, into, priority)
            raise

    # ---- keys

    def keys(self) -> list[str]:
        """Return all keys of the namespace, as ``DiskStore.keys``. Blocks until the service has replied.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.keys()
        []
        """
        self._expect_open()
        return rpc_sync(self._worker, calls.keys, (self._name, self._token), timeout=self._timeout or math.inf)

    def __contains__(self, key: str) -> bool:
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    def __len__(self) -> int:
        return len(self.keys())

    def stat(self, key: str) -> Entry:
        """Return dtype, shape and size of a key, as ``DiskStore.stat``. Blocks until the service has replied.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        _C.expect_key(key)
        self._expect_open()
        return rpc_sync(self._worker, calls.stat, (self._name, self._token, key), timeout=self._timeout or math.inf)

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Return a future of the entries of many keys, None for each missing key; see ``DiskStore.find``.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     [entry and entry.nbytes for entry in remote.find(["weight", "bias"]).wait()]
        [36, None]
        """
        self._expect_open()
        names = list(keys)
        for key in names:
            _C.expect_key(key)
        groups = [names[i : i + _MOST_KEYS] for i in range(0, len(names), _MOST_KEYS)]

        def entries(done: CUDAFuture[list[list[Entry | None]]]) -> list[Entry | None]:
            return [entry for group in done.value() for entry in group]

        asked = [self._ask("find keys", calls.find, group) for group in groups]
        return gather(*asked).then(entries, executor=executors.inline)

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of ``keys()``.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.list_keys().wait()
        []
        """
        return self._ask("list keys", calls.keys)

    def delete(self, key: str) -> CUDAFuture[None]:
        """Delete a key as ``DiskStore.delete`` does.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.delete("weight").wait()
        ...     "weight" in remote
        False
        """
        return self.deletev([key])

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        """Delete many keys as ``DiskStore.deletev`` does.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.deletev([]).wait()
        """
        names = listed_keys(keys)
        self._expect_open()
        if not names:
            return CUDAFuture.completed(None)
        return self._window.delete(names)

    # ---- the end

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done, as ``DiskStore.flush``.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.flush().wait()
        """
        self._expect_open()
        return self._window.flush(with_reads=False)

    def trim(self) -> int:
        """Remove the empty files of the service, as ``DiskStore.trim``. Blocks until the service has replied.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.trim()
        0
        """
        self._expect_open()
        return rpc_sync(self._worker, calls.trim, (self._name, self._token), timeout=self._timeout or math.inf)

    def statistics(self) -> RemoteStoreStatistics:
        """Return the statistics of this client.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.statistics().bytes_written
        36
        """
        return RemoteStoreStatistics(**self._window.statistics())

    def close(self) -> None:
        """Wait for all operations, and end the session at the service, which then deletes private keys.

        >>> from rpc_ext import serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.close()
        """
        if self._closed:
            return
        self._closed = True
        self._window.flush(with_reads=True).exception()
        for future in list(self._asked):
            future.exception()
        timer.cancel(self._window)  # otherwise the timer keeps the window and its buffers until the last deadline
        if self._end.detach() is not None:
            closing.end(self._session, self._worker, self._name, self._token, self._timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteStore {self._name!r} of worker {self._worker!r}>"

    # ---- implementation

    def _expect_open(self) -> None:
        if self._closed:
            raise InvalidStateError("the store is closed")

    def _ask(self, what: str, fn: Callable[..., T], *args: Any) -> CUDAFuture[T]:
        """Call a function of the service; return the future of its result."""
        self._expect_open()

        def answer(done: CUDAFuture[T]) -> T:
            if (error := done.exception()) is not None:
                raise named(error, what, self._worker)
            return done.value()

        asked = rpc_async(self._worker, fn, (self._name, self._token, *args), timeout=self._timeout or math.inf)
        told = asked.then(answer)
        self._asked.add(told)
        told.add_done_callback(self._asked.discard, executor=executors.inline)
        return told
