"""Interface of a store of tensors by key, and description of a tensor in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from typing_extensions import Self

from cudafuture._arguments import expect_device, expect_int, expect_mapping, expect_str, expect_tensor, listed
from cudafuture._C import CUDAFuture

__all__ = ["DiskStoreStatistics", "Entry", "Store"]


@dataclass(frozen=True)
class Entry:
    """Dtype, shape and size of the tensor of a key; see ``DiskStore.stat()``."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


@dataclass(frozen=True)
class DiskStoreStatistics:
    """Counts of a store since it was opened, and its sizes now; see ``DiskStore.statistics()``."""

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


def expected_digests(tensors: Mapping[str, torch.Tensor], digests: Mapping[str, int] | None) -> list[int | None]:
    """Return the expected digest of each tensor, from the arguments of ``Store.writev``.

    Raises:
        ValueError: a digest has none of the keys, or is not an unsigned integer of 64 bits.
    """
    digests = {} if digests is None else digests
    expect_mapping("digests", digests, "{key: digest}")
    for key, digest in digests.items():
        if not isinstance(digest, int) or not 0 <= digest < 1 << 64:
            raise ValueError(f"key {key!r}: a digest is a number of 64 bits, not {digest!r}")
    if unknown := digests.keys() - tensors.keys():
        raise ValueError(f"digests of keys that are not written: {', '.join(sorted(map(repr, unknown)))}")
    return [digests.get(key) for key in tensors]


def expect_one_for_each(tensor: torch.Tensor | None, dtype: torch.dtype, keys: int, what: str) -> None:
    """Raise ValueError unless a tensor is one-dimensional, contiguous and on the host, with an element for each key."""
    if tensor is None:
        return
    expect_tensor(what, tensor)
    is_list = tensor.dim() == 1 and tensor.numel() == keys and tensor.is_cpu and tensor.is_contiguous()
    if tensor.dtype != dtype or not is_list:
        raise ValueError(
            f"{what}: pass a tensor of {dtype} on the host with one dimension, and an element for each key"
        )


def expect_writable(tensors: Mapping[str, Any], priority: Any) -> None:
    """Raise TypeError unless the keys are strings, their values are tensors, and the priority is an int."""
    for key, tensor in tensors.items():
        expect_str("key", key)
        expect_tensor("tensor" if len(tensors) == 1 else f"the tensor of key {key!r}", tensor)
    expect_int("priority", priority)


def expect_readable(keys: Sequence[Any], outs: Sequence[Any] | None, priority: Any) -> None:
    """Raise TypeError unless the keys are strings, `outs` are tensors, and the priority is an int."""
    for key in keys:
        expect_str("key", key)
    for key, out in zip(keys, outs or (), strict=False):
        if isinstance(out, (str, torch.device)):
            raise TypeError(f"out is a torch.Tensor, not {out!r}: pass a device by name, device={str(out)!r}")
        expect_tensor("out" if len(keys) == 1 else f"the tensor to fill from key {key!r}", out)
    expect_int("priority", priority)


def expect_tensors(tensors: Any) -> None:
    """Raise TypeError unless the argument of a ``writev`` is a mapping."""
    expect_mapping("tensors", tensors, "{key: tensor}")


def listed_keys(keys: Any) -> list[Any]:
    """Return the keys of a call as a list.

    Raises:
        TypeError: they are not an iterable, or a single key.
    """
    return listed("keys", keys, "keys")


def encoded_key(key: str) -> bytes:
    """Return a key as UTF-8.

    Raises:
        ValueError: UTF-8 cannot encode it; the message names the key.
    """
    try:
        return key.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the key {key!r} is not UTF-8: {e}") from None


def device_to_read_into(out: object, device: torch.device | str | int) -> torch.device:
    """Return the device of new tensors.

    Raises:
        ValueError: tensors to fill were passed, too; or the device is not usable.
        TypeError: it is not a device.
    """
    if out is not None:
        raise ValueError("pass either out or device, not both: out already has a device")
    return expect_device("device", device)


def tensors_to_fill(outs: Any, keys: int) -> list[Any]:
    """Return the tensors of a ``readv`` as a list.

    Raises:
        TypeError: they are not a list of tensors.
        ValueError: their number differs from that of the keys.
    """
    into = listed("outs", outs, "tensors")
    if len(into) != keys:
        raise ValueError(f"{keys} keys, and {len(into)} tensors to fill: pass one for each key")
    return into


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
