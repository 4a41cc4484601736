"""What a client asks its offload service about keys, and not about tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from cudafuture import CUDAFuture, executors, gather
from cudafuture.errors import InvalidStateError, NotFoundError
from cudafuture.storage import Entry
from rpc_ext import _offload_calls as calls
from rpc_ext._offload_errors import named
from rpc_ext._offload_wire import MOST_HEADERS, Wanted, expect_key, pack_wanted
from rpc_ext.calls import rpc_async, rpc_sync

__all__ = ["RemoteKeys"]

T = TypeVar("T")


class RemoteKeys:
    """The methods of ``RemoteOffloader`` that find and list keys."""

    _worker: str
    _name: str  # of the service
    _token: bytes
    _timeout: float
    _closed: bool
    _asked: set[CUDAFuture[Any]]  # what close() waits for, beside reads and writes

    def keys(self) -> list[str]:
        """Return all keys of the namespace, in the order in which they were written last. Waits for the service.

        >>> from rpc_ext import RemoteOffloader, serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
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
        """Return what is known of a key. Asks the service, and waits.

        Raises:
            NotFoundError: there is no such key.

        >>> from rpc_ext import RemoteOffloader, serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        expect_key(key)
        self._expect_open()
        dtype, shape, nbytes = rpc_sync(
            self._worker, calls.stat, (self._name, self._token, key), timeout=self._timeout or math.inf
        )
        return Entry(key, dtype, torch.Size(shape), nbytes)

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Return a future of what is known of each key, None where there is no such key.

        >>> from rpc_ext import RemoteOffloader, serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     [entry and entry.nbytes for entry in remote.find(["weight", "bias"]).wait()]
        [36, None]
        """
        self._expect_open()
        names = list(keys)
        blocks = [
            pack_wanted([Wanted(key) for key in names[i : i + MOST_HEADERS]])
            for i in range(0, len(names), MOST_HEADERS)
        ]

        def entries(done: CUDAFuture[list[list[calls.Found | None]]]) -> list[Entry | None]:
            found = [each for some in done.value() for each in some]
            return [
                each and Entry(key, each[0], torch.Size(each[1]), each[2])
                for key, each in zip(names, found, strict=True)
            ]

        asked = [self._ask("find keys", calls.find_keys, block) for block in blocks]
        return gather(*asked).then(entries, executor=executors.inline)

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of ``keys()``.

        >>> from rpc_ext import RemoteOffloader, serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.list_keys().wait()
        []
        """
        return self._ask("list keys", calls.keys)

    def trim(self) -> int:
        """Remove the files of the service in which nothing is, and return their bytes. Asks the service, and waits.

        >>> from rpc_ext import RemoteOffloader, serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.trim()
        0
        """
        self._expect_open()
        return rpc_sync(self._worker, calls.trim, (self._name, self._token), timeout=self._timeout or math.inf)

    def _ask(self, what: str, fn: Callable[..., T], *args: Any) -> CUDAFuture[T]:
        """Ask the service for what concerns no tensor."""
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
        if self._closed:
            raise InvalidStateError("the offloader is closed")
