"""Operations of a sharded store on keys, not on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from cudafuture._C import CUDAFuture
from cudafuture.store import _shard
from cudafuture.store._inventory import Inventory
from cudafuture.store._shard import Share
from cudafuture.store.protocol import Entry, Store, listed_keys

__all__ = ["ShardedKeys"]

T = TypeVar("T")


class ShardedKeys:
    """Methods of ``ShardedStore`` that find and list keys."""

    _shards: dict[str, Store]
    _inventory: Inventory
    where: Callable[[str], str]
    _expect_open: Callable[[], None]
    _asking: Callable[..., AbstractContextManager[Store]]
    _ask: Callable[..., CUDAFuture[Any]]
    _joined: Callable[..., CUDAFuture[Any]]

    def keys(self) -> list[str]:
        """Return all keys: shard by shard in the order of their names, each shard's keys in its own order.

        It asks every shard, and blocks. If a shard does not answer, it raises instead of omitting keys: list the others
        through ``shards``.

        Raises:
            WorkerLostError: a shard is lost; the error names it.

        >>> from cudafuture.store import DiskStore, ShardedStore
        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).keys()
        []
        """
        found: list[str] = []
        for name in self._shards:
            with self._asking(name) as shard:
                here = [key for key in shard.keys() if self.where(key) == name]  # noqa: SIM118
            self._inventory.found(name, here)
            found += here
        return found

    def __contains__(self, key: str) -> bool:
        name = self.where(key)
        with self._asking(name, key) as shard:
            found = key in shard
        self._inventory.found(name, [key] if found else [])
        return found

    def __len__(self) -> int:
        return len(self.keys())

    def stat(self, key: str) -> Entry:
        """Return dtype, shape and size of the tensor of a key. It asks the key's shard, and blocks.

        Raises:
            NotFoundError: the key does not exist.
            WorkerLostError: its shard is lost.

        >>> import torch
        >>> from cudafuture.store import DiskStore, ShardedStore
        >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        name = self.where(key)
        with self._asking(name, key) as shard:
            entry = shard.stat(key)
        self._inventory.found(name, [key])
        return entry

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Return a future of the entry of each key, None if the key does not exist.

        >>> from cudafuture.store import DiskStore, ShardedStore
        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).find(["weight"]).wait()
        [None]
        """
        names = listed_keys(keys)

        def merged(found: list[list[Entry | None]], places: list[list[int]]) -> list[Entry | None]:
            entries = _shard.in_order(found, places)
            for entry in entries:
                if entry is not None:
                    self._inventory.found(self.where(entry.key), [entry.key])
            return entries

        return self._ask("ask", names, lambda shard, places: shard.find([names[i] for i in places]), merged)

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of ``keys()``, in the same order.

        >>> from cudafuture.store import DiskStore, ShardedStore
        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).list_keys().wait()
        []
        """
        self._expect_open()
        shares = [Share(name, (), _shard.begun(shard.list_keys)) for name, shard in self._shards.items()]

        def merged(found: list[list[str]]) -> list[str]:
            keys = []
            for name, listing in zip(self._shards, found, strict=True):
                here = [key for key in listing if self.where(key) == name]
                self._inventory.found(name, here)
                keys += here
            return keys

        return self._joined("list keys", shares, merged)

    def trim(self) -> int:
        """Remove the empty files of all shards; return their bytes.

        >>> from cudafuture.store import DiskStore, ShardedStore
        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).trim()
        0
        """
        removed = 0
        for name in self._shards:
            with self._asking(name) as shard:
                removed += shard.trim()
        return removed
