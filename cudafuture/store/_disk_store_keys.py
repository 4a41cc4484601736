"""Operations of a store on keys, not on the bytes of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from cudafuture import _C
from cudafuture._arguments import expect_bool, expect_mapping, expect_str, listed, shown
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError, NotFoundError
from cudafuture.store.protocol import Entry, listed_keys

__all__ = ["DiskStoreKeys"]


class DiskStoreKeys:
    """Methods of ``DiskStore`` that find, link and delete keys."""

    _native: _C.Store

    def delete(self, key: str) -> CUDAFuture[None]:
        """Delete a key. Later lookups do not find it; reads that have begun still return its tensor.

        The future completes when the deletion is durable. It fails with NotFoundError if the key does not exist.

        >>> from cudafuture.store import DiskStore
        >>> store = DiskStore("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.delete("weight").wait()
        >>> "weight" in store
        False
        """
        return self._native.erase([key])

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        """Delete many keys. If some do not exist, the future fails, but the others are deleted.

        >>> from cudafuture.store import DiskStore
        >>> DiskStore("states").deletev([]).wait()
        """
        return self._native.erase(listed_keys(keys))

    def link(self, links: Mapping[str, str]) -> CUDAFuture[None]:
        """Give tensors a second key, without copying them: each key of `links` gets the tensor of the key it maps to.

        That is the tensor that a read begun now would return. It lives as long as one of its keys does: writing or
        deleting one key does not change the other. All links take effect together or not at all, also across a crash of
        a durable store, whose future completes when they are on disk. It fails with NotFoundError if one of the
        tensors does not exist.

        Links use no room of `capacity`, and the checksum stays valid. ``statistics().bytes`` counts the bytes of each
        key, ``used`` the bytes on disk.

        >>> from cudafuture.store import DiskStore
        >>> store = DiskStore("states")
        >>> store.write("step 1/weight", torch.eye(2)).wait()
        16
        >>> store.link({"best/weight": "step 1/weight"}).wait()
        >>> store.delete("step 1/weight").wait()
        >>> store.read("best/weight").wait()
        tensor([[1., 0.],
                [0., 1.]])
        """
        if type(links) is not dict:
            expect_mapping("links", links, "{new key: key}")
            links = dict(links)
        return self._native.link(links)

    def map(self, key: str | Sequence[str], *, verify: bool = False) -> torch.Tensor:
        """Return the tensor of a key without reading it: each page is read from disk on first access.

        For several keys it returns one flat tensor of all their elements, in the order of the keys.

        The memory is a private mapping of the file (``mmap`` with MAP_PRIVATE). Changes to the tensor stay in this
        process and never reach the store. The tensor holds its extent on disk: it does not change when the key is
        rewritten or deleted, as long as the store is open. After an ephemeral store is closed it does not change
        either; after a durable one is closed, the next process that opens the store may overwrite the bytes.

        A disk that cannot read a page ends the process with SIGBUS, where ``read`` would raise. Map a tensor if you
        need only parts of it, or if several processes read it: they share the page cache, which ``read`` bypasses.

        Each key of a call takes its own mapping, and the kernel limits the mappings of a process
        (``vm.max_map_count``). While the tensor lives, its bytes count in the store's `capacity`.

        Args:
            key: as for ``write``; or several, whose tensors have one dtype, and all but the last of which have a whole
                number of pages (4 KiB).
            verify: read all bytes now, and compare the checksum. In a store without checksums this verifies nothing.

        Raises:
            NotFoundError: the key does not exist.
            ChecksumError: with `verify`, the bytes changed after they were written.
            StorageError: the file cannot be mapped, or ends before the tensor does.
            InvalidStateError: the store is closed.
            ValueError: several tensors cannot be mapped next to each other.

        >>> from cudafuture.store import DiskStore
        >>> store = DiskStore("states")
        >>> store.write("embedding", torch.arange(6.0).view(3, 2)).wait()
        24
        >>> store.map("embedding")[1]
        tensor([2., 3.])
        """
        expect_bool("verify", verify)
        if not isinstance(key, (str, Iterable)):
            raise TypeError(f"key is a key, or a list of keys, not {shown(key)}")
        return self._native.map([key] if isinstance(key, str) else listed("key", key, "keys"), verify)

    def keys(self) -> list[str]:
        """Return all keys, in the order of their last writes.

        Raises:
            InvalidStateError: the store is closed. The other methods that look up keys raise it too.

        >>> from cudafuture.store import DiskStore
        >>> DiskStore("states").keys()
        []
        """
        self._expect_open()
        return self._native.keys()

    def __contains__(self, key: str) -> bool:
        self._expect_open()
        try:
            return self._native.has(key)
        except TypeError:
            expect_str("key", key)
            raise

    def __len__(self) -> int:
        self._expect_open()
        keys: int = self._native.statistics()["keys"]
        return keys

    def stat(self, key: str) -> Entry:
        """Return dtype, shape and size of the tensor of a key.

        Raises:
            NotFoundError: the key does not exist.

        >>> from cudafuture.store import DiskStore
        >>> store = DiskStore("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        self._expect_open()
        try:
            dtype, shape, nbytes = self._native.stat(key)
        except TypeError:
            expect_str("key", key)
            raise
        return Entry(key, dtype, torch.Size(shape), nbytes)

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Return a future of the entry of each key, None if the key does not exist.

        In this store the future is complete at once; in a remote store it is not.

        >>> from cudafuture.store import DiskStore
        >>> store = DiskStore("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> [entry and entry.shape for entry in store.find(["weight", "bias"]).wait()]
        [torch.Size([3, 3]), None]
        """
        self._expect_open()

        def find(key: str) -> Entry | None:
            try:
                return self.stat(key)
            except NotFoundError:
                return None

        return CUDAFuture.completed([find(key) for key in listed_keys(keys)])

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of ``keys()``, which is complete at once; in a remote store it is not.

        >>> from cudafuture.store import DiskStore
        >>> DiskStore("states").list_keys().wait()
        []
        """
        return CUDAFuture.completed(self.keys())

    def _expect_open(self) -> None:
        if self._native.is_closed:
            raise InvalidStateError("the store is closed")
