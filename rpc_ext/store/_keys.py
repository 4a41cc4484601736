"""Queries of a client about keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from cudafuture import CUDAFuture, executors, gather
from cudafuture.errors import NotFoundError
from cudafuture.store import Entry
from rpc_ext.calls import rpc_async, rpc_sync
from rpc_ext.store import _calls as calls
from rpc_ext.store._errors import named
from rpc_ext.store._wire import expect_key

__all__ = ["RemoteKeys"]

T = TypeVar("T")
_MOST_KEYS = 16384  # in one call


class RemoteKeys:
    """The methods of ``RemoteStore`` that find and list keys."""

    _worker: str
    _name: str  # of the service
    _token: bytes
    _timeout: float
    _closed: bool
    _asked: set[CUDAFuture[Any]]  # queries in flight, which close() waits for

    def keys(self) -> list[str]:
        """Return all keys of the namespace, as ``DiskStore.keys``. Blocks until the service has replied.

        >>> from rpc_ext import RemoteStore, serve_store
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

        >>> import torch
        >>> from rpc_ext import RemoteStore, serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        expect_key(key)
        self._expect_open()
        return rpc_sync(self._worker, calls.stat, (self._name, self._token, key), timeout=self._timeout or math.inf)

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Return a future of the entries of many keys, None for each missing key; see ``DiskStore.find``.

        >>> import torch
        >>> from rpc_ext import RemoteStore, serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     [entry and entry.nbytes for entry in remote.find(["weight", "bias"]).wait()]
        [36, None]
        """
        self._expect_open()
        names = list(keys)
        for key in names:
            expect_key(key)
        groups = [names[i : i + _MOST_KEYS] for i in range(0, len(names), _MOST_KEYS)]

        def entries(done: CUDAFuture[list[list[Entry | None]]]) -> list[Entry | None]:
            return [entry for group in done.value() for entry in group]

        asked = [self._ask("find keys", calls.find, group) for group in groups]
        return gather(*asked).then(entries, executor=executors.inline)

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of ``keys()``.

        >>> from rpc_ext import RemoteStore, serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.list_keys().wait()
        []
        """
        return self._ask("list keys", calls.keys)

    def trim(self) -> int:
        """Remove the empty files of the service, as ``DiskStore.trim``. Blocks until the service has replied.

        >>> from rpc_ext import RemoteStore, serve_store
        >>> with serve_store("served"), RemoteStore("me") as remote:
        ...     remote.trim()
        0
        """
        self._expect_open()
        return rpc_sync(self._worker, calls.trim, (self._name, self._token), timeout=self._timeout or math.inf)

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

    def _expect_open(self) -> None:
        """Raise InvalidStateError if the store is closed."""
        raise NotImplementedError
