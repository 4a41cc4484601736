"""Interface of a store of tensors by key, and description of a tensor in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol

import torch
from typing_extensions import Self

from cudafuture._C import CUDAFuture
from cudafuture.statistics import StatisticsBase

__all__ = ["DiskStoreStatistics", "Entry", "Store"]


@dataclass(frozen=True)
class Entry:
    """Dtype, shape and size of the tensor of a key; see ``DiskStore.stat()``."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


@dataclass(frozen=True, repr=False)
class DiskStoreStatistics(StatisticsBase):
    """Counts of a store since it was opened, and its sizes now; see ``DiskStore.statistics()``."""

    GAUGES: ClassVar = frozenset(
        {"keys", "bytes", "used", "capacity", "slabs", "slab_bytes", "journal_bytes", "pending"}
    )
    BYTES: ClassVar = frozenset({"bytes", "used", "capacity", "slab_bytes", "journal_bytes"})

    keys: int
    bytes: int
    """total bytes of the tensors of the keys"""
    used: int
    """bytes of the tensors on disk, including those that are being written, or still read after a rewrite. A tensor of
    less than a page (4 KiB) takes a whole page if it was written alone"""
    capacity: int | None
    slabs: int
    """number of slab files"""
    slab_bytes: int
    """total bytes of the slab files"""
    journal_bytes: int
    reads: int
    """tensors whose read has ended, with any outcome"""
    writes: int
    transfers: int
    """reads and writes submitted to the engine: fewer than tensors if small ones went together"""
    checksum_errors: int
    pending: int
    """calls that have not ended"""


class Store(Protocol):
    """Methods of a store of tensors by key, for type annotations.

    ``DiskStore``, ``ShardedStore`` and ``rpc_ext.RemoteStore`` have them; ``DiskStore`` describes them. A class
    of yours that has them is a store, too: docs/own-store.md states the contract.

    >>> from cudafuture.store import DiskStore
    >>> def weights(store: Store) -> list[str]:
    ...     return [key for key in store.keys() if key.endswith("weight")]
    >>> weights(DiskStore("states"))
    []
    """

    @property
    def durable(self) -> bool:
        """True if the tensors survive the end of the process that keeps them."""
        ...

    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        """Write a tensor under a key; the future has its bytes."""
        ...

    def writev(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        digests: Mapping[str, int] | None = None,
        written: torch.Tensor | None = None,
    ) -> CUDAFuture[int]:
        """Write many tensors under their keys; the future has their bytes."""
        ...

    def read(
        self,
        key: str,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[torch.Tensor]:
        """Read the tensor of a key, into `out` or a new one."""
        ...

    def readv(
        self,
        keys: Iterable[str],
        outs: Sequence[torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
        digests: torch.Tensor | None = None,
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Read the tensors of many keys, in their order."""
        ...

    def delete(self, key: str) -> CUDAFuture[None]:
        """Delete a key."""
        ...

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        """Delete many keys."""
        ...

    def keys(self) -> list[str]:
        """Return all keys."""
        ...

    def __contains__(self, key: str) -> bool: ...
    def __len__(self) -> int: ...
    def stat(self, key: str) -> Entry:
        """Return dtype, shape and size of a key."""
        ...

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Look up many keys; return a future of their entries, None if the key does not exist."""
        ...

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of all keys; do not block."""
        ...

    def trim(self) -> int:
        """Remove empty files; return their bytes."""
        ...

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done."""
        ...

    def close(self) -> None:
        """Wait for all calls, and refuse further ones."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
