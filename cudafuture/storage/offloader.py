"""Tensors by name on disk: what does not fit into memory, and is wanted again later."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.storage import _xxhash
from cudafuture.storage._home import DurableHome, EphemeralHome, durable_home, is_direct, log_recovery
from cudafuture.storage._offloader_keys import OffloaderKeys
from cudafuture.storage._offloader_parts import OffloaderParts
from cudafuture.storage._path import path_text
from cudafuture.storage.engine import Engine, default_engine
from cudafuture.storage.store import OffloaderStatistics, expected_digests

if TYPE_CHECKING:
    from cudafuture.storage.salvage import SalvagedStore

__all__ = ["Offloader"]

_LEAST_BLOCK, _LEAF = 1 << 18, 1 << 16  # bytes


class Offloader(OffloaderKeys, OffloaderParts):
    """A store of tensors by name, in a folder.

    ``write`` puts a tensor under a key, ``read`` gets it back; both return futures, and take tensors on the host and on
    devices. A key that is written again is replaced at once or not at all: whoever reads it meanwhile gets the old
    tensor or the new one. Tensors lie in large files whose blocks are used again; small ones are written many at once.

    A store is ephemeral, unless it is `durable`: it has a folder of its own inside `dir`, which vanishes with it. When
    its process is killed, the next store in `dir` removes it.

    A durable store is `dir` itself. A write's future completes when its data and its name are on the disk
    (``fdatasync``, of many writes at a time). After a crash everything whose future was done is there, and nothing that
    is not whole. One process at a time can write it. Several processes can read it while none writes: with `read_only`,
    or where the folder cannot be written.

    Args:
        dir: the folder; made where it is not there.
        engine: what reads and writes; by default the process's own. Its blocks have to be a multiple of 64 KiB, and
            256 KiB at least.
        direct: whether to bypass the page cache, as for ``File``; not where a disk's unit is more than a page.
        checksum: whether to take checksums of what is written (XXH3, of data and key), and check them when it is read.
        durable: whether the store is to outlive its process, and crashes.
        read_only: open a durable store without changing it: writes and deletions fail with StorageError (EROFS). A
            folder that cannot be written is opened so by itself, with a warning in the log.
        capacity: bytes that the store's files may have, at least 1; what does not fit, in one piece, is a QuotaError.
            Rewriting a key needs room for both tensors. By default there is no limit.

    Raises:
        StorageError: the folder cannot be used; or it is another process's durable store: the message says whose.
        ChecksumError: the journal of a durable store is damaged; see ``salvage``.
        ValueError: an argument out of its range; a path that is not UTF-8, or has a NUL.
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
            raise ValueError(f"direct={direct!r}: 'auto', True or False is wanted")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity={capacity!r} is not at least 1")
        if read_only and not durable:
            raise ValueError("read_only=True is for a durable store: an ephemeral one begins empty")
        engine = engine or default_engine()
        if engine.block_size < _LEAST_BLOCK or engine.block_size % _LEAF:
            raise ValueError(f"{engine!r}: its blocks are no multiple of {_LEAF} bytes, or less than {_LEAST_BLOCK}")
        _xxhash.install()
        self._dir = str(Path(path_text(dir)).absolute())  # wherever this process goes meanwhile
        self._capacity, self._durable = capacity, durable
        home = durable_home(self._dir, read_only) if durable else EphemeralHome(self._dir)
        self._read_only = isinstance(home, DurableHome) and home.read_only
        opening = self._opened_to_read if self._read_only else "write"
        try:
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
        self._engine = engine  # which ends when nobody holds it
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end, self._native, home, self._pid)
        _open_stores.add(self)

    @property
    def dir(self) -> str:
        """The folder that it was given."""
        return self._dir

    @property
    def is_direct(self) -> bool:
        """Whether it bypasses the page cache."""
        return self._is_direct

    @property
    def durable(self) -> bool:
        """Whether it outlives its process."""
        return self._durable

    @property
    def read_only(self) -> bool:
        """Whether the store refuses writes, links and deletions."""
        return self._read_only

    @staticmethod
    def salvage(dir: str | os.PathLike[str], *, engine: Engine | None = None) -> SalvagedStore:
        """Open what is left of a durable store whose journal is damaged, to read it. Nothing on the disk changes.

        Every tensor is read once; the keys are those whose bytes match. For arguments and errors see ``Offloader``.

        >>> Offloader("states", durable=True).close()
        >>> with Offloader.salvage("states") as found:
        ...     print(found.keys(), found.lost)
        [] {}
        """
        from cudafuture.storage.salvage import SalvagedStore

        return SalvagedStore(dir, engine=engine)

    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        """Put a tensor under a key, in place of what was there.

        The future completes with the tensor's bytes. It fails with QuotaError, or with StorageError when the disk
        refuses; then the key is as it was. The tensor belongs to the write until ``future.released`` is done: do not
        change it before. One on a device is taken as the caller's current stream leaves it.

        Of several writes of a key that are under way at the same time the one that was asked for last wins. A write
        cannot be cancelled.

        Args:
            key: 1 to 1,024 bytes of UTF-8 without NUL.
            tensor: strided, of any dtype and shape, also empty; not quantized.
            priority: of the future, of the streams that copy from a device, and of the I/O; see ``File.read``.

        Raises:
            ValueError: no such key can be; the tensor's elements are not all in its memory.
            TypeError: no tensor, or one without memory.
            InvalidStateError: the store is closed.

        >>> store = Offloader("states")
        >>> store.write("weight", torch.eye(3)).wait()
        36
        """
        return self._native.write([key], [tensor], priority, None, None, False)

    def writev(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        digests: Mapping[str, int] | None = None,
        written: torch.Tensor | None = None,
        atomic: bool = False,
    ) -> CUDAFuture[int]:
        """Put many tensors under their keys. Each is written as ``write`` does: one may fail, and the others not.

        The future completes with the bytes of all, or fails as the first one does that fails. With too little room for
        all of them it fails with QuotaError, and nothing is written.

        Args:
            digests: what the bytes of some keys must have (see ``digest``), as they are on their way to the disk. Where
                they have another, the future fails with ChecksumError, and the key is as it was. This costs nothing
                where the store takes checksums.
            written: a tensor of torch.bool on the host, with an element for each key, which belongs to the write until
                the future is done: then it says which were written, also where the future has failed.
            atomic: change all keys together, or none: also for a ``readv`` meanwhile, and across a crash of a durable
                store. By default each key changes by itself.

        Raises:
            ValueError: a digest is of none of the keys, or no number of 64 bits; `written` is another tensor.

        >>> Offloader("states").writev({"weight": torch.eye(3), "bias": torch.zeros(3)}).wait()
        48
        """
        keys, values = list(tensors.keys()), list(tensors.values())
        expected = None if digests is None else expected_digests(tensors, digests)
        return self._native.write(keys, values, priority, expected, written, atomic)

    def read(
        self,
        key: str,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[torch.Tensor]:
        """Get the tensor that was written under a key.

        The future completes with `out`, filled, or with a new tensor on `device`, by default the host. It fails with
        NotFoundError when there is no such key; with ChecksumError when the bytes are not those that were written, and
        with StorageError when the disk refuses: then `out` may hold anything. The tensor on a device is filled after
        what the caller's current stream has had to do so far; the events of the future order whoever waits for it.

        Args:
            key: as for ``write``.
            out: of the dtype and shape that was written; any strides.
            device: of a new tensor; not together with `out`.
            priority: of the future, of the streams that copy to a device, and of the I/O; see ``File.read``.

        Raises:
            ValueError: `out` does not have the dtype and shape of what was written, or both were given.
            InvalidStateError: the store is closed.

        >>> store = Offloader("states")
        >>> store.write("weight", torch.arange(3)).wait()
        24
        >>> store.read("weight").wait()
        tensor([0, 1, 2])
        """
        _not_both(out, device)
        outs = None if out is None else [out]
        return self._native.read([key], outs, device, False, priority, None)

    def readv(
        self,
        keys: Iterable[str],
        outs: Sequence[torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
        digests: torch.Tensor | None = None,
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Get many tensors, in the order of the keys. What lies side by side on the disk is read at once.

        The future fails as the first ``read`` does that fails.

        Args:
            digests: a tensor of torch.uint64 on the host, with an element for each key, which belongs to the read until
                the future is done: then it has the digests of what was read (see ``digest``). This costs nothing where
                the store takes checksums.

        >>> store = Offloader("states")
        >>> store.writev({"weight": torch.ones(2), "bias": torch.zeros(1)}).wait()
        12
        >>> store.readv(["bias", "weight"]).wait()
        [tensor([0.]), tensor([1., 1.])]
        """
        _not_both(outs, device)
        names = list(keys)
        if outs is not None and len(outs) != len(names):
            raise ValueError(f"{len(names)} keys, and {len(outs)} tensors to be filled")
        into = None if outs is None else list(outs)
        return self._native.read(names, into, device, True, priority, digests)

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done.

        It fails as the first of those does that fail from now on. For a store that is not durable nothing is
        synced: done means that the kernel has it.

        >>> Offloader("states").flush().wait()
        """
        return self._native.flush()

    def trim(self) -> int:
        """Remove the files in which nothing is, and return their bytes.

        They are kept otherwise, since writing over blocks that a file has is fastest, and removed when the disk is
        full.

        >>> Offloader("states").trim()
        0
        """
        self._expect_open()
        return self._native.trim()

    def statistics(self) -> OffloaderStatistics:
        """Return what there is, and what has been done so far.

        >>> Offloader("states").statistics().keys
        0
        """
        return OffloaderStatistics(capacity=self._capacity, **self._native.statistics())

    def close(self) -> None:
        """Take no more calls, and wait until those that were made have ended. An ephemeral store is gone then.

        >>> Offloader("states").close()
        """
        if self._end.alive and os.getpid() == self._pid:
            self._native.retire().wait()  # which Ctrl-C interrupts
        self._end()

    def __enter__(self) -> Offloader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        keys: int = self._native.statistics()["keys"]
        return f"<{'durable' if self._durable else 'ephemeral'} Offloader in {self._dir!r}, {keys} keys>"


_open_stores: weakref.WeakSet[Offloader] = weakref.WeakSet()


@atexit.register  # after the native module's, so before it: engines have to be there
def _close_all() -> None:
    for store in list(_open_stores):
        store.close()


def _not_both(out: object, device: object) -> None:
    if out is not None and device is not None:
        raise ValueError("pass either out or device, not both: out already has a device")


def _end(native: _C.Store, home: EphemeralHome | DurableHome, pid: int) -> None:
    """Close a store whose user does, or has gone, or exits. A forked child leaves it to its parent."""
    if os.getpid() == pid:
        try:
            native.close()
        finally:  # Ctrl-C
            home.leave()
