"""A namespace of an offload service: its keys in the store, their order of writing, and its quota.

A key of a namespace is ``k<namespace>/<key>`` in the store, or ``k<namespace>~<key>`` if the namespace is private to
one client. ``<namespace>`` is a hash of fixed length: no key of one namespace can look like another's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError, NotFoundError, QuotaError, StorageError
from cudafuture.storage import Entry, Offloader
from rpc_ext.offload._buffers import offload_thread
from rpc_ext.offload._order import KeyQueues
from rpc_ext.offload._wire import Put

__all__ = ["Namespace", "call", "error_of", "names_by_prefix", "no_such_key", "prefix_of"]

_HASH = 16  # characters
_NAME = re.compile(rf"k[0-9a-f]{{{_HASH}}}[/~]")


def prefix_of(namespace: str, is_private: bool) -> str:
    """Return the beginning of the names that a namespace has in the store."""
    hashed = hashlib.blake2b(namespace.encode(), digest_size=_HASH // 2).hexdigest()
    return f"k{hashed}{'~' if is_private else '/'}"


def names_by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    """Sort the names in a store by namespace; each keeps the order.

    Raises:
        StorageError: some are not a service's.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if not _NAME.match(name):
            raise StorageError(f"the folder is a store with keys of another program, such as {name!r}: use another one")
        found.setdefault(name[: _HASH + 2], []).append(name)
    return found


