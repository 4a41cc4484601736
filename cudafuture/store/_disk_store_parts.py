"""Operations of a store that write and read tensors in parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cudafuture import _C
from cudafuture._arguments import expect_dtype, expect_int, expect_str, listed
from cudafuture._C import CUDAFuture, Snapshot
from cudafuture.store.multipart_write import MultipartWrite
from cudafuture.store.protocol import expect_one_for_each

__all__ = ["DiskStoreParts"]


class DiskStoreParts:
    """Methods of ``DiskStore`` that write and read tensors in parts."""

    _native: _C.Store

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

        >>> from cudafuture.store import DiskStore
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

        >>> from cudafuture.store import DiskStore
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

        >>> from cudafuture.store import DiskStore
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
