"""What is done with the keys of an offloader, and not with the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError, NotFoundError
from cudafuture.storage.store import Entry

__all__ = ["OffloaderKeys"]


class OffloaderKeys:
    """The methods of ``Offloader`` that find, link and delete keys."""

    _native: _C.Store

    def delete(self, key: str) -> CUDAFuture[None]:
        """Forget a key. Nobody finds it from now on; who reads it already still gets it.

        The future completes when that is so for good. It fails with NotFoundError when there is no such key.

        >>> from cudafuture.storage import Offloader
        >>> store = Offloader("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.delete("weight").wait()
        >>> "weight" in store
        False
        """
        return self._native.erase([key])

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        """Forget many keys. Those that there are go, also when the future fails because another one is not there.

        >>> from cudafuture.storage import Offloader
        >>> Offloader("states").deletev([]).wait()
        """
        return self._native.erase(list(keys))

    def link(self, links: Mapping[str, str]) -> CUDAFuture[None]:
        """Give tensors a second key, without copying them: each key of `links` gets the tensor of the key it maps to.

        That is the tensor which a read begun now would get. It stays as long as one of its keys does: writing or
        deleting one changes nothing for the other. All links take effect together, or none: also across a crash of a
        durable store, whose future completes when they are on the disk. It fails with NotFoundError when one of the
        tensors is not there.

        Links take no room in `capacity`, and the checksum stays valid. ``statistics().bytes`` counts the bytes of each
        key, ``used`` those on disk.

        >>> from cudafuture.storage import Offloader
        >>> store = Offloader("states")
        >>> store.write("step 1/weight", torch.eye(2)).wait()
        16
        >>> store.link({"best/weight": "step 1/weight"}).wait()
        >>> store.delete("step 1/weight").wait()
        >>> store.read("best/weight").wait()
        tensor([[1., 0.],
                [0., 1.]])
        """
        return self._native.link(links if type(links) is dict else dict(links))

    def map(self, key: str | Sequence[str], *, verify: bool = False) -> torch.Tensor:
        """Return the tensor of a key without reading it: its pages come from the disk when they are touched.

        Of several keys it returns one flat tensor of all their elements, in the order of the keys.

        The memory is a private mapping of the file (``mmap`` with MAP_PRIVATE). What you write to the tensor stays in
        this process and never reaches the store. The tensor holds its place on the disk: it stays what it is when the
        key is written again or deleted, as long as the store is open. Past the end of an ephemeral store it stays, too;
        past that of a durable one, whoever opens the store next may write over the bytes.

        A disk that cannot read a page ends the process with SIGBUS; ``read`` raises. Use it where only parts of a large
        tensor are wanted, or several processes read the same ones: they share the page cache, which ``read`` bypasses.

        Each key of a call takes a mapping of its own, and the kernel limits how many a process has
        (``vm.max_map_count``). While the tensor lives its bytes count in the store's `capacity`.

        Args:
            key: as for ``write``; or several, whose tensors have one dtype, and all but the last of which have a whole
                number of pages (4 KiB).
            verify: read all of it now, and compare its checksum. In a store without checksums this verifies nothing.

        Raises:
            NotFoundError: there is no such key.
            ChecksumError: with `verify`, the bytes are not those that were written.
            StorageError: the file cannot be mapped, or ends before the tensor does.
            InvalidStateError: the store is closed.
            ValueError: several tensors cannot lie side by side in memory.

        >>> from cudafuture.storage import Offloader
        >>> store = Offloader("states")
        >>> store.write("embedding", torch.arange(6.0).view(3, 2)).wait()
        24
        >>> store.map("embedding")[1]
        tensor([2., 3.])
        """
        return self._native.map([key] if isinstance(key, str) else list(key), verify)

    def keys(self) -> list[str]:
        """Return all keys, in the order in which they were written last.

        Raises:
            InvalidStateError: the store is closed. So do the other methods that look keys up.

        >>> from cudafuture.storage import Offloader
        >>> Offloader("states").keys()
        []
        """
        self._expect_open()
        return self._native.keys()

    def __contains__(self, key: str) -> bool:
        self._expect_open()
        return self._native.has(key)

    def __len__(self) -> int:
        self._expect_open()
        keys: int = self._native.statistics()["keys"]
        return keys

    def stat(self, key: str) -> Entry:
        """Return what is known of a key.

        Raises:
            NotFoundError: there is no such key.

        >>> from cudafuture.storage import Offloader
        >>> store = Offloader("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        self._expect_open()
        dtype, shape, nbytes = self._native.stat(key)
        return Entry(key, dtype, torch.Size(shape), nbytes)

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Return a future of what is known of each key, None where there is no such key.

        Here it is done at once; that of a store elsewhere is not.

        >>> from cudafuture.storage import Offloader
        >>> store = Offloader("states")
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

        return CUDAFuture.completed([find(key) for key in keys])

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of ``keys()``, which is done: that of a store elsewhere is not.

        >>> from cudafuture.storage import Offloader
        >>> Offloader("states").list_keys().wait()
        []
        """
        return CUDAFuture.completed(self.keys())

    def _expect_open(self) -> None:
        if self._native.is_closed:
            raise InvalidStateError("the store is closed")
