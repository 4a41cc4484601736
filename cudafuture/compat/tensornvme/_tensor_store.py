"""Store of an offloader's tensors on disk: reads and writes as operations that complete one after the other."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.compat.tensornvme._completions import PendingOperation
from cudafuture.compat.tensornvme._tensor_memory import Place, TensorMemory
from cudafuture.errors import CUDAFutureError, TensorError
from cudafuture.store.disk_store import DiskStore

__all__ = ["PendingRead", "PendingWrite", "TensorStore"]

_logger = logging.getLogger("cudafuture.compat.tensornvme")

Name = tuple[bool, tuple[Place, ...]]
"""A flag that is True for a list, and the memory of its tensors."""


class Stored:
    """Entry of a stored tensor or list: its keys in the store, and the storages that own it."""

    def __init__(self, keys: list[str], memory: list[TensorMemory], on_death: Callable[[object], None]) -> None:
        self.keys = keys
        self._storages = [weakref.ref(m.storage, on_death) for m in memory]

    def is_lost(self) -> bool:
        """Return True if no tensor is left that could read it."""
        return any(ref() is None for ref in self._storages)


class TensorStore:
    """Memory of tensors, in a DiskStore.

    An entry belongs to the storage of a tensor, by a weak reference. When a storage is freed, at any moment and under
    any lock, its name is recorded; the next operation deletes the entry.
    """

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.lock = threading.Lock()  # guards the fields below
        self.known: dict[Name, Stored] = {}
        self._dead: deque[Name] = deque()
        self._numbers = itertools.count()

    def new(self, name: Name, memory: list[TensorMemory]) -> Stored:
        """Return an entry with new keys, which are not written yet."""
        number, dead = next(self._numbers), self._dead
        keys = [f"{number}.{i}" for i in range(len(memory))]
        return Stored(keys, memory, lambda _: dead.append(name))

    def forget_lost(self) -> None:
        """Delete the entries that no tensor can read any more. The caller holds the lock."""
        while self._dead:
            name = self._dead.popleft()
            stored = self.known.get(name)
            if stored is not None and stored.is_lost():
                del self.known[name]
                self.store.deletev(stored.keys)  # an error is logged: no caller can receive it

    def delete(self, keys: list[str]) -> None:
        """Delete those of the keys that exist, and block. An error only costs room on disk, and is logged."""
        try:
            there = [key for key in keys if key in self.store]
            if there:
                self.store.deletev(there).wait()
        except CUDAFutureError as e:
            _logger.warning("deleting replaced tensors failed, so they still take room on disk: %s", e)


class _OfTensors(PendingOperation):
    def __init__(
        self,
        store: TensorStore,
        value: torch.Tensor | list[torch.Tensor],
        callback: Callable[[], object] | None = None,
        reported: bool = False,
    ) -> None:
        tensors = value if isinstance(value, list) else [value]
        super().__init__([TensorMemory(tensor) for tensor in tensors], callback, reported)
        self.store = store
        self.name = isinstance(value, list), tuple(m.place for m in self.memory)


class PendingWrite(_OfTensors):
    """Write of tensors to disk."""

    reads = False

    def begin(self) -> CUDAFuture[Any]:
        """Write under new keys, so that the previous entry stays intact until the write has succeeded."""
        self.store.forget_lost()
        for m in self.memory:
            if not m.is_there:
                raise TensorError(self._why_missing(m))
        self.stored = self.store.new(self.name, self.memory)
        self.free = [m for m in self.memory if m.can_be_freed]
        views = (m.bytes() for m in self.memory)
        return self.store.store.writev(dict(zip(self.stored.keys, views, strict=True)))

    def _why_missing(self, memory: TensorMemory) -> str:
        if any(memory.place[0] == place[0] for _, places in self.store.known for place in places):
            return "the tensor has no memory to write, because it is on disk already; read it first"
        needed = memory.offset + memory.nbytes
        return (
            f"the storage of the tensor has {memory.storage.nbytes()} bytes, but its elements need {needed}: the "
            "program has freed or shrunk it; write the tensor before"
        )

    def finish(self) -> None:
        """Free the memory, and replace the previous entry by the new one."""
        try:
            self.written: int = self.transfer.value()
        except Exception:
            self.store.delete(self.stored.keys)  # some tensors of a list may have been written
            raise
        for m in self.free:
            m.free()
        with self.store.lock:
            replaced = self.store.known.get(self.name)
            self.store.known[self.name] = self.stored
        if replaced is not None:
            self.store.delete(replaced.keys)

    def value(self) -> int:
        """Return the bytes that were written."""
        return self.written


class PendingRead(_OfTensors):
    """Read of tensors back into memory."""

    reads = True

    def __init__(
        self,
        store: TensorStore,
        value: torch.Tensor | list[torch.Tensor],
        callback: Callable[[], object] | None = None,
        reported: bool = False,
    ) -> None:
        super().__init__(store, value, callback, reported)
        self.filled = value

    def begin(self) -> CUDAFuture[Any]:
        """Remove the entry, allocate memory, and read."""
        self.store.forget_lost()
        stored = self.store.known.get(self.name)
        if stored is None:
            raise RuntimeError(self._what_is_wrong())
        self.stored = stored
        self.restored: list[TensorMemory] = []
        try:
            for m in self.memory:
                if m.restore():
                    self.restored.append(m)
            transfer = self.store.store.readv(stored.keys, [m.bytes() for m in self.memory])
        except BaseException:
            self._free_again()
            raise
        del self.store.known[self.name]
        return transfer

    def _free_again(self) -> None:
        for m in self.restored:
            m.free()

    def _what_is_wrong(self) -> str:
        listed, places = self.name
        storages = {place[0] for place in places}
        for other_listed, others in self.store.known:
            if storages & {place[0] for place in others}:
                return (
                    f"nothing is stored as {_described(listed, places)}, but as {_described(other_listed, others)}: "
                    "read it as it was written"
                )
        return f"nothing is stored as {_described(listed, places)}: write it first; it can be read once"

    def finish(self) -> None:
        """Delete the entry; after an error restore it and free the memory, so that the read can be retried."""
        try:
            self.transfer.value()
        except Exception:
            self._free_again()
            with self.store.lock:
                self.store.known[self.name] = self.stored
            raise
        self.store.delete(self.stored.keys)

    def value(self) -> torch.Tensor | list[torch.Tensor]:
        """Return the tensors that were read."""
        return self.filled


def _described(listed: bool, places: tuple[Place, ...]) -> str:
    sizes = ", ".join(str(nbytes) for _, _, nbytes in places)
    return f"a list of tensors of {sizes} bytes" if listed else f"a tensor of {sizes} bytes"
