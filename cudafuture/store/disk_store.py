"""Store of tensors by key on disk, for tensors that do not fit into memory."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from typing_extensions import Self

from cudafuture import _C, _frames, _xxhash, openmetrics
from cudafuture._arguments import expect_bool, expect_dtype, expect_int, expect_mapping, expect_str, listed, shown
from cudafuture._C import CUDAFuture, Snapshot
from cudafuture._path import path_text
from cudafuture.errors import InvalidStateError, NotFoundError, StorageError
from cudafuture.io.engine import Engine, engine_or_default
from cudafuture.ownership import owns, tensors_by_key
from cudafuture.store._home import DurableHome, EphemeralHome, durable_home, is_direct, log_recovery
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
from cudafuture.store.multipart_write import MultipartWrite
from cudafuture.store.protocol import DiskStoreStatistics, Entry

__all__ = ["DiskStore", "SalvagedStore"]

_LEAST_BLOCK, _LEAF = 1 << 18, 1 << 16  # bytes
_READ_AT_ONCE = 64 << 20  # bytes, by verify()


class DiskStore:
    """Store of tensors by key, in a folder.

    ``write`` stores a tensor under a key, ``read`` returns it; both return futures, and take tensors on the host and on
    devices. A rewrite of a key is atomic: concurrent readers see either the old tensor or the new one. Tensors lie in
    slabs, large files whose blocks are reused; small tensors are written many at once.

    By default a store is ephemeral: it has its own folder inside `dir`, which is removed with the store. If its process
    is killed, the next store in `dir` removes the folder.

    A `durable` store is `dir` itself. A write's future completes when its data and its key are on disk (``fdatasync``,
    in a group commit). After a crash, the store has every write whose future was done, and no partial one. One process
    at a time can write it. Several processes can read it while none writes: with `read_only`, or if the folder cannot
    be written.

    Args:
        dir: the folder; created if it does not exist.
        engine: reads and writes; by default the engine of the process. Its blocks must be a multiple of 64 KiB, and at
            least 256 KiB.
        direct: bypass the page cache, as for ``File``; not if a disk's unit is larger than a page.
        checksum: compute checksums of writes (XXH3, of data and key), and verify them on reads.
        durable: keep the store after its process ends, and after crashes.
        read_only: open a durable store without changing it: writes and deletions fail with StorageError (EROFS). A
            folder that cannot be written is opened like this automatically, with a warning in the log.
        capacity: limit of the bytes of the store's files, at least 1; a write that finds no extent of its size fails
            with QuotaError. Rewriting a key needs room for both tensors. By default there is no limit.

    Raises:
        StorageError: the folder cannot be used, or is another process's durable store; the message names the process.
        ChecksumError: the journal of a durable store is damaged; see ``salvage``.
        ValueError: an argument is out of its range; the path is not UTF-8, or has a NUL.
    """

    _opened_to_read = "read"

    def __init__(
        self,
        dir: str | os.PathLike[str],
        *,
        engine: Engine | None = None,
        direct: Literal["auto"] | bool = "auto",
        checksum: bool = True,
        durable: bool = False,
        read_only: bool = False,
        capacity: int | None = None,
    ) -> None:
        if direct not in ("auto", True, False):
            raise ValueError(f"direct={direct!r} is not valid; use 'auto', True or False")
        capacity = None if capacity is None else min(expect_int("capacity", capacity, 1), (1 << 63) - 1)
        for name, flag in (("checksum", checksum), ("durable", durable), ("read_only", read_only)):
            expect_bool(name, flag)
        if read_only and not durable:
            raise ValueError("read_only=True is for a durable store: an ephemeral one begins empty")
        engine = engine_or_default(engine)
        if engine.block_size < _LEAST_BLOCK or engine.block_size % _LEAF:
            raise ValueError(f"{engine!r}: its blocks are not a multiple of {_LEAF} bytes, or less than {_LEAST_BLOCK}")
        _xxhash.install()
        self._dir = str(Path(path_text(dir, "dir")).absolute())  # the process may change its working directory
        self._capacity, self._durable = capacity, durable
        home = durable_home(self._dir, read_only) if durable else EphemeralHome(self._dir)
        self._read_only = isinstance(home, DurableHome) and home.read_only
        opening = self._opened_to_read if self._read_only else "write"
        try:
            if not durable and Path(self._dir, "journal").is_file():
                _frames.warn(
                    f"{self._dir} has a durable store, whose keys an ephemeral one does not have: pass durable=True"
                )
            self._is_direct = is_direct(Path(home.path), engine, direct, self._read_only)
            self._native = _C.open_store(
                engine._native,
                home.path,
                None if direct == "auto" else direct,
                checksum,
                durable,
                opening,
                capacity or 0,
            )
        except BaseException:
            home.leave()
            raise
        if durable:
            log_recovery(self._dir, self.read_only, self._native.recovery())
        self._engine = engine  # keeps it alive
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end, self._native, home, self._pid)
        openmetrics.add(self, "store", folder=self._dir)
        _open_stores.add(self)

    @property
    def dir(self) -> str:
        """The folder that was passed as `dir`."""
        return self._dir

    @property
    def is_direct(self) -> bool:
        """True if the store bypasses the page cache."""
        return self._is_direct

    @property
    def durable(self) -> bool:
        """True if the store outlives its process."""
        return self._durable

    @property
    def read_only(self) -> bool:
        """True if the store refuses writes, links and deletions."""
        return self._read_only

    @staticmethod
    def salvage(dir: str | os.PathLike[str], *, engine: Engine | None = None) -> SalvagedStore:
        """Open the remains of a durable store whose journal is damaged, for reading. Nothing on disk changes.

        It reads every tensor once, and keeps the keys whose bytes match. For arguments and errors see ``DiskStore``.

        >>> DiskStore("states", durable=True).close()
        >>> with DiskStore.salvage("states") as found:
        ...     print(found.keys(), found.lost)
        [] {}
        """
        return SalvagedStore(dir, engine=engine)

    def verify(self, progress: Callable[[int], object] | None = None) -> dict[str, StorageError]:
        """Read every tensor, and return the keys whose bytes cannot be read, or do not match their checksums.

        It reads 64 MiB at a time, or one tensor if that is larger. Keys that are deleted meanwhile are left out.
        Tensors that were written with ``checksum=False`` are read, but have nothing to match.

        Args:
            progress: called after each part with the bytes that were read so far.

        Returns:
            The errors by key; ChecksumError: the bytes do not match.

        >>> store = DiskStore("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.verify()
        {}
        """
        damaged: dict[str, StorageError] = {}
        together: list[tuple[str, CUDAFuture[torch.Tensor]]] = []
        size = total = 0
        for key in [*self.keys(), None]:
            if key is not None:
                try:
                    nbytes = self.stat(key).nbytes
                    together.append((key, self.read(key)))
                except NotFoundError:
                    continue
                size += nbytes
            if key is None or size >= _READ_AT_ONCE:
                for name, read in together:
                    error = read.exception()
                    if isinstance(error, StorageError):
                        damaged[name] = error
                    elif error is not None and not isinstance(error, NotFoundError):
                        raise error
                total += size
                together, size = [], 0
                if progress is not None:
                    progress(total)
        return damaged

    # ---- writing

    @owns("write", lambda _, key, tensor, **__: {f"the tensor of key {key!r}": tensor})
    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        """Write a tensor under a key, and replace the previous one.

        The future completes with the tensor's bytes. It fails with QuotaError, or with StorageError if the disk fails;
        then the key does not change. The tensor belongs to the write until ``future.released`` is done: do not change
        it before. A device tensor is taken as the caller's current stream leaves it.

        Of several concurrent writes of a key, the last call wins. A write cannot be cancelled.

        Args:
            key: 1 to 1,024 bytes of UTF-8 without NUL.
            tensor: strided, of any dtype and shape, also empty; not quantized.
            priority: of the future, of the streams that copy from a device, and of the I/O; see ``File.read``.

        Raises:
            ValueError: the key is not valid, or the tensor's elements are not all in its memory.
            TypeError: `tensor` is not a tensor, or has no memory.
            InvalidStateError: the store is closed.

        >>> store = DiskStore("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        """
        try:
            return self._native.write([key], [tensor], priority, None, None, False)
        except TypeError:
            expect_writable({key: tensor}, priority)
            raise

    @owns("writev", lambda _, tensors, **__: tensors_by_key(tensors))
    def writev(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        digests: Mapping[str, int] | None = None,
        written: torch.Tensor | None = None,
        atomic: bool = False,
    ) -> CUDAFuture[int]:
        """Write many tensors under their keys, each as by ``write``: one may fail while the others succeed.

        The future completes with the bytes of all tensors, or fails with the first error. If there is too little room
        for all of them, it fails with QuotaError, and nothing is written.

        Args:
            digests: the expected digests of some keys' bytes (see ``digest``), as the bytes go to the disk. On a
                mismatch the future fails with ChecksumError, and the key does not change. This costs nothing if the
                store computes checksums.
            written: a tensor of torch.bool on the host, with an element for each key. It belongs to the write until the
                future is done, and then is True for the keys that were written, even if the future has failed.
            atomic: change all keys together, or none, also for a concurrent ``readv``, and across a crash of a durable
                store. By default each key changes separately.

        Raises:
            ValueError: a digest has none of the keys, or is not a number of 64 bits; `written` does not fit.

        >>> DiskStore("states").writev({"weight": torch.eye(3), "bias": torch.zeros(3)}).wait()
        48
        """
        if not isinstance(tensors, dict):
            expect_tensors(tensors)
        keys, values = list(tensors.keys()), list(tensors.values())
        expected = None if digests is None else expected_digests(tensors, digests)
        try:
            return self._native.write(keys, values, priority, expected, written, atomic)
        except TypeError:
            expect_writable(tensors, priority)
            expect_bool("atomic", atomic)
            expect_one_for_each(written, torch.bool, len(keys), "written")
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
        """Return a future of the tensor that was written under a key.

        The future completes with `out`, filled, or with a new tensor on `device`, by default the host. It fails with
        NotFoundError if the key does not exist, with ChecksumError if the bytes changed, and with StorageError if the
        disk fails: then the contents of `out` are undefined. A device tensor is filled after the work on the caller's
        current stream; the events of the future order the consumers.

        Args:
            key: as for ``write``.
            out: of the dtype and shape that was written; any strides.
            device: of a new tensor; not together with `out`.
            priority: of the future, of the streams that copy to a device, and of the I/O; see ``File.read``.

        Raises:
            ValueError: `out` does not have the written dtype and shape, or both `out` and `device` were given.
            InvalidStateError: the store is closed.

        >>> store = DiskStore("states")
        >>> store.write("weight", torch.arange(3)).wait()
        24
        >>> store.read("weight").wait()
        tensor([0, 1, 2])
        """
        if device is not None:
            device = device_to_read_into(out, device)
        outs = None if out is None else [out]
        try:
            return self._native.read([key], outs, device, False, priority, None)
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
        """Return a future of many tensors, in the order of the keys. Adjacent extents are read in one transfer.

        The future fails with the first error, as ``read`` does.

        Args:
            digests: a tensor of torch.uint64 on the host, with an element for each key. It belongs to the read until
                the future is done, and then has the digests of the read bytes (see ``digest``). This costs nothing if
                the store computes checksums.

        >>> store = DiskStore("states")
        >>> store.writev({"weight": torch.ones(2), "bias": torch.zeros(1)}).wait()
        12
        >>> store.readv(["bias", "weight"]).wait()
        [tensor([0.]), tensor([1., 1.])]
        """
        if device is not None:
            device = device_to_read_into(outs, device)
        names = listed_keys(keys)
        into = None if outs is None else tensors_to_fill(outs, len(names))
        try:
            return self._native.read(names, into, device, True, priority, digests)
        except TypeError:
            expect_readable(names, into, priority)
            expect_one_for_each(digests, torch.uint64, len(names), "digests")
            raise

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

    # ---- keys

    def keys(self) -> list[str]:
        """Return all keys, in the order of their last writes.

        Raises:
            InvalidStateError: the store is closed. The other methods that look up keys raise it too.

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

        >>> DiskStore("states").list_keys().wait()
        []
        """
        return CUDAFuture.completed(self.keys())

    def link(self, links: Mapping[str, str]) -> CUDAFuture[None]:
        """Give tensors a second key, without copying them: each key of `links` gets the tensor of the key it maps to.

        That is the tensor that a read begun now would return. It lives as long as one of its keys does: writing or
        deleting one key does not change the other. All links take effect together or not at all, also across a crash of
        a durable store, whose future completes when they are on disk. It fails with NotFoundError if one of the
        tensors does not exist.

        Links use no room of `capacity`, and the checksum stays valid. ``statistics().bytes`` counts the bytes of each
        key, ``used`` the bytes on disk.

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

    def delete(self, key: str) -> CUDAFuture[None]:
        """Delete a key. Later lookups do not find it; reads that have begun still return its tensor.

        The future completes when the deletion is durable. It fails with NotFoundError if the key does not exist.

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

        >>> DiskStore("states").deletev([]).wait()
        """
        return self._native.erase(listed_keys(keys))

    # ---- parts of tensors

    def begin_write(self, key: str, dtype: torch.dtype, shape: Sequence[int], *, priority: int = 0) -> MultipartWrite:
        """Begin to write a tensor in parts, which separate calls put; it takes effect as a whole.

        The whole tensor counts in `capacity` from now on. The key keeps its old tensor until the write is committed.

        Args:
            key: as for ``write``.
            dtype: of the tensor; not quantized.
            shape: of the tensor.
            priority: of the futures and of the I/O, as for ``write``.

        Raises:
            QuotaError: the tensor does not fit into `capacity`.
            StorageError: the disk has no room for it, or the store is read-only.
            InvalidStateError: the store is closed.
            ValueError, TypeError: the key, dtype or shape is not valid.

        >>> store = DiskStore("states")
        >>> write = store.begin_write("weight", torch.float32, [2, 16384])
        >>> second, first = write.put(65536, torch.ones(16384)), write.put(0, torch.zeros(16384))
        >>> write.commit().wait()
        131072
        >>> store.read("weight").wait()[:, 0]
        tensor([0., 1.])
        """
        sizes = listed("shape", shape, "sizes")
        try:
            return MultipartWrite(self, self._native.begin_write(key, dtype, sizes, priority))
        except TypeError:
            expect_str("key", key)
            expect_dtype("dtype", dtype)
            expect_int("priority", priority)
            raise

    def snapshots(self, keys: Iterable[str]) -> list[Snapshot | None]:
        """Return a snapshot of each key, all of the same moment; None if the key does not exist.

        A snapshot keeps its tensor readable when the key is written again or deleted; see ``read_parts``.

        Raises:
            InvalidStateError: the store is closed.

        >>> store = DiskStore("states")
        >>> store.write("weight", torch.zeros(3)).wait()
        12
        >>> store.snapshots(["weight", "bias"])
        [<Snapshot of 'weight', version 1, 12 bytes>, None]
        """
        return self._native.snapshots(keys if type(keys) is list else listed("keys", keys, "keys"))

    def read_parts(
        self,
        parts: Iterable[tuple[Snapshot, int, torch.Tensor]],
        *,
        digests: torch.Tensor | None = None,
        priority: int = 0,
    ) -> CUDAFuture[None]:
        """Fill tensors with parts of snapshots. Parts that are adjacent on disk are read in one transfer.

        A part that is a whole tensor is verified as by ``read``, and a mismatch fails the future with ChecksumError.
        Other parts cannot be verified alone. To verify a tensor that was read in parts, add the parts to a ``Digest``
        and compare ``Digest.value(snapshot.seed)`` with ``snapshot.digest``.

        Args:
            parts: a snapshot of this store, the byte of its tensor at which the part begins, a multiple of 64 KiB, and
                the tensor to fill: contiguous, on the host, of torch.uint8. It belongs to the read until the future is
                done.
            digests: a tensor of torch.uint64 on the host, with an element for each part. It belongs to the read until
                the future is done, and then has the digests of the parts (see ``digest``).
            priority: as for ``read``.

        Raises:
            ValueError: a snapshot is of another store, a part does not lie in its tensor, or a tensor cannot be filled.
            TypeError: a part is not such a tuple.
            InvalidStateError: the store is closed.

        >>> store = DiskStore("states")
        >>> store.write("weight", torch.arange(3, dtype=torch.uint8)).wait()
        3
        >>> (snapshot,) = store.snapshots(["weight"])
        >>> store.delete("weight").wait()
        >>> out = torch.empty(2, dtype=torch.uint8)
        >>> store.read_parts([(snapshot, 0, out)]).wait()
        >>> out
        tensor([0, 1], dtype=torch.uint8)
        """
        given = parts if type(parts) is list else listed("parts", parts, "tuples of a snapshot, a byte and a tensor")
        try:
            return self._native.read_parts(given, digests, priority)
        except TypeError:
            expect_one_for_each(digests, torch.uint64, len(given), "digests")
            expect_int("priority", priority)
            raise

    # ---- the end

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done.

        It fails with the first error of those that fail from now on. In a store that is not durable nothing is synced:
        done means that the kernel has the bytes.

        >>> DiskStore("states").flush().wait()
        """
        return self._native.flush()

    def trim(self) -> int:
        """Remove the empty files, and return their bytes.

        The store keeps empty files otherwise, since overwriting allocated blocks is fastest, and removes them when the
        disk is full.

        >>> DiskStore("states").trim()
        0
        """
        self._expect_open()
        return self._native.trim()

    def statistics(self) -> DiskStoreStatistics:
        """Return the sizes of the store and its counts so far.

        >>> DiskStore("states").statistics().keys
        0
        """
        return DiskStoreStatistics(capacity=self._capacity, **self._native.statistics())

    def close(self) -> None:
        """Refuse further calls, and wait until earlier ones have ended. An ephemeral store is then removed.

        >>> DiskStore("states").close()
        """
        if self._end.alive and os.getpid() == self._pid:
            self._native.retire().wait()  # Ctrl-C interrupts this wait
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        keys: int = self._native.statistics()["keys"]
        return f"<{'durable' if self._durable else 'ephemeral'} DiskStore in {self._dir!r}, {keys} keys>"

    def _expect_open(self) -> None:
        if self._native.is_closed:
            raise InvalidStateError("the store is closed")


class SalvagedStore(DiskStore):
    """Keys of a damaged durable store that can be verified, read-only; see ``DiskStore.salvage()``.

    It has the keys whose records are valid and whose bytes match their checksums.

    >>> DiskStore("states", durable=True).close()
    >>> with DiskStore.salvage("states") as found, DiskStore("mended", durable=True) as mended:
    ...     for key in found.keys():
    ...         if key not in found.uncertain:
    ...             mended.write(key, found.read(key).wait()).wait()
    """

    _opened_to_read = "salvage"

    def __init__(self, dir: str | os.PathLike[str], *, engine: Engine | None = None) -> None:
        super().__init__(dir, engine=engine, durable=True, read_only=True)
        recovery = self._native.recovery()
        self._damage: list[tuple[int, int]] = recovery["gaps"]
        try:
            self._lost = self.verify()
        except BaseException:
            self.close()
            raise
        self._native.forget(list(self._lost))
        self._uncertain = frozenset(recovery["uncertain"]) - self._lost.keys()

    @property
    def lost(self) -> dict[str, StorageError]:
        """The keys whose bytes cannot be read, or do not match their checksums, with the errors."""
        return dict(self._lost)

    @property
    def uncertain(self) -> frozenset[str]:
        """The keys without checksums, or whose tensors may be old or deleted because later records are damaged."""
        return self._uncertain

    @property
    def damage(self) -> list[tuple[int, int]]:
        """The ranges of the journal that are damaged or torn: their offsets and sizes, in bytes."""
        return list(self._damage)


_open_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


@atexit.register  # after the native module's handler, so it runs before that: engines must still exist
def _close_all() -> None:
    for store in list(_open_stores):
        store.close()


def _end(native: _C.Store, home: EphemeralHome | DurableHome, pid: int) -> None:
    """Close a store that is closed or freed, or whose process exits. A forked child leaves it to its parent."""
    if os.getpid() == pid:
        try:
            native.close()
        finally:  # Ctrl-C
            home.leave()
