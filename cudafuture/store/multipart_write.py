"""Multipart write of a tensor to a store."""

from __future__ import annotations

import torch

from cudafuture import _C
from cudafuture._arguments import expect_int, expect_tensor
from cudafuture._C import CUDAFuture
from cudafuture.ownership import owns

__all__ = ["MultipartWrite"]


class MultipartWrite:
    """Tensor that separate calls write in parts, and that takes effect as a whole; see ``DiskStore.begin_write()``.

    Readers see the old tensor of the key until ``commit`` has completed. Parts may be put in any order, from several
    threads, and several may be in flight. A multipart write that is freed without ``commit`` is aborted, and so are
    those that are open when the store is closed.

    >>> from cudafuture.store import DiskStore
    >>> store = DiskStore("states")
    >>> write = store.begin_write("weight", torch.float32, [50_000])
    >>> parts = [write.put(at, torch.ones(16384)[: 50_000 - at // 4]) for at in range(0, 200_000, 65536)]
    >>> write.commit().wait()
    200000
    >>> store.read("weight").wait().sum()
    tensor(50000.)
    """

    def __init__(self, store: object, native: _C.MultipartWrite) -> None:
        self._store = store  # a store that is freed is closed
        self._native = native

    def __repr__(self) -> str:
        return f"<MultipartWrite of {self.nbytes} bytes to {self._store!r}>"

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self._native.nbytes

    @owns("put", lambda _, at, tensor, **__: {f"the part at byte {at}": tensor})
    def put(self, at: int, tensor: torch.Tensor, *, digest: int | None = None) -> CUDAFuture[int]:
        """Write the bytes of a tensor as the part that begins at byte `at` of the whole tensor.

        The future completes with the bytes of the part. If the write of the part fails, so does ``commit``. The tensor
        belongs to the write until ``future.released`` is done.

        Args:
            at: a multiple of 64 KiB. The part must end at a multiple too, or at the end of the whole tensor.
            tensor: contiguous, on the host, of any dtype.
            digest: the digest that the bytes of the part must have (see ``digest``); on a mismatch the future fails
                with ChecksumError.

        Raises:
            ValueError: the part does not lie in the tensor, some of its bytes belong to an earlier part, or the tensor
                is not contiguous, or on a device.
            TypeError: `at` is not an int, or `tensor` is not a tensor, or has no memory.
            InvalidStateError: the write was committed or aborted, or the store is closed.

        >>> from cudafuture.store import DiskStore
        >>> write = DiskStore("states").begin_write("bias", torch.float32, [3])
        >>> write.put(0, torch.zeros(3)).wait()
        12
        """
        try:
            return self._native.put(at, tensor, digest)
        except (TypeError, ValueError):
            expect_tensor("tensor", tensor)
            expect_int("at", at)
            raise

    def commit(self, *, digest: int | None = None) -> CUDAFuture[int]:
        """Give the key the tensor, when all parts in flight have ended.

        The future completes with the tensor's bytes, in a durable store when they and the key are on disk. Of several
        writes and deletions of a key the last one wins; this one counts from the call of ``commit``.

        The future fails with the error of the first part that failed, with InvalidStateError if bytes are missing, with
        ChecksumError if the digest differs, and as ``DiskStore.write`` does. Then the write is aborted, and the key
        does not change.

        Args:
            digest: the digest that the bytes of the whole tensor must have, as ``Digest`` computes it.

        Raises:
            InvalidStateError: the write was committed or aborted, or the store is closed.
            ValueError: the digest is not a number of 64 bits.

        >>> from cudafuture.store import DiskStore
        >>> DiskStore("states").begin_write("nothing", torch.float32, [0]).commit().wait()
        0
        """
        return self._native.commit(digest)

    def abort(self) -> None:
        """Abort the write. It frees its room on disk when the parts in flight have ended.

        It does nothing after ``commit`` or ``abort``, and never raises.

        >>> from cudafuture.store import DiskStore
        >>> store = DiskStore("states")
        >>> write = store.begin_write("weight", torch.float32, [50_000])
        >>> write.abort()
        >>> store.statistics().used
        0
        """
        self._native.abort()