class Namespace:
    """One namespace of a store.

    Args:
        store: of the service.
        prefix: see ``prefix_of``.
        capacity: bytes that its tensors may have, unfinished writes included; None: no limit of its own.
        names: that the store has of it from before, in the order of writing.
    """

    def __init__(self, store: Offloader, prefix: str, capacity: int | None, names: Sequence[str] = ()) -> None:
        self.prefix, self.capacity = prefix, capacity
        self.queues = KeyQueues()
        self._store = store
        self._left_over: collections.deque[str] = collections.deque()  # names that the disk failed to remove
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._sizes: dict[str, int] = {}  # by key, in the order of writing
        self._used = self._tensors = 0  # bytes and number, unfinished writes included
        self._is_gone = False
        if self.is_private:
            self._remove(list(names))
        else:
            self._sizes = {name[len(prefix) :]: store.stat(name).nbytes for name in names}
            self._used, self._tensors = sum(self._sizes.values()), len(self._sizes)

    @property
    def is_private(self) -> bool:
        """True for the namespace of one client, which is deleted with the client."""
        return self.prefix.endswith("~")

    @property
    def is_empty(self) -> bool:
        """True without tensors and unfinished writes."""
        return not self._tensors

    def name_of(self, key: str) -> str:
        """Return the name of a key in the store."""
        return self.prefix + key

    def keys(self) -> list[str]:
        """Return the keys, in the order in which they were written last."""
        with self._lock:
            return list(self._sizes)

    def stat(self, key: str) -> Entry:
        """Return what the store knows of a key.

        Raises:
            NotFoundError: there is no such key.
        """
        try:
            return dataclasses.replace(self._store.stat(self.name_of(key)), key=key)
        except NotFoundError:
            raise no_such_key(key) from None

    # ---- quota

    def take(self, nbytes: int) -> None:
        """Count a tensor that is to be written.

        Raises:
            QuotaError: there is no room for it.
        """
        with self._lock:
            if self.capacity is not None and self._used + nbytes > self.capacity:
                raise QuotaError(
                    f"no room for {nbytes} bytes in the namespace: {self._used} of {self.capacity} are in use"
                )
            self._used += nbytes
            self._tensors += 1

    def give_back(self, nbytes: int) -> None:
        """Count a tensor no more."""
        with self._lock:
            self._used -= nbytes
            self._tensors -= 1

    # ---- changes; each key has its turn

    def write(
        self, entries: Sequence[Put], tensors: list[torch.Tensor], done: Callable[[list[BaseException | None]], None]
    ) -> None:
        """Write tensors for which quota was taken. `done` is called with the error of each, on the offload thread."""
        names = [self.name_of(entry.key) for entry in entries]
        written = torch.zeros(len(entries), dtype=torch.bool, device="cpu")
        digests = {name: entry.digest for name, entry in zip(names, entries, strict=True)}

        def ended(future: CUDAFuture[int]) -> None:
            error = error_of(future)
            if error is not None and len(entries) > 1:
                self._write_each(entries, tensors, written.tolist(), done)
                return
            for entry in entries:
                self.settle(entry.key, entry.nbytes, error)
            done([error] * len(entries))

        call(ended, self._store.writev, dict(zip(names, tensors, strict=True)), digests=digests, written=written)

    def _write_each(
        self,
        entries: Sequence[Put],
        tensors: list[torch.Tensor],
        written: list[bool],
        done: Callable[[list[BaseException | None]], None],
    ) -> None:
        """Write alone the tensors that were not written together, to learn the error of each."""
        errors: list[BaseException | None] = [None] * len(entries)
        left = len(entries)

        def ended(i: int, error: BaseException | None) -> None:
            nonlocal left
            errors[i] = error
            left -= 1  # on the offload thread: one at a time
            if not left:
                done(errors)

        for i, (entry, tensor, was_written) in enumerate(zip(entries, tensors, written, strict=True)):
            if was_written:
                self.settle(entry.key, entry.nbytes, None)
                ended(i, None)
            else:
                self.write([entry], [tensor], lambda found, i=i: ended(i, found[0]))  # type: ignore[misc]

    def settle(self, key: str, nbytes: int, error: BaseException | None) -> None:
        """Count a write that has ended, and the tensor that it has replaced."""
        with self._lock:
            if error is None and not self._is_gone:
                replaced = self._sizes.pop(key, None)
                self._sizes[key] = nbytes
                if replaced is not None:
                    self._used -= replaced
                    self._tensors -= 1
                return
            self._used -= nbytes
            self._tensors -= 1
        if error is None:  # the namespace went meanwhile
            self._remove([self.name_of(key)])

    def delete(self, key: str, done: Callable[[BaseException | None], None]) -> None:
        """Delete a key; NotFoundError where there is none. `done` is called on the offload thread."""

        def ended(future: CUDAFuture[None]) -> None:
            error = error_of(future)
            if isinstance(error, NotFoundError):
                error = no_such_key(key)
            if error is None:
                with self._lock:
                    nbytes = self._sizes.pop(key, None)
                    if nbytes is not None:
                        self._used -= nbytes
                        self._tensors -= 1
            done(error)

        call(ended, self._store.deletev, [self.name_of(key)])

    def clear(self) -> None:
        """Delete all keys for good, also those that are being written."""
        with self._lock:
            self._is_gone = True
            names = [self.name_of(key) for key in self._sizes]
            self._used -= sum(self._sizes.values())
            self._tensors -= len(self._sizes)
            self._sizes = {}
        while self._left_over:
            names.append(self._left_over.popleft())
        self._remove(names)

    def _remove(self, names: list[str]) -> None:
        """Delete names that no reader looks for. What the disk fails to delete is deleted by the next ``clear``."""
        if not names:
            return

        def ended(future: CUDAFuture[None]) -> None:
            if error_of(future) is not None:
                with contextlib.suppress(InvalidStateError):  # the store was closed
                    self._left_over.extend(name for name in names if name in self._store)

        call(ended, self._store.deletev, names)


def no_such_key(key: str) -> NotFoundError:
    """Return the error of a key that is not there."""
    return NotFoundError(f"there is no key {key!r}")


def call(done: Callable[[CUDAFuture[Any]], None], start: Callable[..., CUDAFuture[Any]], *args: Any, **kw: Any) -> None:
    """Start an operation of the store, and call `done` with its future on the offload thread, also if it raises."""
    try:
        future = start(*args, **kw)
    except Exception as e:
        future = CUDAFuture.failed(e.with_traceback(None))
    future.add_done_callback(done, executor=offload_thread)


def error_of(future: CUDAFuture[Any]) -> BaseException | None:
    """Return the error of a future that is done, without its traceback: its frames hold the tensors of the call."""
    error = future.exception()
    return error if error is None else error.with_traceback(None)
